"""A reply on its way out: paced release, where the client is in it, and what was heard, to the word."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_live.sessions.marks import Mark
from omni_live.sessions.reply import ACK_EXTRAPOLATION_NS, Chunk, Reply

RATE = 24_000
MS = 1_000_000
START = 7_000 * MS
QUARTER = RATE // 4


def chunk(ms: int = 250, text: str = "", marks: tuple[Mark, ...] = ()) -> Chunk:
    return Chunk(bytes(2 * RATE * ms // 1000), text, marks)


def filled(count: int, lead_ms: int = 800) -> Reply:
    reply = Reply(RATE, lead_ms)
    for _ in range(count):
        reply.receive(chunk())
    return reply


def release_all(reply: Reply, now: int) -> int:
    """Chunks that may go out now."""
    count = 0
    while (at := reply.release_ns(now)) is not None and at <= now:
        reply.release(now)
        count += 1
    return count


def test_nothing_goes_out_where_nothing_waits() -> None:
    reply = Reply(RATE, 800)
    assert reply.release_ns(START) is None
    assert reply.played(START) == 0
    assert not reply.audible(START)


def test_the_first_chunk_goes_out_at_once() -> None:
    reply = filled(1)
    assert reply.release_ns(START) == START
    assert reply.release(START).samples == QUARTER
    assert (reply.received, reply.released, reply.started_ns) == (QUARTER, QUARTER, START)


def test_chunks_go_out_until_the_lead_is_full_and_then_one_by_one_as_they_are_played() -> None:
    reply = filled(8)
    assert release_all(reply, START) == 4, "the fourth goes out 750 ms ahead, which is less than the lead"
    assert reply.release_ns(START) == START + 200 * MS
    assert release_all(reply, START + 199 * MS) == 0
    assert release_all(reply, START + 200 * MS) == 1
    assert reply.release_ns(START + 200 * MS) == START + 450 * MS


def test_the_release_time_is_late_enough_to_release_then() -> None:
    reply = Reply(22_050, 800)
    for _ in range(9):
        reply.receive(Chunk(bytes(2 * 5_513), "", ()))
    now = START + 1
    release_all(reply, now)
    while (at := reply.release_ns(now)) is not None:
        now = at
        assert release_all(reply, now) == 1


def test_an_unpaced_reply_goes_out_as_it_comes() -> None:
    reply = filled(40, lead_ms=0)
    assert release_all(reply, START) == 40


def test_a_reply_that_came_too_slowly_is_played_no_further_than_it_was_sent() -> None:
    reply = filled(1)
    reply.release(START)
    assert reply.played(START + 100 * MS) == RATE // 10
    assert reply.played(START + 10_000 * MS) == QUARTER
    assert reply.audible(START + 249 * MS)
    assert not reply.audible(START + 250 * MS)


def test_the_clients_word_counts_and_is_carried_on_by_real_time_for_a_while() -> None:
    reply = filled(8)
    release_all(reply, START)
    reply.ack(1200, START + 100 * MS)
    assert reply.played(START + 100 * MS) == 1200
    assert reply.played(START + 200 * MS) == 1200 + 2400
    stopped = START + 100 * MS + ACK_EXTRAPOLATION_NS
    assert reply.played(stopped) == reply.played(stopped + 1_000 * MS) == 1200 + 7200


def test_a_client_that_stopped_gets_nothing_more_and_nobody_waits_in_vain() -> None:
    reply = filled(8)
    release_all(reply, START)
    reply.ack(0, START)
    release_all(reply, START + 250 * MS)
    assert reply.release_ns(START + 250 * MS) is None, "its position stands still before that"
    assert reply.release_ns(START + 9_000 * MS) is None
    reply.ack(3 * QUARTER, START + 9_000 * MS)
    assert release_all(reply, START + 9_000 * MS) > 0


def test_more_than_was_sent_or_less_than_nothing_cannot_have_been_played() -> None:
    reply = filled(2)
    reply.release(START)
    reply.ack(10**9, START)
    assert reply.acked == QUARTER
    reply.ack(-5, START)
    assert reply.acked == 0


def test_a_word_of_the_client_before_the_first_chunk_is_about_something_else() -> None:
    reply = filled(8)
    reply.ack(500, START)
    assert reply.acked is None
    release_all(reply, START)
    assert reply.release_ns(START) == START + 200 * MS


def test_the_client_may_correct_itself_downwards() -> None:
    reply = filled(4)
    release_all(reply, START)
    reply.ack(9000, START)
    reply.ack(6000, START)
    assert reply.played(START) == 6000


SAID = "Hello there, my friend. "
MARKS = (Mark(0, 0), Mark(2000, 6), Mark(5000, 13), Mark(8000, 16))


def spoken() -> Reply:
    reply = Reply(RATE, 0)
    reply.receive(chunk(250, SAID[:13], MARKS[:2]))
    reply.receive(chunk(250, SAID[13:], (Mark(5000, 13), Mark(8000, 16))))
    release_all(reply, START)
    return reply


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        (0, ""),
        (1999, ""),
        (2000, "Hello "),
        (4999, "Hello "),
        (5000, "Hello there, "),
        (7999, "Hello there, "),
        (8000, "Hello there, my "),
        (2 * QUARTER - 1, "Hello there, my "),
        (2 * QUARTER, SAID),
        (10**6, SAID),
    ],
)
def test_what_was_heard_ends_with_the_last_word_that_was_spoken_out(samples: int, text: str) -> None:
    assert spoken().heard(samples) == text


def test_a_reply_without_marks_was_heard_as_a_whole_or_not_at_all() -> None:
    reply = Reply(RATE, 0)
    reply.receive(chunk(250, "No marks. "))
    release_all(reply, START)
    assert reply.heard(QUARTER - 1) == ""
    assert reply.heard(QUARTER) == "No marks. "


def test_only_what_was_released_belongs_to_the_transcript() -> None:
    reply = filled(0)
    for word in ("One ", "two ", "three ", "four ", "five ", "six "):
        reply.receive(chunk(250, word))
    release_all(reply, START)
    assert reply.text == "One two three four "
    assert reply.heard(10**9) == reply.text


@given(
    sizes=st.lists(st.integers(1, 12_000), min_size=1, max_size=20),
    lead_ms=st.integers(1, 2000),
    steps=st.lists(st.integers(0, 400), max_size=40),
)
@settings(deadline=None, max_examples=150, derandomize=True)
def test_the_client_never_gets_more_than_the_lead_and_a_chunk_ahead(
    sizes: list[int], lead_ms: int, steps: list[int]
) -> None:
    reply = Reply(RATE, lead_ms)
    for size in sizes:
        reply.receive(Chunk(bytes(2 * size), "", ()))
    now, sent = START, 0
    for step in steps:
        before = reply.released
        while (at := reply.release_ns(now)) is not None and at <= now:
            ahead = reply.released - reply.played(now)
            assert ahead <= lead_ms * RATE // 1000
            sent += reply.release(now).samples
        assert reply.released == sent >= before
        assert reply.played(now) <= reply.released
        now += step * MS
    assert reply.received == sum(sizes)
