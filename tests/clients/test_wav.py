"""Wav files of every kind that recorders write, and those that are broken."""

import struct
import wave
from pathlib import Path

import numpy as np
import pytest

from omni_live.clients.wav import BadWav, parse_wav, read_pcm, read_wav, resampled, to_pcm, write_wav

RATE = 16_000
TONE = (0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE // 4) / RATE)).astype(np.float32)


def _riff(code: int, channels: int, bits: int, data: bytes, *, rate: int = RATE, size: int | None = None) -> bytes:
    frame = channels * bits // 8
    form = struct.pack("<HHIIHH", code, channels, rate, rate * frame, frame, bits)
    body = b"WAVE" + b"LIST" + struct.pack("<I", 3) + b"abc\0"  # an odd chunk and its padding
    body += b"fmt " + struct.pack("<I", len(form)) + form
    body += b"data" + struct.pack("<I", len(data) if size is None else size) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _extensible(bits: int, code: int, data: bytes) -> bytes:
    guid = struct.pack("<H", code) + bytes.fromhex("000000001000800000aa00389b71")
    form = struct.pack("<HHIIHHHHI", 0xFFFE, 1, RATE, RATE * bits // 8, bits // 8, bits, 22, bits, 4) + guid
    body = b"WAVE" + b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _i24(tone: np.ndarray) -> bytes:
    return b"".join(int(value * 2**23).to_bytes(3, "little", signed=True) for value in tone)


KINDS = {
    "8 bits": (_riff(1, 1, 8, (TONE * 127 + 128).astype(np.uint8).tobytes()), 0.02),
    "16 bits": (_riff(1, 1, 16, (TONE * 2**15).astype("<i2").tobytes()), 1e-4),
    "24 bits": (_riff(1, 1, 24, _i24(TONE)), 1e-6),
    "32 bits": (_riff(1, 1, 32, (TONE.astype(np.float64) * 2**31).astype("<i4").tobytes()), 1e-6),
    "float": (_riff(3, 1, 32, TONE.astype("<f4").tobytes()), 1e-6),
    "double": (_riff(3, 1, 64, TONE.astype("<f8").tobytes()), 1e-6),
    "stereo": (_riff(3, 2, 32, np.stack([TONE * 2, TONE * 0], 1).astype("<f4").tobytes()), 1e-6),
    "extensible": (_extensible(16, 1, (TONE * 2**15).astype("<i2").tobytes()), 1e-4),
    "extensible float": (_extensible(32, 3, TONE.astype("<f4").tobytes()), 1e-6),
    "size unknown": (_riff(3, 1, 32, TONE.astype("<f4").tobytes(), size=0xFFFFFFFF), 1e-6),
    "size not filled in": (_riff(3, 1, 32, TONE.astype("<f4").tobytes(), size=0), 1e-6),
    "half a frame at the end": (_riff(1, 1, 16, (TONE * 2**15).astype("<i2").tobytes() + b"\0"), 1e-4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_wav_is_read(kind: str) -> None:
    content, within = KINDS[kind]
    sound, rate = parse_wav(content)
    assert rate == RATE
    np.testing.assert_allclose(sound, TONE, atol=within)


BROKEN = {
    "not a wav file": b"ID3" + bytes(100),
    "cut off": _riff(1, 1, 16, bytes(100), size=5000),
    "no sound in it": _riff(1, 1, 16, b""),
    "no sound": _riff(1, 1, 16, bytes(10))[:20],
    "0 channels": _riff(1, 0, 16, bytes(100)),
    "a rate of 0 Hz": _riff(1, 1, 16, bytes(100), rate=0),
    "a rate of 768000 Hz": _riff(1, 1, 16, bytes(100), rate=768_000),
    "format 2 with 4 bits": _riff(2, 1, 4, bytes(100)),
    "format 1 with 12 bits": _riff(1, 1, 12, bytes(100)),
    "not numbers": _riff(3, 1, 32, np.full(10, np.nan, "<f4").tobytes()),
    "sound before its format": b"RIFF\0\0\0\0WAVEdata\x04\0\0\0\0\0\0\0",
    "a format of too few bytes": b"RIFF\0\0\0\0WAVEfmt \x04\0\0\0\0\0\0\0",
}


@pytest.mark.parametrize("reason", BROKEN)
def test_a_broken_wav_is_refused_with_the_file_and_the_reason(reason: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.wav"
    path.write_bytes(BROKEN[reason])
    with pytest.raises(BadWav, match=f"broken.wav: .*{reason}"):
        read_wav(path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadWav, match=r"missing.wav: No such file"):
        read_wav(tmp_path / "missing.wav")
    with pytest.raises(BadWav, match="Is a directory"):
        read_wav(tmp_path)


@pytest.mark.parametrize(("rate", "to"), [(16_000, 24_000), (44_100, 16_000), (11_025, 16_000), (48_000, 16_000)])
@pytest.mark.parametrize("share", [0.05, 0.47])
def test_another_rate_keeps_pitch_level_and_length(rate: int, to: int, share: float) -> None:
    pitch = round(share * min(rate, to))
    at = np.arange(rate) / rate
    tone = (0.5 * np.sin(2 * np.pi * pitch * at)).astype(np.float32)
    out = resampled(tone, rate, to)
    assert len(out) == to
    expected = 0.5 * np.sin(2 * np.pi * pitch * np.arange(to) / to)
    middle = slice(to // 10, -to // 10)
    np.testing.assert_allclose(out[middle], expected[middle], atol=5e-3)


def test_what_the_lower_rate_cannot_hold_is_filtered_out() -> None:
    tone = np.sin(2 * np.pi * 15_000 * np.arange(48_000) / 48_000).astype(np.float32)
    assert np.abs(resampled(tone, 48_000, 16_000)[1600:-1600]).max() < 0.01


def test_too_loud_samples_are_clipped() -> None:
    assert list(to_pcm(np.array([2.0, -2.0, 0.5], np.float32))) == [32767, -32768, 16384]


def test_what_is_written_is_read_again_and_by_others_too(tmp_path: Path) -> None:
    pcm = np.arange(-500, 500, dtype=np.int16)
    write_wav(tmp_path / "out.wav", pcm, 24_000)
    assert list(read_pcm(tmp_path / "out.wav", 24_000)) == list(pcm)
    with wave.open(str(tmp_path / "out.wav")) as other:
        assert (other.getframerate(), other.getnchannels(), other.getsampwidth()) == (24_000, 1, 2)
        assert other.readframes(1000) == pcm.tobytes()
