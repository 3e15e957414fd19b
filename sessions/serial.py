"""Sessions whose requests run one after the other, first come first served: what plain turns and rollouts share."""

from abc import abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from omni_live.sessions.effects import Count, Credit
from omni_live.sessions.events import ErrorTold, TurnDone, TurnSpoke
from omni_live.sessions.ids import Ids
from omni_live.sessions.inputs import CancelAsked, Outcome, StageEnded, StageSpoke
from omni_live.sessions.lease import SECOND
from omni_live.sessions.limits import Limits
from omni_live.sessions.session import Session
from omni_live.sessions.stamp import Stamp
from omni_live.sessions.turn import Cue, SessionState, TurnState, follow

NS_PER_MS = 1_000_000
CUES = {Outcome.DONE: Cue.FINISHED, Outcome.INCOMPLETE: Cue.CUT_SHORT}


class Request(Protocol):
    """What a client asked for and may have to wait for."""

    @property
    def request_id(self) -> str: ...


@dataclass(slots=True)
class SerialTurn:
    """The request that runs."""

    request_id: str
    stamp: Stamp
    unfinished: set[str]
    since_ns: int
    """When something of it came last."""
    state: TurnState = TurnState.THINKING
    spoken: dict[str, int] = field(default_factory=dict)
    """Chunks that each stage has sent."""
    outcome: Outcome = Outcome.DONE
    reason: str = ""


R = TypeVar("R", bound=Request)
T = TypeVar("T", bound=SerialTurn)


class SerialSession(Session, Generic[R, T]):
    """Base of the kinds with one turn at a time and a mailbox."""

    def __init__(self, session_id: str, slot: int, generation: int, limits: Limits, ids: Ids, now: int) -> None:
        super().__init__(session_id, slot, generation, limits, ids, now)
        self._patience_ns = round(limits.turn_deadline_s * SECOND)
        self._turns = 0
        self._turn: T | None = None
        self._waiting: deque[tuple[R, int]] = deque()
        """Requests and when each came."""
        self._rules |= {
            CancelAsked: self._cancel_asked,
            StageSpoke: self._stage_spoke,
            StageEnded: self._stage_ended,
        }

    @property
    def busy(self) -> bool:
        return self._turn is not None

    # -- what the kinds add --------------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, request: R, since_ns: int) -> None:
        """The request's turn has come; it was asked at `since_ns`."""

    def _accepts(self, turn: T, input: StageSpoke) -> bool:
        """Whether the chunk, which is the next in order, may go out as it is."""
        return True

    def _went_out(self, turn: T) -> None:
        """A chunk of the turn was sent to the client."""

    def _complete(self, turn: T) -> None:
        """Every output of the turn has finished."""
        self._finish(CUES[turn.outcome], turn.reason)

    def _over(self, turn: T) -> None:
        """The turn is over, and its terminal event comes next."""

    # -- requests ------------------------------------------------------------------------------------------------

    def _admit(self, request: R) -> bool:
        """Put the request in the mailbox, or refuse it; it begins as soon as nothing runs."""
        if self.state is SessionState.DRAINING:
            self._emit(ErrorTold("draining", "The server is going away.", request.request_id))
            return False
        if self.busy and len(self._waiting) >= self.limits.mailbox_turns:
            self._effects.append(Count("mailbox_full"))
            self._emit(ErrorTold("mailbox_full", "Too many requests wait in this session.", request.request_id))
            return False
        self._waiting.append((request, self._now))
        return True

    def _cancel_asked(self, input: CancelAsked) -> None:
        self._lease.touch(self._now)
        turn = self._turn
        if turn is not None and input.response_id in (None, turn.request_id):
            self._cut(turn, "client_cancelled")
            return
        for entry in self._waiting:
            if entry[0].request_id == input.response_id:
                self._waiting.remove(entry)
                self._never_began(entry[0], "client_cancelled")
                return
        message = "Cancellation failed: no such turn is active."
        self._emit(ErrorTold("response_cancel_not_active", message, input.event_id))

    def _drop_waiting(self, reason: str) -> None:
        while self._waiting:
            self._never_began(self._waiting.popleft()[0], reason)

    def _never_began(self, request: R, reason: str) -> None:
        self._emit(TurnDone(request.request_id, 0, TurnState.INTERRUPTED.value, reason))

    # -- the turn that runs --------------------------------------------------------------------------------------

    def _next_stamp(self, lane: int, deadline_ns: int) -> Stamp:
        self._turns += 1
        return self.fences[lane].stamp(self._turns, deadline_ns)

    def _current(self, stamp: Stamp) -> T | None:
        """The running turn, if the stamp is one of its own."""
        turn = self._turn
        if turn is None or turn.stamp[:4] != stamp[:4] or not self._admits(stamp):
            self._effects.append(Count("stale_output"))
            return None
        return turn

    def _stage_spoke(self, input: StageSpoke) -> None:
        turn = self._current(input.stamp)
        if turn is None:
            return
        if input.stage not in turn.unfinished:
            self._effects.append(Count("output_after_end"))
            return
        spoken = turn.spoken.get(input.stage, 0)
        if input.stamp.seq < spoken:
            self._effects.append(Count("repeated_output"))
            return
        if input.stamp.seq > spoken or not self._accepts(turn, input):
            self._broke(turn, "output_lost")  # nobody may get an output with a hole in it (G7)
            return
        turn.spoken[input.stage] = spoken + 1
        turn.since_ns = self._now
        if turn.state is TurnState.THINKING:
            turn.state = follow(turn.state, Cue.FIRST_OUTPUT)
        event = TurnSpoke(turn.request_id, turn.stamp.turn, input.stage, input.payload)
        self._emit(event, turn.stamp, input.payload.nbytes)
        if input.outcome is None:
            self._effects.append(Credit(turn.stamp, input.stage, 1))
        self._went_out(turn)

    def _stage_ended(self, input: StageEnded) -> None:
        turn = self._current(input.stamp)
        if turn is None:
            return
        turn.unfinished.discard(input.stage)
        turn.since_ns = self._now
        if input.outcome is Outcome.FAILED:
            self._broke(turn, input.reason)
            return
        if input.outcome is not Outcome.DONE:
            turn.outcome, turn.reason = input.outcome, input.reason
        if not turn.unfinished:
            self._complete(turn)

    def _broke(self, turn: T, reason: str) -> None:
        self._raise_fence(0)
        self._abort(turn.stamp)
        self._finish(Cue.BROKE, reason)

    def _cut(self, turn: T, reason: str) -> None:
        self._raise_fence(0)
        self._abort(turn.stamp)
        self._finish(Cue.CUT, reason)

    def _finish(self, cue: Cue, reason: str) -> None:
        turn = self._turn
        if turn is None:
            return
        turn.state = follow(turn.state, cue)
        self._turn = None
        self._over(turn)
        self._emit(TurnDone(turn.request_id, turn.stamp.turn, turn.state.value, reason))

    def _interrupt(self, reason: str) -> None:
        """Begin anew: the fence moves, what runs or waits ends as interrupted."""
        turn = self._turn
        if turn is not None:
            self._cut(turn, reason)
        else:
            self._raise_fence(0)  # what was said before and is still on its way is stale, too (G1)
        self._drop_waiting(reason)

    # -- time ----------------------------------------------------------------------------------------------------

    def _next_ns(self) -> int | None:
        return None if self._turn is None else self._turn.since_ns + self._patience_ns

    def _expire(self) -> None:
        """End the turn if nothing of it came for too long."""
        turn = self._turn
        if turn is not None and self._now >= turn.since_ns + self._patience_ns:
            self._broke(turn, "timeout")

    def _settle(self) -> None:
        self._expire()
        if self._turn is not None:
            return
        if self._waiting:
            self._begin(*self._waiting.popleft())
        elif self.state is SessionState.DRAINING:
            self._close("drained")

    def _end_turns(self, reason: str) -> None:
        turn = self._turn
        if turn is not None:
            self._abort(turn.stamp)
            self._finish(Cue.CUT, reason)
        self._drop_waiting(reason)
