"""Worker processes as the server sees them: started, spoken to over two sockets, watched, and cleaned up after.

Everything that a worker says is handed to the orchestrator within the read of its socket; nothing waits. A worker is
gone when its process is: whatever goes wrong with a lane first (a bad frame, a backlog at its bound) or with its
engines (no answer to a ping) ends in a kill, and `Happenings.exited` follows the exit, once.
"""

import asyncio
import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, assert_never

from omni_live.config.plan import WorkerPlan
from omni_live.connectors.contract import ConnectorError, Key, TicketInvalid
from omni_live.connectors.shm import Arena, Reader, segment_path, unlink_segments
from omni_live.runtime.fences import FenceTable
from omni_live.runtime.layout import feeder_name, owner_name, producer_name, socket_path
from omni_live.runtime.links import Link
from omni_live.runtime.nursery import Child, Nursery
from omni_live.runtime.outbox import FREE_SHARE, FREE_WAIT_NS
from omni_live.runtime.ports import CLIENT, Counters, End, Happenings, Route, Timer, WorkerId
from omni_live.runtime.supervision import NS_PER_S
from omni_live.runtime.wire import (
    FROM_WORKER,
    INLINE_BYTES,
    Abort,
    Body,
    Chunk,
    CloseSession,
    Configure,
    Counted,
    Credit,
    Drain,
    Ended,
    FeedSession,
    FeedTurn,
    Fork,
    Forward,
    Found,
    Free,
    Freed,
    FromWorker,
    Inline,
    Message,
    OpenSession,
    OpenTurn,
    Ping,
    Pong,
    Ready,
    Report,
    Restore,
    Snapshot,
    Snapshotted,
    Spoke,
    WireError,
    WireStage,
    freed,
    inline,
    unwrapped,
)
from omni_live.sessions.inputs import Outcome
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.stamp import SessionKey, Stamp

log = logging.getLogger(__name__)

_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
_GRACE_S: Final = 5.0
"""A process whose lanes are gone is killed if it has not ended by then."""
_LOOKS: Final = 3
"""The watchdog looks so often within `hang_s`."""


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """How worker processes are run."""

    arena_bytes: int = 16 * 2**20
    """Shared memory of one edge. Reached: the producer waits; what the server feeds travels inline instead."""
    kept_bytes: int = 64 * 2**20
    """Output that one turn keeps for its whole edges. Reached: the turn fails (`resource_exhausted`)."""
    hang_s: float = 15.0
    """A worker with sessions whose engines let no ping through for so long is killed; later where a stage's `step_s`
    says that its steps take longer."""


class Processes:
    """Starts worker processes; see ports.Spawner. One `run` for its whole life."""

    def __init__(
        self,
        workers: Sequence[WorkerPlan],
        directory: Path,
        fences: FenceTable,
        counters: Counters,
        settings: ProcessSettings | None = None,
    ) -> None:
        self._workers = workers
        self._directory = directory
        self._fences = fences
        self._counters = counters
        self._settings = settings or ProcessSettings()
        self._living: dict[WorkerId, Process] = {}
        self._unborn: list[Process] = []
        self._group: asyncio.TaskGroup | None = None
        self._happenings: Happenings | None = None
        self._stopping = asyncio.Event()
        self._nursery = Nursery()

    async def run(self, happenings: Happenings) -> None:
        """Keep watch over workers until `stop`; no worker outlives this, however it ends."""
        self._happenings = happenings
        async with self._nursery, asyncio.TaskGroup() as group:
            self._group = group
            unborn, self._unborn = self._unborn, []
            for process in unborn:
                group.create_task(self._live(process, happenings))
            await self._stopping.wait()
            for process in tuple(self._living.values()):
                process.kill()

    def stop(self) -> None:
        """Kill what still lives and let `run` return."""
        self._stopping.set()

    def spawn(self, worker: WorkerId, role: int) -> "Process":
        plan = self._workers[role]
        process = Process(worker, plan, self._directory, self._fences, self._counters, self._settings, self._nursery)
        if self._stopping.is_set():
            return process  # nobody is left to be told that it does not live
        if self._group is None or self._happenings is None:
            self._unborn.append(process)
        else:
            self._group.create_task(self._live(process, self._happenings))
        return process

    async def _live(self, process: "Process", happenings: Happenings) -> None:
        self._living[process.worker] = process
        try:
            reason = await process.live(happenings)
        finally:
            del self._living[process.worker]
        log.info("event=worker_exited worker=%d stages=%s reason=%s", process.worker, process.stages, reason)
        happenings.exited(process.worker, reason)


@dataclass(slots=True)
class _Turn:
    """A turn that is open there and has output for the client."""

    due: int
    """The client side's credit is sent on once it is this much."""
    owed: int = 0


class Process:
    """One worker process; see ports.WorkerPort. Belongs to the event loop."""

    def __init__(
        self,
        worker: WorkerId,
        plan: WorkerPlan,
        directory: Path,
        fences: FenceTable,
        counters: Counters,
        settings: ProcessSettings,
        nursery: Nursery,
    ) -> None:
        self.worker = worker
        self.stages = ",".join(stage.name for stage in plan.stages)
        self._plan = plan
        self._directory = directory
        self._fences = fences
        self._counters = counters
        self._settings = settings
        self._nursery = nursery
        self._control: Link[FromWorker] = Link(FROM_WORKER, self._heard, partial(self._lane_lost, "control"))
        self._media: Link[FromWorker] = Link(FROM_WORKER, self._heard, partial(self._lane_lost, "media"))
        self._order = 0
        self._arenas: list[Arena] = []
        self._segments: dict[str, int] = {}
        """Stage -> the arena that it is fed through now."""
        self._readers: dict[int, Reader] = {}
        """By whose arenas they read: the worker's own (0), or what it lends on."""
        self._freed: list[Freed] = []
        """Tickets of the worker that were read; given back as an outbox does it."""
        self._freed_bytes = 0
        self._freeing: Timer | None = None
        self._turns: dict[tuple[str, tuple[int, int, int, int]], _Turn] = {}
        self._happenings: Happenings | None = None
        self._process: Child | None = None
        self._killed_for = ""
        self._hang_s = max(settings.hang_s, *(stage.step_s for stage in plan.stages))
        self._held = 0
        """Sessions that are open there. While there are any, the worker is pinged."""
        self._watch: Timer | None = None
        self._grace: Timer | None = None
        self._is_gone = False
        self._pinged = 0
        self._ponged = 0
        self._pinged_at = 0.0

    async def live(self, happenings: Happenings) -> str:
        """Start it, wait for its end and clean up; the reason of the end."""
        self._happenings = happenings
        try:
            self._process = await self._start()
            if self._killed_for:
                self._process.kill()
            status = await self._process.wait()
        except OSError as error:
            log.warning("event=spawn_failed worker=%d error=%s", self.worker, type(error).__name__)
            return "spawn_failed"
        finally:
            await self._bury()
        return self._killed_for or (f"signal:{-status}" if status < 0 else f"exit:{status}")

    # -- ports.WorkerPort

    def open_session(self, stage: str, session: SessionKey, params: Mapping[str, Scalar]) -> None:
        if self._call(self._control, OpenSession(self._order, stage, session, dict(params))):
            self._hold(1)

    def close_session(self, stage: str, session: SessionKey) -> None:
        if self._call(self._control, CloseSession(self._order, stage, session)):
            self._hold(-1)

    def open_turn(
        self,
        stage: str,
        stamp: Stamp,
        params: Mapping[str, Scalar],
        routes: tuple[Route, ...],
        inputs: int,
        payload: Payload | None = None,
    ) -> None:
        if self._is_gone:
            return
        client_credits = 0
        for route in routes:
            if route.receiver == CLIENT:
                client_credits = route.credits
        self.expect_turn(stage, stamp, client_credits)
        body = None if payload is None else self._body(stage, stamp.session, stamp.epoch, payload)
        # What found no room in shared memory is no message for the control lane.
        is_small = not isinstance(body, Inline) or len(body.body) <= INLINE_BYTES
        first = Chunk(CLIENT, stage, stamp, body, False, True) if body is not None and is_small else None
        if not self._call(self._control, OpenTurn(self._order, stage, stamp, dict(params), routes, inputs, first)):
            self._fail_soon(stage, stamp)
        elif body is not None and first is None:
            self._feed(stage, stamp, body, True)

    def expect_turn(self, stage: str, stamp: Stamp, client_credits: int) -> int:
        if client_credits and not self._is_gone:
            self._turns[stage, stamp[:4]] = _Turn(client_credits // 4 or 1)
        return self._order

    def forward(self, stage: str, stamp: Stamp, route: Route) -> None:
        self._call(self._control, Forward(self._order, stage, stamp, route))

    def feed_turn(self, stage: str, stamp: Stamp, payload: Payload, last: bool) -> None:
        """Client input that comes after the turn was opened."""
        self._feed(stage, stamp, self._body(stage, stamp.session, stamp.epoch, payload), last)

    def feed_session(self, stage: str, session: SessionKey, payload: Payload) -> None:
        body = self._body(stage, session, 0, payload)
        self._call(self._media, FeedSession(self._order, stage, session, body))

    def abort(self, stage: str, stamp: Stamp) -> None:
        self._control.send(Abort(stage, stamp))

    def credit(self, stage: str, stamp: Stamp, units: int) -> None:
        # A quarter of the window is held back, so that a stream of chunks costs no message for each.
        turn = self._turns.get((stage, stamp[:4]))
        if turn is None:
            return
        turn.owed += units
        if turn.owed >= turn.due:
            self._control.send(Credit(stage, CLIENT, stamp, turn.owed))
            turn.owed = 0

    def fork(self, stage: str, session: SessionKey, into: SessionKey) -> None:
        if self._call(self._control, Fork(self._order, stage, session, into)):
            self._hold(1)

    def snapshot(self, stage: str, session: SessionKey, ticket: int) -> None:
        self._call(self._control, Snapshot(self._order, stage, session, ticket))

    def restore(self, stage: str, session: SessionKey, payload: Payload) -> None:
        body = self._body(stage, session, 0, payload)
        self._call(self._control, Restore(self._order, stage, session, body))

    def drain(self) -> None:
        self._control.send(Drain())

    def kill(self) -> None:
        self._kill("killed")

    # -- starting and ending

    async def _start(self) -> Child:
        loop = asyncio.get_running_loop()
        theirs: list[socket.socket] = []
        try:
            for link in (self._control, self._media):
                ours, other = socket.socketpair()
                theirs.append(other)
                await loop.create_unix_connection(partial(_itself, link), sock=ours)
            # Whatever was called before now went into the links ahead of this, which the worker expects and sorts out.
            self._control.send(self._configuration())
            return await self._nursery.bear(theirs, _environment(self._plan))
        finally:
            for other in theirs:
                other.close()

    def _configuration(self) -> Configure:
        stages = [WireStage(stage.name, stage.engine, dict(stage.options)) for stage in self._plan.stages]
        return Configure(
            self.worker,
            str(self._directory),
            stages,
            self._settings.arena_bytes,
            self._settings.kept_bytes,
            f"omni:{self.stages}",
        )

    async def _bury(self) -> None:
        """The process is gone, or goes now because nobody will watch it; with it goes what it left behind."""
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
        self._is_gone = True
        for timer in (self._watch, self._grace, self._freeing):
            if timer is not None:
                timer.cancel()
        self._control.close()
        self._media.close()
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()
        self._readers.clear()  # a mapping keeps the memory of a segment that is unlinked
        unlink_segments(self._directory, feeder_name(self.worker))
        unlink_segments(self._directory, producer_name(self.worker))
        socket_path(self._directory, self.worker).unlink(missing_ok=True)

    def _kill(self, reason: str) -> None:
        self._killed_for = self._killed_for or reason
        if self._process is not None:
            self._process.kill()

    def _lane_lost(self, lane: str, reason: str) -> None:
        """The process has ended, or must: it may take a moment to say with which status."""
        if self._is_gone:
            return
        if reason in ("bad_frame", "overflow"):
            log.warning("event=lane_lost worker=%d lane=%s reason=%s", self.worker, lane, reason)
            self._kill(reason)
        elif self._grace is None:
            self._grace = asyncio.get_running_loop().call_later(_GRACE_S, self._kill, "lane_lost")

    # -- speaking

    def _call(self, lane: Link[FromWorker], message: Message) -> bool:
        """False where it cannot travel; it has taken no place in the order then."""
        if self._is_gone:
            return True
        try:
            lane.send(message)
        except WireError:
            self._counters.count("calls_unsendable")
            return False
        self._order += 1
        if self._freed:
            self._give_back()
        return True

    def _feed(self, stage: str, stamp: Stamp, body: Body, last: bool) -> None:
        if not self._call(self._media, FeedTurn(self._order, stage, stamp, body, last)):
            self._fail_soon(stage, stamp)
            self.abort(stage, stamp)

    def _fail_soon(self, stage: str, stamp: Stamp) -> None:
        asyncio.get_running_loop().call_soon(self._ended, stage, stamp, Outcome.FAILED, "payload_refused", ())

    def _body(self, stage: str, session: SessionKey, epoch: int, payload: Payload) -> Body:
        if payload.nbytes <= INLINE_BYTES or self._is_gone:
            return inline(payload)
        try:
            return self._arena(stage).put(Key(session, epoch, self.worker), payload)
        except ConnectorError:
            # The server cannot wait for room. Its lanes' backlog bounds what goes this way.
            self._counters.count("arena_fallbacks")
            return inline(payload)

    def _arena(self, stage: str) -> Arena:
        segment = self._segments.get(stage)
        if segment is None:
            segment = len(self._arenas)
            path = segment_path(self._directory, feeder_name(self.worker), segment)
            self._arenas.append(Arena(path, segment, self._settings.arena_bytes))
            self._segments[stage] = segment
        return self._arenas[segment]

    # -- hearing

    def _heard(self, messages: list[FromWorker], nbytes: int) -> None:
        happenings = self._happenings
        if happenings is None:
            raise RuntimeError("a worker speaks before it lives")
        for message in messages:
            if isinstance(message, Spoke):
                self._spoke(message, happenings)
            elif isinstance(message, Ended):
                self._ended(message.stage, message.stamp, message.outcome, message.reason, message.through)
            else:
                self._heard_rarely(message, happenings)
        if self._freed_bytes * FREE_SHARE >= self._settings.arena_bytes:
            self._give_back()
        elif self._freed and self._freeing is None:
            self._freeing = asyncio.get_running_loop().call_later(FREE_WAIT_NS / NS_PER_S, self._give_back)

    def _give_back(self) -> None:
        if self._freeing is not None:
            self._freeing.cancel()
            self._freeing = None
        freed_now, self._freed, self._freed_bytes = self._freed, [], 0
        self._control.send(Free(freed_now))

    def _spoke(self, spoke: Spoke, happenings: Happenings) -> None:
        stage, stamp, outcome = spoke.stage, spoke.stamp, spoke.outcome
        payload: Payload | None = None
        if self._fences.admits(stamp):
            payload = self._read(spoke.body)
        else:
            self._counters.count("stale_outputs")
            self._let_go(spoke.body)
        if payload is None:
            if outcome is not None:
                self._ended(stage, stamp, outcome, spoke.reason, spoke.through)
        elif outcome is None:
            happenings.spoke(self.worker, stage, stamp, payload)
        else:
            self._turns.pop((stage, stamp[:4]), None)
            happenings.spoke(self.worker, stage, stamp, payload, outcome, spoke.reason, spoke.through)

    def _ended(self, stage: str, stamp: Stamp, outcome: Outcome, reason: str, through: tuple[End, ...]) -> None:
        self._turns.pop((stage, stamp[:4]), None)
        if self._happenings is not None:
            self._happenings.ended(self.worker, stage, stamp, outcome, reason, through)

    def _heard_rarely(
        self, message: Ready | Found | Snapshotted | Report | Counted | Pong | Free, happenings: Happenings
    ) -> None:
        match message:
            case Found(stage, session, body):
                payload = self._read(body)
                if payload is not None:
                    happenings.found(self.worker, stage, session, payload)
            case Report():
                happenings.load(self.worker, message.stage, message.load())
            case Free(tickets):
                self._release(tickets)
            case Pong(serial):
                self._ponged = serial
            case Counted(amounts):
                for name, amount in amounts.items():
                    self._counters.count(name, amount)
            case Snapshotted(stage, session, ticket, body):
                kept = None if body is None else self._read(body)
                happenings.snapshotted(self.worker, stage, session, ticket, kept)
            case Ready():
                happenings.ready(self.worker)
            case _:
                assert_never(message)

    def _read(self, body: Body) -> Payload | None:
        """The payload in the server's own memory, its ticket given back; None where the ticket is no good."""
        if isinstance(body, Inline):
            return unwrapped(body)
        reader = self._readers.get(body.owner)
        if reader is None:
            name = owner_name(body.owner or self.worker)
            reader = self._readers[body.owner] = Reader(self._directory, name)
        try:
            payload = reader.get(body)
        except TicketInvalid:
            if body.owner:  # the owner is dead, which is no fault of this worker
                self._counters.count("tickets_invalid")
                self._let_go(body)
                return None
            log.exception("event=bad_ticket worker=%d", self.worker)
            self._kill("bad_ticket")
            return None
        payload = Payload(payload.kind, payload.meta, bytes(payload.body), payload.arrays)
        self._let_go(body)
        return payload

    def _let_go(self, body: Body) -> None:
        if not isinstance(body, Inline):
            self._freed.append(freed(body))
            self._freed_bytes += body.nbytes

    def _release(self, tickets: list[Freed]) -> None:
        for name in tickets:
            try:
                self._arenas[name.segment].free(name.offset, name.generation, self.worker)
                if name.spoilt:
                    self._segments = {stage: of for stage, of in self._segments.items() if of != name.segment}
                    self._arenas[name.segment].retire()
            except (IndexError, TicketInvalid):
                self._counters.count("tickets_invalid")

    # -- the watchdog

    def _hold(self, change: int) -> None:
        self._held += change
        if self._is_gone:
            return
        if self._held > 0 and self._watch is None:
            self._arm()

    def _arm(self) -> None:
        self._watch = asyncio.get_running_loop().call_later(self._hang_s / _LOOKS, self._look)

    def _look(self) -> None:
        """Ask the runner, which answers between two steps, whether it is still with us."""
        self._watch = None
        now = asyncio.get_running_loop().time()
        if self._ponged == self._pinged:
            if self._held <= 0:
                return
            self._pinged += 1
            self._pinged_at = now
            self._control.send(Ping(self._pinged))
        elif now - self._pinged_at > self._hang_s:
            log.warning("event=worker_hung worker=%d stages=%s", self.worker, self.stages)
            self._kill("hung")
            return
        self._arm()


def _itself(link: Link[FromWorker]) -> Link[FromWorker]:
    return link


def _environment(plan: WorkerPlan) -> dict[str, str]:
    threads = dict.fromkeys(_THREAD_VARIABLES, str(plan.threads))
    # Idle compute threads sleep: spinning ones (the default) take whole cores from the other workers.
    return {**threads, "OMP_WAIT_POLICY": "PASSIVE", **plan.environment}
