"""The server's edge and its clients, simulated. The outbox of each connection, the switch between attachments and the
session's seat are the server's own; what waits for a socket or for a future there waits for the virtual clock here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import cast

from simlaws import Ledger, bounded
from simworld import MS, US, S, World

from omni_live.protocols.desk import Mailbox
from omni_live.protocols.websocket.outbox import Closing, Outbox
from omni_live.runtime.orchestrator import UnavailableError
from omni_live.server.desk import FrontDesk, Seat, SessionLine
from omni_live.sessions.admission import NOTHING, Admission, Admitted, Amount, Cost, Queued, Refused
from omni_live.sessions.effects import Effect, Emit, SnapshotReady
from omni_live.sessions.events import (
    Event,
    HeartbeatAcked,
    InputAcked,
    InputMissing,
    ResyncRequired,
    SessionCreated,
    SessionReplaced,
    SessionResumed,
)
from omni_live.sessions.inputs import (
    Attached,
    ClientInput,
    CloseAsked,
    Detached,
    EventAcked,
    Heartbeat,
    Input,
    Sequenced,
)
from omni_live.sessions.session import Session
from omni_live.sessions.stamp import Stamp, session_key


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a client's line takes frames."""

    least_ns: int = 10 * US
    most_ns: int = 3 * MS
    burst: int = 8
    """Frames that go at once."""


FAST = Pace()
SLOW = Pace(2 * MS, 120 * MS, 2)
STUCK = Pace(20 * MS, 900 * MS, 1)
"""Takes a frame now and then: its outbox fills up."""


@dataclass(frozen=True, slots=True)
class Manners:
    """How a client behaves."""

    paces: tuple[Pace, ...] = (FAST,)
    numbered: float = 0.5
    """Chance that it numbers its input."""
    skips: float = 0.0
    """Chance that a numbered input is lost on the way."""
    forgets: float = 0.0
    """Chance that it comes back without the last frames that it had."""
    patience_ns: int = 10 * S
    """It waits no longer for a place."""
    restless_ns: int = 150 * MS
    """It does something about twice as often."""
    drops: int = 6
    returns: int = 12
    closes: int = 2
    """Weights of what it does with its line and its session."""


class Link:
    """One transport: the server's outbox, and a line that takes frames in its own time."""

    def __init__(self, client: Client, attachment: int) -> None:
        self.client = client
        self.attachment = attachment
        self.open = True
        self.greeted = not client.greets
        """Whoever is greeted says nothing before: its old token is good until it is heard."""
        self.line: SessionLine | None = None
        self.limit = client.world.plan.limits.outbox_bytes
        self.outbox = Outbox(self.limit, client.desk.metrics)
        self.outbox.wake = self._wake
        self.pace = client.world.random.choice(client.manners.paces)
        self._due = False

    def tell(self, told: Input) -> None:
        if self.open and self.line is not None:
            self.line.tell(told)

    def _wake(self) -> None:
        assert self.outbox.nbytes <= self.limit, f"an outbox keeps {self.outbox.nbytes} bytes (G11)"
        if self.open and not self._due:
            self._due = True
            self.client.world.after(self.pace.least_ns, self.pace.most_ns, self._writable)

    def _writable(self) -> None:
        self._due = False
        for _ in range(self.pace.burst):
            if not self.open:
                return
            emit = self.outbox.next()
            if emit is not None:
                # As the connection does between the frames of one event.
                if self.outbox.admits(emit.content):
                    self.client.hand(self, emit)
            elif self.outbox.closing is not None:
                self._closed(self.outbox.closing)
                return
            else:
                return
        self._wake()

    def _closed(self, closing: Closing) -> None:
        """The server ended the connection."""
        self.end()
        self.client.closed(self, closing)

    def end(self) -> None:
        """The server knows that the transport is gone."""
        self.open = False
        self.outbox.clear()
        if self.line is not None:
            self.line.tell(Detached(self.line.attachment))


class Meters:
    """What the server counts, in the world's counter."""

    def __init__(self, world: World) -> None:
        self._world = world

    def count(self, name: str, amount: int = 1) -> None:
        self._world.count(name, amount)

    def fences_raised(self, count: int) -> None:
        self._world.count("sim_fences", count)

    def content_handed(self, nbytes: int) -> None:
        self._world.count("sim_content", nbytes)

    def dropped(self, reason: str, count: int = 1) -> None:
        self._world.count(f"sim_dropped_{reason}", count)

    def outbox(self, change: int) -> None:
        self._world.count("sim_outbox", change)

    def connection_lost(self, why: str) -> None:
        self._world.count(f"sim_lost_{why}")


class Post:
    """The orchestrator's mailbox of a session: the seat's, and what is for whoever asked for a snapshot."""

    def __init__(self, seat: Seat, snapshot: Callable[[SnapshotReady], None]) -> None:
        self._seat = seat
        self._snapshot = snapshot

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SnapshotReady):
                self._snapshot(effect)
        self._seat.take(effects)


@dataclass(eq=False)
class Asking:
    """Somebody who waits for a place."""

    cost: Cost
    admitted: Callable[[int], None]
    refused: Callable[[str], None]


class Desk:
    """Opens sessions as admission lets it, and keeps its own account of what is admitted (G2)."""

    def __init__(self, world: World, wait_queue: int, wait_deadline_s: float) -> None:
        self.world = world
        self.orchestrator = world.it
        self.metrics = Meters(world)
        self.caps = world.plan.caps()
        self.admission = Admission(self.caps, wait_queue, wait_deadline_s)
        self._held: dict[int, Cost] = {}
        self._waiting: dict[int, Asking] = {}
        self._residents: dict[Seat, Client] = {}

    def ask(self, pipeline: str, admitted: Callable[[int], None], refused: Callable[[str], None]) -> int:
        """`admitted` gets the place that is returned, which must be given back once; 0 where there is none."""
        asking = Asking(self.world.plan.cost(pipeline), admitted, refused)
        answer = self.admission.ask(asking.cost, self.world.now())
        if isinstance(answer, Refused):
            refused(answer.reason)
            self._check()
            return 0
        place = answer.place
        if isinstance(answer, Queued):
            self._waiting[place] = asking
            self.world.count("sim_queued")
            self.world.post(answer.deadline_ns, lambda: self._lapse(place))
        else:
            self._admit(place, asking)
        self._check()
        return place

    def give_back(self, place: int) -> None:
        if self._waiting.pop(place, None) is None:
            del self._held[place]
        else:
            self.world.count("sim_left_queue")
        self._let_in(self.admission.give_back(place))

    def settle_in(self, seat: Seat, client: Client) -> None:
        self._residents[seat] = client

    def released(self, seat: Seat) -> None:
        """The session is over: its place goes to whoever waits."""
        assert seat in self._residents, f"{seat.session.session_id} is released twice (G3)"
        self._residents.pop(seat).released(seat)
        self.give_back(seat.place)

    def waits(self, place: int) -> bool:
        return place in self._waiting

    def _lapse(self, place: int) -> None:
        late, admitted = self.admission.lapse(self.world.now())
        for gone in late:
            self.world.count("sim_queue_lapsed")
            self._waiting.pop(gone).refused("overloaded")
        assert place not in self._waiting, f"place {place} waits beyond its deadline (G2)"
        self._let_in(admitted)

    def _let_in(self, admitted: list[Admitted]) -> None:
        for one in admitted:
            self._admit(one.place, self._waiting.pop(one.place))
        self._check()

    def _admit(self, place: int, asking: Asking) -> None:
        assert place not in self._held, f"place {place} is given twice (G2)"
        self._held[place] = asking.cost
        # The one who asked is another task: what it does about it comes later, and it may be gone by then.
        self.world.after(0, MS, lambda: asking.admitted(place))

    def _check(self) -> None:
        """Never over a cap, and never under it while the first who waits would fit."""
        whole, own = self._used()
        assert _fits(whole, self.caps.whole), f"{whole} of {self.caps.whole} is admitted (G2)"
        assert whole == self.admission.admitted, f"admission says {self.admission.admitted} of {whole} (G2)"
        for pipeline, used in own.items():
            assert _fits(used, self.caps.for_pipeline(pipeline)), f"{used} of {pipeline} is admitted (G2)"
        first = next(iter(self._waiting.values()), None)
        if first is not None:
            name = first.cost.pipeline
            more = own.get(name, NOTHING).plus(first.cost.amount)
            both = whole.plus(first.cost.amount)
            fits = _fits(more, self.caps.for_pipeline(name)) and _fits(both, self.caps.whole)
            assert not fits, f"{whole} is admitted, and one waits who fits (G2)"
            self.world.count("sim_cap_reached")

    def _used(self) -> tuple[Amount, dict[str, Amount]]:
        whole, own = NOTHING, dict[str, Amount]()
        for cost in self._held.values():
            whole = whole.plus(cost.amount)
            own[cost.pipeline] = own.get(cost.pipeline, NOTHING).plus(cost.amount)
        return whole, own


def _fits(amount: Amount, cap: Amount) -> bool:
    return all(used <= most for used, most in zip(amount, cap, strict=True))


class Watched(Session):
    """What a session of either kind tells its ledger. Comes before the kind among the bases."""

    ledger: Ledger
    world: World

    def watch(self, world: World, ledger: Ledger) -> None:
        self.world, self.ledger = world, ledger

    def handle(self, input: Input, now: int) -> list[Effect]:
        if isinstance(input, Attached):
            self.ledger.seen = input.seen or 0
        try:
            effects = super().handle(input, now)
            bounded(self)
            self.ledger.check()
            self.check()
        except BaseException as error:
            self.world.trouble = error  # its seat would let the session go and tell nobody
            raise
        return effects

    def check(self) -> None:
        """After each input: what the kind keeps has a bound (G11)."""

    def _apply(self, input: Input) -> None:
        self.ledger.apply(input)
        if isinstance(input, Heartbeat) and input.event_id is not None:
            assert int(input.event_id) == self.attachment, f"{self.ledger.name} hears a transport that lost it (G5)"
        super()._apply(input)

    def _emit(self, event: Event, content: Stamp | None = None, nbytes: int = 0) -> None:
        self.ledger.issue(event, content)
        super()._emit(event, content, nbytes)
        assert self._journal.last == len(self.ledger.said), f"{self.ledger.name}: numbers have holes (G7)"

    def _tell(self, event: Event) -> None:
        self.ledger.tell(event)
        super()._tell(event)


Act = Callable[[], object]


class Client:
    """One client and, while it has one, its session. Subclasses say what the client does with it."""

    pipeline = ""
    greets = False
    """Whether its sessions greet each attachment, and hand out tokens that way."""

    def __init__(self, world: World, desk: Desk, name: str, manners: Manners) -> None:
        self.world = world
        self.desk = desk
        self.name = name
        self.manners = manners
        self.session: Session | None = None
        """As the server has it; None where it is released, or there never was one."""
        self.seat: Seat | None = None
        self.link: Link | None = None
        self.ledger: Ledger | None = None
        self.seen = 0
        self.gap_to = 0
        """Numbers up to here may be missing: the server said so."""
        self.token = ""
        self.forgot = False
        """It came back without frames that it had had, and gets them twice."""
        self.leaving = False
        self._unacked: deque[Sequenced] = deque()
        self._sent = 0
        self._attachments = 0
        self._place = 0
        self._asking = False
        self._acts: Sequence[Act] = ()
        self._weights: Sequence[float] = ()

    # -- for subclasses

    def make_session(self, slot: int, generation: int) -> tuple[Session, Ledger]:
        raise NotImplementedError

    def opened(self) -> None:
        """The session is there and attached."""

    def got(self, event: Event) -> None:
        """A frame came."""

    def gap(self) -> None:
        """Frames are gone for good."""

    def snapshot(self, ready: SnapshotReady) -> None:
        """A snapshot is there."""

    def acts(self) -> dict[Act, int]:
        """What it does with its session, each with a weight."""
        raise NotImplementedError

    # -- its life

    def live(self) -> None:
        """Do one thing after the other from now on."""
        manners = self.manners
        acts: dict[Act, int] = {
            self.drop: manners.drops,
            self.come_back: manners.returns,
            self.close: manners.closes,
            self.ack: 8,
            self.beat: 2,
        } | self.acts()
        self._acts, self._weights = tuple(acts), tuple(accumulate(acts.values()))
        self.world.after(0, manners.restless_ns, self._live)

    def leave(self) -> None:
        """Begin nothing new."""
        self.leaving = True
        self.give_up()

    def mend(self) -> None:
        """Have a good line from now on."""
        self.manners = replace(self.manners, paces=(FAST,), skips=0.0, forgets=0.0)
        if self.link is not None:
            self.link.pace = FAST
        if not self.on_line:
            self.come_back()

    def has_everything(self) -> None:
        """Whatever has a number is here, or void."""
        if self.on_line and self.session is not None and self.ledger is not None:
            self.ledger.missing(max(self.seen, self.gap_to) + 1, len(self.ledger.said))

    def quit(self) -> None:
        """Be gone, whatever the server knows of it."""
        if self.link is not None and self.link.open:
            self.link.end()

    def _live(self) -> None:
        if self.leaving:
            return
        if self.link is None:
            self.want()
        else:
            self.world.random.choices(self._acts, cum_weights=self._weights)[0]()
        self.world.after(0, self.manners.restless_ns, self._live)

    # -- opening

    def want(self) -> None:
        """Ask for a session, unless there is one."""
        if not self._asking and self.link is None and not self.leaving:
            self._asking = True
            self._place = self.desk.ask(self.pipeline, self._admitted, self._refused)
            self.world.after(0, self.manners.patience_ns, self._lose_patience(self._place))

    def _lose_patience(self, place: int) -> Callable[[], None]:
        def lose() -> None:
            if self._asking and self._place == place and self.desk.waits(place):
                self.give_up()

        return lose

    def give_up(self) -> None:
        """Wait no longer."""
        if self._asking and self.desk.waits(self._place):
            self._asking = False
            self.desk.give_back(self._place)

    def _refused(self, reason: str) -> None:
        self.world.count(f"sim_refused_{reason}")
        self._asking = False

    def _admitted(self, place: int) -> None:
        if not self._asking or self.leaving:
            self._asking = False
            self.desk.give_back(place)  # it went away while it was being let in
            return
        self._asking = False
        slot = self.world.slots.take()
        assert slot is not None, "admission let in more than there are slots (G2)"
        session, ledger = self.make_session(*slot)
        key = session_key(*slot)
        self.world.laws.ledgers[key] = ledger
        spec = self.world.plan.pipeline(self.pipeline)
        seat = Seat(session, spec, self.name, place, cast(FrontDesk, self.desk))
        try:
            self.open(seat, Post(seat, self.snapshot))
        except UnavailableError:
            self.world.count("sim_unavailable")
            del self.world.laws.ledgers[key]
            self.world.slots.free(*slot)
            self.desk.give_back(place)
            return
        self.desk.settle_in(seat, self)
        self._enter(session, ledger, seat)

    def open(self, seat: Seat, post: Mailbox) -> None:
        """Raises UnavailableError."""
        self.world.it.open(seat, self.pipeline, post)

    def _enter(self, session: Session, ledger: Ledger, seat: Seat) -> None:
        self.session, self.ledger, self.seat = session, ledger, seat
        self.seen = self.gap_to = self._sent = 0
        self.token = ""
        self.forgot = False
        self._unacked.clear()
        ledger.sent = [] if self.world.chance(self.manners.numbered) else None
        self._attachments = 1
        self._attach(Attached(1))
        self.opened()

    def _attach(self, told: Attached) -> None:
        assert self.seat is not None
        link = self.link = Link(self, told.attachment)
        self.seat.switch.attach(link.outbox)
        self.world.it.tell(self.seat, told)
        link.line = SessionLine(self.seat, told.attachment, cast(FrontDesk, self.desk))

    # -- the transport

    def hand(self, link: Link, emit: Emit) -> None:
        """The line took a frame."""
        assert self.ledger is not None
        if link is not self.link:
            assert isinstance(emit.event, SessionReplaced), f"{self.name} hears {emit.event} on a line it left (G1)"
            return
        self.ledger.hand(emit)
        if emit.seq:
            assert emit.seq > self.seen, f"{self.name} got {emit.seq} after {self.seen} (G7)"
            self.ledger.missing(max(self.seen, self.gap_to) + 1, emit.seq - 1)
            self.seen = emit.seq
        match emit.event:
            case SessionCreated(resume_token=token):
                self.token = token
                self._greeted(link, 0)
            case SessionResumed(resume_token=token, input_seq=taken):
                self.token = token
                self._greeted(link, taken)
            case ResyncRequired(first, last):
                assert first == self.seen + 1, f"{self.name} has seen {self.seen}, and {first} is said to miss (G7)"
                self.gap_to = last
                self.gap()
            case InputAcked(taken):
                self._forget(taken)
            case InputMissing(taken):
                self._send_again(taken)
            case HeartbeatAcked():
                pass
            case event:
                self.got(event)

    def closed(self, link: Link, closing: Closing) -> None:
        """The server ended the connection; of a slow client only that."""
        if link is self.link and closing.reason != "slow_consumer":
            assert self.session is None, f"{self.name} is told {closing}, and its session lives on"
            self.link = None

    def tell(self, told: ClientInput) -> None:
        """Send something; what a broken line loses is sent again, if it has a number."""
        link, ledger = self.link, self.ledger
        if link is None or ledger is None:
            return
        if ledger.sent is None:
            if link.greeted:
                link.tell(told)
            return
        self._sent += 1
        sequenced = Sequenced(self._sent, told)
        ledger.sent.append(told)
        self._unacked.append(sequenced)
        if link.greeted and not self.world.chance(self.manners.skips):
            link.tell(sequenced)

    def _greeted(self, link: Link, taken: int) -> None:
        link.greeted = True
        self._send_again(taken)

    def _forget(self, taken: int) -> None:
        assert taken <= self._sent, f"{self.name} sent {self._sent} inputs, and {taken} were taken (G12)"
        while self._unacked and self._unacked[0].seq <= taken:
            self._unacked.popleft()

    def _send_again(self, taken: int) -> None:
        self._forget(taken)
        assert self.ledger is not None
        if self.ledger.sent is None or self.link is None:
            return
        first = self._unacked[0].seq if self._unacked else self._sent + 1
        assert first == taken + 1, f"{self.name} is asked for input {taken + 1} again and keeps {first} on (G12)"
        for sequenced in tuple(self._unacked):
            self.link.tell(sequenced)

    def ack(self) -> None:
        if self.link is not None and self.link.greeted:
            self.link.tell(EventAcked(self.seen))

    def beat(self) -> None:
        """Say that it is there; a transport that lost the session must not be heard."""
        if self.link is not None and self.link.greeted:
            self.link.tell(Heartbeat(str(self.link.attachment)))

    def close(self) -> None:
        self.tell(CloseAsked())

    def drop(self) -> None:
        """The transport breaks; the server notices some time later."""
        link = self.link
        if link is not None and link.open:
            self.world.tell(f"{self.name} loses its line")
            link.open = False
            self.world.after(MS, 200 * MS, link.end)

    def come_back(self) -> None:
        """Attach again: a resume after a break, or a take-over of a transport that is still there."""
        session, seat, old = self.session, self.seat, self.link
        if old is None:
            return
        if session is None or seat is None or (self.greets and not self.token):
            if not old.open:
                self.link = None  # its session is over, or it never heard how to come back to it
            return
        token = self.token or session.token
        code = session.resumable(token)
        assert code is None, f"{self.name} cannot resume: {code} (G7)"
        if self.world.chance(self.manners.forgets):
            self.forgot = True
            self.seen = max(0, self.seen - self.world.random.randrange(4))
        self.world.tell(f"{self.name} comes back, has seen {self.seen}")
        self.world.count("sim_resumes")
        self._attachments += 1
        self._attach(Attached(self._attachments, token, self.seen, self._sent))
        if not self.greets and self.ledger is not None and self.ledger.sent is not None:
            for sequenced in tuple(self._unacked):  # nobody says what was taken: it sends everything again
                assert self.link is not None
                self.link.tell(sequenced)
        self.world.after(0, 300 * MS, lambda: self._still_there(old))

    def _still_there(self, old: Link) -> None:
        """A transport that was taken over may say something yet."""
        if old.open and old is not self.link:
            old.tell(Heartbeat(str(old.attachment)))

    @property
    def on_line(self) -> bool:
        return self.link is not None and self.link.open

    def released(self, seat: Seat) -> None:
        """The server has let the session go."""
        if self.seat is seat:
            self.session = None
