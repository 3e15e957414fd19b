"""A policy's contract: announced and read back, compared with a robot's, and held against each observation."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from omni_live.protocols.fields import Faulty
from omni_live.protocols.openpi.codec import pack, unpack
from omni_live.protocols.openpi.contract import Contract, Field
from omni_live.protocols.openpi.tabletop import CONTRACT

IMAGE = np.zeros((64, 64, 3), np.uint8)
STATE = np.array([0.25, 0.75], np.float32)
DROID = Contract(
    embodiment="droid",
    observation=(
        Field("observation/exterior_image_1_left", (224, 224, 3), "uint8"),
        Field("observation/wrist_image_left", (224, 224, 3), "uint8"),
        Field("observation/joint_position", (7,), "float32"),
    ),
    action_horizon=10,
    action_dim=8,
    rate_hz=15.0,
    texts=("prompt", "language"),
    action_low=-3.2,
    action_high=3.2,
    action_space="joint_velocity",
    image_resolution=(224, 224),
    external_cameras=1,
    wrist_camera=True,
)


def observation(**other: Any) -> dict[str, Any]:
    fields = {"observation/image": IMAGE, "observation/state": STATE, "prompt": "push"}
    return fields | {f"observation/{key}": value for key, value in other.items()}


def fault(given: dict[str, Any]) -> tuple[str, str | None]:
    with pytest.raises(Faulty) as caught:
        CONTRACT.checked(given)
    return caught.value.fault.code, caught.value.fault.param


def metadata(**other: Any) -> dict[str, Any]:
    found: Any = unpack(pack(CONTRACT.metadata()))
    return {key: value for key, value in (found | other).items() if value != "absent"}


# -- announced


@pytest.mark.parametrize("contract", [CONTRACT, DROID], ids=lambda contract: contract.embodiment)
def test_a_contract_survives_the_wire(contract: Contract) -> None:
    announced: Any = unpack(pack(contract.metadata()))
    assert Contract.of(announced) == contract


def test_roboarenas_clients_find_their_fields() -> None:
    announced = DROID.metadata()
    assert announced["image_resolution"] == [224, 224]
    assert announced["n_external_cameras"] == 1
    assert announced["needs_wrist_camera"] is True
    assert announced["needs_stereo_camera"] is False
    assert announced["needs_session_id"] is False
    assert announced["action_space"] == "joint_velocity"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("embodiment", "absent"),
        ("embodiment", 7),
        ("observation", []),
        ("texts", "prompt"),
        ("texts", [1]),
        ("action_horizon", 0),
        ("action_horizon", True),
        ("action_dim", 2.0),
        ("rate_hz", "10"),
        ("action_low", None),
        ("n_external_cameras", -1),
        ("image_resolution", [64]),
        ("image_resolution", [-1, 64]),
    ],
)
def test_metadata_that_states_no_contract_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(Faulty) as caught:
        Contract.of(metadata(**{key: value}))
    assert (caught.value.fault.code, caught.value.fault.param) == ("bad_metadata", key)


@pytest.mark.parametrize("field", [{}, {"shape": [2]}, {"dtype": "float32"}, {"shape": [2.5], "dtype": "float32"}, [2]])
def test_metadata_with_half_a_field_is_refused(field: Any) -> None:
    with pytest.raises(Faulty, match=r"."):
        Contract.of(metadata(observation={"observation/state": field}))


# -- compared


def test_a_robot_of_the_same_contract_can_be_driven() -> None:
    assert CONTRACT.differences(CONTRACT) == []


def test_what_a_robot_observes_beyond_what_is_wanted_does_not_matter() -> None:
    robot = replace(CONTRACT, observation=(*CONTRACT.observation, Field("observation/force", (6,), "float32")))
    assert CONTRACT.differences(robot) == []
    assert CONTRACT.differences(replace(robot, texts=("prompt", "language"))) == []


@pytest.mark.parametrize(
    ("other", "word"),
    [
        ({"embodiment": "droid"}, "embodiment"),
        ({"action_dim": 7}, "action_dim"),
        ({"action_high": 2.0}, "action_high"),
        ({"action_low": 0.0}, "action_low"),
        ({"rate_hz": 15.0}, "rate_hz"),
        ({"texts": ()}, "prompt"),
        ({"observation": CONTRACT.observation[:1]}, "the robot has none"),
        (
            {"observation": (CONTRACT.observation[0], Field("observation/state", (3,), "float32"))},
            "not float32 of (3,)",
        ),
        ({"observation": (CONTRACT.observation[0], Field("observation/state", (2,), "uint8"))}, "not uint8 of (2,)"),
    ],
)
def test_each_difference_is_one_sentence(other: dict[str, Any], word: str) -> None:
    (only,) = CONTRACT.differences(replace(CONTRACT, **other))
    assert word in only


# -- held against an observation


def test_a_good_observation_is_given_to_the_policy_without_a_copy() -> None:
    arrays, texts = CONTRACT.checked(observation())
    assert arrays["observation/image"] is IMAGE
    assert arrays["observation/state"] is STATE
    assert texts == {"prompt": "push"}


def test_what_the_policy_does_not_want_is_left_out() -> None:
    arrays, texts = CONTRACT.checked(observation(force=STATE) | {"mood": "good"})
    assert arrays.keys() == {"observation/image", "observation/state"}
    assert texts.keys() == {"prompt"}


@pytest.mark.parametrize(
    "state",
    [
        STATE.astype(np.float64),
        STATE.astype(np.float16),
        STATE.astype(">f4"),
        STATE.astype(">f8"),
        [0.25, 0.75],
        (0.25, 0.75),
    ],
    ids=["float64", "float16", "big-endian", "big-endian float64", "list", "tuple"],
)
def test_numbers_of_any_kind_become_float32(state: Any) -> None:
    arrays, _ = CONTRACT.checked(observation(state=state))
    found = arrays["observation/state"]
    assert found.dtype == np.dtype("f4") and found.dtype.isnative
    assert np.array_equal(found, STATE)


def test_integers_become_float32_too() -> None:
    arrays, _ = CONTRACT.checked(observation(state=np.array([0, 1])))
    assert arrays["observation/state"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    "state",
    [
        None,
        "0.25, 0.75",
        STATE[:1],
        STATE[None],
        np.float32(1),
        np.array([0, np.nan], np.float32),
        np.array([-np.inf, 0], np.float32),
        np.array([0, 1e39]),
        np.array([True, False]),
        np.array(["a", "b"]),
        np.array([0, 1], "M8[s]"),
        [0.25, True],
        [0.25, None],
        [0.25, 10**400],
        [[0.25], [0.75]],
    ],
    ids=repr,
)
def test_a_state_that_is_none_is_refused_by_name(state: Any) -> None:
    assert fault(observation(state=state)) == ("bad_observation", "observation/state")


@pytest.mark.parametrize(
    "image",
    [None, IMAGE[:32], np.moveaxis(IMAGE, 2, 0), IMAGE.astype(np.int8), IMAGE.astype(np.float32), IMAGE.tolist(), b""],
    ids=["none", "half", "channels first", "int8", "floats", "list", "bytes"],
)
def test_an_image_that_is_none_is_refused_by_name(image: Any) -> None:
    assert fault(observation(image=image)) == ("bad_observation", "observation/image")


@pytest.mark.parametrize("prompt", [None, b"push", 7, np.array("push")], ids=repr)
def test_a_prompt_that_is_no_text_is_refused_by_name(prompt: Any) -> None:
    assert fault(observation() | {"prompt": prompt}) == ("bad_observation", "prompt")
