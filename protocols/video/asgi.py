"""The video door over ASGI: one video on a connection, which is over when either is.

Nothing of the world runs here; blocks are encoded in a thread.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Self, assert_never

from omni_live.protocols.desk import Desk, Refused
from omni_live.protocols.fields import Fault, Faulty, Wire
from omni_live.protocols.frames import dump_json
from omni_live.protocols.video import encoding, messages
from omni_live.protocols.video.film import Block, Film, Message
from omni_live.protocols.video.messages import Interaction, Ping, Start, Stop
from omni_live.protocols.websocket import Meter
from omni_live.protocols.websocket.asgi import Connection, Frame, Receive, Scope, Send
from omni_live.protocols.world.contract import Served
from omni_live.protocols.world.rollouts import MESSAGE_BYTES, numbered
from omni_live.sessions.limits import Limits
from omni_live.sessions.settings import Settings

PATH: Final = "/v1/realtime/video"
"""Where vllm-omni's clients connect."""

_BREATH: Final = 64
"""Frames heard before the others get their turn."""
_OWN_CODES: Final = frozenset(
    {"unknown_type", "not_started", "already_started", "model_not_found", "unsupported", "prompt_unknown"}
)
"""What is wrong with a message, where it is not one of its fields."""


class VideoDoor:
    """An ASGI application for websocket scopes."""

    def __init__(self, desk: Desk, limits: Limits, worlds: Mapping[str, Served], meter: Meter) -> None:
        """`worlds` are the pipelines with rollouts, by name; the first is taken where a client names none."""
        self.desk = desk
        self.limits = limits
        self.worlds = worlds
        self.contracts = {name: served.contract for name, served in worlds.items()}
        self.meter = meter
        self.next_id = numbered("video")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = Connection(
            scope,
            receive,
            send,
            frame_bytes=self.limits.client_frame_bytes,
            write_deadline_s=self.limits.write_deadline_s,
            meter=self.meter,
        )
        if not await connection.connected():
            return
        await connection.accept()
        with _Talk(self, connection) as talk:
            await talk.run()


class _Talk:
    """One connection and its video. Left, it closes the session."""

    def __init__(self, door: VideoDoor, connection: Connection) -> None:
        self._door = door
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._group = asyncio.TaskGroup()
        self._more = asyncio.Event()
        self._waiting: deque[Message] = deque()
        self._is_lost = False
        """The client reads nothing; the connection is being dropped."""
        self._opening: asyncio.Task[None] | None = None
        self._film: Film | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._film is not None:
            self._film.leave()

    async def run(self) -> None:
        """Take requests and send what comes of them until either side ends it."""
        async with self._group:
            writer = self._group.create_task(self._write())
            heard = 0
            while (frame := await self._connection.receive()) is not None:
                self._hear(frame)
                heard += 1
                if heard % _BREATH == 0:
                    await asyncio.sleep(0)
            writer.cancel()
            if self._opening is not None:
                self._opening.cancel()

    # -- what goes out

    async def _write(self) -> None:
        try:
            while await self._connection.ready():
                film = self._film
                due_s = None if film is None else film.beat(self._loop.time())
                block = None if film is None else film.next()
                if self._waiting:
                    await self._connection.send(dump_json(self._waiting.popleft()))
                elif film is not None and film.close_code is not None:
                    await self._connection.close(film.close_code, "")
                    return
                elif film is not None and block is not None:
                    await self._hand(film, block)
                else:
                    await self._wait(due_s)
        except OSError:
            return  # the client has gone; the reader hears of it, too

    async def _wait(self, due_s: float | None) -> None:
        """Until there may be more to do, or until that time."""
        self._more.clear()
        try:
            async with asyncio.timeout_at(due_s):
                await self._more.wait()
        except TimeoutError:
            return

    async def _hand(self, film: Film, block: Block) -> None:
        pictures = block.pictures  # another list, once a fence took them back
        try:
            fragment = await asyncio.to_thread(encoding.encode, pictures, block.first, block.index, film.fps)
        except encoding.EncodingFailed:
            film.fail("encoding_failed", "The frames could not be encoded.")
            return
        chunk = fragment.media if block.index else fragment.init + fragment.media
        described = dump_json(film.described(block, len(chunk) - len(fragment.media), len(chunk)))
        if not await self._connection.ready():
            return
        if film.next() is not block or block.pictures is not pictures:
            self._door.meter.dropped("fenced_content")
            return
        film.sent(block, self._loop.time())
        # Announced, a fragment is as good as sent: nobody could read on without it.
        if await self._connection.send(described) and await self._connection.send(chunk):
            self._door.meter.content_handed(len(chunk))

    def _say(self, message: Message) -> None:
        if self._is_lost:
            return
        self._waiting.append(message)
        self._more.set()
        if len(self._waiting) * MESSAGE_BYTES > self._door.limits.outbox_bytes:
            self._is_lost = True
            self._waiting.clear()
            self._door.meter.connection_lost("slow_consumer")
            self._connection.abort()

    # -- requests

    def _hear(self, frame: Frame) -> None:
        event_id: str | None = None
        try:
            message = messages.load(frame)
        except Faulty as faulty:
            self._refuse(replace(faulty.fault, code="bad_frame"))
            return
        try:
            event_id = messages.event_of(message)
            running = None if self._film is None else self._film.contract
            asked = messages.read(message, self._door.contracts, running)
        except Faulty as faulty:
            code = faulty.fault.code if faulty.fault.code in _OWN_CODES else "bad_field"
            self._refuse(replace(faulty.fault, code=code, event_id=event_id))
            return
        match asked:
            case Start():
                self._start(asked)
            case Interaction():
                if self._film is not None:
                    self._film.interact(asked)
            case Stop():
                self._stop()
            case Ping():
                self._say({"type": "session.pong"})
            case _:
                assert_never(asked)

    def _start(self, asked: Start) -> None:
        if self._opening is not None:
            self._refuse(Fault("already_started", "The video is being started."))
        elif not encoding.is_available():
            self._refuse(Fault("video_unavailable", "This server has no encoder."))
        elif asked.block_frames > self._door.limits.step_frames:
            self._refuse(Fault("bad_field", f"At most {self._door.limits.step_frames} frames make a block."))
        else:
            self._opening = self._group.create_task(self._open(asked))

    async def _open(self, asked: Start) -> None:
        served = self._door.worlds[asked.model]
        stage = served.outputs["frame"]
        film = Film(self._door.next_id(), asked, served.contract, stage, self._say, self._more.set)
        try:
            settings = Settings(model=asked.model)
            line = await self._door.desk.open(asked.model, settings, film, self._connection.owner)
        except Refused as refused:
            after_s = refused.retry_after_s
            self._refuse(Fault(refused.code, refused.message), {} if after_s is None else {"retry_after_s": after_s})
        else:
            self._film = film
            film.attach(line)
        finally:
            self._opening = None

    def _stop(self) -> None:
        if self._film is not None:
            self._film.stop()
        elif self._opening is not None:
            self._opening.cancel()
            self._say({"type": "session.done", "chunks": 0, "frames": 0, "stopped": True, "reason": "stopped"})
        else:
            self._refuse(Fault("not_started", "There is no video to stop yet."))

    def _refuse(self, fault: Fault, facts: Mapping[str, Wire] | None = None) -> None:
        message: Message = {"type": "error", "code": fault.code, "message": fault.message, **(facts or {})}
        for name, value in (("param", fault.param), ("event_id", fault.event_id)):
            if value is not None:
                message[name] = value
        self._say(message)
