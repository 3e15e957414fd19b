"""What the benches say: recordings and sounds that are no speech."""

import json
from pathlib import Path

import numpy as np
import pytest

from omni_live.bench.wavs import (
    MHM_S,
    NOISE_DB,
    RATE_HZ,
    NoWavs,
    aligned,
    find_wavs,
    level_db,
    load_wavs,
    mhm,
    noise,
)
from omni_live.clients.turns import Utterance
from omni_live.clients.wav import write_wav


def tone(seconds: float, amplitude: float = 8000.0) -> np.ndarray:
    return np.round(amplitude * np.sin(np.arange(round(seconds * RATE_HZ)) * 0.2)).astype(np.int16)


def utterance(lead_s: float, speech_s: float) -> Utterance:
    lead = np.zeros(round(lead_s * RATE_HZ), np.int16)
    pcm = np.concatenate([lead, tone(speech_s), lead])
    return Utterance("a.wav", pcm, len(lead), len(pcm) - len(lead), "a")


def test_recordings_come_by_name_with_what_is_known_of_them(tmp_path: Path) -> None:
    write_wav(tmp_path / "b.wav", tone(1.0), RATE_HZ)
    write_wav(tmp_path / "a.wav", tone(1.0), RATE_HZ)
    listed = [{"file": "a.wav", "text": "hello", "speech_end_s": 0.75}]
    (tmp_path / "transcripts.json").write_text(json.dumps(listed))
    first, second = load_wavs(tmp_path)
    assert (first.name, first.text, first.speech_end) == ("a.wav", "hello", 12_000)
    assert (second.name, second.text) == ("b.wav", "")


def test_a_folder_without_recordings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoWavs, match="holds no wav files"):
        load_wavs(tmp_path)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoWavs, match="is not a folder"):
        find_wavs(tmp_path / "gone")


def test_outside_the_repository_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NoWavs, match="--wavs"):
        find_wavs(None)


def test_in_the_repository_its_own_recordings_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tests" / "data" / "voice"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_wavs(None).resolve() == folder.resolve()


def test_a_file_that_is_no_recording_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"nothing")
    with pytest.raises(NoWavs, match=r"a\.wav: not a wav file"):
        load_wavs(tmp_path)


def test_aligned_users_end_their_speech_at_the_same_sample() -> None:
    users = aligned([utterance(0.5, 1.0), utterance(0.2, 2.0), utterance(0.1, 0.3)])
    assert len({user.speech_end for user in users}) == 1
    assert [user.speech_end - user.speech_start for user in users] == [16_000, 32_000, 4_800]
    for user in users:
        assert np.any(user.pcm[user.speech_start : user.speech_end])
        assert not np.any(user.pcm[: user.speech_start])


def test_the_level_is_that_of_the_speech_and_not_of_the_silence_around_it() -> None:
    alone, surrounded = tone(1.0), utterance(1.0, 1.0).pcm
    expected = 20 * np.log10(8000 / 2**15 / np.sqrt(2))
    assert level_db(alone) == pytest.approx(expected, abs=0.1)
    assert level_db(surrounded) == pytest.approx(expected, abs=0.1)


def test_a_mm_hm_is_short_voiced_and_as_loud_as_the_user() -> None:
    sound = mhm(-20.0)
    assert len(sound) == round(MHM_S * RATE_HZ)
    assert level_db(sound) == pytest.approx(-20.0, abs=1.0)
    power = np.abs(np.fft.rfft(sound)) ** 2
    hz = np.fft.rfftfreq(len(sound), 1 / RATE_HZ)
    assert power[(hz > 90) & (hz < 600)].sum() > 2 * power[hz > 600].sum()


@pytest.mark.parametrize("kind", ["white", "pink"])
def test_noise_is_a_second_long_at_its_level(kind: str) -> None:
    sound = noise(kind, 1.0, np.random.default_rng(0))
    assert len(sound) == RATE_HZ
    assert 10 * np.log10(np.mean((sound / 2**15) ** 2)) == pytest.approx(NOISE_DB, abs=0.5)


def test_pink_noise_falls_by_three_decibels_an_octave() -> None:
    power = np.abs(np.fft.rfft(noise("pink", 4.0, np.random.default_rng(0)).astype(float))) ** 2
    low, high = power[2000:4000].mean(), power[8000:16000].mean()
    assert 10 * np.log10(low / high) == pytest.approx(6.0, abs=0.7)
