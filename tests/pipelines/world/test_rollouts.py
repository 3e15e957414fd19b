"""Recorded episodes: what is in them, and that the same seed gives the same ones."""

import itertools

import numpy as np

from omni_live.clients.envs.table import TASKS, TableEnv, expert
from omni_live.pipelines.world.rollouts import STRIDE, Episode, record


def recorded(count: int, seed: int, frames: int = 12) -> list[Episode]:
    table = TableEnv(seed)
    return list(record(table, lambda: expert(table), TASKS, count, seed, frames))


def test_an_episode_has_one_picture_more_than_frames() -> None:
    for episode in recorded(2, 3):
        assert episode.images.shape == (13, 64, 64, 3)
        assert episode.images.dtype == np.uint8
        assert episode.actions.shape == (12, 2, 2)
        assert (np.abs(episode.actions) <= 1).all()
        assert episode.discs.shape == (13, 3, 2)


def test_the_actions_lead_from_each_picture_to_the_next() -> None:
    table = TableEnv(5)
    episode = next(record(table, lambda: expert(table), TASKS, 1, 5, 12))
    again = TableEnv(5)
    again.reset(TASKS[0])
    for frame, actions in enumerate(episode.actions):
        assert np.array_equal(again.render(), episode.images[frame])
        assert np.allclose([(disc.real, disc.imag) for disc in again.discs], episode.discs[frame])
        for action in actions:
            again.step(action)
    assert again.steps == STRIDE * 12
    assert np.array_equal(again.render(), episode.images[-1])


def test_the_same_seed_records_the_same_episodes() -> None:
    for one, same, other in zip(recorded(2, 3), recorded(2, 3), recorded(2, 4), strict=True):
        assert np.array_equal(one.images, same.images)
        assert np.array_equal(one.actions, same.actions)
        assert not np.array_equal(one.actions, other.actions)


def test_discs_are_pushed_in_most_episodes() -> None:
    moved = [np.abs(episode.discs[-1] - episode.discs[0]).max() > 0.01 for episode in recorded(12, 3, 30)]
    assert np.mean(moved) > 0.5


def test_there_is_always_something_to_push() -> None:
    """An episode in which the task is done gets another one: the expert does not come to rest."""
    table = TableEnv(1)
    tasks = [table.task for _ in itertools.islice(record(table, lambda: expert(table), TASKS, 24, 1, 60), 24)]
    assert any(task != TASKS[at % len(TASKS)] for at, task in enumerate(tasks))
