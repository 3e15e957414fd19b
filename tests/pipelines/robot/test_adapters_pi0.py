"""π0 by transformers' own class, tiny and on random weights."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from omni_live.engines.options import BadOption
from omni_live.pipelines.robot.adapter import BadPolicy, Chunk, Query, load_policy
from omni_live.pipelines.robot.pi0 import TEXT_TOKENS, Pi0Policy
from omni_live.sessions.payload import Scalar

pi0 = pytest.importorskip("transformers.models.pi0", reason="transformers 5.24 is not installed")

IMAGE = 28
IMAGE_TOKEN = 255
HORIZON = 6
WORDS = "push the red blue disc to left right zone".split()
STATS = {
    "state_mean": [1.0, 2.0, 3.0],
    "state_std": [0.5, 0.5, 2.0],
    "actions_mean": [10.0, 20.0],
    "actions_std": [2.0, 4.0],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as transformers writes it."""
    path: Path = tmp_path_factory.mktemp("pi0")
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    gemma = {"model_type": "gemma", "num_key_value_heads": 1, "head_dim": 16, **layers}
    vision = {"hidden_size": 32, "intermediate_size": 64, "image_size": IMAGE, "patch_size": 14, **layers}
    config = pi0.PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "image_token_id": IMAGE_TOKEN,
            "projection_dim": 32,
            "hidden_size": 32,
            "text_config": {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 256, **gemma},
            "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **vision},
        },
        dit_config={"hidden_size": 32, "intermediate_size": 64, **gemma},
        chunk_size=HORIZON,
        num_inference_steps=3,
    )
    torch.manual_seed(0)
    pi0.PI0ForConditionalGeneration(config).save_pretrained(path)
    vocabulary = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3} | {word: 4 + n for n, word in enumerate(WORDS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "processor_config.json").write_text(json.dumps(STATS))
    return path


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Pi0Policy:
    made = make(checkpoint)
    made.load()
    return made


def make(path: Path, **options: Scalar) -> Pi0Policy:
    return Pi0Policy(
        {"path": str(path), "state_dim": 3, "action_dim": 2, "action_low": -100, "action_high": 100, **options}
    )


def query(number: int = 0, prompt: str = "push the red disc", seed: int = 0) -> Query:
    random = np.random.default_rng(number)
    images = {
        key: random.integers(0, 256, (IMAGE, IMAGE, 3), np.uint8)
        for key in ("observation/image", "observation/wrist_image")
    }
    state = random.normal(size=3).astype(np.float32)
    return Query({**images, "observation/state": state}, {"prompt": prompt}, seed)


def one(policy: Pi0Policy, asked: Query) -> Chunk:
    (chunk,) = policy.predict_chunk([asked])
    return chunk


def test_its_contract_is_known_before_it_is_loaded(checkpoint: Path) -> None:
    contract = make(checkpoint, rate_hz=20.0, embodiment="aloha").contract
    assert [(field.key, field.shape, field.dtype) for field in contract.observation] == [
        ("observation/image", (IMAGE, IMAGE, 3), "uint8"),
        ("observation/wrist_image", (IMAGE, IMAGE, 3), "uint8"),
        ("observation/state", (3,), "float32"),
    ]
    assert (contract.action_horizon, contract.action_dim, contract.rate_hz) == (HORIZON, 2, 20.0)
    assert (contract.external_cameras, contract.wrist_camera, contract.embodiment) == (1, True, "aloha")


def test_it_answers_as_its_contract_says(policy: Pi0Policy) -> None:
    chunks = policy.predict_chunk([query(0), query(1), query(2)])
    assert [(chunk.shape, chunk.dtype.str) for chunk in chunks] == [((HORIZON, 2), "<f4")] * 3
    assert all(np.isfinite(chunk).all() for chunk in chunks)


def test_it_computes_what_the_model_computes_of_the_prepared_inputs(policy: Pi0Policy, checkpoint: Path) -> None:
    asked = query(3, "push the blue disc", seed=7)
    model = pi0.PI0ForConditionalGeneration.from_pretrained(checkpoint).eval()
    ids = [IMAGE_TOKEN] * 8 + [2, *(4 + WORDS.index(word) for word in "push the blue disc".split())]
    images = np.stack([asked.arrays["observation/image"], asked.arrays["observation/wrist_image"]])
    state = torch.zeros(1, 32)
    state[0, :3] = (torch.from_numpy(asked.arrays["observation/state"]) - torch.tensor([1.0, 2.0, 3.0])) / torch.tensor(
        [0.5, 0.5, 2.0]
    )
    normal = model.sample_actions(
        state=state,
        input_ids=torch.tensor([ids]),
        pixel_values=torch.from_numpy(images.transpose(0, 3, 1, 2))[None] / 127.5 - 1,
        noise=torch.randn(1, HORIZON, 32, generator=torch.Generator().manual_seed(7)),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        pixel_attention_mask=torch.ones(1, 2, dtype=torch.bool),
    )
    wanted = normal[0, :, :2].numpy() * [2, 4] + [10, 20]
    np.testing.assert_allclose(one(policy, asked), wanted, atol=1e-4)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: query(4, seed=1), id="seed"),
        pytest.param(lambda: query(4, prompt="push the blue disc"), id="prompt"),
        pytest.param(lambda: query(5), id="observation"),
    ],
)
def test_a_chunk_depends_on(policy: Pi0Policy, other: Callable[[], Query]) -> None:
    assert not np.allclose(one(policy, query(4)), one(policy, other()), atol=1e-5)


def test_the_same_query_alone_gives_the_same_bytes(policy: Pi0Policy) -> None:
    assert one(policy, query(6)).tobytes() == one(policy, query(6)).tobytes()


def test_who_else_is_in_the_batch_changes_nothing_but_rounding(policy: Pi0Policy) -> None:
    asked = [query(number, " ".join(WORDS[: number + 1]), seed=number) for number in range(5)]
    for chunk, alone in zip(policy.predict_chunk(asked), [one(policy, single) for single in asked], strict=True):
        np.testing.assert_allclose(chunk, alone, atol=1e-4)


def test_of_a_prompt_that_is_too_long_the_rest_is_cut_off(policy: Pi0Policy) -> None:
    words = [WORDS[number % len(WORDS)] for number in range(TEXT_TOKENS)]
    kept = one(policy, query(7, " ".join(words[: TEXT_TOKENS - 1])))
    assert kept.tobytes() == one(policy, query(7, " ".join(words))).tobytes()


def test_it_is_found_by_its_path(checkpoint: Path) -> None:
    found = load_policy("omni_live.pipelines.robot.pi0:Pi0Policy", {"path": str(checkpoint)})
    assert found.contract.action_dim == 32


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadPolicy, match="cannot be read"):
        make(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "act"}))
    with pytest.raises(BadPolicy, match="another model"):
        make(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "pi0"}))
    with pytest.raises(BadPolicy, match="vlm_config"):
        make(tmp_path)


def test_a_robot_with_more_joints_than_the_checkpoint_knows_is_refused(checkpoint: Path) -> None:
    with pytest.raises(BadOption, match="action_dim"):
        make(checkpoint, action_dim=33)


def test_statistics_of_another_robot_are_refused(checkpoint: Path) -> None:
    with pytest.raises(BadPolicy, match="7 numbers"):
        make(checkpoint, action_dim=7).load()
