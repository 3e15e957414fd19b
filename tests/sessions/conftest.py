"""The driver is a module beside the tests, found whatever the import mode is; what it drove must have kept the laws."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from session_driver import Drive, Start


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts conversations, each of which must have kept the laws of order by the end of the test (R, G1, G3)."""
    drives: list[Drive] = []

    def make(**options: object) -> Drive:
        drive = Drive(**options)  # type: ignore[arg-type]  # the options of Drive
        drives.append(drive)
        return drive

    yield make
    for drive in drives:
        drive.check()
