"""Which replies are stopped when."""

from itertools import pairwise

from omni_live.bench.replies import EARLY, FIRST_S, LAST_S, LATE, LONG, SMALL_TALK, moments


def test_moments_are_spread_over_the_first_seconds_of_a_reply() -> None:
    found = moments(22)
    assert len(found) == 22
    assert (found[0], found[-1]) == (FIRST_S, LAST_S)
    assert max(later - earlier for earlier, later in pairwise(found)) < 0.2


def test_the_turns_that_are_compared_ask_the_same() -> None:
    assert len(SMALL_TALK) == LATE
    assert SMALL_TALK[EARLY - 1] == SMALL_TALK[LATE - 1]


def test_no_two_prompts_are_the_same() -> None:
    assert len(set(LONG)) == len(LONG)
