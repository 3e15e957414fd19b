"""A real server for real third-party clients."""

from collections.abc import Iterator

import pytest

from tests.end_to_end.served import Served, served
from tests.end_to_end.warm import warm_server

DEPLOY = """\
limits: {max_sessions: 24, wait_queue: 1, wait_deadline_s: 0.2}
pipelines: {robot: }
"""


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("robots"), DEPLOY, "--openpi-port", "0") as server:
        server.settle()
        yield server


@pytest.fixture
def robots(shared: Served) -> Iterator[Served]:
    """A server of the table-top policy, which must be at rest again when the test is over."""
    yield shared
    shared.assert_at_rest()


@pytest.fixture(scope="session")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with warm_server(tmp_path_factory.mktemp("voice")) as server:
        yield server


@pytest.fixture
def voice(speaking: Served) -> Iterator[Served]:
    """A warm server of the voice pipeline, which must be at rest again when the test is over."""
    yield speaking
    speaking.assert_at_rest()
