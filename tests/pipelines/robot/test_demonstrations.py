"""Demonstrations: repeatable, whole episodes, and what the expert wanted rather than what was done to it."""

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_live.clients.envs.table import TASKS, Observation, TableEnv, expert, prompt
from omni_live.pipelines.robot.demonstrations import LONGEST, Action, Demonstrations, collect


class Counting:
    def __init__(self) -> None:
        self.steps = 0

    def enter(self, section: str) -> None:
        """Nobody reads it."""

    def step(self, count: int = 1) -> None:
        self.steps += count


class Watched(TableEnv):
    """Remembers what was executed, and what the expert said at each step."""

    def __init__(self, seed: int) -> None:
        self.executed: list[Action] = []
        self.wanted: list[Action] = []
        super().__init__(seed)

    def step(self, action: NDArray[np.floating]) -> tuple[Observation, bool]:
        self.executed.append(action.astype(np.float32))
        return super().step(action)

    def asked(self) -> Action:
        self.wanted.append(expert(self))
        return self.wanted[-1]


def collected(episodes: int, seed: int = 5) -> Demonstrations:
    table = TableEnv(seed)
    return collect(table, lambda: expert(table), TASKS, episodes, seed, Counting())


@pytest.fixture(scope="module")
def shown() -> Demonstrations:
    return collected(30)


def test_the_same_seed_shows_the_same(shown: Demonstrations) -> None:
    again = collected(30)
    assert np.array_equal(again.images, shown.images)
    assert np.array_equal(again.actions, shown.actions)
    assert np.array_equal(again.states, shown.states)


def test_another_seed_shows_something_else(shown: Demonstrations) -> None:
    assert not np.array_equal(collected(1, seed=6).images[0], shown.images[0])


def test_each_frame_knows_the_last_of_its_episode_and_its_sentence(shown: Demonstrations) -> None:
    starts = np.concatenate([[0], np.unique(shown.ends)[:-1] + 1])
    assert len(starts) == 30
    assert shown.ends[-1] == len(shown.images) - 1
    assert (shown.ends >= np.arange(len(shown.ends))).all()
    assert (shown.ends[starts] - starts < LONGEST).all()
    assert shown.prompts == tuple(prompt(task) for task in TASKS)
    assert shown.tasks[starts].tolist() == [number % 12 for number in range(30)]


def test_what_the_expert_wanted_and_what_was_executed_are_kept() -> None:
    table = Watched(5)
    shown = collect(table, table.asked, TASKS, 6, 5, Counting())
    assert np.array_equal(shown.actions, np.stack(table.wanted))
    assert np.array_equal(shown.executed, np.stack(table.executed))


def test_the_expert_is_disturbed_in_some_episodes_and_left_alone_in_others(shown: Demonstrations) -> None:
    off = np.abs(shown.executed - shown.actions).max(1)
    by_episode = [off[shown.ends == end].mean() for end in np.unique(shown.ends)]
    assert min(by_episode) == 0
    assert max(by_episode) > 0.3
    assert np.abs(shown.executed).max() <= 1


def test_progress_is_an_episode() -> None:
    table, counting = TableEnv(0), Counting()
    collect(table, lambda: expert(table), TASKS, 4, 0, counting)
    assert counting.steps == 4
