"""A llama on one CPU thread, for many sessions at once: a pool of KV slots, and a step that serves any mix of them.

Nothing waits or spawns in here. An engine calls `Llama.step` (or its two short forms, `prefill` and `decode`) and looks
at its fences between calls; a step is bounded by `step_tokens`. One step takes tokens of several sessions, few or many
of each: the matrix products run over all of them together, attention runs per session.

How it is made fast, by measurement on an AMX core (SmolLM2-135M, all layers' products, ms at 1 / 4 / 8 / 20 tokens):
plain bf16 37 / 38 / 38 / 39 · bf16 packed by oneDNN 24 / 25 / 25 / 28 · `_weight_int8pack_mm` 18 / 23 / 39 / 72 ·
`_weight_int4pack_mm_for_cpu` 9 / 14 / 25 / 56. The last one computes with the file's own Q4_1 codes (only steps and
bases are rounded, to bf16), so nothing is quantised a second time. Hence: four-bit up to `FEW` rows, packed bf16 above.
The residual stream is fp32, what enters a product is bf16.

Determinism: the same ids on the same KV give the same bits in a step of their own, whichever the slot. Up to `FEW` rows
the kernels compute each row by itself, and single tokens attend over lengths rounded up to whole vectors (a kernel's
tail rounds otherwise); so on a CPU with AMX a step of at most `FEW` single tokens gives each session the bits that it
gets alone. In larger or mixed steps rows differ by rounding, never by what the others say.
"""

import heapq
import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NewType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from omni_live.models.gguf_weights import (
    BLOCK,
    Q41,
    Gguf,
    Misuse,
    PoolFull,
    RawTensor,
    Shape,
    WindowFull,
    floats,
    floats_q41,
    floats_q80,
    shape,
    unpack_q41,
)

FEW: Final = 8  # rows up to which four-bit weights beat packed bf16
_ROWS_AT_ONCE: Final = 4096
_INFINITE: Final = 0x7F80  # bfloat16's bit pattern; without the sign, what is no number lies above it

# torch's weight-only and packed products have no public names; inductor emits calls of these same operators.
_pack_codes: Callable[[Tensor, int], Tensor] = torch._convert_weight_to_int4pack_for_cpu  # noqa: SLF001
_int4_product: Callable[[Tensor, Tensor, int, Tensor], Tensor] = torch._weight_int4pack_mm_for_cpu  # noqa: SLF001
_pack_dense: Callable[[Tensor, None], Tensor] = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001
_dense_product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001

Slot = NewType("Slot", int)
"""A session's handle into the pool. Handles are never used twice, so a stale one is refused, not misread."""


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens to append to one slot in a step. `wanted` are the offsets into `ids` after which logits are asked for:
    by default the last; `()` for a chunk that is not its prompt's last."""

    slot: Slot
    ids: Sequence[int]
    wanted: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Prefilled:
    """`logits` float32[vocabulary] after the last id; `probe` the same after the probed position, if one was given."""

    logits: Tensor
    probe: Tensor | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A slot's state as plain arrays: `tokens` int32[n]; `kv` uint16[layers, 2 * kv_heads, n, head_dim], the bit
    patterns of bfloat16, keys before values."""

    tokens: NDArray[np.int32]
    kv: NDArray[np.uint16]


class Linear:
    """y = x Wᵀ for W in Q4_1, held twice: four-bit for few rows, packed bf16 for many. bf16 in, bf16 out."""

    __slots__ = ("_codes", "_dense", "_ends")

    def __init__(self, parts: Q41) -> None:
        self._codes = _pack_codes(torch.from_numpy(parts.codes.astype(np.int32)), 1)
        # The kernel computes (code - 8) * step + zero, steps and zeros as [blocks, rows, 2].
        ends = np.stack([parts.step.T, (parts.base + 8 * parts.step).T], axis=-1)
        self._ends = torch.from_numpy(np.ascontiguousarray(ends)).bfloat16()
        self._dense = _pack_dense(torch.from_numpy(floats_q41(parts)).bfloat16(), None)

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= FEW:
            return _int4_product(x, self._codes, BLOCK, self._ends)
        return _dense_product(x, self._dense, None, "none", [], "")


class Head:
    """The output projection in packed bf16. Eight-bit would save 1 ms for one row and lose it for four."""

    __slots__ = ("_dense",)

    def __init__(self, tensor: RawTensor) -> None:
        dense = torch.empty(tensor.rows, tensor.columns, dtype=torch.bfloat16)
        for start in range(0, tensor.rows, _ROWS_AT_ONCE):  # the fp32 form of the whole is 113 MB
            part = slice(start, start + _ROWS_AT_ONCE)
            dense[part] = torch.from_numpy(floats_q80(tensor.raw[part]))
        self._dense = _pack_dense(dense, None)

    def __call__(self, x: Tensor) -> Tensor:
        return _dense_product(x, self._dense, None, "none", [], "")


class Norm:
    """RMS norm, float32[n, width] → bfloat16[n, width]; written out, it takes half the time of torch's own."""

    __slots__ = ("_floor", "_gain")

    def __init__(self, gain: NDArray[np.float32], epsilon: float) -> None:
        width = gain.size
        self._gain = torch.from_numpy(gain.reshape(width) * np.float32(width**0.5))
        self._floor = torch.tensor((width * epsilon) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), self._floor)
        return (x / length).mul_(self._gain).bfloat16()


@dataclass(frozen=True, slots=True)
class _Layer:
    before_attention: Norm
    qkv: Linear
    out: Linear
    before_ffn: Norm
    gate_up: Linear
    down: Linear


@dataclass(slots=True)
class _Session:
    index: int
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Span:
    """Rows `start` to `stop` of a step that one attention call serves: one session's many tokens (`rows` 1), or one
    token each of `rows` sessions in neighbouring slots from `index` on, padded to the longest."""

    start: int
    stop: int
    index: int
    rows: int
    length: int
    mask: Tensor | None
    causal: bool


class Llama:
    """A llama and its sessions' KV.

    `sessions` slots of `context` tokens each are reserved as addresses only; memory is touched as tokens arrive and
    given back on `close`. `threads` is set for the whole process (torch knows no other way).
    Source of the arithmetic: the LLaMA paper and llama.cpp's `llama` graph. GGUF stores q and k permuted for rotary
    pairs of neighbours, which is also what is computed here, so nothing is permuted back.
    """

    def __init__(
        self, gguf: Gguf, *, sessions: int = 16, context: int = 2048, step_tokens: int = 256, threads: int = 1
    ) -> None:
        torch.set_num_threads(threads)
        self.shape = shape(gguf)
        self.context = -(-context // BLOCK) * BLOCK  # whole pages for each head's keys
        self.step_tokens = step_tokens
        self._embedding = gguf.tensor("token_embd.weight").raw
        self._layers = [_layer(gguf, self.shape, number) for number in range(self.shape.layers)]
        self._norm = Norm(floats(gguf.tensor("output_norm.weight")), self.shape.epsilon)
        self._head = Head(gguf.tensor("token_embd.weight"))
        gguf.forget()
        self._rotary = _rotary(self.shape, self.context)
        self._pool = _Pool(self.shape, sessions, self.context)
        self._sessions: dict[Slot, _Session] = {}
        self._free = list(range(sessions))  # a heap: low indices first keeps neighbours together, see _Span
        self._next = 0

    @property
    def free(self) -> int:
        """How many more sessions can be opened."""
        return len(self._free)

    def open(self) -> Slot:
        """Takes a slot; raises PoolFull when all are taken."""
        if not self._free:
            raise PoolFull("every session slot of the model is taken")
        slot = Slot(self._next)
        self._next += 1
        self._sessions[slot] = _Session(heapq.heappop(self._free))
        return slot

    def close(self, slot: Slot) -> None:
        """Gives a slot back; what it held is wiped before anyone else can take it."""
        session = self._session(slot)
        self._pool.wipe(session.index)
        del self._sessions[slot]
        heapq.heappush(self._free, session.index)

    def tokens(self, slot: Slot) -> tuple[int, ...]:
        """The ids that the slot's KV stands for."""
        return tuple(self._session(slot).tokens)

    def length(self, slot: Slot) -> int:
        return len(self._session(slot).tokens)

    def truncate(self, slot: Slot, length: int) -> None:
        """Forgets everything after the first `length` tokens."""
        session = self._session(slot)
        if not 0 <= length <= len(session.tokens):
            raise Misuse("a slot cannot be cut to more than it holds")
        del session.tokens[length:]

    def fork(self, slot: Slot) -> Slot:
        """A second slot in the same state: the used part is copied, 23 kB a token. Raises PoolFull."""
        source = self._session(slot)
        made = self.open()
        target = self._sessions[made]
        target.tokens = source.tokens.copy()
        used = len(source.tokens)
        self._pool.kv[target.index, :, :, :used] = self._pool.kv[source.index, :, :, :used]
        return made

    def snapshot(self, slot: Slot) -> Snapshot:
        """The slot's state as a copy in plain arrays, 23 kB a token."""
        session = self._session(slot)
        kv = self._pool.kv[session.index, :, :, : len(session.tokens)].contiguous()
        return Snapshot(np.array(session.tokens, np.int32), kv.view(torch.uint16).numpy())

    def restore(self, snapshot: Snapshot) -> Slot:
        """Opens a slot in the snapshot's state; raises PoolFull, WindowFull, or Misuse for arrays of another model."""
        shape, used = self.shape, snapshot.tokens.size
        if snapshot.tokens.shape != (used,) or snapshot.tokens.dtype != np.int32:
            raise Misuse("a snapshot's tokens are int32[n]")
        expected = (shape.layers, 2 * shape.kv_heads, used, shape.head_dim)
        if snapshot.kv.shape != expected or snapshot.kv.dtype != np.uint16:
            raise Misuse("the snapshot is of another model")
        tokens: list[int] = snapshot.tokens.tolist()
        self._check_ids(tokens)
        if used > self.context:
            raise WindowFull("the snapshot is longer than the context")
        if any(layer.size and int((layer & 0x7FFF).max()) >= _INFINITE for layer in snapshot.kv):
            raise Misuse("the snapshot holds no numbers")
        made = self.open()
        session = self._sessions[made]
        session.tokens = tokens
        for target, layer in zip(self._pool.kv[session.index], snapshot.kv, strict=True):
            target[:, :used] = torch.from_numpy(layer.copy()).view(torch.bfloat16)  # a copy: it may be read-only
        return made

    def prefill(self, slot: Slot, ids: Sequence[int], *, probe: int | None = None) -> Prefilled:
        """Appends at most `step_tokens` ids; `probe` is an offset into `ids` after which logits are wanted too."""
        last = len(ids) - 1
        wanted = (last,) if probe is None else (probe, last)
        logits = self.step([Feed(slot, ids, wanted)])[0]
        return Prefilled(logits[-1], None if probe is None else logits[0])

    def decode(self, entries: Sequence[tuple[Slot, int]]) -> Tensor:
        """Appends one token to each slot; float32[len(entries), vocabulary], in the order given."""
        return torch.cat(self.step([Feed(slot, (token,)) for slot, token in entries]))

    @torch.inference_mode()
    def step(self, feeds: Sequence[Feed]) -> list[Tensor]:
        """Appends each feed's ids to its slot and returns, feed by feed, float32[len(wanted), vocabulary].

        Either every feed is taken or, when this raises (Misuse, WindowFull), none.
        """
        self._check(feeds)
        # Single tokens first and by slot index, so that neighbours share an attention call.
        order = sorted(range(len(feeds)), key=lambda i: (len(feeds[i].ids) > 1, self._sessions[feeds[i].slot].index))
        batch = [(self._sessions[feeds[i].slot], feeds[i]) for i in order]
        x = self._forward(batch)
        rows, counts, start = [], [], 0
        for _, feed in batch:
            wanted = (len(feed.ids) - 1,) if feed.wanted is None else feed.wanted
            rows += [start + offset for offset in wanted]
            counts.append(len(wanted))
            start += len(feed.ids)
        logits = torch.split_with_sizes(self._logits(x, rows), counts)
        for session, feed in batch:
            session.tokens += feed.ids
        return [logits[place] for place in sorted(range(len(order)), key=order.__getitem__)]

    def _session(self, slot: Slot) -> _Session:
        session = self._sessions.get(slot)
        if session is None:
            raise Misuse("the slot is closed")
        return session

    def _check_ids(self, ids: Sequence[int]) -> None:
        if ids and (min(ids) < 0 or max(ids) >= self.shape.vocabulary):
            raise Misuse("an id is outside the vocabulary")

    def _check(self, feeds: Sequence[Feed]) -> None:
        if len({feed.slot for feed in feeds}) != len(feeds):
            raise Misuse("a slot is named twice in one step")
        if not 0 < sum(len(feed.ids) for feed in feeds) <= self.step_tokens:
            raise Misuse(f"a step takes 1 to {self.step_tokens} tokens")
        for feed in feeds:
            held = len(self._session(feed.slot).tokens)
            if not feed.ids:
                raise Misuse("a feed without ids")
            self._check_ids(feed.ids)
            if feed.wanted is not None and any(not 0 <= offset < len(feed.ids) for offset in feed.wanted):
                raise Misuse("logits are wanted outside the ids")
            if held + len(feed.ids) > self.context:
                raise WindowFull("the tokens do not fit the context")

    def _forward(self, batch: Sequence[tuple[_Session, Feed]]) -> Tensor:
        shape = self.shape
        ids = np.concatenate([np.asarray(feed.ids, np.int64) for _, feed in batch])
        at = [np.arange(len(session.tokens), len(session.tokens) + len(feed.ids)) for session, feed in batch]
        places = torch.from_numpy(np.concatenate(at))
        indices = torch.from_numpy(np.repeat([session.index for session, _ in batch], [len(part) for part in at]))
        turns = torch.ones(ids.size, shape.heads + 2 * shape.kv_heads, shape.head_dim // 2, dtype=torch.complex64)
        turns[:, : -shape.kv_heads] = self._rotary[places][:, None]  # values keep the 1: they are not turned
        rows = self._pool.rows(indices, places)
        spans = self._spans(batch)
        x = torch.from_numpy(floats_q80(self._embedding[ids]))
        for number, layer in enumerate(self._layers):
            qkv = _turned(layer.qkv(layer.before_attention(x)), turns)
            self._pool.write(rows[number], qkv[:, shape.heads :])
            x.add_(layer.out(self._attend(number, qkv[:, : shape.heads], spans)))
            gate, up = layer.gate_up(layer.before_ffn(x)).chunk(2, -1)
            x.add_(layer.down(silu(gate).mul_(up)))
        return x

    def _spans(self, batch: Sequence[tuple[_Session, Feed]]) -> list[_Span]:
        spans: list[_Span] = []
        singles = [session for session, feed in batch if len(feed.ids) == 1]
        start = 0
        while start < len(singles):
            stop = start + 1
            while stop < len(singles) and singles[stop].index == singles[stop - 1].index + 1:
                stop += 1
            padding = _padding([len(session.tokens) + 1 for session in singles[start:stop]])
            spans.append(_Span(start, stop, singles[start].index, stop - start, padding.shape[-1], padding, False))
            start = stop
        for session, feed in batch[len(singles) :]:
            held, count = len(session.tokens), len(feed.ids)
            mask = _staircase(held, count) if held else None
            spans.append(_Span(start, start + count, session.index, 1, held + count, mask, not held))
            start += count
        return spans

    def _attend(self, number: int, q: Tensor, spans: Sequence[_Span]) -> Tensor:
        done = [self._attend_span(number, q[span.start : span.stop], span) for span in spans]
        return done[0] if len(done) == 1 else torch.cat(done)

    def _attend_span(self, number: int, q: Tensor, span: _Span) -> Tensor:
        count = span.stop - span.start
        # [sessions, heads, tokens, head_dim]: tokens is 1 for many sessions, sessions is 1 for many tokens
        q = q.unsqueeze(2) if span.rows == count else q.transpose(0, 1).unsqueeze(0)
        keys = self._pool.keys[number][span.index : span.index + span.rows, :, : span.length]
        values = self._pool.values[number][span.index : span.index + span.rows, :, : span.length]
        heard = scaled_dot_product_attention(
            q, keys, values, attn_mask=span.mask, is_causal=span.causal, enable_gqa=True
        )
        return heard.transpose(1, 2).reshape(count, -1)

    def _logits(self, x: Tensor, rows: list[int]) -> Tensor:
        if not rows:
            return torch.empty(0, self.shape.vocabulary)
        return self._head(self._norm(x[rows])).float()


class _Pool:
    """The KV of every slot, bfloat16[sessions, layers, 2 * kv_heads, context, head_dim], keys before values.

    On Linux the pages are mapped by hand: without huge pages (one would touch 2 MiB for one token of one head), so that
    a slot costs what it holds, and so that `wipe` can give them back.
    """

    def __init__(self, shape: Shape, sessions: int, context: int) -> None:
        sizes = (sessions, shape.layers, 2 * shape.kv_heads, context, shape.head_dim)
        self._slot_bytes = 2 * int(np.prod(sizes[1:]))
        self._map: mmap.mmap | None = None
        if sys.platform == "linux":
            self._map = mmap.mmap(-1, self._slot_bytes * sessions, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
            self.kv = torch.frombuffer(self._map, dtype=torch.bfloat16).view(sizes)
        else:
            self.kv = torch.zeros(sizes, dtype=torch.bfloat16)
        self.keys = [self.kv[:, layer, : shape.kv_heads] for layer in range(shape.layers)]
        self.values = [self.kv[:, layer, shape.kv_heads :] for layer in range(shape.layers)]
        self._flat = self.kv.view(-1, shape.head_dim)
        heads = torch.arange(2 * shape.kv_heads)
        layers = torch.arange(shape.layers)
        self._head_rows = (layers[:, None, None] * (2 * shape.kv_heads) + heads) * context  # [layers, 1, heads]
        self._slot_rows = shape.layers * 2 * shape.kv_heads * context

    def rows(self, indices: Tensor, places: Tensor) -> Tensor:
        """Where tokens at `places` of slots `indices` go in the flat pool: int64[layers, tokens * 2 * kv_heads]."""
        return ((indices * self._slot_rows + places)[:, None] + self._head_rows).flatten(1)

    def write(self, rows: Tensor, kv: Tensor) -> None:
        self._flat.index_copy_(0, rows, kv.reshape(-1, self._flat.shape[1]))

    def wipe(self, index: int) -> None:
        if sys.platform == "linux" and self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED, index * self._slot_bytes, self._slot_bytes)
        else:
            self.kv[index].zero_()


def _layer(gguf: Gguf, shape: Shape, number: int) -> _Layer:
    def linear(*names: str) -> Linear:
        parts = [unpack_q41(gguf.tensor(f"blk.{number}.{name}.weight")) for name in names]
        return Linear(
            Q41(
                np.concatenate([part.codes for part in parts]),
                np.concatenate([part.step for part in parts]),
                np.concatenate([part.base for part in parts]),
            )
        )

    def norm(name: str) -> Norm:
        return Norm(floats(gguf.tensor(f"blk.{number}.{name}.weight")), shape.epsilon)

    return _Layer(
        norm("attn_norm"),
        linear("attn_q", "attn_k", "attn_v"),
        linear("attn_output"),
        norm("ffn_norm"),
        linear("ffn_gate", "ffn_up"),
        linear("ffn_down"),
    )


def _rotary(shape: Shape, context: int) -> Tensor:
    """complex64[context, head_dim / 2]: e^(i·position·frequency)."""
    pairs = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    angles = torch.outer(torch.arange(context, dtype=torch.float64), shape.rope_base**-pairs)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def _turned(qkv: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions on neighbouring pairs: bfloat16[n, heads, head_dim]."""
    count, heads, half = turns.shape
    pairs = torch.view_as_complex(qkv.float().view(count, heads, half, 2))
    return torch.view_as_real(pairs.mul_(turns)).view(count, heads, 2 * half).bfloat16()


def _padding(lengths: Sequence[int]) -> Tensor:
    """bool[sessions, 1, 1, longest, rounded up]: true where the session has a token."""
    width = -(-max(lengths) // BLOCK) * BLOCK
    return (torch.arange(width) < torch.tensor(lengths)[:, None])[:, None, None]


def _staircase(held: int, count: int) -> Tensor:
    """bool[count, held + count]: new token i sees all that was held and the new ones up to itself."""
    return torch.ones(count, held + count, dtype=torch.bool).tril_(held)
