"""The real clock of ports.Clock."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from omni_live.runtime.ports import Timer

_NS_PER_S: Final = 1_000_000_000


class LoopClock:
    """Monotonic time, and calls on an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    now = staticmethod(time.monotonic_ns)

    def call_at(self, at_ns: int, call: Callable[[], None]) -> Timer:
        return self._loop.call_later(max(0, at_ns - time.monotonic_ns()) / _NS_PER_S, call)
