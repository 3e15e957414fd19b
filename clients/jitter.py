"""The jitter buffer of one reply: sound waits here until it is played.

Playing starts when enough is there (the depth) or no more will come. A buffer that runs dry in the middle waits for the
depth again, which has grown: what underran once will again. The depth belongs to the connection, so replies share it.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Pcm = npt.NDArray[np.int16]


@dataclass(slots=True)
class Depth:
    """How much sound is gathered before playing, in samples."""

    samples: int
    most: int

    def grow(self) -> None:
        self.samples = min(self.most, self.samples + self.samples // 2)


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive samples of a reply and the position of the first."""

    start: int
    pcm: Pcm


@dataclass(slots=True)
class JitterBuffer:
    depth: Depth
    end: int = 0
    """The position behind the last sample that came."""
    samples: int = 0
    """Samples waiting."""
    complete: bool = False
    """No more will come."""
    missing: int = 0
    """Samples that never came: the server's journal lost them while the socket was down."""
    playing: bool = False
    begun: bool = False
    _pieces: deque[Piece] = field(default_factory=deque)

    def push(self, start: int, pcm: Pcm) -> None:
        """Sound that belongs at `start`; what was there already is left out."""
        fresh = pcm[max(0, self.end - start) :]
        start = max(start, self.end)
        if not len(fresh):
            return
        self.missing += start - self.end
        self._pieces.append(Piece(start, fresh))
        self.end = start + len(fresh)
        self.samples += len(fresh)

    def pull(self, samples: int) -> list[Piece]:
        """Up to so many samples; fewer, or none, where they are not there yet."""
        if not self.playing and not self._may_start():
            return []
        self.playing = self.begun = True
        taken: list[Piece] = []
        while samples and self._pieces:
            piece = self._pieces.popleft()
            if len(piece.pcm) > samples:
                self._pieces.appendleft(Piece(piece.start + samples, piece.pcm[samples:]))
                piece = Piece(piece.start, piece.pcm[:samples])
            taken.append(piece)
            samples -= len(piece.pcm)
            self.samples -= len(piece.pcm)
        if samples and not self.complete:
            self.playing = False
        return taken

    def clear(self) -> int:
        """Discard what waits; returns how many samples that were."""
        discarded, self.samples = self.samples, 0
        self._pieces.clear()
        return discarded

    def _may_start(self) -> bool:
        return self.samples >= self.depth.samples or (self.complete and self.samples > 0)
