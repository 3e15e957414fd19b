"""The server's life: start the workers, open the port, wait for a signal, drain, end.

The port is open from the beginning, so that a supervisor can ask how far the start is; sessions are refused until
every stage is ready. The first SIGTERM or SIGINT drains: not ready at once, no new sessions, running turns may finish
for `drain_s`; the second ends it now.
"""

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import uvicorn
from starlette.routing import BaseRoute

from omni_live.config.plan import Plan
from omni_live.runtime.orchestrator import Orchestrator
from omni_live.runtime.running import Runtime, running
from omni_live.server.app import Doors, http_app
from omni_live.server.auth import LOOPBACK_NAMES, App, Gate, Keys, is_loopback
from omni_live.server.desk import FrontDesk
from omni_live.server.doors import http_routes, models, openpi_door, websocket_doors
from omni_live.server.metrics import Metrics
from omni_live.server.uvicorn_protocols import WebSocket, http_with
from omni_live.sessions.admission import NS_PER_S
from omni_live.sessions.limits import Limits

Say = Callable[[str], None]
"""Takes one line for whoever started the server."""

Ready = Callable[[str, int], None]
"""Called once, with host and port, when every stage is ready."""

_BACKLOG: Final = 2048
_UNSENT_BYTES: Final = 64 * 1024
"""What the kernel may hold that it could not send yet, a second of sound. By itself it takes megabytes from us, which
no fence reaches, and in which a reader that stopped reading goes unnoticed."""
_FLUSH_S: Final = 2.0
"""After the last session closed its farewell may take so long to leave."""
_START_LOOK_S: Final = 0.02


class StartError(Exception):
    """The server cannot start; the sentence says why."""


class Stop:
    """What the signals ask for."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()

    def ask(self) -> None:
        if self.asked.is_set():
            self.hurried.set()
        self.asked.set()

    async def wait_hurried(self) -> None:
        await self.hurried.wait()

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


class Port:
    """uvicorn on one socket, without its signals and its clock tick."""

    def __init__(self, app: App, listening: socket.socket, limits: Limits, frame_bytes: int | None = None) -> None:
        """`frame_bytes` is the largest frame of any websocket door on this port; None: `client_frame_bytes`."""
        config = uvicorn.Config(
            app,
            http=http_with(limits.header_deadline_s, limits.write_deadline_s),
            ws=WebSocket,
            ws_max_size=limits.client_frame_bytes if frame_bytes is None else frame_bytes,
            ws_ping_interval=limits.ping_s,
            ws_ping_timeout=limits.ping_timeout_s,
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=round(_FLUSH_S),
        )
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._socket = listening

    async def open(self) -> None:
        await self._server.startup(sockets=[self._socket])

    async def close(self) -> None:
        """Let what was said leave, then end every connection."""
        tasks = tuple(self._server.server_state.tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=_FLUSH_S)
        await self._server.shutdown(sockets=[self._socket])


def listen(host: str, port: int, limits: Limits) -> socket.socket:
    """A listening socket whose connections drop a peer that acknowledges nothing. Raises StartError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartError(f"cannot listen on {host}: {error.strerror}") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        user_timeout_ms = round(limits.tcp_user_timeout_s * 1000)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, user_timeout_ms)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listening


async def serve(plan: Plan, say: Say, ready: Ready, stop: Stop | None = None) -> None:
    """Run the server until it is told to stop. Raises StartError."""
    _check(plan)
    stop = stop or Stop()
    began = time.monotonic()
    limits, server = plan.limits, plan.server
    metrics = Metrics()
    with ExitStack() as sockets:
        listening = sockets.enter_context(listen(server.host, server.port, limits))
        aside = None
        if server.metrics_port is not None:
            aside = sockets.enter_context(listen(server.host, server.metrics_port, limits))
        robots = None
        if server.openpi_port is not None:
            robots = sockets.enter_context(listen(server.host, server.openpi_port, limits))
        sockets.enter_context(stop.on_signals())
        async with running(plan, metrics) as runtime:
            desk = FrontDesk(plan, runtime.orchestrator, runtime.slots, runtime.clock, metrics)
            metrics.watch(desk)
            http = _http(plan, runtime.orchestrator, desk, metrics)
            speaking = _http(plan, runtime.orchestrator, desk, metrics, http_routes(plan, desk, metrics))
            frame_bytes = max(limits.client_frame_bytes, limits.openpi_frame_bytes)  # each door has its own bound, too
            ports = [
                Port(_gate(plan, Doors(speaking, websocket_doors(plan, desk, metrics))), listening, limits, frame_bytes)
            ]
            if robots is not None:
                doors = Doors(http, {}, openpi_door(plan, desk, metrics))
                ports.append(Port(_gate(plan, doors), robots, limits, frame_bytes))
            if aside is not None:
                ports.append(Port(_gate(plan, Doors(http, {})), aside, limits))
            for port in ports:
                await port.open()
            async with asyncio.TaskGroup() as group:
                starting = group.create_task(_started(runtime.orchestrator, began, say))
                starting.add_done_callback(_telling(listening, began, say, ready))
                await stop.asked.wait()
                starting.cancel()
            await _drain(desk, runtime, stop, limits.drain_s)
            for port in ports:
                await port.close()
            runtime.orchestrator.pools.stop()


def _check(plan: Plan) -> None:
    if not plan.server.api_keys and not is_loopback(plan.server.host):
        raise StartError(
            f"{plan.server.host} can be reached from other machines, and there is no API key: "
            "give one with --api-key, or listen on 127.0.0.1."
        )


def _gate(plan: Plan, app: App) -> Gate:
    server = plan.server
    hosts: set[str] | None = {*LOOPBACK_NAMES, server.host, *server.hosts}
    if not is_loopback(server.host) and not server.hosts:
        hosts = None
    return Gate(app, Keys(server.api_keys), hosts, server.origins)


def _http(
    plan: Plan, orchestrator: Orchestrator, desk: FrontDesk, metrics: Metrics, routes: Iterable[BaseRoute] = ()
) -> App:
    def unready() -> list[str]:
        if desk.draining:
            return ["draining"]
        return [f"{pipeline}/{stage}" for pipeline, stage in orchestrator.pools.unready()]

    return http_app(metrics, unready, lambda: models(plan), routes)


async def _started(orchestrator: Orchestrator, began: float, say: Say) -> None:
    """Tell of each stage that becomes ready, and of those that keep crashing, until all are ready."""
    missing = set(orchestrator.pools.unready())
    broken: set[tuple[str, str]] = set()
    while missing:
        await asyncio.sleep(_START_LOOK_S)
        left = set(orchestrator.pools.unready())
        for pipeline, stage in sorted(missing - left):
            say(f"{pipeline}/{stage} ready in {time.monotonic() - began:.1f} s")
        for pipeline, stage in sorted(set(orchestrator.pools.open_breakers()) - broken):
            say(f"{pipeline}/{stage} crashes again and again; its worker's output above says why")
        broken = set(orchestrator.pools.open_breakers())
        missing = left


def _telling(listening: socket.socket, began: float, say: Say, ready: Ready) -> Callable[[asyncio.Task[None]], None]:
    def tell(started: asyncio.Task[None]) -> None:
        if started.cancelled() or started.exception() is not None:
            return
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        ready(host, port)
        say(f"ready on http://{shown}:{port} in {time.monotonic() - began:.1f} s")

    return tell


async def _drain(desk: FrontDesk, runtime: Runtime, stop: Stop, drain_s: float) -> None:
    """Let running turns finish, for `drain_s` or until somebody is in a hurry; then close what is left."""
    desk.drain(runtime.clock.now() + round(drain_s * NS_PER_S))
    async with asyncio.TaskGroup() as group:
        ends = {group.create_task(desk.emptied()), group.create_task(stop.wait_hurried())}
        await asyncio.wait(ends, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
    desk.close_all("drained")
