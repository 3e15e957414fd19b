"""Stamps and fences: what is admitted, and what a raised fence or a reused slot makes stale."""

from hypothesis import given, settings
from hypothesis import strategies as st

from omni_live.sessions.stamp import LANES, Fence, Stamp, session_key

small = st.integers(0, 3)
stamps = st.builds(Stamp, slot=small, generation=small, epoch=small, turn=small, stage=small, seq=small)


def test_a_fence_admits_what_it_stamps() -> None:
    fence = Fence(slot=5, generation=2, epoch=9)
    assert fence.stamp(turn=4, deadline_ns=7) == Stamp(5, 2, 9, 4, 0, 0, 7)
    assert fence.admits(fence.stamp(4))


def test_a_raised_fence_admits_nothing_that_was_stamped_before() -> None:
    fence = Fence(5, 2)
    before = fence.stamp(1)
    raised = fence.raised()
    assert (raised.slot, raised.generation, raised.epoch) == (5, 2, 2)
    assert not raised.admits(before)
    assert fence.admits(before), "a fence is a value"


def test_a_reused_slot_admits_nothing_of_its_former_owner() -> None:
    assert not Fence(5, 3).admits(Fence(5, 2).stamp(1))


def test_lanes_have_fences_of_their_own() -> None:
    lanes = [Fence(7 * LANES + lane, 1) for lane in range(LANES)]
    side = lanes[3].stamp(1)
    assert [fence.admits(side) for fence in lanes] == [False, False, False, True]
    assert lanes[0].raised().epoch == 2
    assert lanes[3].admits(side)


def test_a_stamp_knows_its_session_and_lane() -> None:
    stamp = Fence(7 * LANES + 2, 5).stamp(1)
    assert (stamp.session_slot, stamp.lane) == (7, 2)
    assert stamp.session == session_key(7, 5)


def test_session_keys_differ_by_slot_and_by_generation() -> None:
    keys = {session_key(slot, generation) for slot in range(50) for generation in range(50)}
    assert len(keys) == 2500


@given(stamp=stamps, slot=small, generation=small, epoch=small)
@settings(deadline=None, max_examples=200, derandomize=True)
def test_a_stamp_is_admitted_exactly_where_row_generation_and_epoch_are_its_own(
    stamp: Stamp, slot: int, generation: int, epoch: int
) -> None:
    admitted = Fence(slot, generation, epoch).admits(stamp)
    assert admitted == ((stamp.slot, stamp.generation, stamp.epoch) == (slot, generation, epoch))
