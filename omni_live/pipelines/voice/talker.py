"""The talker: text that comes in pieces is cut where a speaker would pause, and each piece becomes acoustic frames.

A step is one piece through the network, the turn first whose listener waits for a first sound, then by deadline.
Frames leave in blocks; each utterance's first block carries its text, so that the transcript travels with the sound.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from omni_live.engines.contract import EngineOptions, Host, Load, Turn, TurnError
from omni_live.engines.options import Options, param_int, param_real, param_text
from omni_live.engines.stateless import Stateless
from omni_live.models import hibari_frames
from omni_live.models.hibari_frames import DEFAULT_VOICE, VOICES, FrameBlock, Utterance
from omni_live.pipelines.voice.clauses import ClauseCutter, Piece
from omni_live.protocols.arrays import pack
from omni_live.sessions.payload import Payload, Scalar

BLOCK_FRAMES: Final = 40
"""Frames of one block: half a second, 480 kB."""
NO_END: Final = -1


@dataclass(slots=True)
class Speech:
    """One turn's text on its way to frames."""

    turn: Turn
    cutter: ClauseCutter
    voice: str
    speed: float
    pieces: deque[Piece] = field(default_factory=deque)
    utterances: deque[tuple[Utterance, str]] = field(default_factory=deque)
    """With the text that travels with each."""
    blocks: deque[Payload] = field(default_factory=deque)
    spoken: bool = False
    flushed: bool = False

    @property
    def urgency(self) -> tuple[bool, int]:
        return (self.spoken, self.turn.stamp.deadline_ns)


class Talker(Stateless):
    """Engine of the talker stage. Options: voice, first_words, first_words_crowded, crowd.

    Where `crowd` turns wait for their first sound, the first piece has `first_words_crowded` words only, so that each
    is heard sooner. That makes a reply's sound depend on who else is there, so it is off (0) unless asked for.
    """

    inline = False

    def __init__(self, options: EngineOptions) -> None:
        super().__init__()
        read = Options("talker", options)
        self._voice = read.text("voice", DEFAULT_VOICE)
        self._first_words = read.whole("first_words", 6, 1, 32)
        self._first_words_crowded = read.whole("first_words_crowded", 4, 1, 32)
        self._crowd = read.whole("crowd", 0, 0, 1024)
        read.done()
        self._speeches: list[Speech] = []

    def load(self, host: Host) -> None:
        self._model = hibari_frames.Talker()
        self._model.warm()

    def begin(self, turn: Turn) -> None:
        voice = param_text(turn.params, "voice", self._voice)
        if voice not in VOICES:
            raise TurnError(turn, "unknown_voice")
        waiting = sum(not speech.spoken for speech in self._speeches)
        crowded = 0 < self._crowd <= waiting + 1
        words = self._first_words_crowded if crowded else self._first_words
        words = param_int(turn.params, "first_words", words)
        self._speeches.append(Speech(turn, ClauseCutter(words), voice, param_real(turn.params, "speed", 1.0)))

    def drop(self, turn: Turn) -> None:
        self._speeches = [speech for speech in self._speeches if speech.turn is not turn]

    def step(self) -> bool:
        for speech in sorted(self._speeches, key=lambda s: s.urgency):
            self._take(speech)
            if self._send(speech):
                continue
            if speech.utterances:
                self._speak(speech)
                return True
        return False

    def _take(self, speech: Speech) -> None:
        """Text is only taken while there is nothing to say: what waits, waits at the producer."""
        turn = speech.turn
        while not speech.utterances and not speech.blocks and (payload := turn.take()) is not None:
            text, start = payload.meta.get("text"), payload.meta.get("start")
            if isinstance(text, str) and isinstance(start, int):
                self._plan(speech, speech.cutter.push(text, start))
        if turn.exhausted() and not speech.flushed and not speech.utterances:
            speech.flushed = True
            self._plan(speech, speech.cutter.flush())

    def _plan(self, speech: Speech, pieces: list[Piece]) -> None:
        for piece in pieces:
            at = piece.start_char
            for utterance in self._model.plan(piece.text, piece.start_char):
                text = piece.text[at - piece.start_char : utterance.end_char - piece.start_char]
                at = utterance.end_char
                speech.utterances.append((utterance, text))

    def _send(self, speech: Speech) -> bool:
        """Send what is ready; True where the speech has to wait for its receiver or is over."""
        while speech.blocks and speech.turn.room():
            speech.turn.emit(speech.blocks.popleft())
        if speech.blocks:
            return True
        if speech.flushed and not speech.utterances:
            self.drop(speech.turn)
            speech.turn.finish()
            return True
        return False

    def _speak(self, speech: Speech) -> None:
        utterance, text = speech.utterances.popleft()
        block = self._model.speak(utterance, speech.speed, speech.voice)
        speech.blocks.extend(blocks(block, text))
        speech.spoken = True
        self._send(speech)

    def load_now(self) -> Load:
        return Load(len(self.sessions), len(self._speeches), sum(len(s.utterances) for s in self._speeches), 0, 0)

    def shut(self) -> None:
        self._speeches.clear()


def blocks(block: FrameBlock, text: str) -> list[Payload]:
    """Payloads of `BLOCK_FRAMES` frames: arrays frames float32[F, 3006] and chars int32[F]; meta text and ends."""
    count = len(block.chars)
    starts = range(0, count, BLOCK_FRAMES) if count else range(1)
    payloads = []
    for start in starts:
        stop = min(count, start + BLOCK_FRAMES)
        last = stop == count
        ends = block.ends if last and block.ends is not None else NO_END
        frames = np.ascontiguousarray(block.frames[start:stop])
        meta: dict[str, Scalar] = {"text": text if not start else "", "ends": ends}
        payloads.append(pack("frames", meta, frames=frames, chars=block.chars[start:stop]))
    return payloads
