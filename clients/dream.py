"""Dreamt rollouts of the table beside the true one: the same start, the same actions, and how far they part.

The dream sees one true picture, the first. From then on it gets the actions only; a frame takes two of the
simulator's.

    CannotDream    no actions to dream with, or not this table's world
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO

import numpy as np
from numpy.typing import NDArray

from omni_live.clients.clock import Clock, MonotonicClock, S
from omni_live.clients.envs.likeness import Likeness, likeness
from omni_live.clients.envs.table import SIDE, TASKS, TableEnv, expert
from omni_live.clients.world import connect
from omni_live.clients.world_wire import Facts, Images

STRIDE: Final = 2
"""Actions of a frame."""
ACTION: Final = (STRIDE, 2)
MARKS: Final = (1, 8, 16, 32, 64)
"""Frames whose figures are told one by one."""
BAR: Final = 24
GAP: Final = 2
"""Pixels between the two tables of a film."""
RANDOM_FRAMES: Final = (1, 6)
"""A random mover keeps its way for so many frames."""

Actions = NDArray[np.float32]
"""float32 (frames, 2, 2)"""
Figures = dict[str, float | int | None]


class CannotDream(Exception):
    """There are no actions to dream with, or the world is not this table's."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is dreamt."""

    url: str
    steps: int = 64
    seed: int = 0
    """Of the table, of random actions, and of the dream's noise."""
    actions: str = "expert"
    """expert, random, or a file's name."""
    api_key: str | None = None
    films: bool = False


@dataclass(slots=True)
class Rollout:
    """What truly happens: pictures, and where the discs are, after each frame's actions."""

    first: Images
    actions: Actions
    images: list[Images] = field(default_factory=list)
    discs: list[tuple[complex, ...]] = field(default_factory=list)


@dataclass(slots=True)
class Dream:
    """What came of it."""

    wall_s: float = 0.0
    compared: list[Likeness] = field(default_factory=list)
    """Of each frame, counted from 1."""
    film: list[Images] = field(default_factory=list)
    """The true table on the left, the dreamt one on the right."""
    drops: int = 0
    resumes: int = 0

    def figures(self) -> Figures:
        """What was measured, by name; None where nothing was."""
        frames = len(self.compared)
        figures: Figures = {
            "frames": frames,
            "wall_s": round(self.wall_s, 3),
            "frames_per_s": round(frames / self.wall_s, 1) if self.wall_s else None,
            "disc_err_px": _median([error for each in self.compared for error in each.errors_px]),
            "psnr": round(float(np.mean([each.psnr_db for each in self.compared])), 2) if frames else None,
            "lost": round(float(np.mean([each.lost for each in self.compared])), 4) if frames else None,
        }
        for mark in (mark for mark in MARKS if mark <= frames):
            found = self.compared[mark - 1]
            figures[f"disc_err_px_{mark}"] = _median(found.errors_px)
            figures[f"psnr_{mark}"] = round(found.psnr_db, 2)
        return {**figures, "drops": self.drops, "resumes": self.resumes}


def _median(errors: Sequence[float]) -> float | None:
    return round(float(np.median(errors)), 2) if errors else None


def report(dream: Dream) -> str:
    """The figures for people to read."""
    found = dream.figures()
    lines = [
        f"frames    {found['frames']} in {found['wall_s']} s, {_shown(found['frames_per_s'])} a second",
        f"discs     {_shown(found['disc_err_px'])} px off at the median, {_shown(found['lost'])} lost",
        f"likeness  {_shown(found['psnr'])} dB",
    ]
    marks = [mark for mark in MARKS if f"psnr_{mark}" in found]
    lines += [
        f"at {mark:<6} {_shown(found[f'disc_err_px_{mark}'])} px, {_shown(found[f'psnr_{mark}'])} dB" for mark in marks
    ]
    if dream.drops:
        lines.append(f"lost      {dream.drops} sockets, {dream.resumes} of them back")
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"


# -- the true table


def played(plan: Plan) -> Rollout:
    """What truly happens at the plan's table. Raises CannotDream."""
    table = TableEnv(plan.seed)
    rollout = Rollout(table.render(), np.zeros((plan.steps, *ACTION), np.float32))
    given = _given(plan)
    if given is not None:
        rollout.actions = given
    chance = np.random.default_rng((plan.seed, 1))
    for at in range(len(rollout.actions)):
        for step in range(STRIDE):
            if given is None:
                rollout.actions[at, step] = expert(table)
            _, success = table.step(rollout.actions[at, step])
            if success:  # there is always something to push
                table.task = TASKS[int(chance.integers(len(TASKS)))]
        rollout.images.append(table.render())
        rollout.discs.append(table.discs)
    return rollout


def _given(plan: Plan) -> Actions | None:
    """Actions that do not depend on what happens; None where the expert decides."""
    if plan.actions == "expert":
        return None
    if plan.actions == "random":
        return random_actions(plan.steps, np.random.default_rng((plan.seed, 2)))
    return read_actions(Path(plan.actions))[: plan.steps]


def random_actions(frames: int, chance: np.random.Generator) -> Actions:
    """Straight ways in directions drawn by chance, each for some frames."""
    rows: list[list[float]] = []
    while len(rows) < frames:
        angle = chance.uniform(0.0, 2 * np.pi)
        rows += [[float(np.cos(angle)), float(np.sin(angle))]] * int(chance.integers(*RANDOM_FRAMES))
    return np.repeat(np.array(rows[:frames], np.float32)[:, None], STRIDE, 1)


def read_actions(path: Path) -> Actions:
    """Actions of a file: .npy, else JSON lines; either the simulator's, [x, y], or a frame's two, [[x, y], [x, y]].

    Raises CannotDream, OSError.
    """
    try:
        loaded = np.load(path, allow_pickle=False) if path.suffix == ".npy" else _read_lines(path)
        actions = np.asarray(loaded, np.float32)
    except (ValueError, TypeError) as error:
        raise CannotDream(f"{path}: {error}") from error
    if actions.ndim == 2 and actions.shape[1:] == ACTION[1:]:
        actions = actions[: len(actions) // STRIDE * STRIDE].reshape(-1, *ACTION)
    if actions.shape[1:] != ACTION or not len(actions):
        raise CannotDream(f"{path}: actions are [x, y], or [[x, y], [x, y]] for a frame, and at least a frame's")
    if not (np.isfinite(actions).all() and np.abs(actions).max() <= 1):
        raise CannotDream(f"{path}: actions are from -1 to 1")
    return actions


def _read_lines(path: Path) -> list[object]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


# -- the dream


async def dream(plan: Plan, progress: "Progress | None" = None, clock: Clock | None = None) -> Dream:
    """Dream what truly happened. Raises WorldError, CannotDream, OSError."""
    clock = clock or MonotonicClock()
    true = played(plan)
    result = Dream()
    if plan.films:
        result.film.append(beside(true.first, true.first))
    try:
        async with connect(plan.url, api_key=plan.api_key) as link:
            check(link.facts)
            world = await link.open(seed=plan.seed, image=true.first)
            began_ns = clock.now_ns()
            for start in range(0, len(true.actions), link.facts.step_frames):
                async for frame in world.step(true.actions[start : start + link.facts.step_frames]):
                    assert frame.image is not None, "it was asked for"
                    _compare(result, true, frame.step, frame.image, films=plan.films)
                    if progress is not None:
                        progress.step()
            result.wall_s = (clock.now_ns() - began_ns) / S
            result.drops, result.resumes = link.counts.drops, link.counts.resumes
    finally:
        if progress is not None:
            progress.close()
    return result


def _compare(result: Dream, true: Rollout, step: int, image: Images, *, films: bool) -> None:
    at = step - 1
    result.compared.append(likeness(true.images[at], image, true.discs[at]))
    if films:
        result.film.append(beside(true.images[at], image))


def check(facts: Facts) -> None:
    """Raises CannotDream where the world is not this table's."""
    contract = facts.contract
    if contract.frame != (SIDE, SIDE, 3) or contract.action != ACTION:
        raise CannotDream("the server's world is not the table's: its pictures or actions are of another shape")


def beside(true: Images, dreamt: Images) -> Images:
    """Both in one picture."""
    gap = np.zeros((len(true), GAP, 3), np.uint8)
    return np.concatenate([true, gap, dreamt], 1)


@dataclass(slots=True)
class Progress:
    """A bar on a terminal, nothing elsewhere."""

    total: int
    out: TextIO = field(default_factory=lambda: sys.stderr)
    done: int = 0

    def step(self) -> None:
        self.done += 1
        if self.out.isatty():
            full = round(BAR * self.done / self.total)
            self.out.write(f"\r\033[K[{'#' * full}{'.' * (BAR - full)}] {self.done} of {self.total} frames")
            self.out.flush()

    def close(self) -> None:
        if self.out.isatty():
            self.out.write("\r\033[K")
            self.out.flush()
