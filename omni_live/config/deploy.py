"""The second layer: the deploy file, which says what differs from the defaults and repeats nothing.

    server:
      host: 0.0.0.0
      port: 8765
      api_keys: {team-a: env:TEAM_A_KEY}
    limits: {idle_lease_s: 120, client_frame_bytes: 8 MiB}
    pipelines:
      voice:
        max_sessions: 8
        stages:
          thinker: {replicas: 2, device: "cuda:0", threads: 2, options: {max_tokens: 200}}
        edges:
          thinker->talker: {credits: 4}
        fuse: [[talker, code2wav]]

Everything may be left out but `pipelines`, which says what is served. See docs/configuration.md for each key.
"""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

from omni_live.config.document import ConfigError, Cursor, Position, parse
from omni_live.pipelines.spec import Connector, Handover
from omni_live.sessions.limits import Limits
from omni_live.sessions.payload import NO_META, Scalar

NOWHERE = Position()
NO_TEXTS: Mapping[str, str] = MappingProxyType({})

MAY_BE_ZERO = frozenset(
    {"lead_ms", "wait_queue", "wait_deadline_s", "restarts", "replica_wait_s", "replica_wait_items", "drain_s"}
)
"""Limits of which 0 means none at all."""

DEVICE = re.compile(r"[a-z]+(:\d+)?")
ENGINE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
VARIABLE = re.compile(r"[A-Za-z_]\w*")
MAX_REPLICAS = 256


class Balance(StrEnum):
    """How a pool picks a replica for a new session."""

    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"


class Door(StrEnum):
    """A protocol that the server speaks."""

    DUPLEX = "duplex"
    REALTIME = "realtime"
    LIVE = "live"
    OPENPI = "openpi"
    WORLD = "world"
    VIDEO = "video"
    OPENAI = "openai"


@dataclass(frozen=True, slots=True)
class Server:
    """Where the server listens and whom it lets in."""

    host: str = "127.0.0.1"
    port: int = 8765
    """0 takes a free one."""
    openpi_port: int | None = None
    """A port of its own for OpenPI clients, which connect to the root path; None leaves them their path on `port`."""
    metrics_port: int | None = None
    """A port of its own for /metrics; None leaves it on `port`."""
    api_keys: Mapping[str, str] = field(default_factory=lambda: NO_TEXTS, repr=False)
    """Label -> key. A session belongs to the label that opened it."""
    origins: tuple[str, ...] = ()
    """Browser origins that may connect beside the server's own."""
    hosts: tuple[str, ...] = ()
    """Host header values that are accepted beside loopback names and `host`."""
    doors: tuple[Door, ...] = tuple(Door)


@dataclass(frozen=True, slots=True)
class StageDeploy:
    """What a deploy file says about a stage; None where it says nothing."""

    at: Position = NOWHERE
    engine: str | None = None
    options: Mapping[str, Scalar] = field(default_factory=lambda: NO_META)
    bytes_per_session: int | None = None
    step_s: float | None = None
    replicas: int | None = None
    parallel: int | None = None
    devices: tuple[str, ...] | None = None
    threads: int | None = None
    environment: Mapping[str, str] | None = None
    balance: Balance | None = None


@dataclass(frozen=True, slots=True)
class EdgeDeploy:
    """What a deploy file says about an edge; None where it says nothing."""

    at: Position = NOWHERE
    handover: Handover | None = None
    connector: Connector | None = None
    credits: int | None = None


@dataclass(frozen=True, slots=True)
class PipelineDeploy:
    """What a deploy file says about a pipeline."""

    name: str
    """Its name in the registry, or a model type."""
    at: Position = NOWHERE
    max_sessions: int | None = None
    max_bytes: int | None = None
    max_duty_permille: int | None = None
    stages: Mapping[str, StageDeploy] = field(default_factory=lambda: MappingProxyType({}))
    edges: Mapping[str, EdgeDeploy] = field(default_factory=lambda: MappingProxyType({}))
    fuse: tuple[tuple[str, ...], ...] | None = None
    """Groups of stages that share a worker; None leaves the pipeline's own grouping, () fuses nothing."""


@dataclass(frozen=True, slots=True)
class Deploy:
    """A deploy file, read and checked in itself. Whether it fits the pipelines is the plan's business."""

    pipelines: tuple[PipelineDeploy, ...]
    server: Server = field(default_factory=Server)
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def of(cls, *pipelines: str) -> "Deploy":
        """These pipelines with every default."""
        return cls(tuple(PipelineDeploy(name) for name in pipelines))


def load(path: Path, environment: Mapping[str, str]) -> Deploy:
    """Read a deploy file. `environment` is where `env:NAME` keys are looked up. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(Position(str(path)), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(Position(str(path)), "is not UTF-8") from None
    return loads(text, str(path), environment)


def loads(text: str, file: str, environment: Mapping[str, str]) -> Deploy:
    """Read a deploy file from its text; `file` is its name in complaints. Raises ConfigError."""
    root = parse(text, file)
    found = root.fields(("server", "limits", "pipelines"))
    if "pipelines" not in found:
        raise root.refuse("pipelines: missing; it says what is served")
    pipelines = tuple(_pipeline(name, cursor) for name, cursor in found["pipelines"].entries())
    if not pipelines:
        raise found["pipelines"].refuse("expected at least one pipeline")
    return Deploy(
        pipelines,
        _server(found["server"], environment) if "server" in found else Server(),
        _limits(found["limits"]) if "limits" in found else Limits(),
    )


def _server(cursor: Cursor, environment: Mapping[str, str]) -> Server:
    found = cursor.fields([one.name for one in fields(Server)])
    default = Server()
    server = Server(
        host=found["host"].text() if "host" in found else default.host,
        port=found["port"].port() if "port" in found else default.port,
        openpi_port=found["openpi_port"].port() if "openpi_port" in found else None,
        metrics_port=found["metrics_port"].port() if "metrics_port" in found else None,
        api_keys=_keys(found["api_keys"], environment) if "api_keys" in found else NO_TEXTS,
        origins=found["origins"].texts() if "origins" in found else (),
        hosts=found["hosts"].texts() if "hosts" in found else (),
        doors=tuple(item.choice(Door) for item in found["doors"].items()) if "doors" in found else default.doors,
    )
    _no_twin_ports(found, server)
    if not server.api_keys and not is_loopback(server.host):
        raise found["host"].refuse(f"{server.host!r} is reachable from other machines: that takes server.api_keys")
    return server


def _no_twin_ports(found: Mapping[str, Cursor], server: Server) -> None:
    taken: dict[int, str] = {}
    for name, port in (
        ("port", server.port),
        ("openpi_port", server.openpi_port),
        ("metrics_port", server.metrics_port),
    ):
        if not port:
            continue
        if port in taken:
            raise found[name].refuse(f"port {port} is taken by server.{taken[port]}")
        taken[port] = name


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address; names other than localhost count as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _keys(cursor: Cursor, environment: Mapping[str, str]) -> Mapping[str, str]:
    keys: dict[str, str] = {}
    for label, value in cursor.entries():
        key = value.text()
        if key.startswith("env:"):
            variable = key.removeprefix("env:")
            key = environment.get(variable, "")
            if not key:
                raise value.refuse(f"the environment variable {variable} is not set")
        if key in keys.values():
            raise value.refuse("is the key of another label too")
        keys[label] = key
    return MappingProxyType(keys)


def _limits(cursor: Cursor) -> Limits:
    whole: dict[str, int] = {}
    real: dict[str, float] = {}
    names = {one.name: one.type for one in fields(Limits)}
    found = cursor.fields(names)
    for name, value in found.items():
        if names[name] is float:
            real[name] = value.number(0 if name in MAY_BE_ZERO else 0.001)
        elif "_bytes" in name:
            whole[name] = value.size()
        else:
            whole[name] = value.integer(0 if name in MAY_BE_ZERO else 1, 2**31 - 1)
    limits = Limits(**whole, **real)  # type: ignore[arg-type]  # names come from the dataclass itself
    if limits.max_age_warning_s >= limits.max_age_s:
        where = found.get("max_age_warning_s") or found["max_age_s"]
        raise where.refuse("max_age_warning_s must be less than max_age_s")
    return limits


def _pipeline(name: str, cursor: Cursor) -> PipelineDeploy:
    if cursor.node.tag.endswith(":null"):
        return PipelineDeploy(name, cursor.at)  # `voice:` alone takes every default
    found = cursor.fields(("max_sessions", "max_bytes", "max_duty_permille", "stages", "edges", "fuse"))
    stages = found["stages"].entries() if "stages" in found else ()
    edges = found["edges"].entries() if "edges" in found else ()
    return PipelineDeploy(
        name,
        cursor.at,
        max_sessions=found["max_sessions"].integer(1) if "max_sessions" in found else None,
        max_bytes=found["max_bytes"].size() if "max_bytes" in found else None,
        max_duty_permille=found["max_duty_permille"].integer(1) if "max_duty_permille" in found else None,
        stages=MappingProxyType({stage: _stage(value) for stage, value in stages}),
        edges=MappingProxyType({edge.replace(" ", ""): _edge(value) for edge, value in edges}),
        fuse=_fuse(found["fuse"]) if "fuse" in found else None,
    )


def _fuse(cursor: Cursor) -> tuple[tuple[str, ...], ...]:
    groups: list[tuple[str, ...]] = []
    for item in cursor.items():
        group = item.texts()
        if len(group) < 2:
            raise item.refuse("expected at least two stages that share a worker")
        for stage in group:
            if any(stage in other for other in groups):
                raise item.refuse(f"stage {stage!r} is in another group already")
        groups.append(group)
    return tuple(groups)


def _stage(cursor: Cursor) -> StageDeploy:
    found = cursor.fields([*(one.name for one in fields(StageDeploy) if one.name != "at"), "device"])
    if "device" in found and "devices" in found:
        raise found["device"].refuse("devices are given already")
    devices: tuple[str, ...] | None = None
    if "device" in found:
        devices = (_device(found["device"]),)
    elif "devices" in found:
        devices = tuple(_device(item) for item in found["devices"].items())
        if not devices:
            raise found["devices"].refuse("expected at least one device")
    return StageDeploy(
        cursor.at,
        engine=_matching(found["engine"], ENGINE, "module:Class") if "engine" in found else None,
        options=found["options"].scalar_map() if "options" in found else NO_META,
        bytes_per_session=found["bytes_per_session"].size(0) if "bytes_per_session" in found else None,
        step_s=found["step_s"].number(0, 86_400) if "step_s" in found else None,
        replicas=found["replicas"].integer(1, MAX_REPLICAS) if "replicas" in found else None,
        parallel=found["parallel"].integer(1, MAX_REPLICAS) if "parallel" in found else None,
        devices=devices,
        threads=found["threads"].integer(1, 1024) if "threads" in found else None,
        environment=_environment(found["environment"]) if "environment" in found else None,
        balance=found["balance"].choice(Balance) if "balance" in found else None,
    )


def _device(cursor: Cursor) -> str:
    return _matching(cursor, DEVICE, "a device such as cpu or cuda:0")


def _matching(cursor: Cursor, pattern: re.Pattern[str], what: str) -> str:
    value = cursor.text()
    if pattern.fullmatch(value) is None:
        raise cursor.refuse(f"expected {what}, got {value!r}")
    return value


def _environment(cursor: Cursor) -> Mapping[str, str]:
    for name, value in cursor.entries():
        if VARIABLE.fullmatch(name) is None:
            raise value.refuse("expected the name of an environment variable")
    return cursor.text_map()


def _edge(cursor: Cursor) -> EdgeDeploy:
    found = cursor.fields(("handover", "connector", "credits"))
    return EdgeDeploy(
        cursor.at,
        handover=found["handover"].choice(Handover) if "handover" in found else None,
        connector=found["connector"].choice(Connector) if "connector" in found else None,
        credits=found["credits"].integer(1, 1_000_000) if "credits" in found else None,
    )
