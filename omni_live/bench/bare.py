"""The yardstick of `bench hops`: a bare chain of Unix sockets, with nothing on it but framing.

`python -m omni_live.bench.bare LISTEN NEXT` runs one link of it: whatever comes in on LISTEN goes out to NEXT.
"""

import asyncio
import struct
import sys
from collections.abc import Callable
from typing import cast

import uvloop

_LENGTH = struct.Struct("<I")


class Frames(asyncio.Protocol):
    """Cuts a stream into frames of a 4-byte length and a body."""

    def __init__(self, got: Callable[[bytes], None]) -> None:
        self._got = got
        self._rest = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        at, end = 0, len(data)
        while end - at >= _LENGTH.size:
            stop = at + _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
            if stop > end:
                break
            self._got(data[at + _LENGTH.size : stop])
            at = stop
        self._rest = data[at:]

    def send(self, body: bytes) -> None:
        if self.transport is not None:
            self.transport.write(_LENGTH.pack(len(body)) + body)


async def link(listen: str, onward: str) -> None:
    """Pass frames on until the incoming side closes."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()

    class Incoming(Frames):
        def connection_lost(self, exc: Exception | None) -> None:
            over.set()

    def ignore(_: bytes) -> None:
        """Nothing comes back from the next link."""

    _, out = await loop.create_unix_connection(lambda: Frames(ignore), onward)
    server = await loop.create_unix_server(lambda: Incoming(out.send), listen)
    print("listening", flush=True)
    await over.wait()
    server.close()


if __name__ == "__main__":
    uvloop.run(link(sys.argv[1], sys.argv[2]))
