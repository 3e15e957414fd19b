"""Frames that no OpenPI client should send, and some that look odd but are fine.

CASES       (name, frame, code of the error), for the table-top policy's contract
ACCEPTED    (name, frame) that ask for actions and must get them
RESETS      (name, frame, the sessions that are reset; None for all)
"""

import io
import struct
import zlib
from typing import Any

import msgpack
import numpy as np
from PIL import Image

U8, U16, U32 = struct.Struct(">B"), struct.Struct(">H"), struct.Struct(">I")
IMAGE = np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3)
STATE = np.array([0.25, 0.75], dtype=np.float32)


def ndarray(array: Any, **other: Any) -> dict[bytes, Any]:
    """An array as openpi-client marks it, with whatever is to be wrong about it."""
    fields = {"__ndarray__": True, "data": array.tobytes(), "dtype": array.dtype.str, "shape": array.shape} | other
    return {key.encode(): value for key, value in fields.items() if value is not None}


def generic(data: Any, dtype: Any) -> dict[bytes, Any]:
    return {b"__npgeneric__": True, b"data": data, b"dtype": dtype}


def native(array: Any, **other: Any) -> dict[str, Any]:
    """An array as vllm-omni marks it."""
    fields = {"nd": True, "type": array.dtype.str, "kind": array.dtype.kind, "shape": array.shape}
    return {key: value for key, value in (fields | {"data": array.tobytes()} | other).items() if value is not None}


def texts(marker: dict[bytes, Any]) -> dict[str, Any]:
    return {key.decode(): value for key, value in marker.items()}


def observation(**other: Any) -> dict[str, Any]:
    fields = {"observation/image": ndarray(IMAGE), "observation/state": ndarray(STATE), "prompt": "push"}
    fields |= {key.replace("__", "/"): value for key, value in other.items()}
    return {key: value for key, value in fields.items() if value is not None}


def frame(value: Any) -> bytes:
    packed = msgpack.packb(value)
    assert isinstance(packed, bytes)
    return packed


def state(marker: Any) -> bytes:
    """A request whose state is the marker given."""
    return frame(observation(observation__state=marker))


def with_image(value: Any) -> bytes:
    return frame(observation(observation__image=value))


def picture(name: str, array: Any = IMAGE) -> bytes:
    written = io.BytesIO()
    Image.fromarray(array).save(written, name)
    return written.getvalue()


def compressed(**other: Any) -> dict[str, Any]:
    fields = {"__image__": True, "format": "jpeg", "data": picture("JPEG"), "shape": [64, 64, 3]} | other
    return {key: value for key, value in fields.items() if value is not None}


def chunk(kind: bytes, data: bytes) -> bytes:
    return U32.pack(len(data)) + kind + data + U32.pack(zlib.crc32(kind + data))


def png(width: int, height: int, rows: int | None = None, after: bytes = b"") -> bytes:
    """A black PNG of so many rows, all that its header says or not, and chunks after them."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = bytes(1 + 3 * width) * (height if rows is None else rows)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels, 1)) + after + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def black(after: bytes = b"") -> dict[str, Any]:
    return compressed(format="png", data=png(64, 64, after=after))


GOOD = frame(observation())
STRUCTURED = str([(f"f{number}", "<f4") for number in range(2000)])

_FRAMES: list[tuple[str, bytes]] = [
    ("empty frame", b""),
    ("one byte that begins a map", b"\x81"),
    ("cut short after its first byte", GOOD[:1]),
    ("cut short in a key", GOOD[:10]),
    ("cut short in an array's data", GOOD[:6000]),
    ("cut short by one byte", GOOD[:-1]),
    ("one byte too many", GOOD + b"\xc0"),
    ("two messages in one frame", GOOD + GOOD),
    ("the byte that msgpack never uses", b"\x81\xa1a\xc1"),
    ("1,100 lists within one another", b"\x91" * 1100 + b"\xc0"),
    ("1,100 maps within one another", b"\x81\xa1a" * 1100 + b"\xc0"),
    ("17 maps within one another", b"\x81\xa1a" * 17 + b"\xc0"),
    ("1,000 lists that each announce 20,000 items", b"\xdc\x4e\x20" * 1000),
    ("15 lists that each announce 65,535 items", b"\xdc\xff\xff" * 15 + b"\xc0" * 70_000),
    ("list header of 4 billion", b"\xdd\xff\xff\xff\xff"),
    ("map header of 4 billion", b"\xdf\xff\xff\xff\xff"),
    ("text header of 4 billion", b"\xdb\xff\xff\xff\xff"),
    ("bin header of 4 billion", b"\xc6\xff\xff\xff\xff"),
    ("ext header of 4 billion", b"\xc9\xff\xff\xff\xff\x01"),
    ("2 MB of empty maps", b"\xdd" + U32.pack(2_000_000) + b"\x80" * 2_000_000),
    ("2 MB of empty lists in lists of 15", b"\xdc\xff\xff" + (b"\x9f" + b"\x90" * 15) * 125_000),
    ("2 MB of nil as a value", b"\x81\xa1a\xdd" + U32.pack(2_000_000) + b"\xc0" * 2_000_000),
    ("20,001 elements", frame({"a": [0] * 20_000})),
    ("a text of 1 MB", frame(observation(prompt="p" * 1_000_000))),
    ("a key of 1 KB", frame({"k" * 1000: 1})),
    ("a key that is a number", frame({1: 2})),
    ("a key that is NaN", frame({float("nan"): 1})),
    ("a key that is nil", frame({None: 1})),
    ("a key that is true", frame({True: 1})),
    ("a key that is a list", b"\x81\x91\x01\x01"),
    ("a key that is a map", b"\x81\x80\x01"),
    ("a key that is bytes", frame({b"prompt": "push"})),
    ("a key that is bytes and no text", frame({b"\xff\xfe": 1})),
    ("a key twice", b"\x82\xa1a\x01\xa1a\x02"),
    ("a marker's key twice, as bytes and as text", frame({**ndarray(STATE), "data": b""})),
    ("a key that is not UTF-8", b"\x81\xa2\xff\xfe\x01"),
    ("a text that is not UTF-8", b"\x81\xa1a\xa2\xc3\x28"),
    ("a text with an encoded surrogate", b"\x81\xa1a\xa3\xed\xa0\x80"),
    ("an extension of one byte", b"\x81\xa1a\xd4\x05\x00"),
    ("an extension of many bytes", frame({"a": msgpack.ExtType(5, b"x" * 100)})),
    ("a timestamp", frame({"a": msgpack.Timestamp(1, 2)})),
    ("an object's pickle", b"\x80\x04\x95\x1b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94"),
    ("JSON", b'{"prompt": "push"}'),
    ("zeros", bytes(64)),
    ("an unmarked bin key in a map of arrays", frame({b"state": ndarray(STATE)})),
    ("a marker's bin key in a map that is none", frame({b"data": 1})),
]

_MARKERS: list[tuple[str, Any]] = [
    ("dtype of objects", ndarray(STATE, dtype="|O")),
    ("dtype of objects, by its letter", ndarray(STATE, dtype="O")),
    ("dtype of numbers and objects", ndarray(STATE, dtype="f4,O")),
    ("dtype of records", ndarray(STATE, dtype="f4,f4")),
    ("dtype of 2,000 fields", ndarray(STATE, dtype=STRUCTURED)),
    ("dtype of 2,000 fields as a list", ndarray(STATE, dtype=[[f"f{number}", "<f4"] for number in range(2000)])),
    ("dtype with a shape of its own", ndarray(STATE, dtype="(2,)f4")),
    ("dtype of raw bytes", ndarray(STATE, dtype="|V8")),
    ("dtype of complex numbers", ndarray(np.zeros(2, np.complex64))),
    ("dtype of complex numbers, big-endian", ndarray(STATE, dtype=">c8", shape=[1])),
    ("dtype of extended floats", ndarray(np.zeros(2, np.longdouble))),
    ("dtype of floats of 16 bytes", ndarray(STATE, dtype="<f16", data=bytes(32))),
    ("dtype of booleans of 2 bytes", ndarray(STATE, dtype="|b2", shape=[4])),
    ("dtype of integers of 3 bytes", ndarray(STATE, dtype="<i3", data=bytes(6))),
    ("dtype of integers of 16 bytes", ndarray(STATE, dtype="<i16", data=bytes(32))),
    ("dtype of times of no known unit", ndarray(STATE, dtype="<M8[fortnight]", shape=[1])),
    ("dtype by its name", ndarray(STATE, dtype="float32")),
    ("dtype of an unknown letter", ndarray(STATE, dtype="<q4")),
    ("dtype of nothing", ndarray(STATE, dtype="")),
    ("dtype of 1 MB", ndarray(STATE, dtype="<f4" + " " * 60_000)),
    ("dtype that is a number", ndarray(STATE, dtype=4)),
    ("dtype that is nil", {**ndarray(STATE), b"dtype": None}),
    ("dtype that is a list", ndarray(STATE, dtype=["<f4"])),
    ("dtype that is bytes and no text", ndarray(STATE, dtype=b"\xff\xfe")),
    ("dtype of texts of no length, 1e18 of them", ndarray(STATE, dtype="<U0", data=b"", shape=[10**18])),
    ("dtype of bytes of no length, 1e18 of them", ndarray(STATE, dtype="|S0", data=b"", shape=[10**18])),
    ("dtype of raw bytes of no length, 1e18 of them", ndarray(STATE, dtype="|V0", data=b"", shape=[10**18])),
    ("dtype of texts of 2 billion", ndarray(STATE, dtype="<U2000000000", shape=[1])),
    ("shape of -1", ndarray(STATE, shape=[-1])),
    ("shape of a huge negative length", ndarray(STATE, shape=[-(2**63)])),
    ("shape of two negative lengths", ndarray(STATE, shape=[-1, -2])),
    ("shape of a fraction", ndarray(STATE, shape=[2.0])),
    ("shape of 0 and 1e12", ndarray(STATE, data=b"", shape=[0, 10**12])),
    ("shape of 0 and 1e12 as a float", ndarray(STATE, data=b"", shape=[0, 1e12])),
    ("shape of 2^32 times 2^32", ndarray(STATE, shape=[2**32, 2**32])),
    ("shape of 2^64 - 1", ndarray(STATE, shape=[2**64 - 1])),
    ("shape whose product overflows to the right size", ndarray(STATE, shape=[2**33, 2**31 + 1])),
    ("shape of true", ndarray(STATE, shape=[True, 2])),
    ("shape of a text", ndarray(STATE, shape=["2"])),
    ("shape that is a number", ndarray(STATE, shape=2)),
    ("shape that is nil", {**ndarray(STATE), b"shape": None}),
    ("shape that is a map", ndarray(STATE, shape={"a": 2})),
    ("shape of 33 dimensions", ndarray(STATE, shape=[1] * 32 + [2])),
    ("shape of 65 dimensions", ndarray(STATE, shape=[1] * 64 + [2])),
    ("shape of more than the data", ndarray(STATE, shape=[3])),
    ("shape of less than the data", ndarray(STATE, shape=[1])),
    ("no shape", ndarray(STATE, shape=None)),
    ("no dtype", ndarray(STATE, dtype=None)),
    ("no data", ndarray(STATE, data=None)),
    ("data that is a text", ndarray(STATE, data="12345678")),
    ("data that is a list", ndarray(STATE, data=[1.0, 2.0])),
    ("data that is nil", {**ndarray(STATE), b"data": None}),
    ("data of half an element", ndarray(STATE, data=b"123456")),
    ("a key too many", ndarray(STATE, strides=[4])),
    ("a key too many, all of them texts", texts(ndarray(STATE)) | {"strides": [4]}),
    ("a marker that is false", ndarray(STATE, __ndarray__=False)),
    ("a marker that is a text", ndarray(STATE, __ndarray__="true")),
    ("booleans of 2", ndarray(np.zeros(2, np.bool_), data=b"\x02\x00")),
    ("texts that are not Unicode", ndarray(np.array(["a"]), data=b"\xff\xff\xff\xff")),
    ("scalar of 2 GB of raw bytes", generic(2_000_000_000, "|V2000000000")),
    ("scalar of raw bytes by a number", generic(2_000_000_000, "V")),
    ("scalar of objects", generic(1, "|O")),
    ("scalar of 2 billion bytes", generic(2_000_000_000, "|S1")),
    ("scalar of a text where a number should be", generic("1", "<f4")),
    ("scalar of a number where a boolean should be", generic(1, "|b1")),
    ("scalar too large for its dtype", generic(300, "|u1")),
    ("scalar below zero for its dtype", generic(-1, "<u8")),
    ("scalar of a time", generic(1, "<M8[s]")),
    ("scalar of a list", generic([1, 2], "<f4")),
    ("scalar without data", {b"__npgeneric__": True, b"dtype": "<f4"}),
    ("vllm-omni's marker of another kind", native(STATE, kind="i")),
    ("vllm-omni's marker of objects", native(STATE, type="|O", kind="O")),
    ("vllm-omni's marker of records", native(STATE, type=[["a", "<f4"]], kind="V")),
    ("vllm-omni's marker without a shape", native(STATE, shape=None)),
    ("vllm-omni's marker with a shape of -1", native(STATE, shape=[-1])),
    ("vllm-omni's scalar of two elements", native(STATE, nd=False, shape=None)),
    ("vllm-omni's marker with a key too many", native(STATE, order="F")),
]

_OBSERVATIONS: list[tuple[str, bytes]] = [
    ("no state", frame(observation(observation__state=None))),
    ("no image", frame(observation(observation__image=None))),
    ("no prompt", frame(observation(prompt=None))),
    ("an empty map", frame({})),
    ("an image of another size", with_image(ndarray(IMAGE[:32]))),
    ("an image with its channels first", with_image(ndarray(np.moveaxis(IMAGE, 2, 0)))),
    ("an image with a batch dimension", with_image(ndarray(IMAGE[None]))),
    ("an image of floats", with_image(ndarray(IMAGE.astype(np.float32)))),
    ("an image of signed bytes", with_image(ndarray(IMAGE.astype(np.int8)))),
    ("an image that is bytes", with_image(IMAGE.tobytes())),
    ("an image that is a list", with_image([[0, 0, 0]])),
    ("a state of NaN", state(ndarray(np.array([0, np.nan], np.float32)))),
    ("a state of infinity", state(ndarray(np.array([0, np.inf], np.float32)))),
    ("a state too large for float32", state(ndarray(np.array([0, 1e300])))),
    ("a state of three numbers", state(ndarray(np.zeros(3, np.float32)))),
    ("a state of no dimension", state(ndarray(np.zeros((), np.float32)))),
    ("a state of booleans", state(ndarray(np.zeros(2, np.bool_)))),
    ("a state of texts", state(ndarray(np.array(["a", "b"])))),
    ("a state of times", state(ndarray(np.array([0, 1], "M8[s]")))),
    ("a state that is a scalar", state(generic(1.0, "<f4"))),
    ("a state of a list of texts", state(["0.5", "0.5"])),
    ("a state of a list of huge numbers", state([2**63, 1e300])),
    ("a prompt that is bytes", frame(observation(prompt=b"push"))),
    ("a prompt that is a number", frame(observation(prompt=7))),
    ("a prompt that is a list", frame(observation(prompt=["push"]))),
]

_REQUESTS: list[tuple[str, bytes]] = [
    ("a list", frame([observation()])),
    ("nil", frame(None)),
    ("a number", frame(7)),
    ("a text", frame("infer")),
    ("an array", frame(ndarray(STATE))),
    ("an unknown endpoint", frame(observation(endpoint="train"))),
    ("an endpoint that is a number", frame(observation(endpoint=1))),
    ("an endpoint that is an array", frame(observation(endpoint=ndarray(STATE)))),
    ("a request id of 10,000 characters", frame(observation(request_id="r" * 10_000))),
    ("a request id that is a list", frame(observation(request_id=[1]))),
    ("a request id with a line break", frame(observation(request_id="a\nb"))),
    ("a session id that is a map", frame(observation(session_id={}))),
    ("a session id that is a fraction", frame(observation(session_id=1.5))),
    ("a session id of control characters", frame(observation(session_id="\x1b[31m"))),
    ("a session id and an env id", frame(observation(session_id="a", env_id=1))),
    ("env ids without a reset", frame(observation(env_ids=[0, 1]))),
    ("a seed below zero", frame(observation(seed=-1))),
    ("a seed that is a text", frame(observation(seed="1"))),
    ("a seed that is true", frame(observation(seed=True))),
    ("a seed of 2^64 - 1", frame(observation(seed=2**64 - 1))),
    ("a deadline of NaN", frame(observation(deadline_ms=float("nan")))),
    ("a deadline of infinity", frame(observation(deadline_ms=float("inf")))),
    ("a deadline below zero", frame(observation(deadline_ms=-5))),
    ("a deadline that is an array", frame(observation(deadline_ms=ndarray(STATE)))),
    ("executed steps that are a fraction", frame(observation(executed_steps=1.5))),
    ("delay steps of a billion", frame(observation(delay_steps=10**9))),
    ("latest that is a number", frame(observation(latest=1))),
    ("deterministic that is a text", frame(observation(deterministic="yes"))),
    ("sampling parameters that are a list", frame(observation(sampling_params=[1]))),
    ("a reset beside an observation", frame(observation(reset=True))),
    ("a reset of a number", frame({"reset": 1})),
    ("a reset of a map", frame({"reset": {"a": 1}})),
    ("a reset of fractions", frame({"reset": [0.5]})),
    ("a reset of 2,000 sessions", frame({"reset": list(range(2000))})),
    ("a reset and infer", frame({"reset": True, "endpoint": "infer"})),
    ("a reset endpoint of nested ids", frame({"endpoint": "reset", "env_ids": [[0]]})),
]

_IMAGES: list[tuple[str, bytes]] = [
    ("a JPEG cut short", with_image(compressed(data=picture("JPEG")[:700]))),
    ("a JPEG cut short in its header", with_image(compressed(data=picture("JPEG")[:20]))),
    ("a PNG cut short", with_image(compressed(format="png", data=picture("PNG")[:100]))),
    ("a PNG that says it is a JPEG", with_image(compressed(data=picture("PNG")))),
    ("a GIF", with_image(compressed(format="gif", data=picture("GIF")))),
    ("a BMP that says it is a PNG", with_image(compressed(format="png", data=picture("BMP")))),
    ("a format that is bytes", with_image(compressed(format=b"jpeg"))),
    ("a format that is a list", with_image(compressed(format=["jpeg"]))),
    ("no format", with_image(compressed(format=None))),
    ("no data in an image", with_image(compressed(data=None))),
    ("no bytes in an image", with_image(compressed(data=b""))),
    ("an image's data that is a text", with_image(compressed(data="JFIF"))),
    ("an image without a shape", with_image(compressed(shape=None))),
    ("an image of two channels", with_image(compressed(shape=[64, 64, 2]))),
    ("an image whose shape is another", with_image(compressed(shape=[64, 63, 3]))),
    ("an image whose channels are others", with_image(compressed(shape=[64, 64, 4]))),
    ("an image of no height", with_image(compressed(shape=[0, 64, 3]))),
    ("an image of a height below zero", with_image(compressed(shape=[-64, -64, 3]))),
    ("an image of a fraction", with_image(compressed(shape=[64.0, 64, 3]))),
    ("a PNG of 100,000 by 100,000", with_image(
        compressed(format="png", data=png(100_000, 100_000, 1), shape=[100_000, 100_000, 3])
    )),
    ("a PNG whose header says 100,000 by 100,000", with_image(
        compressed(format="png", data=png(100_000, 100_000, 1))
    )),
    ("a PNG whose header says 10,000 by 10,000", with_image(
        compressed(format="png", data=png(10_000, 10_000, 1))
    )),
    ("a PNG with an empty colour profile", with_image(black(chunk(b"iCCP", b"")))),
    ("a PNG with a text that unfolds to 2 MB", with_image(
        black(chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2 << 20))))
    )),
    ("a PNG with an animation that is none", with_image(black(chunk(b"fcTL", b"\xff" * 26)))),
    ("an image of a size below zero that pays for a large one", frame({
        "large": compressed(format="png", data=png(3500, 3500), shape=[3500, 3500, 3]),
        "small": compressed(shape=[-3500, 3500, 3]),
    })),
    ("a PNG of no rows", with_image(compressed(format="png", data=png(64, 64, 0)))),
    ("many images of 2,000 by 2,000", frame(
        {f"image {number}": compressed(shape=[2000, 2000, 3]) for number in range(100)}
    )),
]  # fmt: skip

CASES: list[tuple[str, bytes, str]] = [
    *((name, data, "bad_frame") for name, data in _FRAMES),
    *((name, state(marker), "bad_frame") for name, marker in _MARKERS),
    *((name, data, "bad_observation") for name, data in _OBSERVATIONS),
    *((name, data, "bad_request") for name, data in _REQUESTS),
    *((name, data, "bad_image") for name, data in _IMAGES),
]

ACCEPTED: list[tuple[str, bytes]] = [
    ("openpi-client's marking", GOOD),
    ("vla-eval's marking", frame(observation(observation__image=texts(ndarray(IMAGE))))),
    ("vllm-omni's marking", frame(observation(observation__image=native(IMAGE), observation__state=native(STATE)))),
    ("msgpack-numpy's marking", state({key.encode(): value for key, value in native(STATE, kind=b"").items()})),
    ("a big-endian state", state(ndarray(STATE.astype(">f4")))),
    ("a float16 state", state(ndarray(STATE.astype(np.float16)))),
    ("a float64 state", state(ndarray(STATE.astype(np.float64)))),
    ("a state of integers", state(ndarray(np.array([0, 1])))),
    ("a state that is a list", state([0, 0.5])),
    ("an observation with more in it than is wanted", frame(observation(state={"deep": [1, {"er": None}]}, t=b"\0"))),
    ("an empty array that nobody wants", frame(observation(none=ndarray(np.zeros((0, 7)))))),
    ("a JPEG", with_image(compressed())),
    ("a JPEG whose marker's keys are bytes", with_image({key.encode(): value for key, value in compressed().items()})),
    ("a PNG", with_image(compressed(format="png", data=picture("PNG")))),
    ("an endpoint", frame(observation(endpoint="infer", session_id="robot 1"))),
    ("a session id in an array", frame(observation(session_id=ndarray(np.array(["robot 1"]))))),
    ("numbers out of arrays", frame(observation(seed=generic(7, "<i8"), latest=generic(True, "|b1")))),
    ("reset: false", frame(observation(reset=False))),
    ("nil for what is left open", frame(observation(seed=None, session_id=None) | {"deadline_ms": None})),
]

RESETS: list[tuple[str, bytes, tuple[str, ...] | None]] = [
    ("endpoint reset", frame({"endpoint": "reset"}), None),
    ("endpoint reset with a session", frame({"endpoint": "reset", "session_id": "robot 1"}), ("robot 1",)),
    ("endpoint reset with more information", frame({"endpoint": "reset", "prompt": "push", "seed": 3}), None),
    ("endpoint reset of environments", frame({"endpoint": "reset", "env_ids": [0, 2, 0]}), ("0", "2")),
    ("endpoint reset of an array of environments", frame(
        {"endpoint": "reset", "env_ids": ndarray(np.array([0, 2]))}
    ), ("0", "2")),
    ("endpoint reset of all", frame({"endpoint": "reset", "env_ids": "all"}), None),
    ("endpoint reset with reset: true", frame({"endpoint": "reset", "reset": True, "env_id": 4}), ("4",)),
    ("reset: true", frame({"reset": True}), None),
    ("reset: true with a session", frame({"reset": True, "session_id": "robot 1"}), ("robot 1",)),
    ("reset of sessions", frame({"reset": ["robot 1", 2]}), ("robot 1", "2")),
    ("reset of one session", frame({"reset": "robot 1"}), ("robot 1",)),
    ("reset of all", frame({"reset": "all"}), None),
    ("reset of none", frame({"reset": []}), ()),
]  # fmt: skip
