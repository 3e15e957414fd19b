"""Frames of events, as JSON text or as msgpack: bytes of a peer against plain values, with caps that hold before
anything is built.

msgpack carries the same names and fields with bytes as they are: numbers, text, lists, maps, booleans, nil and bin
only, no extension types, no timestamps, no pickle in disguise.

A frame of a few MiB may ask for hundreds of MiB of empty containers, a number of five thousand digits, or nesting
that no reader survives; each is refused with a `Faulty`.
"""

import json
from typing import Final, NoReturn, TypeGuard

import msgpack

from omni_live.protocols.audio import to_base64
from omni_live.protocols.fields import Faulty, Wire

MAX_CONTAINERS: Final = 20_000
MAX_COMMAS: Final = 200_000
MAX_DEPTH: Final = 32
_MAX_ELEMENTS: Final = 4096
"""Of one list or map."""


def load_json(text: str, *, unique: bool = False) -> dict[str, Wire]:
    """The frame's object. Raises Faulty (invalid_json, invalid_event); with `unique` also where a key comes twice."""
    if text.count("{") + text.count("[") > MAX_CONTAINERS or text.count(",") > MAX_COMMAS:
        raise Faulty("invalid_event", "The frame has too many elements.")
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_once if unique else None)
    except RecursionError:
        raise Faulty("invalid_event", "The frame is nested too deeply.") from None
    except ValueError:
        raise Faulty("invalid_json", "The frame is not valid JSON.") from None
    return event_object(value)


def event_object(value: object) -> dict[str, Wire]:
    """The value, seen to be an object with string keys that is not nested beyond MAX_DEPTH. Raises Faulty."""
    if not _is_object(value):
        raise Faulty("invalid_event", "The frame is not an object.")
    level: list[Wire] = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for container in level for inner in _inside(container)]
        if not level:
            return value
    raise Faulty("invalid_event", "The frame is nested too deeply.")


def dump_json(event: dict[str, Wire]) -> str:
    """The event as one line of ASCII JSON; bytes become base64."""
    return json.dumps(event, separators=(",", ":"), allow_nan=False, default=_plain)


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


def _is_object(value: object) -> TypeGuard[dict[str, Wire]]:
    return isinstance(value, dict)


def _inside(container: Wire) -> list[Wire]:
    if isinstance(container, dict):
        if not all(isinstance(key, str) for key in container):
            raise Faulty("invalid_event", "The frame has a key that is not a string.")
        return [value for value in container.values() if isinstance(value, dict | list)]
    if isinstance(container, list):
        return [value for value in container if isinstance(value, dict | list)]
    return []


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Faulty("invalid_event", "The frame has a key twice in one object.")
    return found


def _no_constant(_: str) -> NoReturn:
    raise ValueError("JSON has no NaN and no infinity")


def _plain(value: object) -> str:
    if isinstance(value, bytes):
        return to_base64(value)
    raise TypeError(f"{type(value).__name__} has no place in an event")
