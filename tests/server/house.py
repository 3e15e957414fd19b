"""A server without workers: a real orchestrator over ports that do nothing, a real desk, a real port if wanted."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from omni_live.config.deploy import Deploy, Server
from omni_live.config.plan import Plan, plan
from omni_live.runtime.clock import LoopClock
from omni_live.runtime.orchestrator import Orchestrator
from omni_live.runtime.ports import Clock, Route, Timer, WorkerId
from omni_live.runtime.slots import Slots
from omni_live.server.app import Doors, http_app
from omni_live.server.auth import Gate, Keys
from omni_live.server.desk import FrontDesk
from omni_live.server.doors import models, websocket_doors
from omni_live.server.metrics import Metrics
from omni_live.server.supervise import Port, listen
from omni_live.sessions.effects import Effect, Emit
from omni_live.sessions.events import Event
from omni_live.sessions.limits import Limits
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.stamp import Fence, SessionKey, Stamp

LIMITS = Limits()


class IdleWorker:
    """A worker that takes everything and says nothing; it counts the sessions it has open."""

    def __init__(self) -> None:
        self.sessions: dict[tuple[str, SessionKey], int] = {}

    def open_session(self, stage: str, session: SessionKey, params: Mapping[str, Scalar]) -> None:
        self.sessions[stage, session] = self.sessions.get((stage, session), 0) + 1

    def close_session(self, stage: str, session: SessionKey) -> None:
        self.sessions[stage, session] -= 1
        if not self.sessions[stage, session]:
            del self.sessions[stage, session]

    def open_turn(
        self,
        stage: str,
        stamp: Stamp,
        params: Mapping[str, Scalar],
        routes: tuple[Route, ...],
        inputs: int,
        payload: Payload | None = None,
    ) -> None: ...

    def expect_turn(self, stage: str, stamp: Stamp, client_credits: int) -> int:
        return 0

    def forward(self, stage: str, stamp: Stamp, route: Route) -> None: ...
    def feed_session(self, stage: str, session: SessionKey, payload: Payload) -> None: ...
    def abort(self, stage: str, stamp: Stamp) -> None: ...
    def credit(self, stage: str, stamp: Stamp, units: int) -> None: ...
    def fork(self, stage: str, session: SessionKey, into: SessionKey) -> None: ...
    def snapshot(self, stage: str, session: SessionKey, ticket: int) -> None: ...
    def restore(self, stage: str, session: SessionKey, payload: Payload) -> None: ...
    def drain(self) -> None: ...
    def kill(self) -> None: ...


class IdleSpawner:
    def __init__(self) -> None:
        self.workers: dict[WorkerId, IdleWorker] = {}

    def spawn(self, worker: WorkerId, role: int) -> IdleWorker:
        self.workers[worker] = IdleWorker()
        return self.workers[worker]


class Rows:
    """A fence table that nobody reads."""

    def write(self, fence: Fence) -> None: ...


class HandClock:
    """Time that moves when the test says so."""

    def __init__(self) -> None:
        self._now = 1_000_000_000
        self._calls: list[tuple[int, Callable[[], None]]] = []

    def now(self) -> int:
        return self._now

    def call_at(self, at_ns: int, call: Callable[[], None]) -> Timer:
        entry = (at_ns, call)
        self._calls.append(entry)
        return _Cancel(self._calls, entry)

    def advance(self, seconds: float) -> None:
        self._now += round(seconds * 1e9)
        while due := [entry for entry in self._calls if entry[0] <= self._now]:
            self._calls.remove(due[0])
            due[0][1]()


class _Cancel:
    def __init__(self, calls: list[tuple[int, Callable[[], None]]], entry: tuple[int, Callable[[], None]]) -> None:
        self._calls = calls
        self._entry = entry

    def cancel(self) -> None:
        if self._entry in self._calls:
            self._calls.remove(self._entry)


class Box:
    """A mailbox that keeps what it gets."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []

    def take(self, effects: list[Effect]) -> None:
        self.effects += effects

    def events(self) -> list[Event]:
        return [effect.event for effect in self.effects if isinstance(effect, Emit)]


class House:
    """Everything between a door and the workers. `ready` False: no worker has come up yet."""

    def __init__(self, limits: Limits = LIMITS, clock: Clock | None = None, *, ready: bool = True) -> None:
        self.plan: Plan = plan(replace(Deploy.of("voice", "echo"), limits=limits))
        self.metrics = Metrics()
        self.spawner = IdleSpawner()
        self.slots = Slots(limits.max_sessions)
        self.clock = clock or HandClock()
        self.orchestrator = Orchestrator(self.plan, self.spawner, Rows(), self.clock, self.metrics, self.slots)
        self.desk = FrontDesk(self.plan, self.orchestrator, self.slots, self.clock, self.metrics)
        self.metrics.watch(self.desk)
        self.orchestrator.start()
        if ready:
            self.workers_ready()

    def workers_ready(self) -> None:
        for worker in self.spawner.workers:
            self.orchestrator.ready(worker)

    @property
    def open_in_workers(self) -> int:
        return sum(len(worker.sessions) for worker in self.spawner.workers.values())

    def at_rest(self) -> bool:
        """Nothing is left of any session."""
        standing = sum(count for _, _, count in self.desk.sessions())
        return not (self.slots.taken or standing or self.open_in_workers or self.desk.waiting())


@asynccontextmanager
async def open_house(
    limits: Limits = LIMITS, server: Server | None = None, *, ready: bool = True
) -> AsyncIterator[tuple[House, int]]:
    """A house on a real port of loopback; gives the port's number."""
    house = House(limits, LoopClock(asyncio.get_running_loop()), ready=ready)
    server = server or Server()

    def unready() -> list[str]:
        return ["draining"] if house.desk.draining else [stage for _, stage in house.orchestrator.pools.unready()]

    doors = Doors(
        http_app(house.metrics, unready, lambda: models(house.plan)),
        websocket_doors(house.plan, house.desk, house.metrics),
    )
    gate = Gate(doors, Keys(server.api_keys), {"localhost", "127.0.0.1"}, server.origins)
    listening = listen("127.0.0.1", 0, limits)
    port = Port(gate, listening, limits)
    await port.open()
    number: int = listening.getsockname()[1]
    try:
        yield house, number
    finally:
        house.desk.close_all("drained")
        await port.close()
