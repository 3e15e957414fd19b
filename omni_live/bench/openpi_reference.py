"""The yardstick of `bench robots`: a policy server of the pattern that robot teams run today.

It stands for OpenPI's `WebsocketPolicyServer` and those made after it: one asyncio process, the `websockets` package,
msgpack with numpy arrays, and the policy called where the request is read, in the connection's handler. So no other
connection is served while the policy works, and requests are never put together. It has no sessions, checks nothing,
and its policy is a stand-in that answers zeros: what is measured is the pattern.

`python -m omni_live.bench.openpi_reference --ready-file FILE` listens on a free port of loopback, which it writes to
FILE. The policy works for `--delay-ms`, or for as long as the observation's own `delay_ms` says.
"""

import argparse
import asyncio
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgpack
import numpy as np
from numpy.typing import NDArray
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from omni_live.protocols.openpi.fake_contract import DIM, HORIZON


def pack(value: object) -> bytes:
    """A message as OpenPI's clients and servers write it."""
    packed = msgpack.packb(value, default=_marked)
    assert isinstance(packed, bytes)
    return packed


def unpack(frame: str | bytes) -> object:
    """A message as they read it. For frames of one's own server only: it takes what a frame says for granted."""
    return msgpack.unpackb(frame, object_hook=_array)


def _marked(value: object) -> dict[bytes, object]:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a {type(value).__name__} cannot be packed")
    return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}


def _array(found: dict[object, object]) -> object:
    match found:
        case {b"__ndarray__": _, b"data": bytes(data), b"dtype": str(dtype), b"shape": list(shape)}:
            return np.ndarray(tuple(shape), np.dtype(dtype), data)
        case _:
            return found


class Policy:
    """Answers zeros, after a while."""

    def __init__(self, delay_ms: float) -> None:
        self._delay_ms = delay_ms

    def infer(self, observation: Mapping[str, object]) -> dict[str, NDArray[np.float32]]:
        delay_ms = observation.get("delay_ms", self._delay_ms)
        if isinstance(delay_ms, int | float) and delay_ms > 0:
            time.sleep(delay_ms / 1000)
        return {"actions": np.zeros((HORIZON, DIM), np.float32)}


class Server:
    """One handler a connection; each calls the policy itself."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    async def handle(self, socket: ServerConnection) -> None:
        try:
            await socket.send(pack({}))
            total_ms: float | None = None
            while True:
                observation = unpack(await socket.recv())
                if not isinstance(observation, dict):
                    return
                began = time.monotonic()
                action: dict[str, object] = {**self._policy.infer(observation)}
                timing = {"infer_ms": (time.monotonic() - began) * 1000}
                if total_ms is not None:
                    timing["prev_total_ms"] = total_ms
                await socket.send(pack({**action, "server_timing": timing}))
                total_ms = (time.monotonic() - began) * 1000
        except ConnectionClosed:
            return


async def run(delay_ms: float, ready: Path) -> None:
    """Serve until SIGTERM."""
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    async with serve(Server(Policy(delay_ms)).handle, "127.0.0.1", 0, compression=None, max_size=None) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        unfinished = ready.with_name(f".{ready.name}")
        unfinished.write_text(f"{port}\n")
        unfinished.replace(ready)
        await over.wait()


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m omni_live.bench.openpi_reference")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="how long the policy works (%(default)s)")
    parser.add_argument("--ready-file", type=Path, required=True, metavar="FILE", help="where the port goes")
    asked = parser.parse_args(given)
    asyncio.run(run(asked.delay_ms, asked.ready_file))


if __name__ == "__main__":
    main()
