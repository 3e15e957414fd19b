"""Word error rate, and the plain form of a sentence in which it is counted.

Two transcripts that say the same are the same here: case and punctuation are gone, numbers are words ("10" is "ten",
"1984" "one thousand nine hundred eighty four", "3.5" "three point five", "2nd" "second", "50%" "fifty percent").
"""

import re
import unicodedata
from collections.abc import Sequence
from typing import Final

_ONES: Final = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS: Final = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_SCALES: Final = ((10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred"))
_ORDINALS: Final = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
_SIGNS: Final = {"%": " percent ", "&": " and ", "+": " plus ", "@": " at ", "=": " equals "}
_LARGEST: Final = 10**12
_SPELLED: Final = {"okay": "ok", "alright": "all right", "mr": "mister", "mrs": "missis", "dr": "doctor"}

_NUMBER: Final = re.compile(r"\$?\d[\d,]*(?:\.\d+)?(?:st|nd|rd|th)?\b|\$?\d[\d,]*", re.IGNORECASE)


def plain(text: str) -> list[str]:
    """The words of a sentence, without what is only a matter of spelling."""
    text = unicodedata.normalize("NFKD", text).lower().replace("’", "'")
    text = "".join(letter for letter in text if not unicodedata.combining(letter))
    text = _NUMBER.sub(lambda match: f" {_number(match.group())} ", text)
    for sign, word in _SIGNS.items():
        text = text.replace(sign, word)
    words = re.sub(r"[^a-z0-9]+", " ", text.replace("'", "")).split()
    return " ".join(_SPELLED.get(word, word) for word in words).split()


def errors(said: str, heard: str) -> tuple[int, int]:
    """(words wrong, words said): the fewest words to put in, leave out or change to make `heard` what was said."""
    wanted, got = plain(said), plain(heard)
    return _distance(wanted, got), len(wanted)


def word_error_rate(pairs: Sequence[tuple[str, str]]) -> float | None:
    """Over all (said, heard) pairs together; None where nothing was said."""
    counts = [errors(said, heard) for said, heard in pairs]
    total = sum(words for _, words in counts)
    return sum(wrong for wrong, _ in counts) / total if total else None


def _distance(wanted: Sequence[str], got: Sequence[str]) -> int:
    row = list(range(len(got) + 1))
    for index, word in enumerate(wanted, 1):
        corner, row[0] = row[0], index
        for column, other in enumerate(got, 1):
            corner, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, corner + (word != other))
    return row[-1]


def _number(written: str) -> str:
    digits = written.lstrip("$").replace(",", "")
    ordinal = digits[-2:] in ("st", "nd", "rd", "th")
    whole, _, decimals = (digits[:-2] if ordinal else digits).partition(".")
    spoken = _cardinal(int(whole)) if int(whole) < _LARGEST else [_ONES[int(digit)] for digit in whole]
    if ordinal:
        spoken[-1] = _ordinal(spoken[-1])
    if decimals:
        spoken += ["point", *(_ONES[int(digit)] for digit in decimals)]
    return " ".join(spoken + (["dollars"] if written.startswith("$") else []))


def _cardinal(number: int) -> list[str]:
    if number < 20:
        return [_ONES[number]]
    if number < 100:
        return [_TENS[number // 10 - 2], *(_cardinal(number % 10) if number % 10 else [])]
    scale, name = next((scale, name) for scale, name in _SCALES if number >= scale)
    rest = number % scale
    return [*_cardinal(number // scale), name, *(_cardinal(rest) if rest else [])]


def _ordinal(word: str) -> str:
    if word in _ORDINALS:
        return _ORDINALS[word]
    return f"{word[:-1]}ieth" if word.endswith("y") else f"{word}th"
