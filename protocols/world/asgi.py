"""The world door over ASGI: rollouts of a world model, several on a connection.

A connection that ends detaches its sessions; each lives on for its grace and is resumed by id and token. Nothing of
the world runs here, but pictures are compressed: in a thread where they are large.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Self, assert_never

from omni_live.protocols.desk import Desk, Refused, ResumeRefused
from omni_live.protocols.fields import Fault, Faulty, Wire
from omni_live.protocols.websocket import Meter
from omni_live.protocols.websocket.asgi import Connection, Frame, Receive, Scope, Send
from omni_live.protocols.world import messages
from omni_live.protocols.world.arrays import FORMATS, RAW
from omni_live.protocols.world.contract import Served
from omni_live.protocols.world.messages import MSGPACK_SUBPROTOCOL, Credit, Describe, Fork, Open, Resume, Show, Told
from omni_live.protocols.world.rollouts import Item, Message, Outlet, Rollout, numbered
from omni_live.sessions.inputs import WorldResetAsked
from omni_live.sessions.limits import Limits
from omni_live.sessions.settings import Settings

_INLINE_PIXELS: Final = 128 * 128
"""A picture up to this is compressed on the event loop, where it costs less than a thread's switch."""
_BREATH: Final = 64
"""Frames sent before the others get their turn."""


class WorldDoor:
    """An ASGI application for websocket scopes."""

    def __init__(self, desk: Desk, limits: Limits, worlds: Mapping[str, Served], meter: Meter) -> None:
        """`worlds` are the pipelines with rollouts, by name; the first is taken where a client names none."""
        self.desk = desk
        self.limits = limits
        self.worlds = worlds
        self.meter = meter
        self._ids = numbered("connection")

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
        binary = MSGPACK_SUBPROTOCOL in connection.offered
        await connection.accept(MSGPACK_SUBPROTOCOL if binary else None)
        with _Talk(self, connection, self._ids(), binary=binary) as talk:
            await talk.run()


class _Talk:
    """One connection and the rollouts on it. Left, it detaches them."""

    def __init__(self, door: WorldDoor, connection: Connection, name: str, *, binary: bool) -> None:
        self._door = door
        self._connection = connection
        self._binary = binary
        self._next_id = numbered(name)
        self._more = asyncio.Event()
        self._outlet = Outlet(self._more.set)
        self._rollouts: dict[str, Rollout] = {}
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        self._model = next(iter(door.worlds))
        """Taken where a client names none."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rollout in tuple(self._rollouts.values()):
            rollout.leave()

    async def run(self) -> None:
        """Take requests and send what comes of them until either side ends it."""
        self._outlet.say(self._about())
        async with self._group:
            writer = self._group.create_task(self._write())
            heard = 0
            while (frame := await self._connection.receive()) is not None:
                self._hear(frame)
                heard += 1
                if heard % _BREATH == 0:
                    await asyncio.sleep(0)
            writer.cancel()
            for task in tuple(self._tasks):
                task.cancel()

    async def _write(self) -> None:
        sent = 0
        try:
            while await self._connection.ready():
                found = self._outlet.next()
                if found is None:
                    self._more.clear()
                    await self._more.wait()
                    continue
                await self._hand(*found)
                sent += 1
                if sent % _BREATH == 0:
                    await asyncio.sleep(0)
        except OSError:
            return  # the client has gone; the reader hears of it, too

    async def _hand(self, rollout: Rollout | None, item: Item) -> None:
        if rollout is None or item.frame is None:
            await self._connection.send(messages.dump(item.message, binary=self._binary))
            return
        message = await written(rollout, item)
        if not rollout.admits(item):
            self._door.meter.dropped("fenced_content")
            return
        frame = messages.dump(message, binary=self._binary)
        if await self._connection.send(frame):
            self._door.meter.content_handed(len(frame))

    # -- requests

    def _hear(self, frame: Frame) -> None:
        request_id: str | None = None
        try:
            message = messages.load(frame)
        except Faulty as faulty:
            self._refuse(replace(faulty.fault, code="bad_frame"), None)
            return
        try:
            request_id = messages.request_of(message)
            asked = messages.read(message, self._named(message).contract, self._next_id)
        except Faulty as faulty:
            self._refuse(messages.named(faulty.fault), request_id)
            return
        match asked:
            case Open():
                self._start(asked)
            case Describe():
                self._outlet.say({**self._about(), "request_id": asked.request_id})
            case Resume():
                self._resume(asked)
            case Fork() | Credit() | Told():
                self._of_session(asked)
            case _:
                assert_never(asked)

    def _named(self, message: Message) -> Served:
        """The world that the message is about; the default where it names none, or one that is not there."""
        rollout = self._rollouts.get(messages.session_of(message))
        if rollout is not None:
            return rollout.world
        worlds = self._door.worlds
        return worlds.get(messages.model_of(message) or "", worlds[self._model])

    def _of_session(self, asked: Fork | Credit | Told) -> None:
        rollout = self._rollouts.get(asked.session_id)
        if rollout is None:
            request_id = None if isinstance(asked, Credit) else asked.request_id
            message = "There is no such session on this connection, or it is over."
            self._refuse(Fault("session_not_found", message, "session_id"), request_id)
            return
        match asked:
            case Told(_, _, input, form):
                rollout.ask(input, form)
            case Credit(_, frames):
                rollout.credit(frames)
            case Fork():
                self._fork(rollout, asked)
            case _:
                assert_never(asked)

    def _start(self, asked: Open) -> None:
        task = self._group.create_task(self._open(asked))  # whoever waits for a place holds up nobody else here
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self, asked: Open) -> None:
        model = asked.model or self._model
        if model not in self._door.worlds:
            self._refuse(Fault("model_not_found", "There is no world of that name.", "model"), asked.request_id)
            return
        rollout = self._rollout(model, asked.show)
        try:
            line = await self._door.desk.open(model, Settings(model=model), rollout, self._connection.owner)
        except Refused as refused:
            self._turn_away(refused, asked.request_id)
            return
        rollout.attach(line)
        self._opened(rollout, asked.request_id, {})
        rollout.ask(WorldResetAsked(asked.begin, asked.request_id))

    def _fork(self, parent: Rollout, asked: Fork) -> None:
        """All the children that were asked for, or none."""
        children: list[Rollout] = []
        for _ in range(asked.count):
            child = self._rollout(parent.model, asked.show or parent.show)
            try:
                assert parent.line is not None
                child.attach(self._door.desk.fork(parent.line, asked.step, child, self._connection.owner))
            except Refused as refused:
                for made in children:
                    made.discard()
                self._turn_away(refused, asked.request_id, parent)
                return
            children.append(child)
        for child in children:
            self._opened(child, asked.request_id, {"forked_from": parent.session_id})

    def _resume(self, asked: Resume) -> None:
        model = asked.model or self._model
        if model not in self._door.worlds:
            self._refuse(Fault("model_not_found", "There is no world of that name.", "model"), asked.request_id)
            return
        rollout = self._rollout(model, asked.show)
        rollout.session_id = asked.session_id  # what is said again comes before the line does
        try:
            line = self._door.desk.resume(asked.session_id, asked.token, asked.seen, 0, rollout, self._connection.owner)
        except ResumeRefused as refused:
            self._refuse(Fault(refused.code, refused.message), asked.request_id, asked.session_id)
            return
        rollout.attach(line)
        self._rollouts[asked.session_id] = rollout
        self._outlet.woke(rollout)

    def _opened(self, rollout: Rollout, request_id: str, facts: Message) -> None:
        self._rollouts[rollout.session_id] = rollout
        rollout.opened(request_id, {"credits": rollout.credits, "world": self._facts(rollout.model), **facts})

    def _rollout(self, model: str, show: Show) -> Rollout:
        limits = self._door.limits
        return Rollout(
            model,
            self._door.worlds[model],
            show,
            limits.rollout_credits,
            self._woke,
            self._over,
            most_waiting=limits.mailbox_turns,
        )

    # -- what comes of them

    def _woke(self, rollout: Rollout) -> None:
        self._outlet.woke(rollout)
        if rollout.nbytes > self._door.limits.outbox_bytes:
            self._door.meter.connection_lost("slow_consumer")
            self._connection.abort()

    def _over(self, rollout: Rollout, _: str) -> None:
        if self._rollouts.get(rollout.session_id) is rollout:
            del self._rollouts[rollout.session_id]

    def _turn_away(self, refused: Refused, request_id: str, parent: Rollout | None = None) -> None:
        facts: Message = {} if refused.retry_after_s is None else {"retry_after_s": refused.retry_after_s}
        session_id = None if parent is None else parent.session_id
        self._refuse(Fault(refused.code, refused.message), request_id, session_id, facts)

    def _refuse(
        self,
        fault: Fault,
        request_id: str | None,
        session_id: str | None = None,
        facts: Mapping[str, Wire] | None = None,
    ) -> None:
        message: Message = {"type": "error", "code": fault.code, "message": fault.message, **(facts or {})}
        for name, value in (("param", fault.param), ("request_id", request_id), ("session_id", session_id)):
            if value is not None:
                message[name] = value
        self._outlet.say(message)
        if self._outlet.nbytes > self._door.limits.outbox_bytes:
            self._door.meter.connection_lost("slow_consumer")
            self._connection.abort()

    def _facts(self, model: str) -> Message:
        return about(model, self._door.worlds[model], self._door.limits)

    def _about(self) -> Message:
        """The default world, and the names of all."""
        return {"type": "server.world", **self._facts(self._model), "models": list(self._door.worlds)}


async def written(rollout: Rollout, item: Item) -> Message:
    """The item's message, made in a thread where it holds up the event loop. A fence may have moved meanwhile."""
    height, width, _ = rollout.world.contract.frame
    if item.frame is not None and item.form != RAW and height * width > _INLINE_PIXELS:
        return await asyncio.to_thread(rollout.written, item)
    return rollout.written(item)


def about(model: str, served: Served, limits: Limits) -> Message:
    """What a client should know of a world before it begins."""
    return {
        "model": model,
        **served.contract.describe(),
        "formats": list(FORMATS),
        "outputs": list(served.outputs),
        "rewind_steps": limits.rewind_steps,
        "step_frames": limits.step_frames,
        "credits": limits.rollout_credits,
        "detach_grace_s": limits.detach_grace_s,
        "idle_lease_s": limits.idle_lease_s,
        "experimental": [],
    }
