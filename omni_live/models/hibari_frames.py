"""The talker's model: text to acoustic frames, with hibari's reading rules and its network.

A frame is 12.5 ms: five spectra of 601 bins (harmonic magnitude and phase, noise magnitude, free magnitude and phase;
magnitudes are natural logarithms) and the fundamental frequency in Hz. `hibari_wave` turns frames into samples.

The network was trained on whole sentences and puts 300 ms of digital silence before and 450 ms behind each. Both are
cut here: what stays in front is the onset, what stays behind is the pause that the text's last mark asks for.

Calls are not batched over sessions: the network's batch size is fixed at one, and its quantisation takes its scales
from the whole input, so that a neighbour's text would change the sound.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from omni_live.models.wheels import find

BINS = 601
FEATURES = 5 * BINS + 1
FRAME_RATE_HZ = 80
SAMPLE_RATE_HZ = 24_000
HOP = SAMPLE_RATE_HZ // FRAME_RATE_HZ

MAX_WORDS = 16
MAX_PHONEMES = 240
"""Bound of one call of the network: 80 ms, 20 ms for 16 words of ordinary text."""
MIN_SPEED, MAX_SPEED = 0.5, 2.0

LEAD_FRAMES = 2
SENTENCE_PAUSE = 24
CLAUSE_PAUSE = 14
SHORT_PAUSE = 3
VOICED_HZ = 40.0
QUIET_POWER = 0.3
"""Spectral power below which a frame is silent; about -62 dB of full scale."""

_MAGNITUDES = (0, 2, 3)

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Voice:
    """A way to speak; the network is the same for all."""

    pitch: float = 1.0
    """Factor on the fundamental frequency."""
    level: float = 0.0
    """Added to the logarithm of the magnitudes."""


VOICES: Mapping[str, Voice] = MappingProxyType({"heart": Voice(), "heart-low": Voice(pitch=0.75, level=-0.6)})
DEFAULT_VOICE = "heart"


@dataclass(frozen=True, slots=True)
class FrameBlock:
    """Consecutive frames of one utterance: all of them, or a part where a connector cut it."""

    frames: F32
    """float32 [F, 3006], rows contiguous."""
    chars: npt.NDArray[np.int32]
    """int32 [F]: characters of the reply that have been heard once the frame was played; a word's start always."""
    ends: int | None = None
    """On an utterance's last block: the characters that count as heard behind it. The next frame begins afresh."""


@dataclass(frozen=True, slots=True)
class Utterance:
    """One call of the network: text in the form in which it reads it. Nothing sounds where `ids` is empty."""

    ids: tuple[int, ...]
    """Phonemes between the network's paddings."""
    start_char: int
    words: tuple[tuple[float, int], ...]
    """Each word's share of the time (relative) and the character of the reply at which the next word starts."""
    end_char: int
    pause: int
    """Silent frames behind it."""


@dataclass(frozen=True, slots=True)
class _Word:
    spoken: str
    start: int


class Talker:
    """Reading rules and network, on one thread; 160 MB, loads in half a second. Keeps nothing between calls."""

    def __init__(self) -> None:
        import onnxruntime as ort
        from hibari.g2p import G2P

        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._network = ort.InferenceSession(
            str(find("hibari", "assets/hibari.onnx")), options, providers=["CPUExecutionProvider"]
        )
        self._vocabulary = _vocabulary(find("hibari", "assets/vocab.json"))
        self._read = G2P()

    def warm(self) -> None:
        """Speak a little, so that the first user does not wait for lazy parts (a network for unknown words is one)."""
        for text in ("Hello.", "Sure, the wug and the blicket cost 3.50 dollars, as far as I know."):
            for utterance in self.plan(text, 0):
                self.speak(utterance)

    def plan(self, text: str, start_char: int) -> list[Utterance]:
        """Read a piece of a reply that starts at `start_char`; about 0.1 ms a word. At least one utterance comes back.

        Marks for the eye, emoji and scripts that are not Latin are passed over.
        """
        end_char = start_char + len(text)
        words = [_Word(spoken, start_char + m.start()) for m in _WORD.finditer(_unlink(text)) if (spoken := _spoken(m))]
        if not any(_sounds(word.spoken) for word in words):
            return [Utterance((), start_char, (), end_char, 0)]
        return self._plan(words, start_char, end_char, text[len(text.rstrip()) :].count("\n") > 0)

    def _plan(self, words: Sequence[_Word], start_char: int, end_char: int, line_ends: bool) -> list[Utterance]:
        ids = self._ids(words) if len(words) <= MAX_WORDS else ()
        if len(words) > 1 and not 0 < len(ids) <= MAX_PHONEMES:
            cut = _middle(words)
            border = words[cut].start
            return [
                *self._plan(words[:cut], start_char, border, line_ends=False),
                *self._plan(words[cut:], border, end_char, line_ends),
            ]
        ends = [*(word.start for word in words[1:]), end_char]
        shares = tuple((_share(word.spoken), end) for word, end in zip(words, ends, strict=True))
        pause = SENTENCE_PAUSE if line_ends else _pause(words[-1].spoken)
        padded = (0, *ids[:MAX_PHONEMES], 0) if ids else ()
        return [Utterance(padded, start_char, shares, end_char, pause)]

    def _ids(self, words: Sequence[_Word]) -> tuple[int, ...]:
        phonemes = self._read(" ".join(word.spoken for word in words))
        return tuple(self._vocabulary[p] for p in phonemes if p in self._vocabulary)

    def speak(self, utterance: Utterance, speed: float = 1.0, voice: str = DEFAULT_VOICE) -> FrameBlock:
        """Call the network: 5 ms and 0.08 ms a frame. ValueError for an unknown voice or a speed out of 0.5 to 2."""
        if voice not in VOICES:
            raise ValueError(f"voices are {', '.join(VOICES)}")
        if not MIN_SPEED <= speed <= MAX_SPEED:
            raise ValueError(f"speed is {MIN_SPEED} to {MAX_SPEED}")
        if not utterance.ids:
            return _silent(utterance)
        feeds = {"ids": np.asarray([utterance.ids], np.int64), "speed": np.asarray([speed], np.float32)}
        *spectra, pitch = (output[0] for output in self._network.run(None, feeds))
        loud = np.flatnonzero(_power(spectra, pitch) > QUIET_POWER)
        if not loud.size:
            return _silent(utterance)
        onset, offset = int(loud[0]), int(loud[-1]) + 1
        first, last = max(0, onset - LEAD_FRAMES), min(pitch.size, offset + utterance.pause)
        frames = np.empty((last - first, FEATURES), np.float32)
        for i, spectrum in enumerate(spectra):
            frames[:, i * BINS : (i + 1) * BINS] = spectrum[:, first:last].T
            if i in _MAGNITUDES:
                frames[:, i * BINS : (i + 1) * BINS] += np.float32(VOICES[voice].level)
        frames[:, -1] = pitch[first:last] * VOICES[voice].pitch
        return FrameBlock(frames, _heard(utterance, onset - first, offset - first, last - first), utterance.end_char)


def _silent(utterance: Utterance) -> FrameBlock:
    return FrameBlock(np.empty((0, FEATURES), np.float32), np.empty(0, np.int32), utterance.end_char)


def _power(spectra: Sequence[F32], pitch: F32) -> F32:
    """Each frame's spectral power, from every fourth bin; the pulse train's own power is about a tenth a bin."""
    harmonic, _, noise, free, _ = (2 * np.minimum(spectrum[::4], 7.0) for spectrum in spectra)
    voiced = np.where(pitch > VOICED_HZ, np.float32(0.1), np.float32(0))
    power: F32 = 4 * (voiced * np.exp(harmonic) + np.exp(noise) + np.exp(free)).sum(axis=0)
    return power


def _heard(utterance: Utterance, onset: int, offset: int, count: int) -> npt.NDArray[np.int32]:
    """int32 [count]: characters heard behind each frame; speech lasts from frame `onset` to `offset`."""
    shares = np.cumsum([share for share, _ in utterance.words])
    ends = onset + np.rint(shares / shares[-1] * (offset - onset))
    steps = np.asarray([utterance.start_char, *(char for _, char in utterance.words)], np.int32)
    heard: npt.NDArray[np.int32] = steps[np.searchsorted(ends, np.arange(1, count + 1), side="right")]
    return heard


def _vocabulary(path: Path) -> Mapping[str, int]:
    import msgspec

    return msgspec.json.decode(path.read_bytes(), type=dict[str, int])


_WORD = re.compile(r"[^\s—]+—?|—")
_LINK_TARGET = re.compile(r"\]\([^()\s]*\)?|https?://(?:www\.)?")
_LONG_NUMBER = re.compile(r"\d[\d,]{12,}")
"""Read digit by digit: the rules have no names for such numbers and fail on longer ones."""
_MARKS = ".,;:!?…—–"
_SYMBOLS = frozenset("$£€¥₹%&@+=/°#'’\"“”()<>~^×÷½¼¾-" + _MARKS)
_READ_ALONE = frozenset("&+=%@")


def _unlink(text: str) -> str:
    """The text without the addresses of its links, at the same length."""
    return _LINK_TARGET.sub(lambda m: " " * len(m.group()), text)


def _spoken(match: re.Match[str]) -> str:
    """A word as the reading rules should see it; empty if there is nothing to say or to pause for."""
    word = "".join(
        c if _legible(c) else " " if c in "_|\\" else "" for c in unicodedata.normalize("NFC", match.group())
    )
    word = word.strip() if re.match(r"#\d", word) else word.strip("#~^ ")
    if not _sounds(word):
        return "".join(c for c in word if c in _MARKS)
    return _LONG_NUMBER.sub(lambda m: " ".join(m.group().replace(",", "")), word)


def _sounds(word: str) -> bool:
    return any(c.isalnum() for c in word) or word in _READ_ALONE


@lru_cache(maxsize=4096)
def _legible(char: str) -> bool:
    return char in _SYMBOLS or "0" <= char <= "9" or (char.isalpha() and unicodedata.name(char, "").startswith("LATIN"))


def _middle(words: Sequence[_Word]) -> int:
    """Where to halve a long run of words: behind the mark nearest to the middle, if it is in the inner half."""
    half = len(words) / 2
    marked = [i for i in range(1, len(words)) if words[i - 1].spoken.endswith(tuple(_MARKS))]
    near = min(marked, key=lambda i: abs(i - half), default=0)
    return near if abs(near - half) <= half / 2 else len(words) // 2


def _share(word: str) -> float:
    """A word's rough length: letters, digits as what they are read as, the pause at a mark."""
    digits = sum(c.isdigit() for c in word)
    return len(word) + 3.0 * digits + (4.0 if word.endswith(tuple(_MARKS)) else 1.0)


def _pause(word: str) -> int:
    mark = word.rstrip("\"'”’)")[-1:]
    if mark and mark in ".!?…":
        return SENTENCE_PAUSE
    return CLAUSE_PAUSE if mark and mark in _MARKS else SHORT_PAUSE
