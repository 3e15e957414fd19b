"""The measure itself: what is true is perfect, what fades or wanders off is lost, and no more than that."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_live.clients.envs.likeness import likeness
from omni_live.clients.envs.table import TASKS, TableEnv, expert
from omni_live.pipelines.world.fake import FakeWorld
from omni_live.pipelines.world.quality import compared, measure
from omni_live.pipelines.world.rollouts import Episode, record

RED, GREEN, BLUE = range(3)


@pytest.fixture(scope="module")
def episodes() -> list[Episode]:
    table = TableEnv(8)
    return list(record(table, lambda: expert(table), TASKS, 6, 8, 8))


def frames(episodes: list[Episode], frame: int) -> list[NDArray[np.uint8]]:
    return [episode.images[frame].copy() for episode in episodes]


def around(episode: Episode, frame: int, disc: int) -> tuple[slice, slice]:
    column, row = (episode.discs[frame, disc] * 64).astype(int)
    return slice(row - 5, row + 6), slice(column - 5, column + 6)


def test_the_true_frames_are_perfect(episodes: list[Episode]) -> None:
    quality = compared(episodes, 8, frames(episodes, 8))
    assert quality["psnr_8"] > 70
    assert quality["disc_err_px_8"] < 0.1
    assert quality["lost_8"] == 0


def test_a_faded_disc_is_lost(episodes: list[Episode]) -> None:
    dreamt = frames(episodes, 4)
    for episode, picture in zip(episodes, dreamt, strict=True):
        picture[around(episode, 4, GREEN)] = 232
    quality = compared(episodes, 4, dreamt)
    assert quality["lost_4"] >= 1 / 3
    assert quality["psnr_4"] < 35


def test_a_disc_that_is_somewhere_else_is_lost_and_its_distance_counts(episodes: list[Episode]) -> None:
    dreamt = [np.roll(picture, 12, axis=1) for picture in frames(episodes, 2)]
    quality = compared(episodes, 2, dreamt)
    assert quality["lost_2"] > 0.9
    assert quality["disc_err_px_2"] == pytest.approx(12, abs=0.5)


def test_a_small_shift_is_an_error_and_no_loss(episodes: list[Episode]) -> None:
    dreamt = [np.roll(picture, 2, axis=0) for picture in frames(episodes, 2)]
    quality = compared(episodes, 2, dreamt)
    assert quality["lost_2"] == 0
    assert quality["disc_err_px_2"] == pytest.approx(2, abs=0.1)


def test_a_pusher_that_is_gone_costs_no_disc(episodes: list[Episode]) -> None:
    dreamt = frames(episodes, 1)
    for picture in dreamt:
        picture[(picture < 45).all(-1)] = 232
    quality = compared(episodes, 1, dreamt)
    assert quality["lost_1"] == 0
    assert quality["disc_err_px_1"] < 0.1


def test_nothing_but_grey_loses_everything(episodes: list[Episode]) -> None:
    quality = compared(episodes, 1, [np.full((64, 64, 3), 232, np.uint8)] * len(episodes))
    assert quality["lost_1"] == 1
    assert np.isnan(quality["disc_err_px_1"])


def test_the_figures_carry_their_frames(episodes: list[Episode]) -> None:
    world = FakeWorld({})
    quality = measure(world, episodes, 0, frames=(1, 8))
    assert set(quality) == {f"{name}_{frame}" for name in ("psnr", "disc_err_px", "lost") for frame in (1, 8)}
    assert quality == pytest.approx(measure(world, episodes, 0, frames=(1, 8)), nan_ok=True)


def test_a_dream_sees_the_first_frame_and_no_other(episodes: list[Episode]) -> None:
    blinded = [
        replace(episode, images=np.concatenate([episode.images[:1], np.zeros_like(episode.images[1:])]))
        for episode in episodes
    ]
    world = FakeWorld({})
    true, blind = (measure(world, seen, 0, frames=(4,)) for seen in (episodes, blinded))
    assert true["disc_err_px_4"] == pytest.approx(blind["disc_err_px_4"], nan_ok=True)
    assert true["psnr_4"] != blind["psnr_4"]


@pytest.mark.parametrize("change", ["none", "fade", "roll", "grey"])
def test_clients_measure_the_same(episodes: list[Episode], change: str) -> None:
    """clients/envs/likeness.py is told where the discs are and what colour they have; here both are found out."""
    dreamt = frames(episodes, 6)
    for at, picture in enumerate(dreamt):
        if change == "fade":
            picture[around(episodes[at], 6, at % 3)] = 232
        elif change == "roll":
            picture[:] = np.roll(picture, at + 1, axis=at % 2)
        elif change == "grey":
            picture[:] = 128
    found = [
        likeness(episode.images[6], picture, [complex(*place) for place in episode.discs[6]])
        for episode, picture in zip(episodes, dreamt, strict=True)
    ]
    quality = compared(episodes, 6, dreamt)
    assert np.mean([one.psnr_db for one in found]) == pytest.approx(quality["psnr_6"], abs=0.05)
    assert np.mean([one.lost for one in found]) == quality["lost_6"]
    errors = [error for one in found for error in one.errors_px]
    if errors:
        assert np.median(errors) == pytest.approx(quality["disc_err_px_6"], abs=1e-3)
    else:
        assert np.isnan(quality["disc_err_px_6"])
