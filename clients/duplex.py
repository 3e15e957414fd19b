"""The client of /v1/duplex: a conversation that goes on when its socket does not.

    async with connect("ws://127.0.0.1:8765/v1/duplex") as session:
        await session.send_audio(pcm)
        async for event in session:
            ...

Input is numbered and kept until the server took it; output is taken once, by number. When the socket drops, the session
comes back by itself for as long as the server keeps it (the grace), and takes audio meanwhile. What it must remember
for that is in `duplex_link`; this module waits and talks.

Errors:

    DuplexError
    ├── ConnectFailed      no connection to begin with
    ├── Refused            the server would not open the session (`code`), or not take its settings
    └── SessionLost        the session is over although nobody closed it (`code`)
        ├── ResumeRefused  the server would not have it back
        ├── Replaced       another connection resumed it
        └── PeerBroke      the server does not speak the protocol

and `duplex_link.BufferFull` where events that must not be lost have filled the buffer.
"""

import asyncio
import contextlib
import itertools
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from omni_live.clients.clock import MS, Clock, MonotonicClock, S
from omni_live.clients.dial import TRY_AGAIN_STATUS, Address
from omni_live.clients.duplex_events import (
    Closed,
    Detached,
    Event,
    InputLost,
    Reattached,
    Refusal,
    SettingsUpdated,
    Sound,
    read,
)
from omni_live.clients.duplex_link import Inbound, Outbound
from omni_live.clients.duplex_wire import MSGPACK_SUBPROTOCOL, BadFrame, Fields, decode, encode

PIECE_BYTES = 32 * 1024
"""Longer audio goes out in pieces: what is lost or dropped is lost in pieces too."""
LEAST_BUFFER_BYTES = 16 * 1024
EVENTS_KEPT = 1024
"""Events waiting for the application. Reached: the socket is not read, which the server notices."""
ACK_WITHIN_NS = 200 * MS
FIRST_FRAME_S = 10.0
CLOSE_WITHIN_S = 5.0
PING_TIMEOUT_S = 20.0
"""A peer silent for so long is gone. A false alarm costs a resume and nothing else."""
TRY_AGAIN_CODES = frozenset({"overloaded", "draining", "replica_unavailable", "open_timeout"})
"""Answers to a resume after which another one may succeed; any other error ends the session."""

_GONE = (ConnectionClosed, OSError, TimeoutError)


class DuplexError(Exception):
    """Anything this client raises on purpose."""


class ConnectFailed(DuplexError):
    """There is no server at the address, or no websocket."""


class Refused(DuplexError):
    """The server would not open the session or not take its settings."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code = code


class SessionLost(DuplexError):
    """The session is over although nobody closed it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code = code


class ResumeRefused(SessionLost):
    """The server would not have the session back: it expired, the token is stale, the grace is over."""


class Replaced(SessionLost):
    """Another connection resumed this session."""


class PeerBroke(SessionLost):
    """The server sent something that is not this protocol."""


@dataclass(frozen=True, slots=True)
class Options:
    """A session's settings; None leaves the server's default."""

    input_rate_hz: int = 16_000
    """Rate of the audio that `send_audio` gets."""
    output_rate_hz: int = 24_000
    instructions: str | None = None
    modality: str | None = None
    """audio or text."""
    voice: str | None = None
    speed: float | None = None
    max_output_tokens: int | None = None
    manual: bool = False
    """True: the server detects no turns, the client commits."""
    turn_detection: Mapping[str, object] = field(default_factory=dict)
    """Fields of GA's server_vad that shall differ from the server's."""
    omni_live: Mapping[str, object] = field(default_factory=dict)
    """Settings that GA has no name for: seed, lead_ms, overlap options (docs/duplex.md)."""

    def session(self) -> dict[str, object]:
        """The session object of a session.update that asks for these settings."""
        heard: dict[str, object] = {}
        if self.manual:
            heard["turn_detection"] = None
        elif self.turn_detection:
            heard["turn_detection"] = {"type": "server_vad", **self.turn_detection}
        spoken = {"voice": self.voice, "speed": self.speed}
        asked = {
            "instructions": self.instructions,
            "output_modalities": [self.modality] if self.modality else None,
            "max_output_tokens": self.max_output_tokens,
        }
        return {
            "type": "realtime",
            **{key: value for key, value in asked.items() if value is not None},
            "audio": {
                "input": heard,
                "output": {key: value for key, value in spoken.items() if value is not None},
            },
            "omni_live": {
                "input_rate_hz": self.input_rate_hz,
                "output_rate_hz": self.output_rate_hz,
                **self.omni_live,
            },
        }


@dataclass(frozen=True, slots=True)
class Patience:
    """How long, and how often, a client tries."""

    open_s: float = 10.0
    """One attempt to connect."""
    grace_s: float = 30.0
    """After a drop, all attempts together: as long as the server keeps a session whose client is gone."""
    first_s: float = 0.1
    longest_s: float = 2.0
    """The wait before an attempt is drawn up to `first_s`, then twice that and so on up to this."""


@dataclass(slots=True)
class Counts:
    """What happened to the connection so far."""

    drops: int = 0
    resumes: int = 0
    lost_bytes: int = 0
    """Microphone audio dropped because the buffer was full."""


def waits(patience: Patience, chance: Callable[[], float]) -> Iterator[float]:
    """Seconds to wait before each attempt to come back; `chance` draws from [0, 1)."""
    longest = patience.first_s
    while True:
        yield longest * chance()
        longest = min(patience.longest_s, longest * 2)


def with_query(url: str, **query: str) -> str:
    """The URL with these query fields set, and `model` only if it is among them."""
    parts = urlsplit(url)
    kept = [(key, value) for key, value in parse_qsl(parts.query) if key not in {"model", *query}]
    return urlunsplit(parts._replace(query=urlencode([*kept, *query.items()])))


class Session:
    """A conversation with the server. Made by `connect`; iterating over it gives its events until it is closed."""

    def __init__(
        self,
        address: Address,
        model: str,
        options: Options,
        patience: Patience,
        max_bytes: int,
        clock: Clock,
        chance: Callable[[], float],
    ) -> None:
        self.session_id = ""
        self.attachment = 0
        self.options = options
        self.counts = Counts()
        self.inbound = Inbound()
        self.outbound = Outbound(max_bytes)
        self._address = address
        self._model = model
        self._patience = patience
        self._piece = min(PIECE_BYTES, max_bytes // 8 * 2)
        self._clock = clock
        self._chance = chance
        self._token = ""
        self._socket: ClientConnection | None = None
        self._events: deque[Event] = deque()
        self._error: SessionLost | None = None
        self._closing = False
        self._settled = False
        self._over = asyncio.Event()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._to_send = asyncio.Event()
        self._to_acknowledge = asyncio.Event()
        self._sent = asyncio.Event()
        self._ids = itertools.count(1)

    # -- what the application says -------------------------------------------------------------------------------

    async def send_audio(self, pcm: bytes) -> None:
        """Microphone audio: int16 little endian mono at `options.input_rate_hz`.

        While the socket is up it waits for room in the buffer. While it is down it never waits: when the buffer is
        full, the oldest audio goes and an `InputLost` says so.
        """
        if len(pcm) % 2:
            raise ValueError("audio is whole int16 samples")
        for start in range(0, len(pcm), self._piece):
            piece = pcm[start : start + self._piece]
            await self._await_room(len(piece))
            self._put({"type": "input_audio_buffer.append", "audio": piece}, len(piece), sound=True)

    async def text(self, text: str, *, respond: bool = True) -> str:
        """A typed user turn, to be answered or not. Returns the event's id, as all of the following do."""
        return self.send("input.text.append", text=text, response_create=respond)

    async def commit(self, respond: bool | None = None) -> str:
        """End the user's turn by hand; `respond` None leaves it to the settings whether an answer follows."""
        return self.send("input_audio_buffer.commit", **({} if respond is None else {"response_create": respond}))

    async def clear(self) -> str:
        """Forget the audio that is not committed."""
        return self.send("input_audio_buffer.clear")

    async def respond(self, **response: object) -> str:
        """Ask for a response; `response` are fields of GA's response.create."""
        return self.send("response.create", **({"response": response} if response else {}))

    async def cancel(self, response_id: str | None = None) -> str:
        """Stop the reply."""
        return self.send("response.cancel", **({"response_id": response_id} if response_id else {}))

    async def barge_in(self) -> str:
        """The user interrupts, as the client itself found out."""
        return self.send("barge_in")

    async def ack_playback(self, response_id: str, item_id: str, played_ms: float) -> str:
        """So much of the reply has been heard."""
        which = {key: value for key, value in (("response_id", response_id), ("item_id", item_id)) if value}
        return self.send("playback.ack", played_ms=played_ms, **which)

    async def update(self, options: Options) -> str:
        """Change the settings; a `SettingsUpdated` or a `Refusal` follows."""
        self.options = options
        return self.send("session.update", session=options.session())

    def send(self, type: str, **fields: object) -> str:
        """Any client event, without sound; raises BufferFull and what ended the session."""
        event_id = f"event_{next(self._ids)}"
        event = {"type": type, "event_id": event_id, **fields}
        self._put(event, len(repr(fields)), sound=False)
        return event_id

    async def close(self) -> None:
        """End the session on the server too; returns when the server said so, or could not within 5 s."""
        if self._over.is_set():
            return
        self.send("session.close")
        self._closing = True
        self._room.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_WITHIN_S):
                await self._over.wait()

    def abandon(self) -> None:
        """Be done with the session without a word to the server, which gives it up when its grace is over."""
        self._over.set()
        self.drop_transport()

    def drop_transport(self) -> None:
        """Lose the socket without a word, as a network does. For tests and demonstrations."""
        if self._socket is not None:
            self._socket.transport.abort()

    @property
    def attached(self) -> bool:
        return self._socket is not None

    # -- what the application hears ------------------------------------------------------------------------------

    def __aiter__(self) -> "Session":
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._over.is_set():
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        self._room.set()
        return event

    # -- the inside ----------------------------------------------------------------------------------------------

    def _put(self, event: Mapping[str, object], nbytes: int, *, sound: bool) -> None:
        if self._error is not None:
            raise self._error
        if self._over.is_set():
            raise SessionLost("session_closed", "the session is closed")
        lost = self.outbound.put(event, nbytes, sound=sound)
        if lost:
            self.counts.lost_bytes += lost
            self._tell(InputLost(at_ns=self._clock.now_ns(), nbytes=lost))
        self._to_send.set()

    async def _await_room(self, nbytes: int) -> None:
        while self._socket is not None and not self._over.is_set() and not self.outbound.has_room(nbytes):
            self._sent.clear()
            await self._sent.wait()

    def _tell(self, event: Event) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(event, InputLost) and isinstance(last, InputLost):
            self._events.pop()
            event = InputLost(at_ns=event.at_ns, nbytes=last.nbytes + event.nbytes)
        self._events.append(event)
        self._arrived.set()

    async def open(self) -> None:
        """Connect and have the settings taken; raises ConnectFailed, Refused. `connect` does this."""
        try:
            socket = await self._address.dial(self._patience.open_s, with_query(self._address.url, model=self._model))
        except InvalidStatus as error:
            raise _refused(error) from error
        except (OSError, TimeoutError, InvalidHandshake, InvalidURI) as error:
            raise ConnectFailed(f"no session at {self._address.url}: {error}") from error
        try:
            self._attach(await _first_frame(socket, "session.created"), socket)
            await self._settle(socket)
        except _GONE as error:
            raise ConnectFailed(f"the server at {self._address.url} hung up: {error}") from error
        except BadFrame as error:
            raise ConnectFailed(f"the server at {self._address.url} does not speak duplex: {error}") from error
        finally:
            if not self._settled:
                socket.transport.abort()

    async def _settle(self, socket: ClientConnection) -> None:
        """Send the settings and wait until they hold."""
        event_id = await self.update(self.options)
        await self._flush(socket)
        async with asyncio.timeout(FIRST_FRAME_S):
            while not self._settled:
                event = self._take(decode(await socket.recv()))
                if isinstance(event, Refusal) and event.event_id in ("", event_id):
                    raise Refused(event.code, event.message)
                if event is not None:
                    self._tell(event)
                self._settled = isinstance(event, SettingsUpdated)

    def _attach(self, greeting: Fields, socket: ClientConnection) -> None:
        self.session_id = greeting.text("session_id") or greeting.fields("session").text("id") or self.session_id
        self.attachment = greeting.integer("attachment_generation")
        self._token = greeting.text("resume_token")
        self._socket = socket

    async def run(self) -> None:
        """Keeps the session attached until it is over; what goes wrong, iterating raises. `connect` does this."""
        try:
            while not self._over.is_set():
                why = await self._serve()
                if not self._over.is_set():
                    await self._come_back(why)
        except SessionLost as error:
            self._error = None if self._closing else error
        except BadFrame as error:
            self._error = PeerBroke("bad_frame", str(error))
        finally:
            for event in (self._over, self._arrived, self._sent):
                event.set()

    async def _serve(self) -> str:
        """One attachment, from greeting to drop; returns why it ended."""
        socket = self._socket
        assert socket is not None
        try:
            async with asyncio.TaskGroup() as group:
                helpers = [group.create_task(self._write(socket)), group.create_task(self._acknowledge(socket))]
                try:
                    outcome = await self._read(socket)
                finally:
                    self._socket = None
                    self._sent.set()
                    for helper in helpers:
                        helper.cancel()
        finally:
            socket.transport.abort()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _read(self, socket: ClientConnection) -> str | SessionLost | BadFrame:
        """Why there is nothing more to read: a value, since a task group would wrap what is raised in it."""
        try:
            while not self._over.is_set():
                await self._hear(decode(await socket.recv()))
        except ConnectionClosed as error:
            return str(error)
        except (SessionLost, BadFrame) as error:
            return error
        return "closed"

    async def _hear(self, frame: Fields) -> None:
        event = self._take(frame)
        if event is None:
            return
        self._tell(event)
        if isinstance(event, Closed):
            self._over.set()
        while len(self._events) >= EVENTS_KEPT and not self._closing:
            self._room.clear()
            await self._room.wait()

    def _take(self, frame: Fields) -> Event | None:
        """The event for the application, None where the frame was for this module or came before."""
        match frame.type:
            case "session.input_ack":
                self.outbound.acknowledged(frame.integer("input_seq"))
                self._to_send.set()
                return None
            case "session.input_missing":
                self.outbound.rewind(frame.integer("input_seq"))
                self._to_send.set()
                return None
            case "session.replaced":
                raise Replaced("session_replaced", "another connection resumed the session")
            case _:
                return self._take_event(frame)

    def _take_event(self, frame: Fields) -> Event | None:
        number = frame.integer("server_event_seq")
        if not self.inbound.admits(number):
            return None
        if self.inbound.behind:
            self._to_acknowledge.set()
        if self.inbound.due:
            self._to_send.set()
        event = read(frame, self._clock.now_ns())
        if not isinstance(event, Sound):
            return event
        return (
            event if self.inbound.admits_sound(number, event.response_id, event.start_sample, event.samples) else None
        )

    async def _write(self, socket: ClientConnection) -> None:
        with contextlib.suppress(*_GONE):
            while True:
                self._to_send.clear()
                await self._flush(socket)
                if self.inbound.due:
                    await self._send_ack(socket)
                await self._to_send.wait()

    async def _flush(self, socket: ClientConnection) -> None:
        while (event := self.outbound.take()) is not None:
            await socket.send(encode(event, binary=socket.subprotocol == MSGPACK_SUBPROTOCOL))
            self._sent.set()

    async def _acknowledge(self, socket: ClientConnection) -> None:
        with contextlib.suppress(*_GONE):
            while True:
                await self._to_acknowledge.wait()
                await self._clock.sleep_until_ns(self._clock.now_ns() + ACK_WITHIN_NS)
                self._to_acknowledge.clear()
                if self.inbound.behind:
                    await self._send_ack(socket)

    async def _send_ack(self, socket: ClientConnection) -> None:
        ack = {"type": "session.event_ack", "server_event_seq": self.inbound.acknowledge()}
        await socket.send(encode(ack, binary=socket.subprotocol == MSGPACK_SUBPROTOCOL))

    # -- coming back ---------------------------------------------------------------------------------------------

    async def _come_back(self, why: str) -> None:
        """A new socket for the session; raises ResumeRefused when the server has none for it, or the grace is over."""
        self.counts.drops += 1
        if not self._token:
            raise SessionLost("connection_lost", f"this server resumes no sessions ({why})")
        dropped_ns = self._clock.now_ns()
        deadline_ns = dropped_ns + round(self._patience.grace_s * S)
        self._tell(Detached(at_ns=dropped_ns, why=why))
        for wait_s in waits(self._patience, self._chance):
            await self._clock.sleep_until_ns(min(deadline_ns, self._clock.now_ns() + round(wait_s * S)))
            left_s = (deadline_ns - self._clock.now_ns()) / S
            if left_s <= 0:
                raise ResumeRefused("grace_over", f"no way back within {self._patience.grace_s:g} s ({why})")
            resumed = await self._attempt(min(left_s, self._patience.open_s))
            if resumed is not None:
                self._resumed(resumed, dropped_ns)
                return

    async def _attempt(self, within_s: float) -> Fields | None:
        """The server's session.resumed, or None where trying again may help."""
        try:
            socket = await self._address.dial(within_s, with_query(self._address.url))
        except InvalidStatus as error:
            if error.response.status_code in TRY_AGAIN_STATUS:
                return None
            raise ResumeRefused("http_status", str(error)) from error
        except (OSError, TimeoutError, InvalidHandshake):
            return None
        try:
            await socket.send(encode(self._resume_request(), binary=socket.subprotocol == MSGPACK_SUBPROTOCOL))
            resumed = await _first_frame(socket, "session.resumed")
        except Refused as error:
            socket.transport.abort()
            if error.code in TRY_AGAIN_CODES:
                return None
            raise ResumeRefused(error.code, str(error)) from error
        except _GONE:
            socket.transport.abort()
            return None
        self._attach(resumed, socket)
        return resumed

    def _resume_request(self) -> dict[str, object]:
        return {
            "type": "session.resume",
            "session_id": self.session_id,
            "resume_token": self._token,
            "last_received_server_event_seq": self.inbound.seen,
            "last_sent_input_seq": self.outbound.last,
        }

    def _resumed(self, resumed: Fields, dropped_ns: int) -> None:
        self.counts.resumes += 1
        self.outbound.rewind(resumed.integer("input_seq"))
        now = self._clock.now_ns()
        voids = resumed.ranges("void_ranges")
        away_ms = (now - dropped_ns) / MS
        self._tell(Reattached(at_ns=now, attachment=self.attachment, away_ms=away_ms, voids=voids))


async def _first_frame(socket: ClientConnection, expected: str) -> Fields:
    """The greeting; raises Refused where the server answers with an error instead, BadFrame for anything else."""
    async with asyncio.timeout(FIRST_FRAME_S):
        frame = decode(await socket.recv())
    if frame.type == "error":
        error = frame.fields("error")
        raise Refused(error.text("code") or error.text("type"), error.text("message"))
    if frame.type == "session.expired":
        raise Refused("session_resume_expired", "the session is gone")
    if frame.type != expected:
        raise BadFrame(f"{frame.type} came instead of {expected}")
    return frame


def _refused(error: InvalidStatus) -> Refused:
    """What an HTTP answer instead of a websocket means."""
    status = error.response.status_code
    names = {401: "invalid_api_key", 403: "forbidden", 404: "not_found", 429: "overloaded", 503: "overloaded"}
    return Refused(names.get(status, "http_status"), f"the server answers with HTTP status {status}")


@contextlib.asynccontextmanager
async def connect(
    url: str,
    *,
    model: str = "voice",
    api_key: str | None = None,
    binary: bool = True,
    options: Options | None = None,
    patience: Patience | None = None,
    max_buffer_bytes: int = 4 * 1024 * 1024,
    clock: Clock | None = None,
    chance: Callable[[], float] = random.random,
) -> AsyncIterator[Session]:
    """Open a session and keep it over dropped sockets until the block is left; it is closed then.

    `binary` asks for msgpack frames and speaks JSON where the server knows none. `max_buffer_bytes` bounds the input
    kept for a server that did not take it yet (twice: what was sent, and what waits). Raises ConnectFailed, Refused.
    """
    if max_buffer_bytes < LEAST_BUFFER_BYTES:
        raise ValueError(f"max_buffer_bytes is at least {LEAST_BUFFER_BYTES}")
    session = Session(
        Address(
            url,
            api_key,
            subprotocols=(MSGPACK_SUBPROTOCOL,) if binary else (),
            close_within_s=CLOSE_WITHIN_S,
            ping_timeout_s=PING_TIMEOUT_S,
        ),
        model,
        options or Options(),
        patience or Patience(),
        max_buffer_bytes,
        clock or MonotonicClock(),
        chance,
    )
    await session.open()
    # not a TaskGroup: it would hand the block's own exceptions on inside a group
    running = asyncio.create_task(session.run())
    try:
        yield session
    except asyncio.CancelledError:
        session.abandon()
        raise
    finally:
        await session.close()
        session.abandon()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
