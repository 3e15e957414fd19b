"""`omni-live bench hops`: what the runtime itself costs, with engines that only hand on, beside a bare socket chain.

Three echo stages in three processes, with everything on that a real turn has: sessions, journal, stamps, fences,
credits. The bare chain is three processes that pass frames along Unix sockets and do nothing else. Both run in the
same command, alternating, so that their ratio means something on a machine that others use as well.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

from omni_live.bench import server
from omni_live.bench.bare import Frames
from omni_live.config.deploy import Deploy, PipelineDeploy
from omni_live.config.plan import Plan, plan
from omni_live.pipelines.registry import ECHO
from omni_live.runtime.running import Runtime, running
from omni_live.sessions.effects import Effect, Emit
from omni_live.sessions.events import TurnDone, TurnSpoke
from omni_live.sessions.ids import CountedIds
from omni_live.sessions.inputs import Asked, Attached, CloseAsked, EventAcked
from omni_live.sessions.limits import MIB
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.plain import PlainSession
from omni_live.sessions.turn import TurnState

HOPS = 4
"""Server to first, second, third, and back."""
TINY = Payload("bytes", body=b"x" * 32)

Progress = Callable[[str, float], None]
"""What runs, and how far it is from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Work:
    """How much is measured."""

    rounds: int = 5
    requests: int = 1000
    """One at a time, in each round."""
    big: int = 60
    units: int = 4000
    """Per session, in each round."""
    warm_up: int = 200
    """Requests before the first round."""


QUICK = Work(rounds=2, requests=300, big=20, units=1000, warm_up=50)


class NoCounters:
    def count(self, name: str, amount: int = 1) -> None:
        """Nobody asks."""


class Bystander:
    """A client in the server's process: it waits for the ends of turns and acknowledges what it got."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] | None = None
        self.units = 0
        self.seq = 0
        self.failed = ""

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if not isinstance(effect, Emit):
                continue
            self.seq = effect.seq
            match effect.event:
                case TurnSpoke():
                    self.units += 1
                case TurnDone(status=status, reason=reason):
                    if status != TurnState.DONE:
                        self.failed = f"{status}: {reason}"
                    if self.done is not None:
                        self.done.set_result(None)
                case _:
                    pass


@dataclass(slots=True)
class Client:
    runtime: Runtime
    session: PlainSession
    mailbox: Bystander = field(default_factory=Bystander)

    async def ask(self, payload: Payload) -> float:
        """One turn; seconds until its end."""
        mailbox = self.mailbox
        done = mailbox.done = asyncio.get_running_loop().create_future()
        asked = Asked("first", frozenset(("third",)), payload)
        start = time.perf_counter()
        self.runtime.orchestrator.tell(self.session, asked)
        await done
        took = time.perf_counter() - start
        if mailbox.failed:
            raise RuntimeError(f"a turn ended {mailbox.failed}")
        self.runtime.orchestrator.tell(self.session, EventAcked(mailbox.seq))
        return took


def echo_plan(multiply: int) -> Plan:
    """The echo pipeline, each stage in a process of its own; the first makes `multiply` chunks of one."""
    first, *rest = ECHO.stages
    options: Mapping[str, Scalar] = {**first.options, "multiply": multiply}
    spec = replace(ECHO, stages=(replace(first, options=options), *rest))
    return plan(Deploy(pipelines=(PipelineDeploy(spec.name),)), {spec.name: spec})


@asynccontextmanager
async def echo(multiply: int, clients: int) -> AsyncIterator[list[Client]]:
    the_plan = echo_plan(multiply)
    ids = CountedIds()
    async with running(the_plan, NoCounters()) as runtime:
        while not runtime.orchestrator.pools.is_ready():  # noqa: ASYNC110 - nothing tells when the pools are ready
            await asyncio.sleep(0.02)
        opened = []
        for number in range(clients):
            slot = runtime.slots.take()
            if slot is None:
                raise RuntimeError("no session slot is free")
            session = PlainSession(f"bench-{number}", *slot, the_plan.limits, ids, runtime.clock.now())
            client = Client(runtime, session)
            runtime.orchestrator.open(session, ECHO.name, client.mailbox)
            runtime.orchestrator.tell(session, Attached(1))
            opened.append(client)
        yield opened
        for client in opened:
            runtime.orchestrator.tell(client.session, CloseAsked())


class BareChain:
    """The bare chain's ends in this process."""

    def __init__(self) -> None:
        self._arrived: asyncio.Future[None] | None = None
        self._out: Frames | None = None

    def arrived(self, _: bytes) -> None:
        if self._arrived is not None:
            self._arrived.set_result(None)

    async def ask(self, body: bytes) -> float:
        if self._out is None:
            raise RuntimeError("the chain is not open")
        arrived = self._arrived = asyncio.get_running_loop().create_future()
        start = time.perf_counter()
        self._out.send(body)
        await arrived
        return time.perf_counter() - start

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        with tempfile.TemporaryDirectory() as folder:
            paths = [f"{folder}/{number}" for number in range(HOPS)]
            back = await loop.create_unix_server(lambda: Frames(self.arrived), paths[-1])
            processes = [await started(listen, onward) for listen, onward in reversed(list(pairwise(paths)))]
            transport, self._out = await loop.create_unix_connection(lambda: Frames(self.arrived), paths[0])
            try:
                yield
            finally:
                transport.close()
                for process in processes:
                    process.terminate()
                    await process.wait()
                back.close()


async def started(listen: str, onward: str) -> asyncio.subprocess.Process:
    """A link of the bare chain that listens. Raises RuntimeError where it does not come to that."""
    safe = ["-P"] if sys.flags.safe_path else []
    command = (sys.executable, *safe, "-m", "omni_live.bench.bare", listen, onward)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    if process.stdout is None or not await process.stdout.readline():
        raise RuntimeError("a link of the bare chain did not start")
    return process


@dataclass(slots=True)
class Timed:
    """Requests one after another: how long each took, and what they cost all processes together."""

    took_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    async def run(self, ask: Callable[[], Awaitable[float]], count: int) -> None:
        tree = server.process_tree(os.getpid())  # of which this process is the first
        before = server.cpu_s(tree[::-1])  # looked at last and first, so that what the looking costs is not counted
        self.took_s += [await ask() for _ in range(count)]
        self.cpu_s += server.cpu_s(tree) - before

    @property
    def p50_s(self) -> float:
        return statistics.median(self.took_s)

    @property
    def cpu_s_each(self) -> float:
        return self.cpu_s / len(self.took_s)


async def measure(work: Work, progress: Progress) -> dict[str, float]:
    """All figures of the bench."""
    load_before = os.getloadavg()[0]
    tiny, bare, big = await requests(work, progress)
    rates = await streams(work, progress)
    progress("done", 1.0)
    return {
        "hop_us_p50": tiny.p50_s / HOPS * 1e6,
        "hop_us_p99": quantile(tiny.took_s, 0.99) / HOPS * 1e6,
        "cpu_ms_per_request": tiny.cpu_s_each * 1e3,
        "chain_1mib_ms_p50": big.p50_s * 1e3,
        "units_per_s_8": statistics.median(rates),
        "bare_hop_us_p50": bare.p50_s / HOPS * 1e6,
        "bare_cpu_ms_per_request": bare.cpu_s_each * 1e3,
        "hop_ratio": tiny.p50_s / bare.p50_s,
        "cpu_ratio": tiny.cpu_s_each / bare.cpu_s_each,
        "runs": work.rounds,
        "load1_before": load_before,
        "load1_after": os.getloadavg()[0],
        "cpus": len(os.sched_getaffinity(0)),
    }


async def requests(work: Work, progress: Progress) -> tuple[Timed, Timed, Timed]:
    """One at a time: tiny ones, the same through the bare chain, and 1 MiB each."""
    tiny, bare, big = Timed(), Timed(), Timed()
    mib, body = Payload("bytes", body=bytes(MIB)), bytes(TINY.body)
    chain = BareChain()
    progress("start", 0.0)
    async with echo(1, 1) as (client,), chain.opened():
        await Timed().run(lambda: client.ask(TINY), work.warm_up)
        await Timed().run(lambda: chain.ask(body), work.warm_up)
        for number in range(work.rounds):
            progress("one request at a time", 0.05 + 0.5 * number / work.rounds)
            await tiny.run(lambda: client.ask(TINY), work.requests)
            await bare.run(lambda: chain.ask(body), work.requests)
        progress("1 MiB through the chain", 0.55)
        await Timed().run(lambda: client.ask(mib), 5)
        await big.run(lambda: client.ask(mib), work.big)
    return tiny, bare, big


async def streams(work: Work, progress: Progress) -> list[float]:
    """Units per second through the chain with eight sessions streaming at once, one figure a round."""
    rates = []
    async with echo(work.units, 8) as clients:
        await asyncio.gather(*(client.ask(TINY) for client in clients))
        for number in range(work.rounds):
            progress("eight sessions streaming", 0.65 + 0.35 * number / work.rounds)
            before = sum(client.mailbox.units for client in clients)
            start = time.perf_counter()
            await asyncio.gather(*(client.ask(TINY) for client in clients))
            took = time.perf_counter() - start
            rates.append((sum(client.mailbox.units for client in clients) - before) / took)
    return rates


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]
