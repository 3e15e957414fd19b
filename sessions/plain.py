"""Plain turns: one payload in, the outputs of the named stages back. One-shot calls are such a session's only turn."""

from collections import deque
from dataclasses import dataclass, field

from omni_live.sessions.effects import Count, Credit, Feed, Submit
from omni_live.sessions.events import ErrorTold, Event, ResyncRequired, TurnDone, TurnSpoke
from omni_live.sessions.ids import Ids
from omni_live.sessions.inputs import (
    Asked,
    CancelAsked,
    Outcome,
    ResetAsked,
    StageEnded,
    StageFound,
    StageLost,
    StageSpoke,
)
from omni_live.sessions.journal import Replay
from omni_live.sessions.lease import SECOND
from omni_live.sessions.limits import Limits
from omni_live.sessions.payload import Payload
from omni_live.sessions.session import Session
from omni_live.sessions.stamp import Stamp
from omni_live.sessions.turn import Cue, SessionState, TurnState, follow

NS_PER_MS = 1_000_000
RESET = Payload("reset")
"""What a stage is fed that is to forget the session."""
CUES = {Outcome.DONE: Cue.FINISHED, Outcome.INCOMPLETE: Cue.CUT_SHORT}


@dataclass(slots=True)
class PlainTurn:
    asked: Asked
    stamp: Stamp
    state: TurnState = TurnState.THINKING
    unfinished: set[str] = field(default_factory=set)
    spoken: dict[str, int] = field(default_factory=dict)
    """Chunks that each stage has sent."""
    since_ns: int = 0
    """When something of it came last."""
    outcome: Outcome = Outcome.DONE
    reason: str = ""


class PlainSession(Session):
    """Turns one after another, first come first served."""

    def __init__(self, session_id: str, slot: int, generation: int, limits: Limits, ids: Ids, now: int) -> None:
        super().__init__(session_id, slot, generation, limits, ids, now)
        self._patience_ns = round(limits.turn_deadline_s * SECOND)
        self._turns = 0
        self._turn: PlainTurn | None = None
        self._waiting: deque[tuple[Asked, int]] = deque()
        """Requests and when each came."""
        self._rules |= {
            Asked: self._asked,
            ResetAsked: self._reset_asked,
            CancelAsked: self._cancel_asked,
            StageSpoke: self._stage_spoke,
            StageEnded: self._stage_ended,
            StageFound: self._ignored,
            StageLost: self._ignored,
        }

    @property
    def busy(self) -> bool:
        return self._turn is not None

    def _greet(self) -> Event | None:
        return None

    def _welcome_back(self, replay: Replay) -> list[Event]:
        if replay.gap is None:
            return []
        return [ResyncRequired(*replay.gap, "journal_overflow" if replay.overflowed else "journal_gap", ())]

    def _ignored(self, _: StageFound | StageLost) -> None:
        """A plain session keeps nothing in a stage that a finding or a loss could be about."""

    def _asked(self, input: Asked) -> None:
        self._lease.touch(self._now)
        if self.state is SessionState.DRAINING:
            self._emit(ErrorTold("draining", "The server is going away.", input.request_id))
            return
        if input.latest:
            self._drop_waiting("superseded")
        if self._turn is None:
            self._begin(input, self._now)
        elif len(self._waiting) < self.limits.mailbox_turns:
            self._waiting.append((input, self._now))
        else:
            self._effects.append(Count("mailbox_full"))
            self._emit(ErrorTold("mailbox_full", "Too many requests wait in this session.", input.request_id))

    def _begin(self, asked: Asked, since_ns: int) -> None:
        self._turns += 1
        stamp = self.fences[0].stamp(self._turns, since_ns + round(asked.due_ms * NS_PER_MS))
        self._turn = PlainTurn(asked, stamp, unfinished=set(asked.outputs), since_ns=self._now)
        self._effects.append(Submit(stamp, asked.entry, asked.outputs, asked.payload, asked.params))

    def _current(self, stamp: Stamp) -> PlainTurn | None:
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
        if input.stamp.seq > spoken:
            self._broke(turn, "output_lost")  # nobody may get an output with a hole in it (G7)
            return
        turn.spoken[input.stage] = spoken + 1
        turn.since_ns = self._now
        if turn.state is TurnState.THINKING:
            turn.state = follow(turn.state, Cue.FIRST_OUTPUT)
        event = TurnSpoke(turn.asked.request_id, turn.stamp.turn, input.stage, input.payload)
        self._emit(event, turn.stamp, input.payload.nbytes)
        self._effects.append(Credit(turn.stamp, input.stage, 1))

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
            self._finish(CUES[turn.outcome], turn.reason)

    def _broke(self, turn: PlainTurn, reason: str) -> None:
        self._raise_fence(0)
        self._abort(turn.stamp)
        self._finish(Cue.BROKE, reason)

    def _cancel_asked(self, input: CancelAsked) -> None:
        self._lease.touch(self._now)
        turn = self._turn
        if turn is not None and input.response_id in (None, turn.asked.request_id):
            self._cut(turn, "client_cancelled")
            return
        for entry in self._waiting:
            if entry[0].request_id == input.response_id:
                self._waiting.remove(entry)
                self._never_began(entry[0], "client_cancelled")
                return
        message = "Cancellation failed: no such turn is active."
        self._emit(ErrorTold("response_cancel_not_active", message, input.event_id))

    def _reset_asked(self, input: ResetAsked) -> None:
        self._lease.touch(self._now)
        turn = self._turn
        if turn is not None:
            self._cut(turn, "reset")
        else:
            self._raise_fence(0)
        self._drop_waiting("reset")
        self._effects.extend(Feed(stage, RESET) for stage in input.stages)

    def _cut(self, turn: PlainTurn, reason: str) -> None:
        self._raise_fence(0)
        self._abort(turn.stamp)
        self._finish(Cue.CUT, reason)

    def _drop_waiting(self, reason: str) -> None:
        while self._waiting:
            self._never_began(self._waiting.popleft()[0], reason)

    def _never_began(self, asked: Asked, reason: str) -> None:
        self._emit(TurnDone(asked.request_id, 0, TurnState.INTERRUPTED.value, reason))

    def _finish(self, cue: Cue, reason: str) -> None:
        turn = self._turn
        if turn is None:
            return
        turn.state = follow(turn.state, cue)
        self._turn = None
        self._emit(TurnDone(turn.asked.request_id, turn.stamp.turn, turn.state.value, reason))

    def _next_ns(self) -> int | None:
        return None if self._turn is None else self._turn.since_ns + self._patience_ns

    def _settle(self) -> None:
        turn = self._turn
        if turn is not None:
            if self._now < turn.since_ns + self._patience_ns:
                return
            self._broke(turn, "timeout")
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
