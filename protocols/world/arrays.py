"""Arrays, pictures and snapshots as values of a message.

An array is `{dtype, shape, data}` with little-endian data in C order; a picture may also be `{format, data}`, PNG or
JPEG. Data are bytes: msgpack's bin, base64 text in JSON. Actions may be nested lists of numbers instead.

A snapshot is opaque to clients. It is checked for damage, but neither secret nor signed: whoever has one can read what
is in it, and could make one of their own.
"""

import binascii
from collections.abc import Mapping
from hashlib import sha256
from math import prod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_live.protocols.fields import Faulty, Fields, Wire
from omni_live.protocols.frames import dump_msgpack, load_msgpack
from omni_live.protocols.images import decode_images, encode_image
from omni_live.sessions.payload import ArraySpec, Payload, Scalar

MAX_FRAMES: Final = 4096
"""Rows that actions may have at all; the server's limit `step_frames` is less."""
RAW, PNG, JPEG = "raw", "png", "jpeg"
FORMATS: Final = (RAW, PNG, JPEG)
"""How pictures travel."""

_MAGIC: Final = b"omni-live rollout 1\n"
_DIGEST_BYTES: Final = 32
_DTYPES: Final[Mapping[str, type[np.generic]]] = {"|u1": np.uint8, "<f4": np.float32}

Numbers = NDArray[np.float32] | NDArray[np.uint8]


def array_value(array: Numbers) -> dict[str, Wire]:
    """An array as a message has it."""
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": array.tobytes()}


def picture_value(image: NDArray[np.uint8], form: str) -> dict[str, Wire]:
    """A picture, uint8 (height, width, 3), in one of `FORMATS`. Needs Pillow for two of them."""
    if form == RAW:
        return array_value(image)
    data = encode_image(image, 90 if form == JPEG else None)["data"]
    assert isinstance(data, bytes)
    return {"format": form, "shape": list(image.shape), "data": data}


def read_array(fields: Fields, name: str, dtype: str) -> Numbers | None:
    """The array of that field. Raises Faulty where it is none, or is not what its shape says."""
    inner = fields.inner(name)
    if inner is None:
        return None
    kind = inner.choice("dtype", (dtype,)) or dtype
    shape = _shape(inner)
    data = read_bytes(inner, "data")
    inner.done()
    item = np.dtype(_DTYPES[kind])
    if data is None or len(data) != prod(shape) * item.itemsize:
        fields.refuse("invalid_value", name, "has data of another length than its shape and dtype say")
    return np.frombuffer(data, item).reshape(shape)


def read_picture(fields: Fields, name: str, shape: tuple[int, int, int]) -> NDArray[np.uint8] | None:
    """The picture of that field, uint8. Raises Faulty where it is none of this shape."""
    value = fields.raw(name)
    if value is None:
        return None
    inner = Fields(value, fields.param(name)) if isinstance(value, dict) else None
    if inner is None:
        fields.refuse("invalid_type", name, "must be a picture: an array, or a map of format and data")
    form = inner.choice("format", FORMATS) or RAW
    if form == RAW:
        image = read_array(
            Fields({name: {key: it for key, it in inner_map(value).items() if key != "format"}}), name, "|u1"
        )
    else:
        data = read_bytes(inner, "data")
        inner.ignore(("shape",))
        inner.done()
        image = _unpacked(data, form, shape)
    if image is None or image.shape != shape or image.dtype != np.uint8:
        size = " x ".join(map(str, shape))
        fields.refuse("invalid_value", name, f"must be a picture of {size}, uint8")
    return np.asarray(image, np.uint8)


def inner_map(value: Wire) -> dict[str, Wire]:
    return value if isinstance(value, dict) else {}


def read_bytes(fields: Fields, name: str) -> bytes | None:
    """Bytes, or base64 text of them. Raises Faulty."""
    value = fields.raw(name)
    if value is None or isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        fields.refuse("invalid_type", name, "must be bytes, in JSON as base64 text")
    try:
        return binascii.a2b_base64(value, strict_mode=True)
    except ValueError:  # binascii.Error, and text that is not ASCII
        fields.refuse("invalid_value", name, "is no valid base64")


def read_actions(fields: Fields, name: str, shape: tuple[int, ...], low: float, high: float) -> NDArray[np.float32]:
    """float32 (frames, *shape), each from `low` to `high`. Raises Faulty."""
    value = fields.raw(name)
    if value is None:
        fields.missing(name)
    if isinstance(value, list):
        actions = _listed(fields, name, value, shape)
    else:
        read = read_array(Fields({name: value}), name, "<f4")
        if read is None:
            fields.missing(name)
        actions = np.asarray(read, np.float32)
    if actions.shape[1:] != shape or not 1 <= len(actions) <= MAX_FRAMES:
        size = " x ".join(map(str, shape))
        fields.refuse("invalid_value", name, f"must be {size} numbers for each frame, and at least one frame")
    if not np.isfinite(actions).all() or actions.min() < low or actions.max() > high:
        fields.refuse("invalid_value", name, f"must be numbers from {low:g} to {high:g}")
    return actions


def seal(step: int, state: Payload) -> bytes:
    """A snapshot as a client keeps it."""
    specs: list[Wire] = [[name, dtype, list(shape)] for name, dtype, shape in state.arrays]
    meta: dict[str, Wire] = {
        key: list(value) if isinstance(value, tuple) else value for key, value in state.meta.items()
    }
    body = dump_msgpack({"step": step, "kind": state.kind, "meta": meta, "arrays": specs, "body": bytes(state.body)})
    sealed = _MAGIC + body
    return sealed + sha256(sealed).digest()


def unseal(blob: bytes) -> tuple[int, Payload]:
    """Where the rollout stood, and its state. Raises Faulty (bad_snapshot) for anything that `seal` did not make."""
    sealed, digest = blob[:-_DIGEST_BYTES], blob[-_DIGEST_BYTES:]
    if not sealed.startswith(_MAGIC) or sha256(sealed).digest() != digest:
        raise _bad_snapshot()
    try:
        fields = Fields(load_msgpack(sealed[len(_MAGIC) :]))
        step, kind, body = fields.integer("step"), fields.text("kind"), fields.raw("body")
        meta, specs = inner_map(fields.raw("meta")), fields.array("arrays")
    except Faulty:
        raise _bad_snapshot() from None
    if step is None or kind is None or not isinstance(body, bytes) or specs is None:
        raise _bad_snapshot()
    return step, Payload(kind, _scalars(meta), body, tuple(_spec(spec) for spec in specs))


def _unpacked(data: bytes | None, form: str, shape: tuple[int, int, int]) -> NDArray[np.uint8] | None:
    claimed: dict[str, object] = {"__image__": True, "format": form, "data": data, "shape": list(shape)}
    image = decode_images(claimed, prod(shape[:2]))
    return image if isinstance(image, np.ndarray) else None


def _shape(fields: Fields) -> tuple[int, ...]:
    sizes = fields.array("shape", 8)
    if sizes is None:
        fields.missing("shape")
    shape = tuple(size for size in sizes if type(size) is int and 0 <= size <= 2**31)
    if len(shape) != len(sizes):
        fields.refuse("invalid_value", "shape", "must be sizes")
    return shape


def _listed(fields: Fields, name: str, value: list[Wire], shape: tuple[int, ...]) -> NDArray[np.float32]:
    if len(value) > MAX_FRAMES:
        fields.refuse("invalid_value", name, f"has more than {MAX_FRAMES} rows")
    flat: list[float] = []
    level: list[Wire] = list(value)
    for size in shape:
        if not all(isinstance(row, list) and len(row) == size for row in level):
            fields.refuse(
                "invalid_value", name, "must be lists of numbers, of the shape that this world's actions have"
            )
        level = [item for row in level if isinstance(row, list) for item in row]
    for number in level:
        if isinstance(number, bool) or not isinstance(number, int | float) or abs(number) > 1e30:
            fields.refuse("invalid_value", name, "must be numbers")
        flat.append(float(number))
    return np.array(flat, np.float32).reshape(len(value), *shape)


def _scalars(meta: Mapping[str, Wire]) -> dict[str, Scalar]:
    found: dict[str, Scalar] = {}
    for key, value in meta.items():
        match value:
            case None | bool() | int() | float() | str():
                found[key] = value
            case list() if all(type(number) is int for number in value):
                found[key] = tuple(number for number in value if type(number) is int)
            case _:
                raise _bad_snapshot()
    return found


def _spec(spec: Wire) -> ArraySpec:
    match spec:
        case [str(name), str(dtype), list(shape)] if all(type(size) is int and size >= 0 for size in shape):
            return ArraySpec(name, dtype, tuple(size for size in shape if type(size) is int))
        case _:
            raise _bad_snapshot()


def _bad_snapshot() -> Faulty:
    return Faulty("bad_snapshot", "The snapshot is none, or it was damaged.", "blob")
