"""numpy arrays to payloads and back.

A payload's arrays follow one another in its body, each aligned to 8 bytes. Only plain little-endian numbers travel;
everything a spec claims is checked before a byte is read, since a spec may come from another process.
"""

from collections.abc import Mapping
from math import prod

import numpy as np
from numpy.typing import NDArray

from omni_live.sessions.payload import NO_META, ArraySpec, Payload, Scalar

DTYPES = frozenset({"|b1", "|i1", "|u1", "<i2", "<u2", "<f2", "<i4", "<u4", "<f4", "<i8", "<u8", "<f8"})
"""numpy's dtype.str of everything that travels: kinds b, i, u, f, up to 8 bytes an element."""
_TYPES = {text: np.dtype(text) for text in DTYPES}
_ALIGN = 8
_MAX_DIMS = 32

Array = NDArray[np.generic]


class BadPayload(ValueError):
    """The payload does not hold what its specs say, or an array is of a kind that does not travel."""


def pack(kind: str, meta: Mapping[str, Scalar] = NO_META, /, **arrays: Array) -> Payload:
    """A payload of the named arrays, in the order given.

    One contiguous array is not copied: the payload is a view of it, so do not write to it afterwards.
    Raises BadPayload for dtypes other than DTYPES (objects, strings, complex and big-endian numbers, ...).
    """
    solid = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    specs = tuple(_spec(name, arrays[name]) for name in solid)
    if len(solid) == 1:
        only = next(iter(solid.values()))
        return Payload(kind, meta, only.reshape(-1).view(np.uint8).data, specs)
    parts: list[bytes | memoryview] = []
    for array in solid.values():
        parts += (array.reshape(-1).view(np.uint8).data, bytes(_padded(array.nbytes) - array.nbytes))
    return Payload(kind, meta, b"".join(parts), specs)


def array(payload: Payload, name: str) -> Array:
    """The named array as a view of the payload's body: copy it to keep it longer than the body is valid.

    Raises BadPayload where there is none of that name or where the body is too short for what the specs say.
    """
    found = arrays(payload).get(name)
    if found is None:
        raise BadPayload(f"a payload {payload.kind!r} without array {name!r}")
    return found


def arrays(payload: Payload) -> dict[str, Array]:
    """All arrays of a payload by name, as `array` gives them. Raises BadPayload."""
    found: dict[str, Array] = {}
    offset, end = 0, payload.nbytes
    for name, text, shape in payload.arrays:
        dtype = _TYPES.get(text)
        if dtype is None:
            raise BadPayload(f"array {name!r} is of dtype {text!r}, which does not travel")
        if len(shape) > _MAX_DIMS or (shape and min(shape) < 0):
            raise BadPayload(f"array {name!r} has an impossible shape")
        count = prod(shape)
        nbytes = count * dtype.itemsize
        if offset + nbytes > end:
            raise BadPayload(f"array {name!r} reaches past the body")
        found[name] = np.frombuffer(payload.body, dtype, count, offset).reshape(shape)
        offset += _padded(nbytes)
    return found


def _spec(name: str, given: Array) -> ArraySpec:
    if given.dtype.str not in DTYPES:
        raise BadPayload(f"array {name!r} is of dtype {given.dtype.str}, which does not travel")
    return ArraySpec(name, given.dtype.str, given.shape)


def _padded(nbytes: int) -> int:
    return (nbytes + _ALIGN - 1) // _ALIGN * _ALIGN
