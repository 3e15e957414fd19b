"""Turn and session states, each moved by one table. If you add a row, also draw it in docs/architecture.md."""

from enum import StrEnum

from omni_live.sessions.errors import Illegal


class TurnState(StrEnum):
    LISTENING = "listening"
    THINKING = "thinking"
    SPEAKING = "speaking"
    DONE = "done"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    INCOMPLETE = "incomplete"

    __hash__ = str.__hash__  # the hash of an Enum is a call in Python, and each move looks up the table

    @property
    def over(self) -> bool:
        return self in _OVER


class Cue(StrEnum):
    """What moves a turn."""

    COMMITTED = "committed"
    """The user's side is complete and the work was submitted."""
    FIRST_OUTPUT = "first_output"
    FINISHED = "finished"
    """Every final output is finished and released."""
    CUT = "cut"
    """Barge-in, cancel, reset, close."""
    BROKE = "broke"
    CUT_SHORT = "cut_short"
    """A limit was reached."""

    __hash__ = str.__hash__


_OVER = frozenset({TurnState.DONE, TurnState.INTERRUPTED, TurnState.FAILED, TurnState.INCOMPLETE})

TURNS: dict[tuple[TurnState, Cue], TurnState] = {
    (TurnState.LISTENING, Cue.COMMITTED): TurnState.THINKING,
    (TurnState.LISTENING, Cue.CUT): TurnState.INTERRUPTED,
    (TurnState.THINKING, Cue.FIRST_OUTPUT): TurnState.SPEAKING,
    (TurnState.THINKING, Cue.FINISHED): TurnState.DONE,
    (TurnState.THINKING, Cue.CUT): TurnState.INTERRUPTED,
    (TurnState.THINKING, Cue.BROKE): TurnState.FAILED,
    (TurnState.THINKING, Cue.CUT_SHORT): TurnState.INCOMPLETE,
    (TurnState.SPEAKING, Cue.FINISHED): TurnState.DONE,
    (TurnState.SPEAKING, Cue.CUT): TurnState.INTERRUPTED,
    (TurnState.SPEAKING, Cue.BROKE): TurnState.FAILED,
    (TurnState.SPEAKING, Cue.CUT_SHORT): TurnState.INCOMPLETE,
}


def follow(state: TurnState, cue: Cue) -> TurnState:
    """The state after the cue; Illegal where the table has no such row."""
    try:
        return TURNS[state, cue]
    except KeyError:
        raise Illegal(f"a turn that is {state} cannot be {cue}") from None


class SessionState(StrEnum):
    OPENING = "opening"
    OPEN = "open"
    DETACHED = "detached"
    DRAINING = "draining"
    CLOSED = "closed"


class Move(StrEnum):
    """What moves a session."""

    ATTACHED = "attached"
    DETACHED = "detached"
    DRAINED = "drained"
    """The server is going away."""
    CLOSED = "closed"


SESSIONS: dict[tuple[SessionState, Move], SessionState] = {
    (SessionState.OPENING, Move.ATTACHED): SessionState.OPEN,
    (SessionState.OPENING, Move.CLOSED): SessionState.CLOSED,
    (SessionState.OPEN, Move.ATTACHED): SessionState.OPEN,
    (SessionState.OPEN, Move.DETACHED): SessionState.DETACHED,
    (SessionState.OPEN, Move.DRAINED): SessionState.DRAINING,
    (SessionState.OPEN, Move.CLOSED): SessionState.CLOSED,
    (SessionState.DETACHED, Move.ATTACHED): SessionState.OPEN,
    (SessionState.DETACHED, Move.CLOSED): SessionState.CLOSED,
    (SessionState.DRAINING, Move.ATTACHED): SessionState.DRAINING,
    (SessionState.DRAINING, Move.CLOSED): SessionState.CLOSED,
}


def move(state: SessionState, how: Move) -> SessionState:
    """The state after the move; Illegal where the table has no such row."""
    try:
        return SESSIONS[state, how]
    except KeyError:
        raise Illegal(f"a session that is {state} cannot be {how}") from None
