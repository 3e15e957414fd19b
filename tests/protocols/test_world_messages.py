"""The world protocol's messages: what is read of good ones, and how each bad one is refused."""

import json

import numpy as np
import pytest

from omni_live.protocols.arrays import arrays, pack
from omni_live.protocols.fields import Faulty, Fields, Wire
from omni_live.protocols.images import encode_image
from omni_live.protocols.world.arrays import array_value, picture_value, read_picture, seal, unseal
from omni_live.protocols.world.contract import TABLE_TOP
from omni_live.protocols.world.messages import Fork, Open, Told, dump, load, read
from omni_live.sessions.inputs import StepAsked, WorldRestoreAsked
from omni_live.sessions.payload import Payload

ACTIONS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 2, 2)
STATE = pack("rollout", {"seed": 7, "world": "w", "sizes": (1, 2)}, latents=np.arange(8, dtype=np.float32))
PICTURE = np.arange(64 * 64 * 3, dtype=np.uint32).astype(np.uint8).reshape(64, 64, 3)


def asked(**message: Wire) -> object:
    return read(message, TABLE_TOP, lambda: "made up")


@pytest.mark.parametrize("binary", [True, False])
def test_a_step_is_read_from_either_kind_of_frame(binary: bool) -> None:
    message: dict[str, Wire] = {
        "type": "step",
        "session_id": "sess_1",
        "request_id": "r",
        "actions": array_value(ACTIONS),
        "step": 4,
    }
    told = read(load(dump(message, binary=binary)), TABLE_TOP, lambda: "made up")
    assert isinstance(told, Told)
    assert isinstance(told.input, StepAsked)
    assert (told.request_id, told.input.frames, told.input.step) == ("r", 3, 4)
    assert np.array_equal(arrays(told.input.actions)["actions"], ACTIONS)


def test_actions_may_be_lists() -> None:
    told = asked(type="step", session_id="s", actions=json.loads(json.dumps(ACTIONS.tolist())))
    assert isinstance(told, Told)
    assert isinstance(told.input, StepAsked)
    assert np.array_equal(arrays(told.input.actions)["actions"], ACTIONS)


@pytest.mark.parametrize("form", ["raw", "png"])
def test_a_rollout_may_begin_with_a_picture(form: str) -> None:
    opened = asked(type="session.open", seed=3, image=picture_value(PICTURE, form))
    assert isinstance(opened, Open)
    assert opened.begin.meta["seed"] == 3
    assert np.array_equal(arrays(opened.begin)["image"], PICTURE)


def test_a_fork_keeps_how_its_parent_shows_frames_unless_it_says_otherwise() -> None:
    plain, other = asked(type="fork", session_id="s", step=2), asked(type="fork", session_id="s", format="png")
    assert isinstance(plain, Fork)
    assert isinstance(other, Fork)
    assert (plain.step, plain.count, plain.show) == (2, 1, None)
    assert other.show is not None


def test_a_snapshot_comes_back_as_it_was() -> None:
    assert unseal(seal(9, STATE)) == (9, Payload(STATE.kind, STATE.meta, bytes(STATE.body), STATE.arrays))
    restore = asked(type="restore", session_id="s", blob=seal(9, STATE))
    assert isinstance(restore, Told)
    assert isinstance(restore.input, WorldRestoreAsked)
    assert restore.input.step == 9


def test_a_snapshot_with_any_byte_changed_is_refused() -> None:
    blob = seal(9, STATE)
    for at in range(len(blob)):
        with pytest.raises(Faulty) as refused:
            unseal(blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :])
        assert refused.value.fault.code == "bad_snapshot"


@pytest.mark.parametrize("blob", [b"", b"x", bytes(200), seal(9, STATE)[:-1], seal(9, STATE) + b"x"])
def test_what_is_no_snapshot_is_refused(blob: bytes) -> None:
    with pytest.raises(Faulty):
        unseal(blob)


BAD: list[dict[str, Wire]] = [
    {},
    {"type": 7},
    {"type": "nonsense", "session_id": "s"},
    {"type": "step", "actions": [[[0.0, 0.0], [0.0, 0.0]]]},
    {"type": "step", "session_id": "s"},
    {"type": "step", "session_id": "s", "actions": []},
    {"type": "step", "session_id": "s", "actions": [[[0.0, 0.0]]]},
    {"type": "step", "session_id": "s", "actions": [[[0.0, 2.0], [0.0, 0.0]]]},
    {"type": "step", "session_id": "s", "actions": [[["0", 0.0], [0.0, 0.0]]]},
    {"type": "step", "session_id": "s", "actions": [[[True, 0.0], [0.0, 0.0]]]},
    {"type": "step", "session_id": "s", "actions": {"dtype": "<f8", "shape": [1, 2, 2], "data": bytes(32)}},
    {"type": "step", "session_id": "s", "actions": {"dtype": "<f4", "shape": [1, 2, 2], "data": bytes(15)}},
    {"type": "step", "session_id": "s", "actions": {"dtype": "<f4", "shape": [-1, 2, 2], "data": bytes(16)}},
    {"type": "step", "session_id": "s", "actions": {"dtype": "<f4", "shape": [2**31, 2, 2], "data": b""}},
    {"type": "step", "session_id": "s", "actions": {"dtype": "<f4", "shape": [1, 2, 2], "data": b"\0\0\xc0\x7f" * 4}},
    {"type": "step", "session_id": "s", "actions": [[[0.0, 0.0], [0.0, 0.0]]], "surprise": 1},
    {"type": "look", "session_id": "s"},
    {"type": "look", "session_id": "s", "step": -1},
    {"type": "look", "session_id": "s", "step": 1, "outputs": ["sound"]},
    {"type": "fork", "session_id": "s", "count": 65},
    {"type": "fork", "session_id": "s", "format": "tiff"},
    {"type": "session.open", "image": {"dtype": "|u1", "shape": [2, 2, 3], "data": bytes(12)}},
    {"type": "session.open", "image": {"format": "png", "data": b"no picture"}},
    {"type": "session.open", "seed": 2**60},
    {"type": "session.open", "credits": 0},
    {"type": "session.resume", "session_id": "s"},
    {"type": "restore", "session_id": "s", "blob": "not base64!"},
    {"type": "credit", "session_id": "s", "frames": 0},
]


@pytest.mark.parametrize("message", BAD, ids=str)
def test_a_bad_message_is_refused(message: dict[str, Wire]) -> None:
    with pytest.raises(Faulty):
        read(message, TABLE_TOP, lambda: "made up")


def test_a_picture_of_another_size_than_the_worlds_is_refused() -> None:
    small = encode_image(np.zeros((2, 2, 3), np.uint8), None)
    with pytest.raises(Faulty):
        read_picture(Fields({"image": {"format": "png", "data": _bytes(small["data"])}}), "image", TABLE_TOP.frame)


def _bytes(value: object) -> bytes:
    assert isinstance(value, bytes)
    return value
