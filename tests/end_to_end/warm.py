"""A server that has done everything once, so that what it holds at rest is known."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from .caller import FRANCE, session
from .served import Served, served, wait_until


@contextlib.contextmanager
def warm_server(
    folder: Path,
    deploy: str = "pipelines: {voice: }\n",
    *,
    before: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Served]:
    """A ready server that has heard, thought and spoken; what it holds now is what it must come back to."""
    with served(folder, deploy, before=before, environment=environment) as server:
        asyncio.run(_one_turn(server.port))
        wait_until(lambda: not any(server.standing().values()), f"not at rest: {server.standing()}")
        server.settle()
        yield server


async def _one_turn(port: int) -> None:
    async with session(port) as caller:
        response = await caller.speak(FRANCE)
        assert response["status"] == "completed"
