"""A policy's contract: what it wants to see and what it answers with, as the server announces it and a robot checks it.

The server sends it as the metadata that OpenPI's handshake begins with; keys of other dialects (RoboArena's
`image_resolution`, `n_external_cameras`, ...) are among them. Each observation is checked against it before any of
the policy's code sees it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from omni_live.protocols.fields import Faulty, Wire, shown

Array = NDArray[np.generic]

_FLOATS: Final = frozenset({"float32"})
"""Field dtypes that take any real number: robots send float64 states and integer ones."""


@dataclass(frozen=True, slots=True)
class Field:
    """One array of an observation."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    """numpy's name: `uint8` for images, `float32` for numbers."""


@dataclass(frozen=True, slots=True)
class Contract:
    """What a policy observes and how it acts."""

    embodiment: str
    observation: tuple[Field, ...]
    action_horizon: int
    action_dim: int
    rate_hz: float
    """Control steps per second that the actions are meant for."""
    texts: tuple[str, ...] = ("prompt",)
    """Keys of texts."""
    action_low: float = -1.0
    action_high: float = 1.0
    action_space: str = ""
    image_resolution: tuple[int, int] | None = None
    """Height, width, where all images have the same."""
    external_cameras: int = 0
    wrist_camera: bool = False

    def metadata(self) -> dict[str, Wire]:
        """The map that goes to the client."""
        return {
            "embodiment": self.embodiment,
            "observation": {
                field.key: {"shape": list(field.shape), "dtype": field.dtype} for field in self.observation
            },
            "texts": list(self.texts),
            "action_key": "actions",
            "action_horizon": self.action_horizon,
            "action_dim": self.action_dim,
            "action_low": self.action_low,
            "action_high": self.action_high,
            "action_space": self.action_space,
            "rate_hz": self.rate_hz,
            "image_resolution": None if self.image_resolution is None else list(self.image_resolution),
            "n_external_cameras": self.external_cameras,
            "needs_wrist_camera": self.wrist_camera,
            "needs_stereo_camera": False,
            "needs_session_id": False,
            "session": "one per connection, or one per session_id, which survives a lost connection for its grace",
            "reset": "clears the session and drops the chunk in flight",
        }

    @classmethod
    def of(cls, metadata: Mapping[str, Wire]) -> Self:
        """The contract that a server's metadata states. Raises Faulty, which names a field that is missing or wrong."""
        fields = _map(metadata, "observation")
        return cls(
            embodiment=_text(metadata, "embodiment"),
            observation=tuple(_field(key, fields) for key in fields),
            action_horizon=_count(metadata, "action_horizon"),
            action_dim=_count(metadata, "action_dim"),
            rate_hz=_number(metadata, "rate_hz"),
            texts=tuple(_texts(metadata, "texts")),
            action_low=_number(metadata, "action_low"),
            action_high=_number(metadata, "action_high"),
            action_space=_text(metadata, "action_space"),
            image_resolution=_resolution(metadata),
            external_cameras=_count(metadata, "n_external_cameras", least=0),
            wrist_camera=metadata.get("needs_wrist_camera") is True,
        )

    def differences(self, robot: "Contract") -> list[str]:
        """What keeps a robot that is built for the contract `robot` from being driven by this policy; empty if nothing.

        One sentence for each field that differs. What the robot observes beyond what the policy wants does not matter.
        """
        found = [
            f"{name}: the policy has {ours!r}, the robot {theirs!r}"
            for name, ours, theirs in (
                ("embodiment", self.embodiment, robot.embodiment),
                ("action_dim", self.action_dim, robot.action_dim),
                ("action_low", self.action_low, robot.action_low),
                ("action_high", self.action_high, robot.action_high),
                ("rate_hz", self.rate_hz, robot.rate_hz),
            )
            if ours != theirs
        ]
        theirs = {field.key: field for field in robot.observation}
        for field in self.observation:
            other = theirs.get(field.key)
            if other is None:
                found.append(f"observation {field.key!r}: the policy wants it, the robot has none")
            elif (other.shape, other.dtype) != (field.shape, field.dtype):
                has = f"{other.dtype} of {other.shape}"
                found.append(f"observation {field.key!r}: the policy wants {field.dtype} of {field.shape}, not {has}")
        found += [
            f"text {key!r}: the policy wants it, the robot has none" for key in self.texts if key not in robot.texts
        ]
        return found

    def checked(self, given: Mapping[str, object]) -> tuple[dict[str, Array], dict[str, str]]:
        """The arrays and texts of an observation, as the policy wants them; what it does not want is left out.

        Raises Faulty, which names the key: missing, of another shape or kind, or not finite.
        """
        arrays = {field.key: _array(field, given.get(field.key)) for field in self.observation}
        texts: dict[str, str] = {}
        for key in self.texts:
            text = given.get(key)
            if not isinstance(text, str):
                raise Faulty("bad_observation", f"{shown(key)} must be a text.", key)
            texts[key] = text
        return arrays, texts


def _array(field: Field, value: object) -> Array:
    if value is None:
        raise Faulty("bad_observation", f"The observation has no {shown(field.key)}.", field.key)
    if isinstance(value, list | tuple) and field.dtype in _FLOATS:
        value = _of_numbers(field, value)
    if not isinstance(value, np.ndarray):
        raise Faulty("bad_observation", f"{shown(field.key)} must be an array.", field.key)
    if value.shape != field.shape:
        wants, has = list(field.shape), list(value.shape[:8])
        raise Faulty("bad_observation", f"{shown(field.key)} must have the shape {wants}, not {has}.", field.key)
    if field.dtype in _FLOATS:
        if value.dtype != np.float32:
            if value.dtype.kind not in "fiu":
                raise Faulty("bad_observation", f"{shown(field.key)} must be of real numbers.", field.key)
            with np.errstate(over="ignore"):  # a float64 that is too large becomes infinite and is refused as such
                value = value.astype(np.float32)
        if not np.isfinite(value).all():
            raise Faulty("bad_observation", f"{shown(field.key)} holds a number that is not finite.", field.key)
    elif value.dtype != field.dtype:
        raise Faulty("bad_observation", f"{shown(field.key)} must be of dtype {field.dtype}.", field.key)
    return value


def _of_numbers(field: Field, value: Sequence[object]) -> Array:
    """A list of numbers, which some clients send for a state."""
    if len(field.shape) == 1 and all(isinstance(item, int | float) and not isinstance(item, bool) for item in value):
        try:
            return np.array(value, dtype=np.float64)
        except OverflowError:
            pass
    raise Faulty("bad_observation", f"{shown(field.key)} must be of real numbers.", field.key)


# -- reading a server's metadata


def _get(metadata: Mapping[str, Wire], key: str) -> Wire:
    if key not in metadata:
        raise Faulty("bad_metadata", f"The server's metadata has no {shown(key)}.", key)
    return metadata[key]


def _map(metadata: Mapping[str, Wire], key: str) -> dict[str, Wire]:
    found = _get(metadata, key)
    if not isinstance(found, dict):
        raise Faulty("bad_metadata", f"{shown(key)} must be a map.", key)
    return found


def _text(metadata: Mapping[str, Wire], key: str) -> str:
    found = _get(metadata, key)
    if not isinstance(found, str):
        raise Faulty("bad_metadata", f"{shown(key)} must be a text.", key)
    return found


def _texts(metadata: Mapping[str, Wire], key: str) -> list[str]:
    found = _get(metadata, key)
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise Faulty("bad_metadata", f"{shown(key)} must be a list of texts.", key)
    return [item for item in found if isinstance(item, str)]


def _number(metadata: Mapping[str, Wire], key: str) -> float:
    found = _get(metadata, key)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise Faulty("bad_metadata", f"{shown(key)} must be a number.", key)
    return float(found)


def _count(metadata: Mapping[str, Wire], key: str, least: int = 1) -> int:
    found = _get(metadata, key)
    if isinstance(found, bool) or not isinstance(found, int) or found < least:
        raise Faulty("bad_metadata", f"{shown(key)} must be a number of at least {least}.", key)
    return found


def _shape(found: Wire, key: str) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(isinstance(item, int) and item >= 0 for item in found):
        raise Faulty("bad_metadata", f"{shown(key)} must have a shape.", key)
    return tuple(item for item in found if isinstance(item, int))


def _field(key: str, fields: Mapping[str, Wire]) -> Field:
    found = _map(fields, key)
    return Field(key, _shape(_get(found, "shape"), key), _text(found, "dtype"))


def _resolution(metadata: Mapping[str, Wire]) -> tuple[int, int] | None:
    found = metadata.get("image_resolution")
    if found is None:
        return None
    shape = _shape(found, "image_resolution")
    if len(shape) != 2:
        raise Faulty("bad_metadata", "'image_resolution' must be a height and a width.", "image_resolution")
    return shape[0], shape[1]
