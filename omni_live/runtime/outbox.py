"""What a worker's runner has to say since it was last asked, and the shared memory that larger payloads travel in.

Belongs to the runner's thread. The runner writes messages in the order in which they happen; the worker's event loop
takes them all at once and writes them to sockets.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from omni_live.connectors.contract import ConnectorError, Key, Stats, Ticket
from omni_live.connectors.shm import Arena, Reader, segment_path
from omni_live.runtime.layout import feeder_name, producer_name
from omni_live.runtime.ports import CLIENT, WorkerId
from omni_live.runtime.wire import (
    INLINE_BYTES,
    SERVER,
    Body,
    Found,
    Free,
    Freed,
    Inline,
    Message,
    Snapshotted,
    freed,
    inline,
    unwrapped,
)
from omni_live.sessions.payload import Payload
from omni_live.sessions.stamp import SessionKey, Stamp

CONTROL = -1
MEDIA = -2
"""Where a message goes: a lane to the server, or a worker by its id."""

Edge = tuple[str, str]
"""Producing stage, receiving stage."""


class Outbox:
    """Messages on their way out, arenas of our own, readers of others'."""

    def __init__(self, directory: Path, worker: WorkerId, arena_bytes: int) -> None:
        self.batch = 0
        """Counts `take`: what was said in an earlier batch is gone and cannot be added to."""
        self.counts: Counter[str] = Counter()
        self.worker = worker
        self._directory = directory
        self._arena_bytes = arena_bytes
        self._said: list[tuple[int, Message]] = []
        self._freed: dict[int, list[Freed]] = {}
        self._arenas: list[Arena] = []
        self._segments: dict[Edge, int] = {}
        self._readers: dict[int, Reader] = {}

    def take(self) -> list[tuple[int, Message]]:
        """Everything said since the last call, as (target, message)."""
        if self._freed:
            self._said.extend((CONTROL if source == SERVER else source, Free(f)) for source, f in self._freed.items())
            self._freed = {}
        said, self._said = self._said, []
        self.batch += 1
        return said

    def say(self, target: int, message: Message) -> None:
        self._said.append((target, message))

    def find(self, stage: str, session: SessionKey, payload: Payload) -> None:
        self._said.append((MEDIA, Found(stage, session, self._to_server(stage, session, payload))))

    def snapshotted(self, stage: str, session: SessionKey, ticket: int, payload: Payload | None) -> None:
        body = None if payload is None else self._to_server(stage, session, payload)
        self._said.append((MEDIA, Snapshotted(stage, session, ticket, body)))

    # -- bytes going out

    def put(self, stage: str, receiver: str, stamp: Stamp, worker: int, payload: Payload) -> Ticket:
        """A ticket for what `stage` sends to the receiver in `worker`. Raises ArenaFull and ArenaUnavailable."""
        holder = SERVER if receiver == CLIENT else worker
        return self._arena((stage, receiver)).put(Key(stamp.session, stamp.epoch, holder), payload)

    def release(self, source: int, tickets: list[Freed]) -> None:
        """The holder `source` is done with these tickets of ours."""
        for segment, offset, generation in tickets:
            try:
                self._arenas[segment].free(offset, generation, source)
            except (ConnectorError, IndexError):
                self.counts["tickets_invalid"] += 1

    def forget(self, holder: int) -> int:
        """A holder is dead: free all it had."""
        return sum(arena.forget(holder) for arena in self._arenas)

    @property
    def tickets(self) -> int:
        """Payloads of ours that somebody still reads, or will."""
        return sum(arena.stats().tickets for arena in self._arenas)

    def stats(self) -> dict[Edge, Stats]:
        return {edge: self._arenas[segment].stats() for edge, segment in self._segments.items()}

    def _to_server(self, stage: str, session: SessionKey, payload: Payload) -> Body:
        # Findings and snapshots have no credits that could hold them back, so they never wait for room.
        if payload.nbytes <= INLINE_BYTES:
            return inline(payload)
        try:
            return self._arena((stage, CLIENT)).put(Key(session, 0, SERVER), payload)
        except ConnectorError:
            self.counts["arena_fallbacks"] += 1
            return inline(payload)

    def _arena(self, edge: Edge) -> Arena:
        segment = self._segments.get(edge)
        if segment is None:
            segment = len(self._arenas)
            path = segment_path(self._directory, producer_name(self.worker), segment)
            self._arenas.append(Arena(path, segment, self._arena_bytes))
            self._segments[edge] = segment
        return self._arenas[segment]

    # -- bytes coming in

    def open(self, source: int, ticket: Ticket) -> Payload:
        """What the ticket of `source` names, where it lies. Raises TicketInvalid."""
        reader = self._readers.get(source)
        if reader is None:
            name = feeder_name(self.worker) if source == SERVER else producer_name(source)
            reader = self._readers[source] = Reader(self._directory, name)
        return reader.get(ticket)

    def read(self, source: int, body: Body, use: Callable[[Payload], None]) -> None:
        """Let `use` see a payload that is not kept. Raises TicketInvalid."""
        if isinstance(body, Inline):
            use(unwrapped(body))
            return
        try:
            use(self.open(source, body))
        finally:
            self.free(source, body)

    def free(self, source: int, ticket: Ticket) -> None:
        self._freed.setdefault(source, []).append(freed(ticket))

    def close_reader(self, source: int) -> None:
        """A producer is dead. Views that were given out keep their mapping until they are dropped."""
        self._readers.pop(source, None)
