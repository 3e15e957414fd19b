"""The runner: steps a worker's engines, most urgent first, and drops stale turns between any two steps.

It does no I/O and owns no thread. A drive (see drives.py) calls it, on the event loop or on a thread of its own:
`receive` with what arrived, `step` until there is nothing to do, and the outbox is taken away in between.

Every turn that is opened here has its end reported, also when it was aborted or was stale before it began: the
orchestrator counts a worker that keeps one as wedged. A stage that hands chunks on lets a later stage report its end
(wire.End). Where that one does not come to it, an abort follows; it is answered with an end, whatever became of the
turn here, and the server takes the first end that reaches it.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

from omni_live.connectors.contract import Ticket, TicketInvalid
from omni_live.engines.contract import Engine, SessionError, TurnError
from omni_live.runtime.fences import FenceTable
from omni_live.runtime.outbox import CONTROL, Outbox
from omni_live.runtime.ports import CLIENT
from omni_live.runtime.turns import Handed, Item, Life, Output, StageTurn, TurnKey, discard
from omni_live.runtime.wire import (
    SERVER,
    Abort,
    Call,
    Chunk,
    CloseSession,
    Counted,
    Credit,
    Drain,
    Ended,
    FeedSession,
    FeedTurn,
    Fork,
    Forward,
    Free,
    Message,
    OpenSession,
    OpenTurn,
    Ping,
    Pong,
    Report,
    Restore,
    Snapshot,
)
from omni_live.sessions.inputs import Outcome
from omni_live.sessions.payload import Payload
from omni_live.sessions.stamp import LANES, SessionKey, Stamp, session_key

NS_PER_S: Final = 1_000_000_000
_NEVER: Final = 2**63
_UNDATED_NS: Final = 100_000_000
"""Work without a deadline counts as due so long after it became ready: it waits for urgent turns, never forever."""
_REPORT_NS: Final = 250_000_000
"""Loads and counts are reported at most this often."""
_REMEMBERED: Final = 512
"""Turns that ended here and are remembered, so that their late chunks are not taken for early ones."""
# Class attributes of an enum cost a look-up through its metaclass.
_RUNNING: Final = Life.RUNNING
_OVER: Final = Life.OVER
_FAILED: Final = Outcome.FAILED


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Bounds of what a runner keeps for others."""

    kept_bytes: int = 64 * 2**20
    """Output of one turn that waits for its receiver. Reached: the turn fails (`resource_exhausted`)."""
    early_bytes: int = 32 * 2**20
    """Chunks of turns that are not open yet, in all. Reached: further ones are dropped and counted."""
    early_s: float = 5.0
    """A turn that does not open by then is not coming: its early chunks are dropped and counted."""
    forward_s: float = 30.0
    """Kept output that nobody asks to forward by then is dropped and counted."""


class Memory(dict[TurnKey, None]):
    """At least the latest `_REMEMBERED` turns that were added, and at most twice as many."""

    def add(self, key: TurnKey) -> None:
        self[key] = None
        if len(self) > 2 * _REMEMBERED:
            for oldest in tuple(islice(self, _REMEMBERED)):
                del self[oldest]


class Seat:
    """One stage in this worker: its engine, and what it has to do. It is the engine's Host."""

    def __init__(self, stage: str, engine: Engine, outbox: Outbox, wake: Callable[[], None]) -> None:
        self.stage = stage
        self.engine = engine
        self.sessions: set[SessionKey] = set()
        self.refused: dict[SessionKey, str] = {}
        """Sessions that the engine would not open, and why."""
        self.turns: dict[TurnKey, StageTurn] = {}
        self.lingering: dict[TurnKey, StageTurn] = {}
        """Finished turns whose output is still on its way."""
        self.over = Memory()
        """Turns that ended: a chunk that comes late is not taken for an early one."""
        self.broken = Memory()
        """Turns of which early chunks were dropped: they must not begin as if they were not."""
        self.ready_ns = 0
        """Since when the engine has something to do; 0: it has nothing."""
        self.alarm_ns = _NEVER
        self.woken = False
        self._outbox = outbox
        self._wake = wake

    def due_ns(self) -> int:
        """When the engine should have stepped. Never before it became ready, so that nobody starves the others."""
        dated = [turn.stamp.deadline_ns for turn in self.turns.values() if turn.stamp.deadline_ns]
        return max(min(dated), self.ready_ns) if dated else self.ready_ns + _UNDATED_NS

    # -- engines.contract.Host

    def find(self, session: SessionKey, payload: Payload) -> None:
        self._outbox.find(self.stage, session, payload)

    def wake(self) -> None:
        self.woken = True
        self._wake()

    def now(self) -> int:
        return time.monotonic_ns()

    def wake_at(self, at_ns: int) -> None:
        self.alarm_ns = min(self.alarm_ns, at_ns)


@dataclass(slots=True)
class _Early:
    """Chunks of a turn that is not open here yet; its OpenTurn comes by another socket."""

    stamp: Stamp
    until_ns: int
    items: list[tuple[Item, int]]
    nbytes: int = 0


class Runner:
    """See the module. `wake` must be callable from any thread; the clock is injected for tests."""

    def __init__(
        self,
        worker: int,
        engines: Mapping[str, Engine],
        fences: FenceTable,
        outbox: Outbox,
        *,
        wake: Callable[[], None],
        limits: RunnerLimits | None = None,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._worker = worker
        self._fences = fences
        self.outbox = outbox
        self._counts = outbox.counts
        self._limits = limits or RunnerLimits()
        self._now = now
        self._seats = {stage: Seat(stage, engine, outbox, wake) for stage, engine in engines.items()}
        self._seat_list = tuple(self._seats.values())
        self._early: dict[tuple[str, TurnKey], _Early] = {}
        self._early_bytes = 0
        self._next = 0
        self._waiting: dict[int, Call] = {}
        """Calls on the port that arrived ahead of earlier ones, which come by the other lane."""
        self._ahead: list[tuple[int, OpenTurn]] = []
        """Openings by producers that arrived ahead of calls that go before them."""
        self._moves = -1
        self._look_again = False
        self.is_draining = False
        """The worker was told to drain."""
        self._changed = True
        self._reported_ns = 0
        self._perform: dict[type[object], Callable[..., None]] = {
            OpenSession: self._open_session,
            CloseSession: self._close_session,
            OpenTurn: self._open_turn,
            Forward: self._forward,
            FeedSession: self._feed_session,
            FeedTurn: self._feed_turn,
            Fork: self._fork,
            Snapshot: self._snapshot,
            Restore: self._restore,
        }

    # -- the drive's side

    def load(self) -> None:
        """Load every engine; may take long."""
        for seat in self._seats.values():
            seat.engine.load(seat)

    def shut(self) -> None:
        for seat in self._seats.values():
            seat.engine.shut()

    def receive(self, source: int, message: Message | Call) -> None:
        """Take what the server or the worker `source` said. Raises what an engine raises that names no turn."""
        if isinstance(message, Chunk):
            self._deliver(message.receiver, message.stamp, message, source)
        elif source != SERVER and isinstance(message, OpenTurn):
            if message.order > self._next:
                self._ahead.append((source, message))
            else:
                self._open_turn(message, source)
        elif isinstance(message, Call):
            self._in_order(message)
        else:
            self._overtaking(source, message)

    def lost_receiver(self, worker: int) -> None:
        """The link that our chunks to that worker take is gone, and with it what was on its way."""
        freed = self.outbox.forget(worker)
        if freed:
            self._counts["tickets_freed_of_lost"] += freed
        for seat in self._seats.values():
            for turn in [*seat.turns.values(), *seat.lingering.values()]:
                if turn.sends_to(worker):
                    self._counts["turn_peer_lost"] += 1
                    self._fail(seat, turn, "peer_lost")

    def lost_producer(self, worker: int) -> None:
        """The link that brought chunks of that worker is gone."""
        for seat in self._seats.values():
            for turn in list(seat.turns.values()):
                if turn.awaits(worker):
                    self._counts["turn_peer_lost"] += 1
                    self._fail(seat, turn, "peer_lost")
        for source, opening in self._ahead:
            if source == worker:
                self._end_unopened(self._seats[opening.stage], opening.stamp, Outcome.FAILED, "peer_lost")
        self.outbox.close_reader(worker)

    def step(self) -> bool:
        """Drop what is stale, then let the most urgent engine do one unit of work; False where none has more."""
        if self._fences.moves != self._moves or self._look_again:
            self._drop_stale()
        seat = self._most_urgent()
        if seat is None:
            return False
        seat.ready_ns = 0
        try:
            more = seat.engine.step()
        except TurnError as error:
            self._failed(error)
            more = True
        if more:
            self._mark(seat)
            return True
        return self._is_awake()

    def _is_awake(self) -> bool:
        for seat in self._seat_list:  # noqa: SIM110 - twice as fast as a generator
            if seat.ready_ns or seat.woken:
                return True
        return False

    def settle(self) -> int | None:
        """Nothing is left to do for now: expire and report what is due.

        Returns when `step` and `settle` must be called again even if nothing arrives, None where never.
        """
        at = _NEVER
        if self._changed or self._counts:
            now = self._now()
            if now - self._reported_ns >= _REPORT_NS:
                self._report(now)
            else:
                at = self._reported_ns + _REPORT_NS
        if self._early:
            at = min(at, self._expire_early())
        if self.outbox.frees_ns:
            at = min(at, self.outbox.frees_ns)
        for seat in self._seat_list:
            if seat.lingering:
                at = min(at, self._expire_kept(seat))
            at = min(at, seat.alarm_ns)
        return None if at == _NEVER else at

    @property
    def is_drained(self) -> bool:
        """True where the worker was told to drain and holds nothing for anybody any more."""
        if not self.is_draining or self.outbox.tickets:
            return False
        return not any(seat.sessions or seat.turns or seat.lingering for seat in self._seats.values())

    # -- turns.Floor

    def open_here(self, message: OpenTurn) -> None:
        self._open_turn(message, self._worker)

    def hand(self, receiver: str, stamp: Stamp, item: Handed) -> None:
        self._deliver(receiver, stamp, item, self._worker)

    def has_room(self, turn: StageTurn) -> None:
        self._mark(self._seats[turn.stage])

    def lingers(self, turn: StageTurn) -> None:
        seat = self._seats[turn.stage]
        turn.since_ns = self._now()
        seat.turns.pop(turn.key, None)
        seat.lingering[turn.key] = turn

    def settled(self, turn: StageTurn) -> None:
        seat, key = self._seats[turn.stage], turn.key
        if seat.turns.pop(key, None) is None:
            seat.lingering.pop(key, None)
        turn.life = _OVER
        seat.over.add(key)
        self._changed = True

    # -- what arrives

    def _in_order(self, message: Call) -> None:
        if message.order != self._next:
            self._waiting[message.order] = message
            return
        while True:
            self._next += 1
            try:
                self._perform[type(message)](message)
            except TurnError as error:
                self._failed(error)
            except SessionError as error:
                self._counts[f"refused_{error.code}"] += 1
            except TicketInvalid:
                self._counts["tickets_invalid"] += 1
            if self._ahead:
                self._open_ahead()
            following = self._waiting.pop(self._next, None) if self._waiting else None
            if following is None:
                return
            message = following

    def _open_ahead(self) -> None:
        ahead, self._ahead = self._ahead, []
        for producer, message in ahead:
            self.receive(producer, message)

    def _overtaking(self, source: int, message: Message | Call) -> None:
        match message:
            case Credit():
                self._credit(message)
            case Free(tickets):
                self.outbox.release(source, tickets)
                self._pump_all()
            case Abort():
                self._abort(message)
            case Ping():
                self.outbox.say(CONTROL, Pong(message.serial))
            case Drain():
                self.is_draining = True
            case _:
                raise TypeError(f"{type(message).__name__} is not for a runner")

    def _deliver(self, receiver: str, stamp: Stamp, item: Item, source: int) -> None:
        """Bring a unit of work to its turn, keep it for a turn that is about to open, or drop and count it."""
        seat = self._seats.get(receiver)
        if seat is None or not self._fences.admits(stamp):
            self._counts["stale_chunks"] += 1
            discard(item, source, self.outbox)
            return
        key = stamp[:4]
        turn = seat.turns.get(key)
        if turn is not None:
            self._arrive(seat, turn, item, source)
        elif key in seat.over or key in seat.lingering or key in seat.broken:
            self._counts["late_chunks"] += 1
            discard(item, source, self.outbox)
        else:
            self._keep_early(seat, key, stamp, item, source)

    def _arrive(self, seat: Seat, turn: StageTurn, item: Item, source: int) -> None:
        if turn.life is not _RUNNING:
            discard(item, source, self.outbox)
            return
        if item.outcome is _FAILED:
            self._fail(seat, turn, item.reason)
            return
        turn.arrived(item, source)
        if not seat.ready_ns:
            seat.ready_ns = self._now()

    def _keep_early(self, seat: Seat, key: TurnKey, stamp: Stamp, item: Item, source: int) -> None:
        nbytes = _nbytes(item)
        if self._early_bytes + nbytes > self._limits.early_bytes:
            self._counts["early_chunks_refused"] += 1
            seat.broken.add(key)
            discard(item, source, self.outbox)
            return
        early = self._early.get((seat.stage, key))
        if early is None:
            until_ns = self._now() + int(self._limits.early_s * NS_PER_S)
            early = self._early[seat.stage, key] = _Early(stamp, until_ns, [])
        early.items.append((item, source))
        early.nbytes += nbytes
        self._early_bytes += nbytes

    # -- the port's calls, in order

    def _open_session(self, message: OpenSession) -> None:
        seat, session = self._seats[message.stage], message.session
        self._changed = True
        try:
            seat.engine.open(session, message.params)
        except SessionError as error:
            seat.refused[session] = error.code
            raise
        seat.sessions.add(session)
        self._mark(seat)

    def _close_session(self, message: CloseSession) -> None:
        seat, session = self._seats[message.stage], message.session
        self._changed = True
        for turn in [*seat.turns.values(), *seat.lingering.values()]:
            if turn.session == session:
                self._drop(seat, turn, "closed")
        for name, early in list(self._early.items()):
            if name[0] == seat.stage and early.stamp.session == session:
                self._drop_early(name)
        seat.refused.pop(session, None)
        if session in seat.sessions:
            seat.sessions.discard(session)
            seat.engine.close(session)

    def _open_turn(self, message: OpenTurn, opener: int = SERVER) -> None:
        stamp = message.stamp
        seat, key = self._seats[message.stage], stamp[:4]
        session = session_key(key[0] // LANES, key[1])
        if session in seat.sessions and key not in seat.over and key not in seat.broken and self._fences.admits(stamp):
            self._begin(seat, key, session, message, opener)
            return
        if key not in seat.over:
            self._end_unopened(seat, stamp, *self._refusal(seat, stamp, session))
        if message.first is not None:
            self._counts["late_chunks"] += 1
            discard(message.first, opener, self.outbox)

    def _begin(self, seat: Seat, key: TurnKey, session: SessionKey, message: OpenTurn, opener: int) -> None:
        """Open what hangs on the turn before its engine can have made anything, then tell the engine."""
        turn = StageTurn(seat.stage, message.stamp, key, session, message.params, message.inputs, opener, self)
        here, kept_cap = self._worker, self._limits.kept_bytes
        for route in message.routes:
            output = Output(turn, route, route.worker == here, kept_cap)
            turn.send_to(output)
            if route.opens is not None:
                output.open(message, route.opens)
        seat.turns[key] = turn
        self._changed = True
        try:
            seat.engine.begin(turn)
        except TurnError as error:
            self._failed(error)
        if not seat.ready_ns:
            seat.ready_ns = self._now()
        if message.first is not None:
            self._arrive(seat, turn, message.first, opener)
        if self._early:
            self._deliver_early(seat, key)

    def _deliver_early(self, seat: Seat, key: TurnKey) -> None:
        early = self._early.pop((seat.stage, key), None)
        if early is not None:
            self._early_bytes -= early.nbytes
            for item, source in early.items:
                self._deliver(seat.stage, early.stamp, item, source)

    def _end_unopened(self, seat: Seat, stamp: Stamp, outcome: Outcome, reason: str) -> None:
        """Report the end of a turn that is not open here, and see to it that it never is."""
        key = stamp[:4]
        seat.over.add(key)
        if (seat.stage, key) in self._early:
            self._drop_early((seat.stage, key))
        self.outbox.say(CONTROL, Ended(seat.stage, stamp, outcome, reason))

    def _refusal(self, seat: Seat, stamp: Stamp, session: SessionKey) -> tuple[Outcome, str]:
        """Why the turn does not begin."""
        if not self._fences.admits(stamp):
            return Outcome.INCOMPLETE, "stale"
        if stamp[:4] in seat.broken:
            return Outcome.FAILED, "input_lost"
        return Outcome.FAILED, seat.refused.get(session, "session_unknown")

    def _forward(self, message: Forward) -> None:
        seat, key = self._seats[message.stage], message.stamp[:4]
        turn = seat.lingering.get(key) or seat.turns.get(key)
        if turn is None:
            self._counts["stale_forwards"] += 1
            return
        for output in turn.outputs:
            if output.receiver == message.route.receiver:
                output.is_local = message.route.worker == self._worker
                output.forward(message.route)

    def _feed_session(self, message: FeedSession) -> None:
        seat, session = self._seats[message.stage], message.session
        if session not in seat.sessions:
            self._counts["stale_feeds"] += 1
            self.outbox.read(SERVER, message.body, lambda _: None)
            return
        self.outbox.read(SERVER, message.body, lambda payload: seat.engine.listen(session, payload))
        self._mark(seat)

    def _feed_turn(self, message: FeedTurn) -> None:
        chunk = Chunk(CLIENT, message.stage, message.stamp, message.body, False, message.last)
        self._deliver(message.stage, message.stamp, chunk, SERVER)

    def _fork(self, message: Fork) -> None:
        seat = self._seats[message.stage]
        if message.session not in seat.sessions:
            raise SessionError(message.session, "session_unknown")
        seat.engine.fork(message.session, message.into)
        seat.sessions.add(message.into)
        self._changed = True

    def _snapshot(self, message: Snapshot) -> None:
        seat, session = self._seats[message.stage], message.session
        payload: Payload | None = None
        try:
            if session in seat.sessions:
                payload = seat.engine.snapshot(session)
        finally:
            self.outbox.snapshotted(seat.stage, session, message.ticket, payload)

    def _restore(self, message: Restore) -> None:
        seat, session = self._seats[message.stage], message.session
        if session not in seat.sessions:
            self.outbox.read(SERVER, message.body, lambda _: None)
            raise SessionError(session, "session_unknown")
        self.outbox.read(SERVER, message.body, lambda payload: seat.engine.restore(session, payload))
        self._mark(seat)

    # -- what overtakes

    def _abort(self, message: Abort) -> None:
        seat, key = self._seats[message.stage], message.stamp[:4]
        turn = seat.turns.get(key) or seat.lingering.get(key)
        if turn is not None:
            self._drop(seat, turn, "aborted")
        else:
            # Over, and another stage was to report it; or not open yet, because the opening waits for the other lane,
            # or is to come by a producer that may be dead.
            self._end_unopened(seat, message.stamp, Outcome.INCOMPLETE, "aborted")

    def _credit(self, message: Credit) -> None:
        seat = self._seats.get(message.sender)
        key = message.stamp[:4]
        turn = seat and (seat.turns.get(key) or seat.lingering.get(key))
        if turn:
            try:
                for output in turn.outputs:
                    if output.receiver == message.receiver:
                        output.give(message.units)
            except TurnError as error:
                self._failed(error)

    def _pump_all(self) -> None:
        """An arena has room again: who waited for it goes on."""
        for seat in self._seats.values():
            for turn in [*seat.turns.values(), *seat.lingering.values()]:
                try:
                    for output in turn.outputs:
                        output.pump()
                except TurnError as error:
                    self._failed(error)

    # -- how turns end

    def _failed(self, error: TurnError) -> None:
        turn = error.turn
        if not isinstance(turn, StageTurn):
            raise error
        self._counts[f"turn_{error.code}"] += 1
        self._fail(self._seats[turn.stage], turn, error.code)

    def _fail(self, seat: Seat, turn: StageTurn, code: str) -> None:
        self._drop(seat, turn, code, Outcome.FAILED)

    def _drop(self, seat: Seat, turn: StageTurn, reason: str, outcome: Outcome = Outcome.INCOMPLETE) -> None:
        was = turn.life
        if was is Life.OVER:
            return
        turn.void()
        if was is Life.FINISHED and outcome is Outcome.FAILED and reason != "peer_lost":
            for output in turn.outputs:
                output.break_off(reason)
        if was is Life.RUNNING:
            seat.engine.drop(turn)
        if not turn.is_reported:
            turn.end(outcome, reason)
        self.settled(turn)

    def _drop_stale(self) -> None:
        moves = self._fences.moves
        # Once more on the next look, for the row that became visible after the count (see FenceTable.moves).
        self._look_again = moves != self._moves
        self._moves = moves
        admits = self._fences.admits
        for seat in self._seats.values():
            for turn in [*seat.turns.values(), *seat.lingering.values()]:
                if not admits(turn.stamp):
                    self._drop(seat, turn, "stale")
        for name, early in list(self._early.items()):
            if not admits(early.stamp):
                self._drop_early(name)

    def _drop_early(self, name: tuple[str, TurnKey]) -> None:
        early = self._early.pop(name)
        self._early_bytes -= early.nbytes
        self._counts["early_chunks_dropped"] += len(early.items)
        for item, source in early.items:
            discard(item, source, self.outbox)

    def _expire_early(self) -> int:
        """Drop early chunks of turns that do not open; when the next ones are due."""
        now, at = self._now(), _NEVER
        for name, early in list(self._early.items()):
            if early.until_ns <= now:
                self._seats[name[0]].broken.add(name[1])
                self._drop_early(name)
            else:
                at = min(at, early.until_ns)
        return at

    def _expire_kept(self, seat: Seat) -> int:
        """Drop kept output that nobody asks for; when the next is due."""
        now, at = self._now(), _NEVER
        for turn in [turn for turn in seat.lingering.values() if turn.awaits_forward]:
            until_ns = turn.since_ns + int(self._limits.forward_s * NS_PER_S)
            if until_ns <= now:
                self._counts["outputs_never_forwarded"] += 1
                self._drop(seat, turn, "expired")
            else:
                at = min(at, until_ns)
        return at

    # -- whose turn it is

    def _mark(self, seat: Seat) -> None:
        if not seat.ready_ns:
            seat.ready_ns = self._now()

    def _most_urgent(self) -> Seat | None:
        first, others = None, False
        for seat in self._seat_list:
            if seat.woken:
                seat.woken = False
                self._mark(seat)
            if seat.alarm_ns != _NEVER and seat.alarm_ns <= self._now():
                seat.alarm_ns = _NEVER
                self._mark(seat)
            if seat.ready_ns:
                others = first is not None
                first = first or seat
        if not others:
            return first
        return min((seat for seat in self._seats.values() if seat.ready_ns), key=Seat.due_ns)

    def _report(self, now: int) -> None:
        self._changed, self._reported_ns = False, now
        for stage, seat in self._seats.items():
            load = seat.engine.load_now()
            self.outbox.say(
                CONTROL,
                Report(stage, load.sessions, load.turns, load.queued, load.bytes_used, load.bytes_cap),
            )
        if self._counts:
            self.outbox.say(CONTROL, Counted(dict(self._counts)))
            self._counts.clear()


def _nbytes(item: Item) -> int:
    if isinstance(item, Handed):
        return 0 if item.payload is None else item.payload.nbytes
    if item.body is None:
        return 0
    return item.body.nbytes if isinstance(item.body, Ticket) else len(item.body.body)
