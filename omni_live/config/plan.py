"""The third layer, the placement plan: which worker hosts which stages, on which devices, with how many threads.

Stages that are fused share each worker of their pool; the replicas of a pool are workers alike. Devices are dealt out
in order: `parallel` of them to each replica, or the same ones to all where only one replica's worth is named.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from omni_live.config.deploy import Balance, Deploy, EdgeDeploy, PipelineDeploy, Server, StageDeploy, load
from omni_live.config.document import ConfigError, Position
from omni_live.config.registry import RegistryError, find, registry
from omni_live.pipelines.spec import Connector, EdgeSpec, PipelineSpec, SessionKind, StageSpec
from omni_live.sessions.admission import Amount, Caps, Cost
from omni_live.sessions.limits import GIB, KIB, MIB, Limits

T = TypeVar("T")

CONNECTORS = (Connector.AUTO, Connector.SHARED_MEMORY)
"""What the workers know to use. If you add a connector to the runtime, also add it here."""

KEPT_FRAMES = "rewind_steps"
"""Option of an engine that keeps rollouts: how far back each can go."""
POOL = "pool_bytes"
"""Option of an engine whose sessions share one pool of memory in each replica."""

NO_ENVIRONMENT: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker process: the stages that it hosts and what it may use."""

    role: int
    """Index in Plan.workers. A replacement of a dead worker has the same role."""
    pipeline: str
    stages: tuple[StageSpec, ...]
    """In the order of the pipeline, options of the deploy file applied."""
    devices: tuple[str, ...] = ("cpu",)
    """torch device names; more than one where a stage is split over several (tensor parallel)."""
    threads: int = 1
    """Compute threads (OMP, torch, onnxruntime) of the process."""
    environment: Mapping[str, str] = field(default_factory=lambda: NO_ENVIRONMENT)

    @property
    def name(self) -> str:
        """For people and logs: the fused stages, joined."""
        return "+".join(stage.name for stage in self.stages)


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Workers that host the same stages of one pipeline: a session is bound to one of them."""

    pipeline: str
    stages: tuple[str, ...]
    roles: tuple[int, ...]
    balance: Balance = Balance.LEAST_LOADED


@dataclass(frozen=True, slots=True)
class Plan:
    """What a server starts. Pipelines are as deployed: overrides applied, credits resolved."""

    pipelines: tuple[PipelineSpec, ...]
    workers: tuple[WorkerPlan, ...]
    pools: tuple[PoolPlan, ...]
    limits: Limits = field(default_factory=Limits)
    server: Server = field(default_factory=Server)
    own_caps: Mapping[str, Amount] = field(default_factory=lambda: MappingProxyType({}))
    """Pipelines whose caps the deploy file sets."""

    def pipeline(self, name: str) -> PipelineSpec:
        """Raises KeyError where the plan does not serve it."""
        for spec in self.pipelines:
            if name == spec.name or name in spec.model_types:
                return spec
        raise KeyError(name)

    def caps(self) -> Caps:
        """What admission may admit."""
        return Caps.from_limits(self.limits, self.own_caps)

    def cost(self, pipeline: str) -> Cost:
        """What one session of the pipeline takes at most."""
        spec = self.pipeline(pipeline)
        return Cost(spec.name, Amount(1, sum(stage.bytes_per_session for stage in spec.stages)))

    def fused(self, edge: EdgeSpec, pipeline: str) -> bool:
        """Whether the edge stays inside one worker."""
        ends = {edge.producer, edge.consumer}
        return any(pool.pipeline == pipeline and ends <= set(pool.stages) for pool in self.pools)

    def describe(self) -> str:
        """The plan for people, one line a thing."""
        keys = len(self.server.api_keys)
        lines = [
            f"listen    {self.server.host}:{self.server.port}, {keys} API key{'' if keys == 1 else 's'}",
            f"doors     {', '.join(self.server.doors)}",
            f"limits    {_amount(self.caps().whole)} in all",
        ]
        for spec in self.pipelines:
            lines += ["", *self._describe(spec)]
        return "\n".join(lines) + "\n"

    def _describe(self, spec: PipelineSpec) -> list[str]:
        rates = f", hears {spec.hears_hz} Hz" if spec.hears_hz else ""
        rates += f", speaks {spec.speaks_hz} Hz" if spec.speaks_hz else ""
        cost = self.cost(spec.name).amount.nbytes
        lines = [
            f"pipeline  {spec.name} ({spec.kind}{rates})",
            f"          {_amount(self.caps().for_pipeline(spec.name))}, {_bytes(cost)} a session",
            f"          in: {_pairs(spec.entries)}; out: {_pairs(spec.outputs)}",
        ]
        for worker in self.workers:
            if worker.pipeline == spec.name:
                threads = f"{worker.threads} thread{'' if worker.threads == 1 else 's'}"
                lines.append(f"worker {worker.role:<2} {worker.name} on {', '.join(worker.devices)}, {threads}")
        for edge in spec.edges:
            fused = self.fused(edge, spec.name)
            how = "by reference" if fused else edge.connector.value
            lines.append(f"edge      {edge.producer} -> {edge.consumer} {edge.handover}, {how}, {edge.credits} credits")
        return lines


def plan(deploy: Deploy, among: Mapping[str, PipelineSpec] | None = None) -> Plan:
    """Place what the deploy file asks for. Raises ConfigError that names the line that does not fit."""
    known = registry() if among is None else among
    specs: list[PipelineSpec] = []
    workers: list[WorkerPlan] = []
    pools: list[PoolPlan] = []
    own_caps: dict[str, Amount] = {}
    for wanted in deploy.pipelines:
        try:
            spec = find(wanted.name, known)
        except RegistryError as error:
            raise ConfigError(wanted.at, str(error)) from None
        if any(spec.name == other.name for other in specs):
            raise ConfigError(wanted.at, f"pipeline {spec.name!r} is served already")
        spec = _deployed(spec, wanted, deploy.limits)
        _check_reach(spec, wanted, deploy.limits)
        specs.append(spec)
        replicas: dict[str, int] = {}
        for group in _groups(spec):
            placed, balance = _placed(spec, group, wanted, len(workers))
            pools.append(PoolPlan(spec.name, group, tuple(worker.role for worker in placed), balance))
            replicas |= dict.fromkeys(group, len(placed))
            workers += placed
        own_caps |= _own_caps(spec, wanted, deploy.limits, _sessions_in_pools(spec, wanted, replicas))
    return Plan(tuple(specs), tuple(workers), tuple(pools), deploy.limits, deploy.server, MappingProxyType(own_caps))


def check(path: Path, environment: Mapping[str, str] | None = None) -> str:
    """What `omni-live check FILE` prints: the plan that the file leads to. Raises ConfigError."""
    return plan(load(path, os.environ if environment is None else environment)).describe()


def _deployed(spec: PipelineSpec, wanted: PipelineDeploy, limits: Limits) -> PipelineSpec:
    """The pipeline with the overrides of the deploy file applied."""
    edges = {edge.name: edge for edge in spec.edges}
    for name, stage in wanted.stages.items():
        if name not in spec.stage_names:
            raise ConfigError(stage.at, f"pipeline {spec.name!r} has the stages {', '.join(spec.stage_names)}")
    for name, edge in wanted.edges.items():
        if name not in edges:
            raise ConfigError(edge.at, f"pipeline {spec.name!r} has the edges {', '.join(edges) or '(none)'}")
    fused = spec.fused if wanted.fuse is None else wanted.fuse
    for group in fused:
        for name in group:
            if name not in spec.stage_names:
                at = replace(wanted.at, key=f"{wanted.at.key}.fuse")
                raise ConfigError(at, f"pipeline {spec.name!r} has no stage {name!r}")
    return replace(
        spec,
        stages=tuple(_stage(stage, wanted.stages.get(stage.name)) for stage in spec.stages),
        edges=tuple(_edge(edge, wanted.edges.get(edge.name), fused, limits) for edge in spec.edges),
        fused=fused,
    )


def _stage(stage: StageSpec, wanted: StageDeploy | None) -> StageSpec:
    if wanted is None:
        return stage
    return replace(
        stage,
        engine=wanted.engine or stage.engine,
        options=MappingProxyType({**stage.options, **wanted.options}),
        bytes_per_session=_or(wanted.bytes_per_session, stage.bytes_per_session),
        step_s=_or(wanted.step_s, stage.step_s),
    )


def _edge(edge: EdgeSpec, wanted: EdgeDeploy | None, fused: Sequence[Sequence[str]], limits: Limits) -> EdgeSpec:
    credit = edge.credits or limits.chunk_credits
    if wanted is None:
        return replace(edge, credits=credit)
    if wanted.connector not in (None, Connector.AUTO) and any(
        edge.producer in group and edge.consumer in group for group in fused
    ):
        raise ConfigError(wanted.at, "both ends share a worker, so payloads go by reference: leave the connector out")
    if wanted.connector not in (None, *CONNECTORS):
        raise ConfigError(wanted.at, f"the workers of one machine speak {', '.join(CONNECTORS)} only")
    return replace(
        edge,
        handover=_or(wanted.handover, edge.handover),
        connector=_or(wanted.connector, edge.connector),
        credits=_or(wanted.credits, credit),
    )


def _check_reach(spec: PipelineSpec, wanted: PipelineDeploy, limits: Limits) -> None:
    """An engine that keeps fewer frames than its rollouts may go back would refuse what the session promised."""
    for stage in spec.stages:
        kept = stage.options.get(KEPT_FRAMES)
        if spec.kind is SessionKind.ROLLOUT and isinstance(kept, int) and kept < limits.rewind_steps:
            sentence = f"{kept} frames are kept, and limits.rewind_steps lets rollouts go back {limits.rewind_steps}"
            raise ConfigError(_at_option(stage.name, KEPT_FRAMES, wanted), sentence)


def _sessions_in_pools(spec: PipelineSpec, wanted: PipelineDeploy, replicas: Mapping[str, int]) -> int | None:
    """How many sessions the stages' pools have room for, whatever they keep; None where no stage names one."""
    rooms: list[int] = []
    for stage in spec.stages:
        pool = stage.options.get(POOL)
        if not isinstance(pool, int) or not stage.bytes_per_session:
            continue
        room = pool // stage.bytes_per_session
        if not room:
            sentence = f"{_bytes(pool)} are no room for a session of {_bytes(stage.bytes_per_session)}"
            raise ConfigError(_at_option(stage.name, POOL, wanted), sentence)
        rooms.append(room * replicas[stage.name])
    return min(rooms, default=None)


def _at_option(stage: str, option: str, wanted: PipelineDeploy) -> Position:
    """Where the deploy file names the stage's option, or else the pipeline."""
    said = wanted.stages.get(stage)
    at = wanted.at if said is None else said.at
    return replace(at, key=f"{at.key}.options.{option}" if said is not None else f"{at.key}.stages.{stage}.{option}")


def _own_caps(spec: PipelineSpec, wanted: PipelineDeploy, limits: Limits, room: int | None) -> dict[str, Amount]:
    """The pipeline's caps where the deploy file sets some, or where its pools have less room than they say."""
    sessions = _or(wanted.max_sessions, limits.max_sessions_per_pipeline)
    if room is not None and room < sessions:
        sessions = room
    elif (wanted.max_sessions, wanted.max_bytes, wanted.max_duty_permille) == (None, None, None):
        return {}
    return {
        spec.name: Amount(
            sessions,
            _or(wanted.max_bytes, limits.max_bytes_per_pipeline),
            _or(wanted.max_duty_permille, limits.max_duty_permille),
        )
    }


def _groups(spec: PipelineSpec) -> list[tuple[str, ...]]:
    """The stages by worker, in the order of the pipeline."""
    groups: list[tuple[str, ...]] = []
    for name in spec.stage_names:
        mates = next((group for group in spec.fused if name in group), (name,))
        group = tuple(mate for mate in spec.stage_names if mate in mates)
        if group not in groups:
            groups.append(group)
    return groups


def _placed(
    spec: PipelineSpec, group: tuple[str, ...], wanted: PipelineDeploy, first_role: int
) -> tuple[list[WorkerPlan], Balance]:
    """The workers of one pool. What is said about one of its stages holds for all; two that differ are an error."""
    said = [wanted.stages[name] for name in group if name in wanted.stages]
    at = said[-1].at if said else wanted.at
    replicas = _agreed("replicas", [(one.at, one.replicas) for one in said], 1)
    parallel = _agreed("parallel", [(one.at, one.parallel) for one in said], 1)
    devices = _agreed("devices", [(one.at, one.devices) for one in said], ("cpu",))
    threads = _agreed("threads", [(one.at, one.threads) for one in said], 1)
    environment = _agreed("environment", [(one.at, one.environment) for one in said], NO_ENVIRONMENT)
    balance = _agreed("balance", [(one.at, one.balance) for one in said], Balance.LEAST_LOADED)
    stages = tuple(spec.stage(name) for name in group)
    workers = [
        WorkerPlan(first_role + index, spec.name, stages, dealt, threads, environment)
        for index, dealt in enumerate(_dealt(devices, replicas, parallel, at))
    ]
    return workers, balance


def _dealt(devices: tuple[str, ...], replicas: int, parallel: int, at: Position) -> list[tuple[str, ...]]:
    """Each replica's devices."""
    if len(devices) == parallel:
        return [devices] * replicas
    if len(devices) == replicas * parallel:
        return [devices[start : start + parallel] for start in range(0, len(devices), parallel)]
    needs = f"{replicas * parallel} or {parallel}" if replicas > 1 else f"{parallel}"
    raise ConfigError(at, f"{replicas} replicas of parallel size {parallel} take {needs} devices, got {len(devices)}")


def _agreed(what: str, said: list[tuple[Position, T | None]], default: T) -> T:
    agreed: T | None = None
    for at, value in said:
        if value is None:
            continue
        if agreed is not None and agreed != value:
            raise ConfigError(replace(at, key=f"{at.key}.{what}"), "differs from that of a stage in the same worker")
        agreed = value
    return default if agreed is None else agreed


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _pairs(pairs: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={stage}" for name, stage in pairs.items())


def _amount(amount: Amount) -> str:
    return f"at most {amount.sessions} sessions, {_bytes(amount.nbytes)}"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"
