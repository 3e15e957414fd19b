"""The official openpi-client, unmodified, against `omni-live serve`."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import websockets.exceptions
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy

from omni_live.clients.envs.table import TASKS, TableEnv
from tests.end_to_end.served import Served

# openpi-client calls connect() as websockets up to 16 has it.
pytestmark = pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")

EXECUTE = 4
STEPS = 150
EPISODES = 100


def connected(server: Served, path: str = "/openpi") -> WebsocketClientPolicy:
    return WebsocketClientPolicy(f"ws://127.0.0.1:{server.port}{path}")


def observation(seed: int = 1) -> dict[str, Any]:
    return TableEnv(seed).reset(TASKS[0])


def left(policy: WebsocketClientPolicy) -> None:
    policy._ws.close()  # the client has no other way


def episodes(server: Served, robot: int, count: int) -> list[bool]:
    """Closed loop as an OpenPI user writes it: execute 4 of 16 steps, then ask again."""
    policy = connected(server)
    broker = ActionChunkBroker(policy, EXECUTE)
    env = TableEnv(50_000 + robot)
    done = []
    for number in range(count):
        seen, success = env.reset(TASKS[(robot + number) % len(TASKS)]), False
        broker.reset()
        for step in range(STEPS):
            seen, success = env.step(broker.infer({**seen, "seed": step})["actions"])
            if success:
                break
        done.append(success)
    left(policy)
    return done


def test_the_embedded_policy_succeeds_with_one_client(robots: Served) -> None:
    done = episodes(robots, 100, EPISODES)
    assert sum(done) >= 0.98 * EPISODES, done


def test_eight_clients_at_once_succeed_as_one_does(robots: Served) -> None:
    counts = [EPISODES // 8 + (robot < EPISODES % 8) for robot in range(8)]
    with ThreadPoolExecutor(8) as pool:
        done = [one for all_of in pool.map(lambda job: episodes(robots, *job), enumerate(counts)) for one in all_of]
    assert len(done) == EPISODES
    assert sum(done) >= 0.98 * EPISODES, done


@pytest.mark.parametrize("path", ["", "/", "/openpi", "/openpi/robot", "/v1/realtime/robot/openpi"])
def test_the_metadata_says_what_the_policy_wants_at_every_path(robots: Served, path: str) -> None:
    policy = connected(robots, path)
    metadata = policy.get_server_metadata()
    assert (metadata["action_horizon"], metadata["action_dim"]) == (16, 2)
    assert metadata["observation"]["observation/image"] == {"shape": [64, 64, 3], "dtype": "uint8"}
    left(policy)


def test_a_reply_is_what_the_client_expects(robots: Served) -> None:
    policy = connected(robots)
    first, second = policy.infer(observation()), policy.infer(observation())
    for reply in (first, second):
        assert reply["actions"].shape == (16, 2)
        assert reply["actions"].dtype == np.float32
        assert all(isinstance(value, bool | int | float) for value in reply["server_timing"].values())
        assert {"infer_ms", "queue_ms", "batch", "replica"} <= set(reply["server_timing"])
    assert "prev_total_ms" in second["server_timing"]
    left(policy)


def test_the_same_seed_and_observation_give_the_same_bytes(robots: Served) -> None:
    policy, other = connected(robots), connected(robots)
    asked = {**observation(), "seed": 11}
    first = policy.infer(asked)["actions"]
    assert first.tobytes() == policy.infer(asked)["actions"].tobytes() == other.infer(asked)["actions"].tobytes()
    assert first.tobytes() != policy.infer({**asked, "seed": 12})["actions"].tobytes()
    left(policy)
    left(other)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda seen: seen.pop("prompt"), "prompt"),
        (lambda seen: seen.update({"observation/image": np.zeros((8, 8, 3), np.uint8)}), "observation/image"),
        (lambda seen: seen.update({"observation/state": np.array([np.nan, 0], np.float32)}), "observation/state"),
        (lambda seen: seen.update({"observation/state": "left"}), "observation/state"),
    ],
)
def test_an_error_is_raised_by_the_client_and_the_connection_goes_on(
    robots: Served, wrong: Callable[[dict[str, Any]], object], named: str
) -> None:
    policy = connected(robots)
    seen = observation()
    wrong(seen)
    with pytest.raises(RuntimeError, match=named) as raised:
        policy.infer(seen)
    assert "Traceback" not in str(raised.value)
    assert policy.infer(observation())["actions"].shape == (16, 2)
    left(policy)


def test_float64_states_and_strided_images_are_taken(robots: Served) -> None:
    policy = connected(robots)
    seen = observation()
    seen["observation/state"] = seen["observation/state"].astype(np.float64)
    seen["observation/image"] = np.asfortranarray(seen["observation/image"])
    wide = np.zeros((64, 128, 3), np.uint8)
    wide[:, ::2] = observation()["observation/image"]
    strided = {**seen, "observation/image": wide[:, ::2]}
    plain = policy.infer({**observation(), "seed": 5})["actions"]
    assert policy.infer({**seen, "seed": 5})["actions"].tobytes() == plain.tobytes()
    assert policy.infer({**strided, "seed": 5})["actions"].tobytes() == plain.tobytes()
    left(policy)


def test_a_robot_above_the_cap_is_refused_and_nobody_else_notices(robots: Served) -> None:
    fleet = [connected(robots) for _ in range(24)]
    for policy in fleet:
        policy.infer(observation())
    late = connected(robots)
    with pytest.raises(RuntimeError, match="overloaded"):
        late.infer(observation())
    with pytest.raises(websockets.exceptions.ConnectionClosed) as closed:
        late.infer(observation())
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1013
    for policy in fleet:
        assert policy.infer(observation())["actions"].shape == (16, 2)
        left(policy)


def test_clients_that_connect_and_leave_at_once_leave_nothing(robots: Served) -> None:
    def visit(_: int) -> None:
        policy = connected(robots)
        policy.infer(observation())
        left(policy)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(visit, range(64)))
    assert threading.active_count() < 64
