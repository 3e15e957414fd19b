"""Real worker processes, driven through the ports as the orchestrator drives them."""

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from omni_live.config.plan import WorkerPlan
from omni_live.connectors.shm import RunDirectory
from omni_live.engines.contract import Load
from omni_live.pipelines.spec import StageSpec
from omni_live.runtime.fences import FenceTable
from omni_live.runtime.layout import FENCES
from omni_live.runtime.ports import CLIENT, End, Opening, Route, WorkerId
from omni_live.runtime.process import Process, Processes, ProcessSettings
from omni_live.sessions.inputs import Outcome
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.stamp import Fence, SessionKey, Stamp

SERVER = WorkerId(0)
BIG = os.urandom(300_000)
PATIENCE_S = 30.0
"""Nothing here takes long; a test that waits longer has failed."""

FAKE = "omni_live.engines.fake:FakeEcho"


class Counts(Counter[str]):
    def count(self, name: str, amount: int = 1) -> None:
        self[name] += amount


class House:
    """A run directory, worker processes, and everything they reported."""

    def __init__(self, plans: list[WorkerPlan], settings: ProcessSettings) -> None:
        self.directory = RunDirectory()
        self.fences = FenceTable.create(self.directory.path / FENCES, 8)
        self.counts = Counts()
        self.processes = Processes(plans, self.directory.path, self.fences, self.counts, settings)
        self.plans = plans
        self.workers: dict[int, Process] = {}
        self.hosts: dict[str, WorkerId] = {}
        self.readied: set[int] = set()
        self.said: list[tuple[str, Stamp, Payload]] = []
        self.ends: list[tuple[str, Stamp, Outcome, str]] = []
        self.findings: list[tuple[str, SessionKey, Payload]] = []
        self.shots: dict[int, Payload | None] = {}
        self.exits: dict[int, str] = {}
        self.loads: dict[str, Load] = {}
        self._news = asyncio.Event()

    def spawn(self, role: int) -> WorkerId:
        worker = WorkerId(len(self.workers) + 1)
        self.workers[worker] = self.processes.spawn(worker, role)
        for stage in self.plans[role].stages:
            self.hosts[stage.name] = worker
        return worker

    def port(self, stage: str) -> Process:
        return self.workers[self.hosts[stage]]

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                self._news.clear()
                await self._news.wait()

    async def all_ended(self, stamp: Stamp) -> None:
        await self.until(lambda: all(self.ended(stage, stamp) for stage in self.hosts))

    def open(self, fence: Fence) -> Fence:
        """A session on every stage."""
        self.fences.write(fence)
        for stage in self.hosts:
            self.port(stage).open_session(stage, fence.stamp(0).session, {})
        return fence

    def chain(
        self,
        stamp: Stamp,
        *stages: str,
        whole: bool = False,
        rides: bool = True,
        params: Mapping[str, Scalar] | None = None,
        payload: Payload | None = None,
    ) -> None:
        """Open a turn on stages that hand on to one another, the last one to the client.

        Where it `rides`, each stage is opened by the one before it.
        """
        route = Route(CLIENT, SERVER, 4)
        for stage in reversed(stages[1:]):
            opening = None
            if rides and not whole:
                opening = Opening(self.port(stage).expect_turn(stage, stamp, 4), stamp.stage, (route,))
            else:
                self.port(stage).open_turn(stage, stamp, params or {}, (route,), 1)
            route = Route(stage, self.hosts[stage], 4, whole, opening)
        self.port(stages[0]).open_turn(stages[0], stamp, params or {}, (route,), 1, payload)

    def feed(self, stage: str, stamp: Stamp, body: bytes, last: bool = True, kind: str = "x") -> None:
        self.port(stage).feed_turn(stage, stamp, Payload(kind, {}, body), last)

    def ended(self, stage: str, stamp: Stamp) -> tuple[Outcome, str] | None:
        found = [(outcome, reason) for name, of, outcome, reason in self.ends if (name, of[:4]) == (stage, stamp[:4])]
        return found[0] if found else None  # the first report counts

    def heard(self, stamp: Stamp) -> list[bytes]:
        return [bytes(payload.body) for _, of, payload in self.said if of[:4] == stamp[:4]]

    # -- ports.Happenings

    def ready(self, worker: WorkerId) -> None:
        self.readied.add(worker)
        self._news.set()

    def spoke(
        self,
        worker: WorkerId,
        stage: str,
        stamp: Stamp,
        payload: Payload,
        outcome: Outcome | None = None,
        reason: str = "",
        through: tuple[End, ...] = (),
    ) -> None:
        self.said.append((stage, stamp, payload))
        self.workers[worker].credit(stage, stamp, 1)
        if outcome is not None:
            self.ended_(stage, stamp, outcome, reason, through)
        self._news.set()

    def ended_(self, stage: str, stamp: Stamp, outcome: Outcome, reason: str, through: tuple[End, ...]) -> None:
        self.ends += [(end.stage, stamp, end.outcome, end.reason) for end in through]
        self.ends.append((stage, stamp, outcome, reason))
        self._news.set()

    def found(self, worker: WorkerId, stage: str, session: SessionKey, payload: Payload) -> None:
        self.findings.append((stage, session, payload))
        self._news.set()

    def snapshotted(
        self, worker: WorkerId, stage: str, session: SessionKey, ticket: int, payload: Payload | None
    ) -> None:
        self.shots[ticket] = payload
        self._news.set()

    def exited(self, worker: WorkerId, reason: str) -> None:
        self.exits[worker] = reason
        self._news.set()

    def load(self, worker: WorkerId, stage: str, load: Load) -> None:
        self.loads[stage] = load
        self._news.set()


class Reports:
    """House as ports.Happenings, whose `ended` is a report where House's is a question."""

    def __init__(self, house: House) -> None:
        self.ready, self.spoke, self.found = house.ready, house.spoke, house.found
        self.snapshotted, self.exited, self.load = house.snapshotted, house.exited, house.load
        self._house = house

    def ended(
        self,
        worker: WorkerId,
        stage: str,
        stamp: Stamp,
        outcome: Outcome,
        reason: str,
        through: tuple[End, ...] = (),
    ) -> None:
        self._house.ended_(stage, stamp, outcome, reason, through)


def plan(*stages: str, engine: str = FAKE, **options: Scalar) -> WorkerPlan:
    return WorkerPlan(0, "test", tuple(StageSpec(stage, engine, options) for stage in stages))


@asynccontextmanager
async def house(*plans: WorkerPlan, settings: ProcessSettings | None = None) -> AsyncIterator[House]:
    """All workers ready; afterwards nothing of them is left."""
    built = House(list(plans), settings or ProcessSettings())
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(built.processes.run(Reports(built)))
            for role in range(len(plans)):
                built.spawn(role)
            try:
                await built.until(lambda: len(built.readied) + len(built.exits) == len(plans))
                yield built
            finally:
                built.processes.stop()
        left = {path.name for path in built.directory.path.iterdir()}
        assert left == {"owner", FENCES}
        assert len(built.exits) == len(built.workers)
    finally:
        built.directory.remove()


SPLIT = (plan("a"), plan("b"), plan("c"))
FUSED = (plan("a", "b", "c"),)
THREADED = tuple(plan(stage, inline=False) for stage in "abc")
MIXED = (plan("a", "b", inline=False), plan("c"))


PLACED = pytest.mark.parametrize("plans", [SPLIT, FUSED, THREADED, MIXED], ids=["split", "fused", "threaded", "mixed"])
SIZED = pytest.mark.parametrize("body", [b"small", BIG], ids=["inline", "shared memory"])


@PLACED
@SIZED
async def test_a_turn_that_is_opened_at_its_entry_runs_through_all_of_its_stages(
    plans: tuple[WorkerPlan, ...], body: bytes
) -> None:
    async with house(*plans) as on:
        fence = on.open(Fence(0, 1))
        for number in range(1, 6):
            stamp = fence.stamp(number)
            on.chain(stamp, "a", "b", "c", payload=Payload("x", {}, body))
            await on.all_ended(stamp)
            assert on.heard(stamp) == [body]
            assert [on.ended(stage, stamp) for stage in "abc"] == [(Outcome.DONE, "")] * 3
        assert not on.counts


@PLACED
@SIZED
@pytest.mark.parametrize("rides", [True, False])
async def test_a_turn_runs_through_its_stages_however_they_are_placed(
    plans: tuple[WorkerPlan, ...], body: bytes, rides: bool
) -> None:
    async with house(*plans) as on:
        fence = on.open(Fence(0, 1))
        for number in range(1, 6):
            stamp = fence.stamp(number)
            on.chain(stamp, "a", "b", "c", rides=rides)
            for _ in range(20):
                on.feed("a", stamp, body, last=False)
            on.feed("a", stamp, b"last")
            await on.all_ended(stamp)
            assert on.heard(stamp) == [body] * 20 + [b"last"]
            assert on.ended("c", stamp) == (Outcome.DONE, "")
        assert [of.seq for _, of, _ in on.said] == list(range(21)) * 5
        assert not on.counts


async def test_whole_edges_wait_for_the_orchestrators_word() -> None:
    async with house(*SPLIT) as on:
        stamp = on.open(Fence(0, 1)).stamp(1)
        on.chain(stamp, "a", "b", whole=True)
        on.port("b").abort("b", stamp)
        on.feed("a", stamp, BIG)
        await on.until(lambda: on.ended("a", stamp))
        assert on.heard(stamp) == []
        stamp = stamp._replace(turn=2)
        on.port("a").open_turn("a", stamp, {}, (Route("c", on.hosts["c"], 4, True),), 1)
        on.feed("a", stamp, BIG)
        await on.until(lambda: on.ended("a", stamp))
        on.port("c").open_turn("c", stamp, {}, (Route(CLIENT, SERVER, 4),), 1)
        on.port("a").forward("a", stamp, Route("c", on.hosts["c"], 4, True))
        await on.until(lambda: on.ended("c", stamp))
        assert on.heard(stamp) == [BIG]


async def test_concurrent_turns_do_not_mix() -> None:
    async with house(*SPLIT) as on:
        fences = [on.open(Fence(slot * 4, 1)) for slot in range(8)]
        bodies = {fence.slot: [bytes([fence.slot]) * (100 + 700 * n) for n in range(12)] for fence in fences}
        for fence in fences:
            on.chain(fence.stamp(1), "a", "b", "c")
        for index in range(12):
            for fence in fences:
                on.feed("a", fence.stamp(1), bodies[fence.slot][index], last=index == 11)
        await on.until(lambda: all(on.ended("c", fence.stamp(1)) for fence in fences))
        for fence in fences:
            assert on.heard(fence.stamp(1)) == bodies[fence.slot]


@pytest.mark.parametrize("inline", [True, False])
async def test_a_raised_fence_silences_every_worker(inline: bool) -> None:
    async with house(plan("a", inline=inline, multiply=10_000), plan("b", inline=inline)) as on:
        fence = on.open(Fence(0, 1))
        stamp = fence.stamp(1)
        on.chain(stamp, "a", "b")
        on.feed("a", stamp, b"x" * 5000)
        await on.until(lambda: len(on.said) > 20)
        raised = fence.raised()
        on.fences.write(raised)
        count = len(on.said)
        on.port("a").abort("a", stamp)
        on.port("b").abort("b", stamp)
        await on.until(lambda: on.ended("a", stamp) and on.ended("b", stamp))
        assert len(on.said) == count
        on.chain(raised.stamp(2), "b")
        on.feed("b", raised.stamp(2), b"new")
        await on.until(lambda: on.ended("b", raised.stamp(2)))
        assert on.heard(raised.stamp(2)) == [b"new"]


async def test_a_stage_stops_for_a_client_that_takes_nothing() -> None:
    async with house(plan("a", multiply=1000)) as on:
        stamp = on.open(Fence(0, 1)).stamp(1)
        port = on.port("a")
        port.credit = lambda *_: None  # type: ignore[method-assign]
        port.open_turn("a", stamp, {}, (Route(CLIENT, SERVER, 3),), 1)
        on.feed("a", stamp, b"x")
        on.port("a").snapshot("a", stamp.session, 1)
        await on.until(lambda: 1 in on.shots and len(on.said) == 3)
        on.port("a").snapshot("a", stamp.session, 2)
        await on.until(lambda: 2 in on.shots)
        assert len(on.said) == 3


async def test_sessions_are_heard_forked_and_restored_across_workers() -> None:
    async with house(plan("a"), plan("b", inline=False)) as on:
        session = on.open(Fence(0, 1)).stamp(0).session
        other = on.open(Fence(4, 1)).stamp(0).session
        for number in range(3):
            on.port("a").feed_session("a", session, Payload("pcm", {"n": number}, BIG))
        on.port("a").snapshot("a", session, 7)
        await on.until(lambda: 7 in on.shots)
        assert [payload.meta["n"] for _, _, payload in on.findings] == [0, 1, 2]
        assert all(payload.body == BIG for _, _, payload in on.findings)
        shot = on.shots[7]
        assert shot is not None
        on.port("b").restore("b", other, shot)
        on.port("b").feed_session("b", other, Payload("pcm"))
        on.port("b").snapshot("b", other, 8)
        await on.until(lambda: 8 in on.shots)
        again = on.shots[8]
        assert again is not None
        assert again.meta == {"told": 4}


async def test_loads_are_reported() -> None:
    async with house(plan("a")) as on:
        on.open(Fence(0, 1))
        on.open(Fence(4, 1))
        await on.until(lambda: "a" in on.loads and on.loads["a"].sessions == 2)


# -- faults


async def test_a_turn_that_fails_leaves_its_worker_alone() -> None:
    async with house(plan("a")) as on:
        fence = on.open(Fence(0, 1))
        on.chain(fence.stamp(1), "a")
        on.feed("a", fence.stamp(1), b"x", kind="fail")
        await on.until(lambda: on.ended("a", fence.stamp(1)))
        assert on.ended("a", fence.stamp(1)) == (Outcome.FAILED, "stage_error")
        on.chain(fence.stamp(2), "a")
        on.feed("a", fence.stamp(2), b"y")
        await on.until(lambda: on.ended("a", fence.stamp(2)))
        assert on.heard(fence.stamp(2)) == [b"y"]


@pytest.mark.parametrize(
    ("kind", "inline", "reason"),
    [
        ("crash", True, "signal:9"),
        ("crash", False, "signal:9"),
        ("raise", True, "exit:70"),
        ("raise", False, "exit:70"),
        ("stall", True, "hung"),
        ("stall", False, "hung"),
    ],
)
async def test_a_broken_engine_ends_its_worker_and_the_others_go_on(kind: str, inline: bool, reason: str) -> None:
    settings = ProcessSettings(hang_s=0.6)
    async with house(plan("a", inline=inline), plan("b"), plan("c"), settings=settings) as on:
        fence = on.open(Fence(0, 1))
        healthy = on.open(Fence(4, 1)).stamp(1)
        stamp = fence.stamp(1)
        on.chain(stamp, "a", "b")
        on.feed("a", stamp, BIG, last=False)
        await on.until(lambda: on.said)
        on.feed("a", stamp, b"x", kind=kind)
        await on.until(lambda: on.exits)
        assert on.exits == {on.hosts["a"]: reason}
        await on.until(lambda: on.ended("b", stamp))  # which was in the middle of its input
        assert on.ended("b", stamp) == (Outcome.FAILED, "peer_lost")
        on.chain(healthy, "b", "c")
        on.feed("b", healthy, BIG)
        await on.until(lambda: on.ended("c", healthy))
        assert on.heard(healthy) == [BIG]


async def test_a_worker_whose_steps_may_take_long_is_given_that_long() -> None:
    patient = WorkerPlan(0, "test", (StageSpec("a", FAKE, {"inline": False, "step_s": 1.0}, step_s=60.0),))
    async with house(patient, settings=ProcessSettings(hang_s=0.2)) as on:
        stamp = on.open(Fence(0, 1)).stamp(1)
        on.chain(stamp, "a")
        on.feed("a", stamp, b"x")
        await on.until(lambda: on.ended("a", stamp))
        assert on.ended("a", stamp) == (Outcome.DONE, "")
        assert on.exits == {}


async def test_a_stopped_worker_counts_as_hung() -> None:
    async with house(plan("a"), settings=ProcessSettings(hang_s=0.6)) as on:
        on.open(Fence(0, 1))
        process = on.port("a")._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        await on.until(lambda: on.exits)
        assert on.exits == {1: "hung"}


async def test_a_dead_receiver_fails_the_turns_that_send_to_it() -> None:
    async with house(plan("a", multiply=100_000), plan("b")) as on:
        stamp = on.open(Fence(0, 1)).stamp(1)
        on.chain(stamp, "a", "b")
        on.feed("a", stamp, b"x" * 5000)
        await on.until(lambda: len(on.said) > 10)
        on.port("b").kill()
        await on.until(lambda: on.ended("a", stamp))
        assert on.ended("a", stamp) == (Outcome.FAILED, "peer_lost")
        await on.until(lambda: on.exits == {on.hosts["b"]: "killed"})
        replacement = on.spawn(1)
        await on.until(lambda: replacement in on.readied)
        again = on.open(Fence(4, 1)).stamp(1)
        on.chain(again, "b")
        on.feed("b", again, BIG)
        await on.until(lambda: on.ended("b", again))
        assert on.heard(again) == [BIG]


async def test_what_is_handed_on_untouched_lies_in_one_place_and_survives_the_death_of_who_lent_it() -> None:
    async with house(*SPLIT) as on:
        fences = [on.open(Fence(slot * 4, 1)) for slot in range(3)]
        stamp = fences[0].stamp(1)
        on.chain(stamp, "a", "b", "c", payload=Payload("x", {}, BIG))
        await on.all_ended(stamp)
        assert on.heard(stamp) == [BIG]
        assert {path.name for path in on.directory.path.glob("*.0")} == {"s1.0"}  # nobody copied it further
        stamps = [fence.stamp(2) for fence in fences]
        for stamp in stamps:
            on.chain(stamp, "a", "b", "c", payload=Payload("x", {}, BIG))
        on.port("b").kill()
        await on.until(lambda: on.exits)
        for stamp in stamps:
            for stage in "ac":
                on.port(stage).abort(stage, stamp)
        await on.until(lambda: all(on.ended(stage, stamp) for stage in "ac" for stamp in stamps))
        again = fences[0].stamp(3)
        on.chain(again, "a", payload=Payload("x", {}, BIG))
        await on.until(lambda: on.ended("a", again))
        assert on.heard(again) == [BIG]
        for stage in "ac":
            for fence in fences:
                on.port(stage).close_session(stage, fence.stamp(0).session)
            on.port(stage).drain()
        await on.until(lambda: len(on.exits) == 3)
        assert sorted(on.exits.values()) == ["exit:0", "exit:0", "killed"]  # nothing is held for the dead one


async def test_of_a_worker_that_died_nothing_stays_mapped() -> None:
    async with house(plan("a")) as on:
        stamp = on.open(Fence(0, 1)).stamp(1)
        on.chain(stamp, "a")
        on.feed("a", stamp, BIG)
        await on.until(lambda: on.ended("a", stamp))
        assert on.heard(stamp) == [BIG]
        dead = on.port("a")  # whoever still names it keeps none of its memory
        assert _segments(on)
        dead.kill()
        await on.until(lambda: on.exits)
        assert not _segments(on)


def _segments(on: House) -> list[str]:
    """The arenas that are mapped here: the workers', and those that they are fed through."""
    names = re.compile(re.escape(str(on.directory.path)) + r"/[ws]\d+\.\d+")
    return names.findall(Path("/proc/self/maps").read_text())


async def test_a_stage_whose_producer_died_before_it_opened_the_turn_answers_the_abort() -> None:
    async with house(*SPLIT) as on:
        stamp = on.open(Fence(0, 1)).stamp(1)
        process = on.port("a")._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        on.chain(stamp, "a", "b", "c", payload=Payload("x"))
        on.port("a").kill()
        await on.until(lambda: on.exits)
        for stage in "bc":
            on.port(stage).abort(stage, stamp)
        await on.until(lambda: len(on.ends) == 2)
        assert {on.ended(stage, stamp) for stage in "bc"} == {(Outcome.INCOMPLETE, "aborted")}


async def test_an_opening_never_overtakes_what_its_stage_was_told_before() -> None:
    async with house(plan("a"), plan("b", inline=False)) as on:
        for slot in range(20):
            fence = Fence(slot % 8 * 4, slot + 1)
            on.fences.write(fence)
            stamp = fence.stamp(1)
            for stage in "ab":  # nobody waits: what the first worker says to the second comes by another socket
                on.port(stage).open_session(stage, stamp.session, {})
            on.port("b").feed_session("b", stamp.session, Payload("x", {}, BIG))
            on.chain(stamp, "a", "b", payload=Payload("x"))
            await on.all_ended(stamp)
            assert on.ended("b", stamp) == (Outcome.DONE, "")
            for stage in "ab":
                on.port(stage).close_session(stage, stamp.session)


async def test_a_chunk_for_a_worker_that_never_was_fails_its_turn() -> None:
    async with house(plan("a")) as on:
        stamp = on.open(Fence(0, 1)).stamp(1)
        on.port("a").open_turn("a", stamp, {}, (Route("z", WorkerId(99), 4),), 1)
        on.feed("a", stamp, BIG, last=False)
        await on.until(lambda: on.ended("a", stamp))
        assert on.ended("a", stamp) == (Outcome.FAILED, "peer_lost")


async def test_an_engine_that_does_not_exist_is_a_bad_configuration() -> None:
    async with house(plan("a", engine="omni_live.engines.fake:Nobody"), plan("b", engine="no.such:Module")) as on:
        await on.until(lambda: len(on.exits) == 2)
        assert on.exits == {1: "exit:78", 2: "exit:78"}


async def test_a_worker_that_is_killed_before_it_is_ready_is_reported_once() -> None:
    async with house(plan("a")) as on:
        worker = on.spawn(0)
        on.workers[worker].kill()
        await on.until(lambda: worker in on.exits)
        assert on.exits[worker] == "killed"
        assert worker not in on.readied


async def test_calls_to_a_dead_worker_go_nowhere() -> None:
    async with house(plan("a")) as on:
        fence = on.open(Fence(0, 1))
        on.port("a").kill()
        await on.until(lambda: on.exits)
        on.chain(fence.stamp(1), "a")
        on.feed("a", fence.stamp(1), BIG)
        on.port("a").credit("a", fence.stamp(1), 1)
        on.port("a").abort("a", fence.stamp(1))
        on.port("a").close_session("a", fence.stamp(1).session)
        on.port("a").drain()
        on.port("a").kill()
        assert not list(on.directory.path.glob("s1.*"))


async def test_what_cannot_travel_fails_its_turn_and_the_worker_lives() -> None:
    async with house(plan("a")) as on:
        fence = on.open(Fence(0, 1))
        on.chain(fence.stamp(1), "a")
        on.port("a").feed_turn("a", fence.stamp(1), Payload("x", {"n": 2**70}), True)
        on.chain(fence.stamp(2), "a", params={"n": 2**70})
        await on.until(lambda: on.ended("a", fence.stamp(2)))
        assert [end[2:] for end in on.ends] == [(Outcome.FAILED, "payload_refused")] * 2
        on.chain(fence.stamp(3), "a")
        on.feed("a", fence.stamp(3), b"fine")
        await on.until(lambda: on.ended("a", fence.stamp(3)))
        assert on.heard(fence.stamp(3)) == [b"fine"]


async def test_what_finds_no_room_in_shared_memory_travels_inline() -> None:
    async with house(plan("a"), settings=ProcessSettings(arena_bytes=1 << 20)) as on:
        stamp = on.open(Fence(0, 1)).stamp(1)
        huge = Payload("x", {}, bytes(3 << 20))
        on.port("a").feed_session("a", stamp.session, huge)
        await on.until(lambda: on.findings)
        assert on.findings[0][2].body == huge.body
        assert on.counts["arena_fallbacks"] == 1
        on.chain(stamp, "a", payload=huge)
        await on.until(lambda: on.ended("a", stamp))
        assert on.ended("a", stamp) == (Outcome.FAILED, "resource_exhausted")  # there is no way back for so much
        assert on.counts["arena_fallbacks"] == 2


# -- ends


@pytest.mark.parametrize("inline", [True, False])
async def test_a_drained_worker_finishes_its_turns_and_ends_well(inline: bool) -> None:
    async with house(plan("a", inline=inline, multiply=50), plan("b")) as on:
        stamp = on.open(Fence(0, 1)).stamp(1)
        on.chain(stamp, "a", "b")
        on.port("a").drain()
        on.feed("a", stamp, BIG)
        await on.until(lambda: on.ended("b", stamp))
        assert on.heard(stamp) == [BIG] * 50
        on.port("a").close_session("a", stamp.session)
        await on.until(lambda: on.exits)
        assert on.exits == {on.hosts["a"]: "exit:0"}


@pytest.mark.parametrize("seed", range(3))
async def test_after_a_storm_of_interruptions_each_turn_has_ended_once_and_nothing_is_held(seed: int) -> None:
    chance = random.Random(seed)
    async with house(plan("a", multiply=3), plan("b", inline=chance.random() < 0.5), plan("c")) as on:
        fences = [on.open(Fence(slot * 4, 1)) for slot in range(6)]
        turns: list[Stamp] = []
        for number in range(1, 121):
            lane = chance.randrange(len(fences))
            stamp = fences[lane].stamp(number)
            turns.append(stamp)
            on.chain(stamp, "a", "b", "c", rides=chance.random() < 0.7)
            for _ in range(chance.randrange(4)):
                on.feed("a", stamp, BIG[: chance.choice([10, 5000, 200_000])], last=False)
            fate = chance.random()
            if fate < 0.5:
                on.feed("a", stamp, b"last")
            if fate > 0.3:
                await asyncio.sleep(0)
                fences[lane] = fences[lane].raised()
                on.fences.write(fences[lane])
                for stage in "abc":
                    if on.ended(stage, stamp) is None:
                        on.port(stage).abort(stage, stamp)
            else:
                await on.all_ended(stamp)
        for stamp in turns:
            await on.all_ended(stamp)
        for stage in "abc":
            for fence in fences:
                on.port(stage).close_session(stage, fence.stamp(0).session)
            on.port(stage).drain()
        await on.until(lambda: len(on.exits) == 3)
        assert set(on.exits.values()) == {"exit:0"}  # which they would not, if they held a turn or a ticket
        assert on.counts["tickets_invalid"] == 0


ORPHANAGE = """
import asyncio, os, sys
from omni_live.config.plan import WorkerPlan
from omni_live.connectors.shm import RunDirectory
from omni_live.pipelines.spec import StageSpec
from omni_live.runtime.fences import FenceTable
from omni_live.runtime.layout import FENCES
from omni_live.runtime.ports import WorkerId
from omni_live.runtime.process import Processes

async def main() -> None:
    directory = RunDirectory()
    fences = FenceTable.create(directory.path / FENCES, 1)
    class Counts:
        def count(self, name, amount=1): pass
    class Reports:
        def ready(self, worker): print(process._process.pid, directory.path, flush=True)
        def __getattr__(self, name): return lambda *_: None
    plan = WorkerPlan(0, "test", (StageSpec("a", "omni_live.engines.fake:FakeEcho", {"inline": False}),))
    processes = Processes([plan], directory.path, fences, Counts())
    process = processes.spawn(WorkerId(1), 0)
    await processes.run(Reports())

asyncio.run(main())
"""


def test_no_worker_outlives_its_server() -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHANAGE], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pid, directory = server.stdout.readline().split()
        worker = os.pidfd_open(int(pid))
        server.kill()
        server.wait()
        # A pidfd is readable once its process has ended.
        waiting = asyncio.run(_readable(worker))
        os.close(worker)
        for path in sorted(Path(directory).iterdir()):
            path.unlink()
        Path(directory).rmdir()
    assert waiting


async def _readable(fd: int) -> bool:
    done = asyncio.Event()
    asyncio.get_running_loop().add_reader(fd, done.set)
    async with asyncio.timeout(PATIENCE_S):
        await done.wait()
    asyncio.get_running_loop().remove_reader(fd)
    return True
