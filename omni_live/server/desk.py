"""The desk: where doors open and find sessions.

It joins admission (whether), the slots (where in the fence table), the session core (what) and the orchestrator
(how). What an open has taken is undone on every way out of it; from the moment the orchestrator has the session, its
Release is the one thing that gives everything back.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from omni_live.config.plan import Plan
from omni_live.engines.contract import Load
from omni_live.pipelines.spec import PipelineSpec, SessionKind
from omni_live.protocols.desk import Line, Mailbox, Refused, ResumeRefused
from omni_live.runtime.orchestrator import Orchestrator, UnavailableError
from omni_live.runtime.ports import Clock, Timer
from omni_live.runtime.slots import Slot, Slots
from omni_live.server.metrics import Metrics
from omni_live.sessions.admission import Admission, Admitted, Queued
from omni_live.sessions.admission import Refused as NotAdmitted
from omni_live.sessions.conversation import Conversation
from omni_live.sessions.effects import Effect, Emit, RaiseFence, Release, Replace
from omni_live.sessions.events import SessionClosed
from omni_live.sessions.exchange import Shape
from omni_live.sessions.inputs import Attached, CloseAsked, Detached, Input
from omni_live.sessions.plain import PlainSession
from omni_live.sessions.rollout import RolloutSession
from omni_live.sessions.session import Session
from omni_live.sessions.settings import Settings
from omni_live.sessions.turn import SessionState

log = logging.getLogger(__name__)

_ID_BYTES: Final = 16
_DRAINING: Final = "The server is going away."
_FULL: Final = "The server has no room for another session."


def random_id(prefix: str) -> str:
    """An id that cannot be guessed: 128 random bits."""
    return f"{prefix}_{secrets.token_hex(_ID_BYTES)}"


class Switch:
    """A session's way to whichever attachment it has."""

    def __init__(self) -> None:
        self._now: Mailbox | None = None
        self._next: Mailbox | None = None

    def attach(self, mailbox: Mailbox) -> None:
        """Send everything there from the moment the session lets go of the attachment it has."""
        if self._now is None:
            self._now = mailbox
        else:
            self._next = mailbox

    def detach(self) -> None:
        """Nobody takes anything: the transport is gone."""
        self._now = None

    def take(self, effects: list[Effect]) -> None:
        at = next((index for index, effect in enumerate(effects) if isinstance(effect, Replace)), None)
        if at is not None and self._next is not None:
            self._give(effects[: at + 1])
            self._now, self._next = self._next, None
            effects = effects[at + 1 :]
        if effects:
            self._give(effects)

    def _give(self, effects: list[Effect]) -> None:
        if self._now is not None:
            self._now.take(effects)


class Seat:
    """A session at work, as the orchestrator sees it. A bug in the core costs this session and no other."""

    def __init__(self, session: Session, spec: PipelineSpec, owner: str, place: int, desk: "FrontDesk") -> None:
        self.session = session
        self.pipeline = spec.name
        self.owner = owner
        self.place = place
        self.switch = Switch()
        self._desk = desk

    @property
    def slot(self) -> int:
        return self.session.slot

    @property
    def generation(self) -> int:
        return self.session.generation

    @property
    def settings(self) -> Settings:
        return self.session.settings if isinstance(self.session, Conversation) else Settings(model=self.pipeline)

    def handle(self, told: Input, now_ns: int, /) -> list[Effect]:
        try:
            effects = self.session.handle(told, now_ns)
        except Exception:
            log.exception("event=session_failed session=%s input=%s", self.session.session_id, type(told).__name__)
            return [Emit(SessionClosed("internal_error"), 0), Release("internal_error")]
        fences: list[Effect] = [effect for effect in effects if isinstance(effect, RaiseFence)]
        if fences:
            self._desk.metrics.fences_raised(len(fences))
            self.switch.take(fences)  # what waits in an outbox is stale before anybody else hears of it
        return effects

    def take(self, effects: list[Effect]) -> None:
        """The orchestrator's mailbox for this session."""
        self.switch.take(effects)
        if any(isinstance(effect, Release) for effect in effects):
            self._desk.released(self)


class SessionLine:
    """One attachment's line to a session; see protocols.desk.Line. Once replaced, it reaches nothing (G5)."""

    def __init__(self, seat: Seat, attachment: int, desk: "FrontDesk") -> None:
        self._seat = seat
        self._desk = desk
        self.attachment = attachment

    @property
    def session_id(self) -> str:
        return self._seat.session.session_id

    @property
    def settings(self) -> Settings:
        return self._seat.settings

    @property
    def token(self) -> str:
        return self._seat.session.token

    def tell(self, input: Input) -> None:
        if self._seat.session.attachment != self.attachment:
            self._desk.metrics.count("input_after_replace")
            return
        if isinstance(input, Detached):
            self._seat.switch.detach()
        self._desk.orchestrator.tell(self._seat, input)


@dataclass(slots=True, eq=False)
class _Asking:
    """Somebody who waits for admission."""

    place: int
    answer: asyncio.Future[bool]
    lost: bool = False
    """The place is not ours any more: it lapsed, or the server drains."""


class FrontDesk:
    """See protocols.desk.Desk."""

    def __init__(self, plan: Plan, orchestrator: Orchestrator, slots: Slots, clock: Clock, metrics: Metrics) -> None:
        self.orchestrator = orchestrator
        self.metrics = metrics
        self._plan = plan
        self._slots = slots
        self._clock = clock
        limits = plan.limits
        self._admission = Admission(plan.caps(), limits.wait_queue, limits.wait_deadline_s)
        self._asking: dict[int, _Asking] = {}
        self._lapse: Timer | None = None
        self._seats: dict[str, Seat] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False

    # -- for the doors -----------------------------------------------------------------------------------------------

    async def open(self, model: str, settings: Settings, mailbox: Mailbox, owner: str) -> SessionLine:
        spec = self._find(model)
        with ExitStack() as undo:
            place = await self._place(spec, undo)
            slot = self._slot(undo)
            session = self._session(spec, slot.slot, slot.generation, settings)
            seat = Seat(session, spec, owner, place, self)
            seat.switch.attach(mailbox)
            try:
                self.orchestrator.open(seat, spec.name, seat)
            except UnavailableError as error:
                message = "The model is not ready."
                raise self._refused("replica_unavailable", message, error.retry_after_s) from None
            undo.pop_all()
        log.info("event=session_opened session=%s pipeline=%s", session.session_id, spec.name)
        return self._seated(seat)

    def fork(self, line: Line, at: int | None, mailbox: Mailbox, owner: str) -> SessionLine:
        parent = self._seats.get(line.session_id)
        if parent is None or parent.owner != owner or parent.session.attachment != line.attachment:
            raise self._refused("session_not_found", "There is no such session, or it is over.")
        rollout = parent.session
        if not isinstance(rollout, RolloutSession):
            raise self._refused("unsupported", "Sessions of this model cannot be forked.")
        code = rollout.fork_refusal(at)
        if code is not None:
            raise self._refused(code, "The rollout cannot be forked there.", 1.0 if code == "state_not_ready" else None)
        spec = self._plan.pipeline(parent.pipeline)
        with ExitStack() as undo:
            place = self._place_now(spec, undo)
            slot = self._slot(undo)
            now = self._clock.now()
            child = rollout.forked(random_id("sess"), slot.slot, slot.generation, random_id, now, at)
            seat = Seat(child, spec, owner, place, self)
            seat.switch.attach(mailbox)
            try:
                self.orchestrator.fork(parent, seat, seat)
            except UnavailableError:
                raise self._refused("session_not_found", "There is no such session, or it is over.") from None
            undo.pop_all()
        log.info("event=session_forked session=%s parent=%s", child.session_id, rollout.session_id)
        return self._seated(seat)

    def resume(
        self, session_id: str, token: str, seen: int | None, sent: int, mailbox: Mailbox, owner: str
    ) -> SessionLine:
        seat = self._seats.get(session_id)
        if seat is None or seat.owner != owner:
            raise ResumeRefused("session_resume_expired", "There is no such session, or it is over.")
        code = seat.session.resumable(token)
        if code is not None:
            self.metrics.count(f"refused_{code}")
            raise ResumeRefused(code, "The session cannot be resumed with this token.")
        seat.switch.attach(mailbox)
        attachment = seat.session.attachment + 1
        log.info("event=session_resumed session=%s attachment=%d", session_id, attachment)
        self.orchestrator.tell(seat, Attached(attachment, token, seen, sent))
        return SessionLine(seat, attachment, self)

    # -- for the server ----------------------------------------------------------------------------------------------

    def drain(self, deadline_ns: int) -> None:
        """Refuse new sessions, let running turns finish."""
        self.draining = True
        for asking in tuple(self._asking.values()):
            if asking.place in self._asking:
                self._settle(asking.place, admitted=False)
                self._give_back(asking.place)
        self.orchestrator.drain(deadline_ns)

    async def emptied(self) -> None:
        """Wait until no session is left."""
        await self._empty.wait()

    def close_all(self, reason: str) -> None:
        for seat in tuple(self._seats.values()):
            self.orchestrator.tell(seat, CloseAsked(reason))

    def sessions(self) -> Iterator[tuple[str, str, int]]:
        counts = Counter((seat.pipeline, seat.session.state.value) for seat in self._seats.values())
        for spec in self._plan.pipelines:
            for state in SessionState:
                yield spec.name, state.value, counts[spec.name, state.value]

    def replicas(self) -> Iterator[tuple[str, str, str, int]]:
        found = Counter(
            (replica.pool.plan.pipeline, "+".join(replica.pool.plan.stages), replica.state.value)
            for replica in self.orchestrator.pools.replicas()
        )
        for (pipeline, stages, state), count in sorted(found.items()):
            yield pipeline, stages, state, count

    def loads(self) -> Iterator[tuple[str, str, Load]]:
        found: dict[tuple[str, str], Load] = {}
        for replica in self.orchestrator.pools.replicas():
            for stage, load in replica.loads.items():
                key = replica.pool.plan.pipeline, stage
                found[key] = load.plus(found[key]) if key in found else load
        for (pipeline, stage), load in sorted(found.items(), key=itemgetter(0)):
            yield pipeline, stage, load

    def slots_taken(self) -> int:
        return self._slots.taken

    def waiting(self) -> int:
        return self._admission.waiting

    def released(self, seat: Seat) -> None:
        """The session is over: its place goes to whoever waits."""
        self._seats.pop(seat.session.session_id)
        log.info("event=session_closed session=%s", seat.session.session_id)
        self._give_back(seat.place)
        if not self._seats:
            self._empty.set()

    # -- admission -----------------------------------------------------------------------------------------------------

    def _seated(self, seat: Seat) -> SessionLine:
        """The orchestrator has the session: from here on its Release gives everything back."""
        self._seats[seat.session.session_id] = seat
        self._empty.clear()
        self.orchestrator.tell(seat, Attached(1))
        return SessionLine(seat, 1, self)

    def _slot(self, undo: ExitStack) -> Slot:
        slot = self._slots.take()
        if slot is None:  # admission's cap is the slots' number, so this is a leak of ours
            raise self._refused("overloaded", "No session slot is free.", 1.0)
        undo.callback(self._slots.free, slot.slot, slot.generation)
        return slot

    def _place_now(self, spec: PipelineSpec, undo: ExitStack) -> int:
        """A place, where one is free at once: whoever forks has a session that goes on meanwhile."""
        if self.draining:
            raise self._refused("draining", _DRAINING, self._plan.limits.drain_s)
        answer = self._admission.ask(self._plan.cost(spec.name), self._clock.now())
        match answer:
            case Admitted(place):
                undo.callback(self._give_back, place)
                return place
            case Queued(place):
                self._give_back(place)
                raise self._refused("overloaded", _FULL, 1.0)
            case NotAdmitted():
                raise self._refused(answer.reason, _FULL, answer.retry_after_s)

    def _find(self, model: str) -> PipelineSpec:
        try:
            return self._plan.pipeline(model)
        except KeyError:
            raise self._refused("model_not_found", "There is no such model here.") from None

    async def _place(self, spec: PipelineSpec, undo: ExitStack) -> int:
        """A place for a session; whatever becomes of the caller, `undo` gives it back."""
        if self.draining:
            raise self._refused("draining", _DRAINING, self._plan.limits.drain_s)
        answer = self._admission.ask(self._plan.cost(spec.name), self._clock.now())
        match answer:
            case NotAdmitted():
                raise self._refused(answer.reason, _FULL, answer.retry_after_s)
            case Admitted(place):
                undo.callback(self._give_back, place)
                return place
            case Queued(place):
                await self._wait(place, undo)
                return place

    async def _wait(self, place: int, undo: ExitStack) -> None:
        asking = self._asking[place] = _Asking(place, asyncio.get_running_loop().create_future())
        undo.callback(self._leave, asking)
        self._watch_the_queue()
        admitted = await asking.answer
        if self.draining:
            raise self._refused("draining", _DRAINING, self._plan.limits.drain_s)
        if not admitted:
            raise self._refused("overloaded", _FULL, 1.0)

    def _leave(self, asking: "_Asking") -> None:
        """Give up a place that is held or waited for."""
        self._asking.pop(asking.place, None)
        if not asking.lost:
            self._give_back(asking.place)

    def _settle(self, place: int, *, admitted: bool) -> None:
        asking = self._asking.pop(place)
        asking.lost = not admitted
        if not asking.answer.done():
            asking.answer.set_result(admitted)

    def _give_back(self, place: int) -> None:
        for admitted in self._admission.give_back(place):
            self._settle(admitted.place, admitted=True)

    def _watch_the_queue(self) -> None:
        at_ns = self._admission.next_lapse_ns
        if self._lapse is None and at_ns is not None:
            self._lapse = self._clock.call_at(at_ns, self._lapsed)

    def _lapsed(self) -> None:
        self._lapse = None
        late, admitted = self._admission.lapse(self._clock.now())
        for place in late:
            self._settle(place, admitted=False)
        for entry in admitted:
            self._settle(entry.place, admitted=True)
        self._watch_the_queue()

    def _refused(self, code: str, message: str, retry_after_s: float | None = None) -> Refused:
        self.metrics.count(f"refused_{code}")
        return Refused(code, message, retry_after_s)

    def _session(self, spec: PipelineSpec, slot: int, generation: int, settings: Settings) -> Session:
        now = self._clock.now()
        limits = self._plan.limits
        session_id = random_id("sess")
        if spec.kind is SessionKind.PLAIN:
            return PlainSession(session_id, slot, generation, limits, random_id, now)
        if spec.kind is SessionKind.ROLLOUT:
            return RolloutSession(session_id, slot, generation, limits, random_id, now, spec.entries["actions"])
        shape = Shape(
            ears=spec.entries.get("audio", ""),
            thinker=spec.entries["text"],
            voice=spec.outputs.get("audio", ""),
            input_rate_hz=spec.hears_hz,
            output_rate_hz=spec.speaks_hz,
        )
        return Conversation(session_id, slot, generation, limits, random_id, now, settings, shape)
