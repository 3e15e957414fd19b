"""What the planner decides by: places off pictures, costs, branches; and that it drives a table it can dream truly."""

import asyncio
import copy

import numpy as np
import pytest

from omni_live.clients.envs.table import TASKS, TableEnv, prompt
from omni_live.clients.planner import Planner, RandomPolicy, drive_table
from omni_live.clients.planning import (
    DISCS,
    PUSHER,
    ZONES,
    Branches,
    Goal,
    Images,
    Search,
    UnknownTask,
    cost,
    first_branches,
    goal,
    next_branches,
    places,
    score,
)

RED_LEFT = goal("push the red disc to the left zone")


def test_every_task_of_the_table_is_understood() -> None:
    wanted = {(goal(prompt(task)).colour, goal(prompt(task)).x, goal(prompt(task)).y) for task in TASKS}
    assert wanted == {(colour, *zone) for colour in DISCS.values() for zone in ZONES.values()}


@pytest.mark.parametrize("text", ["", "push the pink disc to the left zone", "push the red disc to the middle zone"])
def test_another_task_is_refused(text: str) -> None:
    with pytest.raises(UnknownTask):
        goal(text)


def test_places_read_off_a_true_picture_are_within_a_pixel() -> None:
    for seed in range(20):
        table = TableEnv(seed)
        image = table.render()
        for colour, true in zip((*DISCS.values(), PUSHER), (*table.discs, table.pusher), strict=True):
            assert np.hypot(*(places(image, colour) - [true.real, true.imag])) < 1 / 64


def test_a_colour_that_is_nowhere_has_no_place_and_costs_more_than_any_place() -> None:
    blank = np.full((1, 1, 64, 64, 3), 232, np.uint8)
    assert np.isnan(places(blank, PUSHER)).all()
    table = TableEnv(3).render()[None, None]
    assert score(blank, RED_LEFT)[0] > score(table, RED_LEFT)[0]


def test_a_disc_nearer_to_its_zone_costs_less() -> None:
    discs = np.array([[0.6, 0.5], [0.4, 0.5], [0.2, 0.5]])
    costs = cost(discs, discs + np.array([0.13, 0.0]), RED_LEFT.place)
    assert (np.diff(costs) < 0).all()


def test_a_pusher_behind_the_disc_costs_less_than_one_before_it() -> None:
    disc = np.array([0.5, 0.5])
    behind, beside, before = (
        float(cost(disc, disc + arm, RED_LEFT.place)) for arm in ([0.13, 0.0], [0.0, 0.13], [-0.13, 0.0])
    )
    assert behind < beside < before


def test_branches_have_their_shape_and_no_action_is_longer_than_one() -> None:
    search, chance = Search(branches=9, frames=5), np.random.default_rng(0)
    for disc in (np.array([0.5, 0.5]), np.array([np.nan, np.nan])):
        branches = first_branches(disc, np.array([0.3, 0.3]), RED_LEFT, search, chance)
        assert branches.shape == (9, 5, 2, 2)
        assert branches.dtype == np.float32
        assert np.linalg.norm(branches, axis=-1).max() <= 1 + 1e-6


def test_the_next_round_keeps_the_best_branch() -> None:
    search, chance = Search(branches=8, frames=4, elite=3), np.random.default_rng(1)
    branches = first_branches(np.array([0.5, 0.5]), np.array([0.3, 0.3]), RED_LEFT, search, chance)
    more = next_branches(branches, np.array([5.0, 4, 3, 0.5, 2, 6, 7, 8]), search, chance)
    np.testing.assert_allclose(more[0], branches[3], atol=1e-6)
    assert not np.allclose(more[1:], branches[3])


def test_the_same_chance_gives_the_same_branches() -> None:
    place = np.array([0.5, 0.5]), np.array([0.3, 0.3])
    one, other = (first_branches(*place, RED_LEFT, Search(), np.random.default_rng(4)) for _ in range(2))
    assert one.tobytes() == other.tobytes()


class TrueDreams:
    """A fake world: the simulator itself, branched from the table that is driven."""

    def __init__(self) -> None:
        self.rolls = 0
        self.table: TableEnv | None = None

    async def roll(self, image: Images, branches: Branches, looks: tuple[int, ...]) -> Images:
        self.rolls += 1
        assert self.table is not None
        assert image.tobytes() == self.table.render().tobytes()
        return np.stack([self._rolled(moves, looks) for moves in branches])

    def _rolled(self, moves: Branches, looks: tuple[int, ...]) -> Images:
        table, seen = copy.deepcopy(self.table), []
        assert table is not None
        for number, frame in enumerate(moves, 1):
            for action in frame:
                table.step(action)
            if number in looks:
                seen.append(table.render())
        return np.stack(seen)


async def _drive(table: TableEnv, decider: Planner | RandomPolicy) -> bool:
    seen = table.observe()
    while table.steps < 150:
        for action in await decider.decide(seen):
            seen, success = table.step(action)
            if success:
                return True
    return False


def test_where_dreams_are_true_the_planner_succeeds_and_asks_once_a_round() -> None:
    won = 0
    for seed in range(4):
        dreams = TrueDreams()
        dreams.table = TableEnv(seed)
        planner = Planner(dreams, Search(branches=16, rounds=2), np.random.default_rng(seed))
        won += asyncio.run(_drive(dreams.table, planner))
        assert dreams.rolls % 2 == 0
    assert won >= 3


def test_a_random_policy_hardly_ever_succeeds() -> None:
    outcome = asyncio.run(drive_table(RandomPolicy(np.random.default_rng(0)), 10, seed=0))
    assert outcome.share <= 0.3
    assert outcome.steps <= 1500


def test_a_decision_is_as_many_actions_as_are_carried_out() -> None:
    dreams = TrueDreams()
    dreams.table = TableEnv(1)
    planner = Planner(dreams, Search(branches=4, frames=4, rounds=1, execute=2))
    assert asyncio.run(planner.decide(dreams.table.observe())).shape == (4, 2)


def test_a_goal_is_a_place() -> None:
    assert Goal((0, 0, 0), 0.25, 0.75).place.tolist() == [0.25, 0.75]
