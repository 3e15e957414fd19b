"""LeRobot's policies (ACT, SmolVLA, π0, ...), behind the policy interface.

A checkpoint is a directory as LeRobot's `save_pretrained` writes it: `config.json` says which policy it is, what it
observes and how many joints it moves, and `policy_preprocessor.json` and `policy_postprocessor.json` how inputs and
actions are normalised (LeRobot 0.4 and later; older checkpoints must be migrated with LeRobot's own script).
Tried with lerobot 0.4.4's ACT; LeRobot is not installed with this package, since it pins other versions of torch.
"""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from omni_live.engines.contract import EngineOptions
from omni_live.engines.options import Options
from omni_live.pipelines.robot.adapter import Array, BadPolicy, Chunk, Query
from omni_live.protocols.openpi.contract import Contract, Field
from omni_live.sessions.payload import Scalar

_NUMBERS: Final = frozenset({"STATE", "ENV"})
_IMAGE: Final = "VISUAL"

Batch = dict[str, object]


class LeRobotModel(Protocol):
    """The part of lerobot's PreTrainedPolicy that is used here."""

    config: object

    def eval(self) -> Self: ...
    def to(self, device: str) -> Self: ...
    def predict_action_chunk(self, batch: Batch) -> Tensor:
        """(batch, horizon, actions), normalised."""


class LeRobotClass(Protocol):
    def from_pretrained(self, path: str, *, local_files_only: bool) -> LeRobotModel: ...


Processors = tuple[Callable[[Batch], Batch], Callable[[Tensor], Tensor]]


class LeRobotPolicy:
    """A LeRobot policy from a local directory. It starts each chunk anew: a previous one is ignored.

    Its features are the contract's under OpenPI's names: `observation.state` is `observation/state`,
    `observation.images.top` is `observation/top`, uint8 with the channels last. Policies that keep a history of
    observations themselves (`n_obs_steps` above 1: diffusion, VQ-BeT) are refused, since it would mix the sessions.
    A policy that draws noise takes it from torch's generator, so that a query's seed holds where it is alone
    (`deterministic`).
    Options: `path`; `horizon` (0: the checkpoint's chunk_size); `prompt`: there is one (true); `action_low` and
    `action_high`; `rate_hz`; `embodiment`; `device` (cpu). Raises BadPolicy where the directory holds no such policy.
    """

    def __init__(self, options: Mapping[str, Scalar]) -> None:
        read = Options("lerobot", EngineOptions(options))
        self._path = Path(read.text("path", ""))
        config = _read(self._path / "config.json")
        if config.get("n_obs_steps", 1) != 1:
            raise BadPolicy("lerobot: a policy that keeps a history of observations itself would mix the sessions")
        self._type = _text(config, "type")
        self._fields = _fields(config)
        self._device = read.text("device", "cpu")
        images = [field for field in self._fields.values() if len(field.shape) == 3]
        self.contract = Contract(
            embodiment=read.text("embodiment", self._type),
            observation=tuple(self._fields.values()),
            action_horizon=read.whole("horizon", 0, 0, 1000) or _horizon(config),
            action_dim=_actions(config),
            rate_hz=read.real("rate_hz", 30.0, 0.1, 1000.0),
            texts=("prompt",) if read.flag("prompt", True) else (),
            action_low=read.real("action_low", -1.0, -1e6, 1e6),
            action_high=read.real("action_high", 1.0, -1e6, 1e6),
            image_resolution=_resolution(images),
            external_cameras=sum("wrist" not in image.key for image in images),
            wrist_camera=any("wrist" in image.key for image in images),
        )
        read.done()

    def load(self) -> None:
        factory = vars(importlib.import_module("lerobot.policies.factory"))
        find: Callable[[str], LeRobotClass] = factory["get_policy_class"]
        processors: Callable[..., Processors] = factory["make_pre_post_processors"]
        model = find(self._type).from_pretrained(str(self._path), local_files_only=True)
        self._model = model.to(self._device).eval()
        self._before, self._after = processors(
            model.config,
            str(self._path),
            preprocessor_overrides={"device_processor": {"device": self._device}},
        )

    @torch.inference_mode()
    def predict_chunk(self, batch: Sequence[Query]) -> Sequence[Chunk]:
        torch.manual_seed(batch[0].seed)
        observed: Batch = {
            name: _tensor([query.arrays[field.key] for query in batch]) for name, field in self._fields.items()
        }
        observed["task"] = [query.texts.get("prompt", "") for query in batch]
        normal = self._model.predict_action_chunk(self._before(observed))
        size = normal.shape
        # The processor takes a batch of single actions.
        actions: Chunk = self._after(normal.reshape(-1, size[-1])).reshape(size).float().cpu().numpy()
        return list(actions)


def _tensor(arrays: Sequence[Array]) -> Tensor:
    stacked = torch.from_numpy(np.stack(arrays))
    return stacked.permute(0, 3, 1, 2) / 255 if stacked.ndim == 4 else stacked


def _read(path: Path) -> Mapping[str, object]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadPolicy(f"no LeRobot policy: {path} cannot be read") from error
    if not isinstance(found, dict):
        raise BadPolicy(f"no LeRobot policy: {path} is not a map")
    return found


def _text(config: Mapping[str, object], key: str) -> str:
    found = config.get(key)
    if not isinstance(found, str):
        raise BadPolicy(f"no LeRobot policy: config.json has no {key}")
    return found


def _features(config: Mapping[str, object], key: str) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Each feature's type and shape."""
    features = config.get(key)
    if not isinstance(features, dict) or not features:
        raise BadPolicy(f"no LeRobot policy: config.json has no {key}")
    return {name: (_text(feature, "type"), _shape(name, feature)) for name, feature in features.items()}


def _shape(name: str, feature: Mapping[str, object]) -> tuple[int, ...]:
    shape = feature.get("shape")
    if not isinstance(shape, list) or not all(isinstance(length, int) and length > 0 for length in shape):
        raise BadPolicy(f"no LeRobot policy: feature {name!r} has no shape")
    return tuple(shape)


def _fields(config: Mapping[str, object]) -> Mapping[str, Field]:
    """The contract's fields by LeRobot's names."""
    found: dict[str, Field] = {}
    for name, (kind, shape) in _features(config, "input_features").items():
        key = "observation/" + name.removeprefix("observation.").removeprefix("images.")
        if kind in _NUMBERS and len(shape) == 1:
            found[name] = Field(key, shape, "float32")
        elif kind == _IMAGE and len(shape) == 3:
            found[name] = Field(key, (*shape[1:], shape[0]), "uint8")
        else:
            raise BadPolicy(f"lerobot: feature {name!r} of type {kind} and shape {shape} cannot be served")
    return found


def _actions(config: Mapping[str, object]) -> int:
    _, shape = _features(config, "output_features").get("action", ("", ()))
    if len(shape) != 1:
        raise BadPolicy("no LeRobot policy: config.json names no action of one dimension")
    return shape[0]


def _horizon(config: Mapping[str, object]) -> int:
    steps = config.get("chunk_size", config.get("n_action_steps"))
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise BadPolicy("no LeRobot policy: config.json has no chunk_size")
    return steps


def _resolution(images: Sequence[Field]) -> tuple[int, int] | None:
    sizes = {(image.shape[0], image.shape[1]) for image in images}
    return sizes.pop() if len(sizes) == 1 else None
