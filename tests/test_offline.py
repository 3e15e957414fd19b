"""The tests run without a network, and one that reaches for it fails."""

import socket

import pytest


def test_a_connection_that_would_leave_this_machine_is_refused() -> None:
    # The unspecified address is not loopback; should the guard ever fail, it leads to this machine all the same.
    with socket.socket() as sock, pytest.raises(AssertionError, match="tried to connect"):
        sock.connect(("0.0.0.0", 9))
    with socket.socket() as sock, pytest.raises(AssertionError, match="tried to connect"):
        sock.connect_ex(("0.0.0.0", 9))


def test_loopback_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            client.sendall(b"x")
            assert accepted.recv(1) == b"x"
