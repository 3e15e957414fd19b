"""What the client remembers for a resume, as values in and values out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_live.clients.duplex_link import ENTRY_BYTES, BufferFull, Inbound, Outbound


def _drain(outbound: Outbound) -> list[int]:
    numbers = []
    while (event := outbound.take()) is not None:
        numbers.append(event["input_seq"])
    return numbers


def _sound(outbound: Outbound, nbytes: int = 100) -> int:
    return outbound.put({"type": "append"}, nbytes, sound=True)


def test_input_is_numbered_from_one_in_the_order_it_was_put() -> None:
    outbound = Outbound(10_000)
    for _ in range(3):
        _sound(outbound)
    assert _drain(outbound) == [1, 2, 3]


def test_after_a_resume_everything_behind_the_servers_count_goes_out_again_under_its_old_number() -> None:
    outbound = Outbound(10_000)
    for _ in range(4):
        _sound(outbound)
    _drain(outbound)
    _sound(outbound)
    outbound.rewind(2)
    assert _drain(outbound) == [3, 4, 5]
    assert outbound.resent == 2


def test_a_second_drop_in_the_middle_of_the_resending_loses_nothing() -> None:
    outbound = Outbound(10_000)
    for _ in range(4):
        _sound(outbound)
    _drain(outbound)
    outbound.rewind(0)
    outbound.take()
    outbound.take()
    outbound.rewind(1)
    assert _drain(outbound) == [2, 3, 4]


def test_what_the_server_took_is_not_kept() -> None:
    outbound = Outbound(10_000)
    for _ in range(3):
        _sound(outbound)
    _drain(outbound)
    outbound.acknowledged(3)
    outbound.rewind(3)
    assert _drain(outbound) == []
    assert outbound.sent_bytes == 0


def test_the_oldest_sound_goes_when_there_is_no_room_and_leaves_no_hole_in_the_numbers() -> None:
    outbound = Outbound(3 * (100 + ENTRY_BYTES))
    outbound.put({"type": "append", "name": "first"}, 100, sound=True)
    _sound(outbound)
    _sound(outbound)
    assert _sound(outbound) == 100
    events = [outbound.take() for _ in range(3)]
    assert [event["input_seq"] for event in events] == [1, 2, 3]
    assert all("name" not in event for event in events)


def test_what_is_not_sound_is_never_dropped() -> None:
    outbound = Outbound(3 * (100 + ENTRY_BYTES))
    for _ in range(3):
        outbound.put({"type": "text"}, 100, sound=False)
    assert _sound(outbound) == 100  # the new sound itself has no room
    with pytest.raises(BufferFull):
        outbound.put({"type": "text"}, 100, sound=False)
    assert _drain(outbound) == [1, 2, 3]


def test_nothing_new_is_sent_to_a_server_that_acknowledges_nothing_once_the_bound_is_reached() -> None:
    outbound = Outbound(2 * (100 + ENTRY_BYTES))
    _sound(outbound)
    _sound(outbound)
    assert _drain(outbound) == [1, 2]
    _sound(outbound)
    assert outbound.take() is None
    outbound.acknowledged(1)
    assert _drain(outbound) == [3]


@given(st.lists(st.tuples(st.sampled_from("ptka"), st.integers(0, 400)), max_size=60))
def test_the_server_gets_every_number_in_order_whatever_drops_and_the_buffers_stay_bounded(
    steps: list[tuple[str, int]],
) -> None:
    outbound = Outbound(2_000)
    taken = 0
    for step, size in steps:
        if step == "p":
            _sound(outbound, size)
        elif step == "t":
            event = outbound.take()
            if event is not None:
                assert event["input_seq"] <= taken + 1
                taken = max(taken, event["input_seq"])
        elif step == "k":
            outbound.acknowledged(taken)
        else:
            outbound.rewind(taken)
        assert outbound.waiting_bytes <= 2_000
        assert outbound.sent_bytes <= 2_000 + 400 + ENTRY_BYTES
    outbound.rewind(taken)
    assert _drain(outbound) == list(range(taken + 1, outbound.last + 1))


def test_a_numbered_event_is_taken_once() -> None:
    inbound = Inbound()
    assert [inbound.admits(number) for number in (1, 2, 2, 1, 5, 4)] == [True, True, False, False, True, False]
    assert inbound.duplicates == 3


def test_events_without_a_number_are_always_taken() -> None:
    inbound = Inbound()
    assert inbound.admits(0)
    assert inbound.admits(0)
    assert not inbound.behind


def test_an_acknowledgement_is_due_after_sixteen_events() -> None:
    inbound = Inbound()
    for number in range(1, 16):
        inbound.admits(number)
    assert inbound.behind
    assert not inbound.due
    inbound.admits(16)
    assert inbound.due
    assert inbound.acknowledge() == 16
    assert not inbound.behind


def test_a_piece_of_sound_replayed_without_its_number_is_not_taken_twice() -> None:
    inbound = Inbound()
    assert inbound.admits_sound(0, "r", 0, 100)
    assert not inbound.admits_sound(0, "r", 0, 100)
    assert inbound.admits_sound(7, "r", 100, 50)
    assert inbound.admits_sound(0, "other", 0, 100)
