"""The duplex door: /v1/duplex over ASGI.

With `?model=` the session opens before the upgrade is answered, so that a refusal is an HTTP error; without it the
first frame opens or resumes one. A connection that ends detaches; the session lives on for its grace.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final, Self
from urllib.parse import parse_qs

from omni_live.protocols.desk import Desk, Line, Refused, ResumeRefused
from omni_live.protocols.duplex.codec import (
    MSGPACK_SUBPROTOCOL,
    Decoder,
    Encoder,
    OpenAsked,
    ResumeAsked,
    Told,
    default_settings,
)
from omni_live.protocols.fields import Fault, Wire
from omni_live.protocols.websocket import Meter
from omni_live.protocols.websocket.asgi import Connection, Frame, Receive, Scope, Send
from omni_live.protocols.websocket.outbox import POLICY, TRY_AGAIN, Outbox
from omni_live.sessions.effects import Emit
from omni_live.sessions.events import ErrorTold
from omni_live.sessions.inputs import CloseAsked, Detached
from omni_live.sessions.limits import Limits
from omni_live.sessions.settings import Settings

_SPOKEN: Final = (MSGPACK_SUBPROTOCOL, "realtime")
"""Subprotocols we answer with, best first; one that carries a key is never among them."""

_STATUS: Final[Mapping[str, int]] = {"model_not_found": 404, "rate_limited": 429}
_FALSE: Final = ("0", "false", "no")


class DuplexDoor:
    """An ASGI application for websocket scopes."""

    def __init__(self, desk: Desk, limits: Limits, models: Sequence[str], meter: Meter) -> None:
        """`models` are the names of pipelines that converse; the first is taken where a client names none."""
        self._desk = desk
        self._limits = limits
        self._models = models
        self._meter = meter
        self._facts: dict[str, Wire] = {
            "limits": {
                "client_frame_bytes": limits.client_frame_bytes,
                "detach_grace_s": limits.detach_grace_s,
                "idle_lease_s": limits.idle_lease_s,
                "journal_bytes": limits.journal_bytes,
            }
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = Connection(
            scope,
            receive,
            send,
            frame_bytes=self._limits.client_frame_bytes,
            write_deadline_s=self._limits.write_deadline_s,
            meter=self._meter,
        )
        subprotocol = next((name for name in _SPOKEN if name in connection.offered), None)
        with _Talk(self, connection, binary=subprotocol == MSGPACK_SUBPROTOCOL) as talk:
            if not await connection.connected():
                return
            model = _model_to_start(scope["query_string"])
            if model is not None:
                if not await self._open_first(talk, default_settings(model)):
                    return
                await connection.accept(subprotocol)
            else:
                await connection.accept(subprotocol)
                if not await self._open_by_frame(talk):
                    return
            await talk.go_on()

    async def _open_first(self, talk: "_Talk", settings: Settings) -> bool:
        """Open before the upgrade is answered; True where there is a session."""
        if not await talk.connection.unless_gone(talk.open(settings)):
            return False
        refused = talk.refused
        if refused is not None:
            status = _STATUS.get(refused.code, 503)
            await talk.connection.reject(status, refused.code, refused.message, refused.retry_after_s)
        return refused is None

    async def _open_by_frame(self, talk: "_Talk") -> bool:
        """Open or resume as the first frame asks; True where there is a session."""
        try:
            async with asyncio.timeout(self._limits.open_timeout_s):
                asked = await talk.first(default_settings(self._models[0]))
        except TimeoutError:
            await talk.give_up(Fault("open_timeout", "No event came in time to open a session."), POLICY)
            return False
        match asked:
            case OpenAsked():
                await talk.connection.unless_gone(talk.open(asked.settings))
                if talk.refused is not None:
                    refused = talk.refused
                    code = POLICY if refused.code in _STATUS else TRY_AGAIN
                    await talk.give_up(Fault(refused.code, refused.message), code)
                talk.then = asked.then
            case ResumeAsked():
                try:
                    talk.resume(asked)
                except ResumeRefused as refusal:
                    await talk.give_up(Fault(refusal.code, refusal.message), POLICY)
            case None:
                pass
        return talk.line is not None

    @property
    def desk(self) -> Desk:
        return self._desk

    @property
    def limits(self) -> Limits:
        return self._limits

    def serves(self, model: str) -> bool:
        return model in self._models

    def outbox(self) -> Outbox:
        return Outbox(self._limits.outbox_bytes, self._meter)

    def encoder(self, *, binary: bool) -> Encoder:
        return Encoder(binary=binary, frame_bytes=self._limits.server_frame_bytes, facts=self._facts)


class _Talk:
    """One connection and, once there is one, its line to a session. Left, it detaches."""

    def __init__(self, door: DuplexDoor, connection: Connection, *, binary: bool) -> None:
        self._door = door
        self._outbox = door.outbox()
        self._decoder = Decoder(binary=binary)
        self._encoder = door.encoder(binary=binary)
        self.connection = connection
        self.line: Line | None = None
        self.refused: Refused | None = None
        self.then: tuple[Told, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.line is None:
            return
        if self.connection.accepted:
            self.line.tell(Detached(self.line.attachment))
        else:
            self.line.tell(CloseAsked("never_attached"))  # nobody has the token to resume it

    async def open(self, settings: Settings) -> None:
        if not self._door.serves(settings.model):
            self.refused = Refused("model_not_found", "There is no model of that name to talk to.")
            return
        try:
            self.line = await self._door.desk.open(settings.model, settings, self._outbox, self.connection.owner)
        except Refused as refused:
            self.refused = refused

    def resume(self, asked: ResumeAsked) -> None:
        self.line = self._door.desk.resume(
            asked.session_id, asked.token, asked.seen, asked.sent, self._outbox, self.connection.owner
        )

    async def first(self, defaults: Settings) -> OpenAsked | ResumeAsked | None:
        """The first frame that asks for something; None where the client went away before."""
        while (frame := await self.connection.receive()) is not None:
            asked = self._decoder.first(frame, defaults)
            if not isinstance(asked, Fault):
                return asked
            if not await self.connection.send(self._encoder.fault(asked)):
                return None
        return None

    async def give_up(self, fault: Fault, code: int) -> None:
        if await self.connection.send(self._encoder.fault(fault, "server_error")):
            await self.connection.close(code, fault.code)

    async def go_on(self) -> None:
        for told in self.then:
            self._tell(told)
        await self.connection.converse(self._outbox, self._encoder, self._hear)

    def _hear(self, frame: Frame) -> None:
        assert self.line is not None
        for told in self._decoder.decode(frame, self.line.settings):
            self._tell(told)

    def _tell(self, told: Told) -> None:
        assert self.line is not None
        if isinstance(told, Fault):
            self._outbox.take([Emit(ErrorTold(told.code, told.message, told.event_id, told.param), 0)])
        else:
            self.line.tell(told)


def _model_to_start(query_string: bytes) -> str | None:
    """The model whose session opens at once; None where the first frame decides."""
    query = parse_qs(query_string.decode("latin-1"), keep_blank_values=True)
    model = query.get("model", [""])[0]
    wait = query.get("autostart", ["1"])[0] in _FALSE or query.get("resume", ["0"])[0] not in ("", *_FALSE)
    return model if model and not wait else None
