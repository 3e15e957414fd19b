"""What nobody but the server's own processes should reach, and what they do when somebody reaches it all the same."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from ..end_to_end.caller import session
from ..end_to_end.served import Served
from ..end_to_end.warm import warm_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with warm_server(tmp_path_factory.mktemp("inside")) as server:
        yield server


@pytest.fixture
def voice(server: Served) -> Iterator[Served]:
    yield server
    server.assert_at_rest()


def traps(canary: Path) -> list[bytes]:
    """Pickles of protocols 0, 2 and 4 that make a file when they are unpickled; by hand, nothing here pickles."""
    command = f"touch {canary}".encode()
    long_text, short_text = len(command).to_bytes(4, "little"), bytes([len(command)])
    return [
        b"cposix\nsystem\n(S'" + command + b"'\ntR.",
        b"\x80\x02cposix\nsystem\nX" + long_text + command + b"\x85R.",
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c" + short_text + command + b"\x85R.",
    ]


def shapes(canary: Path) -> Iterator[bytes]:
    """The traps as various servers would take them: bare, framed, and wrapped into what we do take."""
    for body in traps(canary):
        yield body
        yield len(body).to_bytes(4, "little") + body
        yield len(body).to_bytes(4, "big") + body
        for wrapped in (msgpack.packb(body), msgpack.packb(["Hello", 1, body]), msgpack.packb({"type": body})):
            yield len(wrapped).to_bytes(4, "little") + wrapped
    yield b"\xff" * 4096
    yield b""


def test_the_traps_spring_where_somebody_unpickles_them(tmp_path: Path) -> None:
    for number, trap in enumerate(traps(tmp_path / "canary")):
        unpickle = [sys.executable, "-c", "import pickle, sys; pickle.load(sys.stdin.buffer)"]
        subprocess.run(unpickle, input=trap, check=True)
        assert (tmp_path / "canary").exists(), number
        (tmp_path / "canary").unlink()


async def test_nothing_that_is_sent_to_an_internal_socket_is_unpickled(voice: Served, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    workers = voice.workers()
    sockets = sorted(voice.run_directory.glob("*.sock"))
    assert len(sockets) == 3
    for path in sockets:
        for shape in shapes(canary):
            _throw(path, shape)
    assert voice.workers() == workers
    async with session(voice.port) as caller:
        assert (await caller.ask("Hello."))["status"] in ("completed", "incomplete")
    assert voice.workers() == workers
    assert not canary.exists()


def _throw(path: Path, shape: bytes) -> None:
    """Send it and wait until the other side has had enough, or has all of it and waits for more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as thrower:
        thrower.settimeout(0.05)
        thrower.connect(str(path))
        with contextlib.suppress(TimeoutError, ConnectionError):
            thrower.sendall(shape)
            thrower.recv(1)


def test_nobody_else_may_enter_the_run_directory(voice: Served) -> None:
    assert voice.run_directory.stat().st_mode & 0o777 == 0o700


def test_the_public_port_is_the_only_one_and_on_loopback(voice: Served) -> None:
    pids = [voice.pid, *(pid for pids in voice.workers().values() for pid in pids)]
    ours = {inode for pid in pids for inode in _socket_inodes(pid)}
    assert {address for address, inode in _open_ports() if inode in ours} == {("127.0.0.1", voice.port)}


def _socket_inodes(pid: int) -> Iterator[str]:
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(fd.readlink())
            if target.startswith("socket:["):
                yield target[8:-1]


def _open_ports() -> Iterator[tuple[tuple[str, int], str]]:
    """Everything that waits for packets from a network: ((address, port), inode)."""
    for name, waits in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].partition(":")
            if fields[3] == waits:
                shown = socket.inet_ntoa(bytes.fromhex(address)[::-1]) if len(address) == 8 else address
                yield (shown, int(port, 16)), fields[9]


WATCHED_S = 2.0
WAKES_A_SECOND = 5.0
"""Over all threads of all processes; a poll of 100 ms in one of them would be 10."""


async def test_idle_sessions_wake_nobody(voice: Served, record_property: Any) -> None:
    async with session(voice.port) as one, session(voice.port), session(voice.port):
        assert (await one.ask("Hello."))["status"] in ("completed", "incomplete")
        least = _wakes_a_second(voice)
        for _ in range(3):  # the end of the turn before may still be told about, and workers are pinged now and then
            if least < 1.0:
                break
            least = min(least, _wakes_a_second(voice))
        record_property("wakes_a_second", least)
        assert least < WAKES_A_SECOND


def _wakes_a_second(voice: Served) -> float:
    before, began = _switches(voice), time.monotonic()
    time.sleep(WATCHED_S)
    return round((_switches(voice) - before) / (time.monotonic() - began), 2)


def _switches(voice: Served) -> int:
    """How often any thread of the server has gone to sleep so far."""
    total = 0
    for pid in (voice.pid, *(pid for pids in voice.workers().values() for pid in pids)):
        for status in Path(f"/proc/{pid}/task").glob("*/status"):
            with contextlib.suppress(OSError):
                line = next(line for line in status.read_text().splitlines() if line.startswith("voluntary"))
                total += int(line.split()[1])
    return total
