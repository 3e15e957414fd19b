"""The server's edge and its clients, simulated: admission, attachments, outboxes that lag, clients that misbehave."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from simworld import MS, US, S, World

from omni_live.runtime.orchestrator import UnavailableError
from omni_live.sessions.admission import Admission, Admitted, Cost, Queued, Refused
from omni_live.sessions.effects import Effect, Emit, Hold, Release, Replace, Unhold
from omni_live.sessions.events import Event
from omni_live.sessions.inputs import Attached, Detached, EventAcked, Input
from omni_live.sessions.session import Session
from omni_live.sessions.stamp import SessionKey, Stamp, session_key


@dataclass(frozen=True, slots=True)
class Frame:
    """What the client got, with what only the simulation knows about it."""

    at_ns: int
    event: Event
    seq: int
    content: Stamp | None


class Connection:
    """One transport: frames wait in an outbox and go out one by one; content is looked at once more as it goes."""

    def __init__(self, world: World, hand: Callable[[Frame], None]) -> None:
        self._world = world
        self._hand = hand
        self._outbox: deque[Emit] = deque()
        self._sending = False
        self.held = False
        self.open = True

    def put(self, emit: Emit) -> None:
        self._outbox.append(emit)
        self.go()

    def go(self) -> None:
        if self.open and not self._sending and self._outbox:
            self._sending = True
            self._world.after(10 * US, 3 * MS, self._sent)

    def _sent(self) -> None:
        self._sending = False
        while self.open and self._outbox:
            emit = self._outbox[0]
            if emit.content is not None and not self._world.admits(emit.content):
                self._outbox.popleft()
                self._world.count("sim_outbox_voided")
                continue
            if emit.content is not None and self.held:
                return
            self._outbox.popleft()
            self._hand(Frame(self._world.now(), emit.event, emit.seq, emit.content))
            break
        self.go()


@dataclass(eq=False)
class Door:
    """A session's mailbox: routes its effects to the attachment that they are for."""

    world: World
    connection: Connection | None = None
    following: Connection | None = None
    """Takes over at the next Replace."""
    released: list[str] = field(default_factory=list)
    on_release: Callable[[], None] = lambda: None
    emitted: list[Emit] = field(default_factory=list)

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Emit():
                    stale = effect.content is not None and not self.world.admits(effect.content)
                    assert not stale, f"{effect} is content of a fenced turn (G1)"
                    self.emitted.append(effect)
                    if self.connection is not None:
                        self.connection.put(effect)
                case Hold() | Unhold():
                    if self.connection is not None:
                        self.connection.held = isinstance(effect, Hold)
                        self.connection.go()
                case Replace():
                    self.connection, self.following = self.following, None
                case Release(reason):
                    self.released.append(reason)
                    self.on_release()
                case _:
                    raise AssertionError(f"{effect} is not for a mailbox")


class Desk:
    """Opens sessions as admission lets it."""

    def __init__(self, world: World, pipeline: str, wait_queue: int = 64, wait_deadline_s: float = 10) -> None:
        self.world = world
        self.pipeline = pipeline
        self.admission = Admission(world.plan.caps(), wait_queue, wait_deadline_s)
        self.most = 0
        self._waiting: dict[int, Callable[[int], None]] = {}

    def ask(self, admitted: Callable[[int], None], refused: Callable[[str], None]) -> None:
        """`admitted` gets the place; it must give it back once."""
        match self.admission.ask(Cost(self.pipeline), self.world.now()):
            case Admitted(place):
                admitted(place)
            case Queued(place, deadline_ns):
                self._waiting[place] = admitted
                self.world.call_at(deadline_ns, lambda: self._lapse(place, refused))
            case Refused(reason):
                refused(reason)
        self.most = max(self.most, self.admission.admitted.sessions)

    def give_back(self, place: int) -> None:
        self._let_in(self.admission.give_back(place))

    def _lapse(self, place: int, refused: Callable[[str], None]) -> None:
        late, admitted = self.admission.lapse(self.world.now())
        if place in late:
            del self._waiting[place]
            refused("overloaded")
        self._let_in(admitted)

    def _let_in(self, admitted: list[Admitted]) -> None:
        for one in admitted:
            self._waiting.pop(one.place)(one.place)


class Client:
    """One client and, while it has one, its session. Subclasses say what the client does with it."""

    def __init__(self, world: World, desk: Desk, name: str) -> None:
        self.world = world
        self.desk = desk
        self.name = name
        self.session: Session | None = None
        self.door: Door | None = None
        self.frames: list[Frame] = []
        self.seen = 0
        self.leaving = False
        self.sessions: list[tuple[SessionKey, Door]] = []
        """Every session it ever had."""
        self._attachments = 0
        self._asking = False

    # -- for subclasses

    def make_session(self, slot: int, generation: int) -> Session:
        raise NotImplementedError

    def opened(self) -> None:
        """The session is there and attached."""

    def got(self, frame: Frame) -> None:
        """A frame came."""

    # -- opening

    def want(self) -> None:
        """Ask for a session, unless there is one."""
        if not self._asking and self.session is None and not self.leaving:
            self._asking = True
            self.desk.ask(self._admitted, self._refused)

    def _refused(self, reason: str) -> None:
        self.world.count(f"sim_refused_{reason}")
        self._asking = False

    def _admitted(self, place: int) -> None:
        self._asking = False
        slot = self.world.slots.take()
        assert slot is not None, "admission let in more than there are slots"
        session = self.make_session(*slot)
        door = Door(self.world)
        try:
            self.world.it.open(session, self.desk.pipeline, door)
        except UnavailableError:
            self.world.count("sim_unavailable")
            self.world.slots.free(*slot)
            self.desk.give_back(place)
            return
        key = session_key(*slot)
        self.session, self.door, self.frames, self.seen = session, door, [], 0
        self.sessions.append((key, door))
        door.on_release = lambda: self._released(session, place)
        self._attachments = 1
        door.connection = self._connection()
        self.tell(Attached(1))
        self.opened()

    def _released(self, session: Session, place: int) -> None:
        if self.session is session:
            self.session = None
        # A door hears of the release inside the orchestrator's call: what follows is another day's work.
        self.world.after(0, MS, lambda: self.desk.give_back(place))

    # -- the transport

    def _connection(self) -> Connection:
        connection = Connection(self.world, lambda frame: self._hand(connection, frame))
        return connection

    def _hand(self, connection: Connection, frame: Frame) -> None:
        if self.door is None or connection is not self.door.connection:
            return  # what an old transport still delivers is nobody's any more
        if frame.seq:
            assert frame.seq > self.seen, f"{self.name} got {frame.seq} after {self.seen} (G7)"
            if frame.seq > self.seen + 1:
                self._check_voids(range(self.seen + 1, frame.seq))
            self.seen = frame.seq
        if frame.content is not None:
            assert self.world.admits(frame.content), f"{self.name} got content of a fenced turn (G1)"
        self.frames.append(frame)
        self.got(frame)

    def _check_voids(self, missing: range) -> None:
        """Numbers may only be missing where their content is fenced."""
        assert self.door is not None
        emitted = {emit.seq: emit for emit in self.door.emitted if emit.seq}
        for seq in missing:
            emit = emitted.get(seq)
            # While nobody was attached nothing was emitted: such a number is in no mailbox, and the journal voided it.
            fenced = emit is None or (emit.content is not None and not self.world.admits(emit.content))
            assert fenced, f"{self.name} misses frame {seq}, which is not void: {emit} (G7)"

    def tell(self, told: Input) -> None:
        if self.session is not None:
            self.world.it.tell(self.session, told)

    def ack(self) -> None:
        self.tell(EventAcked(self.seen))

    def drop(self) -> None:
        """The transport breaks; the server notices some time later."""
        if self.door is None or self.door.connection is None:
            return
        connection, attachment, door = self.door.connection, self._attachments, self.door
        connection.open = False

        def noticed() -> None:
            if door.connection is connection:
                door.connection = None
                self.tell(Detached(attachment))

        self.world.after(MS, 200 * MS, noticed)

    def come_back(self) -> None:
        """Attach again: a resume after a break, or a take-over of a transport that is still there."""
        session, door = self.session, self.door
        if session is None or door is None or session.resumable(session.token) is not None:
            return
        self._attachments += 1
        if door.connection is None:
            door.connection = self._connection()
        else:
            door.connection.open = False
            door.following = self._connection()
        self.tell(Attached(self._attachments, session.token, self.seen))


def at_rest(world: World) -> None:
    """Nothing is left of any session: not in the server, not in a worker (G3)."""
    assert world.it.sessions == 0
    assert world.slots.taken == 0
    assert not world.it._turns, f"turns are left: {list(world.it._turns)}"
    assert not world.it._vacancies
    for worker in world.live():
        for stage in worker.stages.values():
            what = f"worker {worker.worker} stage {stage.name}"
            assert not stage.hosts, f"{what} has sessions left: {list(stage.hosts)}"
            assert not stage.turns, f"{what} has turns left: {list(stage.turns)}"
            assert not stage.finished, f"{what} keeps output of {list(stage.finished)}"
            assert not stage.early, f"{what} keeps early chunks of {list(stage.early)}"


@dataclass
class Faults:
    """Breaks workers now and then until `until_ns`, then mends them."""

    world: World
    until_ns: int
    kinds: tuple[str, ...] = ("die", "stall", "lag", "repeat")
    every_ns: int = S // 2

    def start(self) -> None:
        self.world.after(0, self.every_ns, self._strike)

    def _strike(self) -> None:
        world = self.world
        if world.now() >= self.until_ns:
            for worker in world.live():
                worker.lag(1)
                worker.repeat(0)
            return
        live = world.live()
        if live and self.kinds:
            worker = world.random.choice(live)
            match world.random.choice(self.kinds):
                case "die":
                    worker.die()
                case "stall":
                    worker.stall(3 * S)
                case "lag":
                    worker.lag(world.random.uniform(1, 40))
                case "repeat":
                    worker.repeat(0.2)
        world.after(0, self.every_ns, self._strike)
