"""The server on a real port, with real clients: what no ASGI server does for us."""

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from omni_live.config.deploy import Server
from omni_live.protocols.duplex import MSGPACK_SUBPROTOCOL
from omni_live.protocols.frames import dump_msgpack, load_msgpack
from omni_live.server.supervise import listen
from omni_live.sessions.limits import Limits

from .house import House, open_house

LIMITS = Limits()


async def until(true: Callable[[], bool]) -> None:
    """Wait for something that announces itself to nobody."""
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)


async def http(port: int, request: str) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of one request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    return int(lines[0].split()[1]), headers, body


def get(path: str, host: str = "localhost") -> str:
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"


def url(port: int, query: str = "?model=voice") -> str:
    return f"ws://127.0.0.1:{port}/v1/duplex{query}"


async def received(client: Any) -> dict[str, Any]:
    frame = await client.recv()
    event: dict[str, Any] = json.loads(frame) if isinstance(frame, str) else load_msgpack(frame)
    return event


async def test_the_supervisor_s_questions_are_answered() -> None:
    async with open_house() as (house, port):
        assert (await http(port, get("/healthz")))[0] == 200
        status, _, body = await http(port, get("/readyz"))
        assert (status, json.loads(body)) == (200, {"ready": True, "missing": []})
        status, headers, body = await http(port, get("/metrics"))
        assert status == 200
        assert headers["content-type"].startswith("text/plain")
        assert b"omni_live_sessions" in body
        models = json.loads((await http(port, get("/v1/models")))[2])
        assert [model["id"] for model in models["data"]] == ["voice", "echo"]
        house.desk.drain(0)
        assert (await http(port, get("/readyz")))[0] == 503


async def test_a_server_whose_stages_are_not_ready_says_which() -> None:
    async with open_house(ready=False) as (_, port):
        status, _, body = await http(port, get("/readyz"))
        assert status == 503
        assert "thinker" in json.loads(body)["missing"]
        with pytest.raises(InvalidStatus) as refused:
            await connect(url(port))
        assert refused.value.response.status_code == 503
        assert int(refused.value.response.headers["retry-after"]) >= 1


@pytest.mark.parametrize(("request_line", "status"), [("GET /nope", 404), ("DELETE /v1/models", 405)])
async def test_http_errors_have_openai_s_form(request_line: str, status: int) -> None:
    async with open_house() as (_, port):
        answer = await http(port, f"{request_line} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert answer[0] == status
        assert set(json.loads(answer[2])["error"]) == {"message", "type", "param", "code"}


async def test_a_conversation_over_json_and_over_msgpack() -> None:
    async with open_house() as (house, port):
        for subprotocols in (None, [MSGPACK_SUBPROTOCOL]):
            async with connect(url(port), subprotocols=subprotocols) as client:  # type: ignore[arg-type]
                assert (await received(client))["type"] == "session.created"
                event = {"type": "session.heartbeat", "event_id": "h1"}
                await client.send(dump_msgpack(event) if subprotocols else json.dumps(event))
                assert (await received(client))["client_event_id"] == "h1"
                await client.send(json.dumps({"type": "session.close"}))
                assert (await received(client))["type"] == "session.closed"
                with pytest.raises(ConnectionClosed):
                    await client.recv()
                assert client.close_code == 1000
        await until(house.at_rest)


async def test_deflate_is_never_agreed_on() -> None:
    async with open_house() as (_, port), connect(url(port), compression="deflate") as client:
        assert client.response is not None
        assert "sec-websocket-extensions" not in client.response.headers


async def test_a_key_in_a_subprotocol_opens_the_door_and_is_not_sent_back() -> None:
    offered: Any = ["realtime", "openai-insecure-api-key.secret"]
    async with open_house(server=Server(api_keys={"team": "secret"})) as (_, port):
        async with connect(url(port), subprotocols=offered) as client:
            assert client.subprotocol == "realtime"
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            with pytest.raises(InvalidStatus) as refused:
                await connect(url(port), additional_headers=headers)
            assert refused.value.response.status_code == 401


async def test_a_foreign_page_is_403_before_the_upgrade() -> None:
    async with open_house() as (house, port):
        with pytest.raises(InvalidStatus) as refused:
            await connect(url(port), origin="http://evil.example")  # type: ignore[arg-type]
        assert refused.value.response.status_code == 403
        assert house.at_rest()


async def test_a_path_without_a_door_is_404_and_no_news(caplog: pytest.LogCaptureFixture) -> None:
    async with open_house() as (_, port):
        for path in ("/v1/nothing", "/v1/duplex?model=nothing"):
            with pytest.raises(InvalidStatus) as refused:
                await connect(f"ws://127.0.0.1:{port}{path}")
            assert refused.value.response.status_code == 404
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_frame_over_the_limit_is_1009() -> None:
    limits = replace(LIMITS, client_frame_bytes=10_000)
    async with open_house(limits) as (house, port), connect(url(port)) as client:
        await received(client)
        await client.send("x" * 20_000)
        with pytest.raises(ConnectionClosed):
            await client.recv()
        assert client.close_code == 1009
        await until(lambda: ("voice", "detached", 1) in set(house.desk.sessions()))


@pytest.mark.parametrize("said", ["", "GET /healthz HTTP/1.1\r\nHost: loc"])
async def test_a_silent_or_half_spoken_connection_ends_at_the_header_deadline(said: str) -> None:
    async with open_house(replace(LIMITS, header_deadline_s=0.05)) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said.encode())
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()


async def rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def test_headers_without_end_are_cut_off() -> None:
    async with open_house() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 200_000)
        async with asyncio.timeout(5):
            assert await rest(reader) == b""
        writer.close()


def test_the_listening_socket_drops_peers_that_acknowledge_nothing() -> None:
    listening = listen("127.0.0.1", 0, replace(LIMITS, tcp_user_timeout_s=7.0))
    assert listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000
    listening.close()


async def freeze(port: int) -> socket.socket:
    """A websocket client that reads no more once the upgrade is answered."""
    frozen = socket.socket()
    frozen.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    frozen.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(frozen, ("127.0.0.1", port))
    request = (
        "GET /v1/duplex?model=voice HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    await loop.sock_sendall(frozen, request.encode())
    assert (await loop.sock_recv(frozen, 64)).startswith(b"HTTP/1.1 101")
    return frozen


def masked(event: dict[str, Any]) -> bytes:
    """A client's text frame with a mask of zeros."""
    body = json.dumps(event).encode()
    length = bytes([0x80 | len(body)]) if len(body) < 126 else bytes([0xFE]) + len(body).to_bytes(2, "big")
    return b"\x81" + length + bytes(4) + body


async def flood(frozen: socket.socket) -> None:
    """Ask for 18 MB."""
    item = {"type": "message", "id": "i1", "role": "user", "content": [{"type": "input_text", "text": "x" * 60_000}]}
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(frozen, masked({"type": "conversation.item.create", "item": item}))
    for _ in range(300):
        await loop.sock_sendall(frozen, masked({"type": "conversation.item.retrieve", "item_id": "i1"}))


def ended(house: House, why: str) -> bool:
    return f'omni_live_connections_ended_total{{reason="{why}"}} 1.0' in house.metrics.render().decode()


async def test_a_frozen_reader_is_freed_at_the_write_deadline_and_nobody_else_notices() -> None:
    limits = replace(LIMITS, write_deadline_s=0.2, outbox_bytes=2**30)
    async with open_house(limits) as (house, port), connect(url(port)) as neighbour:
        await received(neighbour)
        frozen = await freeze(port)
        await flood(frozen)
        await until(lambda: ended(house, "write_deadline"))
        await until(lambda: ("voice", "detached", 1) in set(house.desk.sessions()))
        await neighbour.send(json.dumps({"type": "session.heartbeat"}))
        assert (await received(neighbour))["type"] == "session.heartbeat_ack"
        assert "omni_live_outbox_bytes 0.0" in house.metrics.render().decode()
        frozen.close()


async def test_a_reader_that_lags_too_far_behind_is_let_go_and_may_resume() -> None:
    async with open_house(replace(LIMITS, outbox_bytes=20_000)) as (house, port):
        frozen = await freeze(port)
        await flood(frozen)
        await until(lambda: ended(house, "slow_consumer"))
        frozen.close()
        await until(lambda: ("voice", "detached", 1) in set(house.desk.sessions()))


async def test_a_client_that_vanishes_detaches_and_can_come_back() -> None:
    async with open_house() as (house, port):
        client = await connect(url(port))
        created = await received(client)
        client.transport.abort()
        await until(lambda: ("voice", "detached", 1) in set(house.desk.sessions()))
        async with connect(url(port, "")) as again:
            asked = {"session_id": created["session_id"], "resume_token": created["resume_token"]}
            await again.send(json.dumps({"type": "session.resume", **asked}))
            assert (await received(again))["type"] == "session.resumed"


async def test_draining_tells_every_client_and_closes_with_1012() -> None:
    async with open_house() as (house, port), connect(url(port)) as client:
        await received(client)
        house.desk.drain(0)
        assert (await received(client))["reason"] == "drained"
        with pytest.raises(ConnectionClosed):
            await client.recv()
        assert client.close_code == 1012


async def test_no_tasks_and_no_sessions_are_left_after_many_rude_clients() -> None:
    async with open_house(replace(LIMITS, detach_grace_s=0.01)) as (house, port):
        before = len(asyncio.all_tasks())
        for number in range(20):
            client = await connect(url(port))
            if number % 3:
                await client.send(json.dumps({"type": "input.text.append", "text": "hello"}))
            if number % 2:
                client.transport.abort()
            else:
                await client.close()
        await until(house.at_rest)
        await until(lambda: len(asyncio.all_tasks()) <= before)
