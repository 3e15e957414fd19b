"""The table-top world: the same each time, true to its contract, and solvable."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_live.clients.envs.table import (
    CONTRACT,
    DISC_RADIUS,
    PUSHER_RADIUS,
    SIDE,
    STEP_LENGTH,
    TASKS,
    Observation,
    TableEnv,
    Task,
    expert,
    prompt,
)

RGB = ((214, 60, 50), (60, 160, 75), (60, 95, 200))
ZONES = (0.1 + 0.5j, 0.9 + 0.5j, 0.5 + 0.1j, 0.5 + 0.9j)


def action(x: float, y: float) -> NDArray[np.float32]:
    return np.array([x, y], np.float32)


def pixel(place: complex) -> tuple[int, int]:
    return int(place.imag * SIDE), int(place.real * SIDE)


def episode(env: TableEnv, task: Task | None = None) -> list[Observation]:
    seen = [env.reset(task)]
    while not env.success() and env.steps < 150:
        seen.append(env.step(expert(env))[0])
    return seen


def same(one: list[Observation], other: list[Observation]) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a["observation/image"], b["observation/image"])
        and np.array_equal(a["observation/state"], b["observation/state"])
        and a["prompt"] == b["prompt"]
        for a, b in zip(one, other, strict=True)
    )


def test_the_same_seed_is_the_same_world_to_the_bit() -> None:
    one, other = TableEnv(7), TableEnv(7)
    for _ in range(3):
        assert same(episode(one), episode(other))


def test_another_seed_and_another_reset_are_other_worlds() -> None:
    env = TableEnv(7)
    first, second, stranger = episode(env), episode(env), episode(TableEnv(8))
    assert not same(first, second)
    assert not same(first, stranger)


def test_an_observation_is_what_the_contract_says() -> None:
    seen = TableEnv(1).reset(Task(2, 1))
    arrays, texts = CONTRACT.checked(seen)
    assert {key: (value.shape, value.dtype.name) for key, value in arrays.items()} == {
        "observation/image": ((64, 64, 3), "uint8"),
        "observation/state": ((2,), "float32"),
    }
    assert texts == {"prompt": "push the blue disc to the right zone"}


def test_the_contract_survives_the_wire() -> None:
    assert type(CONTRACT).of(CONTRACT.metadata()) == CONTRACT


def test_twelve_tasks_have_twelve_sentences() -> None:
    assert len({prompt(task) for task in TASKS}) == len(TASKS) == 12


def test_a_reset_without_a_task_draws_one_by_chance() -> None:
    env = TableEnv(0)
    drawn = set()
    for _ in range(100):
        env.reset()
        drawn.add(env.task)
    assert drawn == set(TASKS)


def test_no_world_is_solved_before_it_begins() -> None:
    env = TableEnv(3)
    for number in range(200):
        env.reset(TASKS[number % 12])
        assert not env.success()
        assert env.steps == 0


def test_the_expert_solves_at_least_95_of_100_worlds() -> None:
    env = TableEnv(11)
    solved = 0
    for number in range(240):
        episode(env, TASKS[number % 12])
        solved += env.success()
    assert solved >= 0.95 * 240


def test_success_means_that_the_named_disc_is_in_the_named_zone() -> None:
    env = TableEnv(5)
    for task in TASKS:
        episode(env, task)
        assert env.success() == (abs(env.discs[task.disc] - ZONES[task.zone]) < 0.1)


def test_standing_still_moves_nothing() -> None:
    env = TableEnv(4)
    before = env.observe()
    after, success = env.step(action(0, 0))
    assert same([before], [after])
    assert not success


@pytest.mark.parametrize(("x", "y"), [(1, 0), (0.6, 0.8), (1, 1), (-50, 50), (0, 1e30)])
def test_no_action_is_faster_than_full_speed(x: float, y: float) -> None:
    env = TableEnv(4)
    before = env.pusher
    env.step(action(x, y))
    moved = env.pusher - before
    assert abs(moved) == pytest.approx(STEP_LENGTH)
    assert math.copysign(1, moved.real) == math.copysign(1, x)


def test_a_slow_action_is_slow() -> None:
    env = TableEnv(4)
    before = env.pusher
    env.step(action(0.25, 0))
    assert env.pusher - before == pytest.approx(0.25 * STEP_LENGTH)


@pytest.mark.parametrize("bad", [action(np.nan, 0), action(0, np.inf), np.zeros(3), np.zeros((1, 2))])
def test_an_action_that_is_none_is_refused_and_moves_nothing(bad: NDArray[np.floating]) -> None:
    env = TableEnv(4)
    before = env.observe()
    with pytest.raises(ValueError):
        env.step(bad)
    assert same([before], [env.observe()])
    assert env.steps == 0


def test_nothing_leaves_the_table_or_lies_in_another_body() -> None:
    env, random = TableEnv(9), np.random.default_rng(9)
    deepest = 0.0
    for way in np.repeat(random.normal(size=(250, 2)), 12, axis=0):
        env.step(way)
        discs, pusher = env.discs, env.pusher
        for place, radius in [*((disc, DISC_RADIUS) for disc in discs), (pusher, PUSHER_RADIUS)]:
            assert radius <= place.real <= 1 - radius
            assert radius <= place.imag <= 1 - radius
        deepest = max(deepest, *(DISC_RADIUS + PUSHER_RADIUS - abs(disc - pusher) for disc in discs))
        deepest = max(deepest, *(2 * DISC_RADIUS - abs(discs[a] - discs[b]) for a, b in ((0, 1), (0, 2), (1, 2))))
    assert deepest < 0.5 * STEP_LENGTH


def test_the_picture_shows_each_body_where_it_is() -> None:
    env = TableEnv(2)
    for _ in range(20):
        env.reset()
        image = env.render()
        for place, colour in zip(env.discs, RGB, strict=True):
            assert tuple(image[pixel(place)]) == colour
        assert tuple(image[pixel(env.pusher)]) == (30, 30, 30)
        assert tuple(image[0, 0]) == (232, 232, 232)


@pytest.mark.parametrize("corner", [action(-1, -1), action(1, -1), action(-1, 1), action(1, 1)])
def test_the_picture_is_whole_when_the_pusher_is_in_a_corner(corner: NDArray[np.float32]) -> None:
    env = TableEnv(2)
    for _ in range(80):
        env.step(corner)
    dark = (env.render() < 60).all(-1)
    assert dark.sum() == pytest.approx(math.pi * (PUSHER_RADIUS * SIDE) ** 2, rel=0.3)


def test_what_was_seen_belongs_to_the_one_who_saw_it() -> None:
    env = TableEnv(2)
    before, mine = env.observe(), env.observe()
    mine["observation/image"][:] = 0
    mine["observation/state"][:] = 0
    assert same([before], [env.observe()])
