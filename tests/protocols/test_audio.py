"""Audio at the doors' edge."""

import numpy as np
import pytest

from omni_live.protocols import audio
from omni_live.protocols.fields import Faulty

ALL = np.arange(-32768, 32768, dtype=np.int32).astype(np.int16)

# ITU-T G.711: code words of a few levels, as every codec has them.
ULAW = {0: 0xFF, 8: 0xFE, -8: 0x7E, 1000: 0xCE, -1000: 0x4E, 32767: 0x80, -32768: 0x00}
ALAW = {0: 0xD5, 8: 0xD5, -8: 0x55, 1000: 0xFA, -1000: 0x7A, 32767: 0xAA, -32768: 0x2A}


@pytest.mark.parametrize(("encoding", "table"), [(audio.ULAW, ULAW), (audio.ALAW, ALAW)])
def test_g711_writes_the_code_words_of_the_standard(encoding: str, table: dict[int, int]) -> None:
    samples = np.array(list(table), np.int16)
    assert list(audio.encode(samples, encoding)) == list(table.values())


@pytest.mark.parametrize("encoding", [audio.ULAW, audio.ALAW])
def test_g711_reads_back_every_code_word_as_it_was(encoding: str) -> None:
    codes = bytes(range(256))
    again = audio.encode(audio.decode(codes, encoding), encoding)
    if encoding == audio.ULAW:
        again = again.replace(b"\xff\xff", b"\xff")  # minus zero is zero
        codes = codes.replace(b"\x7f", b"")
        assert sorted(set(again)) == sorted(set(codes))
    else:
        assert again == codes


@pytest.mark.parametrize("encoding", [audio.ULAW, audio.ALAW])
def test_g711_is_never_far_off(encoding: str) -> None:
    heard = audio.decode(audio.encode(ALL, encoding), encoding).astype(np.int32)
    off = np.abs(heard - ALL.astype(np.int32))
    assert (off <= np.maximum(16, np.abs(ALL.astype(np.int32)) // 16)).all()


def test_float_samples_are_clipped_and_come_back_as_they_were() -> None:
    assert list(audio.decode(np.array([2.0, -2.0, 0.5], "<f4").tobytes(), audio.PCM_F32)) == [32767, -32768, 16384]
    assert (audio.decode(audio.encode(ALL, audio.PCM_F32), audio.PCM_F32) == ALL).all()


@pytest.mark.parametrize(("data", "encoding"), [(b"\x00", audio.PCM16), (b"\x00" * 6, audio.PCM_F32)])
def test_half_a_sample_is_refused(data: bytes, encoding: str) -> None:
    with pytest.raises(Faulty):
        audio.decode(data, encoding)


@pytest.mark.parametrize(("rate_in", "rate_out"), [(24000, 16000), (8000, 16000), (48000, 16000), (24000, 8000)])
@pytest.mark.parametrize("piece", [160, 480, 4096])
def test_a_stream_keeps_its_length_and_its_tone_however_it_is_cut(rate_in: int, rate_out: int, piece: int) -> None:
    samples = (np.sin(np.arange(rate_in) * 2 * np.pi * 440 / rate_in) * 10_000).astype(np.int16)
    stream = audio.Resampler(rate_in, rate_out)
    pieces = [stream.feed(samples[at : at + piece]) for at in range(0, rate_in, piece)]
    heard = np.concatenate([*pieces, stream.flush()])
    assert abs(len(heard) - rate_out) <= 1
    wanted = np.sin(np.arange(len(heard)) * 2 * np.pi * 440 / rate_out) * 10_000
    middle = slice(rate_out // 10, -rate_out // 10)
    assert np.abs(heard[middle] - wanted[middle]).max() < 300


def test_a_stream_can_be_used_again_after_a_flush() -> None:
    stream = audio.Resampler(24000, 16000)
    lengths = [len(stream.feed(np.ones(2400, np.int16))) + len(stream.flush()) for _ in range(2)]
    assert lengths[0] == lengths[1] == 1600


def test_equal_rates_pass_everything_through_at_once() -> None:
    stream = audio.Resampler(16000, 16000)
    assert stream.feed(ALL) is ALL
    assert stream.flush().size == 0
