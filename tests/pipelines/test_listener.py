"""The listener's rules: probabilities in, findings and wishes for transcripts out."""

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_live.pipelines.voice.listener import (
    FRAME,
    SILENCE_DB,
    Bounds,
    Framer,
    Listener,
    Pcm,
    Report,
    Settle,
    Transcribe,
    level_db,
    quiet_behind,
)
from omni_live.sessions.findings import SpeechBegan, SpeechFaded, SpeechPaused, SpeechWent
from omni_live.sessions.settings import TurnDetection

T = TypeVar("T")
DETECTION = TurnDetection(speculative_ms=160)
BOUNDS = Bounds()
PREFIX = 4800
LOUD = np.full(FRAME, 16_384, np.int16)


class Ears:
    """Feeds a listener numbered frames, so that audio can be told apart, and collects what it reports."""

    def __init__(self, detection: TurnDetection = DETECTION, bounds: Bounds = BOUNDS) -> None:
        self.listener = Listener(detection, bounds)
        self.fed = 0

    def hear(self, *probabilities: float) -> list[Report]:
        reports: list[Report] = []
        for probability in probabilities:
            reports += self.listener.hear(np.full(FRAME, self.fed, np.int16), probability)
            self.fed += 1
        return reports

    def speak(self, frames: int) -> list[Report]:
        return self.hear(*[0.9] * frames)

    def rest(self, frames: int) -> list[Report]:
        return self.hear(*[0.01] * frames)


def of(kind: type[T], reports: Iterable[Report]) -> list[T]:
    return [report for report in reports if isinstance(report, kind)]


# -- speech and pauses ---------------------------------------------------------------------------------------------


def test_speech_begins_at_its_first_voiced_frame_with_the_prefix_before_it() -> None:
    ears = Ears()
    assert ears.rest(20) == []
    began, went = ears.speak(1)
    assert isinstance(began, SpeechBegan)
    assert (began.utterance, began.start) == (1, 20 * FRAME - PREFIX)
    assert went == SpeechWent(1, at=21 * FRAME, voiced=FRAME, level_db=began.level_db)


def test_the_prefix_is_cut_to_what_there_is() -> None:
    ears = Ears()
    ears.rest(2)
    assert of(SpeechBegan, ears.speak(1))[0].start == 0


def test_each_voiced_frame_is_told_with_the_speech_so_far_pauses_included() -> None:
    ears = Ears()
    ears.speak(4)
    ears.rest(4)
    (went,) = of(SpeechWent, ears.speak(1))
    assert (went.at, went.voiced) == (9 * FRAME, 9 * FRAME)


def test_a_dip_inside_a_word_is_no_pause() -> None:
    ears = Ears()
    ears.speak(6)
    assert ears.rest(2) == []
    ears.speak(1)
    assert ears.rest(2) == []  # and starts to count anew


def test_a_pause_is_told_for_each_frame_from_the_end_of_speech() -> None:
    ears = Ears()
    ears.speak(6)
    paused = of(SpeechPaused, ears.rest(5))
    assert [pause.end for pause in paused] == [6 * FRAME] * 3
    assert [pause.silence for pause in paused] == [3 * FRAME, 4 * FRAME, 5 * FRAME]


def test_speech_fading_away_stays_speech_and_noise_in_a_pause_does_not_become_it() -> None:
    ears = Ears()
    ears.speak(6)
    assert len(of(SpeechWent, ears.hear(0.4, 0.4))) == 2
    ears.rest(3)
    assert of(SpeechWent, ears.hear(0.4, 0.4)) == []
    assert len(of(SpeechWent, ears.hear(0.5))) == 1


def test_the_threshold_is_the_clients_and_the_lowest_one_still_lets_speech_end() -> None:
    assert Ears(TurnDetection(threshold=0.95)).speak(5) == []
    ears = Ears(TurnDetection(threshold=0.05))
    assert of(SpeechBegan, ears.hear(0.06))
    assert of(SpeechPaused, ears.rest(5))


# -- transcripts ---------------------------------------------------------------------------------------------------


def test_a_transcript_is_wanted_once_per_pause_at_the_speculative_silence() -> None:
    ears = Ears()
    ears.rest(20)
    ears.speak(10)
    reports = ears.rest(12)
    (wanted,) = of(Transcribe, reports)
    start = 20 * FRAME - PREFIX
    assert (wanted.start, wanted.speech_end, wanted.end, wanted.final) == (start, 30 * FRAME, 35 * FRAME, False)
    assert wanted.pcm.tolist() == [index // FRAME for index in range(start, 35 * FRAME)]
    assert reports.index(wanted) == 3  # behind the pause of its frame
    ears.speak(2)
    (again,) = of(Transcribe, ears.rest(12))
    assert (again.start, again.end) == (wanted.start, 49 * FRAME)


def test_a_commit_that_the_last_transcript_covers_settles_it() -> None:
    ears = Ears()
    ears.speak(10)
    (wanted,) = of(Transcribe, ears.rest(14))
    assert ears.listener.commit(1) == [Settle(1, wanted.start, wanted.end)]


def test_a_commit_after_more_speech_wants_the_final_transcript() -> None:
    ears = Ears()
    ears.speak(10)
    ears.rest(6)
    ears.speak(3)
    (wanted,) = of(Transcribe, ears.listener.commit(1))
    assert (wanted.final, wanted.start, wanted.end) == (True, 0, 19 * FRAME)


def test_nothing_is_wanted_early_without_speculation() -> None:
    ears = Ears(TurnDetection(speculative_ms=0))
    ears.speak(10)
    assert of(Transcribe, ears.rest(20)) == []
    assert of(Transcribe, ears.listener.commit())[0].final


def test_speech_after_a_commit_is_a_new_utterance_that_reaches_back_no_further() -> None:
    ears = Ears()
    ears.speak(10)
    ears.rest(14)
    ears.listener.commit(1)
    ears.rest(3)
    (began,) = of(SpeechBegan, ears.speak(1))
    assert (began.utterance, began.start) == (2, 24 * FRAME)


def test_a_commit_in_the_midst_of_speech_splits_it() -> None:
    ears = Ears()
    ears.speak(10)
    (wanted,) = of(Transcribe, ears.listener.commit(1))
    assert wanted.end == 10 * FRAME
    (began,) = of(SpeechBegan, ears.speak(1))
    assert (began.utterance, began.start) == (2, 10 * FRAME)


@pytest.mark.parametrize("utterance", [None, 1, 2])
def test_a_commit_of_what_is_not_open_does_nothing(utterance: int | None) -> None:
    ears = Ears()
    assert ears.listener.commit(utterance) == []
    ears.speak(10)
    ears.listener.commit(1)
    assert ears.listener.commit(utterance) == []


# -- utterances that come to nothing, or to no end -----------------------------------------------------------------


def test_a_click_fades_and_wants_no_transcript() -> None:
    ears = Ears()
    ears.speak(1)
    reports = ears.rest(8)
    assert of(SpeechFaded, reports) == [SpeechFaded(1)]
    assert of(Transcribe, reports) == []
    assert len(of(SpeechPaused, reports)) == 3  # none after it faded
    (began,) = of(SpeechBegan, ears.speak(1))
    assert (began.utterance, began.start) == (2, 0)  # the click may have been the word's first sound


def test_an_utterance_that_nobody_commits_fades() -> None:
    ears = Ears(bounds=Bounds(fade_ms=640))
    ears.speak(10)
    assert of(SpeechFaded, ears.rest(19)) == []
    assert of(SpeechFaded, ears.rest(1)) == [SpeechFaded(1)]
    assert ears.listener.commit(1) == []


def test_an_endless_utterance_is_closed_at_the_bound() -> None:
    ears = Ears(bounds=Bounds(utterance_ms=3200))
    reports = ears.speak(250)
    wanted = of(Transcribe, reports)
    assert [want.utterance for want in wanted] == [1, 2]
    assert all(want.final and len(want.pcm) == 100 * FRAME for want in wanted)
    assert [began.start for began in of(SpeechBegan, reports)] == [0, 100 * FRAME, 200 * FRAME]


def test_clearing_forgets_the_speech_but_not_the_position() -> None:
    ears = Ears()
    ears.speak(10)
    ears.listener.take(np.zeros(100, np.int16))
    assert ears.listener.clear() == 10 * FRAME + 100
    assert ears.listener.commit() == []
    assert of(SpeechBegan, ears.speak(1))[0].start == 10 * FRAME + 100


# -- by hand -------------------------------------------------------------------------------------------------------


def test_by_hand_a_commit_takes_every_sample_since_the_last() -> None:
    listener = Listener(None)
    assert listener.take(np.arange(700, dtype=np.int16)) == []
    assert listener.take(np.arange(700, 1000, dtype=np.int16)) == []
    (first,) = of(Transcribe, listener.commit())
    assert (first.start, first.end, first.speech_end, first.final) == (0, 1000, 1000, True)
    assert first.pcm.tolist() == list(range(1000))
    assert listener.commit() == []
    listener.take(np.zeros(5, np.int16))
    (second,) = of(Transcribe, listener.commit())
    assert (second.utterance, second.start, second.end) == (2, 1000, 1005)


def test_by_hand_the_audio_is_bounded_and_the_loss_counted() -> None:
    listener = Listener(None, Bounds(utterance_ms=100))
    for k in range(4):
        listener.take(np.full(1000, k, np.int16))
    (wanted,) = of(Transcribe, listener.commit())
    assert (wanted.start, wanted.end, listener.lost) == (2400, 4000, 2400)
    assert wanted.pcm.tolist() == [2] * 600 + [3] * 1000


def test_turning_detection_off_keeps_the_open_utterances_audio_for_the_commit() -> None:
    ears = Ears()
    ears.rest(20)
    ears.speak(10)
    ears.listener.take(np.zeros(40, np.int16))
    assert ears.listener.configure(None) == [SpeechFaded(1)]
    (wanted,) = of(Transcribe, ears.listener.commit())
    assert (wanted.utterance, wanted.start, wanted.end) == (2, 20 * FRAME - PREFIX, 30 * FRAME + 40)


def test_turning_detection_on_keeps_no_more_than_the_prefix() -> None:
    listener = Listener(None)
    listener.take(np.zeros(100 * FRAME, np.int16))
    assert listener.configure(TurnDetection(speculative_ms=160)) == []
    (began, _) = listener.hear(LOUD, 0.9)
    assert isinstance(began, SpeechBegan)
    assert began.start == 100 * FRAME - 4800


# -- samples -------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2000), max_size=30))
def test_frames_hold_every_sample_in_order_however_the_audio_was_cut(sizes: list[int]) -> None:
    audio = np.arange(sum(sizes)).astype(np.int16)
    framer, frames, at = Framer(), list[Pcm](), 0
    for size in sizes:
        frames += framer.push(audio[at : at + size])
        at += size
    assert all(len(frame) == FRAME for frame in frames)
    assert np.array_equal(np.concatenate([*frames, framer.drain()]), audio)


@given(st.lists(st.sampled_from([0.0, 0.4, 0.9]), max_size=200), st.lists(st.integers(0, 199), max_size=6))
def test_transcripts_never_overlap_and_positions_never_run_ahead(odds: list[float], commits: list[int]) -> None:
    ears = Ears(bounds=Bounds(utterance_ms=1600, fade_ms=800))
    committed = 0
    open_utterance: int | None = None
    for index, probability in enumerate(odds):
        reports = ears.hear(probability)
        if index in commits:
            reports += ears.listener.commit()
        for report in reports:
            match report:
                case SpeechBegan():
                    assert open_utterance is None
                    assert report.start >= committed
                    open_utterance = report.utterance
                case SpeechWent() | SpeechPaused():
                    assert report.utterance == open_utterance
                case SpeechFaded():
                    assert report.utterance == open_utterance
                    open_utterance = None
                case Transcribe():
                    assert committed <= report.start < report.speech_end <= report.end == ears.listener.at
                    assert len(report.pcm) == report.end - report.start <= 1600 * 16
                    assert report.pcm[0] * FRAME == report.start
                    if report.final:
                        open_utterance, committed = None, report.end
                case Settle():
                    open_utterance, committed = None, ears.listener.at
                case _:
                    raise AssertionError(report)


def test_levels_are_in_decibels_of_full_scale() -> None:
    assert level_db(np.full(FRAME, -32_768, np.int16)) == pytest.approx(0.0)
    assert level_db(LOUD) == pytest.approx(-6.02, abs=0.01)
    assert level_db(np.zeros(FRAME, np.int16)) == SILENCE_DB
    assert level_db(np.zeros(0, np.int16)) == SILENCE_DB


# -- where the sound ends ------------------------------------------------------------------------------------------


def spoken(sound: int, room: int, *, behind: float = 1.0) -> Pcm:
    """Noise of -10 dB for `sound` samples, then `room` samples of `behind` (int16 units) times noise."""
    noise = np.random.default_rng(1).standard_normal(sound + room)
    noise[:sound] *= 10_000
    noise[sound:] *= behind
    return noise.clip(-32_768, 32_767).astype(np.int16)


@pytest.mark.parametrize("behind", [0.0, 10.0, 100.0])
@pytest.mark.parametrize("room", [1_100, 1_536, 3_000])
def test_sound_is_found_to_end_where_it_ends_to_one_block(room: int, behind: float) -> None:
    quiet = quiet_behind(spoken(10_000, room, behind=behind))
    assert quiet is not None
    assert room - 128 <= quiet <= room


def test_no_end_of_sound_is_made_up_in_a_loud_room_or_in_silence() -> None:
    assert quiet_behind(spoken(10_000, 2_000, behind=2_000.0)) is None
    assert quiet_behind(np.zeros(4_096, np.int16)) is None


def test_silence_is_counted_from_the_end_of_the_sound_not_of_the_detectors_frames() -> None:
    listener = Listener(TurnDetection(speculative_ms=160))
    audio = spoken(10 * FRAME + 200, 8 * FRAME - 200)
    reports: list[Report] = []
    for index, frame in enumerate(listener.take(audio)):
        reports += listener.hear(frame, 0.9 if index < 12 else 0.01)  # it notices more than a frame late
    for paused in of(SpeechPaused, reports):
        assert 10 * FRAME + 200 <= paused.end <= 10 * FRAME + 200 + 128
        assert (paused.end + paused.silence) % FRAME == 0
    (wanted,) = of(Transcribe, reports)
    assert (wanted.end, wanted.speech_end) == (16 * FRAME, of(SpeechPaused, reports)[0].end)


def test_sound_that_seems_to_end_long_before_the_detector_says_so_is_not_believed() -> None:
    listener = Listener(TurnDetection(speculative_ms=160))
    reports: list[Report] = []
    for index, frame in enumerate(listener.take(spoken(10 * FRAME, 14 * FRAME))):
        reports += listener.hear(frame, 0.9 if index < 20 else 0.01)
    assert of(SpeechPaused, reports)[0].end == 20 * FRAME - 1920


CERTAIN = DETECTION.silence_duration_ms * 16


def heard(pause: int, commits: bool) -> list[Report]:
    """Speech, so many frames of silence, speech; `commits` says whether the session's word comes at once or never."""
    ears = Ears()
    reports: list[Report] = []
    for probability in [0.01] * 12 + [0.9] * 20 + [0.01] * pause + [0.9] * 20 + [0.01] * 14:
        reports += ears.hear(probability)
        last = reports[-1] if reports else None
        if commits and isinstance(last, SpeechPaused) and last.silence >= CERTAIN:
            reports += ears.listener.commit(last.utterance)
    return reports


@pytest.mark.parametrize("pause", [14, 15, 16, 17, 20, 30])
def test_speech_after_the_certain_end_is_cut_alike_whether_the_commit_comes_in_time_or_late(pause: int) -> None:
    in_time, late = heard(pause, commits=True), heard(pause, commits=False)
    assert of(SpeechBegan, late) == of(SpeechBegan, in_time)
    assert of(SpeechWent, late) == of(SpeechWent, in_time)
    assert len(of(SpeechBegan, late)) == (2 if pause * FRAME >= CERTAIN else 1)
    if pause * FRAME >= CERTAIN:
        assert of(Settle, late) == of(Settle, in_time) != []
    wanted = [(one.utterance, one.start, one.end, one.pcm.tolist()) for one in of(Transcribe, late)]
    assert wanted == [(one.utterance, one.start, one.end, one.pcm.tolist()) for one in of(Transcribe, in_time)]
