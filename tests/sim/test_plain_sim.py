"""The real session core, orchestrator and pools, with clients that misbehave and workers that break.

Each test runs seeds; a seed is one schedule. The laws are those of the design (G1 to G9); a failure names its seed:
`SEEDS=17 pytest tests/sim` runs that one alone.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
from simclients import Client, Desk, Faults, Frame, at_rest
from simworkers import BrokenError, Host, Make
from simworld import MS, S, World

from omni_live.config.deploy import Deploy, PipelineDeploy, StageDeploy
from omni_live.config.plan import Plan, plan
from omni_live.pipelines.spec import EdgeSpec, Handover, PipelineSpec, StageSpec
from omni_live.sessions.effects import Release, Submit
from omni_live.sessions.events import ErrorTold, Event, TurnDone, TurnSpoke
from omni_live.sessions.ids import CountedIds
from omni_live.sessions.inputs import Asked, CancelAsked, CloseAsked, Heartbeat, StageLost, StageSpoke
from omni_live.sessions.limits import Limits
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.plain import PlainSession
from omni_live.sessions.session import Session
from omni_live.sessions.stamp import SessionKey, Stamp, session_key

SEEDS = [int(seed) for seed in os.environ.get("SEEDS", "").split()] or list(range(int(os.environ.get("RUNS", "6"))))


class Source(Make):
    """Makes `units` numbered units of a request, or breaks where the request is poison."""

    def turn(self, host: Host, stamp: Stamp, params: Mapping[str, Scalar], payload: Payload) -> Iterable[Payload]:
        assert payload.meta["owner"] == host.session, "a request reached another session (G6)"
        if payload.meta["poison"]:
            raise BrokenError
        units = payload.meta["units"]
        assert isinstance(units, int)
        return [Payload("unit", {**payload.meta, "turn": stamp.turn, "index": index}) for index in range(units)]


class Relay(Make):
    """Hands on what is its own session's."""

    def turn(self, host: Host, stamp: Stamp, params: Mapping[str, Scalar], payload: Payload) -> Iterable[Payload]:
        assert payload.meta["owner"] == host.session, "a unit reached another session (G6)"
        assert payload.meta["turn"] == stamp.turn
        return (payload,)


def stages(names: str) -> tuple[StageSpec, ...]:
    return tuple(StageSpec(name, "nowhere:Engine") for name in names)


CHAIN = PipelineSpec(
    "chain",
    stages("abc"),
    edges=(EdgeSpec("a", "b", credits=2), EdgeSpec("b", "c", credits=3)),
    entries={"x": "a"},
    outputs={"mid": "b", "end": "c"},
)
MIXED = replace(
    CHAIN,
    stages=stages("abcd"),
    edges=(
        EdgeSpec("a", "b", Handover.WHOLE),
        EdgeSpec("b", "c", credits=1),
        EdgeSpec("a", "d", credits=4),
    ),
    outputs={"end": "c", "beside": "d"},
)
MAKE = {"a": Source(), "b": Relay(), "c": Relay(), "d": Relay()}
LIMITS = Limits(
    max_sessions=6,
    idle_lease_s=30,
    detach_grace_s=4,
    abort_deadline_ms=500,
    replica_wait_s=2,
    restarts=1000,
    restart_backoff_ms=20,
    restart_backoff_cap_ms=100,
    client_credits=3,
)


def placed(spec: PipelineSpec, replicas: int = 2, fuse: tuple[tuple[str, ...], ...] = ()) -> Plan:
    each = {name: StageDeploy(replicas=replicas) for name in spec.stage_names}
    return plan(Deploy((PipelineDeploy("chain", stages=each, fuse=fuse),), limits=LIMITS), {"chain": spec})


class Recorded(PlainSession):
    """Keeps what it says, also what nobody is attached to hear."""

    def __init__(self, name: str, slot: int, generation: int, now: int) -> None:
        super().__init__(f"sess_{name}", slot, generation, LIMITS, CountedIds(name), now)
        self.said: list[Event] = []

    def _emit(self, event: Event, content: Stamp | None = None, nbytes: int = 0) -> None:
        self.said.append(event)
        super()._emit(event, content, nbytes)


class Asker(Client):
    """Asks for turns, cancels some, breaks its transport, closes and comes anew."""

    def __init__(self, world: World, desk: Desk, name: str, poison: float = 0.0) -> None:
        super().__init__(world, desk, name)
        self.poison = poison
        self.requests = 0
        self.asked: dict[SessionKey, list[str]] = {}
        self.recorded: dict[SessionKey, Recorded] = {}
        self.poisoned: set[str] = set()

    def make_session(self, slot: int, generation: int) -> Session:
        session = Recorded(self.name, slot, generation, self.world.now())
        self.recorded[session_key(slot, generation)] = session
        return session

    def live(self) -> None:
        """One more thing to do, again and again."""
        if self.leaving:
            return
        if self.session is None:
            self.want()
        else:
            self.world.random.choices(
                (self.ask, self.cancel, self.drop, self.come_back, self.ack, self.close, self.babble),
                (40, 12, 6, 12, 10, 2, 4),
            )[0]()
        self.world.after(0, 150 * MS, self.live)

    def ask(self, units: int | None = None) -> str:
        session = self.session
        if session is None:
            return ""
        self.requests += 1
        request = f"{self.name}-{self.requests}"
        key = session_key(session.slot, session.generation)
        poison = units is None and self.world.chance(self.poison)
        if poison:
            self.poisoned.add(request)
        names = self.world.plan.pipelines[0].outputs.values()
        outputs = frozenset(name for name in names if units or self.world.chance(0.6)) or frozenset(names)
        meta = {"owner": int(key), "units": units or self.world.random.randint(1, 12), "poison": poison}
        self.asked.setdefault(key, []).append(request)
        self.tell(Asked("a", outputs, Payload("request", meta), request_id=request))
        return request

    def cancel(self) -> None:
        self.tell(CancelAsked())

    def close(self) -> None:
        self.tell(CloseAsked())

    def babble(self) -> None:
        """Things that are legal and useless."""
        self.tell(CancelAsked("no such request"))
        self.tell(Heartbeat())

    def got(self, frame: Frame) -> None:
        match frame.event:
            case TurnSpoke(request, _, _, payload):
                assert payload.meta["owner"] == self.sessions[-1][0], f"{self.name} got another's content (G6)"
                done = [one.event.request_id for one in self.frames if isinstance(one.event, TurnDone)]
                assert request not in done, f"{self.name}: {request} speaks after its end (G1, G4)"
            case _:
                pass

    # -- what must hold in the end

    def check(self, history: "History") -> None:
        """One release of each session, one end of each request, and `done` only with every unit of every output."""
        for key, door in self.sessions:
            assert len(door.released) == 1, f"{self.name}: released {door.released} (G3)"
            said = self.recorded[key].said
            ends = [event for event in said if isinstance(event, TurnDone)]
            refused = [
                event.event_id for event in said if isinstance(event, ErrorTold) and event.code == "mailbox_full"
            ]
            ended = Counter([end.request_id for end in ends] + refused)
            assert ended == Counter(self.asked.get(key, ())), f"{self.name}: not one end for each request (G4)"
            for end in ends:
                self._check_end(key, end, history)

    def _check_end(self, key: SessionKey, end: TurnDone, history: "History") -> None:
        if end.reason == "stage_error":
            assert end.request_id in self.poisoned, f"{end} is another's poison (G6)"
        if end.status == "done":
            submit = history.submitted[key, end.turn]
            for stage in submit.outputs:
                units = history.told[key, end.turn, stage]
                assert units == submit.payload.meta["units"], f"{end}: {units} units of {stage} (G4, G7)"


class History:
    """What the trace says, by session."""

    def __init__(self, world: World) -> None:
        self.told: Counter[tuple[SessionKey, int, str]] = Counter()
        self.submitted: dict[tuple[SessionKey, int], Submit] = {}
        for note in world.trace:
            match note.detail:
                case StageSpoke(stamp, stage) if note.what == "told":
                    self.told[note.session, stamp.turn, stage] += 1
                case Submit(stamp):
                    self.submitted[note.session, stamp.turn] = note.detail
                case _:
                    pass


def nothing_after_release(world: World) -> None:
    """A session that is released is told nothing and does nothing any more (G5)."""
    released = set()
    for note in world.trace:
        if note.what in ("told", "does"):
            assert note.session not in released, f"{note} comes after the release (G5)"
        if note.what == "does" and isinstance(note.detail, Release):
            released.add(note.session)


def whoever_loses_a_replica_is_told_and_nobody_else(world: World) -> None:
    """StageLost is told to those who were bound to a worker that was lost, and to each of them (G9)."""
    moves = Counter((note.session, note.detail[0]) for note in world.trace if note.what == "bound")  # type: ignore[index]
    tellings = Counter(
        (note.session, note.detail.stage)
        for note in world.trace
        if note.what == "told" and isinstance(note.detail, StageLost)
    )
    for seat, times in moves.items():
        assert times - 1 <= tellings[seat], (
            f"{seat} moved {times - 1} times and heard of it {tellings[seat]} times (G9)"
        )
    home: dict[tuple[SessionKey, str], int] = {}
    lost: set[int] = set()
    previous: dict[tuple[SessionKey, str], int] = {}
    for note in world.trace:
        match note.what, note.detail:
            case "bound", (str() as stage, int() as worker):
                previous[note.session, stage] = home.get((note.session, stage), 0)
                home[note.session, stage] = worker
            case "lost", (int() as worker, _):
                lost.add(worker)
            case "told", StageLost(stage):
                was = {home.get((note.session, stage), 0), previous.get((note.session, stage), 0)}
                assert was & lost, f"{note.session} lost {stage} with no worker of its own (G9)"


def run(world: World, clients: int, seconds: float, kinds: tuple[str, ...], poison: float = 0.0) -> list[Asker]:
    """Clients live while workers break, then calm returns: everyone is served, leaves, and nothing is left."""
    desk = Desk(world, "chain")
    askers = [Asker(world, desk, f"client{index}", poison) for index in range(clients)]
    world.run(0.5)
    for asker in askers:
        world.after(0, 200 * MS, asker.live)
    Faults(world, world.now() + int(seconds * S), kinds).start()
    world.run(seconds)
    for asker in askers:
        asker.leaving = True
    world.run(12)
    assert world.it.pools.is_ready()
    for asker in askers:
        assert asker.session is None or not asker.session.busy, (
            f"{asker.name} waits for a turn that never ends (G4, G9)"
        )
        asker.come_back()
    world.run(2)
    last = {asker: asker.ask(units=3) for asker in askers if asker.session is not None}
    world.run(3)
    for asker, request in last.items():
        if asker.session is None:
            continue  # its lease ran out in the calm
        ends = [one.event for one in asker.frames if isinstance(one.event, TurnDone)]
        assert [end.status for end in ends if end.request_id == request] == ["done"], f"{asker.name} is not served (G9)"
    for asker in askers:
        asker.close()
    world.run(5)
    assert desk.most <= LIMITS.max_sessions, "more sessions than the cap (G2)"
    at_rest(world)
    history = History(world)
    for asker in askers:
        asker.check(history)
    nothing_after_release(world)
    whoever_loses_a_replica_is_told_and_nobody_else(world)
    return askers


@pytest.mark.parametrize("seed", SEEDS)
def test_with_sound_workers_nothing_ever_fails(seed: int) -> None:
    world = World(placed(CHAIN), seed, MAKE)
    askers = run(world, clients=9, seconds=10, kinds=())
    assert world.counts["workers_lost"] == 0
    said = [event for asker in askers for session in asker.recorded.values() for event in session.said]
    assert {event.status for event in said if isinstance(event, TurnDone)} == {"done", "interrupted"}


@pytest.mark.parametrize("seed", SEEDS)
def test_with_workers_that_die_stall_lag_and_repeat_the_guarantees_hold(seed: int) -> None:
    world = World(placed(CHAIN), seed, MAKE)
    run(world, clients=9, seconds=20, kinds=("die", "stall", "lag", "repeat"))
    assert world.counts["workers_lost"] > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_with_whole_and_chunk_edges_the_guarantees_hold(seed: int) -> None:
    world = World(placed(MIXED), seed, MAKE)
    run(world, clients=7, seconds=15, kinds=("die", "stall", "lag", "repeat"))


@pytest.mark.parametrize("seed", SEEDS)
def test_with_fused_stages_and_a_single_replica_of_each_the_guarantees_hold(seed: int) -> None:
    world = World(placed(CHAIN, replicas=1, fuse=(("b", "c"),)), seed, MAKE)
    run(world, clients=7, seconds=15, kinds=("die", "stall", "lag"))


@pytest.mark.parametrize("seed", SEEDS)
def test_poison_costs_its_own_turn_and_nobody_elses(seed: int) -> None:
    world = World(placed(CHAIN, replicas=1), seed, MAKE)
    askers = run(world, clients=7, seconds=10, kinds=(), poison=0.2)
    assert any(asker.poisoned for asker in askers)
    assert world.counts["workers_lost"] == 0


def test_exactly_the_cap_is_reached_while_more_want_in() -> None:
    world = World(placed(CHAIN), 1, MAKE)
    desk = Desk(world, "chain", wait_deadline_s=3)
    askers = [Asker(world, desk, f"client{index}") for index in range(12)]
    world.run(0.5)
    for asker in askers:
        world.after(0, 200 * MS, asker.live)
    world.run(15)
    assert desk.most == LIMITS.max_sessions


def test_one_seed_is_one_schedule() -> None:
    def traced(seed: int) -> list[str]:
        world = World(placed(CHAIN), seed, MAKE)
        run(world, clients=5, seconds=5, kinds=("die", "lag"))
        return [f"{note.at_ns} {note.what} {note.session} {note.detail}" for note in world.trace]

    assert traced(3) == traced(3)
    assert traced(3) != traced(4)
