"""Forks at the desk: who gets one, that a refusal leaves the parent as it was, and that everything comes back."""

from dataclasses import replace

import pytest

from omni_live.config.deploy import Deploy
from omni_live.config.plan import plan
from omni_live.protocols.desk import Refused
from omni_live.runtime.orchestrator import Orchestrator
from omni_live.runtime.ports import WorkerId
from omni_live.runtime.slots import Slots
from omni_live.server.desk import FrontDesk, SessionLine
from omni_live.server.metrics import Metrics
from omni_live.sessions.effects import Release
from omni_live.sessions.events import RolloutAt, SessionCreated, TurnDone
from omni_live.sessions.inputs import CloseAsked, RewindAsked, StepAsked, WorldResetAsked
from omni_live.sessions.limits import Limits
from omni_live.sessions.payload import ArraySpec, Payload
from omni_live.sessions.settings import Settings
from omni_live.sessions.stamp import SessionKey, Stamp

from .house import Box, HandClock, IdleWorker, Rows

ACTIONS = Payload("actions", {}, bytes(32), (ArraySpec("actions", "<f4", (2, 2, 2)),))
SHOWN = frozenset({"decoder"})


class WorldWorker(IdleWorker):
    """One worker of both stages, which reports what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.house: WorldHouse | None = None
        self.worker = WorkerId(0)
        self.fed: list[tuple[SessionKey, Payload]] = []
        self.forks: list[tuple[str, SessionKey, SessionKey]] = []
        self.stamps: list[Stamp] = []

    def feed_session(self, stage: str, session: SessionKey, payload: Payload) -> None:
        self.fed.append((session, payload))
        assert self.house is not None
        step = 0 if payload.kind == "reset" else payload.meta["step"]
        self.house.orchestrator.found(self.worker, stage, session, Payload("at", {"step": step}))

    def fork(self, stage: str, session: SessionKey, into: SessionKey) -> None:
        self.forks.append((stage, session, into))
        self.sessions[stage, into] = 1

    def expect_turn(self, stage: str, stamp: Stamp, client_credits: int) -> int:
        self.stamps.append(stamp)
        return 0


class WorldSpawner:
    def __init__(self, house: "WorldHouse") -> None:
        self.workers: dict[WorkerId, WorldWorker] = {}
        self._house = house

    def spawn(self, worker: WorkerId, role: int) -> WorldWorker:
        made = self.workers[worker] = WorldWorker()
        made.house, made.worker = self._house, worker
        return made


class WorldHouse:
    """A desk over a real orchestrator and workers whose stages answer at once."""

    def __init__(self, limits: Limits | None = None) -> None:
        limits = limits or Limits()
        self.plan = plan(replace(Deploy.of("world", "echo"), limits=limits))
        self.spawner = WorldSpawner(self)
        self.slots = Slots(limits.max_sessions)
        clock, metrics = HandClock(), Metrics()
        self.orchestrator = Orchestrator(self.plan, self.spawner, Rows(), clock, metrics, self.slots)
        self.desk = FrontDesk(self.plan, self.orchestrator, self.slots, clock, metrics)
        self.orchestrator.start()
        for worker in self.spawner.workers:
            self.orchestrator.ready(worker)

    @property
    def forks(self) -> list[tuple[str, SessionKey, SessionKey]]:
        return [fork for worker in self.spawner.workers.values() for fork in worker.forks]

    @property
    def fed(self) -> list[tuple[SessionKey, Payload]]:
        return [feed for worker in self.spawner.workers.values() for feed in worker.fed]

    async def started(self, box: Box, owner: str = "") -> SessionLine:
        line = await self.desk.open("world", Settings(), box, owner)
        line.tell(WorldResetAsked(Payload("reset", {"seed": 1}), "reset"))
        return line

    def make(self, frames: int) -> None:
        """The decoder shows so many frames of the turn that was opened last."""
        worker_id, worker = next((key, worker) for key, worker in self.spawner.workers.items() if worker.stamps)
        stamp = worker.stamps[-1]
        for seq in range(frames):
            self.orchestrator.spoke(worker_id, "decoder", stamp._replace(seq=seq), Payload("frame", {"step": seq + 1}))

    def at_rest(self) -> bool:
        open_sessions = sum(len(worker.sessions) for worker in self.spawner.workers.values())
        return not (self.slots.taken or open_sessions or self.desk.waiting() or self.orchestrator.sessions)


async def test_a_fork_copies_every_stage_and_cuts_the_copy_to_where_it_was_asked_for() -> None:
    house, box, other = WorldHouse(), Box(), Box()
    line = await house.started(box)
    line.tell(StepAsked(ACTIONS, 2, SHOWN, None, "step"))
    house.make(2)
    child = house.desk.fork(line, 1, other, "")
    assert child.session_id != line.session_id
    assert sorted(stage for stage, _, _ in house.forks) == ["decoder", "dynamics"]
    into = house.forks[0][2]
    assert (into, Payload("cut", {"step": 1, "ask": 1})) in house.fed
    assert isinstance(other.events()[0], SessionCreated)
    child.tell(RewindAsked(0, "back"))
    assert other.events()[-2:] == [RolloutAt("back", 0), TurnDone("back", 0, "done", "")]
    line.tell(CloseAsked())
    child.tell(CloseAsked())
    assert house.at_rest()


async def test_a_fork_without_a_step_goes_on_from_the_frames_that_came_though_a_step_runs() -> None:
    house = WorldHouse()
    line = await house.started(Box())
    line.tell(StepAsked(ACTIONS, 2, SHOWN, None, "step"))
    house.make(1)
    house.desk.fork(line, None, Box(), "")
    assert house.fed[-1] == (house.forks[0][2], Payload("cut", {"step": 1, "ask": 1}))


async def test_g2_caps_at_the_cap_a_fork_is_refused_at_once_and_the_parent_lives() -> None:
    house, box = WorldHouse(replace(Limits(), max_sessions=2)), Box()
    line = await house.started(box)
    child = house.desk.fork(line, None, Box(), "")
    for _ in range(3):
        with pytest.raises(Refused) as refused:
            house.desk.fork(line, None, Box(), "")
        assert refused.value.code == "overloaded"
        assert refused.value.retry_after_s is not None
    assert (house.slots.taken, house.desk.waiting()) == (2, 0)
    line.tell(RewindAsked(0, "back"))
    assert box.events()[-1] == TurnDone("back", 0, "done", "")
    child.tell(CloseAsked())
    again = house.desk.fork(line, None, Box(), "")
    again.tell(CloseAsked())
    line.tell(CloseAsked())
    assert house.at_rest()


async def test_g3_release_many_forks_and_closes_leave_nothing() -> None:
    house, box = WorldHouse(replace(Limits(), max_sessions=4)), Box()
    line = await house.started(box)
    for _ in range(50):
        mailboxes = [Box() for _ in range(3)]
        children = [house.desk.fork(line, 0, mailbox, "") for mailbox in mailboxes]
        for child in children:
            child.tell(CloseAsked())
        assert all(mailbox.effects[-1] == Release("close_requested") for mailbox in mailboxes)
    assert house.slots.taken == 1
    line.tell(CloseAsked())
    assert house.at_rest()


async def test_a_parent_that_closes_leaves_its_forks_alone() -> None:
    house, other = WorldHouse(), Box()
    line = await house.started(Box())
    child = house.desk.fork(line, None, other, "")
    line.tell(CloseAsked())
    child.tell(RewindAsked(0, "back"))
    assert other.events()[-1] == TurnDone("back", 0, "done", "")


@pytest.mark.parametrize(("at", "code"), [(1, "rewind_ahead"), (-1, "bad_step")])
async def test_a_fork_at_a_frame_that_is_not_there_is_refused_and_takes_nothing(at: int, code: str) -> None:
    house = WorldHouse()
    line = await house.started(Box())
    with pytest.raises(Refused) as refused:
        house.desk.fork(line, at, Box(), "")
    assert (refused.value.code, house.slots.taken, house.forks) == (code, 1, [])


async def test_only_its_owner_forks_a_rollout_and_only_by_the_line_that_holds() -> None:
    house, box = WorldHouse(), Box()
    line = await house.started(box, "team-a")
    with pytest.raises(Refused) as refused:
        house.desk.fork(line, None, Box(), "team-b")
    assert refused.value.code == "session_not_found"
    house.desk.resume(line.session_id, line.token, None, 0, Box(), "team-a")
    with pytest.raises(Refused) as refused:
        house.desk.fork(line, None, Box(), "team-a")
    assert refused.value.code == "session_not_found"
    assert house.slots.taken == 1


async def test_a_rollout_that_has_not_begun_and_a_session_that_is_none_cannot_be_forked() -> None:
    house = WorldHouse()
    line = await house.desk.open("world", Settings(), Box(), "")
    with pytest.raises(Refused) as refused:
        house.desk.fork(line, None, Box(), "")
    assert refused.value.code == "not_started"
    plain = await house.desk.open("echo", Settings(), Box(), "")
    with pytest.raises(Refused) as refused:
        house.desk.fork(plain, None, Box(), "")
    assert refused.value.code == "unsupported"


async def test_while_the_server_drains_no_fork_is_made() -> None:
    house = WorldHouse()
    line = await house.started(Box())
    line.tell(StepAsked(ACTIONS, 2, SHOWN, None, "step"))
    house.desk.drain(10**12)
    with pytest.raises(Refused) as refused:
        house.desk.fork(line, None, Box(), "")
    assert refused.value.code == "draining"
    assert house.slots.taken == 1
