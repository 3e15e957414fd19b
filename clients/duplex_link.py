"""What a duplex client must remember to lose nothing over a dropped socket, without any I/O.

The rules, in both directions: what was sent is kept until the server says that it took it, and after a resume
everything behind the server's count goes out again under its old number; what comes in is taken once, by its number.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

ENTRY_BYTES = 96
"""What an event counts for in the buffer beside its sound."""


class BufferFull(Exception):
    """The input buffer is full of events that must not be lost."""


@dataclass(frozen=True, slots=True)
class Entry:
    event: Mapping[str, object]
    cost: int
    """Bytes it counts for."""
    sound: bool
    """Microphone audio, which may be dropped when there is no room, the oldest first."""
    number: int = 0
    """Its input_seq; 0 until it is first handed to a socket."""

    def numbered(self, number: int) -> "Entry":
        return Entry({**self.event, "input_seq": number}, self.cost, self.sound, number)


@dataclass(slots=True)
class Outbound:
    """Numbers client input and keeps it until the server took it.

    Two bounds of `max_bytes` each: on what was sent and is not acknowledged (reached: nothing new is sent), and on
    what waits to be sent (reached: the oldest waiting sound goes). Waiting events have no number yet, so that nothing
    dropped ever leaves a hole which the server would ask for.
    """

    max_bytes: int
    last: int = 0
    """The last number given out."""
    waiting_bytes: int = 0
    sent_bytes: int = 0
    resent: int = 0
    """Events that went out more than once."""
    _waiting: deque[Entry] = field(default_factory=deque)
    _sent: deque[Entry] = field(default_factory=deque)
    _again: deque[Entry] = field(default_factory=deque)

    def put(self, event: Mapping[str, object], nbytes: int, *, sound: bool) -> int:
        """Takes an event of `nbytes` of content; returns the bytes of sound that were dropped to make room.

        Raises BufferFull where only events are waiting that must not be dropped.
        """
        entry = Entry(event, nbytes + ENTRY_BYTES, sound)
        dropped = 0
        while self.waiting_bytes + entry.cost > self.max_bytes:
            oldest = next((index for index, waiting in enumerate(self._waiting) if waiting.sound), None)
            if oldest is None:
                if sound:
                    return dropped + nbytes
                raise BufferFull
            dropped += self._drop(oldest)
        self._waiting.append(entry)
        self.waiting_bytes += entry.cost
        return dropped

    def has_room(self, nbytes: int) -> bool:
        """Whether as many bytes of sound can be taken without dropping any."""
        return self.waiting_bytes + nbytes + ENTRY_BYTES <= self.max_bytes

    def _drop(self, index: int) -> int:
        cost = self._waiting[index].cost
        del self._waiting[index]
        self.waiting_bytes -= cost
        return cost - ENTRY_BYTES

    def take(self) -> Mapping[str, object] | None:
        """The next event for the socket; None where there is none or too much is unacknowledged."""
        if self._again:
            entry = self._again.popleft()
            self.resent += 1
        elif self._waiting and self.sent_bytes < self.max_bytes:
            self.last += 1
            entry = self._waiting.popleft().numbered(self.last)
            self.waiting_bytes -= entry.cost
            self.sent_bytes += entry.cost
        else:
            return None
        self._sent.append(entry)
        return entry.event

    def acknowledged(self, number: int) -> None:
        """The server took everything up to `number`."""
        for entries in (self._sent, self._again):
            while entries and entries[0].number <= number:
                self.sent_bytes -= entries.popleft().cost

    def rewind(self, number: int) -> None:
        """The server took everything up to `number` and nothing after it: that goes out again."""
        self.acknowledged(number)
        self._again = self._sent + self._again
        self._sent = deque()


@dataclass(slots=True)
class Inbound:
    """Takes each numbered server event once, and says when to acknowledge."""

    every: int = 16
    """So many events behind, an acknowledgement is due at once."""
    seen: int = 0
    """The last server_event_seq that was taken."""
    duplicates: int = 0
    _told: int = 0
    _response_id: str = ""
    _sound_end: int = 0

    def admits(self, number: int) -> bool:
        """Whether an event is new. Number 0: it has none, it is about the connection. Skipped numbers are void."""
        if number == 0:
            return True
        if number <= self.seen:
            self.duplicates += 1
            return False
        self.seen = number
        return True

    def admits_sound(self, number: int, response_id: str, start: int, samples: int) -> bool:
        """Whether a piece of a reply's sound is new.

        Of a long piece that went out in several frames only the last has a number; a socket that drops between them
        brings the others once more.
        """
        if response_id != self._response_id:
            self._response_id, self._sound_end = response_id, 0
        if number == 0 and 0 <= start < self._sound_end:
            self.duplicates += 1
            return False
        self._sound_end = max(self._sound_end, start + samples)
        return True

    @property
    def behind(self) -> bool:
        return self.seen > self._told

    @property
    def due(self) -> bool:
        return self.seen - self._told >= self.every

    def acknowledge(self) -> int:
        """The number to send."""
        self._told = self.seen
        return self.seen
