"""`omni-live bench world`: how true the served world's dreams are, how fast they come, and what a fork costs.

Everything goes over the world door of servers that the bench starts. `batch_speedup_8` compares the same 8 sessions
that step together on a server as it ships, and on one that serves each row alone (max_batch 1 for both stages), in
alternating rounds.
"""

import asyncio
import os
import re
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Final
from urllib.parse import urlsplit
from urllib.request import urlopen

import numpy as np
from numpy.typing import NDArray

from omni_live.bench.report import Progress, Row, Value
from omni_live.bench.server import Endpoint, NoServer, own_server
from omni_live.clients.envs.table import TASKS, TableEnv, expert
from omni_live.clients.planner import Planner, RandomPolicy, drive_table
from omni_live.clients.planner_link import ServedDreams
from omni_live.clients.planning import Images
from omni_live.clients.world import Link, World, connect
from omni_live.clients.world_errors import WorldError
from omni_live.pipelines.world.quality import compared
from omni_live.pipelines.world.rollouts import Episode, record

SECTIONS: Final = ("quality", "batch", "fork", "pace")
PLANNER: Final = "planner"
PATH: Final = "/v1/world"
WORLD: Final = "pipelines:\n  world:\n"
UNBATCHED: Final = (
    "pipelines:\n  world: {stages: {dynamics: {options: {max_batch: 1}}, decoder: {options: {max_batch: 1}}}}\n"
)
DETERMINISTIC: Final = (
    "pipelines:\n  world: {stages: {dynamics: {options: {deterministic: true}},"
    " decoder: {options: {deterministic: true}}}}\n"
)
MEASURED: Final = (1, 8, 16, 32)
FORKED_AT: Final = 64
FORKS: Final = 64
PACED: Final = 8
PERIOD_S: Final = 0.1
_STUCK_S: Final = 300.0
_ANSWER_S: Final = 5.0
_POOL: Final = re.compile(r'^omni_live_stage_bytes\{[^}]*stage="dynamics"[^}]*\} ([0-9.e+]+)', re.MULTILINE)

ROWS: Final = (
    *(Row(f"psnr_{at}", f"likeness of frame {at}, mean", "dB", 1) for at in MEASURED),
    *(Row(f"disc_err_px_{at}", f"disc's error at frame {at}, median", "px", 2) for at in MEASURED),
    *(Row(f"lost_{at}", f"share of discs lost at frame {at}", "", 3) for at in MEASURED),
    Row("quality_n", "episodes"),
    Row("ms_per_frame", "a frame of one session", "ms", 2),
    *(Row(f"frames_per_s_{count}", f"frames with {count} stepping together", "/s", 0) for count in (1, 8, 32)),
    Row("frames_per_s_8_unbatched", "the same 8 in batches of one", "/s", 0),
    Row("batch_speedup_8", "8 batched over 8 unbatched", "", 2),
    Row("frames_per_s_8_deterministic", "8 with deterministic: true", "/s", 0),
    Row("deterministic_cost", "8 batched over 8 deterministic", "", 2),
    Row("fork_ms_p50", "a fork at step 64, median", "ms", 2),
    Row("fork_share", "memory of 64 forks over 64 copies", "", 4),
    Row("fork_n", "forks"),
    Row("action_to_frame_ms_p50", "8 at 10 frames/s, action to frame, median", "ms", 1),
    Row("action_to_frame_ms_p95", "the same, 95 of 100", "ms", 1),
    Row("late_frames", "of these after 100 ms"),
    Row("paced_n", "paced frames"),
    Row("planner_success", "planner's success", "", 2),
    Row("random_success", "random policy's success", "", 2),
    Row("decision_ms_p50", "a planner's decision, median", "ms", 0),
    Row("runs", "rounds"),
    Row("load1_before", "load of the machine before", "", 2),
    Row("load1_after", "load of the machine after", "", 2),
    Row("cpus", "processors"),
)


@dataclass(frozen=True, slots=True)
class Work:
    """How much is measured."""

    rounds: int = 5
    episodes: int = 48
    frames: int = 32
    """Of each session's step, in each round of the speeds."""
    forks: int = 50
    paced_frames: int = 100
    planned: int = 10


QUICK: Final = Work(rounds=2, episodes=8, frames=16, forks=10, paced_frames=20, planned=3)


def actions(frames: int, seed: int) -> NDArray[np.float32]:
    """Actions float32[frames, 2, 2] drawn by chance."""
    return np.random.default_rng(seed).uniform(-0.7, 0.7, (frames, 2, 2)).astype(np.float32)


async def quality(link: Link, work: Work, tell: Callable[[], None]) -> dict[str, Value]:
    """Dreams of the server, beside what truly happened; with the true actions, from one true frame."""
    table = TableEnv(20_001)  # no episode that it learned from
    episodes = list(record(table, lambda: expert(table), TASKS, work.episodes, 20_001, max(MEASURED)))
    dreamt: list[list[Images]] = []
    for number, episode in enumerate(episodes):
        dreamt.append(await _dreamt(link, episode, number))
        if number % max(1, work.episodes // work.rounds) == 0:
            tell()
    found: dict[str, Value] = {"quality_n": len(episodes)}
    for frame in MEASURED:
        found |= compared(episodes, frame, [images[frame - 1] for images in dreamt])
    return found


async def _dreamt(link: Link, episode: Episode, seed: int) -> list[Images]:
    world = await link.open(seed=seed, image=episode.images[0])
    frames = await world.step(episode.actions[: max(MEASURED)])
    world.discard()
    return [frame.image for frame in frames if frame.image is not None]


async def _rate(worlds: Sequence[World], frames: int, seed: int) -> float:
    """Frames per second, pictures and all, of sessions that each make so many at once."""
    began = time.perf_counter()
    moves = actions(frames, seed)
    made = await asyncio.gather(*(world.step(moves) for world in worlds))
    return sum(map(len, made)) / (time.perf_counter() - began)


async def batch(link: Link, work: Work, tell: Callable[[], None]) -> dict[str, Value]:
    """Frames per second: as shipped, in batches of one, and deterministic, in alternating rounds. Raises NoServer."""
    async with (
        own_server(deploy=UNBATCHED) as single,
        own_server(deploy=DETERMINISTIC) as exact,
        connect(single.door(PATH)) as lone_link,
        connect(exact.door(PATH)) as exact_link,
    ):
        kinds = (("1", link, 1), ("8", link, 8), ("32", link, 32), ("8_unbatched", lone_link, 8))
        fleets = [
            (name, [await it.open(seed=at) for at in range(count)])
            for name, it, count in (*kinds, ("8_deterministic", exact_link, 8))
        ]
        rates: dict[str, list[float]] = {name: [] for name, _ in fleets}
        for number in range(-1, work.rounds):  # the first warms up
            for name, worlds in fleets:
                rate = await _rate(worlds, work.frames, number + 1)
                if number >= 0:
                    rates[name].append(rate)
            if number >= 0:
                tell()
        for _, worlds in fleets:
            for world in worlds:
                await world.close()
    typical = {name: statistics.median(found) for name, found in rates.items()}
    return {
        **{f"frames_per_s_{name}": rate for name, rate in typical.items()},
        "ms_per_frame": 1e3 / typical["1"],
        "batch_speedup_8": typical["8"] / typical["8_unbatched"],
        "deterministic_cost": typical["8"] / typical["8_deterministic"],
    }


async def fork(ours: Endpoint, link: Link, work: Work, tell: Callable[[], None]) -> dict[str, Value]:
    """What a fork takes at step 64, and how much 64 of them add to the pool, beside 64 rollouts of their own."""
    parent = await link.open(seed=1, outputs=("latent",))
    before = await _pool_bytes(ours)
    await parent.step(actions(FORKED_AT, 1))
    took_s: list[float] = []
    for number in range(work.forks):
        began = time.perf_counter()
        (child,) = await parent.fork()
        took_s.append(time.perf_counter() - began)
        child.discard()
        if number % max(1, work.forks // work.rounds) == 0:
            tell()
    found: dict[str, Value] = {"fork_ms_p50": statistics.median(took_s) * 1e3, "fork_n": len(took_s)}
    await asyncio.sleep(1.5)  # the load that /metrics tells is a second old at most
    alone = await _pool_bytes(ours)
    children = await parent.fork(count=FORKS)
    await asyncio.sleep(1.5)
    forked = await _pool_bytes(ours)
    for world in (*children, parent):
        await world.close()
    if before is not None and alone is not None and forked is not None and alone > before:
        found["fork_share"] = (forked - alone) / (FORKS * (alone - before))
    return found


async def _pool_bytes(ours: Endpoint) -> float | None:
    address = urlsplit(ours.url)._replace(scheme="http", path="/metrics").geturl()
    found = _POOL.search(await asyncio.to_thread(_read, address))
    return float(found[1]) if found else None


def _read(address: str) -> str:
    with urlopen(address, timeout=_ANSWER_S) as answer:
        page: bytes = answer.read()
    return page.decode()


async def pace(link: Link, work: Work, tell: Callable[[], None]) -> dict[str, Value]:
    """Sessions that each act ten times a second, a step of one frame each."""
    worlds = [await link.open(seed=at) for at in range(PACED)]
    loop = asyncio.get_running_loop()
    began = loop.time() + PERIOD_S

    async def drive(at: int, world: World) -> list[float]:
        took_s = []
        moves = actions(work.paced_frames, at)
        for number in range(work.paced_frames):
            due = began + (number + at / PACED) * PERIOD_S
            await asyncio.sleep(max(0.0, due - loop.time()))
            await world.step(moves[number : number + 1])
            took_s.append(loop.time() - max(due, began))  # waiting for the frame before counts
        return took_s

    driven = await asyncio.gather(*(drive(at, world) for at, world in enumerate(worlds)))
    took_ms = [took_s * 1e3 for each in driven for took_s in each]
    for world in worlds:
        await world.close()
    tell()
    return {
        "action_to_frame_ms_p50": float(np.percentile(took_ms, 50)),
        "action_to_frame_ms_p95": float(np.percentile(took_ms, 95)),
        "late_frames": sum(took > PERIOD_S * 1e3 for took in took_ms),
        "paced_n": len(took_ms),
    }


async def planner(link: Link, work: Work, tell: Callable[[], None]) -> dict[str, Value]:
    """The planner's success on the table, and a random policy's on the same tables."""
    async with aclosing(ServedDreams(link)) as dreams:
        dreamt = await drive_table(Planner(dreams), work.planned, seed=7)
    chance = await drive_table(RandomPolicy(np.random.default_rng(7)), work.planned, seed=7)
    tell()
    return {
        "planner_success": dreamt.share,
        "random_success": chance.share,
        "decision_ms_p50": dreamt.figures()["decision_ms_p50"],
    }


class Bench:
    """One run of the bench."""

    def __init__(self, sections: Sequence[str], work: Work) -> None:
        self.problems: list[str] = []
        """What could not be measured, and why."""
        self._sections = sections
        self._work = work
        self._progress = Progress(work.rounds * len(sections))

    async def run(self) -> dict[str, Value]:
        """The figures by key."""
        values: dict[str, Value] = {"load1_before": os.getloadavg()[0]}
        self._progress.enter("starting the server")
        try:
            async with own_server(deploy=WORLD) as ours:
                for name in self._sections:
                    values |= await self._tried(name, ours)
        except NoServer as error:
            self.problems.append(str(error))
        self._progress.close()
        cpus = len(os.sched_getaffinity(0))
        return {**values, "runs": self._work.rounds, "load1_after": os.getloadavg()[0], "cpus": cpus}

    async def _tried(self, name: str, ours: Endpoint) -> Mapping[str, Value]:
        """The section's figures; none, and a problem, where something is in its way."""
        self._progress.enter(name)
        try:
            async with asyncio.timeout(_STUCK_S), connect(ours.door(PATH)) as link:
                return await self._section(name, ours, link)()
        except* TimeoutError:
            self.problems.append(f"{name}: not done within {_STUCK_S:.0f} s")
        except* (NoServer, WorldError, OSError) as errors:
            self.problems.append(f"{name}: {_first(errors)}")
        return {}

    def _section(self, name: str, ours: Endpoint, link: Link) -> Callable[[], Awaitable[Mapping[str, Value]]]:
        work, tell = self._work, self._progress.step
        return {
            "quality": partial(quality, link, work, tell),
            "batch": partial(batch, link, work, tell),
            "fork": partial(fork, ours, link, work, tell),
            "pace": partial(pace, link, work, tell),
            PLANNER: partial(planner, link, work, tell),
        }[name]


def _first(error: BaseException) -> BaseException:
    """What went wrong first, of what a task group gathered."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
