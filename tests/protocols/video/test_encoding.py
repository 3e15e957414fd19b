"""Fragments: joined they are one file, each begins with a key frame, and what the library cannot do is told."""

import io
import struct
from fractions import Fraction

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from omni_live.protocols.video import encoding
from omni_live.protocols.video.encoding import EncodingFailed, encode

Pictures = list[NDArray[np.uint8]]
CUTS = ((0, 8), (8, 16), (16, 17), (17, 24))


def drawn(count: int, height: int = 64, width: int = 64) -> Pictures:
    """A square that goes its way."""
    pictures = []
    for number in range(count):
        picture = np.full((height, width, 3), 200, np.uint8)
        picture[8:24, number : number + 16] = (220, 40, 40)
        pictures.append(picture)
    return pictures


def boxes(data: bytes) -> list[str]:
    names, at = [], 0
    while at < len(data):
        size, name = struct.unpack_from(">I4s", data, at)
        names.append(name.decode())
        at += size
    return names


def decoded(data: bytes) -> list[av.VideoFrame]:
    with av.open(io.BytesIO(data), "r") as container:
        return list(container.decode(video=0))


def in_blocks(pictures: Pictures, fps: float = 5.0) -> tuple[bytes, list[bytes]]:
    fragments = [encode(pictures[a:b], a, index, fps) for index, (a, b) in enumerate(CUTS)]
    (init,) = {fragment.init for fragment in fragments}
    return init, [fragment.media for fragment in fragments]


@pytest.mark.parametrize("name", ["libx264", "mpeg4"])
def test_joined_fragments_are_one_file_with_each_frame_in_its_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "encoder", lambda: name)
    pictures = drawn(24)
    init, fragments = in_blocks(pictures)
    assert boxes(init) == ["ftyp", "moov"]
    assert [boxes(fragment) for fragment in fragments] == [["moof", "mdat"]] * len(CUTS)
    frames = decoded(init + b"".join(fragments))
    assert [frame.time for frame in frames] == pytest.approx([number / 5 for number in range(24)])
    assert [number for number, frame in enumerate(frames) if frame.key_frame] == [first for first, _ in CUTS]
    for frame, picture in zip(frames, pictures, strict=True):
        away = np.abs(frame.to_ndarray(format="rgb24").astype(int) - picture)
        assert away.mean() < 3


def test_fragments_are_numbered_and_dated() -> None:
    _, fragments = in_blocks(drawn(24))
    numbers = [struct.unpack_from(">I", fragment, fragment.index(b"mfhd") + 8)[0] for fragment in fragments]
    times = [struct.unpack_from(">Q", fragment, fragment.index(b"tfdt") + 8)[0] for fragment in fragments]
    assert numbers == [1, 2, 3, 4]
    assert [Fraction(time, times[1]) for time in times] == [0, 1, 2, Fraction(17, 8)]


def test_a_block_plays_without_those_before_it() -> None:
    init, fragments = in_blocks(drawn(24))
    assert len(decoded(init + fragments[1])) == 8
    assert len(decoded(init + fragments[3])) == 7


def test_the_same_block_is_the_same_fragment() -> None:
    assert encode(drawn(8), 8, 1, 29.97) == encode(drawn(8), 8, 1, 29.97)


def test_odd_sizes_and_one_frame_are_no_trouble() -> None:
    fragment = encode(drawn(1, 33, 41), 0, 0, 1.0)
    (frame,) = decoded(fragment.init + fragment.media)
    assert (frame.height, frame.width) == (33, 41)


def test_what_cannot_be_encoded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "encoder", lambda: "libx264rgb_of_another_build")
    monkeypatch.setitem(vars(encoding)["_ENCODERS"], "libx264rgb_of_another_build", {})
    with pytest.raises(EncodingFailed):
        encode(drawn(2), 0, 0, 5.0)


def test_the_library_is_there() -> None:
    assert encoding.is_available()
    assert encoding.encoder() == "libx264"
