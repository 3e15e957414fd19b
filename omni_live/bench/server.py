"""The server under measurement: started as its users start it, watched from outside, and stopped.

What its processes use comes from /proc (Linux); what it knows of itself from /metrics.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
import sysconfig
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import omni_live

READY_WITHIN_S: Final = 180.0
STOP_WITHIN_S: Final = 15.0
_LOOK_S: Final = 0.01
_ANSWER_S: Final = 5.0
_TAIL_LINES: Final = 12
_TICKS_S: Final = os.sysconf("SC_CLK_TCK")
_HANDED: Final = re.compile(rb"^omni_live_last_content_handed_seconds ([0-9.e+]+)", re.MULTILINE)
LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


class NoServer(Exception):
    """The server did not start or is gone; the text says what is known."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a tree of processes holds, in MiB."""

    pss_mb: float
    """Each page counted once, whoever shares it: what stopping all of them would free, to a page."""
    rss_mb: float
    """The plain sum, in which shared pages count for each process."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A running server."""

    url: str
    """Of its duplex door."""
    api_key: str | None = None
    pid: int = 0
    """0: somebody else's, perhaps on another machine."""
    ready_s: float | None = None

    def door(self, path: str) -> str:
        """The URL of another of its doors."""
        return urlsplit(self.url)._replace(path=path).geturl()

    async def last_handed_ns(self) -> int | None:
        """When the server last handed content to a socket, by its own monotonic clock; None where that is unknown.

        The clock is the machine's, so a server elsewhere has none to offer.
        """
        parts = urlsplit(self.url)
        host, port = parts.hostname or "", parts.port or 80
        if host not in LOOPBACK:
            return None
        try:
            async with asyncio.timeout(_ANSWER_S):
                page = await _get(host, port, "/metrics", self.api_key)
        except (OSError, TimeoutError):
            return None
        found = _HANDED.search(page)
        seconds = float(found.group(1)) if found else 0.0
        return round(seconds * 1e9) if seconds else None


async def _get(host: str, port: int, path: str, api_key: str | None) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n{key}Connection: close\r\n\r\n".encode())
        return await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@dataclass(frozen=True, slots=True)
class Child:
    """A server that this process started, once it is ready."""

    port: int
    pid: int
    ready_s: float


@contextlib.asynccontextmanager
async def own_server(model: str = "", *, deploy: str = "") -> AsyncIterator[Endpoint]:
    """`omni-live serve` on a free port of loopback, until the block is left. Raises NoServer.

    It serves the pipeline `model`, or what the text of a deploy file, `deploy`, says.
    """
    with tempfile.TemporaryDirectory(prefix="omni-live-bench-") as folder:
        ready, config = Path(folder) / "ready", Path(folder) / "deploy.yaml"
        if deploy:
            config.write_text(deploy, encoding="utf-8")
        async with child(deploy_command(config, ready) if deploy else serve_command(model, ready), ready) as server:
            yield Endpoint(f"ws://127.0.0.1:{server.port}/v1/duplex", None, server.pid, server.ready_s)


@contextlib.asynccontextmanager
async def child(command: Sequence[str], ready: Path) -> AsyncIterator[Child]:
    """A server that writes its port to `ready` when it is; stopped when the block is left. Raises NoServer."""
    log = ready.with_name(f"{ready.name}.log")
    began = time.monotonic()
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output, env=_environment())
    try:
        port = await _ready(process, ready, log, began)
        yield Child(port, process.pid, time.monotonic() - began)
        if not alive(process.pid):
            raise NoServer(f"the server ended by itself{_tail(log)}")
    finally:
        await _stop(process)


def serve_command(model: str, ready: Path) -> list[str]:
    return _serve_command("--pipeline", model, ready)


def deploy_command(config: Path, ready: Path) -> list[str]:
    return _serve_command("--config", str(config), ready)


def _serve_command(option: str, value: str, ready: Path) -> list[str]:
    start = "import sys; from omni_live.cli import main; sys.exit(main())"
    # -P: the work directory must not shadow the package that this process runs
    return [
        *(sys.executable, "-P", "-c", start),
        *("serve", "--host", "127.0.0.1", "--port", "0", option, value, "--ready-file", str(ready)),
    ]


def _environment() -> dict[str, str]:
    """The server runs the package that this process runs, also from a tree that is not installed."""
    here = str(Path(omni_live.__file__).resolve().parents[1])
    if here in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return dict(os.environ)
    paths = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


async def _ready(process: asyncio.subprocess.Process, ready: Path, log: Path, began: float) -> int:
    while (port := _port(ready)) is None:
        if process.returncode is not None:
            raise NoServer(f"the server did not start (exit status {process.returncode}){_tail(log)}")
        if time.monotonic() - began > READY_WITHIN_S:
            raise NoServer(f"the server was not ready within {READY_WITHIN_S:g} s{_tail(log)}")
        await asyncio.sleep(_LOOK_S)
    return port


def _port(ready: Path) -> int | None:
    """What the server wrote when it was ready."""
    return int(ready.read_text().split()[-1].rpartition(":")[2]) if ready.exists() else None


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_WITHIN_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return "".join(f"\n  {line}" for line in lines)


# -- what its processes use --------------------------------------------------------------------------------------


def process_tree(pid: int) -> list[int]:
    """The process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                children.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
    tree = [pid]
    for one in tree:
        tree.extend(children.get(one, []))
    return tree


def cpu_s(pids: Sequence[int]) -> float:
    """Processor time that their threads have used so far."""
    return sum(_cpu_s(pid) for pid in pids)


def _cpu_s(pid: int) -> float:
    threads = list(Path(f"/proc/{pid}/task").glob("*/schedstat"))
    total = 0.0
    for thread in threads:  # in nanoseconds, where stat counts in ticks of 10 ms, which an idle process hides under
        with contextlib.suppress(OSError):
            total += int(thread.read_text().split()[0]) / 1e9
    if not threads:
        with contextlib.suppress(OSError):
            fields = _stat(pid)
            total = (int(fields[11]) + int(fields[12])) / _TICKS_S
    return total


def memory(pids: Sequence[int]) -> Memory:
    pss = rss = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE))
            pss += int(sizes.get("Pss", 0))
            rss += int(sizes.get("Rss", 0))
    return Memory(pss / 1024, rss / 1024)


def alive(pid: int) -> bool:
    """Whether it runs, as the kernel has it: asyncio hears of an end somewhat later."""
    try:
        return _stat(pid)[0] not in "ZX"
    except OSError:
        return False


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, which may hold blanks and parentheses itself."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
