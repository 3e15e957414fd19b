"""What a bench tells: a bar while it runs, a table or one flat JSON object at the end."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

Value = float | int | str | None


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: its key in the JSON, and how the table says it."""

    key: str
    meaning: str
    unit: str = ""
    digits: int = 0


def flat(rows: Sequence[Row], values: Mapping[str, Value]) -> str:
    """One line of JSON with exactly these keys, in this order; null for what was not measured.

    Raises KeyError for a value that no row names.
    """
    unknown = set(values) - {row.key for row in rows}
    if unknown:
        raise KeyError(f"no row for {', '.join(sorted(unknown))}")
    return json.dumps({row.key: _rounded(values.get(row.key)) for row in rows})


def table(rows: Sequence[Row], values: Mapping[str, Value]) -> str:
    """The figures that were measured, one a line."""
    shown = [row for row in rows if values.get(row.key) is not None]
    cells = [(row.meaning, _shown(row, values[row.key]), row.unit) for row in shown]
    wide = max((len(meaning) for meaning, _, _ in cells), default=0)
    high = max((len(value) for _, value, unit in cells if unit), default=0)
    lines = [f"  {meaning:<{wide}}  {value:>{high if unit else 0}} {unit}" for meaning, value, unit in cells]
    return "\n".join(line.rstrip() for line in lines)


def _rounded(value: Value) -> Value:
    return round(value, 5) if isinstance(value, float) else value


def _shown(row: Row, value: Value) -> str:
    return f"{value:.{row.digits}f}" if isinstance(value, float) else str(value)


@dataclass(slots=True)
class Progress:
    """A bar on a terminal, a line per section elsewhere."""

    total: int
    out: TextIO = field(default_factory=lambda: sys.stderr)
    done: int = 0
    section: str = ""
    _began: float = field(default_factory=time.monotonic)

    def enter(self, section: str) -> None:
        self.section = section
        self._draw(line=True)

    def step(self, count: int = 1) -> None:
        self.done = min(self.total, self.done + count)
        self._draw(line=False)

    def close(self) -> None:
        if self.out.isatty():
            self.out.write("\r\033[K")
            self.out.flush()

    def _draw(self, *, line: bool) -> None:
        share = self.done / self.total if self.total else 1.0
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        full = round(share * 24)
        text = f"[{'#' * full}{'.' * (24 - full)}] {share:4.0%} {minutes:d}:{seconds:02d}  {self.section}"
        if self.out.isatty():
            self.out.write(f"\r\033[K{text}")
        elif line:
            self.out.write(f"{text}\n")
        self.out.flush()
