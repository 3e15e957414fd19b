"""Simulated workers: the rules of the worker side (fences, credits, early chunks, one end for each turn) on a
virtual clock, with faults. What an engine computes is a `Make`: a unit of input in, units of output back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from omni_live.config.plan import WorkerPlan
from omni_live.pipelines.spec import Handover
from omni_live.runtime.ports import CLIENT, Opening, Route, WorkerId
from omni_live.sessions.inputs import Outcome
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.stamp import SessionKey, Stamp

if TYPE_CHECKING:
    from simworld import Lane, World

US = 1_000
MS = 1_000_000

Key = tuple[int, ...]
"""A stamp's slot, generation, epoch and turn."""


class BrokenError(Exception):
    """An engine cannot make anything of its input. Its text is the code, where there is one."""


Later = Callable[[], Payload]
"""Output that is made when it is sent: by then the turn may be over, and it is never made. Raises BrokenError."""


@dataclass
class Host:
    """What a simulated engine knows of a session and may report about it."""

    session: SessionKey
    find: Callable[[Payload], None]
    memory: dict[str, object] = field(default_factory=dict)
    """What the stage keeps for the session; gone with the replica."""


class Make:
    """A stage's engine. As it is, it hands everything on and keeps nothing."""

    compute_ns = (100 * US, 4 * MS)
    chokes = False
    """Whether a fault may spoil a turn here."""
    prompt = False
    """Takes what it is told at once, behind what turns that came before it bring; else when its turn comes."""

    def turn(
        self, host: Host, stamp: Stamp, params: Mapping[str, Scalar], payload: Payload
    ) -> Iterable[Payload | Later]:
        """Output for one unit of a turn's input. Raises BrokenError."""
        del host, stamp, params
        return (payload,)

    def listen(self, host: Host, payload: Payload) -> None:
        """A session-addressed payload."""

    def fork(self, host: Host, into: Host) -> None:
        """`into` goes on from where `host` is."""

    def snapshot(self, host: Host) -> Payload | None:
        """None where there is nothing to be had."""
        del host
        return Payload("nothing")

    def restore(self, host: Host, payload: Payload) -> None:
        """Be again as the snapshot says."""


class Unit(NamedTuple):
    """What travels along an edge: a payload, or the word that there is no more, or both."""

    payload: Payload | None
    last: bool = False
    sender: tuple[WorkerId, str] | None = None
    """Who gets the credit for a payload; None for the server."""
    incomplete: str | None = None
    """Why a producer's output is incomplete."""


@dataclass(slots=True, eq=False)
class SimTurn:
    """A turn as a stage has it."""

    stamp: Stamp
    params: Mapping[str, Scalar]
    routes: tuple[Route, ...]
    inputs: int
    credits: dict[str, int]
    inbox: deque[Unit] = field(default_factory=deque)
    made: deque[Payload | Later] = field(default_factory=deque)
    """Output that is not sent yet."""
    kept: dict[str, list[Payload]] = field(default_factory=dict)
    """By receiver: output of a whole edge."""
    seq: int = 0
    incomplete: str | None = None
    sources: set[WorkerId] = field(default_factory=set)
    """Workers that produce input and have not said last; one that opened it is among them from the start."""

    is_reported: bool = False
    """Its end went with its last chunk."""

    @property
    def outcome(self) -> Outcome:
        return Outcome.DONE if self.incomplete is None else Outcome.INCOMPLETE

    @property
    def final(self) -> bool:
        return any(route.receiver == CLIENT for route in self.routes)

    def can_send(self) -> bool:
        return not any(self.credits[route.receiver] <= 0 and not route.whole for route in self.routes)

    def can_move(self) -> bool:
        return self.can_send() if self.made else bool(self.inbox) or self.inputs <= 0


class SimStage:
    """One stage in a worker."""

    def __init__(self, name: str, make: Make, room: int | None) -> None:
        self.name = name
        self.make = make
        self.room = room
        """Units that may wait for one turn; None where a whole edge brings them all at once."""
        self.hosts: dict[SessionKey, Host] = {}
        self.heard: deque[tuple[SessionKey, Payload]] = deque()
        self.turns: dict[Key, SimTurn] = {}
        self.finished: dict[Key, SimTurn] = {}
        """Turns that keep output for whole edges."""
        self.over: set[Key] = set()
        self.early: dict[Key, list[Unit]] = {}


class SimWorker:
    """A worker process; see ports.WorkerPort."""

    def __init__(self, world: World, worker: WorkerId, plan: WorkerPlan) -> None:
        self.world = world
        self.worker = worker
        self.alive = True
        self.busy = True
        """Loading or stalled: what arrives waits."""
        self.stages = {
            stage.name: SimStage(stage.name, world.make[stage.name], _room(world, plan.pipeline, stage.name))
            for stage in plan.stages
        }
        self._list = tuple(self.stages.values())
        self._calls, self._urgent, self._control, self._media = (world.lane() for _ in range(4))
        self._peers: dict[WorkerId, Lane] = {}
        """The lanes to other workers."""
        self._inbox: deque[Callable[[], None]] = deque()
        self._called = self._performed = 0
        """Calls that were made, and those that have arrived and were done."""
        self._ahead: list[tuple[int, WorkerId, SimStage, SimTurn]] = []
        """Openings by producers that arrived before the calls that they come after."""
        self._stepping = False
        self._choked = False
        self._draining = False
        world.after(MS, (600 if world.chance(0.15) else 80) * MS, self._loaded)

    # -- faults ------------------------------------------------------------------------------------------------------

    def lag(self, slowness: float) -> None:
        """Everything to and from the worker takes so much longer."""
        for lane in (self._calls, self._urgent, self._control, self._media, *self._peers.values()):
            lane.slowness = slowness

    def repeat(self, chance: float) -> None:
        """Reports come twice now and then."""
        self._control.repeats = self._media.repeats = chance

    def swap(self, chance: float) -> None:
        """Outputs change places now and then."""
        self._media.swaps = chance

    def mend(self) -> None:
        self.lag(1)
        self.repeat(0)
        self.swap(0)
        self._choked = False

    def choke(self) -> None:
        """The next turn that can be spoilt is: its stage breaks on it and loses what it kept of the session."""
        self._choked = True

    def stall(self, most_ns: int) -> None:
        """The runner steps nothing and answers nothing for a while."""
        self.busy = True
        self.world.after(0, most_ns, self._unbusy)

    def die(self, reason: str = "crashed") -> None:
        """The process is gone; what it had sent is still under way, and its exit is noticed some time later."""
        if self.alive:
            self.alive = False
            self.world.tell(f"worker {self.worker} of {', '.join(self.stages)}: {reason}")
            self.world.after(50 * US, 20 * MS, lambda: self._noticed(reason))
            for peer in self.world.live():
                self.world.after(50 * US, 20 * MS, peer.neighbour_lost(self.worker))

    def _noticed(self, reason: str) -> None:
        self.world.it.exited(self.worker, reason)
        self.world.laws.nothing_is_left_on(self.worker)

    def _loaded(self) -> None:
        if self.alive:
            self._control.send(lambda: self.world.it.ready(self.worker))
        self._unbusy()

    def _unbusy(self) -> None:
        self.busy = False
        self._wake()

    # -- ports.WorkerPort --------------------------------------------------------------------------------------------

    def open_session(self, stage: str, session: SessionKey, params: Mapping[str, Scalar]) -> None:
        del params
        self._call(lambda: self._open_session(self.stages[stage], session))

    def close_session(self, stage: str, session: SessionKey) -> None:
        self._call(lambda: self._close_session(self.stages[stage], session))

    def open_turn(
        self,
        stage: str,
        stamp: Stamp,
        params: Mapping[str, Scalar],
        routes: tuple[Route, ...],
        inputs: int,
        payload: Payload | None = None,
    ) -> None:
        turn = _turn(stamp, params, routes, inputs)
        if payload is not None:
            self._take(self.stages[stage], turn, Unit(payload, True))
        self._call(lambda: self._open_turn(self.stages[stage], turn))

    def expect_turn(self, stage: str, stamp: Stamp, client_credits: int) -> int:
        del stage, stamp, client_credits
        return self._called

    def forward(self, stage: str, stamp: Stamp, route: Route) -> None:
        self._call(lambda: self._forward(self.stages[stage], stamp, route))

    def feed_session(self, stage: str, session: SessionKey, payload: Payload) -> None:
        self._call(lambda: self._hear(self.stages[stage], session, payload))

    def abort(self, stage: str, stamp: Stamp) -> None:
        self._urgent.send(lambda: self._arrive(lambda: self._abort(self.stages[stage], stamp)))

    def credit(self, stage: str, stamp: Stamp, units: int) -> None:
        self._urgent.send(lambda: self._arrive(lambda: self._credit(stage, stamp, CLIENT, units)))

    def fork(self, stage: str, session: SessionKey, into: SessionKey) -> None:
        self._call(lambda: self._fork(self.stages[stage], session, into))

    def snapshot(self, stage: str, session: SessionKey, ticket: int) -> None:
        self._call(lambda: self._snapshot(self.stages[stage], session, ticket))

    def restore(self, stage: str, session: SessionKey, payload: Payload) -> None:
        self._call(lambda: self._restore(self.stages[stage], session, payload))

    def drain(self) -> None:
        self._draining = True
        self._leave()

    def kill(self) -> None:
        self.die("killed")

    # -- the runner --------------------------------------------------------------------------------------------------

    def _call(self, act: Callable[[], None]) -> None:
        self._called += 1
        self._calls.send(lambda: self._arrive(lambda: self._perform(act)))

    def _perform(self, act: Callable[[], None]) -> None:
        act()
        self._performed += 1
        if self._ahead:
            ahead, self._ahead = self._ahead, []
            for opening in ahead:
                self._open_after(*opening)

    def _open_after(self, after: int, worker: WorkerId, stage: SimStage, turn: SimTurn) -> None:
        if after > self._performed:
            self._ahead.append((after, worker, stage, turn))
        else:
            self._open_turn(stage, turn)

    def _arrive(self, act: Callable[[], None]) -> None:
        if self.alive:
            self._inbox.append(act)
            self._wake()

    def _wake(self) -> None:
        if not self.alive or self.busy:
            return
        while self._inbox:
            self._inbox.popleft()()
        if not self._stepping and self._has_work():
            self._stepping = True
            stage = self._list[int(self.world.draw() * len(self._list))] if len(self._list) > 1 else self._list[0]
            self.world.after(*stage.make.compute_ns, self._stepped)

    def _has_work(self) -> bool:
        admits = self.world.admits
        for stage in self._list:
            if stage.heard:
                return True
            for turn in stage.turns.values():
                if turn.can_move() or not admits(turn.stamp):
                    return True
        return False

    def _stepped(self) -> None:
        self._stepping = False
        if not self.alive or self.busy:
            return
        for stage in self._list:
            if stage.turns or stage.finished or stage.early:
                self._drop_stale(stage)
            if stage.heard:
                self._listen(stage, *stage.heard.popleft())
            if stage.turns:
                self._advance(stage)
        self._wake()

    def _advance(self, stage: SimStage) -> None:
        """Make or send something of the most urgent turn that can go on, and end those of which nothing is left."""
        turns = tuple(stage.turns.values())
        for turn in turns if len(turns) == 1 else sorted(turns, key=_deadline):
            if not turn.made and turn.inbox:
                self._make(stage, turn)
                if turn.stamp[:4] not in stage.turns or not turn.made:
                    break
            if turn.made and turn.can_send():
                self._send(stage, turn)
                break
        for turn in turns:
            if not turn.made and not turn.inbox and turn.inputs <= 0 and turn.stamp[:4] in stage.turns:
                self._finish(stage, turn)

    def _drop_stale(self, stage: SimStage) -> None:
        admits = self.world.admits
        for turns in (stage.turns, stage.finished):
            for turn in tuple(turns.values()):
                if not admits(turn.stamp):
                    self._drop(stage, turn.stamp[:4], "stale")
        for key in tuple(stage.early):
            stamp = Stamp(*key)
            if not admits(stamp):
                self._drop_early(stage, stamp)

    def _hear(self, stage: SimStage, session: SessionKey, payload: Payload) -> None:
        if not stage.make.prompt:
            stage.heard.append((session, payload))
            return
        for turn in tuple(stage.turns.values()):
            if turn.stamp.session == session and turn.inbox:
                self._make(stage, turn)
        self._listen(stage, session, payload)

    def _listen(self, stage: SimStage, session: SessionKey, payload: Payload) -> None:
        host = stage.hosts.get(session)
        if host is None:
            self.world.count("sim_feeds_unknown")
        else:
            stage.make.listen(host, payload)

    def _make(self, stage: SimStage, turn: SimTurn) -> None:
        unit = turn.inbox.popleft()
        self._give_back(stage, turn.stamp, unit)
        if unit.payload is None:
            return
        host = stage.hosts[turn.stamp.session]
        if self._choked and stage.make.chokes and not turn.params.get("side"):
            self._choked = False
            host.memory = {"choked": True}
            self._drop(stage, turn.stamp[:4], "stage_error", Outcome.FAILED)
            return
        try:
            turn.made.extend(stage.make.turn(host, turn.stamp, turn.params, unit.payload))
        except BrokenError as error:
            self._drop(stage, turn.stamp[:4], str(error) or "stage_error", Outcome.FAILED)

    def _send(self, stage: SimStage, turn: SimTurn) -> None:
        made = turn.made.popleft()
        try:
            payload = made if isinstance(made, Payload) else made()
        except BrokenError as error:
            self._drop(stage, turn.stamp[:4], str(error) or "stage_error", Outcome.FAILED)
            return
        stamp = turn.stamp._replace(seq=turn.seq)
        turn.seq += 1
        for route in turn.routes:
            if route.whole:
                turn.kept.setdefault(route.receiver, []).append(payload)
                continue
            turn.credits[route.receiver] -= 1
            if route.receiver == CLIENT:
                self._speak(stage, turn, stamp, payload)
            else:
                self._hand(turn.stamp, route, Unit(payload, sender=(self.worker, stage.name)))

    def _speak(self, stage: SimStage, turn: SimTurn, stamp: Stamp, payload: Payload) -> None:
        if turn.made or turn.inbox or turn.inputs > 0 or not self.world.chance(0.7):
            self._media.send(lambda: self.world.it.spoke(self.worker, stage.name, stamp, payload), loose=True)
            return
        turn.is_reported = True  # the last chunk says that it is the last
        outcome, reason = turn.outcome, turn.incomplete or ""
        self._media.send(
            lambda: self.world.it.spoke(self.worker, stage.name, stamp, payload, outcome, reason), loose=True
        )

    def _finish(self, stage: SimStage, turn: SimTurn) -> None:
        key = turn.stamp[:4]
        del stage.turns[key]
        stage.over.add(key)
        for route in turn.routes:
            if route.receiver != CLIENT and not route.whole:
                self._hand(turn.stamp, route, Unit(None, True, (self.worker, stage.name), turn.incomplete))
        if any(route.whole for route in turn.routes):
            stage.finished[key] = turn
        if not turn.is_reported:
            self._end(stage, turn, turn.outcome, turn.incomplete or "")

    def _drop(self, stage: SimStage, key: Key, reason: str, outcome: Outcome = Outcome.INCOMPLETE) -> None:
        stage.over.add(key)
        stage.finished.pop(key, None)
        turn = stage.turns.pop(key, None)
        if turn is not None:
            for unit in turn.inbox:
                self._give_back(stage, turn.stamp, unit)
            if not turn.is_reported:
                self._end(stage, turn, outcome, reason)

    def _end(self, stage: SimStage, turn: SimTurn, outcome: Outcome, reason: str) -> None:
        lane = self._media if turn.final else self._control
        lane.send(lambda: self.world.it.ended(self.worker, stage.name, turn.stamp, outcome, reason))

    def _never_opened(self, stage: SimStage, stamp: Stamp, reason: str, outcome: Outcome = Outcome.INCOMPLETE) -> None:
        """A turn that has not begun here ends here all the same, and never begins."""
        stage.over.add(stamp[:4])
        self._drop_early(stage, stamp)
        self._control.send(lambda: self.world.it.ended(self.worker, stage.name, stamp, outcome, reason))

    def _drop_early(self, stage: SimStage, stamp: Stamp) -> None:
        for unit in stage.early.pop(stamp[:4], ()):
            self._give_back(stage, stamp, unit)

    def _leave(self) -> None:
        if self._draining and not any(stage.hosts for stage in self._list):
            self.die("drained")

    # -- between workers ---------------------------------------------------------------------------------------------

    def _hand(self, stamp: Stamp, route: Route, unit: Unit) -> None:
        peer = self.world.workers[route.worker]
        self._to(peer, lambda: peer.deliver(route.receiver, stamp, unit))

    def _to(self, peer: SimWorker, arrive: Callable[[], None]) -> None:
        if peer is self:
            arrive()
            return
        lane = self._peers.get(peer.worker)
        if lane is None:
            lane = self._peers[peer.worker] = self.world.lane()
        lane.send(arrive)

    def _open_at(self, route: Route, opening: Opening, ours: SimTurn) -> None:
        """Open the receiver's side of our turn."""
        peer = self.world.workers[route.worker]
        stage = peer.stages[route.receiver]
        stamp = ours.stamp._replace(stage=opening.stage_index)
        turn = _turn(stamp, ours.params, opening.routes, 1)
        turn.sources.add(self.worker)
        if peer is self:
            self._open_turn(stage, turn)
        else:
            self._to(peer, lambda: peer.open_from(opening.after, self.worker, stage, turn))

    def open_from(self, after: int, worker: WorkerId, stage: SimStage, turn: SimTurn) -> None:
        """A producer opens the stage's side of a turn."""
        self._arrive(lambda: self._open_after(after, worker, stage, turn))

    def neighbour_lost(self, worker: WorkerId) -> Callable[[], None]:
        """A worker is dead: what still waits for its output cannot end well."""

        def fail() -> None:
            for stage in self._list:
                for turn in tuple(stage.turns.values()):
                    if worker in turn.sources:
                        self._drop(stage, turn.stamp[:4], "peer_lost", Outcome.FAILED)
            for _, opener, stage, turn in self._ahead:
                if opener == worker and turn.stamp[:4] not in stage.over:
                    self._never_opened(stage, turn.stamp, "peer_lost", Outcome.FAILED)

        return lambda: self._arrive(fail)

    def deliver(self, stage: str, stamp: Stamp, unit: Unit) -> None:
        """A unit from another stage."""
        self._arrive(lambda: self._deliver(self.stages[stage], stamp, unit))

    def credit_from(self, stage: str, stamp: Stamp, receiver: str) -> None:
        """A receiver took a unit."""
        self._arrive(lambda: self._credit(stage, stamp, receiver, 1))

    def _give_back(self, stage: SimStage, stamp: Stamp, unit: Unit) -> None:
        if unit.payload is not None and unit.sender is not None:
            worker, producer = unit.sender
            peer = self.world.workers[worker]
            self._to(peer, lambda: peer.credit_from(producer, stamp, stage.name))

    def _deliver(self, stage: SimStage, stamp: Stamp, unit: Unit) -> None:
        key = stamp[:4]
        turn = stage.turns.get(key)
        if not self.world.admits(stamp) or key in stage.over:
            self._give_back(stage, stamp, unit)
        elif turn is None:
            early = stage.early.setdefault(key, [])
            early.append(unit)
            self._check_room(stage, len(early) - 1)
        else:
            self._take(stage, turn, unit)

    def _take(self, stage: SimStage, turn: SimTurn, unit: Unit) -> None:
        if unit.payload is not None:
            turn.inbox.append(unit)
            self._check_room(stage, len(turn.inbox))
        if unit.sender is not None:
            turn.sources.add(unit.sender[0])
        if unit.last:
            if unit.sender is not None:
                turn.sources.discard(unit.sender[0])
            turn.inputs -= 1
            turn.incomplete = turn.incomplete or unit.incomplete

    def _check_room(self, stage: SimStage, waiting: int) -> None:
        assert stage.room is None or waiting <= stage.room, f"{waiting} units wait in {stage.name} (G11)"

    # -- calls of the port -------------------------------------------------------------------------------------------

    def _host(self, stage: SimStage, session: SessionKey) -> Host:
        assert session not in stage.hosts, f"session {session} is opened twice on {stage.name} (G3)"

        def find(payload: Payload) -> None:
            self._media.send(lambda: self.world.it.found(self.worker, stage.name, session, payload))

        host = stage.hosts[session] = Host(session, find)
        return host

    def _open_session(self, stage: SimStage, session: SessionKey) -> None:
        self._host(stage, session)

    def _close_session(self, stage: SimStage, session: SessionKey) -> None:
        assert session in stage.hosts, f"session {session} is closed on {stage.name}, where it is not open (G3)"
        del stage.hosts[session]
        for turn in (*stage.turns.values(), *stage.finished.values()):
            if turn.stamp.session == session:
                self._drop(stage, turn.stamp[:4], "closed")
        for key in tuple(stage.early):
            if Stamp(*key).session == session:
                del stage.early[key]
        self._leave()

    def _fork(self, stage: SimStage, session: SessionKey, into: SessionKey) -> None:
        assert session in stage.hosts, f"session {session} is forked on {stage.name}, where it is not open"
        stage.make.fork(stage.hosts[session], self._host(stage, into))

    def _snapshot(self, stage: SimStage, session: SessionKey, ticket: int) -> None:
        host = stage.hosts.get(session)
        payload = None if host is None else stage.make.snapshot(host)
        self._media.send(lambda: self.world.it.snapshotted(self.worker, stage.name, session, ticket, payload))

    def _restore(self, stage: SimStage, session: SessionKey, payload: Payload) -> None:
        assert session in stage.hosts, f"session {session} is restored on {stage.name}, where it is not open"
        stage.make.restore(stage.hosts[session], payload)

    def _open_turn(self, stage: SimStage, turn: SimTurn) -> None:
        key = turn.stamp[:4]
        assert key not in stage.turns, f"turn {key} is opened twice on {stage.name} (G4)"
        if key in stage.over:
            self._drop_early(stage, turn.stamp)
            return
        if not self.world.admits(turn.stamp):
            self._never_opened(stage, turn.stamp, "stale")
            return
        assert turn.stamp.session in stage.hosts, f"turn {key} is opened on {stage.name} without its session (G5)"
        stage.turns[key] = turn
        for route in turn.routes:
            if route.opens is not None:
                self._open_at(route, route.opens, turn)
        for unit in stage.early.pop(key, ()):
            self._take(stage, turn, unit)

    def _forward(self, stage: SimStage, stamp: Stamp, route: Route) -> None:
        turn = stage.finished.get(stamp[:4])
        if turn is None:
            self.world.count("sim_forwards_stale")
            return
        kept = turn.kept.pop(route.receiver, [])
        for payload in kept:
            self._hand(stamp, route, Unit(payload))
        self._hand(stamp, route, Unit(None, True, (self.worker, stage.name), turn.incomplete))
        if not turn.kept:
            del stage.finished[stamp[:4]]

    def _abort(self, stage: SimStage, stamp: Stamp) -> None:
        if stamp[:4] in stage.turns or stamp[:4] in stage.over:
            self._drop(stage, stamp[:4], "aborted")
        else:
            self._never_opened(stage, stamp, "aborted")

    def _credit(self, stage: str, stamp: Stamp, receiver: str, units: int) -> None:
        turn = self.stages[stage].turns.get(stamp[:4])
        if turn is not None:
            turn.credits[receiver] += units


def _turn(stamp: Stamp, params: Mapping[str, Scalar], routes: tuple[Route, ...], inputs: int) -> SimTurn:
    return SimTurn(stamp, params, routes, inputs, {route.receiver: route.credits for route in routes})


def _deadline(turn: SimTurn) -> int:
    return turn.stamp.deadline_ns


def _room(world: World, pipeline: str, stage: str) -> int | None:
    """How many units may wait for one turn of the stage: all of its producers' credits, and what the server feeds."""
    edges = [edge for edge in world.plan.pipeline(pipeline).edges if edge.consumer == stage]
    if any(edge.handover is Handover.WHOLE for edge in edges):
        return None
    return 1 + sum(edge.credits or world.plan.limits.chunk_credits for edge in edges)
