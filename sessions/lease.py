"""The lease: a session's time-bounded right to resources. Liveness only, never mutual exclusion."""

from dataclasses import dataclass
from enum import Enum, auto

SECOND = 1_000_000_000


class Verdict(Enum):
    HOLDS = auto()
    WARN = auto()
    """The maximum age is near and nobody was told yet."""
    IDLE = auto()
    """Nothing was heard of the client for the idle time, and no turn runs."""
    GRACE_OVER = auto()
    """Detached for longer than the grace."""
    AGED = auto()
    """The maximum age is reached."""


@dataclass(slots=True)
class Lease:
    """All times are monotonic nanoseconds."""

    opened_ns: int
    idle_ns: int
    grace_ns: int
    max_age_ns: int
    warning_ns: int
    touched_ns: int = 0
    detached_ns: int | None = None
    warned: bool = False

    def __post_init__(self) -> None:
        self.touched_ns = self.opened_ns

    def touch(self, now: int) -> None:
        self.touched_ns = max(self.touched_ns, now)

    def detach(self, now: int) -> None:
        self.detached_ns = now

    def attach(self, now: int) -> None:
        self.detached_ns = None
        self.touch(now)

    @property
    def expires_ns(self) -> int:
        return self.opened_ns + self.max_age_ns

    def verdict(self, now: int, busy: bool) -> Verdict:
        """`busy` says that a turn runs: work in flight is not idleness."""
        if now >= self.expires_ns:
            return Verdict.AGED
        if self.detached_ns is not None and now >= self.detached_ns + self.grace_ns:
            return Verdict.GRACE_OVER
        if self.detached_ns is None and not busy and now >= self.touched_ns + self.idle_ns:
            return Verdict.IDLE
        if not self.warned and now >= self.expires_ns - self.warning_ns:
            return Verdict.WARN
        return Verdict.HOLDS

    def next_ns(self, busy: bool) -> int:
        """When the verdict may change next."""
        at = self.expires_ns
        if not self.warned:
            at = min(at, self.expires_ns - self.warning_ns)
        if self.detached_ns is not None:
            return min(at, self.detached_ns + self.grace_ns)
        if not busy:
            at = min(at, self.touched_ns + self.idle_ns)
        return at
