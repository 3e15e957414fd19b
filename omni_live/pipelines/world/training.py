"""Trains the table-top world on recorded episodes: seeded, and resumable to the same bits.

First the autoencoder, on pictures alone: the square of what it gets wrong. Then the dynamics, on the latents of all
episodes: at a random step of the flow from noise to the true move, the square of the error in the estimated move. The
context gets a little noise, and the move is then counted from there: so a dream that went slightly wrong is not alien
to it. What is kept of both in the end is a moving average of the weights, in float16, and beside them a few pictures to
start from.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Final, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from omni_live.pipelines import checkpoints
from omni_live.pipelines.checkpoints import BadCheckpoint, Progress, checkpoint_path
from omni_live.pipelines.world.network import STEPS, Autoencoder, Dynamics, floats
from omni_live.pipelines.world.rollouts import Episode

PICTURES: Final = 32
"""Pictures in a batch of the autoencoder's."""
BATCH: Final = 256
"""Moves in a batch of the dynamics'."""
STARTS: Final = 16
"""Pictures that ship beside the weights."""
_SEEN: Final = 200  # episodes whose pictures the autoencoder learns from
_SURVEYED: Final = 27  # every so manieth of those pictures is looked at before it begins
_EYE_RATE: Final = 3e-3
_MOVE_RATE: Final = 2e-3
_WARM_UP: Final = 200
_DECAY: Final = 1e-4
_LONGEST_GRADIENT: Final = 1.0
_AVERAGE_EVERY: Final = 5
_AVERAGE_MOST: Final = 0.99
_BLUR: Final = 0.004  # the most noise in the context, in latents: an eighth of a pixel
_STILL_SHARE: Final = 0.1  # of contexts that are one frame twice, as after a start
_MOMENTS: Final = ("exp_avg", "exp_avg_sq", "step")  # what AdamW keeps of each parameter

N = TypeVar("N", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides the outcome; with the same ones, and on the same kind of machine, training gives the same bits."""

    seed: int = 0
    iterations: int = 9000
    """Of the dynamics."""
    episodes: int = 3000
    threads: int = 1
    """Set for the whole process; sums come out differently with another number."""

    @property
    def eye_iterations(self) -> int:
        """Of the autoencoder."""
        return max(1, self.iterations // 6)

    @property
    def steps(self) -> int:
        """Steps of progress: episodes and iterations."""
        return self.episodes + self.eye_iterations + self.iterations


def train(
    episodes: Iterable[Episode],
    out: Path,
    settings: Settings,
    progress: Progress,
    *,
    resume: bool = False,
    keep_every: int = 500,
) -> float:
    """Trains and writes the weights to `out`; the loss of the dynamics at the end, averaged over about 100 iterations.

    `episodes` (as many as the settings say, all of one length) are taken as they are needed, and only what is learned
    from them is kept. Steps `progress` once an episode and once an iteration (those that a resumed training has behind
    it at once). Every `keep_every` iterations the state is written to `checkpoint_path(out)`, which is removed at the
    end; `resume` goes on from there if it exists. Raises BadCheckpoint, and OSError where `out` can't be written.
    """
    torch.set_num_threads(settings.threads)
    state = _State(settings)
    kept = checkpoint_path(out)
    if resume and kept.exists():
        state.load(kept)
    left = iter(episodes)
    seen = list(islice(left, _SEEN))
    images = torch.from_numpy(np.concatenate([episode.images for episode in seen]))
    progress.enter(f"{settings.eye_iterations} iterations of the autoencoder")
    progress.step(state.sight.iteration)
    while state.sight.iteration < settings.eye_iterations:
        state.see(images)
        progress.step()
        if state.sight.iteration % keep_every == 0:
            state.save(kept)
    progress.enter(f"the latents of {settings.episodes} episodes")
    moves = _Moves(state.sight.average, chain(seen, left), progress)
    progress.enter(f"{settings.iterations} iterations of the dynamics")
    progress.step(state.foresight.iteration)
    while state.foresight.iteration < settings.iterations:
        state.foresee(moves)
        progress.step()
        if state.foresight.iteration % keep_every == 0 and state.foresight.iteration < settings.iterations:
            state.save(kept)
            progress.enter(f"iteration {state.foresight.iteration}, loss {state.foresight.loss:.4f}")
    starts = torch.from_numpy(np.stack([episode.images[0] for episode in seen[:STARTS]]))
    checkpoints.write(out, {**state.weights(), "starts": starts}, checkpoints.described(asdict(settings)))
    kept.unlink(missing_ok=True)
    return state.foresight.loss


@dataclass(frozen=True, slots=True)
class _Batch:
    context: Tensor
    actions: Tensor
    moves: Tensor
    """In latents."""


class _Moves:
    """All episodes as latents and actions, and the batches that are drawn from them."""

    @torch.no_grad()
    def __init__(self, autoencoder: Autoencoder, episodes: Iterable[Episode], progress: Progress) -> None:
        latents, actions = [], []
        for episode in episodes:
            latents.append(autoencoder.eyes(floats(torch.from_numpy(episode.images))))
            actions.append(torch.from_numpy(episode.actions))
            progress.step()
        self._latents, self._actions = torch.stack(latents), torch.stack(actions)
        self.scale = (self._latents[:, 1:] - self._latents[:, :-1]).square().mean().sqrt()

    def draw(self, generator: torch.Generator) -> _Batch:
        episodes, frames = self._actions.shape[:2]
        episode = torch.randint(episodes, (BATCH,), generator=generator)
        frame = torch.randint(frames, (BATCH,), generator=generator)
        still = torch.rand(BATCH, generator=generator) < _STILL_SHARE
        before = torch.where(still, frame, (frame - 1).clamp(min=0))
        context = torch.cat([self._latents[episode, before], self._latents[episode, frame]], 1)
        blur = _BLUR * torch.rand(BATCH, 1, 1, 1, generator=generator)
        context = context + blur * torch.randn(context.shape, generator=generator)
        move = self._latents[episode, frame + 1] - context.chunk(2, 1)[1]
        return _Batch(context, self._actions[episode, frame], move)


class _Fit(Generic[N]):
    """A network, the moving average of its weights, and its optimizer, between two iterations."""

    def __init__(self, network: N, average: N, rate: float, iterations: int) -> None:
        self.network, self.average = network, average
        average.load_state_dict(network.state_dict())
        self._rate, self._iterations = rate, iterations
        self._optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=_DECAY)
        self.iteration = 0
        self.loss = math.nan

    def improve(self, loss: Tensor) -> None:
        """One iteration; `loss` is what the network gives now."""
        for group in self._optimizer.param_groups:
            group["lr"] = _rate(self._rate, self.iteration, self._iterations)
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.network.parameters(), _LONGEST_GRADIENT)
        self._optimizer.step()
        value = float(loss.detach())
        self.loss = value if math.isnan(self.loss) else 0.99 * self.loss + 0.01 * value
        if self.iteration % _AVERAGE_EVERY == 0:
            self._move_average()
        self.iteration += 1

    @torch.no_grad()
    def _move_average(self) -> None:
        weight = 1 - min(_AVERAGE_MOST, (self.iteration + 1) / (self.iteration + 50))
        for kept, now in zip(self.average.parameters(), self.network.parameters(), strict=True):
            kept.lerp_(now, weight)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights, their average and the optimizer's moments, by name; no moments before the first iteration."""
        for name, value in self.network.state_dict().items():
            yield f"network.{name}", value
        for name, value in self.average.state_dict().items():
            yield f"average.{name}", value
        if self.iteration:
            for name, parameter in self.network.named_parameters():
                for moment in _MOMENTS:
                    yield f"{moment}.{name}", self._optimizer.state[parameter][moment]

    def restore(self, tensors: Mapping[str, Tensor], iteration: int, loss: float) -> None:
        self.network.load_state_dict(checkpoints.under("network.", tensors))
        self.average.load_state_dict(checkpoints.under("average.", tensors))
        self.iteration, self.loss = iteration, loss
        if iteration:
            moments = {
                at: {moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS}
                for at, (name, _) in enumerate(self.network.named_parameters())
            }
            groups = self._optimizer.state_dict()["param_groups"]
            self._optimizer.load_state_dict({"state": moments, "param_groups": groups})


class _State:
    """A training between two iterations."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            autoencoder, dynamics = Autoencoder(), Dynamics()
        self.sight = _Fit(autoencoder, Autoencoder(), _EYE_RATE, settings.eye_iterations)
        self.foresight = _Fit(dynamics, Dynamics(), _MOVE_RATE, settings.iterations)
        self._generator = torch.Generator().manual_seed(settings.seed)

    def see(self, images: Tensor) -> None:
        """One iteration of the autoencoder."""
        fit = self.sight
        if not fit.iteration:
            fit.network.begin(images[::_SURVEYED])
            fit.average.load_state_dict(fit.network.state_dict())
        drawn = torch.randint(len(images), (PICTURES,), generator=self._generator)
        pictures = floats(images[drawn])
        fit.improve((fit.network(pictures) - pictures).square().mean())

    def foresee(self, moves: _Moves) -> None:
        """One iteration of the dynamics."""
        fit = self.foresight
        if not fit.iteration:
            fit.network.scale.copy_(moves.scale)
            fit.average.scale.copy_(moves.scale)
        batch = moves.draw(self._generator)
        target = batch.moves / fit.network.scale
        noise = torch.randn(target.shape, generator=self._generator)
        times = torch.randint(STEPS, (BATCH,), generator=self._generator) / STEPS
        on_the_way = torch.lerp(noise, target, times[:, None, None, None])
        fit.improve((fit.network(on_the_way, times, batch.context, batch.actions) - target).square().mean())

    def weights(self) -> dict[str, Tensor]:
        """What ships: the averages, in float16."""
        fits = (("", self.sight.average), ("dynamics.", self.foresight.average))
        return {f"{prefix}{name}": value.half() for prefix, fit in fits for name, value in fit.state_dict().items()}

    def save(self, path: Path) -> None:
        tensors = {"generator": self._generator.get_state()}
        described = checkpoints.described(asdict(self._settings))
        for name, fit in self._fits():
            tensors |= {f"{name}.{key}": value for key, value in fit.tensors()}
            described |= {f"{name}.iteration": str(fit.iteration), f"{name}.loss": fit.loss.hex()}
        checkpoints.write(path, tensors, described)

    def load(self, path: Path) -> None:
        """Raises BadCheckpoint."""
        tensors, described = checkpoints.read(path, asdict(self._settings))
        try:
            for name, fit in self._fits():
                iteration, loss = int(described[f"{name}.iteration"]), float.fromhex(described[f"{name}.loss"])
                fit.restore(checkpoints.under(f"{name}.", tensors), iteration, loss)
            self._generator.set_state(tensors["generator"])
        except (KeyError, ValueError, RuntimeError) as error:
            raise BadCheckpoint(f"{path} is no checkpoint of this network: {error}") from None

    def _fits(self) -> tuple[tuple[str, _Fit[Autoencoder]], tuple[str, _Fit[Dynamics]]]:
        return ("sight", self.sight), ("foresight", self.foresight)


def _rate(most: float, iteration: int, iterations: int) -> float:
    """The learning rate: up linearly, down along a cosine."""
    warm = min(1.0, (iteration + 1) / _WARM_UP)
    return most * warm * 0.5 * (1 + math.cos(math.pi * iteration / iterations)) + 1e-6
