"""A fake engine for tests and measurements: it hands on what it gets, and fails on request."""

import os
import signal
import time
from collections.abc import Mapping

from omni_live.engines.contract import EngineOptions, Host, Load, SessionError, Turn, TurnError
from omni_live.sessions.inputs import Outcome
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.stamp import SessionKey

_FAULTS = frozenset({"fail", "raise", "crash", "stall"})


class FakeFailure(RuntimeError):
    """What the fake raises where a real engine would have a bug."""


class FakeEcho:
    """Emits each chunk of a turn's input unchanged. Not a model.

    Options: `inline` (true); `steps`: steps that a chunk takes (1); `step_s`: seconds that a step takes, asleep (0);
    `multiply`: chunks out for each chunk in (1); `limit`: chunks out after which the turn ends INCOMPLETE
    (max_output_tokens), 0 for none; `ends_early`: chunks in after which the turn ends DONE, 0 for never.
    A chunk whose kind is one of these asks for a fault: `fail` (this turn fails with TurnError), `raise` (the engine
    raises something else), `crash` (the process dies at once), `stall` (the step never returns).
    What a session is told (`listen`) comes back as a finding; snapshots carry the number of things it was told.
    """

    def __init__(self, options: EngineOptions) -> None:
        self.inline = bool(options.values.get("inline", True))
        self._steps = int(_number(options, "steps", 1))
        self._step_s = _number(options, "step_s", 0.0)
        self._multiply = int(_number(options, "multiply", 1))
        self._limit = int(_number(options, "limit", 0))
        self._ends_early = int(_number(options, "ends_early", 0))
        self._host: Host | None = None
        self._sessions: dict[SessionKey, int] = {}
        self._turns: dict[int, _Echo] = {}

    def load(self, host: Host) -> None:
        self._host = host

    def open(self, session: SessionKey, params: Mapping[str, Scalar]) -> None:
        if params.get("refuse"):
            raise SessionError(session, "refused")
        self._sessions[session] = 0

    def close(self, session: SessionKey) -> None:
        del self._sessions[session]

    def begin(self, turn: Turn) -> None:
        self._turns[id(turn)] = _Echo(turn)

    def drop(self, turn: Turn) -> None:
        del self._turns[id(turn)]

    def listen(self, session: SessionKey, payload: Payload) -> None:
        self._sessions[session] += 1
        if self._host is not None:
            self._host.find(session, payload)

    def step(self) -> bool:
        if self._step_s and self._turns:
            time.sleep(self._step_s)
        echoes = list(self._turns.values())
        if len(echoes) > 1:
            echoes.sort(key=_Echo.due)
        more = False
        for echo in echoes:
            more |= self._advance(echo)
        return more

    def fork(self, session: SessionKey, into: SessionKey) -> None:
        self._sessions[into] = self._sessions[session]

    def snapshot(self, session: SessionKey) -> Payload:
        return Payload("fake", {"told": self._sessions[session]})

    def restore(self, session: SessionKey, payload: Payload) -> None:
        told = payload.meta.get("told")
        if not isinstance(told, int):
            raise SessionError(session, "bad_snapshot")
        self._sessions[session] = told

    def load_now(self) -> Load:
        queued = sum(echo.turn.waiting() for echo in self._turns.values())
        return Load(len(self._sessions), len(self._turns), queued, 0, 0)

    def shut(self) -> None:
        self._turns.clear()

    def _advance(self, echo: "_Echo") -> bool:
        """True where there is more to do right away."""
        turn = echo.turn
        if not turn.room():
            return False
        if echo.payload is None:
            payload = turn.take()
            if payload is None:
                if turn.exhausted():
                    self._finish(turn, Outcome.DONE)
                return False
            if payload.kind in _FAULTS:
                _act_out(payload.kind, turn)
            echo.taken += 1
            echo.payload, echo.steps, echo.copies = payload, self._steps, self._multiply
        echo.steps -= 1
        return echo.steps > 0 or self._emit(echo, echo.payload)

    def _emit(self, echo: "_Echo", payload: Payload) -> bool:
        turn = echo.turn
        turn.emit(payload)
        echo.made += 1
        echo.copies -= 1
        if not echo.copies:
            echo.payload = None
        if echo.made == self._limit:
            self._finish(turn, Outcome.INCOMPLETE, "max_output_tokens")
        elif not echo.copies and (turn.exhausted() or echo.taken == self._ends_early):
            self._finish(turn, Outcome.DONE)
        return echo.copies > 0 or turn.waiting() > 0

    def _finish(self, turn: Turn, outcome: Outcome, reason: str = "") -> None:
        del self._turns[id(turn)]
        turn.finish(outcome, reason)


class _Echo:
    """A turn and what is being done with its latest chunk."""

    __slots__ = ("copies", "made", "payload", "steps", "taken", "turn")

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.payload: Payload | None = None
        self.steps = 0
        self.copies = 0
        self.taken = 0
        self.made = 0

    def due(self) -> int:
        return self.turn.stamp.deadline_ns or 2**63


def _number(options: EngineOptions, name: str, default: float) -> float:
    value = options.values.get(name, default)
    if not isinstance(value, int | float):
        raise TypeError(f"option {name} is not a number")
    return value


def _act_out(kind: str, turn: Turn) -> None:
    match kind:
        case "fail":
            raise TurnError(turn)
        case "raise":
            raise FakeFailure("a chunk asked for it")
        case "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stall":
            while True:
                time.sleep(3600)
        case _:
            pass
