"""Marks: which characters of a spoken text have been heard once so many samples were played.

A voice stage sends marks along with its audio, at the start of each word: `Mark(sample, char)` says that by `sample`
everything before `char` was heard and nothing from `char` on. So the heard text is the last mark passed, with no
guess about the inside of a word; a word whose end was not played counts as not heard.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class Mark(NamedTuple):
    """By `sample` (counted from the reply's first sample) the reply's first `char` characters have been heard."""

    sample: int
    char: int


def heard_chars(marks: Sequence[Mark], samples: int, text: str = "") -> int:
    """Characters heard after `samples` samples; `marks` are in order of both fields.

    Where `text` is given, a mark that lies inside a word is moved back to that word's start.
    """
    passed = bisect_right(marks, samples, key=_sample)
    if not passed:
        return 0
    char = marks[passed - 1].char
    return word_start(text, char) if text else char


def word_start(text: str, char: int) -> int:
    """`char`, or the start of the word that it cuts in two (a word is a run of characters that are not white)."""
    if char >= len(text) or text[char].isspace():
        return min(char, len(text))
    while char and not text[char - 1].isspace():
        char -= 1
    return char


def _sample(mark: Mark) -> int:
    return mark.sample
