"""What a seed plays: it draws a scene, plays it, lets calm return, and sees that everybody is served and nothing left."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from simclients import FAST, SLOW, STUCK, Client, Desk, Manners, Pace
from simplain import CHAIN, MAKE, MIXED, Asker
from simtalk import Code2Wav, Ears, Habits, Talkative, Talker, Thinker
from simworkers import Make
from simworld import MS, S, World

from omni_live.config.deploy import Caps, Deploy, PipelineDeploy, StageDeploy
from omni_live.config.plan import Plan, plan
from omni_live.pipelines.registry import VOICE
from omni_live.sessions.inputs import TextAppended
from omni_live.sessions.limits import KIB, Limits

LIMITS = Limits(
    max_sessions=6,
    idle_lease_s=30,
    detach_grace_s=4,
    abort_deadline_ms=400,
    replica_wait_s=1,
    turn_deadline_s=3,
    restarts=1000,
    restart_backoff_ms=20,
    restart_backoff_cap_ms=60,
    client_credits=3,
    lead_ms=800,
)
FAULTS = ("die", "stall", "lag", "repeat", "swap")
SPECS = {spec.name: spec for spec in (CHAIN, MIXED, VOICE)}
VOICE_MAKE: Mapping[str, Make] = {"ears": Ears(), "talker": Talker(), "code2wav": Code2Wav()}


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything that a seed decides before time begins."""

    kind: str
    asking: tuple[tuple[str, int], ...] = ()
    """Plain pipelines, each with the number of its clients."""
    people: int = 0
    seconds: float = 2.0
    replicas: int = 2
    fuse: bool = False
    faults: tuple[str, ...] = ()
    every_ns: int = S // 2
    """A fault strikes about twice as often."""
    poison: float = 0.0
    limits: Limits = LIMITS
    manners: Manners = Manners()
    habits: Habits = Habits()
    ask: Mapping[str, int] = field(default_factory=dict)
    """Weights of what plain clients do, where they are not the usual ones."""
    wait_queue: int = 64
    wait_deadline_s: float = 10.0
    drains: bool = False
    """The server goes away in the end; else the clients do."""

    @property
    def pipelines(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.asking) + ((VOICE.name,) if self.people else ())


@dataclass(frozen=True, slots=True)
class Played:
    """What came of a seed."""

    seed: int
    kind: str
    digest: str
    steps: int
    counts: Mapping[str, int]
    error: AssertionError | Exception | None = None


Draw = Callable[[random.Random], Scene]


def _plain(draw: random.Random) -> Scene:
    """Sound workers: nothing ever fails."""
    return Scene("plain", ((draw.choice(("chain", "mixed")), draw.randint(1, 5)),), seconds=draw.uniform(1, 3))


def _plain_faults(draw: random.Random) -> Scene:
    return replace(_plain(draw), kind="plain_faults", **_troubled(draw))


def _troubled(draw: random.Random) -> dict[str, object]:
    return {
        "faults": tuple(name for name in FAULTS if draw.random() < 0.6) or FAULTS,
        "replicas": draw.choice((1, 2, 2)),
        "every_ns": draw.choice((S // 5, S // 2, S)),
        "fuse": draw.random() < 0.3,
    }
