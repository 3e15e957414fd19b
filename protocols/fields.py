"""Reading what a peer sent, strictly: each field is asked for by name and type, what nobody asked for is a fault.

    Faulty        the peer's frame is wrong; carries the `Fault` that is to be told

Codecs raise `Faulty` inside and catch it at their edge; what a codec gives away is a `Fault`.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final, NoReturn, TypeAlias, TypeVar

Wire: TypeAlias = "bool | int | float | str | bytes | list[Wire] | dict[str, Wire] | None"
"""What JSON and msgpack can say."""

T = TypeVar("T")

MAX_ID_CHARS: Final = 128
MAX_TEXT_CHARS: Final = 65_536
MAX_INT: Final = 2**53 - 1


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a frame, in words that may go to the peer."""

    code: str
    message: str
    param: str | None = None
    event_id: str | None = None


class Faulty(Exception):
    """A frame that cannot be taken."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.fault = Fault(code, message, param)

    def about(self, event_id: str | None) -> Fault:
        return replace(self.fault, event_id=event_id)


def shown(text: str) -> str:
    """A peer's text as an error message may repeat it: short, printable, in ASCII."""
    short = text if len(text) <= 64 else text[:61] + "..."
    return ascii(short)


def is_sound(text: str) -> bool:
    """Whether the text can be written as UTF-8 (JSON may hold lone surrogates)."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Fields:
    """One object of a frame. Absent and null are both None to the plain readers; `is_null` tells them apart."""

    __slots__ = ("_body", "_left", "_path")

    def __init__(self, body: dict[str, Wire], path: str = "") -> None:
        self._body = body
        self._path = path
        self._left = set(body)

    def param(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def has(self, name: str) -> bool:
        """Whether the field is there at all, null included."""
        return name in self._body

    def is_null(self, name: str) -> bool:
        """Whether the field is there and null; counts as read."""
        if name in self._body and self._body[name] is None:
            self._left.discard(name)
            return True
        return False

    def ignore(self, names: Iterable[str]) -> None:
        """Fields that are understood to have no effect here."""
        self._left.difference_update(names)

    def raw(self, name: str) -> Wire:
        self._left.discard(name)
        return self._body.get(name)

    def text(self, name: str, max_chars: int = MAX_TEXT_CHARS) -> str | None:
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, str):
            self._wrong_type(name, "a string", value)
        if len(value) > max_chars:
            self.refuse("invalid_value", name, f"is longer than {max_chars} characters")
        if not is_sound(value):
            self.refuse("invalid_value", name, "holds a lone surrogate")
        return value

    def choice(self, name: str, choices: Collection[str]) -> str | None:
        value = self.text(name)
        if value is not None and value not in choices:
            self.refuse("invalid_value", name, f"is {shown(value)}; supported are {', '.join(sorted(choices))}")
        return value

    def identifier(self, name: str) -> str | None:
        value = self.text(name, MAX_ID_CHARS)
        if value is not None and not (value and value.isprintable()):
            self.refuse("invalid_value", name, "must be a printable string that is not empty")
        return value

    def integer(self, name: str, low: int = 0, high: int = MAX_INT) -> int | None:
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            self._wrong_type(name, "an integer", value)
        if not low <= value <= high:
            self.refuse("invalid_value", name, f"must be from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._wrong_type(name, "a number", value)
        if not low <= value <= high or not math.isfinite(value):
            self.refuse("invalid_value", name, f"must be from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str) -> bool | None:
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            self._wrong_type(name, "a boolean", value)
        return value

    def inner(self, name: str) -> "Fields | None":
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self._wrong_type(name, "an object", value)
        return Fields(value, self.param(name))

    def array(self, name: str, most: int = 1024) -> list[Wire] | None:
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, list):
            self._wrong_type(name, "an array", value)
        if len(value) > most:
            self.refuse("invalid_value", name, f"has more than {most} elements")
        return value

    def texts(self, name: str) -> list[str] | None:
        values = self.array(name)
        if values is None:
            return None
        texts: list[str] = []
        for index, value in enumerate(values):
            if not isinstance(value, str):
                self._wrong_type(f"{name}[{index}]", "a string", value)
            texts.append(value)
        return texts

    def text_map(self, name: str, most: int = 16, key_chars: int = 64, value_chars: int = 512) -> dict[str, str] | None:
        """Metadata as OpenAI defines it: up to 16 short string pairs."""
        body = self.raw(name)
        if body is None:
            return None
        if not isinstance(body, dict):
            self._wrong_type(name, "an object", body)
        pairs = Fields(body, self.param(name))
        found: dict[str, str] = {}
        for key in body:
            value = pairs.text(key, value_chars)
            if value is None:
                self.refuse("invalid_type", name, "must have strings as values")
            if len(key) > key_chars or not is_sound(key):
                self.refuse("invalid_value", name, f"has a key that is no string of up to {key_chars} characters")
            found[key] = value
        if len(found) > most:
            self.refuse("invalid_value", name, f"has more than {most} pairs")
        return found

    def done(self) -> None:
        """Complain about what nobody asked for."""
        if self._left:
            name = min(self._left)
            raise Faulty("unknown_parameter", f"Unknown parameter: {shown(self.param(name))}.", self._shown_param(name))

    def missing(self, name: str) -> NoReturn:
        param = self.param(name)
        raise Faulty("missing_required_parameter", f"Missing required parameter: '{param}'.", param)

    def refuse(self, code: str, name: str, why: str) -> NoReturn:
        raise Faulty(code, f"'{self._shown_param(name)}' {why}.", self._shown_param(name))

    def _wrong_type(self, name: str, wanted: str, value: Wire) -> NoReturn:
        self.refuse("invalid_type", name, f"must be {wanted}, not {_kind(value)}")

    def _shown_param(self, name: str) -> str:
        return shown(self.param(name))[1:-1]


_KINDS: Final = (
    (bool, "a boolean"),
    (int | float, "a number"),
    (str, "a string"),
    (bytes, "bytes"),
    (list, "an array"),
    (dict, "an object"),
)


def _kind(value: Wire) -> str:
    return next((name for kind, name in _KINDS if isinstance(value, kind)), "null")


def needed(fields: Fields, name: str, value: T | None) -> T:
    """The value of a required field."""
    if value is None:
        fields.missing(name)
    return value
