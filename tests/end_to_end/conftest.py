"""One server for all tests of this folder that do not need one of their own."""

from collections.abc import Iterator

import pytest

from .served import Served
from .warm import warm_server


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with warm_server(tmp_path_factory.mktemp("voice")) as server:
        yield server


@pytest.fixture
def voice(shared: Served) -> Iterator[Served]:
    """A warm server, which must be at rest again when the test is over."""
    yield shared
    shared.assert_at_rest()
