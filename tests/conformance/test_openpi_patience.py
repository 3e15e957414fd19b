"""Slow policies, paused robots, keys, and a port of its own, with the official client and times made short."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import websockets.exceptions
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


def test_openpis_own_port_takes_every_path_and_asks_for_the_key_as_openpi_sends_it(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    deploy = "server: {api_keys: {team: a-long-secret}}\npipelines: {fake-robot: }\n"
    with served(tmp_path, deploy, "--openpi-port", str(port)) as server:
        for host, its_port in (("127.0.0.1", port), (f"ws://127.0.0.1:{port}/some/path", None)):
            policy = WebsocketClientPolicy(host, its_port, api_key="a-long-secret")
            assert policy.infer(observation())["actions"].shape == (50, 32)
            policy._ws.close()
        for key in (None, "another"):
            with pytest.raises(websockets.exceptions.InvalidStatus) as refused:
                WebsocketClientPolicy("127.0.0.1", port, api_key=key)
            assert refused.value.response.status_code == 401
        assert "a-long-secret" not in server.log()
