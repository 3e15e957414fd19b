"""A policy server over real sockets that does what a test scripts: the door's words, none of its sessions.

`plain` makes it OpenPI's own: no contract, no ids, one answer after another, what went wrong as text.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import numpy as np
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from omni_live.protocols.images import decode_images
from omni_live.protocols.openpi import codec, dialects
from omni_live.protocols.openpi.dialects import Dialect, Infer, Reset
from omni_live.protocols.openpi.tabletop import CONTRACT


@dataclass(frozen=True)
class No:
    """A request is refused."""

    code: str
    message: str = "no"


class PolicyServer:
    def __init__(self) -> None:
        self.url = ""
        self.plain = False
        self.metadata: object = CONTRACT.metadata()
        self.greeting: str | None = None
        """Sent instead of the metadata."""
        self.http_status: int | None = None
        self.close_at_once: int | None = None
        """Hang up with this code instead of a greeting."""
        self.requests: list[Infer] = []
        self.resets: list[Reset] = []
        self.frames: list[bytes] = []
        self.headers: list[str | None] = []
        self.sockets: list[ServerConnection] = []
        self.policy: Callable[[Infer], object | Awaitable[object]] = lambda _: np.full((16, 2), 0.25, np.float32)
        """Gives a chunk, a No, or None for no answer at all."""
        self.timing: dict[str, int | float | bool] = {"infer_ms": 1.5, "queue_ms": 0.5, "batch": 1, "replica": 0}
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(true)

    async def handle(self, socket: ServerConnection) -> None:
        self.sockets.append(socket)
        self.headers.append(socket.request.headers.get("Authorization"))
        try:
            if self.close_at_once is not None:
                await socket.close(self.close_at_once)
                return
            await socket.send(codec.pack(self.metadata) if self.greeting is None else self.greeting)
            await self._note()
            async for frame in socket:
                self.frames.append(frame)
                asked = dialects.read(decode_images(codec.unpack(frame)))
                if self.plain:
                    await self._answer(socket, asked)
                else:
                    task = asyncio.create_task(self._answer(socket, asked))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
        except ConnectionClosed:
            pass
        finally:
            await self._note()

    async def _answer(self, socket: ServerConnection, asked: Infer | Reset) -> None:
        with contextlib.suppress(ConnectionClosed):
            if isinstance(asked, Reset):
                self.resets.append(asked)
                await socket.send(dialects.reset_reply(asked))
            else:
                self.requests.append(asked)
                await self._note()
                answer = self.policy(asked)
                if asyncio.iscoroutine(answer):
                    answer = await answer
                if answer is not None:
                    await socket.send(self._frame(asked, answer))
        await self._note()

    def _frame(self, asked: Infer, answer: object) -> str | bytes:
        match answer:
            case No(code, message):
                return dialects.error(Dialect.OPENPI, code, message, asked.request_id)
            case str() | bytes():
                return answer
            case np.ndarray():
                return dialects.reply(asked, answer, self.timing)
        raise AssertionError(answer)

    async def _note(self) -> None:
        async with self._changed:
            self._changed.notify_all()


@contextlib.asynccontextmanager
async def policy_server() -> AsyncIterator[PolicyServer]:
    server = PolicyServer()

    def process_request(connection: ServerConnection, request: object) -> object:
        if server.http_status is None:
            return None
        response = connection.respond(server.http_status, "no\n")
        response.headers["Retry-After"] = "3"
        return response

    async with serve(
        server.handle, "127.0.0.1", 0, compression=None, max_size=None, process_request=process_request, close_timeout=1
    ) as listener:
        server.url = f"ws://127.0.0.1:{listener.sockets[0].getsockname()[1]}/openpi"
        yield server
        for task in tuple(server._tasks):
            task.cancel()
