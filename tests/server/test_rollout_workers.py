"""Rollouts on real workers, of a world that is arithmetic: the same frames whatever happens to the replicas."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np

from omni_live.config.deploy import Deploy, PipelineDeploy
from omni_live.config.plan import Plan, plan
from omni_live.pipelines.registry import WORLD
from omni_live.protocols.arrays import pack
from omni_live.runtime.pool import State
from omni_live.runtime.running import Runtime, running
from omni_live.server.desk import FrontDesk, SessionLine
from omni_live.server.metrics import Metrics
from omni_live.sessions.effects import Effect, Emit
from omni_live.sessions.events import RolloutAt, RolloutSnapshotted, TurnDone, TurnSpoke
from omni_live.sessions.inputs import (
    CancelAsked,
    ClientInput,
    CloseAsked,
    LookAsked,
    RewindAsked,
    StepAsked,
    WorldResetAsked,
    WorldRestoreAsked,
    WorldSnapshotAsked,
)
from omni_live.sessions.limits import Limits
from omni_live.sessions.payload import Payload
from omni_live.sessions.settings import Settings

SHOWN = frozenset({"decoder", "dynamics"})


def world_plan() -> Plan:
    fake = {"world": "omni_live.pipelines.world.fake:FakeWorld"}
    stages = tuple(replace(stage, options={**stage.options, **fake}) for stage in WORLD.stages)
    limits = replace(Limits(), snapshot_frames=8, restart_backoff_ms=10)
    deploy = replace(Deploy(pipelines=(PipelineDeploy("world"),)), limits=limits)
    return plan(deploy, {"world": replace(WORLD, stages=stages)})


Frame = dict[str, bytes]
"""What each stage made of it."""


class Dreamer:
    """A client in the server's process."""

    def __init__(self, line: SessionLine | None = None) -> None:
        self.line = line
        self.frames: dict[str, dict[int, Frame]] = {}
        self.ends: dict[str, tuple[str, str]] = {}
        self.at: dict[str, int] = {}
        self.states: dict[str, RolloutSnapshotted] = {}
        self._asked = 0
        self._told = asyncio.Event()

    def take(self, effects: list[Effect]) -> None:
        for event in [effect.event for effect in effects if isinstance(effect, Emit)]:
            match event:
                case TurnSpoke(request, _, stage, payload):
                    step = payload.meta["step"]
                    assert isinstance(step, int)
                    self.frames.setdefault(request, {}).setdefault(step, {})[stage] = bytes(payload.body)
                case RolloutAt(request, step):
                    self.at[request] = step
                case RolloutSnapshotted(request):
                    self.states[request] = event
                case TurnDone(request, _, status, reason):
                    assert request not in self.ends, "a request ended twice (G4)"
                    self.ends[request] = status, reason
                case _:
                    pass
        self._told.set()

    def tell(self, make: Callable[[str], ClientInput]) -> str:
        assert self.line is not None
        self._asked += 1
        request = f"request {self._asked}"
        self.line.tell(make(request))
        return request

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                self._told.clear()
                await self._told.wait()

    async def ask(self, make: Callable[[str], ClientInput]) -> str:
        request = self.tell(make)
        await self.until(lambda: request in self.ends)
        return request

    async def done(self, make: Callable[[str], ClientInput]) -> str:
        request = await self.ask(make)
        assert self.ends[request] == ("done", "")
        return request

    def whole(self, request: str) -> int:
        """Frames of the request of which everything came."""
        return sum(len(frame) == len(SHOWN) for frame in self.frames.get(request, {}).values())

    async def lost(self) -> None:
        """Ask until it is known that the replica died: what runs at that moment fails, and nothing else does."""
        reason = ""
        while reason != "replica_lost":
            status, reason = self.ends[await self.ask(lambda name: LookAsked(1, SHOWN, 1, name))]
            assert status == "done" or reason == "replica_lost"

    async def step(self, *numbers: float, step: int | None = None) -> list[Frame]:
        request = await self.done(lambda name: stepping(name, *numbers, step=step))
        return list(self.frames[request].values())


def stepping(request: str, *numbers: float, step: int | None = None) -> StepAsked:
    rows = np.array(numbers, np.float32)[:, None, None] * np.ones((1, 2, 2), np.float32)
    return StepAsked(pack("actions", {}, actions=rows), len(numbers), SHOWN, step, request)


def resetting(request: str) -> WorldResetAsked:
    return WorldResetAsked(Payload("reset", {"seed": 3}), request)


NUMBERS = tuple((number * 7 % 11 - 5) / 200 for number in range(40))


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Runtime, FrontDesk]]:
    the_plan, metrics = world_plan(), Metrics()
    async with running(the_plan, metrics) as runtime:
        desk = FrontDesk(the_plan, runtime.orchestrator, runtime.slots, runtime.clock, metrics)
        async with asyncio.timeout(60):
            while not runtime.orchestrator.pools.is_ready():
                await asyncio.sleep(0.02)
        yield runtime, desk
        desk.close_all("done")
        assert runtime.slots.taken == 0


async def opened(desk: FrontDesk) -> Dreamer:
    dreamer = Dreamer()
    dreamer.line = await desk.open("world", Settings(), dreamer, "")
    await dreamer.done(resetting)
    return dreamer


def kill(runtime: Runtime, stage: str) -> None:
    for replica in tuple(runtime.orchestrator.pools.replicas()):
        if stage in replica.pool.plan.stages and replica.state is State.READY:
            replica.port.kill()


async def test_g9_survival_the_same_frames_alone_forked_rewound_restored_and_after_kills() -> None:
    async with served() as (runtime, desk):
        dreamer = await opened(desk)
        alone = await dreamer.step(*NUMBERS)
        assert len({frame["dynamics"] for frame in alone}) == len(NUMBERS)

        await dreamer.done(lambda name: RewindAsked(10, name))
        assert await dreamer.step(*NUMBERS[10:]) == alone[10:]
        look = await dreamer.done(lambda name: LookAsked(5, SHOWN, 3, name))
        assert list(dreamer.frames[look].values()) == alone[4:7]

        other = Dreamer()
        other.line = desk.fork(dreamer.line, 20, other, "")  # type: ignore[arg-type]  # it has one
        assert await other.step(*NUMBERS[20:]) == alone[20:]

        await dreamer.done(lambda name: RewindAsked(15, name))
        taken = dreamer.states[await dreamer.done(WorldSnapshotAsked)]
        kill(runtime, "dynamics")
        await dreamer.lost()
        assert await dreamer.step(*NUMBERS[15:], step=16) == alone[15:]
        await other.done(lambda name: RewindAsked(30, name))
        assert await other.step(*NUMBERS[30:]) == alone[30:]

        third = await opened(desk)
        await third.done(lambda name: WorldRestoreAsked(taken.state, taken.step, name))
        assert await third.step(*NUMBERS[15:]) == alone[15:]
        refused = await third.ask(lambda name: WorldRestoreAsked(Payload("rubbish"), 4, name))
        assert third.ends[refused][0] == "failed"
        await third.done(lambda name: RewindAsked(35, name))
        assert await third.step(*NUMBERS[35:]) == alone[35:]
        for line in (dreamer.line, other.line, third.line):
            assert line is not None
            line.tell(CloseAsked())


async def test_a_step_cancelled_or_killed_in_its_middle_keeps_the_frames_that_came() -> None:
    async with served() as (runtime, desk):
        dreamer = await opened(desk)
        alone = await dreamer.step(*NUMBERS)
        for spoil in (lambda: dreamer.tell(lambda name: CancelAsked(None, name)), lambda: kill(runtime, "dynamics")):
            await dreamer.done(resetting)
            running_request = dreamer.tell(lambda name: stepping(name, *NUMBERS))
            await dreamer.until(lambda request=running_request: dreamer.whole(request) >= 3)  # type: ignore[misc]
            spoil()
            await dreamer.until(lambda request=running_request: request in dreamer.ends)  # type: ignore[misc]
            kept = dreamer.at[running_request]
            assert dreamer.ends[running_request][0] in {"interrupted", "failed"}
            assert 3 <= kept < len(NUMBERS)
            assert await dreamer.step(*NUMBERS[kept:], step=kept + 1) == alone[kept:]
