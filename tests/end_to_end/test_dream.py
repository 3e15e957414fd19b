"""The world client against a real server with the real model: lost sockets, `omni-live dream`, the planner."""

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from omni_live.clients.world import Link, World, connect
from tests.end_to_end.served import Served, served

ACTIONS = np.random.default_rng(5).uniform(-0.7, 0.7, (48, 2, 2)).astype(np.float32)
DREAM = (sys.executable, "-P", "-m", "omni_live", "dream")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("dream"), "pipelines: {world: }\n") as running:
        running.settle()
        yield running


@pytest.fixture
def exact(tmp_path: Path) -> Iterator[Served]:
    """Here a frame does not depend on what is made beside it."""
    stages = "{dynamics: {options: {deterministic: true}}, decoder: {options: {deterministic: true}}}"
    with served(tmp_path / "exact", f"pipelines: {{world: {{stages: {stages}}}}}\n") as running:
        yield running


@pytest.fixture(autouse=True)
def at_rest(server: Served) -> Iterator[None]:
    yield
    server.assert_at_rest()


def _url(server: Served) -> str:
    return f"ws://127.0.0.1:{server.port}/v1/world"


async def _frames(link: Link, world: World, dropped_at: tuple[int, ...] = ()) -> list[bytes]:
    found = []
    async for frame in world.step(ACTIONS):
        assert frame.image is not None
        found.append(frame.image.tobytes())
        if frame.step in dropped_at:
            link.drop_transport()
    return found


async def test_g9_survival_frames_are_the_same_when_the_socket_is_lost_in_the_middle_of_a_step(server: Served) -> None:
    async with connect(_url(server)) as link:
        undisturbed = await _frames(link, await link.open(seed=3))
    assert len(set(undisturbed)) > 20
    async with connect(_url(server)) as link:
        world = await link.open(seed=3)
        assert await _frames(link, world, (1, 2, 17, 30)) == undisturbed
        assert link.counts.drops == link.counts.resumes
        assert link.counts.drops >= 2  # frames that had come need no socket
        assert world.position == len(ACTIONS)


async def test_a_step_is_made_once_wherever_the_socket_is_lost(server: Served) -> None:
    async with connect(_url(server)) as link:
        world = await link.open(seed=3)
        expected = [frame.image.tobytes() for frame in await world.step(ACTIONS[:40]) if frame.image is not None]
    async with connect(_url(server)) as link:
        world = await link.open(seed=3)
        found: list[bytes] = []
        for start in range(0, 40, 2):
            async with asyncio.TaskGroup() as group:
                stepping = group.create_task(_stepped(world, ACTIONS[start : start + 2]))
                for _ in range(start):  # another moment each time: before it is sent, and after
                    await asyncio.sleep(0)
                link.drop_transport()
            found += stepping.result()
        assert found == expected
        assert world.position == 40


async def _stepped(world: World, actions: np.ndarray) -> list[bytes]:
    return [frame.image.tobytes() for frame in await world.step(actions) if frame.image is not None]


async def test_branches_that_lose_their_socket_together_go_on_together(exact: Served) -> None:
    async with connect(_url(exact)) as link:
        world = await link.open(seed=4)
        await world.step(ACTIONS[:8])
        children = await world.fork(count=4)
        async with asyncio.TaskGroup() as group:
            stepping = [group.create_task(_stepped(child, ACTIONS[8:24])) for child in children]
            await asyncio.sleep(0.02)
            link.drop_transport()
        (first, *others) = [task.result() for task in stepping]
        assert len(first) == 16
        assert all(found == first for found in others)
        blob = await world.snapshot()
        link.drop_transport()
        await children[0].restore(blob)
        assert await _stepped(children[0], ACTIONS[8:24]) == first


async def test_frames_come_raw_compressed_and_as_latents(server: Served) -> None:
    async with connect(_url(server)) as link:
        raw = await _stepped(await link.open(seed=3), ACTIONS[:4])
        packed = await link.open(seed=3, format="png", outputs=("frame", "latent"))
        frames = await packed.step(ACTIONS[:4])
        assert [frame.image.tobytes() for frame in frames if frame.image is not None] == raw
        assert [frame.latent.shape for frame in frames if frame.latent is not None] == [link.facts.contract.latent] * 4
        (lossy,) = await packed.look(4, format="jpeg", outputs=("frame",))
        assert lossy.image is not None
        assert lossy.latent is None
        apart = lossy.image.astype(np.float32) - np.frombuffer(raw[3], np.uint8).reshape(lossy.image.shape)
        assert 0 < np.abs(apart).mean() < 4


def test_omni_live_dream_shows_the_dream_beside_what_truly_happens(server: Served, tmp_path: Path) -> None:
    film = tmp_path / "out.gif"
    command = (*DREAM, "--url", _url(server), "--steps", "64", "--seed", "7", "--render", str(film), "--json")
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert outcome.returncode == 0, outcome.stderr
    figures = json.loads(outcome.stdout)
    assert figures["frames"] == 64
    assert figures["disc_err_px_16"] <= 2
    assert figures["psnr_1"] > 30
    with Image.open(film) as moving:
        assert moving.size == (520, 256)
        assert getattr(moving, "n_frames", 1) > 50  # pictures that are the same are one
        moving.seek(1)
        picture = np.asarray(moving.convert("RGB"), np.float32)
    assert np.abs(picture[:, :256] - picture[:, 264:]).mean() < 3, "both sides begin alike"


class Terminal:
    """`omni-live dream --interactive` on a terminal of its own."""

    def __init__(self, server: Served) -> None:
        self.outer, self._inner = pty.openpty()
        self.before = termios.tcgetattr(self._inner)
        self.shown = b""
        command = (*DREAM, "--url", _url(server), "--seed", "7", "--interactive")
        self.process = subprocess.Popen(
            command, stdin=self._inner, stdout=self._inner, stderr=subprocess.PIPE, start_new_session=True
        )
        self._more = threading.Condition()
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.outer, 65536)
            except OSError:
                return
            with self._more:
                self.shown += data
                self._more.notify_all()

    def press(self, keys: str) -> None:
        os.write(self.outer, keys.encode())

    def until(self, holds: Callable[[], bool]) -> None:
        with self._more:
            assert self._more.wait_for(holds, 60), self.shown[-2000:]

    def ended(self) -> int:
        """Its exit status; the terminal is as it was."""
        _, told = self.process.communicate(timeout=60)
        assert termios.tcgetattr(self._inner) == self.before
        self.until(lambda: self.shown.endswith(b"\033[?25h\033[?1049l"))
        assert not told, told
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._inner)  # nobody has the terminal open any more, which ends the reading
        self._reading.join()
        os.close(self.outer)


@pytest.fixture
def terminal(server: Served) -> Iterator[Terminal]:
    found = Terminal(server)
    yield found
    found.close()


def test_a_game_is_played_with_the_arrow_keys(terminal: Terminal) -> None:
    terminal.until(lambda: b"frame 0, branch 1" in terminal.shown)
    terminal.press("\033[C" * 10)
    terminal.until(lambda: b"frame 10, branch 1" in terminal.shown)
    terminal.press("uf\033[A")
    terminal.until(lambda: b"frame 3, branch 2" in terminal.shown)
    terminal.press("q")
    assert terminal.ended() == 0
    assert terminal.shown.count("▀".encode()) >= 64 * 32


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_game_that_is_ended_leaves_the_terminal_as_it_was(
    terminal: Terminal, number: signal.Signals, status: int
) -> None:
    terminal.until(lambda: b"frame 0, branch 1" in terminal.shown)
    terminal.process.send_signal(number)
    assert terminal.ended() == status


def test_a_planner_drives_the_table_by_dreaming_and_leaves_nothing_behind(server: Served) -> None:
    command = (sys.executable, "-P", "-m", "omni_live", "drive", "--planner", "world", "--url", _url(server))
    command = (*command, "--episodes", "2", "--branches", "24", "--json")
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert outcome.returncode == 0, outcome.stderr
    assert json.loads(outcome.stdout)["success"] >= 0.5
