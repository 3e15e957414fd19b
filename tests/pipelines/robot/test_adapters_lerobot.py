"""LeRobot's policies by LeRobot's own class, tiny and on random weights; what needs no LeRobot runs without it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni_live.pipelines.robot.adapter import BadPolicy, Chunk, Query
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


# -- with LeRobot


def lerobot(module: str) -> Any:
    return pytest.importorskip(f"lerobot.{module}", reason="lerobot is not installed")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of ACT as LeRobot writes it."""
    act = lerobot("policies.act.modeling_act")
    types = lerobot("configs.types")
    path: Path = tmp_path_factory.mktemp("act")
    image = types.PolicyFeature(types.FeatureType.VISUAL, (3, 64, 48))
    config = act.ACTConfig(
        input_features={
            "observation.state": types.PolicyFeature(types.FeatureType.STATE, (3,)),
            "observation.images.top": image,
            "observation.images.wrist_image": image,
        },
        output_features={"action": types.PolicyFeature(types.FeatureType.ACTION, (2,))},
        chunk_size=HORIZON,
        n_action_steps=4,
        dim_model=32,
        n_heads=2,
        dim_feedforward=64,
        n_encoder_layers=1,
        n_vae_encoder_layers=1,
        latent_dim=8,
        pretrained_backbone_weights=None,
        device="cpu",
        push_to_hub=False,
    )
    torch.manual_seed(0)
    half = {"mean": torch.full((3, 1, 1), 0.5), "std": torch.full((3, 1, 1), 0.25)}
    stats = {
        "observation.state": {"mean": torch.tensor([1.0, 2.0, 3.0]), "std": torch.tensor([0.5, 0.5, 2.0])},
        "observation.images.top": half,
        "observation.images.wrist_image": half,
        "action": {"mean": torch.tensor([10.0, 20.0]), "std": torch.tensor([2.0, 4.0])},
    }
    act.ACTPolicy(config).save_pretrained(path)
    for processor in lerobot("policies.factory").make_pre_post_processors(config, dataset_stats=stats):
        processor.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> LeRobotPolicy:
    made = make(checkpoint)
    made.load()
    return made


def query(number: int) -> Query:
    random = np.random.default_rng(number)
    images = {
        key: random.integers(0, 256, (64, 48, 3), np.uint8) for key in ("observation/top", "observation/wrist_image")
    }
    state = random.normal(size=3).astype(np.float32)
    return Query({**images, "observation/state": state}, {"prompt": "push"}, seed=number)


def one(policy: LeRobotPolicy, asked: Query) -> Chunk:
    (chunk,) = policy.predict_chunk([asked])
    return chunk


def test_it_answers_as_its_contract_says(policy: LeRobotPolicy) -> None:
    chunks = policy.predict_chunk([query(number) for number in range(3)])
    assert [(chunk.shape, chunk.dtype.str) for chunk in chunks] == [((HORIZON, 2), "<f4")] * 3


def test_it_computes_what_lerobot_computes_of_one_observation(policy: LeRobotPolicy, checkpoint: Path) -> None:
    asked = query(3)
    model = lerobot("policies.act.modeling_act").ACTPolicy.from_pretrained(checkpoint)
    before, after = lerobot("policies.factory").make_pre_post_processors(model.config, str(checkpoint))
    observed = {
        "observation.state": torch.from_numpy(asked.arrays["observation/state"]),
        "observation.images.top": torch.from_numpy(asked.arrays["observation/top"]).permute(2, 0, 1) / 255,
        "observation.images.wrist_image": torch.from_numpy(asked.arrays["observation/wrist_image"]).permute(2, 0, 1)
        / 255,
        "task": "push",
    }
    model.reset()
    wanted = [after(model.select_action(before(observed))).numpy()[0] for _ in range(4)]
    np.testing.assert_allclose(one(policy, asked)[:4], wanted, atol=1e-4)


def test_the_same_query_alone_gives_the_same_bytes(policy: LeRobotPolicy) -> None:
    assert one(policy, query(6)).tobytes() == one(policy, query(6)).tobytes()
    assert not np.allclose(one(policy, query(6)), one(policy, query(7)), atol=1e-4)


def test_who_else_is_in_the_batch_changes_nothing_but_rounding(policy: LeRobotPolicy) -> None:
    asked = [query(number) for number in range(5)]
    for chunk, alone in zip(policy.predict_chunk(asked), [one(policy, single) for single in asked], strict=True):
        np.testing.assert_allclose(chunk, alone, atol=1e-3)
