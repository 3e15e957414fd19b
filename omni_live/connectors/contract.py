"""The one contract of all connectors, and their errors.

ConnectorError
├── ArenaFull         resource_exhausted: no room now; a release makes some
├── ArenaUnavailable  resource_exhausted: the space could not be reserved, or never suffices for this payload
└── TicketInvalid     ticket_invalid: forged, released already, or of a segment that is gone
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import msgspec

from omni_live.sessions.payload import ArraySpec, Payload, Scalar
from omni_live.sessions.stamp import SessionKey


class ConnectorError(Exception):
    """A connector could not do what was asked. Its text stays in this process; peers see `code`."""

    code: ClassVar[str] = "connector_error"


class ArenaFull(ConnectorError):
    """There is no room for the payload until something is released. Nobody waits inside a connector."""

    code = "resource_exhausted"


class ArenaUnavailable(ConnectorError):
    """The payload is larger than all of the arena, or the arena's space could not be reserved (ENOSPC)."""

    code = "resource_exhausted"


class TicketInvalid(ConnectorError):
    """The ticket does not name a payload that lies here: forged, released before, or its owner is gone."""

    code = "ticket_invalid"


class Key(NamedTuple):
    """Whose a payload is, so that it can be swept."""

    session: SessionKey
    epoch: int
    holder: int = 0
    """The worker that gets the ticket and releases it."""


class Ticket(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Names a payload's bytes where they lie; everything else of the payload travels in the ticket itself."""

    segment: int
    offset: int
    nbytes: int
    generation: int
    """Never the same twice in one segment, and stored beside the bytes: a stale ticket does not match."""
    kind: str
    meta: dict[str, Scalar]
    arrays: tuple[ArraySpec, ...]
    owner: int = 0
    """0 where the bytes lie with whoever sent the ticket; else with somebody else, who lent them to the sender."""


@dataclass(frozen=True, slots=True)
class Stats:
    tickets: int
    """Payloads that lie here now."""
    bytes_used: int
    bytes_cap: int
    """0 where nothing bounds it but the credits of its users."""
    puts: int
    refused: int
    """Puts that found no room."""


class Connector(Protocol):
    """Carries payload bytes from a producer to a receiver. Only the producer's side puts and sweeps."""

    def put(self, key: Key, payload: Payload) -> Ticket:
        """Copy the payload's body in. Raises ArenaFull or ArenaUnavailable; never blocks."""

    def get(self, ticket: Ticket) -> Payload:
        """The payload, its body valid until the release. Raises TicketInvalid."""

    def release(self, ticket: Ticket) -> None:
        """Free what the ticket names. Raises TicketInvalid, also the second time."""

    def sweep(self, session: SessionKey, below_epoch: int) -> int:
        """Free everything of the session's epochs below `below_epoch`; how many that were.

        For a caller who knows that no receiver reads these any more: their owner is closed or dead.
        """

    def stats(self) -> Stats: ...
