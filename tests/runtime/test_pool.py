"""Pools: who is chosen, who is replaced and when, who is counted as ready. Workers and time are faked."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from omni_live.config.deploy import Balance
from omni_live.config.plan import Plan, PoolPlan, WorkerPlan
from omni_live.engines.contract import Load
from omni_live.pipelines.spec import PipelineSpec, StageSpec
from omni_live.runtime.pool import MOVES, Cue, IllegalMoveError, Pool, Pools, Replica, State
from omni_live.runtime.ports import NoTrace, WorkerId, WorkerPort
from omni_live.runtime.slots import LAST_GENERATION, SlotError, Slots
from omni_live.runtime.supervision import Breaker
from omni_live.sessions.limits import Limits
from omni_live.sessions.stamp import SessionKey

NS_PER_S = 1_000_000_000


@dataclass
class Alarm:
    call: Callable[[], None] | None

    def cancel(self) -> None:
        self.call = None


@dataclass
class ManualClock:
    now_ns: int = 0
    heap: list[tuple[int, int, Alarm]] = field(default_factory=list)

    def now(self) -> int:
        return self.now_ns

    def call_at(self, at_ns: int, call: Callable[[], None]) -> Alarm:
        alarm = Alarm(call)
        heapq.heappush(self.heap, (at_ns, len(self.heap), alarm))
        return alarm

    def run(self, seconds: float) -> None:
        end = self.now_ns + round(seconds * NS_PER_S)
        while self.heap and self.heap[0][0] <= end:
            self.now_ns, _, alarm = heapq.heappop(self.heap)
            if alarm.call is not None:
                alarm.call()
        self.now_ns = end


class FakePort:
    def __init__(self) -> None:
        self.killed = self.drained = False

    def kill(self) -> None:
        self.killed = True

    def drain(self) -> None:
        self.drained = True


SPEC = PipelineSpec(
    "p", (StageSpec("a", "x:Y"), StageSpec("b", "x:Y"), StageSpec("c", "x:Y")), outputs={"c": "c"}, entries={"a": "a"}
)


class Town:
    """Two pools: stage a alone with `replicas` workers, b and c fused with one."""

    def __init__(
        self, replicas: int = 2, balance: Balance = Balance.LEAST_LOADED, limits: Limits | None = None
    ) -> None:
        a, b, c = SPEC.stages
        workers = (*(WorkerPlan(role, "p", (a,)) for role in range(replicas)), WorkerPlan(replicas, "p", (b, c)))
        pools = (
            PoolPlan("p", ("a",), tuple(range(replicas)), balance),
            PoolPlan("p", ("b", "c"), (replicas,), balance),
        )
        self.clock = ManualClock()
        self.ports: dict[WorkerId, FakePort] = {}
        self.roles: dict[WorkerId, int] = {}
        self.pools = Pools(Plan((SPEC,), workers, pools, limits or Limits()), self, self.clock, NoTrace())
        self.pools.start()

    def spawn(self, worker: WorkerId, role: int) -> WorkerPort:
        self.ports[worker] = FakePort()
        self.roles[worker] = role
        return self.ports[worker]  # type: ignore[return-value]

    @property
    def a(self) -> Pool:
        return self.pools.pool("p", "a")

    def ready(self, *workers: int) -> "Town":
        for worker in workers:
            self.pools.ready(WorkerId(worker))
        return self

    def bind(self, key: int) -> int:
        replica = self.a.bind(SessionKey(key))
        assert replica is not None
        return replica.worker

    def crash(self, worker: int) -> Replica | None:
        return self.pools.lost(WorkerId(worker))


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("cue", Cue)
def test_a_replica_moves_by_the_table_and_in_no_other_way(state: State, cue: Cue) -> None:
    replica = Town().a.replicas().__next__()
    replica.state = state
    if (state, cue) in MOVES:
        replica.follow(cue)
        assert replica.state is MOVES[state, cue]
    else:
        with pytest.raises(IllegalMoveError):
            replica.follow(cue)
        assert replica.state is state


def test_the_whole_is_ready_when_every_stage_has_a_ready_replica() -> None:
    town = Town()
    assert town.pools.unready() == (("p", "a"), ("p", "b"), ("p", "c"))
    town.ready(1)
    assert not town.pools.is_ready()
    assert town.pools.unready() == (("p", "b"), ("p", "c"))
    town.ready(3)
    assert town.pools.is_ready()


def test_fused_stages_are_one_pool() -> None:
    town = Town()
    assert town.pools.pool("p", "b") is town.pools.pool("p", "c")
    assert town.roles == {1: 0, 2: 1, 3: 2}


def test_round_robin_takes_the_ready_ones_in_turn() -> None:
    town = Town(replicas=3, balance=Balance.ROUND_ROBIN).ready(1, 3)
    assert [town.bind(key) for key in range(4)] == [1, 3, 1, 3]


def test_least_loaded_looks_at_sessions_first_and_then_at_what_the_workers_report() -> None:
    town = Town().ready(1, 2)
    assert [town.bind(1), town.bind(2)] == [1, 2]
    busy = town.pools.replica(WorkerId(1))
    assert busy is not None
    busy.loads["a"] = Load(sessions=1, turns=1, queued=3, bytes_used=0, bytes_cap=0)
    assert town.bind(3) == 2
    assert town.bind(4) == 1


def test_no_ready_replica_binds_nobody() -> None:
    assert Town().a.bind(SessionKey(1)) is None


def test_a_crashed_worker_is_replaced_after_its_back_off_by_one_with_its_role_and_a_new_id() -> None:
    town = Town().ready(1, 2, 3)
    lost = town.crash(1)
    assert lost is not None
    assert lost.state is State.DEAD
    assert len(town.ports) == 3
    town.clock.run(0.25)
    assert town.roles[WorkerId(4)] == 0
    town.ready(4)
    assert town.pools.replica(WorkerId(4)) is not None


def test_a_worker_is_lost_once() -> None:
    town = Town().ready(1, 2, 3)
    assert town.crash(1) is not None
    assert town.crash(1) is None
    town.clock.run(5)
    assert len(town.ports) == 4


def test_a_ready_of_a_dead_or_ready_worker_changes_nothing() -> None:
    town = Town().ready(1)
    assert town.pools.ready(WorkerId(1)) is None
    town.crash(1)
    assert town.pools.ready(WorkerId(1)) is None
    assert town.pools.ready(WorkerId(99)) is None


def crash_over_budget(town: Town) -> None:
    """The single fused worker of b and c crashes until nobody starts it any more."""
    fused = 2
    for _ in range(6):
        town.crash(fused)
        town.clock.run(8)
        fused = max(town.ports)


def test_a_stage_that_keeps_crashing_is_given_up_and_then_probed() -> None:
    town = Town(replicas=1).ready(1, 2)
    crash_over_budget(town)
    b = town.pools.pool("p", "b")
    started = len(town.ports)
    assert b.supervision.breaker is Breaker.OPEN
    assert town.pools.open_breakers() == (("p", "b"), ("p", "c"))
    assert not town.pools.is_ready()
    assert 0 < b.retry_after_s() <= 30
    town.clock.run(15)
    assert len(town.ports) == started
    town.clock.run(15)
    assert len(town.ports) == started + 1
    assert b.supervision.breaker is Breaker.HALF_OPEN
    town.ready(max(town.ports))
    assert town.pools.open_breakers() == ()
    assert town.pools.is_ready()


def test_a_probe_that_crashes_gives_the_stage_up_again() -> None:
    town = Town(replicas=1).ready(1, 2)
    crash_over_budget(town)
    town.clock.run(30)
    started = len(town.ports)
    town.crash(max(town.ports))
    town.clock.run(29)
    assert len(town.ports) == started
    town.clock.run(1)
    assert len(town.ports) == started + 1


def test_a_ready_probe_brings_back_its_siblings_too() -> None:
    town = Town(replicas=2, limits=Limits(restarts=1, breaker_s=30)).ready(1, 2, 3)
    town.crash(1)
    town.crash(2)
    town.clock.run(29)
    assert len(town.ports) == 3
    town.clock.run(2)
    assert len(town.ports) == 4
    town.ready(4)
    assert sorted(replica.role for replica in town.a.replicas()) == [0, 1]


def test_a_replica_that_keeps_crashing_does_not_close_its_healthy_sibling() -> None:
    town = Town(replicas=2, limits=Limits(restarts=0)).ready(1, 2, 3)
    town.crash(1)
    assert town.a.supervision.breaker is Breaker.OPEN
    assert town.a.is_ready
    assert town.bind(1) == 2


def test_a_worker_that_does_not_get_ready_in_time_is_killed() -> None:
    town = Town(limits=Limits(start_timeout_s=5)).ready(1, 2)
    town.clock.run(6)
    assert [worker for worker, port in town.ports.items() if port.killed] == [3]


def test_draining_takes_no_new_sessions_and_replaces_nothing() -> None:
    town = Town().ready(1, 2, 3)
    town.pools.drain()
    assert all(port.drained for port in town.ports.values())
    assert town.a.bind(SessionKey(1)) is None
    town.crash(1)
    town.clock.run(60)
    assert len(town.ports) == 3


def test_a_worker_that_is_ready_while_it_drains_stays_out() -> None:
    town = Town()
    town.pools.drain()
    assert town.pools.ready(WorkerId(1)) is None
    assert not town.a.is_ready


def test_stopping_kills_everything_and_starts_nothing() -> None:
    town = Town().ready(1, 2, 3)
    town.crash(1)
    town.pools.stop()
    town.crash(2)
    town.crash(3)
    town.clock.run(600)
    assert len(town.ports) == 3
    assert town.ports[WorkerId(2)].killed


# -- slots -----------------------------------------------------------------------------------------------------------


def test_exactly_the_cap_is_given_away() -> None:
    slots = Slots(3)
    taken = [slots.take() for _ in range(4)]
    assert taken[3] is None
    assert {slot.slot for slot in taken[:3] if slot is not None} == {0, 1, 2}
    assert slots.taken == 3


def test_a_slot_and_generation_is_never_given_away_twice() -> None:
    slots = Slots(2)
    seen = set()
    for _ in range(20):
        slot = slots.take()
        assert slot is not None
        assert slot not in seen
        assert slot.generation > 0
        seen.add(slot)
        slots.free(*slot)


def test_a_slot_is_freed_once_and_only_in_its_own_generation() -> None:
    slots = Slots(1)
    slot = slots.take()
    assert slot is not None
    slots.free(*slot)
    for wrong in (slot, (slot.slot, slot.generation + 1), (5, 1), (-1, 1)):
        with pytest.raises(SlotError):
            slots.free(*wrong)


def test_a_slot_whose_generations_are_used_up_is_retired() -> None:
    slots = Slots(1)
    slots._generations[0] = LAST_GENERATION - 1
    slot = slots.take()
    assert slot is not None
    slots.free(*slot)
    assert slots.take() is None
