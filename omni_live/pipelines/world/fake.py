"""A fake world for tests and measurements: arithmetic that any numpy does to the same bit. Not a model."""

import time
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_live.engines.contract import EngineOptions
from omni_live.engines.options import Options
from omni_live.pipelines.world.adapter import Floats, Images
from omni_live.sessions.payload import Scalar

SIDE: Final = 64
_CELL: Final = 16
"""A latent's cell stands for a square of so many pixels."""
_STARTS: Final = 4
_SEEDS: Final = 2**64


class FakeFailure(RuntimeError):
    """What the fake raises where a real world would have a bug."""


class FakeWorld:
    """Mosaics of 4x4 cells, whose colours follow the actions, the two frames before, and the seed. No weights.

    Options: `delay_ms`: sleeps so long for each denoising step of a batch (0); `fail_on`, `nan_on`: a first action's
    first number, other than 0, at which a denoising step raises, or gives NaN.
    """

    STEPS: Final = 4
    CONTEXT: Final = 2
    LATENT: Final = (3, 4, 4)

    def __init__(self, options: Mapping[str, Scalar]) -> None:
        read = Options("fake world", EngineOptions(options))
        self._delay_s = read.real("delay_ms", 0.0, 0.0, 60_000.0) / 1000
        self._fail_on = np.float32(read.real("fail_on", 0.0, -1.0, 1.0))
        self._nan_on = np.float32(read.real("nan_on", 0.0, -1.0, 1.0))
        read.done()

    def load(self) -> None:
        """There is nothing to load."""

    def fingerprint(self) -> str:
        return "fake-world-1"

    def starts(self) -> Images:
        """Four frames, each of one grey."""
        greys = np.arange(1, _STARTS + 1, dtype=np.uint8) * 50
        return np.broadcast_to(greys[:, None, None, None], (_STARTS, SIDE, SIDE, 3))

    def encode(self, images: Images) -> Floats:
        """The colour of each cell's first pixel, 0 to 1."""
        corners = images[:, ::_CELL, ::_CELL].transpose(0, 3, 1, 2)
        return np.ascontiguousarray(corners, np.float32) / np.float32(255)

    def decode(self, latents: Floats) -> Images:
        colours = np.rint(np.clip(latents, 0, 1) * np.float32(255)).astype(np.uint8).transpose(0, 2, 3, 1)
        return np.ascontiguousarray(colours.repeat(_CELL, axis=1).repeat(_CELL, axis=2))

    def begin(self, seeds: Sequence[int], frames: Sequence[int]) -> Floats:
        return np.stack([self._noise(seed, frame) for seed, frame in zip(seeds, frames, strict=True)])

    def denoise(self, x: Floats, step_index: NDArray[np.int64], context: Floats, actions: Floats) -> Floats:
        if self._delay_s:
            time.sleep(self._delay_s)
        first = actions[:, 0, 0]
        if self._fail_on and bool((first == self._fail_on).any()):
            raise FakeFailure("the actions asked for it")
        depth = self.LATENT[0]
        drift = context[:, depth:] - context[:, :depth]
        push = (actions.sum(axis=(1, 2)) * (step_index + 1)).astype(np.float32)[:, None, None, None]
        x = x * np.float32(0.5) + drift * np.float32(0.25) + push * np.float32(0.125)
        if self._nan_on:
            x[first == self._nan_on] = np.nan
        return x

    def finish(self, x: Floats, context: Floats) -> Floats:
        return np.clip(context[:, self.LATENT[0] :] + x * np.float32(0.0625), 0, 1)

    def _noise(self, seed: int, frame: int) -> Floats:
        bits = np.random.Philox(key=seed % _SEEDS, counter=frame << 64)  # far apart: each draw counts it up
        return np.random.Generator(bits).standard_normal(self.LATENT, np.float32)
