"""Who may come in."""

import ast
import inspect
from typing import Any

import pytest

from omni_live.protocols.websocket import OWNER_KEY
from omni_live.server import auth
from omni_live.server.auth import KEY_SUBPROTOCOL, Gate, Keys, is_loopback

KEYS = {"team-a": "secret-a", "team-b": "secret-b"}
LOCAL = {"localhost", "127.0.0.1", "::1"}


class Behind:
    """The application behind the gate."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)


async def ask(
    headers: dict[str, str],
    *,
    keys: dict[str, str] | None = None,
    hosts: set[str] | None = LOCAL,
    origins: tuple[str, ...] = (),
    path: str = "/v1/models",
    offered: tuple[str, ...] = (),
    websocket: bool = False,
) -> tuple[int, str | None]:
    """(status, owner): 200 where the request came through."""
    behind = Behind()
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    gate = Gate(behind, Keys(keys or {}), hosts, origins)
    shown = {"Host": "localhost", **headers}
    scope = {
        "type": "websocket" if websocket else "http",
        "path": path,
        "headers": [(name.lower().encode(), value.encode()) for name, value in shown.items()],
        "subprotocols": list(offered),
    }
    await gate(scope, receive, send)
    if behind.scopes:
        assert not sent
        return 200, behind.scopes[0][OWNER_KEY]
    assert sent[0]["type"] == ("websocket.http.response.start" if websocket else "http.response.start")
    assert b"secret" not in sent[1]["body"]
    return sent[0]["status"], None


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "127.0.0.1:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:8000", "Origin": "http://localhost:8000"}, 200),
        ({"Host": "localhost:8000", "Origin": "http://localhost:9999"}, 403),
        ({"Origin": "https://app.example"}, 200),
        ({"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}, 403),
    ],
)
@pytest.mark.parametrize("websocket", [False, True])
async def test_a_web_page_of_another_origin_does_not_reach_loopback(
    headers: dict[str, str], status: int, websocket: bool
) -> None:
    assert await ask(headers, origins=("https://app.example",), websocket=websocket) == (
        status,
        "" if status == 200 else None,
    )


@pytest.mark.parametrize(
    ("headers", "offered", "owner"),
    [
        ({"Authorization": "Bearer secret-a"}, (), "team-a"),
        ({"Authorization": "bearer secret-b"}, (), "team-b"),
        ({"Authorization": "Api-Key secret-a"}, (), "team-a"),
        ({"Api-Key": "secret-a"}, (), "team-a"),
        ({}, ("realtime", KEY_SUBPROTOCOL + "secret-b"), "team-b"),
    ],
)
async def test_a_key_may_be_shown_in_each_way_that_clients_have(
    headers: dict[str, str], offered: tuple[str, ...], owner: str
) -> None:
    assert await ask(headers, keys=KEYS, offered=offered, websocket=True) == (200, owner)


BAD_KEYS = ["", "x", "secret-", "secret-aa", "SECRET-A", "ä", "secret-a\x00", "s" * 1_000_000]


@pytest.mark.parametrize("key", BAD_KEYS, ids=range(len(BAD_KEYS)))
@pytest.mark.parametrize("websocket", [False, True])
async def test_a_wrong_key_is_401(key: str, websocket: bool) -> None:
    assert await ask({"Authorization": f"Bearer {key}"}, keys=KEYS, websocket=websocket) == (401, None)
    assert await ask({}, keys=KEYS, offered=(KEY_SUBPROTOCOL + key,), websocket=websocket) == (401, None)


async def test_no_key_at_all_is_401() -> None:
    assert await ask({}, keys=KEYS) == (401, None)


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_a_supervisor_needs_no_key_and_may_use_any_address(path: str) -> None:
    assert (await ask({"Host": "10.0.0.7:8000"}, keys=KEYS, path=path))[0] == 200


async def test_the_metrics_need_a_key_where_there_are_keys() -> None:
    assert (await ask({}, keys=KEYS, path="/metrics"))[0] == 401


async def test_a_public_server_answers_to_every_host_but_only_with_a_key() -> None:
    assert (await ask({"Host": "voice.example"}, keys=KEYS, hosts=None))[0] == 401
    shown = {"Host": "voice.example", "Authorization": "Bearer secret-a"}
    assert await ask(shown, keys=KEYS, hosts=None) == (200, "team-a")


def test_keys_are_compared_in_constant_time_and_by_digest() -> None:
    source = ast.unparse(ast.parse(inspect.getsource(auth.Keys)))
    assert "hmac.compare_digest(digest, known)" in source
    assert "secret" not in repr(vars(Keys(KEYS)))


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("127.9.9.9", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.1", False), ("example.org", False), ("", False)],
)  # fmt: skip
def test_only_loopback_is_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
