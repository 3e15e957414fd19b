"""LeRobot's ACT by LeRobot's own class, tiny and on random weights, behind the adapter: test_lerobot.py runs this file.

It is not collected by itself: LeRobot and what it pins are on the path of a process of their own.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

# torchvision's compiled part is of another build than this torch and is not loaded. Its Python part, all that ACT's
# backbone needs, asks for two of the operators at its import.
_OPERATORS = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from lerobot.configs import types  # noqa: E402
from lerobot.policies import factory  # noqa: E402
from lerobot.policies.act import modeling_act  # noqa: E402

from omni_live.pipelines.robot.adapter import Chunk, Query  # noqa: E402
from omni_live.pipelines.robot.lerobot import LeRobotPolicy  # noqa: E402

HORIZON = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of ACT as LeRobot writes it."""
    path: Path = tmp_path_factory.mktemp("act")
    image = types.PolicyFeature(types.FeatureType.VISUAL, (3, 64, 48))
    config = modeling_act.ACTConfig(
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
    modeling_act.ACTPolicy(config).save_pretrained(path)
    for processor in factory.make_pre_post_processors(config, dataset_stats=stats):
        processor.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> LeRobotPolicy:
    made = LeRobotPolicy({"path": str(checkpoint), "action_low": -100, "action_high": 100})
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
    model = modeling_act.ACTPolicy.from_pretrained(checkpoint)
    before, after = factory.make_pre_post_processors(model.config, str(checkpoint))
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
