"""The orchestrator: performs what sessions decide and tells them what their workers report.

It decides three things only: which stage comes next, on which replica, and whether an output goes to the client,
onward, or both. It never waits and holds no payload over `KEPT_BYTES` beyond a call. Whatever calls it from inside
one of its own calls is queued and done after (`_run`), so that nothing nests and every order below is a plain one.

What a report is worth depends on two tables: `_bound` (sessions) and `_turns` (open turns, those that are being
aborted included). A report that finds no entry, or one of another worker, is counted and dropped; nothing here is
ever made by a report (G5). A turn leaves `_turns` when each of its opened stages has ended or died, which every
worker must see to within the abort deadline (see `_abort`).
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, ParamSpec, Protocol

from omni_live.config.plan import Plan
from omni_live.engines.contract import Load
from omni_live.pipelines.spec import EdgeSpec, Handover
from omni_live.runtime.dag import Course, Dag, Step, UnroutableError
from omni_live.runtime.pool import Pool, Pools, Replica
from omni_live.runtime.ports import (
    CLIENT,
    Clock,
    Counters,
    End,
    Fences,
    Mailbox,
    NoTrace,
    Opening,
    Route,
    Spawner,
    Timer,
    Trace,
    WorkerId,
)
from omni_live.runtime.slots import Slots
from omni_live.sessions.effects import (
    Abort,
    Count,
    Credit,
    Effect,
    Feed,
    RaiseFence,
    Release,
    Restore,
    Submit,
    TakeSnapshot,
    Wake,
)
from omni_live.sessions.inputs import (
    DrainAsked,
    Input,
    Outcome,
    StageEnded,
    StageFound,
    StageLost,
    StageSnapshotted,
    StageSpoke,
    Woke,
)
from omni_live.sessions.payload import NO_META, Payload, Scalar
from omni_live.sessions.stamp import LANES, Fence, SessionKey, Stamp, session_key

KEPT_BYTES = 4096
"""A payload that must wait for a replica is kept up to this size."""

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

_UNSEEN: Final = frozenset({Credit, Wake, Count})
"""Effects that a client cannot see, before which nothing needs to go out."""

SERVER = WorkerId(0)
"""Stands for the server's own process in a route to CLIENT."""


class UnavailableError(RuntimeError):
    """A stage has no ready replica: the session is refused, with a time after which asking again makes sense."""

    def __init__(self, stage: str, retry_after_s: float) -> None:
        super().__init__(f"stage {stage!r} has no ready replica")
        self.stage = stage
        self.retry_after_s = retry_after_s


class IllegalEffectError(RuntimeError):
    """A session wants what it must not want; a bug of the core."""


class SessionCore(Protocol):
    """What the orchestrator needs of a session (sessions.session.Session)."""

    @property
    def slot(self) -> int: ...
    @property
    def generation(self) -> int: ...
    def handle(self, told: Input, now_ns: int, /) -> list[Effect]: ...


_Given = ParamSpec("_Given")
TurnKey = tuple[int, ...]
"""A stamp's slot, generation, epoch and turn."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An effect that needs a stage without a ready replica, or must stay behind one that does."""

    stages: frozenset[str]
    effect: Submit | Feed


@dataclass(frozen=True, slots=True)
class _Line:
    """A pipeline as the orchestrator walks it."""

    name: str
    dag: Dag
    pools: Mapping[str, Pool]
    steps_ms: Mapping[str, float]
    """Stage -> the longest that a step of it may take."""


@dataclass(slots=True, eq=False)
class _Bound:
    """A session and where its stages live."""

    session: SessionCore
    key: SessionKey
    line: _Line
    mailbox: Mailbox
    params: Mapping[str, Scalar]
    seats: dict[str, Replica] = field(default_factory=dict)
    """Stage -> replica that has the session open."""
    turns: dict[TurnKey, "_Turn"] = field(default_factory=dict)
    """Turns that may still tell the session something."""
    ways: dict[Course, "_Way"] = field(default_factory=dict)
    """How turns were opened; void when a stage moves."""
    epochs: list[int] = field(default_factory=lambda: [1] * LANES)
    wake_at: int = 0
    timer: Timer | None = None
    timer_at: int = 0
    vacant: set[str] = field(default_factory=set)
    """Stages that wait for a replica to be ready."""
    waiting: deque[_Waiting] = field(default_factory=deque)
    held: set[str] = field(default_factory=set)
    """Stages that `waiting` touches: later work for them queues up behind."""
    lossy: set[str] = field(default_factory=set)
    """Vacant stages of which input was dropped: what waits behind it is no longer worth running."""
    patience: Timer | None = None
    snapshots: dict[str, int] = field(default_factory=dict)
    """Stage -> ticket of the snapshot it was asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    """The routes of a turn, which are the next turn's, too, unless its workers were told something in between."""

    steps: tuple[Step, ...]
    afters: tuple[int, ...]
    routes: Mapping[str, tuple[Route, ...]]


@dataclass(slots=True, eq=False)
class _Part:
    """A stage of a turn, as opened."""

    replica: Replica
    spoken: int = 0
    """Outputs that reached the session; the next one's sequence number."""


@dataclass(slots=True, eq=False)
class _Turn:
    """A turn that some worker has open."""

    stamp: Stamp
    key: TurnKey
    bound: _Bound
    course: Course
    params: Mapping[str, Scalar]
    pending: set[str]
    """Stages whose end is not reported yet."""
    unfinished: set[str]
    """Final outputs of which the session was not told the end."""
    parts: dict[str, _Part] = field(default_factory=dict)
    over: bool = False
    """Nothing of it reaches the session any more."""
    deadline: Timer | None = None


class Orchestrator:
    """Performs effects; implements ports.Happenings."""

    def __init__(
        self,
        plan: Plan,
        spawner: Spawner,
        fences: Fences,
        clock: Clock,
        counters: Counters,
        slots: Slots,
        trace: Trace | None = None,
    ) -> None:
        self.pools = Pools(plan, spawner, clock, trace or NoTrace())
        self._limits = plan.limits
        self._fences = fences
        self._clock = clock
        self._counters = counters
        self._slots = slots
        self._trace: Trace = trace or NoTrace()
        self._is_traced = trace is not None
        self._lines = {
            spec.name: _Line(
                spec.name,
                Dag(spec),
                {stage: self.pools.pool(spec.name, stage) for stage in spec.stage_names},
                {stage.name: stage.step_s * 1000 for stage in spec.stages},
            )
            for spec in plan.pipelines
        }
        self._bound: dict[SessionKey, _Bound] = {}
        self._turns: dict[TurnKey, _Turn] = {}
        self._vacancies: set[SessionKey] = set()
        self._todo: deque[Callable[[], None]] = deque()
        self._running = False
        self._acts: Mapping[type[Effect], Callable[[_Bound, Any], None]] = {
            Submit: self._submit,
            Feed: self._feed,
            RaiseFence: self._raise,
            Abort: self._abort_stamped,
            TakeSnapshot: self._take_snapshot,
            Restore: self._restore,
            Release: self._release,
            Credit: self._credit,
            Wake: self._wake_asked,
            Count: self._count,
        }
        """Effects by type; what is not here goes to the mailbox."""

    # -- for doors and the server ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start every worker of the plan."""
        self.pools.start()

    def open(
        self,
        session: SessionCore,
        pipeline: str,
        mailbox: Mailbox,
        params: Mapping[str, Scalar] = NO_META,
        stages: Iterable[str] = (),
    ) -> None:
        """Bind the session to a replica of each stage and open it there.

        `stages` names those that will be used, if it is known (a one-shot call); the others are bound when they are
        first needed. The session's slot belongs to the orchestrator from here on; where this raises
        UnavailableError nothing has happened and the slot is still the caller's.
        """
        line = self._lines[pipeline]
        wanted = tuple(stages) or tuple(line.pools)
        for stage in wanted:
            if not line.pools[stage].is_ready:
                raise UnavailableError(stage, line.pools[stage].retry_after_s())
        key = session_key(session.slot, session.generation)
        bound = self._bound[key] = _Bound(session, key, line, mailbox, params)
        for lane in range(LANES):
            self._fences.write(Fence(session.slot * LANES + lane, session.generation))
        self._trace.note("open", key, pipeline)
        for stage in wanted:
            self._seat(bound, stage)

    def fork(self, parent: SessionCore, child: SessionCore, mailbox: Mailbox) -> None:
        """Bind `child` to the replicas of `parent` and copy there what each stage keeps of it.

        Raises UnavailableError where `parent` is not open; the child's slot is still the caller's then.
        """
        origin = self._bound.get(session_key(parent.slot, parent.generation))
        if origin is None:
            raise UnavailableError("", 0.0)
        key = session_key(child.slot, child.generation)
        bound = self._bound[key] = _Bound(child, key, origin.line, mailbox, origin.params)
        for lane in range(LANES):
            self._fences.write(Fence(child.slot * LANES + lane, child.generation))
        self._trace.note("fork", key, origin.key)
        for stage, replica in origin.seats.items():
            bound.seats[stage] = replica
            replica.sessions.add(key)
            replica.port.fork(stage, origin.key, key)

    def tell(self, session: SessionCore, told: Input) -> None:
        """Give the session an input and perform what it wants done; dropped and counted where it is closed."""
        self._run(self._tell, session_key(session.slot, session.generation), told)

    def close(self, session: SessionCore, reason: str) -> None:
        """Release the session without asking it; nothing happens where it is released already."""
        self._run(self._close, session_key(session.slot, session.generation), reason)

    def drain(self, deadline_ns: int) -> None:
        """Ask every session to come to its end by then."""
        for key in tuple(self._bound):
            self._run(self._tell, key, DrainAsked(deadline_ns))

    @property
    def sessions(self) -> int:
        return len(self._bound)

    # -- what workers report (ports.Happenings) ----------------------------------------------------------------------

    def ready(self, worker: WorkerId) -> None:
        self._run(self._ready, worker)

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
        self._run(self._spoke, worker, stage, stamp, payload, outcome, reason, through)

    def ended(
        self,
        worker: WorkerId,
        stage: str,
        stamp: Stamp,
        outcome: Outcome,
        reason: str,
        through: tuple[End, ...] = (),
    ) -> None:
        for end in through:
            self._run(self._ended, end.worker, end.stage, stamp, end.outcome, end.reason)
        self._run(self._ended, worker, stage, stamp, outcome, reason)

    def found(self, worker: WorkerId, stage: str, session: SessionKey, payload: Payload) -> None:
        self._run(self._found, worker, stage, session, payload)

    def snapshotted(
        self, worker: WorkerId, stage: str, session: SessionKey, ticket: int, payload: Payload | None
    ) -> None:
        self._run(self._snapshotted, worker, stage, session, ticket, payload)

    def exited(self, worker: WorkerId, reason: str) -> None:
        self._run(self._lost, worker, reason)

    def load(self, worker: WorkerId, stage: str, load: Load) -> None:
        replica = self.pools.replica(worker)
        if replica is not None:
            replica.loads[stage] = load

    # -- one thing after the other -----------------------------------------------------------------------------------

    def _run(self, act: Callable[_Given, None], *given: _Given.args, **named: _Given.kwargs) -> None:
        """Do it now, or after what is being done."""
        if self._running:
            self._todo.append(partial(act, *given, **named))
            return
        self._running = True
        try:
            act(*given, **named)
            while self._todo:
                self._todo.popleft()()
        finally:
            self._running = False
            if self._todo:  # a session or a port raised: what waits behind it has nothing to do with it
                self._clock.call_at(self._clock.now(), partial(self._run, _nothing))

    def _tell(self, key: SessionKey, told: Input) -> None:
        bound = self._bound.get(key)
        if bound is None:
            self._stale("input", key, told)
            return
        if self._is_traced:
            self._trace.note("told", key, told)
        self._perform(bound, bound.session.handle(told, self._clock.now()))

    def _perform(self, bound: _Bound, effects: list[Effect]) -> None:
        post: list[Effect] = []
        traced, acts = self._is_traced, self._acts
        for effect in effects:
            if traced:
                self._trace.note("does", bound.key, effect)
            act = acts.get(type(effect))
            if act is None:
                post.append(effect)
                continue
            if post and type(effect) not in _UNSEEN:
                bound.mailbox.take(post)
                post = []
            act(bound, effect)
        if post:
            bound.mailbox.take(post)

    # -- effects -----------------------------------------------------------------------------------------------------

    def _count(self, _: _Bound, count: Count) -> None:
        self._counters.count(count.name, count.amount)

    def _restore(self, bound: _Bound, restore: Restore) -> None:
        replica = self._seat(bound, restore.stage)
        if replica is None:  # the history goes on without it
            self._tell(bound.key, StageLost(restore.stage))
        else:
            replica.port.restore(restore.stage, bound.key, restore.payload)

    def _release(self, bound: _Bound, release: Release) -> None:
        self._close(bound.key, release.reason)

    def _take_snapshot(self, bound: _Bound, effect: TakeSnapshot) -> None:
        replica = bound.seats.get(effect.stage)
        if replica is None:
            self._tell(bound.key, StageSnapshotted(effect.stage, effect.ticket, None))
        else:
            bound.snapshots[effect.stage] = effect.ticket
            replica.port.snapshot(effect.stage, bound.key, effect.ticket)

    def _feed(self, bound: _Bound, feed: Feed) -> None:
        replica = bound.seats.get(feed.stage)
        if replica is None or feed.stage in bound.held:
            replica = self._seat_or_wait(bound, (feed.stage,), feed)
            if replica is None:
                return
        replica.port.feed_session(feed.stage, bound.key, feed.payload)

    def _submit(self, bound: _Bound, submit: Submit) -> None:
        try:
            course = bound.line.dag.course(submit.entry, submit.outputs)
        except UnroutableError:
            self._refuse(bound, submit, "unroutable")
            return
        # Where there is a way, every stage has its seat.
        if (bound.held or course not in bound.ways) and self._seat_or_wait(bound, course.steps, submit) is None:
            return
        key = submit.stamp[:4]
        if submit.stamp.session != bound.key or key in self._turns:
            raise IllegalEffectError(
                f"session {bound.key} submits {submit.stamp}, which is not its own or runs already"
            )
        turn = _Turn(submit.stamp, key, bound, course, submit.params, set(course.steps), set(submit.outputs))
        self._turns[key] = bound.turns[key] = turn
        self._open_parts(turn, course.first, submit.payload)

    def _open_parts(self, turn: _Turn, steps: tuple[Step, ...], payload: Payload | None = None) -> None:
        """Open the stages' sides of the turn, consumers first; those that ride are opened by their producers."""
        bound, parts, stamp = turn.bound, turn.parts, turn.stamp
        seats, client_credits = bound.seats, self._limits.client_credits
        afters = []
        for step in steps:
            stage = step.stage
            parts[stage] = part = _Part(seats[stage])
            if step.rides:
                afters.append(part.replica.port.expect_turn(stage, stamp, client_credits if step.final else 0))
        routes = self._routes(bound, turn.course, steps, tuple(afters))
        for step in steps:
            if not step.rides:
                stage = step.stage
                parts[stage].replica.port.open_turn(
                    stage,
                    stamp if not step.index else stamp._replace(stage=step.index),
                    turn.params,
                    routes[stage],
                    step.inputs,
                    payload if step.entry else None,
                )

    def _routes(
        self, bound: _Bound, course: Course, steps: tuple[Step, ...], afters: tuple[int, ...]
    ) -> Mapping[str, tuple[Route, ...]]:
        """Each stage's routes. `afters` is what the workers answered that expect a turn."""
        way = bound.ways.get(course)
        if way is not None and way.steps is steps and way.afters == afters:
            return way.routes
        routes: dict[str, tuple[Route, ...]] = {}
        openings: dict[str, Opening] = {}
        after = iter(afters)
        for step in steps:
            onward = [self._route(bound, edge, openings.get(edge.consumer)) for edge in step.edges]
            if step.final:
                onward.append(Route(CLIENT, SERVER, self._limits.client_credits))
            routes[step.stage] = tuple(onward)
            if step.rides:
                openings[step.stage] = Opening(next(after), step.index, routes[step.stage])
        bound.ways[course] = _Way(steps, afters, routes)
        return routes

    def _route(self, bound: _Bound, edge: EdgeSpec, opening: Opening | None = None) -> Route:
        receiver = bound.seats[edge.consumer]
        credit = edge.credits or self._limits.chunk_credits
        return Route(edge.consumer, receiver.worker, credit, edge.handover is Handover.WHOLE, opening)

    def _raise(self, bound: _Bound, effect: RaiseFence) -> None:
        fence = effect.fence
        self._fences.write(fence)
        bound.epochs[fence.slot % LANES] = fence.epoch
        for turn in tuple(bound.turns.values()):
            if turn.stamp.slot == fence.slot and turn.stamp.epoch < fence.epoch:
                self._abort(turn)
        self._forgo(bound, lambda stamp: stamp.slot == fence.slot and stamp.epoch < fence.epoch)

    def _abort_stamped(self, bound: _Bound, abort: Abort) -> None:
        stamp = abort.stamp
        turn = bound.turns.get(stamp[:4])
        if turn is not None:
            self._abort(turn)
        self._forgo(bound, lambda other: other[:4] == stamp[:4])

    def _abort(self, turn: _Turn) -> None:
        """Nothing of the turn reaches the session from now on; what is left of it must end by the deadline."""
        if turn.over:
            return
        turn.over = True
        turn.bound.turns.pop(turn.key, None)
        turn.pending &= turn.parts.keys()
        for stage, part in turn.parts.items():  # in the order of opening, so that a run can be repeated
            if stage in turn.pending:
                part.replica.port.abort(stage, turn.stamp)
        if turn.pending:
            steps_ms = turn.bound.line.steps_ms
            wait_ms = max(self._limits.abort_deadline_ms, *(steps_ms[stage] for stage in turn.pending))
            at_ns = self._clock.now() + round(wait_ms * NS_PER_MS)
            turn.deadline = self._clock.call_at(at_ns, partial(self._run, self._abort_lapsed, turn))
        else:
            self._forget(turn)

    def _abort_lapsed(self, turn: _Turn) -> None:
        for replica in dict.fromkeys(part.replica for stage, part in turn.parts.items() if stage in turn.pending):
            self._counters.count("workers_wedged")
            replica.port.kill()
            self._lost(replica.worker, "wedged")

    def _forget(self, turn: _Turn) -> None:
        self._turns.pop(turn.key, None)
        if turn.deadline is not None:
            turn.deadline.cancel()

    def _credit(self, _: _Bound, credit: Credit) -> None:
        turn = self._turns.get(credit.stamp[:4])
        part = turn.parts.get(credit.stage) if turn is not None else None
        if turn is not None and part is not None and not turn.over:
            part.replica.port.credit(credit.stage, turn.stamp, credit.units)

    def _wake_asked(self, bound: _Bound, wake: Wake) -> None:
        self._wake(bound, wake.at_ns)

    def _wake(self, bound: _Bound, at_ns: int) -> None:
        bound.wake_at = at_ns
        if bound.timer is not None:
            if bound.timer_at <= at_ns:
                return  # it finds the later time when it fires: most leases are only ever prolonged
            bound.timer.cancel()
        bound.timer_at = at_ns
        bound.timer = self._clock.call_at(at_ns, partial(self._run, self._woke, bound))

    def _woke(self, bound: _Bound) -> None:
        if bound.key not in self._bound:
            return
        bound.timer = None
        if self._clock.now() < bound.wake_at:
            self._wake(bound, bound.wake_at)
        else:
            self._tell(bound.key, Woke())

    def _close(self, key: SessionKey, reason: str) -> None:
        bound = self._bound.pop(key, None)
        if bound is None:
            return
        slot, generation = bound.session.slot, bound.session.generation
        for lane in range(LANES):
            # The next generation's epochs begin at 1, so until the slot is taken again the rows admit nothing.
            self._fences.write(Fence(slot * LANES + lane, generation + 1, 0))
        for timer in (bound.timer, bound.patience):
            if timer is not None:
                timer.cancel()
        for turn in tuple(bound.turns.values()):
            self._abort(turn)
        for stage, replica in bound.seats.items():
            replica.port.close_session(stage, key)
            replica.sessions.discard(key)
        self._vacancies.discard(key)
        self._slots.free(slot, generation)
        bound.mailbox.take([Release(reason)])

    # -- reports -----------------------------------------------------------------------------------------------------

    def _spoke(
        self,
        worker: WorkerId,
        stage: str,
        stamp: Stamp,
        payload: Payload,
        outcome: Outcome | None,
        reason: str,
        through: tuple[End, ...],
    ) -> None:
        turn = self._turns.get(stamp[:4])
        for end in through:
            self._part_ended(turn, end.worker, end.stage, stamp, end.outcome, end.reason)
        part = _hosted(turn, stage, worker)
        if turn is None or part is None or turn.over or stage not in turn.unfinished or stamp.seq < part.spoken:
            self._stale("output", stamp.session, stamp)
        elif stamp.seq > part.spoken:
            self._fail(turn, stage, "output_lost")  # better no end than one with a hole before it (G7)
        else:
            part.spoken += 1
            is_last = outcome is not None and outcome is not Outcome.FAILED and stage in turn.pending
            if is_last and not turn.course.steps[stage].keeps:
                turn.pending.discard(stage)
                turn.unfinished.discard(stage)
                self._tell(turn.bound.key, StageSpoke(stamp, stage, payload, outcome, reason))
                if not turn.unfinished:
                    self._abort(turn)
                return
            self._tell(turn.bound.key, StageSpoke(stamp, stage, payload))
        if outcome is not None:
            self._ended(worker, stage, stamp, outcome, reason)

    def _ended(self, worker: WorkerId, stage: str, stamp: Stamp, outcome: Outcome, reason: str) -> None:
        self._part_ended(self._turns.get(stamp[:4]), worker, stage, stamp, outcome, reason)

    def _part_ended(
        self, turn: _Turn | None, worker: WorkerId, stage: str, stamp: Stamp, outcome: Outcome, reason: str
    ) -> None:
        if turn is None or stage not in turn.pending or _hosted(turn, stage, worker) is None:
            self._stale("end", stamp.session, stamp)
            return
        turn.pending.discard(stage)
        if turn.over:
            if not turn.pending:
                self._forget(turn)
        elif outcome is Outcome.FAILED:
            # Which of the two hears first of a death, its neighbour or we, is chance, and no client's concern.
            self._fail(turn, stage, "replica_lost" if reason == "peer_lost" else reason)
        else:
            step = turn.course.steps[stage]
            if step.keeps:
                self._hand_on(turn, stage)
            if step.final and not turn.over:
                turn.unfinished.discard(stage)
                self._tell(turn.bound.key, StageEnded(stamp, stage, outcome, reason))
            if not turn.unfinished:
                # Of a stage that ended early its producers are left, and nobody takes what they make.
                self._abort(turn)

    def _hand_on(self, turn: _Turn, stage: str) -> None:
        """The stage has finished and keeps output: open what waits for it and let it send that."""
        bound = turn.bound
        steps = tuple(step for step in turn.course.later.get(stage, ()) if step.stage not in turn.parts)
        for step in steps:
            if any(self._seat(bound, name) is None for name in (step.stage, *(edge.consumer for edge in step.edges))):
                self._fail(turn, step.stage, "replica_unavailable")
                return
        if steps:
            self._open_parts(turn, steps)
        for edge in turn.course.steps[stage].edges:
            if edge.handover is Handover.WHOLE:
                part = turn.parts[stage]
                part.replica.port.forward(stage, turn.stamp, self._route(bound, edge))

    def _fail(self, turn: _Turn, stage: str, reason: str) -> None:
        """The turn cannot come to its end: say so once, then stop what is left of it."""
        if turn.over:
            return
        self._tell(turn.bound.key, StageEnded(turn.stamp, stage, Outcome.FAILED, reason))
        self._abort(turn)

    def _found(self, worker: WorkerId, stage: str, session: SessionKey, payload: Payload) -> None:
        bound = self._bound.get(session)
        replica = bound.seats.get(stage) if bound is not None else None
        if replica is None or replica.worker != worker:
            self._stale("finding", session, (worker, stage))
            return
        self._tell(session, StageFound(stage, payload))

    def _snapshotted(
        self, worker: WorkerId, stage: str, session: SessionKey, ticket: int, payload: Payload | None
    ) -> None:
        bound = self._bound.get(session)
        if bound is None or bound.snapshots.get(stage) != ticket:
            self._stale("snapshot", session, (worker, stage, ticket, payload is None))
            return
        del bound.snapshots[stage]
        self._tell(session, StageSnapshotted(stage, ticket, payload))

    def _stale(self, what: str, session: SessionKey, detail: object) -> None:
        self._counters.count(f"stale_{what}s")
        self._trace.note(f"stale_{what}", session, detail)

    # -- replicas come and go ----------------------------------------------------------------------------------------

    def _seat(self, bound: _Bound, stage: str) -> Replica | None:
        """The session's replica of the stage, bound and opened if need be; None where none is ready."""
        replica = bound.seats.get(stage)
        if replica is not None:
            return replica
        pool = bound.line.pools[stage]
        siblings = (bound.seats[sibling] for sibling in pool.plan.stages if sibling in bound.seats)
        replica = next(siblings, None) or pool.bind(bound.key)
        if replica is None:
            bound.vacant.add(stage)
            self._vacancies.add(bound.key)
            return None
        bound.seats[stage] = replica
        bound.ways.clear()
        bound.vacant.discard(stage)
        self._trace.note("bound", bound.key, (stage, replica.worker))
        replica.port.open_session(stage, bound.key, bound.params)
        return replica

    def _lost(self, worker: WorkerId, reason: str) -> None:
        replica = self.pools.lost(worker)
        if replica is None:
            return
        self._counters.count("workers_lost")
        self._trace.note("lost", SessionKey(0), (worker, reason))
        hit = [turn for turn in self._turns.values() if any(part.replica is replica for part in turn.parts.values())]
        for turn in hit:
            turn.pending -= {stage for stage, part in turn.parts.items() if part.replica is replica}
            if turn.over and not turn.pending:
                self._forget(turn)
        unanswered = [
            (key, stage, ticket)
            for key in sorted(replica.sessions)
            for stage, ticket in self._bound[key].snapshots.items()
            if self._bound[key].seats.get(stage) is replica
        ]
        # Everybody moves before anybody is told: what a session does about it finds its new replicas.
        moved = [(key, self._move(self._bound[key], replica)) for key in sorted(replica.sessions)]
        for key, stages in moved:
            for stage in stages:
                self._tell(key, StageLost(stage))
        for key, stage, ticket in unanswered:
            self._snapshotted(worker, stage, key, ticket, None)
        for turn in hit:
            stage = next(stage for stage, part in turn.parts.items() if part.replica is replica)
            self._fail(turn, stage, "replica_lost")

    def _move(self, bound: _Bound, replica: Replica) -> list[str]:
        """The stages that lived there; each has another replica now, or waits for one."""
        stages = [stage for stage, seat in bound.seats.items() if seat is replica]
        bound.ways.clear()
        for stage in stages:
            del bound.seats[stage]
        for stage in stages:
            self._seat(bound, stage)
        return stages

    def _ready(self, worker: WorkerId) -> None:
        if self.pools.ready(worker) is None:
            return
        for key in sorted(self._vacancies):
            bound = self._bound[key]
            for stage in sorted(bound.vacant):
                self._seat(bound, stage)
            if not bound.vacant:
                self._vacancies.discard(key)
            self._resume(bound)

    # -- work that waits for a replica -------------------------------------------------------------------------------

    def _seat_or_wait(self, bound: _Bound, stages: Iterable[str], effect: Submit | Feed) -> Replica | None:
        """A replica for each of the stages (the last is returned), or None: the effect waits, in order, or is lost."""
        replica: Replica | None = None
        for stage in stages:
            replica = None if stage in bound.held else self._seat(bound, stage)
            if replica is None:
                self._wait(bound, frozenset(stages), effect)
                break
        return replica

    def _wait(self, bound: _Bound, stages: frozenset[str], effect: Submit | Feed) -> None:
        if effect.payload.nbytes > KEPT_BYTES or len(bound.waiting) >= self._limits.replica_wait_items:
            self._lose(bound, effect)
            return
        payload = replace(effect.payload, body=bytes(effect.payload.body))
        bound.waiting.append(_Waiting(stages, replace(effect, payload=payload)))
        bound.held |= stages
        if bound.patience is None:
            at_ns = self._clock.now() + int(self._limits.replica_wait_s * NS_PER_S)
            bound.patience = self._clock.call_at(at_ns, partial(self._run, self._wait_lapsed, bound))

    def _resume(self, bound: _Bound) -> None:
        """Some stage has a replica again: do what waited for it, unless a part of its input is missing."""
        back = bound.lossy - bound.vacant
        if back:
            bound.lossy -= back
            for stage in sorted(back):
                self._run(self._tell, bound.key, StageLost(stage))
            self._lose_waiting(bound)
        for waiting in self._unqueue(bound):
            self._perform(bound, [waiting.effect])

    def _wait_lapsed(self, bound: _Bound) -> None:
        bound.patience = None
        self._lose_waiting(bound)

    def _lose_waiting(self, bound: _Bound) -> None:
        for waiting in self._unqueue(bound):
            self._lose(bound, waiting.effect)

    def _unqueue(self, bound: _Bound) -> tuple[_Waiting, ...]:
        waiting = tuple(bound.waiting)
        bound.waiting.clear()
        bound.held.clear()
        if bound.patience is not None:
            bound.patience.cancel()
            bound.patience = None
        return waiting

    def _lose(self, bound: _Bound, effect: Submit | Feed) -> None:
        if isinstance(effect, Submit):
            self._refuse(bound, effect, "replica_unavailable")
        else:
            bound.lossy.add(effect.stage)
            self._counters.count("feeds_lost")

    def _forgo(self, bound: _Bound, stale: Callable[[Stamp], bool]) -> None:
        """Turns that wait and shall not start any more."""
        if not bound.waiting:
            return
        bound.waiting = deque(
            waiting
            for waiting in bound.waiting
            if not (isinstance(waiting.effect, Submit) and stale(waiting.effect.stamp))
        )
        bound.held = set().union(*(waiting.stages for waiting in bound.waiting))

    def _refuse(self, bound: _Bound, submit: Submit, reason: str) -> None:
        ended = StageEnded(submit.stamp, submit.entry, Outcome.FAILED, reason)
        self._run(self._tell, bound.key, ended)


def _hosted(turn: _Turn | None, stage: str, worker: WorkerId) -> _Part | None:
    """The stage's part of the turn, if it runs on that worker."""
    part = turn.parts.get(stage) if turn is not None else None
    return part if part is not None and part.replica.worker == worker else None


def _nothing() -> None:
    pass
