"""What makes an utterance seem finished: its words, its voice, a language model's word; and real speech."""

import json
import wave
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from omni_live.models.silero import Vad, VadState
from omni_live.models.whisper import Whisper
from omni_live.pipelines.voice.completeness import NO_PROSODY, Prosody, bare, completeness, prosody, with_closing
from omni_live.pipelines.voice.listener import Listener, Transcribe
from omni_live.sessions.settings import TurnDetection

VOICE = Path(__file__).parents[1] / "data" / "voice"
RECORDINGS = json.loads((VOICE / "transcripts.json").read_text())
ENDED = Prosody(pitch=-4.0, level_db=-18.0, decay_s=0.12, vowel_s=0.25, length_s=2.2)
BROKEN_OFF = Prosody(pitch=0.5, level_db=-6.0, decay_s=0.02, vowel_s=0.1, length_s=1.1)

# -- the words -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("whole", "part"),
    [
        ("Turn off the kitchen light.", "Turn off the kitchen..."),
        ("Turn off the kitchen light.", "Turn off the kitchen light and"),
        ("What is the capital of France?", "What is the capital of"),
        ("When is the next bus?", "When I was a small child"),
        ("If it rains, we stay at home.", "If it rains then we maybe"),
        ("Yes.", "The."),
        ("Thank you.", "Could you."),
    ],
)
def test_finished_words_score_above_unfinished_ones_said_the_same_way(whole: str, part: str) -> None:
    for voice in (ENDED, BROKEN_OFF):
        said = replace(voice, length_s=0.2 + 0.25 * len(part.split()))
        assert completeness(whole, said) > completeness(part, said) + 0.05


@pytest.mark.parametrize("text", ["", "   ", "...", "?!"])
def test_no_words_are_not_finished(text: str) -> None:
    assert completeness(text, ENDED) == 0.0


def test_a_voice_that_ends_scores_above_one_that_breaks_off() -> None:
    text = "How many planets are there?"
    assert completeness(text, ENDED) > 0.6
    assert completeness(text, BROKEN_OFF) < 0.4
    for change in ({"pitch": 0.0}, {"decay_s": 0.02}, {"vowel_s": 0.1}, {"length_s": 0.8}):
        assert completeness(text, replace(ENDED, **change)) < completeness(text, ENDED)


def test_a_language_models_word_moves_the_score_its_way() -> None:
    for score in (0.1, 0.5, 0.9):
        assert with_closing(score, 0.01) < with_closing(score, 0.2) < with_closing(score, 0.9)
    text = "What should I cook for dinner?"
    assert completeness(text, ENDED, 0.3) == with_closing(completeness(text, ENDED), 0.3)


def test_bare_text_has_no_marks_behind_its_last_word() -> None:
    assert bare("What's next?!") == "What's next"
    assert bare("Well, I...") == "Well, I"
    assert bare("...") == ""


@given(
    st.text(max_size=80),
    st.builds(
        Prosody, *[st.floats(-12, 12), st.floats(-60, 0), st.floats(0, 4), st.floats(0, 0.6), st.floats(0.05, 4)]
    ),
    st.none() | st.floats(0, 1),
)
def test_any_words_in_any_voice_score_between_0_and_1(text: str, voice: Prosody, closing: float | None) -> None:
    assert 0.0 <= completeness(text, voice, closing) <= 1.0


# -- the voice -----------------------------------------------------------------------------------------------------


def hummed(hertz: NDArray[np.float64], level: NDArray[np.float64]) -> NDArray[np.int16]:
    """A buzz of that pitch and level, a quarter second of silence on both sides."""
    phase = np.cumsum(hertz) / 16_000
    buzz = sum(np.sin(2 * np.pi * harmonic * phase) / harmonic for harmonic in range(1, 6))
    room = np.random.default_rng(0).standard_normal(len(hertz) + 8_000) * 20
    room[4_000:-4_000] += buzz * level * 8_000
    return room.astype(np.int16)


def steady(seconds: float, value: float) -> NDArray[np.float64]:
    return np.full(int(seconds * 16_000), value)


def test_pitch_is_told_in_semitones_over_the_utterances_own() -> None:
    level = steady(1.3, 1.0)
    for last, semitones in ((100.0, -12.0), (150.0, -5.0), (200.0, 0.0), (300.0, 7.0)):
        pcm = hummed(np.concatenate([steady(1.1, 200.0), steady(0.2, last)]), level)
        assert prosody(pcm, len(pcm) - 4_000).pitch == pytest.approx(semitones, abs=0.6)


def test_sound_that_dies_away_has_a_decay_and_sound_that_stops_has_none() -> None:
    hertz = steady(1.4, 140.0)
    fade = np.concatenate([steady(1.1, 1.0), np.geomspace(1.0, 0.03, 4_800)])
    dying, stopping = (prosody(pcm, len(pcm) - 4_000) for pcm in (hummed(hertz, fade), hummed(hertz, steady(1.4, 1.0))))
    assert dying.decay_s > 0.1
    assert stopping.decay_s < 0.04
    assert dying.level_db < -20
    assert stopping.level_db > -5
    assert stopping.length_s == pytest.approx(1.4, abs=0.05)
    assert stopping.vowel_s == 0.6  # as much as is told apart


@pytest.mark.parametrize("length", [0, 1, 400, 3_000])
@pytest.mark.parametrize("value", [0, 1, 32_767])
def test_sound_too_short_or_too_flat_to_tell_is_no_error(length: int, value: int) -> None:
    assert isinstance(prosody(np.full(length, value, np.int16), length), Prosody)
    assert prosody(np.zeros(0, np.int16), 0) == NO_PROSODY


# -- real speech ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whisper() -> Iterator[Whisper]:
    model = Whisper(parallel=1)
    yield model
    model.close()


@pytest.fixture(scope="module")
def vad() -> Vad:
    return Vad()


def score_at_the_pause(vad: Vad, whisper: Whisper, pcm: NDArray[np.int16]) -> float:
    listener, state = Listener(TurnDetection()), VadState()
    wanted: Transcribe | None = None
    for frame in listener.take(np.concatenate([pcm, np.zeros(9_600, np.int16)])):
        for report in listener.hear(frame, vad.probability(state, frame.astype(np.float32) / np.float32(32_768))):
            wanted = report if isinstance(report, Transcribe) else wanted
    assert wanted is not None
    text = whisper.transcribe(wanted.pcm.astype(np.float32) / np.float32(32_768)).text
    return completeness(text, prosody(wanted.pcm, wanted.speech_end - wanted.start))


def test_recordings_seem_finished_at_their_end_and_unfinished_in_their_midst(vad: Vad, whisper: Whisper) -> None:
    ends, midst = [], []
    for recording in RECORDINGS:
        with wave.open(str(VOICE / recording["file"])) as file:
            pcm = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        start, end = recording["speech_start_s"], recording["speech_end_s"]
        ends.append(score_at_the_pause(vad, whisper, pcm[: int(end * 16_000)]))
        midst += [
            score_at_the_pause(vad, whisper, pcm[: int((start + part * (end - start)) * 16_000)]) for part in (0.4, 0.6)
        ]
    assert sum(score > 0.5 for score in ends) >= 5
    assert sum(score < 0.5 for score in midst) >= 11
    assert min(ends) > 0.4
