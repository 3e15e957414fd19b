"""The fence table: one row per lane of every session slot, written by the server, read by every worker.

An array of unsigned 64-bit words in a file in /dev/shm: first a header, then one word per row, generation << 32 |
epoch. A word is written with a single aligned 8-byte store, so a reader sees the old fence or the new one and never
a mixture, and an interruption reaches every process without a message. An epoch of 0 admits nothing: rows start that
way, and a closed session's rows go back to it.
"""

import mmap
import os
from pathlib import Path
from typing import Self

from omni_live.sessions.stamp import LANES, Fence, Stamp

_MAGIC = 0x31454E4546494E4D  # "MNIFENE1"
_HEADER = 8
"""Words before the first row: magic, rows, moves, and padding to a cache line."""
_MOVES = 2
_EPOCH_BITS = 32
_WORD = 8


class BadFenceTable(ValueError):
    """The file is no fence table of this version."""


class FenceTable:
    """The rows. The server's object writes; a worker's is read-only and only asks."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._map = mapped
        self._words = memoryview(mapped).cast("Q")
        self._rows = self._words[_HEADER:]
        self._count = len(self._rows)

    @classmethod
    def create(cls, path: Path, sessions: int) -> Self:
        """A table with `LANES` closed rows for each of `sessions` slots. Raises OSError where there is no space."""
        nbytes = (_HEADER + sessions * LANES) * _WORD
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)  # a hole that cannot be filled later would be a SIGBUS
            table = cls(mmap.mmap(fd, nbytes))
        finally:
            os.close(fd)
        table._words[0], table._words[1] = _MAGIC, sessions * LANES
        return table

    @classmethod
    def open(cls, path: Path) -> Self:
        """Another process's table, read-only. Raises BadFenceTable."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size < _HEADER * _WORD or size % _WORD:
                raise BadFenceTable(f"a fence table of {size} bytes")
            table = cls(mmap.mmap(fd, size, prot=mmap.PROT_READ))
        finally:
            os.close(fd)
        if table._words[0] != _MAGIC or table._words[1] != len(table._rows):
            raise BadFenceTable("no fence table, or one of another version")
        return table

    def write(self, fence: Fence) -> None:
        """Raises IndexError for a row that the table does not have, OverflowError past 32 bits."""
        if not 0 <= fence.slot < self._count:
            raise IndexError(f"no row {fence.slot}")
        if fence.epoch >> _EPOCH_BITS or fence.generation >> _EPOCH_BITS:
            raise OverflowError("a fence's generation and epoch have 32 bits each")
        self._rows[fence.slot] = fence.generation << _EPOCH_BITS | fence.epoch
        # After the row: a reader that sees the count sees the row (see `moves`).
        self._words[_MOVES] = (self._words[_MOVES] + 1) & 0xFFFF_FFFF_FFFF_FFFF

    def admits(self, stamp: Stamp) -> bool:
        """False for a stale stamp, and for one of a row that does not exist."""
        slot, generation, epoch = stamp[:3]
        return 0 <= slot < self._count and epoch > 0 and self._rows[slot] == generation << _EPOCH_BITS | epoch

    @property
    def moves(self) -> int:
        """Counts writes, so that a reader with many turns need not look at all of their rows between two steps.

        On processors that reorder stores a row may become visible a moment after the count: whoever relies on the
        count checks the rows again on its next look.
        """
        return self._words[_MOVES]
