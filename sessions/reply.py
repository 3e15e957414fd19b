"""A reply's audio between the pipeline and the client: paced release, playback position, what was heard."""

from collections import deque
from dataclasses import dataclass, field

from omni_live.sessions.lease import SECOND
from omni_live.sessions.marks import Mark, heard_chars

ACK_EXTRAPOLATION_NS = SECOND * 3 // 10
"""How far a client's word is carried on: clients acknowledge each 250 ms, silence longer than that is a stop."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a reply: int16 mono, with the transcript that begins in it and its marks."""

    pcm: bytes
    text: str
    marks: tuple[Mark, ...]

    @property
    def samples(self) -> int:
        return len(self.pcm) // 2


@dataclass(slots=True)
class Reply:
    """Counts in samples of the pipeline's output rate from the reply's first sample."""

    rate_hz: int
    lead_ms: int
    waiting: deque[Chunk] = field(default_factory=deque)
    received: int = 0
    released: int = 0
    text: str = ""
    """The transcript of what was released."""
    marks: list[Mark] = field(default_factory=list)
    started_ns: int | None = None
    acked: int | None = None
    acked_ns: int = 0

    def receive(self, chunk: Chunk) -> None:
        self.waiting.append(chunk)
        self.received += chunk.samples

    def release_ns(self, now: int) -> int | None:
        """When the next chunk may go out (`now` or earlier: at once).

        None where none waits, or where the position, as the client told it, stands still before that.
        """
        if not self.waiting:
            return None
        if self.started_ns is None or self.lead_ms == 0:
            return now
        ahead = self.released - self.played(now) - self.lead_ms * self.rate_hz // 1000
        if ahead <= 0:
            return now
        at = now - (-ahead * SECOND // self.rate_hz)
        return None if self.acked is not None and at > self.acked_ns + ACK_EXTRAPOLATION_NS else at

    def release(self, now: int) -> Chunk:
        """Take the next chunk as sent."""
        chunk = self.waiting.popleft()
        if self.started_ns is None:
            self.started_ns = now
        self.released += chunk.samples
        self.text += chunk.text
        self.marks.extend(chunk.marks)
        return chunk

    def ack(self, samples: int, now: int) -> None:
        """The client has played so much. More than was sent is taken as all of it; before the first chunk: nothing."""
        if self.started_ns is None:
            return
        self.acked = max(0, min(samples, self.released))
        self.acked_ns = now

    def played(self, now: int) -> int:
        """The playback position: the client's word carried on by real time, else real time since the first chunk."""
        if self.started_ns is None:
            return 0
        if self.acked is None:
            return min(self.released, (now - self.started_ns) * self.rate_hz // SECOND)
        since = min(now - self.acked_ns, ACK_EXTRAPOLATION_NS)
        return min(self.released, self.acked + since * self.rate_hz // SECOND)

    def audible(self, now: int) -> bool:
        """Whether the client may still be playing something of it."""
        return self.started_ns is not None and self.played(now) < self.released

    def heard(self, samples: int) -> str:
        """The transcript up to the last word that had been spoken after `samples`."""
        if samples >= self.released:
            return self.text
        return self.text[: heard_chars(self.marks, samples, self.text)]
