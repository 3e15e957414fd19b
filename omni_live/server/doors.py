"""Which door answers where."""

from collections.abc import Mapping, Sequence
from typing import Final

from starlette.routing import BaseRoute

from omni_live.config.deploy import Door
from omni_live.config.plan import Plan
from omni_live.pipelines.spec import SessionKind
from omni_live.protocols.duplex.asgi import DuplexDoor
from omni_live.protocols.openpi.asgi import PATHS, OpenPiDoor
from omni_live.protocols.openpi.contract import Contract
from omni_live.protocols.video.asgi import PATH as VIDEO_PATH
from omni_live.protocols.video.asgi import VideoDoor
from omni_live.protocols.world.asgi import WorldDoor
from omni_live.protocols.world.contract import Served
from omni_live.server.auth import App
from omni_live.server.desk import FrontDesk
from omni_live.server.metrics import Metrics
from omni_live.server.world_http import world_routes

WORLD_PATH: Final = "/v1/world"


def websocket_doors(plan: Plan, desk: FrontDesk, metrics: Metrics) -> Mapping[str, App]:
    """Path -> door, for the doors that the plan opens and that have a pipeline behind them."""
    doors: dict[str, App] = {}
    conversing = models(plan, SessionKind.CONVERSATION)
    if Door.DUPLEX in plan.server.doors and conversing:
        doors["/v1/duplex"] = DuplexDoor(desk, plan.limits, conversing, metrics)
    policies = contracts(plan)
    if Door.OPENPI in plan.server.doors and policies:
        door = OpenPiDoor(desk, plan.limits, policies, metrics)
        for path in PATHS:
            root = path.rstrip("/")
            doors |= {path: door, f"{root}/": door} | {f"{root}/{name}": door for name in policies}
    rollouts = worlds(plan)
    if Door.WORLD in plan.server.doors and rollouts:
        doors[WORLD_PATH] = WorldDoor(desk, plan.limits, rollouts, metrics)
    if Door.VIDEO in plan.server.doors and rollouts:
        doors[VIDEO_PATH] = VideoDoor(desk, plan.limits, rollouts, metrics)
    return doors


def http_routes(plan: Plan, desk: FrontDesk, metrics: Metrics) -> Sequence[BaseRoute]:
    """The doors' HTTP routes, beside their websockets."""
    rollouts = worlds(plan)
    if Door.WORLD in plan.server.doors and rollouts:
        return world_routes(desk, plan.limits, rollouts, metrics)
    return ()


def worlds(plan: Plan) -> Mapping[str, Served]:
    """Every name a client may call a world model by, and what it is."""
    found: dict[str, Served] = {}
    for spec in plan.pipelines:
        if spec.world is not None:
            found |= dict.fromkeys((spec.name, *spec.model_types), Served(spec.world, spec.outputs))
    return found


def openpi_door(plan: Plan, desk: FrontDesk, metrics: Metrics) -> App | None:
    """The door of the port that only OpenPI clients use; None where there is no policy for them."""
    policies = contracts(plan)
    return OpenPiDoor(desk, plan.limits, policies, metrics, any_path=True) if policies else None


def contracts(plan: Plan) -> Mapping[str, Contract]:
    """Every name a robot may call a policy by, and what it promises."""
    found: dict[str, Contract] = {}
    for spec in plan.pipelines:
        if spec.contract is not None:
            found |= dict.fromkeys((spec.name, *spec.model_types), spec.contract)
    return found


def models(plan: Plan, kind: SessionKind | None = None) -> tuple[str, ...]:
    """Every name a client may call a pipeline by: its own first, then the model types it runs."""
    specs = [spec for spec in plan.pipelines if kind is None or spec.kind is kind]
    return (*(spec.name for spec in specs), *(name for spec in specs for name in spec.model_types))
