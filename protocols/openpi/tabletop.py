"""The table-top world's contract: what its simulator shows and what it takes, shared by the policy and the robot."""

from typing import Final

from omni_live.protocols.openpi.contract import Contract, Field

CONTRACT: Final = Contract(
    embodiment="table-top",
    observation=(
        Field("observation/image", (64, 64, 3), "uint8"),
        Field("observation/state", (2,), "float32"),
    ),
    action_horizon=16,
    action_dim=2,
    rate_hz=10.0,
    action_space="pusher velocity",
    image_resolution=(64, 64),
    external_cameras=1,
)
"""The image is the table from above, the state the pusher's place (x, y; 0 to 1, y down), an action its velocity."""
