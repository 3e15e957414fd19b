"""Training on a handful of episodes: a stopped one goes on to the same bits, and nothing foreign is gone on with."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_live.cli import train as command
from omni_live.clients.envs.table import TASKS, TableEnv, expert
from omni_live.pipelines.checkpoints import BadCheckpoint, checkpoint_path
from omni_live.pipelines.world.rollouts import Episode, record
from omni_live.pipelines.world.table_world import TableWorld
from omni_live.pipelines.world.training import Settings, train

SETTINGS = Settings(seed=4, iterations=18, episodes=3)
EYES, LATENTS, MOVES = 3, 3, 18  # steps of progress


class Stopped(Exception):
    """Somebody pressed Ctrl-C."""


class Watch:
    """Counts, and stops the work at a given count."""

    def __init__(self, stop_at: int = -1) -> None:
        self.steps = 0
        self.sections: list[str] = []
        self._stop_at = stop_at

    def enter(self, section: str) -> None:
        self.sections.append(section)

    def step(self, count: int = 1) -> None:
        self.steps += count
        if self.steps == self._stop_at:
            raise Stopped


def shown(episodes: int = SETTINGS.episodes) -> Iterator[Episode]:
    table = TableEnv(1)
    return record(table, lambda: expert(table), TASKS, episodes, 1, 10)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "weights.safetensors"
    train(shown(), out, SETTINGS, Watch(), keep_every=2)
    return out


def stopped(out: Path, at: int, *, resume: bool = False) -> None:
    with pytest.raises(Stopped):
        train(shown(), out, SETTINGS, Watch(at), resume=resume, keep_every=2)


@pytest.mark.parametrize("at", [3, EYES + 1, EYES + LATENTS + 1, EYES + LATENTS + 5])
def test_a_stopped_training_goes_on_to_the_same_bits(whole: Path, tmp_path: Path, at: int) -> None:
    """Stopped among the autoencoder's iterations, the latents, and the dynamics' iterations."""
    out = tmp_path / "weights.safetensors"
    stopped(out, at)
    assert not out.exists()
    assert checkpoint_path(out).exists()
    watch = Watch()
    train(shown(), out, SETTINGS, watch, resume=True, keep_every=2)
    assert watch.steps == SETTINGS.steps == EYES + LATENTS + MOVES
    assert out.read_bytes() == whole.read_bytes()


def test_only_the_weights_are_left_behind(whole: Path) -> None:
    assert [path.name for path in whole.parent.iterdir()] == ["weights.safetensors"]


def test_the_weights_are_small_and_fit_the_world(whole: Path) -> None:
    weights = load_file(whole)
    assert {value.dtype for name, value in weights.items() if name != "starts"} == {torch.float16}
    assert whole.stat().st_size < 3_000_000
    world = TableWorld({"weights": str(whole)})
    world.load()
    assert np.array_equal(world.starts(), np.stack([episode.images[0] for episode in shown()]))


def test_a_training_learns(tmp_path: Path) -> None:
    short, longer = (
        train(shown(), tmp_path / "weights.safetensors", Settings(iterations=count, episodes=3), Watch())
        for count in (10, 100)
    )
    assert longer < 0.9 * short  # an average over about 100 iterations, so it lags behind


def test_without_resume_it_begins_anew(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "weights.safetensors"
    checkpoint_path(out).write_bytes(b"whatever this is")
    train(shown(), out, SETTINGS, Watch())
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    "other", [Settings(5, 18, 3), Settings(4, 19, 3), Settings(4, 18, 4), Settings(4, 18, 3, threads=2)]
)
def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path, other: Settings) -> None:
    out = tmp_path / "weights.safetensors"
    stopped(out, at=4)
    with pytest.raises(BadCheckpoint, match="other settings"):
        train(shown(), out, other, Watch(), resume=True)
    torch.set_num_threads(1)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "weights.safetensors"
    stopped(out, at=4)
    kept = checkpoint_path(out)
    intact = kept.read_bytes()
    for damaged in (b"", intact[:5], intact[:-1], b"\xff" * 100):
        kept.write_bytes(damaged)
        with pytest.raises(BadCheckpoint):
            train(shown(), out, SETTINGS, Watch(), resume=True)


def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "weights.safetensors"
    settings = json.dumps({"seed": 4, "iterations": 18, "episodes": 3, "threads": 1}, sort_keys=True)
    save_file({"sight.network.x": torch.zeros(1)}, checkpoint_path(out), {"settings": settings})
    with pytest.raises(BadCheckpoint, match="no checkpoint of this network"):
        train(shown(), out, SETTINGS, Watch(), resume=True)


def told(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(["world", "--iterations", "2", "--episodes", "2", *words]))


def test_the_command_trains_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made" / "weights.safetensors"
    assert told("--out", str(out)) == 0
    TableWorld({"weights": str(out)}).load()
    printed = capsys.readouterr()
    assert f"{out}: loss" in printed.out
    assert "2 iterations of the dynamics" in printed.err


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "weights.safetensors"
    checkpoint_path(out).write_bytes(b"whatever this is")
    assert told("--out", str(out), "--resume") == 1
    assert "can't be read" in capsys.readouterr().err
    assert told("--out", "/proc/nowhere/weights") == 1
    assert "omni-live train: /proc/nowhere" in capsys.readouterr().err
