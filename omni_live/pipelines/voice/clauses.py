"""The receiving end of the thinker -> talker edge: running text is cut into pieces that can be spoken.

Where the cuts fall depends on the text alone, never on how it was split into pushes: a boundary is decided once as much
of what follows it is there as the decision needs, and not before. Every character lies in exactly one piece, white
space and what cannot be spoken included, so that heard samples map back to heard characters.

The first piece decides how soon the user hears something, so it ends at the first clause mark after a few words, or
after `first_words`; later ones may wait for a mark.
"""

import re
from dataclasses import dataclass

FIRST_WORDS = 8
FIRST_CLAUSE_WORDS = 3
CLAUSE_WORDS = 6
MAX_WORDS = 24
MAX_CHARS = 240

_TOKEN = re.compile(r"([^\s—]+—?|—)(\s*)")
_CLOSERS = "\"'”’)]}*_`"
_OPENERS = "\"'“‘([{*_`-"
_SPELLED = re.compile(r"(?:[^\W\d_]\.)+")
"""Initials and letters with dots between: "J.", "U.S.", "e.g."."""
_CLAUSE_MARKS = (",", ";", ":", "–", "—")
_NUMERAL = re.compile(r"\(?\d{1,3}[.)]")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ABBREVIATIONS = _words(
    "mr mrs ms dr prof rev hon st jr sr vs approx dept est fig figs nos vol vols pp eds inc ltd co corp ave blvd "
    "rd mt ft hr hrs sec tel cf capt col gen gov lt sgt sen rep pres jan feb apr jun jul aug sep sept oct nov dec "
    "tue tues thu thurs"
)
_OPENING = _words(
    "of to in on at by for from with about into over under and or but so if as than because when while until who which"
)
"""Words before which a long sentence may be cut where it has no mark."""
_WEAK = _OPENING | _words(
    "a an the this that these those my your his her its our their whom whose is are was were be been am do does "
    "did has have had will would can could may might must shall should nor not no very more most i you he she it "
    "we they i'm i'll i've it's that's you're you'll we're we'll they're he's she's there's don't can't won't "
    "isn't"
)
"""Words after which nobody pauses."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text to be spoken in one breath; it is `reply[start_char:end_char]`."""

    text: str
    start_char: int
    end_char: int


class ClauseCutter:
    """Cuts one reply. `first_words` bounds the first piece: fewer where several sessions wait for their first sound."""

    def __init__(self, first_words: int = FIRST_WORDS) -> None:
        if first_words < 1:
            raise ValueError("the first piece needs a word")
        self._first_words = first_words
        self._first = True
        self._rest = ""
        self._start = 0
        self._begun = False

    def push(self, text: str, start_char: int) -> list[Piece]:
        """Take text on; returns the pieces that it completes. ValueError where it does not follow what came before."""
        if not self._begun:
            self._begun, self._start = True, start_char
        if start_char != self._start + len(self._rest):
            raise ValueError(f"text at {start_char} does not follow {self._start + len(self._rest)}")
        self._rest += text
        return self._cuts()

    def flush(self) -> list[Piece]:
        """The reply is complete; returns what is left of it."""
        return [self._take(len(self._rest))] if self._rest else []

    def _cuts(self) -> list[Piece]:
        pieces = []
        while (end := self._boundary()) is not None:
            pieces.append(self._take(end))
        return pieces

    def _take(self, end: int) -> Piece:
        text, self._rest = self._rest[:end], self._rest[end:]
        piece = Piece(text, self._start, self._start + len(text))
        self._start = piece.end_char
        self._first = self._first and not _speaks(text)
        return piece

    def _boundary(self) -> int | None:
        """Where the next piece ends, None as long as that is open."""
        text = self._rest
        enough = self._first_words if self._first else MAX_WORDS
        words = last = strong = phrase = 0
        for token in _TOKEN.finditer(text):
            word, gap = token.group(1), token.group(2)
            dashed = word.endswith("—")
            end = token.end(1) + (gap != "" and not dashed)
            if end > MAX_CHARS or not (gap or dashed):
                break  # too long, or the word may go on
            before, last = last, end
            words += _speaks(word)
            ends = self._ends_here(token, text[token.end() : token.end() + 1], words)
            if ends is None:
                break
            if ends:
                return last
            if words > enough // 2 and _bare(word) in _OPENING:
                phrase = before
            if words >= min(FIRST_CLAUSE_WORDS, enough) and _bare(word) not in _WEAK:
                strong = last
            if words >= enough:
                return phrase or strong or last
        return (last or MAX_CHARS) if len(text) > MAX_CHARS else None

    def _ends_here(self, token: re.Match[str], following: str, words: int) -> bool | None:
        """Whether a piece of so many words ends after the token; None while what follows it must decide that."""
        word, gap = token.group(1), token.group(2)
        marked = word.rstrip(_CLOSERS)
        if not words:
            return False
        if "\n" in gap:
            return True
        if marked.endswith(_CLAUSE_MARKS) or word.endswith(")"):
            return words >= (FIRST_CLAUSE_WORDS if self._first else CLAUSE_WORDS) or (None if not following else False)
        if not following:
            return None
        return words >= (FIRST_CLAUSE_WORDS if self._first else 1) and _ends_sentence(marked, following, words)


def _ends_sentence(word: str, following: str, words: int) -> bool:
    """False before a small letter and for the dot of an abbreviation, of initials, of a list's number."""
    if not word.endswith((".", "!", "?", "…")) or following.islower():
        return False
    bare = word.lstrip(_OPENERS)
    return not (
        bare[:-1].lower() in _ABBREVIATIONS or _SPELLED.fullmatch(bare) or (words == 1 and _NUMERAL.fullmatch(bare))
    )


def _speaks(word: str) -> bool:
    return any(map(str.isalnum, word))


def _bare(word: str) -> str:
    return word.lower().strip(_OPENERS + _CLOSERS)
