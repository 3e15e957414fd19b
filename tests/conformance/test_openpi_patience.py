"""Slow policies and paused robots, with the official client and times made short."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from openpi_client.websocket_client_policy import WebsocketClientPolicy

from tests.end_to_end.served import Served, served, wait_until

pytestmark = pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")

DEPLOY = """\
limits: {ping_s: 0.1, ping_timeout_s: 0.3, write_deadline_s: 0.5, idle_lease_s: 3, detach_grace_s: 0.2}
pipelines:
  slow-fake-robot: {stages: {policy: {options: {delay_ms: 2000}}}}
  fake-robot:
"""


@pytest.fixture(scope="module")
def robots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("patience"), DEPLOY) as server:
        yield server


def observation(**more: Any) -> dict[str, Any]:
    image = np.zeros((224, 224, 3), np.uint8)
    return {
        "observation/image": image,
        "observation/wrist_image": image,
        "observation/state": np.zeros(32, np.float32),
        "prompt": "wait",
        **more,
    }


def test_an_inference_of_many_ping_timeouts_kills_no_connection(robots: Served) -> None:
    policy = WebsocketClientPolicy(f"ws://127.0.0.1:{robots.port}/openpi/slow-fake-robot")
    reply = policy.infer(observation())
    assert reply["server_timing"]["infer_ms"] >= 2000 > 6 * 300
    assert policy.infer(observation())["actions"].shape == (50, 32)
    policy._ws.close()


def test_a_paused_robot_keeps_its_session_for_the_idle_lease_and_is_told_when_that_is_over(robots: Served) -> None:
    policy = WebsocketClientPolicy(f"ws://127.0.0.1:{robots.port}/openpi/fake-robot")
    policy.infer(observation())
    time.sleep(1)  # of the lease's 3 s, and three times the ping timeout
    reply = policy.infer(observation(executed_steps=4, delay_steps=0))
    assert reply["server_timing"]["continued"] is True
    wait_until(lambda: not robots.metric("omni_live_sessions", pipeline="fake-robot"), "the lease does not lapse")
    with pytest.raises(RuntimeError, match="session_expired"):
        policy.infer(observation())
    again = policy.infer(observation(executed_steps=4, delay_steps=0))
    assert again["server_timing"]["continued"] is False
    policy._ws.close()
