"""Pools: the replicas of a stage, or of stages fused into one worker, and which sessions live on which.

A session stays on its replica for as long as both live: affinity is by session, never by epoch or request. Stages of
one pool share each of its workers, so a session is bound to all of them together. A replica that dies is replaced
under supervision (see supervision.py); the orchestrator moves its sessions.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from omni_live.config.deploy import Balance
from omni_live.config.plan import Plan, PoolPlan
from omni_live.engines.contract import Load
from omni_live.runtime.ports import Clock, Spawner, Timer, Trace, WorkerId, WorkerPort
from omni_live.runtime.supervision import NS_PER_S, Breaker, GiveUp, Supervision
from omni_live.sessions.limits import Limits
from omni_live.sessions.stamp import SessionKey

NO_SESSION = SessionKey(0)


class State(StrEnum):
    """Where a replica is in its life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class Cue(StrEnum):
    """What moves a replica on."""

    LOADED = "loaded"
    DRAIN = "drain"
    GONE = "gone"


MOVES: dict[tuple[State, Cue], State] = {
    (State.STARTING, Cue.LOADED): State.READY,
    (State.STARTING, Cue.DRAIN): State.DRAINING,
    (State.STARTING, Cue.GONE): State.DEAD,
    (State.READY, Cue.DRAIN): State.DRAINING,
    (State.READY, Cue.GONE): State.DEAD,
    (State.DRAINING, Cue.LOADED): State.DRAINING,  # told to drain while it was loading
    (State.DRAINING, Cue.DRAIN): State.DRAINING,
    (State.DRAINING, Cue.GONE): State.DEAD,
}
"""Every legal move. Nothing leads out of DEAD: a replacement is a new replica with a new worker id."""


class IllegalMoveError(RuntimeError):
    """A replica was told something that its state does not allow; a bug of ours."""


@dataclass(slots=True, eq=False)
class Replica:
    """One worker of a pool, from its start to its death."""

    worker: WorkerId
    role: int
    port: WorkerPort
    pool: "Pool"
    state: State = State.STARTING
    sessions: set[SessionKey] = field(default_factory=set)
    """Sessions bound to it. Kept by the pool."""
    loads: dict[str, Load] = field(default_factory=dict)
    """The latest report of each stage."""

    def follow(self, cue: Cue) -> None:
        """Raises IllegalMoveError where the table has no such move."""
        try:
            self.state = MOVES[self.state, cue]
        except KeyError:
            raise IllegalMoveError(f"a {self.state} replica cannot take {cue}") from None

    def burden(self) -> tuple[int, int, int]:
        """What least_loaded compares: sessions bound, turns under way and waiting, bytes kept."""
        loads = self.loads.values()
        return (
            len(self.sessions),
            sum(load.turns + load.queued for load in loads),
            sum(load.bytes_used for load in loads),
        )


class Pool:
    """The replicas of one stage (or of stages fused together), kept alive and chosen from."""

    def __init__(
        self,
        plan: PoolPlan,
        spawn: Callable[["Pool", int], Replica],
        clock: Clock,
        limits: Limits,
        trace: Trace,
    ) -> None:
        self.plan = plan
        self.supervision = Supervision(limits)
        self._spawn = spawn
        self._clock = clock
        self._limits = limits
        self._trace = trace
        self._places: dict[int, Replica | None] = dict.fromkeys(plan.roles)
        self._timers: dict[int, Timer] = {}
        """By role: a start that may take too long, or a restart that is due."""
        self._probe: Timer | None = None
        self._turn = 0
        self._stopping = False

    def start(self) -> None:
        """Start a replica for every role that has none."""
        for role, replica in self._places.items():
            if replica is None and role not in self._timers:
                self._start(role)

    def replicas(self) -> Iterator[Replica]:
        return (replica for replica in self._places.values() if replica is not None)

    @property
    def is_ready(self) -> bool:
        """True while some replica takes new sessions. One that keeps crashing does not close its healthy siblings."""
        return any(replica.state is State.READY for replica in self.replicas())

    def retry_after_s(self) -> float:
        """What a refused client is told."""
        return self.supervision.retry_after_s(self._clock.now())

    def bind(self, session: SessionKey) -> Replica | None:
        """Choose a replica for the session; None where none is ready. The caller remembers it: affinity is its hold."""
        ready = [replica for replica in self.replicas() if replica.state is State.READY]
        if not ready:
            return None
        if self.plan.balance is Balance.ROUND_ROBIN:
            chosen = ready[self._turn % len(ready)]
            self._turn += 1
        else:
            chosen = min(ready, key=Replica.burden)
        chosen.sessions.add(session)
        return chosen

    def loaded(self, replica: Replica) -> bool:
        """The replica's worker says that it is ready; True where it takes sessions from now on."""
        replica.follow(Cue.LOADED)
        self._cancel(replica.role)
        if replica.state is not State.READY:
            return False
        if self.supervision.recovered():
            self._trace.note("breaker_closed", NO_SESSION, self.plan.stages)
            self.start()
        return True

    def drain(self) -> None:
        """Take no new sessions, replace nothing from now on, and let the workers end when they have nothing left."""
        self._stopping = True
        self._cancel_all()
        for replica in self.replicas():
            replica.follow(Cue.DRAIN)
            replica.port.drain()

    def stop(self) -> None:
        """End every worker now."""
        self._stopping = True
        self._cancel_all()
        for replica in self.replicas():
            replica.port.kill()

    def gone(self, replica: Replica) -> None:
        """The replica's worker ended, or is as good as dead; a replacement follows unless it was told to drain."""
        told_to = replica.state is State.DRAINING
        replica.follow(Cue.GONE)
        self._places[replica.role] = None
        self._cancel(replica.role)
        if told_to or self._stopping:
            return
        match self.supervision.crashed(self._clock.now()):
            case GiveUp(until_ns):
                self._give_up(until_ns)
            case restart:
                self._trace.note("restart_due", NO_SESSION, (replica.role, restart.at_ns))
                self._timers[replica.role] = self._clock.call_at(restart.at_ns, partial(self._restart, replica.role))

    def _give_up(self, until_ns: int) -> None:
        if self._probe is not None:
            return
        self._trace.note("breaker_opened", NO_SESSION, (self.plan.stages, until_ns))
        for role, replica in self._places.items():
            if replica is None:
                self._cancel(role)
        self._probe = self._clock.call_at(until_ns, self._start_probe)

    def _start_probe(self) -> None:
        self._probe = None
        self.supervision.probing()
        for role, replica in self._places.items():
            if replica is None:
                self._start(role)
                return

    def _restart(self, role: int) -> None:
        del self._timers[role]
        self._start(role)

    def _start(self, role: int) -> None:
        replica = self._places[role] = self._spawn(self, role)
        self._trace.note("started", NO_SESSION, (role, replica.worker))
        late_ns = self._clock.now() + int(self._limits.start_timeout_s * NS_PER_S)
        self._timers[role] = self._clock.call_at(late_ns, partial(self._start_lapsed, replica))

    def _start_lapsed(self, replica: Replica) -> None:
        # Its exit follows the kill and is what counts as the crash.
        self._trace.note("start_lapsed", NO_SESSION, replica.worker)
        del self._timers[replica.role]
        replica.port.kill()

    def _cancel(self, role: int) -> None:
        timer = self._timers.pop(role, None)
        if timer is not None:
            timer.cancel()

    def _cancel_all(self) -> None:
        for role in self._places:
            self._cancel(role)
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None


class Pools:
    """All pools of a server: who hosts what, and which worker is which replica."""

    def __init__(self, plan: Plan, spawner: Spawner, clock: Clock, trace: Trace) -> None:
        self._spawner = spawner
        self._last_worker = 0
        self._replicas: dict[WorkerId, Replica] = {}
        self._pools = [Pool(pool, self._spawn, clock, plan.limits, trace) for pool in plan.pools]
        self._by_stage = {(pool.plan.pipeline, stage): pool for pool in self._pools for stage in pool.plan.stages}

    def start(self) -> None:
        """Start every worker of the plan."""
        for pool in self._pools:
            pool.start()

    def pool(self, pipeline: str, stage: str) -> Pool:
        return self._by_stage[pipeline, stage]

    def replica(self, worker: WorkerId) -> Replica | None:
        """None where the worker is dead or was never ours: its report is stale."""
        return self._replicas.get(worker)

    def ready(self, worker: WorkerId) -> Replica | None:
        """The replica, where it takes sessions from now on."""
        replica = self._replicas.get(worker)
        if replica is None or replica.state is State.READY or not replica.pool.loaded(replica):
            return None
        return replica

    def lost(self, worker: WorkerId) -> Replica | None:
        """The worker ended or is wedged: forget it and see to a replacement. None where that was done before."""
        replica = self._replicas.pop(worker, None)
        if replica is not None:
            replica.pool.gone(replica)
        return replica

    def is_ready(self) -> bool:
        """Readiness of the whole: every stage has a ready replica."""
        return all(pool.is_ready for pool in self._pools)

    def unready(self) -> tuple[tuple[str, str], ...]:
        """(pipeline, stage) of everything without a ready replica."""
        return tuple(
            (pool.plan.pipeline, stage) for pool in self._pools if not pool.is_ready for stage in pool.plan.stages
        )

    def open_breakers(self) -> tuple[tuple[str, str], ...]:
        """(pipeline, stage) of everything that crashed too often."""
        return tuple(
            (pool.plan.pipeline, stage)
            for pool in self._pools
            if pool.supervision.breaker is not Breaker.CLOSED
            for stage in pool.plan.stages
        )

    def replicas(self) -> tuple[Replica, ...]:
        return tuple(self._replicas.values())

    def drain(self) -> None:
        """Take no new sessions and replace nothing."""
        for pool in self._pools:
            pool.drain()

    def stop(self) -> None:
        """End every worker now."""
        for pool in self._pools:
            pool.stop()

    def _spawn(self, pool: Pool, role: int) -> Replica:
        self._last_worker += 1
        worker = WorkerId(self._last_worker)
        replica = Replica(worker, role, self._spawner.spawn(worker, role), pool)
        self._replicas[worker] = replica
        return replica
