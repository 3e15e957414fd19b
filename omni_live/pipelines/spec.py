"""What a pipeline is made of, as data: stages, edges, where inputs enter and which stage makes which output.

Specs name engines by path and import none, so that reading a registry costs nothing. A deploy file changes options,
edges and placement of a spec, never its shape; code never mentions replicas, processes or devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from types import MappingProxyType

from omni_live.protocols.openpi.contract import Contract
from omni_live.protocols.world.contract import WorldContract
from omni_live.sessions.payload import NO_META, Scalar


class BadSpec(ValueError):
    """A pipeline spec contradicts itself; the sentence says where."""


class SessionKind(StrEnum):
    """Which inputs the sessions of a pipeline understand."""

    CONVERSATION = "conversation"
    """Items, settings, audio in and out; the full voice session."""
    PLAIN = "plain"
    """One payload in, the outputs of the named stages back, turn by turn."""
    ROLLOUT = "rollout"
    """Actions in, frames out, from a state that is stepped, looked at, rewound, forked and restored."""


class Handover(StrEnum):
    """When an edge hands its payloads on."""

    WHOLE = "whole"
    CHUNK = "chunk"


class Connector(StrEnum):
    """What carries the bytes of an edge."""

    AUTO = "auto"
    """By reference inside a worker, shared memory between the workers of one host."""
    INLINE = "inline"
    """In the message itself; for edges whose payloads are small."""
    SHARED_MEMORY = "shared_memory"
    RAY = "ray"
    MOONCAKE = "mooncake"


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One model component and the engine that runs it."""

    name: str
    engine: str
    """`module:Class`, imported in the worker only."""
    options: Mapping[str, Scalar] = field(default_factory=lambda: NO_META)
    bytes_per_session: int = 0
    """What one session keeps in the stage's replica at most; admission adds it up. 0: nothing worth counting."""
    step_s: float = 0.0
    """The longest that one step of the engine may take, a first one that compiles included. A worker that answers
    nothing for longer, nor for the runtime's own patience, is wedged and killed. 0: steps are short."""


@dataclass(frozen=True, slots=True)
class EdgeSpec:
    """Hands what `producer` emits on to `consumer`."""

    producer: str
    consumer: str
    handover: Handover = Handover.CHUNK
    connector: Connector = Connector.AUTO
    credits: int = 0
    """Chunks under way per turn; 0 takes the limit `chunk_credits`."""

    @property
    def name(self) -> str:
        return f"{self.producer}->{self.consumer}"


NO_NAMES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """A DAG of stages. Checked when it is made: every name it uses exists, and no edge leads back."""

    name: str
    stages: tuple[StageSpec, ...]
    outputs: Mapping[str, str]
    """Modality -> the stage that makes it."""
    entries: Mapping[str, str]
    """Kind of input -> the stage it enters at."""
    edges: tuple[EdgeSpec, ...] = ()
    kind: SessionKind = SessionKind.PLAIN
    hears_hz: int = 0
    """Sample rate of client audio; 0 where the pipeline hears none."""
    speaks_hz: int = 0
    """Sample rate of the audio it makes; 0 where it makes none."""
    model_types: tuple[str, ...] = ()
    """`model_type` values of model configurations that this pipeline runs; names of their own in the registry."""
    fused: tuple[tuple[str, ...], ...] = ()
    """Stages that share a worker unless the deploy file says otherwise."""
    contract: Contract | None = None
    """What a robot policy observes and how it acts; the OpenPI door serves the pipelines that have one."""
    world: WorldContract | None = None
    """What a world model predicts and takes; the world door serves the pipelines that have one."""

    def __post_init__(self) -> None:
        check(self)

    def stage(self, name: str) -> StageSpec:
        """Raises KeyError where the pipeline has no such stage."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)

    @property
    def stage_names(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self.stages)


def check(spec: PipelineSpec) -> None:
    """Raise BadSpec, with one sentence, where the spec contradicts itself."""
    names = spec.stage_names
    if not names:
        raise BadSpec(f"pipeline {spec.name!r} has no stages")
    _no_twins(spec.name, "stage", names)
    _no_twins(spec.name, "edge", tuple(edge.name for edge in spec.edges))
    _no_twins(spec.name, "fused stage", tuple(name for group in spec.fused for name in group))
    used = [(f"edge {edge.name}", end) for edge in spec.edges for end in (edge.producer, edge.consumer)]
    used += [(f"output {modality!r}", stage) for modality, stage in spec.outputs.items()]
    used += [(f"entry {kind!r}", stage) for kind, stage in spec.entries.items()]
    used += [("a fused group", stage) for group in spec.fused for stage in group]
    for where, stage in used:
        if stage not in names:
            raise BadSpec(f"pipeline {spec.name!r}: {where} names stage {stage!r}, which it does not have")
    order(spec)


def order(spec: PipelineSpec) -> tuple[str, ...]:
    """Stage names, producers before consumers. Raises BadSpec where the edges lead in a circle."""
    producers: dict[str, list[str]] = {name: [] for name in spec.stage_names}
    for edge in spec.edges:
        producers[edge.consumer].append(edge.producer)
    try:
        return tuple(TopologicalSorter(producers).static_order())
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise BadSpec(f"pipeline {spec.name!r}: edges lead in a circle: {circle}") from None


def _no_twins(pipeline: str, what: str, names: tuple[str, ...]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise BadSpec(f"pipeline {pipeline!r}: {what} {name!r} appears twice")
