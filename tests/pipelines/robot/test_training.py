"""Training on a handful of episodes: a stopped one goes on to the same bits, and nothing foreign is gone on with."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_live.cli import train as command
from omni_live.clients.envs.table import TASKS, TableEnv, expert
from omni_live.pipelines.checkpoints import BadCheckpoint, checkpoint_path
from omni_live.pipelines.robot.demonstrations import Demonstrations, collect
from omni_live.pipelines.robot.network import Network
from omni_live.pipelines.robot.table_policy import TablePolicy
from omni_live.pipelines.robot.training import Settings, train

SETTINGS = Settings(seed=4, iterations=7, episodes=3)


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


@pytest.fixture(scope="module")
def shown() -> Demonstrations:
    table = TableEnv(1)
    return collect(table, lambda: expert(table), TASKS, 3, 1, Watch())


@pytest.fixture(scope="module")
def whole(shown: Demonstrations, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "weights.safetensors"
    train(shown, out, SETTINGS, Watch(), keep_every=3)
    return out


def stopped(shown: Demonstrations, out: Path, at: int) -> None:
    with pytest.raises(Stopped):
        train(shown, out, SETTINGS, Watch(at), keep_every=3)


def test_a_stopped_training_goes_on_to_the_same_bits(shown: Demonstrations, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "weights.safetensors"
    stopped(shown, out, at=5)
    assert not out.exists()
    watch = Watch()
    train(shown, out, SETTINGS, watch, resume=True, keep_every=3)
    assert watch.steps == SETTINGS.iterations
    assert watch.sections == ["7 iterations", watch.sections[1]]  # it went on from the third and kept the sixth
    assert out.read_bytes() == whole.read_bytes()


def test_only_the_weights_are_left_behind(whole: Path) -> None:
    assert [path.name for path in whole.parent.iterdir()] == ["weights.safetensors"]


def test_the_weights_are_small_and_fit_the_network(whole: Path) -> None:
    weights = load_file(whole)
    assert {value.dtype for value in weights.values()} == {torch.float16}
    assert whole.stat().st_size < 1_500_000
    Network().load_state_dict(weights)
    TablePolicy({"weights": str(whole)}).load()


def test_a_training_learns(shown: Demonstrations, tmp_path: Path) -> None:
    short, longer = (
        train(shown, tmp_path / "weights.safetensors", Settings(iterations=count), Watch()) for count in (1, 40)
    )
    assert longer < 0.96 * short  # an average over about 100 iterations, so it lags behind


def test_without_resume_it_begins_anew(shown: Demonstrations, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "weights.safetensors"
    checkpoint_path(out).write_bytes(b"whatever this is")
    train(shown, out, SETTINGS, Watch())
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    "other", [Settings(5, 7, 3), Settings(4, 8, 3), Settings(4, 7, 4), Settings(4, 7, 3, threads=2)]
)
def test_a_checkpoint_of_another_training_is_refused(shown: Demonstrations, tmp_path: Path, other: Settings) -> None:
    out = tmp_path / "weights.safetensors"
    stopped(shown, out, at=3)
    stopped(shown, out, at=4)
    with pytest.raises(BadCheckpoint, match="other settings"):
        train(shown, out, other, Watch(), resume=True)
    torch.set_num_threads(1)


def test_a_damaged_checkpoint_is_refused(shown: Demonstrations, tmp_path: Path) -> None:
    out = tmp_path / "weights.safetensors"
    stopped(shown, out, at=4)
    kept = checkpoint_path(out)
    intact = kept.read_bytes()
    for damaged in (b"", intact[:5], intact[:-1], b"\xff" * 100):
        kept.write_bytes(damaged)
        with pytest.raises(BadCheckpoint):
            train(shown, out, SETTINGS, Watch(), resume=True)


def test_a_checkpoint_of_another_network_is_refused(shown: Demonstrations, tmp_path: Path) -> None:
    out = tmp_path / "weights.safetensors"
    settings = json.dumps({"seed": 4, "iterations": 7, "episodes": 3, "threads": 1}, sort_keys=True)
    save_file({"network.x": torch.zeros(1)}, checkpoint_path(out), {"settings": settings})
    with pytest.raises(BadCheckpoint, match="no checkpoint of this network"):
        train(shown, out, SETTINGS, Watch(), resume=True)


def told(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(["robot", "--iterations", "2", "--episodes", "2", *words]))


def test_the_command_trains_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made" / "weights.safetensors"
    assert told("--out", str(out)) == 0
    Network().load_state_dict(load_file(out))
    printed = capsys.readouterr()
    assert f"{out}: loss" in printed.out
    assert "2 demonstrations" in printed.err


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "weights.safetensors"
    checkpoint_path(out).write_bytes(b"whatever this is")
    assert told("--out", str(out), "--resume") == 1
    assert "can't be read" in capsys.readouterr().err
    assert told("--out", "/proc/nowhere/weights") == 1
    assert "omni-live train: /proc/nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--iterations", "0"), ("--episodes", "-1"), ("--threads", "x")])
def test_numbers_that_make_no_sense_are_refused(words: tuple[str, str]) -> None:
    with pytest.raises(SystemExit):
        told(*words)
