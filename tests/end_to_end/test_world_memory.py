"""What rollouts take: flat over thousands of frames, all of it back when they close, and never more than there is."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.served import Served, served, wait_until
from tests.end_to_end.world_talk import Talk, moves, talking, warm

SESSION_BYTES = 22 * 1024
"""What admission counts for a rollout; see the world in pipelines/registry.py."""
ROOM = 8
DEPLOY = f"""\
pipelines: {{world: {{stages: {{dynamics: {{options: {{pool_bytes: {ROOM * SESSION_BYTES}}}}}}}}}}}
limits: {{wait_queue: 0}}
"""
FLAT_BYTES = 3 << 20
"""Growth that still is none, in a process: allocators round up. A frame kept is 12 KiB in the server."""
RINGS_BYTES = 3 * (16 << 20) + 4 * 4096
"""The shared memory that the server maps: what both stages send it goes through it round and round, and so do pictures
to begin from. A page of each is its head."""
KEPT = 256 + 64 + 2
"""Latents kept of a rollout at most, each in 64 bytes of a page of 8."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("memory"), DEPLOY) as running:
        warm(running)
        yield running


@pytest.fixture(autouse=True)
def at_rest(server: Served) -> Iterator[None]:
    yield
    server.assert_at_rest()


def memory(server: Served, kind: str) -> dict[str, int]:
    """Bytes of resident memory by process; `kind` is RssAnon or RssShmem, see proc(5)."""
    pids = {"server": server.pid} | {title: pid for title, (pid,) in server.workers().items()}
    return {name: _status(pid, kind) for name, pid in pids.items()}


def _status(pid: int, kind: str) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(f"{kind}:")]
    return int(line.split()[1]) * 1024


def assert_flat(server: Served, before: dict[str, int]) -> None:
    """Rings of shared memory count when they are first written to, so what they may grow to is what counts of them."""
    assert max(memory(server, "RssShmem").values()) <= RINGS_BYTES
    now = memory(server, "RssAnon")
    assert now.keys() == before.keys(), "no worker was replaced"
    grown = {name: now[name] - was for name, was in before.items()}
    assert max(grown.values()) < FLAT_BYTES, grown


def pool_bytes(server: Served) -> float:
    return server.metric("omni_live_stage_bytes", stage="dynamics")


def play(talk: Talk, session: str, frames: int) -> None:
    """As a client does that acknowledges what it has."""
    for at in range(0, frames, 50):
        assert len(set(talk.step(session, moves(50, variant=at)))) > 10
        talk.send("ack", session_id=session, seq=talk.last_seq[session])


def test_a_rollout_of_2000_frames_takes_what_one_of_300_takes(server: Served) -> None:
    with talking(server) as talk:
        session = talk.open()
        play(talk, session, 300)
        before = memory(server, "RssAnon")
        for _ in range(17):
            play(talk, session, 100)
            assert pool_bytes(server) <= SESSION_BYTES
        assert_flat(server, before)
        kept = pool_bytes(server)
        assert 0.9 * KEPT * 64 <= kept <= SESSION_BYTES, kept
        (done,) = talk.ask("rewind", session_id=session, step=2000 - 256)
        assert done["step"] == 1744
        talk.close(session)


def test_500_rollouts_that_are_opened_forked_and_closed_leave_nothing(server: Served) -> None:
    def cycle(talk: Talk, number: int) -> None:
        session = talk.open(seed=number)
        talk.step(session, moves(2))
        child = talk.fork(session)
        talk.step(child, moves(1, variant=number))
        first, second = (session, child) if number % 2 else (child, session)
        talk.close(first)
        talk.close(second)

    with talking(server) as talk:
        for number in range(50):
            cycle(talk, number)
        before = memory(server, "RssAnon")
        for number in range(500):
            cycle(talk, number)
        wait_until(lambda: not any(server.standing().values()), "something is left")
        assert_flat(server, before)
    assert server.metric("omni_live_sessions") == 0
    assert server.metric("omni_live_slots_taken") == 0
    assert pool_bytes(server) == 0


def test_at_the_cap_a_fork_is_refused_and_its_parent_steps_on(server: Served) -> None:
    with talking(server) as talk:
        parent = talk.open()
        sessions = [parent, *(talk.open(seed=seed) for seed in range(1, ROOM))]
        for at in (0, 120, 240):  # until each takes as much as it ever will
            talk.step_together({session: moves(120, variant=at) for session in sessions})
        assert len(talk.look(parent, 360)) == 1
        for asked in ({}, {"step": 300}, {"count": 64}):
            (refused,) = talk.ask("fork", session_id=parent, **asked)
            assert (refused["type"], refused["code"]) == ("error", "overloaded")
            assert refused["retry_after_s"] > 0
        (turned_away,) = talk.ask("session.open", seed=1)
        assert turned_away["code"] == "overloaded"

        made = [talk.step(session, moves(20, variant=360)) for session in sessions]
        assert all(len(frames) == 20 for frames in made), "everybody has room to go on"
        talk.close(sessions.pop())
        child = talk.fork(parent, step=360)
        assert talk.step(child, moves(20, variant=360)) == made[0], "the place that was given back is the fork's"
        for session in (*sessions, child):
            talk.close(session)


def test_of_several_forks_all_are_made_or_none(server: Served) -> None:
    with talking(server) as talk:
        parent = talk.open()
        frames = talk.step(parent, moves(20))
        for _ in range(3):
            (refused,) = talk.ask("fork", session_id=parent, step=10, count=ROOM)
            assert refused["code"] == "overloaded", "one of them would be one too many"
        asked = talk.send("fork", session_id=parent, step=10, count=ROOM - 1)
        opened = [talk.receive() for _ in range(ROOM - 1)]
        assert {(message["type"], message["request_id"]) for message in opened} == {("session.opened", asked)}
        sessions = [message["session_id"] for message in opened]
        assert len(set(sessions)) == ROOM - 1
        for session in sessions:
            assert talk.step(session, moves(10, variant=10)) == frames[10:]
        talk.rewind(parent, 10)
        assert talk.step(parent, moves(10, variant=10)) == frames[10:]
        for session in (parent, *sessions):
            talk.close(session)
