"""The code2wav stage's model: acoustic frames to samples, while the reply goes on.

The signal processing is hibari's (its dsp module): a pulse train at the fundamental frequency shaped by the harmonic
spectrum, shaped noise, and a part with free phase; one inverse STFT of 1200 samples every 300. What is added is that
it runs in pieces, and that the samples do not depend on the pieces:

- the frames of an utterance are taken in strides fixed by their index (22, then 20 at a time), each stride with
  the same array shapes whatever blocks the frames came in, and nothing is computed twice;
- from stride to stride are carried: the pulse train's phase, its last samples, and the overlap of the inverse STFT;
- the noise of a frame is a function of (seed, index of the frame in the reply).

An utterance starts and ends in silence, so its neighbours need not overlap.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import scipy.fft

from omni_live.models.hibari_frames import BINS, F32, FEATURES, HOP, SAMPLE_RATE_HZ, VOICED_HZ, FrameBlock
from omni_live.sessions.marks import Mark

STRIDE = 20
"""Frames of one stride: 250 ms."""
SMALL_CHUNKS = 4
"""Chunks of one stride at the start of a reply; later ones have `LARGE_STRIDES`."""
LARGE_STRIDES = 4
GAIN = 1.4
KNEE = 0.85
FADE_SAMPLES = SAMPLE_RATE_HZ * 5 // 1000

_N_FFT = 4 * HOP
_BEHIND = 2
"""Frames that a sample waits for: the last window over it is centred two hops later."""
_HIGHEST_HARMONIC_HZ = 11_000.0
_NOISE_ROWS = 1024
_WINDOW = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_N_FFT) / _N_FFT)).astype(np.float32)
_PULSE_WINDOW = _WINDOW / np.float32(HOP)  # a cosine of amplitude 1 then has a peak of 1, so exp(harmonic) is its size
_TAPER = (_WINDOW * _WINDOW).reshape(4, HOP)
_LATER = ((np.arange(HOP, dtype=np.float32) + 0.5) / HOP - 0.5) % np.float32(1)
"""Within a hop the frequency is interpolated between frames (k - 1, k) in its first half, (k, k + 1) in its second."""

Chars = npt.NDArray[np.int32]
C64 = npt.NDArray[np.complex64]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive samples of a reply at 24 kHz."""

    start: int
    """Index of the first sample in the reply."""
    wave: F32
    """float32 [N] within -1 to 1."""
    marks: tuple[Mark, ...]
    """Positions in the reply; in the last chunk of a reply there may be nothing else."""

    @property
    def pcm(self) -> npt.NDArray[np.int16]:
        """int16 [N], little endian."""
        pcm: npt.NDArray[np.int16] = np.rint(self.wave * np.float32(32767)).astype("<i2")
        return pcm


class Vocoder:
    """One reply on its way from frames to samples: feed and finish as frames come, next until it gives None."""

    def __init__(self, seed: int, small_chunks: int = SMALL_CHUNKS, large_strides: int = LARGE_STRIDES) -> None:
        self._seed = seed
        self._small_chunks = small_chunks
        self._large_strides = large_strides
        self._utterances: deque[_Utterance] = deque()
        self._marks: list[Mark] = []
        self._frames_in = 0
        self._samples_out = 0
        self._chunks_out = 0
        self._char = 0
        self._finished = False

    def feed(self, block: FrameBlock) -> None:
        """Take frames on (they are copied). ValueError if shapes do not fit or a value is not finite."""
        count = len(block.chars)
        if block.frames.shape != (count, FEATURES) or not np.isfinite(block.frames).all():
            raise ValueError(f"frames are finite and [F, {FEATURES}]")
        if not self._utterances or self._utterances[-1].ended:
            self._utterances.append(_Utterance(self._seed, self._frames_in))
        self._utterances[-1].extend(block)
        self._frames_in += count

    @property
    def waiting(self) -> int:
        """Frames that are not yet in a chunk, 12 kB each; the feeder's business to bound."""
        return self._frames_in - self._samples_out // HOP

    def finish(self) -> None:
        """No more frames come; what was fed without an end, ends."""
        self._finished = True
        if self._utterances:
            self._utterances[-1].ended = True

    def next(self) -> Chunk | None:
        """The next chunk, as soon as all of its frames are there. Its size follows from frame counts alone."""
        self._pass_empty()
        if not self._utterances:
            return self._cut(np.empty(0, np.float32)) if self._finished and self._marks else None
        utterance = self._utterances[0]
        strides = 1 if self._chunks_out < self._small_chunks else self._large_strides
        if not utterance.offers(strides):
            return None
        wave = np.concatenate(list(utterance.advance(strides)))
        for hops, char in utterance.steps(len(wave) // HOP):
            self._mark(self._samples_out + hops * HOP, char)
        if utterance.over:
            self._mark(self._samples_out + len(wave), utterance.ends)
            self._utterances.popleft()
        return self._cut(wave)

    def _pass_empty(self) -> None:
        while self._utterances and self._utterances[0].over:
            self._mark(self._samples_out, self._utterances.popleft().ends)

    def _mark(self, sample: int, char: int) -> None:
        if char > self._char:
            self._char = char
            self._marks.append(Mark(sample, char))

    def _cut(self, wave: F32) -> Chunk:
        chunk = Chunk(self._samples_out, wave, tuple(self._marks))
        self._marks.clear()
        self._samples_out += len(wave)
        self._chunks_out += 1
        return chunk


class _Utterance:
    """The frames of one call of the network and what is carried from stride to stride."""

    def __init__(self, seed: int, first: int) -> None:
        self.ended = False
        self.ends = 0
        self._seed = seed
        self._first = first
        self._rows: deque[F32] = deque()
        self._pitch = np.empty(0, np.float32)
        self._chars = np.empty(0, np.int32)
        self._done = 0  # frames taken in strides
        self._out = 0  # frames whose samples are out
        self._stepped = 0  # frames whose characters are reported
        self._phase = 0.0
        self._pulses = np.zeros(_BEHIND * HOP, np.float32)  # from two hops before the next stride on
        self._overlap = np.zeros((3, HOP), np.float32)

    @property
    def over(self) -> bool:
        return self.ended and self._done == len(self._pitch)

    def extend(self, block: FrameBlock) -> None:
        if len(block.chars):
            self._rows.append(np.array(block.frames, np.float32, order="C"))
            self._pitch = np.concatenate([self._pitch, self._rows[-1][:, -1]])
            self._chars = np.concatenate([self._chars, block.chars])
        if block.ends is not None:
            self.ended, self.ends = True, block.ends

    def offers(self, strides: int) -> bool:
        """Whether so many strides can be taken, or all that are left."""
        return self.ended or len(self._pitch) >= self._done + self._lead() + strides * STRIDE + _BEHIND

    def advance(self, strides: int) -> Iterator[F32]:
        """Take so many strides, or those that are left; yields what samples are final with each, float32 [N * 300]."""
        while strides and not self.over:
            strides -= 1
            yield self._stride()

    def _stride(self) -> F32:
        count = len(self._pitch)
        start, stop = self._done, min(self._done + self._lead() + STRIDE, count)
        rows = self._take(stop - start)
        self._extend_pulses(min(stop + 1, count))
        spectra = _spectra(rows, self._windows(stop - start), _noise(self._seed, self._first + start, stop - start))
        overlapped = _overlap(spectra, self._overlap)
        self._overlap = overlapped[stop - start :]
        self._done = stop
        return self._release(overlapped, start - _BEHIND, count if self.over else stop - _BEHIND)

    def steps(self, hops: int) -> list[tuple[int, int]]:
        """(hops into the samples, characters heard by then), for the next so many hops, where the latter changes."""
        chars = self._chars[self._stepped : self._stepped + hops]
        self._stepped += hops
        changes = np.flatnonzero(np.diff(chars, prepend=np.int32(-1)))
        return [(int(i) + 1, int(chars[i])) for i in changes]

    def _lead(self) -> int:
        """The first stride is longer, so that what it finishes is a whole number of strides as well."""
        return 0 if self._done else _BEHIND

    def _take(self, count: int) -> F32:
        parts = []
        while count:
            rows = self._rows.popleft()
            if len(rows) > count:
                self._rows.appendleft(rows[count:])
            parts.append(rows[:count])
            count -= len(parts[-1])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _extend_pulses(self, stop: int) -> None:
        """Continue the pulse train through frame `stop` - 1."""
        start = min(self._done + 1, stop) if self._done else 0
        around = np.clip(np.arange(start - 1, stop + 1), 0, len(self._pitch) - 1)
        pulses, self._phase = _pulse_train(self._pitch[around], self._phase)
        self._pulses = np.concatenate([self._pulses, pulses])

    def _windows(self, count: int) -> F32:
        """The pulse train under the next `count` windows, float32 [count, 1200]; beyond the end it is zero."""
        missing = (count + 3) * HOP - len(self._pulses)
        pulses = np.pad(self._pulses, (0, missing)) if missing > 0 else self._pulses
        self._pulses = pulses[count * HOP :]
        windows: F32 = np.lib.stride_tricks.sliding_window_view(pulses, _N_FFT)[: count * HOP : HOP] * _PULSE_WINDOW
        return windows

    def _release(self, overlapped: F32, base: int, stop: int) -> F32:
        """The finished hops from `self._out` to `stop`, levelled; `overlapped` starts at hop `base`."""
        hops = overlapped[self._out - base : stop - base]
        before, after = min(self._out, 1), len(self._pitch) - stop if self.over else _BEHIND
        wave = _limited((hops * _levels(stop - self._out, before, after)).reshape(-1))
        if not self._out:
            wave[:FADE_SAMPLES] *= _FADE
        if self.over:
            wave[-FADE_SAMPLES:] *= _FADE[::-1]
        self._out = stop
        return wave


def _pulse_train(pitch: F32, phase: float) -> tuple[F32, float]:
    """All harmonics below 11 kHz at amplitude 1, as a closed form (Dirichlet's kernel); zero where unvoiced.

    `pitch` is float32 [F + 2], with the frames before and behind; returns float32 [F * 300] and the phase after it,
    both phases in turns.
    """
    half = HOP // 2
    here = pitch[1:-1, None]
    between = np.empty((len(here), HOP), np.float32)
    between[:, :half] = pitch[:-2, None] * (1 - _LATER[:half]) + here * _LATER[:half]
    between[:, half:] = here * (1 - _LATER[half:]) + pitch[2:, None] * _LATER[half:]
    hz = between.reshape(-1)
    voiced = hz > VOICED_HZ
    np.maximum(hz, np.float32(VOICED_HZ), out=hz)
    turns = np.cumsum(hz, dtype=np.float64)
    turns /= SAMPLE_RATE_HZ
    turns += phase
    turns -= np.floor(turns)
    angle = (turns * (2 * np.pi)).astype(np.float32)
    harmonics = np.floor(np.float32(_HIGHEST_HARMONIC_HZ) / hz) + np.float32(0.5)
    below = 2 * np.sin(angle * np.float32(0.5))
    pole = np.abs(below) <= 2e-3
    below[pole] = 1
    pulses = np.sin(harmonics * angle) / below
    pulses[pole] = harmonics[pole]
    pulses -= np.float32(0.5)
    pulses[~voiced] = 0
    return pulses, float(turns[-1]) if turns.size else phase


def _spectra(rows: F32, windows: F32, noise: C64) -> C64:
    """The five parts of each frame put together, complex64 [F, 601]."""
    harmonic, theta, shape, free, phi = (rows[:, i * BINS : (i + 1) * BINS] for i in range(5))
    spectra: C64 = scipy.fft.rfft(windows, axis=1, overwrite_x=True, workers=1)
    spectra *= _polar(_size(harmonic), np.float32(np.pi) * np.tanh(theta))
    spectra += _polar(_size(free), phi)
    size = _size(shape)
    spectra.real += noise.real * size
    spectra.imag += noise.imag * size
    return spectra


def _size(logarithm: F32) -> F32:
    return np.exp(np.minimum(logarithm, np.float32(7)))


def _polar(size: F32, angle: F32) -> C64:
    turned = np.empty(size.shape, np.complex64)
    np.multiply(np.cos(angle), size, out=turned.real)
    np.multiply(np.sin(angle), size, out=turned.imag)
    return turned


def _overlap(spectra: C64, carried: F32) -> F32:
    """Overlap-added windows, float32 [F + 3, 300]; the last three hops are still open."""
    count = len(spectra)
    frames = scipy.fft.irfft(spectra, n=_N_FFT, axis=1, overwrite_x=True, workers=1)
    frames *= _WINDOW
    parts = frames.reshape(count, 4, HOP)
    hops = np.zeros((count + 3, HOP), np.float32)
    hops[:3] = carried
    for k in range(4):
        hops[k : k + count] += parts[:, k]
    return hops


@lru_cache(maxsize=256)
def _levels(hops: int, before: int, after: int) -> F32:
    """What undoes the windows' sum, times the gain: float32 [hops, 300], with so many frames around the hops."""
    levels = np.empty((hops, HOP), np.float32)
    for i in range(hops):
        earlier, later = min(i + before, 1), min(hops - 1 - i + after, 2)
        levels[i] = GAIN / _TAPER[2 - later : 3 + earlier].sum(axis=0)
    return levels


def _limited(wave: F32) -> F32:
    """Bend what is above the knee, so that nothing clips."""
    size = np.abs(wave)
    if size.size and size.max() > KNEE:
        over = size > KNEE
        bent = KNEE + (1 - KNEE) * np.tanh((size[over] - KNEE) / (1 - KNEE))
        wave[over] = np.copysign(bent, wave[over])
    return wave


_FADE = ((np.arange(FADE_SAMPLES, dtype=np.float32) + 0.5) / FADE_SAMPLES).astype(np.float32)


@lru_cache(maxsize=1)
def _noise_table() -> C64:
    """Gaussian noise, complex64 [1024, 601]; drawing it anew for each frame would take half of the vocoder's time."""
    draw = np.random.Generator(np.random.Philox(key=0)).standard_normal((_NOISE_ROWS, 2 * BINS), dtype=np.float32)
    return draw.view(np.complex64)


def _noise(seed: int, first: int, count: int) -> C64:
    """The noise of frames `first` on: rows of the table, picked by a hash of (seed, frame) (SplitMix64)."""
    key = np.arange(first, first + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    key += np.uint64(seed * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15 & (1 << 64) - 1)
    key = (key ^ key >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ key >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    key ^= key >> np.uint64(31)
    noise: C64 = _noise_table()[key % np.uint64(_NOISE_ROWS)]
    return noise
