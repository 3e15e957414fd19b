"""How finished an utterance seems at a pause: whether to answer soon or to wait for more.

Two things tell. The words: does the transcript trail off, end in a word that wants another, hang in a subordinate
clause? And the voice: speech that ends falls (or rises) in pitch, lets its last sounds die away and has lasted long
enough to say something, while speech that stops in the midst breaks off level. A logistic model weighs both. Its
weights come from tests/pipelines/fit_completeness.py: synthetic speech of 250 sentences and phrases by eleven voices,
whole, cut at word gaps, and paused at a comma that was put in.

A language model adds much where there is one at hand: how likely it is that the utterance is over after its last
word. It comes as `closing`, and may come later than the rest, since it needs the transcript (`with_closing`).
"""

import math
import re
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

# Words that hardly ever end an utterance.
_DANGLING: Final = frozenset(
    "a an the my your his her its our their these those some any no every each of in on at to for from with by about "
    "into over under between through during without against and or but nor so because if when while although though "
    "unless until since that which who whom whose whether as than is are was were am be been being do does did have "
    "has had will would shall should can could may might must i we they he she what how why where very really quite "
    "too more most just also not it's i'm i've i'll i'd don't there's can't we're let's".split()
)
# Words that are an utterance by themselves.
_WHOLE: Final = frozenset(
    "yes no yeah yep nope okay ok sure stop thanks hello hi goodbye bye maybe never absolutely exactly right really "
    "why please help cancel continue".split()
)
_WHOLE_PAIRS: Final = frozenset({"thank you", "go on", "of course", "not really", "got it"})
# A clause that one of these opens needs another, unless it is a question ("when is ...").
_OPENING: Final = frozenset(
    "if when because although though unless while since after before as once until whenever".split()
)
_ASKING: Final = frozenset("is are was were do does did can could will would should has have had am".split())


@dataclass(frozen=True, slots=True)
class Prosody:
    """How the speech ends."""

    pitch: float
    """Of the last voiced 80 ms, in semitones over the utterance's median; 0 where nothing is voiced."""
    level_db: float
    """Of the last 50 ms, over the utterance's loud frames (their 90th percentile)."""
    decay_s: float
    """Time since the speech was last within 12 dB of those."""
    vowel_s: float
    """Length of the last voiced stretch."""
    length_s: float
    """Of the speech."""


NO_PROSODY: Final = Prosody(0.0, 0.0, 0.3, 0.0, 0.05)
"""Of sound too short to tell anything."""


def completeness(text: str, prosody: Prosody, closing: float | None = None) -> float:
    """How finished the utterance seems, 0 (surely goes on) to 1 (surely complete); 0 for no text.

    `closing` is a language model's probability that after the last word the utterance is over: of a sentence mark
    (. ? !) or the turn's end token, given `bare(text)`.
    """
    if not bare(text):
        return 0.0
    score = _logistic(sum(_WEIGHTS[name] * value for name, value in features(text, prosody).items()) + _BIAS)
    return score if closing is None else with_closing(score, closing)


def with_closing(score: float, closing: float) -> float:
    """`completeness` as it is, given what a language model thinks of the text (see there)."""
    return _logistic(_SCORE_WEIGHT * logit(score) + _CLOSING_WEIGHT * logit(closing) + _CLOSING_BIAS)


def bare(text: str) -> str:
    """The text without the marks behind its last word."""
    return re.sub(r"[^\w]+$", "", text)


def features(text: str, prosody: Prosody) -> dict[str, float]:
    """What the model weighs, by name."""
    words = re.findall(r"[a-z0-9']+", text.lower())
    return {
        "marked": float(re.search(r"(^|[^.])[.?!]$", text) is not None),
        "trailing": float(re.search(r"(\.\.|…|-)$", text) is not None),
        "dangling": float(bool(words) and words[-1] in _DANGLING),
        "opening": float(_is_opening(words, text)),
        "whole": float(_is_whole(words)),
        "one_word": float(len(words) == 1),
        "two_words": float(len(words) == 2),
        "pitch": prosody.pitch,
        "pitch_move": abs(prosody.pitch),
        "level": prosody.level_db / 10,
        "decay": prosody.decay_s * 10,
        "vowel": prosody.vowel_s * 10,
        "length": math.log(prosody.length_s),
    }


def _is_opening(words: list[str], text: str) -> bool:
    return len(words) > 1 and words[0] in _OPENING and words[1] not in _ASKING and "," not in text


def _is_whole(words: list[str]) -> bool:
    return 0 < len(words) <= 3 and (words[0] in _WHOLE or " ".join(words) in _WHOLE_PAIRS)


# -- the voice -----------------------------------------------------------------------------------------------------

_RATE_HZ: Final = 8_000
_HOP: Final = 80
_WINDOW: Final = 256
_TRANSFORM: Final = 512
_LAGS: Final = range(20, 134)
"""400 Hz down to 60 Hz."""
_LOOKS_BACK_S: Final = 4.0

F32 = NDArray[np.float32]


def prosody(pcm: NDArray[np.int16], speech_end: int) -> Prosody:
    """How the speech in `pcm` (int16[n], 16 kHz) ends, `speech_end` being the sample up to which there is any.

    Looks at the last 4 s. Levels and pitch are taken every 10 ms; the end is the last frame that stands out from the
    background.
    """
    speech = pcm[: speech_end + _HOP][-int(_LOOKS_BACK_S * 16_000) :]
    speech = speech[: len(speech) // 2 * 2]
    if len(speech) < 2 * _WINDOW:
        return NO_PROSODY
    halved = speech.reshape(-1, 2).astype(np.float32).mean(axis=1) / np.float32(32_768)  # 8 kHz will do for pitch
    frames = np.lib.stride_tricks.sliding_window_view(halved, _WINDOW)[::_HOP]
    middle = frames[:, (_WINDOW - _HOP) // 2 : (_WINDOW + _HOP) // 2]
    level = 10 * np.log10(np.square(middle).mean(axis=1) + 1e-10)
    loud = float(np.percentile(level[level > level.max() - 30], 90))
    standing_out = np.flatnonzero(level > max(float(np.percentile(level, 10)) + 8, loud - 32))
    if len(standing_out) < 3:
        return NO_PROSODY
    first, last = int(standing_out[0]), int(standing_out[-1])
    level = level[first : last + 1]
    pitch = _pitch(frames[first : last + 1], level)
    return Prosody(
        pitch=_final_pitch(pitch),
        level_db=float(level[-5:].mean()) - loud,
        decay_s=(len(level) - 1 - int(np.flatnonzero(level > loud - 12)[-1])) / 100,
        vowel_s=min(_last_run(pitch > 0), 60) / 100,
        length_s=max(len(level), 5) / 100,
    )


def _pitch(frames: F32, level: F32) -> F32:
    """Semitones over 1 Hz per frame by autocorrelation, 0 where unvoiced: float32[n, 256], float32[n] to float32[n]."""
    spectra = np.fft.rfft((frames - frames.mean(axis=1, keepdims=True)) * _TAPER, _TRANSFORM)
    similar = np.fft.irfft(spectra.real**2 + spectra.imag**2)[:, : _LAGS.stop]
    similar = similar / (similar[:, :1] + 1e-9) / _TAPER_SIMILAR
    similar = similar[:, _LAGS.start :]
    best = similar.max(axis=1)
    # The first peak nearly as good as the best: later ones are its multiples.
    rising = np.diff(similar, axis=1, append=similar[:, -1:]) > 0
    lag = _LAGS.start + np.argmax((similar > 0.9 * best[:, None]) & ~rising, axis=1)
    voiced = (best > 0.55) & (level > level.max() - 32)
    semitones: F32 = np.where(voiced, 12 * np.log2(_RATE_HZ / lag), 0.0).astype(np.float32)
    return semitones


def _final_pitch(pitch: F32) -> float:
    voiced = pitch[pitch > 0]
    last = pitch[-40:][pitch[-40:] > 0][-8:]
    if len(last) < 4:
        return 0.0
    return float(np.clip(np.median(last) - np.median(voiced), -12, 12))


def _last_run(voiced: NDArray[np.bool_]) -> int:
    """Frames in the last run of voiced ones, gaps of one frame included."""
    where = np.flatnonzero(voiced)
    if len(where) == 0:
        return 0
    breaks = np.flatnonzero(np.diff(where) > 2)
    return int(where[-1] - (where[breaks[-1] + 1] if len(breaks) else where[0])) + 1


_TAPER: Final[F32] = np.hanning(_WINDOW).astype(np.float32)
_TAPER_SIMILAR: Final[NDArray[np.float64]] = np.fft.irfft(np.abs(np.fft.rfft(_TAPER, _TRANSFORM)) ** 2)[
    : _LAGS.stop
] / (float(np.square(_TAPER).sum()))


# -- the weights ---------------------------------------------------------------------------------------------------


def _logistic(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-max(-30.0, min(30.0, x))))


def logit(p: float) -> float:
    return math.log((p + 0.003) / (1.0 - p + 0.003))


_WEIGHTS: Final = {
    "marked": 1.055,
    "trailing": -0.790,
    "dangling": -1.377,
    "opening": -1.624,
    "whole": 1.282,
    "one_word": 4.447,
    "two_words": 2.612,
    "pitch": -0.138,
    "pitch_move": 0.103,
    "level": -0.422,
    "decay": 0.385,
    "vowel": 0.271,
    "length": 2.848,
}
_BIAS: Final = -4.189
_SCORE_WEIGHT: Final = 0.702
_CLOSING_WEIGHT: Final = 0.565
_CLOSING_BIAS: Final = 0.92
