"""Rollouts whose client is here only while it calls: the world door's sessions over HTTP.

A guest's session stays attached between its calls, and ends by its idle lease, its age or a DELETE. It takes one call
at a time, and the next ones wait in order. A call goes on to its end whoever waits for it: what it makes is committed,
and a client that lost the answer asks for the same frames again. Its rollout is the one that the websocket door has;
the credit that a client gives there is given here as frames are collected.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Final

from omni_live.protocols.desk import Desk, Refused
from omni_live.protocols.websocket import Meter
from omni_live.protocols.world.asgi import written
from omni_live.protocols.world.contract import Served
from omni_live.protocols.world.messages import Fork, Open, Show, Told
from omni_live.protocols.world.rollouts import Item, Message, Rollout
from omni_live.sessions.inputs import (
    CancelAsked,
    ClientInput,
    CloseAsked,
    EventAcked,
    Heartbeat,
    LookAsked,
    StepAsked,
    WorldResetAsked,
)
from omni_live.sessions.limits import Limits
from omni_live.sessions.settings import Settings

_SHOWN: Final[tuple[str, ...]] = ("step", "output", "format", "image", "latent")
"""What an answer says of a frame."""
_LATENT_ITEM_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a call."""

    status: str
    """done, interrupted or failed."""
    step: int
    """Where the rollout stands."""
    code: str = ""
    """Why it is not done."""
    frames: tuple[Message, ...] = ()
    nbytes: int = 0
    """Of the frames, as they came."""
    extra: Message = field(default_factory=dict)


class NoTurn(Exception):
    """The call never had its turn: it was withdrawn, or the session is over."""

    def __init__(self, status: str, code: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code


@dataclass(slots=True, eq=False)
class _Call:
    request_id: str
    turn: asyncio.Future[NoTurn | None]
    """Done when the call may begin, or will not."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Guest:
    """One session and the calls on it."""

    def __init__(
        self,
        owner: str,
        model: str,
        world: Served,
        show: Show,
        limits: Limits,
        meter: Meter,
        gone: Callable[["Guest"], None],
    ) -> None:
        """`gone` is called when the session is over."""
        self.owner = owner
        self.over = ""
        """Why the session is over; empty while it is not."""
        self._limits = limits
        self._meter = meter
        self._gone = gone
        self._calls: deque[_Call] = deque()
        """The first one runs."""
        self._more = asyncio.Event()
        self._ended = asyncio.Event()
        self.rollout = Rollout(
            model,
            world,
            replace(show, credits=None),
            limits.rollout_credits,
            self._woke,
            self._ends,
            most_waiting=limits.mailbox_turns,
        )
        self._expires_at = 0.0

    def began(self) -> None:
        """The session is there."""
        self._expires_at = asyncio.get_running_loop().time() + self.rollout.expires_in_s

    @property
    def expires_in_s(self) -> float:
        """Until the session's maximum age."""
        return max(0.0, self._expires_at - asyncio.get_running_loop().time())

    @property
    def calls(self) -> int:
        """How many run and wait."""
        return len(self._calls)

    # -- calls ---------------------------------------------------------------------------------------------------

    async def call(self, asked: Told) -> Result:
        """Put it to the session when its turn has come, and collect all that comes of it. Raises Refused, NoTurn."""
        self._check(asked.input)
        async with self.turn(asked.request_id):
            self.rollout.ask(asked.input, asked.form)
            return await self._collected(asked.request_id)

    @asynccontextmanager
    async def turn(self, request_id: str) -> AsyncIterator[None]:
        """Nothing else is asked of the session within the block. Raises Refused, NoTurn."""
        if self.over:
            raise NoTurn("failed", self.over)
        if len(self._calls) > self._limits.mailbox_turns:
            raise Refused("mailbox_full", "Too many requests wait in this session.", 1.0)
        call = _Call(request_id, asyncio.get_running_loop().create_future())
        self._calls.append(call)
        try:
            self._next()
            never = await call.turn
            if never is not None:
                raise never
            yield
        finally:
            self._calls.remove(call)
            call.ended.set()
            self._next()

    async def cancel(self, target: str | None) -> bool:
        """End the call of that id, or the one that runs; False where there is none. Returns when it has ended."""
        found = next((call for call in self._calls if target in {None, call.request_id}), None)
        if found is None:
            return False
        if found is self._calls[0]:
            self.rollout.ask(CancelAsked(found.request_id, f"{found.request_id}-cancel"))
        elif not found.turn.done():
            found.turn.set_result(NoTurn("interrupted", "client_cancelled"))
        await found.ended.wait()
        return True

    async def close(self) -> None:
        """End the session and whatever runs in it."""
        self.leave()
        await self._ended.wait()

    def leave(self) -> None:
        if not self.over:
            self.rollout.ask(CloseAsked("close_requested"))

    def touch(self) -> None:
        """The client is there, so the idle lease begins anew."""
        self.rollout.ask(Heartbeat())

    def _check(self, input: ClientInput) -> None:
        """An answer is collected whole, so it is bounded beforehand."""
        if not isinstance(input, StepAsked | LookAsked):
            return
        contract = self.rollout.world.contract
        sizes = {"frame": prod(contract.frame), "latent": prod(contract.latent) * _LATENT_ITEM_BYTES}
        outputs = input.outputs or frozenset(self.rollout.show.outputs)
        most = self._limits.outbox_bytes // sum(sizes[output] for output in outputs)
        if input.frames > most:
            raise Refused("bad_frames", f"One answer of this world holds at most {most} frames with these outputs.")

    def _next(self) -> None:
        if self._calls and not self._calls[0].turn.done():
            self._calls[0].turn.set_result(None)

    # -- what comes of them --------------------------------------------------------------------------------------

    async def _collected(self, request_id: str) -> Result:
        frames: list[tuple[Item, Message]] = []
        extra: Message = {}
        while True:
            item = await self._item()
            if item is None:
                return self._failed(self.over)
            message = item.message
            if message.get("request_id") != request_id:
                continue  # of the session, or of a call that was given up
            kind = message["type"]
            if kind == "frame":
                frames.append((item, await written(self.rollout, item)))
            elif kind == "snapshot":
                extra = {"blob": message["blob"]}
            elif kind == "error":
                return self._failed(str(message["code"]))
            elif kind == "done":
                self._ack(message)
                return self._done(message, frames, extra)

    async def _item(self) -> Item | None:
        """The next thing that the session said; None where it is over."""
        while (item := self.rollout.pop()) is None:
            if self.over:
                return None
            self._more.clear()
            await self._more.wait()
        if item.frame is not None:
            self.rollout.credit(1)
        return item

    def _ack(self, message: Message) -> None:
        """Nobody will ask the journal for it: an answer comes whole or not at all."""
        seq = message.get("seq")
        if isinstance(seq, int):
            self.rollout.tell(EventAcked(seq))

    def _done(self, message: Message, frames: list[tuple[Item, Message]], extra: Message) -> Result:
        admitted = [(item, made) for item, made in frames if self.rollout.admits(item)]
        if len(admitted) < len(frames):
            self._meter.dropped("fenced_content", len(frames) - len(admitted))
        if any(made["type"] == "error" for _, made in admitted):
            return self._failed("output_lost")
        shown = tuple({name: made[name] for name in _SHOWN if name in made} for _, made in admitted)
        status, reason = str(message["status"]), str(message["reason"])
        nbytes = sum(item.nbytes for item, _ in admitted)
        return Result(status, self.rollout.position, reason, shown, nbytes, extra)

    def _failed(self, code: str) -> Result:
        return Result("failed", self.rollout.position, code)

    def _woke(self, rollout: Rollout) -> None:
        if not self._calls:
            while rollout.pop() is not None:
                pass  # what a session says by itself between two calls
        self._more.set()

    def _ends(self, _: Rollout, reason: str) -> None:
        self.over = reason
        self._gone(self)
        for call in self._calls:
            if not call.turn.done():
                call.turn.set_result(NoTurn("failed", reason))
        self._more.set()
        self._ended.set()


class Guests:
    """The sessions that were opened over HTTP; admission bounds them."""

    def __init__(self, desk: Desk, limits: Limits, worlds: Mapping[str, Served], meter: Meter) -> None:
        """`worlds` are the pipelines with rollouts, by name; the first is taken where a client names none."""
        self.worlds = worlds
        self.default = next(iter(worlds))
        self._desk = desk
        self._limits = limits
        self._meter = meter
        self._guests: dict[str, Guest] = {}

    def find(self, session_id: str, owner: str) -> Guest | None:
        """The session, if it is one of this owner's."""
        guest = self._guests.get(session_id)
        return guest if guest is not None and guest.owner == owner else None

    async def open(self, asked: Open, owner: str) -> tuple[Guest, Result]:
        """A session, and what came of its beginning: where it could not begin, it is closed again. Raises Refused.

        A task cancelled meanwhile leaves nothing behind.
        """
        model = asked.model or self.default
        if model not in self.worlds:
            raise Refused("model_not_found", "There is no world of that name.")
        guest = self._guest(model, asked.show, owner)
        line = await self._desk.open(model, Settings(model=model), guest.rollout, owner)
        guest.rollout.attach(line)
        self._seat(guest)
        with ExitStack() as undo:
            undo.callback(guest.leave)
            begin = WorldResetAsked(asked.begin, asked.request_id)
            began = await guest.call(Told(asked.request_id, line.session_id, begin))
            if began.status == "done":
                undo.pop_all()
        return guest, began

    async def fork(self, parent: Guest, asked: Fork) -> list[Guest]:
        """All the children that were asked for, or none. Raises Refused, NoTurn."""
        async with parent.turn(asked.request_id):
            children: list[Guest] = []
            with ExitStack() as undo:
                for _ in range(asked.count):
                    child = self._forked(parent, asked)
                    undo.callback(child.leave)
                    children.append(child)
                undo.pop_all()
            return children

    def _forked(self, parent: Guest, asked: Fork) -> Guest:
        line = parent.rollout.line
        assert line is not None
        child = self._guest(parent.rollout.model, asked.show or parent.rollout.show, parent.owner)
        child.rollout.attach(self._desk.fork(line, asked.step, child.rollout, parent.owner))
        self._seat(child)
        return child

    def _guest(self, model: str, show: Show, owner: str) -> Guest:
        return Guest(owner, model, self.worlds[model], show, self._limits, self._meter, self._left)

    def _seat(self, guest: Guest) -> None:
        guest.began()
        if not guest.over:
            self._guests[guest.rollout.session_id] = guest

    def _left(self, guest: Guest) -> None:
        self._guests.pop(guest.rollout.session_id, None)
