"""The orchestrator behind fake ports: what it sends to which worker, in which order, and what it tells the session."""

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import pytest

from omni_live.config.plan import Plan, PoolPlan, WorkerPlan
from omni_live.engines.contract import Load
from omni_live.pipelines.spec import EdgeSpec, Handover, PipelineSpec, StageSpec
from omni_live.runtime.orchestrator import IllegalEffectError, Orchestrator, UnavailableError
from omni_live.runtime.ports import CLIENT, End, Opening, Route, WorkerId
from omni_live.runtime.slots import Slots
from omni_live.sessions.effects import (
    Abort,
    Count,
    Credit,
    Effect,
    Emit,
    Feed,
    Hold,
    RaiseFence,
    Release,
    Replace,
    SnapshotReady,
    Submit,
    Unhold,
    Wake,
)
from omni_live.sessions.inputs import (
    DrainAsked,
    Heartbeat,
    Outcome,
    StageEnded,
    StageFound,
    StageLost,
    StageSpoke,
    Woke,
)
from omni_live.sessions.limits import Limits
from omni_live.sessions.payload import NO_META, Payload
from omni_live.sessions.stamp import LANES, Fence, SessionKey, Stamp, session_key

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
AFTER = 5
"""The calls that every worker has had before a turn that it is to expect."""


@dataclass
class Alarm:
    call: Callable[[], None] | None

    def cancel(self) -> None:
        self.call = None


class ManualClock:
    def __init__(self) -> None:
        self.now_ns = NS_PER_S
        self.heap: list[tuple[int, int, Alarm]] = []
        self.made = 0

    def now(self) -> int:
        return self.now_ns

    def call_at(self, at_ns: int, call: Callable[[], None]) -> Alarm:
        alarm = Alarm(call)
        self.made += 1
        heapq.heappush(self.heap, (at_ns, self.made, alarm))
        return alarm

    def run(self, seconds: float) -> None:
        end = self.now_ns + round(seconds * NS_PER_S)
        while self.heap and self.heap[0][0] <= end:
            at_ns, _, alarm = heapq.heappop(self.heap)
            self.now_ns = max(self.now_ns, at_ns)
            if alarm.call is not None:
                alarm.call()
        self.now_ns = end

    @property
    def armed(self) -> int:
        return sum(alarm.call is not None for _, _, alarm in self.heap)


class FakeWorker:
    """Writes down what it is asked; `on_open` lets a test answer from inside the call."""

    def __init__(self, worker: WorkerId, role: int, log: list[tuple[Any, ...]]) -> None:
        self.worker, self.role, self.log = worker, role, log
        self.killed = False
        self.on_open: Callable[[str, Stamp], None] | None = None

    def _note(self, *what: Any) -> None:
        self.log.append((self.worker, *what))

    def open_session(self, stage: str, session: SessionKey, params: Mapping[str, Any]) -> None:
        self._note("open_session", stage, session)

    def close_session(self, stage: str, session: SessionKey) -> None:
        self._note("close_session", stage, session)

    def open_turn(
        self,
        stage: str,
        stamp: Stamp,
        params: Mapping[str, Any],
        routes: tuple[Route, ...],
        inputs: int,
        payload: Payload | None = None,
    ) -> None:
        self._note("open_turn", stage, stamp, routes, inputs, payload)
        if self.on_open is not None:
            self.on_open(stage, stamp)

    def expect_turn(self, stage: str, stamp: Stamp, client_credits: int) -> int:
        self._note("expect_turn", stage, stamp, client_credits)
        if self.on_open is not None:
            self.on_open(stage, stamp)
        return AFTER

    def forward(self, stage: str, stamp: Stamp, route: Route) -> None:
        self._note("forward", stage, stamp, route)

    def feed_session(self, stage: str, session: SessionKey, payload: Payload) -> None:
        self._note("feed_session", stage, session, payload)

    def abort(self, stage: str, stamp: Stamp) -> None:
        self._note("abort", stage, stamp)

    def credit(self, stage: str, stamp: Stamp, units: int) -> None:
        self._note("credit", stage, stamp, units)

    def fork(self, stage: str, session: SessionKey, into: SessionKey) -> None: ...
    def snapshot(self, stage: str, session: SessionKey, ticket: int) -> None: ...
    def restore(self, stage: str, session: SessionKey, payload: Payload) -> None: ...

    def drain(self) -> None:
        self._note("drain")

    def kill(self) -> None:
        self.killed = True
        self._note("kill")


class Script:
    """A session that answers each input with what the test wrote down for its type, and keeps what it was told."""

    def __init__(self, slot: int, generation: int) -> None:
        self.slot, self.generation = slot, generation
        self.told: list[object] = []
        self.answers: dict[type, list[list[Effect]]] = {}

    def handle(self, told: object, now_ns: int) -> list[Effect]:
        self.told.append(told)
        waiting = self.answers.get(type(told))
        return waiting.pop(0) if waiting else []

    @property
    def key(self) -> SessionKey:
        return session_key(self.slot, self.generation)

    def fence(self, epoch: int = 1, lane: int = 0) -> Fence:
        return Fence(self.slot * LANES + lane, self.generation, epoch)

    def stamp(self, turn: int = 1, epoch: int = 1, lane: int = 0) -> Stamp:
        return self.fence(epoch, lane).stamp(turn)


class Box:
    """A mailbox that keeps everything; `on_take` lets a test call back from inside."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.on_take: Callable[[list[Effect]], None] | None = None

    def take(self, effects: list[Effect]) -> None:
        self.effects += effects
        if self.on_take is not None:
            self.on_take(effects)


@dataclass
class House:
    """An orchestrator with everything around it faked, one worker a pool unless told otherwise."""

    spec: PipelineSpec
    groups: tuple[tuple[str, ...], ...]
    replicas: int = 1
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.clock = ManualClock()
        self.workers: dict[WorkerId, FakeWorker] = {}
        self.counts: dict[str, int] = {}
        self.slots = Slots(8)
        workers: list[WorkerPlan] = []
        pools: list[PoolPlan] = []
        for group in self.groups:
            roles = tuple(range(len(workers), len(workers) + self.replicas))
            stages = tuple(self.spec.stage(name) for name in group)
            workers += [WorkerPlan(role, self.spec.name, stages) for role in roles]
            pools.append(PoolPlan(self.spec.name, group, roles))
        plan = Plan((self.spec,), tuple(workers), tuple(pools), self.limits)
        self.it = Orchestrator(plan, self, self, self.clock, self, self.slots)
        self.it.start()

    def spawn(self, worker: WorkerId, role: int) -> FakeWorker:
        self.workers[worker] = FakeWorker(worker, role, self.log)
        return self.workers[worker]

    def write(self, fence: Fence) -> None:
        self.log.append(("fence", fence))

    def count(self, name: str, amount: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + amount

    def all_ready(self) -> "House":
        for worker in self.workers:
            self.it.ready(worker)
        return self

    def session(self) -> tuple[Script, Box]:
        slot = self.slots.take()
        assert slot is not None
        script, box = Script(*slot), Box()
        self.it.open(script, self.spec.name, box)
        return script, box

    def make(self, script: Script, *effects: Effect) -> None:
        """Have the session want these effects."""
        script.answers.setdefault(Heartbeat, []).append(list(effects))
        self.it.tell(script, Heartbeat())
        script.told = [told for told in script.told if not isinstance(told, Heartbeat)]

    def did(self, *kinds: str) -> list[tuple[Any, ...]]:
        """What workers were asked since the last look, in order; ("fence", ...) for fence writes."""
        mine = [entry for entry in self.log if (entry[0] if entry[0] == "fence" else entry[1]) in kinds]
        self.log.clear()
        return mine


def stages(*names: str) -> tuple[StageSpec, ...]:
    return tuple(StageSpec(name, "nowhere:Engine") for name in names)


CHAIN = PipelineSpec(
    "chain",
    stages("a", "b", "c"),
    edges=(EdgeSpec("a", "b"), EdgeSpec("b", "c", credits=3)),
    entries={"x": "a"},
    outputs={"mid": "b", "end": "c"},
)
WHOLE = replace(
    CHAIN, name="whole", edges=(EdgeSpec("a", "b", Handover.WHOLE), EdgeSpec("b", "c")), outputs={"end": "c"}
)
FAN_IN = replace(
    CHAIN, name="fan-in", edges=(EdgeSpec("a", "b"), EdgeSpec("a", "c"), EdgeSpec("b", "c")), outputs={"end": "c"}
)
ABORTS_OF_B_AND_C = ([("abort", "b"), ("abort", "c")], [("abort", "c"), ("abort", "b")])
APART = (("a",), ("b",), ("c",))
PAYLOAD = Payload("test", body=b"x")


def submit(script: Script, *outputs: str, turn: int = 1, epoch: int = 1, entry: str = "a", lane: int = 0) -> Submit:
    return Submit(script.stamp(turn, epoch, lane), entry, frozenset(outputs or ("c",)), PAYLOAD, NO_META)


@pytest.fixture
def house() -> House:
    return House(CHAIN, APART).all_ready()


def test_a_session_is_opened_on_a_replica_of_each_stage_and_its_rows_admit_its_first_epoch(house: House) -> None:
    script, _ = house.session()
    assert house.did("fence", "open_session") == [
        *(("fence", script.fence(lane=lane)) for lane in range(LANES)),
        (1, "open_session", "a", script.key),
        (2, "open_session", "b", script.key),
        (3, "open_session", "c", script.key),
    ]


def test_a_session_that_will_use_some_stages_is_opened_on_those_and_later_on_what_it_needs(house: House) -> None:
    slot = house.slots.take()
    assert slot is not None
    script = Script(*slot)
    house.it.open(script, "chain", Box(), stages=("a",))
    assert house.did("open_session") == [(1, "open_session", "a", script.key)]
    house.make(script, submit(script, "b"))
    assert house.did("open_session") == [(2, "open_session", "b", script.key)]


def test_a_session_is_refused_with_a_retry_time_and_nothing_done_while_a_stage_has_no_ready_replica() -> None:
    house = House(CHAIN, APART)
    house.it.ready(WorkerId(1))
    slot = house.slots.take()
    assert slot is not None
    with pytest.raises(UnavailableError) as refused:
        house.it.open(Script(*slot), "chain", Box())
    assert refused.value.stage == "b"
    assert refused.value.retry_after_s > 0
    assert house.did("open_session", "fence") == []
    house.slots.free(*slot)


def test_a_chain_is_expected_consumers_first_and_opened_at_its_entry_with_its_input(house: House) -> None:
    script, _ = house.session()
    house.did()
    house.make(script, submit(script, "b", "c"))
    stamp = script.stamp()
    client = Route(CLIENT, WorkerId(0), house.limits.client_credits)
    to_c = Route("c", WorkerId(3), 3, opens=Opening(AFTER, 2, (client,)))
    to_b = Route("b", WorkerId(2), house.limits.chunk_credits, opens=Opening(AFTER, 1, (to_c, client)))
    assert house.did("open_turn", "expect_turn") == [
        (3, "expect_turn", "c", stamp, client.credits),
        (2, "expect_turn", "b", stamp, client.credits),
        (1, "open_turn", "a", stamp, (to_b,), 1, PAYLOAD),
    ]


def test_a_stage_with_several_producers_is_opened_before_any_of_them() -> None:
    house = House(FAN_IN, APART).all_ready()
    script, _ = house.session()
    house.make(script, submit(script))
    third, first = house.did("open_turn")
    assert (third[:3], third[5]) == ((3, "open_turn", "c"), 2)
    assert (first[:3], [(route.receiver, bool(route.opens)) for route in first[4]]) == (
        (1, "open_turn", "a"),
        [("b", True), ("c", False)],
    )


def test_a_stage_that_its_producer_was_to_open_is_aborted_like_any_other(house: House) -> None:
    script, _ = house.session()
    house.make(script, submit(script))
    house.it.ended(WorkerId(1), "a", script.stamp(), Outcome.FAILED, "stage_error")
    assert [entry[1:3] for entry in house.did("abort")] in ABORTS_OF_B_AND_C
    house.it.ended(WorkerId(2), "b", script.stamp(), Outcome.INCOMPLETE, "aborted")
    house.it.ended(WorkerId(3), "c", script.stamp(), Outcome.INCOMPLETE, "aborted")
    house.clock.run(60)
    assert not any(worker.killed for worker in house.workers.values())


def test_stages_that_no_requested_output_needs_are_not_run(house: House) -> None:
    script, _ = house.session()
    house.make(script, submit(script, "b"))
    assert [entry[2] for entry in house.did("expect_turn", "open_turn")] == ["b", "a"]
    house.make(script, submit(script, "c", turn=2, entry="b"))
    assert [entry[2] for entry in house.did("expect_turn", "open_turn")] == ["c", "b"]


def test_a_turn_to_an_output_that_its_entry_does_not_reach_fails(house: House) -> None:
    script, _ = house.session()
    house.make(script, submit(script, "b", entry="c"))
    assert script.told == [StageEnded(script.stamp(), "c", Outcome.FAILED, "unroutable")]
    assert house.did("open_turn") == []


def test_outputs_and_ends_of_final_stages_reach_the_session_and_those_of_others_do_not(house: House) -> None:
    script, _ = house.session()
    house.make(script, submit(script))
    stamp = script.stamp()
    house.it.spoke(WorkerId(2), "b", stamp, PAYLOAD)
    house.it.spoke(WorkerId(3), "c", stamp, PAYLOAD)
    for worker, stage in ((1, "a"), (2, "b"), (3, "c")):
        house.it.ended(WorkerId(worker), stage, stamp, Outcome.DONE, "")
    assert script.told == [StageSpoke(stamp, "c", PAYLOAD), StageEnded(stamp, "c", Outcome.DONE)]
    assert house.counts == {"stale_outputs": 1}
    assert house.clock.armed == 0


def test_an_end_that_comes_with_the_last_output_is_told_with_it(house: House) -> None:
    script, _ = house.session()
    house.make(script, submit(script))
    stamp = script.stamp()
    for worker, stage in ((1, "a"), (2, "b")):
        house.it.ended(WorkerId(worker), stage, stamp, Outcome.DONE, "")
    house.it.spoke(WorkerId(3), "c", stamp, PAYLOAD, Outcome.INCOMPLETE, "max_output_tokens")
    assert script.told == [StageSpoke(stamp, "c", PAYLOAD, Outcome.INCOMPLETE, "max_output_tokens")]
    assert house.clock.armed == 0
    house.it.ended(WorkerId(3), "c", stamp, Outcome.DONE, "")
    assert house.counts == {"stale_ends": 1}


@pytest.mark.parametrize("with_output", [True, False])
def test_ends_that_come_through_a_later_stage_count_as_if_each_had_come_by_itself(
    house: House, with_output: bool
) -> None:
    script, _ = house.session()
    house.make(script, submit(script))
    stamp = script.stamp()
    through = tuple(End(WorkerId(worker), stage, Outcome.DONE, "") for worker, stage in ((1, "a"), (2, "b")))
    if with_output:
        house.it.spoke(WorkerId(3), "c", stamp, PAYLOAD, Outcome.DONE, "", through)
        assert script.told == [StageSpoke(stamp, "c", PAYLOAD, Outcome.DONE)]
    else:
        house.it.ended(WorkerId(3), "c", stamp, Outcome.DONE, "", through)
        assert script.told == [StageEnded(stamp, "c", Outcome.DONE)]
    assert house.did("abort") == [], "nothing of it is left"
    house.it.ended(WorkerId(1), "a", stamp, Outcome.DONE, "")
    assert house.counts == {"stale_ends": 1}, "the first report counted"


def test_a_failure_that_comes_through_a_later_stage_fails_the_turn(house: House) -> None:
    script, _ = house.session()
    house.make(script, submit(script))
    stamp = script.stamp()
    house.it.spoke(
        WorkerId(3), "c", stamp, PAYLOAD, Outcome.DONE, "", (End(WorkerId(1), "a", Outcome.FAILED, "stage_error"),)
    )
    assert script.told == [StageEnded(stamp, "a", Outcome.FAILED, "stage_error")]


def test_each_effect_is_performed_or_goes_to_the_mailbox(house: House) -> None:
    seen = {Emit, Hold, Unhold, Replace, SnapshotReady}
    assert house.it._acts.keys() | seen == set(get_args(Effect))
    assert not house.it._acts.keys() & seen


def test_an_end_that_comes_with_an_output_behind_a_hole_is_one_all_the_same(house: House) -> None:
    script, _ = house.session()
    house.make(script, submit(script))
    stamp = script.stamp()
    for worker, stage in ((1, "a"), (2, "b")):
        house.it.ended(WorkerId(worker), stage, stamp, Outcome.DONE, "")
    house.it.spoke(WorkerId(3), "c", stamp._replace(seq=1), PAYLOAD, Outcome.DONE)
    assert script.told == [StageEnded(stamp, "c", Outcome.FAILED, "output_lost")]
    assert house.clock.armed == 0  # nothing of the turn is waited for


def test_an_output_that_comes_twice_is_told_once(house: House) -> None:
    script, _ = house.session()
    house.make(script, submit(script))
    for seq in (0, 1, 1, 0, 2):
        house.it.spoke(WorkerId(3), "c", script.stamp()._replace(seq=seq), PAYLOAD)
    assert [told.stamp.seq for told in script.told if isinstance(told, StageSpoke)] == [0, 1, 2]
    assert house.counts == {"stale_outputs": 2}


def test_a_turn_with_a_hole_in_its_output_fails(house: House) -> None:
    script, _ = house.session()
    house.make(script, submit(script))
    house.it.spoke(WorkerId(3), "c", script.stamp()._replace(seq=1), PAYLOAD)
    assert script.told == [StageEnded(script.stamp(), "c", Outcome.FAILED, "output_lost")]


def test_a_failed_stage_fails_the_turn_once_and_the_others_are_aborted(house: House) -> None:
    script, _ = house.session()
    house.make(script, submit(script))
    house.it.ended(WorkerId(1), "a", script.stamp(), Outcome.FAILED, "stage_error")
    house.it.ended(WorkerId(2), "b", script.stamp(), Outcome.FAILED, "upstream")
    house.it.ended(WorkerId(3), "c", script.stamp(), Outcome.FAILED, "upstream")
    assert script.told == [StageEnded(script.stamp(), "a", Outcome.FAILED, "stage_error")]
    assert sorted(entry[2] for entry in house.did("abort")) == ["b", "c"]
    assert house.clock.armed == 0


def test_an_incomplete_end_of_a_final_stage_is_told_as_it_is(house: House) -> None:
    script, _ = house.session()
    house.make(script, submit(script))
    house.it.ended(WorkerId(3), "c", script.stamp(), Outcome.INCOMPLETE, "max_output_tokens")
    assert script.told == [StageEnded(script.stamp(), "c", Outcome.INCOMPLETE, "max_output_tokens")]


def test_producers_that_go_on_after_every_final_output_ended_are_stopped(house: House) -> None:
    script, _ = house.session()
    house.make(script, submit(script))
    house.it.ended(WorkerId(3), "c", script.stamp(), Outcome.DONE, "")
    assert sorted(entry[2] for entry in house.did("abort")) == ["a", "b"]


def test_a_fence_is_written_before_any_worker_hears_of_the_abort_and_the_terminal_comes_last(house: House) -> None:
    script, box = house.session()
    house.make(script, submit(script))
    house.did()
    box.on_take = lambda effects: house.log.append(("fence", effects))
    terminal = Emit("interrupted", 1)  # type: ignore[arg-type]
    house.make(script, RaiseFence(script.fence(2)), Abort(script.stamp()), terminal)
    done = house.did("fence", "abort")
    assert done[0] == ("fence", script.fence(2))
    assert {entry[1:3] for entry in done[1:4]} == {("abort", "a"), ("abort", "b"), ("abort", "c")}
    assert done[4:] == [("fence", [terminal])]


def test_nothing_of_a_fenced_turn_is_told_any_more(house: House) -> None:
    script, _ = house.session()
    house.make(script, submit(script))
    house.make(script, RaiseFence(script.fence(2)))
    house.it.spoke(WorkerId(3), "c", script.stamp(), PAYLOAD)
    house.it.ended(WorkerId(3), "c", script.stamp(), Outcome.DONE, "")
    assert script.told == []
    assert house.counts["stale_outputs"] == 1


def test_a_fence_of_one_lane_leaves_the_turns_of_the_others(house: House) -> None:
    script, _ = house.session()
    house.make(script, submit(script), submit(script, turn=2, lane=1))
    house.make(script, RaiseFence(script.fence(2, lane=1)))
    assert {entry[3].lane for entry in house.did("abort")} == {1}
    house.it.spoke(WorkerId(3), "c", script.stamp(), PAYLOAD)
    assert script.told == [StageSpoke(script.stamp(), "c", PAYLOAD)]


def test_a_worker_that_holds_an_aborted_turn_past_the_deadline_is_killed_and_replaced(house: House) -> None:
    script, _ = house.session()
    house.make(script, submit(script))
    house.make(script, RaiseFence(script.fence(2)), Abort(script.stamp()))
    for worker, stage in ((1, "a"), (3, "c")):
        house.it.ended(WorkerId(worker), stage, script.stamp(), Outcome.FAILED, "aborted")
    house.clock.run(1.9)
    assert not house.workers[WorkerId(2)].killed
    house.clock.run(0.2)
    assert [worker.worker for worker in house.workers.values() if worker.killed] == [2]
    assert script.told == [StageLost("b")]
    house.clock.run(1)
    assert house.workers[WorkerId(4)].role == house.workers[WorkerId(2)].role
    house.it.ready(WorkerId(4))
    assert house.did("open_session")[-1:] == [(4, "open_session", "b", script.key)]


def test_a_stage_whose_steps_may_take_long_may_hold_an_aborted_turn_that_long() -> None:
    stages = (StageSpec("a", "m:A"), StageSpec("b", "m:B", step_s=60.0))
    spec = PipelineSpec("slow", stages, {"x": "b"}, {"x": "a"}, (EdgeSpec("a", "b"),))
    house = House(spec, (("a",), ("b",))).all_ready()
    script, _ = house.session()
    house.make(script, Submit(script.stamp(), "a", frozenset({"b"}), PAYLOAD, {}))
    house.make(script, RaiseFence(script.fence(2)), Abort(script.stamp()))
    house.it.ended(WorkerId(1), "a", script.stamp(), Outcome.FAILED, "aborted")
    house.clock.run(59)
    assert not any(worker.killed for worker in house.workers.values())
    house.clock.run(2)
    assert [worker.worker for worker in house.workers.values() if worker.killed] == [2]


def test_workers_that_end_aborted_turns_in_time_live(house: House) -> None:
    script, _ = house.session()
    house.make(script, submit(script))
    house.make(script, RaiseFence(script.fence(2)), Abort(script.stamp()))
    for worker, stage in ((1, "a"), (2, "b"), (3, "c")):
        house.it.ended(WorkerId(worker), stage, script.stamp(), Outcome.FAILED, "aborted")
    house.clock.run(60)
    assert not any(worker.killed for worker in house.workers.values())
    assert script.told == []


def test_the_abort_deadline_holds_after_the_session_is_gone(house: House) -> None:
    script, _ = house.session()
    house.make(script, submit(script))
    house.make(script, Release("bye"))
    house.clock.run(3)
    assert sorted(worker.worker for worker in house.workers.values() if worker.killed) == [1, 2, 3]


def test_credit_of_the_client_side_reaches_the_stage_as_long_as_the_turn_counts(house: House) -> None:
    script, _ = house.session()
    house.make(script, submit(script), Credit(script.stamp(), "c", 2))
    assert house.did("credit") == [(3, "credit", "c", script.stamp(), 2)]
    house.make(script, RaiseFence(script.fence(2)), Credit(script.stamp(), "c", 2))
    assert house.did("credit") == []


def test_feeds_of_a_stage_go_to_its_replica_in_order(house: House) -> None:
    script, _ = house.session()
    first, second = Payload("audio", body=b"1"), Payload("audio", body=b"2")
    house.make(script, Feed("a", first), Feed("a", second))
    assert [entry[4] for entry in house.did("feed_session")] == [first, second]


def test_findings_reach_the_session_from_its_own_replica_only(house: House) -> None:
    script, _ = house.session()
    house.it.found(WorkerId(1), "a", script.key, PAYLOAD)
    house.it.found(WorkerId(2), "a", script.key, PAYLOAD)
    house.it.found(WorkerId(1), "a", session_key(7, 7), PAYLOAD)
    assert script.told == [StageFound("a", PAYLOAD)]
    assert house.counts == {"stale_findings": 2}


# -- timers ----------------------------------------------------------------------------------------------------------


def test_the_latest_wake_counts_and_one_timer_serves_them_all(house: House) -> None:
    script, _ = house.session()
    now = house.clock.now()
    house.make(script, Wake(now + NS_PER_S), Wake(now + 3 * NS_PER_S))
    assert house.clock.armed == 1
    house.clock.run(2)
    assert script.told == []
    house.clock.run(1)
    assert script.told == [Woke()]
    house.make(script, Wake(now + 9 * NS_PER_S), Wake(now + 5 * NS_PER_S))
    house.clock.run(2)
    assert script.told == [Woke(), Woke()]
    house.clock.run(20)
    assert script.told == [Woke(), Woke()]


def test_a_closed_session_is_not_woken(house: House) -> None:
    script, _ = house.session()
    house.make(script, Wake(house.clock.now() + NS_PER_S), Release("bye"))
    assert house.clock.armed == 0
    house.clock.run(2)
    assert script.told == []


# -- release ---------------------------------------------------------------------------------------------------------


def test_release_closes_every_stage_frees_the_slot_once_and_is_the_mailboxs_last_effect(house: House) -> None:
    script, box = house.session()
    house.did()
    house.make(script, Hold(), Release("bye"))
    assert [entry[2] for entry in house.did("close_session")] == ["a", "b", "c"]
    assert box.effects == [Hold(), Release("bye")]
    assert (house.slots.taken, house.it.sessions) == (0, 0)
    house.it.close(script, "again")
    house.it.tell(script, Heartbeat())
    assert house.did("close_session") == []
    assert box.effects == [Hold(), Release("bye")]
    assert house.counts == {"stale_inputs": 1}


def test_after_a_release_the_rows_admit_nothing_of_the_old_session_and_a_new_one_has_another_generation() -> None:
    house = House(CHAIN, APART).all_ready()
    house.slots = house.it._slots = Slots(1)
    old, _ = house.session()
    house.did()
    house.it.close(old, "bye")
    for _, fence in house.did("fence"):
        assert not fence.admits(Stamp(fence.slot, old.generation, 1, 1))
    new, _ = house.session()
    assert new.slot == old.slot
    assert new.generation != old.generation
    house.it.found(WorkerId(1), "a", old.key, PAYLOAD)
    assert new.told == []


def test_a_close_from_outside_releases_too(house: House) -> None:
    script, box = house.session()
    house.it.close(script, "shutdown")
    assert box.effects == [Release("shutdown")]
    assert house.slots.taken == 0


# -- nothing nests ---------------------------------------------------------------------------------------------------


def test_an_input_from_inside_a_mailbox_call_is_handled_after_the_effects_at_hand(house: House) -> None:
    script, box = house.session()
    box.on_take = lambda effects: house.it.tell(script, Woke()) if effects == [Hold()] else None
    script.answers[Woke] = [[Count("woken")]]
    script.answers[Heartbeat] = [[Hold(), Feed("a", PAYLOAD), Count("fed")]]
    counted: list[str] = []
    house.it._counters.count = lambda name, amount=1: counted.append(name)  # type: ignore[method-assign]
    house.it.tell(script, Heartbeat())
    assert counted == ["fed", "woken"]


def test_a_report_from_inside_a_port_call_finds_the_turn_wholly_open(house: House) -> None:
    script, _ = house.session()
    worker = house.workers[WorkerId(3)]
    worker.on_open = lambda stage, stamp: house.it.ended(WorkerId(3), stage, stamp, Outcome.FAILED, "stage_error")
    house.make(script, submit(script))
    assert [entry[1:3] for entry in house.did("expect_turn", "open_turn", "abort")][:3] == [
        ("expect_turn", "c"),
        ("expect_turn", "b"),
        ("open_turn", "a"),
    ]
    assert len(script.told) == 1


def test_what_waits_behind_a_session_that_raises_is_done_all_the_same(house: House) -> None:
    script, box = house.session()
    other, _ = house.session()

    def call_and_raise(effects: list[Effect]) -> None:
        house.it.tell(other, Woke())
        raise RuntimeError("poison")

    box.on_take = call_and_raise
    with pytest.raises(RuntimeError, match="poison"):
        house.make(script, Hold())
    assert other.told == []
    house.clock.run(0)
    assert other.told == [Woke()]


# -- whole edges -----------------------------------------------------------------------------------------------------


def test_the_receiver_of_a_whole_edge_is_opened_when_its_producer_has_ended_and_then_gets_everything() -> None:
    house = House(WHOLE, APART).all_ready()
    script, _ = house.session()
    house.make(script, submit(script))
    opened = house.did("open_turn")
    assert [entry[2] for entry in opened] == ["a"]
    assert opened[0][4][0].whole
    house.it.ended(WorkerId(1), "a", script.stamp(), Outcome.DONE, "")
    done = house.did("expect_turn", "open_turn", "forward")
    assert [entry[1:3] for entry in done] == [("expect_turn", "c"), ("open_turn", "b"), ("forward", "a")]
    assert done[2][4] == Route("b", WorkerId(2), house.limits.chunk_credits, True)


def test_a_receiver_that_died_before_its_producer_ended_costs_the_turn_nothing() -> None:
    house = House(WHOLE, APART, replicas=2).all_ready()
    script, _ = house.session()
    house.make(script, submit(script))
    (bound_b,) = [entry[0] for entry in house.did("open_session") if entry[2] == "b"]
    house.it.exited(bound_b, "crashed")
    assert script.told == [StageLost("b")]
    house.it.ended(WorkerId(1), "a", script.stamp(), Outcome.DONE, "")
    opened = [entry for entry in house.did("open_turn") if entry[2] == "b"]
    assert opened[0][0] != bound_b
    assert script.told == [StageLost("b")]


def test_a_whole_edge_without_a_ready_receiver_fails_the_turn() -> None:
    house = House(WHOLE, APART).all_ready()
    script, _ = house.session()
    house.make(script, submit(script))
    house.it.exited(WorkerId(2), "crashed")
    house.it.ended(WorkerId(1), "a", script.stamp(), Outcome.DONE, "")
    assert script.told == [StageLost("b"), StageEnded(script.stamp(), "b", Outcome.FAILED, "replica_unavailable")]
    assert house.did("forward") == []


# -- replicas die ----------------------------------------------------------------------------------------------------


def test_a_dead_replica_costs_its_sessions_the_running_turn_and_they_go_on_with_another() -> None:
    house = House(CHAIN, APART, replicas=2).all_ready()
    script, _ = house.session()
    other, _ = house.session()
    house.make(script, submit(script))
    house.make(other, submit(other))
    homes = {entry[3]: entry[0] for entry in house.did("open_session") if entry[2] == "b"}
    assert homes[script.key] != homes[other.key]
    house.it.exited(homes[script.key], "crashed")
    assert script.told == [StageLost("b"), StageEnded(script.stamp(), "b", Outcome.FAILED, "replica_lost")]
    assert other.told == []
    done = house.did("open_session", "abort")
    assert done[0] == (homes[other.key], "open_session", "b", script.key)
    assert sorted(entry[1:3] for entry in done[1:]) == [("abort", "a"), ("abort", "c")]
    house.make(script, submit(script, turn=2, epoch=1))
    assert (homes[other.key], "b") in [entry[0:3:2] for entry in house.did("expect_turn")]


def test_a_turn_that_the_session_fences_when_it_hears_of_the_loss_is_not_failed_again() -> None:
    house = House(CHAIN, APART, replicas=2).all_ready()
    script, _ = house.session()
    house.make(script, submit(script))
    script.answers[StageLost] = [[RaiseFence(script.fence(2)), Abort(script.stamp())]]
    (home,) = [entry[0] for entry in house.did("open_session") if entry[2] == "b"]
    house.it.exited(home, "crashed")
    assert script.told == [StageLost("b")]


def test_fused_stages_are_bound_and_lost_together() -> None:
    house = House(CHAIN, (("a",), ("b", "c")), replicas=2).all_ready()
    for _ in range(3):
        house.session()
    script, _ = house.session()
    homes = {entry[2]: entry[0] for entry in house.did("open_session") if entry[3] == script.key}
    assert homes["b"] == homes["c"]
    house.make(script, submit(script))
    house.it.exited(homes["b"], "crashed")
    assert script.told == [
        StageLost("b"),
        StageLost("c"),
        StageEnded(script.stamp(), "c", Outcome.FAILED, "replica_lost"),
    ]


def test_reports_of_a_dead_worker_are_dropped_and_counted(house: House) -> None:
    script, _ = house.session()
    house.make(script, submit(script))
    house.it.exited(WorkerId(3), "crashed")
    script.told.clear()
    house.it.spoke(WorkerId(3), "c", script.stamp(), PAYLOAD)
    house.it.ended(WorkerId(3), "c", script.stamp(), Outcome.DONE, "")
    house.it.found(WorkerId(3), "c", script.key, PAYLOAD)
    house.it.ready(WorkerId(3))
    house.it.exited(WorkerId(3), "crashed again")
    house.it.load(WorkerId(3), "c", Load(1, 1, 1, 1, 1))
    assert script.told == []
    assert house.counts == {"workers_lost": 1, "stale_outputs": 1, "stale_ends": 1, "stale_findings": 1}


def test_work_for_a_stage_without_a_replica_waits_in_order_until_one_is_ready(house: House) -> None:
    script, _ = house.session()
    house.it.exited(WorkerId(2), "crashed")
    house.did()
    context = Payload("context", body=bytearray(b"hello"))
    house.make(script, Feed("b", context), submit(script), Feed("a", PAYLOAD))
    assert house.did("feed_session", "open_turn") == []
    house.clock.run(1)
    house.it.ready(WorkerId(4))
    done = house.did("open_session", "feed_session", "expect_turn", "open_turn")
    assert [entry[:3] for entry in done] == [
        (4, "open_session", "b"),
        (4, "feed_session", "b"),
        (3, "expect_turn", "c"),
        (4, "expect_turn", "b"),
        (1, "open_turn", "a"),
        (1, "feed_session", "a"),
    ]
    assert script.told == [StageLost("b")]


def test_work_that_touches_no_vacant_stage_does_not_wait(house: House) -> None:
    script, _ = house.session()
    house.it.exited(WorkerId(3), "crashed")
    house.did()
    house.make(script, Feed("a", PAYLOAD), submit(script, "b"))
    done = house.did("feed_session", "expect_turn", "open_turn")
    assert [entry[1] for entry in done] == ["feed_session", "expect_turn", "open_turn"]


def test_work_that_waited_too_long_fails_and_the_stage_is_lost_again_when_it_is_back(house: House) -> None:
    script, _ = house.session()
    house.it.exited(WorkerId(2), "crashed")
    house.make(script, Feed("b", PAYLOAD), submit(script))
    house.clock.run(10.1)
    failed = StageEnded(script.stamp(), "a", Outcome.FAILED, "replica_unavailable")
    assert script.told == [StageLost("b"), failed]
    assert house.counts["feeds_lost"] == 1
    house.it.ready(WorkerId(4))
    assert script.told == [StageLost("b"), failed, StageLost("b")]


def test_a_fenced_turn_that_waits_is_never_started(house: House) -> None:
    script, _ = house.session()
    house.it.exited(WorkerId(2), "crashed")
    house.make(script, submit(script))
    house.make(script, RaiseFence(script.fence(2)), Abort(script.stamp()))
    house.clock.run(1)
    house.it.ready(WorkerId(4))
    assert house.did("open_turn") == []
    assert script.told == [StageLost("b")]


def test_a_large_payload_is_never_kept(house: House) -> None:
    script, _ = house.session()
    house.it.exited(WorkerId(1), "crashed")
    large = Payload("image", body=bytes(4097))
    house.make(script, Feed("a", large), replace(submit(script), payload=large))
    assert house.counts["feeds_lost"] == 1
    assert script.told == [
        StageLost("a"),
        StageEnded(script.stamp(), "a", Outcome.FAILED, "replica_unavailable"),
    ]


def test_what_waits_is_bounded() -> None:
    house = House(CHAIN, APART, limits=Limits(replica_wait_items=2)).all_ready()
    script, _ = house.session()
    house.it.exited(WorkerId(1), "crashed")
    house.make(script, *[Feed("a", PAYLOAD)] * 5)
    assert house.counts["feeds_lost"] == 3


def test_a_session_that_closes_while_it_waits_is_not_opened_anywhere(house: House) -> None:
    script, _ = house.session()
    house.it.exited(WorkerId(2), "crashed")
    house.make(script, submit(script))
    house.make(script, Release("bye"))
    house.clock.run(1)
    house.did()
    house.it.ready(WorkerId(4))
    house.clock.run(30)
    assert house.did("open_session", "open_turn") == []


# -- the core's own mistakes -----------------------------------------------------------------------------------------


def test_a_turn_of_another_session_is_refused_loudly(house: House) -> None:
    script, _ = house.session()
    other, _ = house.session()
    with pytest.raises(IllegalEffectError):
        house.make(script, submit(other))


def test_a_turn_is_never_opened_twice(house: House) -> None:
    script, _ = house.session()
    house.make(script, submit(script))
    with pytest.raises(IllegalEffectError):
        house.make(script, submit(script))


def test_drain_asks_every_session(house: House) -> None:
    script, _ = house.session()
    other, _ = house.session()
    house.it.drain(42)
    assert script.told == other.told == [DrainAsked(42)]
