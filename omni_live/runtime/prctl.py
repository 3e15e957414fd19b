"""What a process asks of the Linux kernel about itself (prctl(2))."""

import ctypes
import os
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15


def set_title(title: str) -> None:
    """What `ps` and /proc/PID/comm call the process; cut to 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, title.encode()[:15], 0, 0, 0)


def die_with(parent: int) -> None:
    """Be killed when the parent dies, also while an engine is busy in native code."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the request
        os._exit(0)
