"""What a bad OpenPI frame costs: a Faulty of the right code, little memory, a sentence with nothing internal in it."""

import re
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_live.protocols.fields import Fault, Faulty
from omni_live.protocols.images import decode_images, has_images
from omni_live.protocols.openpi import dialects
from omni_live.protocols.openpi.codec import unpack
from omni_live.protocols.openpi.dialects import Dialect, Infer, Reset
from omni_live.protocols.openpi.tabletop import CONTRACT

from .msgpack_cases import ACCEPTED, CASES, GOOD, RESETS, compressed, frame, picture

INTERNAL = re.compile(r"/dev/shm|psm_|/tmp|Traceback|0x[0-9a-f]{8}|File \"|numpy|msgpack|PIL|object at|\n")
MAX_PEAK_BYTES = 32 << 20
SMALL = [data for _, data, *_ in (*CASES, *ACCEPTED, *RESETS) if len(data) < 2000]


def asked(frame: bytes) -> Infer | Reset:
    """As the door does it."""
    request = unpack(frame)
    if has_images(request):
        request = decode_images(request)
    read = dialects.read(request)
    if isinstance(read, Infer):
        CONTRACT.checked(read.observation)
    return read


def fault(frame: bytes) -> Fault:
    with pytest.raises(Faulty) as caught:
        asked(frame)
    return caught.value.fault


def test_no_two_cases_have_one_name() -> None:
    names = [name for name, *_ in (*CASES, *ACCEPTED, *RESETS)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("frame", "code"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_bad_frame_is_refused_cheaply_and_in_plain_words(frame: bytes, code: str) -> None:
    asked_once = fault(frame)  # what is loaded only once is no part of the cost
    tracemalloc.start()
    try:
        found = fault(frame)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == asked_once
    assert (found.code, peak < MAX_PEAK_BYTES) == (code, True), (found, peak)
    assert not INTERNAL.search(found.message)
    assert found.message.isascii() and found.message.endswith(".") and len(found.message) < 250
    told = dialects.error(Dialect.OPENPI, found.code, found.message)
    assert told == f"{found.code}: {found.message}"


@pytest.mark.parametrize("frame", [case[1] for case in ACCEPTED], ids=[case[0] for case in ACCEPTED])
def test_what_only_looks_odd_is_accepted(frame: bytes) -> None:
    assert isinstance(asked(frame), Infer)


@pytest.mark.parametrize(("frame", "sessions"), [case[1:] for case in RESETS], ids=[case[0] for case in RESETS])
def test_each_form_of_a_reset_names_its_sessions(frame: bytes, sessions: tuple[str, ...] | None) -> None:
    read = asked(frame)
    assert isinstance(read, Reset)
    assert read.sessions == sessions


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_no_bytes_raise_anything_but_faulty(data: bytes) -> None:
    _read_or_refused(data)


@given(st.sampled_from(SMALL), st.integers(0, 2000), st.binary(min_size=1, max_size=4))
@settings(deadline=None, max_examples=400)
def test_no_damaged_frame_raises_anything_but_faulty(data: bytes, at: int, damage: bytes) -> None:
    at %= len(data) + 1
    _read_or_refused(data[:at] + damage + data[at + len(damage) :])


@given(st.sampled_from(["JPEG", "PNG"]), st.integers(0, 8000), st.binary(min_size=1, max_size=4))
@settings(deadline=None, max_examples=200)
def test_no_damaged_image_raises_anything_but_faulty(name: str, at: int, damage: bytes) -> None:
    data = picture(name)
    at %= len(data)
    damaged = data[:at] + damage + data[at + len(damage) :]
    _read_or_refused(frame({"image": compressed(format=name.lower(), data=damaged)}))


def _read_or_refused(data: bytes) -> None:
    found = None
    try:
        asked(data)
    except Faulty as faulty:
        found = faulty.fault
    if found is not None:
        assert found.code in {"bad_frame", "bad_request", "bad_observation", "bad_image"}
        assert not INTERNAL.search(found.message)


def test_the_frame_that_the_cases_damage_is_good() -> None:
    assert isinstance(asked(GOOD), Infer)
