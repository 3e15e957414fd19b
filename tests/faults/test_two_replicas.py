"""G9 with a second replica: who lives on the other one notices nothing, and who does not goes on there at once."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..end_to_end.caller import Caller, session, settings
from ..end_to_end.served import Served
from ..end_to_end.warm import warm_server

DEPLOY = """
limits: {restarts: 100, restart_backoff_ms: 2000}
pipelines: {voice: {stages: {thinker: {replicas: 2}}}}
"""
STORY = "Tell me a long story about a small robot in a big garden."


@pytest.fixture
def voice(tmp_path: Path) -> Iterator[Served]:
    with warm_server(tmp_path, DEPLOY) as server:
        yield server
        server.assert_at_rest()


async def begun(caller: Caller) -> None:
    await caller.send("input.text.append", text=STORY)
    await caller.wait("response.output_audio.delta")


async def test_G9_a_session_on_the_other_replica_does_not_notice(voice: Served) -> None:
    wanted = settings(tokens=100)
    async with session(voice.port, wanted) as caller:
        undisturbed = await caller.ask(STORY)
        whole = caller.audio(undisturbed["id"])
    async with session(voice.port, wanted) as one, session(voice.port, wanted) as two:
        await asyncio.gather(begun(one), begun(two))
        os.kill(voice.workers()["omni:thinker"][0], signal.SIGKILL)
        ends = await asyncio.gather(one.answer(), two.answer())
        assert sorted(end["status"] for end in ends) == sorted(["failed", undisturbed["status"]])
        pairs = sorted(zip((one, two), ends, strict=True), key=lambda pair: str(pair[1]["status"] != "failed"))
        (hit, _), (spared, reply) = pairs
        assert spared.audio(reply["id"]) == whole
        assert voice.is_ready()
        # with the restart still ahead the other replica is the only one
        assert len(voice.workers()["omni:thinker"]) == 1
        again = await hit.ask("What is the capital city of France?")
        assert "Paris" in hit.words(again["id"])
