"""Robots on a real server: no chunk of another robot, none of an older episode, whatever happens at the same time."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import websockets

from omni_live.pipelines.robot.fake import prompt_tag
from omni_live.protocols.openpi import codec

from .served import Served, served, wait_until

DEPLOY = """\
limits: {detach_grace_s: 1}
pipelines:
  fake-robot: {stages: {policy: {replicas: 2, options: {nan_on: 666}}}}
  slow-fake-robot: {stages: {policy: {options: {delay_ms: 100}}}}
"""
ROBOTS = 16
STEPS = 10_000
EXECUTE = 4
IMAGE = np.zeros((224, 224, 3), np.uint8)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("robots"), DEPLOY) as server:
        asyncio.run(warmed(server))
        server.settle()
        yield server


@pytest.fixture
def robots(shared: Served) -> Iterator[Served]:
    yield shared
    shared.assert_at_rest()


@dataclass
class Robot:
    """A client whose observations are all different, and whose chunks tell which one they were made of."""

    socket: websockets.ClientConnection
    number: int
    count: int = 0
    episode: int = 0
    asked: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Request id -> episode, observation."""

    def observation(self, **more: Any) -> dict[str, Any]:
        self.count += 1
        state = np.zeros(32, np.float32)
        state[0], state[1] = self.number, self.count
        return {
            "observation/image": IMAGE,
            "observation/wrist_image": IMAGE,
            "observation/state": state,
            "prompt": f"task of robot {self.number} in episode {self.episode}",
            **more,
        }

    async def send(self, **more: Any) -> None:
        seen = self.observation(request_id=self.count + 1, **more)
        self.asked[self.count] = (self.episode, self.count)
        await self.socket.send(codec.pack(seen))

    async def reset(self) -> None:
        self.episode += 1
        self.count += 1
        await self.socket.send(codec.pack({"reset": True, "request_id": self.count}))

    async def read(self) -> Any:
        frame = await self.socket.recv()
        assert isinstance(frame, bytes), frame
        return codec.unpack(frame)


@asynccontextmanager
async def connected(server: Served, number: int, path: str = "/openpi") -> AsyncIterator[Robot]:
    url = f"ws://127.0.0.1:{server.port}{path}"
    async with websockets.connect(url, compression=None, max_size=None) as socket:
        await socket.recv()
        yield Robot(socket, number)


async def warmed(server: Served) -> None:
    """Every replica has served somebody, and has the shared memory for it."""
    for path in ("/openpi/fake-robot", "/openpi/slow-fake-robot"):
        async with connected(server, 1, path) as one, connected(server, 2, path) as two:
            for robot in (one, two):
                await robot.send()
                await robot.read()
    wait_until(lambda: not any(server.standing().values()), "the server does not come to rest")


async def live(server: Served, number: int, steps: int) -> int:
    """Some thousand control steps of one robot with resets at random moments, most of them while a chunk is under way;
    how many chunks it was denied because of one."""
    chance = random.Random(number)
    denied = 0
    async with connected(server, number) as robot:
        while steps > 0:
            await robot.send()
            sent = robot.count
            if chance.random() < 0.1:
                if chance.random() < 0.5:
                    await asyncio.sleep(chance.random() * 0.003)
                await robot.reset()
            waits = {sent, robot.count}
            while waits:
                reply = await robot.read()
                waits.discard(reply["request_id"])
                if "actions" in reply:
                    episode, observed = robot.asked.pop(reply["request_id"])
                    check(reply["actions"], robot, episode, observed)
                    # A chunk of before the reset may have been sent before the reset was heard, never after it.
                    assert episode == robot.episode or robot.count in waits, "a chunk of an older episode came (G1)"
                    steps -= EXECUTE
                elif "error" in reply:
                    assert reply["error"]["code"] == "reset", reply
                    denied += 1
    return denied


def check(actions: Any, robot: Robot, episode: int, observed: int) -> None:
    for row in actions[:EXECUTE]:
        assert (row[0], row[1]) == (robot.number, observed), "a chunk that was made of another observation (G6)"
        assert row[5] == prompt_tag(f"task of robot {robot.number} in episode {episode}")


async def test_G6_no_robot_ever_gets_a_chunk_of_another_one_or_of_an_older_episode(robots: Served) -> None:
    async with asyncio.timeout(240), asyncio.TaskGroup() as group:
        tasks = [group.create_task(live(robots, number, STEPS // ROBOTS)) for number in range(1, ROBOTS + 1)]
    assert sum(task.result() for task in tasks) > 20, "hardly any reset met a chunk under way"


async def test_robots_with_names_share_a_socket_and_nothing_else(robots: Served) -> None:
    async with asyncio.timeout(60), connected(robots, 1) as robot:
        for turn in range(20):
            for number in (1, 2, 3):
                robot.number = number
                await robot.send(session_id=f"arm {number}")
            for number in (1, 2, 3):
                reply = await robot.read()
                state = reply["actions"][0]
                assert 3 * turn < state[1] <= 3 * turn + 3
                assert (state[1] - 1) % 3 + 1 == state[0]
                assert number


async def test_a_bad_action_costs_its_robot_one_chunk_and_its_neighbours_nothing(robots: Served) -> None:
    async with asyncio.timeout(60), connected(robots, 666) as bad, connected(robots, 2) as good:
        for _ in range(5):
            await bad.send()
            await good.send()
            assert (await bad.read())["error"]["code"] == "action_not_finite"
            assert (await good.read())["actions"][0, 0] == 2


async def test_G9_a_killed_policy_process_costs_its_robots_a_chunk_at_most(robots: Served) -> None:
    import os
    import signal

    async with asyncio.timeout(60), connected(robots, 1) as one, connected(robots, 2) as two:
        for robot in (one, two):
            await robot.send()
            await robot.read()
        victim = robots.workers()["omni:policy"][0]
        os.kill(victim, signal.SIGKILL)
        lost = 0
        for _ in range(50):
            for robot in (one, two):
                await robot.send()
                reply = await robot.read()
                if "error" in reply:
                    lost += 1
                    assert reply["error"]["code"] in ("replica_lost", "replica_unavailable"), reply
                else:
                    assert reply["actions"][0, 0] == robot.number
        assert lost <= 2
    wait_until(robots.is_ready, "the server is not ready again")


async def test_a_slow_policy_holds_nobody_up(robots: Served) -> None:
    """Forty slow requests that were there first, four seconds of work, and fifty fast ones."""
    async with (
        asyncio.timeout(60),
        connected(robots, 1, "/openpi/slow-fake-robot") as slow,
        connected(robots, 2) as fast,
    ):
        for _ in range(40):
            await slow.send()

        async def hear() -> None:
            while slow.asked:
                slow.asked.pop((await slow.read())["request_id"])

        async with asyncio.TaskGroup() as group:
            group.create_task(hear())
            for _ in range(50):
                await fast.send()
                assert (await fast.read())["actions"][0, 0] == 2
            assert slow.asked, "the fast robot waited for the slow one"
