"""code2wav: acoustic frames become sound in chunks, 250 ms each at first and a second later on.

Samples and chunks follow from frame indices and the turn's seed alone, never from timing. Each chunk carries the part
of the transcript that is spoken in it, and marks from samples to characters.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from omni_live.engines.contract import EngineOptions, Host, Load, Turn
from omni_live.engines.options import Options, param_int
from omni_live.engines.stateless import Stateless
from omni_live.models.hibari_frames import FrameBlock
from omni_live.models.hibari_wave import Chunk, Vocoder
from omni_live.protocols.arrays import array
from omni_live.sessions.payload import Payload, Scalar

WAITING_FRAMES: Final = 240
"""Frames a reply may have waiting: three seconds, 3 MB."""


@dataclass(slots=True)
class Wave:
    """One turn's frames on their way to sound."""

    turn: Turn
    vocoder: Vocoder
    text: str = ""
    sent: int = 0
    """Characters of the transcript that are out."""
    finished: bool = False
    sounded: bool = False
    ready: Payload | None = field(default=None)

    @property
    def urgency(self) -> tuple[bool, int]:
        return (self.sounded, self.turn.stamp.deadline_ns)


class Code2Wav(Stateless):
    """Engine of the code2wav stage. No options."""

    inline = False

    def __init__(self, options: EngineOptions) -> None:
        super().__init__()
        Options("code2wav", options).done()
        self._waves: list[Wave] = []

    def load(self, host: Host) -> None:
        """The vocoder is signal processing: nothing to load."""

    def begin(self, turn: Turn) -> None:
        self._waves.append(Wave(turn, Vocoder(param_int(turn.params, "seed", 0))))

    def drop(self, turn: Turn) -> None:
        self._waves = [wave for wave in self._waves if wave.turn is not turn]

    def step(self) -> bool:
        return any(self._advance(wave) for wave in sorted(self._waves, key=lambda w: w.urgency))

    def _advance(self, wave: Wave) -> bool:
        """One chunk of one reply; False where it has to wait."""
        turn = wave.turn
        while wave.vocoder.waiting < WAITING_FRAMES and (payload := turn.take()) is not None:
            self._feed(wave, payload)
        if turn.exhausted() and not wave.finished:
            wave.finished = True
            wave.vocoder.finish()
        if not turn.room():
            return False
        chunk = wave.vocoder.next()
        if chunk is not None:
            wave.sounded = True
            turn.emit(self._payload(wave, chunk))
            return True
        if wave.finished:
            self._end(wave)
            return True
        return False

    def _feed(self, wave: Wave, payload: Payload) -> None:
        text, ends = payload.meta.get("text"), payload.meta.get("ends")
        if isinstance(text, str):
            wave.text += text
        end = ends if isinstance(ends, int) and ends >= 0 else None
        frames = np.asarray(array(payload, "frames"), np.float32)
        wave.vocoder.feed(FrameBlock(frames, np.asarray(array(payload, "chars"), np.int32), end))

    def _payload(self, wave: Wave, chunk: Chunk) -> Payload:
        spoken = max(wave.sent, *(mark.char for mark in chunk.marks)) if chunk.marks else wave.sent
        text, wave.sent = wave.text[wave.sent : spoken], spoken
        marks = tuple(number for mark in chunk.marks for number in mark)
        meta: dict[str, Scalar] = {"start": chunk.start, "text": text, "marks": marks}
        return Payload("pcm", meta, chunk.pcm.tobytes())

    def _end(self, wave: Wave) -> None:
        rest = wave.text[wave.sent :]
        if rest:
            wave.turn.emit(Payload("pcm", {"text": rest}))
        self.drop(wave.turn)
        wave.turn.finish()

    def load_now(self) -> Load:
        return Load(len(self.sessions), len(self._waves), 0, 0, 0)

    def shut(self) -> None:
        self._waves.clear()
