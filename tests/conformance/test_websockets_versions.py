"""Our clients and our server on each websockets that the package admits: realtime clients of others pin older ones."""

import pytest

from .apart import ROOT, run, run_tests

LIBRARIES = ("test_duplex.py", "test_duplex_link.py", "test_robot.py", "test_robot_link.py", "test_world.py")
HERE = [str(ROOT / "tests" / "clients" / name) for name in LIBRARIES] + [
    str(ROOT / "tests" / "server" / "test_port.py")
]
RECONNECT = ROOT / "tests" / "end_to_end" / "test_reconnect.py"


@pytest.mark.parametrize(("name", "version"), [("websockets-15", "15.0.1"), ("websockets-16", "16.1.1")])
def test_the_client_libraries_and_the_port_pass_their_tests_on_it(name: str, version: str) -> None:
    assert run([name], "-c", "import websockets; print(websockets.__version__)").strip() == version
    run_tests([name], *HERE)


def test_G7_on_websockets_15_a_conversation_survives_dropped_sockets() -> None:
    chosen = ("costs_nothing", "heard_whole_and_answered_alike")
    run_tests(["websockets-15"], str(RECONNECT), "-k", " or ".join(chosen))
