"""Payloads: typed named arrays with a few scalars, in the form in which they travel."""

from collections.abc import Mapping
from dataclasses import field
from types import MappingProxyType
from typing import NamedTuple

from omni_live.sessions.values import value

Scalar = int | float | str | bool | tuple[int, ...] | None

NO_META: Mapping[str, Scalar] = MappingProxyType({})


class ArraySpec(NamedTuple):
    """Where an array lies in a payload's body: arrays follow one another in order, each aligned to 8 bytes."""

    name: str
    dtype: str
    """numpy's dtype.str, little endian, kinds i, u, f, b only."""
    shape: tuple[int, ...]


@value
class Payload:
    """What one stage hands another: `kind` says how to read it.

    `body` holds the arrays' raw bytes (or plain bytes where `arrays` is empty); `meta` holds scalars, small and flat.
    """

    kind: str
    meta: Mapping[str, Scalar] = field(default_factory=lambda: NO_META)
    body: bytes | bytearray | memoryview = b""
    arrays: tuple[ArraySpec, ...] = ()

    @property
    def nbytes(self) -> int:
        return len(self.body) if isinstance(self.body, bytes | bytearray) else self.body.nbytes
