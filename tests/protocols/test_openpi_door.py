"""The OpenPI door over a websocket made of lists, with real sessions behind it and the test as the policy."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from omni_live.protocols.arrays import array, pack
from omni_live.protocols.desk import Refused
from omni_live.protocols.openpi import codec
from omni_live.protocols.openpi.asgi import OpenPiDoor, policy_at
from omni_live.protocols.openpi.tabletop import CONTRACT
from omni_live.sessions.effects import Feed, Submit
from omni_live.sessions.inputs import CancelAsked, CloseAsked, Detached, Outcome, StageEnded, StageSpoke
from omni_live.sessions.limits import Limits

from .lone_desk import FakeSocket, Lone, LoneDesk, Meter


class House:
    """A door, its desk and its meter."""

    def __init__(self, limits: Limits | None = None) -> None:
        limits = limits or Limits()
        self.desk = LoneDesk(limits, plain=True)
        self.meter = Meter()
        self.door = OpenPiDoor(self.desk, limits, {"robot": CONTRACT, "other": CONTRACT}, self.meter)

    @asynccontextmanager
    async def visit(self, path: str = "/openpi", owner: str = "") -> AsyncIterator[FakeSocket]:
        """A connection; at the end the client leaves, and the door must let go."""
        socket = FakeSocket(path=path, owner=owner)
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            served = group.create_task(self.door(socket.scope, socket.receive, socket.send))
            yield socket
            if not served.done():
                socket.leave()

    @property
    def lone(self) -> Lone:
        return self.desk.sessions[-1]

    async def submitted(self, count: int = 1, session: int = -1) -> Submit:
        """Wait until that many turns were submitted by a session; the latest."""
        async with asyncio.timeout(10):
            while len(self.desk.sessions) < max(1, session + 1) or len(submits(self.desk.sessions[session])) < count:
                await asyncio.sleep(0)
        return submits(self.desk.sessions[session])[-1]


def submits(lone: Lone) -> list[Submit]:
    return [effect for effect in lone.effects if isinstance(effect, Submit)]


def chunk(value: float, **meta: Any) -> Any:
    return pack("chunk", {"infer_ms": 1.5, "batch": 1, **meta}, actions=np.full((16, 2), value, np.float32))


def answer(lone: Lone, value: float, submit: Submit | None = None) -> None:
    stamp = (submit or submits(lone)[-1]).stamp
    lone.tell(StageSpoke(stamp, "policy", chunk(value)))
    lone.tell(StageEnded(stamp, "policy", Outcome.DONE))


def observation(**more: Any) -> dict[str, Any]:
    return {
        "observation/image": np.zeros((64, 64, 3), np.uint8),
        "observation/state": np.array([0.25, 0.75], np.float32),
        "prompt": "push the red disc to the left zone",
        **more,
    }


def asks(socket: FakeSocket, **more: Any) -> None:
    socket.say(codec.pack(observation(**more)))


def replies(socket: FakeSocket) -> list[Any]:
    """What came after the metadata: texts, and maps or arrays."""
    return [frame if isinstance(frame, str) else codec.unpack(frame) for frame in socket.frames()][1:]


def has(count: int) -> Callable[[FakeSocket], bool]:
    return lambda socket: len(replies(socket)) >= count


async def test_the_server_speaks_first_and_opens_no_session_for_it() -> None:
    house = House()
    async with house.visit() as socket:
        await socket.until(lambda socket: len(list(socket.frames())) == 1)
    (first,) = socket.frames()
    assert isinstance(first, bytes)
    metadata = codec.unpack(first)
    assert isinstance(metadata, dict)
    assert (metadata["action_horizon"], metadata["action_dim"], metadata["embodiment"]) == (16, 2, "table-top")
    assert metadata["observation"]["observation/image"] == {"shape": [64, 64, 3], "dtype": "uint8"}
    assert house.desk.sessions == []


async def test_an_observation_becomes_a_turn_and_its_chunk_the_reply() -> None:
    house = House()
    async with house.visit() as socket:
        asks(socket, seed=3)
        submit = await house.submitted()
        assert submit.payload.kind == "observation"
        assert submit.payload.meta == {"prompt": "push the red disc to the left zone", "seed": 3}
        assert array(submit.payload, "observation/state").tolist() == [0.25, 0.75]
        answer(house.lone, 0.5)
        await socket.until(has(1))
        asks(socket)
        await house.submitted(2)
        answer(house.lone, 0.5)
        await socket.until(has(2))
    first, second = replies(socket)
    assert first["actions"].shape == (16, 2)
    assert first["actions"].dtype == np.float32
    assert first["server_timing"] == {"infer_ms": 1.5, "batch": 1}
    assert second["server_timing"]["prev_total_ms"] >= 0.0


async def test_a_wrong_observation_is_told_and_the_socket_goes_on() -> None:
    house = House()
    async with house.visit() as socket:
        wrong = observation()
        wrong["observation/image"] = np.zeros((32, 32, 3), np.uint8)
        socket.say(codec.pack(wrong))
        socket.say(b"\xc1")
        socket.say("hello")
        await socket.until(has(3))
        asks(socket)
        await house.submitted()
        answer(house.lone, 0.0)
        await socket.until(has(4))
    first, second, third, fourth = replies(socket)
    assert "observation/image" in first
    assert all(isinstance(text, str) for text in (first, second, third))
    assert fourth["actions"].shape == (16, 2)
    assert socket.close_code is None


async def test_g1_a_chunk_of_before_a_reset_is_never_sent_after_it() -> None:
    house = House()
    async with house.visit() as socket:
        asks(socket, request_id="old")
        old = await house.submitted()
        socket.say(codec.pack({"reset": True}))
        await socket.until(has(2))
        answer(house.lone, 9.0, old)
        asks(socket, request_id="new")
        await house.submitted(2)
        answer(house.lone, 1.0)
        await socket.until(has(3))
    told = replies(socket)
    assert told[0]["request_id"] == "old"
    assert told[0]["error"]["code"] == "reset"
    assert told[2]["request_id"] == "new"
    assert told[2]["actions"][0, 0] == 1.0
    assert [effect.payload.kind for effect in house.lone.effects if isinstance(effect, Feed)] == ["reset"]


async def test_g1_a_chunk_that_waits_for_a_slow_reader_is_taken_back_by_a_reset() -> None:
    house = House()
    async with house.visit() as socket:
        asks(socket)
        await house.submitted()
        socket.stop_reading()
        answer(house.lone, 9.0)
        socket.say(codec.pack({"reset": True}))
        async with asyncio.timeout(10):
            while not any(isinstance(effect, Feed) for effect in house.lone.effects):
                await asyncio.sleep(0)
        socket.read_again()
        await socket.until(has(2))
    first, _ = replies(socket)
    assert isinstance(first, str)
    assert "reset" in first


async def test_requests_without_an_id_are_answered_in_the_order_in_which_they_came() -> None:
    house = House()
    async with house.visit() as socket:
        asks(socket, session_id="a")
        await house.submitted(session=0)
        asks(socket, session_id="b")
        await house.submitted(session=1)
        answer(house.desk.sessions[1], 2.0)
        asks(socket, session_id="b", request_id=7)
        await house.submitted(2, session=1)
        answer(house.desk.sessions[1], 3.0)
        await socket.until(has(1))
        assert [reply["request_id"] for reply in replies(socket)] == [7]
        answer(house.desk.sessions[0], 1.0)
        await socket.until(has(3))
    assert [float(reply["actions"][0, 0]) for reply in replies(socket)] == [3.0, 1.0, 2.0]


async def test_the_connections_own_session_is_closed_with_it() -> None:
    house = House()
    async with house.visit() as socket:
        asks(socket)
        await house.submitted()
    assert isinstance(house.lone.told[-1], CloseAsked)
    assert house.lone.session.closed


async def test_a_named_session_survives_its_connection_and_what_was_asked_on_it_does_not() -> None:
    house = House()
    async with house.visit() as socket:
        asks(socket, session_id="arm")
        old = await house.submitted()
    assert [type(told) for told in house.lone.told if isinstance(told, CancelAsked | Detached)] == [
        CancelAsked,
        Detached,
    ]
    async with house.visit() as socket:
        asks(socket, session_id="arm")
        await house.submitted(2)
        answer(house.lone, 9.0, old)
        answer(house.lone, 1.0)
        await socket.until(has(1))
    (reply,) = replies(socket)
    assert reply["actions"][0, 0] == 1.0
    assert len(house.desk.sessions) == 1


async def test_a_reset_clears_those_that_it_names_and_no_other() -> None:
    house = House()
    async with house.visit() as socket:
        for number, name in enumerate(("a", "b", "c")):
            asks(socket, session_id=name)
            await house.submitted(session=number)
        socket.say(codec.pack({"reset": ["a", "c", "never heard of"], "request_id": 1}))
        await socket.until(has(1))
        for lone in house.desk.sessions:
            if lone.session.busy:
                answer(lone, 1.0)
        await socket.until(has(4))
    resets = [any(isinstance(effect, Feed) for effect in lone.effects) for lone in house.desk.sessions]
    assert resets == [True, False, True]
    answers = [told for told in replies(socket) if isinstance(told, str) or "request_id" not in told]
    assert [isinstance(told, str) and told.startswith("reset:") for told in answers] == [True, False, True]


async def test_a_reset_of_everything_holds_for_a_session_that_is_taken_up_after_it() -> None:
    house = House()
    async with house.visit() as socket:
        asks(socket, session_id="arm")
        await house.submitted()
    async with house.visit() as socket:
        socket.say(codec.pack({"reset": True}))
        asks(socket, session_id="arm")
        await house.submitted(2)
    assert [type(effect) for effect in house.lone.effects if isinstance(effect, Feed | Submit)] == [
        Submit,
        Feed,
        Submit,
    ]


async def test_a_session_that_another_connection_takes_over_is_told_so_here() -> None:
    house = House()
    async with house.visit() as first:
        asks(first, session_id="arm")
        await house.submitted()
        async with house.visit() as second:
            asks(second, session_id="arm")
            await house.submitted(1)
            await first.until(has(1))
            answer(house.lone, 1.0)
            await house.submitted(2)
            answer(house.lone, 2.0)
            await second.until(has(1))
        assert replies(second)[0]["actions"][0, 0] == 2.0
    (told,) = replies(first)
    assert "session_replaced" in told


async def test_nobody_reaches_a_session_of_another_key_by_its_name() -> None:
    house = House()
    async with house.visit(owner="a") as socket:
        asks(socket, session_id="arm")
        await house.submitted()
        async with house.visit(owner="b") as other:
            asks(other, session_id="arm")
            await house.submitted(session=1)
    assert [lone.owner for lone in house.desk.sessions] == ["a", "b"]


async def test_a_session_whose_grace_is_over_is_not_silently_begun_anew() -> None:
    house = House()
    async with house.visit() as socket:
        asks(socket, session_id="arm")
        await house.submitted()
    house.lone.tell(CloseAsked("detached"))
    async with house.visit() as socket:
        asks(socket, session_id="arm")
        await socket.until(has(1))
        asks(socket, session_id="arm")
        await house.submitted(session=1)
    (told,) = replies(socket)
    assert "session_expired" in told


async def test_a_session_that_idled_away_on_an_open_connection_is_told_once() -> None:
    house = House()
    async with house.visit() as socket:
        asks(socket)
        await house.submitted()
        answer(house.lone, 0.0)
        await socket.until(has(1))
        house.lone.tell(CloseAsked("idle"))
        asks(socket)
        await socket.until(has(2))
        assert "session_expired" in replies(socket)[1]
        asks(socket)
        await house.submitted(session=1)


async def test_a_robot_for_which_there_is_no_room_is_told_and_the_connection_ends_with_try_again() -> None:
    house = House()
    house.desk.refusal = Refused("overloaded", "The server has no room for another session.", 2.0)
    async with house.visit() as socket:
        asks(socket)
        await socket.until(lambda socket: socket.close_code is not None)
    (told,) = replies(socket)
    assert told.startswith("overloaded")
    assert socket.close_code == 1013


async def test_a_robot_beside_others_for_which_there_is_no_room_leaves_them_alone() -> None:
    house = House()
    async with house.visit() as socket:
        asks(socket, session_id="a")
        await house.submitted()
        house.desk.refusal = Refused("overloaded", "The server has no room for another session.", 2.0)
        asks(socket, session_id="b", request_id=1)
        await socket.until(has(1))
        answer(house.lone, 0.0)
        await socket.until(has(2))
    assert socket.close_code is None


@pytest.mark.parametrize(
    ("reason", "code"),
    [("action_not_finite", "action_not_finite"), ("replica_lost", "replica_lost"), ("", "policy_error")],
)
async def test_a_turn_that_fails_is_told_with_its_code(reason: str, code: str) -> None:
    house = House()
    async with house.visit() as socket:
        asks(socket)
        submit = await house.submitted()
        house.lone.tell(StageEnded(submit.stamp, "policy", Outcome.FAILED, reason))
        await socket.until(has(1))
    (told,) = replies(socket)
    assert told.startswith(code)
    assert socket.close_code is None


async def test_a_robot_that_waits_for_a_place_holds_up_no_other_on_its_connection() -> None:
    house = House()
    async with house.visit() as socket:
        asks(socket, session_id="a")
        await house.submitted()
        house.desk.gate.clear()
        asks(socket, session_id="b", request_id="b1")
        asks(socket, session_id="b", request_id="b2")
        answer(house.desk.sessions[0], 1.0)
        await socket.until(has(1))
        socket.say(codec.pack({"reset": ["b"], "request_id": "r"}))
        asks(socket, session_id="b", request_id="b3")
        await socket.until(has(4))
        house.desk.gate.set()
        await house.submitted(session=1)
        answer(house.desk.sessions[1], 3.0)
        await socket.until(has(5))
    told = replies(socket)[1:]
    assert [(one["request_id"], one.get("error", {}).get("code")) for one in told] == [
        ("b1", "reset"),
        ("b2", "reset"),
        ("r", None),
        ("b3", None),
    ]


async def test_a_robot_whose_client_leaves_while_it_waits_for_a_place_never_gets_one() -> None:
    house = House()
    house.desk.gate.clear()
    async with house.visit() as socket:
        asks(socket)
        async with asyncio.timeout(10):
            while not house.desk.waiting:
                await asyncio.sleep(0)
    assert (house.desk.given_up, house.desk.sessions) == (1, [])


async def test_one_name_on_two_connections_at_once_is_one_session() -> None:
    house = House()
    house.desk.gate.clear()
    async with house.visit() as first, house.visit() as second:
        asks(first, session_id="arm")
        asks(second, session_id="arm")
        async with asyncio.timeout(10):
            while house.desk.waiting < 2:
                await asyncio.sleep(0)
        house.desk.gate.set()
        await first.until(has(1))
        assert sum(not lone.session.closed for lone in house.desk.sessions) == 1
        (living,) = (lone for lone in house.desk.sessions if not lone.session.closed)
        answer(living, 1.0, submits(living)[0])
        answer(living, 2.0, submits(living)[1])
        await second.until(has(1))
    assert replies(first)[0].startswith("session_replaced")
    assert replies(second)[0]["actions"][0, 0] == 2.0


async def test_a_reset_by_name_from_elsewhere_leaves_the_robot_where_it_is() -> None:
    house = House()
    async with house.visit() as owner, house.visit() as supervisor:
        asks(owner, session_id="arm")
        await house.submitted()
        supervisor.say(codec.pack({"reset": ["arm"]}))
        await supervisor.until(has(1))
        await owner.until(has(1))
        asks(owner, session_id="arm")
        await house.submitted(2)
        answer(house.lone, 2.0)
        await owner.until(has(2))
    first, second = replies(owner)
    assert first.startswith("reset:")
    assert second["actions"][0, 0] == 2.0


async def test_g1_a_chunk_that_waits_for_a_slow_reader_is_not_sent_once_another_connection_has_the_robot() -> None:
    house = House()
    async with house.visit() as slow, house.visit() as other:
        asks(slow, session_id="arm")
        await house.submitted()
        slow.stop_reading()
        answer(house.lone, 9.0)
        asks(other, session_id="arm")
        await house.submitted(2)
        slow.read_again()
        await slow.until(has(1))
    assert isinstance(replies(slow)[0], str)


async def test_g11_errors_that_nobody_reads_are_bounded() -> None:
    house = House(replace(Limits(), outbox_bytes=20_000))
    async with house.visit() as socket:
        await socket.until(lambda socket: bool(list(socket.frames())))
        socket.stop_reading()
        for _ in range(100):
            socket.say(b"\xc1")
        async with asyncio.timeout(10):
            while not socket.aborted:
                await asyncio.sleep(0.001)
    assert house.meter.ended == ["slow_consumer"]


async def test_the_latest_observation_takes_the_place_of_those_that_wait() -> None:
    house = House()
    async with house.visit() as socket:
        for number in range(3):
            asks(socket, request_id=number, latest=True)
        await house.submitted()
        await socket.until(has(1))
        answer(house.lone, 0.0)
        await house.submitted(2)
        answer(house.lone, 2.0)
        await socket.until(has(3))
    superseded, first, last = replies(socket)
    assert (superseded["request_id"], superseded["error"]["code"]) == (1, "superseded")
    assert (first["request_id"], last["request_id"]) == (0, 2)


async def test_g11_observations_that_wait_are_bounded_in_bytes() -> None:
    house = House(replace(Limits(), openpi_frame_bytes=40_000))
    async with house.visit() as socket:
        for number in range(5):
            asks(socket, request_id=number)
        await socket.until(has(2))
        assert [reply["error"]["code"] for reply in replies(socket)] == ["mailbox_full", "mailbox_full"]
        for count in range(1, 4):
            await house.submitted(count)
            answer(house.lone, 0.0)
        await socket.until(has(5))


async def test_a_client_that_does_not_read_is_let_go() -> None:
    house = House(replace(Limits(), write_deadline_s=0.02))
    async with house.visit() as socket:
        asks(socket)
        await house.submitted()
        socket.stop_reading()
        answer(house.lone, 0.0)
        async with asyncio.timeout(10):
            while not socket.aborted:
                await asyncio.sleep(0.001)
    assert house.meter.ended == ["write_deadline"]


@pytest.mark.parametrize(
    ("path", "policy"),
    [
        ("/", "robot"),
        ("/openpi", "robot"),
        ("/openpi/", "robot"),
        ("/openpi/other", "other"),
        ("/other", "other"),
        ("/v1/realtime/robot/openpi", "robot"),
        ("/v1/realtime/robot/openpi/other", "other"),
        ("/openpi/none", None),
        ("/openpi/../other", None),
    ],
)
def test_the_path_chooses_the_policy(path: str, policy: str | None) -> None:
    assert policy_at(path, {"robot": CONTRACT, "other": CONTRACT}) == policy


async def test_a_policy_that_is_not_there_is_refused_before_the_upgrade() -> None:
    house = House()
    async with house.visit("/openpi/none") as socket:
        await socket.until(lambda socket: bool(socket.sent))
    assert socket.sent[0]["status"] == 404
