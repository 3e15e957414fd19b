"""The shipped world: it dreams truly, each row for itself, and the same again wherever it is loaded."""

from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from omni_live.clients.envs.table import TASKS, TableEnv, expert
from omni_live.engines.options import BadOption
from omni_live.pipelines.world.adapter import TABLE_WORLD, Floats, World, load_world
from omni_live.pipelines.world.quality import compared, measure
from omni_live.pipelines.world.rollouts import Episode, record
from omni_live.pipelines.world.table_world import SHIPPED, BadWeights, TableWorld, noise_of


def made(weights: str = "") -> TableWorld:
    world = TableWorld({"weights": weights})
    world.load()
    return world


@pytest.fixture(scope="module")
def world() -> TableWorld:
    return made()


@pytest.fixture(scope="module")
def episodes() -> list[Episode]:
    """Of seeds that no training had."""
    table = TableEnv(4321)
    return list(record(table, lambda: expert(table), TASKS, 24, 4321, 32))


def inputs(world: World, size: int) -> tuple[Floats, Floats, Floats]:
    """Noise, context and actions of some rows."""
    random = np.random.default_rng(size)
    latents = world.encode(world.starts()[np.arange(size) % len(world.starts())])
    actions = random.uniform(-1, 1, (size, 2, 2)).astype(np.float32)
    return world.begin(range(size), [1] * size), np.concatenate([latents, latents], 1), actions


def frame(world: World, x: Floats, context: Floats, actions: Floats) -> Floats:
    for step in range(world.STEPS):
        x = world.denoise(x, np.full(len(x), step, np.int64), context, actions)
    return world.finish(x, context)


def test_it_dreams_truly(world: TableWorld, episodes: list[Episode]) -> None:
    quality = measure(world, episodes, 0)
    assert quality["disc_err_px_16"] <= 2
    assert quality["lost_16"] <= 0.08
    assert quality["lost_32"] <= 0.2
    assert quality["psnr_1"] > 30


def test_what_it_sees_it_can_paint(world: TableWorld, episodes: list[Episode]) -> None:
    painted = world.decode(world.encode(np.stack([episode.images[16] for episode in episodes])))
    quality = compared(episodes, 16, list(painted))
    assert quality["psnr_16"] > 34
    assert quality["disc_err_px_16"] < 0.5
    assert quality["lost_16"] == 0


def test_no_disc_fades_in_a_very_long_dream(world: TableWorld) -> None:
    """Also after 300 frames of driving about, each thing is somewhere on the table, in its colour."""
    random = np.random.default_rng(0)
    latents = [world.encode(world.starts()[:8])] * 2
    driven = random.uniform(-1, 1, (60, 8, 1, 2)).astype(np.float32).repeat(5, axis=0).repeat(2, axis=2)
    for number, actions in enumerate(driven, 1):
        noise = world.begin(range(8), [number] * 8)
        latents = [latents[1], frame(world, noise, np.concatenate(latents, 1), actions)]
    pictures = world.decode(latents[-1]).astype(int)
    for colour in ((214, 60, 50), (60, 160, 75), (60, 95, 200)):
        like = np.abs(pictures - colour).max(-1) < 60
        assert (like.sum((1, 2)) > 8).mean() > 0.85  # one may lie beneath another


def test_it_is_the_world_in_the_box(world: TableWorld) -> None:
    served = load_world(TABLE_WORLD, {})
    served.load()
    assert isinstance(served, TableWorld)
    assert served.fingerprint() == world.fingerprint()


def test_the_shapes_are_what_the_interface_says(world: TableWorld) -> None:
    x, context, actions = inputs(world, 3)
    assert x.shape == (3, *world.LATENT)
    latents = frame(world, x, context, actions)
    assert latents.shape == (3, *world.LATENT)
    images = world.decode(latents)
    assert images.shape == (3, 64, 64, 3)
    assert x.dtype == latents.dtype == np.float32
    assert images.dtype == np.uint8
    assert world.starts().shape == (16, 64, 64, 3)


def test_a_frame_alone_has_the_same_bits_in_each_load(world: TableWorld) -> None:
    other = made()
    x, context, actions = inputs(world, 1)
    one, same = frame(world, x, context, actions), frame(other, x, context, actions)
    assert np.array_equal(one, same)
    assert np.array_equal(world.decode(one), other.decode(same))
    assert np.array_equal(world.encode(world.starts()[:1]), other.encode(world.starts()[:1]))


@pytest.mark.parametrize("size", [2, 7, 32])
def test_who_else_is_in_the_batch_does_not_matter_but_for_rounding(world: TableWorld, size: int) -> None:
    x, context, actions = inputs(world, size)
    steps = np.arange(size, dtype=np.int64) % world.STEPS
    together = world.denoise(x, steps, context, actions)
    for at in range(size):
        row = slice(at, at + 1)
        alone = world.denoise(x[row], steps[row], context[row], actions[row])
        assert np.allclose(alone, together[row], atol=1e-4)


def test_the_inputs_are_left_as_they_were_and_may_be_read_only(world: TableWorld) -> None:
    x, context, actions = inputs(world, 2)
    before = x.copy(), context.copy(), actions.copy()
    latents = frame(world, x, context, actions)
    world.decode(latents)
    for array, copy in zip((x, context, actions), before, strict=True):
        assert np.array_equal(array, copy)
    image = world.starts()[:1].copy()
    image.setflags(write=False)
    for array in (x, context, actions, latents):
        array.setflags(write=False)
    assert np.array_equal(frame(world, x, context, actions), latents)
    world.decode(latents)
    world.encode(image)


def test_the_noise_is_that_of_seed_and_frame_alone(world: TableWorld) -> None:
    noise = world.begin([5, 5, 6, 5], [1, 2, 1, 1])
    assert np.array_equal(noise[0], noise[3])
    assert not np.array_equal(noise[0], noise[1])
    assert not np.array_equal(noise[0], noise[2])
    assert np.array_equal(noise[1], noise_of(5, 2)[:])


@pytest.mark.parametrize("seed", [0, -1, 2**64 - 1, 2**200])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    assert noise_of(seed, 2**40).shape == TableWorld.LATENT


def test_the_noise_of_a_seed_never_changes() -> None:
    assert noise_of(0, 1)[0, 0].tolist() == pytest.approx([1.370856, -0.262472, 0.194317, 0.455596], abs=1e-6)


def test_the_pusher_goes_where_it_is_sent(world: TableWorld) -> None:
    _, context, _ = inputs(world, 8)
    right, left = (
        frame(world, world.begin([0] * 8, [1] * 8), context, np.full((8, 2, 2), (way, 0), np.float32))
        for way in (1, -1)
    )
    ahead = (right - left)[:, 0, 0].max(1)  # 4 steps of 0.022 table widths, in latents
    assert np.median(ahead) == pytest.approx(4 * 0.022 * 2, rel=0.15)


def test_an_option_that_is_none_is_refused() -> None:
    with pytest.raises(BadOption, match="stepps"):
        TableWorld({"stepps": 3})


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    shipped = (resources.files("omni_live.pipelines.world.weights") / SHIPPED).read_bytes()
    path = tmp_path / "weights.safetensors"
    for damaged in (
        b"",
        shipped[:1000],
        shipped[:-1],
        shipped.replace(b"eyes", b"ears"),
        shipped.replace(b"starts", b"starty"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(BadWeights):
            made(str(path))
    path.write_bytes(shipped)
    assert made(str(path)).fingerprint() == made().fingerprint()


def test_weights_that_are_not_there_are_named() -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        made("/nowhere")


def test_the_shipped_weights_are_small() -> None:
    assert len((resources.files("omni_live.pipelines.world.weights") / SHIPPED).read_bytes()) <= 3_000_000
