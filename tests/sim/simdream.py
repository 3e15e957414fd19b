"""A simulated world model, and clients that dream in it: they step, look, rewind, fork, give back, cancel and return.

A frame is a hash of everything that it follows from, so two frames are equal where, and only where, their start and
their actions are. `DreamLedger` makes each line of frames once more from what was asked, without asking the core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

from simclients import Act, Client, Desk, Manners, Watched
from simlaws import CUT_TURN, Ledger, Wanted
from simworkers import BrokenError, Host, Later, Make
from simworld import World

from omni_live.pipelines.spec import EdgeSpec, PipelineSpec, SessionKind, StageSpec
from omni_live.protocols.desk import Mailbox
from omni_live.runtime.orchestrator import UnavailableError
from omni_live.server.desk import Seat
from omni_live.sessions.effects import Emit
from omni_live.sessions.events import Event, RolloutAt, RolloutSnapshotted, SessionClosed, TurnDone, TurnSpoke
from omni_live.sessions.ids import CountedIds
from omni_live.sessions.inputs import (
    CancelAsked,
    Input,
    LookAsked,
    RewindAsked,
    StepAsked,
    WorldResetAsked,
    WorldRestoreAsked,
    WorldSnapshotAsked,
)
from omni_live.sessions.payload import ArraySpec, Payload, Scalar
from omni_live.sessions.rollout import RolloutSession
from omni_live.sessions.session import Session
from omni_live.sessions.stamp import SessionKey, Stamp, session_key

MIB = 1 << 20
KEEPER = "dynamics"
BOTH = frozenset({KEEPER, "decoder"})
DREAM = PipelineSpec(
    "dream",
    (
        StageSpec(KEEPER, "nowhere:Dynamics", bytes_per_session=MIB),
        StageSpec("decoder", "nowhere:Decoder", bytes_per_session=MIB),
    ),
    kind=SessionKind.ROLLOUT,
    edges=(EdgeSpec(KEEPER, "decoder", credits=2),),
    entries={"actions": KEEPER},
    outputs={"frame": "decoder", "latent": KEEPER},
)
ROW = 16
FRAME = 16
REWIND = 12
"""Frames that the stage can be rewound by; limits may say less."""
UNDELIVERED = 32
"""Frames of a turn that may be cut off again: more than a request has."""
POISON = 255
BAD_SEED = -1
MOST_DREAMERS = 5


def begun(seed: Scalar) -> bytes:
    """Frame 0."""
    return blake2b(repr(seed).encode(), digest_size=FRAME).digest()


def follows(frame: bytes, row: bytes) -> bytes:
    return blake2b(frame + row, digest_size=FRAME).digest()


def acted(numbers: Iterable[int]) -> Payload:
    """A row of actions for each number."""
    rows = [bytes([number]) * ROW for number in numbers]
    return Payload("actions", {}, b"".join(rows), (ArraySpec("actions", "<f4", (len(rows), 2, 2)),))


def rows_of(payload: Payload) -> tuple[bytes, ...]:
    body = bytes(payload.body)
    return tuple(body[at : at + ROW] for at in range(0, len(body), ROW))


# -- the stages --------------------------------------------------------------------------------------------------------


@dataclass
class Kept:
    """What the stage keeps of a session: frames `first` and on."""

    first: int = 0
    frames: list[bytes] = field(default_factory=list)
    moves: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.frames)

    def cut(self, step: int) -> None:
        del self.frames[step + 1 - self.first :]
        self.moves += 1

    def add(self, frame: bytes) -> None:
        self.frames.append(frame)
        gone = len(self.frames) - REWIND - UNDELIVERED
        if gone > 0:
            del self.frames[:gone]
            self.first += gone


@dataclass
class Run:
    """A turn that makes frames."""

    moves: int | None = None


class Dynamics(Make):
    """Keeps the frames. Its rules are those of the real stage: see pipelines.world.dynamics."""

    chokes = True
    prompt = True

    def __init__(self) -> None:
        self.is_full: Callable[[], bool] = lambda: False
        """Whether there is no room for a fork at this moment."""
        self.is_lost: Callable[[], bool] = lambda: False
        """Whether what is given back at this moment is lost on the way."""
        self.orphans: set[SessionKey] = set()
        """Forks for which there was no room."""

    def turn(
        self, host: Host, stamp: Stamp, params: Mapping[str, Scalar], payload: Payload
    ) -> Iterable[Payload | Later]:
        step = payload.meta["step"]
        assert isinstance(step, int)
        if payload.kind == "look":
            return (partial(_shown, host, step),)
        run = Run()
        return [partial(_made, host, run, step + index, row) for index, row in enumerate(rows_of(payload))]

    def listen(self, host: Host, payload: Payload) -> None:
        try:
            step = self._told(host, payload)
        except BrokenError as error:
            answer: dict[str, Scalar] = {"code": str(error), "step": payload.meta.get("step", -1)}
            host.find(Payload("refused", answer | _ask(payload)))
        else:
            host.find(Payload("at", {"step": step} | _ask(payload)))

    def _told(self, host: Host, payload: Payload) -> int:
        step = payload.meta.get("step", -1)
        assert isinstance(step, int)
        match payload.kind:
            case "clear":
                host.memory.clear()
                return -1
            case "reset":
                if payload.meta["seed"] == BAD_SEED:
                    raise BrokenError("bad_reset")
                kept = _kept(host)
                host.memory = {"kept": Kept(0, [begun(payload.meta["seed"])], kept.moves + 1 if kept else 0)}
            case "rewind":
                kept = _started(host)
                if 0 <= step < max(kept.first, kept.end - 1 - REWIND):
                    raise BrokenError("rewind_too_far")
                _go_back(kept, step)
            case "cut":
                refused = host.memory.pop("refused", "")
                if refused:
                    raise BrokenError(refused)
                if step < _started(host).end - 1:
                    _go_back(_started(host), step)
            case other:
                raise AssertionError(f"{other} is no command")
        return _started(host).end - 1

    def fork(self, host: Host, into: Host) -> None:
        kept = _kept(host)
        if kept is not None and self.is_full():
            self.orphans.add(into.session)
            into.memory["refused"] = "pool_full"
        elif kept is not None:
            into.memory["kept"] = Kept(kept.first, list(kept.frames))
        elif "refused" in host.memory:
            into.memory["refused"] = host.memory["refused"]
            self.orphans.add(into.session)

    def snapshot(self, host: Host) -> Payload | None:
        kept = _kept(host)
        if kept is None:
            return None
        first = max(kept.first, kept.end - 1 - REWIND)
        return Payload("world", {"first": first}, b"".join(kept.frames[first - kept.first :]))

    def restore(self, host: Host, payload: Payload) -> None:
        if self.is_lost():
            return
        if payload.kind != "world":
            host.memory["refused"] = "bad_snapshot"
            return
        first, frames = framed(payload)
        kept = _kept(host)
        host.memory = {"kept": Kept(first, frames, kept.moves + 1 if kept else 0)}


def _ask(payload: Payload) -> dict[str, Scalar]:
    """What an answer repeats, so that nobody takes it for another's."""
    return {name: value for name, value in payload.meta.items() if name == "ask"}


def _kept(host: Host) -> Kept | None:
    kept = host.memory.get("kept")
    return kept if isinstance(kept, Kept) else None


def _started(host: Host) -> Kept:
    kept = _kept(host)
    if kept is None:
        raise BrokenError("not_started")
    return kept


def _go_back(kept: Kept, step: int) -> None:
    if step < 0:
        raise BrokenError("bad_step")
    if step >= kept.end:
        raise BrokenError("rewind_ahead")
    if step < kept.first:
        raise BrokenError("rewind_too_far")
    kept.cut(step)


def _latent(host: Host, step: int, frame: bytes) -> Payload:
    return Payload("latent", {"step": step, "owner": int(host.session)}, frame)


def _shown(host: Host, step: int) -> Payload:
    kept = _started(host)
    if not kept.first <= step < kept.end:
        raise BrokenError("step_unknown")
    return _latent(host, step, kept.frames[step - kept.first])


def _made(host: Host, run: Run, step: int, row: bytes) -> Payload:
    """One frame, kept before it is sent."""
    kept = _started(host)
    if step != kept.end or run.moves not in (None, kept.moves):
        raise BrokenError("step_out_of_order")
    if row[0] == POISON:
        raise BrokenError("world_error")
    run.moves = kept.moves
    kept.add(follows(kept.frames[-1], row))
    return _latent(host, step, kept.frames[-1])


class Decoder(Make):
    """Draws what is its own session's."""

    def turn(self, host: Host, stamp: Stamp, params: Mapping[str, Scalar], payload: Payload) -> Iterable[Payload]:
        assert payload.meta["owner"] == host.session, "a latent reached another session (G6)"
        return (Payload("frame", payload.meta, payload.body),)


def framed(state: Payload) -> tuple[int, list[bytes]]:
    """The number of a snapshot's first frame, and its frames."""
    body, first = bytes(state.body), state.meta["first"]
    assert isinstance(first, int)
    return first, [body[at : at + FRAME] for at in range(0, len(body), FRAME)]


# -- the law -----------------------------------------------------------------------------------------------------------

Request = StepAsked | LookAsked | WorldResetAsked | RewindAsked | WorldSnapshotAsked | WorldRestoreAsked


@dataclass
class Line:
    """Frames by their numbers, as start and actions make them, up to `at`; of what was given back the last ones."""

    frames: dict[int, bytes] = field(default_factory=dict)
    at: int = -1

    def upto(self, step: int) -> Line:
        return Line({number: frame for number, frame in self.frames.items() if number <= step}, step)

    @classmethod
    def begun(cls, seed: Scalar) -> Line:
        return cls({0: begun(seed)}, 0)

    @classmethod
    def restored(cls, state: Payload) -> Line:
        first, frames = framed(state)
        return cls(dict(enumerate(frames, first)), first + len(frames) - 1)


@dataclass
class Expected:
    """What a request that runs must bring: frame by frame, from `first` on."""

    first: int
    frames: list[bytes]
    committed: int = 0


class DreamLedger(Ledger):
    """Where the rollout stands, by its requests and by what came: never by what the core believes."""

    def __init__(self, world: World, key: SessionKey, name: str, line: Line) -> None:
        super().__init__(world, key, name)
        self.line = line
        self.asked: dict[str, Request] = {}
        self._known = set(line.frames.items())
        """Every frame that ever was the rollout's."""
        self._expected: dict[str, Expected] = {}
        self._told_at: dict[str, int] = {}
        self._snapshotted: set[str] = set()
        self._said_before: dict[str, int] = {}
        """By move: the last number that was given when it was asked."""
        self._gone = 0
        """Content up to this number is of before a move that was made."""

    # -- what is said to it

    def apply(self, told: Input) -> None:
        if isinstance(told, Request):
            outputs = told.outputs if isinstance(told, StepAsked | LookAsked) else frozenset[str]()
            frames = told.frames if isinstance(told, StepAsked | LookAsked) else 0
            poison = isinstance(told, StepAsked) and any(row[0] == POISON for row in rows_of(told.actions))
            assert told.request_id not in self.asked, f"{self.name}: {told.request_id} is taken twice (G7)"
            self.asked[told.request_id] = told
            self.wanted[told.request_id] = Wanted(outputs, frames, poison)
            self._said_before[told.request_id] = len(self.said)
        super().apply(told)

    # -- what it says

    def issue(self, event: Event, content: Stamp | None) -> None:
        match event:
            case RolloutAt(request, step):
                assert request not in self._told_at, f"{self.name} tells twice where {request} leads to (G4)"
                self._told_at[request] = step
            case RolloutSnapshotted(request, step, state):
                self._check_snapshot(request, step, state)
            case _:
                pass
        super().issue(event, content)

    def tell(self, event: Event) -> None:
        if isinstance(event, RolloutAt):
            assert event.step == self.line.at, f"{self.name} is at {self.line.at} and told {event.step} (G4)"
        if isinstance(event, SessionClosed):
            self.world.count(f"sim_closed_{event.reason}")
        super().tell(event)

    def _turn_spoke(self, spoke: TurnSpoke) -> None:
        request, stage = spoke.request_id, spoke.stage
        assert request in self.wanted and request not in self.ended, f"{self.name}: {request} speaks unasked (G1, G4)"
        assert spoke.payload.meta["owner"] == self.key, f"{self.name} speaks with another's voice (G6)"
        expected = self._expected.get(request)
        if expected is None:
            expected = self._expected[request] = self._expect(self.asked[request])
        index = self.spoken[request, stage]
        step = spoke.payload.meta["step"]
        assert step == expected.first + index, f"{self.name}: {request} shows {step} of {stage} out of turn (G7)"
        assert index < len(expected.frames), f"{self.name}: {request} shows {step}, which is too much (G4)"
        right = expected.frames[index]
        assert spoke.payload.body == right, f"{self.name}: frame {step} is not what its actions make (G6, G8)"
        self.spoken[request, stage] += 1
        self._commit(request, expected)

    def _expect(self, asked: Request) -> Expected:
        """What the request must bring, as the rollout stands now that the first of it comes."""
        line = self.line
        assert isinstance(asked, StepAsked | LookAsked), f"{self.name}: frames come of {asked} (G5)"
        first = line.at + 1 if asked.step is None else asked.step
        if first == line.at + 1 and isinstance(asked, StepAsked):
            frames = [line.frames[line.at]]
            for row in rows_of(asked.actions):
                frames.append(follows(frames[-1], row))
            return Expected(first, frames[1:])
        steps = range(first, first + asked.frames)
        missing = [step for step in steps if step not in line.frames]
        assert not missing, f"{self.name}: {asked.request_id} brings {missing}, which there never were (G8)"
        self.world.count("sim_frames_again", asked.frames)
        return Expected(first, [line.frames[step] for step in steps])

    def _commit(self, request: str, expected: Expected) -> None:
        """A frame counts when all that was wanted of it came."""
        came = min(self.spoken[request, stage] for stage in self.wanted[request].outputs)
        while expected.committed < came:
            step = expected.first + expected.committed
            if step > self.line.at:
                self.line.frames[step] = frame = expected.frames[expected.committed]
                self.line.at = step
                self._known.add((step, frame))
            expected.committed += 1

    def _check_snapshot(self, request: str, step: int, state: Payload) -> None:
        assert request in self.wanted and request not in self.ended, f"{self.name}: a snapshot comes unasked (G5)"
        _, frames = framed(state)
        assert (step, frames[-1]) in self._known, f"{self.name}: a snapshot of {step} is of another rollout (G6, G8)"
        self._snapshotted.add(request)

    def _turn_done(self, done: TurnDone) -> None:
        request = done.request_id
        super()._turn_done(done)
        self._expected.pop(request, None)
        if done.status == "done":
            self._done(request)
        at = self._told_at.get(request)
        if at is None:
            assert done.status == "interrupted", f"{self.name}: nobody says where {request} leads to (G4)"
        else:
            assert at == self.line.at, f"{self.name}: {request} leads to {self.line.at}, and {at} is told (G4)"

    def _done(self, request: str) -> None:
        asked = self.asked[request]
        match asked:
            case WorldResetAsked():
                assert asked.payload.meta["seed"] != BAD_SEED, f"{self.name} begins with nothing (G4)"
                self._moved(request, Line.begun(asked.payload.meta["seed"]))
            case WorldRestoreAsked():
                assert asked.state.kind == "world", f"{self.name} goes on from what is no snapshot (G4)"
                self._moved(request, Line.restored(asked.state).upto(asked.step))
            case RewindAsked():
                self._moved(request, self.line.upto(asked.step))
            case WorldSnapshotAsked():
                assert request in self._snapshotted, f"{self.name}: {request} is done without a snapshot (G4)"
            case StepAsked() | LookAsked():
                pass

    def _moved(self, request: str, line: Line) -> None:
        assert line.at in line.frames, f"{self.name} is to go on from {line.at}, of which nothing is known (G8)"
        self.line = line
        self._known |= set(line.frames.items())
        self._gone = max(self._gone, self._said_before[request])
        self.world.count("sim_moves")

    def _check_reason(self, request: str, reason: str) -> None:
        """Some refusals are right only for some requests."""
        asked, poison = self.asked[request], self.wanted[request].poison
        match reason:
            case "world_error":
                assert poison, f"{self.name}: {request} ends of another's poison (G6)"
            case "not_started" if not isinstance(asked, WorldRestoreAsked):
                assert self.line.at < 0, f"{self.name}: {request} finds nothing at {self.line.at} (G8, G9)"
            case "step_out_of_order":
                explicit = isinstance(asked, StepAsked | LookAsked) and asked.step is not None
                assert explicit, f"{self.name}: {request} finds the stage elsewhere (G8)"
            case _:
                pass

    # -- what reaches the client

    def hand(self, emit: Emit) -> None:
        if emit.content is not None:
            event, _ = self.said[emit.seq - 1]
            assert emit.event is event, f"{self.name} is handed {emit.event}, and said {event} (G7)"
            assert emit.seq > self._gone, f"{self.name} is handed a frame of before it moved (G1)"
        super().hand(emit)


# -- the clients -------------------------------------------------------------------------------------------------------


class WatchedRollout(Watched, RolloutSession):
    def check(self) -> None:
        limits, past = self.limits, self._past
        assert len(self._waiting) <= limits.mailbox_turns, f"{len(self._waiting)} requests wait (G11)"
        assert past is None or past.count <= limits.rollout_actions, f"{past} is kept (G11)"


@dataclass(frozen=True, slots=True)
class Whims:
    """What a dreamer does how often."""

    steps: int = 40
    looks: int = 8
    rewinds: int = 8
    snapshots: int = 6
    restores: int = 4
    resets: int = 3
    cancels: int = 8
    forks: int = 5
    poison: float = 0.0
    full: float = 0.0
    """Chance that there is no room for a fork."""
    lossy: float = 0.0
    """Chance that what is given back never reaches the stage, and nobody hears of it."""


class Dreamer(Client):
    """Dreams, alone or with others whose snapshots it may go on from."""

    pipeline = DREAM.name
    greets = True

    def __init__(
        self,
        world: World,
        desk: Desk,
        name: str,
        manners: Manners,
        whims: Whims,
        dynamics: Dynamics,
        dreamers: list[Dreamer],
    ) -> None:
        super().__init__(world, desk, name, manners)
        self.whims = whims
        self.dynamics = dynamics
        self.dreamers = dreamers
        """Everybody who dreams; one may go on from another's snapshot."""
        dreamers.append(self)
        self.parent: Dreamer | None = None
        self.ends: dict[str, str] = {}
        """How each request ended, as the client heard it."""
        self.snapshots: list[RolloutSnapshotted] = []
        self._at: int | None = None
        """Where its fork begins; None where it has no parent."""
        self._requests = self._twins = 0

    @property
    def line(self) -> Line:
        assert isinstance(self.ledger, DreamLedger)
        return self.ledger.line

    # -- its session

    def make_session(self, slot: int, generation: int) -> tuple[Session, Ledger]:
        key, now, limits = session_key(slot, generation), self.world.now(), self.world.plan.limits
        session_id, ids = f"sess_{self.name}", CountedIds(f"{key:x}.")
        parent, line = self.parent, Line()
        origin = parent.session if parent is not None else None
        at = None
        if parent is not None and isinstance(origin, RolloutSession):
            at = self._fork_point(parent.line.at)
            if origin.fork_refusal(at) is not None:
                self.world.count(f"sim_fork_{origin.fork_refusal(at)}")
                origin = None
        if parent is not None and isinstance(origin, RolloutSession):
            session = origin.forked(session_id, slot, generation, ids, now, at)
            line = parent.line.upto(parent.line.at if at is None else at)
        else:
            self.parent = None
            session = RolloutSession(session_id, slot, generation, limits, ids, now, KEEPER)
        session.__class__ = WatchedRollout
        assert isinstance(session, WatchedRollout)
        ledger = DreamLedger(self.world, key, self.name, line)
        session.watch(self.world, ledger)
        return session, ledger

    def _fork_point(self, at: int) -> int | None:
        return None if self.world.chance(0.5) else at - self.world.random.randrange(6)

    def open(self, seat: Seat, post: Mailbox) -> None:
        parent, self.parent = self.parent, None
        if parent is None:
            super().open(seat, post)
        elif parent.seat is None or parent.session is None:
            raise UnavailableError("", 0.0)
        else:
            self.world.it.fork(parent.seat, seat, post)
            self.world.count("sim_rollout_forks")

    def opened(self) -> None:
        if self.line.at < 0:
            self.reset()

    def learnt(self) -> bool:
        """Whether it knows of a fork that there was no room for; a replica that was lost since made it after all."""
        if self.session is None or self.ledger is None or self.ledger.key not in self.dynamics.orphans:
            return True
        return self.world.laws.homes[self.ledger.key][KEEPER].moves > 0

    # -- what it does

    def acts(self) -> dict[Act, int]:
        whims = self.whims
        return {
            self.step: whims.steps,
            self.look: whims.looks,
            self.rewind: whims.rewinds,
            self.snap: whims.snapshots,
            self.restore: whims.restores,
            self.reset: whims.resets,
            self.cancel: whims.cancels,
            self.fork: whims.forks,
        }

    def _name(self) -> str:
        self._requests += 1
        return f"{self.name}-{self._requests}"

    def _outputs(self) -> frozenset[str]:
        return self.world.random.choice((BOTH, frozenset({"decoder"}), frozenset({KEEPER})))

    def step(self, frames: int | None = None) -> str:
        """Make frames; now and then ask for such as there are, or as cannot be."""
        if self.session is None or self.ledger is None:
            return ""
        if frames is None and self.line.at < 0 and self.world.chance(0.8):
            return self.reset()
        world, request = self.world, self._name()
        count = frames or world.random.randint(1, 7)
        numbers = [world.random.randrange(4) for _ in range(count)]
        if frames is None and world.chance(self.whims.poison):
            numbers[world.random.randrange(count)] = POISON
        step = None
        if frames is None and world.chance(0.3):
            step = self.line.at + 1 - world.random.choice((0, 0, 1, 3, -1)) * count
        outputs = BOTH if frames else self._outputs()
        self.tell(StepAsked(acted(numbers), count, outputs, step, request, due_ms=world.random.choice((0.0, 20.0))))
        return request

    def look(self) -> None:
        if self.session is not None and self.ledger is not None:
            frames = self.world.random.randint(1, 4)
            step = self.line.at + 1 - frames - self.world.random.randrange(-1, 8)
            self.tell(LookAsked(step, self._outputs(), frames, self._name()))

    def rewind(self) -> None:
        if self.session is not None and self.ledger is not None:
            self.tell(RewindAsked(self.line.at - self.world.random.randrange(-1, 8), self._name()))

    def snap(self) -> None:
        self.tell(WorldSnapshotAsked(self._name()))

    def restore(self) -> None:
        """Go on from a snapshot, from somebody else's as well; now and then from what is none, or not quite."""
        shots = [shot for dreamer in self.dreamers for shot in dreamer.snapshots[-4:]]
        if not shots:
            return
        shot = self.world.random.choice(shots)
        state, step = shot.state, shot.step
        if self.world.chance(0.15):
            state = Payload("another world", state.meta, state.body)
            step = self.world.random.choice((0, step))
        elif self.world.chance(0.1):
            step += self.world.random.choice((-1, 1))
        self.tell(WorldRestoreAsked(state, step, self._name()))

    def reset(self) -> str:
        seed, request = BAD_SEED if self.world.chance(0.1) else self.world.random.randrange(3), self._name()
        self.tell(WorldResetAsked(Payload("reset", {"seed": seed}), request))
        return request

    def cancel(self) -> None:
        self.tell(CancelAsked())

    def fork(self) -> None:
        """Somebody goes on from here, or from a little before, in a session of its own."""
        if self.session is None or len(self.dreamers) >= MOST_DREAMERS:
            return
        self._twins += 1
        name = f"{self.name}.{self._twins}"
        twin = Dreamer(self.world, self.desk, name, self.manners, self.whims, self.dynamics, self.dreamers)
        twin.parent = self
        twin.want()
        twin.live()

    def begin(self) -> None:
        """Be somewhere, if it is nowhere yet."""
        if self.session is not None and self.ledger is not None and self.line.at < 0:
            self.tell(WorldResetAsked(Payload("reset", {"seed": 1}), self._name()))

    # -- what comes

    def got(self, event: Event) -> None:
        match event:
            case TurnSpoke(request):
                assert self.forgot or request not in self.ends, f"{self.name}: {request} speaks after its end (G1, G4)"
            case TurnDone(request, _, status):
                assert self.forgot or request not in self.ends, f"{self.name}: {request} ends twice (G4, G7)"
                self.ends[request] = status
                assert status not in CUT_TURN or self.ledger is None or request in self.ledger.cut
            case RolloutSnapshotted():
                self.snapshots.append(event)
            case _:
                pass
