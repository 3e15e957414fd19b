"""Pages: what a model keeps of its past, in one arena for all sessions of a replica, shared by forks.

A `Pages` is a sequence that grows at its end, of records of one shape: the latent of a frame, the keys and values of a
token. Its records lie in pages of a `PagePool`, which counts how many sequences hold each page. A fork holds the same
pages, and costs a list of page numbers. Records are never changed, so a full page can be shared forever; the last
page, where it is partly filled and shared, is copied by whoever appends first.

    PagesError          root
    ├─ PoolFull         refused: no page is free; nothing was changed
    ├─ NotKept          no such record (any more), or none yet
    └─ Closed           the sequence gave its pages back

One thread uses a pool and all of its sequences.
"""

from collections.abc import Iterator
from math import prod
from typing import Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

Record = NDArray[np.generic]
_ALIGN: Final = 64
"""Pages and records begin at multiples of this: whole cache lines, and every dtype is aligned."""


class PagesError(Exception):
    """Root of this module's errors. `code` is stable and may reach a client."""

    code = "pages_error"


class PoolFull(PagesError):
    """Every page of the pool is held; nothing was changed."""

    code = "pool_full"


class NotKept(PagesError):
    """The sequence has no record of that number: it was trimmed or cut away, or was never appended."""

    code = "not_kept"


class Closed(PagesError):
    """The sequence was closed."""

    code = "closed"


class PagePool:
    """`cap_bytes` of memory in pages of `page_bytes`, each with a count of its holders.

    The memory is reserved at once, but takes room only when it is written to; the page that was freed last is the
    first to be given out again, so that what was never needed stays untouched.
    """

    def __init__(self, page_bytes: int, cap_bytes: int) -> None:
        """`cap_bytes` counts in whole pages. Raises ValueError where it has no room for one, or where pages are not
        whole multiples of 64 bytes."""
        if page_bytes < 1 or page_bytes % _ALIGN or cap_bytes < page_bytes:
            raise ValueError(f"no page of {page_bytes} bytes in a pool of {cap_bytes}")
        self.page_bytes: Final = page_bytes
        self._count = cap_bytes // page_bytes
        self._arena = np.zeros((self._count, page_bytes), np.uint8)
        self._holders: list[int] = []
        """By page; of those that were ever given out."""
        self._free: list[int] = []
        """Of these, the ones that nobody holds."""

    @property
    def cap_bytes(self) -> int:
        return self._count * self.page_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that somebody holds, each counted once."""
        return (len(self._holders) - len(self._free)) * self.page_bytes

    @property
    def free_pages(self) -> int:
        return self._count - len(self._holders) + len(self._free)

    def holders(self, page: int) -> int:
        """How many hold it; 0 for a free page."""
        return self._holders[page] if 0 <= page < len(self._holders) else 0

    def take(self) -> int:
        """A page that the caller alone holds, with whatever is in it. Raises PoolFull."""
        if self._free:
            page = self._free.pop()
            self._holders[page] = 1
            return page
        if len(self._holders) == self._count:
            raise PoolFull(f"all {self._count} pages are held")
        self._holders.append(1)
        return len(self._holders) - 1

    def share(self, page: int) -> None:
        """One more holds it. Raises ValueError for a page that nobody holds."""
        self._held(page)
        self._holders[page] += 1

    def give_back(self, page: int) -> None:
        """One less holds it; the last one frees it. Raises ValueError for a page that nobody holds."""
        self._held(page)
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free.append(page)

    def memory(self, page: int) -> NDArray[np.uint8]:
        """The page's bytes, (page_bytes,): to be written by a sole holder only."""
        memory: NDArray[np.uint8] = self._arena[page]
        return memory

    def _held(self, page: int) -> None:
        if not self.holders(page):
            raise ValueError(f"nobody holds page {page}")


class Pages:
    """A sequence of records of one shape and dtype, numbered from `start`; it grows at its end and may lose its front.

    Records keep their numbers whatever is trimmed. A sequence that is forgotten instead of closed gives its pages
    back as well.
    """

    __slots__ = ("_base", "_dtype", "_end", "_first", "_held", "_open", "_per_page", "_pool", "_shape", "_stride")

    def __init__(self, pool: PagePool, shape: tuple[int, ...], dtype: DTypeLike, start: int = 0) -> None:
        """An empty one, which holds no page. Raises ValueError where a page has no room for a record."""
        self._pool = pool
        self._held: list[int] = []
        self._open = True
        self._shape = shape
        self._dtype = np.dtype(dtype)
        self._stride = record_bytes(shape, dtype)
        self._per_page = pool.page_bytes // self._stride
        if not self._per_page:
            raise ValueError(f"a record of {self._stride} bytes does not fit a page of {pool.page_bytes}")
        self._base = self._first = self._end = start

    def __del__(self) -> None:
        self.close()

    def __len__(self) -> int:
        """How many records are kept."""
        return self._end - self._first

    @property
    def first(self) -> int:
        """Number of the oldest record that is kept."""
        return self._first

    @property
    def end(self) -> int:
        """Number that the next record gets."""
        return self._end

    @property
    def held_bytes(self) -> int:
        """Bytes of the pages that it holds, those that it shares included."""
        return len(self._held) * self._pool.page_bytes

    def held(self) -> tuple[int, ...]:
        """Numbers of the pages that it holds, oldest first."""
        return tuple(self._held)

    def freeable(self) -> int:
        """How many pages closing it would free: those that nobody else holds."""
        return sum(self._pool.holders(page) == 1 for page in self._held)

    def append(self, record: Record) -> int:
        """Keep a copy of the record; its number. Raises PoolFull; ValueError where shape or dtype are others."""
        if record.shape != self._shape or record.dtype != self._dtype:
            raise ValueError(f"a record of {record.dtype}{record.shape} among {self._dtype}{self._shape}")
        self._see_that_it_is_open()
        number = self._end
        self._writable(number)[...] = record
        self._end += 1
        return number

    def get(self, number: int) -> Record:
        """A copy of one record. Raises NotKept."""
        record: Record = self.span(number, number + 1)[0, ...]
        return record

    def last(self, count: int) -> Record:
        """A copy of the last records, (count, *shape), oldest first. Raises NotKept where there are fewer."""
        return self.span(self._end - count, self._end)

    def span(self, begin: int, end: int) -> Record:
        """A copy of the records from `begin` up to but not including `end`, (end - begin, *shape). Raises NotKept."""
        self._see_that_it_is_open()
        if begin < self._first or end > self._end or end < begin:
            raise NotKept(f"records {begin} to {end} of {self._first} to {self._end}")
        out = np.empty((end - begin, *self._shape), self._dtype)
        at = 0
        for part in self._parts(begin, end):
            out[at : at + len(part)] = part
            at += len(part)
        return out

    def truncate(self, end: int) -> None:
        """Forget the records from number `end` on. Raises NotKept where it is not among those that are kept."""
        self._see_that_it_is_open()
        if not self._first <= end <= self._end:
            raise NotKept(f"cut at {end}, of {self._first} to {self._end}")
        self._end = end
        needed = -(-(end - self._base) // self._per_page)
        while len(self._held) > needed:
            self._pool.give_back(self._held.pop())

    def trim(self, keep: int) -> None:
        """Forget all but the last `keep` records; pages that hold none of these are given back."""
        self._see_that_it_is_open()
        if keep < 0:
            raise ValueError(f"{keep} records can't be kept")
        self._first = max(self._first, self._end - keep)
        gone = (self._first - self._base) // self._per_page
        if gone:
            for page in self._held[:gone]:
                self._pool.give_back(page)
            del self._held[:gone]
            self._base += gone * self._per_page

    def fork(self) -> "Pages":
        """Another one with the same records, which holds the same pages. Takes none, so it can't be refused."""
        self._see_that_it_is_open()
        twin = Pages(self._pool, self._shape, self._dtype, self._base)
        for page in self._held:
            self._pool.share(page)
        twin._held = self._held.copy()
        twin._first, twin._end = self._first, self._end
        return twin

    def close(self) -> None:
        """Give all pages back. Closing again does nothing; everything else raises Closed from now on."""
        self._open = False
        while self._held:
            self._pool.give_back(self._held.pop())

    # -- inside

    def _see_that_it_is_open(self) -> None:
        if not self._open:
            raise Closed("its pages were given back")

    def _parts(self, begin: int, end: int) -> Iterator[Record]:
        while begin < end:
            index, offset = divmod(begin - self._base, self._per_page)
            count = min(self._per_page - offset, end - begin)
            yield self._records(self._held[index])[offset : offset + count]
            begin += count

    def _records(self, page: int) -> Record:
        """The page's records as a view, (per_page, *shape)."""
        memory = self._pool.memory(page)[: self._per_page * self._stride].reshape(self._per_page, self._stride)
        nbytes = prod(self._shape) * self._dtype.itemsize
        return memory[:, :nbytes].view(self._dtype).reshape(self._per_page, *self._shape)

    def _writable(self, number: int) -> Record:
        """Where that record, the next one, is to be written: in a page that nobody else holds. Raises PoolFull."""
        index, offset = divmod(number - self._base, self._per_page)
        if index == len(self._held):
            self._held.append(self._pool.take())
        elif self._pool.holders(self._held[index]) > 1:
            self._diverge(index, offset)
        return self._records(self._held[index])[offset, ...]

    def _diverge(self, index: int, filled: int) -> None:
        shared, own = self._held[index], self._pool.take()
        # Only our own records: what another sequence wrote behind them is nothing of ours.
        used = filled * self._stride
        self._pool.memory(own)[:used] = self._pool.memory(shared)[:used]
        self._held[index] = own
        self._pool.give_back(shared)


def record_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """What a record takes in a page. Raises ValueError for records without a byte."""
    nbytes = prod(shape) * np.dtype(dtype).itemsize
    if nbytes < 1:
        raise ValueError(f"a record of shape {shape} has no bytes")
    return -(-nbytes // _ALIGN) * _ALIGN
