"""What lies where in a server's run directory (connectors.shm.RunDirectory), which all of its processes share."""

from pathlib import Path
from typing import Final

FENCES: Final = "fences"
"""The fence table's file."""


def socket_path(directory: Path, worker: int) -> Path:
    """Where a worker listens for other workers."""
    return directory / f"{worker}.sock"


def producer_name(worker: int) -> str:
    """What a worker's own arenas are called."""
    return f"w{worker}"


def owner_name(owner: int) -> str:
    """Whose arenas a ticket with this `owner` means: a worker's own, or, negative, the server's for that worker."""
    return producer_name(owner) if owner > 0 else feeder_name(-owner)


def feeder_name(worker: int) -> str:
    """What the server's arenas for one worker are called."""
    return f"s{worker}"
