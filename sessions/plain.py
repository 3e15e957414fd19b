"""Plain turns: one payload in, the outputs of the named stages back. One-shot calls are such a session's only turn."""

from omni_live.sessions.effects import Feed, Submit
from omni_live.sessions.events import Event, ResyncRequired
from omni_live.sessions.ids import Ids
from omni_live.sessions.inputs import Asked, ResetAsked, StageFound, StageLost
from omni_live.sessions.journal import Replay
from omni_live.sessions.limits import Limits
from omni_live.sessions.payload import Payload
from omni_live.sessions.serial import NS_PER_MS, SerialSession, SerialTurn
from omni_live.sessions.turn import SessionState

RESET = Payload("reset")
"""What a stage is fed that is to forget the session."""


class PlainSession(SerialSession[Asked, SerialTurn]):
    """Turns one after another, first come first served."""

    def __init__(self, session_id: str, slot: int, generation: int, limits: Limits, ids: Ids, now: int) -> None:
        super().__init__(session_id, slot, generation, limits, ids, now)
        self._rules |= {
            Asked: self._asked,
            ResetAsked: self._reset_asked,
            StageFound: self._ignored,
            StageLost: self._ignored,
        }

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
        if input.latest and self.state is not SessionState.DRAINING:
            self._drop_waiting("superseded")
        self._admit(input)

    def _begin(self, request: Asked, since_ns: int) -> None:
        stamp = self._next_stamp(0, since_ns + round(request.due_ms * NS_PER_MS))
        self._turn = SerialTurn(request.request_id, stamp, set(request.outputs), self._now)
        self._effects.append(Submit(stamp, request.entry, request.outputs, request.payload, request.params))

    def _reset_asked(self, input: ResetAsked) -> None:
        self._lease.touch(self._now)
        self._interrupt("reset")
        self._effects.extend(Feed(stage, RESET) for stage in input.stages)
