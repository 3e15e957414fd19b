"""Who may come in: API keys, `Host` and `Origin`, seen before anything else looks at a request.

A server on loopback without keys is open to this machine's programs but not to web pages: a browser names its page in
`Origin` and the name it was asked for in `Host`, and both are checked (cross-site websockets, DNS rebinding).
"""

import hashlib
import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final
from urllib.parse import urlsplit

from omni_live.protocols.websocket import OWNER_KEY

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

KEY_SUBPROTOCOL: Final = "openai-insecure-api-key."
"""Browsers cannot set headers on a websocket; OpenAI's clients offer the key as a subprotocol. Never answered with."""

PUBLIC: Final = ("/healthz", "/readyz")
"""Paths that a machine's supervisor asks without a key and by whatever address."""

LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")
_MAX_KEY_BYTES: Final = 1024


class Keys:
    """The API keys, as digests. A session belongs to the name of the key that opened it."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._digests = [(name, _digest(key.encode())) for name, key in keys.items()]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, key: bytes) -> str | None:
        """The name of the key, None if there is no such key. Takes the same time whichever it is."""
        digest = _digest(key[:_MAX_KEY_BYTES])
        found = None
        for name, known in self._digests:
            if hmac.compare_digest(digest, known):
                found = name
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Gate:
    """An ASGI application in front of the others.

    `hosts` None lets every Host pass: then a key is needed, which no web page has.
    """

    def __init__(self, app: App, keys: Keys, hosts: Iterable[str] | None, origins: Iterable[str]) -> None:
        self._app = app
        self._keys = keys
        self._hosts = None if hosts is None else frozenset(hosts)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(reversed(scope["headers"]))  # the first of a repeated header counts
        refusal = self._refusal(scope, headers)
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await _answer(send, "http.response", *refusal)
        else:
            await receive()
            await _answer(send, "websocket.http.response", *refusal)

    def _refusal(self, scope: Scope, headers: Mapping[bytes, bytes]) -> "_Refusal | None":
        scope[OWNER_KEY] = ""
        if scope["type"] == "http" and scope["path"] in PUBLIC:
            return None
        return self._misplaced(headers) or self._keyless(scope, headers)

    def _misplaced(self, headers: Mapping[bytes, bytes]) -> "_Refusal | None":
        """What `Host` and `Origin` say against the request."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self._hosts is not None and _host_name(host) not in self._hosts:
            return 403, "host_not_allowed", "This server does not answer to that Host."
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        if origin and origin not in self._origins and (not host or urlsplit(origin).netloc != host):
            return 403, "origin_not_allowed", "Pages of that origin may not connect."
        return None

    def _keyless(self, scope: Scope, headers: Mapping[bytes, bytes]) -> "_Refusal | None":
        """What the key says against the request; a good one leaves its name in the scope."""
        if not self._keys:
            return None
        key = _key(scope, headers)
        if key is None:
            return 401, "missing_api_key", "An API key is needed: Authorization: Bearer KEY."
        owner = self._keys.owner(key)
        if owner is None:
            return 401, "invalid_api_key", "Incorrect API key provided."
        scope[OWNER_KEY] = owner
        return None


_Refusal = tuple[int, str, str]
"""Status, code, message."""


def _host_name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _key(scope: Scope, headers: Mapping[bytes, bytes]) -> bytes | None:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and token:
        return token.strip()
    if scheme.lower() == b"api-key" and token:
        return token.strip()  # openpi-client sends `Authorization: Api-Key ...`
    if b"api-key" in headers:
        return headers[b"api-key"]
    for offered in scope.get("subprotocols", ()):
        if offered.startswith(KEY_SUBPROTOCOL):
            return bytes(offered.removeprefix(KEY_SUBPROTOCOL), "latin-1", "replace")
    return None


async def _answer(send: Send, kind: str, status: int, code: str, message: str) -> None:
    body = json.dumps(
        {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    ).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": f"{kind}.start", "status": status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})
