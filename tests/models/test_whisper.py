"""Whisper against real speech, noise, threads and interpreter exit."""

import json
import re
import subprocess
import sys
import threading
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_live.models.whisper import Closed, Loop, Transcript, Whisper, find_loop, log_mel

VOICE = Path(__file__).parents[1] / "data" / "voice"
RECORDINGS = json.loads((VOICE / "transcripts.json").read_text())


@pytest.fixture(scope="module")
def whisper() -> Iterator[Whisper]:
    model = Whisper()
    yield model
    model.close()


def speech(index: int, before_s: float = 0.3, behind_s: float = 0.25) -> NDArray[np.float32]:
    recording = RECORDINGS[index]
    with wave.open(str(VOICE / recording["file"])) as file:
        pcm = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / np.float32(32768)
    start, end = recording["speech_start_s"] - before_s, recording["speech_end_s"] + behind_s
    part: NDArray[np.float32] = pcm[int(start * 16_000) : int(end * 16_000)]
    return part


def words(text: str) -> list[str]:
    return re.sub(r"[^a-z0-9' ]", " ", text.lower()).split()


def test_the_recordings_are_heard_word_for_word(whisper: Whisper) -> None:
    for index, recording in enumerate(RECORDINGS):
        transcript = whisper.transcribe(speech(index))
        assert words(transcript.text) == words(recording["text"])
        assert transcript.avg_logprob > -0.8
        assert transcript.no_speech < 0.5


def test_a_minute_of_speech_loses_no_sentence_at_the_windows_edges(whisper: Whisper) -> None:
    pcm = np.concatenate([speech(index) for _ in range(4) for index in range(6)])
    assert len(pcm) > 60 * 16_000
    expected = [word for _ in range(4) for recording in RECORDINGS for word in words(recording["text"])]
    got = words(whisper.transcribe(pcm).text)
    assert len(got) == pytest.approx(len(expected), rel=0.03)
    assert sum(word in expected for word in got) >= 0.97 * len(expected)


@pytest.mark.parametrize("level_db", [-70, -50, -30, -15])
@pytest.mark.parametrize("length_s", [0.4, 1.5, 3.0])
def test_noise_hum_and_clicks_are_not_made_into_words(whisper: Whisper, level_db: int, length_s: float) -> None:
    random = np.random.default_rng(3)
    n = int(length_s * 16_000)
    sounds = {
        "hiss": random.standard_normal(n),
        "rumble": np.cumsum(random.standard_normal(n)) / 40,
        "hum": np.sin(np.arange(n) * 2 * np.pi * 100 / 16_000) * 1.4,
        "beep": np.sin(np.arange(n) * 2 * np.pi * 440 / 16_000) * 1.4,
        "clicks": (random.random(n) < 5e-4) * 10.0,
        "coughs": random.standard_normal(n) * np.exp(-(np.arange(n) % 6000) / 1500),
    }
    for name, sound in sounds.items():
        pcm = (sound * 10 ** (level_db / 20)).clip(-1, 1).astype(np.float32)
        assert whisper.transcribe(pcm).text == "", name


def test_no_audio_and_hardly_any_are_nothing(whisper: Whisper) -> None:
    for length in (0, 1, 100, 400):
        assert whisper.transcribe(np.zeros(length, np.float32)) == Transcript("", 0.0, 1.0)
        assert whisper.transcribe(np.ones(length, np.float32)).text == ""


def test_two_threads_hear_what_one_hears(whisper: Whisper) -> None:
    alone = [whisper.transcribe(speech(index)) for index in range(6)]
    heard: dict[int, list[Transcript]] = {}

    def listen(name: int) -> None:
        heard[name] = [whisper.transcribe(speech(index)) for index in range(6)]

    threads = [threading.Thread(target=listen, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(heard.values()) == [alone] * 3


def test_a_closed_model_refuses_and_closes_again() -> None:
    model = Whisper(parallel=1)
    model.close()
    model.close()
    with pytest.raises(Closed):
        model.transcribe(speech(0))


def test_closing_while_others_transcribe_leaves_a_clean_exit() -> None:
    code = """
import threading, numpy as np
from omni_live.models.whisper import Closed, Whisper
model = Whisper()
pcm = np.random.default_rng(0).standard_normal(48_000).astype(np.float32) * 0.1
begun = threading.Barrier(4)
def listen():
    begun.wait()
    try:
        while True:
            model.transcribe(pcm)
    except Closed:
        pass
threads = [threading.Thread(target=listen) for _ in range(3)]
[thread.start() for thread in threads]
begun.wait()
model.close()
[thread.join() for thread in threads]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_loops_are_found_where_they_start() -> None:
    assert find_loop("Never mind. Never mind. Never mind.".split()) == Loop(0, 2)
    assert find_loop("I said stop that stop that".split()) == Loop(2, 2)
    assert find_loop("3 3 3 3".split()) == Loop(0, 1)
    assert find_loop("Is that that or that other one?".split()) is None
    assert find_loop([]) is None


def test_a_spectrogram_does_not_depend_on_how_its_silence_was_made() -> None:
    pcm = speech(0)
    padded = np.pad(pcm, (0, 2 * 16_000))
    assert np.allclose(log_mel(pcm, 6.0), log_mel(padded, 6.0), atol=1e-5)
    assert log_mel(pcm, 6.0).shape == (80, 600)
