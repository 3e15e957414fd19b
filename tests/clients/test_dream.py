"""`omni-live dream`: dreams beside the true table, the game, and the terminal it is played on."""

import io
import json
import os
import pty
import termios
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest

from omni_live.cli import main
from omni_live.clients.dream import CannotDream, Plan, Progress, dream, played, random_actions, read_actions, report
from omni_live.clients.dream_game import play
from omni_live.clients.envs.likeness import likeness
from omni_live.clients.envs.table import TableEnv
from omni_live.clients.keyboard import KeyReader, Screen, half_blocks, keys_at_once, pressed
from omni_live.clients.planner import Planner
from omni_live.clients.planner_link import ServedDreams
from omni_live.clients.planning import Search
from omni_live.clients.world import connect

from .fake_world import FakeDoor, fake_door, picture, start


@pytest.fixture
async def door() -> AsyncIterator[FakeDoor]:
    async with fake_door() as running:
        running.side = 64
        yield running


# -- what truly happens


def test_the_expert_pushes_the_table_s_discs_all_the_time() -> None:
    rollout = played(Plan("", steps=64, seed=7))
    assert rollout.actions.shape == (64, 2, 2)
    assert rollout.discs[-1] != rollout.discs[0]
    assert played(Plan("", steps=64, seed=7)).actions.tobytes() == rollout.actions.tobytes()


def test_the_true_table_is_what_the_actions_lead_to() -> None:
    rollout = played(Plan("", steps=5, seed=2, actions="random"))
    table = TableEnv(2)
    for image, actions in zip(rollout.images, rollout.actions, strict=True):
        for action in actions:
            table.step(action)
        assert table.render().tobytes() == image.tobytes()


def test_random_actions_are_of_full_speed_and_fixed_by_their_seed() -> None:
    actions = random_actions(20, np.random.default_rng(1))
    assert actions.shape == (20, 2, 2)
    assert np.allclose(np.linalg.norm(actions, axis=-1), 1)
    assert actions.tobytes() == random_actions(20, np.random.default_rng(1)).tobytes()
    assert len({row.tobytes() for row in actions}) > 3


@pytest.mark.parametrize("kind", ["npy", "npy of frames", "lines", "lines of frames"])
def test_actions_are_read_from_a_file(tmp_path: Path, kind: str) -> None:
    actions = np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 2, 2)
    rows = actions if kind.endswith("frames") else actions.reshape(12, 2)
    path = tmp_path / ("actions.npy" if kind.startswith("npy") else "actions.jsonl")
    if kind.startswith("npy"):
        np.save(path, rows)
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows.tolist()))
    assert np.allclose(read_actions(path), actions)
    assert len(played(Plan("", steps=4, actions=str(path))).images) == 4
    assert len(played(Plan("", steps=9, actions=str(path))).images) == 6


@pytest.mark.parametrize("text", ["", "[1]", "[0.1, 0.2]", "[2, 0]\n[0, 0]", '["a", "b"]', "{}", "[NaN, 0]\n[0, 0]"])
def test_a_file_without_actions_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "actions.jsonl"
    path.write_text(text)
    with pytest.raises(CannotDream):
        read_actions(path)


def test_a_file_of_objects_is_not_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "actions.npy", np.array([{}], object))
    with pytest.raises(CannotDream):
        read_actions(tmp_path / "actions.npy")


# -- how alike


def test_the_true_picture_is_like_itself() -> None:
    table = TableEnv(3)
    found = likeness(table.render(), table.render(), table.discs)
    assert found.psnr_db > 70
    assert max(found.errors_px) < 0.5
    assert not any(found.lost)


def test_a_disc_that_is_dreamt_elsewhere_is_off_by_that_way_and_lost() -> None:
    true, moved = TableEnv(3), TableEnv(3)
    moved._discs[0] = 0.5 + 0.5j if abs(true.discs[0] - (0.5 + 0.5j)) > 0.2 else 0.1 + 0.1j
    found = likeness(true.render(), moved.render(), true.discs)
    assert found.lost[0]
    assert found.errors_px[0] == pytest.approx(64 * abs(moved.discs[0] - true.discs[0]), abs=1.0)


# -- the dream


async def test_a_dream_begins_at_the_true_picture_and_gets_the_true_actions(door: FakeDoor) -> None:
    told = io.StringIO()
    plan = Plan(door.url, steps=20, seed=5, films=True)
    found = await dream(plan, Progress(20, told))
    true = played(plan)
    assert door.asked("session.open")[0]["image"]["data"] == true.first.tobytes()
    assert b"".join(message["actions"]["data"] for message in door.asked("step")) == true.actions.tobytes()
    assert len(found.film) == 21
    assert found.film[20][:, :64].tobytes() == true.images[19].tobytes()
    assert found.film[0].shape == (64, 130, 3)
    assert not told.getvalue(), "no terminal, no bar"
    figures = found.figures()
    assert (figures["frames"], figures["drops"]) == (20, 0)
    assert {"psnr", "disc_err_px", "frames_per_s", "psnr_16", "disc_err_px_16"} <= set(figures)
    assert "frames    20 in" in report(found)
    await door.until(lambda: not door.sessions)


async def test_a_dream_survives_a_lost_socket(door: FakeDoor) -> None:
    door.lose("step", "during", 7)
    found = await dream(Plan(door.url, steps=20))
    assert (found.figures()["frames"], found.drops, found.resumes) == (20, 1, 1)
    assert "lost      1 sockets, 1 of them back" in report(found)


async def test_a_bar_is_shown_on_a_terminal(door: FakeDoor) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    told = Terminal()
    await dream(Plan(door.url, steps=4), Progress(4, told))
    assert "[############............] 2 of 4 frames" in told.getvalue()
    assert told.getvalue().endswith("\r\033[K")


async def test_a_world_that_is_not_the_table_s_is_not_dreamt_in(door: FakeDoor) -> None:
    door.side = 8
    with pytest.raises(CannotDream, match="not the table's"):
        await dream(Plan(door.url, steps=4))


@pytest.mark.parametrize("options", [["--actions", "/no/such/file"], ["--url", "ws://127.0.0.1:1/v1/world"]])
def test_trouble_is_told_in_a_sentence(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dream", *options]) == 1
    assert capsys.readouterr().err.startswith("omni-live dream: ")


def test_a_game_needs_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dream", "--interactive"]) == 1
    assert "needs a terminal" in capsys.readouterr().err


# -- the game


class Shown:
    def __init__(self) -> None:
        self.images: list[bytes] = []
        self.words: list[str] = []

    def show(self, image: np.ndarray, words: str) -> None:
        self.images.append(image.tobytes())
        self.words.append(words)


async def _keys(keys: list[str]) -> AsyncIterator[str]:
    for key in keys:
        yield key


async def test_each_arrow_is_a_frame_and_u_goes_back(door: FakeDoor) -> None:
    shown = Shown()
    async with connect(door.url) as link:
        world = await link.open(seed=3)
        keys = ["right"] * 10 + ["x", "u", "up", "q", "down"]
        assert await play(world, _keys(keys), shown) == ["right"] * 10 + ["u", "up"]
        assert world.position == 3
    assert shown.images[0] == picture(start(3), 64).tobytes()
    assert shown.images[11] == shown.images[2], "the second frame again"
    moves = [np.frombuffer(message["actions"]["data"], np.float32).tolist() for message in door.asked("step")]
    assert moves == [[1, 0, 1, 0]] * 10 + [[0, -1, 0, -1]]
    assert shown.words[-1].startswith("frame 3, branch 1")


async def test_a_fork_goes_on_by_itself_and_p_returns_to_its_parent(door: FakeDoor) -> None:
    shown = Shown()
    async with connect(door.url) as link:
        world = await link.open(seed=3)
        await play(world, _keys(["up", "f", "left", "left", "p", "p", "left"]), shown)
        assert len(door.sessions) == 1
    assert shown.images[3] == shown.images[-1], "from the same place the same move"
    assert "frame 3, branch 2" in shown.words[4]
    assert "frame 1, branch 1" in shown.words[5]


async def test_a_refusal_is_told_and_the_game_goes_on(door: FakeDoor) -> None:
    shown = Shown()
    async with connect(door.url) as link:
        world = await link.open(seed=3)
        door.refusals["fork"] = "overloaded"
        assert await play(world, _keys(["f", "up"]), shown) == ["up"]
    assert "overloaded" in shown.words[1]


# -- the terminal


@pytest.mark.parametrize(
    ("pieces", "keys"),
    [
        (["\033[A\033[B\033[C\033[D"], ["up", "down", "right", "left"]),
        (["\033", "[", "A", "u"], ["up", "u"]),
        (["\033OA"], ["up"]),
        (["\033[1;5C", "q"], ["right", "q"]),
        (["\033[99999999999;", "q"], ["9", "9", "9", "9", "9", ";", "q"]),
        (["\033u"], ["u"]),
        (["\033[200~f"], ["f"]),
    ],
)
def test_keys_are_read_however_they_are_cut(pieces: list[str], keys: list[str]) -> None:
    reader = KeyReader()
    assert [key for piece in pieces for key in reader.feed(piece)] == keys


def test_a_picture_is_drawn_in_half_blocks() -> None:
    image = np.array([[[1, 2, 3], [1, 2, 3]], [[4, 5, 6], [4, 5, 6]]], np.uint8)
    assert half_blocks(image) == "\033[38;2;1;2;3m\033[48;2;4;5;6m▀▀\033[0m\n"


@pytest.fixture
def terminal() -> Iterator[tuple[int, TextIO]]:
    outer, inner = pty.openpty()
    with os.fdopen(inner) as source:
        yield outer, source
    os.close(outer)


async def test_keys_come_from_a_terminal_that_is_restored_whatever_happens(terminal: tuple[int, TextIO]) -> None:
    outer, inner = terminal
    before = termios.tcgetattr(inner.fileno())
    found: list[str] = []

    async def played_until_it_breaks() -> None:
        with keys_at_once(inner):
            assert termios.tcgetattr(inner.fileno()) != before
            os.write(outer, b"\033[Aq")
            async with aclosing(pressed(inner)) as keys:
                async for key in keys:
                    found.append(key)
                    if key == "q":
                        raise KeyError(key)

    with pytest.raises(KeyError):
        await played_until_it_breaks()
    assert found == ["up", "q"]
    assert termios.tcgetattr(inner.fileno()) == before


async def test_keys_end_with_the_terminal() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"ab")
    os.close(writing)
    with os.fdopen(reading) as source:
        assert [key async for key in pressed(source)] == ["a", "b"]


def test_the_screen_is_left_as_it_was() -> None:
    out = io.StringIO()

    def shown_until_it_breaks() -> None:
        with Screen(out) as screen:
            screen.show(np.zeros((2, 2, 3), np.uint8), "words")
            raise KeyError

    with pytest.raises(KeyError):
        shown_until_it_breaks()
    assert out.getvalue().startswith("\033[?1049h\033[?25l")
    assert "words" in out.getvalue()
    assert out.getvalue().endswith("\033[?25h\033[?1049l")


# -- the planner


async def test_a_planner_forks_dreams_and_leaves_nothing_open(door: FakeDoor) -> None:
    async with connect(door.url) as link:
        dreams: Any = ServedDreams(link)
        table = TableEnv(1)
        planner = Planner(dreams, Search(branches=6, frames=4, rounds=2))
        for _ in range(2):
            assert (await planner.decide(table.observe())).shape == (6, 2)
        assert len(door.asked("session.open")) == 1
        assert [message["count"] for message in door.asked("fork")] == [6] * 4
        await dreams.aclose()
        await door.until(lambda: not door.sessions)


async def test_more_branches_than_a_fork_makes_are_forked_in_turns(door: FakeDoor) -> None:
    async with connect(door.url) as link:
        dreams = ServedDreams(link)
        images = await dreams.roll(TableEnv(1).render(), np.zeros((70, 2, 2, 2), np.float32), (2,))
        assert images.shape == (70, 1, 64, 64, 3)
        assert [message["count"] for message in door.asked("fork")] == [64, 6]


def test_options_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--steps", "0"], ["--seed", "-1"], ["--steps", "many"]):
        with pytest.raises(SystemExit):
            main(["dream", *options])
    assert "is not a number" in capsys.readouterr().err
