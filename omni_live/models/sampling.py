"""Picks the next token of each row, and notices when a reply goes round in circles.

Draws are counter-based: the number drawn depends on the seed, the turn and the position in the reply, and on nothing
that happened before, so a replayed, resumed or regrouped turn draws the same. Rows do not see each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.random import Generator, Philox
from torch import Tensor

from omni_live.models.gguf_weights import Misuse

_UINT64: Final = (1 << 64) - 1
_USUALLY_ENOUGH: Final = 256  # tokens that mostly hold the nucleus; sorting the whole vocabulary takes milliseconds


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a turn's tokens are picked. `temperature` 0 is greedy; `top_p` in (0, 1]; `repetition_penalty` ≥ 1 divides
    (or multiplies, below zero) the logits of tokens already there, as in CTRL (Keskar et al. 2019)."""

    temperature: float = 0.0
    top_p: float = 1.0
    repetition_penalty: float = 1.1
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and 0 < self.top_p <= 1 and self.repetition_penalty >= 1):
            raise Misuse("temperature is at least 0, top_p in (0, 1], repetition_penalty at least 1")


class Sampler:
    """One turn's picking: its settings, its place in the random sequence, and the tokens that are penalised.

    `stops` are never penalised (a reply must be free to end) and end the reply when picked: see `stopped`.
    `context` are ids that count as already said, besides the reply's own.
    """

    def __init__(
        self, sampling: Sampling, *, turn: int, stops: frozenset[int] = frozenset(), context: Sequence[int] = ()
    ) -> None:
        self.sampling = sampling
        self.stops = stops
        self.position = 0
        self.stopped = False
        self._turn = turn
        self._said = dict.fromkeys(token for token in context if token not in stops)

    def said(self) -> list[int]:
        """The penalised ids, each once."""
        return list(self._said)

    def uniform(self) -> float:
        """This position's draw from [0, 1)."""
        key = np.array([self.sampling.seed & _UINT64, self._turn & _UINT64], np.uint64)
        counter = np.array([0, 0, 0, self.position], np.uint64)  # the low words are the generator's own to count with
        return float(Generator(Philox(key=key, counter=counter)).random())

    def took(self, token: int) -> None:
        self.position += 1
        if token in self.stops:
            self.stopped = True
        else:
            self._said[token] = None


def sample(logits: Tensor, rows: Sequence[Sampler]) -> list[int]:
    """Picks one token per row of float32[rows, vocabulary] and tells each row's sampler; changes `logits` in place."""
    if logits.shape[0] != len(rows):
        raise Misuse("one sampler per row")
    with torch.inference_mode():
        for row, sampler in zip(logits, rows, strict=True):
            _penalise(row, sampler)
        greedy: list[int] = logits.argmax(-1).tolist()
        picked = [
            token if sampler.sampling.temperature == 0 else _draw(row, sampler)
            for token, row, sampler in zip(greedy, logits, rows, strict=True)
        ]
    for token, sampler in zip(picked, rows, strict=True):
        sampler.took(token)
    return picked


def probability(logits: Tensor, token: int) -> float:
    """The softmax probability of one token in float32[vocabulary]."""
    return float((logits[token] - logits.logsumexp(-1)).exp())


def _penalise(row: Tensor, sampler: Sampler) -> None:
    said, penalty = sampler.said(), sampler.sampling.repetition_penalty
    if not said or penalty == 1:
        return
    at = torch.tensor(said)
    scores = row[at]
    row[at] = torch.where(scores > 0, scores / penalty, scores * penalty)


def _draw(row: Tensor, sampler: Sampler) -> int:
    chances = torch.softmax(row / sampler.sampling.temperature, -1)
    chances, tokens = _nucleus(chances, sampler.sampling.top_p)
    sums = chances.double().cumsum(-1)
    place = int(torch.searchsorted(sums, sampler.uniform() * float(sums[-1]), right=True))
    return int(tokens[min(place, tokens.numel() - 1)])


def _nucleus(chances: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The likeliest tokens, as few as reach `top_p` together: their chances and their ids, likeliest first."""
    count = min(_USUALLY_ENOUGH, chances.numel()) if top_p < 1 else chances.numel()
    best, tokens = chances.topk(count)
    sums = best.double().cumsum(-1)
    if count < chances.numel() and float(sums[-1]) < top_p:
        best, tokens = chances.sort(descending=True)
        sums = best.double().cumsum(-1)
    kept = int(torch.searchsorted(sums, min(top_p, float(sums[-1])))) + 1
    return best[:kept], tokens[:kept]


class Loop:
    """Watches a reply for repetition: true once the same `length` tokens in a row were said `times` times."""

    def __init__(self, length: int = 8, times: int = 3) -> None:
        self._length = length
        self._times = times
        self._recent: tuple[int, ...] = ()
        self._counts: dict[tuple[int, ...], int] = {}

    def push(self, token: int) -> bool:
        """Takes the reply's next token; tells whether the reply loops."""
        self._recent = (*self._recent[-self._length + 1 :], token)
        if len(self._recent) < self._length:
            return False
        count = self._counts.get(self._recent, 0) + 1
        self._counts[self._recent] = count
        return count >= self._times
