"""uvicorn's two protocols with what they lack: deadlines and a cap, and a transport that can be aborted.

uvicorn's httptools protocol keeps a silent or half-spoken connection for ever, and both let a send wait for ever for a
reader that stopped reading.
"""

import asyncio
from asyncio.transports import BaseTransport
from typing import Any, ClassVar, Final

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from omni_live.protocols.websocket import TRANSPORT_KEY

MAX_HEAD_BYTES: Final = 64 * 1024


class Http(HttpToolsProtocol):
    """HTTP with `header_deadline_s` from the first byte of a connection, or of a later request, to its headers' end.

    What was written must have left within `write_deadline_s`, so larger answers are to be written in pieces.
    """

    header_deadline_s: ClassVar[float] = 5.0
    write_deadline_s: ClassVar[float] = 5.0

    _deadline: asyncio.TimerHandle | None = None
    _unwritten: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # whatever waits there is said to wait
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._written()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unwritten is None:
            self._unwritten = self.loop.call_later(self.write_deadline_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._written()
        super().resume_writing()

    def _written(self) -> None:
        if self._unwritten is not None:
            self._unwritten.cancel()
            self._unwritten = None

    def data_received(self, data: bytes) -> None:
        if self._deadline is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._deadline is not None and self._head_bytes > MAX_HEAD_BYTES:
            self._disarm()
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._deadline is None:
            self._arm()

    def on_headers_complete(self) -> None:
        self._disarm()
        super().on_headers_complete()

    def _arm(self) -> None:
        self._head_bytes = 0
        self._deadline = self.loop.call_later(self.header_deadline_s, self._late)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self.transport.close()


class WebSocket(WebSocketsSansIOProtocol):
    """A websocket whose application finds its `Transport` in the scope.

    The write buffer is empty or the socket is not writable: nothing waits where a fence cannot purge it.
    """

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.set_write_buffer_limits(high=0)

    async def run_asgi(self) -> None:
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope[TRANSPORT_KEY] = _Transport(self)
        await super().run_asgi()

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            # uvicorn would otherwise log each refused upgrade as an application that did not answer
            self.handshake_complete = True


class _Transport:
    """See omni_live.protocols.websocket.Transport."""

    def __init__(self, protocol: WebSocket) -> None:
        self._protocol = protocol

    @property
    def is_writable(self) -> bool:
        return self._protocol.writable.is_set()

    async def writable(self) -> None:
        await self._protocol.writable.wait()

    def abort(self) -> None:
        self._protocol.transport.abort()


def http_with(header_deadline_s: float, write_deadline_s: float) -> type[Http]:
    """The HTTP protocol with these deadlines."""
    deadlines = {"header_deadline_s": header_deadline_s, "write_deadline_s": write_deadline_s}
    return type("HttpWithDeadlines", (Http,), deadlines)
