"""When a crashed replica is started again, and when its stage is given up for a while.

    closed --crash within the budget--> closed      restart after a back-off that doubles with each crash
    closed --crash over the budget----> open        start nothing, refuse new sessions
    open   --time is up---------------> half open   start one replica as a probe
    half open --ready-----------------> closed      start the others too, forget the crashes
    half open --crash-----------------> open

Pure: times come in as monotonic nanoseconds and go out as what to do; the pool owns the timers.
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from omni_live.sessions.limits import Limits

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000


class Breaker(StrEnum):
    """Whether a pool's crashes allow another start."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class Restart:
    """Start a replacement at `at_ns`."""

    at_ns: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Start nothing until `until_ns`, then one probe."""

    until_ns: int


class Supervision:
    """The crash record of one pool."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._crashes: deque[int] = deque(maxlen=limits.restarts + 1)
        self._until_ns = 0
        self.breaker = Breaker.CLOSED

    def crashed(self, now_ns: int) -> Restart | GiveUp:
        """A replica ended that was not told to."""
        window_ns = int(self._limits.restart_window_s * NS_PER_S)
        while self._crashes and self._crashes[0] <= now_ns - window_ns:
            self._crashes.popleft()
        self._crashes.append(now_ns)
        if self.breaker is Breaker.OPEN:
            return GiveUp(self._until_ns)
        if self.breaker is Breaker.HALF_OPEN or len(self._crashes) > self._limits.restarts:
            self.breaker = Breaker.OPEN
            self._until_ns = now_ns + int(self._limits.breaker_s * NS_PER_S)
            return GiveUp(self._until_ns)
        return Restart(now_ns + self._backoff_ns())

    def probing(self) -> None:
        """The open breaker's time is up and a probe is being started."""
        self.breaker = Breaker.HALF_OPEN

    def recovered(self) -> bool:
        """A replica is ready; True where it was the probe and the others may be started again."""
        if self.breaker is not Breaker.HALF_OPEN:
            return False
        self.breaker = Breaker.CLOSED
        self._crashes.clear()
        return True

    def retry_after_s(self, now_ns: int) -> float:
        """When asking again makes sense: the breaker's rest, or the next back-off."""
        if self.breaker is Breaker.OPEN:
            return max(self._until_ns - now_ns, 0) / NS_PER_S
        return self._backoff_ns() / NS_PER_S

    def _backoff_ns(self) -> int:
        doublings = max(len(self._crashes) - 1, 0)
        return min(self._limits.restart_backoff_ms << doublings, self._limits.restart_backoff_cap_ms) * NS_PER_MS
