"""The video door over a websocket made of lists, with a real session behind it and the test as the world."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from omni_live.protocols.desk import Line, Mailbox, Refused
from omni_live.protocols.video import encoding
from omni_live.protocols.video.asgi import VideoDoor
from omni_live.protocols.video.encoding import EncodingFailed
from omni_live.protocols.world.contract import Served
from omni_live.sessions.limits import Limits
from omni_live.sessions.settings import Settings

from ..lone_desk import FakeSocket, Meter
from .house import WORLD, House

SERVED = {"world": Served(WORLD, {"frame": "decoder", "latent": "dynamics"})}


class Desk:
    """Gives away one house, once `gate` is set."""

    def __init__(self) -> None:
        self.house = House()
        self.refusal: Refused | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.opened: list[tuple[str, str]] = []
        self.given_up = 0

    async def open(self, model: str, settings: Settings, mailbox: Mailbox, owner: str) -> Line:
        if self.refusal is not None:
            raise self.refusal
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        self.opened.append((model, owner))
        self.house = House.behind(mailbox)
        return self.house

    def resume(self, *_: object) -> Line:
        raise AssertionError("nobody resumes a video")

    def fork(self, *_: object) -> Line:
        raise AssertionError("nobody forks a video")


class Street:
    """A door and its desk."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.desk = Desk()
        self.meter = Meter()
        self.door = VideoDoor(self.desk, limits or Limits(), SERVED, self.meter)

    @asynccontextmanager
    async def visit(self) -> AsyncIterator[FakeSocket]:
        """A connection; at the end the client leaves, and the door must let go."""
        socket = FakeSocket(path="/v1/realtime/video", owner="key")
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            served = group.create_task(self.door(socket.scope, socket.receive, socket.send))
            yield socket
            if not served.done():
                socket.leave()

    async def turn(self) -> None:
        """Wait until the world is asked for frames."""
        async with asyncio.timeout(10):
            while not self.desk.house.turns:
                await asyncio.sleep(0.001)


def say(socket: FakeSocket, kind: str, **fields: Any) -> None:
    socket.say(json.dumps({"type": kind, **fields}))


def told(socket: FakeSocket) -> list[dict[str, Any]]:
    return [json.loads(frame) for frame in socket.frames() if isinstance(frame, str)]


def has(kind: str, count: int = 1) -> Callable[[FakeSocket], bool]:
    return lambda socket: [message["type"] for message in told(socket)].count(kind) >= count


async def test_each_block_is_announced_and_follows_at_once() -> None:
    street = Street()
    async with street.visit() as socket:
        say(socket, "session.start", num_frames=12, paced=False)
        for _ in range(2):
            await street.turn()
            street.desk.house.run()
        await socket.until(lambda socket: socket.close_code is not None)
        frames = list(socket.frames())
    assert socket.close_code == 1000
    assert street.desk.opened == [("world", "key")]
    kinds = [json.loads(frame)["type"] if isinstance(frame, str) else "" for frame in frames]
    assert kinds == ["video.start", *["video.chunk_metadata", ""] * 2, "session.done"]
    first, second = (message for message in told(socket) if message["type"] == "video.chunk_metadata")
    assert [first["byte_length"], second["byte_length"]] == [len(frames[2]), len(frames[4])]
    assert (first["init_length"] > 0, second["init_length"]) == (True, 0)
    assert street.meter.handed == len(frames[2]) + len(frames[4])


async def test_a_block_that_a_fence_takes_back_while_it_is_encoded_does_not_go_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    street = Street()
    encode, loop = encoding.encode, asyncio.get_running_loop()
    turned: list[bool] = []

    def slow(*arguments: Any) -> encoding.Fragment:
        if not turned:
            turned.append(True)
            asyncio.run_coroutine_threadsafe(fail(), loop).result(10)
        return encode(*arguments)

    async def fail() -> None:
        await street.turn()
        street.desk.house.break_down()

    monkeypatch.setattr(encoding, "encode", slow)
    async with street.visit() as socket:
        say(socket, "session.start", num_frames=16, paced=False)
        await street.turn()
        # The door asks for the next block before it encodes this one.
        street.desk.house.run()
        while socket.close_code is None:
            if street.meter.drops and street.desk.house.turns:
                street.desk.house.run()
            await asyncio.sleep(0.001)
    assert street.meter.drops == ["fenced_content"]
    chunks = [message for message in told(socket) if message["type"] == "video.chunk_metadata"]
    assert [chunk["first_frame"] for chunk in chunks] == [0, 8]
    assert len([frame for frame in socket.frames() if isinstance(frame, bytes)]) == 2


async def test_frames_that_cannot_be_encoded_end_the_video(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> encoding.Fragment:
        raise EncodingFailed("no")

    monkeypatch.setattr(encoding, "encode", broken)
    street = Street()
    async with street.visit() as socket:
        say(socket, "session.start")
        await street.turn()
        street.desk.house.run()
        await socket.until(lambda socket: socket.close_code is not None)
    assert [message.get("code") for message in told(socket)][-2:] == ["encoding_failed", None]
    assert socket.close_code == 1013
    assert street.desk.house.closes()


async def test_a_server_without_the_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "is_available", lambda: False)
    street = Street()
    async with street.visit() as socket:
        say(socket, "session.start")
        await socket.until(has("error"))
        say(socket, "session.ping")
        await socket.until(has("session.pong"))
    assert told(socket)[0]["code"] == "video_unavailable"
    assert not street.desk.opened


async def test_a_refused_start_is_told_and_may_be_tried_again() -> None:
    street = Street()
    street.desk.refusal = Refused("overloaded", "No place.", 2.0)
    async with street.visit() as socket:
        say(socket, "session.start")
        await socket.until(has("error"))
        assert (told(socket)[0]["code"], told(socket)[0]["retry_after_s"]) == ("overloaded", 2.0)
        street.desk.refusal = None
        say(socket, "session.start")
        await socket.until(has("video.start"))
        say(socket, "session.stop")
        await socket.until(lambda socket: socket.close_code is not None)
    assert told(socket)[-1]["stopped"]


async def test_a_stop_while_the_start_waits_for_a_place_gives_it_up() -> None:
    street = Street()
    street.desk.gate.clear()
    async with street.visit() as socket:
        say(socket, "session.start")
        say(socket, "session.start")
        await socket.until(has("error"))
        assert told(socket)[0]["code"] == "already_started"
        say(socket, "session.stop")
        await socket.until(has("session.done"))
    assert street.desk.given_up == 1


@pytest.mark.parametrize("is_open", [True, False])
async def test_a_client_that_leaves_takes_its_session_along(is_open: bool) -> None:
    street = Street()
    async with street.visit() as socket:
        if is_open:
            say(socket, "session.start", paced=False)
            await street.turn()
        else:
            street.desk.gate.clear()
            say(socket, "session.start")
            await asyncio.sleep(0.01)
    assert street.desk.house.closes() == is_open
    assert street.desk.given_up == (not is_open)


async def test_a_client_that_reads_nothing_gets_two_blocks_made_and_no_more() -> None:
    street = Street()
    async with street.visit() as socket:
        say(socket, "session.start", paced=False)
        await socket.until(has("video.start"))
        socket.stop_reading()
        for _ in range(3):
            await asyncio.sleep(0.01)
            while street.desk.house.turns:
                street.desk.house.run()
        assert len(street.desk.house.turns_begun) <= 2


async def test_answers_that_nobody_reads_end_the_connection() -> None:
    street = Street(Limits(outbox_bytes=4096))
    async with street.visit() as socket:
        socket.stop_reading()
        for _ in range(40):
            say(socket, "session.ping")
        async with asyncio.timeout(10):
            while not socket.aborted:
                await asyncio.sleep(0.001)
        socket.read_again()
    assert street.meter.ended == ["slow_consumer"]


async def test_each_kind_of_bad_message_is_told_under_a_code_and_the_socket_stays_open() -> None:
    street = Street()
    async with street.visit() as socket:
        for frame in ("{", b"{}", "[]", '{"type": "session.start", "fps": 0}', '{"type": 5}', '{"type": "x"}'):
            socket.say(frame)
        say(socket, "session.stop")
        say(socket, "session.start", block_frames=9, num_frames=1)
        await socket.until(has("video.start"))
        say(socket, "session.interaction", interaction={"event_id": "e", "event": {"camera": 1}})
        await socket.until(has("error", 8))
    codes = [message["code"] for message in told(socket) if message["type"] == "error"]
    wanted = ["bad_frame"] * 3 + ["bad_field"] * 2 + ["unknown_type", "not_started", "unsupported"]
    assert codes == wanted
    assert told(socket)[-1]["event_id"] == "e"


async def test_a_block_longer_than_a_request_may_be_is_refused() -> None:
    street = Street(Limits(step_frames=8))
    async with street.visit() as socket:
        say(socket, "session.start", block_frames=9)
        await socket.until(has("error"))
    assert told(socket)[0]["code"] == "bad_field"
