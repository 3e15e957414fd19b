"""How true a world's dreams are: rollouts with the true actions, held against what truly happened.

A dream begins from one true frame, encoded twice, and sees no other. At some of its frames three things are measured,
over all episodes:

- `psnr_N`: the mean over episodes of the peak signal-to-noise ratio of frame N, in dB.
- `disc_err_px_N`: the median over discs of how far the centroid of all pixels of the disc's colour, anywhere in the
  dreamed picture, is from where the disc truly is, in pixels. A disc that is lost counts too, if there are such pixels.
- `lost_N`: the share of discs of whose true pixels less than a quarter have the disc's colour in the dreamed picture.
  So a disc that is dreamed elsewhere is lost as well as one that has faded.

A disc's colour is that of the first true picture at the disc's centre; a pixel has it within `_ALIKE` in RGB space. A
disc's true pixels are those that have it in the true picture. The pusher is not a disc.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_live.pipelines.world.adapter import Floats, Images, World
from omni_live.pipelines.world.rollouts import Episode

_ALIKE: Final = 70.0  # of 441; the two discs most alike are 141 apart
_QUARTER: Final = 0.25

Quality = dict[str, float]
"""The figures by name, as a bench prints them."""


def measure(world: World, episodes: Sequence[Episode], seed: int, frames: Sequence[int] = (1, 8, 16, 32)) -> Quality:
    """What the world's dreams of `episodes` are worth at `frames`; `seed` is that of their noise."""
    dreamt = dream(world, episodes, seed, max(frames))
    quality: Quality = {}
    for frame in frames:
        quality |= compared(episodes, frame, [images[frame - 1] for images in dreamt])
    return quality


def dream(world: World, episodes: Sequence[Episode], seed: int, frames: int) -> list[Images]:
    """The pictures of frames 1 to `frames` of each episode, uint8[frames, 64, 64, 3], all in one batch.

    The episodes' rollouts have the seeds `seed`, `seed` + 1 and so on.
    """
    seeds = range(seed, seed + len(episodes))
    start = world.encode(np.stack([episode.images[0] for episode in episodes]))
    latents = [start] * world.CONTEXT
    pictures = []
    for frame in range(1, frames + 1):
        actions = np.stack([episode.actions[frame - 1] for episode in episodes])
        latents.append(_next(world, np.concatenate(latents[-world.CONTEXT :], 1), actions, seeds, frame))
        pictures.append(world.decode(latents[-1]))
    return list(np.stack(pictures, 1))


def _next(world: World, context: Floats, actions: NDArray[np.float32], seeds: Sequence[int], frame: int) -> Floats:
    x = world.begin(seeds, [frame] * len(seeds))
    for step in range(world.STEPS):
        x = world.denoise(x, np.full(len(x), step, np.int64), context, actions)
    return world.finish(x, context)


def compared(episodes: Sequence[Episode], frame: int, dreamt: Sequence[NDArray[np.uint8]]) -> Quality:
    """How one frame of each episode was dreamt: `psnr_N`, `disc_err_px_N` and `lost_N` for the frame's number N."""
    ratios, errors, lost = [], [], []
    for episode, picture in zip(episodes, dreamt, strict=True):
        true = episode.images[frame]
        ratios.append(_psnr(true, picture))
        for centre, colour in zip(episode.discs[frame], _colours(episode), strict=True):
            has = _has(picture, colour)
            pixels = _has(true, colour)
            lost.append(bool((has & pixels).sum() < _QUARTER * pixels.sum()))
            if has.any():
                errors.append(float(np.hypot(*(_centroid(has) - centre * len(true)))))
    return {
        f"psnr_{frame}": float(np.mean(ratios)),
        f"disc_err_px_{frame}": float(np.median(errors)) if errors else float("nan"),
        f"lost_{frame}": float(np.mean(lost)),
    }


def _psnr(true: NDArray[np.uint8], picture: NDArray[np.uint8]) -> float:
    wrong = float(np.square(true.astype(np.float32) - picture).mean())
    return float(10 * np.log10(255**2 / max(wrong, 1e-3)))  # 78 dB and no more where nothing is wrong


def _colours(episode: Episode) -> NDArray[np.float32]:
    """RGB of each disc, float32[3, 3]."""
    first = episode.images[0]
    columns, rows = (episode.discs[0] * len(first)).astype(np.int64).T
    colours: NDArray[np.float32] = first[rows, columns].astype(np.float32)
    return colours


def _has(picture: NDArray[np.uint8], colour: NDArray[np.float32]) -> NDArray[np.bool_]:
    has: NDArray[np.bool_] = np.square(picture - colour).sum(-1) < _ALIKE**2
    return has


def _centroid(pixels: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The mean place of the pixels that are set, x and y from the picture's upper left corner."""
    rows, columns = np.nonzero(pixels)
    return np.array([columns.mean() + 0.5, rows.mean() + 0.5])
