"""The one place where a client waits. Everything else is told the time, so tests run on a clock of their own."""

import asyncio
import time
from typing import Protocol

MS = 1_000_000
"""Nanoseconds in a millisecond."""
S = 1_000_000_000
"""Nanoseconds in a second."""


class Clock(Protocol):
    """Monotonic time in nanoseconds."""

    def now_ns(self) -> int: ...

    async def sleep_until_ns(self, at_ns: int) -> None:
        """Returns at `at_ns` or later; lets other tasks run once, also if that is past."""


class MonotonicClock:
    """The machine's."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    async def sleep_until_ns(self, at_ns: int) -> None:
        await asyncio.sleep(max(0.0, (at_ns - time.monotonic_ns()) / S))
