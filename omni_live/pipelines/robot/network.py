"""The table-top policy's network: what it sees and reads becomes a chunk of actions by flow matching.

Three convolutions look at the picture, modulated by the sentence (FiLM, Perez et al. 2018); a softmax over each
channel's places turns them into keypoints (Finn et al. 2016). From those a residual MLP tells how fast noise must flow
to become a chunk of actions (rectified flow, Liu et al. 2022): x(t) = (1 - t) · noise + t · actions.

A chunk can be made to go on from the one before it (real-time chunking, Black et al. 2025, arXiv 2506.07339): the rows
that the arm will have executed by then are given, as they were in training, and the flow of the two after them is led
towards the earlier chunk's. Rows of a batch are independent of each other, but for rounding.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn, relu_
from torch.nn.functional import silu

HORIZON: Final = 16
ACTION_DIM: Final = 2
STATE_DIM: Final = 2
TEXT_DIM: Final = 128
TEXT_LIMIT: Final = 512
"""Characters of a sentence that count: its length is the client's choice, the work is not."""

_LED: Final = 2  # rows after the fixed ones: more, up to the whole overlap as in the paper, and it reacts too late
_WIDTH: Final = 160
_BLOCKS: Final = 3
_KEYPOINTS: Final = 32
_GRID: Final = 16
_SHARPNESS: Final = 4.0
_TIME_DIM: Final = 64


def text_code(text: str) -> NDArray[np.float32]:
    """A sentence as float32[128]: its words and pairs of words, hashed with a sign. There is no vocabulary to ship."""
    words = text[:TEXT_LIMIT].lower().split()
    parts = [*words, *("_".join(pair) for pair in pairwise(words))]
    code = np.zeros(TEXT_DIM, np.float32)
    for part in parts:
        digest = hashlib.blake2b(part.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        hashed = int.from_bytes(digest, "little")
        code[hashed % TEXT_DIM] += 1 if hashed >> 32 & 1 else -1
    code /= np.float32(math.sqrt(max(1, len(parts))))
    return code


@dataclass(frozen=True, slots=True)
class Prefix:
    """What each chunk of a batch has to agree with."""

    actions: Tensor
    """float32[B, 16, 2]: the earlier chunk's rows, moved to where the new one begins; anything past their end."""
    weights: Tensor
    """float32[B, 16] of 0 to 1: how much a row is bound to it. Rows of weight 1 are taken over bit by bit."""


def prefix_weights(overlap: int, delay: int) -> NDArray[np.float32]:
    """How much each row of a new chunk is bound to the earlier one, float32[16].

    `overlap` rows are common to both, and the first `delay` of them are fixed. The `_LED` rows after those decay as the
    paper's soft mask does (its equation 5): c · (e^c - 1) / (e - 1) with c falling linearly to 0.
    """
    overlap = min(max(overlap, 0), HORIZON)
    delay = min(max(delay, 0), overlap)
    end = min(overlap, delay + _LED)
    weights = np.zeros(HORIZON, np.float32)
    weights[:delay] = 1.0
    falling = (end - np.arange(delay, end)) / (end - delay + 1)
    weights[delay:end] = falling * np.expm1(falling) / (math.e - 1)
    return weights


class Eyes(nn.Module):
    """Picture, state and sentence to features: uint8[B, 64, 64, 3], float32[B, 2], float32[B, 128] to [B, 98]."""

    grid: Tensor
    """float32[3, 256]: each place's x and y, -1 to 1, and 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 5, 2, 2)
        self.second = nn.Conv2d(32, 32, 3, 2, 1)
        self.film = nn.Linear(TEXT_DIM, 2 * 32)
        self.third = nn.Conv2d(32, 48, 3, 1, 1)
        self.points = nn.Linear(48, _KEYPOINTS)
        along = (torch.arange(_GRID) + 0.5) * (2 / _GRID) - 1
        grid = torch.stack([along.repeat(_GRID), along.repeat_interleave(_GRID), torch.ones(_GRID**2)])
        self.register_buffer("grid", grid, persistent=False)

    def forward(self, images: Tensor, states: Tensor, texts: Tensor) -> Tensor:
        x = images.permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)  # in memory it stays as it was: channels last
        x = self.second(relu_(self.first(x)))
        scale, shift = self.film(texts)[..., None, None].chunk(2, 1)
        x = relu_(self.third(relu_(torch.addcmul(shift, x, 1 + scale))))
        x = self.points(x.permute(0, 2, 3, 1).flatten(1, 2))  # [B, 256, 32]
        most = x.amax(1)
        # A softmax over places and the mean place under it, in one product: torch's own is slow along this axis.
        shares = ((x - most[:, None]) * _SHARPNESS).exp()
        sums = torch.bmm(self.grid.expand(len(x), -1, -1), shares)
        places = sums[:, :2] / sums[:, 2:]
        return torch.cat([places.flatten(1), most.tanh(), states * 2 - 1], -1)


class Block(nn.Module):
    """A residual MLP whose norm is scaled and shifted by the condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH, elementwise_affine=False)
        self.rise = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.fall = nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        fallen: Tensor = self.fall(silu(self.rise(torch.addcmul(shift, self.norm(x), scale))))
        return x + fallen


class Flow(nn.Module):
    """The velocity of a chunk on its way from noise to actions."""

    frequencies: Tensor
    neutral: Tensor
    """float32[2, 1, 1]: scales are around 1, shifts around 0."""

    def __init__(self) -> None:
        super().__init__()
        features = 3 * _KEYPOINTS + STATE_DIM
        self.context = nn.Sequential(nn.Linear(features + TEXT_DIM, 256), nn.SiLU(), nn.Linear(256, _WIDTH))
        self.time = nn.Sequential(nn.Linear(_TIME_DIM, _WIDTH), nn.SiLU(), nn.Linear(_WIDTH, _WIDTH))
        self.modulate = nn.Linear(_WIDTH, 2 * _BLOCKS * _WIDTH)
        nn.init.zeros_(self.modulate.weight)
        nn.init.zeros_(self.modulate.bias)
        self.enter = nn.Linear(HORIZON * ACTION_DIM, _WIDTH)
        self.given = nn.Linear(HORIZON, _WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(_BLOCKS))
        self.leave = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, HORIZON * ACTION_DIM))
        half = _TIME_DIM // 2
        frequencies = 1000 * torch.exp(torch.arange(half) * (-math.log(1000.0) / half))
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("neutral", torch.tensor([1.0, 0.0]).view(2, 1, 1), persistent=False)

    def clock(self, times: Tensor) -> Tensor:
        """Times of the flow (0 noise, 1 actions) as the network takes them: float32[...] to [..., 160]."""
        angles = times[..., None] * self.frequencies
        clock: Tensor = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        return clock

    def modulation(self, context: Tensor, clock: Tensor) -> Tensor:
        """What the blocks are scaled and shifted by: [..., 160] twice, broadcast together, to [..., 2, 3, 160]."""
        modulation: Tensor = self.modulate(silu(context + clock)).unflatten(-1, (2, _BLOCKS, _WIDTH))
        return modulation + self.neutral

    def velocity(self, chunks: Tensor, modulation: Tensor, given: Tensor | None) -> Tensor:
        """float32[B, 16, 2] and [B, 2, 3, 160] to float32[B, 16, 2].

        `given` (float32[B, 16]) is 1 for the rows that are actions already and 0 for those that flow; None: all flow.
        """
        x = self.enter(chunks.flatten(1))
        if given is not None:
            x = x + self.given(given)
        scales, shifts = modulation.unbind(1)
        for block, scale, shift in zip(self.blocks, scales.unbind(1), shifts.unbind(1), strict=True):
            x = block(x, scale, shift)
        velocity: Tensor = self.leave(x)
        return velocity.view_as(chunks)


class Network(nn.Module):
    """The whole policy, 647,280 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.eyes = Eyes()
        self.flow = Flow()
        for parameter in self.parameters():
            if parameter.dim() == 4:  # as the pictures lie in memory
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)

    def context(self, images: Tensor, states: Tensor, texts: Tensor) -> Tensor:
        """float32[B, 160]: all that a chunk depends on but its noise."""
        context: Tensor = self.flow.context(torch.cat([self.eyes(images, states, texts), texts], -1))
        return context

    def velocity(self, context: Tensor, chunks: Tensor, times: Tensor, given: Tensor) -> Tensor:
        """The velocity of `chunks` (float32[B, 16, 2]) at `times` (float32[B], 0 noise to 1 actions); see Flow."""
        return self.flow.velocity(chunks, self.flow.modulation(context, self.flow.clock(times)), given)

    def clocks(self, steps: int) -> Tensor:
        """What `sample` has to know of its number of steps, float32[steps, 1, 160]; the same for all batches."""
        return self.flow.clock(torch.arange(steps)[:, None] / steps)

    def sample(self, context: Tensor, noise: Tensor, clocks: Tensor, prefix: Prefix | None = None) -> Tensor:
        """Chunks of actions in -1..1, float32[B, 16, 2], that `noise` (of the same shape) flows to."""
        steps = len(clocks)
        modulations = self.flow.modulation(context, clocks)  # of all steps in one product
        if prefix is not None:
            return self._going_on(noise, modulations, prefix)
        chunks = noise
        for modulation in modulations:
            chunks = torch.add(chunks, self.flow.velocity(chunks, modulation, None), alpha=1 / steps)
        return chunks.clamp(-1.0, 1.0)

    def _going_on(self, noise: Tensor, modulations: Tensor, prefix: Prefix) -> Tensor:
        steps, weights = len(modulations), prefix.weights[..., None]
        fixed = weights >= 1.0
        given = fixed[..., 0].float()
        chunks = torch.where(fixed, prefix.actions, noise)
        for step, modulation in enumerate(modulations):
            led = (prefix.actions - chunks) * (steps / (steps - step))
            velocity = torch.lerp(self.flow.velocity(chunks, modulation, given), led, weights)
            chunks = torch.add(chunks, velocity, alpha=1 / steps)
        return torch.where(fixed, prefix.actions, chunks.clamp(-1.0, 1.0))


def prefix_of(previous: Sequence[NDArray[np.float32] | None], delays: Sequence[int]) -> Prefix | None:
    """The prefix for a batch: each chunk's earlier rows (float32[n, 2], n up to 16) if it has any; None if none has."""
    if all(rows is None for rows in previous):
        return None
    actions = np.zeros((len(previous), HORIZON, ACTION_DIM), np.float32)
    weights = np.zeros((len(previous), HORIZON), np.float32)
    for at, (rows, delay) in enumerate(zip(previous, delays, strict=True)):
        if rows is not None:
            overlap = min(len(rows), HORIZON)
            actions[at, :overlap] = rows[:overlap]
            weights[at] = prefix_weights(overlap, delay)
    return Prefix(torch.from_numpy(actions), torch.from_numpy(weights))
