"""The language model on its real weights: against fp32, and its slots against each other."""

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, rms_norm, scaled_dot_product_attention, silu

from omni_live.models.gguf_weights import (
    Gguf,
    Kind,
    Misuse,
    PoolFull,
    RawTensor,
    WeightsUnusable,
    WindowFull,
    floats,
    smollm2_path,
    tokenizer,
    unpack_q41,
)
from omni_live.models.llama import FEW, Feed, Llama, Slot, Snapshot

CONTEXT, SESSIONS, STEP = 512, 12, 128
AMX = bool(torch.cpu.get_capabilities().get("amx_tile", False))  # elsewhere kernels may choose by the number of rows
PROSE = """The lighthouse stood at the end of a long stone pier, and every evening an old man walked out to light the \
lamp. He had done so for thirty years, through storms and through calm summer nights, and he could have walked the \
distance with his eyes closed. The fishermen said that they could tell the time by him. When the lamp came on, they \
turned their boats toward home. Water boils at one hundred degrees Celsius at sea level. At higher altitudes the air \
pressure is lower, and so water boils at a lower temperature, which is why it takes longer to cook rice or potatoes \
in the mountains."""


@pytest.fixture(scope="module")
def gguf() -> Gguf:
    return Gguf(smollm2_path())


@pytest.fixture(scope="module")
def words(gguf: Gguf) -> Tokenizer:
    return tokenizer(gguf)


@pytest.fixture(scope="module")
def loaded(gguf: Gguf) -> Llama:
    return Llama(gguf, sessions=SESSIONS, context=CONTEXT, step_tokens=STEP)


@pytest.fixture
def llama(loaded: Llama) -> Iterator[Llama]:
    """The model with no slot open; every slot a test leaves open is closed after it."""
    yield loaded
    for slot in list(loaded._sessions):
        loaded.close(slot)
    assert loaded.free == SESSIONS


def some(count: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(3, 49152, count).tolist()
    return ids


def filled(llama: Llama, count: int, seed: int = 0) -> Slot:
    slot = llama.open()
    ids = some(count, seed)
    for start in range(0, count, STEP):
        llama.prefill(slot, ids[start : start + STEP])
    return slot


def close_to(one: Tensor, other: Tensor) -> bool:
    """Equal up to the rounding of one kernel or another: bf16 logits, no bias."""
    distance = float((one - other).square().mean().sqrt() / other.std())
    return distance < 0.2  # unrelated rows are at 1 to 3


def fp32_logits(gguf: Gguf, llama: Llama, ids: Sequence[int]) -> Tensor:
    """The textbook forward pass in fp32: float32[len(ids), vocabulary]."""
    shape, count = llama.shape, len(ids)
    embedding = torch.from_numpy(floats(gguf.tensor("token_embd.weight")))
    angles = torch.outer(torch.arange(count), shape.rope_base ** -(torch.arange(0, 64, 2) / 64))
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]

    def turned(x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.reshape(count, -1, 32, 2)) * turns).flatten(2)

    x = embedding[list(ids)]
    for layer in range(shape.layers):

        def weight(name: str, layer: int = layer) -> Tensor:
            return torch.from_numpy(floats(gguf.tensor(f"blk.{layer}.{name}.weight")))

        h = rms_norm(x, (shape.width,), weight("attn_norm").view(-1), shape.epsilon)
        q, k, v = (linear(h, weight(f"attn_{name}")).view(count, -1, 64) for name in "qkv")
        heads = [part.transpose(0, 1)[None] for part in (turned(q), turned(k), v)]
        heard = scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True, enable_gqa=True)[0]
        x = x + linear(heard.transpose(0, 1).reshape(count, -1), weight("attn_output"))
        h = rms_norm(x, (shape.width,), weight("ffn_norm").view(-1), shape.epsilon)
        x = x + linear(silu(linear(h, weight("ffn_gate"))) * linear(h, weight("ffn_up")), weight("ffn_down"))
    norm = torch.from_numpy(floats(gguf.tensor("output_norm.weight"))).view(-1)
    return linear(rms_norm(x, (shape.width,), norm, shape.epsilon), embedding)


def perplexity(logits: Tensor, ids: Sequence[int]) -> float:
    return math.exp(float(cross_entropy(logits[:-1], torch.tensor(ids[1:]))))


@pytest.mark.parametrize("chunk", [STEP, 3], ids=["many rows: packed bf16", "few rows: four-bit"])
def test_perplexity_on_english_is_that_of_fp32(gguf: Gguf, llama: Llama, words: Tokenizer, chunk: int) -> None:
    assert min(chunk, FEW) in (FEW, 3)
    ids = [0, *words.encode(PROSE, add_special_tokens=False).ids]
    slot = llama.open()
    parts = [ids[start : start + chunk] for start in range(0, len(ids), chunk)]
    logits = torch.cat([llama.step([Feed(slot, part, tuple(range(len(part))))])[0] for part in parts])
    expected = perplexity(fp32_logits(gguf, llama, ids), ids)
    assert expected < 30  # English to this model; q and k paired wrongly gives thousands
    assert perplexity(logits, ids) == pytest.approx(expected, rel=0.02)


def test_a_greedy_answer_is_coherent(llama: Llama, words: Tokenizer) -> None:
    slot = llama.open()
    ids = words.encode("The capital of France is the city of", add_special_tokens=False).ids
    logits = llama.prefill(slot, ids).logits
    assert words.decode([int(logits.argmax())]) == " Paris"


def test_the_slot_does_not_matter(llama: Llama) -> None:
    first, others = llama.open(), [llama.open() for _ in range(5)]
    last = llama.open()
    ids = some(40)
    one, other = llama.prefill(first, ids).logits, llama.prefill(last, ids).logits
    assert torch.equal(one, other)
    assert torch.equal(llama.decode([(first, 7)]), llama.decode([(last, 7)]))
    llama.close(others[2])
    again = llama.open()
    assert torch.equal(llama.prefill(again, ids).logits, one)
    assert torch.equal(llama.decode([(again, 7)]), llama.decode([(others[0], 9)])) is False


def test_a_prompt_in_chunks_is_the_prompt_at_once(llama: Llama) -> None:
    ids = some(100)
    whole, parts = llama.open(), llama.open()
    expected = llama.prefill(whole, ids).logits
    found = [llama.prefill(parts, ids[start : start + 30]).logits for start in range(0, 100, 30)]
    assert close_to(found[-1], expected)
    assert llama.tokens(parts) == llama.tokens(whole) == tuple(ids)


@pytest.mark.parametrize("count", [3, FEW, FEW + 3])
def test_sessions_decoded_together_are_as_if_alone(llama: Llama, count: int) -> None:
    slots = [filled(llama, 5 + 23 * number, seed=number) for number in range(count + 1)]
    llama.close(slots.pop(1))  # a gap between neighbours
    entries = [(slot, 1000 + number) for number, slot in enumerate(slots)]
    alone = []
    for slot, token in entries:
        alone.append(llama.decode([(slot, token)])[0])
        llama.truncate(slot, llama.length(slot) - 1)
    together = llama.decode(entries[::-1])  # in the caller's order, whatever the slots' is
    for found, expected in zip(together, alone[::-1], strict=True):
        assert close_to(found, expected)
        if count <= FEW and AMX:
            assert torch.equal(found, expected)


def test_one_step_serves_prompts_and_replies_at_once(llama: Llama) -> None:
    talking, asking, starting = filled(llama, 50, 1), filled(llama, 30, 2), llama.open()
    feeds = [(asking, some(20, 3)), (talking, [5]), (starting, some(17, 4))]
    expected = []
    for slot, ids in feeds:
        fork = llama.fork(slot)
        expected.append(llama.prefill(fork, ids).logits)
        llama.close(fork)
    found = llama.step([Feed(slot, ids) for slot, ids in feeds])
    assert [len(rows) for rows in found] == [1, 1, 1]
    assert all(close_to(rows[0], other) for rows, other in zip(found, expected, strict=True))
    assert [llama.length(slot) for slot, _ in feeds] == [50, 51, 17]


def test_a_probe_gives_the_logits_in_the_middle(llama: Llama) -> None:
    ids = some(60)
    probed, short = llama.open(), llama.open()
    found = llama.prefill(probed, ids, probe=41)
    assert found.probe is not None
    assert close_to(found.probe, llama.prefill(short, ids[:42]).logits)
    assert not close_to(found.probe, found.logits)


def test_a_chunk_may_want_no_logits(llama: Llama) -> None:
    slot = llama.open()
    assert llama.step([Feed(slot, some(10), ())])[0].shape == (0, 49152)
    assert llama.length(slot) == 10


def test_a_truncated_slot_has_forgotten(llama: Llama) -> None:
    slot, never = filled(llama, 40), filled(llama, 40)
    llama.prefill(slot, some(25, seed=9))
    llama.truncate(slot, 40)
    assert llama.tokens(slot) == tuple(some(40))
    assert torch.equal(llama.prefill(slot, [3, 4, 5]).logits, llama.prefill(never, [3, 4, 5]).logits)


def test_a_fork_goes_its_own_way(llama: Llama) -> None:
    slot, never = filled(llama, 40), filled(llama, 40)
    fork = llama.fork(slot)
    assert torch.equal(llama.prefill(fork, some(9, 5)).logits, llama.prefill(never, some(9, 5)).logits)
    llama.truncate(never, 40)
    assert torch.equal(llama.decode([(slot, 8)]), llama.decode([(never, 8)]))
    llama.close(slot)
    llama.truncate(fork, 40)
    llama.truncate(never, 40)
    assert torch.equal(llama.decode([(fork, 6)]), llama.decode([(never, 6)]))


def test_a_snapshot_restores_to_the_same_bits(llama: Llama) -> None:
    slot = filled(llama, 70)
    taken = llama.snapshot(slot)
    assert taken.tokens.dtype == np.int32
    assert taken.kv.dtype == np.uint16
    assert taken.kv.shape == (30, 6, 70, 64)
    expected = llama.decode([(slot, 11)])
    llama.close(slot)
    carried = Snapshot(
        np.frombuffer(taken.tokens.tobytes(), np.int32),  # read-only, as from a connector
        np.frombuffer(taken.kv.tobytes(), np.uint16).reshape(taken.kv.shape),
    )
    restored = llama.restore(carried)
    assert llama.tokens(restored) == tuple(some(70))
    assert torch.equal(llama.decode([(restored, 11)]), expected)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda s: Snapshot(s.tokens, s.kv[:, :, :-1]), Misuse),
        (lambda s: Snapshot(s.tokens, s.kv[:20]), Misuse),
        (lambda s: Snapshot(s.tokens, s.kv.astype(np.float32)), Misuse),
        (lambda s: Snapshot(s.tokens.astype(np.int64), s.kv), Misuse),
        (lambda s: Snapshot(s.tokens - 49152, s.kv), Misuse),
        (lambda s: Snapshot(s.tokens, np.full_like(s.kv, 0x7FC0)), Misuse),
        (lambda s: Snapshot(np.tile(s.tokens, 60), np.tile(s.kv, (1, 1, 60, 1))), WindowFull),
    ],
    ids=["fewer tokens", "fewer layers", "floats", "wide ids", "ids below zero", "not a number", "too long"],
)
def test_a_snapshot_that_does_not_fit_is_refused(
    llama: Llama, spoil: Callable[[Snapshot], Snapshot], error: type[Exception]
) -> None:
    taken = llama.snapshot(filled(llama, 10))
    free = llama.free
    with pytest.raises(error):
        llama.restore(spoil(taken))
    assert llama.free == free


def test_a_closed_slot_leaves_nothing_behind(llama: Llama) -> None:
    slot = filled(llama, 60)
    index = llama._sessions[slot].index
    assert llama._pool.kv[index].abs().sum() > 0
    llama.close(slot)
    assert llama._pool.kv[index].abs().sum() == 0
    again = llama.open()
    assert llama._sessions[again].index == index
    assert llama.tokens(again) == ()


def test_a_closed_slot_is_refused_though_its_place_is_taken_again(llama: Llama) -> None:
    stale = filled(llama, 5)
    llama.close(stale)
    fresh = llama.open()
    for use in (
        lambda: llama.prefill(stale, [1]),
        lambda: llama.decode([(fresh, 1), (stale, 1)]),
        lambda: llama.truncate(stale, 0),
        lambda: llama.fork(stale),
        lambda: llama.snapshot(stale),
        lambda: llama.tokens(stale),
        lambda: llama.close(stale),
    ):
        with pytest.raises(Misuse):
            use()
    assert llama.length(fresh) == 0


def test_exactly_the_cap_of_sessions_is_reachable(llama: Llama) -> None:
    slots = [llama.open() for _ in range(SESSIONS)]
    with pytest.raises(PoolFull):
        llama.open()
    with pytest.raises(PoolFull):
        llama.fork(slots[0])
    llama.close(slots[4])
    assert llama.open() not in slots


def test_exactly_the_context_is_reachable(llama: Llama) -> None:
    slot = filled(llama, CONTEXT)
    with pytest.raises(WindowFull):
        llama.decode([(slot, 1)])
    llama.truncate(slot, CONTEXT - 1)
    assert torch.isfinite(llama.decode([(slot, 1)])).all()


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ([], Misuse),
        ([1] * (STEP + 1), Misuse),
        ([-1], Misuse),
        ([49152], Misuse),
        ([1] * 20, WindowFull),
    ],
    ids=["empty", "too many for a step", "below zero", "beyond the vocabulary", "beyond the context"],
)
def test_a_step_with_one_bad_feed_changes_nobody(llama: Llama, ids: list[int], error: type[Exception]) -> None:
    good, bad = filled(llama, 10), filled(llama, CONTEXT - 5)
    before = llama.snapshot(good)
    with pytest.raises(error):
        llama.step([Feed(good, [1]), Feed(bad, ids)])
    assert llama.length(bad) == CONTEXT - 5
    after = llama.snapshot(good)
    assert np.array_equal(after.tokens, before.tokens)
    assert np.array_equal(after.kv, before.kv)


def test_a_step_names_a_slot_once_and_wants_logits_inside_its_ids(llama: Llama) -> None:
    slot = filled(llama, 10)
    with pytest.raises(Misuse):
        llama.decode([(slot, 1), (slot, 2)])
    with pytest.raises(Misuse):
        llama.prefill(slot, [1, 2], probe=2)
    with pytest.raises(Misuse):
        llama.truncate(slot, 11)
    with pytest.raises(Misuse):
        llama.step([])
    assert llama.length(slot) == 10


def test_a_slot_costs_what_it_holds_and_gives_it_back(llama: Llama) -> None:
    process = psutil.Process()
    llama.prefill(llama.open(), some(STEP))  # the kernels' own buffers come once
    before = process.memory_info().rss
    slot = filled(llama, 384, seed=3)
    held = process.memory_info().rss - before
    llama.close(slot)
    kept = process.memory_info().rss - before
    assert 0.8 < held / (384 * 23040) < 1.8
    assert kept < held - 0.8 * 384 * 23040


def test_a_q41_block_is_read_as_ggml_lays_it_out() -> None:
    low, high = np.arange(16) % 16, np.arange(16)[::-1]
    block = struct.pack("<ee16B", 0.5, -2.0, *(low | high << 4).tolist())
    tensor = RawTensor(Kind.Q4_1, 1, 32, np.frombuffer(block, np.uint8).reshape(1, 20))
    expected = np.concatenate([low, high]) * 0.5 - 2.0
    assert np.array_equal(floats(tensor)[0], expected)


def test_a_q80_block_is_read_as_ggml_lays_it_out() -> None:
    block = struct.pack("<e32b", 0.25, *range(-16, 16))
    tensor = RawTensor(Kind.Q8_0, 1, 32, np.frombuffer(block, np.uint8).reshape(1, 34))
    assert np.array_equal(floats(tensor)[0], np.arange(-16, 16) * 0.25)
    with pytest.raises(WeightsUnusable):
        unpack_q41(tensor)


def small_file(kind: int = 0, rows: int = 2, text: bytes = b"llama", values: bytes = b"\0" * 256) -> bytes:
    """A GGUF file with one text and one tensor `t` of 32 columns."""
    key, name = b"general.architecture", b"t"
    head = struct.pack("<4sIQQ", b"GGUF", 3, 1, 1)
    head += struct.pack(f"<Q{len(key)}sIQ{len(text)}s", len(key), key, 8, len(text), text)
    head += struct.pack("<Q1sIQQIQ", 1, name, 2, 32, rows, kind, 0)
    return head + b"\0" * (-len(head) % 32) + values


def test_a_small_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(small_file())
    gguf = Gguf(path)
    assert floats(gguf.tensor("t")).shape == (2, 32)
    with pytest.raises(WeightsUnusable):
        gguf.tensor("u")
    with pytest.raises(WeightsUnusable):
        gguf.whole("llama.block_count")
    with pytest.raises(WeightsUnusable):
        gguf.whole("general.architecture")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"GGML" + small_file()[4:],
        small_file()[:40],
        small_file()[:-1],
        small_file(kind=2),
        small_file(rows=3),
        small_file(rows=2**62),
        small_file(text=b"\xff"),
    ],
    ids=["empty", "no header", "magic", "cut", "cut tensor", "kind", "rows", "many rows", "text"],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(WeightsUnusable):
        Gguf(path)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(small_file(text=b"gemma"))
    with pytest.raises(WeightsUnusable):
        Llama(Gguf(path))
