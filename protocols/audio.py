"""Audio at the doors' edge: encodings and sample rates of clients against int16 at the pipeline's rate.

Sans-IO. numpy always; soxr only where a rate is converted, imported when first needed.
"""

import base64
import binascii
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_live.protocols.fields import Faulty

PCM16: Final = "pcm16"
PCM_F32: Final = "pcm_f32le"
ULAW: Final = "g711_ulaw"
ALAW: Final = "g711_alaw"

ENCODINGS: Final = (PCM16, PCM_F32, ULAW, ALAW)
G711_HZ: Final = 8000
LOW_HZ, HIGH_HZ = 8000, 48000
"""Sample rates a client may name."""

Samples = NDArray[np.int16]

_SPELLINGS: Final = {
    "audio/pcm": PCM16,
    "audio/pcm16": PCM16,
    "pcm": PCM16,
    "pcm16": PCM16,
    "pcm_s16le": PCM16,
    "s16le": PCM16,
    "audio/pcm_f32le": PCM_F32,
    "pcm_f32le": PCM_F32,
    "f32le": PCM_F32,
    "audio/pcmu": ULAW,
    "audio/g711_ulaw": ULAW,
    "g711_ulaw": ULAW,
    "g711-ulaw": ULAW,
    "ulaw": ULAW,
    "mulaw": ULAW,
    "audio/pcma": ALAW,
    "audio/g711_alaw": ALAW,
    "g711_alaw": ALAW,
    "g711-alaw": ALAW,
    "alaw": ALAW,
}


def encoding_named(name: str) -> str | None:
    """The encoding for one of its names (OpenAI's GA and beta names, vllm-omni's spellings); None if unknown."""
    return _SPELLINGS.get(name.lower())


# -- bytes and samples -------------------------------------------------------------------------------------------


def decode(data: bytes, encoding: str) -> Samples:
    """A client's bytes as int16 samples at the client's rate. Raises Faulty (invalid_audio)."""
    if encoding == PCM16:
        if len(data) % 2:
            raise Faulty("invalid_audio", "The audio has an odd number of bytes; pcm16 has two per sample.", "audio")
        return np.frombuffer(data, np.dtype("<i2"))
    if encoding == PCM_F32:
        return _from_float(data)
    return _table(encoding)[np.frombuffer(data, np.uint8)]


def encode(samples: Samples, encoding: str) -> bytes:
    """int16 samples in a client's encoding."""
    if encoding == PCM16:
        return samples.astype(np.dtype("<i2"), copy=False).tobytes()
    if encoding == PCM_F32:
        return (samples.astype(np.dtype("<f4")) / np.float32(32768)).tobytes()
    return _to_ulaw(samples) if encoding == ULAW else _to_alaw(samples)


def bytes_per_sample(encoding: str) -> int:
    return {PCM16: 2, PCM_F32: 4, ULAW: 1, ALAW: 1}[encoding]


def from_base64(text: str) -> bytes:
    """The bytes of strict standard base64. Raises Faulty (invalid_audio)."""
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:  # binascii.Error, and text that is not ASCII
        raise Faulty("invalid_audio", "The audio is not valid base64.", "audio") from None


def to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _from_float(data: bytes) -> Samples:
    if len(data) % 4:
        raise Faulty(
            "invalid_audio", "The audio's length is no multiple of four; pcm_f32le has four bytes per sample.", "audio"
        )
    values = np.frombuffer(data, np.dtype("<f4"))
    if not np.isfinite(values).all():
        raise Faulty("invalid_audio", "The audio holds samples that are no finite numbers.", "audio")
    return (np.clip(values, -1.0, 32767 / 32768) * 32768).astype(np.int16)


# -- G.711 (ITU-T G.711; the arithmetic is that of Sun's public-domain g711.c) -------------------------------------


@cache
def _table(encoding: str) -> Samples:
    codes = np.arange(256, dtype=np.int32)
    if encoding == ULAW:
        flipped = ~codes & 0xFF
        magnitude = (((flipped & 0x0F) << 3) + 0x84 << ((flipped & 0x70) >> 4)) - 0x84
        return np.where(flipped & 0x80, -magnitude, magnitude).astype(np.int16)
    flipped = codes ^ 0x55
    segment = (flipped & 0x70) >> 4
    mantissa = (flipped & 0x0F) << 4
    magnitude = np.where(segment == 0, mantissa + 8, (mantissa + 0x108) << np.maximum(segment - 1, 0))
    return np.where(flipped & 0x80, magnitude, -magnitude).astype(np.int16)


def _to_ulaw(samples: Samples) -> bytes:
    wide = samples.astype(np.int32) >> 2  # mu-law codes 14 bits
    magnitude = np.minimum(np.abs(wide), 8158) + 33
    exponent = np.clip(np.floor(np.log2(magnitude)).astype(np.int32) - 5, 0, 7)
    mantissa = (magnitude >> (exponent + 1)) & 0x0F
    sign = np.where(wide < 0, 0x80, 0)
    codes: NDArray[np.uint8] = (~(sign | (exponent << 4) | mantissa) & 0xFF).astype(np.uint8)
    return codes.tobytes()


def _to_alaw(samples: Samples) -> bytes:
    wide = samples.astype(np.int32)
    magnitude = np.minimum(np.where(wide < 0, ~wide, wide), 32767)
    exponent = np.clip(np.floor(np.log2(np.maximum(magnitude, 1))).astype(np.int32) - 7, 0, 7)
    mantissa = np.where(exponent == 0, magnitude >> 4, magnitude >> (exponent + 3)) & 0x0F
    sign = np.where(wide < 0, 0, 0x80)
    codes: NDArray[np.uint8] = (((exponent << 4) | mantissa | sign) ^ 0x55).astype(np.uint8)
    return codes.tobytes()


# -- rates -------------------------------------------------------------------------------------------------------

_QUALITY: Final = "LQ"
"""soxr's low quality, plenty for speech: it keeps back 20 ms at most at 24 to 16 kHz (high quality 37), 40 ms at 24 to
8 kHz (73) and 60 ms at 8 to 16 kHz (115)."""


class Resampler:
    """Converts one stream of int16 samples from one rate to another, keeping its filter between pieces."""

    __slots__ = ("_rate_in", "_rate_out", "_stream")

    def __init__(self, rate_in: int, rate_out: int) -> None:
        self._rate_in = rate_in
        self._rate_out = rate_out
        self._stream = None
        if rate_in != rate_out:
            import soxr

            self._stream = soxr.ResampleStream(rate_in, rate_out, 1, dtype="int16", quality=_QUALITY)

    @property
    def rates(self) -> tuple[int, int]:
        return self._rate_in, self._rate_out

    def feed(self, samples: Samples) -> Samples:
        """The converted samples that are ready; some milliseconds stay in the filter."""
        if self._stream is None:
            return samples
        return np.asarray(self._stream.resample_chunk(samples), np.int16)

    def flush(self) -> Samples:
        """What is left in the filter; the stream starts anew."""
        if self._stream is None:
            return np.zeros(0, np.int16)
        tail = np.asarray(self._stream.resample_chunk(np.zeros(0, np.int16), last=True), np.int16)
        self._stream.clear()
        return tail
