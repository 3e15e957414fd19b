"""A clock that tests move, and a duplex server that does what a test scripts.

The scripted server is no model of the real one: it takes numbered input, keeps what it said for a resume, rotates
tokens, and otherwise says what the test tells it to. It speaks over real sockets, in the codec that the client asks
for.
"""

import asyncio
import base64
import contextlib
import heapq
import itertools
import json
from collections.abc import AsyncIterator, Callable

import msgpack
import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

SUBPROTOCOL = "omni-live.duplex.v1+msgpack"


class ManualClock:
    """Stands still until it is advanced."""

    def __init__(self) -> None:
        self.now = 1_000_000_000
        self._order = itertools.count()
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []

    def now_ns(self) -> int:
        return self.now

    async def sleep_until_ns(self, at_ns: int) -> None:
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (at_ns, next(self._order), future))
        if at_ns <= self.now:
            self._wake()
        await future

    async def advance(self, ms: float) -> None:
        """Wake each sleeper at its time, and let everybody run in between."""
        end = self.now + round(ms * 1_000_000)
        await settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            self.now = max(self.now, self._sleepers[0][0])
            self._wake()
            await settle()
        self.now = end

    def _wake(self) -> None:
        while self._sleepers and self._sleepers[0][0] <= self.now:
            future = heapq.heappop(self._sleepers)[2]
            if not future.done():
                future.set_result(None)


class HastyClock:
    """Does not wait: whoever sleeps is at once as late as it wanted to be."""

    def __init__(self) -> None:
        self.now = 1_000_000_000
        self.slept: list[int] = []

    def now_ns(self) -> int:
        return self.now

    async def sleep_until_ns(self, at_ns: int) -> None:
        self.slept.append(at_ns - self.now)
        self.now = max(self.now, at_ns)
        await asyncio.sleep(0)


async def settle(rounds: int = 20) -> None:
    for _ in range(rounds):
        await asyncio.sleep(0)


class ScriptedServer:
    def __init__(self) -> None:
        self.url = ""
        self.paths: list[str] = []
        self.received: list[dict] = []
        """Every event of every connection."""
        self.taken: list[dict] = []
        """Numbered input, each once and in order."""
        self.acked = 0
        self.resumes: list[dict] = []
        self.input_acks = True
        self.refuse_open: str | None = None
        self.refuse_resume: str | None = None
        self.forget_input_after: int | None = None
        """Drop the input with this number, once: as a server that lost it would."""
        self.drop_before_resumed = 0
        """Hang up so many times when asked to resume."""
        self.http_status: int | None = None
        self.answer: Callable[[dict], object] | None = None
        """Called with each event taken; may be a coroutine function."""
        self.resumable = True
        self.close_answered = True
        self.token = 0
        self.journal: list[tuple[int, dict]] = []
        self.seq = 0
        self.socket: ServerConnection | None = None
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task] = set()

    # -- what tests do

    async def say(self, type: str, **fields) -> int:
        """A journaled event, at once or after the next resume."""
        self.seq += 1
        event = {"type": type, **fields, "server_event_seq": self.seq}
        self.journal.append((self.seq, event))
        await self._send(event)
        return self.seq

    async def tell(self, type: str, **fields) -> None:
        """An event that is not journaled."""
        await self._send({"type": type, **fields})

    async def sound(self, response_id: str, pcm: bytes, start: int, **fields) -> int:
        return await self.say(
            "response.output_audio.delta",
            response_id=response_id,
            item_id=f"item_{response_id}",
            delta=pcm,
            sample_rate_hz=24000,
            metadata={"start_sample": start},
            **fields,
        )

    def drop(self) -> None:
        if self.socket is not None:
            self.socket.transport.abort()

    async def until(self, true: Callable[[], object], within_s: float = 20) -> None:
        """Waits for the server's state, not for time; the limit only ends a test that hangs."""
        async with asyncio.timeout(within_s), self._changed:
            await self._changed.wait_for(true)

    def sound_taken(self) -> bytes:
        return b"".join(event["audio"] for event in self.taken if event["type"] == "input_audio_buffer.append")

    # -- the inside

    async def _note(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _send(self, event: dict) -> None:
        socket = self.socket
        if socket is None:
            return
        with contextlib.suppress(ConnectionClosed):
            await socket.send(self._encode(socket, event))

    @staticmethod
    def _encode(socket: ServerConnection, event: dict) -> str | bytes:
        if socket.subprotocol == SUBPROTOCOL:
            return msgpack.packb(event)
        return json.dumps(event, default=lambda value: base64.b64encode(value).decode())

    @staticmethod
    def _decode(frame: str | bytes) -> dict:
        event = msgpack.unpackb(frame) if isinstance(frame, bytes) else json.loads(frame)
        if isinstance(event.get("audio"), str):
            event["audio"] = base64.b64decode(event["audio"])
        return event

    def _credentials(self) -> dict:
        self.token += 1
        if not self.resumable:
            return {}
        return {"attachment_generation": self.token, "resume_token": f"token_{self.token}"}

    async def handle(self, socket: ServerConnection) -> None:
        self.paths.append(socket.request.path)
        try:
            if "model=" in socket.request.path:
                if not await self._greet(socket):
                    return
            elif not await self._resume(socket):
                return
            async for frame in socket:
                await self._take(socket, self._decode(frame))
        except ConnectionClosed:
            pass
        finally:
            if self.socket is socket:
                self.socket = None
            await self._note()

    async def _greet(self, socket: ServerConnection) -> bool:
        if self.refuse_open:
            error = {"code": self.refuse_open, "message": "no"}
            await socket.send(self._encode(socket, {"type": "error", "error": error}))
            return False
        self.socket = socket
        await self.tell("session.created", session_id="sess_1", session={"id": "sess_1"}, **self._credentials())
        return True

    async def _resume(self, socket: ServerConnection) -> bool:
        asked = self._decode(await socket.recv())
        self.resumes.append(asked)
        if self.drop_before_resumed:
            self.drop_before_resumed -= 1
            socket.transport.abort()
            return False
        code = self.refuse_resume
        if asked["resume_token"] != f"token_{self.token}":
            code = "invalid_resume_token"
        if code:
            error = {"code": code, "message": "no"}
            await socket.send(self._encode(socket, {"type": "error", "error": error}))
            await socket.close(1008)
            return False
        self.socket = socket
        await self.tell(
            "session.resumed",
            session_id="sess_1",
            input_seq=len(self.taken),
            void_ranges=[],
            **self._credentials(),
        )
        for seq, event in self.journal:
            if seq > asked["last_received_server_event_seq"]:
                await self._send(event)
        await self._note()
        return True

    async def _take(self, socket: ServerConnection, event: dict) -> None:
        self.received.append(event)
        if event["type"] == "session.event_ack":
            self.acked = event["server_event_seq"]
        number = event.get("input_seq")
        if number is not None and self._is_next(number):
            self.taken.append(event)
            await self._react(event)
            if self.input_acks:
                await self.tell("session.input_ack", input_seq=number)
        elif number is not None and number > len(self.taken) + 1 and self.forget_input_after is None:
            await self.tell("session.input_missing", input_seq=len(self.taken))
        await self._note()

    def _is_next(self, number: int) -> bool:
        if number == self.forget_input_after:
            self.forget_input_after = None
            return False
        return number == len(self.taken) + 1

    async def _react(self, event: dict) -> None:
        if event["type"] == "session.update":
            await self.say("session.updated", session=event["session"])
        if event["type"] == "session.close" and self.close_answered:
            await self.tell("session.closed", reason="close_requested")
        if self.answer is not None:
            answer = self.answer(event)
            if asyncio.iscoroutine(answer):
                task = asyncio.create_task(answer)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer()

    def process_request(connection: ServerConnection, request: object) -> object:
        if server.http_status is not None:
            return connection.respond(server.http_status, "no\n")
        return None

    async with serve(
        server.handle,
        "127.0.0.1",
        0,
        select_subprotocol=lambda _, offered: SUBPROTOCOL if SUBPROTOCOL in offered else None,
        compression=None,
        max_size=None,
        process_request=process_request,
        close_timeout=1,
    ) as listener:
        port = listener.sockets[0].getsockname()[1]
        server.url = f"ws://127.0.0.1:{port}/v1/duplex"
        yield server
        for task in server._tasks:
            task.cancel()


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with serving() as running:
        yield running


@pytest.fixture
def manual_clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def hasty_clock() -> HastyClock:
    return HastyClock()
