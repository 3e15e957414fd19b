"""A desk with real sessions and no stages behind them, and a websocket that is made of two lists."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from omni_live.protocols.desk import Mailbox, Refused, ResumeRefused
from omni_live.protocols.websocket import OWNER_KEY, TRANSPORT_KEY
from omni_live.sessions.conversation import Conversation
from omni_live.sessions.effects import Effect, Emit, Feed, Hold, RaiseFence, Release, Replace, Unhold
from omni_live.sessions.ids import CountedIds
from omni_live.sessions.inputs import Attached, Detached, Input
from omni_live.sessions.limits import Limits
from omni_live.sessions.plain import PlainSession
from omni_live.sessions.session import Session
from omni_live.sessions.settings import Settings


class Meter:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.drops: list[str] = []
        self.ended: list[str] = []
        self.waiting = 0
        self.handed = 0

    def content_handed(self, nbytes: int) -> None:
        self.handed += nbytes

    def dropped(self, reason: str, count: int = 1) -> None:
        self.drops += [reason] * count

    def outbox(self, change: int) -> None:
        self.waiting += change

    def connection_lost(self, why: str) -> None:
        self.ended.append(why)


class Nobody:
    """The mailbox of a session whose transport is gone."""

    def take(self, effects: list[Effect]) -> None:
        """Nobody takes anything."""


@dataclass
class Lone:
    """One session, its mailbox, and everything it was told and wanted."""

    session: Session
    owner: str
    mailbox: Mailbox
    told: list[Input] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)

    def tell(self, told: Input, mailbox: Mailbox | None = None) -> None:
        self.told.append(told)
        effects = self.session.handle(told, 0)
        self.effects += effects
        for effect in effects:
            if isinstance(effect, Emit | Hold | Unhold | RaiseFence | Replace | Release):
                self.mailbox.take([effect])
            if isinstance(effect, Replace) and mailbox is not None:
                self.mailbox = mailbox

    def heard(self) -> bytes:
        """What audio the session fed to its ears."""
        return b"".join(
            bytes(effect.payload.body)
            for effect in self.effects
            if isinstance(effect, Feed) and effect.payload.kind == "pcm"
        )


@dataclass
class LoneLine:
    lone: Lone
    attachment: int

    @property
    def session_id(self) -> str:
        return self.lone.session.session_id

    @property
    def settings(self) -> Settings:
        session = self.lone.session
        return session.settings if isinstance(session, Conversation) else Settings(model="plain")

    @property
    def token(self) -> str:
        return self.lone.session.token

    def tell(self, input: Input) -> None:
        if self.attachment == self.lone.session.attachment:
            if isinstance(input, Detached):
                self.lone.mailbox = Nobody()
            self.lone.tell(input)


class LoneDesk:
    """See omni_live.protocols.desk.Desk."""

    def __init__(self, limits: Limits | None = None, *, plain: bool = False) -> None:
        self.limits = limits or Limits()
        self.plain = plain
        self.sessions: list[Lone] = []
        self.refusal: Refused | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.given_up = 0
        self.waiting = 0
        """Opens that came to the gate."""
        self._ids = CountedIds()

    async def open(self, model: str, settings: Settings, mailbox: Mailbox, owner: str) -> LoneLine:
        if self.refusal is not None:
            raise self.refusal
        self.waiting += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        session: Session
        place = (self._ids("sess"), len(self.sessions), 1, self.limits, self._ids, 0)
        session = PlainSession(*place) if self.plain else Conversation(*place, settings)
        lone = Lone(session, owner, mailbox)
        self.sessions.append(lone)
        lone.tell(Attached(1))
        return LoneLine(lone, 1)

    def resume(
        self, session_id: str, token: str, seen: int | None, sent: int, mailbox: Mailbox, owner: str
    ) -> LoneLine:
        for lone in self.sessions:
            if lone.session.session_id == session_id and lone.owner == owner:
                code = lone.session.resumable(token)
                if code is not None:
                    raise ResumeRefused(code, "No.")
                attachment = lone.session.attachment + 1
                if lone.session.state == "detached":
                    lone.mailbox = mailbox
                lone.tell(Attached(attachment, token, seen, sent), mailbox)
                return LoneLine(lone, attachment)
        raise ResumeRefused("session_resume_expired", "There is no such session.")


class FakeSocket:
    """An ASGI websocket and its transport; the test is the client."""

    def __init__(
        self,
        query: str = "model=voice",
        offered: tuple[str, ...] = (),
        owner: str = "",
        path: str = "/v1/duplex",
    ) -> None:
        self.scope: dict[str, Any] = {
            "type": "websocket",
            "path": path,
            "query_string": query.encode(),
            "headers": [],
            "subprotocols": list(offered),
            TRANSPORT_KEY: self,
            OWNER_KEY: owner,
        }
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "websocket.connect"})
        self._open = asyncio.Event()
        self._open.set()
        self.sent: list[dict[str, Any]] = []
        self.aborted = False
        self.refused = 0
        self._hung_up = False
        self._news = asyncio.Event()

    # -- the server's side

    async def receive(self) -> dict[str, Any]:
        return await self._incoming.get()

    async def send(self, message: Any) -> None:
        self._news.set()
        if self._hung_up:
            self.refused += 1
            raise OSError
        self.sent.append(dict(message))
        if message["type"] == "websocket.close":
            self.leave()

    @property
    def is_writable(self) -> bool:
        return self._open.is_set()

    async def writable(self) -> None:
        await self._open.wait()

    def abort(self) -> None:
        self.aborted = True
        self.leave()
        self._news.set()

    # -- the client's side

    def say(self, frame: str | bytes) -> None:
        kind = "text" if isinstance(frame, str) else "bytes"
        self._incoming.put_nowait({"type": "websocket.receive", kind: frame})

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "websocket.disconnect", "code": 1005})

    def hang_up(self) -> None:
        """Take nothing any more; what was said before is still on its way to the server."""
        self._hung_up = True

    def stop_reading(self) -> None:
        self._open.clear()

    def read_again(self) -> None:
        self._open.set()

    async def until(self, seen: Callable[["FakeSocket"], bool]) -> None:
        """Wait for something among what was sent."""
        async with asyncio.timeout(10):
            while not seen(self):
                self._news.clear()
                await self._news.wait()

    def frames(self) -> Iterator[str | bytes]:
        for message in self.sent:
            if message["type"] == "websocket.send":
                yield message["text"] if "text" in message else message["bytes"]

    @property
    def close_code(self) -> int | None:
        return next((message["code"] for message in self.sent if message["type"] == "websocket.close"), None)
