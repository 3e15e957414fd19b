"""What a worker's runner has to say since it was last asked, and the shared memory that larger payloads travel in.

Belongs to the runner's thread. The runner writes messages in the order in which they happen; the worker's event loop
takes them all at once and writes them to sockets.
"""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from omni_live.connectors.contract import ConnectorError, Key, Stats, Ticket
from omni_live.connectors.shm import Arena, Reader, segment_path
from omni_live.runtime.layout import owner_name, producer_name
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

FREE_WAIT_NS = 5_000_000
"""A ticket is given back with the next message that goes the same way, alone after so long."""
FREE_SHARE = 8
"""... or at once, where a part of an arena as large as one in so many waits to be given back."""

_Hold = tuple[int, Freed]
"""Something that we hold: whom it came from, and what it is called there."""
Edge = tuple[str, str]
"""Producing stage, receiving stage."""


class Outbox:
    """Messages on their way out, arenas of our own, readers of others'."""

    def __init__(
        self,
        directory: Path,
        worker: WorkerId,
        arena_bytes: int,
        *,
        free_wait_ns: int = FREE_WAIT_NS,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.batch = 0
        """Counts `take`: what was said in an earlier batch is gone and cannot be added to."""
        self.counts: Counter[str] = Counter()
        self.worker = worker
        self._directory = directory
        self._arena_bytes = arena_bytes
        self._said: list[tuple[int, Message]] = []
        self._free_wait_ns = free_wait_ns
        self._now = now
        self._freed: dict[int, list[Freed]] = {}
        self._freed_bytes = 0
        self.frees_ns = 0
        """When `take` must be called for what is to be given back; 0 for never."""
        self._arenas: list[Arena] = []
        self._segments: dict[Edge, int] = {}
        self._readers: dict[tuple[int, int], Reader] = {}
        """By who sends the tickets, and whose arenas they name."""
        self._lent: dict[tuple[Freed, int], tuple[_Hold, int]] = {}
        """What was lent on: what the borrower will name, and who that is; what it is to us, and its bytes."""
        self._holds: dict[_Hold, int] = {}
        """How many hold what was lent on, we ourselves included."""
        self._spoilt: set[_Hold] = set()
        """Of these, what somebody died with."""

    def take(self) -> list[tuple[int, Message]]:
        """Everything said since the last call, as (target, message)."""
        if self._freed:
            self._give_back()
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

    def lend(self, source: int, ticket: Ticket, receiver: str, worker: int, payload: Payload) -> Ticket | None:
        """A ticket for a payload whose body is what `ticket` of `source` names, as it lies there.

        None where that worker has it already: what it gives back could not be told apart.
        """
        holder = SERVER if receiver == CLIENT else worker
        owner = self._owner(source, ticket)
        lent = (Freed(ticket.segment, ticket.offset, ticket.generation, owner), holder)
        if lent in self._lent:
            return None
        hold = (source, freed(ticket))
        self._lent[lent] = (hold, ticket.nbytes)
        self._holds[hold] = self._holds.get(hold, 1) + 1
        where = (ticket.segment, ticket.offset, ticket.nbytes, ticket.generation)
        return Ticket(*where, payload.kind, dict(payload.meta), payload.arrays, owner)

    def release(self, source: int, tickets: list[Freed]) -> None:
        """The holder `source` is done with these tickets of ours."""
        for name in tickets:
            try:
                if name.owner:
                    self._returned(name._replace(spoilt=False), source, name.spoilt)
                else:
                    self._arenas[name.segment].free(name.offset, name.generation, source)
                    if name.spoilt:
                        self._retire(name.segment)
            except (ConnectorError, LookupError):
                self.counts["tickets_invalid"] += 1

    def forget(self, holder: int) -> int:
        """A holder is dead: free all it had. It may have lent it to others, so that it is never written again."""
        gone = 0
        for segment, arena in enumerate(self._arenas):
            had = arena.forget(holder)
            if had:
                gone += had
                self._retire(segment)
        lent = [name for name, borrower in self._lent if borrower == holder]
        for name in lent:
            self._returned(name, holder, spoilt=True)
        return gone + len(lent)

    @property
    def tickets(self) -> int:
        """Payloads of ours, or lent on by us, that somebody still reads, or will."""
        return sum(arena.stats().tickets for arena in self._arenas) + len(self._lent)

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
        key = (source, ticket.owner)
        reader = self._readers.get(key)
        if reader is None:
            reader = self._readers[key] = Reader(self._directory, owner_name(self._owner(source, ticket)))
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
        self._let_go((source, freed(ticket)), ticket.nbytes)

    def close_reader(self, source: int) -> None:
        """A producer is dead. Views that were given out keep their mapping until they are dropped."""
        self._readers = {key: reader for key, reader in self._readers.items() if key[0] != source}

    def _owner(self, source: int, ticket: Ticket) -> int:
        return ticket.owner or (-self.worker if source == SERVER else source)

    def _retire(self, segment: int) -> None:
        """The arena takes nothing new; its edge gets another one."""
        self._segments = {edge: of for edge, of in self._segments.items() if of != segment}
        self._arenas[segment].retire()

    def _returned(self, name: Freed, borrower: int, spoilt: bool) -> None:
        hold, nbytes = self._lent.pop((name, borrower))
        if spoilt:
            self._spoilt.add(hold)
        self._let_go(hold, nbytes)

    def _let_go(self, hold: _Hold, nbytes: int) -> None:
        """One of those who hold it does no more; its owner hears of the last one."""
        left = self._holds.pop(hold, 1) - 1
        if left:
            self._holds[hold] = left
            return
        source, name = hold
        if hold in self._spoilt:
            self._spoilt.discard(hold)
            name = name._replace(spoilt=True)
        if not self._freed:
            self.frees_ns = self._now() + self._free_wait_ns
        self._freed.setdefault(source, []).append(name)
        self._freed_bytes += nbytes

    def _give_back(self) -> None:
        """Say which tickets are free, to whom something is said anyway, or to all where it is time."""
        everybody = self._freed_bytes * FREE_SHARE >= self._arena_bytes or self._now() >= self.frees_ns
        lanes = {target if target >= 0 else SERVER: target for target, _ in self._said}
        for source in tuple(self._freed):
            if everybody or source in lanes:
                target = lanes.get(source, CONTROL if source == SERVER else source)
                self._said.append((target, Free(self._freed.pop(source))))
        if not self._freed:
            self._freed_bytes = self.frees_ns = 0
