"""The bench of the OpenPI door, with little work: what it says and whom it compares, not how fast anything is."""

import argparse
import asyncio
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from websockets.asyncio.server import ServerConnection, serve

from omni_live.bench import openpi_reference, robots, server
from omni_live.bench.cli import add_arguments, run
from omni_live.bench.robots import BadAnswer, Bench, Loops, Work, batch_of, observation, robot
from omni_live.bench.server import NoServer, alive, own_server, process_tree
from omni_live.protocols.openpi import codec
from omni_live.protocols.openpi.fake_contract import CONTRACT, DIM, HORIZON

LITTLE = Work(rounds=2, warm_up=2, requests=10, paced_steps=2, handshakes=2, loop_s=0.2)
CIRCUMSTANCES = {"runs", "load1_before", "load1_after", "cpus"}
FAKE = "pipelines:\n  fake-robot: {stages: {policy: {options: {delay_ms: 4}}}}\n"
FAKE_UNBATCHED = "pipelines:\n  fake-robot: {stages: {policy: {options: {delay_ms: 4, max_batch: 1}}}}\n"


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["robots", *arguments])


# -- what it prints


def test_the_last_line_is_one_flat_object_with_every_figure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(robots, "QUICK", LITTLE)
    monkeypatch.setattr(robots, "ROBOT", FAKE)
    monkeypatch.setattr(robots, "UNBATCHED", FAKE_UNBATCHED)
    monkeypatch.setattr(robots, "TABLETOP", CONTRACT)
    assert run(parsed("--json", "--quick")) == 0
    out, progress = capsys.readouterr()
    figures = json.loads(out.splitlines()[-1])
    assert list(figures) == [row.key for row in robots.ROWS]
    assert all(isinstance(value, int | float) and math.isfinite(value) for value in figures.values())
    assert (figures["runs"], figures["rtt_n"], figures["neighbours_n"], figures["handshake_n"]) == (2, 20, 28, 4)
    for ratio, over, under in (
        ("rtt_ratio", "rtt_ms_p50", "reference_rtt_ms_p50"),
        ("slow_neighbour_ratio", "fast_rtt_ms_p50_beside_slow", "fast_rtt_ms_p50"),
        ("reference_slow_neighbour_ratio", "reference_fast_rtt_ms_p50_beside_slow", "reference_fast_rtt_ms_p50"),
        ("batch_speedup_32", "chunks_per_s_32", "chunks_per_s_32_unbatched"),
        ("deterministic_cost", "chunks_per_s_32", "chunks_per_s_32_deterministic"),
    ):
        assert figures[ratio] == pytest.approx(figures[over] / figures[under], rel=1e-2)
    assert figures["batch_mean_32"] > 1
    assert figures["batch_speedup_32"] > 1  # 4 ms for one as for all
    assert figures["deterministic_cost"] > 1
    assert {"rtt", "neighbours", "handshake", "batch"} <= {line.split()[-1] for line in progress.splitlines()}


def test_what_is_not_asked_for_is_null(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robots, "QUICK", LITTLE)
    assert run(parsed("--json", "--quick", "--only", "rtt")) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    measured = {key for key, value in figures.items() if value is not None}
    of_others = ("fast", "batch")
    assert measured - CIRCUMSTANCES == {
        key for key in figures if "rtt" in key and not any(word in key for word in of_others)
    }


def test_sections_that_there_are_not_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--only", "rtt,cutoffs")
    assert "choose of rtt, neighbours, handshake, batch" in capsys.readouterr().err


def test_a_server_that_does_not_start_is_a_problem_and_no_figure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def no_server(**_: str) -> AsyncIterator[server.Endpoint]:
        raise NoServer("there is none")
        yield

    monkeypatch.setattr(robots, "own_server", no_server)
    assert run(parsed("--json", "--quick")) == 1
    out, err = capsys.readouterr()
    assert "omni-live bench robots: there is none" in err
    assert "omni-live bench robots: batch: there is none" in err
    assert {key for key, value in json.loads(out).items() if value is not None} == CIRCUMSTANCES


def test_terminated_it_leaves_no_server_behind() -> None:
    command = [sys.executable, "-m", "omni_live", "bench", "robots", "--only", "rtt"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as bench:
        assert bench.stderr is not None
        while not bench.stderr.readline().rstrip().endswith("rtt"):
            assert bench.poll() is None
        children = process_tree(bench.pid)[1:]
        assert len(children) >= 3  # a server with its workers, and the reference
        bench.send_signal(signal.SIGTERM)
        bench.communicate()
    assert bench.returncode == 128 + signal.SIGTERM
    assert not [pid for pid in children if alive(pid)]


# -- the server under measurement


async def test_a_server_can_be_told_by_the_text_of_a_deploy_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(config: Path, ready: Path) -> list[str]:
        copied = f"pathlib.Path({str(ready)!r}).write_text('4321' if open({str(config)!r}).read() == 'x: 1' else '1')"
        return [sys.executable, "-c", f"import pathlib, time; {copied}; time.sleep(600)"]

    monkeypatch.setattr(server, "deploy_command", command)
    async with own_server(deploy="x: 1") as endpoint:
        assert endpoint.url == "ws://127.0.0.1:4321/v1/duplex"
        assert endpoint.door("/openpi/robot") == "ws://127.0.0.1:4321/openpi/robot"


async def test_ours_greets_a_robot_while_a_slow_policy_works() -> None:
    slow = "pipelines:\n  slow-fake-robot: {stages: {policy: {options: {delay_ms: 1000}}}}\n"
    async with own_server(deploy=slow) as ours:
        assert await _order(ours.door(robots.SLOW_PATH), observation(CONTRACT, 0)) == ["greeted", "answered"]


# -- the reference


async def test_the_reference_serves_nobody_else_while_its_policy_works() -> None:
    async with robots.reference_server() as reference:
        url = f"ws://127.0.0.1:{reference.port}"
        assert await _order(url, openpi_reference.pack({"delay_ms": 300})) == ["answered", "greeted"]
    assert not alive(reference.pid)


async def _order(url: str, slow_frame: bytes) -> list[str]:
    """What comes first: the answer to a slow robot, or the metadata for one that connects meanwhile."""
    order = []

    async def ask(slow: robots.Robot) -> None:
        await slow.ask(slow_frame)
        order.append("answered")

    async with robot(url) as slow, asyncio.TaskGroup() as group:
        asking = group.create_task(ask(slow))
        while not slow.has_sent:
            await asyncio.sleep(0)
        async with robot(url):
            order.append("greeted")
        await asking
    return order


async def test_the_reference_answers_as_openpi_does() -> None:
    async with robots.reference_server() as reference, robot(f"ws://127.0.0.1:{reference.port}") as one:
        first, second = [codec.unpack(await one.ask(observation(CONTRACT, 0))) for _ in range(2)]
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert first["actions"].shape == (HORIZON, DIM)
    assert list(first["server_timing"]) == ["infer_ms"]
    assert list(second["server_timing"]) == ["infer_ms", "prev_total_ms"]


def test_the_reference_s_messages_are_openpi_s() -> None:
    message = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": {"c": "x", "d": [1, 2.5, None]}}
    for read in (openpi_reference.unpack, codec.unpack):
        found = read(openpi_reference.pack(message))
        assert isinstance(found, dict)
        assert np.array_equal(found["a"], message["a"])
        assert found["b"] == message["b"]
    with pytest.raises(TypeError, match="a set cannot be packed"):
        openpi_reference.pack({"a": {1}})


# -- the robots


def test_an_observation_is_as_the_contract_says() -> None:
    found = codec.unpack(observation(CONTRACT, 3, delay_ms=100.0))
    assert isinstance(found, dict)
    arrays, texts = CONTRACT.checked(found)
    assert (texts, found["delay_ms"]) == ({"prompt": robots.PROMPT}, 100.0)
    assert sum(array.nbytes for array in arrays.values()) == 2 * 224 * 224 * 3 + 32 * 4
    assert observation(CONTRACT, 3) == observation(CONTRACT, 3) != observation(CONTRACT, 4)


@asynccontextmanager
async def answering(answer: bytes | str) -> AsyncIterator[str]:
    """A server that greets and then answers everything with this."""

    async def handle(socket: ServerConnection) -> None:
        await socket.send(openpi_reference.pack({}))
        async for _ in socket:
            await socket.send(answer)

    async with serve(handle, "127.0.0.1", 0) as listening:
        port = next(iter(listening.sockets)).getsockname()[1]
        yield f"ws://127.0.0.1:{port}"


@pytest.mark.parametrize("answer", ["policy_error: it failed", openpi_reference.pack({"status": "fine"})])
async def test_an_answer_without_a_chunk_is_no_round_trip(answer: bytes | str) -> None:
    async with answering(answer) as url, robot(url) as one:
        with pytest.raises(BadAnswer):
            await one.timed(b"x")


async def test_robots_in_a_loop_ask_again_as_soon_as_they_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robots, "_SETTLE_S", 0.0)
    loops = Loops()
    async with answering(chunk_of(3)) as url, robots.robots(url, 3) as fleet:
        await loops.run(fleet, [b"x"] * 3, 0.1, os.getpid())
        await loops.run(fleet, [b"x"] * 3, 0.1, os.getpid())
    assert len(loops.rates) == 2
    assert len(loops.replies) == len(loops.took_s) > 6
    assert loops.batch_mean == pytest.approx(3)
    assert loops.rate == pytest.approx(len(loops.replies) / loops.wall_s, rel=0.9)


async def test_paced_robots_ask_as_often_as_they_are_told() -> None:
    async with answering(chunk_of(1)) as url, robots.robots(url, 2) as fleet:
        assert len(await robots.paced(fleet, b"x", 3, 0)) == 6


def chunk_of(size: int) -> bytes:
    return openpi_reference.pack({"actions": np.zeros((2, 2), np.float32), "server_timing": {"batch": size}})


def test_the_mean_batch_is_over_steps_not_over_robots() -> None:
    loops = Loops(replies=[chunk_of(2), chunk_of(2), chunk_of(1)])
    assert loops.batch_mean == 1.5


def test_a_reply_that_tells_no_batch_counts_for_none() -> None:
    assert batch_of(openpi_reference.pack({"actions": np.zeros((2, 2), np.float32)})) == 0
    assert Loops().batch_mean is None
    with pytest.raises(BadAnswer):
        batch_of(openpi_reference.pack({"status": "fine"}))


async def test_a_section_that_fails_leaves_the_others_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> dict[str, float]:
        raise BadAnswer("not today")

    monkeypatch.setattr(robots, "rtt", fail)
    bench = Bench(("rtt", "handshake"), LITTLE)
    values = await bench.run()
    assert bench.problems == ["rtt: not today"]
    assert values["handshake_n"] == 4
    assert "rtt_n" not in values
