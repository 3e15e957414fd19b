"""What a request asks for in each dialect, and that each dialect's own client understands the answer."""

from typing import Any

import numpy as np
import pytest

from omni_live.protocols.fields import Faulty
from omni_live.protocols.openpi.codec import pack, unpack
from omni_live.protocols.openpi.dialects import Dialect, Infer, Reset, addressee, error, read, reply, reset_reply

STATE = np.array([0.25, 0.75], np.float32)
CHUNK = np.arange(32, dtype=np.float64).reshape(16, 2)
TIMING: dict[str, int | float | bool] = {"infer_ms": 1.5, "batch": 4, "continued": True}
PLAIN = {"observation/state": STATE, "prompt": "push"}

DIALECTS: list[tuple[dict[str, Any], Dialect, Dialect]] = [
    ({}, Dialect.OPENPI, Dialect.OPENPI),
    ({"session_id": "a"}, Dialect.OPENPI, Dialect.OPENPI),
    ({"request_id": 1}, Dialect.OPENPI, Dialect.OPENPI),
    ({"endpoint": "infer"}, Dialect.OPENPI, Dialect.ROBOARENA),
    ({"sampling_params": {"num_inference_steps": 4}}, Dialect.OPENPI, Dialect.VLLM_OMNI),
    ({"sampling_params": None, "endpoint": "infer"}, Dialect.OPENPI, Dialect.VLLM_OMNI),
    ({}, Dialect.VLLM_OMNI, Dialect.VLLM_OMNI),
    ({"endpoint": "infer"}, Dialect.VLLM_OMNI, Dialect.VLLM_OMNI),
]


def infer(request: dict[str, Any] | None = None, dialect: Dialect = Dialect.OPENPI) -> Infer:
    asked = read({**PLAIN, **(request or {})}, dialect)
    assert isinstance(asked, Infer), asked
    return asked


def reset(request: dict[str, Any], dialect: Dialect = Dialect.OPENPI) -> Reset:
    asked = read(request, dialect)
    assert isinstance(asked, Reset), asked
    return asked


def refused(request: dict[str, Any]) -> str | None:
    with pytest.raises(Faulty) as caught:
        read({**PLAIN, **request})
    assert caught.value.fault.code == "bad_request"
    return caught.value.fault.param


# -- requests


def test_a_bare_observation_asks_for_a_chunk_and_says_nothing_else() -> None:
    assert infer() == Infer(PLAIN, None, None, None, False, None, False, None, None, Dialect.OPENPI)


def test_everything_that_a_request_can_say_is_read_and_leaves_the_observation() -> None:
    said = {
        "session_id": "robot 1",
        "request_id": "r1",
        "seed": 7,
        "deterministic": True,
        "deadline_ms": 80,
        "latest": True,
        "executed_steps": 4,
        "delay_steps": 2,
        "endpoint": "infer",
        "reset": False,
    }
    assert infer(said) == Infer(PLAIN, "robot 1", "r1", 7, True, 80.0, True, 4, 2, Dialect.ROBOARENA)


@pytest.mark.parametrize(("said", "default", "dialect"), DIALECTS)
def test_a_request_is_taken_in_its_dialect(said: dict[str, Any], default: Dialect, dialect: Dialect) -> None:
    assert infer(said, default).dialect is dialect


def test_numpys_numbers_count_as_numbers() -> None:
    asked = infer(
        {"seed": np.int64(7), "latest": np.bool_(True), "deadline_ms": np.float32(0.5), "env_id": np.uint8(3)}
    )
    assert (asked.seed, asked.latest, asked.deadline_ms, asked.session) == (7, True, 0.5, "3")
    assert type(asked.seed) is int and type(asked.deadline_ms) is float


@pytest.mark.parametrize(
    ("said", "session"),
    [
        ({}, None),
        ({"session_id": None}, None),
        ({"session_id": ""}, None),
        ({"session_id": "a"}, "a"),
        ({"session_id": 12}, "12"),
        ({"session_id": np.array(["a"])}, "a"),
        ({"session_id": np.array(4)}, "4"),
        ({"env_id": 0}, "0"),
        ({"env_id": "left", "session_id": ""}, "left"),
    ],
)
def test_a_session_is_known_by_the_clients_name_for_it(said: dict[str, Any], session: str | None) -> None:
    assert infer(said).session == session


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("session_id", np.array(["a", "b"])),
        ("session_id", True),
        ("env_id", 0.5),
        ("request_id", False),
        ("seed", 1.0),
        ("deterministic", 1),
        ("deadline_ms", 0),
        ("deadline_ms", True),
        ("deadline_ms", 3_600_001),
        ("executed_steps", -1),
        ("delay_steps", 10_001),
        ("latest", "true"),
        ("sampling_params", 4),
        ("endpoint", "Infer"),
        ("endpoint", np.array(["infer", "reset"])),
        ("reset", True),
        ("reset", ["a"]),
        ("env_ids", [0]),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(name: str, value: Any) -> None:
    assert refused({name: value}) == name


def test_a_session_id_and_an_env_id_together_would_name_two_robots() -> None:
    assert refused({"session_id": "run", "env_id": 0}) == "env_id"


def test_a_reset_may_stand_beside_what_says_whose_it_is() -> None:
    assert reset({"reset": True, "session_id": "a", "request_id": 5}) == Reset(("a",), 5, Dialect.OPENPI)


# -- replies


@pytest.mark.parametrize("said", [{}, {"request_id": 7}, {"endpoint": "infer", "request_id": "r"}])
def test_a_chunk_goes_out_as_a_map_with_its_timing(said: dict[str, Any]) -> None:
    found: Any = unpack(reply(infer(said), CHUNK, TIMING))
    assert found.keys() == {"actions", "server_timing", *(["request_id"] if "request_id" in said else [])}
    assert found["actions"].dtype == np.float32 and np.array_equal(found["actions"], CHUNK)
    assert found["server_timing"] == TIMING
    assert {type(value) for value in found["server_timing"].values()} <= {int, float, bool}
    assert found.get("request_id") == said.get("request_id")


@pytest.mark.parametrize(("said", "dialect"), [({"endpoint": "infer"}, Dialect.OPENPI), ({}, Dialect.VLLM_OMNI)])
def test_a_chunk_goes_out_bare_where_the_client_expects_an_array(said: dict[str, Any], dialect: Dialect) -> None:
    found: Any = unpack(reply(infer(said, dialect), CHUNK, TIMING))
    assert found.dtype == np.float32 and np.array_equal(found, CHUNK)


def test_a_state_goes_out_where_the_door_has_one() -> None:
    found: Any = unpack(reply(infer(), CHUNK, {}, state=STATE))
    assert np.array_equal(found["state"], STATE)
    assert found["server_timing"] == {}


def test_roboarena_hears_of_a_reset_in_its_own_words() -> None:
    assert reset_reply(reset({"endpoint": "reset"})) == "reset successful"


@pytest.mark.parametrize("dialect", [Dialect.OPENPI, Dialect.VLLM_OMNI])
def test_the_others_hear_of_a_reset_in_a_map(dialect: Dialect) -> None:
    told = reset_reply(Reset(None, None, dialect))
    assert isinstance(told, bytes)
    assert unpack(told) == {"status": "reset successful"}


@pytest.mark.parametrize("dialect", Dialect)
def test_a_reset_with_an_id_is_answered_with_it(dialect: Dialect) -> None:
    told = reset_reply(Reset(None, "r1", dialect))
    assert isinstance(told, bytes)
    assert unpack(told) == {"status": "reset successful", "request_id": "r1"}


@pytest.mark.parametrize("dialect", [Dialect.OPENPI, Dialect.ROBOARENA])
def test_an_error_is_one_line_of_text(dialect: Dialect) -> None:
    assert error(dialect, "bad_frame", "It broke.\n  Badly.") == "bad_frame: It broke. Badly."


def test_vllm_omnis_errors_are_maps() -> None:
    told = error(Dialect.VLLM_OMNI, "bad_frame", "It broke.")
    assert isinstance(told, bytes)
    assert unpack(told) == {"type": "error", "message": "It broke.", "code": "bad_frame"}


@pytest.mark.parametrize("dialect", Dialect)
def test_an_error_about_a_request_with_an_id_repeats_it(dialect: Dialect) -> None:
    told = error(dialect, "bad_frame", "It broke.", request_id=0)
    assert isinstance(told, bytes)
    found: Any = unpack(told)
    assert (found["error"], found["request_id"]) == ({"code": "bad_frame", "message": "It broke."}, 0)
    assert (found.get("type") == "error") == (dialect is Dialect.VLLM_OMNI)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"request_id": 4, "seed": -1}, (Dialect.OPENPI, 4)),
        ({"request_id": "r", "endpoint": "train"}, (Dialect.ROBOARENA, "r")),
        ({"request_id": [1], "sampling_params": {}}, (Dialect.VLLM_OMNI, None)),
        ([1], (Dialect.OPENPI, None)),
    ],
)
def test_an_error_about_an_unreadable_request_still_finds_its_way(request_: Any, expected: Any) -> None:
    assert addressee(request_) == expected


# -- openpi-client itself


class Served:
    """What openpi-client's policy is without its socket."""

    def __init__(self, official: Any, answer: bytes) -> None:
        self._official = official
        self._answer = answer

    def infer(self, _observation: dict[str, Any]) -> Any:
        return self._official.unpackb(self._answer)


def test_openpi_clients_chunk_broker_takes_our_reply_apart() -> None:
    broker = pytest.importorskip("openpi_client.action_chunk_broker", reason="openpi-client or dm-tree is missing")
    official = pytest.importorskip("openpi_client.msgpack_numpy", reason="openpi-client is not installed")
    chunks = broker.ActionChunkBroker(Served(official, reply(infer(), CHUNK, TIMING)), action_horizon=len(CHUNK))
    for row in CHUNK:
        found = chunks.infer(PLAIN)
        assert np.array_equal(found["actions"], row)
        assert found["server_timing"] == TIMING


def test_what_openpi_client_sends_asks_for_a_chunk() -> None:
    official = pytest.importorskip("openpi_client.msgpack_numpy", reason="openpi-client is not installed")
    asked = read(unpack(official.packb(PLAIN)))
    assert isinstance(asked, Infer)
    assert np.array_equal(asked.observation["observation/state"], STATE)  # type: ignore[arg-type]
    assert pack(asked.observation) == official.packb(PLAIN)


def test_an_array_of_names_to_reset_is_measured_before_it_is_read() -> None:
    with pytest.raises(Faulty):
        read({"reset": np.zeros(50_000_000, np.uint8)})
