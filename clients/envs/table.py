"""The table-top world: a pusher, three discs, four zones, and a sentence that says which disc goes where.

Seen from above, pushed without momentum, drawn as a picture of 64 by 64: small enough for a policy that learns in
minutes, and rich enough that it must look, read and steer. One seed is one world: the same calls give the same bits.

Places are complex numbers, x + y·i in table widths with y down: a move is a sum, a turn is a product. With four bodies
this is ten times as fast as arrays.
"""

import math
from collections.abc import Iterable
from typing import Final, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from omni_live.protocols.openpi.tabletop import CONTRACT

__all__ = ["CONTRACT", "TASKS", "Observation", "TableEnv", "Task", "expert", "prompt"]

Rgb = tuple[int, int, int]

DISC_RADIUS: Final = 0.065
PUSHER_RADIUS: Final = 0.04
ZONE_RADIUS: Final = 0.10
"""A disc is in a zone when its centre is nearer than this to the zone's."""
STEP_LENGTH: Final = 0.022
"""How far the pusher moves in one control step at full speed."""
SIDE: Final = 64

_SUBSTEPS: Final = 3
_ROUNDS: Final = 3  # of pushing bodies apart in a substep: enough for a chain of three discs
_TOUCH: Final = DISC_RADIUS + PUSHER_RADIUS
_APART: Final = 2.3 * DISC_RADIUS  # between any two bodies at the start
_PAIRS: Final = ((0, 1), (0, 2), (1, 2))

DISCS: Final[tuple[tuple[str, Rgb], ...]] = (
    ("red", (214, 60, 50)),
    ("green", (60, 160, 75)),
    ("blue", (60, 95, 200)),
)
ZONES: Final = (("left", 0.10 + 0.5j), ("right", 0.90 + 0.5j), ("top", 0.5 + 0.10j), ("bottom", 0.5 + 0.90j))
PUSHER_RGB: Final = (30, 30, 30)
_TABLE_RGB: Final = (232, 232, 232)
_ZONE_RGB: Final = (205, 200, 180)

Observation = TypedDict(
    "Observation",
    {"observation/image": NDArray[np.uint8], "observation/state": NDArray[np.float32], "prompt": str},
)
"""What `CONTRACT` describes: uint8[64, 64, 3], float32[2] and the task's sentence."""


class Task(NamedTuple):
    """Which disc (0 to 2) goes to which zone (0 to 3)."""

    disc: int
    zone: int


TASKS: Final = tuple(Task(disc, zone) for disc in range(len(DISCS)) for zone in range(len(ZONES)))


def prompt(task: Task) -> str:
    """The task as a sentence: "push the red disc to the left zone"."""
    return f"push the {DISCS[task.disc][0]} disc to the {ZONES[task.zone][0]} zone"


class TableEnv:
    """One table. `seed` fixes every world that its `reset` will set up."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self.task = TASKS[0]
        self.steps = 0
        """Control steps since the last reset."""
        self._discs = [0j, 0j, 0j]
        self._pusher = 0j
        self.reset()

    def reset(self, task: Task | None = None) -> Observation:
        """Sets the table anew, for a task drawn by chance where none is given."""
        self.task = TASKS[int(self._random.integers(len(TASKS)))] if task is None else task
        self.steps = 0
        *self._discs, self._pusher = self._places()
        return self.observe()

    def step(self, action: NDArray[np.floating]) -> tuple[Observation, bool]:
        """Moves the pusher by `action` ([2], cut to -1..1 and to length 1); what is seen then, and `success()`.

        Raises ValueError for an action of another shape, or with a number that is not finite.
        """
        move = _bounded(_velocity(action)) * STEP_LENGTH / _SUBSTEPS
        for _ in range(_SUBSTEPS):
            self._advance(move)
        self.steps += 1
        return self.observe(), self.success()

    def success(self) -> bool:
        """Whether the task's disc lies in the task's zone."""
        return abs(self._discs[self.task.disc] - ZONES[self.task.zone][1]) < ZONE_RADIUS

    def observe(self) -> Observation:
        """What the robot sees now, in arrays of its own."""
        return {
            "observation/image": self.render(),
            "observation/state": np.array([self._pusher.real, self._pusher.imag], np.float32),
            "prompt": prompt(self.task),
        }

    def render(self) -> NDArray[np.uint8]:
        """The table from above: uint8[64, 64, 3], RGB, edges smoothed."""
        image = _BACKGROUND.copy()
        for place, (_, colour) in zip(self._discs, DISCS, strict=True):
            _paint(image, place, DISC_RADIUS, colour)
        _paint(image, self._pusher, PUSHER_RADIUS, PUSHER_RGB)
        return image.astype(np.uint8)

    @property
    def pusher(self) -> complex:
        """The pusher's place."""
        return self._pusher

    @property
    def discs(self) -> tuple[complex, ...]:
        """The discs' places: red, green, blue."""
        return tuple(self._discs)

    def _places(self) -> list[complex]:
        while True:
            drawn = self._random.uniform(0.2, 0.8, (4, 2)).tolist()
            places = [complex(x, y) for x, y in drawn]
            if all(abs(a - b) > _APART for at, a in enumerate(places) for b in places[:at]):
                return places

    def _advance(self, move: complex) -> None:
        """One substep: the pusher goes first, discs give way to it and to each other, what is jammed holds it up."""
        self._pusher = _inside(self._pusher + move, PUSHER_RADIUS)
        discs = self._discs
        for _ in range(_ROUNDS):
            for at, disc in enumerate(discs):
                discs[at] = disc + _push(self._pusher, disc, _TOUCH)
            for a, b in _PAIRS:
                half = _push(discs[a], discs[b], 2 * DISC_RADIUS) / 2
                discs[a] -= half
                discs[b] += half
            discs[:] = [_inside(disc, DISC_RADIUS) for disc in discs]
        for disc in discs:
            self._pusher = _inside(self._pusher + _push(disc, self._pusher, _TOUCH), PUSHER_RADIUS)


def _velocity(action: NDArray[np.floating]) -> complex:
    if action.shape != (2,):
        raise ValueError(f"an action is [2], not {list(action.shape)}")
    x, y = action.tolist()
    if not (math.isfinite(x) and math.isfinite(y)):
        raise ValueError("an action holds a number that is not finite")
    return complex(x, y)


def _bounded(velocity: complex) -> complex:
    """Cut to -1..1 along each axis, then to length 1."""
    cut = _cut(velocity, -1.0, 1.0)
    return cut / max(1.0, abs(cut))


def _cut(place: complex, low: float, high: float) -> complex:
    return complex(min(max(place.real, low), high), min(max(place.imag, low), high))


def _inside(place: complex, radius: float) -> complex:
    return _cut(place, radius, 1.0 - radius)


def _push(pushing: complex, pushed: complex, touch: float) -> complex:
    """How far `pushed` has to move for the two to be `touch` apart; 0 where they are."""
    way = pushed - pushing
    length = abs(way)
    return way / (length + 1e-9) * (touch - length) if length < touch else 0j


# -- drawing

_CENTRES: Final = (np.arange(SIDE, dtype=np.float32) + 0.5) / SIDE


def _background() -> NDArray[np.float32]:
    image = np.full((SIDE, SIDE, 3), _TABLE_RGB, np.float32)
    for _, zone in ZONES:
        away = np.maximum(abs(_CENTRES[None, :] - zone.real), abs(_CENTRES[:, None] - zone.imag))
        image[away < 0.9 * ZONE_RADIUS] = _ZONE_RGB
    return image


_BACKGROUND: Final = _background()


def _paint(image: NDArray[np.float32], place: complex, radius: float, colour: Rgb) -> None:
    """Draws a disc into the part of the picture that it can touch; a pixel it covers in part is mixed."""
    columns, rows = _span(place.real, radius), _span(place.imag, radius)
    distance = np.hypot(_CENTRES[None, columns] - place.real, _CENTRES[rows, None] - place.imag)
    covered = np.clip((radius - distance) * SIDE + 0.5, 0.0, 1.0)[..., None].astype(np.float32)
    part = image[rows, columns]
    part += covered * (np.asarray(colour, np.float32) - part)


def _span(centre: float, radius: float) -> slice:
    return slice(max(0, int((centre - radius) * SIDE) - 1), min(SIDE, int((centre + radius) * SIDE) + 2))


# -- the expert


def expert(env: TableEnv) -> NDArray[np.float32]:
    """What somebody who sees the places does next, float32[2]: go round the disc, then push it towards the zone.

    Succeeds in at least 95 % of worlds within 150 steps; discs that are jammed in a corner are the rest.
    """
    disc, goal = env.discs[env.task.disc], ZONES[env.task.zone][1]
    ahead = _unit(goal - disc)
    wish = _wish(env.pusher, disc, ahead)
    action = wish / max(abs(wish), STEP_LENGTH)
    others = (place for at, place in enumerate(env.discs) if at != env.task.disc)
    action = _cut(_around(action, env.pusher, others), -1.0, 1.0)
    return np.array([action.real, action.imag], np.float32)


def _wish(pusher: complex, disc: complex, ahead: complex) -> complex:
    """The way the pusher wants to go; `ahead` is the way the disc should, of length 1."""
    arm = pusher - disc
    behind = -_dot(_unit(arm), ahead)  # 1 where the pusher is exactly opposite of the zone
    if behind > 0.90 and abs(arm) < _TOUCH + 0.05:
        aside = _dot(arm, 1j * ahead)  # pushing while getting back onto the line
        return disc - 0.6 * _TOUCH * ahead - pusher + 0.08 * ahead - 0.8 * aside * 1j * ahead
    if behind >= 0.55:
        return disc - (_TOUCH + 0.025) * ahead - pusher
    return _orbit(arm, -ahead) - arm


def _orbit(arm: complex, wanted: complex) -> complex:
    """A point on a circle about the disc, up to 0.6 rad further towards the side `wanted`."""
    turn = _unit(wanted) / _unit(arm)
    angle = math.atan2(turn.imag, turn.real)
    bounded = min(max(angle, -0.6), 0.6)
    radius = max(_TOUCH + 0.035, min(abs(arm), _TOUCH + 0.06))
    return radius * _unit(arm) * complex(math.cos(bounded), math.sin(bounded))


def _around(action: complex, pusher: complex, others: Iterable[complex]) -> complex:
    """Slides along a disc that is in the way and not the task's."""
    for other in others:
        way = pusher - other
        away = _unit(way)
        if abs(way) < _TOUCH + 0.035 and _dot(action, -away) > 0.2:
            along = 1j * away if _dot(1j * away, action) >= 0 else -1j * away
            action = 0.75 * along + (0.45 if abs(way) < _TOUCH + 0.015 else 0.09) * away
    return action


def _unit(way: complex) -> complex:
    return way / (abs(way) + 1e-9)


def _dot(a: complex, b: complex) -> float:
    return (a * b.conjugate()).real
