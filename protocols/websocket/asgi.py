"""One websocket connection over ASGI: two tasks, one that reads and one that writes.

A send never starts before the socket takes it, so that what a fence purges is still here and not in a buffer; a
socket that takes nothing within the write deadline is aborted, because no keepalive frees a handler that is stuck in
a send to a reader that stopped reading.
"""

import asyncio
import json
import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, Final, Protocol

from omni_live.protocols.websocket import OWNER_KEY, TRANSPORT_KEY, Meter, Transport
from omni_live.protocols.websocket.outbox import TOO_BIG, Closing, Outbox
from omni_live.sessions.effects import Emit

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

Frame = str | bytes

_EARLY_BYTES: Final = 1024 * 1024
"""Frames taken while the session is not open yet; beyond it the client's socket fills up."""

_FRAMES_PER_BREATH: Final = 64
"""A client that sends faster than it is read must not keep the others waiting."""


class Encode(Protocol):
    def frames(self, emit: Emit) -> list[Frame]: ...


class Connection:
    """A websocket, from the upgrade request to its end."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, *, frame_bytes: int, write_deadline_s: float, meter: Meter
    ) -> None:
        self._receive = receive
        self._send = send
        self._frame_bytes = frame_bytes
        self._deadline_s = write_deadline_s
        self._meter = meter
        self._transport: Transport = scope[TRANSPORT_KEY]
        self._early: deque[Frame] = deque()
        self._gone = False
        self.accepted = False
        self.owner: str = scope.get(OWNER_KEY, "")
        self.offered: list[str] = scope["subprotocols"]

    # -- before the session ----------------------------------------------------------------------------------------

    async def connected(self) -> bool:
        """Wait for the upgrade request; False where the client is gone already."""
        message = await self._receive()
        return bool(message["type"] == "websocket.connect")

    async def accept(self, subprotocol: str | None = None) -> None:
        await self._send({"type": "websocket.accept", "subprotocol": subprotocol, "headers": []})
        self.accepted = True

    async def reject(self, status: int, code: str, message: str, retry_after_s: float | None = None) -> None:
        """Answer the upgrade request with an HTTP error in OpenAI's form."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(retry_after_s))).encode()))
        await self._send({"type": "websocket.http.response.start", "status": status, "headers": headers})
        await self._send({"type": "websocket.http.response.body", "body": body})

    async def unless_gone(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do the work, or give it up where the client goes away meanwhile; True where it was done.

        The work must take care of what it acquired when it is cancelled, and must not raise.
        """
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work)
            watch = group.create_task(self._watch(task))
            await asyncio.wait({task})
            watch.cancel()
        return not task.cancelled()

    async def _watch(self, task: asyncio.Task[None]) -> None:
        early = 0
        while early < _EARLY_BYTES:
            frame = await self._read()
            if frame is None:
                task.cancel()
                return
            self._early.append(frame)
            early += len(frame)

    # -- frames ----------------------------------------------------------------------------------------------------

    async def receive(self) -> Frame | None:
        """The next frame, None once the client is gone."""
        return self._early.popleft() if self._early else await self._read()

    async def _read(self) -> Frame | None:
        if self._gone:
            return None
        message = await self._receive()
        if message["type"] != "websocket.receive":
            self._gone = True
            return None
        text: str | None = message.get("text")
        frame: Frame = (message.get("bytes") or b"") if text is None else text
        if len(frame) > self._frame_bytes:
            self._gone = True
            await self.close(TOO_BIG, "frame_too_large")
            return None
        return frame

    async def ready(self) -> bool:
        """Wait until the socket takes a frame; False where it takes none, and then the connection is aborted."""
        return await self._writable(self._deadline_s)

    async def send(self, frame: Frame) -> bool:
        """Hand one frame to the socket; False where it takes none, and then the connection is aborted."""
        if not await self._writable(self._deadline_s):
            return False
        await self._hand(frame)
        return True

    async def send_fresh(self, frame: Callable[[], Frame]) -> bool:
        """As `send`, of what `frame` gives at the moment when the socket takes it."""
        if not await self._writable(self._deadline_s):
            return False
        await self._hand(frame())
        return True

    async def close(self, code: int, reason: str) -> None:
        if await self._writable(min(1.0, self._deadline_s)):
            await self._send({"type": "websocket.close", "code": code, "reason": reason})

    def abort(self) -> None:
        """Drop the connection now."""
        self._transport.abort()

    async def converse(self, outbox: Outbox, encode: Encode, hear: Callable[[Frame], None]) -> None:
        """Give every frame to `hear` and send what the outbox holds, until either side ends it."""
        more = asyncio.Event()
        outbox.wake = more.set
        more.set()
        try:
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(self._write(outbox, encode, more))
                await self._hear(hear)
                writer.cancel()
        finally:
            outbox.clear()

    async def _hear(self, hear: Callable[[Frame], None]) -> None:
        count = 0
        while (frame := await self.receive()) is not None:
            hear(frame)
            count += 1
            if count % _FRAMES_PER_BREATH == 0:
                await asyncio.sleep(0)

    async def _write(self, outbox: Outbox, encode: Encode, more: asyncio.Event) -> None:
        try:
            while await self._writable(self._deadline_s):
                emit = outbox.next()
                if emit is not None:
                    await self._hand_event(emit, outbox, encode)
                elif outbox.closing is not None:
                    await self._end(outbox.closing)
                    return
                else:
                    more.clear()
                    await more.wait()
        except OSError:
            return  # ASGI's way to say that the client has gone; the reader hears of it, behind what was said last

    async def _hand_event(self, emit: Emit, outbox: Outbox, encode: Encode) -> None:
        for frame in encode.frames(emit):
            if not await self._writable(self._deadline_s):
                return
            if not outbox.admits(emit.content):
                self._meter.dropped("fenced_content")
                return
            await self._hand(frame)
            if emit.content is not None:
                self._meter.content_handed(len(frame))

    async def _hand(self, frame: Frame) -> None:
        if isinstance(frame, str):
            await self._send({"type": "websocket.send", "text": frame})
        else:
            await self._send({"type": "websocket.send", "bytes": frame})

    async def _end(self, closing: Closing) -> None:
        await self.close(closing.code, closing.reason)

    async def _writable(self, deadline_s: float) -> bool:
        if self._transport.is_writable:
            return True
        try:
            async with asyncio.timeout(deadline_s):
                await self._transport.writable()
        except TimeoutError:
            self._meter.connection_lost("write_deadline")
            self._transport.abort()
            return False
        return True
