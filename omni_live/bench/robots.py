"""`omni-live bench robots`: what robots get from the OpenPI door, beside a server of the pattern they use today.

Whatever is compared runs in the same command, in alternating rounds, so that a ratio means something on a machine that
others use as well. The robots are one asyncio process with the `websockets` package; what of a processor it takes
itself is told, since it shares the machine with the servers.

    BadAnswer    a server did not answer with a chunk
"""

import asyncio
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from omni_live.bench.openpi_reference import pack, unpack
from omni_live.bench.report import Progress, Row, Value
from omni_live.bench.server import Child, Endpoint, NoServer, child, cpu_s, own_server, process_tree
from omni_live.protocols.openpi.contract import Contract
from omni_live.protocols.openpi.fake_contract import CONTRACT as FAKE
from omni_live.protocols.openpi.tabletop import CONTRACT as TABLETOP

SECTIONS: Final = ("rtt", "neighbours", "handshake", "batch")
FAKES: Final = "pipelines:\n  fake-robot:\n  slow-fake-robot:\n"
ROBOT: Final = "pipelines:\n  robot:\n"
UNBATCHED: Final = "pipelines:\n  robot: {stages: {policy: {options: {max_batch: 1}}}}\n"
FAST_PATH: Final = "/openpi/fake-robot"
SLOW_PATH: Final = "/openpi/slow-fake-robot"
ROBOT_PATH: Final = "/openpi"
SLOW_MS: Final = 100.0
"""What the slow fake robot's policy takes."""
FAST_ROBOTS: Final = 7
FAST_HZ: Final = 10.0
ROBOTS: Final = 32
PROMPT: Final = "push the red disc to the left zone"
_SETTLE_S: Final = 0.3
"""Of a closed loop, until it is counted: who asks together is then served together."""
_STUCK_S: Final = 60.0
_STUCK_ROUND_S: Final = 60.0
"""A section that has taken so long is given up."""

ROWS: Final = (
    Row("rtt_ms_p50", "an observation's round trip, median", "ms", 3),
    Row("reference_rtt_ms_p50", "the same of the reference", "ms", 3),
    Row("rtt_ratio", "round trip over the reference's", "", 2),
    Row("rtt_ms_p99", "an observation's round trip, 99 of 100", "ms", 3),
    Row("reference_rtt_ms_p99", "the same of the reference", "ms", 3),
    Row("rtt_cpu_ms", "the server's processor time for one", "ms", 3),
    Row("reference_rtt_cpu_ms", "the same of the reference", "ms", 3),
    Row("rtt_client_cpu_share", "share of a processor that the client took", "", 2),
    Row("rtt_n", "round trips of each"),
    Row("fast_rtt_ms_p50", "seven fast robots alone, median", "ms", 3),
    Row("fast_rtt_ms_p50_beside_slow", "the same beside a slow one", "ms", 3),
    Row("slow_neighbour_ratio", "with the slow one over without", "", 2),
    Row("reference_fast_rtt_ms_p50", "seven fast robots alone, reference", "ms", 3),
    Row("reference_fast_rtt_ms_p50_beside_slow", "the same beside a slow one, reference", "ms", 3),
    Row("reference_slow_neighbour_ratio", "with the slow one over without, reference", "", 2),
    Row("neighbours_n", "round trips of each"),
    Row("handshake_ms_p50", "connecting while a slow policy works, median", "ms", 2),
    Row("reference_handshake_ms_p50", "the same of the reference", "ms", 2),
    Row("handshake_n", "connections of each"),
    Row("chunks_per_s_32", "chunks with 32 robots", "/s", 1),
    Row("chunks_per_s_32_unbatched", "the same in batches of one", "/s", 1),
    Row("batch_speedup_32", "batched over unbatched", "", 2),
    Row("batch_mean_32", "robots in a batch, mean", "", 1),
    Row("chunks_per_s_32_deterministic", "chunks with 32 robots, deterministic", "/s", 1),
    Row("deterministic_cost", "batched over deterministic", "", 2),
    Row("batch_rtt_ms_p50", "a robot's round trip among 32, median", "ms", 1),
    Row("batch_client_cpu_share", "share of a processor that the client took", "", 2),
    Row("batch_server_cpu_share", "and the server's processes together", "", 2),
    Row("batch_n", "chunks, batched"),
    Row("runs", "rounds"),
    Row("load1_before", "load of the machine before", "", 2),
    Row("load1_after", "load of the machine after", "", 2),
    Row("cpus", "processors"),
)


@dataclass(frozen=True, slots=True)
class Work:
    """How much is measured."""

    rounds: int = 5
    warm_up: int = 50
    """Round trips with each server, before the first round."""
    requests: int = 300
    """Round trips with each server, in each round."""
    paced_steps: int = 20
    """Of each fast robot, in each round, with and without a slow one, on each server."""
    handshakes: int = 10
    """With each server, in each round."""
    loop_s: float = 3.0
    """Of 32 robots in a closed loop, in each round, of each kind."""


QUICK: Final = Work(rounds=2, warm_up=20, requests=100, paced_steps=10, handshakes=5, loop_s=1.0)


class BadAnswer(Exception):
    """A server did not answer with a chunk; the text is what it said."""


# -- robots


class Robot:
    """One robot's connection."""

    def __init__(self, socket: ClientConnection) -> None:
        self.has_sent = False
        """The last observation has gone out, all of it."""
        self._socket = socket

    async def ask(self, frame: bytes) -> bytes:
        """The frame that answers an observation's frame. Raises BadAnswer."""
        self.has_sent = False
        await self._socket.send(frame)
        self.has_sent = True
        reply = await self._socket.recv()
        if isinstance(reply, str):
            raise BadAnswer(reply[:200])
        return reply

    async def timed(self, frame: bytes) -> float:
        """Seconds from a packed observation until its chunk is unpacked. Raises BadAnswer."""
        began = time.perf_counter()
        reply = unpack(await self.ask(frame))
        took_s = time.perf_counter() - began
        if not isinstance(reply, dict) or not isinstance(reply.get("actions"), np.ndarray):
            raise BadAnswer("there is no chunk in the answer")
        return took_s


@contextlib.asynccontextmanager
async def robot(url: str) -> AsyncIterator[Robot]:
    """A robot that is connected and has its metadata."""
    async with connect(url, compression=None, max_size=None, ping_interval=None, proxy=None) as socket:
        if isinstance(greeting := await socket.recv(), str):
            raise BadAnswer(greeting[:200])
        yield Robot(socket)


@contextlib.asynccontextmanager
async def robots(url: str, count: int) -> AsyncIterator[list[Robot]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(robot(url)) for _ in range(count)]


def observation(contract: Contract, seed: int, **more: object) -> bytes:
    """An observation as it goes to the server, of random pixels and numbers."""
    chance = np.random.default_rng(seed)
    arrays = {
        wanted.key: (
            chance.integers(0, 256, wanted.shape, np.uint8)
            if wanted.dtype == "uint8"
            else chance.random(wanted.shape, np.float32)
        )
        for wanted in contract.observation
    }
    return pack({**arrays, **dict.fromkeys(contract.texts, PROMPT), **more})


@contextlib.asynccontextmanager
async def kept_busy(url: str, frame: bytes) -> AsyncIterator[None]:
    """A slow robot that asks again as soon as it is answered, until the block is left."""
    is_over = False
    has_asked = asyncio.Event()

    async def ask_on() -> None:
        async with robot(url) as slow:
            while not is_over:
                has_asked.set()
                await slow.ask(frame)

    async with asyncio.TaskGroup() as group:
        group.create_task(ask_on())
        await has_asked.wait()
        try:
            yield
        finally:
            is_over = True


async def paced(fleet: Sequence[Robot], frame: bytes, steps: int, seed: int) -> list[float]:
    """Round trips of robots that ask ten times a second, each at a moment of its own within each tenth."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def drive(one: Robot, chance: random.Random) -> list[float]:
        took_s = []
        for step in range(steps):
            due = began + (step + chance.random()) / FAST_HZ
            await asyncio.sleep(max(0.0, due - loop.time()))
            took_s.append(await one.timed(frame))
        return took_s

    driven = await asyncio.gather(*(drive(one, random.Random(seed + index)) for index, one in enumerate(fleet)))
    return [took_s for each in driven for took_s in each]


# -- what is measured


@dataclass(slots=True)
class Trips:
    """Round trips with one server, and what they cost it."""

    pid: int
    took_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    async def run(self, one: Robot, frame: bytes, count: int) -> None:
        pids = process_tree(self.pid)
        before = cpu_s(pids)
        self.took_s += [await one.timed(frame) for _ in range(count)]
        self.cpu_s += cpu_s(pids) - before

    @property
    def p50_ms(self) -> float:
        return median_ms(self.took_s)

    @property
    def p99_ms(self) -> float:
        ordered = sorted(self.took_s)
        return ordered[round(0.99 * (len(ordered) - 1))] * 1e3

    @property
    def cpu_ms_each(self) -> float:
        return self.cpu_s * 1e3 / len(self.took_s)


@dataclass(slots=True)
class Loops:
    """What robots in closed loops were answered, one figure a round."""

    rates: list[float] = field(default_factory=list)
    """Chunks per second."""
    took_s: list[float] = field(default_factory=list)
    replies: list[bytes] = field(default_factory=list)
    wall_s: float = 0.0
    client_cpu_s: float = 0.0
    server_cpu_s: float = 0.0

    async def run(self, fleet: Sequence[Robot], frames: Sequence[bytes], seconds: float, pid: int) -> None:
        """Each robot asks again as soon as it is answered; counted is what comes within `seconds`."""
        is_counted = is_over = False

        async def drive(one: Robot, frame: bytes) -> None:
            while not is_over:
                began = time.perf_counter()
                reply = await one.ask(frame)
                if is_counted:
                    self.took_s.append(time.perf_counter() - began)
                    self.replies.append(reply)

        async with asyncio.TaskGroup() as group:
            for one, frame in zip(fleet, frames, strict=True):
                group.create_task(drive(one, frame))
            await asyncio.sleep(_SETTLE_S)
            pids, before = process_tree(pid), len(self.replies)
            server_s, client_s, began = cpu_s(pids), time.process_time(), time.perf_counter()
            is_counted = True
            await asyncio.sleep(seconds)
            is_counted, is_over = False, True
            wall_s = time.perf_counter() - began
            self.rates.append((len(self.replies) - before) / wall_s)
            self.wall_s += wall_s
            self.client_cpu_s += time.process_time() - client_s
            self.server_cpu_s += cpu_s(pids) - server_s

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def batch_mean(self) -> float | None:
        """Robots in a step, on average over the steps, as the replies tell it; None where they do not."""
        sizes = [size for size in map(batch_of, self.replies) if size]
        return len(sizes) / sum(1 / size for size in sizes) if sizes else None


def batch_of(reply: bytes) -> int:
    """How many robots the step served that made this chunk; 0 where the reply does not say."""
    match unpack(reply):
        case {"actions": np.ndarray(), "server_timing": {"batch": int(size)}}:
            return size
        case {"actions": np.ndarray()}:
            return 0
        case _:
            raise BadAnswer("there is no chunk in the answer")


def median_ms(took_s: Sequence[float]) -> float:
    return statistics.median(took_s) * 1e3


@dataclass(frozen=True, slots=True)
class Pair:
    """Our server and the reference."""

    ours: Endpoint
    reference: Child

    @property
    def fast(self) -> tuple[str, str]:
        """Where the two serve the policy that answers at once."""
        return self.ours.door(FAST_PATH), f"ws://127.0.0.1:{self.reference.port}"

    @property
    def slow(self) -> tuple[str, str]:
        return self.ours.door(SLOW_PATH), f"ws://127.0.0.1:{self.reference.port}"


@contextlib.asynccontextmanager
async def reference_server() -> AsyncIterator[Child]:
    """Raises NoServer."""
    with tempfile.TemporaryDirectory(prefix="omni-live-bench-") as folder:
        ready = Path(folder) / "ready"
        command = (sys.executable, "-P", "-m", "omni_live.bench.openpi_reference", "--ready-file", str(ready))
        async with child(command, ready) as server:
            yield server


async def rtt(pair: Pair, work: Work, step: Callable[[], None]) -> dict[str, Value]:
    """One robot, one observation after another."""
    frame = observation(FAKE, 0)
    trips = Trips(pair.ours.pid), Trips(pair.reference.pid)
    client_s = wall_s = 0.0
    async with robot(pair.fast[0]) as ours, robot(pair.fast[1]) as theirs:
        await Trips(pair.ours.pid).run(ours, frame, work.warm_up)
        await Trips(pair.reference.pid).run(theirs, frame, work.warm_up)
        for _ in range(work.rounds):
            cpu, began = time.process_time(), time.perf_counter()
            await trips[0].run(ours, frame, work.requests)
            client_s += time.process_time() - cpu
            wall_s += time.perf_counter() - began
            await trips[1].run(theirs, frame, work.requests)
            step()
    mine, reference = trips
    return {
        "rtt_ms_p50": mine.p50_ms,
        "reference_rtt_ms_p50": reference.p50_ms,
        "rtt_ratio": mine.p50_ms / reference.p50_ms,
        "rtt_ms_p99": mine.p99_ms,
        "reference_rtt_ms_p99": reference.p99_ms,
        "rtt_cpu_ms": mine.cpu_ms_each,
        "reference_rtt_cpu_ms": reference.cpu_ms_each,
        "rtt_client_cpu_share": client_s / wall_s,
        "rtt_n": len(mine.took_s),
    }


async def neighbours(pair: Pair, work: Work, step: Callable[[], None]) -> dict[str, Value]:
    """Seven fast robots, with and without a slow one beside them."""
    frame, slow_frame = observation(FAKE, 0), observation(FAKE, 1, delay_ms=SLOW_MS)
    alone: tuple[list[float], list[float]] = ([], [])
    beside: tuple[list[float], list[float]] = ([], [])
    async with robots(pair.fast[0], FAST_ROBOTS) as ours, robots(pair.fast[1], FAST_ROBOTS) as theirs:
        for number in range(work.rounds):
            seed = 1000 * number
            for index, fleet in enumerate((ours, theirs)):
                alone[index].extend(await paced(fleet, frame, work.paced_steps, seed))
                async with kept_busy(pair.slow[index], slow_frame):
                    beside[index].extend(await paced(fleet, frame, work.paced_steps, seed))
            step()
    before = [median_ms(took_s) for took_s in alone]
    after = [median_ms(took_s) for took_s in beside]
    return {
        "fast_rtt_ms_p50": before[0],
        "fast_rtt_ms_p50_beside_slow": after[0],
        "slow_neighbour_ratio": after[0] / before[0],
        "reference_fast_rtt_ms_p50": before[1],
        "reference_fast_rtt_ms_p50_beside_slow": after[1],
        "reference_slow_neighbour_ratio": after[1] / before[1],
        "neighbours_n": len(alone[0]),
    }


async def handshake(pair: Pair, work: Work, step: Callable[[], None]) -> dict[str, Value]:
    """From connecting to the policy that works for a slow robot, until its metadata is there."""
    slow_frame = observation(FAKE, 1, delay_ms=SLOW_MS)
    chance = random.Random(0)
    took_s: tuple[list[float], list[float]] = ([], [])
    for _ in range(work.rounds):
        for index, url in enumerate(pair.slow):
            async with kept_busy(url, slow_frame):
                for _ in range(work.handshakes):
                    await asyncio.sleep(chance.uniform(0.2, 1.2) * SLOW_MS / 1000)
                    began = time.perf_counter()
                    async with robot(url):
                        took_s[index].append(time.perf_counter() - began)
        step()
    return {
        "handshake_ms_p50": median_ms(took_s[0]),
        "reference_handshake_ms_p50": median_ms(took_s[1]),
        "handshake_n": len(took_s[0]),
    }


async def batch(work: Work, step: Callable[[], None]) -> dict[str, Value]:
    """32 robots on the table-top policy. Raises NoServer."""
    plain = [observation(TABLETOP, number) for number in range(ROBOTS)]
    exact = [observation(TABLETOP, number, deterministic=True) for number in range(ROBOTS)]
    batched, unbatched, deterministic = Loops(), Loops(), Loops()
    async with (
        own_server(deploy=ROBOT) as ours,
        own_server(deploy=UNBATCHED) as single,
        robots(ours.door(ROBOT_PATH), ROBOTS) as fleet,
        robots(single.door(ROBOT_PATH), ROBOTS) as lone_fleet,
    ):
        for one, other in zip(fleet, lone_fleet, strict=True):  # warm-up, and each gets its session
            await one.ask(plain[0])
            await other.ask(plain[0])
        for _ in range(work.rounds):
            await batched.run(fleet, plain, work.loop_s, ours.pid)
            await unbatched.run(lone_fleet, plain, work.loop_s, single.pid)
            await deterministic.run(fleet, exact, work.loop_s, ours.pid)
            step()
    return {
        "chunks_per_s_32": batched.rate,
        "chunks_per_s_32_unbatched": unbatched.rate,
        "batch_speedup_32": batched.rate / unbatched.rate,
        "batch_mean_32": batched.batch_mean,
        "chunks_per_s_32_deterministic": deterministic.rate,
        "deterministic_cost": batched.rate / deterministic.rate,
        "batch_rtt_ms_p50": median_ms(batched.took_s),
        "batch_client_cpu_share": batched.client_cpu_s / batched.wall_s,
        "batch_server_cpu_share": batched.server_cpu_s / batched.wall_s,
        "batch_n": len(batched.replies),
    }


# -- the bench


class Bench:
    """One run of the bench."""

    def __init__(self, sections: Sequence[str], work: Work) -> None:
        self.problems: list[str] = []
        """What could not be measured, and why."""
        self._sections = sections
        self._work = work
        self._progress = Progress(work.rounds * len(sections))

    async def run(self) -> dict[str, Value]:
        """The figures by key. SIGTERM cancels it, so that no server is left behind."""
        values: dict[str, Value] = {"load1_before": os.getloadavg()[0]}
        with _cancelled_by_sigterm():
            if set(self._sections) - {"batch"}:
                values |= await self._beside_reference()
            if "batch" in self._sections:
                values |= await self._tried("batch", partial(batch, self._work, self._progress.step))
        self._progress.close()
        cpus = len(os.sched_getaffinity(0))
        return {**values, "runs": self._work.rounds, "load1_after": os.getloadavg()[0], "cpus": cpus}

    async def _beside_reference(self) -> Mapping[str, Value]:
        values: dict[str, Value] = {}
        self._progress.enter("starting the servers")
        try:
            async with own_server(deploy=FAKES) as ours, reference_server() as reference:
                pair = Pair(ours, reference)
                for name, section in (("rtt", rtt), ("neighbours", neighbours), ("handshake", handshake)):
                    if name in self._sections:
                        values |= await self._tried(name, partial(section, pair, self._work, self._progress.step))
        except NoServer as error:
            self.problems.append(str(error))
        return values

    async def _tried(self, name: str, section: Callable[[], Awaitable[Mapping[str, Value]]]) -> Mapping[str, Value]:
        """The section's figures; none, and a problem, where something is in its way."""
        self._progress.enter(name)
        limit_s = _STUCK_S + _STUCK_ROUND_S * self._work.rounds
        try:
            async with asyncio.timeout(limit_s):
                return await section()
        except* TimeoutError:
            self.problems.append(f"{name}: not done within {limit_s:.0f} s")
        except* (NoServer, BadAnswer, WebSocketException, OSError) as errors:
            self.problems.append(f"{name}: {_first(errors)}")
        return {}


@contextlib.contextmanager
def _cancelled_by_sigterm() -> Iterator[None]:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _first(error: BaseException) -> BaseException:
    """What went wrong first, of what a task group gathered."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
