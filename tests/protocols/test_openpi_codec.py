"""OpenPI's msgpack: what one side packs the other unpacks, ours, openpi-client's, vllm-omni's and msgpack's alike."""

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_live.protocols.fields import Faulty
from omni_live.protocols.openpi.codec import Caps, pack, read, unpack
from omni_live.protocols.openpi.tabletop import CONTRACT

RNG = np.random.default_rng(7)
OBSERVATION = {
    "observation/image": RNG.integers(0, 255, (224, 224, 3), np.uint8),
    "observation/wrist_image": RNG.integers(0, 255, (224, 224, 3), np.uint8),
    "observation/state": RNG.random(32).astype(np.float32),
    "prompt": "push the red disc to the left zone",
}

ARRAYS: dict[str, Any] = {
    **{
        name: np.arange(12).reshape(3, 4).astype(name)
        for name in ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8")
    },
    **{name: np.linspace(-2, 2, 6).reshape(2, 3).astype(name) for name in ("<f2", "<f4", "<f8", ">f2", ">f4", ">f8")},
    **{name: np.arange(4).astype(name) for name in (">u2", ">i4", ">u8", ">i8")},
    "bool": np.array([[True, False], [False, True]]),
    "texts": np.array(["robot 1", "r2"]),
    "big-endian texts": np.array(["robot 1", "r2"], ">U7"),
    "bytes": np.array([b"abc", b"d"]),
    "times": np.array(["2026-01-01T00:00:00", "2026-01-02T00:00:00"], "M8[s]"),
    "spans": np.array([1, 2], "m8[25ms]"),
    "no dimension": np.array(2.5, np.float32),
    "one element": np.array([7], np.uint8),
    "empty": np.zeros((0,), np.float32),
    "empty with lengths": np.zeros((4, 0, 3), np.uint8),
    "Fortran order": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "backwards": np.arange(10, dtype=np.int16)[::-2],
    "32 dimensions": np.zeros((1,) * 32, np.uint8),
    "read-only": np.frombuffer(b"\x01\x02\x03", np.uint8),
}
SCALARS: list[Any] = [np.float32(0.5), np.float16(1.5), np.int64(-7), np.uint8(255), np.bool_(True)]

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=20), inner, max_size=20),
    max_leaves=40,
)


def same(ours: Any, theirs: Any) -> bool:
    return bool(ours.dtype == theirs.dtype and ours.shape == theirs.shape and np.array_equal(ours, theirs))


def refusal(frame: bytes, caps: Caps) -> str:
    with pytest.raises(Faulty) as caught:
        unpack(frame, caps)
    assert caught.value.fault.code == "bad_frame"
    return caught.value.fault.message


# -- arrays


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_comes_back_as_it_was(name: str) -> None:
    found: Any = unpack(pack({"array": ARRAYS[name]}))
    assert same(found["array"], ARRAYS[name])


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_that_comes_is_writable_aligned_and_its_own(name: str) -> None:
    frame = pack(["x" * 3, ARRAYS[name]])  # after a text of three bytes, nothing in the frame is aligned
    found: Any = unpack(frame)
    flags = found[1].flags
    assert flags.writeable and flags.aligned and flags.c_contiguous and flags.owndata


@pytest.mark.parametrize("scalar", SCALARS, ids=repr)
def test_a_scalar_comes_back_as_it_was(scalar: Any) -> None:
    found: Any = unpack(pack([scalar]))
    assert type(found[0]) is type(scalar)
    assert found[0] == scalar


def test_numpys_doubles_and_texts_are_pythons_as_openpi_client_has_it() -> None:
    found: Any = unpack(pack([np.float64(0.25), np.str_("a")]))
    assert [type(each) for each in found] == [float, str]


@pytest.mark.parametrize(("value", "dtype"), [("robot 1", "<U7"), (b"r", "|S1"), (0.25, "<f8"), (7, ">i4")])
def test_a_marked_scalar_is_read_as_numpys(value: Any, dtype: str) -> None:
    found: Any = unpack(msgpack.packb({b"__npgeneric__": True, b"data": value, b"dtype": dtype}))
    assert isinstance(found, np.generic)
    assert found == value


def test_a_float16_that_is_too_large_is_infinite() -> None:
    frame = msgpack.packb({b"__npgeneric__": True, b"data": 1e300, b"dtype": "<f2"})
    assert unpack(frame) == np.float16(np.inf)


def test_packing_leaves_an_array_alone_and_does_not_keep_it() -> None:
    array = np.arange(4)
    frame = pack(array)
    array[0] = 9
    found: Any = unpack(frame)
    assert found.tolist() == [0, 1, 2, 3]
    found[1] = 8
    assert array.tolist() == [9, 1, 2, 3]


@pytest.mark.parametrize(
    "value",
    [np.array([object()]), np.zeros(2, "f4,f4"), np.zeros(2, complex), np.zeros(2, "V4"), 1j, object(), {1, 2}],
    ids=lambda value: type(value).__name__,
)
def test_what_the_wire_has_no_word_for_is_not_packed(value: Any) -> None:
    with pytest.raises(TypeError):
        pack({"value": value})


def test_the_contracts_metadata_is_plain_msgpack() -> None:
    metadata = CONTRACT.metadata()
    assert unpack(pack(metadata)) == msgpack.unpackb(pack(metadata)) == metadata


# -- the other markings


def native(array: Any) -> dict[str, Any]:
    """As vllm-omni's clients have it."""
    return {
        "nd": True,
        "type": array.dtype.str,
        "kind": array.dtype.kind,
        "shape": list(array.shape),
        "data": array.tobytes(),
    }


@pytest.mark.parametrize("name", ARRAYS)
def test_vllm_omnis_marking_is_read_and_noticed(name: str) -> None:
    message = read(msgpack.packb({"array": native(ARRAYS[name])}))
    assert message.vllm_omni
    found: Any = message.value
    assert same(found["array"], ARRAYS[name])


@pytest.mark.parametrize("name", ARRAYS)
def test_msgpack_numpys_marking_is_read(name: str) -> None:
    marker = {key.encode(): value for key, value in (native(ARRAYS[name]) | {"kind": b""}).items()}
    found: Any = unpack(msgpack.packb(marker))
    assert same(found, ARRAYS[name])


@pytest.mark.parametrize("name", ARRAYS)
def test_openpis_marking_with_keys_of_text_is_read(name: str) -> None:
    array = ARRAYS[name]
    marker = {"__ndarray__": 1, "data": array.tobytes(), "dtype": array.dtype.str, "shape": array.shape}
    message = read(msgpack.packb(marker))
    assert same(message.value, array)
    assert not message.vllm_omni


@pytest.mark.parametrize("scalar", SCALARS, ids=repr)
def test_msgpack_numpys_scalars_are_read(scalar: Any) -> None:
    marker = {b"nd": False, b"type": scalar.dtype.str, b"data": scalar.tobytes()}
    assert unpack(msgpack.packb(marker)) == scalar


def test_a_map_that_only_resembles_a_marker_stays_a_map() -> None:
    value = {"nd": True, "type": "robot", "shape": [1], "dtype": "<f4"}
    assert unpack(pack(value)) == value


def test_keys_of_an_image_may_be_bytes_and_come_as_texts() -> None:
    image = {b"__image__": True, b"format": "png", b"data": b"\x89", b"shape": [1, 1, 3]}
    assert unpack(msgpack.packb(image)) == {"__image__": True, "format": "png", "data": b"\x89", "shape": [1, 1, 3]}


# -- msgpack itself


@given(PLAIN)
@settings(deadline=None)
def test_what_msgpack_packs_is_read_as_msgpack_reads_it(value: Any) -> None:
    packed = msgpack.packb(value)
    assert unpack(packed) == msgpack.unpackb(packed) == value


@given(st.binary(max_size=60))
@settings(deadline=None, max_examples=500)
def test_what_is_read_at_all_is_read_as_msgpack_reads_it(data: bytes) -> None:
    try:
        ours = unpack(data)
    except Faulty:
        return
    assert repr(ours) == repr(msgpack.unpackb(data, strict_map_key=False))


@pytest.mark.parametrize("size", [0, 1, 15, 16, 31, 32, 255, 256, 65_535, 65_536])
def test_every_length_of_text_and_bytes_is_read(size: int) -> None:
    value = ["t" * size, b"b" * size]
    assert unpack(msgpack.packb(value)) == value


@pytest.mark.parametrize("size", [0, 1, 15, 16, 255, 256, 9000])
def test_every_length_of_list_and_map_is_read(size: int) -> None:
    value = [list(range(size)), {str(number): number for number in range(size)}]
    assert unpack(msgpack.packb(value)) == value


@pytest.mark.parametrize("header", [b"\xdd\0\0\0\1", b"\xdc\0\1"])
def test_a_length_may_be_written_longer_than_it_has_to_be(header: bytes) -> None:
    assert unpack(header + b"\xc2") == [False]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_frame_may_be_any_bytes(kind: Any) -> None:
    found: Any = unpack(kind(pack({"state": ARRAYS["<f4"]})))
    assert same(found["state"], ARRAYS["<f4"])


# -- caps


def test_elements_are_counted_over_the_whole_message() -> None:
    value = {"a": [1, 2, 3], "b": {"c": [4]}}  # 2 + 3 + 1 + 1
    assert unpack(pack(value), Caps(elements=7)) == value
    assert refusal(pack(value), Caps(elements=6)) == "The frame has more than 6 elements."


def test_depth_counts_maps_and_lists_within_one_another() -> None:
    value = {"a": [{"b": 1}]}
    assert unpack(pack(value), Caps(depth=3)) == value
    assert refusal(pack(value), Caps(depth=2)) == "The frame nests maps and lists more than 2 deep."


def test_a_text_may_be_as_long_as_its_cap() -> None:
    assert unpack(pack("abcd"), Caps(text_bytes=4)) == "abcd"
    assert refusal(pack("abcde"), Caps(text_bytes=4)) == "The frame holds a text of more than 4 bytes."


def test_an_array_may_be_as_large_as_its_cap() -> None:
    caps = Caps(array_bytes=16)
    assert same(unpack(pack(np.zeros(4, np.float32)), caps), np.zeros(4, np.float32))
    assert refusal(pack(np.zeros(5, np.float32)), caps) == "The frame holds an array of more than 16 bytes."


def test_an_empty_array_is_measured_as_if_its_empty_axes_were_not() -> None:
    caps = Caps(array_bytes=16)
    assert same(unpack(pack(np.zeros((0, 4), np.float32)), caps), np.zeros((0, 4), np.float32))
    assert "more than 16 bytes" in refusal(pack(np.zeros((0, 5), np.float32)), caps)


# -- openpi-client's own codec


@pytest.fixture
def official() -> Any:
    return pytest.importorskip("openpi_client.msgpack_numpy", reason="openpi-client is not installed")


@pytest.mark.parametrize("name", ARRAYS)
def test_openpi_client_unpacks_what_we_pack(official: Any, name: str) -> None:
    ours = official.unpackb(pack({"actions": ARRAYS[name]}))["actions"]
    assert same(ours, ARRAYS[name])


@pytest.mark.parametrize("name", ARRAYS)
def test_we_unpack_what_openpi_client_packs(official: Any, name: str) -> None:
    found: Any = unpack(official.packb({"observation/state": ARRAYS[name]}))
    assert same(found["observation/state"], ARRAYS[name])


@pytest.mark.parametrize("scalar", SCALARS, ids=repr)
def test_scalars_pass_both_ways_between_us_and_openpi_client(official: Any, scalar: Any) -> None:
    assert unpack(official.packb(scalar)) == official.unpackb(pack(scalar)) == scalar


@pytest.mark.parametrize("value", [OBSERVATION, {"a": SCALARS, "b": list(ARRAYS.values())}], ids=["small", "all"])
def test_we_write_the_very_bytes_that_openpi_client_writes(official: Any, value: Any) -> None:
    assert pack(value) == official.packb(value)


@pytest.mark.parametrize("text", ["<U\u0661", "<U\u0663", "<m8[\u0661s]", "<U1\u0663"])
def test_digits_of_other_scripts_are_no_dtype(text: str) -> None:
    marker = {b"__ndarray__": True, b"data": bytes(4), b"dtype": text, b"shape": [1]}
    with pytest.raises(Faulty):
        unpack(msgpack.packb({"a": marker}))


def test_an_empty_extension_is_refused_as_any_other() -> None:
    with pytest.raises(Faulty):
        unpack(b"\x81\xa1a\xc7\x00\x05")
