import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from omni_live.engines.contract import EngineOptions, Turn
from omni_live.engines.fake import FakeEcho
from omni_live.runtime import drives
from omni_live.runtime.drives import InlineDrive, ThreadedDrive
from omni_live.runtime.fences import FenceTable
from omni_live.runtime.outbox import Outbox
from omni_live.runtime.ports import CLIENT, Opening, Route, WorkerId
from omni_live.runtime.runner import Runner
from omni_live.runtime.wire import (
    SERVER,
    CloseSession,
    Drain,
    FeedSession,
    FeedTurn,
    Found,
    Inline,
    Message,
    OpenSession,
    OpenTurn,
    Spoke,
)
from omni_live.sessions.stamp import Fence

STAMP = Fence(0, 1).stamp(1)
PATIENCE_S = 20.0
BOTH = pytest.mark.parametrize("kind", [InlineDrive, ThreadedDrive], ids=["inline", "threaded"])


class Shell:
    """A worker without sockets: it notes what it is told."""

    def __init__(self) -> None:
        self.said: list[Message] = []
        self.posts = 0
        self.events: list[str] = []
        self._news = asyncio.Event()

    def post(self, said: Sequence[tuple[int, Message]]) -> None:
        self.said += [message for _, message in said]
        self.posts += 1
        self._news.set()

    def loaded(self) -> None:
        self._note("loaded")

    def drained(self) -> None:
        self._note("drained")

    def crashed(self) -> None:
        self._note("crashed")

    def hold(self, full: bool) -> None:
        self._note("hold" if full else "go on")

    def _note(self, event: str) -> None:
        self.events.append(event)
        self._news.set()

    def heard(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message in self.said)

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                self._news.clear()
                await self._news.wait()


class Endless(FakeEcho):
    """Always has something to do."""

    steps = 0

    def step(self) -> bool:
        self.steps += 1
        return True


class Stuck(FakeEcho):
    """Listens only once it may."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self.may = threading.Event()

    def begin(self, turn: Turn) -> None:
        self.may.wait(PATIENCE_S)
        super().begin(turn)


class Slow(FakeEcho):
    """Steps only once it may, where it has a turn."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self.may = threading.Event()

    def step(self) -> bool:
        if self._turns:
            self.may.wait(PATIENCE_S)
        return super().step()


@asynccontextmanager
async def driving(
    path: Path, kind: type[InlineDrive | ThreadedDrive], engine: FakeEcho
) -> AsyncIterator[tuple[InlineDrive | ThreadedDrive, Shell]]:
    shell = Shell()
    fences = FenceTable.create(path / "fences", 1)
    fences.write(Fence(0, 1))
    outbox = Outbox(path, WorkerId(1), 1 << 20)
    drive = kind(
        asyncio.get_running_loop(), shell, outbox, lambda wake: Runner(1, {"a": engine}, fences, outbox, wake=wake)
    )
    drive.start()
    await shell.until(lambda: shell.events)
    yield drive, shell
    drive.stop()


def opening() -> list[Message]:
    route = Route(CLIENT, SERVER, 4, False)
    return [OpenSession(0, "a", STAMP.session, {}), OpenTurn(1, "a", STAMP, {}, [route], 1)]


@BOTH
async def test_what_arrives_is_worked_on_and_what_is_said_comes_out(
    tmp_path: Path, kind: type[InlineDrive | ThreadedDrive]
) -> None:
    async with driving(tmp_path, kind, FakeEcho(EngineOptions({}))) as (drive, shell):
        drive.receive(SERVER, opening(), 0)
        drive.receive(SERVER, [FeedTurn(2, "a", STAMP, Inline("x", {}, b"", ()), True)], 0)
        await shell.until(lambda: shell.heard(Spoke))
        assert shell.events == ["loaded"]


@BOTH
async def test_an_error_that_names_no_turn_is_reported_once_and_ends_the_drive(
    tmp_path: Path, kind: type[InlineDrive | ThreadedDrive], caplog: pytest.LogCaptureFixture
) -> None:
    async with driving(tmp_path, kind, FakeEcho(EngineOptions({}))) as (drive, shell):
        drive.receive(SERVER, [*opening(), FeedTurn(2, "a", STAMP, Inline("raise", {}, b"", ()), True)], 0)
        await shell.until(lambda: "crashed" in shell.events)
        drive.receive(SERVER, [FeedSession(3, "a", STAMP.session, Inline("x", {}, b"", ()))], 0)
        drive.lost(2, receiver=True)
        assert shell.events == ["loaded", "crashed"]
        assert "FakeFailure" in caplog.text


@BOTH
async def test_a_drained_runner_says_so_once_it_holds_nothing(
    tmp_path: Path, kind: type[InlineDrive | ThreadedDrive]
) -> None:
    async with driving(tmp_path, kind, FakeEcho(EngineOptions({}))) as (drive, shell):
        drive.receive(SERVER, opening(), 0)
        drive.receive(SERVER, [Drain(), FeedTurn(2, "a", STAMP, Inline("x", {}, b"", ()), True)], 0)
        await shell.until(lambda: shell.heard(Spoke))
        drive.receive(SERVER, [CloseSession(3, "a", STAMP.session)], 0)
        await shell.until(lambda: "drained" in shell.events)


async def test_an_engine_that_never_rests_leaves_the_loop_to_others(tmp_path: Path) -> None:
    engine = Endless(EngineOptions({}))
    async with driving(tmp_path, InlineDrive, engine) as (drive, _):
        drive.receive(SERVER, opening(), 0)
        steps = engine.steps
        for _ in range(5):  # rounds of the loop
            await asyncio.sleep(0)
        assert engine.steps > steps


async def test_what_waits_for_a_busy_thread_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drives, "_INBOX_BYTES", 1000)
    engine = Stuck(EngineOptions({}))
    async with driving(tmp_path, ThreadedDrive, engine) as (drive, shell):
        drive.receive(SERVER, opening(), 100)
        for number in range(12):
            drive.receive(SERVER, [FeedSession(2 + number, "a", STAMP.session, Inline("x", {}, b"", ()))], 100)
        assert shell.events == ["loaded", "hold"]
        engine.may.set()
        await shell.until(lambda: "go on" in shell.events)
        await shell.until(lambda: shell.heard(Found) == 12)
        assert shell.events == ["loaded", "hold", "go on"]


async def test_a_receiver_is_opened_while_its_producer_still_steps(tmp_path: Path) -> None:
    engine = Slow(EngineOptions({}))
    async with driving(tmp_path, ThreadedDrive, engine) as (drive, shell):
        onward = Route("b", WorkerId(9), 4, opens=Opening(0, 1, (Route(CLIENT, WorkerId(SERVER), 4),)))
        drive.receive(SERVER, [OpenSession(0, "a", STAMP.session, {}), OpenTurn(1, "a", STAMP, {}, (onward,), 1)], 0)
        await shell.until(lambda: shell.heard(OpenTurn))
        engine.may.set()


async def test_what_a_thread_says_together_crosses_over_together(tmp_path: Path) -> None:
    async with driving(tmp_path, ThreadedDrive, FakeEcho(EngineOptions({}))) as (drive, shell):
        feeds = [FeedSession(2 + n, "a", STAMP.session, Inline("x", {}, b"", ())) for n in range(500)]
        before = shell.posts
        drive.receive(SERVER, [*opening(), *feeds], 0)
        await shell.until(lambda: shell.heard(Found) == 500)
        assert shell.posts - before <= 3
