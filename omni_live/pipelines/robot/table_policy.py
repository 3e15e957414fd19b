"""The policy that drives the table-top simulator: the shipped weights behind the adapter that every policy has.

A query's chunk depends on its observation, seed and previous chunk alone. In batches of different sizes it differs by
rounding (below 1e-4); served alone it is the same to the bit, each time.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Final

import numpy as np
import safetensors
import torch
from numpy.typing import NDArray
from safetensors.torch import load

from omni_live.engines.contract import EngineOptions
from omni_live.engines.options import Options
from omni_live.pipelines.robot.adapter import Chunk, Query
from omni_live.pipelines.robot.network import ACTION_DIM, HORIZON, TEXT_LIMIT, Network, prefix_of, text_code
from omni_live.protocols.openpi.tabletop import CONTRACT
from omni_live.sessions.payload import Scalar

SHIPPED: Final = "table_policy.safetensors"
_SEEDS: Final = 2**64
_IMAGE, _STATE = (field.key for field in CONTRACT.observation)


class BadWeights(ValueError):
    """A weights file is damaged, or of another network."""


class TablePolicy:
    """Flow matching over chunks of 16 steps. Options: `steps`, of the flow (4); `weights`, a file of your own training.

    More steps of the flow cost more and gain nothing that we could measure.
    """

    contract = CONTRACT

    def __init__(self, options: Mapping[str, Scalar]) -> None:
        read = Options("table policy", EngineOptions(options))
        self._steps = read.whole("steps", 4, 1, 64)
        self._weights = read.text("weights", "")
        read.done()

    def load(self) -> None:
        """Load the weights and warm up; sets torch to one thread. Raises BadWeights, and OSError for a missing file."""
        torch.set_num_threads(1)  # a chunk is too small to share out, and other workers want the cores
        self._network = _network(_bytes(self._weights))
        with torch.inference_mode():
            self._clocks = self._network.clocks(self._steps)
        for size in (1, 8):
            self.predict_chunk([_BLANK] * size)

    @torch.inference_mode()
    def predict_chunk(self, batch: Sequence[Query]) -> Sequence[Chunk]:
        """One forward pass for all; float32[16, 2] in -1..1 each."""
        images = torch.from_numpy(np.stack([query.arrays[_IMAGE] for query in batch]))
        states = torch.from_numpy(np.stack([query.arrays[_STATE] for query in batch]))
        texts = torch.from_numpy(np.stack([_code(query.texts["prompt"][:TEXT_LIMIT]) for query in batch]))
        noise = torch.from_numpy(np.stack([noise_of(query.seed) for query in batch]))
        prefix = prefix_of([query.previous for query in batch], [query.delay_steps for query in batch])
        context = self._network.context(images, states, texts)
        return list(self._network.sample(context, noise, self._clocks, prefix).numpy())


_BLANK: Final = Query(
    {field.key: np.zeros(field.shape, field.dtype) for field in CONTRACT.observation}, {"prompt": "warm up"}, seed=0
)


def noise_of(seed: int) -> NDArray[np.float32]:
    """The noise that a seed stands for, float32[16, 2]: the same in every batch and process."""
    bits = np.random.Philox(key=seed % _SEEDS)
    return np.random.Generator(bits).standard_normal((HORIZON, ACTION_DIM), np.float32)


@lru_cache(maxsize=256)
def _code(text: str) -> NDArray[np.float32]:
    """The same as `text_code`, remembered: robots say the same sentence with each observation."""
    return text_code(text)


def _bytes(path: str) -> bytes:
    if path:
        return Path(path).read_bytes()
    return (resources.files("omni_live.pipelines.robot.weights") / SHIPPED).read_bytes()


def _network(weights: bytes) -> Network:
    network = Network()
    try:
        network.load_state_dict({name: value.float() for name, value in load(weights).items()})
    except (safetensors.SafetensorError, RuntimeError) as error:
        raise BadWeights(f"the table policy's weights can't be used: {error}") from None
    return network.eval().requires_grad_(False)
