"""What /metrics says. Labels are names of pipelines, stages, states and stable codes: nothing a client can invent."""

import time
from collections.abc import Iterable, Iterator
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from omni_live.engines.contract import Load

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_TURN: Final = "turn_"
_REFUSED: Final = "refused_"


class Standing(Protocol):
    """Where the numbers come from that are counted when somebody asks."""

    def sessions(self) -> Iterable[tuple[str, str, int]]:
        """(pipeline, state, how many)."""

    def replicas(self) -> Iterable[tuple[str, str, str, int]]:
        """(pipeline, stage, state, how many)."""

    def loads(self) -> Iterable[tuple[str, str, Load]]:
        """(pipeline, stage, what its replicas reported last, added up)."""

    def slots_taken(self) -> int: ...

    def waiting(self) -> int:
        """Opens that wait for admission."""


class Metrics:
    """The server's counters: a `Counters` of the runtime, a `Meter` of the doors."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._turns = Counter("omni_live_turns", "Turns that ended.", ["outcome"], registry=self._registry)
        self._refused = Counter("omni_live_refused", "Requests refused.", ["code"], registry=self._registry)
        self._events = Counter("omni_live_events", "Whatever else is counted.", ["event"], registry=self._registry)
        self._dropped = Counter("omni_live_dropped", "Frames dropped by policy.", ["reason"], registry=self._registry)
        self._lost = Counter(
            "omni_live_connections_ended", "Connections the server ended.", ["reason"], registry=self._registry
        )
        self._fences = Counter("omni_live_fence_raises", "Fences raised.", registry=self._registry)
        self._content = Counter("omni_live_content_bytes", "Content handed to sockets.", registry=self._registry)
        self._outbox = Gauge("omni_live_outbox_bytes", "Bytes that wait in outboxes.", registry=self._registry)
        self._handed = Gauge(
            "omni_live_last_content_handed_seconds",
            "Monotonic time at which content was last handed to a socket.",
            registry=self._registry,
        )
        self._handed_at = 0.0
        self._handed.set_function(lambda: self._handed_at)

    def watch(self, standing: Standing) -> None:
        """Show these numbers, too."""
        self._registry.register(_Standings(standing))

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def count(self, name: str, amount: int = 1) -> None:
        if name.startswith(_TURN):
            self._turns.labels(name.removeprefix(_TURN)).inc(amount)
        elif name.startswith(_REFUSED):
            self._refused.labels(name.removeprefix(_REFUSED)).inc(amount)
        else:
            self._events.labels(name).inc(amount)

    def fences_raised(self, count: int) -> None:
        self._fences.inc(count)

    # -- protocols.websocket.Meter -----------------------------------------------------------------------------------

    def content_handed(self, nbytes: int) -> None:
        self._handed_at = time.monotonic()
        self._content.inc(nbytes)

    def dropped(self, reason: str, count: int = 1) -> None:
        self._dropped.labels(reason).inc(count)

    def outbox(self, change: int) -> None:
        self._outbox.inc(change)

    def connection_lost(self, why: str) -> None:
        self._lost.labels(why).inc()


class _Standings:
    """A prometheus collector over a `Standing`."""

    def __init__(self, standing: Standing) -> None:
        self._standing = standing

    def collect(self) -> Iterator[Metric]:
        sessions = GaugeMetricFamily("omni_live_sessions", "Sessions.", labels=["pipeline", "state"])
        for pipeline, state, count in self._standing.sessions():
            sessions.add_metric([pipeline, state], count)
        yield sessions
        replicas = GaugeMetricFamily("omni_live_replicas", "Replicas.", labels=["pipeline", "stage", "state"])
        for pipeline, stage, state, count in self._standing.replicas():
            replicas.add_metric([pipeline, stage, state], count)
        yield replicas
        yield from self._loads()
        slots = GaugeMetricFamily("omni_live_slots_taken", "Rows of the fence table that a session has.")
        slots.add_metric([], self._standing.slots_taken())
        yield slots
        waiting = GaugeMetricFamily("omni_live_admission_waiting", "Opens that wait for admission.")
        waiting.add_metric([], self._standing.waiting())
        yield waiting

    def _loads(self) -> Iterator[Metric]:
        where = ["pipeline", "stage"]
        sessions = GaugeMetricFamily("omni_live_stage_sessions", "Sessions that a stage has open.", labels=where)
        turns = GaugeMetricFamily("omni_live_stage_turns", "Turns that a stage has under way.", labels=where)
        queue = GaugeMetricFamily("omni_live_stage_queue", "Work that waits in a stage.", labels=where)
        used = GaugeMetricFamily("omni_live_stage_bytes", "What a stage keeps for its sessions.", labels=where)
        for pipeline, stage, load in self._standing.loads():
            sessions.add_metric([pipeline, stage], load.sessions)
            turns.add_metric([pipeline, stage], load.turns)
            queue.add_metric([pipeline, stage], load.queued)
            used.add_metric([pipeline, stage], load.bytes_used)
        yield from (sessions, turns, queue, used)
