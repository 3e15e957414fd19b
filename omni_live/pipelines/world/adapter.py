"""What a world model must offer to be served: its arithmetic, and no knowledge of sessions, batching or memory."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from omni_live.sessions.payload import Scalar

Floats = NDArray[np.float32]
Images = NDArray[np.uint8]
"""(B, height, width, 3)."""


TABLE_WORLD: Final = "omni_live.pipelines.world.table_world:TableWorld"
"""The world in the box."""
UNDATED_NS: Final = 100_000_000
"""A frame without a deadline counts as due so long after it could begin: urgent ones go before it, but not forever."""


class WorldBroken(RuntimeError):
    """The world cannot even go on from zeros, or decode them."""


class BadWorld(ValueError):
    """A world's path names nothing that can be imported, or its options do not fit together."""


class World(Protocol):
    """A world model. It is made as `World(options)`, which must be cheap, and called from one thread.

    The next frame's latent is denoised in `STEPS` steps from noise, given the last `CONTEXT` latents and the frame's
    two actions. Rows of a batch belong to different sessions and may be at different steps: a row's result depends on
    that row alone, but for rounding.
    """

    @property
    def STEPS(self) -> int:  # noqa: N802 - a constant of the class
        """Denoising steps of a frame."""

    @property
    def CONTEXT(self) -> int:  # noqa: N802
        """Latents that a frame is predicted from."""

    @property
    def LATENT(self) -> tuple[int, int, int]:  # noqa: N802
        """Shape of a latent: c, h, w."""

    def load(self) -> None:
        """Load weights and warm up; may take long. Everything below is called after it."""

    def fingerprint(self) -> str:
        """Says which weights these are: latents of one world mean nothing to another."""

    def starts(self) -> Images:
        """The frames that it ships to begin with, of the size of all its frames."""

    def encode(self, images: Images) -> Floats:
        """Latents (B, c, h, w)."""

    def decode(self, latents: Floats) -> Images:
        """Frames of the latents (B, c, h, w)."""

    def begin(self, seeds: Sequence[int], frames: Sequence[int]) -> Floats:
        """The noise (B, c, h, w) that each frame begins as: of the rollout's seed and the frame's number, no more."""

    def denoise(self, x: Floats, step_index: NDArray[np.int64], context: Floats, actions: Floats) -> Floats:
        """One denoising step of each row: x (B, c, h, w); step_index (B,), each 0 to STEPS - 1; context
        (B, CONTEXT * c, h, w), the oldest latent first; actions (B, 2, 2)."""

    def finish(self, x: Floats, context: Floats) -> Floats:
        """The next latents (B, c, h, w), of what the last step gave."""


def load_world(path: str, options: Mapping[str, Scalar]) -> World:
    """The world that `module:Class` names, made with these options. Raises BadWorld where there is none."""
    module, _, name = path.partition(":")
    try:
        made: Callable[[Mapping[str, Scalar]], World] = vars(importlib.import_module(module))[name]
    except (ImportError, KeyError, ValueError) as error:
        raise BadWorld(f"no world {path!r}: {error}") from error
    return made(options)
