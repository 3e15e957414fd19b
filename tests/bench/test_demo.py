"""What the demo says, and when it is not content."""

from dataclasses import replace

import numpy as np
import pytest

from omni_live.bench.wavs import NoWavs
from omni_live.cli.demo import SCRIPT, Disappointed, check, choose, joined, told
from omni_live.clients.clock import MS
from omni_live.clients.turns import Arrival, ReplyReport, TurnReport, Utterance


def reply(status: str = "completed", first_ms: int = 2500) -> ReplyReport:
    return ReplyReport(
        response_id="r",
        text="The capital is Paris.",
        status=status,
        reason="",
        rate_hz=24_000,
        created_ns=2400 * MS,
        ended_ns=4000 * MS,
        arrivals=(Arrival(first_ms * MS, 0, 6000),),
        received=36_000,
        played=36_000,
        discarded=0,
        after_end=0,
        missing=0,
        first_played_ns=(first_ms + 20) * MS,
        first_audible_ns=(first_ms + 40) * MS,
        last_played_ns=4000 * MS,
        gaps=(),
        silences=(),
    )


def turn(index: int, *replies: ReplyReport, heard: str = "What is it", stop_ms: float | None = None) -> TurnReport:
    return TurnReport(
        index=index,
        source="a.wav",
        said="What is it?",
        heard=heard,
        started_ns=0,
        speech_start_ns=500 * MS,
        speech_end_ns=2000 * MS,
        sent=(),
        speech_started_ns=700 * MS,
        committed_ns=2400 * MS,
        decisions=(),
        replies=replies,
        interrupts="r" if stop_ms is not None else "",
        stop_ms=stop_ms,
        timed_out=False,
    )


GOOD = (turn(1, reply()), turn(2, reply("cancelled")), turn(3, reply(), stop_ms=310.0))


def test_a_conversation_as_it_should_be_passes() -> None:
    check(GOOD)


@pytest.mark.parametrize(
    ("turns", "sentence"),
    [
        (GOOD[:2], "after 2 of 3 turns"),
        ((turn(1, reply(), heard=""), *GOOD[1:]), "did not understand turn 1"),
        ((turn(1), *GOOD[1:]), "turn 1 was not answered"),
        ((GOOD[0], turn(2, reply()), GOOD[2]), "was not interrupted"),
        ((*GOOD[:2], turn(3, reply())), "did not fall silent"),
    ],
)
def test_whatever_went_wrong_has_a_sentence(turns: tuple[TurnReport, ...], sentence: str) -> None:
    with pytest.raises(Disappointed, match=sentence):
        check(turns)


def test_a_turn_shows_what_was_said_heard_and_answered_and_how_fast() -> None:
    shown = told(turn(1, reply()))
    assert [line.strip() for line in shown.splitlines()] == [
        "Turn 1",
        "said     What is it?",
        "heard    What is it",
        "answer   The capital is Paris.",
        "latency  500 ms from the last word to the answer, 540 ms until it sounds",
    ]


def test_an_interruption_shows_on_both_sides() -> None:
    assert "interrupted after 1.5 s" in told(turn(2, reply("cancelled")))
    assert "fell silent 310 ms after" in told(turn(3, reply(), stop_ms=310.0))


def test_a_turn_without_an_answer_says_so() -> None:
    shown = told(replace(turn(1), heard=""))
    assert "(nothing)" in shown
    assert "no answer was heard" in shown


def test_the_replies_follow_one_another_in_one_sound() -> None:
    one, two = np.ones(100, np.int16), np.full(50, 2, np.int16)
    whole = joined([one, two], 1000)
    assert len(whole) == 100 + 500 + 50
    assert np.array_equal(whole[:100], one)
    assert np.array_equal(whole[-50:], two)
    assert len(joined([], 1000)) == 0


def named(*names: str) -> list[Utterance]:
    return [Utterance(name, np.zeros(1, np.int16), 0, 1) for name in names]


def test_the_script_is_said_in_its_order_whatever_else_is_there() -> None:
    assert [one.name for one in choose(named("zz.wav", *reversed(SCRIPT), "aa.wav"))] == list(SCRIPT)


def test_other_recordings_are_said_in_theirs() -> None:
    assert [one.name for one in choose(named("a", "b", "c", "d"))] == ["a", "b", "c"]


def test_two_recordings_are_too_few() -> None:
    with pytest.raises(NoWavs, match="needs 3"):
        choose(named("a", "b"))
