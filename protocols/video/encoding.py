"""Blocks of frames as fragments of one MP4 file (ISO/IEC 14496-12, 8.8), by PyAV.

Each block is encoded by itself, so that its first frame is a key frame and a block that is thrown away leaves no hole:
a fragment is a function of its frames, its place and the rate. The initialisation segment is the same for all of them.
"""

import importlib.util
import io
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

Picture = NDArray[np.uint8]
"""(height, width, 3), RGB."""

_MUXER: Final = {
    "movflags": "empty_moov+default_base_moof+frag_keyframe+frag_discont+skip_trailer",
    "use_editlist": "0",
    "avoid_negative_ts": "disabled",  # else each block would be moved to the time of the first
}
_ENCODERS: Final[Mapping[str, Mapping[str, str]]] = {
    "libx264": {
        "preset": "veryfast",
        "tune": "zerolatency",
        "crf": "16",
        "threads": "1",
        "x264-params": "keyint=infinite:scenecut=0",
    },
    "mpeg4": {"qscale": "3", "flags": "+qscale", "threads": "1", "g": "600"},
}
"""What a build of FFmpeg may have, the best first."""


class EncodingFailed(RuntimeError):
    """The library made no fragment of these frames."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """A block of the file."""

    init: bytes
    """The initialisation segment, ftyp and moov: what stands before the first fragment."""
    media: bytes
    """moof and mdat."""


def is_available() -> bool:
    """Whether the library is installed."""
    return importlib.util.find_spec("av") is not None


@cache
def encoder() -> str:
    """The encoder that is used. Raises EncodingFailed where the library has none."""
    import av

    for name in _ENCODERS:
        if name in av.codecs_available:
            return name
    raise EncodingFailed("FFmpeg has no encoder for H.264 or MPEG-4")


def encode(pictures: Sequence[Picture], first: int, index: int, fps: float) -> Fragment:
    """The fragment of block `index`, whose first frame has the number `first`. Takes milliseconds.

    `pictures` are of one size, and at least one. Raises EncodingFailed.
    """
    import av

    try:
        written = _written(pictures, first, index, Fraction(fps).limit_denominator(1001))
    except (av.FFmpegError, ValueError) as error:
        raise EncodingFailed(str(error)) from error
    at = _place(written, b"moof")
    return Fragment(written[:at], written[at:])


def _written(pictures: Sequence[Picture], first: int, index: int, rate: Fraction) -> bytes:
    import av

    height, width, _ = pictures[0].shape
    name = encoder()
    file = io.BytesIO()
    with av.open(file, "w", format="mp4", options={**_MUXER, "fragment_index": str(index + 1)}) as container:
        stream = container.add_stream(name, rate=rate, options=dict(_ENCODERS[name]))
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuv420p" if width % 2 == 0 and height % 2 == 0 else "yuv444p"
        stream.time_base = stream.codec_context.time_base = 1 / rate
        for offset, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = first + offset, 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def _place(written: bytes, wanted: bytes) -> int:
    """Where the first box of that kind begins."""
    at = 0
    while at + 8 <= len(written):
        size, kind = struct.unpack_from(">I4s", written, at)
        if kind == wanted:
            return at
        at += max(8, size)
    raise EncodingFailed(f"the library wrote no {wanted.decode()}")
