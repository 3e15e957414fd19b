"""The one ASGI application: a few HTTP routes of the server's own, the doors' routes, and the doors' websockets."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from omni_live.protocols.fields import Wire
from omni_live.server.auth import App, Receive, Scope, Send
from omni_live.server.metrics import CONTENT_TYPE, Metrics

log = logging.getLogger(__name__)

_INTERNAL: Final = 1011


class Doors:
    """HTTP and websockets on one port. `websockets` maps a path to the door that answers there."""

    def __init__(self, http: App, websockets: Mapping[str, App], otherwise: App | None = None) -> None:
        """`otherwise` answers websockets at every other path."""
        self._http = http
        self._websockets = websockets
        self._otherwise = otherwise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
            return
        door = self._websockets.get(scope["path"], self._otherwise)
        if door is None:
            await receive()
            await send({"type": "websocket.http.response.start", "status": 404, "headers": []})
            await send({"type": "websocket.http.response.body", "body": b""})
            return
        try:
            await door(scope, receive, send)
        except OSError:
            log.debug("event=client_gone path=%s", scope["path"])
        except Exception:  # the connection edge: a bug costs this connection and nothing else
            log.exception("event=door_failed path=%s", scope["path"])
            await send({"type": "websocket.close", "code": _INTERNAL, "reason": "internal_error"})


def http_app(
    metrics: Metrics,
    unready: Callable[[], Sequence[str]],
    models: Callable[[], Iterable[str]],
    routes: Iterable[BaseRoute] = (),
) -> Starlette:
    """The HTTP routes. `unready` names what is not ready yet ("" for a server that is going away); empty is ready."""

    async def healthz(_: Request) -> Response:
        return Response("OK\n", media_type="text/plain")

    async def readyz(_: Request) -> Response:
        missing = list(unready())
        return JSONResponse({"ready": not missing, "missing": missing}, 503 if missing else 200)

    async def metrics_page(_: Request) -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    async def list_models(_: Request) -> Response:
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "omni-live"} for name in models()]
        return JSONResponse({"object": "list", "data": data})

    own = [
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/metrics", metrics_page),
        Route("/v1/models", list_models),
    ]
    return Starlette(routes=[*own, *routes], exception_handlers={HTTPException: _http_error, Exception: _bug})


def error_body(status: int, code: str, message: str, param: str | None = None) -> dict[str, Wire]:
    """An error in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(status: int, code: str, message: str, param: str | None = None) -> JSONResponse:
    return JSONResponse(error_body(status, code, message, param), status)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed", 413: "too_large"}.get(error.status_code, "invalid_request")
    response = error_response(error.status_code, code, error.detail)
    response.headers.update(error.headers or {})
    return response


async def _bug(_: Request, __: Exception) -> Response:
    return error_response(500, "internal_error", "The server failed on this request.")
