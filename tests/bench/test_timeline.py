"""The figures, on timelines made by hand."""

import pytest

from omni_live.bench.figures import cutoffs, silence, sweep_line
from omni_live.bench.timeline import (
    PausedTurn,
    Silencing,
    content_ns,
    ending,
    first_sound_ns,
    growth,
    largest,
    median,
    others_began,
    quantile,
    stale_chunks,
    worst,
)
from omni_live.clients.clock import MS
from omni_live.clients.duplex_events import (
    Committed,
    Event,
    ReplyEnded,
    ReplyStarted,
    Sound,
    SoundEnded,
    Words,
)


def started(at_ms: int, reply: str = "r1") -> Event:
    return ReplyStarted(at_ns=at_ms * MS, response_id=reply)


def sound(at_ms: int, reply: str = "r1") -> Event:
    return Sound(at_ns=at_ms * MS, response_id=reply, item_id="i", pcm=b"\0\0", rate_hz=24000, start_sample=0)


def words(at_ms: int, reply: str = "r1") -> Event:
    return Words(at_ns=at_ms * MS, response_id=reply, text="so")


def ended(at_ms: int, reply: str = "r1", status: str = "cancelled") -> ReplyEnded:
    return ReplyEnded(at_ns=at_ms * MS, response_id=reply, status=status, reason="")


def committed(at_ms: int) -> Event:
    return Committed(at_ns=at_ms * MS, item_id="i")


# -- quantiles


def test_the_quantile_is_the_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert quantile(values, 0.99) == 99
    assert quantile(values, 0.95) == 95
    assert quantile(values, 1.0) == 100
    assert quantile(reversed(values), 0.01) == 1
    assert quantile([7.0], 0.5) == 7


def test_of_twenty_values_the_99th_percentile_is_the_largest() -> None:
    assert quantile([float(value) for value in range(20)], 0.99) == 19


def test_nothing_has_no_quantile_no_median_and_no_largest() -> None:
    assert (quantile([], 0.5), median([]), largest([]), worst([None]), growth([], [1.0])) == (None,) * 5


def test_growth_is_the_later_median_over_the_earlier() -> None:
    assert growth([40.0, 50.0, 900.0], [100.0, 90.0, 110.0]) == pytest.approx(2.0)


def test_the_worst_passes_over_what_is_not_known() -> None:
    assert worst([1.0, None, 1.5]) == 1.5


# -- replies


def test_content_is_sound_and_words_of_that_reply_only() -> None:
    events = [started(1), words(2), sound(3), sound(4, "r2"), ended(5)]
    assert content_ns(events, "r1") == [2 * MS, 3 * MS]
    assert others_began(events, "r1")
    assert not others_began([*events[:3], *events[4:]], "r1")


def test_the_end_of_a_reply_is_its_own() -> None:
    events = [ended(5, "r2"), ended(7, "r1", "completed")]
    assert ending(events, "r1") == events[1]
    assert ending(events, "r3") is None


def test_content_behind_its_terminal_is_stale() -> None:
    events = [sound(1), ended(2), sound(3), words(4), SoundEnded(at_ns=5 * MS, response_id="r1"), sound(6, "r2")]
    assert stale_chunks(events) == 3


def test_content_before_its_terminal_is_not_stale() -> None:
    assert stale_chunks([sound(1), sound(2, "r2"), ended(3), sound(4, "r2"), ended(5, "r2")]) == 0


def test_the_first_sound_is_of_a_reply_that_began_after_the_speech() -> None:
    events = [started(1, "r1"), sound(2, "r1"), sound(12, "r1"), started(13, "r2"), words(14, "r2"), sound(15, "r2")]
    assert first_sound_ns(events, 10 * MS) == 15 * MS
    assert first_sound_ns(events[:-1], 10 * MS) is None


# -- pauses


def paused(*events: Event) -> PausedTurn:
    """Speech with a pause from 1000 to 1500 ms, over at 3000 ms."""
    return PausedTurn(1000 * MS, 1500 * MS, 3000 * MS, events)


def test_a_turn_taken_in_the_pause_is_cut_off_and_has_no_latency() -> None:
    turn = paused(committed(1450), started(1451), sound(1500), committed(3400), started(3401, "r2"), sound(3450, "r2"))
    assert turn.cut_off
    assert turn.v2v_ms is None


def test_a_turn_taken_late_for_the_pause_is_cut_off_too() -> None:
    assert paused(committed(1600)).cut_off


def test_a_turn_taken_after_the_speech_is_whole() -> None:
    turn = paused(committed(3400), started(3401), sound(3600))
    assert not turn.cut_off
    assert turn.v2v_ms == pytest.approx(600.0)


def test_cutoffs_are_a_share_of_all_pauses_and_the_latency_is_of_the_whole_turns() -> None:
    turns = [
        paused(committed(1450), started(1451), sound(1500)),
        paused(committed(3400), started(3401), sound(3500)),
        paused(committed(3400), started(3401), sound(3700)),
        paused(committed(3400)),
    ]
    assert cutoffs(turns) == {"cutoffs": 0.25, "cutoff_pauses": 4, "cutoff_v2v_ms_p50": pytest.approx(600.0)}
    assert sweep_line(350, turns) == "min_silence_ms=350: cut off 0.250 of 4, voice to voice 600 ms"


def test_without_pauses_there_are_no_cutoffs() -> None:
    assert cutoffs([])["cutoffs"] is None


# -- silence


def test_silence_is_counted_from_the_cue_to_the_last_content() -> None:
    assert Silencing(100 * MS, 130 * MS, None).ms == pytest.approx(30.0)


def test_the_server_s_own_record_goes_before_the_client_s() -> None:
    assert Silencing(100 * MS, 130 * MS, 102 * MS).ms == pytest.approx(2.0)


def test_the_lag_is_from_the_server_s_record_to_the_client_s() -> None:
    assert Silencing(0, 130 * MS, 127 * MS).lag_ms == pytest.approx(3.0)
    assert Silencing(0, None, 127 * MS).lag_ms is None
    assert Silencing(0, 130 * MS, None).lag_ms is None


def test_a_reply_that_was_silent_at_the_cue_took_no_time() -> None:
    assert Silencing(100 * MS, 90 * MS, 89 * MS).ms == 0.0
    assert Silencing(100 * MS, None, None).ms == 0.0


def test_the_figures_of_silence_are_quantiles_of_their_own_kind() -> None:
    cancels = [Silencing(0, at * MS, None) for at in range(1, 21)]
    speech = [Silencing(0, at * 10 * MS, None) for at in range(1, 21)]
    assert silence(cancels, speech) == {"cancel_to_silence_ms_p99": 20.0, "speech_to_silence_ms_p95": 190.0}
