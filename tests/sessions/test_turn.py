"""Every pair of the two tables, those that are in them and those that are not."""

from itertools import product

import pytest

from omni_live.sessions.errors import Illegal, SessionError
from omni_live.sessions.turn import Cue, Move, SessionState, TurnState, follow, move

_ = None
TURNS = {
    # COMMITTED, FIRST_OUTPUT, FINISHED, CUT, BROKE, CUT_SHORT
    TurnState.LISTENING: (TurnState.THINKING, _, _, TurnState.INTERRUPTED, _, _),
    TurnState.THINKING: (
        _,
        TurnState.SPEAKING,
        TurnState.DONE,
        TurnState.INTERRUPTED,
        TurnState.FAILED,
        TurnState.INCOMPLETE,
    ),
    TurnState.SPEAKING: (_, _, TurnState.DONE, TurnState.INTERRUPTED, TurnState.FAILED, TurnState.INCOMPLETE),
}
NOTHING = (None,) * len(Cue)

OPENING, OPEN, DETACHED, DRAINING, CLOSED = SessionState
SESSIONS = {
    # ATTACHED, DETACHED, DRAINED, CLOSED
    OPENING: (OPEN, _, _, CLOSED),
    OPEN: (OPEN, DETACHED, DRAINING, CLOSED),
    DETACHED: (OPEN, _, _, CLOSED),
    DRAINING: (DRAINING, _, _, CLOSED),
    CLOSED: (_, _, _, _),
}


@pytest.mark.parametrize(("state", "cue"), list(product(TurnState, Cue)))
def test_a_turn_moves_as_the_table_says(state: TurnState, cue: Cue) -> None:
    expected = TURNS.get(state, NOTHING)[list(Cue).index(cue)]
    if expected is None:
        with pytest.raises(Illegal, match=f"a turn that is {state} cannot be {cue}"):
            follow(state, cue)
    else:
        assert follow(state, cue) is expected


@pytest.mark.parametrize(("state", "how"), list(product(SessionState, Move)))
def test_a_session_moves_as_the_table_says(state: SessionState, how: Move) -> None:
    expected = SESSIONS[state][list(Move).index(how)]
    if expected is None:
        with pytest.raises(Illegal, match=f"a session that is {state} cannot be {how}"):
            move(state, how)
    else:
        assert move(state, how) is expected


def test_a_turn_is_over_in_exactly_the_states_that_nothing_leads_out_of() -> None:
    stuck = {state for state in TurnState if state not in TURNS}
    assert {state for state in TurnState if state.over} == stuck
    assert stuck == {TurnState.DONE, TurnState.INTERRUPTED, TurnState.FAILED, TurnState.INCOMPLETE}


def test_every_state_can_be_reached_from_the_first() -> None:
    turns, sessions = {TurnState.LISTENING}, {SessionState.OPENING}
    for _round in TurnState:
        turns |= {state for row in list(turns) for state in TURNS.get(row, NOTHING) if state is not None}
        sessions |= {state for row in list(sessions) for state in SESSIONS[row] if state is not None}
    assert turns == set(TurnState)
    assert sessions == set(SessionState)


def test_a_closed_session_can_be_reached_from_every_other_and_left_by_nothing() -> None:
    for state in SessionState:
        if state is not CLOSED:
            assert move(state, Move.CLOSED) is CLOSED


def test_an_illegal_transition_is_an_error_of_the_core() -> None:
    assert issubclass(Illegal, SessionError)
