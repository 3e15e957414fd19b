"""The control loop of a robot: one action per step at a steady rate, from chunks that a policy makes meanwhile.

An episode begins to move when its first chunk is there. From then on an arm with a rate gets its action on every tick,
whatever the network does: the next row of a chunk, or what `Hold` says where there is none that is valid and safe.
Without a rate the world is simulated, and stands still while there is nothing to do.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from omni_live.clients.chunks import Action, Ask, Executor, unsafe
from omni_live.clients.clock import Clock, MonotonicClock, S
from omni_live.clients.robot_link import Chunk, Overloaded, PolicyError, RobotError
from omni_live.protocols.openpi.contract import Contract

Observation = Mapping[str, object]
Hold = Callable[[Action | None], Action]
"""How an arm holds still; it is given the last action that was executed, None where there was none."""

RETRY_S: Final = 0.1
"""After a request failed, where the world can wait."""
TRIES: Final = 20
"""For the first chunk of an episode."""
UNSAFE: Final = frozenset({"action_not_finite", "action_out_of_range", "bad_actions"})
"""Codes of a chunk that must not be executed, whoever noticed."""
_OWN_FAULT: Final = frozenset({"bad_frame", "bad_image", "bad_observation", "bad_request"})
"""Codes of a request that would be refused again."""


class World(Protocol):
    """What an arm acts in: a simulator, or the arm's driver."""

    def step(self, action: Action) -> tuple[Observation, bool]:
        """Do one action; what is seen then, and whether the task is done."""


class Asked(Protocol):
    """A policy as the loop needs it; `robot_link.Policy` is one."""

    @property
    def contract(self) -> Contract: ...

    async def infer(
        self,
        observation: Observation,
        *,
        latest: bool = False,
        executed_steps: int | None = None,
        delay_steps: int | None = None,
    ) -> Chunk: ...

    async def reset(self) -> None: ...


@dataclass(slots=True)
class Episode:
    """What became of one."""

    success: bool = False
    steps: int = 0
    chunks: int = 0
    """That were executed, at least in part."""
    holds: int = 0
    """Steps in which the arm held still."""
    late_steps: int = 0
    """That began more than half a step too late."""
    late_chunks: int = 0
    unsafe_chunks: int = 0
    failures: int = 0
    """Requests that failed."""
    continued: int = 0
    """Chunks that go on where the last one was."""
    ended: str = ""
    """Code of what ended it early."""
    rtts_ms: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)


def stand_still(contract: Contract) -> Hold:
    """For velocities: none, or what of their range is nearest to that."""
    still = np.clip(np.zeros(contract.action_dim, np.float32), contract.action_low, contract.action_high)
    return lambda _: still.astype(np.float32)


def keep_last(contract: Contract) -> Hold:
    """For positions: the one that the arm was sent to last."""
    still = stand_still(contract)
    return lambda last: still(None) if last is None else last


async def run_episode(
    policy: Asked,
    world: World,
    observation: Observation,
    executor: Executor,
    *,
    max_steps: int,
    rate_hz: float = 0.0,
    hold: Hold | None = None,
    clock: Clock | None = None,
) -> Episode:
    """One episode in `world`, from what is seen at its beginning until the task is done or `max_steps` are over.

    `executor` knows the rules, and keeps what it knows of the network's delay from one episode to the next. `rate_hz`
    0: as fast as it goes. `hold` None: `stand_still`. Raises RobotError: before anything moved where there is no first
    chunk, else after the arm was told to hold; what the world raises comes inside an ExceptionGroup.
    """
    executor.reset()
    await policy.reset()
    hold = hold or stand_still(policy.contract)
    async with asyncio.TaskGroup() as group:
        loop = _Loop(policy, world, executor, _Pace(clock or MonotonicClock(), rate_hz), hold, group)
        await loop.run(observation, max_steps)
    if loop.error is not None:
        raise loop.error
    return loop.episode


class _Pace:
    """The ticks of a control loop. One that comes late moves all that follow: an arm must not be made to catch up."""

    def __init__(self, clock: Clock, rate_hz: float) -> None:
        self.clock = clock
        self.period_ns = round(S / rate_hz) if rate_hz else 0
        self.next_ns = 0

    def begin(self) -> None:
        self.next_ns = self.clock.now_ns() + self.period_ns

    async def tick(self) -> bool:
        """Wait for the next one; False where it is more than half a step late."""
        if not self.period_ns:
            await asyncio.sleep(0)
            return True
        await self.clock.sleep_until_ns(self.next_ns)
        now = self.clock.now_ns()
        is_late = now - self.next_ns > self.period_ns // 2
        self.next_ns = (now if is_late else self.next_ns) + self.period_ns
        return not is_late


class _Loop:
    """One episode under way."""

    def __init__(
        self, policy: Asked, world: World, executor: Executor, pace: _Pace, hold: Hold, group: asyncio.TaskGroup
    ) -> None:
        self.episode = Episode()
        self.error: RobotError | None = None
        """A value, since the task group would wrap what is raised in it."""
        self._policy = policy
        self._world = world
        self._executor = executor
        self._pace = pace
        self._hold = hold
        self._group = group
        self._asking: asyncio.Task[None] | None = None
        self._came: tuple[Ask, Chunk | RobotError] | None = None
        self._woken = asyncio.Event()
        self._last: Action | None = None

    async def run(self, observation: Observation, max_steps: int) -> None:
        before = self._executor.holds, self._executor.late_chunks
        try:
            await self._first_chunk(observation)
            await self._move(observation, max_steps)
        except RobotError as error:
            self.error = error
            self._leave()
        except asyncio.CancelledError:
            self._leave()
            raise
        finally:
            if self._asking is not None:
                self._asking.cancel()
        self.episode.holds = self._executor.holds - before[0]
        self.episode.late_chunks = self._executor.late_chunks - before[1]

    def _leave(self) -> None:
        """The arm is not to go on with what it was told last."""
        if self.episode.steps:
            self._world.step(self._hold(self._last))

    async def _first_chunk(self, observation: Observation) -> None:
        for tries_left in reversed(range(TRIES)):
            self._ask_if_due(observation)
            await self._wait(until_ns=None)
            failure = self._collect()
            if failure is None:
                return
            if not tries_left or isinstance(failure, Overloaded):
                raise failure
            await self._rest()

    async def _move(self, observation: Observation, max_steps: int) -> None:
        self._pace.begin()
        while self._executor.step < max_steps:
            await self._prepare(observation)
            action = self._executor.act()
            if action is None:
                action = self._hold(self._last)
            self._last = action
            observation, self.episode.success = self._world.step(action)
            self.episode.steps += 1
            if self.episode.success:
                return
            if not await self._pace.tick():
                self.episode.late_steps += 1

    async def _prepare(self, observation: Observation) -> None:
        """Take what has come, ask for what is due, and wait for it as far as that is allowed."""
        self._collect()
        self._ask_if_due(observation)
        is_simulated = not self._pace.period_ns
        if self._executor.has_action or (self._executor.rules.overlaps and not is_simulated):
            return
        await self._wait(None if is_simulated else self._pace.next_ns)
        if self._collect() is not None and is_simulated:
            await self._rest()

    # -- asking

    def _ask_if_due(self, observation: Observation) -> None:
        ask = self._executor.due()
        if ask is not None:
            self._asking = self._group.create_task(self._ask(ask, observation))

    async def _ask(self, ask: Ask, observation: Observation) -> None:
        came: Chunk | RobotError
        try:
            came = await self._policy.infer(
                observation, latest=True, executed_steps=ask.executed_steps, delay_steps=ask.delay_steps
            )
        except RobotError as error:
            came = error
        self._came = (ask, came)
        self._woken.set()

    async def _wait(self, until_ns: int | None) -> None:
        """Until the answer is there, or it is `until_ns`."""
        if until_ns is None:
            await self._answered()
            return
        waits = [
            self._group.create_task(self._answered()),
            self._group.create_task(self._pace.clock.sleep_until_ns(until_ns)),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()

    async def _answered(self) -> None:
        while self._came is None:
            self._woken.clear()
            await self._woken.wait()

    async def _rest(self) -> None:
        clock = self._pace.clock
        await clock.sleep_until_ns(clock.now_ns() + round(RETRY_S * S))

    # -- what comes

    def _collect(self) -> PolicyError | None:
        """Take the answer that is there, if any; what was wrong with it. Raises what ends the episode."""
        if self._came is None:
            return None
        (ask, came), self._came = self._came, None
        if isinstance(came, Chunk):
            return self._take(ask, came)
        self.episode.failures += 1
        if not isinstance(came, PolicyError) or came.code in _OWN_FAULT:
            raise came
        if came.code in UNSAFE:
            self._stop(ask)
        else:
            self._executor.lost(ask)
        return came

    def _take(self, ask: Ask, chunk: Chunk) -> PolicyError | None:
        self.episode.rtts_ms.append(chunk.rtt_ms)
        code = unsafe(chunk.actions, self._policy.contract)
        if code is not None:
            self._stop(ask)
            return PolicyError(code, "the robot does not execute this")
        if self._executor.take(ask, chunk.actions):
            self.episode.chunks += 1
            self.episode.continued += chunk.timing.continued
            if chunk.timing.batch is not None:
                self.episode.batches.append(chunk.timing.batch)
        return None

    def _stop(self, ask: Ask) -> None:
        self.episode.unsafe_chunks += 1
        self._executor.stop(ask)
