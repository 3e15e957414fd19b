"""The control loop: an arm that never waits, holds still rather than do something unsafe, and need not catch up."""

import asyncio

import numpy as np
import pytest

from omni_live.clients.chunks import Executor, Rules
from omni_live.clients.duplex import Patience
from omni_live.clients.envs.table import CONTRACT, TableEnv
from omni_live.clients.robot import Episode, keep_last, run_episode, stand_still
from omni_live.clients.robot_link import (
    Chunk,
    Overloaded,
    PolicyError,
    RobotError,
    SessionLost,
    TimedOut,
    connect,
)
from omni_live.clients.robot_wire import Timing

from .conftest import settle
from .policy_server import policy_server

SEEN = {"step": 0}
PERIOD_MS = 100.0
RATE_HZ = 10.0


class Arm:
    """Notes what it is told to do, and shows how often."""

    def __init__(self, succeeds_at: int | None = None) -> None:
        self.done: list[np.ndarray] = []
        self.succeeds_at = succeeds_at

    def step(self, action: np.ndarray) -> tuple[dict[str, object], bool]:
        self.done.append(action)
        return {"step": len(self.done)}, len(self.done) == self.succeeds_at

    def marks(self) -> list[float]:
        return [round(float(action[0]), 3) for action in self.done]


class Brain:
    """A policy that answers as it is told: at once, when it is let, or with an error."""

    contract = CONTRACT

    def __init__(self) -> None:
        self.asked: list[dict[str, object]] = []
        self.resets = 0
        self.gate: asyncio.Event | None = None
        self.gated_from = 1
        self.answers: dict[int, np.ndarray | RobotError] = {}
        """By the number of the request, from 1; others get a chunk that says which it is."""

    async def infer(self, observation, *, latest=False, executed_steps=None, delay_steps=None) -> Chunk:
        number = len(self.asked) + 1
        self.asked.append({"step": observation["step"], "executed": executed_steps, "delay": delay_steps})
        if self.gate is not None and number >= self.gated_from:
            await self.gate.wait()
        answer = self.answers.get(number, np.full((16, 2), number / 100, np.float32))
        if isinstance(answer, RobotError):
            raise answer
        return Chunk(answer, Timing(batch=2, continued=executed_steps is not None), rtt_ms=5.0)

    async def reset(self) -> None:
        self.resets += 1


async def _run(brain: Brain, arm: Arm, rules: Rules, clock, *, max_steps: int = 10, rate_hz: float = 0.0) -> Episode:
    return await run_episode(brain, arm, SEEN, Executor(rules), max_steps=max_steps, rate_hz=rate_hz, clock=clock)


async def test_in_turn_each_chunk_is_asked_for_with_what_is_seen_after_the_last(hasty_clock) -> None:
    brain, arm = Brain(), Arm()
    episode = await _run(brain, arm, Rules(4), hasty_clock)
    assert arm.marks() == [0.01] * 4 + [0.02] * 4 + [0.03] * 2
    assert [asked["step"] for asked in brain.asked] == [0, 4, 8]
    assert (episode.steps, episode.chunks, episode.holds, episode.late_steps, brain.resets) == (10, 3, 0, 0, 1)
    assert (episode.rtts_ms, episode.batches) == ([5.0] * 3, [2] * 3)


async def test_an_episode_ends_when_the_task_is_done(hasty_clock) -> None:
    episode = await _run(Brain(), Arm(succeeds_at=6), Rules(4), hasty_clock)
    assert (episode.success, episode.steps) == (True, 6)


async def test_nothing_moves_before_the_first_chunk_is_there(manual_clock) -> None:
    brain, arm = Brain(), Arm()
    brain.gate = asyncio.Event()
    running = asyncio.create_task(_run(brain, arm, Rules(4, overlaps=True), manual_clock, rate_hz=RATE_HZ))
    await manual_clock.advance(5000)
    assert not arm.done
    brain.gate.set()
    await manual_clock.advance(PERIOD_MS * 12)
    assert (await running).holds == 0


async def test_overlapping_the_arm_gets_an_action_on_every_tick_while_the_next_chunk_is_made(manual_clock) -> None:
    brain, arm = Brain(), Arm()
    rules = Rules(4, overlaps=True, continues=True)
    running = asyncio.create_task(_run(brain, arm, rules, manual_clock, rate_hz=RATE_HZ))
    await manual_clock.advance(PERIOD_MS * 3.5)
    brain.gate = asyncio.Event()
    await manual_clock.advance(PERIOD_MS * 3)
    assert arm.marks() == [0.01] * 7
    brain.gate.set()
    await manual_clock.advance(PERIOD_MS * 5)
    episode = await running
    assert arm.marks() == [0.01] * 7 + [0.02] * 2 + [0.03]
    assert brain.asked[:3] == [
        {"step": 0, "executed": None, "delay": None},
        {"step": 4, "executed": 4, "delay": 1},
        {"step": 8, "executed": 4, "delay": 3},
    ]
    assert (episode.holds, episode.late_steps, episode.continued) == (0, 0, 2)


async def test_an_arm_whose_chunk_is_used_up_holds_still_on_every_tick(manual_clock) -> None:
    brain, arm = Brain(), Arm()
    running = asyncio.create_task(
        _run(brain, arm, Rules(4, overlaps=True), manual_clock, max_steps=20, rate_hz=RATE_HZ)
    )
    await manual_clock.advance(PERIOD_MS * 1.5)
    brain.gate = asyncio.Event()
    await manual_clock.advance(PERIOD_MS * 17)
    assert arm.marks() == [0.01] * 16 + [0.0] * 3
    brain.gate.set()
    await manual_clock.advance(PERIOD_MS * 3)
    assert (await running).holds == 3


async def test_in_turn_an_arm_with_a_rate_holds_still_until_the_chunk_is_there(manual_clock) -> None:
    brain, arm = Brain(), Arm()
    running = asyncio.create_task(_run(brain, arm, Rules(4), manual_clock, rate_hz=RATE_HZ))
    await manual_clock.advance(PERIOD_MS * 2.5)
    brain.gate = asyncio.Event()
    await manual_clock.advance(PERIOD_MS * 4)
    assert arm.marks() == [0.01] * 4 + [0.0] * 2
    brain.gate.set()
    await manual_clock.advance(PERIOD_MS * 5)
    episode = await running
    assert arm.marks() == [0.01] * 4 + [0.0] * 2 + [0.02] * 4
    assert (episode.holds, episode.late_steps) == (2, 0)


async def test_a_late_tick_is_counted_and_not_made_up_for(manual_clock) -> None:
    brain, arm = Brain(), Arm()
    running = asyncio.create_task(_run(brain, arm, Rules(4), manual_clock, max_steps=6, rate_hz=RATE_HZ))
    await manual_clock.advance(PERIOD_MS * 1.5)
    assert len(arm.done) == 2
    manual_clock.now += round(PERIOD_MS * 3e6)  # the machine was busy with something else
    await manual_clock.advance(0)
    assert len(arm.done) == 3
    await manual_clock.advance(PERIOD_MS * 2 + 1)
    assert len(arm.done) == 5
    await manual_clock.advance(PERIOD_MS * 2)
    assert (await running).late_steps == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, 1.5])
async def test_an_unsafe_chunk_is_not_executed_and_neither_is_the_rest_of_the_last_one(manual_clock, value) -> None:
    brain, arm = Brain(), Arm()
    brain.answers[2] = np.full((16, 2), value, np.float32)
    running = asyncio.create_task(_run(brain, arm, Rules(4, overlaps=True), manual_clock, rate_hz=RATE_HZ))
    await manual_clock.advance(PERIOD_MS * 12)
    episode = await running
    assert arm.marks() == [0.01] * 5 + [0.0] + [0.03] * 4
    assert (episode.unsafe_chunks, episode.holds) == (1, 1)


async def test_an_unsafe_chunk_that_the_server_held_back_stops_the_arm_too(hasty_clock) -> None:
    brain, arm = Brain(), Arm()
    brain.answers[2] = PolicyError("action_not_finite", "held back")
    episode = await _run(brain, arm, Rules(4), hasty_clock)
    assert arm.marks() == [0.01] * 4 + [0.0] + [0.03] * 4 + [0.04]
    assert (episode.unsafe_chunks, episode.failures) == (1, 1)


async def test_a_request_that_failed_is_made_again(hasty_clock) -> None:
    brain, arm = Brain(), Arm()
    brain.answers |= {1: TimedOut(1), 2: PolicyError("replica_lost", ""), 4: TimedOut(1)}
    episode = await _run(brain, arm, Rules(4), hasty_clock)
    assert arm.marks() == [0.03] * 4 + [0.0] + [0.05] * 4 + [0.06]
    assert episode.failures == 3


async def test_a_policy_that_never_answers_the_first_request_is_given_up(hasty_clock) -> None:
    brain, arm = Brain(), Arm()
    brain.answers = {number: PolicyError("policy_error", "no") for number in range(1, 100)}
    with pytest.raises(PolicyError, match="policy_error"):
        await _run(brain, arm, Rules(4), hasty_clock)
    assert not arm.done
    assert len(brain.asked) == 20


@pytest.mark.parametrize(
    "error", [SessionLost("session_expired", "gone"), PolicyError("bad_observation", "no"), Overloaded("full", "", 1.0)]
)
async def test_what_cannot_be_tried_again_ends_the_episode_before_anything_moves(hasty_clock, error) -> None:
    brain, arm = Brain(), Arm()
    brain.answers[1] = error
    with pytest.raises(type(error)):
        await _run(brain, arm, Rules(4), hasty_clock)
    assert not arm.done


async def test_an_arm_whose_lease_is_gone_is_told_to_hold_still(hasty_clock) -> None:
    brain, arm = Brain(), Arm()
    brain.answers[2] = SessionLost("session_expired", "gone")
    with pytest.raises(SessionLost):
        await _run(brain, arm, Rules(4), hasty_clock)
    assert arm.marks() == [0.01] * 4 + [0.0]


async def test_an_arm_whose_loop_is_cancelled_is_told_to_hold_still(manual_clock) -> None:
    arm = Arm()
    running = asyncio.create_task(_run(Brain(), arm, Rules(4), manual_clock, rate_hz=RATE_HZ))
    await manual_clock.advance(PERIOD_MS * 1.5)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert arm.marks() == [0.01] * 2 + [0.0]


async def test_a_simulated_world_stands_still_where_an_overlapping_chunk_is_not_there_yet(hasty_clock) -> None:
    brain, arm = Brain(), Arm()
    brain.gate, brain.gated_from = asyncio.Event(), 2
    running = asyncio.create_task(_run(brain, arm, Rules(4, overlaps=True), hasty_clock, max_steps=40))
    await settle(100)
    assert arm.marks() == [0.01] * 16
    brain.gate.set()
    assert (await running).holds == 0


async def test_an_episode_that_is_over_waits_for_no_chunk(hasty_clock) -> None:
    brain, arm = Brain(), Arm(succeeds_at=6)
    brain.gate, brain.gated_from = asyncio.Event(), 2
    async with asyncio.timeout(20):
        episode = await _run(brain, arm, Rules(4, overlaps=True), hasty_clock)
    assert (episode.success, len(brain.asked)) == (True, 2)


def test_still_is_zero_for_velocities_and_the_last_place_for_positions() -> None:
    last = np.array([0.5, -0.5], np.float32)
    assert stand_still(CONTRACT)(last).tolist() == [0, 0]
    assert keep_last(CONTRACT)(last).tolist() == [0.5, -0.5]
    assert keep_last(CONTRACT)(None).tolist() == [0, 0]


async def test_an_episode_goes_on_over_a_dropped_socket_in_the_same_session() -> None:
    async with policy_server() as server:
        patience = Patience(grace_s=20, first_s=0.001, longest_s=0.01)

        def policy_of(_) -> np.ndarray | None:
            if len(server.requests) == 3:
                server.sockets[-1].transport.abort()
                return None
            return np.full((16, 2), 0.1, np.float32)

        server.policy = policy_of
        async with connect(server.url, CONTRACT, patience=patience) as policy:
            world = TableEnv(3)
            episode = await run_episode(policy, world, world.observe(), Executor(Rules(4)), max_steps=20)
        assert (episode.steps, episode.chunks, episode.holds, episode.failures) == (20, 5, 0, 0)
        assert len({asked.session for asked in server.requests}) == 1
        assert len(server.requests) == 6
        assert policy.counts.resumes == 1
