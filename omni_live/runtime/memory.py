"""What a process asks of its allocator."""

import ctypes
from typing import Final

MIB: Final = 1 << 20
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, up to 64 MiB, instead of giving every block over 128 KiB back to the kernel.

    Observations, chunks of sound and frames are allocated and freed at the rate of a stream: given back, each costs a
    page fault for every 4 KiB of it, dozens of them for a robot's observation. See mallopt(3); other C libraries have
    no such call, and are left alone.
    """
    libc = ctypes.CDLL(None)
    try:
        mallopt = libc.mallopt
    except AttributeError:
        return
    mallopt(_M_MMAP_THRESHOLD, 16 * MIB)
    mallopt(_M_TRIM_THRESHOLD, 64 * MIB)
