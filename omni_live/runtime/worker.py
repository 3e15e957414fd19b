"""What a worker process runs.

Forked by the nursery, with two sockets. It learns over the control lane what to load, and ends when that
lane closes, when the server dies, when it was drained, or when an engine raises something that names no turn.
"""

import asyncio
import contextlib
import gc
import importlib
import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import uvloop

from omni_live.engines.contract import Engine, EngineOptions
from omni_live.runtime.drives import Drive, InlineDrive, ThreadedDrive
from omni_live.runtime.fences import FenceTable
from omni_live.runtime.layout import FENCES, socket_path
from omni_live.runtime.links import Link
from omni_live.runtime.outbox import CONTROL, MEDIA, Outbox
from omni_live.runtime.ports import WorkerId
from omni_live.runtime.prctl import set_title
from omni_live.runtime.runner import Runner, RunnerLimits
from omni_live.runtime.wire import (
    FROM_PRODUCER,
    FROM_RECEIVER,
    FROM_SERVER,
    SERVER,
    Chunk,
    Configure,
    FromProducer,
    FromReceiver,
    FromServer,
    Hello,
    Message,
    OpenTurn,
    Ready,
    WireError,
)

EXIT_CRASHED: Final = 70
"""An engine raised something that names no turn; os.EX_SOFTWARE."""
EXIT_BAD_CONFIGURATION: Final = 78
"""An engine could not be imported or made; os.EX_CONFIG."""
_LINGER_S: Final = 1.0
"""After draining, what was said may take so long to leave."""

_TO_RECEIVER: Final = (Chunk, OpenTurn)
"""What goes along the edge; the rest of what workers say to each other goes back to the producer."""

log = logging.getLogger(__name__)

AnyLink = Link[FromServer] | Link[FromReceiver] | Link[FromProducer]


class BadEngine(Exception):
    """An engine's path names nothing that can be imported."""


def engine_class(path: str) -> Callable[[EngineOptions], Engine]:
    """The class that `module:Class` names. Raises BadEngine."""
    module, _, name = path.partition(":")
    try:
        made: Callable[[EngineOptions], Engine] = vars(importlib.import_module(module))[name]
    except (ImportError, KeyError, ValueError) as error:
        raise BadEngine(f"no engine {path!r}") from error
    return made


class Worker:
    """The sockets of one worker process and the drive that its engines run on. One per process."""

    def __init__(self, control: socket.socket, media: socket.socket) -> None:
        self._sockets = (control, media)
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[int, Link[FromServer]] = {}
        self._receivers: dict[int, Link[FromReceiver]] = {}
        self._producers: dict[int, Link[FromProducer]] = {}
        self._configured: asyncio.Future[Configure] = self._loop.create_future()
        self._before: list[FromServer] = []
        """Said before there was anybody to hear it."""
        self._drive: Drive | None = None
        self._server: asyncio.Server | None = None
        self._number = WorkerId(0)
        self._directory = Path()
        self._group = asyncio.TaskGroup()
        self._connecting: set[asyncio.Task[None]] = set()
        self._exit: asyncio.Future[int] = self._loop.create_future()

    async def run(self) -> int:
        """Live until there is a reason to end; the exit status."""
        async with self._group:
            status = await self._live()
            for task in self._connecting:
                task.cancel()
        return status

    async def _live(self) -> int:
        for lane, sock in zip((CONTROL, MEDIA), self._sockets, strict=True):
            self._lanes[lane] = link = Link(FROM_SERVER, self._heard, self._lane_lost)
            await self._loop.create_unix_connection(lambda link=link: link, sock=sock)  # type: ignore[misc]
        await asyncio.wait((self._configured, self._exit), return_when=asyncio.FIRST_COMPLETED)
        if self._exit.done():
            return self._exit.result()
        configure = self._configured.result()
        self._number, self._directory = WorkerId(configure.worker), Path(configure.directory)
        set_title(configure.title)
        try:
            drive = self._make_drive(configure)
        except BadEngine:
            log.exception("event=bad_configuration worker=%d", self._number)
            return EXIT_BAD_CONFIGURATION
        path = socket_path(self._directory, self._number)
        # Kept: uvloop closes a server that nobody refers to.
        self._server = await self._loop.create_unix_server(self._greet, path=str(path))
        self._drive = drive
        drive.start()
        for link in self._lanes.values():
            link.receive = partial(drive.receive, SERVER)
        before, self._before = self._before, []
        if before:
            drive.receive(SERVER, before, 0)
        status = await self._exit
        await self._leave(status)
        return status

    def _make_drive(self, configure: Configure) -> Drive:
        engines = {
            stage.name: engine_class(stage.engine)(EngineOptions(stage.options, self._number))
            for stage in configure.stages
        }
        outbox = Outbox(self._directory, self._number, configure.arena_bytes)
        fences = FenceTable.open(self._directory / FENCES)
        limits = RunnerLimits(kept_bytes=configure.kept_bytes)

        def build(wake: Callable[[], None]) -> Runner:
            return Runner(self._number, engines, fences, outbox, wake=wake, limits=limits)

        inline = all(engine.inline for engine in engines.values())
        kind = InlineDrive if inline else ThreadedDrive
        return kind(self._loop, self, outbox, build)

    async def _leave(self, status: int) -> None:
        """Let what was said leave, then let the engines go."""
        links: tuple[AnyLink, ...] = (*self._receivers.values(), *self._producers.values(), *self._lanes.values())
        for link in links:
            link.close()
        if status == 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_S):
                    for link in links:
                        await link.gone.wait()
        if self._drive is not None:
            self._drive.stop()

    # -- drives.Shell

    def post(self, said: Sequence[tuple[int, Message]]) -> None:
        try:
            for target, message in said:
                if target < 0:
                    self._lanes[target].send(message)
                elif isinstance(message, _TO_RECEIVER):
                    (self._receivers.get(target) or self._connect(target)).send(message)
                else:
                    producer = self._producers.get(target)
                    if producer is not None:
                        producer.send(message)
        except WireError:
            log.exception("event=engine_crashed")  # an engine put something into a payload that cannot travel
            self.crashed()

    def loaded(self) -> None:
        gc.collect()
        gc.freeze()  # weights and modules never die: no later collection walks through them
        log.info("event=ready worker=%d", self._number)
        self._lanes[CONTROL].send(Ready())

    def drained(self) -> None:
        log.info("event=drained worker=%d", self._number)
        self._end(0)

    def crashed(self) -> None:
        self._end(EXIT_CRASHED)

    def hold(self, full: bool) -> None:
        links: list[Link[FromServer] | Link[FromProducer]] = [self._lanes[MEDIA], *self._producers.values()]
        for link in links:
            if full:
                link.pause_reading()
            else:
                link.resume_reading()

    # -- the server

    def _heard(self, messages: list[FromServer], nbytes: int) -> None:
        """Keep what is said before there is somebody to hear it."""
        for message in messages:
            if isinstance(message, Configure) and not self._configured.done():
                self._configured.set_result(message)
            else:
                self._before.append(message)

    def _lane_lost(self, reason: str) -> None:
        if not self._exit.done():
            log.info("event=server_gone worker=%d reason=%s", self._number, reason)
        self._end(0)

    def _end(self, status: int) -> None:
        if not self._exit.done():
            self._exit.set_result(status)

    # -- other workers

    def _connect(self, worker: int) -> Link[FromReceiver]:
        """A link to a receiver, usable at once; what is said before it is up waits for it."""

        def lost(reason: str) -> None:
            log.info("event=receiver_lost worker=%d peer=%d reason=%s", self._number, worker, reason)
            self._receivers.pop(worker, None)
            self._its_drive.lost(worker, receiver=True)

        link: Link[FromReceiver] = Link(FROM_RECEIVER, partial(self._its_drive.receive, worker), lost)
        self._receivers[worker] = link
        link.send(Hello(self._number))
        task = self._group.create_task(self._reach(worker, link))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return link

    async def _reach(self, worker: int, link: Link[FromReceiver]) -> None:
        try:
            await self._loop.create_unix_connection(lambda: link, path=str(socket_path(self._directory, worker)))
        except OSError as error:
            link.fail(type(error).__name__)

    def _greet(self) -> Link[FromProducer]:
        """Somebody connects: a producer, as soon as it has said who it is."""
        peer: list[int] = []

        def heard(messages: list[FromProducer], nbytes: int) -> None:
            first = messages.pop(0)
            if not isinstance(first, Hello) or first.worker <= SERVER:
                link.fail("bad_frame")
                return
            peer.append(first.worker)
            self._producers[first.worker] = link
            link.receive = partial(self._its_drive.receive, first.worker)
            if messages:
                link.receive(messages, nbytes)

        def lost(reason: str) -> None:
            if peer and self._producers.get(peer[0]) is link:
                log.info("event=producer_lost worker=%d peer=%d reason=%s", self._number, peer[0], reason)
                del self._producers[peer[0]]
                self._its_drive.lost(peer[0], receiver=False)

        link: Link[FromProducer] = Link(FROM_PRODUCER, heard, lost)
        return link

    @property
    def _its_drive(self) -> Drive:
        if self._drive is None:
            raise RuntimeError("a worker without engines")
        return self._drive


async def _live(control: socket.socket, media: socket.socket) -> int:
    return await Worker(control, media).run()


def live(control: socket.socket, media: socket.socket) -> int:
    """Be a worker whose server is at the other end of these, until there is a reason to end; the exit status."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_live(control, media))
