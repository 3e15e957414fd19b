"""Text to speech in one call, by the way the voice pipeline takes: cutter, talker, vocoder."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from omni_live.models.hibari_frames import DEFAULT_VOICE, Talker
from omni_live.models.hibari_wave import Chunk, Vocoder
from omni_live.pipelines.voice.clauses import ClauseCutter


def speak(
    talker: Talker, text: str, seed: int = 0, speed: float = 1.0, voice: str = DEFAULT_VOICE
) -> npt.NDArray[np.int16]:
    """Speech at 24 kHz, int16 [N]; empty where there is nothing to say."""
    chunks = [chunk.pcm for chunk in chunks_of(talker, text, seed, speed, voice)]
    return np.concatenate(chunks) if chunks else np.empty(0, np.int16)


def chunks_of(
    talker: Talker, text: str, seed: int = 0, speed: float = 1.0, voice: str = DEFAULT_VOICE
) -> Iterator[Chunk]:
    """The chunks in which the pipeline would send it."""
    cutter, vocoder = ClauseCutter(), Vocoder(seed)
    for piece in [*cutter.push(text, 0), *cutter.flush()]:
        for utterance in talker.plan(piece.text, piece.start_char):
            vocoder.feed(talker.speak(utterance, speed, voice))
            while chunk := vocoder.next():
                yield chunk
    vocoder.finish()
    while chunk := vocoder.next():
        yield chunk
