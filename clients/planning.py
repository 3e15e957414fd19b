"""What a planner at the table decides by: places read off pictures, branches worth dreaming, and what a dream is worth.

Places are arrays of x and y in table widths, y down. A branch is what one imagined rollout does: float32[K, 2, 2],
two actions for each of K frames. Nothing here knows where things truly are: places come from pictures by colour.

    UnknownTask    the prompt names no disc or no zone of the table
"""

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_live.clients.envs import table

Places = NDArray[np.float64]
Images = NDArray[np.uint8]
Branches = NDArray[np.float32]
"""float32[N, K, 2, 2]"""

STRIDE: Final = 2
"""Actions of a frame."""
DISCS: Final = dict(table.DISCS)
PUSHER: Final = table.PUSHER_RGB
ZONES: Final = {name: (place.real, place.imag) for name, place in table.ZONES}

_TOUCH: Final = table.DISC_RADIUS + table.PUSHER_RADIUS
_BEHIND: Final = 0.13  # from the disc's centre to where a push begins
_ORBIT: Final = 0.15  # of the way round a disc
_TURN: Final = 0.6  # rad between two waypoints of that way
_ALIKE: Final = 70.0  # of 441 in RGB space
_LOST_COST: Final = 2.0  # more than any place on the table is worth
_SETUP_WEIGHT: Final = 0.3  # of the way that the pusher still has to go, beside the disc's
_PROMPT: Final = re.compile(r"\bthe (\w+) disc to the (\w+) zone\b")


class UnknownTask(ValueError):
    """The prompt names no disc or no zone of the table."""


@dataclass(frozen=True, slots=True)
class Goal:
    """Which disc, by its colour, goes where."""

    colour: tuple[int, int, int]
    x: float
    y: float

    @property
    def place(self) -> Places:
        return np.array([self.x, self.y])


@dataclass(frozen=True, slots=True)
class Search:
    """How much is dreamt for a decision."""

    branches: int = 32
    """In each round."""
    frames: int = 8
    """Of each branch."""
    rounds: int = 2
    """After the first, branches are those that were best, with noise."""
    elite: int = 6
    noise: float = 0.35
    """Standard deviation added to an elite branch's actions."""
    execute: int = 3
    """Frames of the best branch that are carried out."""

    @property
    def looks(self) -> tuple[int, ...]:
        """Frames that are scored, counted from 1: half way and at the end."""
        return tuple(sorted({(self.frames + 1) // 2, self.frames}))


def goal(prompt: str) -> Goal:
    """What "push the red disc to the left zone" asks for. Raises UnknownTask."""
    found = _PROMPT.search(prompt)
    if not found or found[1] not in DISCS or found[2] not in ZONES:
        raise UnknownTask(f"no disc and zone of this table in {prompt[:100]!r}")
    return Goal(DISCS[found[1]], *ZONES[found[2]])


def places(images: Images, colour: tuple[int, int, int]) -> Places:
    """Where the colour is in each picture (..., height, width, 3): float64[..., 2]; NaN where it is nowhere."""
    has = np.square(images.astype(np.float32) - np.asarray(colour, np.float32)).sum(-1) < _ALIKE**2
    rows, columns = (np.arange(side) + 0.5 for side in has.shape[-2:])
    count = has.sum((-2, -1))
    x = (has * columns).sum((-2, -1)) / has.shape[-1]
    y = (has * rows[:, None]).sum((-2, -1)) / has.shape[-2]
    there = np.stack([x, y], -1) / np.maximum(count, 1)[..., None]
    there[count == 0] = np.nan
    found: Places = there
    return found


def cost(discs: Places, pushers: Places, target: Places) -> NDArray[np.float64]:
    """What is left to do where disc and pusher lie so, float64[...]: how far the disc has to go, and a share of how
    far the pusher is from where it would push next. A disc or pusher that is not seen costs more than any that is."""
    ahead = target - discs
    far = np.linalg.norm(ahead, axis=-1)
    way = ahead / (far[..., None] + 1e-9)
    arm = pushers - discs
    reach = np.linalg.norm(arm, axis=-1)
    behind = -(arm * way).sum(-1) / (reach + 1e-9)  # 1 where the pusher is opposite of the zone
    around = np.arccos(np.clip(behind, -1.0, 1.0)) * _ORBIT
    setup = np.hypot(around, np.maximum(reach - _BEHIND, 0.0))
    total: NDArray[np.float64] = far + _SETUP_WEIGHT * setup * np.minimum(1.0, far / 0.1)
    return np.where(np.isnan(total), _LOST_COST, total)


def score(looked: Images, wanted: Goal) -> NDArray[np.float64]:
    """The cost of each branch by the pictures (N, looks, height, width, 3) of its scored frames, float64[N]."""
    costs = cost(places(looked, wanted.colour), places(looked, PUSHER), wanted.place)
    weights = np.ones(costs.shape[-1])
    weights[-1] = 3.0  # where a branch ends matters most; the rest prefers those that are there sooner
    result: NDArray[np.float64] = costs @ (weights / weights.sum())
    return result


def first_branches(disc: Places, pusher: Places, wanted: Goal, search: Search, chance: np.random.Generator) -> Branches:
    """Branches to begin with: half go round the disc and push it about towards the zone, with noise; the others go
    straight, in all directions. `disc` and `pusher` may be NaN: then all go straight."""
    count = search.branches
    length = search.frames * STRIDE
    angles = chance.uniform(0.0, 2 * np.pi) + np.arange(count) * 2 * np.pi / count * 2
    rows = [np.repeat([[np.cos(angle), np.sin(angle)]], length, 0) for angle in angles]
    if np.isfinite(disc).all() and np.isfinite(pusher).all():
        for index in range(count // 2 + count % 2):
            bend = 0.0 if index < 2 else chance.normal(0.0, 0.35)
            side = 1 if index % 2 else -1
            rows[index] = _approach(disc, pusher, wanted.place, bend, side, length)
            if index >= 4:
                rows[index] = rows[index] + chance.normal(0.0, search.noise / 2, (1, 2))
    return _shaped(np.stack(rows), search)


def next_branches(
    branches: Branches, costs: NDArray[np.float64], search: Search, chance: np.random.Generator
) -> Branches:
    """A round's branches after one that came out so: the best, and copies of the elite with noise."""
    elite = branches[np.argsort(costs, kind="stable")[: search.elite]]
    picked = elite[np.arange(search.branches) % len(elite)].astype(np.float64)
    picked = picked.reshape(search.branches, -1, 2)
    steady = chance.normal(0.0, search.noise, (search.branches, 1, 2))
    jitter = chance.normal(0.0, search.noise / 2, picked.shape)
    noise = steady + jitter
    noise[0] = 0.0  # a branch that was the best must not be lost
    return _shaped(picked + noise, search)


def _shaped(moves: NDArray[np.float64], search: Search) -> Branches:
    longest = np.maximum(1.0, np.linalg.norm(moves, axis=-1, keepdims=True))
    branches: Branches = (moves / longest).reshape(len(moves), search.frames, STRIDE, 2).astype(np.float32)
    return branches


def _approach(disc: Places, pusher: Places, target: Places, bend: float, side: int, length: int) -> Places:
    """Moves [length, 2] round a disc, on one side of it where that is undecided, and through it; the disc is thought
    to give way as it is pushed, which the dream then judges."""
    ahead = _turned(_unit(target - disc), bend)
    at, where = pusher.astype(np.float64), disc.astype(np.float64)
    moves = np.zeros((length, 2))
    for step in range(length):
        wish = _waypoint(at, where, ahead, side) - at
        moves[step] = wish / max(float(np.linalg.norm(wish)), table.STEP_LENGTH)
        at = at + moves[step] * table.STEP_LENGTH
        arm = where - at
        reach = float(np.linalg.norm(arm))
        if reach < _TOUCH:
            where = at + arm / (reach + 1e-9) * _TOUCH
    return moves


def _waypoint(at: Places, disc: Places, ahead: Places, side: int) -> Places:
    arm = at - disc
    x, y = -float(ahead @ arm), -float(ahead[0] * arm[1] - ahead[1] * arm[0])
    off = float(np.arctan2(y, x))  # rad from where the push begins
    if abs(off) < 0.4:
        aside = float(ahead[0] * arm[1] - ahead[1] * arm[0])
        if np.linalg.norm(arm) < _BEHIND + 0.03:
            return at + ahead * table.STEP_LENGTH + _turned(ahead, np.pi / 2) * -aside * 0.8
        return disc - ahead * (_BEHIND - 0.01)
    if abs(off) > np.pi - 0.5:
        off = abs(off) * side
    turn = -float(np.clip(off, -_TURN, _TURN))
    radius = max(_TOUCH + 0.03, min(float(np.linalg.norm(arm)), _ORBIT + 0.02))
    return disc + _turned(_unit(arm), turn) * radius


def _unit(way: Places) -> Places:
    result: Places = way / (np.linalg.norm(way) + 1e-9)
    return result


def _turned(way: Places, angle: float) -> Places:
    c, s = np.cos(angle), np.sin(angle)
    return np.array([c * way[0] - s * way[1], s * way[0] + c * way[1]])
