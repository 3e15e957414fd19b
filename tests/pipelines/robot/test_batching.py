"""When a step begins and whom it serves."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_live.pipelines.robot.batching import (
    FIRST_NS,
    LEAST_HOLD_NS,
    SLACK_NS,
    UNDATED_NS,
    Go,
    Hold,
    Rhythm,
    Rule,
    Span,
    Steps,
    Waiting,
    decide,
)
from omni_live.sessions.stamp import SessionKey

MS = 1_000_000
RULE = Rule(max_batch=4, window_ns=2 * MS)
NOW = 1_000 * MS
STEPS = Steps(length_ns=10 * MS)
SOON = [Span(NOW, NOW + 50 * MS)]


def session(number: int) -> SessionKey:
    return SessionKey(number)


def waiting(number: int, since_ms: float = 1_000, deadline_ms: float = 0, alone: bool = False) -> Waiting:
    return Waiting(session(number), round(since_ms * MS), round(deadline_ms * MS), alone)


def test_a_robot_that_is_alone_never_waits() -> None:
    assert decide([waiting(1)], [], RULE, STEPS, NOW) == Go((0,))


def test_a_step_is_put_off_while_somebody_is_about_to_ask() -> None:
    assert decide([waiting(1)], SOON, RULE, STEPS, NOW) == Hold(NOW + 2 * MS)


def test_nobody_waits_for_those_who_ask_much_later_or_should_have_asked_before() -> None:
    later, before = Span(NOW + 3 * MS, NOW + 9 * MS), Span(NOW - 9 * MS, NOW - MS)
    assert decide([waiting(1)], [later, before], RULE, STEPS, NOW) == Go((0,))


def test_the_wait_is_over_when_the_last_of_them_should_have_asked() -> None:
    absent = [Span(NOW, NOW + MS // 2), Span(NOW, NOW + MS)]
    assert decide([waiting(1)], absent, RULE, STEPS, NOW) == Hold(NOW + MS)


def test_the_window_opens_with_the_oldest_query_and_is_not_prolonged() -> None:
    queue = [waiting(1, 1_000), waiting(2, 1_001.5)]
    assert decide(queue, SOON, RULE, STEPS, round(1_001.9 * MS)) == Hold(1_002 * MS)
    assert decide(queue, SOON, RULE, STEPS, 1_002 * MS) == Go((0, 1))


def test_for_a_query_that_came_during_a_step_the_window_opens_when_that_is_over() -> None:
    assert decide([waiting(1, 990)], SOON, RULE, STEPS._replace(free_ns=NOW), NOW) == Hold(NOW + 2 * MS)


def test_a_long_step_is_worth_a_longer_wait_up_to_five_milliseconds() -> None:
    assert decide([waiting(1)], SOON, RULE, Steps(32 * MS), NOW) == Hold(NOW + 4 * MS)
    assert decide([waiting(1)], SOON, RULE, Steps(800 * MS), NOW) == Hold(NOW + 5 * MS)


def test_nobody_waits_longer_than_a_step_takes() -> None:
    assert decide([waiting(1)], SOON, RULE, Steps(MS), NOW) == Hold(NOW + MS)
    assert decide([waiting(1)], SOON, RULE, Steps(LEAST_HOLD_NS - 1), NOW) == Go((0,))


def test_without_a_window_nobody_waits() -> None:
    assert decide([waiting(1)], SOON, replace(RULE, window_ns=0), STEPS, NOW) == Go((0,))


def test_a_full_batch_waits_for_nobody() -> None:
    queue = [waiting(number) for number in range(1, 6)]
    assert decide(queue, SOON, RULE, STEPS, NOW) == Go((0, 1, 2, 3))


def test_the_most_urgent_go_first() -> None:
    queue = [waiting(n, deadline_ms=deadline) for n, deadline in enumerate((1_900, 1_300, 1_700, 1_100, 1_500))]
    assert decide(queue, [], RULE, STEPS, NOW) == Go((3, 1, 4, 2))


def test_a_query_without_a_deadline_is_not_starved_by_those_that_have_one() -> None:
    undated = waiting(1, since_ms=900)
    urgent = [waiting(n, since_ms=1_000, deadline_ms=1_050) for n in range(2, 6)]
    assert decide([undated, *urgent], [], RULE, STEPS, NOW) == Go((0, 1, 2, 3))
    assert undated.due_ns == 900 * MS + UNDATED_NS


def test_nobody_waits_past_the_moment_at_which_a_deadline_can_be_kept() -> None:
    queue = [waiting(1, deadline_ms=1_020)]
    assert decide(queue, SOON, RULE, Steps(round(19.5 * MS)), NOW) == Hold(round(1_000.5 * MS))
    assert decide(queue, SOON, RULE, Steps(20 * MS), NOW) == Go((0,))


def test_a_deadline_that_was_over_on_arrival_does_not_end_the_window() -> None:
    assert decide([waiting(1, deadline_ms=999)], SOON, RULE, STEPS, NOW) == Hold(1_002 * MS)


def test_a_query_that_is_to_be_alone_gets_a_batch_of_its_own_at_once() -> None:
    queue = [waiting(1, deadline_ms=1_500), waiting(2, deadline_ms=1_100, alone=True)]
    assert decide(queue, SOON, RULE, STEPS, NOW) == Go((1,))


def test_others_are_not_batched_with_one_that_is_to_be_alone() -> None:
    queue = [waiting(1, deadline_ms=1_100), waiting(2, deadline_ms=1_500, alone=True), waiting(3, deadline_ms=1_600)]
    assert decide(queue, [], RULE, STEPS, NOW) == Go((0, 2))


times = st.integers(0, 20 * MS)
queries = st.builds(
    lambda number, since, deadline, alone: Waiting(session(number), since, since + deadline if deadline else 0, alone),
    st.integers(0, 9),
    times,
    st.one_of(st.just(0), times),
    st.booleans(),
)
queues = st.lists(queries, min_size=1, max_size=12, unique_by=lambda query: query.session)
crowds = st.lists(st.builds(lambda early, length: Span(early, early + length), times, times), max_size=5)
rules = st.builds(Rule, st.integers(1, 8), st.integers(0, 5 * MS))
steps = st.builds(Steps, st.integers(0, 100 * MS), times)


@given(queues, crowds, rules, steps, times)
def test_a_batch_is_bounded_ordered_and_unmixed(
    queue: list[Waiting], crowd: list[Span], rule: Rule, steps: Steps, now: int
) -> None:
    decision = decide(queue, crowd, rule, steps, now)
    if isinstance(decision, Hold):
        return
    chosen = [queue[i] for i in decision.chosen]
    assert 1 <= len(chosen) <= rule.max_batch
    assert len(set(decision.chosen)) == len(chosen)
    assert len(chosen) == 1 or not any(query.alone for query in chosen)
    assert [query.due_ns for query in chosen] == sorted(query.due_ns for query in chosen)
    left = [query for query in queue if query not in chosen and query.alone == chosen[0].alone]
    assert all(query.due_ns >= chosen[-1].due_ns for query in left)


@given(queues, crowds, rules, steps, times)
def test_a_hold_is_short_and_has_a_reason(
    queue: list[Waiting], crowd: list[Span], rule: Rule, steps: Steps, now: int
) -> None:
    decision = decide(queue, crowd, rule, steps, now)
    if isinstance(decision, Go):
        return
    until = decision.until_ns
    assert any(early <= until <= late for early, late in crowd)
    batch = [query for query in queue if not query.alone]
    opened = min(max(query.since_ns, steps.free_ns) for query in batch)
    assert now < until <= opened + min(steps.length_ns, max(rule.window_ns, steps.length_ns // 8))
    assert all(until + steps.length_ns <= query.deadline_ns for query in batch if query.deadline_ns)


@given(queues, crowds, rules, steps, times)
def test_a_hold_that_is_over_becomes_a_step(
    queue: list[Waiting], crowd: list[Span], rule: Rule, steps: Steps, now: int
) -> None:
    decision = decide(queue, crowd, rule, steps, now)
    if isinstance(decision, Hold):
        assert isinstance(decide(queue, crowd, rule, steps, decision.until_ns), Go)


@given(queues, rules, steps, times)
def test_nobody_holds_where_nobody_else_is_expected(queue: list[Waiting], rule: Rule, steps: Steps, now: int) -> None:
    assert isinstance(decide(queue, [], rule, steps, now), Go)


@given(queues, crowds, rules, steps)
def test_everybody_is_served_in_as_many_steps_as_there_are_queries(
    queue: list[Waiting], crowd: list[Span], rule: Rule, steps: Steps
) -> None:
    left, served = list(queue), 0
    while left:
        decision = decide(left, crowd, rule, steps, 1_000 * MS)
        assert isinstance(decision, Go)  # every window is over by then
        left = [query for i, query in enumerate(left) if i not in decision.chosen]
        served += 1
    assert served <= len(queue)


# -- rhythm


def rhythm(*thinks_ms: int) -> tuple[Rhythm, int]:
    """A session that took so long between its answers and its next questions, and when it was answered last."""
    made, now = Rhythm(), 0
    made.asked(session(1), now)
    for think in thinks_ms:
        made.answered(session(1), now)
        now += think * MS
        made.asked(session(1), now)
    made.answered(session(1), now)
    return made, now


def test_a_session_is_expected_again_for_a_while_after_its_first_answer() -> None:
    made, now = rhythm()
    assert made.absent() == [Span(now - FIRST_NS - SLACK_NS, now + FIRST_NS + SLACK_NS)]


def test_a_session_whose_question_is_here_is_not_absent() -> None:
    made, now = rhythm(5)
    made.asked(session(1), now)
    assert made.absent() == []


@pytest.mark.parametrize("think_ms", [1, 5, 100, 800])
def test_a_steady_session_is_expected_when_it_asks_and_at_no_other_time(think_ms: int) -> None:
    made, now = rhythm(*[think_ms] * 40)
    (span,) = made.absent()
    assert span.early_ns <= now + think_ms * MS <= span.late_ns
    assert span.late_ns - span.early_ns < 2.1 * MS


def test_an_unsteady_session_is_expected_within_wider_bounds() -> None:
    made, now = rhythm(*[10, 30] * 10)
    (span,) = made.absent()
    assert span.early_ns < now + 10 * MS < now + 30 * MS < span.late_ns


def test_a_new_rhythm_is_learned() -> None:
    made, now = rhythm(*[2] * 20, *[400] * 30)
    (span,) = made.absent()
    assert span.early_ns <= now + 400 * MS <= span.late_ns
    assert span.early_ns > now + 390 * MS


def test_a_session_that_is_forgotten_is_not_expected_until_it_was_answered_again() -> None:
    made, now = rhythm(5)
    made.forget(session(1))
    made.forget(session(2))
    made.answered(session(1), now)
    assert made.absent() == []
    made.asked(session(1), now)
    made.answered(session(1), now)
    assert len(made.absent()) == 1


# -- both together


@dataclass
class Closed:
    """Robots that ask again so long after each answer, served by a policy whose steps take 100 ms."""

    think_ms: list[int]

    def run(self, until_ms: int) -> list[int]:
        """The sizes of the batches."""
        made, steps = Rhythm(), Steps()
        asks = {number: number * 10 * MS for number in range(len(self.think_ms))}
        queue: list[Waiting] = []
        sizes: list[int] = []
        now = 0
        while now < until_ms * MS:
            for number in [number for number, at in asks.items() if at <= now]:
                queue.append(Waiting(session(number), asks.pop(number)))
                made.asked(session(number), queue[-1].since_ns)
            decision = decide(queue, made.absent(), Rule(32, 2 * MS), steps, now) if queue else None
            if not isinstance(decision, Go):
                now = min([*asks.values(), *([decision.until_ns] if decision else [])])
                continue
            now += 100 * MS
            steps = Steps(100 * MS, now)
            for i in decision.chosen:
                made.answered(queue[i].session, now)
                asks[queue[i].session] = now + self.think_ms[queue[i].session] * MS
            sizes.append(len(decision.chosen))
            queue = [query for i, query in enumerate(queue) if i not in decision.chosen]
        return sizes


def test_robots_that_could_be_served_together_end_up_in_one_group() -> None:
    sizes = Closed([1, 1, 2, 2, 3, 3, 4, 4]).run(5_000)
    assert set(sizes[10:]) == {8}


def test_a_robot_that_asks_seldom_does_not_slow_the_others_down() -> None:
    sizes = Closed([3, 3, 3, 900]).run(20_000)
    assert sum(sizes) / len(sizes) > 2.9
    assert len(sizes) >= 20_000 / (100 + 3) * 0.98
