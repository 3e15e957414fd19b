"""The learned table-top world as it is served: the shipped weights behind the interface that every world has.

A row's results depend on that row alone; in batches of different sizes they differ by rounding (below 1e-4). Computed
alone they are the same to the bit, each time and in each process of the same kind of machine.
"""

import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Final

import numpy as np
import safetensors
import torch
from numpy.typing import NDArray
from safetensors.torch import load
from torch import Tensor

from omni_live.engines.contract import EngineOptions
from omni_live.engines.options import Options
from omni_live.pipelines.world import network
from omni_live.pipelines.world.adapter import Floats, Images
from omni_live.pipelines.world.network import Autoencoder, Dynamics, floats, stepped
from omni_live.sessions.payload import Scalar

SHIPPED: Final = "table_world.safetensors"
_SEEDS: Final = 2**64


class BadWeights(ValueError):
    """A weights file is damaged, or of another network."""


class TableWorld:
    """Places of four things, moved by flow matching. Option: `weights`, a file of your own training.

    A latent is float32[2, 1, 4]: each thing's x and y, -1..1 across the picture; which slot holds what was found in
    training. Images are uint8[B, 64, 64, 3]. Arrays are copied before use: they may be read-only, and where they lie in
    memory (which decides in which order sums are vectorized) does not show in the results.
    """

    STEPS: Final = network.STEPS
    CONTEXT: Final = network.CONTEXT
    LATENT: Final = (network.CHANNELS, 1, network.SLOTS)

    def __init__(self, options: Mapping[str, Scalar] | None = None) -> None:
        read = Options("table world", EngineOptions(options or {}))
        self._weights = read.text("weights", "")
        read.done()

    def load(self) -> None:
        """Load the weights and warm up; sets torch to one thread. Raises BadWeights, and OSError for a missing file."""
        torch.set_num_threads(1)  # a step is too small to share out, and other workers want the cores
        weights = _bytes(self._weights)
        self._autoencoder, self._dynamics, self._starts = _networks(weights)
        self._fingerprint = hashlib.blake2b(weights, digest_size=16).hexdigest()
        for size in (1, 8):
            x = self.encode(np.zeros((size, network.SIDE, network.SIDE, 3), np.uint8))
            context = np.concatenate([x] * self.CONTEXT, 1)
            actions = np.zeros((size, network.ACTIONS, 2), np.float32)
            self.decode(self.finish(self.denoise(x, np.zeros(size, np.int64), context, actions), context))

    def fingerprint(self) -> str:
        """Says which weights these are: latents of one world mean nothing to another."""
        return self._fingerprint

    def starts(self) -> Images:
        """Sixteen frames to begin with."""
        return self._starts

    @torch.inference_mode()
    def encode(self, images: Images) -> Floats:
        """Latents (B, 2, 1, 4)."""
        return _numpy(self._autoencoder.eyes(floats(torch.tensor(images))))

    @torch.inference_mode()
    def decode(self, latents: Floats) -> Images:
        """Frames of the latents (B, 2, 1, 4)."""
        pictures = self._autoencoder.painter(torch.tensor(latents))
        images = pictures.clamp(0, 1).mul(255).round().to(torch.uint8)
        decoded: Images = images.permute(0, 2, 3, 1).contiguous().numpy()
        return decoded

    def begin(self, seeds: Sequence[int], frames: Sequence[int]) -> Floats:
        """The noise that each frame begins as: of the rollout's seed and the frame's number, no more."""
        return np.stack([noise_of(seed, frame) for seed, frame in zip(seeds, frames, strict=True)])

    @torch.inference_mode()
    def denoise(self, x: Floats, step_index: NDArray[np.int64], context: Floats, actions: Floats) -> Floats:
        """One denoising step of each row: `step_index` (B,), each 0 to STEPS - 1; `context` (B, 4, 1, 4), the older
        latent first; `actions` (B, 2, 2)."""
        flowing, times = torch.tensor(x), torch.tensor(step_index) / self.STEPS
        move = self._dynamics(flowing, times, torch.tensor(context), torch.tensor(actions))
        return _numpy(stepped(flowing, move, times))

    def finish(self, x: Floats, context: Floats) -> Floats:
        """The next latents, of what the last step gave."""
        now = context[:, -network.CHANNELS :]
        return np.clip(now + x * self._scale, -1.0, 1.0)

    @property
    def _scale(self) -> np.float32:
        return np.float32(self._dynamics.scale.item())


def noise_of(seed: int, frame: int) -> Floats:
    """The noise of a rollout's frame, float32[2, 1, 4]: the same in every batch and process. Any whole number is a
    seed; a frame is 0 to 2^64 - 1."""
    bits = np.random.Philox(key=seed % _SEEDS, counter=frame << 64)  # far apart: each draw counts it up
    return np.random.Generator(bits).standard_normal(TableWorld.LATENT, np.float32)


def _numpy(tensor: Tensor) -> Floats:
    array: Floats = tensor.contiguous().numpy()
    return array


def _bytes(path: str) -> bytes:
    if path:
        return Path(path).read_bytes()
    return (resources.files("omni_live.pipelines.world.weights") / SHIPPED).read_bytes()


def _networks(weights: bytes) -> tuple[Autoencoder, Dynamics, Images]:
    autoencoder, dynamics = Autoencoder(), Dynamics()
    try:
        tensors = load(weights)
        starts: Images = tensors.pop("starts").numpy()
        moving = {name for name in tensors if name.startswith("dynamics.")}
        dynamics.load_state_dict({name.removeprefix("dynamics."): tensors[name].float() for name in moving})
        autoencoder.load_state_dict({name: tensors[name].float() for name in tensors.keys() - moving})
    except (safetensors.SafetensorError, KeyError, RuntimeError) as error:
        raise BadWeights(f"the table world's weights can't be used: {error}") from None
    return autoencoder.eval().requires_grad_(False), dynamics.eval().requires_grad_(False), starts
