"""A client of /v1/duplex that does what a test says and nothing by itself, and keeps everything that it hears."""

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from omni_live.clients.duplex_wire import MSGPACK_SUBPROTOCOL, decode, encode
from omni_live.clients.wav import read_pcm

VOICES: Final = Path(__file__).resolve().parents[1] / "data" / "voice"
HEARS_HZ: Final = 16_000
SPEAKS_HZ: Final = 24_000
SOON_S: Final = 30.0

FRANCE: Final = "00_kokf.wav"
PLANETS: Final = "02_kokf.wav"
DINNER: Final = "05_kokm.wav"

Event = Mapping[str, Any]
Holds = Callable[[Event], bool]


def speech(name: str) -> bytes:
    """A recording of a user, silence behind it included: int16 mono at 16 kHz."""
    return read_pcm(VOICES / name, HEARS_HZ).astype("<i2").tobytes()


def silence(seconds: float) -> bytes:
    return bytes(2 * round(seconds * HEARS_HZ))


def settings(seed: int = 7, tokens: int | None = 24, lead_ms: int = 0, **more: Any) -> dict[str, Any]:
    """A session object: 16 kHz in, 24 kHz out, replies of a few words, sent as soon as they are there."""
    own = {"input_rate_hz": HEARS_HZ, "output_rate_hz": SPEAKS_HZ, "seed": seed, "lead_ms": lead_ms}
    short = {} if tokens is None else {"max_output_tokens": tokens}
    return {"type": "realtime", **short, "omni_live": {**own, **more.pop("omni_live", {})}, **more}


class Caller:
    """One connection. Events stay in `events`, each with `at_s`, when it was read; `wait` looks on from there."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.events: list[dict[str, Any]] = []
        self.closed: ConnectionClosed | None = None
        self.session_id = ""
        self.token = ""
        self._looked = 0
        self._news = asyncio.Condition()

    async def read(self) -> None:
        """Take what comes until the connection ends."""
        try:
            async for frame in self.socket:
                await self._take(frame)
            await self.socket.recv()
        except ConnectionClosed as closed:
            self.closed = closed
        async with self._news:
            self._news.notify_all()

    async def _take(self, frame: str | bytes) -> None:
        event = {**decode(frame).values, "at_s": time.monotonic()}
        if event["type"] in ("session.created", "session.resumed"):
            self.session_id, self.token = event["session_id"], event["resume_token"]
        async with self._news:
            self.events.append(event)
            self._news.notify_all()

    # -- what it says --------------------------------------------------------------------------------------------

    async def send(self, type: str, **fields: Any) -> None:
        binary = self.socket.subprotocol == MSGPACK_SUBPROTOCOL
        await self.socket.send(encode({"type": type, **fields}, binary=binary))

    async def say(self, pcm: bytes, piece_s: float = 0.1) -> None:
        """Audio as fast as it goes: what the server makes of it depends on samples, not on when they come."""
        size = 2 * round(piece_s * HEARS_HZ)
        for at in range(0, len(pcm), size):
            await self.send("input_audio_buffer.append", audio=pcm[at : at + size])

    async def update(self, session: Mapping[str, Any]) -> None:
        await self.send("session.update", session=session)
        await self.wait("session.updated")

    async def ask(self, text: str) -> dict[str, Any]:
        """A typed turn, heard out; its response."""
        await self.send("input.text.append", text=text)
        return await self.answer()

    async def speak(self, name: str) -> dict[str, Any]:
        """A spoken turn, heard out; its response."""
        await self.say(speech(name))
        return await self.answer()

    async def answer(self, within_s: float = SOON_S) -> dict[str, Any]:
        """The next response to end; the server is told that all of it has been played."""
        done = await self.wait("response.done", within_s)
        response: dict[str, Any] = done["response"]
        played = len(self.audio(response["id"])) * 1000 / (2 * SPEAKS_HZ)
        if played:
            await self.send("playback.ack", played_ms=played, response_id=response["id"])
            await self.wait("playback.acknowledged")
        return response

    async def item(self, item_id: str) -> dict[str, Any]:
        """The item as the conversation holds it now."""
        await self.send("conversation.item.retrieve", item_id=item_id)
        event = await self.wait("conversation.item.retrieved")
        item: dict[str, Any] = event["item"]
        return item

    # -- what it hears -------------------------------------------------------------------------------------------

    async def wait(self, what: str | Holds, within_s: float = SOON_S) -> dict[str, Any]:
        """The next event of this type, or that holds, behind the one found last."""
        holds = (lambda event: event["type"] == what) if isinstance(what, str) else what
        try:
            async with asyncio.timeout(within_s), self._news:
                while True:
                    while self._looked < len(self.events):
                        self._looked += 1
                        if holds(self.events[self._looked - 1]):
                            return self.events[self._looked - 1]
                    assert self.closed is None, f"{what} did not come before {self.closed}: {self.heard()}"
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"{what} did not come: {self.heard()}") from None

    async def ended(self, within_s: float = SOON_S) -> ConnectionClosed:
        """How the connection ended."""
        async with asyncio.timeout(within_s), self._news:
            await self._news.wait_for(lambda: self.closed is not None)
        assert self.closed is not None
        return self.closed

    def look_from_here(self) -> None:
        """What has come so far is not waited for any more."""
        self._looked = len(self.events)

    def heard(self) -> str:
        """What came, in short."""
        return " ".join(event["type"] for event in self.events[-40:])

    def of(self, type: str, **fields: Any) -> list[dict[str, Any]]:
        return [
            event
            for event in self.events
            if event["type"] == type and all(event.get(key) == value for key, value in fields.items())
        ]

    def audio(self, response_id: str) -> bytes:
        """The sound of a reply. Raises AssertionError where it has a hole, or a piece came twice."""
        sound = b""
        for event in self.of("response.output_audio.delta", response_id=response_id):
            assert event["metadata"]["start_sample"] * 2 == len(sound), "a piece is missing, or came twice"
            sound += event["delta"]
        return sound

    def words(self, response_id: str) -> str:
        kinds = ("response.output_audio_transcript.delta", "response.output_text.delta")
        return "".join(
            event["delta"] for event in self.events if event["type"] in kinds and event["response_id"] == response_id
        )

    def transcripts(self) -> list[str]:
        return [event["transcript"] for event in self.of("conversation.item.input_audio_transcription.completed")]

    @property
    def last_seq(self) -> int:
        return max((event.get("server_event_seq", 0) for event in self.events), default=0)

    # -- how it ends ---------------------------------------------------------------------------------------------

    def vanish(self) -> None:
        """The connection is reset (RST), as when a process dies."""
        raw: socket.socket = self.socket.transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.transport.abort()

    def freeze(self) -> None:
        """Stop reading: the kernel's buffers fill up."""
        self.socket.transport.pause_reading()

    async def close(self) -> None:
        """End the session."""
        await self.send("session.close")
        await self.wait("session.closed")
        await self.ended()


@contextlib.asynccontextmanager
async def dialled(
    port: int, query: str = "?model=voice", *, binary: bool = False, buffer_bytes: int | None = None
) -> AsyncIterator[Caller]:
    """A connection, dropped without a word when the block is left. Nothing is sent on it by itself."""
    subprotocols = [Subprotocol(MSGPACK_SUBPROTOCOL)] if binary else None
    raw = socket.socket()
    if buffer_bytes is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
    opened = await connect(
        f"ws://127.0.0.1:{port}/v1/duplex{query}",
        sock=raw,
        subprotocols=subprotocols,
        compression=None,
        max_size=None,
        max_queue=None if buffer_bytes is None else 1,
        ping_interval=None,
    )
    caller = Caller(opened)
    reading = asyncio.create_task(caller.read())
    try:
        yield caller
    finally:
        opened.transport.abort()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


@contextlib.asynccontextmanager
async def closing(caller: Caller) -> AsyncIterator[None]:
    """Ends the session when the block is left, unless it ended before."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(ConnectionClosed):
            await caller.send("session.close")  # what failed is what is told, and the next test finds no session
        raise
    if caller.closed is None:
        await caller.close()


@contextlib.asynccontextmanager
async def session(
    port: int, wanted: Mapping[str, Any] | None = None, *, binary: bool = False, buffer_bytes: int | None = None
) -> AsyncIterator[Caller]:
    """A session with these settings, closed when the block is left unless it ended before."""
    async with dialled(port, binary=binary, buffer_bytes=buffer_bytes) as caller:
        await caller.wait("session.created")
        await caller.update(wanted or settings())
        async with closing(caller):
            yield caller


@contextlib.asynccontextmanager
async def resumed(port: int, before: Caller, seen: int | None = None, sent: int = 0) -> AsyncIterator[Caller]:
    """The session of an earlier connection on a new one, closed when the block is left unless it ended before."""
    async with dialled(port, "") as caller:
        await resume(caller, before, seen, sent)
        await caller.wait("session.resumed")
        async with closing(caller):
            yield caller


async def resume(caller: Caller, before: Caller, seen: int | None = None, sent: int = 0) -> None:
    """Ask for it; what comes of it is the caller's to wait for."""
    await caller.send(
        "session.resume",
        session_id=before.session_id,
        resume_token=before.token,
        last_received_server_event_seq=before.last_seq if seen is None else seen,
        last_sent_input_seq=sent,
    )


async def items(caller: Caller) -> list[dict[str, Any]]:
    """The conversation as the session holds it."""
    added = [event["item"]["id"] for event in caller.of("conversation.item.added")]
    return [await caller.item(item_id) for item_id in added]


async def retold(port: int, told: list[dict[str, Any]], question: str) -> str:
    """What a fresh session answers that was told the same conversation."""
    async with session(port) as caller:
        for item in told:
            parts = [{"type": part["type"], **_said(part)} for part in item["content"]]
            if any(text for part in parts for text in _said(part).values()):
                fresh = {"type": "message", "role": item["role"], "content": parts}
                await caller.send("conversation.item.create", item=fresh)
        response = await caller.ask(question)
        return caller.words(response["id"])


def _said(part: dict[str, Any]) -> dict[str, str]:
    return {key: part[key] for key in ("text", "transcript") if key in part}
