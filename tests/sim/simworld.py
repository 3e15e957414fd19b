"""A world on a virtual clock: one seed is one schedule, replayable.

Everything that takes time (a message under way, a step of an engine, a client that thinks) is an entry in one heap,
with a delay drawn from one seeded source. Nothing here knows a wall clock, a thread or a socket.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from simworkers import Make, SimWorker

from omni_live.config.plan import Plan
from omni_live.runtime.orchestrator import Orchestrator
from omni_live.runtime.ports import WorkerId
from omni_live.runtime.slots import Slots
from omni_live.sessions.stamp import Fence, SessionKey, Stamp

US = 1_000
MS = 1_000_000
S = 1_000_000_000
MANY_STEPS = 3_000_000


class Alarm:
    """A call in the future; see ports.Timer."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


@dataclass(frozen=True, slots=True)
class Note:
    """One decision, as the trace keeps it."""

    at_ns: int
    what: str
    session: SessionKey
    detail: object


class Lane:
    """A socket: what goes in comes out in order, some time later. `slowness` stretches the delays."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._last_ns = 0
        self.slowness = 1.0
        self.repeats = 0.0
        """Chance that something comes out twice."""

    def send(self, arrive: Callable[[], None]) -> None:
        delay = int(self._world.random.uniform(20 * US, 2 * MS) * self.slowness)
        self._last_ns = max(self._last_ns, self._world.now() + delay)
        self._world.call_at(self._last_ns, arrive)
        if self.repeats and self._world.chance(self.repeats):
            self._world.call_at(self._last_ns, arrive)


class World:
    """Clock, fence table, spawner, counters and trace of one simulated server, and the server itself."""

    def __init__(self, plan: Plan, seed: int, make: Mapping[str, Make]) -> None:
        self.make = make
        self.random = random.Random(seed)  # a schedule, no secret
        self.counts: Counter[str] = Counter()
        self.trace: list[Note] = []
        self.workers: dict[WorkerId, SimWorker] = {}
        self.rows: dict[int, Fence] = {}
        self.plan = plan
        self._now = S
        self._heap: list[tuple[int, int, Alarm]] = []
        self._made = 0
        self.slots = Slots(plan.limits.max_sessions)
        self.it = Orchestrator(plan, self, self, self, self, self.slots, self)
        self.it.start()

    # -- ports -------------------------------------------------------------------------------------------------------

    def now(self) -> int:
        return self._now

    def call_at(self, at_ns: int, call: Callable[[], None]) -> Alarm:
        alarm = Alarm(call)
        self._made += 1
        heapq.heappush(self._heap, (at_ns, self._made, alarm))
        return alarm

    def spawn(self, worker: WorkerId, role: int) -> SimWorker:
        self.workers[worker] = SimWorker(self, worker, self.plan.workers[role])
        return self.workers[worker]

    def write(self, fence: Fence) -> None:
        old = self.rows.get(fence.slot)
        if old is not None:
            assert (fence.generation, fence.epoch) >= (old.generation, old.epoch), "a fence row went back"
        self.rows[fence.slot] = fence

    def count(self, name: str, amount: int = 1) -> None:
        self.counts[name] += amount

    def note(self, what: str, session: SessionKey, detail: object) -> None:
        self.trace.append(Note(self._now, what, session, detail))

    # -- time and chance ---------------------------------------------------------------------------------------------

    def lane(self) -> Lane:
        return Lane(self)

    def after(self, least_ns: float, most_ns: float, call: Callable[[], None]) -> Alarm:
        return self.call_at(self._now + int(self.random.uniform(least_ns, most_ns)), call)

    def chance(self, of: float) -> bool:
        return self.random.random() < of

    def run(self, seconds: float) -> None:
        """Let so much time pass."""
        end = self._now + round(seconds * S)
        steps = 0
        while self._heap and self._heap[0][0] <= end:
            at_ns, _, alarm = heapq.heappop(self._heap)
            self._now = max(self._now, at_ns)
            if alarm.call is not None:
                call, alarm.call = alarm.call, None
                call()
                steps += 1
                assert steps < MANY_STEPS, "the world does not come to rest"
        self._now = end

    # -- looks -------------------------------------------------------------------------------------------------------

    def admits(self, stamp: Stamp) -> bool:
        """What every process reads in the shared fence table."""
        row = self.rows.get(stamp.slot)
        return row is not None and row.admits(stamp)

    def live(self) -> list[SimWorker]:
        return [worker for worker in self.workers.values() if worker.alive]
