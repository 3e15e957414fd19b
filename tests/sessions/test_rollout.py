"""Rollouts by example, and as a state machine that loses its stage, goes back, is cut and asks for too much."""

from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rollout_driver import BOTH, SHOWN, STAGE, RolloutDrive, World, actions, dreamt
from session_driver import GENERATION, MS, SLOT

from omni_live.sessions.effects import Abort, Emit, Feed, RaiseFence, Restore, TakeSnapshot
from omni_live.sessions.errors import Illegal
from omni_live.sessions.events import ResyncRequired, RolloutAt, RolloutSnapshotted, SessionResumed, TurnDone, TurnSpoke
from omni_live.sessions.ids import CountedIds
from omni_live.sessions.inputs import (
    Asked,
    Attached,
    CancelAsked,
    CloseAsked,
    Detached,
    DrainAsked,
    Outcome,
    StageEnded,
    StageFound,
    StageSpoke,
    StepAsked,
)
from omni_live.sessions.limits import Limits
from omni_live.sessions.past import Actions
from omni_live.sessions.payload import ArraySpec, Payload
from omni_live.sessions.rollout import ATTEMPTS

SMALL = Limits(rewind_steps=8, snapshot_frames=4, step_frames=8, rollout_actions=12)


def started(limits: Limits | None = None, seed: int = 5) -> RolloutDrive:
    drive = RolloutDrive(limits)
    drive.reset(seed)
    return drive


def stepped(drive: RolloutDrive, *numbers: int) -> str:
    request = drive.step(*numbers)
    drive.run_all()
    return request


def shown(drive: RolloutDrive, request: str) -> list[bytes]:
    return list(drive.frames(request).values())


# -- stepping --------------------------------------------------------------------------------------------------------


def test_a_reset_begins_at_frame_0_and_a_step_makes_the_next_frames() -> None:
    drive = RolloutDrive()
    request = drive.reset(5)
    assert (drive.ended(request), drive.at(request)) == (("done", ""), 0)
    step = stepped(drive, 1, 2, 3)
    assert drive.frames(step) == dict(enumerate(dreamt(5, 1, 2, 3)[1:], 1))
    assert (drive.ended(step), drive.at(step)) == (("done", ""), 3)


def test_a_reset_is_answered_only_when_the_stage_has_answered() -> None:
    drive = RolloutDrive()
    drive.is_prompt = False
    request = drive.reset()
    drive.step(1)
    assert not drive.all(RolloutAt)
    assert not drive.submits
    drive.answer()
    assert drive.ended(request) == ("done", "")
    assert len(drive.submits) == 1


def test_a_step_is_due_when_it_says_and_else_at_no_time_at_all() -> None:
    drive = started()
    asked_ns = drive.now
    drive.tell(StepAsked(actions(1), 1, SHOWN, due_ms=40.0, request_id="soon"))
    drive.run_all()
    stepped(drive, 2)
    drive.look(1, 2)
    drive.run_all()
    assert [submit.stamp.deadline_ns for submit in drive.submits] == [asked_ns + 40 * MS, 0, 0, 0]


def test_where_the_rollout_stands_is_told_right_before_the_end_of_a_request() -> None:
    drive = started()
    request = stepped(drive, 1)
    at, end = drive.events[-2:]
    assert isinstance(at, RolloutAt)
    assert isinstance(end, TurnDone)
    assert at.request_id == end.request_id == request


def test_a_step_before_the_first_reset_fails() -> None:
    drive = RolloutDrive()
    request = drive.step(1)
    assert (drive.ended(request), drive.at(request)) == (("failed", "not_started"), -1)


def test_a_repeated_step_id_gives_the_same_frames_and_makes_none() -> None:
    drive = started()
    stepped(drive, 1, 2, 3, 4)
    again = drive.step(9, 9, step=2)
    drive.run_all()
    assert drive.frames(again) == dict(enumerate(dreamt(5, 1, 2, 3, 4)[2:4], 2))
    assert drive.ended(again) == ("done", "")
    assert drive.rollout.position == 4


@pytest.mark.parametrize("step", [4, 6, -1])
def test_a_step_that_is_partly_old_or_in_the_future_fails_and_says_where_the_rollout_stands(step: int) -> None:
    drive = started()
    stepped(drive, 1, 2, 3, 4)
    request = drive.step(9, 9, step=step)
    status, reason = drive.ended(request)
    assert (status, drive.at(request)) == ("failed", 4)
    assert reason == ("step_unknown" if step < 0 else "step_out_of_order")
    assert shown(drive, stepped(drive, 5)) == dreamt(5, 1, 2, 3, 4, 5)[5:]


def test_a_look_shows_frames_made_before() -> None:
    drive = started()
    stepped(drive, 1, 2, 3)
    request = drive.look(0, 4)
    drive.run_all()
    assert shown(drive, request) == dreamt(5, 1, 2, 3)


def test_a_frame_counts_when_every_output_of_it_came() -> None:
    drive = started()
    request = drive.step(1, 2, outputs=BOTH)
    submit = drive.submits[-1]
    drive.tell(StageSpoke(submit.stamp, STAGE, Payload("latent", {"step": 1})))
    assert drive.rollout.position == 0
    drive.tell(StageSpoke(submit.stamp, "decoder", Payload("frame", {"step": 1})))
    assert drive.rollout.position == 1
    drive.tell(CancelAsked(request))


def test_a_frame_with_another_number_than_its_place_breaks_the_turn() -> None:
    drive = started()
    request = drive.step(1, 2)
    drive.tell(StageSpoke(drive.submits[-1].stamp, "decoder", Payload("frame", {"step": 2})))
    assert (drive.ended(request), drive.at(request)) == (("failed", "output_lost"), 0)


def test_g4_a_step_that_ends_with_frames_missing_is_not_done() -> None:
    drive = started()
    request = drive.step(1, 2)
    drive.tell(StageEnded(drive.submits[-1].stamp, "decoder", Outcome.DONE))
    assert drive.ended(request) == ("failed", "output_lost")


def test_a_cancelled_step_keeps_the_frames_that_came_and_cuts_the_stage_back_before_the_next() -> None:
    drive = started()
    request = drive.step(1, 2, 3, 4)
    drive.run(frames=3, shown=2)
    effects = drive.tell(CancelAsked(request))
    order = [type(effect) for effect in effects]
    assert order.index(RaiseFence) < order.index(Abort) < order.index(Emit) < order.index(Feed)
    assert [feed.payload.meta["step"] for feed in effects if isinstance(feed, Feed)] == [2]
    assert (drive.ended(request), drive.at(request)) == (("interrupted", "client_cancelled"), 2)
    assert shown(drive, stepped(drive, 7)) == dreamt(5, 1, 2, 7)[3:]


def test_a_failed_step_keeps_the_frames_that_came() -> None:
    drive = started()
    request = drive.step(1, 2, 3)
    drive.run(frames=2)
    drive.broke("pool_full")
    assert (drive.ended(request), drive.at(request)) == (("failed", "pool_full"), 2)
    assert shown(drive, stepped(drive, 7)) == dreamt(5, 1, 2, 7)[3:]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (StepAsked(actions(1), 2, BOTH, None, "r"), "bad_actions"),
        (StepAsked(Payload("actions"), 1, BOTH, None, "r"), "bad_actions"),
        (StepAsked(Payload("actions", {}, b"123", (ArraySpec("a", "<f4", (2,)),)), 2, BOTH, None, "r"), "bad_actions"),
        (StepAsked(actions(1), 0, BOTH, None, "r"), "bad_frames"),
        (StepAsked(actions(*range(300)), 300, BOTH, None, "r"), "bad_frames"),
    ],
)
def test_a_step_whose_actions_are_not_a_row_for_each_frame_fails(asked: StepAsked, reason: str) -> None:
    drive = started()
    drive.tell(asked)
    assert drive.ended("r") == ("failed", reason)
    assert not drive.submits


def test_requests_run_one_after_the_other_and_g11_too_many_are_refused() -> None:
    drive = started()
    requests = [drive.step(number) for number in range(1 + Limits().mailbox_turns)]
    late = drive.step(1)
    assert drive.refused(late) == ["mailbox_full"]
    drive.run_all()
    assert [drive.at(request) for request in requests] == list(range(1, len(requests) + 1))


# -- going back ------------------------------------------------------------------------------------------------------


def test_a_rewind_and_the_same_actions_give_the_same_frames_and_others_give_others() -> None:
    drive = started()
    stepped(drive, 1, 2, 3, 4)
    request = drive.rewind(2)
    assert (drive.ended(request), drive.at(request)) == (("done", ""), 2)
    assert shown(drive, stepped(drive, 3, 4)) == dreamt(5, 1, 2, 3, 4)[3:]
    drive.rewind(2)
    assert shown(drive, stepped(drive, 9)) == dreamt(5, 1, 2, 9)[3:]


@pytest.mark.parametrize("how", ["rewind", "reset", "restore"])
def test_g1_silence_after_a_move_no_frame_of_before_goes_out(how: str) -> None:
    drive = started()
    stepped(drive, 1, 2)
    state = drive.state(drive.snapshot())
    running, waiting = drive.step(3, 4), drive.step(5)
    drive.run(frames=1)
    submit = drive.submits[-1]
    seen = len(drive.all(TurnSpoke))
    drive.tell(Detached(1))
    moves = {
        "rewind": lambda: drive.rewind(1),
        "reset": lambda: drive.reset(8),
        "restore": lambda: drive.restore(state.state, 2),
    }
    moves[how]()
    drive.tell(StageSpoke(submit.stamp._replace(seq=1), "decoder", Payload("frame", {"step": 4})))
    drive.tell(Attached(2, drive.session.token, 0))
    assert len(drive.all(TurnSpoke)) == seen, "a frame of before was said again"
    assert drive.ended(running) == drive.ended(waiting) == ("interrupted", how)
    assert isinstance(drive.all(SessionResumed)[-1], SessionResumed)


def test_g1_silence_frames_of_finished_steps_that_nobody_has_yet_are_void_after_a_rewind() -> None:
    drive = started()
    drive.tell(Detached(1))
    stepped(drive, 1, 2)
    drive.rewind(1)
    drive.tell(Attached(2, drive.session.token, 0))
    assert not drive.all(TurnSpoke)
    assert drive.last(SessionResumed).voids


def test_a_rewind_beyond_the_limit_or_ahead_fails_and_disturbs_nothing() -> None:
    drive = started(SMALL)
    for number in range(3):
        stepped(drive, *range(number * 4, number * 4 + 4))
    running = drive.step(1)
    far, ahead, bad = drive.rewind(3), drive.rewind(13), drive.rewind(-1)
    assert [drive.ended(one) for one in (far, ahead, bad)] == [
        ("failed", "rewind_too_far"),
        ("failed", "rewind_ahead"),
        ("failed", "bad_step"),
    ]
    drive.run_all()
    assert drive.ended(running) == ("done", "")
    assert drive.ended(drive.rewind(5)) == ("done", "")


def test_rewinding_twice_reaches_no_further_than_once() -> None:
    drive = started(SMALL)
    for _ in range(3):
        stepped(drive, 1, 2, 3, 4)
    drive.rewind(6)
    assert drive.ended(drive.rewind(3)) == ("failed", "rewind_too_far")
    assert drive.ended(drive.look(3)) == ("failed", "step_unknown")
    assert drive.ended(drive.rewind(4)) == ("done", "")


def test_a_rewind_that_a_stage_refuses_because_it_lost_something_is_made_anew() -> None:
    drive = started()
    stepped(drive, 1, 2, 3)
    drive.world.frames = None
    request = drive.rewind(2)
    drive.run_all()
    assert (drive.ended(request), drive.at(request)) == (("done", ""), 2)
    assert shown(drive, stepped(drive, 4)) == dreamt(5, 1, 2, 4)[3:]


def test_a_move_that_the_stage_refuses_leaves_the_rollout_as_it_was() -> None:
    drive = started()
    stepped(drive, 1, 2)
    request = drive.reset("bad")
    assert (drive.ended(request), drive.at(request)) == (("failed", "bad_reset"), 2)
    assert shown(drive, stepped(drive, 3)) == dreamt(5, 1, 2, 3)[3:]


# -- snapshots -------------------------------------------------------------------------------------------------------


def test_a_snapshot_waits_for_what_was_asked_before_and_goes_on_elsewhere_with_the_same_frames() -> None:
    drive = started()
    drive.step(1, 2)
    request, later = drive.snapshot(), drive.step(3)
    drive.run_all()
    taken = drive.state(request)
    assert (taken.step, drive.ended(request)) == (2, ("done", ""))
    other = RolloutDrive()
    restored = other.restore(taken.state, taken.step)
    assert (other.ended(restored), other.at(restored)) == (("done", ""), 2)
    assert shown(other, stepped(other, 3)) == shown(drive, later)


@pytest.mark.parametrize("step", [0, 2])
def test_a_snapshot_that_no_stage_takes_fails_to_restore_and_the_rollout_is_made_again_as_it_was(step: int) -> None:
    drive = started()
    stepped(drive, 1, 2)
    request = drive.restore(Payload("rubbish"), step)
    drive.run_all()
    assert (drive.ended(request), drive.at(request)) == (("failed", "not_started"), 2)
    assert shown(drive, stepped(drive, 3)) == dreamt(5, 1, 2, 3)[3:]


def test_a_snapshot_of_what_has_not_begun_fails() -> None:
    drive = RolloutDrive()
    assert drive.ended(drive.snapshot()) == ("failed", "not_started")


def test_g11_bounded_the_actions_kept_are_those_since_the_last_snapshot() -> None:
    drive = started(SMALL)
    for number in range(100):
        stepped(drive, number, number)
    past = drive.rollout._past
    assert past is not None
    assert past.count <= SMALL.snapshot_frames
    assert len(drive.all(TakeSnapshot)) >= 40


def test_g11_steps_fail_where_snapshots_never_come_rather_than_keep_ever_more() -> None:
    drive = started(SMALL)
    drive.is_prompt = False
    for _ in range(3):
        stepped(drive, 1, 2, 3, 4)
    assert drive.ended(drive.step(1)) == ("failed", "history_full")
    drive.answer()
    drive.is_prompt = True
    assert drive.ended(stepped(drive, 1)) == ("done", "")


# -- the replica dies ------------------------------------------------------------------------------------------------


def test_g9_survival_a_lost_state_is_made_again_from_its_start_and_the_actions() -> None:
    drive = started()
    stepped(drive, 1, 2, 3)
    drive.kill()
    replay = drive.submits[-1]
    assert (replay.outputs, replay.payload.meta["step"]) == (frozenset({STAGE}), 1)
    waiting, spoken = drive.step(4), len(drive.all(TurnSpoke))
    drive.run()
    assert len(drive.all(TurnSpoke)) == spoken, "what is made again is said again"
    drive.run_all()
    assert shown(drive, waiting) == dreamt(5, 1, 2, 3, 4)[4:]


def test_g9_survival_a_lost_state_is_made_again_from_the_last_snapshot_and_the_actions_since() -> None:
    drive = started(SMALL)
    stepped(drive, 1, 2, 3, 4)
    stepped(drive, 5, 6)
    drive.kill()
    assert len(drive.all(Restore)) == 1
    assert drive.submits[-1].payload.meta["step"] == 5
    assert shown(drive, stepped(drive, 7)) == dreamt(5, 1, 2, 3, 4, 5, 6, 7)[7:]


def test_g9_a_snapshot_from_before_a_rewind_serves_as_far_as_it_goes() -> None:
    drive = started(SMALL)
    stepped(drive, 1, 2, 3, 4)
    drive.rewind(2)
    stepped(drive, 9)
    drive.kill()
    assert shown(drive, stepped(drive, 8)) == dreamt(5, 1, 2, 9, 8)[4:]


def test_a_snapshot_that_comes_after_a_rewind_does_not_become_the_base() -> None:
    drive = started(SMALL)
    drive.is_prompt = False
    stepped(drive, 1, 2, 3, 4)
    drive.rewind(2)
    drive.answer()
    stepped(drive, 9, 9, 9)
    drive.is_prompt = True
    drive.kill()
    assert shown(drive, stepped(drive, 8)) == dreamt(5, 1, 2, 9, 9, 9, 8)[6:]


def test_a_death_in_mid_step_fails_it_keeps_the_frames_that_came_and_the_next_goes_on() -> None:
    drive = started()
    request = drive.step(1, 2, 3)
    drive.run(frames=3, shown=2)
    drive.kill()
    assert (drive.ended(request), drive.at(request)) == (("failed", "replica_lost"), 2)
    assert shown(drive, stepped(drive, 7)) == dreamt(5, 1, 2, 7)[3:]


def test_g9_a_death_that_a_neighbour_sees_first_costs_one_request() -> None:
    drive = started()
    request, waiting = drive.step(1, 2), drive.step(3)
    drive.run(frames=1)
    drive.is_prompt = False
    drive.broke("replica_lost")
    assert (drive.ended(request), len(drive.live)) == (("failed", "replica_lost"), 0)
    assert drive.rollout.fork_refusal(None) == "state_not_ready"
    drive.is_prompt = True
    drive.kill()
    drive.run_all()
    assert shown(drive, waiting) == dreamt(5, 1, 3)[2:]


def test_after_the_death_of_another_stage_the_answer_of_this_one_lets_the_next_request_begin() -> None:
    drive = started()
    drive.step(1, 2)
    waiting = drive.step(3)
    drive.kill("decoder")
    drive.broke("replica_lost")
    drive.run_all()
    assert shown(drive, waiting) == dreamt(5, 3)[1:]


def test_a_second_death_while_the_state_is_made_again_begins_it_anew() -> None:
    drive = started()
    stepped(drive, 1, 2, 3)
    drive.kill()
    drive.run(frames=2)
    drive.kill()
    assert shown(drive, stepped(drive, 4)) == dreamt(5, 1, 2, 3, 4)[4:]


def test_a_death_during_a_rewind_makes_what_was_gone_back_to() -> None:
    drive = started()
    stepped(drive, 1, 2, 3)
    drive.is_prompt = False
    request = drive.rewind(2)
    drive.kill()
    drive.is_prompt = True
    drive.answer()
    drive.run_all()
    assert (drive.ended(request), drive.at(request)) == (("done", ""), 2)
    assert shown(drive, stepped(drive, 4)) == dreamt(5, 1, 2, 4)[3:]


def test_nothing_is_given_back_to_a_stage_that_did_not_answer() -> None:
    drive = started(SMALL)
    stepped(drive, 1, 2, 3, 4)
    drive.is_prompt = False
    drive.kill()
    assert not drive.all(Restore)
    drive.answer()
    assert drive.all(Restore)


def test_a_state_that_cannot_be_made_again_closes_the_session() -> None:
    drive = started()
    stepped(drive, 1, 2)
    drive.kill()
    waiting = drive.step(3)
    for _ in range(ATTEMPTS):
        assert not drive.released
        drive.broke()
    assert drive.released == ["state_lost"]
    assert drive.ended(waiting) == ("interrupted", "state_lost")


def test_a_stage_that_never_answers_closes_the_session_in_the_end() -> None:
    drive = started()
    drive.is_prompt = False
    drive.kill()
    drive.pass_ms(Limits().turn_deadline_s * 1000 + 1)
    assert drive.released == ["state_lost"]


def test_a_replay_that_falls_silent_is_begun_again() -> None:
    drive = started()
    stepped(drive, 1, 2)
    drive.kill()
    drive.run(frames=1)
    drive.pass_ms(Limits().turn_deadline_s * 1000 + 1)
    assert not drive.released
    assert shown(drive, stepped(drive, 3)) == dreamt(5, 1, 2, 3)[3:]


def test_a_reset_need_not_wait_for_a_state_that_is_made_again() -> None:
    drive = started()
    stepped(drive, 1, 2)
    drive.kill()
    replay = drive.submits[-1]
    request = drive.reset(8)
    assert Abort(replay.stamp) in drive.effects
    assert (drive.ended(request), drive.at(request)) == (("done", ""), 0)
    assert shown(drive, stepped(drive, 1)) == dreamt(8, 1)[1:]


def test_the_loss_of_a_stage_without_state_costs_nothing() -> None:
    drive = started()
    stepped(drive, 1)
    feeds = len(drive.all(Feed))
    drive.kill("decoder")
    assert len(drive.all(Feed)) == feeds
    assert shown(drive, stepped(drive, 2)) == dreamt(5, 1, 2)[2:]


def test_a_look_that_breaks_the_stage_costs_one_request() -> None:
    drive = started()
    stepped(drive, 1, 2)
    request, waiting = drive.look(1), drive.step(3)
    drive.is_prompt = False
    drive.world.frames = None
    drive.broke()
    assert (drive.ended(request), len(drive.live)) == (("failed", "stage_error"), 0)
    drive.is_prompt = True
    drive.answer()
    drive.tell(CancelAsked("nothing"))
    drive.run_all()
    assert shown(drive, waiting) == dreamt(5, 1, 2, 3)[3:]


def test_an_answer_that_comes_twice_counts_once() -> None:
    drive = started()
    stepped(drive, 1, 2, 3)
    drive.is_prompt = False
    first = drive.rewind(2)
    (answer,) = drive.owed
    drive.answer()
    second = drive.rewind(1)
    drive.tell(answer)
    assert drive.count("stale_finding") == 1
    drive.answer()
    assert [drive.ended(request) for request in (first, second)] == [("done", "")] * 2
    assert drive.at(second) == 1


def test_a_stage_that_is_found_out_of_step_has_its_state_made_again() -> None:
    drive = started()
    stepped(drive, 1, 2)
    drive.is_prompt = False
    drive.step(3)
    drive.tell(CancelAsked())
    drive.owed.clear()
    drive.world.hear(Payload("cut", {"step": 0}))
    drive.tell(StageFound(STAGE, Payload("at", {"step": 0})))
    drive.is_prompt = True
    drive.answer()
    drive.run_all()
    assert drive.count("states_out_of_step") == 1
    assert shown(drive, stepped(drive, 4)) == dreamt(5, 1, 2, 4)[3:]


# -- forks -----------------------------------------------------------------------------------------------------------


def forked(drive: RolloutDrive, at: int | None = None) -> RolloutDrive:
    twin = drive.rollout.forked("sess_2", SLOT + 1, GENERATION, CountedIds("b"), drive.now, at)
    return RolloutDrive(session=twin, world=drive.world.copy())


def test_a_fork_goes_on_from_where_it_was_made_and_neither_touches_the_other() -> None:
    drive = started()
    stepped(drive, 1, 2, 3)
    child = forked(drive, 1)
    assert child.rollout.position == 1
    assert shown(child, stepped(child, 9)) == dreamt(5, 1, 9)[2:]
    assert shown(drive, stepped(drive, 4)) == dreamt(5, 1, 2, 3, 4)[4:]


def test_a_fork_of_a_rollout_whose_step_runs_has_the_frames_that_came() -> None:
    drive = started()
    drive.step(1, 2, 3)
    drive.run(frames=3, shown=1)
    child = forked(drive)
    assert child.rollout.position == 1
    assert shown(child, stepped(child, 2)) == dreamt(5, 1, 2)[2:]


def test_g9_a_fork_survives_its_replica_by_itself() -> None:
    drive = started(SMALL)
    stepped(drive, 1, 2, 3, 4)
    child = forked(drive, 2)
    stepped(child, 9)
    child.kill()
    assert shown(child, stepped(child, 8)) == dreamt(5, 1, 2, 9, 8)[4:]


def test_a_fork_is_refused_where_there_is_nothing_to_go_on_from() -> None:
    drive = RolloutDrive(SMALL)
    assert drive.rollout.fork_refusal(None) == "not_started"
    drive.reset()
    for _ in range(3):
        stepped(drive, 1, 2, 3, 4)
    assert [drive.rollout.fork_refusal(at) for at in (-1, 3, 4, 12, 13)] == [
        "bad_step",
        "rewind_too_far",
        None,
        None,
        "rewind_ahead",
    ]
    drive.kill()
    drive.run(frames=0)
    drive.is_prompt = False
    drive.kill()
    assert drive.rollout.fork_refusal(None) == "state_not_ready"
    with pytest.raises(Illegal):
        drive.rollout.forked("sess_2", 1, 1, CountedIds(), 0)


def test_a_fork_that_its_stage_could_not_make_closes_when_it_is_used() -> None:
    drive = started()
    stepped(drive, 1)
    drive.step(2)
    drive.broke("session_unknown")
    assert drive.released == ["state_lost"]


def test_a_fork_that_its_stage_has_no_room_for_closes_before_its_first_step() -> None:
    drive = started()
    stepped(drive, 1)
    twin = drive.rollout.forked("sess_2", SLOT + 1, GENERATION, CountedIds("b"), drive.now)
    world = World()
    world.refused = "pool_full"
    child = RolloutDrive(session=twin, world=world)
    assert child.released == ["pool_full"]
    assert not child.submits
    assert shown(drive, stepped(drive, 2)) == dreamt(5, 1, 2)[2:]


# -- the session -----------------------------------------------------------------------------------------------------


def test_a_resume_names_the_void_and_where_the_rollout_stands() -> None:
    drive = started()
    stepped(drive, 1)
    drive.tell(Detached(1))
    request = drive.step(2)
    drive.run_all()
    drive.tell(Attached(2, drive.session.token, max(drive.seqs)))
    resumed = next(index for index, event in enumerate(drive.events) if isinstance(event, SessionResumed))
    assert drive.events[resumed + 1] == RolloutAt("", 2)
    assert drive.ended(request) == ("done", "")
    assert not drive.all(ResyncRequired)


def test_g3_release_closing_ends_whatever_runs_and_waits() -> None:
    drive = started()
    stepped(drive, 1)
    drive.kill()
    waiting = drive.step(2)
    drive.tell(CloseAsked())
    assert drive.ended(waiting) == ("interrupted", "close_requested")
    assert drive.released == ["close_requested"]
    drive = started()
    drive.is_prompt = False
    moving = drive.rewind(0)
    taking = drive.snapshot()
    drive.tell(CloseAsked())
    assert drive.ended(moving) == drive.ended(taking) == ("interrupted", "close_requested")


def test_draining_lets_what_runs_finish_and_takes_nothing_new() -> None:
    drive = started()
    running = drive.step(1)
    drive.tell(DrainAsked(drive.now + 10_000 * MS))
    late, move = drive.step(2), drive.rewind(0)
    assert drive.refused(late) == drive.refused(move) == ["draining"]
    drive.run_all()
    assert drive.ended(running) == ("done", "")
    assert drive.released == ["drained"]


def test_g5_no_ghosts_a_finding_nobody_asked_for_is_counted() -> None:
    drive = started()
    drive.tell(StageFound(STAGE, Payload("at", {"step": 9})), StageFound("decoder", Payload("at", {"step": 9})))
    assert drive.count("stale_finding") == 1
    assert drive.rollout.position == 0


def test_a_rollout_takes_no_plain_turn() -> None:
    drive = started()
    drive.tell(Asked("first", BOTH, Payload("request")))
    assert drive.errors == ["unsupported_input"]


def test_actions_are_copied_out_of_the_buffer_they_were_read_from() -> None:
    given = actions(1, 2)
    buffer = bytearray(given.body)
    read = Actions.read(Payload("actions", {}, memoryview(buffer), given.arrays), 2)
    buffer[:] = bytes(len(buffer))
    assert read is not None
    assert read.payload(7) == Payload("actions", {"step": 7}, given.body, given.arrays)


class RolloutMachine(RuleBasedStateMachine):
    """Whatever is asked, cut, lost and late: frames are those that the actions since the start make."""

    LIMITS: ClassVar = Limits(rewind_steps=6, snapshot_frames=3, step_frames=4, rollout_actions=8, mailbox_turns=4)

    def __init__(self) -> None:
        super().__init__()
        self.drive = RolloutDrive(self.LIMITS)
        self.read_to = 0
        self.line: list[bytes] = []
        """Every frame of the rollout as it stands, by number, from what its actions make."""
        self.steps: dict[str, tuple[int, ...]] = {}
        self.states: list[tuple[Payload, int, list[bytes]]] = []
        self.number = 0
        self.counts: dict[str, int] = {}
        self.moves: dict[str, list[bytes] | None] = {}
        """The frames that a move makes; None: those that are, up to where it goes back."""

    def alive(self) -> bool:
        return not self.drive.session.closed

    def read(self) -> None:
        """Follow what the client was told, and hold it against what must be."""
        for event in self.drive.events[self.read_to :]:
            if isinstance(event, TurnSpoke):
                step = event.payload.meta["step"]
                assert isinstance(step, int)
                if step == len(self.line) and event.request_id in self.steps:
                    first = len(self.line) - self.came(event.request_id)
                    row = self.steps[event.request_id][step - first]
                    self.line.append(RolloutMachine.next(self.line[-1], row))
                    self.counts[event.request_id] = self.came(event.request_id) + 1
                assert bytes(event.payload.body) == self.line[step], f"frame {step} is another"
            elif isinstance(event, RolloutAt) and event.request_id:
                self.moved(event)
        self.read_to = len(self.drive.events)

    def came(self, request: str) -> int:
        return self.counts.get(request, 0)

    @staticmethod
    def next(frame: bytes, number: int) -> bytes:
        world = World()
        world.frames = [frame]
        return world.step(number.to_bytes(16, "little"))

    def moved(self, event: RolloutAt) -> None:
        done = self.drive.ended(event.request_id)[0] == "done"
        if event.request_id in self.moves and done:
            line = self.moves[event.request_id]
            self.line = (self.line if line is None else line)[: event.step + 1]
        assert event.step == len(self.line) - 1, "the rollout stands elsewhere than was told"

    @precondition(alive)
    @rule()
    def reset(self) -> None:
        self.number += 1
        self.moves[f"request {self.drive.requests + 1}"] = dreamt(self.number)
        self.drive.reset(self.number)
        self.read()

    @precondition(alive)
    @rule(numbers=st.lists(st.integers(0, 3), min_size=1, max_size=4), again=st.integers(0, 3))
    def step(self, numbers: list[int], again: int) -> None:
        self.steps[f"request {self.drive.requests + 1}"] = tuple(numbers)
        self.drive.step(*numbers, step=None if not again else self.drive.rollout.position + 2 - again)
        self.read()

    @precondition(alive)
    @rule(back=st.integers(-1, 8))
    def rewind(self, back: int) -> None:
        self.read()
        position = self.drive.rollout.position
        self.moves[f"request {self.drive.requests + 1}"] = None
        self.drive.rewind(position - back)
        self.read()

    @precondition(alive)
    @rule()
    def snapshot(self) -> None:
        request = self.drive.snapshot()
        self.read()
        taken = [one for one in self.drive.all(RolloutSnapshotted) if one.request_id == request]
        if taken:
            self.states.append((taken[0].state, taken[0].step, self.line[: taken[0].step + 1]))

    @precondition(lambda self: self.alive() and self.states)
    @rule(which=st.integers(0, 9), good=st.booleans())
    def restore(self, which: int, good: bool) -> None:
        state, step, line = self.states[which % len(self.states)]
        if good:
            self.moves[f"request {self.drive.requests + 1}"] = line
        self.drive.restore(state if good else Payload("rubbish"), step if good else step + 1)
        self.read()

    @precondition(alive)
    @rule(frames=st.integers(1, 4), shown=st.integers(0, 3) | st.none())
    def run(self, frames: int, shown: int | None) -> None:
        if self.drive.submits:
            replays = self.drive.submits[-1].outputs == {STAGE}
            self.drive.run(frames, None if replays else shown)
            if shown is not None and not replays and self.drive.rollout._turn is not None:
                self.drive.tell(CancelAsked())
        self.read()

    @precondition(alive)
    @rule()
    def cancel(self) -> None:
        self.drive.tell(CancelAsked())
        self.read()

    @precondition(alive)
    @rule(stage=st.sampled_from([STAGE, STAGE, "decoder"]), neighbour=st.booleans())
    def kill(self, stage: str, neighbour: bool) -> None:
        if neighbour and self.drive.rollout._turn is not None:
            self.drive.broke("replica_lost")
        self.drive.kill(stage)
        self.read()

    @precondition(alive)
    @rule(prompt=st.booleans())
    def answers(self, prompt: bool) -> None:
        self.drive.is_prompt = prompt
        if prompt:
            self.drive.answer()
        self.read()

    @invariant()
    def bounded(self) -> None:
        past = self.drive.rollout._past
        if past is not None:
            assert past.count <= self.LIMITS.rollout_actions, "G11"
            assert past.count == (0 if past.actions is None else len(past.actions.rows))
        assert len(self.drive.rollout._waiting) <= self.LIMITS.mailbox_turns, "G11"

    def teardown(self) -> None:
        """Whatever was asked ends once, and the rollout is where it was told to be."""
        if not self.alive():
            return
        self.drive.is_prompt = True
        self.drive.answer()
        self.drive.run_all()
        self.read()
        assert not self.drive.session.busy
        for number in range(1, self.drive.requests + 1):
            request = f"request {number}"
            ends = [end for end in self.drive.all(TurnDone) if end.request_id == request]
            assert len(ends) + len(self.drive.refused(request)) == 1, "G4"


TestRolloutMachine = RolloutMachine.TestCase
TestRolloutMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
