"""A fake policy for tests and measurements: its actions tell whose observation they come from. Not a model."""

import time
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from omni_live.engines.contract import EngineOptions
from omni_live.engines.options import Options
from omni_live.pipelines.robot.adapter import Chunk, Query
from omni_live.protocols.openpi.fake_contract import DIM, HORIZON, LIMIT, SIDE, STATE, contract
from omni_live.sessions.payload import Scalar

__all__ = ["DIM", "HORIZON", "LIMIT", "STATE", "FakeFailure", "FakePolicy", "contract", "prompt_tag"]


class FakeFailure(RuntimeError):
    """What the fake raises where a real policy would have a bug."""


def prompt_tag(prompt: str) -> int:
    """What a prompt becomes in a fake chunk's sixth column: 0 to 9999."""
    return zlib.crc32(prompt.encode()) % 10_000


class FakePolicy:
    """Answers each observation with a chunk of the size of pi0's, without a model.

    Every row holds: state[0] (the tag), state[1], the seed (modulo LIMIT), the camera image's first number, how many
    rows of a previous chunk there were, `prompt_tag`, the size of the batch; then zeros. The first `delay_steps` rows
    are those of the previous chunk.
    Options: `image`: side of the two images (224); `delay_ms`: sleeps so long for each batch (0); `fail_on`,
    `nan_on`, `huge_on`: tags, each a number other than 0, at which it raises, answers NaN, goes beyond its bounds.
    """

    def __init__(self, options: Mapping[str, Scalar]) -> None:
        read = Options("fake policy", EngineOptions(options))
        side = read.whole("image", SIDE, 1, 4096)
        self._delay_s = read.real("delay_ms", 0.0, 0.0, 600_000.0) / 1000
        self._fail_on = read.real("fail_on", 0.0, -LIMIT, LIMIT)
        self._nan_on = read.real("nan_on", 0.0, -LIMIT, LIMIT)
        self._huge_on = read.real("huge_on", 0.0, -LIMIT, LIMIT)
        read.done()
        self.contract = contract(side)

    def load(self) -> None:
        """There is nothing to load."""

    def predict_chunk(self, batch: Sequence[Query]) -> Sequence[Chunk]:
        if self._delay_s:
            time.sleep(self._delay_s)
        return [self._chunk(query, len(batch)) for query in batch]

    def _chunk(self, query: Query, size: int) -> Chunk:
        state = query.arrays["observation/state"]
        tag = float(state[0])
        if tag and tag == self._fail_on:
            raise FakeFailure("the observation asked for it")
        image = query.arrays["observation/image"]
        rows = 0 if query.previous is None else len(query.previous)
        chunk = np.zeros((HORIZON, DIM), np.float32)
        told = (tag, float(state[1]), query.seed % LIMIT, float(image.flat[0]), rows)
        chunk[:, :7] = (*told, prompt_tag(query.texts["prompt"]), size)
        if query.previous is not None:
            chunk[: query.delay_steps] = query.previous[: query.delay_steps]
        if tag and tag == self._nan_on:
            chunk[-1, -1] = np.nan
        if tag and tag == self._huge_on:
            chunk[-1, -1] = 2 * LIMIT
        return chunk
