"""A fake world's door over real sockets: the door's words, journal, tokens and credits, over a world that is a hash.

It is no model of the real one, and loses its sockets where a test says so. A frame is made of the one before and its
action, so that frames made twice, or in another order, are other frames.
"""

import asyncio
import contextlib
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgpack
import numpy as np
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

Message = dict[str, Any]

SIDE = 4
SUBPROTOCOL: Any = "omni-live.world.v1+msgpack"
FACTS: Message = {
    "model": "fake",
    "frame": [SIDE, SIDE, 3],
    "latent": [2, 1, 4],
    "action": [2, 2],
    "rate_hz": 5.0,
    "action_low": -1.0,
    "action_high": 1.0,
    "rewind_steps": 256,
    "step_frames": 256,
    "credits": 64,
    "detach_grace_s": 30.0,
}


def start(seed: int) -> bytes:
    return hashlib.sha256(f"seed {seed}".encode()).digest()


def following(state: bytes, action: bytes) -> bytes:
    return hashlib.sha256(state + action).digest()


def picture(state: bytes, side: int = SIDE) -> np.ndarray:
    return np.resize(np.frombuffer(state, np.uint8), (side, side, 3))


def undisturbed(seed: int, actions: np.ndarray) -> list[bytes]:
    """The pictures that a rollout shows which nothing happens to."""
    state, found = start(seed), []
    for row in np.asarray(actions, np.float32):
        state = following(state, row.tobytes())
        found.append(picture(state).tobytes())
    return found


@dataclass(eq=False)
class FakeSession:
    session_id: str
    states: list[bytes]
    token: str = ""
    old_token: str = ""
    seq: int = 0
    acked: int = 0
    journal: list[tuple[int, Message]] = field(default_factory=list)
    socket: ServerConnection | None = None
    credits: int = 64
    outbox: deque[Message] = field(default_factory=deque)
    made: int = 0
    """Frames that were made, each time."""
    outputs: list[str] = field(default_factory=lambda: ["frame"])
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    cut: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)

    @property
    def at(self) -> int:
        return len(self.states) - 1


@dataclass
class Loss:
    """The socket is lost once with a request of this type."""

    kind: str
    when: str
    """before it arrives, after it was done, or during: after so many of its frames were sent."""
    frames: int = 0


class FakeDoor:
    def __init__(self) -> None:
        self.url = ""
        self.losses: list[Loss] = []
        self.sessions: dict[str, FakeSession] = {}
        self.received: list[Message] = []
        self.sockets: list[ServerConnection] = []
        self.http_status: int | None = None
        self.side = SIDE
        self.refusals: dict[str, str] = {}
        """Type of request -> the code of its refusal."""
        self.forget_journal = False
        """What was said before a resume can't be said again."""
        self.pause_after: int | None = None
        """A step waits for `go` after so many frames."""
        self.go = asyncio.Event()
        self.deaf = False
        """Requests are read and not answered."""
        self._ids = count(1)
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def lose(self, kind: str, when: str, frames: int = 0) -> None:
        self.losses.append(Loss(kind, when, frames))

    def facts(self) -> Message:
        return {**FACTS, "frame": [self.side, self.side, 3]}

    def asked(self, kind: str) -> list[Message]:
        return [message for message in self.received if message["type"] == kind]

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(true)

    async def say(self, session: FakeSession, kind: str, request_id: str = "", **fields: Any) -> None:
        """A numbered message, now or after the next resume."""
        session.seq += 1
        message = {"type": kind, "session_id": session.session_id, "seq": session.seq, **fields}
        if request_id:
            message["request_id"] = request_id
        session.journal.append((session.seq, message))
        session.outbox.append(message)
        await self.flush(session)

    async def tell(self, session: FakeSession, kind: str, **fields: Any) -> None:
        """A message that has no number."""
        session.outbox.append({"type": kind, "session_id": session.session_id, **fields})
        await self.flush(session)

    async def flush(self, session: FakeSession) -> None:
        while session.outbox:
            if session.outbox[0]["type"] == "frame":
                if not session.credits:
                    break
                session.credits -= 1
            message = session.outbox.popleft()
            if session.socket is not None:
                await self._send(session.socket, message)
        await self._note()

    # -- the inside

    async def _send(self, socket: ServerConnection, message: Message) -> None:
        with contextlib.suppress(ConnectionClosed):
            await socket.send(msgpack.packb(message))

    async def handle(self, socket: ServerConnection) -> None:
        self.sockets.append(socket)
        await self._send(socket, {"type": "server.world", **self.facts(), "models": ["fake"]})
        with contextlib.suppress(ConnectionClosed):
            async for frame in socket:
                message = msgpack.unpackb(frame)
                loss = next((each for each in self.losses if each.kind == message["type"]), None)
                if loss is not None and loss.when == "before":
                    self.losses.remove(loss)
                    self._drop(socket)
                    break
                self.received.append(message)
                await self._note()
                if not self.deaf:
                    task = asyncio.create_task(self._take(socket, message))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
        for session in self.sessions.values():
            if session.socket is socket:
                session.socket = None
                session.outbox.clear()
        await self._note()

    def _drop(self, socket: ServerConnection) -> None:
        for session in self.sessions.values():
            if session.socket is socket:
                session.socket = None
                session.outbox.clear()
        socket.transport.abort()

    async def _take(self, socket: ServerConnection, message: Message) -> None:
        loss = next((each for each in self.losses if each.kind == message["type"] and each.when == "after"), None)
        if loss is not None:
            self.losses.remove(loss)
            self._drop(socket)
        await self._do(socket, message)
        await self._note()

    async def _note(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _do(self, socket: ServerConnection, message: Message) -> None:
        kind, request_id = message["type"], message.get("request_id", "")
        session = self.sessions.get(message.get("session_id", ""))
        code = self._refusal(message, session)
        if code is not None:
            await self._send(socket, {"type": "error", "code": code, "message": "no", "request_id": request_id})
        elif session is None:
            await self._open(socket, message)
        elif kind == "session.resume":
            await self._resume(socket, session, message)
        else:
            session.old_token = ""
            await self._of_session(socket, session, message, request_id)

    def _refusal(self, message: Message, session: FakeSession | None) -> str | None:
        kind = message["type"]
        if kind in self.refusals:
            return self.refusals[kind]
        if session is None:
            return None if kind == "session.open" else "session_not_found"
        is_stranger = kind == "session.resume" and message["token"] not in (session.token, session.old_token)
        return "invalid_resume_token" if is_stranger else None

    async def _of_session(
        self, socket: ServerConnection, session: FakeSession, message: Message, request_id: str
    ) -> None:
        match message["type"]:
            case "credit":
                session.credits += message["frames"]
                await self.flush(session)
            case "ack":
                session.acked = message["seq"]
            case "heartbeat":
                await self.tell(session, "heartbeat", request_id=request_id)
            case "cancel":
                if message["target"] not in session.asked:
                    code = "response_cancel_not_active"
                    await self.tell(session, "error", request_id=request_id, code=code, message="no")
                session.cut.add(message["target"])
                self.go.set()
            case "session.close":
                await self.say(session, "session.closed", reason="close_requested", step=session.at)
                del self.sessions[session.session_id]
            case "fork":
                await self._fork(socket, session, message)
            case kind:
                session.asked.append(request_id)
                async with session.lock:
                    await self._in_turn(session, kind, request_id, message)
                session.asked.remove(request_id)

    async def _open(self, socket: ServerConnection, message: Message) -> None:
        session = self._session(socket, [start(message["seed"])], message)
        await self._opened(session, message["request_id"])
        await self.say(session, "done", message["request_id"], status="done", reason="", step=0)

    def _session(self, socket: ServerConnection, states: list[bytes], message: Message) -> FakeSession:
        number = next(self._ids)
        live = None if socket not in self.sockets or socket.state.name != "OPEN" else socket
        session = FakeSession(f"sess_{number}", states, f"token {number}", socket=live)
        session.credits, session.outputs = message.get("credits", 64), message.get("outputs", ["frame"])
        self.sessions[session.session_id] = session
        return session

    async def _opened(self, session: FakeSession, request_id: str, **facts: Any) -> None:
        own = {"token": session.token, "step": session.at, "world": self.facts()}
        await self.tell(session, "session.opened", request_id=request_id, **own, **facts)

    async def _resume(self, socket: ServerConnection, session: FakeSession, message: Message) -> None:
        session.old_token, session.token = message["token"], f"token {next(self._ids)} of {session.session_id}"
        session.socket, session.credits = socket, message["credits"]
        session.outbox.clear()
        seen = message["last_seq"]
        if self.forget_journal:
            self.forget_journal = False
            await self.tell(session, "session.resync", **{"from": seen + 1, "to": session.seq}, reason="journal_gap")
            seen = session.seq
        await self.tell(session, "session.resumed", token=session.token, step=session.at, voids=[])
        session.outbox.extend(said for seq, said in session.journal if seq > seen)
        await self.flush(session)

    async def _fork(self, socket: ServerConnection, parent: FakeSession, message: Message) -> None:
        at = message.get("step", parent.at)
        for _ in range(message["count"]):
            child = self._session(socket, parent.states[: at + 1], message)
            await self._opened(child, message["request_id"], forked_from=parent.session_id)

    async def _in_turn(self, session: FakeSession, kind: str, request_id: str, message: Message) -> None:
        reason = ""
        match kind:
            case "step":
                actions = np.frombuffer(message["actions"]["data"], np.float32).reshape(message["actions"]["shape"])
                reason = await self._step(session, request_id, message, list(actions))
            case "look":
                reason = await self._step(session, request_id, message, [None] * message["frames"])
            case "rewind" if message["step"] <= session.at:
                del session.states[message["step"] + 1 :]
            case "rewind":
                reason = "rewind_ahead"
            case "reset":
                session.states[:] = [start(message["seed"])]
            case "snapshot":
                await self.say(session, "snapshot", request_id, step=session.at, blob=b"".join(session.states))
            case "restore":
                blob = message["blob"]
                session.states[:] = [blob[at : at + 32] for at in range(0, len(blob), 32)]
        status = "interrupted" if reason == "client_cancelled" else "failed" if reason else "done"
        await self.say(session, "done", request_id, status=status, reason=reason, step=session.at)

    async def _step(self, session: FakeSession, request_id: str, message: Message, rows: list[Any]) -> str:
        first = message["step"]
        if first > session.at + 1 or (first <= session.at and first + len(rows) - 1 > session.at):
            return "step_out_of_order"
        for number, row in enumerate(rows):
            if self.pause_after == number:
                self.pause_after = None
                await self._note()
                await self.go.wait()
            if request_id in session.cut:
                return "client_cancelled"
            if first + number > session.at:
                session.states.append(following(session.states[-1], row.tobytes()))
                session.made += 1
            self._lose_during(session, message["type"], number)
            for output in message["outputs"]:
                await self._show(session, request_id, first + number, output)
        return ""

    def _lose_during(self, session: FakeSession, kind: str, number: int) -> None:
        for loss in self.losses:
            if (loss.kind, loss.when, loss.frames) == (kind, "during", number) and session.socket is not None:
                self.losses.remove(loss)
                self._drop(session.socket)
                return

    async def _show(self, session: FakeSession, request_id: str, step: int, output: str) -> None:
        image = picture(session.states[step], self.side)
        if output == "frame":
            value = {"image": {"dtype": "|u1", "shape": list(image.shape), "data": image.tobytes()}}
        else:
            latent = np.full((2, 1, 4), step, np.float32)
            value = {"latent": {"dtype": "<f4", "shape": list(latent.shape), "data": latent.tobytes()}}
        await self.say(session, "frame", request_id, step=step, output=output, format="raw", **value)


@contextlib.asynccontextmanager
async def fake_door() -> AsyncIterator[FakeDoor]:
    door = FakeDoor()

    def process_request(connection: ServerConnection, request: object) -> object:
        return None if door.http_status is None else connection.respond(door.http_status, "no\n")

    async with serve(
        door.handle,
        "127.0.0.1",
        0,
        compression=None,
        max_size=None,
        subprotocols=[SUBPROTOCOL],
        process_request=process_request,
        close_timeout=1,
    ) as listener:
        door.url = f"ws://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1/world"
        yield door
        for task in tuple(door._tasks):
            task.cancel()
