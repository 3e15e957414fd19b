"""What every training here does with files: weights and checkpoints as safetensors, whole or not at all.

BadCheckpoint    the checkpoint belongs to another training, or is damaged
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import safetensors
from safetensors.torch import load_file, save
from torch import Tensor


class BadCheckpoint(ValueError):
    """The checkpoint belongs to another training, or is damaged."""


class Progress(Protocol):
    """Is told how far the work is."""

    def enter(self, section: str) -> None: ...
    def step(self, count: int = 1) -> None: ...


def checkpoint_path(out: Path) -> Path:
    """Where training towards `out` keeps its state while it runs."""
    return out.with_name(f"{out.name}.checkpoint")


def described(settings: Mapping[str, object]) -> dict[str, str]:
    """The settings of a training as a file's metadata."""
    return {"settings": json.dumps(settings, sort_keys=True)}


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those whose names begin so, without that."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Raises OSError where the file can't be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(save({name: value.contiguous() for name, value in tensors.items()}, metadata))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read(path: Path, settings: Mapping[str, object]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A checkpoint's tensors and metadata. Raises BadCheckpoint, also where it was made with other settings."""
    try:
        with safetensors.safe_open(path, "pt") as opened:
            metadata = dict(opened.metadata() or {})
        tensors = load_file(path)
    except safetensors.SafetensorError as error:
        raise BadCheckpoint(f"{path} can't be read: {error}") from None
    if metadata.get("settings") != described(settings)["settings"]:
        raise BadCheckpoint(f"{path} was made with other settings: {metadata.get('settings')}")
    return tensors, metadata
