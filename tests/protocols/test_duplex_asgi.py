"""The duplex door over a websocket made of lists, with real conversations behind it."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from omni_live.protocols.desk import Refused
from omni_live.protocols.duplex import MSGPACK_SUBPROTOCOL
from omni_live.protocols.duplex.asgi import DuplexDoor
from omni_live.protocols.frames import dump_msgpack, load_msgpack
from omni_live.sessions.effects import Emit, Hold, RaiseFence, Unhold
from omni_live.sessions.events import AudioDelta, BufferCleared, HeartbeatAcked
from omni_live.sessions.inputs import CloseAsked, Detached
from omni_live.sessions.limits import Limits
from omni_live.sessions.stamp import Fence

from .lone_desk import FakeSocket, Lone, LoneDesk, Meter

PATIENT = Limits()
HASTY = replace(PATIENT, write_deadline_s=0.02, open_timeout_s=0.02)


class House:
    """A door, its desk and its meter."""

    def __init__(self, limits: Limits = PATIENT) -> None:
        self.desk = LoneDesk(limits)
        self.meter = Meter()
        self.door = DuplexDoor(self.desk, limits, ("voice", "other"), self.meter)

    @asynccontextmanager
    async def visit(self, socket: FakeSocket) -> AsyncIterator[FakeSocket]:
        """Serve the socket meanwhile; at the end the client leaves, and the door must let go."""
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            served = group.create_task(self.door(socket.scope, socket.receive, socket.send))
            yield socket
            if not served.done():
                socket.leave()

    @property
    def lone(self) -> Lone:
        return self.desk.sessions[-1]


def events(socket: FakeSocket) -> list[dict[str, Any]]:
    return [json.loads(frame) if isinstance(frame, str) else load_msgpack(frame) for frame in socket.frames()]


def has(kind: str, count: int = 1) -> Callable[[FakeSocket], bool]:
    return lambda socket: sum(event["type"] == kind for event in events(socket)) >= count


def closed(socket: FakeSocket) -> bool:
    return socket.close_code is not None


def said(kind: str, **fields: Any) -> str:
    return json.dumps({"type": kind, **fields})


def sound(samples: int = 4800) -> str:
    return base64.b64encode(np.zeros(samples, "<i2").tobytes()).decode()


async def test_with_a_model_the_session_is_created_before_the_client_says_anything() -> None:
    house = House()
    async with house.visit(FakeSocket("model=voice")) as socket:
        await socket.until(has("session.created"))
    first = events(socket)[0]
    assert first["type"] == "session.created"
    assert first["session"]["model"] == "voice"
    assert first["resume_token"]


async def test_a_first_session_update_holds_before_the_session_is_created() -> None:
    house = House()
    async with house.visit(FakeSocket("")) as socket:
        socket.say(said("session.update", session={"model": "other", "instructions": "be brief"}))
        await socket.until(has("session.created"))
    (created,) = events(socket)
    assert created["session"]["instructions"] == "be brief"
    assert created["session"]["model"] == "other"


async def test_any_other_first_event_opens_with_the_defaults_and_is_heard() -> None:
    house = House()
    async with house.visit(FakeSocket("")) as socket:
        socket.say(said("session.heartbeat", event_id="h1"))
        await socket.until(has("session.heartbeat_ack"))
    assert [event["type"] for event in events(socket)] == ["session.created", "session.heartbeat_ack"]
    assert events(socket)[1]["client_event_id"] == "h1"


@pytest.mark.parametrize("query", ["model=voice&autostart=0", "model=voice&resume=1"])
async def test_a_client_may_ask_that_its_first_frame_decides(query: str) -> None:
    house = House()
    async with house.visit(FakeSocket(query)) as socket:
        await socket.until(lambda socket: bool(socket.sent))
        assert not house.desk.sessions
        socket.say(said("session.update", session={}))
        await socket.until(has("session.created"))


async def test_a_first_frame_that_is_wrong_is_told_and_the_next_one_opens() -> None:
    house = House()
    async with house.visit(FakeSocket("")) as socket:
        socket.say("{")
        socket.say(said("session.update", event_id="e1", session={"lead_ms": 4}))
        socket.say(said("session.update", session={}))
        await socket.until(has("session.created"))
    assert [event["type"] for event in events(socket)] == ["error", "error", "session.created"]
    assert [event["error"]["event_id"] for event in events(socket)[:2]] == [None, "e1"]


async def test_a_client_that_opens_nothing_in_time_is_closed_with_1008() -> None:
    house = House(HASTY)
    async with house.visit(FakeSocket("")) as socket:
        await socket.until(closed)
    assert socket.close_code == 1008
    assert events(socket)[0]["error"]["code"] == "open_timeout"


async def test_a_refusal_comes_before_the_upgrade_as_503_with_a_time_to_try_again() -> None:
    house = House()
    house.desk.refusal = Refused("overloaded", "No room.", 3.2)
    async with house.visit(FakeSocket("model=voice")) as socket:
        await socket.until(lambda socket: len(socket.sent) == 2)
    start, body = socket.sent
    assert start["status"] == 503
    assert dict(start["headers"])[b"retry-after"] == b"4"
    assert json.loads(body["body"])["error"]["code"] == "overloaded"


async def test_a_model_that_is_not_there_is_404_and_opens_nothing() -> None:
    house = House()
    async with house.visit(FakeSocket("model=../voice")) as socket:
        await socket.until(lambda socket: len(socket.sent) == 2)
    assert socket.sent[0]["status"] == 404
    assert not house.desk.sessions


async def test_a_refusal_after_the_upgrade_is_an_error_and_1013() -> None:
    house = House()
    house.desk.refusal = Refused("overloaded", "No room.", 3.2)
    async with house.visit(FakeSocket("")) as socket:
        socket.say(said("session.update", session={}))
        await socket.until(closed)
    assert events(socket)[0]["error"]["code"] == "overloaded"
    assert socket.close_code == 1013


async def test_a_client_that_leaves_while_it_waits_for_a_place_leaves_nothing_behind() -> None:
    house = House()
    house.desk.gate.clear()
    async with house.visit(FakeSocket("model=voice")) as socket:
        socket.leave()
    assert house.desk.given_up == 1
    assert not house.desk.sessions
    assert not socket.sent


async def test_what_a_client_sends_while_it_waits_for_a_place_is_heard_afterwards() -> None:
    house = House()
    house.desk.gate.clear()
    async with house.visit(FakeSocket("")) as socket:
        socket.say(said("session.update", session={}))
        socket.say(said("session.heartbeat", event_id="h1"))
        await asyncio.sleep(0)
        house.desk.gate.set()
        await socket.until(has("session.heartbeat_ack"))


async def test_audio_reaches_the_ears_at_the_rate_of_the_pipeline() -> None:
    house = House()
    async with house.visit(FakeSocket()) as socket:
        for _ in range(10):
            socket.say(said("input_audio_buffer.append", audio=sound(2400)))
        socket.say(said("session.heartbeat"))
        await socket.until(has("session.heartbeat_ack"))
    samples = len(house.lone.heard()) // 2
    assert 16_000 - 400 < samples <= 16_000  # up to 20 ms stay in the filter


async def test_a_wrong_frame_costs_one_error_and_nothing_else() -> None:
    house = House()
    async with house.visit(FakeSocket()) as socket:
        socket.say(said("input_audio_buffer.append", event_id="e1", audio="?"))
        socket.say(b"\x00")
        socket.say(said("session.heartbeat"))
        await socket.until(has("session.heartbeat_ack"))
    kinds = [event["type"] for event in events(socket)]
    assert kinds == ["session.created", "error", "error", "session.heartbeat_ack"]
    assert events(socket)[1]["error"]["event_id"] == "e1"
    assert house.lone.heard() == b""


async def test_a_lost_connection_detaches_and_a_resume_goes_on_where_it_was() -> None:
    house = House()
    async with house.visit(FakeSocket()) as socket:
        socket.say(said("input.text.append", text="hello", response_create=False, input_seq=1))
        await socket.until(has("conversation.item.done"))
    assert isinstance(house.lone.told[-1], Detached)
    created = events(socket)[0]
    async with house.visit(FakeSocket("")) as again:
        again.say(
            said(
                "session.resume",
                session_id=created["session_id"],
                resume_token=created["resume_token"],
                last_received_server_event_seq=0,
                last_sent_input_seq=1,
            )
        )
        await again.until(has("conversation.item.done"))
    resumed = events(again)[0]
    assert resumed["type"] == "session.resumed"
    assert resumed["input_seq"] == 1
    assert resumed["attachment_generation"] == 2
    assert resumed["resume_token"] != created["resume_token"]
    numbered = [event for event in events(socket) if "server_event_seq" in event]
    assert [event for event in events(again) if "server_event_seq" in event] == numbered


async def test_a_resume_replaces_the_connection_that_still_stands() -> None:
    house = House()
    async with house.visit(FakeSocket()) as old:
        await old.until(has("session.created"))
        created = events(old)[0]
        async with house.visit(FakeSocket("")) as new:
            new.say(said("session.resume", session_id=created["session_id"], resume_token=created["resume_token"]))
            await new.until(has("session.resumed"))
            await old.until(closed)
            new.say(said("session.heartbeat"))
            await new.until(has("session.heartbeat_ack"))
    assert events(old)[-1]["type"] == "session.replaced"
    assert old.close_code == 1000
    assert has("session.heartbeat_ack")(new)


@pytest.mark.parametrize(
    ("change", "owner", "code"),
    [
        ({"resume_token": "token_x"}, "", "invalid_resume_token"),
        ({"session_id": "sess_x"}, "", "session_resume_expired"),
        ({}, "somebody else", "session_resume_expired"),
    ],
)
async def test_a_resume_that_cannot_be_is_an_error_and_1008(change: dict[str, str], owner: str, code: str) -> None:
    house = House()
    async with house.visit(FakeSocket()) as socket:
        await socket.until(has("session.created"))
    created = events(socket)[0]
    asked = {"session_id": created["session_id"], "resume_token": created["resume_token"], **change}
    async with house.visit(FakeSocket("", owner=owner)) as again:
        again.say(said("session.resume", **asked))
        await again.until(closed)
    assert events(again)[0]["error"]["code"] == code
    assert again.close_code == 1008


async def test_closing_is_answered_and_then_the_socket_closes_with_1000() -> None:
    house = House()
    async with house.visit(FakeSocket()) as socket:
        socket.say(said("session.close"))
        await socket.until(closed)
    assert events(socket)[-1] == {
        "type": "session.closed",
        "reason": "close_requested",
        "event_id": events(socket)[-1]["event_id"],
    }
    assert socket.close_code == 1000
    assert isinstance(house.lone.told[0 - 2], CloseAsked)


async def test_what_a_client_said_before_it_left_is_heard_to_the_end() -> None:
    house = House()
    async with house.visit(FakeSocket()) as socket:
        await socket.until(has("session.created"))
        socket.hang_up()
        house.lone.mailbox.take([Emit(HeartbeatAcked(None), 0)])
        await socket.until(lambda socket: socket.refused > 0)
        socket.say(said("session.heartbeat"))
        socket.say(said("session.close"))
    assert any(isinstance(told, CloseAsked) for told in house.lone.told)
    assert house.lone.session.state == "closed"


def delta(house: House, seq: int, epoch: int = 1) -> Emit:
    fence = house.lone.session.fences[0]
    stamp = Fence(fence.slot, fence.generation, epoch).stamp(1)
    return Emit(AudioDelta("resp_1", "item_1", bytes(4800), seq * 2400, epoch), seq, stamp, 5000)


async def test_g1_silence_content_that_waits_is_gone_once_the_fence_moved() -> None:
    house = House()
    async with house.visit(FakeSocket()) as socket:
        await socket.until(has("session.created"))
        socket.stop_reading()
        fence = house.lone.session.fences[0]
        house.lone.mailbox.take([delta(house, 1), delta(house, 2)])
        await asyncio.sleep(0)
        house.lone.mailbox.take([RaiseFence(fence.raised()), Emit(BufferCleared(), 3), delta(house, 4, epoch=2)])
        socket.read_again()
        await socket.until(has("response.output_audio.delta"))
    numbered = [(event["server_event_seq"], event["type"]) for event in events(socket)[1:]]
    assert numbered == [(3, "input_audio_buffer.cleared"), (4, "response.output_audio.delta")]
    assert house.meter.drops == ["fenced_content"] * 2
    assert house.meter.waiting == 0


async def test_held_content_waits_and_so_does_what_is_numbered_behind_it() -> None:
    house = House()
    async with house.visit(FakeSocket()) as socket:
        await socket.until(has("session.created"))
        house.lone.mailbox.take([Hold(), delta(house, 1), Emit(BufferCleared(), 2), Emit(HeartbeatAcked(None), 0)])
        await socket.until(has("session.heartbeat_ack"))
        assert not has("response.output_audio.delta")(socket)
        house.lone.mailbox.take([Unhold()])
        await socket.until(has("input_audio_buffer.cleared"))
    kinds = [event["type"] for event in events(socket)[1:]]
    assert kinds == ["session.heartbeat_ack", "response.output_audio.delta", "input_audio_buffer.cleared"]


async def test_a_reader_that_stopped_reading_is_aborted_at_the_write_deadline() -> None:
    house = House(HASTY)
    async with house.visit(FakeSocket()) as socket:
        await socket.until(has("session.created"))
        socket.stop_reading()
        socket.say(said("session.heartbeat"))
        await socket.until(lambda socket: socket.aborted)
    assert not has("session.heartbeat_ack")(socket)
    assert "write_deadline" in house.meter.ended
    assert isinstance(house.lone.told[-1], Detached)


async def test_a_reader_that_is_too_slow_is_told_1013_and_may_resume() -> None:
    house = House(replace(PATIENT, outbox_bytes=20_000))
    async with house.visit(FakeSocket()) as socket:
        await socket.until(has("session.created"))
        socket.stop_reading()
        house.lone.mailbox.take([delta(house, seq) for seq in range(1, 10)])
        socket.read_again()
        await socket.until(closed)
    assert socket.close_code == 1013
    assert house.meter.ended == ["slow_consumer"]
    assert house.meter.waiting == 0
    assert house.lone.session.state == "detached"


async def test_msgpack_is_spoken_where_it_is_offered() -> None:
    house = House()
    async with house.visit(FakeSocket(offered=("realtime", MSGPACK_SUBPROTOCOL))) as socket:
        socket.say(dump_msgpack({"type": "input_audio_buffer.append", "audio": bytes(4800)}))
        socket.say(said("session.heartbeat"))
        await socket.until(has("session.heartbeat_ack"))
    assert socket.sent[0]["subprotocol"] == MSGPACK_SUBPROTOCOL
    assert all(isinstance(frame, bytes) for frame in socket.frames())
    assert house.lone.heard()


async def test_a_subprotocol_that_carries_a_key_is_never_answered_with() -> None:
    house = House()
    offered = ("openai-insecure-api-key.secret", "realtime", "openai-beta.realtime-v1")
    async with house.visit(FakeSocket(offered=offered)) as socket:
        await socket.until(has("session.created"))
    assert socket.sent[0]["subprotocol"] == "realtime"


async def test_a_frame_over_the_limit_closes_with_1009() -> None:
    house = House(replace(PATIENT, client_frame_bytes=1000))
    async with house.visit(FakeSocket()) as socket:
        await socket.until(has("session.created"))
        socket.say("x" * 1001)
        await socket.until(closed)
    assert socket.close_code == 1009
    assert isinstance(house.lone.told[-1], Detached)


async def test_settings_that_were_taken_hold_for_the_next_append() -> None:
    house = House()
    async with house.visit(FakeSocket()) as socket:
        session = {"type": "realtime", "audio": {"input": {"format": {"type": "audio/pcmu"}}}}
        socket.say(said("session.update", session=session))
        socket.say(said("input_audio_buffer.append", audio=base64.b64encode(bytes([0xFF]) * 8000).decode()))
        socket.say(said("session.heartbeat"))
        await socket.until(has("session.heartbeat_ack"))
    assert 14_900 < len(house.lone.heard()) // 2 <= 16_000  # up to 60 ms stay in the filter
    assert events(socket)[1]["session"]["audio"]["input"]["format"] == {"type": "audio/pcmu"}
