"""Ids come from outside, so that a run can be repeated."""

from typing import Protocol


class Ids(Protocol):
    """Gives a fresh id with the prefix: `ids("item")` -> "item_8f...". Tokens must be unguessable in production."""

    def __call__(self, prefix: str) -> str: ...


class CountedIds:
    """Ids that count up: for tests, simulation and reproducible runs."""

    def __init__(self, stem: str = "") -> None:
        self._stem = stem
        self._next = 0

    def __call__(self, prefix: str) -> str:
        self._next += 1
        return f"{prefix}_{self._stem}{self._next:06d}"
