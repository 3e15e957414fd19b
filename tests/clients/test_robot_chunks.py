"""Which row of which chunk is executed at which step, and when the next chunk is asked for. No time passes here."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omni_live.clients.chunks import Ask, Executor, Rules, unsafe
from omni_live.protocols.openpi.tabletop import CONTRACT


def _chunk(mark: float, rows: int = 16) -> np.ndarray:
    """Rows that say whose they are and which."""
    return np.stack([np.full(rows, mark), np.arange(rows)], axis=1).astype(np.float32)


def _ask(executor: Executor) -> Ask:
    ask = executor.due()
    assert ask is not None
    return ask


def _acts(executor: Executor, steps: int) -> list[tuple[float, float] | None]:
    rows = [executor.act() for _ in range(steps)]
    return [None if row is None else (float(row[0]), float(row[1])) for row in rows]


def test_in_turn_four_of_sixteen_rows_are_executed_and_then_the_next_chunk_is_asked_for() -> None:
    executor = Executor(Rules(execute_steps=4))
    assert executor.take(_ask(executor), _chunk(1))
    for step in range(4):
        assert executor.due() is None
        assert _acts(executor, 1) == [(1, step)]
    ask = _ask(executor)
    assert (ask.step, ask.executed_steps, ask.delay_steps) == (4, None, None)
    assert _acts(executor, 2) == [None, None]
    assert executor.take(ask, _chunk(2))
    assert _acts(executor, 4) == [(2, 0), (2, 1), (2, 2), (2, 3)]
    assert executor.holds == 2


def test_overlapping_the_new_chunk_takes_over_at_the_row_of_the_step_at_which_it_comes() -> None:
    executor = Executor(Rules(execute_steps=4, overlaps=True))
    executor.take(_ask(executor), _chunk(1))
    assert _acts(executor, 4) == [(1, 0), (1, 1), (1, 2), (1, 3)]
    ask = _ask(executor)
    assert _acts(executor, 3) == [(1, 4), (1, 5), (1, 6)]
    assert executor.take(ask, _chunk(2))
    assert _acts(executor, 1) == [(2, 3)]
    assert executor.holds == 0


def test_overlapping_the_next_chunk_is_asked_for_early_enough_for_the_longest_delay_seen() -> None:
    executor = Executor(Rules(execute_steps=16, overlaps=True))
    executor.take(_ask(executor), _chunk(1))
    _acts(executor, 15)
    ask = _ask(executor)
    assert ask.step == 15  # a delay of one step is taken for granted
    _acts(executor, 5)
    executor.take(ask, _chunk(2))
    assert executor.delay_steps == 5
    while executor.due() is None:
        executor.act()
    assert executor.step == 15 + 16 - 5


def test_real_time_chunking_says_how_much_is_executed_and_how_much_is_fixed() -> None:
    executor = Executor(Rules(execute_steps=4, overlaps=True, continues=True))
    first = _ask(executor)
    assert (first.executed_steps, first.delay_steps) == (None, None)
    executor.take(first, _chunk(1))
    _acts(executor, 4)
    second = _ask(executor)
    assert (second.executed_steps, second.delay_steps) == (4, 1)
    _acts(executor, 3)
    executor.take(second, _chunk(2))
    _acts(executor, 1)
    third = _ask(executor)
    assert (third.executed_steps, third.delay_steps) == (4, 3)


def test_no_more_steps_are_fixed_than_the_last_chunk_has_left() -> None:
    executor = Executor(Rules(execute_steps=4, overlaps=True, continues=True))
    executor.take(_ask(executor), _chunk(1))
    _acts(executor, 4)
    slow = _ask(executor)
    _acts(executor, 10)
    executor.take(slow, _chunk(2))
    late = _ask(executor)  # the new chunk is ten steps old already
    assert (late.executed_steps, late.delay_steps) == (10, 6)


def test_after_a_chunk_got_lost_nothing_is_gone_on_with_until_the_next_one_is_here() -> None:
    executor = Executor(Rules(execute_steps=4, overlaps=True, continues=True))
    executor.take(_ask(executor), _chunk(1))
    _acts(executor, 4)
    executor.lost(_ask(executor))  # it is the server's last one all the same
    again = _ask(executor)
    assert (again.executed_steps, again.delay_steps) == (None, None)
    executor.take(again, _chunk(2))
    _acts(executor, 4)
    assert _ask(executor).executed_steps == 4


def test_a_chunk_that_comes_after_all_of_its_steps_is_not_executed() -> None:
    executor = Executor(Rules(execute_steps=4, overlaps=True))
    executor.take(_ask(executor), _chunk(1, rows=30))
    _acts(executor, 4)
    ask = _ask(executor)
    _acts(executor, 16)
    assert not executor.take(ask, _chunk(2))
    assert executor.late_chunks == 1
    assert _acts(executor, 1) == [(1, 20)]
    assert executor.due() is not None


def test_a_slow_policy_moves_an_arm_that_held_still_since_it_was_asked() -> None:
    executor = Executor(Rules(execute_steps=4, overlaps=True))
    ask = _ask(executor)
    assert _acts(executor, 40) == [None] * 40
    assert executor.take(ask, _chunk(1))
    assert _acts(executor, 2) == [(1, 0), (1, 1)]


def test_an_unsafe_answer_ends_the_plan_too() -> None:
    executor = Executor(Rules(execute_steps=2, overlaps=True))
    executor.take(_ask(executor), _chunk(1))
    _acts(executor, 2)
    executor.stop(_ask(executor))
    assert _acts(executor, 1) == [None]


def test_an_answer_from_before_the_reset_is_of_no_use() -> None:
    executor = Executor(Rules(execute_steps=4))
    old = _ask(executor)
    executor.reset()
    new = _ask(executor)
    assert (new.step, old.step) == (0, 0)
    assert not executor.take(old, _chunk(1))
    executor.stop(old)
    executor.lost(old)
    assert executor.is_asking
    assert executor.take(new, _chunk(2))


def test_in_a_new_episode_the_arm_has_not_moved_yet() -> None:
    executor = Executor(Rules(execute_steps=4, overlaps=True))
    executor.take(_ask(executor), _chunk(1))
    _acts(executor, 10)
    executor.reset()
    ask = _ask(executor)
    assert _acts(executor, 3) == [None] * 3
    executor.take(ask, _chunk(2))
    assert _acts(executor, 1) == [(2, 0)]


@pytest.mark.parametrize(("steps", "overlaps", "continues"), [(0, False, False), (4, False, True)])
def test_rules_that_make_no_sense_are_refused(steps: int, overlaps: bool, continues: bool) -> None:
    with pytest.raises(ValueError):
        Rules(steps, overlaps, continues)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.5, None),
        (1.0, None),
        (-1.0, None),
        (np.nan, "action_not_finite"),
        (np.inf, "action_not_finite"),
        (1.01, "action_out_of_range"),
        (-7, "action_out_of_range"),
    ],
)
def test_what_may_not_be_executed_is_told_apart(value: float, code: str | None) -> None:
    actions = np.zeros((16, 2), np.float32)
    actions[9, 1] = value
    assert unsafe(actions, CONTRACT) == code
    assert unsafe(actions, replace(CONTRACT, action_dim=7)) == "bad_actions"


class Executing(RuleBasedStateMachine):
    """Answers come in any order, late, twice, from episodes long over; every row executed says whose it is."""

    @initialize(steps=st.integers(1, 20), overlaps=st.booleans(), continues=st.booleans())
    def begin(self, steps: int, overlaps: bool, continues: bool) -> None:
        self.rules = Rules(steps, overlaps, overlaps and continues)
        self.executor = Executor(self.rules)
        self.asks: list[tuple[int, Ask]] = []
        self.episode = 0
        self.taken: dict[int, int] = {}
        """Rows of a chunk, by the number of its request."""

    @rule()
    def ask(self) -> None:
        was_asking = self.executor.is_asking
        ask = self.executor.due()
        if ask is not None:
            assert not was_asking
            assert ask.step == self.executor.step
            assert all(ask.number != old.number for _, old in self.asks)
            if ask.delay_steps is not None and ask.executed_steps is not None:
                assert ask.executed_steps + ask.delay_steps <= self.taken[max(self.taken)]
            self.asks.append((self.episode, ask))

    @precondition(lambda self: self.asks)
    @rule(data=st.data(), rows=st.integers(1, 20))
    def answer(self, data: st.DataObject, rows: int) -> None:
        episode, ask = data.draw(st.sampled_from(self.asks))
        chunk = np.stack([np.full(rows, ask.number), np.arange(rows)], axis=1).astype(np.float32)
        if self.executor.take(ask, chunk):
            assert episode == self.episode
            assert ask.number not in self.taken
            self.taken[ask.number] = rows

    @precondition(lambda self: self.asks)
    @rule(data=st.data(), unsafe=st.booleans())
    def fail(self, data: st.DataObject, unsafe: bool) -> None:
        _, ask = data.draw(st.sampled_from(self.asks))
        (self.executor.stop if unsafe else self.executor.lost)(ask)

    @rule()
    def act(self) -> None:
        step, could = self.executor.step, self.executor.has_action
        row = self.executor.act()
        assert self.executor.step == step + 1
        assert (row is not None) == could
        if row is None:
            return
        number, index = int(row[0]), int(row[1])
        episode, ask = next((episode, ask) for episode, ask in self.asks if ask.number == number)
        assert episode == self.episode
        assert index < self.taken[number]
        assert number == max(self.taken)  # never back to a chunk that another one has replaced
        assert index <= step - ask.step
        if not self.rules.overlaps:
            assert index < self.rules.execute_steps

    @rule()
    def reset(self) -> None:
        self.executor.reset()
        self.episode += 1

    @invariant()
    def nothing_is_executed_right_after_a_reset(self) -> None:
        if self.asks and self.executor.step == 0 and all(episode != self.episode for episode, _ in self.asks):
            assert not self.executor.has_action


TestExecuting = Executing.TestCase
TestExecuting.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
