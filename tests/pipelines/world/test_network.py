"""The parts of the learned world: places go into a picture and come out of it, and things do not mind their order."""

import pytest
import torch

from omni_live.clients.envs.table import TableEnv
from omni_live.pipelines.world.network import SLOTS, STEPS, Autoencoder, Dynamics, Painter, floats, stepped


@pytest.fixture(scope="module", autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pictures(count: int) -> torch.Tensor:
    table = TableEnv(2)
    return torch.stack([torch.from_numpy(table.reset()["observation/image"]) for _ in range(count)])


def test_the_shapes_are_what_the_text_says() -> None:
    autoencoder = Autoencoder()
    seen = floats(pictures(3))
    assert seen.shape == (3, 3, 64, 64)
    assert autoencoder.eyes(seen).shape == (3, 2, 1, SLOTS)
    assert autoencoder(seen).shape == (3, 3, 64, 64)
    latents = torch.rand(3, 2, 1, SLOTS)
    moves = Dynamics()(latents, torch.zeros(3), torch.cat([latents, latents], 1), torch.zeros(3, 2, 2))
    assert moves.shape == latents.shape


def test_places_stay_in_the_picture() -> None:
    places = Autoencoder().eyes(torch.rand(5, 3, 64, 64))
    assert (places.abs() < 1).all()


@pytest.mark.parametrize("moved", [1, 5])
def test_a_sprite_moves_with_its_place(moved: int) -> None:
    painter = Painter()
    places = torch.zeros(1, 2, 1, SLOTS)
    there = places.clone()
    there[:, 0] += moved * 2 / 64
    with torch.no_grad():
        painter.colours.zero_()
        here, beside = painter(places), painter(there)
    assert torch.allclose(here.roll(moved, -1), beside, atol=1e-5)
    assert not torch.allclose(here, beside, atol=1e-2)


def test_it_begins_from_the_colours_that_things_have() -> None:
    autoencoder = Autoencoder()
    autoencoder.begin(pictures(40))
    found = sorted((autoencoder.eyes.palette * 255).tolist())
    for colour, true in zip(found, [(30, 30, 30), (60, 95, 200), (60, 160, 75), (214, 60, 50)], strict=True):
        assert colour == pytest.approx(true, abs=12)


def test_a_beginner_already_finds_things() -> None:
    """Each slot's place follows one thing: no two slots are ever at the same place."""
    autoencoder = Autoencoder()
    seen = pictures(40)
    autoencoder.begin(seen)
    with torch.no_grad():
        places = autoencoder.eyes(floats(seen))[:, :, 0].transpose(1, 2)
    apart = torch.cdist(places, places) + 9 * torch.eye(SLOTS)
    assert apart.min() > 0.1


def test_the_flow_ends_at_the_move_that_the_last_step_estimates() -> None:
    x, move = torch.randn(2, 2, 1, SLOTS), torch.randn(2, 2, 1, SLOTS)
    assert torch.allclose(stepped(x, move, torch.full((2,), (STEPS - 1) / STEPS)), move, atol=1e-6)
    assert torch.allclose(stepped(x, move, torch.zeros(2)), x + (move - x) / STEPS, atol=1e-6)
