"""The one contract of all engines.

An engine is synchronous and belongs to one runner, which is its only caller (one thread, or the event loop for
engines that are `inline`). Between any two calls of `step` the runner reads the fence table and drops stale turns,
so a step is the unit of cancellation: a token batch, a denoising step, a codec frame, one clause.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from omni_live.sessions.inputs import Outcome
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.stamp import SessionKey, Stamp


@dataclass(frozen=True, slots=True)
class Load:
    """What a stage's replica measures of itself; admission and balancing read it."""

    sessions: int
    turns: int
    queued: int
    bytes_used: int
    bytes_cap: int
    """0 where the stage keeps nothing per session."""

    def plus(self, other: "Load") -> "Load":
        return Load(
            self.sessions + other.sessions,
            self.turns + other.turns,
            self.queued + other.queued,
            self.bytes_used + other.bytes_used,
            self.bytes_cap + other.bytes_cap,
        )


class Turn(Protocol):
    """A turn as a stage's engine sees it; made by the runner, lives from `begin` until `finish` or `drop`."""

    stamp: Stamp
    session: SessionKey
    params: Mapping[str, Scalar]

    def take(self) -> Payload | None:
        """The next chunk of the turn's input, None where none waits. Taking gives the producer its credit back.

        The payload's body may lie in shared memory: it is valid until the next `take` of this turn.
        """

    def waiting(self) -> int:
        """Chunks that `take` would give."""

    def exhausted(self) -> bool:
        """True once the input is complete and everything of it was taken."""

    def room(self) -> int:
        """Chunks that `emit` may send now, the least over all receivers."""

    def emit(self, payload: Payload) -> None:
        """Send a chunk to every receiver. An error where `room()` is 0."""

    def finish(self, outcome: Outcome = Outcome.DONE, reason: str = "") -> None:
        """The stage's part is over; an INCOMPLETE of a producer is passed on by the runner as the reason downstream."""

    def upstream(self) -> tuple[Outcome, str]:
        """How the producers ended, once `exhausted()`."""


class Host(Protocol):
    """What a runner offers its engine."""

    def find(self, session: SessionKey, payload: Payload) -> None:
        """Report something about a session's input or state; it reaches the session as StageFound."""

    def wake(self) -> None:
        """Thread-safe: there is work, call `step` again (for engines with helper threads of their own)."""

    def now(self) -> int:
        """Monotonic nanoseconds."""

    def wake_at(self, at_ns: int) -> None:
        """Call `step` at that time or soon after, if nothing else wakes it before."""


class EngineError(Exception):
    """What an engine may raise without taking its worker down. `code` is stable and reaches the client."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class TurnError(EngineError):
    """One turn cannot go on; from any call. The runner reports it as FAILED and drops it; others are unharmed."""

    def __init__(self, turn: Turn, code: str = "stage_error") -> None:
        super().__init__(code)
        self.turn = turn


class SessionError(EngineError):
    """What was asked about a session cannot be done (open, listen, fork, snapshot, restore); its state is as before."""

    def __init__(self, session: SessionKey, code: str = "stage_error") -> None:
        super().__init__(code)
        self.session = session


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """A stage's options from the registry and the deploy file; the engine's constructor reads and checks them."""

    values: Mapping[str, Scalar]
    replica: int = 0
    """Number of the worker that it runs in; 0 outside of one."""


class Engine(Protocol):
    """Base of all engines; `Engine(options)` must be cheap, `load` may take long."""

    inline: bool
    """True: a step takes microseconds, run it on the event loop."""

    def load(self, host: Host) -> None:
        """Load weights and warm up; the worker is ready when it returns."""

    def open(self, session: SessionKey, params: Mapping[str, Scalar]) -> None: ...
    def close(self, session: SessionKey) -> None: ...
    def begin(self, turn: Turn) -> None: ...
    def drop(self, turn: Turn) -> None:
        """The turn is stale or aborted: forget it. Its `emit` and `finish` do nothing from now on."""

    def listen(self, session: SessionKey, payload: Payload) -> None:
        """A session-addressed payload: client audio, a command about it, a context to cut the state to."""

    def step(self) -> bool:
        """Do one unit of work, most urgent deadline first; False where there is nothing to do until woken."""

    def fork(self, session: SessionKey, into: SessionKey) -> None: ...
    def snapshot(self, session: SessionKey) -> Payload: ...
    def restore(self, session: SessionKey, payload: Payload) -> None: ...
    def load_now(self) -> Load: ...
    def shut(self) -> None:
        """Free what must be freed before the process ends."""
