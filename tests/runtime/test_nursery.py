"""Workers that are forked: what they are told, how their ends are known, and what happens when the nursery dies."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from omni_live.runtime.nursery import Child, Nursery


class Lanes:
    """The two sockets of a worker, and our ends of them."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        self.ours = [ours for ours, _ in pairs]
        self.theirs = [theirs for _, theirs in pairs]

    def close(self) -> None:
        for end in (*self.ours, *self.theirs):
            end.close()

    async def ended(self) -> bool:
        """Wait until nobody has the other end any more."""
        for end in self.theirs:
            end.close()
        ours = self.ours[0]
        return await asyncio.get_running_loop().run_in_executor(None, ours.recv, 1) == b""


class Ward:
    """A nursery, and the lanes of everybody it bore, which close with it."""

    def __init__(self, nursery: Nursery) -> None:
        self.nursery = nursery
        self.lanes: list[Lanes] = []

    def new(self) -> Lanes:
        self.lanes.append(Lanes())
        return self.lanes[-1]

    async def born(self) -> tuple[Child, Lanes]:
        lanes = self.new()
        child = await self.nursery.bear(lanes.theirs, {})
        for end in lanes.theirs:
            end.close()
        return child, lanes


@asynccontextmanager
async def ward() -> AsyncIterator[Ward]:
    async with asyncio.timeout(30), Nursery() as nursery:
        on = Ward(nursery)
        try:
            yield on
        finally:
            for lanes in on.lanes:
                lanes.close()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_a_worker_ends_by_itself_when_its_lanes_close() -> None:
    async with ward() as on:
        child, lanes = await on.born()
        lanes.close()
        assert await child.wait() == 0
        child.kill()  # and is not taken for another one afterwards


async def test_the_signal_that_ended_a_worker_is_known() -> None:
    async with ward() as on:
        child, _ = await on.born()
        child.kill()
        assert await child.wait() == -signal.SIGKILL
        other, _ = await on.born()
        os.kill(other.pid, signal.SIGABRT)
        assert await other.wait() == -signal.SIGABRT


async def test_siblings_lie_at_the_same_addresses_and_their_server_elsewhere() -> None:
    def places(pid: int) -> set[str]:
        """Where the code of libraries lies, which is as it was when the process was forked."""
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {line.split()[0] for line in maps if " r-xp " in line and "libc.so" in line}

    async with ward() as on:
        (one, _), (two, _) = await on.born(), await on.born()
        assert len(places(one.pid)) == 1
        assert places(one.pid) == places(two.pid)
        assert places(one.pid) != places(os.getpid())


async def test_a_worker_has_no_descriptor_of_a_sibling_or_of_the_nursery() -> None:
    def has(pid: int) -> list[str]:
        links = []
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it closes what it inherited just now
                links.append(str(entry.readlink()))
        return sorted(link.partition(":")[0] for link in links if link.startswith(("socket:", "anon_inode:[pidfd]")))

    async with ward() as on:
        first, lanes = await on.born()
        second, _ = await on.born()
        while has(second.pid) != ["socket"] * 4:  # its lanes, and the pair by which its event loop wakes itself
            await asyncio.sleep(0.001)
        lanes.close()
        assert await first.wait() == 0  # the second would have kept its lanes open


async def test_when_the_nursery_dies_its_children_do_and_the_next_worker_comes_from_a_new_one() -> None:
    async with ward() as on:
        child, _ = await on.born()
        first = parent(child.pid)
        os.kill(first, signal.SIGKILL)
        assert await child.wait() == -signal.SIGKILL
        other, _ = await on.born()
        assert parent(other.pid) != first


async def test_whoever_gives_up_waiting_for_a_worker_leaves_none_behind() -> None:
    async with ward() as on:
        await on.born()
        lanes = on.new()
        task = asyncio.create_task(on.nursery.bear(lanes.theirs, {}))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await lanes.ended()


async def test_an_environment_that_cannot_travel_is_an_error_of_that_worker_only() -> None:
    async with ward() as on:
        with pytest.raises(OSError, match="too long"):
            await on.nursery.bear(on.new().theirs, {"LONG": "x" * 10_000_000})
        child, _ = await on.born()
        child.kill()
        await child.wait()


async def test_no_worker_outlives_the_nursery_that_is_left() -> None:
    async with ward() as on:
        child, lanes = await on.born()
        await on.nursery.__aexit__(None, None, None)
        assert child.status is not None
        assert await lanes.ended()
