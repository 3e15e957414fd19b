"""One end of a socket between two of our processes: frames in, frames out, and one answer to everything that is wrong.

What waits for a peer that does not read is bounded by `max_backlog`. Flow control (credits) keeps honest peers far
below it, so whoever reaches it is wedged: the link is aborted, as it is after a bad frame, and its loss is reported.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast

import msgspec

from omni_live.runtime.wire import LENGTH_BYTES, MAX_FRAME, Message, frame

M_co = TypeVar("M_co", covariant=True)
R = TypeVar("R")

_LENGTH = struct.Struct("<I")
_BAD = (msgspec.DecodeError, ValueError, RecursionError)
"""What the decoder raises for bytes that are no message."""


class Decoder(Protocol[M_co]):
    def decode(self, buf: bytes | memoryview, /) -> M_co: ...


class Link(asyncio.Protocol, Generic[R]):
    """Messages of one direction's union come in; `receive` gets all of those that arrived together.

    `receive` may be set anew: who hears what follows may depend on what came first.
    `lost` is called exactly once, with a stable reason: closed, bad_frame, overflow, or what the system called it.
    """

    def __init__(
        self,
        decoder: Decoder[R],
        receive: Callable[[list[R], int], None],
        lost: Callable[[str], None],
        *,
        max_frame: int = MAX_FRAME,
        max_backlog: int = 2 * MAX_FRAME,
    ) -> None:
        self._decode = decoder.decode
        self.receive = receive
        self._lost = lost
        self._max_frame = max_frame
        self._max_backlog = max_backlog
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []
        self._early_bytes = 0
        self._tail = bytearray()
        self._need = 0
        """Bytes that `_tail` must have before it is worth another look."""
        self._fault = ""
        self._up = False
        self._ending = False
        self._over = False
        self.gone = asyncio.Event()
        """Set once the link is lost, however."""

    def send(self, message: Message) -> None:
        """Frames that are sent before the link is up wait for it; on a lost link they go nowhere.

        Raises WireError for a message that cannot travel.
        """
        data = frame(message)
        if self._transport is not None:
            self._transport.write(data)
        elif not (self._over or self._ending):
            self._early.append(data)
            self._early_bytes += len(data)
            if self._early_bytes > self._max_backlog:
                self.fail("overflow")

    def close(self) -> None:
        """Send what waits, then close."""
        self._ending = True
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        elif not self._over and not self._up:
            self.connection_lost(None)

    def fail(self, reason: str) -> None:
        """Abort at once; also for a link that never came up."""
        self._fault = self._fault or reason
        self._ending = True
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        elif not self._over and not self._up:
            self.connection_lost(None)

    def pause_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's stream transports have the interface of asyncio.Transport without being of that class.
        stream = cast("asyncio.Transport", transport)
        if self._over:
            stream.abort()
            return
        stream.set_write_buffer_limits(high=self._max_backlog)
        self._transport = stream
        self._up = True
        early, self._early = self._early, []
        if early:
            stream.writelines(early)

    def pause_writing(self) -> None:
        self.fail("overflow")

    def data_received(self, data: bytes) -> None:
        size = len(data)
        if not self._tail and size > LENGTH_BYTES and size == LENGTH_BYTES + _LENGTH.unpack_from(data)[0]:
            try:
                message = self._decode(memoryview(data)[LENGTH_BYTES:])
            except _BAD:
                self.fail("bad_frame")
            else:
                self.receive([message], size)
            return
        if self._tail:
            self._tail += data
            if len(self._tail) < self._need:
                return
            data, self._tail = bytes(self._tail), bytearray()
        messages: list[R] = []
        taken = self._parse(data, messages)
        if taken < len(data):
            self._tail = bytearray(memoryview(data)[taken:])
        if messages:
            self.receive(messages, taken)

    def connection_lost(self, error: Exception | None) -> None:
        if self._over:
            return
        self._over = True
        self.gone.set()
        self._transport = None
        self._early.clear()
        self._tail.clear()
        reason = self._fault or ("closed" if error is None else type(error).__name__)
        self._lost(reason)

    def _parse(self, data: bytes, messages: list[R]) -> int:
        """Decode all complete frames; how many bytes they took."""
        view = memoryview(data)
        start, end = 0, len(data)
        self._need = LENGTH_BYTES
        while end - start >= LENGTH_BYTES:
            body = start + LENGTH_BYTES
            (size,) = _LENGTH.unpack_from(data, start)
            if size > self._max_frame:
                self.fail("bad_frame")
                return end
            if end - body < size:
                self._need = LENGTH_BYTES + size
                break
            try:
                messages.append(self._decode(view[body : body + size]))
            except _BAD:
                self.fail("bad_frame")
                return end
            start = body + size
        return start
