"""The resume journal: output not yet acknowledged, and the count of input taken. It serves reconnects only.

Output sequence numbers count from 1 without holes as they are given; fencing makes some of them void, and a resume
names the void ranges, so that a client can tell a void number from a lost one (G7).
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto

from omni_live.sessions.events import Event
from omni_live.sessions.stamp import Stamp

Range = tuple[int, int]
"""First and last, both included."""


@dataclass(slots=True)
class Entry:
    seq: int
    event: Event
    content: Stamp | None
    nbytes: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class Replay:
    """What a resuming client gets: the entries after what it has seen."""

    entries: tuple[Entry, ...]
    voids: tuple[Range, ...]
    gap: Range | None
    """Numbers that fell out of the journal before the client had them; None where nothing is missing."""
    overflowed: bool
    """The gap came from the byte limit, not from age."""


class OutputJournal:
    """Bounded by bytes and by age; what falls out unacknowledged leaves a gap that a resume can name."""

    def __init__(self, max_bytes: int, max_age_ns: int) -> None:
        self._max_bytes = max_bytes
        self._max_age_ns = max_age_ns
        self._entries: deque[Entry] = deque()
        self._voids: deque[Range] = deque()
        self._acked = 0
        self._lost_to = 0
        self._overflowed = False
        self.last = 0
        self.nbytes = 0

    def add(self, event: Event, content: Stamp | None, nbytes: int, now: int) -> int:
        """Give the event the next sequence number and keep it."""
        self.last += 1
        self._entries.append(Entry(self.last, event, content, nbytes, now))
        self.nbytes += nbytes
        self._evict(now)
        return self.last

    def ack(self, seq: int) -> None:
        """The client has everything up to `seq`; a number never given out is ignored."""
        if seq <= self._acked or seq > self.last:
            return
        self._acked = seq
        while self._entries and self._entries[0].seq <= seq:
            self.nbytes -= self._entries.popleft().nbytes
        while self._voids and self._voids[0][1] <= seq:
            self._voids.popleft()

    def fence(self, slot: int, generation: int, epoch: int) -> int:
        """Void the content stamped for this row with an older epoch; returns how many entries that were."""
        kept: deque[Entry] = deque()
        voided = 0
        for entry in self._entries:
            stamp = entry.content
            if stamp is not None and stamp.slot == slot and (stamp.generation, stamp.epoch) < (generation, epoch):
                self.nbytes -= entry.nbytes
                self._void(entry.seq)
                voided += 1
            else:
                kept.append(entry)
        if voided:
            self._entries = kept
            self._voids = deque(sorted(self._voids))
        return voided

    def replay(self, seen: int, now: int) -> Replay:
        """What comes after `seen`. Acknowledges `seen` as well; what was acknowledged beyond it is gone for good."""
        self._evict(now)
        gone = max(self._lost_to, self._acked)
        self.ack(min(seen, self.last))
        gap = (seen + 1, gone) if gone > seen else None
        voids = tuple((max(first, seen + 1), last) for first, last in merged(self._voids) if last > seen)
        return Replay(tuple(self._entries), voids, gap, self._overflowed)

    def _void(self, seq: int) -> None:
        if self._voids and self._voids[-1][1] == seq - 1:
            self._voids[-1] = (self._voids[-1][0], seq)
        else:
            self._voids.append((seq, seq))

    def _evict(self, now: int) -> None:
        oldest = now - self._max_age_ns
        while self._entries and (self.nbytes > self._max_bytes or self._entries[0].at_ns < oldest):
            self._overflowed = self.nbytes > self._max_bytes
            entry = self._entries.popleft()
            self.nbytes -= entry.nbytes
            self._lost_to = entry.seq
        while self._voids and self._voids[0][1] <= self._lost_to:
            self._voids.popleft()


def merged(ranges: deque[Range]) -> list[Range]:
    """The same numbers in as few ranges as possible; `ranges` is sorted."""
    out: list[Range] = []
    for first, last in ranges:
        if out and first <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(last, out[-1][1]))
        else:
            out.append((first, last))
    return out


class Arrival(Enum):
    NEXT = auto()
    DUPLICATE = auto()
    AHEAD = auto()
    """Something before it is missing."""


class InputJournal:
    """Counts the client's sequenced input, so that none is lost and none is taken twice (G7, G12)."""

    def __init__(self, every: int = 16, within_ns: int = 200_000_000) -> None:
        self._every = every
        self._within_ns = within_ns
        self._told = 0
        self._told_ns = 0
        self._asked_after = -1
        self.taken = 0

    def arrive(self, seq: int) -> Arrival:
        if seq == self.taken + 1:
            self.taken = seq
            self._asked_after = -1
            return Arrival.NEXT
        return Arrival.DUPLICATE if seq <= self.taken else Arrival.AHEAD

    def wants_resend(self) -> bool:
        """True once for each gap: asking again for every input behind it would flood the client."""
        if self._asked_after == self.taken:
            return False
        self._asked_after = self.taken
        return True

    def due(self, now: int) -> bool:
        """Whether an acknowledgement should go out now."""
        ahead = self.taken - self._told
        if ahead <= 0 or (ahead < self._every and now - self._told_ns < self._within_ns):
            return False
        self.told(now)
        return True

    def told(self, now: int) -> None:
        self._told = self.taken
        self._told_ns = now

    def asked_anew(self) -> None:
        """A new attachment may be asked for the same gap again."""
        self._asked_after = -1
