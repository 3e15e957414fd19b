"""Frames of /v1/duplex, both ways: JSON text with base64 audio, or msgpack with raw PCM.

Both spell the same events; in msgpack the audio fields are `bin`. What comes out of `decode` has bytes in them either
way, so nothing above this module knows which one is spoken.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass

import msgpack

MSGPACK_SUBPROTOCOL = "omni-live.duplex.v1+msgpack"

AUDIO_FIELDS = {"input_audio_buffer.append": "audio", "response.output_audio.delta": "delta"}
"""The field of each event that holds sound."""


class BadFrame(Exception):
    """The peer sent something that is not an event of this protocol."""


def encode(event: Mapping[str, object], *, binary: bool) -> str | bytes:
    """A frame that holds `event`, whose audio fields are bytes (int16 little endian mono)."""
    if binary:
        packed: bytes = msgpack.packb(event)
        return packed
    field = AUDIO_FIELDS.get(str(event["type"]))
    sound = event.get(field) if field else None
    if field and isinstance(sound, bytes):
        event = {**event, field: base64.b64encode(sound).decode("ascii")}
    return json.dumps(event, separators=(",", ":"))


def decode(frame: str | bytes) -> "Fields":
    """The event in a frame; raises BadFrame."""
    try:
        event = json.loads(frame) if isinstance(frame, str) else msgpack.unpackb(frame)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise BadFrame("a frame is neither JSON nor msgpack") from error
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise BadFrame("a frame is not an object with a type")
    field = AUDIO_FIELDS.get(event["type"])
    if field and isinstance(event.get(field), str):
        try:
            event[field] = base64.b64decode(event[field], validate=True)
        except binascii.Error as error:
            raise BadFrame(f"{event['type']}: {field} is not base64") from error
    return Fields(event)


@dataclass(frozen=True, slots=True)
class Fields:
    """A decoded object, read with the type that is expected. Raises BadFrame where the wire says otherwise.

    A field that is absent or null reads as the default: newer servers may leave out what this client can do without.
    """

    values: Mapping[str, object]

    @property
    def type(self) -> str:
        return self.text("type")

    def text(self, key: str, default: str = "") -> str:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise BadFrame(f"{key} is not a string")
        return value

    def integer(self, key: str, default: int = 0) -> int:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadFrame(f"{key} is not an integer")
        return value

    def number(self, key: str, default: float = 0.0) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadFrame(f"{key} is not a number")
        return float(value)

    def sound(self, key: str) -> bytes:
        """Whole int16 samples."""
        value = self.values.get(key)
        if not isinstance(value, bytes):
            raise BadFrame(f"{key} is not sound")
        if len(value) % 2:
            raise BadFrame(f"{key} holds half a sample")
        return value

    def fields(self, key: str) -> "Fields":
        value = self.values.get(key)
        if value is None:
            return Fields({})
        if not isinstance(value, dict):
            raise BadFrame(f"{key} is not an object")
        return Fields(value)

    def several(self, key: str) -> tuple["Fields", ...]:
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(isinstance(one, dict) for one in value):
            raise BadFrame(f"{key} is not a list of objects")
        return tuple(Fields(one) for one in value)

    def ranges(self, key: str) -> tuple[tuple[int, int], ...]:
        """A list of pairs of integers."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            raise BadFrame(f"{key} is not a list")
        pairs = []
        for pair in value:
            if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(end, int) for end in pair):
                raise BadFrame(f"{key} is not a list of ranges")
            pairs.append((pair[0], pair[1]))
        return tuple(pairs)
