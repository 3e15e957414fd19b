"""The world door's HTTP twins: a request is one call on a rollout, its answer is all that came of it.

Bodies and answers are JSON with bytes as base64, or msgpack with bytes as they are. A call whose client hangs up goes
on to its end; only an open is taken back, since nobody would know of its session.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from omni_live.protocols.desk import Desk, Refused
from omni_live.protocols.fields import Fault, Faulty, Wire
from omni_live.protocols.frames import dump_json, dump_msgpack, load_json, load_msgpack
from omni_live.protocols.websocket import OWNER_KEY, Meter
from omni_live.protocols.world import messages
from omni_live.protocols.world.asgi import about
from omni_live.protocols.world.contract import Served
from omni_live.protocols.world.messages import Fork, Open, Told
from omni_live.protocols.world.rollouts import Message, numbered
from omni_live.server.app import error_body
from omni_live.server.guests import Guest, Guests, NoTurn, Result
from omni_live.sessions.inputs import CancelAsked
from omni_live.sessions.limits import Limits

SESSIONS_PATH: Final = "/v1/world/sessions"

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"

_CALLS: Final = frozenset({"step", "look", "reset", "fork", "rewind", "snapshot", "restore", "cancel"})
_OF_THE_PATH: Final = ("type", "session_id")
"""Fields of the socket's messages that a path says here."""
_PIECE_BYTES: Final = 64 * 1024
"""So much of an answer has the write deadline to leave, so that a slow reader may be as slow as a piece in it."""
_LINGER_S: Final = 2.0
"""So long a client that was refused may go on with what it was saying."""
_INLINE_BYTES: Final = 256 * 1024
"""An answer with more content is written in a thread: it would hold up everybody's frames."""

_STATUS: Final[Mapping[str, int]] = {
    "bad_frame": 400,
    "bad_field": 400,
    "bad_frames": 400,
    "bad_actions": 400,
    "bad_step": 400,
    "bad_reset": 400,
    "bad_snapshot": 400,
    "session_not_found": 404,
    "model_not_found": 404,
    "request_timeout": 408,
    "step_out_of_order": 409,
    "step_unknown": 409,
    "rewind_too_far": 409,
    "rewind_ahead": 409,
    "not_started": 409,
    "history_full": 409,
    "response_cancel_not_active": 409,
    "too_large": 413,
    "unsupported_media_type": 415,
    "mailbox_full": 429,
    "overloaded": 503,
    "draining": 503,
    "replica_unavailable": 503,
    "pool_full": 503,
    "state_not_ready": 503,
    "timeout": 504,
}
"""Code -> status; any other one is a failure of what is behind this server: 502."""
_GONE: Final = frozenset({"close_requested", "idle", "max_age", "detached", "replaced"})
"""Reasons of a session that ended as it should have."""
_SENTENCES: Final[Mapping[str, str]] = {
    "session_not_found": "There is no such session, or it is over.",
    "step_out_of_order": "That is neither the next frame nor one that was made.",
    "step_unknown": "That frame is not kept any more.",
    "rewind_too_far": "The rollout cannot go back so far.",
    "rewind_ahead": "The rollout has not come so far.",
    "not_started": "The rollout has not begun: reset or restore it.",
    "history_full": "The rollout's past cannot be kept at the moment.",
    "bad_frames": "The request is for too many frames.",
    "bad_step": "There is no such frame.",
    "bad_snapshot": "The snapshot is none, or it was damaged.",
    "response_cancel_not_active": "There is no such call to cancel.",
    "draining": "The server is going away.",
    "replica_lost": "The model's process was lost; the rollout goes on from the frame that `step` names.",
}
_PARAMS: Final[Mapping[str, str]] = {
    "step_out_of_order": "step",
    "step_unknown": "step",
    "rewind_too_far": "step",
    "rewind_ahead": "step",
    "bad_step": "step",
    "bad_snapshot": "blob",
    "bad_actions": "actions",
    "model_not_found": "model",
}
_RETRY_S: Final = 1.0

Endpoint = Callable[[Request], Awaitable[Response]]


class _Bad(Exception):
    """The request is answered with an error, and nothing came of it."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class _Pieces(Response):
    """A response whose body waits for its reader piece by piece."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._begin(send)
        for at in range(0, len(self.body), _PIECE_BYTES):
            await send({"type": "http.response.body", "body": self.body[at : at + _PIECE_BYTES], "more_body": True})
        await send({"type": "http.response.body"})

    async def _begin(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})


class _Farewell(_Pieces):
    """A response to a request that is not read to its end: the connection closes when the client has had its say.

    Closed at once, a client that still writes would find a broken pipe where the answer is.
    """

    async def _begin(self, send: Send) -> None:
        self.headers["connection"] = "close"
        await super()._begin(send)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._begin(send)
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body"})


def world_routes(desk: Desk, limits: Limits, worlds: Mapping[str, Served], meter: Meter) -> Sequence[Route]:
    """The routes. `worlds` are the pipelines with rollouts, by name; the first is taken where a client names none."""
    twins = _Twins(Guests(desk, limits, worlds, meter), limits, meter)
    one = SESSIONS_PATH + "/{session_id}"
    return (
        Route(SESSIONS_PATH, _answering(twins.open), methods=["POST"]),
        Route(one, _answering(twins.one), methods=["GET", "DELETE"]),
        *(Route(f"{one}/{kind}", _answering(twins.call), methods=["POST"], name=kind) for kind in sorted(_CALLS)),
    )


class _Twins:
    """The endpoints."""

    def __init__(self, guests: Guests, limits: Limits, meter: Meter) -> None:
        self._guests = guests
        self._limits = limits
        self._meter = meter
        self._next_id = numbered("http")

    async def open(self, request: Request) -> Response:
        body = await _body(request, self._limits)
        named = self._guests.worlds.get(messages.model_of(body) or "", self._guests.worlds[self._guests.default])
        asked = self._read("session.open", None, body, named)
        assert isinstance(asked, Open)
        async with asyncio.TaskGroup() as group:
            opening, leaving = group.create_task(self._open(request, asked)), group.create_task(_left(request))
            await asyncio.wait({opening, leaving}, return_when=asyncio.FIRST_COMPLETED)
            opening.cancel()
            leaving.cancel()
        return Response(status_code=408) if opening.cancelled() else opening.result()

    async def _open(self, request: Request, asked: Open) -> Response:
        try:
            guest, began = await self._guests.open(asked, _owner(request))
        except Refused as refused:
            return _refusal(request, refused)
        except NoTurn as never:
            return _unfinished(request, Result(never.status, -1, never.code), {})
        if began.status != "done":
            return _unfinished(request, began, {})
        model = guest.rollout.model
        world = about(model, guest.rollout.world, self._limits)
        return _respond(request, 201, {**_standing(guest), "status": "done", "world": world})

    async def one(self, request: Request) -> Response:
        """Show the session, or end it."""
        guest = self._found(request)
        if request.method == "DELETE":
            await guest.close()
            return Response(status_code=204)
        guest.touch()
        world = about(guest.rollout.model, guest.rollout.world, self._limits)
        return _respond(request, 200, {**_standing(guest), "calls": guest.calls, "world": world})

    async def call(self, request: Request) -> Response:
        guest = self._found(request)
        kind = request.url.path.rpartition("/")[2]
        asked = self._read(kind, guest, await _body(request, self._limits), guest.rollout.world)
        try:
            match asked:
                case Fork():
                    return await self._fork(request, guest, asked)
                case Told(input=CancelAsked(target)):
                    return await self._cancel(request, guest, target)
                case Told():
                    return await self._told(request, guest, asked)
                case _:
                    raise AssertionError(f"{kind} is no call on a rollout")
        except NoTurn as never:
            return _unfinished(request, Result(never.status, guest.rollout.position, never.code), _standing(guest))

    async def _told(self, request: Request, guest: Guest, asked: Told) -> Response:
        result = await guest.call(asked)
        standing = _standing(guest)
        if result.status != "done":
            return _unfinished(request, result, standing)
        answer: Message = {**standing, "status": "done", "frames": list(result.frames), **result.extra}
        if result.nbytes > _INLINE_BYTES:
            content = await asyncio.to_thread(_dumped, request, answer)
        else:
            content = _dumped(request, answer)
        self._meter.content_handed(len(content))
        return _Pieces(content, 200, media_type=_media_type(request))

    async def _fork(self, request: Request, guest: Guest, asked: Fork) -> Response:
        children = await self._guests.fork(guest, asked)
        forks: list[Wire] = [{**_standing(child), "forked_from": guest.rollout.session_id} for child in children]
        return _respond(request, 200, {**_standing(guest), "status": "done", "frames": [], "forks": forks})

    async def _cancel(self, request: Request, guest: Guest, target: str | None) -> Response:
        if not await guest.cancel(target):
            raise _bad("response_cancel_not_active", "target")
        return _respond(request, 200, {**_standing(guest), "status": "done", "frames": []})

    def _found(self, request: Request) -> Guest:
        guest = self._guests.find(request.path_params["session_id"], _owner(request))
        if guest is None:
            raise _bad("session_not_found")
        return guest

    def _read(self, kind: str, guest: Guest | None, body: Message, world: Served) -> messages.Request:
        for name in _OF_THE_PATH:
            if name in body:
                raise _Bad(Fault("bad_field", f"Unknown parameter: '{name}'; the path says it.", name))
        message: Message = {**body, "type": kind}
        if guest is not None:
            message["session_id"] = guest.rollout.session_id
        try:
            return messages.read(message, world.contract, self._next_id)
        except Faulty as faulty:
            raise _Bad(messages.named(faulty.fault)) from None


# -- requests ----------------------------------------------------------------------------------------------------------


def _owner(request: Request) -> str:
    owner: str = request.scope.get(OWNER_KEY, "")
    return owner


async def _body(request: Request, limits: Limits) -> Message:
    """The request's map; none at all is an empty one. Raises _Bad, ClientDisconnect."""
    most = limits.client_frame_bytes
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 18 or int(length) > most:
        raise _too_large(most)
    chunks: list[bytes] = []
    left = most
    try:
        async with asyncio.timeout(limits.open_timeout_s):
            async for chunk in request.stream():
                chunks.append(chunk)
                left -= len(chunk)
                if left < 0:
                    raise _too_large(most)
    except TimeoutError:
        raise _Bad(Fault("request_timeout", "The body did not come in time.")) from None
    return _loaded(request, b"".join(chunks))


def _loaded(request: Request, body: bytes) -> Message:
    if not body:
        return {}
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in {JSON, MSGPACK} or request.headers.get("content-encoding", "identity").lower() != "identity":
        raise _Bad(Fault("unsupported_media_type", f"Bodies are {JSON} or {MSGPACK}, and not compressed."))
    try:
        return load_msgpack(body) if kind == MSGPACK else load_json(body.decode(), unique=True)
    except UnicodeDecodeError:
        raise _Bad(Fault("bad_frame", "The body is not UTF-8.")) from None
    except Faulty as faulty:
        raise _Bad(replace(faulty.fault, code="bad_frame")) from None


def _too_large(most: int) -> _Bad:
    return _Bad(Fault("too_large", f"A body has at most {most} bytes."))


async def _left(request: Request) -> None:
    """Return when the client has hung up. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


# -- answers -----------------------------------------------------------------------------------------------------------


def _answering(endpoint: Endpoint) -> Endpoint:
    """The endpoint, its refusals as errors."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except _Bad as bad:
            return _error(request, bad.fault)
        except Refused as refused:
            return _refusal(request, refused)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it

    return answer


def _bad(code: str, param: str | None = None) -> _Bad:
    return _Bad(Fault(code, _SENTENCES[code], param))


def _standing(guest: Guest) -> Message:
    rollout = guest.rollout
    return {"session_id": rollout.session_id, "step": rollout.position, "expires_in_s": round(guest.expires_in_s, 3)}


def _unfinished(request: Request, result: Result, standing: Message) -> Response:
    """The answer of a call that was cut, failed, or never began."""
    if result.status == "interrupted" and result.code == "client_cancelled":
        frames: list[Wire] = list(result.frames)
        return _respond(request, 200, {**standing, "status": "interrupted", "reason": result.code, "frames": frames})
    code = "session_not_found" if result.code in _GONE else "draining" if result.code == "drained" else result.code
    message = _SENTENCES.get(code, "The world could not do this.")
    return _error(request, Fault(code, message, _PARAMS.get(code)), facts=standing)


def _refusal(request: Request, refused: Refused) -> Response:
    fault = Fault(refused.code, refused.message, _PARAMS.get(refused.code))
    return _error(request, fault, refused.retry_after_s)


def _error(
    request: Request, fault: Fault, retry_after_s: float | None = None, facts: Mapping[str, Wire] | None = None
) -> Response:
    status = _STATUS.get(fault.code, 502)
    body = error_body(status, fault.code, fault.message, fault.param) | dict(facts or {})
    if status == 413:
        return _Farewell(_dumped(request, body), status, media_type=_media_type(request))
    response = _respond(request, status, body)
    if status == 408:
        response.headers["connection"] = "close"
    if status in {429, 503}:
        response.headers["retry-after"] = str(max(1, round(retry_after_s or _RETRY_S)))
    return response


def _respond(request: Request, status: int, body: Message) -> Response:
    return _Pieces(_dumped(request, body), status, media_type=_media_type(request))


def _dumped(request: Request, body: Message) -> bytes:
    return dump_msgpack(body) if _wants_msgpack(request) else dump_json(body).encode()


def _media_type(request: Request) -> str:
    return MSGPACK if _wants_msgpack(request) else JSON


def _wants_msgpack(request: Request) -> bool:
    accepted = request.headers.get("accept", "").lower().split(",")
    return any(kind.partition(";")[0].strip() == MSGPACK for kind in accepted)
