"""The contract of the fake policy, for tests and measurements: of the size of pi0's, with tags for actions."""

from typing import Final

from omni_live.protocols.openpi.contract import Contract, Field

HORIZON: Final = 50
DIM: Final = 32
STATE: Final = 32
LIMIT: Final = 1e6
"""Actions are within ±LIMIT, so that any tag fits."""
SIDE: Final = 224
"""Of the images, in pixels, unless somebody says otherwise."""


def contract(side: int = SIDE) -> Contract:
    """What the fake observes: two images of that side, a state of 32 numbers, a prompt."""
    return Contract(
        embodiment="fake",
        observation=(
            Field("observation/image", (side, side, 3), "uint8"),
            Field("observation/wrist_image", (side, side, 3), "uint8"),
            Field("observation/state", (STATE,), "float32"),
        ),
        action_horizon=HORIZON,
        action_dim=DIM,
        rate_hz=50.0,
        action_low=-LIMIT,
        action_high=LIMIT,
        action_space="tags",
        image_resolution=(side, side),
        external_cameras=1,
        wrist_camera=True,
    )


CONTRACT: Final = contract()
