"""What the benches say to the server: recordings of speech, and sounds that are no speech."""

from pathlib import Path
from typing import Final

import numpy as np

from omni_live.clients.converse import load_utterance
from omni_live.clients.jitter import Pcm
from omni_live.clients.turns import Utterance
from omni_live.clients.wav import BadWav, Wave, to_pcm

RATE_HZ: Final = 16_000
REPOSITORY_WAVS: Final = Path("tests/data/voice")
NOISE_DB: Final = -30.0
"""Level of the noise bursts, of full scale."""
ECHO_DB: Final = -20.0
"""Level of the reply's echo in the microphone, of the user's."""
MHM_S: Final = 0.35
_WINDOW: Final = RATE_HZ // 100


class NoWavs(Exception):
    """There is nothing to say; the text says where it was looked for."""


def find_wavs(folder: Path | None) -> Path:
    """The folder to use: the one given, else the repository's where the work directory is one. Raises NoWavs."""
    if folder is not None:
        if not folder.is_dir():
            raise NoWavs(f"{folder} is not a folder of wav files")
        return folder
    if REPOSITORY_WAVS.is_dir():
        return REPOSITORY_WAVS
    raise NoWavs(
        f"the recordings are not shipped: run this in the repository (there is no {REPOSITORY_WAVS} here), or name a "
        "folder of wav files and transcripts.json with --wavs"
    )


def load_wavs(folder: Path | None) -> list[Utterance]:
    """Each recording of the folder, by name, at 16 kHz mono. Raises NoWavs."""
    found = find_wavs(folder)
    paths = sorted(found.glob("*.wav"))
    if not paths:
        raise NoWavs(f"{found} holds no wav files")
    try:
        return [load_utterance(path, RATE_HZ) for path in paths]
    except BadWav as error:
        raise NoWavs(str(error)) from error


def level_db(pcm: Pcm) -> float:
    """How loud speech is: RMS of full scale over the 10 ms windows within 25 dB of the loudest, in dB."""
    whole = len(pcm) // _WINDOW * _WINDOW
    if not whole:
        return -120.0
    power = np.mean((pcm[:whole].astype(np.float64) / 2**15).reshape(-1, _WINDOW) ** 2, axis=1)
    active = power[power >= power.max() * 10**-2.5]
    return float(10 * np.log10(max(active.mean(), 1e-12)))


def scaled(wave: Wave, to_db: float) -> Pcm:
    """The sound at a level; silence stays silence."""
    have_db = level_db(to_pcm(wave / max(float(np.abs(wave).max(initial=0.0)), 1e-9) * np.float32(0.5)))
    gain = 10 ** ((to_db - have_db) / 20)
    return to_pcm(wave / max(float(np.abs(wave).max(initial=0.0)), 1e-9) * np.float32(0.5 * gain))


def led_in(utterance: Utterance, samples: int) -> Utterance:
    """The utterance with so many samples of silence before it."""
    pcm = np.concatenate([np.zeros(samples, np.int16), utterance.pcm])
    start, end = utterance.speech_start + samples, utterance.speech_end + samples
    return Utterance(utterance.name, pcm, start, end, utterance.text)


def aligned(utterances: list[Utterance]) -> list[Utterance]:
    """Silence before each, so that all end their speech at the same sample."""
    latest = max(utterance.speech_end for utterance in utterances)
    return [led_in(utterance, latest - utterance.speech_end) for utterance in utterances]


def mhm(to_db: float) -> Pcm:
    """A short mm-hm: two voiced nasal syllables with a breath between them, 350 ms in all."""
    time = np.arange(round(MHM_S * RATE_HZ)) / RATE_HZ
    place = time / MHM_S
    pitch = np.interp(place, [0.0, 0.4, 0.5, 1.0], [130.0, 115.0, 115.0, 160.0])
    phase = 2 * np.pi * np.cumsum(pitch) / RATE_HZ
    between = np.exp(-(((place - 0.45) / 0.07) ** 2))
    wave = np.zeros(len(time))
    for harmonic in range(1, int(5000 / pitch.mean())):
        strength = _nasal(harmonic * float(pitch.mean()))
        wave += strength * np.sin(harmonic * phase + 0.3 * harmonic**2)  # no two harmonics peak together
    wave *= 1.0 - 0.9 * between
    wave += 0.05 * np.abs(wave).max() * between * np.random.default_rng(0).standard_normal(len(time))
    wave *= np.clip(np.minimum(time, MHM_S - time) / 0.02, 0.0, 1.0)
    return scaled(wave.astype(np.float32), to_db)


def _nasal(hz: float) -> float:
    """How strong a frequency is behind a closed mouth: one strong resonance, and weak ones above."""
    resonances = ((250.0, 60.0, 1.0), (1000.0, 120.0, 0.15), (2200.0, 200.0, 0.1), (3200.0, 300.0, 0.04))
    return sum(strength / (1 + ((hz - centre) / width) ** 2) for centre, width, strength in resonances)


def noise(kind: str, seconds: float, rng: np.random.Generator, to_db: float = NOISE_DB) -> Pcm:
    """A burst of `white` or `pink` noise with edges of 10 ms."""
    count = round(seconds * RATE_HZ)
    spectrum = np.fft.rfft(rng.standard_normal(count))
    if kind == "pink":
        spectrum /= np.sqrt(np.maximum(np.arange(len(spectrum)), 1.0))
        spectrum[0] = 0.0
    wave = np.fft.irfft(spectrum, count)
    wave *= 10 ** (to_db / 20) / np.sqrt(np.mean(wave**2))
    ramp = np.clip(np.minimum(np.arange(count), np.arange(count)[::-1]) / (RATE_HZ / 100), 0.0, 1.0)
    return to_pcm((wave * ramp).astype(np.float32))
