"""The same seed and actions give the same frames, byte for byte: in a fork, after a rewind, from a snapshot, on another
replica, on another server, after a death, and in company."""

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.end_to_end.served import Served, served, wait_until
from tests.end_to_end.world_talk import Message, Talk, moves, pictures, talking, warm

REPLICAS = """\
limits: {restarts: 100, restart_backoff_ms: 50, restart_backoff_cap_ms: 50, snapshot_frames: 16, rollout_actions: 256}
pipelines: {world: {stages: {dynamics: {replicas: 2}}}}
"""
DETERMINISTIC = """\
pipelines:
  world: {stages: {dynamics: {options: {deterministic: true}}, decoder: {options: {deterministic: true}}}}
"""
MOVES = moves(60)
FRAMES = len(MOVES)
LONG = 150
"""Frames of a step that is cut short: at least 0.3 s of work."""


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("replicas"), REPLICAS) as running:
        warm(running)
        yield running


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Another server, whose deploy file says `deterministic: true`."""
    with served(tmp_path_factory.mktemp("exact"), DETERMINISTIC) as running:
        warm(running)
        yield running


@pytest.fixture(autouse=True)
def at_rest(replicas: Served, exact: Served) -> Iterator[None]:
    yield
    replicas.assert_at_rest()
    exact.assert_at_rest()


@pytest.fixture(scope="module")
def alone(replicas: Served) -> list[bytes]:
    """What comes of seed 3 and MOVES."""
    with talking(replicas) as talk:
        session = talk.open()
        frames = talk.step(session, MOVES)
        talk.close(session)
    assert len(set(frames)) == FRAMES
    return frames


def replica_of(server: Served, work: Callable[[], object]) -> int:
    """The pid of the one dynamics worker that did it."""
    wait_until(
        lambda: server.metric("omni_live_replicas", stage="dynamics", state="ready") == 2, "a replica is missing"
    )
    before = {pid: worked_ns(pid) for pid in server.workers()["omni:dynamics"]}
    work()
    grown = {pid: worked_ns(pid) - was for pid, was in before.items()}
    busy, idle = max(grown, key=grown.__getitem__), min(grown, key=grown.__getitem__)
    assert grown[busy] > 5 * grown[idle], grown
    return busy


def worked_ns(pid: int) -> int:
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def killed(server: Served, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid not in server.workers().get("omni:dynamics", []), "the worker lives on")


def test_the_same_seed_and_actions_give_the_same_frames_however_they_are_asked_for(
    replicas: Served, exact: Served, alone: list[bytes]
) -> None:
    for server in (replicas, exact):
        with talking(server) as talk:
            whole, by_one, other = talk.open(), talk.open(), talk.open(seed=4)
            assert talk.step(whole, MOVES) == alone
            assert [talk.step(by_one, [move])[0] for move in MOVES] == alone
            assert talk.step(other, MOVES) != alone, "another seed is another noise"
            for session in (whole, by_one, other):
                talk.close(session)


def test_forks_and_rewinds_give_the_frames_of_the_rollout_that_was_left_alone(
    replicas: Served, alone: list[bytes]
) -> None:
    with talking(replicas) as talk:
        parent = talk.open()
        talk.step(parent, MOVES[:30])
        children = {at: talk.fork(parent, step=at) for at in (0, 1, 7, 8, 9, 29, 30)}
        talk.step(parent, moves(5, variant=50))  # the parent goes another way
        grandchild = talk.fork(children[9])
        for at, child in children.items():
            assert talk.step(child, MOVES[at:]) == alone[at:], at
        assert talk.step(grandchild, MOVES[9:]) == alone[9:]
        for at in (35, 31, 30, 2, 0):
            talk.rewind(parent, at) if at > 30 else talk.rewind(children[30], at)
        assert talk.step(children[30], MOVES) == alone
        talk.rewind(parent, 30)
        assert talk.step(parent, MOVES[30:]) == alone[30:]
        for session in (parent, grandchild, *children.values()):
            talk.close(session)


def test_a_snapshot_goes_on_to_the_same_bytes_on_another_replica_and_on_another_server(
    replicas: Served, exact: Served, alone: list[bytes]
) -> None:
    with talking(replicas) as talk, talking(exact) as elsewhere:
        one, two = talk.open(), talk.open(seed=9)
        first = replica_of(replicas, lambda: talk.step(one, MOVES[:40]))
        second = replica_of(replicas, lambda: talk.step(two, MOVES))
        assert first != second, "the second session went to the replica that had none"
        blob = talk.snapshot(one)
        assert talk.step(one, MOVES[40:]) == alone[40:]

        assert talk.restore(two, blob) == 40
        frames: list[bytes] = []
        assert replica_of(replicas, lambda: frames.extend(talk.step(two, MOVES[40:]))) == second
        assert frames == alone[40:]
        talk.rewind(two, 3)
        assert talk.step(two, MOVES[3:]) == alone[3:], "what it can be rewound to comes along"

        there = elsewhere.open(seed=1)
        assert elsewhere.restore(there, blob) == 40
        assert elsewhere.step(there, MOVES[40:]) == alone[40:]
        back = elsewhere.snapshot(there)
        assert talk.restore(one, back) == FRAMES
        assert talk.look(one, 41, FRAMES - 40) == alone[40:]
        talk.close(one)
        talk.close(two)
        elsewhere.close(there)


def test_a_replica_killed_between_steps_costs_nothing_but_a_request(replicas: Served, alone: list[bytes]) -> None:
    with talking(replicas) as talk:
        session = talk.open()
        frames: list[bytes] = []
        home = replica_of(replicas, lambda: frames.extend(talk.step(session, MOVES[:40])))
        child = talk.fork(session, step=25)
        killed(replicas, home)
        assert frames + steps_on(talk, session, 41, MOVES[40:]) == alone
        assert steps_on(talk, child, 26, MOVES[25:]) == alone[25:], "a fork is made again by itself"
        talk.rewind(session, 10)
        assert talk.step(session, MOVES[10:]) == alone[10:], "what was before its death can be rewound to"
        talk.close(session)
        talk.close(child)


def test_g9_a_replica_killed_in_mid_step_costs_the_frames_that_were_not_told_of(replicas: Served) -> None:
    """More frames lie behind it than the server keeps actions of, so that it goes on from a snapshot and a journal."""
    actions = moves(300 + LONG)
    with talking(replicas) as talk:
        session, undisturbed = talk.open(seed=5), talk.open(seed=5)
        whole = [frame for at in range(0, len(actions), 90) for frame in talk.step(undisturbed, actions[at : at + 90])]
        talk.close(undisturbed)
        frames: list[bytes] = []

        def play() -> None:
            for at in range(0, 300, 20):
                frames.extend(talk.step(session, actions[at : at + 20]))

        home = replica_of(replicas, play)
        request = talk.send("step", session_id=session, actions=actions[300:])
        made = [until_frame(talk, request) for _ in range(3)]
        os.kill(home, signal.SIGKILL)
        *more, done = talk.until(request)
        made += more
        assert (done["status"], done["reason"]) == ("failed", "replica_lost")
        assert [message["step"] for message in made] == list(range(301, 301 + len(made))), "whole frames, in order"
        assert done["step"] == 300 + len(made) < 300 + LONG
        frames += pictures(made)

        assert talk.look(session, done["step"]) == frames[-1:]
        frames += steps_on(talk, session, done["step"] + 1, actions[done["step"] :])
        assert len(frames) == len(whole)
        assert frames == whole
        talk.close(session)


def test_a_step_repeated_after_a_death_in_mid_step_shows_what_was_made_before(replicas: Served) -> None:
    with talking(replicas) as talk:
        session = talk.open(seed=6)
        home = replica_of(replicas, lambda: talk.step(session, MOVES[:20]))
        request = talk.send("step", session_id=session, actions=moves(LONG, variant=20))
        made = [until_frame(talk, request) for _ in range(2)]
        os.kill(home, signal.SIGKILL)
        *more, done = talk.until(request)
        made += more
        shown = steps_on(talk, session, 21, moves(len(made), variant=20))
        assert shown == pictures(made)
        assert done["step"] == 20 + len(made)
        talk.close(session)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_deterministic_rollouts_give_the_same_bytes_in_any_company(exact: Served, count: int) -> None:
    actions = [moves(30, variant=10 * number) for number in range(count)]
    with talking(exact) as talk:
        golden = []
        for number in range(count):
            session = talk.open(seed=number)
            golden.append(talk.step(session, actions[number]))
            talk.close(session)

        sessions = [talk.open(seed=number) for number in range(count)]
        made, order = talk.step_together(dict(zip(sessions, actions, strict=True)))
        assert list(made.values()) == golden
        assert len(set(map(tuple, golden))) == count, "each is another rollout"
        turns = sum(one != two for one, two in itertools.pairwise(order))
        assert turns >= 10 * (count - 1), "they stepped together"
        for each in sessions:
            talk.close(each)


def until_frame(talk: Talk, request: str) -> Message:
    while (message := talk.receive())["type"] != "frame":
        pass
    assert message["request_id"] == request
    return message


def steps_on(talk: Talk, session: str, step: int, actions: list[list[list[float]]]) -> list[bytes]:
    """Go on from there. The death of a replica may cost the first try, which is made again, and no more than that."""
    for _ in range(2):
        *frames, done = talk.ask("step", session_id=session, actions=actions, step=step)
        if done["status"] == "done":
            return pictures(frames)
        assert done["reason"] == "replica_lost", done
        assert not frames
    raise AssertionError("a death costs one request")
