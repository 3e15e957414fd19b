"""What a world model learns from: episodes at a table where an expert, chance, and both in turns move things.

A frame of the model is two control steps. The table comes in as an argument: the simulator belongs to the clients,
which the runtime does not import.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from omni_live.protocols.openpi.tabletop import CONTRACT

Action = NDArray[np.float32]
Seen = Mapping[str, object]

FRAMES: Final = 44
"""Frames of an episode after its first."""
STRIDE: Final = 2
"""Control steps from a frame to the next."""
_WILD: Final = (0.1, 0.3, 0.6, 1.0)  # the share of bouts that chance decides, drawn per episode
_BOUT: Final = (2, 12)  # control steps
_NOISE: Final = (0.0, 0.15, 0.4)  # standard deviation added to the expert's actions, drawn per episode

T = TypeVar("T")


class Table(Protocol[T]):
    """The part of `clients.envs.table.TableEnv` that is used here."""

    task: T

    def reset(self, task: T | None = None) -> Seen: ...
    def step(self, action: Action) -> tuple[Seen, bool]: ...
    @property
    def discs(self) -> tuple[complex, ...]: ...


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode of F frames after the first."""

    images: NDArray[np.uint8]
    """uint8[F + 1, 64, 64, 3]"""
    actions: NDArray[np.float32]
    """float32[F, 2, 2]: what was done between each frame and the next."""
    discs: NDArray[np.float32]
    """float32[F + 1, 3, 2]: where the discs truly are, x and y in table widths; for measuring, never for learning."""


class _Hand:
    """Decides one episode's actions: bouts of the expert's, with noise, and bouts of one movement drawn by chance."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        self._wild = float(random.choice(_WILD))
        self._noise = float(random.choice(_NOISE))
        self._left = 0
        self._drawn: NDArray[np.float64] | None = None

    def applied(self, wanted: Action) -> Action:
        """The action that is executed where the expert wants `wanted`, in -1..1."""
        random = self._random
        if not self._left:
            self._left = int(random.integers(*_BOUT))
            self._drawn = random.normal(size=2) if random.random() < self._wild else None
        self._left -= 1
        done = wanted + random.normal(size=2) * self._noise if self._drawn is None else self._drawn
        return np.clip(done, -1.0, 1.0).astype(np.float32)


def record(
    table: Table[T],
    expert: Callable[[], Action],
    tasks: Sequence[T],
    episodes: int,
    seed: int,
    frames: int = FRAMES,
) -> Iterator[Episode]:
    """Episodes one by one; `expert()` says what it would do at the table as it stands.

    The same table, seed and numbers give the same episodes.
    """
    random = np.random.default_rng((seed, 2))  # not the table's own stream
    for episode in range(episodes):
        yield _episode(table, expert, tasks, tasks[episode % len(tasks)], random, frames)


def _episode(
    table: Table[T],
    expert: Callable[[], Action],
    tasks: Sequence[T],
    task: T,
    random: np.random.Generator,
    frames: int,
) -> Episode:
    hand = _Hand(random)
    images, discs = [_image(table.reset(task))], [_places(table)]
    actions = np.zeros((frames, STRIDE, CONTRACT.action_dim), np.float32)
    for at, action in enumerate(actions.reshape(-1, CONTRACT.action_dim)):
        action[:] = hand.applied(expert())
        seen, success = table.step(action)
        if success:  # there is always something to push
            table.task = tasks[int(random.integers(len(tasks)))]
        if at % STRIDE == STRIDE - 1:
            images.append(_image(seen))
            discs.append(_places(table))
    return Episode(np.stack(images), actions, np.stack(discs))


def _image(seen: Seen) -> NDArray[np.uint8]:
    arrays, _ = CONTRACT.checked(seen)
    return arrays[CONTRACT.observation[0].key].astype(np.uint8)


def _places(table: Table[T]) -> NDArray[np.float32]:
    return np.array([(disc.real, disc.imag) for disc in table.discs], np.float32)
