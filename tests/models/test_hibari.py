"""Talker and vocoder on the real network: what they say, and that the samples do not depend on how they are asked."""

import itertools
import re
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hibari import dsp
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omni_live.models import hibari_wave
from omni_live.models.hibari_frames import (
    BINS,
    CLAUSE_PAUSE,
    DEFAULT_VOICE,
    F32,
    FEATURES,
    HOP,
    LEAD_FRAMES,
    MAX_PHONEMES,
    MAX_WORDS,
    SENTENCE_PAUSE,
    VOICES,
    FrameBlock,
    Talker,
)
from omni_live.models.hibari_wave import FADE_SAMPLES, GAIN, KNEE, STRIDE, Chunk, Vocoder
from omni_live.pipelines.voice.speech import chunks_of, speak
from omni_live.sessions.marks import Mark

SENTENCE = "Sure, I can help you with that."
REPLY = "Sure, I can help you with that. The weather in Paris is mild today, with a light breeze from the west. Bye!"


@pytest.fixture(scope="module")
def talker() -> Talker:
    talker = Talker()
    talker.warm()
    return talker


@pytest.fixture(scope="module")
def blocks(talker: Talker) -> list[FrameBlock]:
    return [
        talker.speak(utterance)
        for text, at in ((REPLY[:32], 0), (REPLY[32:], 32))
        for utterance in talker.plan(text, at)
    ]


def drain(vocoder: Vocoder) -> list[Chunk]:
    return list(iter(vocoder.next, None))  # type: ignore[arg-type]


def vocode(blocks: Iterable[FrameBlock], seed: int = 7, small: int = 4, large: int = 4) -> list[Chunk]:
    vocoder = Vocoder(seed, small, large)
    chunks = []
    for block in blocks:
        vocoder.feed(block)
        chunks += drain(vocoder)
    vocoder.finish()
    return chunks + drain(vocoder)


def pcm(chunks: Iterable[Chunk]) -> bytes:
    return b"".join(chunk.pcm.tobytes() for chunk in chunks)


def wave(chunks: Sequence[Chunk]) -> F32:
    return np.concatenate([chunk.wave for chunk in chunks])


def marks(chunks: Iterable[Chunk]) -> list[Mark]:
    return [mark for chunk in chunks for mark in chunk.marks]


def split(block: FrameBlock, sizes: Sequence[int]) -> list[FrameBlock]:
    """The block in parts of these sizes, over and over; only the last one says where the utterance ends."""
    parts, at = [], 0
    for size in itertools.cycle(sizes):
        if at + size >= len(block.chars):
            return [*parts, FrameBlock(block.frames[at:], block.chars[at:], block.ends)]
        parts.append(FrameBlock(block.frames[at : at + size], block.chars[at : at + size]))
        at += size
    raise AssertionError


def noise_frames(count: int, seed: int, edge: int = 4) -> FrameBlock:
    """Frames like a voice's in size, random, and unvoiced at both ends as the network's are."""
    draw = np.random.default_rng(seed)
    frames = draw.normal(-3, 2, (count, FEATURES)).astype(np.float32)
    frames[:, -1] = draw.uniform(80, 250, count)
    frames[:edge, -1] = frames[-edge:, -1] = 0
    return FrameBlock(frames, np.arange(count, dtype=np.int32), count)


def whole(block: FrameBlock, seed: int, first: int) -> F32:
    """The utterance by hibari's own signal processing in one go, with the same noise, gain and fades."""

    class SameNoise(np.random.Generator):
        def standard_normal(self, *_args: object, **_kwargs: object) -> F32:  # type: ignore[override]
            drawn = hibari_wave._noise(seed, first, len(block.chars))
            return np.ascontiguousarray(drawn.T).view(np.float32)

    parts = [np.ascontiguousarray(block.frames[:, i * BINS : (i + 1) * BINS].T) for i in range(5)]
    samples: F32 = GAIN * dsp.synth(*parts, block.frames[:, -1], SameNoise(np.random.PCG64(0)))
    over = np.abs(samples) > KNEE
    bent = KNEE + (1 - KNEE) * np.tanh((np.abs(samples[over]) - KNEE) / (1 - KNEE))
    samples[over] = np.copysign(bent, samples[over])
    fade = (np.arange(FADE_SAMPLES) + 0.5) / FADE_SAMPLES
    samples[:FADE_SAMPLES] *= fade
    samples[-FADE_SAMPLES:] *= fade[::-1]
    return samples


class TestVocoder:
    def test_chunks_equal_the_whole_utterance(self, blocks: list[FrameBlock]) -> None:
        first = np.cumsum([0, *(len(block.chars) for block in blocks)])
        expected = [whole(block, 7, int(at)) for block, at in zip(blocks, first, strict=False)]
        assert np.abs(wave(vocode(blocks)) - np.concatenate(expected)).max() < 1e-4

    @pytest.mark.parametrize("count", [8, 19, 20, 21, 22, 23, 24, 25, 41, 42, 43, 61, 62, 63, 102])
    def test_an_utterance_of_any_length_equals_the_whole(self, count: int) -> None:
        block = noise_frames(count, count)
        made = wave(vocode([block]))
        assert made.shape == (count * HOP,)
        assert np.abs(made - whole(block, 7, 0)).max() < 1e-4

    @settings(deadline=None, max_examples=40)
    @given(sizes=st.lists(st.integers(1, 90), min_size=1, max_size=6), small=st.integers(0, 6), large=st.integers(1, 9))
    @example(sizes=[1], small=4, large=4)
    def test_samples_do_not_depend_on_blocks_or_chunks(
        self, blocks: list[FrameBlock], sizes: list[int], small: int, large: int
    ) -> None:
        parts = [part for block in blocks for part in split(block, sizes)]
        chunks, plain = vocode(parts, small=small, large=large), vocode(blocks)
        assert pcm(chunks) == pcm(plain)
        assert marks(chunks) == marks(plain)

    @settings(deadline=None, max_examples=60)
    @given(
        counts=st.lists(st.integers(0, 70), min_size=1, max_size=4),
        sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    )
    def test_frames_voiced_to_their_edges_do_not_depend_on_blocks_either(
        self, counts: list[int], sizes: list[int]
    ) -> None:
        made = [noise_frames(count, i, edge=0) for i, count in enumerate(counts)]
        parts = [part for block in made for part in split(block, sizes)]
        assert pcm(vocode(parts)) == pcm(vocode(made))
        assert [len(c.wave) for c in vocode(parts)] == [len(c.wave) for c in vocode(made)]

    def test_the_first_four_chunks_are_short_and_later_ones_long(self) -> None:
        sizes = [len(chunk.wave) // HOP for chunk in vocode([noise_frames(300, 0)])]
        assert sizes == [20, 20, 20, 20, 80, 80, 60]

    def test_a_chunk_comes_out_as_soon_as_its_frames_are_there(self) -> None:
        vocoder, block = Vocoder(0), noise_frames(60, 1)
        lead = STRIDE + 4
        vocoder.feed(FrameBlock(block.frames[: lead - 1], block.chars[: lead - 1]))
        assert vocoder.next() is None
        vocoder.feed(FrameBlock(block.frames[lead - 1 : lead], block.chars[lead - 1 : lead]))
        chunk = vocoder.next()
        assert chunk is not None
        assert len(chunk.wave) == STRIDE * HOP
        assert vocoder.waiting == lead - STRIDE

    def test_an_utterances_end_waits_for_nothing(self) -> None:
        vocoder = Vocoder(0)
        vocoder.feed(noise_frames(107, 1))
        assert sum(len(chunk.wave) for chunk in drain(vocoder)) == 107 * HOP

    def test_a_reply_that_breaks_off_ends_where_its_frames_do(self) -> None:
        block = noise_frames(50, 1)
        made = vocode([FrameBlock(block.frames, block.chars)])
        assert len(wave(made)) == 50 * HOP

    def test_chunks_follow_one_another_without_a_gap(self, blocks: list[FrameBlock]) -> None:
        at = 0
        for chunk in vocode(blocks):
            assert chunk.start == at
            at += len(chunk.wave)
        assert at == HOP * sum(len(block.chars) for block in blocks)

    def test_chunks_join_without_a_click(self, blocks: list[FrameBlock]) -> None:
        chunks = vocode(blocks)
        samples = wave(chunks)
        bend = np.abs(np.diff(samples, 2))
        for chunk in chunks[1:]:
            around = bend[max(0, chunk.start - 1000) : chunk.start + 1000]
            assert bend[chunk.start - 2 : chunk.start + 1].max() <= np.quantile(around, 0.999) * 1.5 + 1e-3

    def test_the_seed_changes_the_noise_and_nothing_else_does(self, blocks: list[FrameBlock]) -> None:
        assert pcm(vocode(blocks, seed=1)) == pcm(vocode(blocks, seed=1))
        assert pcm(vocode(blocks, seed=1)) != pcm(vocode(blocks, seed=2))
        assert vocode(blocks, seed=-(2**70))

    def test_the_noise_of_a_frame_has_unit_variance_and_no_pattern(self) -> None:
        noise = hibari_wave._noise(3, 0, 400)
        assert noise.real.std() == pytest.approx(1, abs=0.01)
        assert noise.imag.std() == pytest.approx(1, abs=0.01)
        assert np.array_equal(hibari_wave._noise(3, 100, 5), noise[100:105])
        rows = {row.tobytes() for row in noise}
        assert len(rows) > 300

    def test_nothing_clips_however_loud_the_frames(self) -> None:
        block = noise_frames(60, 3)
        block.frames[:, :BINS] = 6
        samples = wave(vocode([block]))
        assert KNEE < np.abs(samples).max() <= 1
        assert np.abs(np.concatenate([c.pcm for c in vocode([block])]).astype(int)).max() <= 32767

    def test_a_reply_starts_and_ends_at_zero(self) -> None:
        samples = wave(vocode([noise_frames(60, 3)]))
        assert max(abs(samples[0]), abs(samples[-1])) < 0.01 * np.abs(samples).max()

    def test_both_formats_hold_the_same_sound(self, blocks: list[FrameBlock]) -> None:
        for chunk in vocode(blocks):
            assert chunk.wave.dtype == np.float32
            assert chunk.pcm.dtype == np.dtype("<i2")
            assert np.abs(chunk.pcm / 32767 - chunk.wave).max() < 1e-4

    @pytest.mark.parametrize("width", [0, FEATURES - 1])
    def test_frames_of_another_shape_are_refused(self, width: int) -> None:
        with pytest.raises(ValueError, match="3006"):
            Vocoder(0).feed(FrameBlock(np.zeros((3, width), np.float32), np.zeros(3, np.int32)))

    def test_frames_that_are_not_numbers_are_refused(self) -> None:
        block = noise_frames(5, 0)
        block.frames[2, 17] = np.nan
        with pytest.raises(ValueError, match="finite"):
            Vocoder(0).feed(block)

    def test_the_caller_may_reuse_a_blocks_memory(self, blocks: list[FrameBlock]) -> None:
        vocoder = Vocoder(7)
        lent = blocks[0].frames.copy()
        vocoder.feed(FrameBlock(lent, blocks[0].chars, blocks[0].ends))
        lent[:] = 9
        vocoder.finish()
        assert pcm(drain(vocoder)) == pcm(vocode(blocks[:1]))

    def test_text_that_does_not_sound_is_marked_as_heard_where_it_stands(self) -> None:
        silent = FrameBlock(np.empty((0, FEATURES), np.float32), np.empty(0, np.int32), 90)
        (chunk,) = vocode([silent])
        assert (len(chunk.wave), chunk.marks) == (0, (Mark(0, 90),))
        made = vocode([noise_frames(30, 0), silent])
        assert marks(made)[-1] == Mark(30 * HOP, 90)


class TestTalker:
    def test_the_networks_silence_is_cut_to_an_onset_and_a_pause(self, talker: Talker) -> None:
        for text, pause in ((SENTENCE, SENTENCE_PAUSE), ("because of that,", CLAUSE_PAUSE)):
            (utterance,) = talker.plan(text, 0)
            samples = wave(vocode([talker.speak(utterance)])).reshape(-1, HOP)
            loud = np.flatnonzero(np.sqrt((samples**2).mean(axis=1)) > 2e-3)
            assert loud[0] <= LEAD_FRAMES + 3
            assert pause <= len(samples) - loud[-1] <= pause + 6

    def test_each_word_is_heard_at_its_end_and_the_text_at_the_last(self, talker: Talker) -> None:
        (utterance,) = talker.plan(SENTENCE, 100)
        block = talker.speak(utterance)
        starts = [100 + m.start() for m in re.finditer(r"\S+", SENTENCE)]
        assert sorted(set(block.chars.tolist())) == [*starts, 100 + len(SENTENCE)]
        assert (np.diff(block.chars) >= 0).all()
        assert block.ends == 100 + len(SENTENCE)

    def test_a_long_piece_is_several_calls(self, talker: Talker) -> None:
        text = "we went on and on, " * 12
        utterances = talker.plan(text, 5)
        assert len(utterances) > 1
        assert all(len(utterance.words) <= MAX_WORDS for utterance in utterances)
        assert [u.start_char for u in utterances] == [5, *(u.end_char for u in utterances[:-1])]
        assert utterances[-1].end_char == 5 + len(text)

    def test_words_that_read_long_are_bounded_too(self, talker: Talker) -> None:
        for text in ("123456789012 " * 10, "9" * 240, "x" * 240):
            assert all(len(utterance.ids) <= MAX_PHONEMES + 2 for utterance in talker.plan(text, 0))

    @pytest.mark.parametrize(
        "text", ["", " \n", "...", "!?", "—", "👍🏽🎉", "你好", "***", "()", "\u200b\u0000", "```\n"]
    )
    def test_what_cannot_be_spoken_gives_no_frames_and_no_error(self, talker: Talker, text: str) -> None:
        (utterance,) = talker.plan(text, 3)
        block = talker.speak(utterance)
        assert block.frames.shape == (0, FEATURES)
        assert block.ends == 3 + len(text)

    @settings(deadline=None, max_examples=200)
    @given(text=st.text(max_size=60) | st.text(alphabet="0123456789.,$€%-/:'# aZIVé", max_size=40))
    def test_any_text_can_be_planned(self, talker: Talker, text: str) -> None:
        utterances = talker.plan(text, 0)
        assert utterances[-1].end_char == len(text)
        for utterance in utterances:
            assert not utterance.ids or utterance.words[-1][1] == utterance.end_char

    @pytest.mark.parametrize(
        ("written", "plain"),
        [
            ("**Bold** and _it_ and `code`", "Bold and it and code"),
            ("# Title", "Title"),
            ("see [the page](https://example.com/a_b?c=1) now", "see the page now"),
            ("great 👍🏽 work", "great work"),
            ("cafe\u0301", "café"),
        ],
    )
    def test_marks_for_the_eye_are_passed_over(self, talker: Talker, written: str, plain: str) -> None:
        assert talker.plan(written, 0)[0].ids == talker.plan(plain, 0)[0].ids

    def test_speed_makes_speech_shorter(self, talker: Talker) -> None:
        (utterance,) = talker.plan(SENTENCE, 0)
        slow, fast = (len(talker.speak(utterance, speed).chars) for speed in (0.7, 1.4))
        assert slow > 1.5 * fast

    def test_voices_are_names_and_sound_different(self, talker: Talker) -> None:
        (utterance,) = talker.plan(SENTENCE, 0)
        median = {
            name: np.median(block.frames[block.frames[:, -1] > 60, -1])
            for name in VOICES
            for block in [talker.speak(utterance, voice=name)]
        }
        assert median["heart-low"] < 0.85 * median[DEFAULT_VOICE]
        with pytest.raises(ValueError, match="voices are"):
            talker.speak(utterance, voice="../heart")

    @pytest.mark.parametrize("speed", [0.0, 0.4, 2.1, float("nan")])
    def test_a_speed_out_of_range_is_refused(self, talker: Talker, speed: float) -> None:
        with pytest.raises(ValueError, match="speed"):
            talker.speak(talker.plan(SENTENCE, 0)[0], speed)


class TestSpeech:
    def test_a_reply_is_spoken_whole_and_alike_each_time(self, talker: Talker) -> None:
        speech = speak(talker, REPLY, seed=5)
        assert speech.dtype == np.int16
        assert 5 < len(speech) / 24_000 < 9
        assert np.array_equal(speech, speak(talker, REPLY, seed=5))

    def test_marks_are_word_starts_and_reach_the_end(self, talker: Talker) -> None:
        chunks = list(chunks_of(talker, REPLY + " 🎉"))
        made = marks(chunks)
        starts = {m.start() for m in re.finditer(r"\S+", REPLY)}
        assert {mark.char for mark in made[:-1]} <= starts | {len(REPLY) + 1}
        assert made[-1].char == len(REPLY) + 2
        assert made == sorted(made)
        assert made[-1].sample <= sum(len(chunk.wave) for chunk in chunks)

    def test_marks_come_no_later_than_the_samples_they_speak_of(self, talker: Talker) -> None:
        for chunk in chunks_of(talker, REPLY):
            assert all(chunk.start <= mark.sample <= chunk.start + len(chunk.wave) for mark in chunk.marks)

    def test_nothing_to_say_is_no_samples(self, talker: Talker) -> None:
        assert len(speak(talker, "")) == len(speak(talker, "👍")) == 0
