"""Puts a runtime together: run directory, fence table, workers, orchestrator. The server and benches use it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from omni_live.config.plan import Plan
from omni_live.connectors.shm import RunDirectory, sweep_dead
from omni_live.runtime.clock import LoopClock
from omni_live.runtime.fences import FenceTable
from omni_live.runtime.layout import FENCES
from omni_live.runtime.orchestrator import Orchestrator
from omni_live.runtime.ports import Counters, Trace
from omni_live.runtime.process import Processes, ProcessSettings
from omni_live.runtime.slots import Slots


@dataclass(frozen=True, slots=True)
class Runtime:
    """A running orchestrator with its workers."""

    orchestrator: Orchestrator
    processes: Processes
    slots: Slots
    clock: LoopClock


@asynccontextmanager
async def running(
    plan: Plan, counters: Counters, settings: ProcessSettings | None = None, trace: Trace | None = None
) -> AsyncIterator[Runtime]:
    """Start the plan's workers; on leaving nothing of them remains, in memory or in /dev/shm.

    Workers are not ready yet when this enters: `Orchestrator.pools.is_ready` tells.
    """
    sweep_dead()
    directory = RunDirectory()
    try:
        fences = FenceTable.create(directory.path / FENCES, plan.limits.max_sessions)
        processes = Processes(plan.workers, directory.path, fences, counters, settings)
        clock = LoopClock(asyncio.get_running_loop())
        slots = Slots(plan.limits.max_sessions)
        orchestrator = Orchestrator(plan, processes, fences, clock, counters, slots, trace)
        async with asyncio.TaskGroup() as group:
            group.create_task(processes.run(orchestrator))
            orchestrator.start()
            try:
                yield Runtime(orchestrator, processes, slots, clock)
            finally:
                processes.stop()
    finally:
        directory.remove()
