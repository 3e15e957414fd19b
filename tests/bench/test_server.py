"""The server under measurement, as it is seen from outside."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from omni_live.bench import server
from omni_live.bench.server import Endpoint, NoServer, alive, cpu_s, memory, own_server, process_tree

CHILD = "import sys; block = bytearray(b'x' * (32 << 20)); print('there', flush=True); sys.stdin.read()"
PARENT = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {CHILD!r}]).returncode)"


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[bytes]]:
    """A process with one child, which holds 32 MiB."""
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        yield process
        process.communicate()


def test_the_tree_is_the_process_and_its_descendants(parent: subprocess.Popen[bytes]) -> None:
    tree = process_tree(parent.pid)
    assert tree[0] == parent.pid
    assert len(tree) == 2
    assert os.getpid() not in tree


def test_memory_is_of_all_processes_together(parent: subprocess.Popen[bytes]) -> None:
    tree = process_tree(parent.pid)
    whole, first = memory(tree), memory(tree[:1])
    assert whole.rss_mb > first.rss_mb + 32
    assert 32 < whole.pss_mb <= whole.rss_mb + 0.1  # what is shared counts once


def test_a_process_that_is_gone_uses_nothing() -> None:
    assert cpu_s([2**30]) == 0
    assert memory([2**30]).rss_mb == 0


def test_a_process_is_alive_until_it_ends(parent: subprocess.Popen[bytes]) -> None:
    child = process_tree(parent.pid)[1]
    assert alive(child)
    parent.communicate()
    assert not alive(child)


def test_processor_time_grows_with_work() -> None:
    before = cpu_s([os.getpid()])
    used = time.process_time()
    while time.process_time() < used + 0.2:
        sum(range(1000))
    assert 0.1 < cpu_s([os.getpid()]) - before < 1.0


@asynccontextmanager
async def metrics(page: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that answers every request with this page; its URL and the requests it got."""
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + page)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        yield f"ws://127.0.0.1:{port}/v1/duplex", asked


async def test_the_server_s_record_of_the_last_content_is_read_from_its_metrics() -> None:
    page = b"# HELP x\nomni_live_content_bytes_total 5.0\nomni_live_last_content_handed_seconds 1234.5\nother 1\n"
    async with metrics(page) as (url, asked):
        assert await Endpoint(url, "secret").last_handed_ns() == 1_234_500_000_000
    assert asked[0].startswith(b"GET /metrics HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret\r\n" in asked[0]


@pytest.mark.parametrize("page", [b"", b"omni_live_last_content_handed_seconds 0.0\n"])
async def test_a_server_without_a_record_has_none(page: bytes) -> None:
    async with metrics(page) as (url, _):
        assert await Endpoint(url).last_handed_ns() is None


async def test_a_server_elsewhere_has_a_clock_of_its_own() -> None:
    assert await Endpoint("ws://192.0.2.1:8765/v1/duplex").last_handed_ns() is None


async def test_a_server_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(model: str, ready: Path) -> list[str]:
        return [sys.executable, "-c", f"print('no {model} here'); raise SystemExit(3)"]

    monkeypatch.setattr(server, "serve_command", command)
    with pytest.raises(NoServer, match=r"exit status 3\)\n  no voice here"):
        async with own_server("voice"):
            pass


async def test_a_server_is_stopped_when_it_is_not_needed_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(model: str, ready: Path) -> list[str]:
        script = f"import pathlib, time; pathlib.Path({str(ready)!r}).write_text('4321\\n'); time.sleep(600)"
        return [sys.executable, "-c", script]

    monkeypatch.setattr(server, "serve_command", command)
    async with own_server("voice") as endpoint:
        assert endpoint.url == "ws://127.0.0.1:4321/v1/duplex"
        assert endpoint.ready_s is not None
        assert endpoint.pid in process_tree(os.getpid())
    assert endpoint.pid not in process_tree(os.getpid())


async def test_a_server_that_dies_under_measurement_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(model: str, ready: Path) -> list[str]:
        return [sys.executable, "-c", f"import pathlib; pathlib.Path({str(ready)!r}).write_text('4321')"]

    monkeypatch.setattr(server, "serve_command", command)
    with pytest.raises(NoServer, match="ended by itself"):
        await _use_until_it_ends("voice")


async def _use_until_it_ends(model: str) -> None:
    async with own_server(model) as endpoint:
        while alive(endpoint.pid):
            await asyncio.sleep(0)
