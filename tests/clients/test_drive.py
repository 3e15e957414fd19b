"""`omni-live drive`: teams of simulated robots on a scripted server, what is told of them, and the exit status."""

import argparse
import asyncio
import builtins
import copy
import io
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from omni_live.cli import drive as command
from omni_live.clients import drive as driving
from omni_live.clients.chunks import Rules
from omni_live.clients.drive import Plan, Progress, Result, drive, report, write_film
from omni_live.clients.envs.table import TableEnv, expert
from omni_live.clients.robot import Episode
from omni_live.clients.robot_link import ContractMismatch, PolicyError
from omni_live.protocols.openpi.dialects import Infer

from .policy_server import No, PolicyServer, policy_server

ROWS = 16


@pytest.fixture
def worlds(monkeypatch) -> dict[bytes, TableEnv]:
    """The tables that robots act on as they were at each observation, by the state that was observed."""
    seen: dict[bytes, TableEnv] = {}

    class Seen(TableEnv):
        def observe(self):
            observation = super().observe()
            kept = TableEnv.__new__(TableEnv)
            vars(kept).update(copy.deepcopy({key: value for key, value in vars(self).items() if key != "_random"}))
            seen[observation["observation/state"].tobytes()] = kept
            return observation

    monkeypatch.setattr(driving, "TableEnv", Seen)
    return seen


def _scripted(worlds: dict[bytes, TableEnv]) -> Callable[[Infer], np.ndarray]:
    """A policy that knows the tables and does what the expert would."""

    def policy_of(asked: Infer) -> np.ndarray:
        state = asked.observation["observation/state"]
        assert isinstance(state, np.ndarray)
        world = copy.copy(worlds[state.tobytes()])
        world._discs = list(world._discs)
        actions = []
        for _ in range(ROWS):
            actions.append(expert(world))
            world.step(actions[-1])
        return np.stack(actions)

    return policy_of


@pytest.mark.parametrize("rules", [Rules(4), Rules(8, overlaps=True, continues=True)])
async def test_a_team_is_driven_each_robot_in_a_session_of_its_own(worlds, rules: Rules) -> None:
    async with policy_server() as server:
        server.policy = _scripted(worlds)
        result = await drive(Plan(server.url, robots=3, episodes=2, rules=rules, seed=5))
    assert result.success == 1
    assert len(result.episodes) == 6
    assert len({asked.session for asked in server.requests}) == 3
    assert len(server.sockets) == 3
    assert len(server.resets) == 6
    figures = result.figures()
    assert figures["chunks"] == sum(len(episode.rtts_ms) for episode in result.episodes)
    assert figures["holds"] == 0
    assert figures["rtt_p50_ms"] <= figures["rtt_p99_ms"]


async def test_a_full_server_is_waited_for(worlds, hasty_clock) -> None:
    async with policy_server() as server:
        scripted = _scripted(worlds)
        server.policy = lambda asked: No("overloaded") if len(server.requests) < 3 else scripted(asked)
        result = await drive(Plan(server.url, episodes=1), clock=hasty_clock)
    assert result.success == 1
    assert result.episodes[0].holds == 0
    assert 1_000_000_000 in hasty_clock.slept


async def test_an_episode_whose_session_is_lost_counts_as_failed_and_the_next_one_is_driven(worlds) -> None:
    async with policy_server() as server:
        scripted = _scripted(worlds)
        server.policy = lambda asked: No("session_expired") if len(server.requests) == 2 else scripted(asked)
        result = await drive(Plan(server.url, episodes=2))
    assert [(episode.ended, episode.success) for episode in result.episodes] == [("session_expired", False), ("", True)]


async def test_one_robots_trouble_is_raised_as_it_is() -> None:
    async with policy_server() as server:
        server.policy = lambda _: No("bad_observation", "The image is upside down.")
        with pytest.raises(PolicyError, match="upside down"):
            await drive(Plan(server.url, robots=3, episodes=2))
        server.metadata = {**server.metadata, "action_dim": 7}
        with pytest.raises(ContractMismatch, match="action_dim"):
            await drive(Plan(server.url, robots=2))


async def test_the_first_robots_first_episodes_are_filmed(worlds, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow writes the film")
    async with policy_server() as server:
        server.policy = _scripted(worlds)
        result = await drive(Plan(server.url, robots=2, episodes=1, films=True, seed=5))
    write_film(result.film, tmp_path / "out" / "film.gif")
    with image.open(tmp_path / "out" / "film.gif") as film:
        assert film.size == (256, 256)
        assert film.n_frames > 5
    filmed = min(len(result.film), 1 + max(episode.steps for episode in result.episodes))
    assert len(result.film) == filmed


def test_the_report_says_what_went_wrong_only_where_something_did() -> None:
    good = Result([Episode(success=True, steps=40, chunks=10, rtts_ms=[1.0] * 10, batches=[2] * 10)], wall_s=2.0)
    assert report(good).splitlines() == [
        "success   100% of 1 episodes",
        "steps     40 in 2.0 s",
        "chunks    10, 5 a second",
        "answers   1 ms at the median, 1 ms at 99 %",
        "batches   2.0 robots on average",
        "late      0 steps, 0 chunks",
    ]
    bad = Result([Episode(holds=3, unsafe_chunks=1, failures=2, ended="session_expired")], drops=2, resumes=1)
    assert "held      3 steps, 1 unsafe chunks" in report(bad)
    assert "failed    2 requests, 1 episodes broken off" in report(bad)
    assert "lost      2 sockets, 1 of them back" in report(bad)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_fills_on_a_terminal_and_nothing_is_shown_elsewhere() -> None:
    terminal, file = Terminal(), io.StringIO()
    for out in (terminal, file):
        bar = Progress(2, out)
        bar.step(Episode(success=True))
        bar.close()
    assert "[############............] 1 of 2 episodes, 1 done well" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\033[K")
    assert not file.getvalue()


# -- the command


@pytest.fixture
def serving(worlds) -> Iterator[PolicyServer]:
    """A server on a loop of its own, since the command has one, too."""
    started, stop, held = threading.Event(), asyncio.Event(), []

    async def serve() -> None:
        async with policy_server() as server:
            server.policy = _scripted(worlds)
            held.extend((server, asyncio.get_running_loop()))
            started.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(20)
    server, loop = held
    yield server
    loop.call_soon_threadsafe(stop.set)
    thread.join(20)


def _run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


def test_the_command_drives_and_prints_one_object(serving: PolicyServer, capsys) -> None:
    assert _run("--url", serving.url, "--robots", "2", "--episodes", "1", "--json", "--min-success", "1") == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["episodes"], figures["success"]) == (2, 1.0)


def test_the_command_fails_below_the_success_that_is_asked_for(serving: PolicyServer, capsys) -> None:
    serving.policy = lambda _: np.zeros((16, 2), np.float32)
    words = ("--url", serving.url, "--episodes", "1", "--max-steps", "8", "--api-key", "k")
    assert _run(*words) == 0
    assert _run(*words, "--min-success", "0.5") == 1
    assert "success 0% is below 50%" in capsys.readouterr().err
    assert serving.headers == ["Api-Key k"] * 2


def test_the_command_says_that_a_server_states_no_contract(serving: PolicyServer, capsys) -> None:
    serving.metadata, serving.plain = {}, True
    assert _run("--url", serving.url, "--episodes", "1", "--max-steps", "4") == 0
    assert "states no contract" in capsys.readouterr().err


def test_the_command_says_in_a_sentence_what_is_wrong(serving: PolicyServer, capsys, monkeypatch) -> None:
    serving.http_status = 401
    assert _run("--url", serving.url) == 1
    assert capsys.readouterr().err == ("omni-live drive: invalid_api_key: the server answers with HTTP status 401\n")
    import_ = builtins.__import__

    def without_pillow(name: str, *rest: object) -> object:
        if name.startswith("PIL"):
            raise ModuleNotFoundError(name)
        return import_(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_pillow)
    assert _run("--url", serving.url, "--render", "film.gif") == 1
    assert "--render needs Pillow: pip install pillow" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "rules", "rate_hz"),
    [
        ((), Rules(4), 0.0),
        (("--execute", "8", "--rate", "20"), Rules(8), 20.0),
        (("--async",), Rules(4, overlaps=True), 10.0),
        (("--rtc", "--rate", "0"), Rules(4, overlaps=True, continues=True), 0.0),
    ],
)
def test_the_options_say_how_chunks_are_executed(words: tuple[str, ...], rules: Rules, rate_hz: float) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    plan = command._plan(parser.parse_args(words))
    assert (plan.rules, plan.rate_hz) == (rules, rate_hz)


@pytest.mark.parametrize("words", [("--robots", "0"), ("--rate", "-1"), ("--rate", "fast"), ("--execute", "x")])
def test_options_that_make_no_sense_are_refused(words: tuple[str, ...], capsys) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(words)
