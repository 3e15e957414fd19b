import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_live.sessions.marks import Mark, heard_chars, word_start

TEXT = "Sure, I can help."
MARKS = [Mark(6000, 6), Mark(9000, 8), Mark(12000, 12), Mark(24000, 17)]


@pytest.mark.parametrize(
    ("samples", "heard"),
    [(0, ""), (5999, ""), (6000, "Sure, "), (8999, "Sure, "), (23999, "Sure, I can "), (24000, TEXT), (10**9, TEXT)],
)
def test_a_word_is_heard_once_its_end_was_played(samples: int, heard: str) -> None:
    assert TEXT[: heard_chars(MARKS, samples)] == heard


def test_nothing_is_heard_where_there_are_no_marks() -> None:
    assert heard_chars([], 10**6) == 0


def test_a_mark_inside_a_word_is_moved_back_to_the_words_start() -> None:
    marks = [Mark(1000, 3), Mark(2000, 10)]
    assert heard_chars(marks, 1500) == 3
    assert heard_chars(marks, 1500, TEXT) == 0
    assert TEXT[: heard_chars(marks, 2500, TEXT)] == "Sure, I "


def test_a_mark_beyond_the_text_counts_as_its_end() -> None:
    assert heard_chars([Mark(10, 99)], 10, TEXT) == len(TEXT)


@given(st.text(alphabet="ab \n", max_size=30), st.integers(0, 40))
def test_a_cut_never_falls_inside_a_word(text: str, char: int) -> None:
    cut = word_start(text, char)
    assert cut <= min(char, len(text))
    assert cut in (0, len(text)) or text[cut].isspace() or text[cut - 1].isspace()
    assert not text[cut:char].strip() or not any(map(str.isspace, text[cut:char]))


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 100)), max_size=20),
    st.integers(0, 1000),
    st.integers(0, 99),
)
def test_more_samples_never_mean_fewer_characters(points: list[tuple[int, int]], samples: int, more: int) -> None:
    marks = [Mark(*pair) for pair in zip(*map(sorted, zip(*points, strict=True)), strict=True)] if points else []
    assert heard_chars(marks, samples) <= heard_chars(marks, samples + more)
