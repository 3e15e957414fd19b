"""Plain turns by example, and as a state machine: one after the other, each ended once, nothing lost or invented."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from session_driver import PlainDrive, S, closing, told

from omni_live.sessions.effects import Abort, Credit, Emit, Feed, RaiseFence, Submit
from omni_live.sessions.events import ErrorTold, TurnDone, TurnSpoke
from omni_live.sessions.inputs import (
    Asked,
    Attached,
    CancelAsked,
    CloseAsked,
    Detached,
    DrainAsked,
    Outcome,
    ResetAsked,
    StageEnded,
    StageFound,
    StageLost,
    StageSpoke,
)
from omni_live.sessions.limits import Limits
from omni_live.sessions.payload import Payload
from omni_live.sessions.plain import RESET
from omni_live.sessions.turn import TurnState


def test_a_request_is_submitted_as_it_was_asked() -> None:
    drive = PlainDrive()
    asked = Asked("first", frozenset({"second", "third"}), Payload("request", {"x": 1}), {"seed": 5}, "r1")
    drive.tell(asked)
    (submit,) = drive.submits
    assert (submit.entry, submit.outputs, submit.payload, submit.params) == (
        "first",
        asked.outputs,
        asked.payload,
        asked.params,
    )
    assert (submit.stamp.turn, submit.stamp.epoch, submit.stamp.deadline_ns) == (1, 1, drive.now)


def test_outputs_go_out_as_they_come_and_each_gives_its_stage_a_credit() -> None:
    drive = PlainDrive()
    request = drive.ask()
    submit = drive.submits[0]
    effects = drive.speak(submit, 0)
    (emit,) = [effect for effect in effects if isinstance(effect, Emit)]
    assert emit.event == TurnSpoke(request, 1, "third", Payload("unit", {"seq": 0}, bytes(8)))
    assert (emit.seq, emit.content) == (1, submit.stamp)
    assert Credit(submit.stamp, "third", 1) in effects


def test_g4_a_turn_is_done_only_when_all_of_its_outputs_are_finished() -> None:
    drive = PlainDrive()
    request = drive.ask("second", "third")
    drive.end(drive.submits[0], "second")
    drive.end(drive.submits[0], "second")
    drive.end(drive.submits[0], "somewhere else")
    assert drive.ends == []
    drive.end(drive.submits[0], "third")
    assert drive.ends == [(request, "done", "")]


def test_g4_one_output_that_is_incomplete_makes_the_turn_incomplete() -> None:
    drive = PlainDrive()
    request = drive.ask("second", "third")
    drive.end(drive.submits[0], "second", Outcome.INCOMPLETE, "max_output_tokens")
    drive.speak(drive.submits[0], 0)
    drive.end(drive.submits[0], "third")
    assert drive.ends == [(request, "incomplete", "max_output_tokens")]


def test_a_failed_output_fails_the_turn_at_once_and_the_next_one_works() -> None:
    drive = PlainDrive()
    first, second = drive.ask("second", "third"), drive.ask()
    effects = drive.end(drive.submits[0], "second", Outcome.FAILED, "stage_error")
    names = [type(effect) for effect in effects]
    assert names.index(RaiseFence) < names.index(Abort) < names.index(Emit) < names.index(Submit)
    drive.speak(drive.submits[1], 0)
    drive.end(drive.submits[1])
    assert drive.ends == [(first, "failed", "stage_error"), (second, "done", "")]


def test_requests_run_one_after_the_other() -> None:
    drive = PlainDrive()
    requests = [drive.ask() for _ in range(3)]
    for index in range(3):
        assert len(drive.submits) == index + 1
        drive.end(drive.submits[index])
    assert drive.ends == [(request, "done", "") for request in requests]
    assert [submit.stamp.turn for submit in drive.submits] == [1, 2, 3]


def test_g11_more_requests_than_the_mailbox_holds_are_refused_and_counted() -> None:
    drive = PlainDrive()
    for _ in range(1 + Limits().mailbox_turns):
        drive.ask()
    assert drive.errors == []
    late = drive.ask()
    (error,) = drive.all(ErrorTold)
    assert (error.code, error.event_id) == ("mailbox_full", late)
    assert drive.count("mailbox_full") == 1


def test_a_cancel_fences_aborts_and_ends_in_this_order() -> None:
    drive = PlainDrive()
    request = drive.ask()
    drive.speak(drive.submits[0], 0)
    effects = drive.tell(CancelAsked())
    names = [type(effect) for effect in effects]
    assert names.index(RaiseFence) < names.index(Abort) < names.index(Emit)
    assert drive.ends == [(request, "interrupted", "client_cancelled")]


def test_a_cancel_names_the_running_request_or_changes_nothing() -> None:
    drive = PlainDrive()
    drive.tell(CancelAsked(event_id="ev_1"))
    request = drive.ask()
    drive.tell(CancelAsked("request 99", "ev_2"))
    assert [(error.code, error.event_id) for error in drive.all(ErrorTold)] == [
        ("response_cancel_not_active", "ev_1"),
        ("response_cancel_not_active", "ev_2"),
    ]
    drive.tell(CancelAsked(request))
    assert drive.ends == [(request, "interrupted", "client_cancelled")]


def test_g1_output_of_a_cancelled_turn_is_dropped_and_counted() -> None:
    drive = PlainDrive()
    drive.ask()
    drive.tell(CancelAsked())
    assert not told(drive.speak(drive.submits[0], 0))
    assert not told(drive.end(drive.submits[0]))
    assert drive.count("stale_output") == 2
    assert len(drive.ends) == 1


def test_g5_output_of_a_finished_turn_does_not_reach_the_next() -> None:
    drive = PlainDrive()
    drive.ask()
    drive.ask()
    drive.end(drive.submits[0])
    assert not told(drive.speak(drive.submits[0], 0))
    assert not told(drive.end(drive.submits[0]))
    assert len(drive.ends) == 1


def test_output_that_comes_twice_is_told_once() -> None:
    drive = PlainDrive()
    drive.ask()
    submit = drive.submits[0]
    drive.speak(submit, 0)
    drive.speak(submit, 1)
    assert not told(drive.speak(submit, 0))
    assert not told(drive.speak(submit, 1))
    assert len(drive.all(TurnSpoke)) == 2
    assert drive.count("repeated_output") == 2


def test_outputs_of_two_stages_are_counted_apart() -> None:
    drive = PlainDrive()
    drive.ask("second", "third")
    submit = drive.submits[0]
    drive.speak(submit, 0, "second")
    drive.speak(submit, 0, "third")
    assert len(drive.all(TurnSpoke)) == 2


def test_g7_an_output_with_a_hole_in_it_fails_the_turn() -> None:
    drive = PlainDrive()
    request = drive.ask()
    drive.speak(drive.submits[0], 0)
    drive.speak(drive.submits[0], 2)
    assert drive.ends == [(request, "failed", "output_lost")]


def test_a_stage_that_ended_has_nothing_more_to_say() -> None:
    drive = PlainDrive()
    drive.ask("second", "third")
    drive.end(drive.submits[0], "second")
    assert not told(drive.speak(drive.submits[0], 0, "second"))
    assert drive.count("output_after_end") == 1


def test_a_turn_of_which_nothing_comes_for_too_long_fails() -> None:
    drive = PlainDrive(Limits(turn_deadline_s=10))
    request = drive.ask()
    drive.pass_ms(9000)
    drive.speak(drive.submits[0], 0)
    drive.pass_ms(9999)
    assert drive.ends == []
    drive.pass_ms(1)
    assert drive.ends == [(request, "failed", "timeout")]
    assert not drive.session.closed


def test_a_close_ends_what_runs_and_what_waits() -> None:
    drive = PlainDrive()
    requests = [drive.ask() for _ in range(3)]
    assert closing(drive.tell(CloseAsked()))
    assert drive.ends == [(request, "interrupted", "close_requested") for request in requests]
    assert drive.released == ["close_requested"]


def test_a_drain_lets_what_was_taken_finish_and_takes_no_more() -> None:
    drive = PlainDrive()
    requests = [drive.ask() for _ in range(2)]
    drive.tell(DrainAsked(drive.now + 30 * S))
    refused = drive.ask()
    drive.end(drive.submits[0])
    drive.end(drive.submits[1])
    assert drive.ends == [(request, "done", "") for request in requests]
    assert [error.event_id for error in drive.all(ErrorTold)] == [refused]
    assert drive.released == ["drained"]


def test_a_one_shot_session_closes_after_its_only_turn() -> None:
    drive = PlainDrive()
    drive.ask()
    drive.speak(drive.submits[0], 0)
    drive.end(drive.submits[0])
    assert closing(drive.tell(CloseAsked()))


def test_findings_and_losses_are_none_of_a_plain_sessions_business() -> None:
    drive = PlainDrive()
    drive.ask()
    drive.tell(StageFound("ears", Payload("heard")), StageLost("first"))
    drive.end(drive.submits[0])
    assert [status for _, status, _ in drive.ends] == ["done"]


def test_a_reset_fences_aborts_ends_what_runs_and_waits_and_then_tells_the_stages() -> None:
    drive = PlainDrive()
    running, waiting = drive.ask(), drive.ask()
    effects = drive.tell(ResetAsked(("first", "second")))
    wanted = [effect for effect in effects if isinstance(effect, RaiseFence | Abort | Emit | Feed | Submit)]
    assert [type(effect) for effect in wanted] == [RaiseFence, Abort, Emit, Emit, Feed, Feed]
    assert [effect for effect in effects if isinstance(effect, Feed)] == [Feed("first", RESET), Feed("second", RESET)]
    assert drive.ends == [(running, "interrupted", "reset"), (waiting, "interrupted", "reset")]


def test_g1_what_was_made_before_a_reset_never_comes_after_it() -> None:
    drive = PlainDrive()
    drive.ask()
    drive.tell(ResetAsked(("first",)))
    drive.ask(request="new")
    old, new = drive.submits
    assert new.stamp.epoch > old.stamp.epoch
    assert not told(drive.speak(old, 0))
    assert told(drive.speak(new, 0))


def test_a_reset_of_a_session_in_which_nothing_runs_moves_the_fence_too() -> None:
    drive = PlainDrive()
    effects = drive.tell(ResetAsked(("first",)))
    assert [effect.fence.epoch for effect in effects if isinstance(effect, RaiseFence)] == [2]
    assert drive.ends == []


def test_the_latest_request_displaces_those_that_wait_and_not_the_one_that_runs() -> None:
    drive = PlainDrive()
    running, waiting = drive.ask(), drive.ask()
    asked = Asked("first", frozenset({"third"}), Payload("request"), request_id="latest", latest=True)
    drive.tell(asked)
    assert drive.ends == [(waiting, "interrupted", "superseded")]
    drive.end(drive.submits[0])
    assert drive.ends[-1] == (running, "done", "")
    assert len(drive.submits) == 2
    drive.end(drive.submits[1])
    assert drive.ends[-1] == ("latest", "done", "")


def test_a_request_is_due_so_long_after_it_was_asked_however_long_it_waited() -> None:
    drive = PlainDrive()
    drive.ask()
    asked_ns = drive.now
    drive.tell(Asked("first", frozenset({"third"}), Payload("request"), due_ms=50.0))
    drive.pass_ms(20)
    drive.end(drive.submits[0])
    assert drive.submits[1].stamp.deadline_ns == asked_ns + 50_000_000


def test_a_request_that_waits_can_be_cancelled_by_its_name() -> None:
    drive = PlainDrive()
    running, waiting = drive.ask(), drive.ask()
    drive.tell(CancelAsked(waiting))
    assert drive.ends == [(waiting, "interrupted", "client_cancelled")]
    drive.end(drive.submits[0])
    assert drive.ends[-1] == (running, "done", "")
    assert len(drive.submits) == 1


class PlainMachine(RuleBasedStateMachine):
    """A client that asks, cancels and comes back, and stages that are right, late, twice, out of order or broken."""

    def __init__(self) -> None:
        super().__init__()
        self.drive = PlainDrive(Limits(journal_bytes=20_000, turn_deadline_s=60, idle_lease_s=500, detach_grace_s=50))
        self.attachment = 1
        self.seqs: Counter[tuple[int, str]] = Counter()
        self.ended: set[tuple[int, str]] = set()
        self.got: dict[int, object] = {}
        """What the client has, by sequence number."""
        self.void: set[int] = set()
        self.gone: set[int] = set()
        self.read_to = 0

    def read(self) -> None:
        """The client takes what was sent to it."""
        for emit in self.drive.emits[self.read_to :]:
            if emit.seq:
                assert emit.seq not in self.got, "the client gets a number twice (G7)"
                assert emit.seq > max(self.got, default=0), "numbers come in order (G7)"
                self.got[emit.seq] = emit.event
        self.read_to = len(self.drive.emits)

    def submit(self, index: int) -> Submit | None:
        submits = self.drive.submits
        return submits[-1 - index % len(submits)] if submits else None

    @precondition(lambda self: not self.drive.session.closed)
    @rule(outputs=st.sets(st.sampled_from(["second", "third"]), min_size=1))
    def ask(self, outputs: set[str]) -> None:
        self.drive.ask(*outputs)

    @rule(
        stage=st.sampled_from(["second", "third"]), index=st.sampled_from([0, 0, 0, 1, 2]), nbytes=st.integers(0, 4000)
    )
    def speak(self, stage: str, index: int, nbytes: int) -> None:
        submit = self.submit(index)
        if submit is not None:
            key = (submit.stamp.turn, stage)
            self.drive.speak(submit, self.seqs[key], stage, nbytes)
            self.seqs[key] += 1

    @rule(stage=st.sampled_from(["second", "third"]), index=st.integers(0, 2), ahead=st.integers(-3, 2))
    def speak_out_of_order(self, stage: str, index: int, ahead: int) -> None:
        submit = self.submit(index)
        if submit is not None and ahead:
            self.drive.speak(submit, max(0, self.seqs[submit.stamp.turn, stage] + ahead), stage)

    @rule(
        stage=st.sampled_from(["second", "third"]),
        index=st.sampled_from([0, 0, 1]),
        outcome=st.sampled_from([Outcome.DONE, Outcome.DONE, *Outcome]),
    )
    def end(self, stage: str, index: int, outcome: Outcome) -> None:
        submit = self.submit(index)
        if submit is not None:
            self.ended.add((submit.stamp.turn, stage))
            self.drive.end(submit, stage, outcome, "" if outcome is Outcome.DONE else "some_reason")

    @rule(index=st.integers(0, 2), epoch=st.integers(-1, 1))
    def ghost(self, index: int, epoch: int) -> None:
        """Output of another epoch, session or turn."""
        submit = self.submit(index)
        if submit is not None:
            stamp = submit.stamp
            ghosts = [
                stamp._replace(epoch=stamp.epoch + epoch, turn=stamp.turn + 7),
                stamp._replace(slot=stamp.slot + 1),
            ]
            for ghost in [*ghosts, stamp._replace(generation=stamp.generation - 1), stamp._replace(slot=0)]:
                effects = self.drive.tell(
                    StageSpoke(ghost, "third", Payload("unit")), StageEnded(ghost, "third", Outcome.DONE)
                )
                assert not told(effects)

    @precondition(lambda self: not self.drive.session.closed)
    @rule(named=st.booleans())
    def cancel(self, named: bool) -> None:
        before = len(self.drive.ends)
        running = self.drive.session.busy
        request = f"request {self.drive.requests}" if named else None
        self.drive.tell(CancelAsked(request))
        assert len(self.drive.ends) - before <= running

    @precondition(lambda self: not self.drive.session.closed)
    @rule()
    def reset(self) -> None:
        self.drive.tell(ResetAsked(("second",)))
        assert not self.drive.session.busy

    @precondition(lambda self: not self.drive.session.closed)
    @rule()
    def detach(self) -> None:
        self.read()
        self.drive.tell(Detached(self.attachment))

    @precondition(lambda self: not self.drive.session.closed)
    @rule(back=st.integers(0, 3))
    def resume(self, back: int) -> None:
        """The client comes back having lost the last few frames."""
        self.read()
        for seq in sorted(self.got)[len(self.got) - min(back, len(self.got)) :]:
            del self.got[seq]
        seen = max(self.got, default=0)
        self.attachment += 1
        replay = self.drive.session._journal.replay(seen, self.drive.now)
        self.void |= {number for first, last in replay.voids for number in range(first, last + 1)}
        if replay.gap is not None:
            self.gone |= set(range(replay.gap[0], replay.gap[1] + 1))
        self.drive.tell(Attached(self.attachment, self.drive.session.token, seen))
        self.read()

    @rule(ms=st.sampled_from([1, 100, 5_000, 30_000]))
    def wait(self, ms: int) -> None:
        self.drive.pass_ms(ms)

    @invariant()
    def ends_are_right(self) -> None:
        done = self.drive.all(TurnDone)
        unique = {(end.request_id, end.turn): end for end in done}
        session = self.drive.session
        journaled = {
            (end.request_id, end.turn)
            for end in (e.event for e in session._journal._entries)
            if isinstance(end, TurnDone)
        }
        for (request, turn), end in unique.items():
            if end.status == TurnState.DONE.value:
                outputs = next(submit.outputs for submit in self.drive.submits if submit.stamp.turn == turn)
                assert {(turn, stage) for stage in outputs} <= self.ended, f"{request} is done too early (G4)"
        if session.closed:
            assert len(self.drive.released) == 1
            assert {submit.stamp.turn for submit in self.drive.submits} <= {turn for _, turn in unique} | {
                turn for _, turn in journaled
            } | self.evicted_turns(), "a turn never ended (G4)"

    def evicted_turns(self) -> set[int]:
        """Turns that ended while nobody was attached, and whose end has left the journal."""
        lost = self.drive.session._journal._lost_to
        return {submit.stamp.turn for submit in self.drive.submits} if lost else set()

    @invariant()
    def bounded(self) -> None:
        assert self.drive.session._journal.nbytes <= 20_000, "G11"

    def teardown(self) -> None:
        """In the end the client has every number that it was not told is void or gone."""
        self.read()
        ends = Counter((end.request_id, end.turn) for end in self.got.values() if isinstance(end, TurnDone))
        assert all(count == 1 for count in ends.values()), "a turn ended twice (G4)"
        if self.drive.session.closed or not self.drive.session.attachment:
            return
        if self.drive.session.state.value == "open":
            missing = set(range(1, self.drive.session._journal.last + 1)) - set(self.got)
            assert missing <= self.void | self.gone, "numbers are missing (G7)"


TestPlainMachine = PlainMachine.TestCase
TestPlainMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None, derandomize=True)


@pytest.mark.parametrize("outcome", list(Outcome))
def test_g4_every_outcome_ends_the_turn_exactly_once(outcome: Outcome) -> None:
    drive = PlainDrive()
    drive.ask()
    for _ in range(3):
        drive.end(drive.submits[0], outcome=outcome)
    assert [status for _, status, _ in drive.ends] == [outcome.value]
