"""What waits on one connection: values in, values out."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from omni_live.protocols.websocket.outbox import CLOSE_CODES, Outbox
from omni_live.sessions.effects import Emit, Hold, RaiseFence, Release, Replace, Unhold
from omni_live.sessions.events import AudioDelta, BufferCleared, InputAcked, SessionReplaced
from omni_live.sessions.stamp import Fence

from .lone_desk import Meter

FENCE = Fence(8, 1)


def content(seq: int, fence: Fence = FENCE) -> Emit:
    return Emit(AudioDelta("resp_1", "item_1", b"", 0, fence.epoch), seq, fence.stamp(1), 1000)


def plain(seq: int) -> Emit:
    return Emit(BufferCleared(), seq)


def drained(outbox: Outbox) -> list[int]:
    seqs = []
    while (emit := outbox.next()) is not None:
        seqs.append(emit.seq)
    return seqs


def test_events_leave_in_the_order_they_came() -> None:
    outbox = Outbox(10_000, Meter())
    outbox.take([content(1), plain(2), content(3)])
    assert drained(outbox) == [1, 2, 3]


def test_a_fence_takes_out_stale_content_of_its_lane_only() -> None:
    outbox = Outbox(10_000, Meter())
    beside = Fence(9, 1)
    outbox.take([content(1), plain(2), content(3, beside), RaiseFence(FENCE.raised()), content(4)])
    assert drained(outbox) == [2, 3]


def test_the_next_generation_of_a_slot_makes_everything_stale() -> None:
    outbox = Outbox(10_000, Meter())
    outbox.take([content(1), RaiseFence(Fence(8, 2))])
    assert drained(outbox) == []


def test_replacement_leaves_one_event_and_then_the_end() -> None:
    outbox = Outbox(10_000, Meter())
    outbox.take([content(1), plain(2), Replace(1), plain(3)])
    only = outbox.next()
    assert only is not None
    assert isinstance(only.event, SessionReplaced)
    assert outbox.next() is None
    assert outbox.closing is not None
    assert outbox.closing.code == 1000


def test_a_release_ends_the_connection_once_all_is_sent_held_content_included() -> None:
    outbox = Outbox(10_000, Meter())
    outbox.take([Hold(), content(1), plain(2), Release("drained")])
    assert drained(outbox) == [1, 2]
    assert outbox.closing is not None
    assert outbox.closing.code == CLOSE_CODES["drained"] == 1012


def test_a_reason_nobody_planned_means_try_again() -> None:
    outbox = Outbox(10_000, Meter())
    outbox.take([Release("replica_unavailable")])
    assert outbox.closing is not None
    assert outbox.closing.code == 1013


def test_at_the_bound_everything_goes_and_the_connection_ends() -> None:
    meter = Meter()
    outbox = Outbox(2500, meter)
    outbox.take([content(1), content(2), content(3), plain(4)])
    assert outbox.next() is None
    assert outbox.closing is not None
    assert outbox.closing.code == 1013
    assert meter.ended == ["slow_consumer"]
    assert meter.waiting == 0


def test_whoever_waits_is_woken() -> None:
    outbox = Outbox(10_000, Meter())
    woken: list[int] = []
    outbox.wake = lambda: woken.append(1)
    outbox.take([plain(1)])
    assert woken


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens: numbers only rise, nothing stale leaves, and the bytes add up."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()
        self.outbox = Outbox(30_000, self.meter)
        self.fence = FENCE
        self.outbox.take([RaiseFence(self.fence)])  # as every session does first
        self.seq = 0
        self.last = 0
        self.held = False

    @rule(stale=st.booleans())
    def put_content(self, stale: bool) -> None:
        self.seq += 1
        fence = Fence(8, 1, self.fence.epoch - 1) if stale else self.fence
        self.outbox.take([content(self.seq, fence)])

    @rule(numbered=st.booleans())
    def put_plain(self, numbered: bool) -> None:
        self.seq += numbered
        self.outbox.take([plain(self.seq) if numbered else Emit(InputAcked(1), 0)])

    @rule()
    def raise_fence(self) -> None:
        self.fence = self.fence.raised()
        self.outbox.take([RaiseFence(self.fence)])

    @rule(held=st.booleans())
    def hold(self, held: bool) -> None:
        self.held = held
        self.outbox.take([Hold() if held else Unhold()])

    @rule()
    def send(self) -> None:
        emit = self.outbox.next()
        if emit is None:
            return
        if emit.seq:
            assert emit.seq > self.last
            self.last = emit.seq
        if emit.content is not None:
            assert not self.held
            assert self.fence.admits(emit.content)

    @invariant()
    def bytes_add_up(self) -> None:
        assert self.meter.waiting == self.outbox.nbytes <= 30_000


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
