"""Payloads handed on by reference, for receivers in the same process."""

from omni_live.connectors.contract import Key, Stats, Ticket, TicketInvalid
from omni_live.sessions.payload import Payload
from omni_live.sessions.stamp import SessionKey


class Inproc:
    """A table of payloads: `get` returns the very object that was put."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Key, Payload]] = {}
        self._puts = 0

    def put(self, key: Key, payload: Payload) -> Ticket:
        self._puts += 1
        self._held[self._puts] = (key, payload)
        return Ticket(0, 0, payload.nbytes, self._puts, payload.kind, {}, ())

    def get(self, ticket: Ticket) -> Payload:
        held = self._held.get(ticket.generation)
        if held is None:
            raise TicketInvalid(f"no payload {ticket.generation} here")
        return held[1]

    def release(self, ticket: Ticket) -> None:
        if self._held.pop(ticket.generation, None) is None:
            raise TicketInvalid(f"no payload {ticket.generation} here")

    def sweep(self, session: SessionKey, below_epoch: int) -> int:
        stale = [
            serial for serial, (key, _) in self._held.items() if key.session == session and key.epoch < below_epoch
        ]
        for serial in stale:
            del self._held[serial]
        return len(stale)

    def stats(self) -> Stats:
        used = sum(payload.nbytes for _, payload in self._held.values())
        return Stats(len(self._held), used, 0, self._puts, 0)
