"""Payloads through shared memory: arenas that their producer owns, and readers of other processes' arenas.

An arena is a file in the server's run directory, which lies in /dev/shm. Its space is reserved with posix_fallocate
before anything is written: without that, a full tmpfs kills the writer with SIGBUS instead of giving an error.
Python's multiprocessing.shared_memory is not used, because its tracker unlinks segments that others still use when
one attached process dies. Only the owner allocates and frees; a reader asks it to, with a message.
"""

import fcntl
import mmap
import os
import shutil
import stat
import struct
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omni_live.connectors.contract import ArenaFull, ArenaUnavailable, Key, Stats, Ticket, TicketInvalid
from omni_live.sessions.payload import Payload
from omni_live.sessions.stamp import SessionKey

SHM = Path("/dev/shm")  # the one place where files are memory on every Linux
_PREFIX = "omni-live."
_LOCK = "owner"
_HEADER = struct.Struct("<QQ")
"""generation, body bytes: in front of each body, so that a reader can tell a stale ticket."""
_HEADER_BYTES = 64
"""A cache line, so that bodies are aligned to 64 bytes."""
_ALIGN = 64


@dataclass(slots=True)
class _Block:
    generation: int
    size: int
    key: Key


class Arena:
    """The producer's side of one edge: bytes lie here from `put` until the receiver's release.

    First fit from the low end keeps a lightly used arena within the processor's caches and lets one slow receiver
    hold a block without stopping what lies behind it, as a ring would. Not thread-safe: one owner, one thread.
    """

    def __init__(self, path: Path, segment: int, capacity: int) -> None:
        self._path = path
        self._segment = segment
        self._is_retired = False
        self._capacity = capacity // _ALIGN * _ALIGN
        self._map = _reserve(path, self._capacity)
        self._bytes = memoryview(self._map)
        self._free: list[tuple[int, int]] = [(0, self._capacity)]
        """Free extents as (offset, size), in order of offset, no two of them adjacent."""
        self._live: dict[int, _Block] = {}
        # Starts at the time, so that a ticket of an earlier arena of the same name does not match.
        self._generation = time.monotonic_ns()
        self._used = 0
        self._puts = 0
        self._refused = 0

    def put(self, key: Key, payload: Payload) -> Ticket:
        nbytes = payload.nbytes
        size = _HEADER_BYTES + (nbytes + _ALIGN - 1) // _ALIGN * _ALIGN
        offset = self._allocate(size)
        start = offset + _HEADER_BYTES
        self._bytes[start : start + nbytes] = _flat(payload.body)
        self._generation += 1
        _HEADER.pack_into(self._map, offset, self._generation, nbytes)
        self._live[offset] = _Block(self._generation, size, key)
        self._puts += 1
        return Ticket(self._segment, offset, nbytes, self._generation, payload.kind, dict(payload.meta), payload.arrays)

    def get(self, ticket: Ticket) -> Payload:
        return _read(self._map, self._bytes, ticket)

    def release(self, ticket: Ticket) -> None:
        self.free(ticket.offset, ticket.generation)

    def free(self, offset: int, generation: int, holder: int | None = None) -> None:
        """Release by name; with `holder`, only what that holder has. Raises TicketInvalid."""
        block = self._live.get(offset)
        if block is None or block.generation != generation or holder not in (None, block.key.holder):
            raise TicketInvalid(f"no payload {generation} at {offset}")
        self._drop(offset, block)

    def forget(self, holder: int) -> int:
        """Free everything that a dead holder has; how many tickets that were."""
        return self._drop_where(lambda key: key.holder == holder)

    def sweep(self, session: SessionKey, below_epoch: int) -> int:
        return self._drop_where(lambda key: key.session == session and key.epoch < below_epoch)

    def stats(self) -> Stats:
        return Stats(len(self._live), self._used, self._capacity, self._puts, self._refused)

    def retire(self) -> None:
        """Take nothing new, and let the memory go when the last payload is released; readers keep their mappings.

        For an arena in which a dead holder had payloads: whoever it lent them to may read them still.
        """
        self._is_retired = True
        self._end_when_empty()

    def close(self) -> None:
        """Give the memory back; the file is the business of whoever owns the directory."""
        self._bytes.release()
        self._map.close()

    def _end_when_empty(self) -> None:
        if self._is_retired and not self._live:
            self.close()
            self._path.unlink(missing_ok=True)

    def _allocate(self, size: int) -> int:
        for at, (offset, free) in enumerate(self._free):
            if free >= size:
                if free == size:
                    del self._free[at]
                else:
                    self._free[at] = (offset + size, free - size)
                self._used += size
                return offset
        self._refused += 1
        if size > self._capacity:
            raise ArenaUnavailable(f"{size} bytes in an arena of {self._capacity}")
        raise ArenaFull(f"no {size} bytes free of {self._capacity}")

    def _drop(self, offset: int, block: _Block) -> None:
        del self._live[offset]
        if not self._is_retired:
            self._give_back(offset, block)
        self._end_when_empty()

    def _give_back(self, offset: int, block: _Block) -> None:
        _HEADER.pack_into(self._map, offset, 0, 0)
        self._used -= block.size
        size = block.size
        at = bisect_left(self._free, (offset, 0))
        if at < len(self._free) and self._free[at][0] == offset + size:
            size += self._free.pop(at)[1]
        if at > 0 and sum(self._free[at - 1]) == offset:
            before, before_size = self._free[at - 1]
            self._free[at - 1] = (before, before_size + size)
        else:
            self._free.insert(at, (offset, size))

    def _drop_where(self, goes: Callable[[Key], bool]) -> int:
        going = [(offset, block) for offset, block in self._live.items() if goes(block.key)]
        for offset, block in going:
            self._drop(offset, block)
        return len(going)


class Reader:
    """The receiver's side: opens the arenas of one owner by number, read only, on first use."""

    def __init__(self, directory: Path, owner: str) -> None:
        self._directory = directory
        self._owner = owner
        self._open: dict[int, tuple[mmap.mmap, memoryview]] = {}

    def get(self, ticket: Ticket) -> Payload:
        """The payload over the arena's own bytes, valid until its release. Raises TicketInvalid."""
        opened = self._open.get(ticket.segment)
        if opened is None:
            opened = self._map(ticket.segment)
            self._open[ticket.segment] = opened
        return _read(opened[0], opened[1], ticket)

    def _map(self, segment: int) -> tuple[mmap.mmap, memoryview]:
        try:
            fd = os.open(segment_path(self._directory, self._owner, segment), os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError) as error:
            raise TicketInvalid(f"no segment {segment} of {self._owner}") from error
        try:
            mapped = mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        return mapped, memoryview(mapped)


def segment_path(directory: Path, owner: str, segment: int) -> Path:
    return directory / f"{owner}.{segment}"


def unlink_segments(directory: Path, owner: str) -> int:
    """Remove a dead owner's segments; mappings that others still hold stay readable until they let go."""
    gone = 0
    for path in directory.glob(f"{owner}.*"):
        path.unlink(missing_ok=True)
        gone += 1
    return gone


def _reserve(path: Path, nbytes: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ArenaUnavailable(f"cannot reserve {nbytes} bytes: {error.strerror}") from error
    finally:
        os.close(fd)


def _read(mapped: mmap.mmap, view: memoryview, ticket: Ticket) -> Payload:
    offset, nbytes = ticket.offset, ticket.nbytes
    start = offset + _HEADER_BYTES
    if offset < 0 or nbytes < 0 or start + nbytes > len(mapped):
        raise TicketInvalid(f"{nbytes} bytes at {offset} lie outside of the segment")
    if _HEADER.unpack_from(mapped, offset) != (ticket.generation, nbytes):
        raise TicketInvalid(f"no payload {ticket.generation} at {offset}")
    return Payload(ticket.kind, ticket.meta, view[start : start + nbytes].toreadonly(), ticket.arrays)


def _flat(body: bytes | bytearray | memoryview) -> bytes | bytearray | memoryview:
    if isinstance(body, memoryview) and (body.ndim != 1 or body.itemsize != 1):
        return body.cast("B")
    return body


class RunDirectory:
    """One server's 0700 directory in /dev/shm: its fence table, sockets and arenas, named by pid and start time.

    The owner holds a lock on a file in it for as long as it lives. That keeps a server in another pid namespace,
    which shares /dev/shm but not /proc, from taking the directory for a dead one's.
    """

    def __init__(self, root: Path = SHM) -> None:
        pid = os.getpid()
        self.path = root / f"{_PREFIX}{pid}.{start_time(pid)}"
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(mode=0o700)
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Remove everything; the server is about to end."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep_dead(root: Path = SHM) -> int:
    """Remove the run directories of servers that are dead; how many that were. Called once at boot."""
    swept = 0
    for path in root.glob(f"{_PREFIX}*"):
        status = path.lstat()
        ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        if ours and not _owner_lives(path.name) and not _is_locked(path / _LOCK):
            shutil.rmtree(path, ignore_errors=True)
            swept += 1
    return swept


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot (field 22 of /proc/pid/stat); None where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.rpartition(")")[2].split()[19])  # the command's name may hold spaces and parentheses


def _owner_lives(name: str) -> bool:
    pid, _, started = name.removeprefix(_PREFIX).partition(".")
    return pid.isdecimal() and started.isdecimal() and start_time(int(pid)) == int(started)


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
