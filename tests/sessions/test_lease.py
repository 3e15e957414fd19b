"""The lease by example: what it says when, and when it wants to be looked at again."""

import pytest

from omni_live.sessions.lease import SECOND, Lease, Verdict

IDLE, GRACE, AGE, WARNING = 300 * SECOND, 30 * SECOND, 3600 * SECOND, 60 * SECOND
OPENED = 1_000 * SECOND


@pytest.fixture
def lease() -> Lease:
    return Lease(OPENED, IDLE, GRACE, AGE, WARNING)


def test_a_fresh_lease_holds_until_the_idle_time_is_over(lease: Lease) -> None:
    assert lease.verdict(OPENED + IDLE - 1, busy=False) is Verdict.HOLDS
    assert lease.verdict(OPENED + IDLE, busy=False) is Verdict.IDLE
    assert lease.next_ns(busy=False) == OPENED + IDLE


def test_busy_is_not_idle(lease: Lease) -> None:
    assert lease.verdict(OPENED + 2 * IDLE, busy=True) is Verdict.HOLDS
    assert lease.next_ns(busy=True) == lease.expires_ns - WARNING


def test_a_touch_starts_the_idle_time_anew_and_never_turns_it_back(lease: Lease) -> None:
    lease.touch(OPENED + 100 * SECOND)
    lease.touch(OPENED + 50 * SECOND)
    assert lease.next_ns(busy=False) == OPENED + 100 * SECOND + IDLE
    assert lease.verdict(OPENED + IDLE + 99 * SECOND, busy=False) is Verdict.HOLDS


def test_a_detached_session_lapses_after_the_grace_even_while_a_turn_runs(lease: Lease) -> None:
    lease.detach(OPENED + SECOND)
    over = OPENED + SECOND + GRACE
    for busy in (False, True):
        assert lease.next_ns(busy) == over
        assert lease.verdict(over - 1, busy) is Verdict.HOLDS
        assert lease.verdict(over, busy) is Verdict.GRACE_OVER


def test_a_detached_session_is_not_idle_as_well(lease: Lease) -> None:
    lease.detach(OPENED + IDLE - SECOND)
    assert lease.verdict(OPENED + IDLE, busy=False) is Verdict.HOLDS


def test_attaching_ends_the_grace_and_counts_as_a_touch(lease: Lease) -> None:
    lease.detach(OPENED + SECOND)
    lease.attach(OPENED + 20 * SECOND)
    assert lease.verdict(OPENED + SECOND + GRACE, busy=False) is Verdict.HOLDS
    assert lease.next_ns(busy=False) == OPENED + 20 * SECOND + IDLE


def test_the_maximum_age_is_reached_whatever_the_session_does(lease: Lease) -> None:
    lease.touch(lease.expires_ns - 1)
    lease.warned = True
    assert lease.verdict(lease.expires_ns - 1, busy=True) is Verdict.HOLDS
    for busy in (False, True):
        assert lease.verdict(lease.expires_ns, busy) is Verdict.AGED
    lease.detach(lease.expires_ns)
    assert lease.verdict(lease.expires_ns + GRACE, busy=False) is Verdict.AGED


def test_the_warning_comes_before_the_maximum_age_and_only_until_it_was_given(lease: Lease) -> None:
    at = lease.expires_ns - WARNING
    lease.touch(at)
    assert lease.verdict(at - 1, busy=False) is Verdict.HOLDS
    assert lease.verdict(at, busy=False) is Verdict.WARN
    lease.warned = True
    assert lease.verdict(at, busy=False) is Verdict.HOLDS
    assert lease.next_ns(busy=True) == lease.expires_ns


def test_a_session_that_is_idle_when_the_warning_is_due_closes_without_one(lease: Lease) -> None:
    assert lease.verdict(lease.expires_ns - WARNING, busy=False) is Verdict.IDLE


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("warned", [False, True])
def test_the_next_time_is_when_the_verdict_changes_and_not_before(
    lease: Lease, busy: bool, detached: bool, warned: bool
) -> None:
    lease.warned = warned
    if detached:
        lease.detach(OPENED)
    at = lease.next_ns(busy)
    assert lease.verdict(at - 1, busy) is Verdict.HOLDS
    assert lease.verdict(at, busy) is not Verdict.HOLDS
