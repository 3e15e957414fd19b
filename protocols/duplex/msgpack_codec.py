"""The duplex events as msgpack maps in binary frames: the same names and fields, audio as raw bytes.

Numbers, text, lists, maps, booleans, nil and bin only: no extension types, no timestamps, no pickle in disguise.
"""

from typing import Final

import msgpack

from omni_live.protocols.fields import Faulty, Wire
from omni_live.protocols.frames import MAX_CONTAINERS, event_object

MSGPACK_SUBPROTOCOL: Final = "omni-live.duplex.v1+msgpack"

_MAX_ELEMENTS: Final = 4096
"""Of one list or map."""


def load_msgpack(frame: bytes) -> dict[str, Wire]:
    """The frame's map. Raises Faulty (invalid_msgpack, invalid_event)."""
    containers = 0

    def counted(container: object) -> object:
        nonlocal containers
        containers += 1
        if containers > MAX_CONTAINERS:
            raise Faulty("invalid_event", "The frame has too many elements.")
        return container

    try:
        value = msgpack.unpackb(
            frame,
            object_hook=counted,
            list_hook=counted,
            max_array_len=_MAX_ELEMENTS,
            max_map_len=_MAX_ELEMENTS,
            max_ext_len=0,
        )
    except (ValueError, msgpack.exceptions.UnpackException):
        # StackError and FormatError, truncated, trailing, oversized, ill-formed UTF-8, keys that are no strings
        raise Faulty("invalid_msgpack", "The frame is not one valid msgpack map.") from None
    return event_object(value)


def dump_msgpack(event: dict[str, Wire]) -> bytes:
    """The event as one msgpack map; bytes stay bytes."""
    packed = msgpack.packb(event, unicode_errors="replace")
    assert isinstance(packed, bytes)
    return packed
