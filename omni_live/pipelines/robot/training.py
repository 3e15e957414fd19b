"""Trains the table-top policy on demonstrations: seeded, and resumable to the same bits.

The loss is that of rectified flow: at a random time between noise and actions, the square of the error in the
velocity. In half of the chunks the first rows are given, as the actions that were executed, disturbances and all, and
only the others are to be found: so the network learns to go on from what a robot is about to do (training-time action
conditioning, Black et al. 2025, arXiv 2512.05964). What is kept in the end is a moving average of the weights, in
float16.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from omni_live.pipelines import checkpoints
from omni_live.pipelines.checkpoints import BadCheckpoint, Progress, checkpoint_path
from omni_live.pipelines.robot.demonstrations import Demonstrations
from omni_live.pipelines.robot.network import ACTION_DIM, HORIZON, Network, text_code

BATCH: Final = 128
_RATE: Final = 1.5e-3
_WARM_UP: Final = 200
_DECAY: Final = 1e-4
_LONGEST_GRADIENT: Final = 1.0
_AVERAGE_EVERY: Final = 5
_AVERAGE_MOST: Final = 0.99
_EARLY_TIMES: Final = 1.3  # the exponent that draws more times near the noise, where the way is decided
_GIVEN_SHARE: Final = 0.5
_GIVEN_MOST: Final = 12
_MOMENTS: Final = ("exp_avg", "exp_avg_sq", "step")  # what AdamW keeps of each parameter


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides the outcome; with the same ones, and on the same kind of machine, training gives the same bits."""

    seed: int = 0
    iterations: int = 4000
    episodes: int = 1200
    threads: int = 1
    """Set for the whole process; sums come out differently with another number."""


def train(
    demonstrations: Demonstrations,
    out: Path,
    settings: Settings,
    progress: Progress,
    *,
    resume: bool = False,
    keep_every: int = 250,
) -> float:
    """Trains and writes the weights to `out`; the loss at the end, averaged over about 100 iterations.

    Steps `progress` once an iteration (those that a resumed training has behind it at once). Every `keep_every`
    iterations the state is written to `checkpoint_path(out)`, which is removed at the end; `resume` goes on from
    there if it exists. Raises BadCheckpoint, and OSError where `out` can't be written.
    """
    torch.set_num_threads(settings.threads)
    state = _State(settings)
    kept = checkpoint_path(out)
    if resume and kept.exists():
        state.load(kept)
    frames = _Frames(demonstrations)
    progress.enter(f"{settings.iterations} iterations")
    progress.step(state.iteration)
    while state.iteration < settings.iterations:
        state.improve(frames)
        progress.step()
        if state.iteration % keep_every == 0 and state.iteration < settings.iterations:
            state.save(kept)
            progress.enter(f"iteration {state.iteration}, loss {state.loss:.4f}")
    checkpoints.write(
        out,
        {name: value.half() for name, value in state.average.state_dict().items()},
        checkpoints.described(asdict(settings)),
    )
    kept.unlink(missing_ok=True)
    return state.loss


@dataclass(frozen=True, slots=True)
class _Batch:
    images: Tensor
    states: Tensor
    texts: Tensor
    chunks: Tensor
    """Rows that are given are what was executed, the others what the expert then wanted; past an episode's end its last
    action is repeated."""
    given: Tensor


class _Frames:
    """The demonstrations as tensors (the same memory), and the batches that are drawn from them."""

    def __init__(self, demonstrations: Demonstrations) -> None:
        self._images = torch.from_numpy(demonstrations.images)
        self._states = torch.from_numpy(demonstrations.states)
        self._actions = torch.from_numpy(demonstrations.actions)
        self._executed = torch.from_numpy(demonstrations.executed)
        self._ends = torch.from_numpy(demonstrations.ends)
        self._tasks = torch.from_numpy(demonstrations.tasks)
        self._texts = torch.from_numpy(np.stack([text_code(text) for text in demonstrations.prompts]))
        self._ahead = torch.arange(HORIZON)

    def draw(self, generator: torch.Generator) -> _Batch:
        drawn = torch.randint(len(self._images), (BATCH,), generator=generator)
        rows = torch.minimum(drawn[:, None] + self._ahead, self._ends[drawn][:, None])
        given = _given(generator)
        chunks = torch.where(given[..., None] > 0, self._executed[rows], self._actions[rows])
        return _Batch(self._images[drawn], self._states[drawn], self._texts[self._tasks[drawn]], chunks, given)


def _given(generator: torch.Generator) -> Tensor:
    """Which rows of each chunk are given, float32[BATCH, 16]: none in half of them, else the first few."""
    some = torch.rand(BATCH, generator=generator) < _GIVEN_SHARE
    count = 1 + (_GIVEN_MOST * torch.rand(BATCH, generator=generator) ** 2).floor()  # mostly few
    return (torch.arange(HORIZON) < (some * count)[:, None]).float()


class _State:
    """A training between two iterations."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self._network = Network()
        self.average = Network()
        self.average.load_state_dict(self._network.state_dict())
        self._optimizer = torch.optim.AdamW(self._network.parameters(), lr=_RATE, weight_decay=_DECAY)
        self._generator = torch.Generator().manual_seed(settings.seed)
        self.iteration = 0
        self.loss = math.nan

    def improve(self, frames: _Frames) -> None:
        """One iteration."""
        for group in self._optimizer.param_groups:
            group["lr"] = _rate(self.iteration, self._settings.iterations)
        loss = self._loss(frames)
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self._network.parameters(), _LONGEST_GRADIENT)
        self._optimizer.step()
        value = float(loss.detach())
        self.loss = value if math.isnan(self.loss) else 0.99 * self.loss + 0.01 * value
        if self.iteration % _AVERAGE_EVERY == 0:
            self._move_average()
        self.iteration += 1

    def _loss(self, frames: _Frames) -> Tensor:
        batch = frames.draw(self._generator)
        noise = torch.randn(batch.chunks.shape, generator=self._generator)
        times = torch.rand(BATCH, generator=self._generator) ** _EARLY_TIMES
        given = batch.given[..., None]
        on_the_way = torch.lerp(noise, batch.chunks, torch.maximum(times[:, None, None], given))
        context = self._network.context(batch.images, batch.states, batch.texts)
        error = self._network.velocity(context, on_the_way, times, batch.given) - (batch.chunks - noise)
        return ((1 - given) * error.square()).sum() / ((1 - given).sum() * ACTION_DIM)

    @torch.no_grad()
    def _move_average(self) -> None:
        weight = 1 - min(_AVERAGE_MOST, (self.iteration + 1) / (self.iteration + 50))
        for kept, now in zip(self.average.parameters(), self._network.parameters(), strict=True):
            kept.lerp_(now, weight)

    def save(self, path: Path) -> None:
        tensors = dict(self._tensors())
        tensors["generator"] = self._generator.get_state()
        progress = {"iteration": str(self.iteration), "loss": self.loss.hex()}
        checkpoints.write(path, tensors, {**checkpoints.described(asdict(self._settings)), **progress})

    def load(self, path: Path) -> None:
        """Raises BadCheckpoint."""
        tensors, described = checkpoints.read(path, asdict(self._settings))
        try:
            self._restore(tensors)
            self.iteration, self.loss = int(described["iteration"]), float.fromhex(described["loss"])
        except (KeyError, ValueError, RuntimeError) as error:
            raise BadCheckpoint(f"{path} is no checkpoint of this network: {error}") from None

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights, their average and the optimizer's moments, by name."""
        for name, value in self._network.state_dict().items():
            yield f"network.{name}", value
        for name, value in self.average.state_dict().items():
            yield f"average.{name}", value
        for name, parameter in self._network.named_parameters():
            for moment in _MOMENTS:
                yield f"{moment}.{name}", self._optimizer.state[parameter][moment]

    def _restore(self, tensors: Mapping[str, Tensor]) -> None:
        self._network.load_state_dict(checkpoints.under("network.", tensors))
        self.average.load_state_dict(checkpoints.under("average.", tensors))
        moments = {
            at: {moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS}
            for at, (name, _) in enumerate(self._network.named_parameters())
        }
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self._generator.set_state(tensors["generator"])


def _rate(iteration: int, iterations: int) -> float:
    """The learning rate: up linearly, down along a cosine."""
    warm = min(1.0, (iteration + 1) / _WARM_UP)
    return _RATE * warm * 0.5 * (1 + math.cos(math.pi * iteration / iterations)) + 1e-6
