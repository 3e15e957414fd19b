"""Messages of the video protocol: what is read of good ones, and how each bad one is refused."""

import json

import numpy as np
import pytest

from omni_live.protocols.arrays import arrays
from omni_live.protocols.fields import Faulty, Wire
from omni_live.protocols.video.messages import Asked, Interaction, Ping, Start, Stop, event_of, load, read
from omni_live.protocols.video.prompts import direction
from omni_live.protocols.world.arrays import picture_value
from omni_live.protocols.world.contract import TABLE_TOP, WorldContract
from omni_live.protocols.world.messages import dump

OTHER = WorldContract(frame=(8, 8, 3), latent=(1, 1, 1), action=(3,), rate_hz=12.0, action_low=0.0)
WORLDS = {"table": TABLE_TOP, "other": OTHER}
HALF = float(np.float32(np.sqrt(0.5)))


def asked(running: WorldContract | None = None, **message: Wire) -> Asked:
    return read(load(json.dumps(message)), WORLDS, running)


def started(**fields: Wire) -> Start:
    found = asked(type="session.start", **fields)
    assert isinstance(found, Start)
    return found


def interaction(running: WorldContract = TABLE_TOP, **event: Wire) -> Interaction:
    found = asked(running, type="session.interaction", interaction={"event": event})
    assert isinstance(found, Interaction)
    return found


def test_a_start_that_says_nothing_takes_the_first_world_and_stands_still() -> None:
    start = started()
    assert (start.model, start.seed, start.num_frames, start.fps) == ("table", 0, None, 5.0)
    assert (start.block_frames, start.paced) == (8, True)
    assert start.track.tolist() == [[[0.0, 0.0], [0.0, 0.0]]]


def test_a_start_says_everything() -> None:
    start = started(
        model="other", seed=7, num_frames=9, fps=2.5, block_frames=3, paced=False, format="m4s", width=8, height=8
    )
    assert (start.model, start.seed, start.num_frames, start.fps) == ("other", 7, 9, 2.5)
    assert (start.block_frames, start.paced, start.begin.meta["seed"]) == (3, False, 7)
    assert start.track.tolist() == [[0.0, 0.0, 0.0]]


def test_a_video_may_begin_with_a_picture() -> None:
    picture = np.arange(64 * 64 * 3, dtype=np.uint32).astype(np.uint8).reshape(64, 64, 3)
    text = dump({"type": "session.start", "image": picture_value(picture, "raw")}, binary=False)
    start = read(load(text), WORLDS, None)
    assert isinstance(start, Start)
    assert np.array_equal(arrays(start.begin)["image"], picture)


@pytest.mark.parametrize(
    ("action", "rows"),
    [
        ([0.5, -1], [[[0.5, -1.0]] * 2]),
        ([[0.5, -1]], [[[0.5, -1.0]] * 2]),
        ([[0.5, -1], [0, 0.25]], [[[0.5, -1.0]] * 2, [[0.0, 0.25]] * 2]),
        ([[[0.5, -1], [0, 0.25]]], [[[0.5, -1.0], [0.0, 0.25]]]),
    ],
)
def test_an_action_is_a_vector_or_a_list_of_them_or_has_each_of_a_frames_actions(action: Wire, rows: object) -> None:
    assert interaction(action=action).track.tolist() == rows


def test_a_world_that_takes_one_action_a_frame_gets_one() -> None:
    assert interaction(OTHER, action=[0, 0.5, 1]).track.tolist() == [[0.0, 0.5, 1.0]]
    assert interaction(OTHER, action=[[0, 0.5, 1], [1, 1, 1]]).track.tolist() == [[0.0, 0.5, 1.0], [1.0, 1.0, 1.0]]


def test_a_prompt_is_the_direction_that_it_names() -> None:
    assert interaction(prompt="Push it LEFT!").track.tolist() == [[[-1.0, 0.0]] * 2]
    assert started(prompt="up, and to the right").track.tolist() == [[[HALF, -HALF]] * 2]
    assert interaction(prompt="please stop").track.tolist() == [[[0.0, 0.0]] * 2]


@pytest.mark.parametrize("prompt", ["", "a castle", "leftovers", "left and right"])
def test_a_prompt_without_a_direction_means_nothing(prompt: str) -> None:
    assert direction(prompt) is None


def test_stop_and_ping_are_read_at_any_time() -> None:
    assert asked(type="session.stop") == Stop()
    assert asked(TABLE_TOP, type="session.ping") == Ping()


def test_an_interactions_id_is_known_although_the_rest_is_bad() -> None:
    assert event_of({"interaction": {"event_id": "e", "event": 5}}) == "e"
    for bad in ({}, {"interaction": 5}, {"interaction": {"event_id": 5}}, {"interaction": {"event_id": "\n"}}):
        assert event_of(bad) is None


REFUSED: list[tuple[dict[str, Wire], bool, str, str | None]] = [
    ({}, False, "missing_required_parameter", "type"),
    ({"type": 5}, False, "invalid_type", "type"),
    ({"type": "nonsense"}, True, "unknown_type", "type"),
    ({"type": "session.start"}, True, "already_started", "type"),
    ({"type": "session.interaction", "interaction": {}}, False, "not_started", "type"),
    ({"type": "session.stop", "more": 1}, True, "unknown_parameter", "more"),
    ({"type": "session.start", "model": "nobody"}, False, "model_not_found", "model"),
    ({"type": "session.start", "format": "webm"}, False, "invalid_value", "format"),
    ({"type": "session.start", "width": 65}, False, "invalid_value", "width"),
    ({"type": "session.start", "num_frames": 0}, False, "invalid_value", "num_frames"),
    ({"type": "session.start", "fps": 0.5}, False, "invalid_value", "fps"),
    ({"type": "session.start", "block_frames": 65}, False, "invalid_value", "block_frames"),
    ({"type": "session.start", "paced": 1}, False, "invalid_type", "paced"),
    ({"type": "session.start", "seed": -1}, False, "invalid_value", "seed"),
    ({"type": "session.start", "guidance_scale": 2}, False, "unknown_parameter", "guidance_scale"),
    ({"type": "session.start", "camera": {}}, False, "unsupported", "camera"),
    ({"type": "session.start", "prompt": "a castle"}, False, "prompt_unknown", "prompt"),
    ({"type": "session.start", "model": "other", "prompt": "left"}, False, "prompt_unknown", "prompt"),
    ({"type": "session.interaction"}, True, "missing_required_parameter", "interaction"),
    ({"type": "session.interaction", "interaction": {}}, True, "missing_required_parameter", "interaction.event"),
]
EVENTS: list[tuple[dict[str, Wire], str, str]] = [
    ({}, "missing_required_parameter", "action"),
    ({"action": [0, 0], "prompt": "left"}, "invalid_value", "prompt"),
    ({"action": []}, "invalid_value", "action"),
    ({"action": {}}, "missing_required_parameter", "action"),
    ({"action": 5}, "invalid_type", "action"),
    ({"action": [0]}, "invalid_value", "action"),
    ({"action": [0, 1.5]}, "invalid_value", "action"),
    ({"action": [0, True]}, "invalid_value", "action"),
    ({"action": [[0, 0], [0]]}, "invalid_value", "action"),
    ({"action": [[0, 0], 5]}, "invalid_value", "action"),
    ({"action": [[[0, 0]]]}, "invalid_value", "action"),
    ({"action": [[[[0, 0]]]]}, "invalid_value", "action"),
    ({"camera": {"yaw": 1}}, "unsupported", "camera"),
    ({"prompt": "left", "negative_prompt": "right"}, "unknown_parameter", "negative_prompt"),
]


@pytest.mark.parametrize(("message", "is_running", "code", "param"), REFUSED)
def test_a_bad_message_is_refused(message: dict[str, Wire], is_running: bool, code: str, param: str | None) -> None:
    with pytest.raises(Faulty) as refused:
        read(message, WORLDS, TABLE_TOP if is_running else None)
    assert (refused.value.fault.code, refused.value.fault.param) == (code, param)


@pytest.mark.parametrize(("event", "code", "name"), EVENTS)
def test_a_bad_event_is_refused(event: dict[str, Wire], code: str, name: str) -> None:
    with pytest.raises(Faulty) as refused:
        interaction(**event)
    fault = refused.value.fault
    assert (fault.code, str(fault.param).split(".")[:3]) == (code, ["interaction", "event", name])


def test_fades_are_refused_unless_they_take_no_time() -> None:
    event: dict[str, Wire] = {"action": [0, 0]}
    asked(TABLE_TOP, type="session.interaction", interaction={"event": event, "transition_chunks": 0})
    with pytest.raises(Faulty, match="fade"):
        asked(TABLE_TOP, type="session.interaction", interaction={"event": event, "transition_chunks": 2})


def test_a_binary_frame_is_no_message() -> None:
    with pytest.raises(Faulty):
        load(b"{}")
