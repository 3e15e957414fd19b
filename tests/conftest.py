"""What every test stands on: one compute thread per process, and no network but loopback."""

import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest

# Before anything loads a compute library. Two OpenMP threads beside one busy process collapse on a small machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A library that would fetch weights fails at once instead of waiting for a network that is not there.
os.environ["HF_HUB_OFFLINE"] = "1"
if sys.flags.safe_path:
    os.environ["PYTHONSAFEPATH"] = "1"  # what a test starts meets the installed package too, not the tree


class NotLoopback(AssertionError):
    """A test reached for another machine. An AssertionError, so that no `except OSError` under test swallows it."""


def _is_loopback(sock: socket.socket, address: Any) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return True
    host = address[0]
    if host in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@pytest.fixture(scope="session", autouse=True)
def _offline() -> Iterator[None]:
    """Refuses each connection of Python's own sockets that leaves this machine."""
    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex

    def guarded_connect(self: socket.socket, address: Any) -> None:
        if not _is_loopback(self, address):
            raise NotLoopback(f"a test tried to connect to {address!r}")
        connect(self, address)

    def guarded_connect_ex(self: socket.socket, address: Any) -> int:
        if not _is_loopback(self, address):
            raise NotLoopback(f"a test tried to connect to {address!r}")
        return connect_ex(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded_connect)
        patch.setattr(socket.socket, "connect_ex", guarded_connect_ex)
        yield
