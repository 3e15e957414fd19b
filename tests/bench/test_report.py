"""What a bench tells."""

import io
import json

import pytest

from omni_live.bench.figures import ROWS
from omni_live.bench.report import Progress, Row, flat, table

SOME = (Row("a_ms", "the first", "ms"), Row("b", "the second", "", 2), Row("c", "the third"))


def test_the_object_is_flat_and_has_exactly_the_keys_of_the_rows() -> None:
    line = flat(SOME, {"b": 0.123456, "a_ms": 12.0})
    assert "\n" not in line
    assert list(json.loads(line).items()) == [("a_ms", 12.0), ("b", 0.12346), ("c", None)]


def test_a_figure_that_no_row_names_is_a_mistake() -> None:
    with pytest.raises(KeyError, match="d"):
        flat(SOME, {"d": 1})


def test_the_table_leaves_out_what_was_not_measured() -> None:
    lines = table(SOME, {"a_ms": 12.3, "b": None, "c": "default"}).splitlines()
    assert [line.split() for line in lines] == [["the", "first", "12", "ms"], ["the", "third", "default"]]


def test_no_figure_of_the_voice_bench_has_two_rows() -> None:
    assert len({row.key for row in ROWS}) == len(ROWS)


def test_without_a_terminal_each_section_is_one_line() -> None:
    out = io.StringIO()
    progress = Progress(4, out)
    progress.enter("first")
    progress.step()
    progress.step()
    progress.enter("second")
    progress.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert "  0%" in lines[0]
    assert lines[0].endswith("first")
    assert " 50%" in lines[1]


def test_the_bar_never_runs_over_its_end() -> None:
    progress = Progress(2, io.StringIO())
    progress.step(5)
    assert progress.done == 2
