"""The resume journal: numbers without holes, two bounds, void ranges, gaps; and the count of the client's input."""

from collections import deque
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from omni_live.sessions.events import BufferCleared, HeartbeatAcked
from omni_live.sessions.journal import Arrival, InputJournal, OutputJournal, Replay, merged
from omni_live.sessions.stamp import Fence, Stamp

MS = 1_000_000
EVENT = BufferCleared()
FENCE = Fence(slot=8, generation=2)


def journal(max_bytes: int = 1000, max_age_ns: int = 1000) -> OutputJournal:
    return OutputJournal(max_bytes, max_age_ns)


def filled(*contents: Stamp | None, nbytes: int = 10) -> OutputJournal:
    made = journal()
    for content in contents:
        made.add(EVENT, content, nbytes, 0)
    return made


def numbers(replay: Replay) -> list[int]:
    return [entry.seq for entry in replay.entries]


def test_numbers_are_given_from_one_without_holes() -> None:
    made = journal()
    assert [made.add(EVENT, None, 10, 0) for _ in range(4)] == [1, 2, 3, 4]
    assert (made.last, made.nbytes) == (4, 40)


def test_numbers_go_on_after_what_was_voided_acknowledged_or_lost() -> None:
    made = filled(FENCE.stamp(1), None)
    made.fence(8, 2, 2)
    made.ack(2)
    made.add(EVENT, None, 5000, 0)
    assert made.add(EVENT, None, 10, 0) == 4


def test_a_resume_replays_what_comes_after_the_number_that_was_seen() -> None:
    made = journal()
    events = [HeartbeatAcked(str(number)) for number in range(1, 6)]
    for event in events:
        made.add(event, None, 10, 0)
    replay = made.replay(2, 0)
    assert [entry.event for entry in replay.entries] == events[2:]
    assert (replay.voids, replay.gap) == ((), None)


def test_an_acknowledged_entry_is_kept_no_longer_and_a_resume_that_asks_for_it_is_told_of_the_gap() -> None:
    made = filled(None, None, None)
    made.ack(2)
    assert made.nbytes == 10
    assert made.replay(2, 0).gap is None
    assert made.replay(0, 0).gap == (1, 2)
    assert numbers(made.replay(0, 0)) == [3]


def test_an_acknowledgement_of_numbers_that_were_never_given_is_ignored() -> None:
    made = filled(None, None)
    made.ack(3)
    made.ack(-1)
    assert numbers(made.replay(0, 0)) == [1, 2]


def test_an_older_acknowledgement_after_a_later_one_changes_nothing() -> None:
    made = filled(None, None, None)
    made.ack(2)
    made.ack(1)
    assert numbers(made.replay(2, 0)) == [3]


def test_the_byte_limit_drops_the_oldest_and_a_resume_names_what_is_gone() -> None:
    made = journal(max_bytes=25)
    for _ in range(4):
        made.add(EVENT, None, 10, 0)
    replay = made.replay(0, 0)
    assert numbers(replay) == [3, 4]
    assert (replay.gap, replay.overflowed) == ((1, 2), True)
    assert made.nbytes == 20


def test_the_age_limit_drops_what_is_older_and_says_that_it_was_no_overflow() -> None:
    made = journal(max_age_ns=100)
    made.add(EVENT, None, 10, 0)
    made.add(EVENT, None, 10, 60)
    replay = made.replay(0, 101)
    assert numbers(replay) == [2]
    assert (replay.gap, replay.overflowed) == ((1, 1), False)


def test_an_entry_lives_exactly_as_long_as_the_age_limit() -> None:
    made = journal(max_age_ns=100)
    made.add(EVENT, None, 10, 0)
    assert numbers(made.replay(0, 100)) == [1]


def test_an_entry_larger_than_the_journal_is_numbered_and_lost() -> None:
    made = journal(max_bytes=25)
    made.add(EVENT, None, 10, 0)
    assert made.add(EVENT, None, 26, 0) == 2
    assert made.nbytes == 0
    assert made.replay(0, 0).gap == (1, 2)


def test_who_has_seen_what_was_lost_is_told_of_no_gap() -> None:
    made = journal(max_bytes=25)
    for _ in range(4):
        made.add(EVENT, None, 10, 0)
    assert made.replay(2, 0).gap is None


def test_a_fence_voids_older_content_of_its_row_and_nothing_else() -> None:
    beside = Fence(slot=9, generation=2)
    made = filled(FENCE.stamp(1), None, beside.stamp(1), FENCE.raised().stamp(2), FENCE.stamp(1))
    assert made.fence(8, 2, 2) == 2
    replay = made.replay(0, 0)
    assert numbers(replay) == [2, 3, 4]
    assert replay.voids == ((1, 1), (5, 5))
    assert made.nbytes == 30


def test_a_later_generation_voids_content_of_any_epoch_before() -> None:
    made = filled(Fence(8, 2, epoch=9).stamp(1))
    assert made.fence(8, 3, 1) == 1


def test_neighbouring_void_numbers_make_one_range_also_over_several_fences() -> None:
    beside = Fence(slot=9, generation=2)
    made = filled(FENCE.stamp(1), beside.stamp(1), FENCE.stamp(1), None)
    made.fence(8, 2, 2)
    assert made.replay(0, 0).voids == ((1, 1), (3, 3))
    made.fence(9, 2, 2)
    assert made.replay(0, 0).voids == ((1, 3),)


def test_void_numbers_that_the_client_has_seen_are_not_named() -> None:
    made = filled(*[FENCE.stamp(1)] * 5)
    made.fence(8, 2, 2)
    assert made.replay(3, 0).voids == ((4, 5),)
    assert made.replay(5, 0).voids == ()


def test_void_ranges_are_forgotten_with_the_numbers_around_them() -> None:
    made = filled(FENCE.stamp(1), None)
    made.fence(8, 2, 2)
    made.ack(2)
    assert not made._voids
    made = filled(FENCE.stamp(1), None)
    made.fence(8, 2, 2)
    made.replay(0, 10_000)
    assert not made._voids


def test_merged_ranges_hold_the_same_numbers() -> None:
    assert merged(deque([(1, 2), (3, 3), (5, 9), (6, 7), (11, 11)])) == [(1, 3), (5, 9), (11, 11)]


@dataclass
class Kept:
    """An entry as the naive model keeps it, forever."""

    seq: int
    content: Stamp | None
    nbytes: int
    at_ns: int
    state: str = "kept"


class JournalMachine(RuleBasedStateMachine):
    """The journal against a model that keeps everything and marks what became of it."""

    MAX_BYTES, MAX_AGE = 60, 50

    def __init__(self) -> None:
        super().__init__()
        self.journal = OutputJournal(self.MAX_BYTES, self.MAX_AGE)
        self.model: list[Kept] = []
        self.epochs = {0: 1, 1: 1}
        self.acked = 0
        self.now = 0

    def kept(self) -> list[Kept]:
        return [entry for entry in self.model if entry.state == "kept"]

    def evict(self) -> None:
        for entry in self.kept():
            bytes_left = sum(other.nbytes for other in self.kept())
            if bytes_left <= self.MAX_BYTES and entry.at_ns >= self.now - self.MAX_AGE:
                break
            entry.state = "lost"

    def settle(self, seq: int) -> None:
        if self.acked < seq <= len(self.model):
            self.acked = seq
            for entry in self.kept():
                if entry.seq <= seq:
                    entry.state = "acked"

    @rule(nbytes=st.integers(0, 40), slot=st.sampled_from([None, 0, 1]))
    def add(self, nbytes: int, slot: int | None) -> None:
        content = None if slot is None else Stamp(slot, 1, self.epochs[slot], 1)
        seq = self.journal.add(EVENT, content, nbytes, self.now)
        self.model.append(Kept(seq, content, nbytes, self.now))
        assert seq == len(self.model)
        self.evict()

    @rule(seq=st.integers(-1, 40))
    def ack(self, seq: int) -> None:
        self.journal.ack(seq)
        self.settle(seq)

    @rule(slot=st.sampled_from([0, 1]))
    def fence(self, slot: int) -> None:
        self.epochs[slot] += 1
        stale = [
            entry for entry in self.kept() if entry.content is not None and entry.content.slot == slot
        ]  # content is always of the epoch that held when it was added
        assert self.journal.fence(slot, 1, self.epochs[slot]) == len(stale)
        for entry in stale:
            entry.state = "void"

    @rule(ns=st.integers(1, 30))
    def wait(self, ns: int) -> None:
        self.now += ns

    @rule(seen=st.integers(0, 40))
    def replay(self, seen: int) -> None:
        seen = min(seen, len(self.model))
        replay = self.journal.replay(seen, self.now)
        self.evict()
        gone = max([self.acked, *(entry.seq for entry in self.model if entry.state == "lost")])
        self.settle(seen)
        assert replay.gap == ((seen + 1, gone) if gone > seen else None)
        assert numbers(replay) == [entry.seq for entry in self.kept()]
        void = {number for first, last in replay.voids for number in range(first, last + 1)}
        assert all(first > seen for first, _ in replay.voids)
        assert all(self.model[number - 1].state == "void" for number in void)
        for number in range(max(seen, gone) + 1, len(self.model) + 1):
            assert (number in void) != (number in numbers(replay)), "each number comes or is named, once (G7)"

    @invariant()
    def bounded(self) -> None:
        assert self.journal.nbytes == sum(entry.nbytes for entry in self.kept()) <= self.MAX_BYTES
        assert self.journal.last == len(self.model)


TestJournalMachine = JournalMachine.TestCase
TestJournalMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)


def test_void_ranges_stay_few_for_a_client_that_never_acknowledges() -> None:
    made = journal(max_bytes=1000, max_age_ns=100)
    ranges: list[int] = []
    fence = FENCE
    for now in range(0, 20_000, 10):
        made.add(EVENT, fence.stamp(1), 10, now)
        made.add(EVENT, None, 10, now)
        fence = fence.raised()
        made.fence(fence.slot, fence.generation, fence.epoch)
        ranges.append(len(made._voids))
    assert max(ranges) <= 12


# -- input -------------------------------------------------------------------------------------------------------


def test_input_is_taken_once_and_in_order() -> None:
    inputs = InputJournal()
    arrivals = [inputs.arrive(seq) for seq in (1, 2, 2, 1, 4, 3, 4)]
    assert arrivals == [
        Arrival.NEXT,
        Arrival.NEXT,
        Arrival.DUPLICATE,
        Arrival.DUPLICATE,
        Arrival.AHEAD,
        Arrival.NEXT,
        Arrival.NEXT,
    ]
    assert inputs.taken == 4


def test_a_resend_is_asked_for_once_per_gap() -> None:
    inputs = InputJournal()
    inputs.arrive(1)
    asked = [inputs.arrive(seq) is Arrival.AHEAD and inputs.wants_resend() for seq in (3, 4, 5, 2, 3, 7, 8)]
    assert asked == [True, False, False, False, False, True, False]


def test_a_new_attachment_may_be_asked_for_the_same_gap_again() -> None:
    inputs = InputJournal()
    inputs.arrive(2)
    assert inputs.wants_resend()
    inputs.asked_anew()
    assert inputs.wants_resend()
    assert not inputs.wants_resend()


def test_acknowledgements_are_put_together_by_number_and_by_time() -> None:
    inputs = InputJournal(every=4, within_ns=200 * MS)
    now = 10_000 * MS
    told = []
    for seq in range(1, 12):
        inputs.arrive(seq)
        told.append(inputs.due(now))
        now += 20 * MS
    assert [seq for seq, due in enumerate(told, 1) if due] == [1, 5, 9]
    inputs.arrive(12)
    assert not inputs.due(now - 20 * MS)
    assert inputs.due(now + 200 * MS)


def test_nothing_is_due_where_nothing_new_was_taken() -> None:
    inputs = InputJournal()
    assert not inputs.due(10**12)
    inputs.arrive(1)
    inputs.told(10**12)
    assert not inputs.due(10**13)
