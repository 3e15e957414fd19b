"""Admission by example, and as a state machine: never over a cap, never under one while somebody waits who fits."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from omni_live.sessions.admission import (
    Admission,
    AdmissionError,
    Admitted,
    Amount,
    Caps,
    Cost,
    Queued,
    Refused,
)
from omni_live.sessions.limits import Limits

NS = 1_000_000_000


def small(sessions: int = 2, wait_queue: int = 2) -> Admission:
    return Admission(Caps(Amount(sessions, 100, 1000), Amount(sessions, 100, 1000)), wait_queue, 10)


def test_exactly_the_cap_is_admitted_and_the_next_waits() -> None:
    admission = small()
    assert [admission.ask(Cost("voice"), 0) for _ in range(3)] == [Admitted(1), Admitted(2), Queued(3, 10 * NS)]
    assert admission.admitted.sessions == 2


def test_a_close_admits_the_first_who_waits_and_an_open_at_the_same_moment_does_not_pass_by() -> None:
    admission = small()
    for _ in range(3):
        admission.ask(Cost("voice"), 0)
    assert admission.give_back(1) == [Admitted(3)]
    assert admission.ask(Cost("voice"), 0) == Queued(4, 10 * NS)
    assert admission.admitted.sessions == 2


def test_a_full_queue_refuses_with_the_time_after_which_somebody_will_have_left_it() -> None:
    admission = small(sessions=1, wait_queue=1)
    admission.ask(Cost("voice"), 0)
    admission.ask(Cost("voice"), 0)
    assert admission.ask(Cost("voice"), 4 * NS) == Refused("overloaded", 6.0)


def test_no_queue_at_all_refuses_at_the_cap() -> None:
    admission = small(sessions=1, wait_queue=0)
    assert admission.ask(Cost("voice"), 0) == Admitted(1)
    assert isinstance(admission.ask(Cost("voice"), 0), Refused)
    admission.give_back(1)
    assert isinstance(admission.ask(Cost("voice"), 0), Admitted)


def test_who_waits_too_long_lapses_and_frees_the_way_for_who_was_behind() -> None:
    admission = small()
    admission.ask(Cost("voice", Amount(1, 60)), 0)
    assert admission.ask(Cost("voice", Amount(1, 60)), 0) == Queued(2, 10 * NS)
    assert admission.ask(Cost("voice", Amount(1, 30)), NS) == Queued(3, 11 * NS)
    assert admission.next_lapse_ns == 10 * NS
    assert admission.lapse(10 * NS - 1) == ([], [])
    assert admission.lapse(10 * NS) == ([2], [Admitted(3)])
    assert admission.waiting == 0
    with pytest.raises(AdmissionError):
        admission.give_back(2)


def test_a_full_pipeline_holds_up_its_own_and_no_other() -> None:
    admission = Admission(Caps(Amount(9, 900, 900), Amount(9, 900, 900), {"voice": Amount(1, 100, 100)}), 9, 10)
    assert isinstance(admission.ask(Cost("voice"), 0), Admitted)
    assert isinstance(admission.ask(Cost("voice"), 0), Queued)
    assert isinstance(admission.ask(Cost("robot"), 0), Admitted)


def test_a_large_session_is_not_starved_by_small_ones_of_other_pipelines() -> None:
    admission = Admission(Caps(Amount(9, 100, 900), Amount(9, 900, 900)), 9, 10)
    assert isinstance(admission.ask(Cost("world", Amount(1, 50)), 0), Admitted)
    assert isinstance(admission.ask(Cost("world", Amount(1, 80)), 0), Queued)
    assert isinstance(admission.ask(Cost("robot", Amount(1, 10)), 0), Queued)


def test_what_can_never_fit_is_refused_without_a_time() -> None:
    assert small().ask(Cost("world", Amount(1, 101)), 0) == Refused("too_large", None)


def test_a_place_is_given_back_once() -> None:
    admission = small()
    admission.ask(Cost("voice"), 0)
    admission.give_back(1)
    with pytest.raises(AdmissionError):
        admission.give_back(1)


def test_caps_come_from_the_limits() -> None:
    caps = Caps.from_limits(Limits(max_sessions=7, max_bytes_per_pipeline=5))
    assert caps.whole.sessions == 7
    assert caps.for_pipeline("voice").nbytes == 5


PIPELINES = ("voice", "robot")
WHOLE = Amount(4, 100, 1000)
OWN = {"voice": Amount(3, 80, 700), "robot": Amount(2, 100, 1000)}


class Doors(RuleBasedStateMachine):
    """Clients ask, close, give up and wait, in any order, against a model that knows only who is admitted."""

    places = Bundle("places")

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(Caps(WHOLE, Amount(), OWN), 3, 10)
        self.now = 0
        self.admitted: dict[int, Cost] = {}
        self.waiting: dict[int, Cost] = {}

    def took(self, admitted: list[Admitted]) -> None:
        for one in admitted:
            self.admitted[one.place] = self.waiting.pop(one.place)

    @rule(
        target=places,
        pipeline=st.sampled_from(PIPELINES),
        nbytes=st.integers(0, 110),
        duty=st.sampled_from((0, 300, 700)),
    )
    def ask(self, pipeline: str, nbytes: int, duty: int) -> object:
        cost = Cost(pipeline, Amount(1, nbytes, duty))
        match self.admission.ask(cost, self.now):
            case Admitted(place):
                self.admitted[place] = cost
                return place
            case Queued(place, deadline_ns):
                assert deadline_ns > self.now
                self.waiting[place] = cost
                return place
            case Refused(reason, retry_after_s):
                assert (retry_after_s is None) == (reason == "too_large")
                assert reason == "too_large" or len(self.waiting) == 3
        return multiple()

    @rule(place=consumes(places))
    def close_or_give_up(self, place: int) -> None:
        if place in self.admitted or place in self.waiting:
            self.admitted.pop(place, None)
            self.waiting.pop(place, None)
            self.took(self.admission.give_back(place))
        with pytest.raises(AdmissionError):
            self.admission.give_back(place)

    @rule(seconds=st.integers(1, 11))
    def wait(self, seconds: int) -> None:
        self.now += seconds * NS
        late, admitted = self.admission.lapse(self.now)
        for place in late:
            del self.waiting[place]
        self.took(admitted)

    @invariant()
    def no_cap_is_passed(self) -> None:
        whole = Amount(0, 0, 0)
        for pipeline in PIPELINES:
            used = Amount(0, 0, 0)
            for cost in self.admitted.values():
                if cost.pipeline == pipeline:
                    used = used.plus(cost.amount)
            assert used.within(OWN[pipeline])
            assert self.admission.admitted_of(pipeline) == used
            whole = whole.plus(used)
        assert whole.within(WHOLE)
        assert self.admission.admitted == whole

    @invariant()
    def the_first_who_waits_does_not_fit(self) -> None:
        for cost in list(self.waiting.values())[:1]:
            fits_whole = self.admission.admitted.plus(cost.amount).within(WHOLE)
            fits_own = self.admission.admitted_of(cost.pipeline).plus(cost.amount).within(OWN[cost.pipeline])
            assert not (fits_whole and fits_own)

    @invariant()
    def the_queue_is_bounded_and_nobody_in_it_is_late(self) -> None:
        assert self.admission.waiting == len(self.waiting) <= 3
        due = self.admission.next_lapse_ns
        assert due is None or due > self.now


Doors.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestDoors = Doors.TestCase
