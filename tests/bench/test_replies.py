"""Which replies are stopped when."""

from itertools import pairwise

from omni_live.bench.replies import EARLY, FIRST_S, LAST_S, LATE, LONG, SMALL_TALK, Disturbed, disturbed, moments
from omni_live.clients.duplex_events import OverlapDecision, ReplyEnded

ENDS = {"r1": "cancelled", "r2": "completed", "r3": "failed"}


def test_moments_are_spread_over_the_first_seconds_of_a_reply() -> None:
    found = moments(22)
    assert len(found) == 22
    assert (found[0], found[-1]) == (FIRST_S, LAST_S)
    assert max(later - earlier for earlier, later in pairwise(found)) < 0.2


def decided(action: str, reply: str = "r1") -> OverlapDecision:
    return OverlapDecision(at_ns=1, action=action, reason="", response_id=reply)


def test_a_reply_that_was_held_and_went_on_is_not_cancelled() -> None:
    events = [decided("hold"), decided("drop"), decided("hold"), decided("drop"), decided("hold", "r2")]
    assert disturbed(events, "r1") == Disturbed(cancelled=False, holds=2)


def test_a_reply_counts_as_cancelled_by_its_own_end() -> None:
    events = [ReplyEnded(at_ns=1, response_id=reply, status=status, reason="") for reply, status in ENDS.items()]
    assert [disturbed(events, reply).cancelled for reply in ENDS] == [True, False, False]
    assert not disturbed([], "r1").cancelled


def test_the_turns_that_are_compared_ask_the_same() -> None:
    assert len(SMALL_TALK) == LATE
    assert SMALL_TALK[EARLY - 1] == SMALL_TALK[LATE - 1]


def test_no_two_prompts_are_the_same() -> None:
    assert len(set(LONG)) == len(LONG)
