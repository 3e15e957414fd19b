"""Many sessions at once, in any order of events: each gets what its own observations ask for, once, nothing else."""

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omni_live.engines.contract import EngineOptions, TurnError
from omni_live.pipelines.robot.policy import PolicyEngine
from omni_live.protocols.arrays import Array, array, pack
from omni_live.protocols.openpi.fake_contract import HORIZON, STATE
from omni_live.sessions.inputs import Outcome
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.stamp import LANES, SessionKey, Stamp, session_key
from tests.pipelines.rig import FakeHost, FakeTurn

MS = 1_000_000
POISON, ENDLESS = 13.0, 17.0
SESSIONS = st.integers(0, 4)


class Clock(FakeHost):
    """Time stands still but for a little between two looks at it, so that steps take a while."""

    ns = MS

    def now(self) -> int:
        self.ns += MS // 4
        return self.ns


@dataclass
class Robot:
    """What a session ought to be, by a model of its own."""

    key: SessionKey
    turns: int = 0
    last: float | None = None
    """The tag of its last chunk's end."""
    turn: FakeTurn | None = None
    tag: float = 0
    executed: int | None = None
    fixed: int = 0


class Fleet(RuleBasedStateMachine):
    @initialize(max_batch=st.integers(1, 4))
    def start(self, max_batch: int) -> None:
        options: dict[str, Scalar] = {"max_batch": max_batch, "image": 2, "fail_on": POISON, "nan_on": ENDLESS}
        self.host = Clock()
        self.engine = PolicyEngine(EngineOptions({"policy": "omni_live.pipelines.robot.fake:FakePolicy", **options}))
        self.engine.load(self.host)
        self.robots: dict[int, Robot] = {}
        self.tags = 100
        self.serial = 0

    @rule(number=SESSIONS)
    def open(self, number: int) -> None:
        if number not in self.robots:
            self.serial += 1
            key = session_key(number, self.serial)
            self.engine.open(key, {})
            self.robots[number] = Robot(key)

    @rule(
        number=SESSIONS,
        kind=st.sampled_from([0.0, 0.0, 0.0, POISON, ENDLESS]),
        executed=st.one_of(st.none(), st.integers(0, HORIZON)),
        fixed=st.integers(0, 3),
        due_ms=st.integers(0, 30),
        alone=st.booleans(),
    )
    def ask(self, number: int, kind: float, executed: int | None, fixed: int, due_ms: int, alone: bool) -> None:
        robot = self.robots.get(number)
        if robot is None or robot.turn is not None:
            return
        self.tags += 1
        robot.turns += 1
        robot.tag, robot.executed, robot.fixed = kind or float(self.tags), executed, fixed
        generation = robot.key >> 32
        robot.turn = FakeTurn(Stamp(number * LANES, generation, 1, self.tags, 0, 0, self.host.ns + due_ms * MS))
        self.engine.begin(robot.turn)
        state = np.zeros(STATE, np.float32)
        state[0] = robot.tag
        arrays: dict[str, Array] = {
            "observation/image": np.full((2, 2, 3), number, np.uint8),
            "observation/wrist_image": np.zeros((2, 2, 3), np.uint8),
            "observation/state": state,
        }
        meta: dict[str, Scalar] = {"prompt": "go", "delay_steps": fixed, "deterministic": alone}
        if executed is not None:
            meta["executed_steps"] = executed
        robot.turn.inbox.append(pack("observation", meta, **arrays))
        robot.turn.complete = True

    @rule(number=SESSIONS)
    def reset(self, number: int) -> None:
        robot = self.robots.get(number)
        if robot is not None:
            self._cut(robot)
            self.engine.listen(robot.key, Payload("reset"))
            robot.turns, robot.last = 0, None

    @rule(number=SESSIONS)
    def drop(self, number: int) -> None:
        robot = self.robots.get(number)
        if robot is not None:
            self._cut(robot)

    @rule(number=SESSIONS)
    def close(self, number: int) -> None:
        robot = self.robots.pop(number, None)
        if robot is not None:
            self._cut(robot)
            self.engine.close(robot.key)

    @rule(number=SESSIONS, into=SESSIONS)
    def fork(self, number: int, into: int) -> None:
        robot = self.robots.get(number)
        if robot is not None and robot.turn is None and into not in self.robots:
            self.serial += 1
            twin = Robot(session_key(into, self.serial), robot.turns, robot.last)
            self.engine.fork(robot.key, twin.key)
            self.robots[into] = twin

    @rule(ms=st.integers(1, 3))
    def wait(self, ms: int) -> None:
        self.host.ns += ms * MS

    @precondition(lambda self: self.robots)
    @rule()
    def step(self) -> None:
        self._step()

    @invariant()
    def every_answer_is_its_own(self) -> None:
        for number, robot in self.robots.items():
            if robot.turn is not None and robot.turn.ended is not None:
                self._check(number, robot, robot.turn)
                robot.turn = None

    def teardown(self) -> None:
        """Whoever still waits is served once the windows are over."""
        for _ in range(60):
            self.host.ns += MS
            self._step()
        self.every_answer_is_its_own()
        assert all(robot.turn is None for robot in self.robots.values())
        load = self.engine.load_now()
        assert (load.turns, load.queued, load.sessions) == (0, 0, len(self.robots))

    def _step(self) -> None:
        try:
            self.engine.step()
        except TurnError as error:
            self._failed(error)

    def _failed(self, error: TurnError) -> None:
        assert isinstance(error.turn, FakeTurn)
        self.engine.drop(error.turn)
        error.turn.finish(Outcome.FAILED, error.code)

    def _cut(self, robot: Robot) -> None:
        if robot.turn is not None:
            self.engine.drop(robot.turn)
            assert not robot.turn.sent
            robot.turn = None

    def _check(self, number: int, robot: Robot, turn: FakeTurn) -> None:
        if robot.tag in (POISON, ENDLESS):
            assert not turn.sent
            code = "policy_error" if robot.tag == POISON else "action_not_finite"
            assert turn.ended == (Outcome.FAILED, code)
            return
        assert turn.ended == (Outcome.DONE, "")
        (sent,) = turn.sent
        actions = array(sent, "actions")
        assert actions[-1, :4].tolist() == [robot.tag, 0, robot.turns, number]
        goes_on = robot.last is not None and robot.executed is not None and robot.executed < HORIZON
        assert sent.meta["continued"] is goes_on
        if goes_on and robot.fixed and robot.executed is not None and robot.executed + robot.fixed < HORIZON:
            assert actions[robot.fixed, 0] == robot.tag
        assert actions[-1, 4] == (HORIZON - (robot.executed or 0) if goes_on else 0)
        robot.last = robot.tag


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
