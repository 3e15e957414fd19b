"""What a world model predicts and what it takes, as the world door announces it and checks requests against it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from omni_live.protocols.fields import Wire


@dataclass(frozen=True, slots=True)
class WorldContract:
    """A world model seen from outside."""

    frame: tuple[int, int, int]
    """Height, width, channels of a picture, uint8."""
    latent: tuple[int, int, int]
    """Shape of a frame's latent, float32."""
    action: tuple[int, ...]
    """Shape of what one frame takes, float32."""
    rate_hz: float
    """Frames in a second of the world's own time."""
    action_low: float = -1.0
    action_high: float = 1.0

    def describe(self) -> dict[str, Wire]:
        return {
            "frame": list(self.frame),
            "latent": list(self.latent),
            "action": list(self.action),
            "rate_hz": self.rate_hz,
            "action_low": self.action_low,
            "action_high": self.action_high,
        }


@dataclass(frozen=True, slots=True)
class Served:
    """A world model behind a door."""

    contract: WorldContract
    outputs: Mapping[str, str]
    """Output -> the stage that makes it."""


TABLE_TOP: Final = WorldContract(frame=(64, 64, 3), latent=(2, 1, 4), action=(2, 2), rate_hz=5.0)
"""The table-top world: a frame takes two actions of its simulator, which runs at 10 Hz."""
