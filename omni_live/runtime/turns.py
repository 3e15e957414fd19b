"""A stage's side of one turn, as its engine sees it: input with credit, output with room."""

from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from omni_live.connectors.contract import ArenaFull, ArenaUnavailable, Ticket, TicketInvalid
from omni_live.engines.contract import TurnError
from omni_live.runtime.outbox import CONTROL, MEDIA, Outbox
from omni_live.runtime.ports import CLIENT, End, Opening, Route
from omni_live.runtime.wire import (
    INLINE_BYTES,
    SERVER,
    Body,
    Chunk,
    Credit,
    Ended,
    Inline,
    OpenTurn,
    Spoke,
    inline,
)
from omni_live.sessions.inputs import Outcome
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.stamp import SessionKey, Stamp

TurnKey = tuple[int, int, int, int]
"""Row, generation, epoch, turn: a stamp without what differs between its chunks."""

_UNBOUNDED = 2**31
"""The room of a whole edge, which keeps what it is given; its bytes are bounded instead."""


class Life(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    """Its engine is done with it; outputs may still be on their way."""
    OVER = "over"


# Class attributes of an enum cost a look-up through its metaclass; these are asked for several times in a turn.
_RUNNING: Final = Life.RUNNING
_FINISHED: Final = Life.FINISHED
_OVER: Final = Life.OVER
_DONE: Final = Outcome.DONE
_FAILED: Final = Outcome.FAILED
_INCOMPLETE: Final = Outcome.INCOMPLETE


class Handed(NamedTuple):
    """A unit of work between two stages of one worker, by reference."""

    payload: Payload | None
    last: bool
    output: "Output"
    """Where it comes from, and where its credit goes."""
    outcome: Outcome = Outcome.DONE
    reason: str = ""
    through: tuple[End, ...] = ()


Item = Chunk | Handed
"""A unit of work that arrives."""


class Floor(Protocol):
    """What a turn needs of the runner that made it."""

    outbox: Outbox

    def open_here(self, message: OpenTurn) -> None:
        """Open a receiver that is a stage of the same worker."""

    def hand(self, receiver: str, stamp: Stamp, item: Handed) -> None:
        """Bring a unit of work to a stage of the same worker."""

    def has_room(self, turn: "StageTurn") -> None:
        """A turn that could not emit can."""

    def lingers(self, turn: "StageTurn") -> None:
        """The engine is done with it, but output is still on its way."""

    def settled(self, turn: "StageTurn") -> None:
        """Nothing of a finished turn is under way from here any more."""


class Output:
    """A turn's way to one receiver.

    Payloads wait in `_queue`, in order, while the receiver gives no credit, while a whole edge waits for `forward`,
    and while the arena has no room for the next one.
    """

    __slots__ = (
        "_batch",
        "_credits",
        "_kept",
        "_kept_cap",
        "_opening",
        "_queue",
        "_turn",
        "_unsent",
        "held",
        "is_local",
        "is_settled",
        "receiver",
        "room",
        "window",
        "worker",
    )

    def __init__(self, turn: "StageTurn", route: Route, is_local: bool, kept_cap: int) -> None:
        self.receiver = route.receiver
        self.worker: int = route.worker
        self.window = route.credits if route.credits > 0 else 1
        self.held = route.whole
        self.is_local = is_local
        self._turn = turn
        self._credits = self.window
        self._queue: deque[tuple[Stamp, Payload]] | tuple[()] = ()
        self.room = _UNBOUNDED if route.whole else self.window
        """Chunks that may be emitted now."""
        self._kept = 0
        self._kept_cap = kept_cap
        self.is_settled = False
        """True once the receiver was told that this was all."""
        self._opening: OpenTurn | None = None
        self._unsent: Chunk | Spoke | None = None
        self._batch = -1
        """The outbox's batch in which these two were said."""

    def open(self, ours: OpenTurn, opening: Opening) -> None:
        """Open the receiver's side. The first chunk goes along, where it is made before this has left."""
        after, stage_index, routes = opening
        slot, generation, epoch, turn, _, _, deadline_ns = ours.stamp
        stamp = Stamp._make((slot, generation, epoch, turn, stage_index, 0, deadline_ns))
        theirs = OpenTurn(after, self.receiver, stamp, ours.params, routes, 1)
        if self.is_local:
            self._turn.floor.open_here(theirs)
            return
        outbox = self._turn.outbox
        outbox.say(self.worker, theirs)
        self._opening = theirs
        self._batch = outbox.batch

    def emit(self, stamp: Stamp, payload: Payload) -> None:
        self.room -= 1
        if self.held or self._queue or not self._send(stamp, payload):
            self._keep(stamp, payload)

    def give(self, units: int) -> None:
        """The receiver took that many."""
        units = min(units, self.window - self._credits)
        starved = self.room <= 0
        self._credits += units
        self.room += units
        if self._queue:
            self.pump()
        if starved and units:
            self._turn.floor.has_room(self._turn)

    def forward(self, route: Route) -> None:
        """The receiver of a whole edge is there: send what was kept."""
        self.worker = route.worker
        self.held = False
        self.room = self._credits - len(self._queue)
        self.pump()

    def pump(self) -> None:
        """Send what waits, as far as credit and arena allow."""
        if self.held or self._turn.life is _OVER:
            return
        while self._queue and self._credits > 0:
            stamp, payload = self._queue[0]
            if not self._send(stamp, payload):
                return
            self._queue.popleft()
            self._kept -= payload.nbytes
        self._end()

    def drop(self) -> None:
        self._queue = ()

    def break_off(self, code: str) -> None:
        """What was promised to the receiver will not come: its turn cannot end well."""
        turn = self._turn
        if self.is_settled or self.held or self.receiver == CLIENT:
            return
        if self.is_local:
            turn.floor.hand(self.receiver, turn.stamp, Handed(None, True, self, Outcome.FAILED, code))
        else:
            chunk = Chunk(turn.stage, self.receiver, turn.stamp, None, False, True, Outcome.FAILED, code)
            turn.outbox.say(self.worker, chunk)

    # -- inside

    def _send(self, stamp: Stamp, payload: Payload) -> bool:
        """False where the arena has no room for it now."""
        turn = self._turn
        if self.is_local:
            self._credits -= 1
            turn.floor.hand(self.receiver, stamp, Handed(turn.own(payload), False, self))
            return True
        outbox = turn.outbox
        body: Body
        if (len(payload.body) if type(payload.body) is bytes else payload.nbytes) <= INLINE_BYTES:
            body = inline(payload)
        else:
            try:
                body = turn.lent(self.receiver, self.worker, payload) or outbox.put(
                    turn.stage, self.receiver, stamp, self.worker, payload
                )
            except ArenaFull:
                outbox.counts["arena_waits"] += 1
                return False
            except ArenaUnavailable as error:
                raise TurnError(turn, error.code) from error
        self._credits -= 1
        if self.receiver == CLIENT:
            self._unsent = spoke = Spoke(turn.stage, stamp, body)
            outbox.say(MEDIA, spoke)
            self._batch = outbox.batch
        else:
            self._hand_on(Chunk(turn.stage, self.receiver, stamp, body, self._credits <= self.window // 2))
        return True

    def _hand_on(self, chunk: Chunk) -> None:
        outbox = self._turn.outbox
        opening, self._opening = self._opening, None
        if opening is not None and self._batch == outbox.batch:
            opening.first = chunk
        else:
            outbox.say(self.worker, chunk)
        self._unsent = chunk
        self._batch = outbox.batch

    def _keep(self, stamp: Stamp, payload: Payload) -> None:
        self._kept += payload.nbytes
        if self._kept > self._kept_cap:
            raise TurnError(self._turn, "resource_exhausted")
        if isinstance(self._queue, tuple):
            self._queue = deque()
        self._queue.append((stamp, self._turn.own(payload)))

    def _end(self) -> None:
        """Tell the receiver that this was all, in the last chunk where that has not left yet."""
        turn = self._turn
        if turn.life is not _FINISHED or self._queue or self.is_settled:
            return
        self.is_settled = True
        turn.unsettled -= 1
        outcome, reason = turn.final
        through: tuple[End, ...] = ()
        if turn.carrier is self:
            through = (*turn.through, End(turn.outbox.worker, turn.stage, outcome, reason))
        unsent = self._unsent if self._batch == turn.outbox.batch else None
        self._unsent = None
        if self.is_local:
            turn.floor.hand(self.receiver, turn.stamp, Handed(None, True, self, outcome, reason, through))
        elif self.receiver == CLIENT:
            if isinstance(unsent, Spoke):
                unsent.outcome, unsent.reason, unsent.through = outcome, reason, turn.through
                turn.is_reported = True
            else:
                turn.end(outcome, reason)
        elif isinstance(unsent, Chunk):
            unsent.last, unsent.outcome, unsent.reason, unsent.through = True, outcome, reason, through
        else:
            self._hand_on(Chunk(turn.stage, self.receiver, turn.stamp, None, False, True, outcome, reason, through))
        if not turn.unsettled:
            turn.floor.settled(turn)


class StageTurn:
    """See engines.contract.Turn. Made by the runner, which sees to it that the server learns of its end."""

    __slots__ = (
        "_batch",
        "_borrowed",
        "_credit",
        "_inbox",
        "_inputs",
        "_opener",
        "_owed",
        "_upstream",
        "_view",
        "carrier",
        "final",
        "floor",
        "has_client",
        "is_reported",
        "key",
        "life",
        "outbox",
        "outputs",
        "params",
        "seq",
        "session",
        "since_ns",
        "stage",
        "stamp",
        "through",
        "unsettled",
    )

    def __init__(
        self,
        stage: str,
        stamp: Stamp,
        key: TurnKey,
        session: SessionKey,
        params: Mapping[str, Scalar],
        inputs: int,
        opener: int,
        floor: Floor,
    ) -> None:
        self.stage = stage
        self.stamp = stamp
        self.key = key
        self.session = session
        self.params = params
        self.floor = floor
        self.outbox = floor.outbox
        self.outputs: list[Output] = []
        self.unsettled = 0
        """Outputs whose receiver was not told yet that this was all."""
        self.has_client = False
        self.carrier: Output | None = None
        """The output whose receiver takes the report of this turn's end along."""
        self.final = (_DONE, "")
        """How the engine finished it."""
        self.is_reported = False
        """True once the server was told of its end from here."""
        self.through: tuple[End, ...] = ()
        """Ends of earlier stages that go with ours."""
        self.life: Life = _RUNNING
        self.seq = 0
        self.since_ns = 0
        """When it finished; what nobody forwards for too long is dropped."""
        self._inputs = inputs
        self._opener = opener
        """The worker that opened it: SERVER, or its one producer's."""
        self._inbox: list[tuple[Item, int]] = []
        """Units of work, each with the worker it came from (SERVER: the client's input). Credits keep it short."""
        self._owed: dict[tuple[int, str], int] = {}
        """(worker, stage) of each remote producer under way, and the credit not given back to it yet."""
        self._borrowed: tuple[int, Ticket] | None = None
        self._view: bytes | bytearray | memoryview = b""
        """The borrowed body, as the engine has it."""
        self._credit: Credit | None = None
        """What was given back last, in the outbox's batch `_batch`."""
        self._batch = -1
        self._upstream = (_DONE, "")

    # -- the engine's side

    def take(self) -> Payload | None:
        if self._borrowed is not None:
            self._let_go()
        if not self._inbox:
            return None
        item, source = self._inbox.pop(0)
        if isinstance(item, Handed):
            item.output.give(1)
            return item.payload
        if self._owed:
            self._owe(item, source)
        body = item.body
        if isinstance(body, Inline):
            return Payload(body.kind, body.meta, body.body, body.arrays)
        return self._open(body, source)

    def waiting(self) -> int:
        return len(self._inbox)

    def exhausted(self) -> bool:
        return self._inputs <= 0 and not self._inbox

    def room(self) -> int:
        least = _UNBOUNDED
        for output in self.outputs:
            least = min(least, output.room)
        return least

    def emit(self, payload: Payload) -> None:
        if self.life is not _RUNNING:
            return
        outputs = self.outputs
        for output in outputs:
            if output.room <= 0:
                raise TurnError(self)
        stamp = self.stamp
        if self.seq:
            slot, generation, epoch, turn, stage, _, deadline_ns = stamp
            stamp = Stamp._make((slot, generation, epoch, turn, stage, self.seq, deadline_ns))
        self.seq += 1
        for output in outputs:
            output.emit(stamp, payload)

    def finish(self, outcome: Outcome = Outcome.DONE, reason: str = "") -> None:
        if self.life is not _RUNNING:
            return
        if outcome is _DONE and self._upstream[0] is _INCOMPLETE:
            outcome, reason = self._upstream
        self.life = _FINISHED
        self.final = (outcome, reason)
        if self._borrowed is not None or self._inbox:
            self._discard_input()
        if outcome is _FAILED:
            # Receivers are not told: they wait for the abort, so that none of them can call its part done.
            self.void()
            self.end(outcome, reason)
            self.floor.settled(self)
            return
        if not self.has_client:
            # Whatever waits for a whole edge waits for the report, so that one goes at once.
            self.carrier = self.outputs[0] if self.outputs and not self.awaits_forward else None
            if self.carrier is None:
                self.end(outcome, reason)
        for output in self.outputs:
            output.pump()
        if not self.outputs:
            self.floor.settled(self)
        elif self.unsettled:
            self.floor.lingers(self)

    def upstream(self) -> tuple[Outcome, str]:
        return self._upstream

    # -- the runner's side

    def send_to(self, output: Output) -> None:
        """Add a receiver; before the engine sees the turn."""
        self.outputs.append(output)
        self.unsettled += 1
        if output.receiver == CLIENT:
            self.has_client = True

    @property
    def awaits_forward(self) -> bool:
        for output in self.outputs:  # noqa: SIM110 - a generator costs more than the rest of `finish`
            if output.held:
                return True
        return False

    def arrived(self, item: Item, source: int) -> None:
        """A unit of work from the worker `source`."""
        if isinstance(item, Handed):
            if item.payload is not None:
                self._inbox.append((item, source))
        else:
            if item.body is not None:
                self._inbox.append((item, source))
            if source != SERVER:
                if not item.last:
                    self._owed.setdefault((source, item.sender), 0)
                elif self._owed:
                    self._owed.pop((source, item.sender), None)  # it needs no credit any more
        if item.last:
            self._inputs -= 1
            self.through += item.through
            if item.outcome is _INCOMPLETE and self._upstream[0] is _DONE:
                self._upstream = (item.outcome, item.reason)

    def awaits(self, worker: int) -> bool:
        """True where that worker is known to produce input and has not said last."""
        if self._opener == worker and self._inputs > 0:
            return True
        return any(producer == worker for producer, _ in self._owed)

    def sends_to(self, worker: int) -> bool:
        """True where output is still to go there. A whole edge that waits may yet be sent to another worker."""
        return any(
            output.worker == worker and not (output.is_settled or output.is_local or output.held)
            for output in self.outputs
        )

    def own(self, payload: Payload) -> Payload:
        """The payload in memory that outlives the input it may be a view of."""
        if self._borrowed is None or type(payload.body) is bytes:
            return payload
        return Payload(payload.kind, payload.meta, bytes(payload.body), payload.arrays)

    def lent(self, receiver: str, worker: int, payload: Payload) -> Ticket | None:
        """A ticket for a payload whose bytes are the borrowed input's, which need not be copied to be handed on."""
        if self._borrowed is None or payload.body is not self._view:
            return None
        return self.outbox.lend(*self._borrowed, receiver, worker, payload)

    def end(self, outcome: Outcome, reason: str) -> None:
        """Report the end, in order behind everything the stage said."""
        self.is_reported = True
        lane = MEDIA if self.has_client else CONTROL
        self.outbox.say(lane, Ended(self.stage, self.stamp, outcome, reason, self.through))

    def void(self) -> None:
        """Nothing of the turn matters any more."""
        self.life = _OVER
        self._discard_input()
        for output in self.outputs:
            output.drop()

    # -- inside

    def _open(self, ticket: Ticket | None, source: int) -> Payload:
        if ticket is None:
            raise TypeError("a chunk without a body is never queued")
        try:
            payload = self.outbox.open(source, ticket)
        except TicketInvalid as error:
            raise TurnError(self, "peer_lost") from error
        self._borrowed = (source, ticket)
        self._view = payload.body
        return payload

    def _owe(self, chunk: Chunk, source: int) -> None:
        owed = self._owed.get((source, chunk.sender))
        if owed is not None:
            owed += 1
            if chunk.owe:
                self._give_back(source, chunk.sender, owed)
                owed = 0
            self._owed[source, chunk.sender] = owed

    def _give_back(self, source: int, sender: str, units: int) -> None:
        credit = self._credit
        if credit is not None and self._batch == self.outbox.batch and credit.sender == sender:
            credit.units += units  # it has not left yet
            return
        self._credit = Credit(sender, self.stage, self.stamp, units)
        self._batch = self.outbox.batch
        self.outbox.say(source, self._credit)

    def _let_go(self) -> None:
        if self._borrowed is not None:
            self.outbox.free(*self._borrowed)
            self._borrowed = None
            self._view = b""

    def _discard_input(self) -> None:
        self._let_go()
        while self._inbox:
            item, source = self._inbox.pop(0)
            discard(item, source, self.outbox)
        self._owed.clear()


def discard(item: Item, source: int, outbox: Outbox) -> None:
    """Drop a unit of work unseen: its ticket is freed and its producer gets the credit back."""
    if isinstance(item, Handed):
        if item.payload is not None:
            item.output.give(1)
        return
    if isinstance(item.body, Ticket):
        outbox.free(source, item.body)
    if item.body is not None and source != SERVER and not item.last:
        outbox.say(source, Credit(item.sender, item.receiver, item.stamp, 1))
