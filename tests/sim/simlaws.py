"""The guarantees, watched as they are kept: each look costs the same, however long the run has been.

Whoever breaks one raises an AssertionError that ends with the guarantee's number. What is watched comes from three
places: what the orchestrator decides (`Laws.note`), what a session says (`Ledger`), what reaches a client
(`Ledger.handed`). None of them asks the core whether something is stale: a reply that was cut is known by its terminal.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from omni_live.runtime.ports import WorkerId
from omni_live.sessions.effects import Emit, Hold, RaiseFence, Release, Submit, Unhold
from omni_live.sessions.events import (
    AudioDelta,
    AudioDone,
    AudioTranscriptDelta,
    AudioTranscriptDone,
    ContextDropped,
    ErrorTold,
    Event,
    InputAcked,
    InputMissing,
    ItemDeleted,
    ItemTruncated,
    OutputItemAdded,
    OutputItemDone,
    PartAdded,
    PartDone,
    ResponseCreated,
    ResponseDone,
    ResyncRequired,
    SessionResumed,
    TextDelta,
    TextDone,
    TurnDone,
    TurnSpoke,
)
from omni_live.sessions.exchange import SIDE_LANE
from omni_live.sessions.inputs import Asked, ClientInput, EventAcked, Heartbeat, Input, StageLost
from omni_live.sessions.items import Response, ResponseStatus
from omni_live.sessions.session import FROM_CLIENT, Session
from omni_live.sessions.stamp import Fence, SessionKey, Stamp

if TYPE_CHECKING:
    from simworld import World

CUT_TURN = ("interrupted", "failed")
CUT_RESPONSE = (ResponseStatus.CANCELLED, ResponseStatus.FAILED)
OF_A_RESPONSE = (
    OutputItemAdded,
    PartAdded,
    TextDelta,
    AudioDelta,
    AudioTranscriptDelta,
    AudioDone,
    AudioTranscriptDone,
    TextDone,
    PartDone,
    OutputItemDone,
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A plain turn as its client asked for it."""

    outputs: frozenset[str]
    units: int
    poison: bool


class Ledger:
    """One session's account: what it said, what was said to it, what it may still say."""

    def __init__(self, world: World, key: SessionKey, name: str) -> None:
        self.world = world
        self.key = key
        self.name = name
        self.released = False
        self.held = False
        self.said: list[tuple[Event, Stamp | None]] = []
        """What has a sequence number, in its order, also what nobody was attached to hear."""
        self.cut: set[str] = set()
        """Responses and requests of which nothing more may be heard."""
        self.begun: set[str] = set()
        self.ended: set[str] = set()
        self.wanted: dict[str, Wanted] = {}
        """Plain requests that the session took, by id."""
        self.spoken: Counter[tuple[str, str]] = Counter()
        self.uncut: set[str] = set()
        """Items of replies that were interrupted, of which it was not said how much was heard."""
        self.deleted: set[str] = set()
        self.talking = 0
        """Responses in the conversation that run: one or none."""
        self.response_of: dict[str, str] = {}
        """By item."""
        self.stamps: dict[int, list[Stamp]] = {}
        """By turn: what was submitted for it."""
        self.fences: dict[int, Fence] = {}
        """Its rows as it wants them. The table's rows move on once more when the slot is free again."""
        self.emitted = 0
        """The highest sequence number that was sent for the first time."""
        self.sent: list[ClientInput] | None = None
        """What the client sent with numbers, in order; None where it sends without."""
        self.applied = 0
        self.seen = 0
        """What the attachment that is about to be said it had seen."""
        self._gap_to = 0
        self._resumed: tuple[set[int], int] | None = None
        """What the latest resume called void, and the last number then; checked once its gap is known."""

    # -- what the session says ---------------------------------------------------------------------------------------

    def issue(self, event: Event, content: Stamp | None) -> None:
        """The session gives the event its next sequence number."""
        self.said.append((event, content))
        match event:
            case TurnSpoke():
                self._turn_spoke(event)
            case TurnDone():
                self._turn_done(event)
            case ErrorTold("mailbox_full" | "draining", _, str() as request):
                self.ended.add(request)
            case ResponseCreated(response):
                assert response.id not in self.begun, f"{self.name}: {response.id} begins twice (G4)"
                self.begun.add(response.id)
                self.talking += response.in_conversation
            case ResponseDone(response):
                self._check_open(response.id, "ends")
                self.ended.add(response.id)
                self.talking -= response.in_conversation
                self._response_done(response)
            case ItemTruncated(item):
                self.uncut.discard(item)
                if not self.talking:
                    # While a later reply runs, a client that takes an earlier one back has to silence it itself.
                    self.cut.add(self.response_of.get(item, ""))
            case ItemDeleted(item):
                self.deleted.add(item)
            case ContextDropped(items):
                self.deleted |= set(items)
                self.uncut -= self.deleted
            case OutputItemAdded(response_id, item):
                self._check_open(response_id, "opens an item")
                self.response_of[item.id] = response_id
            case _ if isinstance(event, OF_A_RESPONSE):
                self._check_open(event.response_id, type(event).__name__)
            case _:
                pass

    def check(self) -> None:
        """After each input."""
        self._check_voids()
        assert not self.uncut, f"{self.name}: nobody says what was heard of {self.uncut} (G8)"

    def _check_open(self, response: str, what: str) -> None:
        assert response in self.begun, f"{self.name}: {response} {what} before it began (G4)"
        assert response not in self.ended, f"{self.name}: {response} {what} after its end (G1, G4)"

    def _turn_spoke(self, spoke: TurnSpoke) -> None:
        request = spoke.request_id
        assert request in self.wanted and request not in self.ended, f"{self.name}: {request} speaks unasked (G1, G4)"
        index = spoke.payload.meta["index"]
        at = self.spoken[request, spoke.stage]
        assert index == at, f"{self.name}: {request} says {index} of {spoke.stage} after {at} (G7)"
        self.spoken[request, spoke.stage] += 1

    def _turn_done(self, done: TurnDone) -> None:
        request = done.request_id
        assert request in self.wanted, f"{self.name}: {request} ends, which nobody asked for (G5)"
        assert request not in self.ended, f"{self.name}: {request} ends twice (G4)"
        self.ended.add(request)
        self.world.count(f"sim_turn_{done.status}_{done.reason}")
        wanted = self.wanted[request]
        if done.status in CUT_TURN:
            self.cut.add(request)
        self._check_reason(request, done.reason)
        if done.status == "done":
            for stage in wanted.outputs:
                units = self.spoken[request, stage]
                assert units == wanted.units, f"{self.name}: {request} is done with {units} units of {stage} (G4)"

    def _check_reason(self, request: str, reason: str) -> None:
        """Whether the request may end so."""
        if reason == "stage_error":
            assert self.wanted[request].poison, f"{self.name}: {request} ends of another's poison (G6)"

    def tell(self, event: Event) -> None:
        """The session says something without a number, about the attachment."""
        match event:
            case InputAcked(input_seq) | InputMissing(input_seq) if self.sent is not None:
                assert input_seq == self.applied, f"{self.name}: took {input_seq} of {self.applied} inputs (G12)"
            case SessionResumed(voids=voids, input_seq=input_seq):
                if self.sent is not None:
                    assert input_seq == self.applied, f"{self.name}: took {input_seq} of {self.applied} inputs (G12)"
                self._resumed = ({seq for first, last in voids for seq in range(first, last + 1)}, len(self.said))
            case ResyncRequired(last=last):
                self._gap_to = last
                self.world.count("sim_gaps_told")
            case _:
                pass

    def _check_voids(self) -> None:
        """What a resume calls void is all of the content of older epochs that the client has not seen."""
        if self._resumed is None:
            return
        (named, last), self._resumed = self._resumed, None
        for seq in named:
            assert self.seen < seq, f"{self.name}: {seq} is void, which the client has seen (G7)"
            assert self._void(seq), f"{self.name}: {seq} is called void and is not (G7)"
        for seq in range(max(self.seen, self._gap_to) + 1, last + 1):
            assert seq in named or not self._void(seq), f"{self.name}: nobody says that {seq} is void (G7)"
        self.world.count("sim_voids_named", len(named))

    def _void(self, seq: int) -> bool:
        event, content = self.said[seq - 1]
        return content is not None and (self._named(event) in self.cut or not self._admits(content))

    def _admits(self, content: Stamp) -> bool:
        return self.fences[content.slot].admits(content)

    def _response_done(self, response: Response) -> None:
        item, status = response.item, response.status
        self.world.count(f"sim_response_{status.value}_{response.error_code}")
        if status in CUT_RESPONSE:
            self.cut.add(response.id)
        if status is ResponseStatus.CANCELLED and response.in_conversation and item is not None and item.spoken:
            self.uncut |= {item.id} - self.deleted

    # -- what is said to it ------------------------------------------------------------------------------------------

    def apply(self, told: Input) -> None:
        """The session takes an input; those with numbers come in order, none twice and none left out."""
        if isinstance(told, Asked):
            meta = told.payload.meta
            self.wanted[told.request_id] = Wanted(told.outputs, cast(int, meta["units"]), bool(meta["poison"]))
        if self.sent is None or type(told) not in FROM_CLIENT or isinstance(told, EventAcked | Heartbeat):
            return
        assert self.applied < len(self.sent), f"{self.name}: {told} is taken twice (G7)"
        assert told is self.sent[self.applied], f"{self.name}: {told} is taken for {self.sent[self.applied]} (G7)"
        self.applied += 1

    # -- what reaches the client -------------------------------------------------------------------------------------

    def hand(self, emit: Emit) -> None:
        """A frame goes to the socket."""
        if emit.content is None:
            return
        assert not self.held, f"{self.name} is handed {type(emit.event).__name__} while the reply is held (G1)"
        assert self._admits(emit.content), f"{self.name} is handed {emit.event}, content of a fenced turn (G1)"
        name = self._named(emit.event)
        assert name not in self.cut, f"{self.name} is handed content of {name}, which was cut (G1)"

    def _named(self, event: Event) -> str:
        match event:
            case AudioDelta(name) | AudioTranscriptDelta(name) | TextDelta(name) | TurnSpoke(name):
                return name
            case _:
                raise AssertionError(f"{event} is no content")

    def missing(self, first: int, last: int) -> None:
        """The client has not got these numbers: each must be void."""
        for seq in range(first, last + 1):
            assert self._void(seq), f"{self.name} misses {self.said[seq - 1]}, number {seq}, which is not void (G7)"

    # -- in the end --------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """The session is over: whatever began has ended."""
        assert self.released, f"{self.name} was never released (G3)"
        left = self.begun - self.ended
        assert not left, f"{self.name}: {left} never ended (G4)"
        unanswered = set(self.wanted) - self.ended
        assert not unanswered, f"{self.name}: {unanswered} never ended (G4)"


@dataclass(slots=True)
class Home:
    """Where a session's stage lives, and where it lived before."""

    worker: WorkerId
    before: WorkerId | None = None
    moves: int = 0
    told: int = 0


@dataclass
class Laws:
    """Watches the orchestrator's trace."""

    world: World
    ledgers: dict[SessionKey, Ledger] = field(default_factory=dict)
    homes: dict[SessionKey, dict[str, Home]] = field(default_factory=dict)
    lost: set[WorkerId] = field(default_factory=set)
    lingering: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Turns that were aborted and have not ended, with the time at which that was seen first."""

    def note(self, what: str, session: SessionKey, detail: object) -> None:
        """One decision, as it is made."""
        match what:
            case "told":
                assert not self.ledgers[session].released, f"{session} is told {detail} after its release (G5)"
                if isinstance(detail, StageLost):
                    self._told_of_loss(session, detail.stage)
            case "does":
                self._does(self.ledgers[session], detail)
            case "bound":
                self._bound(session, *cast(tuple[str, WorkerId], detail))
            case "fork":
                parent = self.homes[cast(SessionKey, detail)]
                self.homes[session] = {
                    stage: Home(home.worker) for stage, home in parent.items() if home.worker not in self.lost
                }
            case "lost":
                self.lost.add(cast(tuple[WorkerId, str], detail)[0])
            case _:
                pass

    def _does(self, ledger: Ledger, effect: object) -> None:
        assert not ledger.released, f"{ledger.name} does {effect} after its release (G5)"
        match effect:
            case Emit(seq=seq) if seq > ledger.emitted:
                ledger.emitted = seq
                self._emitted(ledger, effect)
            case Submit(stamp):
                ledger.stamps.setdefault(stamp.turn, []).append(stamp)
            case RaiseFence(fence):
                ledger.fences[fence.slot] = fence
            case Hold() | Unhold():
                ledger.held = isinstance(effect, Hold)
            case Release():
                ledger.released = True
                ledger.held = False  # what a finished turn said last still goes out
            case _:
                pass

    def _emitted(self, ledger: Ledger, emit: Emit) -> None:
        """Fence first, then the terminal: nothing of a turn that was cut is admitted once its client is told."""
        match emit.event:
            case TurnDone(turn=turn, status=status) if status in CUT_TURN:
                stamps = ledger.stamps.get(turn, [])
            case ResponseDone(response) if response.status in CUT_RESPONSE:
                # Beside the conversation a turn may have the number of one that is tried.
                stamps = [
                    stamp
                    for stamp in ledger.stamps.get(response.turn, [])
                    if (stamp.lane != SIDE_LANE) == response.in_conversation
                ]
            case _:
                return
        for stamp in stamps:
            assert not self.world.admits(stamp), f"{ledger.name} is told {emit.event} before the fence (G1)"

    # -- replicas ----------------------------------------------------------------------------------------------------

    def _bound(self, session: SessionKey, stage: str, worker: WorkerId) -> None:
        homes = self.homes.setdefault(session, {})
        home = homes.get(stage)
        if home is None:
            homes[stage] = Home(worker)
        else:
            home.worker, home.before, home.moves = worker, home.worker, home.moves + 1
            assert home.before in self.lost, f"{session} moved from a worker that lives (G9)"

    def _told_of_loss(self, session: SessionKey, stage: str) -> None:
        home = self.homes.get(session, {}).get(stage)
        if home is not None:
            home.told += 1
            assert {home.worker, home.before} & self.lost, f"{session} lost {stage} with no worker of its own (G9)"

    def nothing_is_left_on(self, worker: WorkerId) -> None:
        """The worker's end was noticed: nobody lives there, and no turn waits for it, from this moment on."""
        it = self.world.it
        for bound in it._bound.values():
            assert all(replica.worker != worker for replica in bound.seats.values()), f"{bound.key} is left (G9)"
        for turn in it._turns.values():
            parts = [stage for stage, part in turn.parts.items() if part.replica.worker == worker]
            assert turn.over or not parts, f"turn {turn.key} waits for {parts} on a worker that is gone (G9)"

    def no_turn_lingers(self) -> None:
        """What was aborted is gone by the deadline, or its worker is. Asked now and then (G9)."""
        now, it = self.world.now(), self.world.it
        for turn in it._turns.values():
            assert turn.over or self.world.admits(turn.stamp), f"turn {turn.key} is stale and nobody stops it (G1)"
        over = {turn.key for turn in it._turns.values() if turn.over}
        self.lingering = {key: self.lingering.get(key, now) for key in over}
        most_ns = it._limits.abort_deadline_ms * 1_000_000
        for key, since_ns in self.lingering.items():
            assert now - since_ns <= most_ns, f"turn {key} was aborted and is still there (G9)"

    # -- in the end --------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Everything is over."""
        for key, homes in self.homes.items():
            for stage, home in homes.items():
                assert home.moves <= home.told, f"{key} lost {stage} {home.moves} times, told {home.told} (G9)"
        for ledger in self.ledgers.values():
            ledger.settle()


def bounded(session: Session) -> None:
    """What a session keeps for its client has a bound (G11)."""
    journal, limits = session._journal, session.limits
    assert journal.nbytes <= limits.journal_bytes, f"the journal keeps {journal.nbytes} bytes (G11)"
