"""The echo guard: keeps a loudspeaker's sound out of the microphone where the user wears no headset.

This is no echo canceller. While a reply can be heard the microphone is turned down, so that the server does not take
the reply for the user; it is let through when it is clearly louder than the loudspeaker alone makes it. How loud that
is, the guard learns while it listens: the usual ratio of what the microphone takes to what the loudspeaker gives.
"""

from collections import deque

import numpy as np

from omni_live.clients.jitter import Pcm

TURNED_DOWN = 10 ** (-30 / 20)
CLEARLY = 10 ** (8 / 20)
"""The user is louder than the echo by this, or taken for it."""
RATIOS = 150
"""Blocks over which the usual ratio is taken: 3 s of 20 ms."""
LEARNED = 15
"""Blocks of a reply before the ratio is trusted; until then everything is turned down."""
TAIL = 15
"""Blocks for which a loudspeaker's block may still be heard: its way through the card and the room."""
HANGOVER = 10
"""Blocks for which the microphone stays open after the user was heard, so that words keep their ends."""


def level(pcm: Pcm) -> float:
    """Root mean square, full scale at 1."""
    return float(np.sqrt(np.mean((pcm.astype(np.float64) / 2**15) ** 2))) if len(pcm) else 0.0


class EchoGuard:
    """Takes blocks of both directions in the order of time, 20 ms each."""

    def __init__(self) -> None:
        self._given: deque[float] = deque(maxlen=TAIL)
        self._ratios: deque[float] = deque(maxlen=RATIOS)
        self._open = 0

    def played(self, pcm: Pcm) -> None:
        """What goes to the loudspeaker."""
        self._given.append(level(pcm))

    def heard(self, pcm: Pcm) -> Pcm:
        """What of the microphone's block is to be sent."""
        given = max(self._given, default=0.0)
        if given < 1e-3:
            self._open = 0
            return pcm
        taken = level(pcm)
        learned = len(self._ratios) >= LEARNED
        usual = float(np.median(self._ratios)) if learned else 0.0
        self._ratios.append(taken / given)
        if learned and taken > max(usual * given * CLEARLY, 2e-3):
            self._open = HANGOVER
        elif self._open:
            self._open -= 1
        else:
            return np.asarray(pcm * TURNED_DOWN, np.int16)
        return pcm
