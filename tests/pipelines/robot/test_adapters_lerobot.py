"""What the adapter for LeRobot's policies makes of a checkpoint; tests/conformance has LeRobot itself behind it."""

import json
from pathlib import Path

import pytest

from omni_live.pipelines.robot.adapter import BadPolicy
from omni_live.pipelines.robot.lerobot import LeRobotPolicy
from omni_live.protocols.openpi.contract import Field
from omni_live.sessions.payload import Scalar

HORIZON = 6
CONFIG: dict[str, object] = {
    "type": "act",
    "n_obs_steps": 1,
    "input_features": {
        "observation.state": {"type": "STATE", "shape": [3]},
        "observation.images.top": {"type": "VISUAL", "shape": [3, 64, 48]},
        "observation.images.wrist_image": {"type": "VISUAL", "shape": [3, 64, 48]},
    },
    "output_features": {"action": {"type": "ACTION", "shape": [2]}},
    "chunk_size": HORIZON,
    "n_action_steps": 4,
}


def make(path: Path, **options: Scalar) -> LeRobotPolicy:
    return LeRobotPolicy({"path": str(path), "action_low": -100, "action_high": 100, **options})


def written(path: Path, **changes: object) -> Path:
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    return path


def test_its_contract_is_that_of_its_config(tmp_path: Path) -> None:
    contract = make(written(tmp_path), rate_hz=25.0).contract
    assert contract.observation == (
        Field("observation/state", (3,), "float32"),
        Field("observation/top", (64, 48, 3), "uint8"),
        Field("observation/wrist_image", (64, 48, 3), "uint8"),
    )
    assert (contract.embodiment, contract.action_horizon, contract.action_dim) == ("act", HORIZON, 2)
    assert (contract.image_resolution, contract.external_cameras, contract.wrist_camera) == ((64, 48), 1, True)
    assert (contract.rate_hz, contract.texts) == (25.0, ("prompt",))


def test_a_policy_that_reads_no_prompt_need_not_ask_for_one(tmp_path: Path) -> None:
    assert make(written(tmp_path), prompt=False).contract.texts == ()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"n_obs_steps": 2}, "mix the sessions"),
        ({"type": None}, "no type"),
        ({"input_features": {}}, "no input_features"),
        ({"input_features": {"observation.language": {"type": "LANGUAGE", "shape": [1]}}}, "cannot be served"),
        ({"input_features": {"observation.state": {"type": "STATE"}}}, "no shape"),
        ({"output_features": {"other": {"type": "ACTION", "shape": [2]}}}, "no action"),
        ({"chunk_size": 0}, "chunk_size"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_is_refused(tmp_path: Path, changes: dict[str, object], why: str) -> None:
    with pytest.raises(BadPolicy, match=why):
        make(written(tmp_path, **changes))


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadPolicy, match="cannot be read"):
        make(tmp_path)
