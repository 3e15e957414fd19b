"""A hand-cranked runner for one engine: fake turns and a fake host, so that engines can be tested without a worker."""

from collections import deque
from collections.abc import Mapping

from omni_live.engines.contract import Engine
from omni_live.sessions.inputs import Outcome
from omni_live.sessions.payload import NO_META, Payload, Scalar
from omni_live.sessions.stamp import SessionKey, Stamp


class FakeTurn:
    """One turn; `receiver` gets what is emitted, as a runner would pass it on."""

    def __init__(self, stamp: Stamp, params: Mapping[str, Scalar] = NO_META, room: int = 1000) -> None:
        self.stamp = stamp
        self.session = stamp.session
        self.params = params
        self.inbox: deque[Payload] = deque()
        self.complete = False
        self.sent: list[Payload] = []
        self.credit = room
        self.ended: tuple[Outcome, str] | None = None
        self.receiver: FakeTurn | None = None

    def take(self) -> Payload | None:
        return self.inbox.popleft() if self.inbox else None

    def waiting(self) -> int:
        return len(self.inbox)

    def exhausted(self) -> bool:
        return self.complete and not self.inbox

    def room(self) -> int:
        return self.credit

    def emit(self, payload: Payload) -> None:
        assert self.credit > 0
        self.credit -= 1
        self.sent.append(payload)
        if self.receiver is not None:
            self.receiver.inbox.append(payload)

    def finish(self, outcome: Outcome = Outcome.DONE, reason: str = "") -> None:
        assert self.ended is None
        self.ended = (outcome, reason)
        if self.receiver is not None:
            self.receiver.complete = True

    def upstream(self) -> tuple[Outcome, str]:
        return (Outcome.DONE, "")


class FakeHost:
    def __init__(self) -> None:
        self.found: list[tuple[SessionKey, Payload]] = []
        self.woken = 0

    def find(self, session: SessionKey, payload: Payload) -> None:
        self.found.append((session, payload))

    def wake(self) -> None:
        self.woken += 1

    def now(self) -> int:
        return 0

    def wake_at(self, at_ns: int) -> None:
        """Nothing of what is tested here waits for a time."""


def run(*engines: Engine, most: int = 10_000) -> int:
    """Step the engines in turn until none has anything to do; the number of steps."""
    steps = 0
    while sum(engine.step() for engine in engines):
        steps += 1
        assert steps < most
    return steps
