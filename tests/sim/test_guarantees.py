"""Two thousand schedules of the real session core, orchestrator, pools, admission and outboxes.

They are played once, by processes of their own (`python -m tests.sim --seeds A-B`); each test here reads one guarantee
out of what they said. A failure comes with the command that replays its schedule.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from simscenes import SCENERY, draw

SEEDS = 2000
ROOT = Path(__file__).resolve().parents[2]
PROCESSES = min(2, os.cpu_count() or 1)
PATIENCE_S = 280
"""Well above what the schedules take, and below what a test may."""


@dataclass(frozen=True, slots=True)
class Failure:
    seed: int
    scene: str
    error: str
    replay: str

    def __str__(self) -> str:
        return f"{self.replay}  # {self.scene}: {self.error}"

    @property
    def guarantees(self) -> frozenset[str]:
        """What was broken; empty where the run itself broke down."""
        return frozenset(re.findall(r"\bG\d+\b", self.error.rpartition("(")[2]))


@dataclass(frozen=True, slots=True)
class Report:
    seeds: int
    failures: tuple[Failure, ...]
    counts: Counter[str]

    def keeps(self, guarantee: str, *put_to_the_test: str) -> None:
        """No schedule breaks it, although each of these things happened in some."""
        broken = [str(failure) for failure in self.failures if guarantee in failure.guarantees]
        assert not broken, f"{guarantee} is broken:\n" + "\n".join(broken)
        idle = [name for name in put_to_the_test if not self.counts[name]]
        assert not idle, f"{guarantee} was not put to the test: {idle} never happened"


def simulation(*arguments: str) -> list[str]:
    """The command; the package that it meets is the one that this process meets."""
    where = [str(Path(__file__).with_name("__main__.py"))] if sys.flags.safe_path else ["-m", "tests.sim"]
    return [sys.executable, *where, *arguments]


def read(outputs: Sequence[str]) -> Report:
    failures: list[Failure] = []
    counts: Counter[str] = Counter()
    seeds = 0
    for output in outputs:
        *failed, total = [json.loads(line) for line in output.splitlines()]
        failures += [Failure(**one) for one in failed]
        counts += Counter(total["counts"])
        seeds += total["seeds"]
    return Report(seeds, tuple(sorted(failures, key=lambda failure: failure.seed)), counts)


@pytest.fixture(scope="module")
def report() -> Report:
    share = SEEDS // PROCESSES
    running = [
        subprocess.Popen(
            simulation("--seeds", f"{first}-{first + share - 1}"),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for first in range(0, SEEDS, share)
    ]
    try:
        return read([process.communicate(timeout=PATIENCE_S)[0] for process in running])
    finally:
        for process in running:
            process.kill()


def test_every_schedule_holds_and_none_breaks_down(report: Report) -> None:
    assert report.seeds == SEEDS
    assert not report.failures, "\n".join(map(str, report.failures))


def test_every_kind_of_scene_is_played(report: Report) -> None:
    kinds = {name.removeprefix("scene_") for name in report.counts if name.startswith("scene_")}
    assert len(kinds) > len(SCENERY), f"only {sorted(kinds)}"


def test_g1_no_content_of_a_fenced_turn_reaches_a_client(report: Report) -> None:
    moves = ("sim_restores", "sim_moves")
    report.keeps("G1", "sim_dropped_fenced_content", "voided_frames", "tentative_discarded", *moves)


def test_g2_the_caps_hold_and_are_reached(report: Report) -> None:
    report.keeps("G2", "sim_cap_reached", "sim_left_queue", "sim_queue_lapsed", "sim_refused_overloaded")


def test_g3_what_a_session_took_is_released_once(report: Report) -> None:
    report.keeps("G3", "sim_unavailable", "sim_resumes", "sim_forks", "sim_rollout_forks", "workers_lost")


def test_g4_every_turn_ends_once_and_is_done_only_when_it_is_whole(report: Report) -> None:
    ends = ("sim_turn_done_", "sim_turn_interrupted_client_cancelled", "sim_turn_failed_replica_lost")
    report.keeps("G4", *ends, "sim_response_completed_", "sim_response_cancelled_", "mailbox_full")


def test_g5_nothing_revives_what_is_over(report: Report) -> None:
    report.keeps("G5", "stale_inputs", "stale_outputs", "stale_ends", "stale_findings", "input_after_replace")


def test_g6_sessions_share_nothing_and_poison_ends_its_own_turn(report: Report) -> None:
    report.keeps("G6", "sim_turn_failed_stage_error", "sim_turn_failed_world_error", "sim_forks", "sim_rollout_forks")


def test_g7_streams_have_no_holes_but_the_voids_that_are_named(report: Report) -> None:
    report.keeps("G7", "sim_resumes", "sim_voids_named", "sim_gaps_told", "duplicate_input", "input_gap")


def test_g8_the_model_sees_what_was_heard(report: Report) -> None:
    edits = ("turn_restarted", "tentative_adopted", "context_dropped", "sim_snapshots", "sim_restores", "sim_forks")
    report.keeps("G8", "sim_heard_exactly", *edits)


def test_g8_a_frame_is_what_its_start_and_actions_make(report: Report) -> None:
    report.keeps("G8", "sim_frames_again", "sim_moves", "sim_rollout_forks", "sim_turn_interrupted_rewind")


def test_g9_a_rollout_is_made_again_and_a_fork_without_room_is_told(report: Report) -> None:
    refused = ("sim_closed_pool_full", "sim_turn_failed_bad_snapshot")
    report.keeps("G9", "states_out_of_step", "sim_turn_failed_replica_lost", "stale_finding", *refused)


def test_g9_a_dead_replica_costs_its_own_sessions_one_turn(report: Report) -> None:
    report.keeps("G9", "workers_lost", "workers_wedged", "sim_snapshots_stateless")


def test_g11_every_queue_has_a_bound(report: Report) -> None:
    report.keeps("G11", "mailbox_full", "sim_lost_slow_consumer", "sim_gaps_told", "context_dropped")


def test_g12_what_a_client_sent_is_taken_or_asked_for_again(report: Report) -> None:
    report.keeps("G12", "input_gap", "duplicate_input", "sim_resumes")


def test_a_schedule_depends_on_its_seed_alone() -> None:
    def digest(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        output = subprocess.run(
            simulation("--seeds", "0-59"), cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        ).stdout
        return str(json.loads(output.splitlines()[-1])["digest"])

    assert digest("1") == digest("2")


def test_one_seed_is_replayed_with_its_whole_schedule() -> None:
    output = subprocess.run(
        simulation("--seed", "7", "--verbose"), cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    first, *schedule, last = output.splitlines()
    assert first == f"seed 7: {draw(7)}"
    assert len(schedule) > 100
    assert last.startswith("seed 7 holds: ")
