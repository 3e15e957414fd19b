"""Pauses between words: where they go, how long they are, what they sound like."""

import numpy as np
import pytest

from omni_live.bench.pauses import LONGEST_MS, SHORTEST_MS, Gap, paused, place_pauses, word_gaps
from omni_live.bench.wavs import RATE_HZ
from omni_live.clients.turns import Utterance
from omni_live.clients.wav import Wave

LEAD = RATE_HZ // 2
WORD = RATE_HZ * 3 // 10
DIP = RATE_HZ // 25


def spoken(words: str, dips_inside: tuple[int, ...] = ()) -> Utterance:
    """Tones with 40 ms of quiet between words, and in the middle of the words whose numbers are given."""
    rng = np.random.default_rng(0)
    pieces = [np.zeros(LEAD)]
    for number, _ in enumerate(words.split()):
        tone = np.sin(np.arange(WORD) * 0.2) * 8000
        if number in dips_inside:
            tone[WORD // 2 - DIP // 2 : WORD // 2 + DIP // 2] = 0
        pieces += [tone, np.zeros(DIP)]
    end = sum(len(piece) for piece in pieces) - DIP
    sound = np.concatenate([*pieces, np.zeros(LEAD)])
    pcm = np.round(sound + rng.standard_normal(len(sound)) * 20).astype(np.int16)
    return Utterance("a.wav", pcm, LEAD, end, words)


class Ears:
    """Hears how many whole words are in a piece of sound of a known utterance, and takes half a word for nonsense."""

    def __init__(self, utterance: Utterance) -> None:
        self.words = utterance.text.split()
        self.whole = utterance.pcm.astype(np.float32) / np.float32(2**15)

    def __call__(self, sound: Wave) -> str:
        padding = RATE_HZ // 2
        if np.any(sound[-padding:]):
            return self._heard(len(self.whole) - (len(sound) - padding), len(self.whole))
        return self._heard(0, len(sound) - padding)

    def _heard(self, start: int, end: int) -> str:
        heard = []
        for number, word in enumerate(self.words):
            first = LEAD + number * (WORD + DIP)
            inside = min(end, first + WORD) - max(start, first)
            if inside > 0.9 * WORD:
                heard.append(word)
            elif inside > 0.1 * WORD:
                heard.append("eh")
        return " ".join(heard)


def test_every_gap_between_two_words_is_found_where_it_is_quiet() -> None:
    utterance = spoken("one two three four")
    gaps = sorted(word_gaps(utterance, Ears(utterance)), key=lambda gap: gap.at)
    assert [gap.words_before for gap in gaps] == [1, 2, 3]
    for number, gap in enumerate(gaps, 1):
        start = LEAD + number * WORD + (number - 1) * DIP
        assert start <= gap.at <= start + DIP
        assert gap.quiet_ms == pytest.approx(40, abs=25)


def test_a_dip_inside_a_word_is_no_gap() -> None:
    utterance = spoken("one two three", dips_inside=(1,))
    gaps = word_gaps(utterance, Ears(utterance))
    middle = LEAD + WORD + DIP + WORD // 2
    assert sorted(gap.words_before for gap in gaps) == [1, 2]
    assert all(abs(gap.at - middle) > WORD // 4 for gap in gaps)


def test_a_gap_that_is_not_heard_for_sure_is_left_alone() -> None:
    utterance = spoken("one two three")
    assert word_gaps(utterance, lambda _: "something else") == []
    assert word_gaps(utterance, lambda _: "") == []


def test_the_pause_is_as_long_as_asked_for_with_what_was_quiet_already() -> None:
    utterance = spoken("one two three")
    gap = Gap(LEAD + WORD + DIP // 2, LEAD + WORD, LEAD + WORD + DIP, 1)
    result = paused(utterance, gap, 500.0, np.random.default_rng(0))
    assert (result.pause_end - result.pause_start) * 1000 / RATE_HZ == pytest.approx(500.0, abs=0.1)
    added = RATE_HZ // 2 - DIP
    assert len(result.utterance.pcm) == len(utterance.pcm) + added
    assert result.utterance.speech_end == utterance.speech_end + added
    assert result.utterance.speech_start == utterance.speech_start
    assert result.after_word == "one"


def test_the_pause_sounds_like_the_room_and_the_words_are_left_as_they_were() -> None:
    utterance = spoken("one two three")
    gap = Gap(LEAD + WORD + DIP // 2, LEAD + WORD, LEAD + WORD + DIP, 1)
    result = paused(utterance, gap, 600.0, np.random.default_rng(0))
    pcm = result.utterance.pcm.astype(np.float64)
    room = np.sqrt(np.mean(pcm[: LEAD - 1000] ** 2))
    inside = np.sqrt(np.mean(pcm[result.pause_start + 100 : result.pause_end - 100] ** 2))
    assert 0.5 * room < inside < 2 * room
    assert np.array_equal(result.utterance.pcm[: gap.at], utterance.pcm[: gap.at])
    assert np.array_equal(result.utterance.pcm[-LEAD:], utterance.pcm[-LEAD:])


def test_a_place_that_is_quiet_for_longer_takes_no_pause() -> None:
    utterance = spoken("one two")
    gap = Gap(LEAD + WORD, LEAD + WORD, LEAD + WORD + RATE_HZ, 1)
    with pytest.raises(ValueError, match="quiet for 1000 ms"):
        paused(utterance, gap, 500.0, np.random.default_rng(0))
    assert place_pauses([(utterance, [gap])], 3, 0) == []


def test_the_same_seed_places_the_same_pauses_and_another_does_not() -> None:
    utterance = spoken("one two three four five")
    found = [(utterance, word_gaps(utterance, Ears(utterance)))]

    def lengths(seed: int) -> list[float]:
        return [one.pause_ms for one in place_pauses(found, 24, seed)]

    assert lengths(1) == lengths(1)
    assert lengths(1) != lengths(2)


def test_the_lengths_are_spread_over_the_whole_range() -> None:
    utterance = spoken("one two three four five")
    lengths = [one.pause_ms for one in place_pauses([(utterance, word_gaps(utterance, Ears(utterance)))], 24, 5)]
    assert len(lengths) == 24
    counts, _ = np.histogram(lengths, bins=4, range=(SHORTEST_MS, LONGEST_MS))
    assert list(counts) == [6, 6, 6, 6]


def test_every_gap_is_used_before_any_is_used_again() -> None:
    utterance = spoken("one two three four five")
    gaps = word_gaps(utterance, Ears(utterance))
    placed = place_pauses([(utterance, gaps)], 2 * len(gaps), 3)
    assert len({one.after_word for one in placed[: len(gaps)]}) == len(gaps)
    assert len({one.after_word for one in placed[len(gaps) :]}) == len(gaps)


def test_recordings_without_a_gap_take_no_pause() -> None:
    assert place_pauses([], 20, 1) == []
