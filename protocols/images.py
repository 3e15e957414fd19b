"""Compressed images in observations: `{__image__: true, format: jpeg | png, data, shape: [height, width, channels]}`.

vla-eval's clients send images so by default, and a JPEG takes a tenth of the bytes. Decoding takes milliseconds, so it
is a pass of its own that a server runs in a thread. What an image claims is held against a cap and against its own
header before it is decoded: a picture of 12 KB may unfold to 12 MB.
"""

import struct
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from io import BytesIO
from math import prod
from types import ModuleType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_live.protocols.fields import Faulty

Image = NDArray[np.uint8]

MAX_PIXELS: Final = 8 << 20
"""Of all the compressed images of one observation together: three of 1080p fit."""

_MARKER: Final = "__image__"
_FORMATS: Final = {"jpeg": "JPEG", "png": "PNG"}
_MODES: Final = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's name for an image of so many channels."""


def has_images(observation: object) -> bool:
    """Whether any value of an observation, or of the maps in it, is a compressed image."""
    return next(_images(observation), None) is not None


def decode_images(observation: object, max_pixels: int = MAX_PIXELS) -> object:
    """The observation with its compressed images as uint8 arrays (height, width, channels), the rest as it is.

    Takes milliseconds where there are any. Raises Faulty (bad_image).
    """
    if sum(prod(_shape(image)[:2]) for image in _images(observation)) > max_pixels:
        raise _bad(f"The observation's images have more than {max_pixels} pixels.")
    return _decoded(observation)


def encode_image(image: Image, quality: int | None = 90) -> dict[str, object]:
    """A uint8 image (height, width, channels) as the map that `decode_images` undoes: JPEG, or PNG for what JPEG can't.

    `quality` is JPEG's, 1 to 95; None makes a PNG, which loses nothing. Images of four channels always become PNGs.
    Raises ValueError for arrays that are no such image. Needs Pillow.
    """
    from PIL import Image as Pillow

    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] not in _MODES or 0 in image.shape:
        raise ValueError("an image is a uint8 array (height, width, 1, 3 or 4 channels)")
    picture = Pillow.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    written = BytesIO()
    if quality is None or image.shape[2] == 4:
        picture.save(written, "PNG")
        name = "png"
    else:
        picture.save(written, "JPEG", quality=quality)
        name = "jpeg"
    return {_MARKER: True, "format": name, "data": written.getvalue(), "shape": list(image.shape)}


def _images(value: object) -> Iterator[dict[str, object]]:
    if isinstance(value, dict):
        if _MARKER in value:
            yield value
        else:
            for inner in value.values():
                if isinstance(inner, dict):
                    yield from _images(inner)


def _decoded(value: object) -> object:
    if not isinstance(value, dict):
        return value
    if _MARKER in value:
        return _decode(value)
    return {key: _decoded(inner) for key, inner in value.items()}


def _shape(image: Mapping[str, object]) -> tuple[int, int, int]:
    """What an image says its array will be."""
    match image.get("shape"):
        case [int(height), int(width), int(channels)] if min(height, width) > 0 and channels in _MODES:
            return height, width, channels
    raise _bad("An image's 'shape' must be its height, its width and 1, 3 or 4 channels.")


def _decode(image: Mapping[str, object]) -> Image:
    pillow = _pillow()
    name, data = image.get("format"), image.get("data")
    if not isinstance(name, str) or name not in _FORMATS:
        raise _bad("An image's 'format' must be 'jpeg' or 'png'.")
    if not isinstance(data, bytes):
        raise _bad("An image's 'data' must be bytes.")
    height, width, channels = _shape(image)
    try:
        with pillow.open(BytesIO(data), formats=(_FORMATS[name],)) as picture:
            if (picture.height, picture.width, picture.mode) != (height, width, _MODES[channels]):
                raise _bad("An image is not of the size and the number of channels that its 'shape' says.")
            return np.array(picture, dtype=np.uint8).reshape(height, width, channels)
    except _BROKEN as error:
        raise _bad("An image cannot be decoded.") from error
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise _bad("An image is too large.") from error


_BROKEN: Final = (OSError, SyntaxError, ValueError, IndexError, struct.error, UserWarning)
"""What Pillow raises for data that is no image of the format, is cut short or contradicts itself; a warning where
warnings are errors."""


@cache
def _pillow() -> ModuleType:
    """Pillow, imported where it is needed, and quiet: who sends broken metadata must not write the server's log."""
    from PIL import Image as Pillow

    warnings.filterwarnings("ignore", module=r"PIL\.")
    return Pillow


def _bad(sentence: str) -> Faulty:
    return Faulty("bad_image", sentence, "__image__")
