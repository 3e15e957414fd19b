"""A world on a virtual clock: one seed is one schedule, replayable.

Everything that takes time (a message under way, a step of an engine, a client that thinks) is an entry in one heap,
with a delay drawn from one seeded source. Nothing here knows a wall clock, a thread or a socket.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Mapping

from simlaws import Laws
from simworkers import Make, SimWorker

from omni_live.config.plan import Plan
from omni_live.runtime.orchestrator import Orchestrator
from omni_live.runtime.ports import WorkerId
from omni_live.runtime.slots import Slots
from omni_live.sessions.stamp import Fence, SessionKey, Stamp

US = 1_000
MS = 1_000_000
S = 1_000_000_000
MANY_STEPS = 200_000
"""More than any scene takes: a run that comes here runs in a circle."""

LEAST_DELAY_NS = 20 * US
DELAYS_NS = 2 * MS
"""A message between two processes takes the least and up to so much more."""

Act = Callable[[], None]


class Alarm:
    """A call in the future that may be taken back; see ports.Timer."""

    __slots__ = ("call",)

    def __init__(self, call: Act) -> None:
        self.call: Act | None = call

    def cancel(self) -> None:
        self.call = None

    def __call__(self) -> None:
        call, self.call = self.call, None
        if call is not None:
            call()


class Lane:
    """A socket: what goes in comes out in order, some time later. `slowness` stretches the delays."""

    __slots__ = ("_back", "_last_ns", "_world", "repeats", "slowness", "swaps")

    def __init__(self, world: "World") -> None:
        self._world = world
        self._last_ns = 0
        self._back: Act | None = None
        self.slowness = 1.0
        self.repeats = 0.0
        """Chance that something comes out twice."""
        self.swaps = 0.0
        """Chance that two things that may change places do."""

    def send(self, arrive: Act, loose: bool = False) -> None:
        """`loose` things may come out after the next thing that is loose too."""
        if self._back is not None:
            back, self._back = self._back, None
            if loose:
                self._put(arrive)
                arrive = back
            else:
                self._put(back)
        elif loose and self.swaps and self._world.chance(self.swaps):
            self._back = arrive
            return
        self._put(arrive)
        if self.repeats and self._world.chance(self.repeats):
            self._world.post(self._last_ns, arrive)

    def _put(self, arrive: Act) -> None:
        world = self._world
        at_ns = world.now() + LEAST_DELAY_NS + int(world.draw() * DELAYS_NS * self.slowness)
        self._last_ns = max(self._last_ns, at_ns)
        world.post(self._last_ns, arrive)


class World:
    """Clock, fence table, spawner, counters and trace of one simulated server, and the server itself."""

    def __init__(
        self, plan: Plan, seed: int, make: Mapping[str, Make], say: Callable[[str], None] | None = None
    ) -> None:
        self.make = make
        self.random = random.Random(seed)  # a schedule, no secret
        self.draw = self.random.random
        self.counts: Counter[str] = Counter()
        self.laws = Laws(self)
        self.workers: dict[WorkerId, SimWorker] = {}
        self.rows: dict[int, Fence] = {}
        self.plan = plan
        self.steps = 0
        self.trouble: BaseException | None = None
        """What went wrong where somebody above swallows it."""
        self._say = say
        self._now = S
        self._heap: list[tuple[int, int, Act]] = []
        self._made = 0
        self.slots = Slots(plan.limits.max_sessions)
        self.it = Orchestrator(plan, self, self, self, self, self.slots, self)
        self.it.start()

    # -- ports -------------------------------------------------------------------------------------------------------

    def now(self) -> int:
        return self._now

    def call_at(self, at_ns: int, call: Act) -> Alarm:
        alarm = Alarm(call)
        self.post(at_ns, alarm)
        return alarm

    def spawn(self, worker: WorkerId, role: int) -> SimWorker:
        self.workers[worker] = SimWorker(self, worker, self.plan.workers[role])
        return self.workers[worker]

    def write(self, fence: Fence) -> None:
        old = self.rows.get(fence.slot)
        if old is not None:
            assert (fence.generation, fence.epoch) >= (old.generation, old.epoch), "a fence row went back (G1)"
        self.rows[fence.slot] = fence

    def count(self, name: str, amount: int = 1) -> None:
        self.counts[name] += amount

    def note(self, what: str, session: SessionKey, detail: object) -> None:
        if self._say is not None:
            self.tell(f"{what} {detail}", session)
        self.laws.note(what, session, detail)

    # -- time and chance ---------------------------------------------------------------------------------------------

    def post(self, at_ns: int, call: Act) -> None:
        """Call it then; nobody takes it back."""
        self._made += 1
        heapq.heappush(self._heap, (at_ns, self._made, call))

    def after(self, least_ns: int, most_ns: int, call: Act) -> None:
        self.post(self._now + least_ns + int(self.draw() * (most_ns - least_ns)), call)

    def lane(self) -> Lane:
        return Lane(self)

    def chance(self, of: float) -> bool:
        return self.draw() < of

    def run(self, seconds: float) -> None:
        """Let so much time pass."""
        heap, pop = self._heap, heapq.heappop
        end = self._now + round(seconds * S)
        while heap and heap[0][0] <= end:
            at_ns, _, call = pop(heap)
            self._now = max(self._now, at_ns)
            call()
            self.steps += 1
            if self.trouble is not None:
                raise self.trouble
            assert self.steps < MANY_STEPS, "the world does not come to rest"
        self._now = end

    def run_until(self, reached: Callable[[], bool], most_s: float, look_s: float = 0.1) -> bool:
        """Let time pass until the condition holds, looking now and then; False where it never does."""
        end = self._now + round(most_s * S)
        while not reached():
            if self._now >= end:
                return False
            self.run(look_s)
        return True

    # -- looks -------------------------------------------------------------------------------------------------------

    def tell(self, what: str, session: int = 0) -> None:
        """One line of the schedule, where somebody wants to see it."""
        if self._say is not None:
            who = f"{session >> 32}.{session & 0xFFFFFFFF}" if session else "-"
            self._say(f"{(self._now - S) / MS:10.3f} ms  {who:>5}  {what}")

    def admits(self, stamp: Stamp) -> bool:
        """What every process reads in the shared fence table."""
        row = self.rows.get(stamp[0])
        return row is not None and row.epoch == stamp[2] and row.generation == stamp[1]

    def live(self) -> list[SimWorker]:
        return [worker for worker in self.workers.values() if worker.alive]

    def alarms(self) -> int:
        """Timers that are set and not taken back."""
        return sum(isinstance(call, Alarm) and call.call is not None for _, _, call in self._heap)

    def digest(self) -> str:
        """The same for the same schedule, and hardly ever for another one."""
        return f"{self._made:06d}-{self._now:x}-{self.random.getrandbits(32):08x}"
