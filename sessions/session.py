"""The session: one client's leased interaction with one pipeline. Inputs and the time come in, effects go out.

This class holds what every session has: lease, attachments, journals, fences, closing. What a session is about is in
its two kinds, `Conversation` (people who talk) and `PlainSession` (one payload in, outputs back).
"""

import hmac
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, get_args

from omni_live.sessions.effects import Abort, Count, Effect, Emit, RaiseFence, Release, Replace, Wake
from omni_live.sessions.events import (
    ErrorTold,
    Event,
    HeartbeatAcked,
    InputAcked,
    InputMissing,
    SessionClosed,
    SessionExpiring,
    SessionReplaced,
)
from omni_live.sessions.ids import Ids
from omni_live.sessions.inputs import (
    Attached,
    ClientInput,
    CloseAsked,
    Detached,
    DrainAsked,
    EventAcked,
    Heartbeat,
    Input,
    Sequenced,
    StageEnded,
    StageSpoke,
    Woke,
)
from omni_live.sessions.journal import Arrival, InputJournal, OutputJournal, Replay
from omni_live.sessions.lease import SECOND, Lease, Verdict
from omni_live.sessions.limits import Limits
from omni_live.sessions.stamp import LANES, Fence, Stamp
from omni_live.sessions.turn import Move, SessionState, move

EVENT_BYTES = 256
"""What an event counts for in the journal beside its content."""

WAKE_SLACK_NS = 1_000_000

FROM_CLIENT = frozenset(get_args(ClientInput))

Rule = Callable[[Any], None]
"""Takes the input it is listed under; the table ties type to method."""


class Session(ABC):
    """Base of the session kinds. Not thread-safe: one writer, the orchestrator."""

    def __init__(self, session_id: str, slot: int, generation: int, limits: Limits, ids: Ids, now: int) -> None:
        self.session_id = session_id
        self.slot = slot
        self.generation = generation
        self.limits = limits
        self.state = SessionState.OPENING
        self.closed = False
        self.attachment = 0
        self.token = ""
        self._old_token = ""
        """Still good until something is heard on the new attachment: the client may never have got the new one."""
        self.fences = [Fence(slot * LANES + lane, generation) for lane in range(LANES)]
        self._ids = ids
        self._now = now
        self._lease = Lease(
            now,
            round(limits.idle_lease_s * SECOND),
            round(limits.detach_grace_s * SECOND),
            round(limits.max_age_s * SECOND),
            round(limits.max_age_warning_s * SECOND),
        )
        self._journal = OutputJournal(limits.journal_bytes, round(limits.journal_s * SECOND))
        self._inputs = InputJournal()
        self._effects: list[Effect] = []
        self._wake_ns: int | None = None
        self._is_moved = True
        """The lease or the drain may have an earlier deadline than when the wake was set."""
        self._drain_ns: int | None = None
        self._opened = False
        self._rules: dict[type, Rule] = {
            Attached: self._attached,
            Detached: self._detached,
            Sequenced: self._sequenced,
            EventAcked: self._event_acked,
            Heartbeat: self._heartbeat,
            CloseAsked: self._close_asked,
            Woke: self._woke,
            DrainAsked: self._drain_asked,
        }

    # -- the one way in ------------------------------------------------------------------------------------------

    def handle(self, input: Input, now: int) -> list[Effect]:
        """What is to be done about the input; nothing but a count once the session is closed (G5)."""
        if self.closed:
            return [Count("input_after_close")]
        self._now = max(self._now, now)
        if self.busy:
            self._lease.touch(self._now)  # the idle time starts when the turn is over
        self._effects = []
        if not self._opened:
            self._opened = True
            self._effects.extend(RaiseFence(fence) for fence in self.fences)
        self._apply(input)
        if not self.closed:
            self._settle()
        if not self.closed:
            self._schedule()
        return self._effects

    def _apply(self, input: Input) -> None:
        rule = self._rules.get(type(input))
        if self._old_token and type(input) in FROM_CLIENT:
            self._old_token = ""
        if rule is not None:
            rule(input)
            if type(input) is StageSpoke and input.outcome is not None and not self.closed:
                self._apply(StageEnded(input.stamp, input.stage, input.outcome, input.reason))
        else:  # a client may well ask a session for what only the other kind can do
            self._effects.append(Count("unsupported_input"))
            self._emit(ErrorTold("unsupported_input", "This model does not take such an input."))

    def resumable(self, token: str) -> str | None:
        """None where a resume with the token would succeed, else the code of the refusal."""
        if self.closed or self.state is SessionState.OPENING:
            return "session_resume_expired"
        shown = token.encode("utf-8", "surrogatepass")
        good = [known for known in (self.token, self._old_token) if known]
        if not any(hmac.compare_digest(shown, known.encode()) for known in good):
            return "invalid_resume_token"
        return None

    # -- what the kinds add --------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether a turn runs."""

    @abstractmethod
    def _greet(self) -> Event | None:
        """The first event of a fresh attachment."""

    @abstractmethod
    def _welcome_back(self, replay: Replay) -> list[Event]:
        """The first events of a resumed attachment."""

    @abstractmethod
    def _end_turns(self, reason: str) -> None:
        """End whatever runs; fences are raised by then."""

    @abstractmethod
    def _settle(self) -> None:
        """After every input: release what may go out, finish what is complete."""

    def _next_ns(self) -> int | None:
        """When `_settle` has something to do, if time alone decides that."""
        return None

    # -- attachments ---------------------------------------------------------------------------------------------

    def _attached(self, input: Attached) -> None:
        if self.attachment and self.state is not SessionState.DETACHED:
            self._tell(SessionReplaced())
            self._effects.append(Replace(self.attachment))
        self.attachment = input.attachment
        self._is_moved = True
        self._old_token, self.token = input.token or self.token, self._ids("token")
        self.state = move(self.state, Move.ATTACHED)
        self._lease.attach(self._now)
        self._inputs.asked_anew()
        if input.seen is None:
            self._inputs = InputJournal()  # whoever starts anew numbers its input anew
            greeting = self._greet()
            if greeting is not None:
                self._tell(greeting)
            return
        replay = self._journal.replay(input.seen, self._now)
        for event in self._welcome_back(replay):
            self._tell(event)
        self._inputs.told(self._now)
        for entry in replay.entries:
            self._effects.append(Emit(entry.event, entry.seq, entry.content, entry.nbytes))

    def _detached(self, input: Detached) -> None:
        if input.attachment != self.attachment or self.state is SessionState.DETACHED:
            self._effects.append(Count("stale_detach"))
        elif self.state is SessionState.DRAINING or self.limits.detach_grace_s <= 0:
            self._close("detached")
        else:
            self.state = move(self.state, Move.DETACHED)
            self._lease.detach(self._now)
            self._is_moved = True

    # -- client housekeeping -------------------------------------------------------------------------------------

    def _sequenced(self, input: Sequenced) -> None:
        match self._inputs.arrive(input.seq):
            case Arrival.NEXT:
                self._apply(input.input)
            case Arrival.DUPLICATE:
                self._effects.append(Count("duplicate_input"))
            case Arrival.AHEAD:
                self._effects.append(Count("input_gap"))
                if self._inputs.wants_resend():
                    self._tell(InputMissing(self._inputs.taken))
        if not self.closed and self._inputs.due(self._now):
            self._tell(InputAcked(self._inputs.taken))

    def _event_acked(self, input: EventAcked) -> None:
        self._journal.ack(input.seq)
        self._lease.touch(self._now)

    def _heartbeat(self, input: Heartbeat) -> None:
        self._lease.touch(self._now)
        self._tell(HeartbeatAcked(input.event_id))

    def _close_asked(self, input: CloseAsked) -> None:
        self._close(input.reason)

    # -- time ----------------------------------------------------------------------------------------------------

    def _woke(self, _: Woke) -> None:
        self._wake_ns = None
        if self._drain_ns is not None and self._now >= self._drain_ns:
            self._close("drained")
            return
        match self._lease.verdict(self._now, self.busy):
            case Verdict.WARN:
                self._lease.warned = True
                self._emit(SessionExpiring((self._lease.expires_ns - self._now) / SECOND))
            case Verdict.IDLE:
                self._close("idle")
            case Verdict.GRACE_OVER:
                self._close("detached")
            case Verdict.AGED:
                self._close("max_age")
            case Verdict.HOLDS:
                pass

    def _drain_asked(self, input: DrainAsked) -> None:
        if self.state is SessionState.OPEN and self.busy:
            self.state = move(self.state, Move.DRAINED)
            self._drain_ns = input.deadline_ns
            self._is_moved = True
        elif self.state is not SessionState.DRAINING:
            self._close("drained")

    def _schedule(self) -> None:
        soon, wake_ns = self._next_ns(), self._wake_ns
        # Idleness that begins now is the one deadline of the lease that can be new where nothing moved it.
        idle_ns = self._now + self._lease.idle_ns
        new_ns = idle_ns if soon is None else min(soon, idle_ns)
        if wake_ns is not None and not self._is_moved and wake_ns - WAKE_SLACK_NS <= new_ns:
            return
        self._is_moved = False
        at = self._lease.next_ns(self.busy)
        for other in (self._drain_ns, soon):
            if other is not None:
                at = min(at, other)
        # a timer that fires early finds nothing to do and is set anew; one that is late is worth a new one
        if wake_ns is None or at < wake_ns - WAKE_SLACK_NS:
            self._wake_ns = at
            self._effects.append(Wake(at))

    # -- what the kinds use --------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self.fences[0].epoch

    def _tell(self, event: Event) -> None:
        """Send without journal: it is about the attachment itself."""
        if self.state is not SessionState.DETACHED:
            self._effects.append(Emit(event, 0))

    def _emit(self, event: Event, content: Stamp | None = None, nbytes: int = 0) -> None:
        """Journal and send."""
        size = nbytes + EVENT_BYTES
        seq = self._journal.add(event, content, size, self._now)
        if self.state is not SessionState.DETACHED:
            self._effects.append(Emit(event, seq, content, size))

    def _raise_fence(self, lane: int) -> None:
        """Everything that was stamped on this lane before is stale from here on (G1)."""
        fence = self.fences[lane].raised()
        self.fences[lane] = fence
        self._effects.append(RaiseFence(fence))
        voided = self._journal.fence(fence.slot, fence.generation, fence.epoch)
        if voided:
            self._effects.append(Count("voided_frames", voided))

    def _abort(self, stamp: Stamp) -> None:
        self._effects.append(Abort(stamp))

    def _admits(self, stamp: Stamp) -> bool:
        lane = stamp.slot - self.slot * LANES
        return 0 <= lane < LANES and self.fences[lane].admits(stamp)

    def _close(self, reason: str) -> None:
        if self.closed:
            return
        if self.busy:  # what a finished turn said last may still go out before the farewell
            for lane in range(LANES):
                self._raise_fence(lane)
        self._end_turns(reason)
        self._tell(SessionClosed(reason))
        self.state = move(self.state, Move.CLOSED)
        self.closed = True
        self._effects.append(Release(reason))
