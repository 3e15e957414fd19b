import asyncio
import socket
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_live.connectors.contract import Ticket
from omni_live.runtime import wire
from omni_live.runtime.links import Decoder, Link
from omni_live.runtime.ports import CLIENT, Opening, Route, WorkerId
from omni_live.runtime.wire import (
    FROM_PRODUCER,
    FROM_RECEIVER,
    FROM_SERVER,
    FROM_WORKER,
    LENGTH_BYTES,
    Abort,
    Chunk,
    Configure,
    Counted,
    Credit,
    Ended,
    FeedTurn,
    Free,
    Freed,
    FromWorker,
    Hello,
    Inline,
    Message,
    OpenTurn,
    Ping,
    Pong,
    Ready,
    Spoke,
    WireError,
    WireStage,
    frame,
    inline,
    unwrapped,
)
from omni_live.sessions.inputs import Outcome
from omni_live.sessions.payload import ArraySpec, Payload
from omni_live.sessions.stamp import Stamp

STAMP = Stamp(5, 2**32 - 1, 9, 2**40, 3, 7, 2**62)
BODY = Inline("pcm", {"rate": 16000, "gain": 0.5, "name": "é", "on": True, "none": None}, b"\x00\xff", ())
TICKET = Ticket(1, 64, 5000, 2**62, "x", {}, (ArraySpec("a", "<f4", (2, 3)),))

TO_B = (Route("b", WorkerId(2), 8, False, Opening(7, 1, (Route(CLIENT, WorkerId(0), 4),))),)

AnyDecoder = Decoder[object]

SAMPLES: list[tuple[AnyDecoder, Message]] = [
    (FROM_SERVER, Configure(1, "/dev/shm/x", [WireStage("a", "m:C", {"inline": True})], 1, 2, "omni:a")),
    (FROM_SERVER, OpenTurn(1, "a", STAMP, {"seed": 3}, (Route("b", WorkerId(2), 8, True),), 2)),
    (FROM_SERVER, OpenTurn(1, "a", STAMP, {}, TO_B, 1, Chunk(CLIENT, "a", STAMP, BODY, last=True))),
    (FROM_SERVER, FeedTurn(2, "a", STAMP, TICKET, True)),
    (FROM_SERVER, Abort("a", STAMP)),
    (FROM_SERVER, Ping(3)),
    (FROM_PRODUCER, Hello(4)),
    (FROM_PRODUCER, OpenTurn(1, "a", STAMP, {}, TO_B, 1, Chunk("z", "a", STAMP, TICKET))),
    (FROM_PRODUCER, Chunk("a", "b", STAMP, BODY, True)),
    (FROM_PRODUCER, Chunk("a", "b", STAMP, None, False, True, Outcome.INCOMPLETE, "max_output_tokens")),
    (FROM_RECEIVER, Credit("a", "b", STAMP, 3)),
    (FROM_RECEIVER, Free([Freed(0, 64, 2**62)])),
    (FROM_WORKER, Spoke("a", STAMP, BODY, Outcome.DONE, "")),
    (FROM_WORKER, Ended("a", STAMP, Outcome.FAILED, "stage_error")),
    (FROM_WORKER, Counted({"late_chunks": 2})),
    (FROM_WORKER, Pong(3)),
    (FROM_WORKER, Ready()),
]


def _ids(sample: object) -> str:
    return type(sample).__name__


@pytest.mark.parametrize(("decoder", "message"), SAMPLES, ids=_ids)
def test_a_message_arrives_as_it_was_sent(decoder: AnyDecoder, message: Message) -> None:
    data = frame(message)
    assert int.from_bytes(data[:LENGTH_BYTES], "little") == len(data) - LENGTH_BYTES
    assert decoder.decode(data[LENGTH_BYTES:]) == message


@pytest.mark.parametrize("decoder", [FROM_SERVER, FROM_PRODUCER, FROM_RECEIVER], ids=["server", "producer", "receiver"])
def test_a_peer_can_say_only_what_is_its_to_say(decoder: AnyDecoder) -> None:
    with pytest.raises(msgspec.ValidationError):
        decoder.decode(frame(Ended("a", STAMP, Outcome.DONE, ""))[LENGTH_BYTES:])


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_fail_to_decode(data: bytes) -> None:
    for decoder in (FROM_SERVER, FROM_PRODUCER, FROM_RECEIVER, FROM_WORKER):
        try:
            decoder.decode(data)
        except (msgspec.DecodeError, ValueError):
            continue


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1])
def test_a_number_that_cannot_travel_is_refused(number: int) -> None:
    with pytest.raises(WireError):
        frame(Spoke("a", STAMP, Inline("x", {"n": number}, b"", ())))


def test_a_message_above_the_frame_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME", 1000)
    with pytest.raises(WireError):
        frame(Spoke("a", STAMP, Inline("x", {}, bytes(1000), ())))


@pytest.mark.parametrize("body", [b"abc", bytearray(b"abc"), memoryview(b"abc")])
def test_a_payload_travels_whatever_holds_its_bytes(body: bytes | bytearray | memoryview) -> None:
    got = unwrapped(inline(Payload("x", {"a": 1}, body)))
    assert (got.kind, got.meta, got.body) == ("x", {"a": 1}, b"abc")


# -- links


class Far:
    """The other end of a link: a plain socket, and what the link made of what came."""

    def __init__(self, max_frame: int, max_backlog: int) -> None:
        self.messages: list[FromWorker] = []
        self.losses: list[str] = []
        self.arrived = asyncio.Event()
        self.link: Link[FromWorker] = Link(
            FROM_WORKER, self._receive, self.losses.append, max_frame=max_frame, max_backlog=max_backlog
        )
        ours, self.socket = socket.socketpair()
        self.ours = ours
        self.socket.setblocking(False)

    async def connect(self) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self.link, sock=self.ours)

    def _receive(self, messages: list[FromWorker], nbytes: int) -> None:
        self.messages += messages
        self.arrived.set()

    async def expect(self, count: int) -> list[FromWorker]:
        while len(self.messages) < count:
            self.arrived.clear()
            await self.arrived.wait()
        return self.messages

    async def say(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def hear(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            got = await asyncio.get_running_loop().sock_recv(self.socket, count - len(data))
            if not got:
                break
            data += got
        return data


FarMaker = Callable[..., Far]


@pytest.fixture
async def far() -> AsyncIterator[FarMaker]:
    made: list[Far] = []

    def make(max_frame: int = 10_000, max_backlog: int = 100_000) -> Far:
        made.append(Far(max_frame, max_backlog))
        return made[-1]

    yield make
    for one in made:
        one.socket.close()
        one.link.close()
        await one.link.gone.wait()
        one.ours.close()


async def test_frames_that_arrive_in_pieces_are_put_together(far: FarMaker) -> None:
    end = far()
    await end.connect()
    sent: list[FromWorker] = [
        Pong(1),
        Ended("a", STAMP, Outcome.DONE, ""),
        Spoke("a", STAMP, Inline("x", {}, bytes(5000), ())),
        Pong(2),
    ]
    data = b"".join(frame(message) for message in sent)
    for piece in (data[:1], data[1:3], data[3:200], data[200:4000], data[4000:]):
        await end.say(piece)
        await asyncio.sleep(0)
    assert await end.expect(4) == sent


async def test_frames_that_arrive_together_are_received_together(far: FarMaker) -> None:
    end = far()
    await end.connect()
    await end.say(b"".join(frame(Pong(number)) for number in range(50)))
    assert await end.expect(50) == [Pong(number) for number in range(50)]


@pytest.mark.parametrize(
    "data",
    [
        (10_001).to_bytes(4, "little"),
        b"\xff\xff\xff\xff",
        frame(Hello(1)),
        b"\x01\x00\x00\x00\xc1",
        b"\x00\x00\x00\x00",
        (9000).to_bytes(4, "little") + b"\x91" * 9000,
    ],
    ids=["too large", "absurd", "not its to say", "no msgpack", "empty", "deep"],
)
async def test_a_bad_frame_closes_the_link_and_says_so_once(far: FarMaker, data: bytes) -> None:
    end = far()
    await end.connect()
    await end.say(frame(Pong(1)) + data)
    await end.link.gone.wait()
    assert end.losses == ["bad_frame"]
    assert end.messages in ([], [Pong(1)])


async def test_what_is_sent_before_the_link_is_up_leaves_first(far: FarMaker) -> None:
    end = far()
    end.link.send(Ping(1))
    await end.connect()
    end.link.send(Ping(2))
    expected = frame(Ping(1)) + frame(Ping(2))
    assert await end.hear(len(expected)) == expected


async def test_a_peer_that_does_not_read_loses_the_link_at_the_bound(far: FarMaker) -> None:
    end = far()
    await end.connect()
    message = Spoke("a", STAMP, Inline("x", {}, bytes(9000), ()))
    for _ in range(10_000):
        if end.link.gone.is_set():
            break
        end.link.send(message)
        await asyncio.sleep(0)
    assert end.losses == ["overflow"]


async def test_too_much_before_the_link_is_up_loses_it_too(far: FarMaker) -> None:
    end = far(max_backlog=1000)
    for _ in range(3):
        end.link.send(Spoke("a", STAMP, Inline("x", {}, bytes(900), ())))
    assert end.losses == ["overflow"]


async def test_close_sends_what_waits(far: FarMaker) -> None:
    end = far(max_backlog=10_000_000)
    await end.connect()
    message = Spoke("a", STAMP, Inline("x", {}, bytes(9000), ()))
    for _ in range(200):
        end.link.send(message)
    end.link.close()
    end.link.send(message)  # goes nowhere
    length = 200 * len(frame(message))
    assert len(await end.hear(length + 1)) == length
    await end.link.gone.wait()
    assert end.losses == ["closed"]


async def test_a_peer_that_goes_is_noticed_once(far: FarMaker) -> None:
    end = far()
    await end.connect()
    end.socket.close()
    await end.link.gone.wait()
    end.link.fail("late")
    end.link.send(Ping(1))
    assert end.losses == ["closed"]


async def test_a_link_that_never_came_up_can_fail(far: FarMaker) -> None:
    end = far()
    end.link.send(Ping(1))
    end.link.fail("unreachable")
    end.link.send(Ping(2))
    assert end.losses == ["unreachable"]
