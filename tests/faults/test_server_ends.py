"""The end of a server: drained it lets replies finish, killed it leaves nothing that the next one does not clear."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from ..end_to_end.caller import dialled, resume, session, settings
from ..end_to_end.served import served, wait_until

STORY = "Tell me a long story about a small robot in a big garden."
SHM = Path("/dev/shm")


async def test_SIGTERM_lets_a_reply_finish_and_takes_nobody_new(tmp_path: Path, record_property: Any) -> None:
    with served(tmp_path) as server:
        async with session(server.port, settings(tokens=30)) as caller:
            undisturbed = await caller.ask(STORY)
            whole = caller.audio(undisturbed["id"])
        async with dialled(server.port) as caller, dialled(server.port) as idle:
            await caller.wait("session.created")
            await idle.wait("session.created")
            await caller.update(settings(tokens=30, lead_ms=200))
            await caller.send("input.text.append", text=STORY)
            await caller.wait("response.output_audio.delta")
            run_directory = SHM / server.run_directory.name
            server.process.send_signal(signal.SIGTERM)
            closed = await idle.ended()
            assert closed.rcvd is not None
            assert (closed.rcvd.code, idle.events[-1]["type"]) == (1012, "session.closed")
            assert server.get("/readyz")[0] == 503
            assert server.get("/healthz")[0] == 200
            with pytest.raises(InvalidStatus) as refused:
                async with dialled(server.port):
                    pass
            assert refused.value.response.status_code == 503
            assert b'"draining"' in refused.value.response.body
            done = await caller.wait("response.done")
            assert done["response"]["status"] == undisturbed["status"]
            assert caller.audio(done["response"]["id"]) == whole
            assert (await caller.wait("session.closed"))["reason"] == "drained"
            ended = await caller.ended()
            assert ended.rcvd is not None
            assert ended.rcvd.code == 1012
            began = time.monotonic()
            assert server.process.wait(20) == 0
            record_property("ended_after_s", round(time.monotonic() - began, 2))
        assert not run_directory.exists()
        assert "Traceback" not in server.log()


async def test_a_second_SIGTERM_ends_the_server_now(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        async with dialled(server.port) as caller:
            await caller.wait("session.created")
            await caller.update(settings(tokens=100, lead_ms=200))
            await caller.send("input.text.append", text=STORY)
            await caller.wait("response.output_audio.delta")
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.get("/readyz")[0] == 503, "no drain")
            server.process.send_signal(signal.SIGTERM)
            done = await caller.wait("response.done")
            assert done["response"]["status"] == "cancelled"
            assert (await caller.ended()).rcvd is not None
            assert server.process.wait(20) == 0


async def test_a_killed_server_leaves_nothing_and_its_sessions_are_not_taken_for_new_ones(tmp_path: Path) -> None:
    with served(tmp_path / "first") as first:
        async with session(first.port) as caller:
            await caller.ask("Hello.")
            run_directory = SHM / first.run_directory.name
            workers = [pid for pids in first.workers().values() for pid in pids]
            first.process.kill()
            first.process.wait()
            await caller.ended()
        wait_until(lambda: not any(_lives(pid) for pid in workers), "a worker outlives its server")
    with served(tmp_path / "second") as second:
        assert not run_directory.exists()
        async with dialled(second.port, "") as late:
            await resume(late, caller)
            error = (await late.wait("error"))["error"]
            assert error["code"] == "session_resume_expired"
            closed = await late.ended()
            assert closed.rcvd is not None
            assert closed.rcvd.code == 1008
            assert not late.of("session.created")


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
