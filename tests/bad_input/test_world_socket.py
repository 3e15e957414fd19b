"""Bad messages to the world door: each is told by one typed error in time, the socket lives, nobody else notices."""

import contextlib
import io
import json
import struct
import time
import zlib
from collections.abc import Iterator
from typing import Any, Final

import msgpack
import numpy as np
import pytest
from PIL import Image
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.end_to_end.served import Served, served
from tests.end_to_end.world_talk import SUBPROTOCOL, Talk, moves, talking, warm

from .leaks import GROWTH_BYTES, LEAKS, TOLD_WITHIN_S, rss

DEPLOY = "limits: {client_frame_bytes: 2 MiB}\npipelines: {world: }\n"

Case = tuple[str, dict[str, Any], str]
"""What it is, the message, and the code of its error."""

BLACK: Final = {"dtype": "|u1", "shape": [64, 64, 3], "data": bytes(64 * 64 * 3)}


def png(width: int, height: int) -> bytes:
    """A picture whose header says so and whose pixels are not there."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(64))), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def jpeg_cut_short() -> bytes:
    whole = io.BytesIO()
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(whole, "JPEG")
    return whole.getvalue()[:-40]


def image_cases() -> Iterator[Case]:
    images: dict[str, Any] = {
        "a text": "nowhere",
        "nothing": {},
        "a form that is none": {"format": "bmp", "data": b"BM"},
        "no bytes": {"format": "png", "data": b""},
        "no picture": {"format": "png", "data": b"\x89PNG\r\n\x1a\nrubbish"},
        "a jpeg called png": {"format": "png", "data": jpeg_cut_short()},
        "a jpeg that is cut short": {"format": "jpeg", "data": jpeg_cut_short()},
        "a bomb": {"format": "png", "data": png(100_000, 100_000)},
        "another size": {"format": "png", "data": png(65, 64)},
        "pixels that are not there": {"format": "png", "data": png(64, 64)},
        "another shape": {**BLACK, "shape": [64, 64]},
        "a shape that lies": {**BLACK, "shape": [64, 64, 4]},
        "a shape of lies": {**BLACK, "shape": [0, 10**12, 3]},
        "a negative shape": {**BLACK, "shape": [-1, 64, 3]},
        "a shape of halves": {**BLACK, "shape": [64.0, 64, 3]},
        "another dtype": {**BLACK, "dtype": "<f4"},
        "objects": {**BLACK, "dtype": "|O"},
        "records": {**BLACK, "dtype": "f4,O"},
        "a dtype that is no text": {**BLACK, "dtype": 7},
        "one byte too few": {**BLACK, "data": bytes(64 * 64 * 3 - 1)},
    }
    for name, image in images.items():
        yield f"open with {name}", {"type": "session.open", "image": image}, "bad_field"


def action_cases(session: str) -> Iterator[Case]:
    actions: dict[str, Any] = {
        "none": None,
        "an empty list": [],
        "a number": 1,
        "a text": "forward",
        "flat": [0.0, 0.0],
        "one row too few": [[[0, 0]]],
        "a third axis": [[[0, 0, 0], [0, 0, 0]]],
        "ragged": [[[0, 0], [0]]],
        "texts": [[["a", "b"], ["c", "d"]]],
        "nothing at all": [[[None, 0], [0, 0]]],
        "booleans": [[[True, False], [True, False]]],
        "no number": [[[float("nan"), 0], [0, 0]]],
        "without end": [[[float("inf"), 0], [0, 0]]],
        "far out": [[[1e30, 0], [0, 0]]],
        "an array that lies": {"dtype": "<f4", "shape": [1, 2, 2], "data": bytes(15)},
        "an array of objects": {"dtype": "|O", "shape": [1, 2, 2], "data": bytes(32)},
        "an array of nan": {"dtype": "<f4", "shape": [1, 2, 2], "data": np.full(4, np.nan, "<f4").tobytes()},
        "an array of 10^12": {"dtype": "<f4", "shape": [10**12, 2, 2], "data": bytes(16)},
        "a nest": [[[[[[[[[0]]]]]]]]],
    }
    for name, value in actions.items():
        yield f"step with {name}", {"type": "step", "session_id": session, "actions": value}, "bad_field"


def field_cases(session: str) -> Iterator[Case]:
    step = {"type": "step", "session_id": session, "actions": moves(1)}
    yield "no type", {"session_id": session}, "bad_field"
    yield "a type that is a number", {"type": 7, "session_id": session}, "bad_field"
    yield "an unknown type", {"type": "dance", "session_id": session}, "unknown_type"
    yield "no session", {"type": "snapshot"}, "bad_field"
    yield "somebody else's session", {"type": "snapshot", "session_id": "sess_of_nobody"}, "session_not_found"
    yield "a session that is a list", {"type": "snapshot", "session_id": [session]}, "bad_field"
    yield "an unknown field", {**step, "speed": 2}, "bad_field"
    yield "an unknown model", {"type": "session.open", "model": "../../etc/passwd"}, "model_not_found"
    yield "a model that is a map", {"type": "session.open", "model": {}}, "bad_field"
    for seed in (-1, 2**53, 1.5, "1", True, [1]):
        yield f"seed {seed!r}", {"type": "session.open", "seed": seed}, "bad_field"
    for count in (0, -1, 65, 1e9, "2"):
        yield f"fork {count!r} times", {"type": "fork", "session_id": session, "count": count}, "bad_field"
    for credit in (0, -5, 10**12, "many", None):
        yield f"credit {credit!r}", {"type": "credit", "session_id": session, "frames": credit}, "bad_field"
    for due in (-1, "soon", float("nan"), float("inf"), 1e300):
        yield f"due {due!r}", {**step, "due_ms": due}, "bad_field"
    for form in ("tiff", 3, "", "RAW"):
        yield f"format {form!r}", {**step, "format": form}, "bad_field"
    for outputs in ([], ["frame", "frame"], ["sound"], "frame", [1]):
        yield f"outputs {outputs!r}", {**step, "outputs": outputs}, "bad_field"
    for number in ("1", 1.5, -1, 2**63 + 1, [1]):
        yield f"step number {number!r}", {**step, "step": number}, "bad_field"
        yield f"rewind to {number!r}", {"type": "rewind", "session_id": session, "step": number}, "bad_field"
        yield f"look at {number!r}", {"type": "look", "session_id": session, "step": number}, "bad_field"
    yield "a rewind to nowhere", {"type": "rewind", "session_id": session}, "bad_field"
    yield "a cancel of nothing", {"type": "cancel", "session_id": session}, "response_cancel_not_active"
    yield "a resume without a token", {"type": "session.resume", "session_id": session}, "bad_field"
    resume = {"type": "session.resume", "session_id": session, "token": "tok_wrong"}
    yield "a resume with a wrong token", resume, "invalid_resume_token"
    yield "a resume of nobody", {**resume, "session_id": "sess_of_nobody"}, "session_resume_expired"


def snapshot_cases(session: str, blob: bytes) -> Iterator[Case]:
    blobs: dict[str, Any] = {
        "nothing": b"",
        "one byte": b"\0",
        "rubbish": bytes(range(256)) * 8,
        "cut short": blob[:-1],
        "too long": blob + b"\0",
        "half": blob[: len(blob) // 2],
        "pickle": b"cos\nsystem\n(S'true'\ntR.",
        **{f"bit {at} flipped": flipped(blob, at) for at in range(0, len(blob) * 8, len(blob) * 8 // 40)},
    }
    for name, value in blobs.items():
        yield f"restore {name}", {"type": "restore", "session_id": session, "blob": value}, "bad_snapshot"
    yield "restore a list", {"type": "restore", "session_id": session, "blob": [1, 2]}, "bad_field"
    yield "restore none", {"type": "restore", "session_id": session}, "bad_field"


def has_words_for(message: dict[str, Any]) -> bool:
    """Whether JSON has: not for bytes, nor for what is no number."""
    try:
        return bool(json.dumps(message, allow_nan=False))
    except (TypeError, ValueError):
        return False


def flipped(blob: bytes, bit: int) -> bytes:
    changed = bytearray(blob)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def failing_cases(session: str) -> Iterator[Case]:
    """Requests that are well formed and cannot be done where the session stands, which is frame 4."""
    step = {"type": "step", "session_id": session, "actions": moves(2)}
    for number in (6, 2**40):
        yield f"step number {number}", {**step, "step": number}, "step_out_of_order"
    yield "a rewind ahead", {"type": "rewind", "session_id": session, "step": 5}, "rewind_ahead"
    yield "a look ahead", {"type": "look", "session_id": session, "step": 5}, "step_out_of_order"
    yield "a look too long", {"type": "look", "session_id": session, "step": 1, "frames": 2**31}, "bad_frames"


RAW_TEXT: Final = {
    "nothing": "",
    "an opened map": "{",
    "a list": "[]",
    "a number": "1e400",
    "no number": "NaN",
    "no number within": '{"type": NaN}',
    "a nest": "[" * 20_000,
    "a nest of maps": '{"a":' * 5_000,
    "a byte order mark": "\ufeff{}",
    "a lone surrogate": '{"type": "step", "session_id": "\\ud800"}',
    "a million commas": '{"actions": [' + "0," * 600_000 + "0]}",
    "two messages": '{"type": "describe"}{"type": "describe"}',
}
RAW_BINARY: Final = {
    "nothing": b"",
    "a byte that is none": b"\xc1",
    "a list": msgpack.packb([1, 2]),
    "a number": b"\x07",
    "a map cut short": msgpack.packb({"type": "describe"})[:-2],
    "more behind it": msgpack.packb({"type": "describe"}) + b"\xc0",
    "a huge list": b"\xdd\xff\xff\xff\xff",
    "a huge map": b"\xdf\xff\xff\xff\xff",
    "a huge text": b"\xdb\xff\xff\xff\xff",
    "a nest": b"\x91" * 1_200,
    "a nest of maps": b"\x81\xa1a" * 1_200,
    "an extension": b"\xc7\x04\x05abcd",
    "a time": b"\xd6\xff\x00\x00\x00\x00",
    "a text that is not UTF-8": b"\x81\xa4type\xa2\xff\xfe",
    "a key that is a number": msgpack.packb({1: 2}),
    "a key that is no number": msgpack.packb({float("nan"): 2}),
    "a million empty maps": b"\x81\xa1a\xdd\x00\x0f\x42\x40" + b"\x80" * 1_000_000,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("bad"), DEPLOY) as running:
        warm(running)
        yield running


@pytest.fixture(autouse=True)
def at_rest(server: Served) -> Iterator[None]:
    yield
    server.assert_at_rest()
    assert "Traceback" not in server.log()


class Watch:
    """Asks bad things on one socket while a neighbour on another dreams as ever."""

    def __init__(self, server: Served, talk: Talk, neighbour: Talk) -> None:
        self.server, self.talk, self.neighbour = server, talk, neighbour
        self.friend = neighbour.open(seed=8)
        self.golden = neighbour.step(self.friend, moves(3))
        self.before = rss(server)
        self.wrong: list[tuple[str, Any, str]] = []
        self.slow: list[tuple[str, float]] = []
        self.leaks: list[tuple[str, str]] = []

    def ask(self, case: Case) -> None:
        name, message, code = case
        began = time.perf_counter()
        request = self.talk.send(**{"kind": message.get("type"), **{k: v for k, v in message.items() if k != "type"}})
        self.judge(name, code, request, began)

    def judge(self, name: str, code: str, request: str | None, began: float) -> None:
        told = self.talk.receive()
        took = time.perf_counter() - began
        found = told.get("code") if told["type"] == "error" else told.get("reason")
        if (told["type"], told.get("status")) not in (("error", None), ("done", "failed")) or found != code:
            self.wrong.append((name, found or told["type"], code))
        elif request is not None and told["request_id"] != request:
            self.wrong.append((name, told["request_id"], request))
        if took > TOLD_WITHIN_S:
            self.slow.append((name, took))
        if LEAKS.search(str(told)):
            self.leaks.append((name, str(told)))

    def done(self) -> None:
        self.neighbour.rewind(self.friend, 0)
        assert self.neighbour.step(self.friend, moves(3)) == self.golden, "the neighbour"
        self.neighbour.close(self.friend)
        assert (self.wrong, self.leaks) == ([], [])
        assert len(self.slow) <= 2, self.slow  # one that the machine held up is nobody's fault, a kind that is slow is
        assert rss(self.server) - self.before < GROWTH_BYTES


@contextlib.contextmanager
def watched(server: Served, *, binary: bool = True) -> Iterator[Watch]:
    with talking(server, binary=binary) as talk, talking(server) as neighbour:
        watch = Watch(server, talk, neighbour)
        yield watch
        watch.done()


def test_every_bad_field_is_told_and_changes_nothing(server: Served) -> None:
    with watched(server) as watch:
        talk = watch.talk
        session = talk.open()
        frames = talk.step(session, moves(4))
        blob = talk.snapshot(session)
        for case in (
            *image_cases(),
            *action_cases(session),
            *field_cases(session),
            *snapshot_cases(session, blob),
            *failing_cases(session),
        ):
            watch.ask(case)
        assert talk.look(session, 1, 4) == frames
        assert talk.restore(session, blob) == 4
        talk.close(session)


def test_json_is_judged_as_msgpack_is(server: Served) -> None:
    with watched(server, binary=False) as watch:
        session = watch.talk.open()
        watch.talk.step(session, moves(4))
        for name, message, code in (*action_cases(session), *field_cases(session), *failing_cases(session)):
            if has_words_for(message):
                watch.ask((name, message, code))
        restore = {"type": "restore", "session_id": session}
        for blob in ("", "AAAA", "!!!!", "A", "AA==A", "AAA\n"):
            code = "bad_field" if blob in ("!!!!", "A", "AA==A", "AAA\n") else "bad_snapshot"
            watch.ask((f"restore {blob!r}", {**restore, "blob": blob}, code))
        watch.talk.close(session)


@pytest.mark.parametrize("binary", [False, True])
def test_a_frame_that_is_no_message_is_told_and_the_socket_stays_open(server: Served, binary: bool) -> None:
    with watched(server, binary=binary) as watch:
        for name, frame in (RAW_BINARY if binary else RAW_TEXT).items():
            began = time.perf_counter()
            watch.talk.socket.send(frame)
            watch.judge(name, "bad_field" if name == "a lone surrogate" else "bad_frame", None, began)
        watch.talk.send("describe")
        assert watch.talk.receive()["type"] == "server.world"


def test_a_frame_over_the_limit_closes_with_1009(server: Served) -> None:
    url = f"ws://127.0.0.1:{server.port}/v1/world"
    with connect(url, subprotocols=[SUBPROTOCOL], max_size=None, proxy=None, compression=None) as socket:
        socket.recv()
        with contextlib.suppress(ConnectionClosed):
            socket.send(bytes(3 << 20))
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=10)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
