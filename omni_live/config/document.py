"""Reading a YAML document into frozen dataclasses, with every complaint naming key, file and line.

Nothing is read that was not asked for: a mapping names the keys it knows and refuses the others, and a key that
appears twice is refused too (YAML itself lets the last one win). Values are never guessed: `yes` is no number and
`1` is no flag.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TypeVar

import yaml

from omni_live.sessions.payload import Scalar

E = TypeVar("E", bound=StrEnum)

UNITS = {"": 1, "B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
SIZE = re.compile(r"(\d+) ?(|B|KiB|MiB|GiB)")
LAST_PORT = 65_535
MAX_DOCUMENT = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Position:
    """A key of a document and where it stands; line 0 is no line of any file."""

    file: str = "(defaults)"
    line: int = 0
    key: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        key = self.key if self.key.isprintable() else ascii(self.key)
        return f"{place}: {key}" if key else place


class ConfigError(ValueError):
    """A configuration that cannot be used. Its text is one line: `file:line: key: what is wrong`."""

    def __init__(self, at: Position, complaint: str) -> None:
        super().__init__(f"{at}: {complaint}")
        self.at = at


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in the document, and the ways to read what stands there."""

    at: Position
    node: yaml.Node

    def refuse(self, complaint: str) -> ConfigError:
        """The error to raise about what stands here."""
        return ConfigError(self.at, complaint)

    # -- containers

    def entries(self) -> Iterator[tuple[str, "Cursor"]]:
        """The pairs of a mapping, in order; refuses keys that are no text and keys that appear twice."""
        if not isinstance(self.node, yaml.MappingNode):
            raise self.refuse(f"expected a mapping, got {self.found()}")
        seen: set[str] = set()
        for key_node, value in self.node.value:
            at = Position(self.at.file, key_node.start_mark.line + 1, self.at.key)
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                raise ConfigError(at, f"expected a name as key, got {Cursor(at, key_node).found()}")
            name = str(key_node.value)
            here = Position(at.file, at.line, f"{at.key}.{name}" if at.key else name)
            if name in seen:
                raise ConfigError(here, "appears twice")
            seen.add(name)
            yield name, Cursor(here, value)

    def fields(self, known: Collection[str]) -> dict[str, "Cursor"]:
        """The pairs of a mapping whose keys are known."""
        found = {}
        for name, value in self.entries():
            if name not in known:
                raise value.refuse(f"unknown key; known are {', '.join(sorted(known))}")
            found[name] = value
        return found

    def items(self) -> tuple["Cursor", ...]:
        """The parts of a list."""
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.refuse(f"expected a list, got {self.found()}")
        return tuple(
            Cursor(Position(self.at.file, node.start_mark.line + 1, f"{self.at.key}[{index}]"), node)
            for index, node in enumerate(self.node.value)
        )

    # -- scalars

    def scalar(self) -> Scalar:
        if not isinstance(self.node, yaml.ScalarNode):
            raise self.refuse(f"expected a single value, got {self.found()}")
        try:
            value: object = yaml.SafeLoader("").construct_object(self.node)
        except (yaml.YAMLError, ValueError):  # an explicit tag that is unknown, or that the text does not fit
            value = self.node
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise self.refuse(f"expected a number, a flag or text, got {self.found()}")

    def text(self) -> str:
        value = self.scalar()
        if not isinstance(value, str) or not value:
            raise self.refuse(f"expected text, got {self.found()}")
        return value

    def flag(self) -> bool:
        value = self.scalar()
        if not isinstance(value, bool):
            raise self.refuse(f"expected true or false, got {self.found()}")
        return value

    def integer(self, least: int, most: int = 2**62) -> int:
        value = self.scalar()
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(f"expected a whole number, got {self.found()}")
        self._in_range(value, least, most)
        return value

    def number(self, least: float, most: float = 1e9) -> float:
        value = self.scalar()
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not isinstance(value, int | float) or not (whole or (isinstance(value, float) and math.isfinite(value))):
            raise self.refuse(f"expected a finite number, got {self.found()}")
        self._in_range(value, least, most)
        return float(value)

    def size(self, least: int = 1) -> int:
        """Bytes: a whole number, or one with B, KiB, MiB or GiB."""
        value = self.scalar()
        if isinstance(value, str):
            match = SIZE.fullmatch(value)
            if match is None:
                raise self.refuse(f"expected a size such as 16 MiB, got {self.found()}")
            total = int(match[1]) * UNITS[match[2]]
            self._in_range(total, least, 2**62)
            return total
        return self.integer(least)

    def port(self) -> int:
        return self.integer(0, LAST_PORT)

    def choice(self, of: type[E]) -> E:
        try:
            return of(self.text())
        except ValueError:
            raise self.refuse(f"expected one of {', '.join(of)}, got {self.found()}") from None

    def texts(self) -> tuple[str, ...]:
        """A list of texts without twins."""
        values: list[str] = []
        for item in self.items():
            value = item.text()
            if value in values:
                raise item.refuse(f"{value!r} appears twice")
            values.append(value)
        return tuple(values)

    def text_map(self) -> Mapping[str, str]:
        return MappingProxyType({name: value.text() for name, value in self.entries()})

    def scalar_map(self) -> Mapping[str, Scalar]:
        return MappingProxyType({name: value.scalar() for name, value in self.entries()})

    def _in_range(self, value: float, least: float, most: float) -> None:
        if not least <= value <= most:
            bound = f"at least {least:g}" if value < least else f"at most {most:g}"
            raise self.refuse(f"expected {bound}, got {self.found()}")

    def found(self) -> str:
        """What stands here, for a complaint."""
        match self.node:
            case yaml.ScalarNode():
                return "nothing" if self.node.tag.endswith(":null") else repr(str(self.node.value)[:80])
            case yaml.SequenceNode():
                return "a list"
            case _:
                return "a mapping"


def parse(text: str, file: str) -> Cursor:
    """The root of the document. Raises ConfigError where the text is no YAML, more than one document, or empty."""
    if len(text) > MAX_DOCUMENT:
        raise ConfigError(Position(file), f"is longer than {MAX_DOCUMENT} characters")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 0
        raise ConfigError(Position(file, line), f"is not YAML: {error.problem}") from None
    except yaml.reader.ReaderError as error:
        raise ConfigError(Position(file), f"is not YAML: {error.reason}") from None
    except RecursionError:
        raise ConfigError(Position(file), "is nested too deeply") from None
    if node is None:
        raise ConfigError(Position(file), "is empty")
    return Cursor(Position(file, node.start_mark.line + 1), node)
