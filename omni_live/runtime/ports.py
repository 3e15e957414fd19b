"""Where the orchestrator meets the world. Behind each port is asyncio in the server and a virtual clock in tests/sim.

The orchestrator and the pools are synchronous and event-driven: they are called with something that happened, call
ports in return, and never wait.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, NewType, Protocol

import msgspec

from omni_live.engines.contract import Load
from omni_live.sessions.effects import Effect
from omni_live.sessions.inputs import Outcome
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.stamp import Fence, SessionKey, Stamp

WorkerId = NewType("WorkerId", int)
CLIENT = ""
"""The receiver name that stands for the server (and so for the client) in a route."""


class Opening(NamedTuple):
    """A stage's side of a turn that its one producer opens, before it has made anything."""

    after: int
    """What the receiver's `WorkerPort.expect_turn` returned."""
    stage_index: int
    """Of the stage in its pipeline; goes into its stamps."""
    routes: "tuple[Route, ...]"


class Route(NamedTuple):
    """Where one stage's output of one turn goes. A stage has one route for each receiver."""

    receiver: str
    """A stage's name, or CLIENT."""
    worker: WorkerId
    """The worker that hosts the receiver's replica (ignored for CLIENT)."""
    credits: int
    """Chunks that may be under way before the receiver gives credit back."""
    whole: bool = False
    """Keep everything until the stage has finished; it leaves when the orchestrator says `forward`."""
    opens: Opening | None = None
    """What to open at the receiver, where the orchestrator does not open it itself."""


class End(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How a stage that hands its chunks on ended its part of a turn.

    It travels with the last chunk, from stage to stage, and reaches the server with the end of a later one: a turn
    costs the server one report, not one for each stage.
    """

    worker: WorkerId
    stage: str
    outcome: Outcome
    reason: str


class WorkerPort(Protocol):
    """One worker process as the orchestrator sees it. Calls never block and never raise for a dead worker.

    A stamp names the turn; only that of `open_turn` goes into what the stage makes and must have its index.
    """

    def open_session(self, stage: str, session: SessionKey, params: Mapping[str, Scalar]) -> None: ...
    def close_session(self, stage: str, session: SessionKey) -> None: ...
    def open_turn(
        self,
        stage: str,
        stamp: Stamp,
        params: Mapping[str, Scalar],
        routes: tuple[Route, ...],
        inputs: int,
        payload: Payload | None = None,
    ) -> None:
        """Open the stage's side of a turn; it has `inputs` producers and has all of its input when each said last.

        `payload` is all of the client's input, where the stage is the turn's entry. The stage opens at once what its
        routes say is to be opened (Route.opens), with the same `params`.
        """

    def expect_turn(self, stage: str, stamp: Stamp, client_credits: int) -> int:
        """The stage's producer opens its side of the turn; its end is reported and it is aborted like any other.

        `client_credits` are those of its route to CLIENT, 0 where it has none. Returns how many calls were made here
        before: the stage opens behind those, although its opening comes another way.
        """

    def forward(self, stage: str, stamp: Stamp, route: Route) -> None:
        """Send what a finished stage kept for a whole edge to the receiver, whose turn is open by now."""

    def feed_session(self, stage: str, session: SessionKey, payload: Payload) -> None: ...
    def abort(self, stage: str, stamp: Stamp) -> None:
        """Answered by the end of the stage's part, also where its opening has not come yet."""

    def credit(self, stage: str, stamp: Stamp, units: int) -> None:
        """The client side took `units` chunks of the stage's output."""

    def fork(self, stage: str, session: SessionKey, into: SessionKey) -> None: ...
    def snapshot(self, stage: str, session: SessionKey, ticket: int) -> None:
        """Answered by `Happenings.snapshotted(worker, stage, session, ticket, payload)`."""

    def restore(self, stage: str, session: SessionKey, payload: Payload) -> None: ...
    def drain(self) -> None: ...
    def kill(self) -> None: ...


class Happenings(Protocol):
    """What workers report; the orchestrator implements it. Every stamped report may be stale."""

    def ready(self, worker: WorkerId) -> None: ...
    def spoke(
        self,
        worker: WorkerId,
        stage: str,
        stamp: Stamp,
        payload: Payload,
        outcome: Outcome | None = None,
        reason: str = "",
        through: tuple[End, ...] = (),
    ) -> None:
        """A chunk for the session. With an `outcome` it is the stage's last, and its end is reported by this."""

    def ended(
        self,
        worker: WorkerId,
        stage: str,
        stamp: Stamp,
        outcome: Outcome,
        reason: str,
        through: tuple[End, ...] = (),
    ) -> None:
        """The stage finished or failed its part of the turn, and with it those whose ends came through it.

        Every opened stage of a turn reports it, final or not, also after an abort or when the fence made it stale
        (FAILED, "aborted"): a worker that does not within the abort deadline is taken for wedged. The first report
        counts.
        """

    def found(self, worker: WorkerId, stage: str, session: SessionKey, payload: Payload) -> None: ...
    def snapshotted(
        self, worker: WorkerId, stage: str, session: SessionKey, ticket: int, payload: Payload | None
    ) -> None: ...
    def exited(self, worker: WorkerId, reason: str) -> None: ...
    def load(self, worker: WorkerId, stage: str, load: Load) -> None: ...


class Fences(Protocol):
    """The fence table's writer."""

    def write(self, fence: Fence) -> None: ...


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """Monotonic nanoseconds and calls in the future."""

    def now(self) -> int: ...
    def call_at(self, at_ns: int, call: Callable[[], None]) -> Timer: ...


class Spawner(Protocol):
    """Starts worker processes for the pools. `Happenings.ready` or `.exited` follows."""

    def spawn(self, worker: WorkerId, role: int) -> WorkerPort:
        """Start a process for the worker `role` of the placement plan (config.plan.Plan.workers[role]).

        Returns before anything is reported: `ready` and `exited` never come from within this call.
        Ids are never used twice: a replacement has the role of the worker it replaces and an id of its own.
        """


class Mailbox(Protocol):
    """Where a session's client-facing effects go: Emit, Hold, Unhold, Replace and, at the end, Release."""

    def take(self, effects: list[Effect]) -> None: ...


class Counters(Protocol):
    """Where counts go: /metrics in the server, a dict in tests."""

    def count(self, name: str, amount: int = 1) -> None: ...


class Trace(Protocol):
    """Told every decision of the orchestrator and the pools. Simulation asserts the guarantees over it."""

    def note(self, what: str, session: SessionKey, detail: object) -> None: ...


class NoTrace:
    """Keeps nothing."""

    def note(self, what: str, session: SessionKey, detail: object) -> None:
        pass
