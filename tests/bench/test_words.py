"""The plain form of a sentence, and the errors counted in it."""

import pytest

from omni_live.bench.words import errors, plain, word_error_rate


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("There are 10 of them.", "there are ten of them"),
        ("In 1984, she was 21!", "in one thousand nine hundred eighty four she was twenty one"),
        ("It's 3.5 dollars", "its three point five dollars"),
        ("$5", "five dollars"),
        ("the 2nd and the 20th", "the second and the twentieth"),
        ("50%", "fifty percent"),
        ("1,000,000", "one million"),
        ("Café — “yes”", "cafe yes"),
        ("well-known", "well known"),
        ("O.K.", "o k"),
        ("Don’t", "don't"),
        ("0", "zero"),
    ],
)
def test_what_is_only_spelled_differently_is_the_same(one: str, other: str) -> None:
    assert plain(one) == plain(other)


def test_a_number_longer_than_any_name_is_read_digit_by_digit() -> None:
    assert plain("1234567890123") == "one two three four five six seven eight nine zero one two three".split()


@pytest.mark.parametrize(
    ("said", "heard", "wrong"),
    [
        ("one two three", "one two three", 0),
        ("one two three", "", 3),
        ("one two three", "one three", 1),
        ("one two three", "one two two three", 1),
        ("one two three", "one too three", 1),
        ("one two three", "three two one", 2),
        ("", "one two", 2),
    ],
)
def test_errors_are_the_fewest_changes(said: str, heard: str, wrong: int) -> None:
    assert errors(said, heard) == (wrong, len(plain(said)))


def test_the_rate_is_over_all_words_together() -> None:
    assert word_error_rate([("a b c d e f g h i", "a b c d e f g h i"), ("j", "k")]) == pytest.approx(0.1)


def test_there_is_no_rate_where_nothing_was_said() -> None:
    assert word_error_rate([("", "noise")]) is None
