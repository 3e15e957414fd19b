"""Train a model that ships with the server, on episodes made on the spot. `robot`: the table-top policy; `world`: the
learned table-top world."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from omni_live.bench.report import Progress
from omni_live.clients.envs.table import TASKS, TableEnv, expert
from omni_live.pipelines.checkpoints import BadCheckpoint
from omni_live.pipelines.robot import training as robot
from omni_live.pipelines.robot.demonstrations import collect
from omni_live.pipelines.world import training as world
from omni_live.pipelines.world.rollouts import record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", choices=tuple(_TARGETS), help="what to train")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"default: {_each(lambda target: target.out)}")
    parser.add_argument(
        "--iterations", type=_count, metavar="N", help=f"default: {_each(lambda target: target.iterations)}"
    )
    parser.add_argument(
        "--episodes", type=_count, metavar="N", help=f"to learn from ({_each(lambda target: target.episodes)})"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    parser.add_argument("--threads", type=_count, default=1, metavar="N", help="the bits depend on it (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on where an earlier training was stopped")


def run(asked: argparse.Namespace) -> int:
    """0, or 1 with a sentence on standard error."""
    target = _TARGETS[asked.model]
    out: Path = asked.out or target.out
    iterations, episodes = asked.iterations or target.iterations, asked.episodes or target.episodes
    try:
        loss = target.train(_Asked(out, asked.seed, iterations, episodes, asked.threads, asked.resume))
    except BadCheckpoint as error:
        print(f"omni-live train: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"omni-live train: {error.filename or out}: {error.strerror or error}", file=sys.stderr)
        return 1
    print(f"{out}: loss {loss:.4f} after {iterations} iterations")
    return 0


@dataclass(frozen=True, slots=True)
class _Asked:
    """A training with nothing left open."""

    out: Path
    seed: int
    iterations: int
    episodes: int
    threads: int
    resume: bool


@dataclass(frozen=True, slots=True)
class _Target:
    """What can be trained, and what it takes where nothing else is asked for."""

    train: Callable[[_Asked], float]
    out: Path
    iterations: int
    episodes: int


def _train_robot(asked: _Asked) -> float:
    settings = robot.Settings(asked.seed, asked.iterations, asked.episodes, asked.threads)
    progress = Progress(settings.episodes + settings.iterations)
    table = TableEnv(settings.seed)
    try:
        shown = collect(table, lambda: expert(table), TASKS, settings.episodes, settings.seed, progress)
        return robot.train(shown, asked.out, settings, progress, resume=asked.resume)
    finally:
        progress.close()


def _train_world(asked: _Asked) -> float:
    settings = world.Settings(asked.seed, asked.iterations, asked.episodes, asked.threads)
    progress = Progress(settings.steps)
    table = TableEnv(settings.seed)
    try:
        episodes = record(table, lambda: expert(table), TASKS, settings.episodes, settings.seed)
        return world.train(episodes, asked.out, settings, progress, resume=asked.resume)
    finally:
        progress.close()


_TARGETS: Final = {
    "robot": _Target(
        _train_robot, Path("out/table_policy.safetensors"), robot.Settings().iterations, robot.Settings().episodes
    ),
    "world": _Target(
        _train_world, Path("out/table_world.safetensors"), world.Settings().iterations, world.Settings().episodes
    ),
}


def _each(of: Callable[[_Target], object]) -> str:
    """One of the targets' defaults, for each."""
    return ", ".join(f"{name}: {of(target)}" for name, target in _TARGETS.items())


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
