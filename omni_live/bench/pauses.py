"""Pauses put between the words of a recording: does the server take the turn inside one?

A gap between two words is where the sound dips and a recogniser hears exactly the first words of the sentence before
the dip and exactly the other words after it. So a stop consonant inside a word is never taken for one, and a gap that
cannot be told for sure is left alone. The pause is as long as asked for with what was quiet there already; it is filled
with the recording's own room noise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from omni_live.bench.wavs import RATE_HZ
from omni_live.bench.words import plain
from omni_live.clients.jitter import Pcm
from omni_live.clients.turns import Utterance
from omni_live.clients.wav import Wave

Recognise = Callable[[Wave], str]
"""The words in a piece of sound, 16 kHz mono."""

SHORTEST_MS: Final = 400
LONGEST_MS: Final = 700

_STEP: Final = RATE_HZ // 200
"""Levels are taken every 5 ms, over 20 ms."""
_DIP_DB: Final = 10.0
"""A dip is so far under the level of the speech."""
_QUIET_DB: Final = 30.0
"""So far under the level of the speech it is quiet."""
_APART: Final = 6
_EDGE: Final = 20
"""Steps from the ends of the speech within which there is no gap."""
_PADDING: Final = RATE_HZ // 2
_FADE: Final = RATE_HZ // 200
_ROOM: Final = RATE_HZ // 5
_ROOM_LEAST: Final = RATE_HZ // 20
_ROOM_DB: Final = -65.0
"""Noise for a recording that has no quiet stretch of its own."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A place between two words: `at` is the quietest sample, quiet is all from `quiet_from` to `quiet_to`."""

    at: int
    quiet_from: int
    quiet_to: int
    words_before: int

    @property
    def quiet_ms(self) -> float:
        return (self.quiet_to - self.quiet_from) * 1000 / RATE_HZ


@dataclass(frozen=True, slots=True)
class Paused:
    """An utterance with a pause in it; sample positions are those of the new recording."""

    utterance: Utterance
    pause_start: int
    pause_end: int
    pause_ms: float
    after_word: str


def word_gaps(utterance: Utterance, recognise: Recognise) -> list[Gap]:
    """The gaps of a recording whose text is known; one for each quiet place, in order."""
    words = plain(utterance.text)
    sound = utterance.pcm.astype(np.float32) / np.float32(2**15)
    levels = _levels(sound)
    speech_db = _speech_db(utterance, levels)
    gaps: list[Gap] = []
    for dip in _dips(utterance, levels, speech_db):
        before = _words_before(sound, dip * _STEP, words, recognise)
        if before and not any(gap.words_before == before for gap in gaps):
            gaps.append(_gap(levels, dip, speech_db - _QUIET_DB, before))
    return gaps


def paused(utterance: Utterance, gap: Gap, pause_ms: float, rng: np.random.Generator) -> Paused:
    """The utterance with its quiet at the gap made `pause_ms` long. ValueError where it is longer already."""
    missing = round(pause_ms * RATE_HZ / 1000) - (gap.quiet_to - gap.quiet_from)
    if missing <= 0:
        raise ValueError(f"it is quiet for {gap.quiet_ms:.0f} ms there")
    pcm = _spliced(utterance.pcm, gap.at, _room(utterance, missing, rng))
    end = utterance.speech_end + missing
    longer = Utterance(utterance.name, pcm, utterance.speech_start, end, utterance.text)
    word = plain(utterance.text)[gap.words_before - 1]
    return Paused(longer, gap.quiet_from, gap.quiet_to + missing, pause_ms, word)


def place_pauses(found: Sequence[tuple[Utterance, Sequence[Gap]]], count: int, seed: int) -> list[Paused]:
    """So many pauses of 400 to 700 ms, their lengths spread evenly, in gaps drawn by the seed.

    Every gap is used once before any is used again. Empty where there is no gap at all.
    """
    rng = np.random.default_rng(seed)
    fitting = [(utterance, gap) for utterance, gaps in found for gap in gaps if gap.quiet_ms < SHORTEST_MS]
    if not fitting:
        return []
    step_ms = (LONGEST_MS - SHORTEST_MS) / count
    lengths = SHORTEST_MS + step_ms * (rng.permutation(count) + rng.random(count))
    order = [index for _ in range(-(-count // len(fitting))) for index in rng.permutation(len(fitting))]
    placed = []
    for index, length_ms in zip(order[:count], lengths, strict=True):
        utterance, gap = fitting[index]
        placed.append(paused(utterance, gap, float(length_ms), rng))
    return placed


# -- where the words part --------------------------------------------------------------------------------------------


def _levels(sound: Wave) -> Wave:
    """dB of full scale, one value each 5 ms."""
    window = 4 * _STEP
    power = np.convolve(sound.astype(np.float64) ** 2, np.ones(window) / window, "same")[::_STEP]
    levels: Wave = (10 * np.log10(power + 1e-9)).astype(np.float32)
    return levels


def _speech_db(utterance: Utterance, levels: Wave) -> float:
    return float(np.percentile(levels[utterance.speech_start // _STEP : utterance.speech_end // _STEP], 75))


def _dips(utterance: Utterance, levels: Wave, speech_db: float) -> list[int]:
    """Steps at which the level is lowest around and well under the speech, the quietest first."""
    first, last = utterance.speech_start // _STEP + _EDGE, utterance.speech_end // _STEP - _EDGE
    dips: list[int] = []
    for step in range(first, last):
        around = levels[step - 8 : step + 9]
        deep = levels[step] == around.min() and levels[step] < speech_db - _DIP_DB
        if deep and (not dips or step - dips[-1] > _APART):
            dips.append(step)
    return sorted(dips, key=lambda step: float(levels[step]))


def _words_before(sound: Wave, at: int, words: Sequence[str], recognise: Recognise) -> int:
    """How many words lie before the cut; 0 where it is not between two words for sure."""
    silence = np.zeros(_PADDING, np.float32)
    before = plain(recognise(np.concatenate([sound[:at], silence])))
    count = len(before)
    if not 0 < count < len(words) or before != list(words[:count]):
        return 0
    after = plain(recognise(np.concatenate([silence, sound[at:]])))
    return count if after == list(words[count:]) else 0


def _gap(levels: Wave, dip: int, quiet_db: float, words_before: int) -> Gap:
    first = last = dip
    while first > 0 and levels[first - 1] < quiet_db:
        first -= 1
    while last < len(levels) - 1 and levels[last + 1] < quiet_db:
        last += 1
    return Gap(dip * _STEP, first * _STEP, last * _STEP, words_before)


# -- what a pause sounds like ----------------------------------------------------------------------------------------


def _room(utterance: Utterance, samples: int, rng: np.random.Generator) -> Pcm:
    """Room noise: the recording's own from before or behind the speech, repeated to and fro, else faint noise."""
    margin = RATE_HZ // 20
    before = utterance.pcm[: max(0, utterance.speech_start - margin)]
    behind = utterance.pcm[utterance.speech_end + 3 * margin :]
    own = max(before[-_ROOM:], behind[-_ROOM:], key=len)
    if len(own) < _ROOM_LEAST:
        faint: Pcm = np.round(rng.standard_normal(samples) * 2**15 * 10 ** (_ROOM_DB / 20)).astype(np.int16)
        return faint
    there_and_back = np.concatenate([own, own[::-1]])
    start = int(rng.integers(len(there_and_back)))
    return np.resize(np.roll(there_and_back, -start), samples)


def _spliced(pcm: Pcm, at: int, filler: Pcm) -> Pcm:
    """The filler put in at `at`, faded over 5 ms into what is there, so that nothing clicks."""
    before, behind = pcm[:at], pcm[at:]
    fade = min(_FADE, len(before), len(behind), len(filler) // 2)
    ramp = np.linspace(0.0, 1.0, fade)
    middle = filler.astype(np.float64)
    # the sound dies away over the filler's beginning, and swells again over its end
    middle[:fade] = middle[:fade] * ramp + behind[:fade] * (1 - ramp)
    middle[len(middle) - fade :] = middle[len(middle) - fade :] * (1 - ramp) + before[len(before) - fade :] * ramp
    return np.concatenate([before, np.round(middle).astype(np.int16), behind])
