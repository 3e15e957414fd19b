"""Shared memory that is full fails a turn with a name, kills nobody, and is forgotten once there is room again."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..end_to_end.caller import FRANCE, session, settings
from ..end_to_end.served import Served, served

APART = "pipelines: {voice: {fuse: []}}\n"
"""Frames of half a megabyte go from the talker to code2wav through shared memory then."""

FULL = 'mount -t tmpfs -o size=80m full /dev/shm && head -c 79m /dev/zero > /dev/shm/filler && exec "$@"'
STORY = "Tell me a short story about a robot."


def _may_mount() -> bool:
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "-o", "size=1m", "probe", "/dev/shm"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Served]:
    if not _may_mount():
        pytest.skip("lacks the right to mount a file system in a namespace of its own (root)")
    with served(tmp_path, APART, before=("unshare", "-m", "sh", "-c", FULL, "sh")) as server:
        yield server


def make_room(server: Served) -> None:
    subprocess.run(["nsenter", "-t", str(server.pid), "-m", "rm", "/dev/shm/filler"], check=True)


async def test_full_shared_memory_fails_the_turn_by_name_and_passes(full: Served) -> None:
    workers = full.workers()
    async with session(full.port, settings(output_modalities=["text"])) as reader:
        response = await reader.speak(FRANCE)  # its audio goes to the ears inline
        assert response["status"] == "completed"
        assert "Paris" in reader.words(response["id"])
    async with session(full.port) as caller:
        failed = await caller.ask(STORY)
        assert failed["status"] == "failed"
        assert failed["status_details"]["error"]["code"] == "resource_exhausted"
        assert full.workers() == workers
        make_room(full)
        response = await caller.ask(STORY)
        assert response["status"] in ("completed", "incomplete")
        assert caller.audio(response["id"])
    assert full.workers() == workers
    assert full.is_ready()
