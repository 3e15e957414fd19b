"""Demonstrations for the table-top policy: an expert acts, and is pushed off its way so that it shows how to get back.

What is to be learned is what the expert wanted to do at each moment (DART, Laskey et al. 2017). What was done instead
is kept too: it is what a robot is about to do when a chunk has to go on from it. The table comes in as an argument: the
simulator belongs to the clients, which the runtime does not import.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from omni_live.pipelines.checkpoints import Progress
from omni_live.protocols.openpi.tabletop import CONTRACT

Action = NDArray[np.float32]
Seen = Mapping[str, object]

LONGEST: Final = 140
"""Steps after which a demonstration ends in any case."""
_TAIL: Final = 6  # steps shown after success, so that the policy learns to stay there
_LATE: Final = (0, 0, 0, 2, 4, 6)  # steps by which the expert's actions come late, drawn per episode
_NOISE: Final = (0.0, 0.15, 0.4)  # standard deviation added to the expert's actions, drawn per episode
_SHOVE_CHANCE: Final = 0.04  # per step of an episode with noise
_SHOVE_STEPS: Final = (3, 10)

T_contra = TypeVar("T_contra", contravariant=True)
T = TypeVar("T")


class Table(Protocol[T_contra]):
    """The part of `clients.envs.table.TableEnv` that is used here."""

    def reset(self, task: T_contra | None = None) -> Seen: ...
    def step(self, action: Action) -> tuple[Seen, bool]: ...


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """The frames of all episodes, one after the other."""

    images: NDArray[np.uint8]
    """uint8[N, 64, 64, 3]"""
    states: NDArray[np.float32]
    """float32[N, 2]"""
    actions: NDArray[np.float32]
    """float32[N, 2]: what the expert wanted to do at each frame."""
    executed: NDArray[np.float32]
    """float32[N, 2]: what was done instead."""
    ends: NDArray[np.int64]
    """int64[N]: the index of the last frame of the frame's episode."""
    tasks: NDArray[np.int64]
    """int64[N]: the frame's sentence, an index into `prompts`."""
    prompts: tuple[str, ...]


class _Recording:
    """Room for the frames of some episodes; memory is touched as they come."""

    def __init__(self, episodes: int) -> None:
        room = episodes * LONGEST
        image, state = CONTRACT.observation
        self._images = np.empty((room, *image.shape), np.uint8)
        self._states = np.empty((room, *state.shape), np.float32)
        self._actions = np.empty((room, CONTRACT.action_dim), np.float32)
        self._executed = np.empty((room, CONTRACT.action_dim), np.float32)
        self._lengths: list[int] = []
        self._tasks: list[int] = []
        self._prompts: dict[str, int] = {}
        self._frames = 0

    def begin(self, prompt: str) -> None:
        self._lengths.append(0)
        self._tasks.append(self._prompts.setdefault(prompt, len(self._prompts)))

    def add(self, seen: Seen, wanted: Action, executed: Action) -> None:
        arrays, _ = CONTRACT.checked(seen)
        image, state = CONTRACT.observation
        self._images[self._frames] = arrays[image.key]
        self._states[self._frames] = arrays[state.key]
        self._actions[self._frames] = wanted
        self._executed[self._frames] = executed
        self._lengths[-1] += 1
        self._frames += 1

    def done(self) -> Demonstrations:
        lengths = np.array(self._lengths)
        return Demonstrations(
            self._images[: self._frames],
            self._states[: self._frames],
            self._actions[: self._frames],
            self._executed[: self._frames],
            np.repeat(np.cumsum(lengths) - 1, lengths),
            np.repeat(np.array(self._tasks), lengths),
            tuple(self._prompts),
        )


class _Disturbance:
    """What is done to the expert's actions in one episode: they come late, with noise, and now and then a shove of some
    steps comes instead."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        self._late: deque[Action] = deque([np.zeros(CONTRACT.action_dim, np.float32)] * int(random.choice(_LATE)))
        self._noise = float(random.choice(_NOISE))
        self._shove = np.zeros(CONTRACT.action_dim)
        self._left = 0

    def applied(self, action: Action) -> Action:
        """The action that is executed instead, in -1..1."""
        self._late.append(action)
        due, random = self._late.popleft(), self._random
        if self._noise and not self._left and random.random() < _SHOVE_CHANCE:
            self._left, self._shove = int(random.integers(*_SHOVE_STEPS)), random.normal(size=2)
        if self._left:
            self._left -= 1
            done = self._shove
        else:
            done = due + random.normal(size=2) * self._noise
        return np.clip(done, -1.0, 1.0).astype(np.float32)


def collect(
    table: Table[T], expert: Callable[[], Action], tasks: Sequence[T], episodes: int, seed: int, progress: Progress
) -> Demonstrations:
    """Runs `episodes` episodes, the tasks in turn; `expert()` says what it would do at the table as it stands.

    Steps `progress` once an episode. The same table, seed and number give the same demonstrations.
    """
    random = np.random.default_rng((seed, 1))  # not the table's own stream
    recording = _Recording(episodes)
    progress.enter(f"{episodes} demonstrations")
    for episode in range(episodes):
        _record(recording, table, expert, tasks[episode % len(tasks)], random)
        progress.step()
    return recording.done()


def _record(
    recording: _Recording, table: Table[T], expert: Callable[[], Action], task: T, random: np.random.Generator
) -> None:
    seen = table.reset(task)
    recording.begin(CONTRACT.checked(seen)[1]["prompt"])
    disturbance = _Disturbance(random)
    left = LONGEST
    while left:
        wanted = expert()
        executed = disturbance.applied(wanted)
        recording.add(seen, wanted, executed)
        seen, success = table.step(executed)
        left = min(left - 1, _TAIL - 1) if success else left - 1
