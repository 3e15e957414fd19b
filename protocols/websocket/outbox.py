"""What waits to be sent on one connection.

The rule it holds (G1): once a fence moved, no content of an older epoch is handed to the socket, and none that waits
here either. While the session holds its reply, no content goes out; numbered events behind held content wait with
it, because clients take a lower number after a higher one for a repetition, and unnumbered ones overtake it.
Bounded in bytes; where the bound is reached the client is too slow: everything goes, and the connection ends with
1013 so that the client can resume.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from omni_live.protocols.websocket import Meter
from omni_live.sessions.effects import Effect, Emit, Hold, RaiseFence, Release, Replace, Unhold
from omni_live.sessions.events import SessionReplaced
from omni_live.sessions.stamp import Fence, Stamp

EVENT_BYTES: Final = 256
"""What an event counts for beside its content."""

NORMAL, GOING_AWAY, POLICY, TOO_BIG, RESTART, TRY_AGAIN = 1000, 1001, 1008, 1009, 1012, 1013

CLOSE_CODES: Final[Mapping[str, int]] = {
    "close_requested": NORMAL,
    "idle": NORMAL,
    "detached": NORMAL,
    "max_age": GOING_AWAY,
    "drained": RESTART,
    "open_timeout": POLICY,
}
"""Close codes for the reasons of a Release; any other reason is the server's trouble and means: try again."""


@dataclass(frozen=True, slots=True)
class Closing:
    """The connection ends once everything that waits is sent."""

    code: int
    reason: str


class Outbox:
    """A `Mailbox` for one attachment. `wake` is called when there may be something to send."""

    def __init__(self, limit_bytes: int, meter: Meter) -> None:
        self._limit = limit_bytes
        self._meter = meter
        self._waiting: deque[Emit] = deque()
        self._bytes = 0
        self._held = False
        self._fences: dict[int, Fence] = {}
        self.closing: Closing | None = None
        self.wake: Callable[[], None] = _nobody

    @property
    def nbytes(self) -> int:
        return self._bytes

    def take(self, effects: list[Effect]) -> None:
        """Queue what the session wants sent, in order; never blocks. Nothing is taken once the end is set."""
        for effect in effects:
            if self.closing is not None:
                break
            match effect:
                case Emit():
                    self._put(effect)
                case RaiseFence():
                    self._purge(effect.fence)
                case Hold():
                    self._held = True
                case Unhold():
                    self._held = False
                case Replace():
                    self._replace()
                case Release():
                    self._held = False
                    code = CLOSE_CODES.get(effect.reason, TRY_AGAIN)
                    self.closing = Closing(code, effect.reason)
                case _:
                    pass  # the orchestrator's business
        self.wake()

    def next(self) -> Emit | None:
        """Take out the event that is to be handed to the socket now; None where there is none."""
        if not self._waiting:
            return None
        if self._held and self._waiting[0].content is not None:
            return self._overtaking()
        return self._count_out(self._waiting.popleft())

    def admits(self, content: Stamp | None) -> bool:
        """Whether content of this stamp may still be handed to the client."""
        if content is None:
            return True
        fence = self._fences.get(content.slot)
        return fence is None or fence.admits(content)

    def clear(self) -> None:
        """Forget everything: the connection is gone."""
        self._meter.outbox(-self._bytes)
        self._waiting.clear()
        self._bytes = 0

    def _put(self, emit: Emit) -> None:
        if not self.admits(emit.content):
            self._meter.dropped("fenced_content")
            return
        self._waiting.append(emit)
        cost = emit.nbytes or EVENT_BYTES
        self._bytes += cost
        self._meter.outbox(cost)
        if self._bytes > self._limit:
            self._meter.connection_lost("slow_consumer")
            self.clear()
            self.closing = Closing(TRY_AGAIN, "slow_consumer")

    def _purge(self, fence: Fence) -> None:
        self._fences[fence.slot] = fence
        kept = deque(emit for emit in self._waiting if self.admits(emit.content))
        dropped = len(self._waiting) - len(kept)
        if not dropped:
            return
        self._meter.dropped("fenced_content", dropped)
        left = sum(emit.nbytes or EVENT_BYTES for emit in kept)
        self._meter.outbox(left - self._bytes)
        self._waiting, self._bytes = kept, left

    def _replace(self) -> None:
        """Somebody else has the session now: nothing of it goes out here any more."""
        self.clear()
        self._held = False
        self._put(Emit(SessionReplaced(), 0))
        self.closing = Closing(NORMAL, "replaced")

    def _overtaking(self) -> Emit | None:
        for at, emit in enumerate(self._waiting):
            if emit.seq == 0 and emit.content is None:
                del self._waiting[at]
                return self._count_out(emit)
        return None

    def _count_out(self, emit: Emit) -> Emit:
        cost = emit.nbytes or EVENT_BYTES
        self._bytes -= cost
        self._meter.outbox(-cost)
        return emit


def _nobody() -> None:
    """Nobody waits yet."""
