"""Turns what the voice activity detector says of each frame into findings, and says when a transcript is wanted.

One `Listener` per session: no model, no clock, no I/O. Samples are counted from the session's first; arrival time
plays no part. The rules:

- A frame at or above the threshold starts an utterance; while one is open a frame counts as voiced down to
  `_HYSTERESIS` below the threshold, until it has paused, and from then on at the threshold again.
- Fewer than `_DIP_FRAMES` silent frames in a row are a dip inside a word and not found at all.
- The detector notices the end of speech 30 to 110 ms late, and now and then early. The end that is told is where the
  sound itself ends, see `quiet_behind`; silence is counted from there.
- A transcript is wanted once per pause, at the speculative silence, and at a commit which that one does not cover.
- An utterance of less speech than the minimum fades at the speculative silence, any other when nobody commits it.
- Whoever speaks again after `silence_duration_ms` says something new, also where the session's commit is still on its
  way: audio that comes in bulk, after a reconnect, is cut where audio in real time would be.
- The audio of an utterance is bounded. At the bound the listener commits by itself, the transcript being final.
- With turn detection off nothing is found; a commit takes whatever came since the last one, up to the same bound.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_live.sessions.findings import Finding, SpeechBegan, SpeechFaded, SpeechPaused, SpeechWent
from omni_live.sessions.settings import TurnDetection

RATE_HZ: Final = 16_000
FRAME: Final = 512
SILENCE_DB: Final = -120.0
"""The level of digital silence."""

_HYSTERESIS: Final = 0.15
_LEAST: Final = 0.05
"""What the detector says of plain silence stays below; no threshold may call that speech for good."""
_DIP_FRAMES: Final = 3
_SETTLED_FRAMES: Final = 6
"""Silent frames after which a soft last sound has come out if there was one."""
_RECENT_FRAMES: Final = 40
_LATEST: Final = 1920
"""Samples by which the detector notices the end late at most; what looks like more is soft speech in a loud room."""
_BLOCK: Final = 128
_SAMPLES_PER_MS: Final = RATE_HZ // 1000

Pcm = NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class Transcribe:
    """A transcript is wanted of `pcm`, which lies at `start` to `end` of the session's audio."""

    utterance: int
    start: int
    end: int
    speech_end: int
    """Sample where the speech ends (`end` where turn detection is off)."""
    pcm: Pcm
    """int16[end - start], the caller's to keep."""
    final: bool


@dataclass(frozen=True, slots=True)
class Settle:
    """The transcript last wanted of this utterance covers its speech: it answers the commit and is final."""

    utterance: int
    start: int
    end: int


Report = Finding | Transcribe | Settle


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long things may go on."""

    utterance_ms: int = 60_000
    """The longest utterance, and the most audio kept."""
    fade_ms: int = 10_000
    """Silence after which an utterance that nobody committed fades."""


DEFAULT_BOUNDS: Final = Bounds()


class Framer:
    """Cuts audio that comes in pieces of any size into frames of 512 samples."""

    def __init__(self) -> None:
        self._rest: Pcm = np.zeros(0, np.int16)

    def push(self, pcm: Pcm) -> list[Pcm]:
        """The frames (int16[512]) that `pcm` (int16[n]) completes. Their memory may be that of `pcm`."""
        whole = np.concatenate([self._rest, pcm]) if len(self._rest) else pcm
        count = len(whole) // FRAME
        self._rest = whole[count * FRAME :].copy()
        return [whole[index * FRAME : (index + 1) * FRAME] for index in range(count)]

    def drain(self) -> Pcm:
        """The incomplete frame, which is then gone from here."""
        rest, self._rest = self._rest, np.zeros(0, np.int16)
        return rest


class _Tail:
    """The last samples of a stream, at most so many."""

    def __init__(self) -> None:
        self._pieces: deque[Pcm] = deque()
        self.length = 0

    def append(self, pcm: Pcm, room: int) -> int:
        """Add `pcm` behind and drop from the front what is above `room` samples; how many that were."""
        self._pieces.append(pcm)
        self.length += len(pcm)
        return self.trim(room)

    def trim(self, room: int) -> int:
        dropped = max(0, self.length - room)
        self.length -= dropped
        left = dropped
        while left:
            first = self._pieces.popleft()
            if len(first) > left:
                self._pieces.appendleft(first[left:])
            left -= min(left, len(first))
        return dropped

    def drain(self) -> Pcm:
        """All of it in one array; nothing is left here."""
        pcm = np.concatenate([np.zeros(0, np.int16), *self._pieces])
        self._pieces.clear()
        self.length = 0
        return pcm


@dataclass(slots=True)
class _Utterance:
    """The utterance being heard. Positions are samples of the session."""

    number: int
    start: int
    """Prefix padding included."""
    first: int
    """Start of the first voiced frame."""
    speech_end: int
    """Where the sound of the last voiced frames ends; just past them while no pause is told."""
    frames: list[Pcm]
    """The audio from `start` on."""
    length: int
    """Its samples."""
    voiced_frames: int = 0
    silent_frames: int = 0
    covered_to: int = 0
    """The end of the audio last given to a transcript; 0: none."""


class Listener:
    """Hears one session's microphone, frame by frame."""

    def __init__(self, turn_detection: TurnDetection | None, bounds: Bounds = DEFAULT_BOUNDS) -> None:
        """`turn_detection` None: the client commits by hand, and no finding is made."""
        self._bounds = bounds
        self._detection = turn_detection
        self._at = 0
        self._number = 0
        self._utterance: _Utterance | None = None
        self._framer = Framer()
        self._kept = _Tail()  # the audio before an utterance, or (turn detection off) since the commit
        self._lost = 0

    @property
    def at(self) -> int:
        """Samples heard so far."""
        return self._at

    @property
    def lost(self) -> int:
        """Samples that came while turn detection was off and were dropped, since nobody committed them in time."""
        return self._lost

    @property
    def open_utterance(self) -> int | None:
        """The number of the utterance being heard."""
        return None if self._utterance is None else self._utterance.number

    def go_on_from(self, position: int, utterance: int) -> None:
        """Count on where another listener of the same session stopped; nothing where this one is as far already."""
        if position > self._at and self._utterance is None and not self._kept.length:
            self._at, self._number = position, max(self._number, utterance)

    def configure(self, turn_detection: TurnDetection | None) -> list[Report]:
        """Go on with other settings. Turning detection off drops the open utterance but keeps its audio."""
        self._detection = turn_detection
        if turn_detection is not None:
            self._kept.trim(self._room)
            return []
        utterance = self._utterance
        reports: list[Report] = [] if utterance is None else [self._fade(utterance)]
        self._keep(self._framer.drain())
        return reports

    def take(self, pcm: Pcm) -> list[Pcm]:
        """Take audio (int16[n] at 16 kHz); the frames (int16[512]) that it completes, each to be given to `hear`.

        None while turn detection is off: the audio is kept as it is, and nobody needs to hear it.
        """
        if self._detection is not None:
            return self._framer.push(pcm)
        self._keep(pcm.copy())
        return []

    def hear(self, pcm: Pcm, probability: float) -> list[Report]:
        """Hear one frame: int16[512], and how surely it is speech. `pcm` is copied."""
        pcm = pcm.copy()
        detection, utterance = self._detection, self._utterance
        if detection is None or (utterance is None and probability < detection.threshold):
            self._keep(pcm)
            return []
        self._at += FRAME
        if utterance is None:
            return self._begin(pcm)
        voiced = self._voiced(probability, detection, utterance)
        late = self._at - FRAME - utterance.speech_end - _samples(detection.silence_duration_ms)
        if voiced and late >= 0:
            return [*self._close_late(utterance, late // FRAME), *self._begin(pcm)]
        utterance.frames.append(pcm)
        utterance.length += FRAME
        reports = self._go(utterance, pcm) if voiced else self._pause(utterance, detection)
        if self._utterance is not None and utterance.length >= _samples(self._bounds.utterance_ms):
            reports += self._close(utterance)
        return reports

    def commit(self, utterance: int | None = None) -> list[Report]:
        """Close the utterance (None: whichever is open): what is said from now on is another.

        Says how its final transcript comes about: `Transcribe` or `Settle`. Empty where there is nothing to commit:
        the utterance has faded or is closed already, or no audio came.
        """
        if self._detection is None:
            return self._commit_kept()
        current = self._utterance
        if current is None or utterance not in (None, current.number):
            return []
        return self._close(current)

    def nothing(self) -> int:
        """The number of an utterance in which nobody spoke: a commit by hand of nothing but silence gets one too."""
        self._number += 1
        return self._number

    def clear(self) -> int:
        """Forget the audio since the last commit, speech included; how many samples that were."""
        forgotten = self._framer.drain()
        self._at += len(forgotten)
        length = len(forgotten) + self._kept.length + (self._utterance.length if self._utterance else 0)
        self._utterance = None
        self._kept.drain()
        return length

    # -- with turn detection -------------------------------------------------------------------------------------

    def _begin(self, pcm: Pcm) -> list[Report]:
        self._number += 1
        before = self._kept.drain()
        length = len(before) + FRAME
        start = self._at - length
        utterance = _Utterance(self._number, start, self._at - FRAME, self._at, [before, pcm], length)
        self._utterance = utterance
        return [SpeechBegan(utterance.number, start, level_db(pcm)), *self._go(utterance, pcm)]

    def _go(self, utterance: _Utterance, pcm: Pcm) -> list[Report]:
        utterance.voiced_frames += 1
        utterance.silent_frames = 0
        utterance.speech_end = self._at
        return [SpeechWent(utterance.number, self._at, self._at - utterance.first, level_db(pcm))]

    def _pause(self, utterance: _Utterance, detection: TurnDetection) -> list[Report]:
        utterance.silent_frames += 1
        if utterance.silent_frames < _DIP_FRAMES:
            return []
        if utterance.silent_frames <= _SETTLED_FRAMES and utterance.covered_to < utterance.speech_end:
            utterance.speech_end = self._sound_end(utterance)
        silence = self._at - utterance.speech_end
        reports: list[Report] = [SpeechPaused(utterance.number, utterance.speech_end, silence)]
        speculates = detection.speculative_ms > 0
        due = _samples(detection.speculative_ms if speculates else detection.min_silence_ms)
        if silence >= due and utterance.voiced_frames * FRAME < _samples(detection.min_speech_ms):
            return [*reports, self._fade(utterance)]
        if silence >= _samples(self._bounds.fade_ms):
            return [*reports, self._fade(utterance)]
        if speculates and silence >= due and utterance.covered_to < utterance.speech_end:
            reports.append(self._wanted(utterance, final=False))
        return reports

    def _sound_end(self, utterance: _Utterance) -> int:
        silence = utterance.silent_frames * FRAME
        quiet = quiet_behind(np.concatenate(utterance.frames[-_RECENT_FRAMES:]))
        return self._at - (silence if quiet is None else min(quiet, silence + _LATEST))

    def _fade(self, utterance: _Utterance) -> SpeechFaded:
        self._utterance = None
        for pcm in utterance.frames:  # its end may be the prefix of the next one
            self._kept.append(pcm, self._room)
        return SpeechFaded(utterance.number)

    def _close(self, utterance: _Utterance) -> list[Report]:
        self._utterance = None
        if utterance.covered_to >= utterance.speech_end:
            return [Settle(utterance.number, utterance.start, utterance.covered_to)]
        return [self._wanted(utterance, final=True)]

    def _close_late(self, utterance: _Utterance, frames: int) -> list[Report]:
        """Close it as of so many frames before the current one."""
        after = utterance.frames[len(utterance.frames) - frames :]
        del utterance.frames[len(utterance.frames) - frames :]
        utterance.length -= frames * FRAME
        self._at -= (frames + 1) * FRAME
        reports = self._close(utterance)
        for pcm in after:
            self._keep(pcm)
        self._at += FRAME
        return reports

    def _wanted(self, utterance: _Utterance, *, final: bool) -> Transcribe:
        utterance.covered_to = self._at
        pcm = np.concatenate(utterance.frames)
        return Transcribe(utterance.number, utterance.start, self._at, utterance.speech_end, pcm, final)

    @staticmethod
    def _voiced(probability: float, detection: TurnDetection, utterance: _Utterance) -> bool:
        if utterance.silent_frames >= _DIP_FRAMES:
            return probability >= detection.threshold
        return probability >= max(detection.threshold - _HYSTERESIS, _LEAST)

    # -- the audio kept ------------------------------------------------------------------------------------------

    def _commit_kept(self) -> list[Report]:
        pcm = self._kept.drain()
        if len(pcm) == 0:
            return []
        self._number += 1
        return [Transcribe(self._number, self._at - len(pcm), self._at, self._at, pcm, final=True)]

    def _keep(self, pcm: Pcm) -> None:
        self._at += len(pcm)
        dropped = self._kept.append(pcm, self._room)
        if self._detection is None:
            self._lost += dropped

    @property
    def _room(self) -> int:
        detection = self._detection
        return _samples(self._bounds.utterance_ms if detection is None else detection.prefix_padding_ms)


def quiet_behind(pcm: Pcm) -> int | None:
    """How many samples at the end of `pcm` (int16[n], speech and then at least 64 ms without) lie behind its sound.

    Counted in blocks of 8 ms, by level: sound is what stands 7 dB above the last 64 ms and at most 38 dB below the
    loudest block. None where speech and background are too close to tell.
    """
    blocks = pcm[len(pcm) % _BLOCK :].reshape(-1, _BLOCK)
    power = np.square(blocks, dtype=np.float64).mean(axis=1)
    loudest, background = float(power.max()), float(power[-8:].mean())
    if loudest < 100 * background or loudest == 0.0:
        return None
    sounding = np.flatnonzero(power > max(background * 10**0.7, loudest * 10**-3.8))
    return (len(power) - 1 - int(sounding[-1])) * _BLOCK


def level_db(pcm: Pcm) -> float:
    """RMS level of `pcm` (int16[n]) in dB; 0 is a full-scale square wave, `SILENCE_DB` the least."""
    power = float(np.square(pcm, dtype=np.float64).mean()) / 32768.0**2 if len(pcm) else 0.0
    return 10.0 * float(np.log10(power)) if power > 10 ** (SILENCE_DB / 10) else SILENCE_DB


def _samples(ms: int) -> int:
    return ms * _SAMPLES_PER_MS
