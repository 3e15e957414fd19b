"""OpenPI messages: msgpack with numpy arrays in it, read strictly and written as the official client reads them.

An array is a map with a marker key. Three forms are read, their keys as msgpack's bin or as text:

    {__ndarray__: true, data, dtype, shape}, {__npgeneric__: true, data, dtype}    openpi-client: bin; vla-eval: text
    {nd: true, type, kind, shape, data}, {nd: false, type, kind, data}             vllm-omni: text; msgpack-numpy: bin

and openpi-client's is written. A message comes from a peer that nothing is known of, so whatever it claims is held
against a cap and against the bytes that are there before anything is allocated for it. That is why there is a reader of
our own: msgpack's allocates each list that a header announces, a thousand levels deep, before a hook hears of the
first, and takes the last of two equal keys. It is twice as fast, though. So it reads first, under caps so low that
nothing can happen, which an observation keeps to; whatever it does not like, ours reads, and says what is wrong.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from struct import Struct
from typing import Final, TypeAlias

import msgpack
import numpy as np
from numpy.typing import NDArray

from omni_live.protocols.fields import Faulty

Array = NDArray[np.generic]
Frame: TypeAlias = bytes | bytearray | memoryview

MAX_ELEMENTS: Final = 20_000
"""Entries of maps and items of lists in one message, all together; an array counts as the few entries of its marker."""
MAX_DEPTH: Final = 16
"""Maps and lists within one another."""
MAX_TEXT_BYTES: Final = 65_536
"""Of one text."""
MAX_KEY_BYTES: Final = 256
"""Of one map key."""
MAX_DIMS: Final = 32
"""Of one array: numpy 1's limit."""
MAX_ARRAY_BYTES: Final = 64 << 20
"""Of one array, an axis of length 0 counted as 1: an empty array of shape (0, 10**12) sums to one of 8 TB."""


@dataclass(frozen=True, slots=True)
class Caps:
    """What one message may hold."""

    elements: int = MAX_ELEMENTS
    depth: int = MAX_DEPTH
    text_bytes: int = MAX_TEXT_BYTES
    key_bytes: int = MAX_KEY_BYTES
    array_bytes: int = MAX_ARRAY_BYTES


DEFAULT_CAPS: Final = Caps()


@dataclass(frozen=True, slots=True)
class Message:
    """What a frame says.

    value         None, bool, int, float, str, bytes, list, dict[str, ...], numpy array or numpy scalar. Arrays are
                  writable, C-contiguous, aligned and own their memory; they keep the byte order that they came in
    vllm_omni     an array in it was marked as vllm-omni's clients mark theirs
    """

    value: object
    vllm_omni: bool


def unpack(frame: Frame, caps: Caps = DEFAULT_CAPS) -> object:
    """The value of a frame, see `Message.value`. Raises Faulty (bad_frame)."""
    return read(frame, caps).value


def read(frame: Frame, caps: Caps = DEFAULT_CAPS, *, copy: bool = True) -> Message:
    """A frame's value and how its arrays were marked. Raises Faulty (bad_frame).

    Without `copy` the arrays are views of the frame: not writable, and aligned as the frame happens to hold them.
    """
    data = bytes(frame)
    quick = _quickly(data, copy) if caps is DEFAULT_CAPS else None
    if quick is not None:
        return quick
    reader = _Reader(data, caps, copy=copy)
    value = _kept(reader.value(0))
    reader.done()
    return Message(value, reader.vllm_omni)


def pack(value: object) -> bytes:
    """The value as one frame; numpy arrays and scalars in it as openpi-client marks them.

    Raises TypeError for what the wire has no word for, among it arrays of objects, records and complex numbers.
    """
    packed = msgpack.packb(value, default=_marked)
    assert isinstance(packed, bytes)
    return packed


def _marked(value: object) -> dict[bytes, object]:
    """What msgpack does not know: a numpy array or scalar."""
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind not in _KINDS:
        raise TypeError(f"a {type(value).__name__} cannot be packed")
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    return {b"__ndarray__": True, b"data": _bytes_of(value), b"dtype": value.dtype.str, b"shape": value.shape}


def _bytes_of(array: Array) -> memoryview | bytes:
    """An array's elements in C order, uncopied where they lie so already."""
    if array.dtype.kind in _NUMBERS:
        return np.ascontiguousarray(array).data
    return array.tobytes()  # texts and times have no buffer that msgpack could take


# -- reading plain observations with msgpack

_QUICK_CONTAINERS: Final = 128
_QUICK_ENTRIES: Final = 64
_QUICK_DEPTH: Final = 8


class _NotPlain(Exception):
    """A frame for the careful reader."""


class _Hooks:
    """What msgpack calls for each map and list that it has read."""

    __slots__ = ("_copy", "_left", "vllm_omni")

    def __init__(self, copy: bool) -> None:
        self._copy = copy
        self._left = _QUICK_CONTAINERS
        self.vllm_omni = False

    def listed(self, items: list[object]) -> list[object]:
        self._left -= 1
        if self._left < 0:
            raise _NotPlain
        return items

    def mapped(self, pairs: list[tuple[object, object]]) -> object:
        self._left -= 1
        found = dict(pairs)
        if self._left < 0 or len(found) != len(pairs):
            raise _NotPlain
        if b"__ndarray__" in found:
            return _quick_array(found, self._copy)
        for key in found:
            # What a frame marks in any other way is for the careful reader.
            if type(key) is not str or len(key) > _QUICK_ENTRIES or key in _MARKS:
                raise _NotPlain
        return found


_MARKS: Final = frozenset({"__ndarray__", "__npgeneric__", "nd"})
_QUICK_KEYS: Final = {b"__ndarray__", b"data", b"dtype", b"shape"}


def _quickly(data: bytes, copy: bool) -> Message | None:
    """What a frame says that holds nothing but plain values and openpi-client's arrays; None for every other one.

    Nothing here decides that a frame is bad, and nothing that it announces can cost more than
    `_QUICK_ENTRIES` words for each of msgpack's thousand levels.
    """
    hooks = _Hooks(copy)
    try:
        value = msgpack.unpackb(
            data,
            object_pairs_hook=hooks.mapped,
            list_hook=hooks.listed,
            ext_hook=_no_extensions,
            strict_map_key=False,
            max_array_len=_QUICK_ENTRIES,
            max_map_len=_QUICK_ENTRIES,
            max_str_len=MAX_TEXT_BYTES,
            max_ext_len=0,
        )
    except (_NotPlain, Faulty, ValueError, TypeError, msgpack.exceptions.UnpackException):
        return None
    return Message(value, hooks.vllm_omni) if _is_shallow(value, _QUICK_DEPTH) else None


def _no_extensions(_code: int, _data: bytes) -> object:
    raise _NotPlain


def _quick_array(marker: dict[object, object], copy: bool) -> Array:
    data, dtype = marker.get(b"data"), marker.get(b"dtype")
    if marker.keys() != _QUICK_KEYS or marker[b"__ndarray__"] is not True:
        raise _NotPlain
    if not isinstance(data, bytes) or not isinstance(dtype, str):
        raise _NotPlain
    return _array(_dtype_named(dtype), marker[b"shape"], memoryview(data), DEFAULT_CAPS, copy)


def _is_shallow(value: object, depth: int) -> bool:
    if isinstance(value, dict):
        return depth > 0 and all(_is_shallow(each, depth - 1) for each in value.values() if type(each) in _CONTAINERS)
    if isinstance(value, list):
        return depth > 0 and all(_is_shallow(each, depth - 1) for each in value if type(each) in _CONTAINERS)
    return True


_CONTAINERS: Final = frozenset({dict, list})

# -- reading msgpack

_NUMBER_OF: Final = {
    head: Struct(f">{code}")
    for head, code in zip(
        (0xCA, 0xCB, 0xCC, 0xCD, 0xCE, 0xCF, 0xD0, 0xD1, 0xD2, 0xD3),
        "fdBHIQbhiq",
        strict=True,
    )
}
_CONSTANTS: Final = {0xC0: None, 0xC2: False, 0xC3: True}
_LENGTH_BYTES: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
_MARKER_KEYS: Final = {
    name.encode(): name
    for name in ("__ndarray__", "__npgeneric__", "__image__", "data", "dtype", "shape", "nd", "type", "kind", "format")
}
"""What may be a key as bin."""
_KEY_HEADS: Final = frozenset({*range(0xA0, 0xC0), 0xC4, 0xC5, 0xC6, 0xD9, 0xDA, 0xDB})


class _Reader:
    """One frame, read from its first byte to its last. A bin is a view of the frame until something keeps it."""

    __slots__ = ("_at", "_caps", "_copy", "_data", "_end", "_left", "_view", "vllm_omni")

    def __init__(self, data: bytes, caps: Caps, *, copy: bool) -> None:
        self._copy = copy
        self._data = data
        self._view = memoryview(data)
        self._end = len(data)
        self._at = 0
        self._caps = caps
        self._left = caps.elements
        self.vllm_omni = False

    def value(self, depth: int) -> object:
        """The next value, which stands within `depth` maps and lists."""
        at = self._at
        if at >= self._end:
            raise _cut_short()
        self._at = at + 1
        head = self._data[at]
        return _READ[head](self, head, depth)

    def done(self) -> None:
        if self._at != self._end:
            raise _bad("The frame goes on after its message.")

    # What may follow a head byte.

    def small(self, head: int, _depth: int) -> int:
        return head

    def negative(self, head: int, _depth: int) -> int:
        return head - 256

    def constant(self, head: int, _depth: int) -> bool | None:
        return _CONSTANTS[head]

    def number(self, head: int, _depth: int) -> int | float:
        form = _NUMBER_OF[head]
        at = self._taken(form.size)
        (number,) = form.unpack_from(self._data, at)
        assert isinstance(number, int | float)
        return number

    def short_text(self, head: int, _depth: int) -> str:
        return self._text(head & 0x1F)

    def long_text(self, head: int, _depth: int) -> str:
        return self._text(self._length(head))

    def binary(self, head: int, _depth: int) -> memoryview:
        size = self._length(head)
        at = self._taken(size)
        return self._view[at : at + size]

    def short_list(self, head: int, depth: int) -> list[object]:
        return self._list(head & 0x0F, depth)

    def long_list(self, head: int, depth: int) -> list[object]:
        return self._list(self._length(head), depth)

    def short_map(self, head: int, depth: int) -> object:
        return self._map(head & 0x0F, depth)

    def long_map(self, head: int, depth: int) -> object:
        return self._map(self._length(head), depth)

    def refused(self, _head: int, _depth: int) -> object:
        raise _bad("The frame holds a type that is not used here: extensions and timestamps are not.")

    # How they are read.

    def _taken(self, size: int) -> int:
        """Where the next `size` bytes begin; they count as read."""
        at = self._at
        if size > self._end - at:
            raise _cut_short()
        self._at = at + size
        return at

    def _length(self, head: int) -> int:
        size = _LENGTH_BYTES[head]
        at = self._taken(size)
        return int.from_bytes(self._data[at : at + size])

    def _text(self, size: int) -> str:
        if size > self._caps.text_bytes:
            raise _bad(f"The frame holds a text of more than {self._caps.text_bytes} bytes.")
        at = self._taken(size)
        try:
            return self._data[at : at + size].decode()
        except UnicodeDecodeError:
            raise _bad("The frame holds a text that is not UTF-8.") from None

    def _enter(self, count: int, depth: int) -> None:
        """Before a map or list is read: it is not too deep, and what it announces is not too much."""
        if depth >= self._caps.depth:
            raise _bad(f"The frame nests maps and lists more than {self._caps.depth} deep.")
        self._left -= count
        if self._left < 0:
            raise _bad(f"The frame has more than {self._caps.elements} elements.")

    def _list(self, count: int, depth: int) -> list[object]:
        self._enter(count, depth)
        return [_kept(self.value(depth + 1)) for _ in range(count)]

    def _map(self, count: int, depth: int) -> object:
        """A map, or the array or scalar that it marks."""
        self._enter(count, depth)
        found: dict[str, object] = {}
        all_texts = True
        for _ in range(count):
            key, is_text = self._key()
            all_texts &= is_text
            if key in found:
                raise _bad("The frame holds a map with a key twice.")
            found[key] = self.value(depth + 1)
        if "__ndarray__" in found:
            return _openpi_array(found, self._caps, self._copy)
        if "__npgeneric__" in found:
            return _openpi_scalar(found)
        if "nd" in found and "type" in found and "data" in found:
            self.vllm_omni = True
            return _vllm_omni_value(found, self._caps, self._copy)
        if not all_texts and "__image__" not in found:
            raise _bad("The frame holds a map with a key that is not text.")
        for key, value in found.items():
            found[key] = _kept(value)
        return found

    def _key(self) -> tuple[str, bool]:
        """A map's next key, and whether it is a text: the keys of markers may be bin."""
        if self._at >= self._end:
            raise _cut_short()
        if self._data[self._at] in _KEY_HEADS:
            before = self._at
            key = self.value(0)
            if self._at - before > self._caps.key_bytes:
                raise _bad(f"The frame holds a map with a key of more than {self._caps.key_bytes} bytes.")
            if isinstance(key, str):
                return key, True
            if key in _MARKER_KEYS:
                return _MARKER_KEYS[key], False
        raise _bad("The frame holds a map with a key that is not text.")


_Read: TypeAlias = Callable[[_Reader, int, int], object]


def _table(rows: Iterable[tuple[Iterable[int], _Read]]) -> tuple[_Read, ...]:
    """How to read on, by head byte."""
    table: list[_Read] = [_Reader.refused] * 256
    for heads, read_on in rows:
        for head in heads:
            table[head] = read_on
    return tuple(table)


_READ: Final = _table(
    (
        (range(0x80), _Reader.small),
        (range(0x80, 0x90), _Reader.short_map),
        (range(0x90, 0xA0), _Reader.short_list),
        (range(0xA0, 0xC0), _Reader.short_text),
        (_CONSTANTS, _Reader.constant),
        ((0xC4, 0xC5, 0xC6), _Reader.binary),
        (_NUMBER_OF, _Reader.number),
        ((0xD9, 0xDA, 0xDB), _Reader.long_text),
        ((0xDC, 0xDD), _Reader.long_list),
        ((0xDE, 0xDF), _Reader.long_map),
        (range(0xE0, 0x100), _Reader.negative),
    )
)


def _kept(value: object) -> object:
    return bytes(value) if isinstance(value, memoryview) else value


def _bad(sentence: str) -> Faulty:
    return Faulty("bad_frame", sentence)


def _cut_short() -> Faulty:
    return _bad("The frame ends before its message does.")


# -- arrays

_NUMBERS: Final = "biuf"
_KINDS: Final = _NUMBERS + "USMm"
_DTYPE: Final = re.compile(
    r"[<>|=]?(?:b1|[iu][1248]|f[248]|[US][1-9]\d{0,3}|[Mm]8(?:\[\d{0,4}(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)",
    re.ASCII,
)
"""numpy's dtype.str of what may travel: plain numbers, texts of a fixed size, times. No objects, records, complex."""

_ARRAY_KEYS: Final = {"__ndarray__", "data", "dtype", "shape"}
_SCALAR_KEYS: Final = {"__npgeneric__", "data", "dtype"}
_VLLM_OMNI_KEYS: Final = {"nd", "type", "kind", "shape", "data"}


def _openpi_array(marker: dict[str, object], caps: Caps, copy: bool) -> Array:
    if marker.keys() != _ARRAY_KEYS or not _is_set(marker["__ndarray__"]):
        raise _bad("The frame holds an array whose marker is not complete.")
    return _array(_dtype(marker["dtype"]), marker["shape"], marker["data"], caps, copy)


def _openpi_scalar(marker: dict[str, object]) -> np.generic:
    if marker.keys() != _SCALAR_KEYS or not _is_set(marker["__npgeneric__"]):
        raise _bad("The frame holds a scalar whose marker is not complete.")
    return _scalar(_dtype(marker["dtype"]), _kept(marker["data"]))


def _vllm_omni_value(marker: dict[str, object], caps: Caps, copy: bool) -> Array | np.generic:
    dtype = _dtype(marker["type"])
    if not marker.keys() <= _VLLM_OMNI_KEYS or _ascii(marker.get("kind", "")) not in ("", dtype.kind):
        raise _bad("The frame holds an array whose marker is not complete.")
    if _is_set(marker["nd"]):
        return _array(dtype, marker.get("shape"), marker["data"], caps, copy)
    scalar = _array(dtype, [1], marker["data"], caps, copy=True)[0]
    assert isinstance(scalar, np.generic)
    return scalar


def _is_set(flag: object) -> bool:
    return flag is True or (type(flag) is int and flag == 1)


def _dtype(text: object) -> np.dtype[np.generic]:
    return _dtype_named(_ascii(text))


def _ascii(text: object) -> str:
    """A short text, which may have come as bin."""
    if isinstance(text, memoryview) and len(text) <= 32:
        return bytes(text).decode("latin-1")
    if not isinstance(text, str):
        raise _bad("The frame holds an array whose dtype is not a text.")
    return text


@lru_cache(maxsize=64)
def _dtype_named(text: str) -> np.dtype[np.generic]:
    """The dtype, if it may travel. numpy parses only what has been recognised: it takes much more for a dtype."""
    if not _DTYPE.fullmatch(text):
        raise _bad("The frame holds an array of a dtype that is not used here.")
    try:
        return np.dtype(text)
    except (TypeError, ValueError):
        raise _bad("The frame holds an array of a dtype that is not used here.") from None


def _array(dtype: np.dtype[np.generic], shape: object, data: object, caps: Caps, copy: bool) -> Array:
    """The array, once its shape, dtype and bytes are known to agree."""
    if not isinstance(data, memoryview):
        raise _bad("The frame holds an array whose data is not bytes.")
    lengths = _shape(shape)
    if dtype.itemsize * prod(max(length, 1) for length in lengths) > caps.array_bytes:
        raise _bad(f"The frame holds an array of more than {caps.array_bytes} bytes.")
    if prod(lengths) * dtype.itemsize != len(data):
        raise _bad("The frame holds an array whose shape and dtype do not fit its data.")
    if not len(data):
        return np.empty(lengths, dtype)
    array: Array = np.frombuffer(data, dtype).reshape(lengths)
    if copy:
        array = array.copy()
    if dtype.kind in "bU":
        _check_elements(array)
    return array


def _shape(shape: object) -> tuple[int, ...]:
    if not isinstance(shape, list) or len(shape) > MAX_DIMS:
        raise _bad(f"The frame holds an array whose shape is not a list of up to {MAX_DIMS} lengths.")
    for length in shape:
        if type(length) is not int or length < 0:
            raise _bad("The frame holds an array with a length that is not a natural number.")
    return tuple(shape)


def _check_elements(array: Array) -> None:
    """Of dtypes that do not take every pattern of bits: numpy never looks, and fails later or lets it pass."""
    if array.dtype.kind == "b":
        if array.reshape(-1).view(np.uint8).max() > 1:
            raise _bad("The frame holds an array of booleans that are neither true nor false.")
    elif array.reshape(-1).view(np.dtype(np.uint32).newbyteorder(array.dtype.byteorder)).max() > 0x10FFFF:
        raise _bad("The frame holds an array of texts that are not Unicode.")


def _scalar(dtype: np.dtype[np.generic], value: object) -> np.generic:
    """A numpy scalar from the plain value that openpi-client sends for it."""
    kind = dtype.kind
    if kind == "b" and isinstance(value, bool):
        return np.bool_(value)
    if kind in "iu" and type(value) is int:
        limits = np.iinfo(dtype.str)
        if limits.min <= value <= limits.max:
            return _made(dtype, value)
    if kind == "f" and type(value) in (int, float):
        return _made(dtype, value)
    if (kind == "U" and isinstance(value, str)) or (kind == "S" and isinstance(value, bytes)):
        return _made(np.dtype(kind), value)
    raise _bad("The frame holds a scalar whose value does not fit its dtype.")


def _made(dtype: np.dtype[np.generic], value: object) -> np.generic:
    with np.errstate(over="ignore"):  # what is too large for a float16 becomes infinite, as it does in an array
        scalar = np.array([value], dtype)[0]
    assert isinstance(scalar, np.generic)
    return scalar
