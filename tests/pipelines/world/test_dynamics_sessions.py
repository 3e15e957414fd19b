"""What a session of the dynamics engine is worth: forks, snapshots, and memory that ends."""

from dataclasses import replace

import numpy as np
import pytest

from omni_live.engines.contract import SessionError
from omni_live.engines.pages import PagePool, Pages, record_bytes
from omni_live.pipelines.registry import WORLD
from omni_live.pipelines.world.dynamics import MIB, PAGE_RECORDS, UNDELIVERED
from omni_live.pipelines.world.fake import FakeWorld
from omni_live.pipelines.world.table_world import TableWorld
from omni_live.protocols.arrays import Array, array, pack
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.stamp import SessionKey, session_key
from tests.pipelines.world.test_dynamics import PAGE, STEPS, Bench, failed, frames


def key(number: int) -> SessionKey:
    return session_key(number, 1)


def fork(bench: Bench, number: int, into: int) -> None:
    bench.engine.fork(key(number), key(into))


def used(bench: Bench) -> int:
    return bench.engine.load_now().bytes_used


@pytest.fixture
def bench() -> Bench:
    return Bench()


# -- forks


def test_a_fork_goes_on_as_its_parent_would_have(bench: Bench) -> None:
    bench.open(0, 4)
    bench.open(1, 4)
    bench.rolled(0, 1, 7)
    bench.rolled(1, 1, 7)
    fork(bench, 0, 2)
    wanted = bench.rolled(1, 8, 5)
    assert bench.rolled(2, 8, 5) == wanted
    assert bench.rolled(0, 8, 5) == wanted


def test_parent_and_fork_go_their_own_ways(bench: Bench) -> None:
    bench.open(0)
    made = bench.rolled(0, 1, 3)
    fork(bench, 0, 1)
    theirs, ours = bench.rolled(1, 4, 2, pace=-0.5), bench.rolled(0, 4, 2)
    assert theirs != ours
    assert [frames(bench.look(1, step=step), step)[0] for step in (2, 3, 4)] == [*made[1:], theirs[0]]
    assert [frames(bench.look(0, step=step), step)[0] for step in (2, 3, 4)] == [*made[1:], ours[0]]


def test_a_fork_can_go_back_to_where_it_should_begin(bench: Bench) -> None:
    bench.open(0)
    made = bench.rolled(0, 1, 6)
    fork(bench, 0, 1)
    assert bench.tell(1, "cut", step=2) == ("at", 2)
    assert bench.rolled(1, 3, 4) == made[2:]
    assert frames(bench.look(0), 6) == [made[5]]


def test_a_fork_in_the_middle_of_a_frame_has_the_frames_before_it(bench: Bench) -> None:
    bench.open(0)
    turn = bench.roll(0, 1, 3)
    for _ in range(STEPS + 2):
        bench.step()
    fork(bench, 0, 1)
    bench.run()
    assert bench.rolled(1, 2, 2) == frames(turn, 1)[1:]


def test_a_fork_outlives_its_parent(bench: Bench) -> None:
    bench.open(0)
    made = bench.rolled(0, 1, 9)
    fork(bench, 0, 1)
    bench.engine.close(key(0))
    assert bench.tell(1, "rewind", step=1) == ("at", 1)
    assert bench.rolled(1, 2, 8) == made[1:]
    bench.engine.close(key(1))
    assert used(bench) == 0


def test_64_forks_at_step_64_share_its_memory_until_they_diverge(bench: Bench) -> None:
    bench.open(0)
    bench.rolled(0, 1, 64)
    alone = used(bench)
    for at in range(1, 65):
        fork(bench, 0, at)
    assert used(bench) - alone < 0.1 * 64 * alone
    for at in range(1, 65):
        bench.roll(at, 65)
    bench.run()
    assert used(bench) == alone + 64 * PAGE  # each has the page that it writes to for itself
    for at in range(65):
        bench.engine.close(key(at))
    assert used(bench) == 0


# -- snapshots


@pytest.mark.parametrize("length", [0, 1, 5, 400])
def test_a_snapshot_goes_on_in_another_engine_to_the_bit(length: int) -> None:
    bench, elsewhere = Bench(rewind_steps=16), Bench(rewind_steps=16)
    bench.open(0, 11)
    made = bench.rolled(0, 1, length) if length else []
    elsewhere.open(7, 3)
    elsewhere.engine.restore(key(7), bench.engine.snapshot(key(0)))
    assert elsewhere.tell(7, "cut", step=length) == ("at", length)
    assert elsewhere.rolled(7, length + 1, 3) == bench.rolled(0, length + 1, 3)
    back = max(0, length - 13)
    assert elsewhere.tell(7, "rewind", step=back) == ("at", back)
    assert elsewhere.rolled(7, back + 1, length - back or 1)[: length - back] == made[back:]


def test_a_snapshot_reaches_as_far_back_as_a_rewind_and_no_further(bench: Bench) -> None:
    bench = Bench(rewind_steps=16)
    bench.open(0)
    bench.rolled(0, 1, 100)
    snapshot = bench.engine.snapshot(key(0))
    assert array(snapshot, "latents").shape == (17 + FakeWorld.CONTEXT - 1, *FakeWorld.LATENT)
    bench.engine.open(key(1), {})
    bench.engine.restore(key(1), snapshot)
    assert bench.tell(1, "rewind", step=83) == ("refused", "rewind_too_far")
    assert bench.tell(1, "rewind", step=84) == ("at", 84)


def test_a_snapshot_of_a_restored_session_is_the_same(bench: Bench) -> None:
    bench.open(0, 2)
    bench.rolled(0, 1, 300)
    snapshot = bench.engine.snapshot(key(0))
    bench.engine.open(key(1), {})
    bench.engine.restore(key(1), snapshot)
    again = bench.engine.snapshot(key(1))
    assert (again.meta, bytes(again.body)) == (snapshot.meta, bytes(snapshot.body))


def test_a_snapshot_is_worth_what_was_committed_when_it_was_taken(bench: Bench) -> None:
    bench.open(0)
    turn = bench.roll(0, 1, 2)
    for _ in range(STEPS + 1):
        bench.step()
    snapshot = bench.engine.snapshot(key(0))
    bench.run()
    bench.engine.restore(key(0), snapshot)
    assert bench.rolled(0, 2) == frames(turn, 1)[1:]


def test_restoring_stops_what_was_under_way(bench: Bench) -> None:
    bench.open(0)
    snapshot = bench.engine.snapshot(key(0))
    turn = bench.roll(0, 1)
    bench.step()
    bench.engine.restore(key(0), snapshot)
    bench.run()
    assert failed(turn) == "step_out_of_order"


@pytest.mark.parametrize(
    "changed",
    [
        {"world": "fake-world-2"},
        {"seed": -1},
        {"seed": 2**63},
        {"seed": True},
        {"seed": "1"},
        {"first": -1},
        {"first": 1},
        {"position": 4},
        {"position": 2},
        {"position": None},
    ],
)
def test_a_snapshot_that_does_not_fit_is_refused(bench: Bench, changed: dict[str, Scalar]) -> None:
    bench.open(0)
    made = bench.rolled(0, 1, 3)
    snapshot = bench.engine.snapshot(key(0))
    assert dict(snapshot.meta) == {"seed": 0, "position": 3, "first": 0, "world": "fake-world-1"}
    refused(bench, replace(snapshot, meta={**snapshot.meta, **changed}))
    assert frames(bench.look(0), 3) == made[2:]


@pytest.mark.parametrize(
    "latents",
    [
        np.zeros((4, 3, 4, 4)),
        np.zeros((4, 3, 4, 5), np.float32),
        np.zeros((3, 3, 4, 4), np.float32),
        np.full((4, 3, 4, 4), np.inf, np.float32),
    ],
)
def test_latents_that_are_none_are_refused(bench: Bench, latents: Array) -> None:
    bench.open(0)
    bench.rolled(0, 1, 3)
    meta = bench.engine.snapshot(key(0)).meta
    refused(bench, pack("world", meta, latents=latents))
    refused(bench, pack("world", meta, others=latents))
    refused(bench, pack("robot", meta, latents=np.zeros((4, 3, 4, 4), np.float32)))
    bench.rolled(0, 4)


def test_a_snapshot_from_the_middle_needs_the_context_of_its_frame(bench: Bench) -> None:
    bench.open(0)
    meta: dict[str, Scalar] = {"seed": 0, "position": 9, "first": 9, "world": "fake-world-1"}
    refused(bench, pack("world", meta, latents=np.zeros((1, *FakeWorld.LATENT), np.float32)))


def refused(bench: Bench, payload: Payload) -> None:
    before = used(bench)
    with pytest.raises(SessionError, match="bad_snapshot"):
        bench.engine.restore(key(0), payload)
    assert used(bench) == before


def test_a_session_that_forgets_its_past_stands_nowhere_and_holds_nothing(bench: Bench) -> None:
    bench.open(0)
    turn = bench.roll(0, 1, 3)
    bench.step()
    assert bench.tell(0, "clear", step=-1) == ("at", -1)
    assert used(bench) == 0
    bench.run()
    assert failed(turn) in {"not_started", "step_out_of_order"}
    assert bench.tell(0, "cut", step=0) == ("refused", "not_started")
    bench.engine.open(key(1), {})
    assert bench.tell(1, "clear", step=-1) == ("at", -1)


@pytest.mark.parametrize(("kind", "answer"), [("cut", "at"), ("rewind", "at"), ("rewind", "refused")])
def test_an_answer_names_what_it_answers(bench: Bench, kind: str, answer: str) -> None:
    bench.open(0)
    bench.engine.listen(key(0), Payload(kind, {"step": 0 if answer == "at" else 9, "ask": 7}))
    _, found = bench.host.found.pop()
    assert (found.kind, found.meta["ask"]) == (answer, 7)


def test_a_cut_behind_a_restore_that_failed_says_so_and_cuts_nothing(bench: Bench) -> None:
    bench.open(0)
    bench.rolled(0, 1, 5)
    snapshot = bench.engine.snapshot(key(0))
    refused(bench, replace(snapshot, kind="nothing"))
    assert bench.tell(0, "cut", step=3) == ("refused", "bad_snapshot")
    assert bench.tell(0, "cut", step=5) == ("at", 5)  # once is enough: this one is about the past that it has
    refused(bench, replace(snapshot, kind="nothing"))
    bench.engine.restore(key(0), snapshot)
    assert bench.tell(0, "cut", step=3) == ("at", 3)


# -- memory


def test_a_rollout_of_2000_frames_keeps_flat_memory() -> None:
    bench = Bench(rewind_steps=32)
    bench.open(0)
    most = 0
    for step in range(1, 2_001, 50):
        bench.rolled(0, step, 50)
        most = max(most, used(bench))
    kept = 32 + UNDELIVERED + FakeWorld.CONTEXT
    assert most <= (kept // PAGE_RECORDS + 2) * PAGE
    assert used(bench) <= most


def test_500_sessions_that_fork_and_close_leave_nothing(bench: Bench) -> None:
    bench.open(0)
    before = used(bench)
    for _ in range(500):
        fork(bench, 0, 1)
        bench.rolled(1, 1)
        bench.engine.close(key(1))
    load = bench.engine.load_now()
    assert (load.sessions, load.turns, load.bytes_used) == (1, 0, before)
    assert load.bytes_cap == 512 * PAGE


def test_at_the_cap_a_fork_is_refused_and_the_parent_lives() -> None:
    bench = Bench(pool_bytes=2 * PAGE)
    bench.open(0)
    bench.rolled(0, 1, PAGE_RECORDS)
    assert used(bench) == bench.engine.load_now().bytes_cap
    fork(bench, 0, 1)
    fork(bench, 1, 2)
    assert bench.tell(1, "cut", step=PAGE_RECORDS) == bench.tell(2, "cut", step=3) == ("refused", "pool_full")
    with pytest.raises(SessionError, match="not_started"):
        bench.engine.snapshot(key(1))
    bench.rolled(0, PAGE_RECORDS + 1)


def test_admission_counts_a_session_as_what_it_keeps_at_most() -> None:
    pool = PagePool(PAGE_RECORDS * record_bytes(TableWorld.LATENT, np.float32), MIB)
    pages, most = Pages(pool, TableWorld.LATENT, np.float32), 0
    for _ in range(2_000):
        pages.append(np.zeros(TableWorld.LATENT, np.float32))
        most = max(most, pool.used_bytes)
        pages.trim(256 + UNDELIVERED + TableWorld.CONTEXT)
    counted = WORLD.stage("dynamics").bytes_per_session
    assert 0.9 * counted <= most <= counted


def test_a_turn_that_fills_the_pool_keeps_the_frames_it_made() -> None:
    bench, roomy = Bench(pool_bytes=2 * PAGE), Bench()
    bench.open(0)
    roomy.open(0)
    turn = bench.roll(0, 1, 20)
    bench.run()
    assert failed(turn) == "pool_full" and len(turn.sent) == 2 * PAGE_RECORDS - 1
    assert frames(turn, 1) == roomy.rolled(0, 1, 20)[: 2 * PAGE_RECORDS - 1]
    assert bench.tell(0, "rewind", step=14) == ("at", 14)
    assert bench.rolled(0, 15) == frames(turn, 1)[14:]


def test_at_the_cap_a_session_can_begin_anew_on_its_own_pages() -> None:
    bench = Bench(pool_bytes=2 * PAGE)
    bench.open(0)
    bench.rolled(0, 1, 2 * PAGE_RECORDS - 1)
    assert bench.tell(0, "reset", seed=1) == ("at", 0)
    assert used(bench) == PAGE


def test_at_the_cap_a_session_without_pages_of_its_own_is_told_so() -> None:
    bench = Bench(pool_bytes=2 * PAGE)
    bench.open(0)
    fork(bench, 0, 1)
    bench.rolled(0, 1, 1)
    bench.engine.open(key(2), {})
    assert used(bench) == 2 * PAGE
    assert bench.tell(2, "reset") == ("refused", "pool_full")
    bench.engine.close(key(1))
    assert bench.tell(2, "reset") == ("at", 0)


def test_a_snapshot_that_finds_no_room_is_refused_and_takes_none() -> None:
    bench, small = Bench(), Bench(pool_bytes=3 * PAGE)
    bench.open(0)
    bench.rolled(0, 1, 4 * PAGE_RECORDS)
    small.open(0)
    with pytest.raises(SessionError, match="pool_full"):
        small.engine.restore(key(0), bench.engine.snapshot(key(0)))
    assert used(small) == PAGE and small.rolled(0, 1)


def test_shutting_down_gives_everything_back(bench: Bench) -> None:
    bench.open(0)
    turn = bench.roll(0, 1, 2)
    bench.step()
    assert (bench.engine.load_now().turns, bench.engine.load_now().queued) == (1, 1)
    bench.engine.shut()
    assert used(bench) == 0 and not bench.step() and turn.ended is None
