"""Wav files, read whatever they hold and written as 16-bit mono.

Python's `wave` refuses float samples and, before 3.12, the extensible header that many recorders write; this one
reads both.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from omni_live.clients.jitter import Pcm

LONGEST_S = 1800
RATES_HZ = range(4_000, 384_001)
CHANNELS = range(1, 33)

PCM_FORMAT, FLOAT_FORMAT, EXTENSIBLE = 1, 3, 0xFFFE
UNKNOWN_SIZES = frozenset({0, 0x7FFFFFFF, 0x7FFFF000, 0xFFFFFFFF})
"""Written into the header by programs that do not know yet how long the recording becomes."""

Wave = npt.NDArray[np.float32]
"""Mono sound, full scale at 1."""


class BadWav(Exception):
    """A file cannot be used; the text says which and why."""


@dataclass(frozen=True, slots=True)
class _Format:
    code: int
    channels: int
    rate_hz: int
    bits: int


def read_wav(path: Path) -> tuple[Wave, int]:
    """The file's sound, mixed to mono, and its rate in Hz: PCM of 8, 16, 24 or 32 bits, or 32- or 64-bit float.

    Raises BadWav.
    """
    try:
        size = path.stat().st_size
        if size > LONGEST_S * 384_000 * 8:
            raise BadWav(f"{path}: the file is too large")
        content = path.read_bytes()
    except OSError as error:
        raise BadWav(f"{path}: {error.strerror or error}") from error
    try:
        return parse_wav(content)
    except BadWav as error:
        raise BadWav(f"{path}: {error}") from None


def parse_wav(content: bytes) -> tuple[Wave, int]:
    """As `read_wav`, of a file's content."""
    header, data = _chunks(content)
    if len(data) > LONGEST_S * header.rate_hz * header.channels * header.bits // 8:
        raise BadWav(f"longer than {LONGEST_S // 60} minutes")
    samples = _samples(header, data)
    if not samples.size:
        raise BadWav("no sound in it")
    if not np.isfinite(samples).all():
        raise BadWav("samples that are not numbers")
    return samples.mean(axis=1, dtype=np.float32), header.rate_hz


def _chunks(content: bytes) -> tuple[_Format, bytes]:
    if len(content) < 12 or content[:4] not in (b"RIFF", b"RF64") or content[8:12] != b"WAVE":
        raise BadWav("not a wav file")
    header: _Format | None = None
    at = 12
    while at + 8 <= len(content):
        name, size = struct.unpack_from("<4sI", content, at)
        at += 8
        if name == b"data":
            if header is None:
                raise BadWav("sound before its format")
            left = len(content) - at
            if size > left and size not in UNKNOWN_SIZES:
                raise BadWav(f"cut off: {size} bytes of sound promised, {left} there")
            return header, content[at : at + size] if 0 < size <= left else content[at:]
        if name == b"fmt ":
            header = _format(content[at : at + size])
        at += size + size % 2
    raise BadWav("no sound in it")


def _format(chunk: bytes) -> _Format:
    if len(chunk) < 16:
        raise BadWav("a format of too few bytes")
    code, channels, rate_hz, _, _, bits = struct.unpack_from("<HHIIHH", chunk)
    if code == EXTENSIBLE:
        if len(chunk) < 26:
            raise BadWav("an extensible format of too few bytes")
        (code,) = struct.unpack_from("<H", chunk, 24)  # the first two bytes of the sub-format's GUID
    if channels not in CHANNELS:
        raise BadWav(f"{channels} channels")
    if rate_hz not in RATES_HZ:
        raise BadWav(f"a rate of {rate_hz} Hz")
    if (code, bits) not in _READERS:
        raise BadWav(f"format {code} with {bits} bits, which is not among PCM of 8, 16, 24, 32 bits and float")
    return _Format(code, channels, rate_hz, bits)


def _samples(header: _Format, data: bytes) -> Wave:
    """float32[n, channels]; an incomplete last frame is left out."""
    frame = header.channels * header.bits // 8
    whole = data[: len(data) // frame * frame]
    return _READERS[header.code, header.bits](whole).reshape(-1, header.channels)


def _u8(data: bytes) -> Wave:
    return np.asarray(np.frombuffer(data, np.uint8) / 128 - 1, np.float32)


def _i16(data: bytes) -> Wave:
    return np.asarray(np.frombuffer(data, "<i2") / 2**15, np.float32)


def _i24(data: bytes) -> Wave:
    triples = np.frombuffer(data, np.uint8).reshape(-1, 3)
    wide = np.zeros((len(triples), 4), np.uint8)
    wide[:, 1:] = triples
    return np.asarray(wide.view("<i4")[:, 0] / 2**31, np.float32)


def _i32(data: bytes) -> Wave:
    return np.asarray(np.frombuffer(data, "<i4") / 2**31, np.float32)


def _f32(data: bytes) -> Wave:
    return np.asarray(np.frombuffer(data, "<f4"), np.float32)


def _f64(data: bytes) -> Wave:
    with np.errstate(over="ignore"):
        return np.asarray(np.frombuffer(data, "<f8"), np.float32)


_READERS = {
    (PCM_FORMAT, 8): _u8,
    (PCM_FORMAT, 16): _i16,
    (PCM_FORMAT, 24): _i24,
    (PCM_FORMAT, 32): _i32,
    (FLOAT_FORMAT, 32): _f32,
    (FLOAT_FORMAT, 64): _f64,
}


def resampled(wave: Wave, rate_hz: int, to_hz: int) -> Wave:
    """The same sound at another rate, band-limited: the spectrum is cut or extended.

    A tenth of a second of silence around it keeps the ends from leaking into each other.
    """
    if rate_hz == to_hz:
        return wave
    wanted = round(len(wave) * to_hz / rate_hz)
    pad = rate_hz // 10
    # the padded length is a whole number of periods of both rates, so that no sample moves
    period = rate_hz // math.gcd(rate_hz, to_hz)
    length = -(-(len(wave) + pad) // period) * period
    spectrum = np.fft.rfft(wave, length)
    longer = length * to_hz // rate_hz
    sound: Wave = np.fft.irfft(spectrum[: longer // 2 + 1], longer)[:wanted].astype(np.float32)
    return sound * np.float32(longer / length)


def to_pcm(wave: Wave) -> Pcm:
    """16-bit samples; what is over full scale is clipped."""
    return np.clip(np.round(wave * 2**15), -(2**15), 2**15 - 1).astype(np.int16)


def read_pcm(path: Path, rate_hz: int) -> Pcm:
    """The file's sound as 16-bit mono at `rate_hz`; raises BadWav."""
    wave, own_hz = read_wav(path)
    return to_pcm(resampled(wave, own_hz, rate_hz))


def write_wav(path: Path, pcm: Pcm, rate_hz: int) -> None:
    """16-bit mono. Raises OSError."""
    data = pcm.astype("<i2").tobytes()
    header = struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        b"RIFF",
        36 + len(data),
        b"WAVE",
        b"fmt ",
        16,
        PCM_FORMAT,
        1,
        rate_hz,
        rate_hz * 2,
        2,
        16,
        b"data",
        len(data),
    )
    path.write_bytes(header + data)
