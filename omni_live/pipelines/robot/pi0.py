"""π0 as transformers ships it (`transformers.models.pi0`), behind the policy interface.

A checkpoint is a directory: `config.json` and `model.safetensors` as `PI0ForConditionalGeneration.save_pretrained`
writes them, `tokenizer.json`, and, where states and actions are normalised, `processor_config.json` with `state_mean`,
`state_std`, `actions_mean` and `actions_std`. What it does not say (whose cameras, how many joints, their limits) comes
as options. Inputs are prepared as transformers' PI0Processor does, without its need for torchvision, and with each
prompt padded to the same length, so that nobody's prompt changes the shape in which another's is computed.
Source: transformers 5.24.0, models/pi0/{modeling,processing,image_processing}_pi0.py.
"""

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, Self

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from omni_live.engines.contract import EngineOptions
from omni_live.engines.options import Options
from omni_live.pipelines.robot.adapter import BadPolicy, Chunk, Query
from omni_live.protocols.openpi.contract import Contract, Field
from omni_live.sessions.payload import Scalar

TEXT_TOKENS: Final = 48
"""PI0Processor's max_length: of a longer prompt the rest is cut off."""
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_EPSILON: Final = 1e-8
"""PI0Processor adds it to every standard deviation."""


class Pi0Model(Protocol):
    """The part of PI0ForConditionalGeneration that is used here."""

    def eval(self) -> Self: ...
    def to(self, device: torch.device) -> Self: ...
    def sample_actions(
        self,
        *,
        state: Tensor,
        input_ids: Tensor,
        pixel_values: Tensor,
        noise: Tensor,
        attention_mask: Tensor,
        pixel_attention_mask: Tensor,
        num_steps: int | None,
    ) -> Tensor: ...


class Pi0Class(Protocol):
    def from_pretrained(self, path: str, *, dtype: torch.dtype, local_files_only: bool) -> Pi0Model: ...


@dataclass(frozen=True, slots=True)
class Shape:
    """What a checkpoint's config.json says about its inputs and outputs."""

    horizon: int
    state_dim: int
    action_dim: int
    """Both padded: a robot's own are at most these."""
    image: int
    image_tokens: int
    """Of one camera."""
    image_token: int
    bos_token: int
    pad_token: int


@dataclass(frozen=True, slots=True)
class Norm:
    """A robot's mean and standard deviation for states or actions; (0, 1) where the checkpoint has none."""

    mean: Tensor
    std: Tensor


class Pi0Policy:
    """π0 from a local directory. It starts each chunk anew: a previous one is ignored.

    Options: `path`; `cameras`: keys of the images, with commas; `state`: the state's key; `state_dim` and `action_dim`;
    `action_low` and `action_high`; `rate_hz`; `embodiment`; `steps`: of denoising (0: as the checkpoint says);
    `device` (cpu); `dtype` (float32 or bfloat16). Raises BadPolicy where the directory holds no such checkpoint.
    """

    def __init__(self, options: Mapping[str, Scalar]) -> None:
        read = Options("pi0", EngineOptions(options))
        self._path = Path(read.text("path", ""))
        self._shape = _shape(_read(self._path / "config.json"))
        self._cameras = tuple(read.text("cameras", "observation/image,observation/wrist_image").split(","))
        self._state = read.text("state", "observation/state")
        self._device = torch.device(read.text("device", "cpu"))
        self._dtype = _dtype(read.text("dtype", "float32"))
        self._steps = read.whole("steps", 0, 0, 1000) or None
        image = self._shape.image
        fields = [Field(key, (image, image, 3), "uint8") for key in self._cameras]
        state_dim = read.whole("state_dim", self._shape.state_dim, 1, self._shape.state_dim)
        self.contract = Contract(
            embodiment=read.text("embodiment", "pi0"),
            observation=(*fields, Field(self._state, (state_dim,), "float32")),
            action_horizon=self._shape.horizon,
            action_dim=read.whole("action_dim", self._shape.action_dim, 1, self._shape.action_dim),
            rate_hz=read.real("rate_hz", 50.0, 0.1, 1000.0),
            action_low=read.real("action_low", -1.0, -1e6, 1e6),
            action_high=read.real("action_high", 1.0, -1e6, 1e6),
            image_resolution=(image, image),
            external_cameras=sum("wrist" not in key for key in self._cameras),
            wrist_camera=any("wrist" in key for key in self._cameras),
        )
        read.done()

    def load(self) -> None:
        module = vars(importlib.import_module("transformers.models.pi0.modeling_pi0"))
        kind: Pi0Class = module["PI0ForConditionalGeneration"]
        model = kind.from_pretrained(str(self._path), dtype=self._dtype, local_files_only=True)
        self._model = model.to(self._device).eval()
        self._tokenizer = Tokenizer.from_file(str(self._path / "tokenizer.json"))
        told = self._path / "processor_config.json"
        stats = _read(told) if told.exists() else {}
        self._states = _norm(stats, "state", self.contract.observation[-1].shape[0])
        self._actions = _norm(stats, "actions", self.contract.action_dim)

    @torch.inference_mode()
    def predict_chunk(self, batch: Sequence[Query]) -> Sequence[Chunk]:
        ids, mask = self._tokens(batch)
        normal = self._model.sample_actions(
            state=self._state_of(batch),
            input_ids=ids,
            pixel_values=self._pixels(batch),
            noise=self._noise(batch),
            attention_mask=mask,
            pixel_attention_mask=torch.ones(len(batch), len(self._cameras), dtype=torch.bool, device=self._device),
            num_steps=self._steps,
        )
        actions = normal.float().cpu()[..., : self.contract.action_dim]
        found: Chunk = (actions * self._actions.std + self._actions.mean).numpy()
        return list(found)

    def _tokens(self, batch: Sequence[Query]) -> tuple[Tensor, Tensor]:
        """Token ids and which of them count, (batch, tokens): all cameras' places, then the prompt, then padding."""
        shape = self._shape
        places = shape.image_tokens * len(self._cameras)
        ids = torch.full((len(batch), places + TEXT_TOKENS), shape.pad_token)
        mask = torch.zeros_like(ids)
        for row, query in enumerate(batch):
            text = self._tokenizer.encode(query.texts["prompt"] + "\n", add_special_tokens=False).ids
            told = [shape.bos_token, *text][:TEXT_TOKENS]
            ids[row, :places] = shape.image_token
            ids[row, places : places + len(told)] = torch.tensor(told)
            mask[row, : places + len(told)] = 1
        return ids.to(self._device), mask.to(self._device)

    def _pixels(self, batch: Sequence[Query]) -> Tensor:
        """(batch, cameras, 3, image, image) in [-1, 1]."""
        stacked = np.stack([[query.arrays[key] for key in self._cameras] for query in batch])
        pixels = torch.from_numpy(stacked).to(self._device, self._dtype) / 127.5 - 1.0
        return pixels.permute(0, 1, 4, 2, 3)

    def _state_of(self, batch: Sequence[Query]) -> Tensor:
        states = torch.from_numpy(np.stack([query.arrays[self._state] for query in batch]))
        normal = (states - self._states.mean) / self._states.std
        padded = torch.nn.functional.pad(normal, (0, self._shape.state_dim - normal.shape[-1]))
        return padded.to(self._device, self._dtype)

    def _noise(self, batch: Sequence[Query]) -> Tensor:
        """Each query's own, from its seed alone; drawn on the CPU, so that it is the same on every device."""
        size = (self._shape.horizon, self._shape.action_dim)
        rows = [torch.randn(size, generator=torch.Generator().manual_seed(query.seed)) for query in batch]
        return torch.stack(rows).to(self._device, self._dtype)


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise BadPolicy(f"pi0: dtype is {' or '.join(_DTYPES)}, not {name!r}")
    return _DTYPES[name]


def _read(path: Path) -> Mapping[str, object]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadPolicy(f"no pi0 checkpoint: {path} cannot be read") from error
    if not isinstance(found, dict):
        raise BadPolicy(f"no pi0 checkpoint: {path} is not a map")
    return found


def _shape(config: Mapping[str, object]) -> Shape:
    if config.get("model_type") != "pi0":
        raise BadPolicy("no pi0 checkpoint: config.json is of another model")
    vlm = _map(config, "vlm_config")
    text, vision = _map(vlm, "text_config"), _map(vlm, "vision_config")
    image = _whole(vision, "image_size")
    return Shape(
        horizon=_whole(config, "chunk_size"),
        state_dim=_whole(config, "max_state_dim"),
        action_dim=_whole(config, "max_action_dim"),
        image=image,
        image_tokens=(image // _whole(vision, "patch_size")) ** 2,
        image_token=_whole(vlm, "image_token_index" if "image_token_index" in vlm else "image_token_id"),
        bos_token=_whole(text, "bos_token_id"),
        pad_token=_whole(text, "pad_token_id"),
    )


def _map(config: Mapping[str, object], key: str) -> Mapping[str, object]:
    found = config.get(key)
    if not isinstance(found, dict):
        raise BadPolicy(f"no pi0 checkpoint: config.json has no {key}")
    return found


def _whole(config: Mapping[str, object], key: str) -> int:
    found = config.get(key)
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise BadPolicy(f"no pi0 checkpoint: config.json has no {key}")
    return found


def _norm(stats: Mapping[str, object], name: str, dim: int) -> Norm:
    mean, std = stats.get(f"{name}_mean"), stats.get(f"{name}_std")
    if mean is None or std is None:
        return Norm(torch.zeros(dim), torch.ones(dim))
    return Norm(_numbers(mean, name, dim), _numbers(std, name, dim) + _EPSILON)


def _numbers(given: object, name: str, dim: int) -> Tensor:
    if not isinstance(given, list) or len(given) != dim:
        raise BadPolicy(f"pi0: processor_config.json must have {dim} numbers as mean and deviation of {name}")
    return torch.tensor(given, dtype=torch.float32)
