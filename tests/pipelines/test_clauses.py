import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omni_live.pipelines.voice.clauses import FIRST_WORDS, MAX_CHARS, MAX_WORDS, ClauseCutter, Piece

WORDS = [
    "Hello",
    "to",
    "and",
    "Dr.",
    "3.5",
    "1,250",
    "e.g.",
    "U.S.",
    "1.",
    "-",
    "—",
    "👍🏽",
    "**bold**",
    "(so)",
    "x" * 300,
]
GAPS = [" ", " ", " ", "  ", "\n", "\n\n", ", ", ". ", "? ", "! ", "… ", ".", ",", ":", "...", " " * 260]
SNIPPETS = st.sampled_from([*WORDS, *GAPS])
TEXTS = st.lists(SNIPPETS, max_size=60).map("".join) | st.text(max_size=80)


def cut(text: str, *, first_words: int = FIRST_WORDS, sizes: list[int] | None = None) -> list[Piece]:
    """The pieces of a text that comes in pushes of these sizes, over and over; in one push where there are none."""
    cutter = ClauseCutter(first_words)
    pieces: list[Piece] = []
    at = 0
    for size in itertools.cycle(sizes or [max(1, len(text))]):
        if at >= len(text):
            break
        pieces += cutter.push(text[at : at + size], at)
        at += size
    return pieces + cutter.flush()


def texts(text: str, *, first_words: int = FIRST_WORDS) -> list[str]:
    return [piece.text for piece in cut(text, first_words=first_words)]


@given(TEXTS, st.integers(1, 9))
@example("", 8)
@example("\n \n", 8)
def test_every_character_lies_in_exactly_one_piece(text: str, first_words: int) -> None:
    pieces = cut(text, first_words=first_words)
    assert "".join(piece.text for piece in pieces) == text
    at = 0
    for piece in pieces:
        assert (piece.start_char, piece.end_char) == (at, at + len(piece.text))
        assert piece.text
        at = piece.end_char


@given(TEXTS, st.lists(st.integers(1, 7), min_size=1, max_size=5))
@example("Hi there you! \n so", [1])
@example("one two three — four", [14, 1])
@example("what... now? No.", [1])
def test_the_cuts_do_not_depend_on_how_the_text_arrives(text: str, sizes: list[int]) -> None:
    assert cut(text, sizes=sizes) == cut(text)


@given(TEXTS)
def test_no_piece_is_longer_than_the_bounds(text: str) -> None:
    for piece in cut(text):
        assert len(piece.text) <= MAX_CHARS
        assert sum(any(map(str.isalnum, word)) for word in piece.text.split()) <= MAX_WORDS


@given(TEXTS, st.integers(1, 9))
def test_the_first_words_come_out_before_the_sentence_is_complete(text: str, first_words: int) -> None:
    words = next((p for p in cut(text, first_words=first_words) if any(map(str.isalnum, p.text))), None)
    if words:
        assert sum(any(map(str.isalnum, word)) for word in words.text.split()) <= first_words


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Well, to be honest, I do not know that.", ["Well, to be honest, ", "I do not know that."]),
        ("Yes, of course.", ["Yes, of course."]),
        (
            "You should drink more water every single morning here",
            ["You should drink more water every single morning ", "here"],
        ),
        ("I think that the best way to get there is fast.", ["I think that the best way ", "to get there is fast."]),
    ],
)
def test_the_first_piece_ends_at_a_mark_after_three_words_or_else_before_the_ninth(
    text: str, pieces: list[str]
) -> None:
    assert texts(text) == pieces


def test_the_first_piece_is_shorter_where_others_wait() -> None:
    assert texts("You should drink more water every single morning here", first_words=4)[0] == "You should drink "


def test_later_pieces_end_with_their_sentences() -> None:
    text = "I see what you mean. It rains. We could, if you like, go home now! Shall we? Yes."
    assert texts(text) == [
        "I see what you mean. ",
        "It rains. ",
        "We could, if you like, go home now! ",
        "Shall we? ",
        "Yes.",
    ]


@pytest.mark.parametrize(
    "sentence",
    [
        "Dr. Smith lives on Main St. today.",
        "It costs $3.50 or 1,250 yen at 10:30.",
        "Fruit, e.g. apples, is sold in the U.S. market.",
        "J. K. Rowling wrote it.",
        "Wait... what is it?",
        "See www.example.com for more.",
    ],
)
def test_a_dot_inside_a_sentence_does_not_end_it(sentence: str) -> None:
    assert texts(f"This is the first one. {sentence} Next.")[1:] == [f"{sentence} ", "Next."]


def test_a_line_ends_a_piece_and_a_list_keeps_its_numbers() -> None:
    assert texts("Here you are:\n1. First one\n2. Second one\n- bare **bold**\n\nDone") == [
        "Here you are:\n",
        "1. First one\n",
        "2. Second one\n",
        "- bare **bold**\n",
        "\nDone",
    ]


def test_emoji_count_as_no_words_and_stay_with_their_neighbours() -> None:
    assert texts("👍 🎉 Great that it works now. 🎉 Bye") == ["👍 🎉 Great that it works now. ", "🎉 Bye"]


def test_a_word_without_end_is_cut_at_the_bound() -> None:
    assert [len(text) for text in texts("a" * 500)] == [MAX_CHARS, MAX_CHARS, 20]


def test_a_dash_without_spaces_is_a_mark() -> None:
    assert texts("There it was—and then it was gone.") == ["There it was—", "and then it was gone."]


def test_the_offsets_may_start_anywhere_but_have_no_gaps() -> None:
    cutter = ClauseCutter()
    assert cutter.push("One two three. F", 40) == [Piece("One two three. ", 40, 55)]
    with pytest.raises(ValueError, match="does not follow"):
        cutter.push("our", 57)


def test_a_first_piece_without_words_is_refused() -> None:
    with pytest.raises(ValueError):
        ClauseCutter(0)
