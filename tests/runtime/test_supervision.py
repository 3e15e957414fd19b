"""Restarts: budget, back-off, breaker, probe; all of it a matter of times given in."""

from omni_live.runtime.supervision import NS_PER_MS, NS_PER_S, Breaker, GiveUp, Restart, Supervision
from omni_live.sessions.limits import Limits

LIMITS = Limits(restarts=3, restart_window_s=60, restart_backoff_ms=250, restart_backoff_cap_ms=900, breaker_s=30)


def test_the_wait_before_a_restart_doubles_with_each_crash_up_to_its_cap() -> None:
    supervision = Supervision(LIMITS)
    assert supervision.crashed(0) == Restart(250 * NS_PER_MS)
    assert supervision.crashed(0) == Restart(500 * NS_PER_MS)
    assert supervision.crashed(0) == Restart(900 * NS_PER_MS)


def test_one_crash_more_than_the_budget_opens_the_breaker() -> None:
    supervision = Supervision(LIMITS)
    for _ in range(3):
        supervision.crashed(0)
    assert supervision.breaker is Breaker.CLOSED
    assert supervision.crashed(NS_PER_S) == GiveUp(31 * NS_PER_S)
    assert supervision.breaker is Breaker.OPEN
    assert supervision.retry_after_s(11 * NS_PER_S) == 20


def test_crashes_outside_the_window_are_forgotten() -> None:
    supervision = Supervision(LIMITS)
    for second in range(0, 300, 30):
        assert isinstance(supervision.crashed(second * NS_PER_S), Restart)


def test_a_crash_while_the_breaker_is_open_does_not_prolong_it() -> None:
    supervision = Supervision(LIMITS)
    for _ in range(4):
        supervision.crashed(0)
    assert supervision.crashed(10 * NS_PER_S) == GiveUp(30 * NS_PER_S)


def test_a_ready_probe_closes_the_breaker_and_gives_the_whole_budget_again() -> None:
    supervision = Supervision(LIMITS)
    for _ in range(4):
        supervision.crashed(0)
    supervision.probing()
    assert supervision.recovered()
    assert not supervision.recovered()
    assert supervision.crashed(31 * NS_PER_S) == Restart(31 * NS_PER_S + 250 * NS_PER_MS)


def test_a_probe_that_crashes_opens_the_breaker_for_as_long_again() -> None:
    supervision = Supervision(LIMITS)
    for _ in range(4):
        supervision.crashed(0)
    supervision.probing()
    assert supervision.crashed(200 * NS_PER_S) == GiveUp(230 * NS_PER_S)


def test_a_ready_replica_while_the_breaker_is_open_does_not_close_it() -> None:
    supervision = Supervision(LIMITS)
    for _ in range(4):
        supervision.crashed(0)
    assert not supervision.recovered()
    assert supervision.breaker is Breaker.OPEN
