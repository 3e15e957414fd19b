"""Rollouts: a world that is stepped, looked at, rewound, snapshotted, restored and forked, and survives its replica.

One stage keeps the state; the session keeps what makes it again (see past.py). Requests run one after the other, and
each ends with one TurnDone, right after the RolloutAt that says where the rollout stands. What moves the rollout other
than by a step (reset, rewind, restore) cuts what runs and waits, and is then *made*, as the state of a lost replica is:

    knock   the stage forgets what it has, which one without state answers as well: nothing given back reaches a stage
            that is not there, and where it is given back in vain there is nothing that could be taken for it
    lay     the base: the reset, or a snapshot, and where that goes too far a cut
    replay  the actions since, in a turn of which nothing is emitted, and whose frames are computed alone

A reset or a rewind of a stage that lives needs no knock and no replay. The stage answers each knock, reset, rewind
and cut with "at" or "refused", in order, and repeats the number `ask` that came with it: an answer that comes twice
counts once. Where it refuses, the request fails and the rollout is what it was before; but a rewind to where the
session knows the stage to reach is refused only by one that lost something, and is made anew.

A turn that was cut may have left the stage ahead of what came to the client: it is cut back before anything else.
So is a fork, whose stage may have had no room for it: it learns that from the answer, and closes (`pool_full`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, assert_never

from omni_live.sessions.effects import Count, Credit, Feed, Restore, Submit, TakeSnapshot
from omni_live.sessions.errors import Illegal
from omni_live.sessions.events import (
    Event,
    ResyncRequired,
    RolloutAt,
    RolloutSnapshotted,
    SessionCreated,
    SessionResumed,
    TurnDone,
)
from omni_live.sessions.ids import Ids
from omni_live.sessions.inputs import (
    Attached,
    LookAsked,
    Outcome,
    RewindAsked,
    StageEnded,
    StageFound,
    StageLost,
    StageSnapshotted,
    StageSpoke,
    StepAsked,
    WorldResetAsked,
    WorldRestoreAsked,
    WorldSnapshotAsked,
)
from omni_live.sessions.journal import Replay
from omni_live.sessions.lease import SECOND
from omni_live.sessions.limits import Limits
from omni_live.sessions.past import Actions, Past
from omni_live.sessions.payload import NO_META, Payload, Scalar
from omni_live.sessions.serial import CUES, NS_PER_MS, SerialSession, SerialTurn
from omni_live.sessions.settings import Settings
from omni_live.sessions.stamp import Stamp
from omni_live.sessions.turn import SessionState, TurnState

REPLAY_LANE = 1
ATTEMPTS = 3
"""So often a lost state is made, if a stage that lives refuses; then the session closes (`state_lost`)."""
NOWHERE = -1
"""Where a rollout stands that has not begun."""
KNOCK = Payload("clear", {"step": NOWHERE})
LOST = "replica_lost"
NO_ROOM = "pool_full"
"""A stage refuses a cut for this where it is asked of a fork that it could not make, and nowhere else."""
UNKNOWN_SESSION = frozenset({"session_unknown", "unknown_session"})
"""The stage never had this session: it could not fork its parent."""

Move = WorldResetAsked | RewindAsked | WorldRestoreAsked
Show = StepAsked | LookAsked
Wish = Show | Move | WorldSnapshotAsked


class Awaited(NamedTuple):
    """An answer that the stage owes."""

    what: str
    """knock, laid (or gone back to), or cut."""
    step: int
    ask: int
    """Its number."""


@dataclass(slots=True)
class RolloutTurn(SerialTurn):
    """A step, or the part of a look that shows one frame."""

    first: int = 0
    """Number of its first frame."""
    frames: int = 1
    outputs: frozenset[str] = frozenset()
    actions: Actions | None = None
    """None for a look."""
    told: int = 0
    """Frames of which every output came."""
    left: int = 0
    """Frames that the look shows after this one."""
    due_ns: int = 0


@dataclass(slots=True)
class Making:
    """How far the state is that is being made."""

    request_id: str | None
    """None where it is made again after a loss."""
    fallback: Past | None
    """What the rollout was before, and is again where the stage refuses."""
    is_sure: bool
    """The stage had all of it before, so that a refusal can only mean that it has lost something."""
    since_ns: int
    knocked: bool = False
    """Of what was before, the stage has nothing any more."""
    stamp: Stamp | None = None
    """Of the replay."""
    spoken: int = 0
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class Taking:
    """A snapshot that the stage was asked for."""

    ticket: int
    past: Past
    step: int
    request_id: str | None = field(default=None)
    """None where it is for ourselves."""


class RolloutSession(SerialSession[Wish, RolloutTurn]):
    """See the module. `stage` is the one that keeps the state."""

    def __init__(
        self, session_id: str, slot: int, generation: int, limits: Limits, ids: Ids, now: int, stage: str
    ) -> None:
        super().__init__(session_id, slot, generation, limits, ids, now)
        self._stage = stage
        self._past: Past | None = None
        self._is_ahead = False
        """The stage may be beyond `position`."""
        self._is_lost = False
        """The stage lost what it had, and did not answer since."""
        self._is_doubted = False
        """A turn failed, and what the stage had may be gone with it: its next answer shows."""
        self._answers: list[Awaited] = []
        self._asks = 0
        self._making: Making | None = None
        self._taking: Taking | None = None
        self._tickets = 0
        self._save_at = limits.snapshot_frames
        """Frames after the base at which it is time for a new one."""
        self._rules |= {
            StepAsked: self._step_asked,
            LookAsked: self._look_asked,
            WorldSnapshotAsked: self._look_asked,
            WorldResetAsked: self._reset_asked,
            RewindAsked: self._rewind_asked,
            WorldRestoreAsked: self._restore_asked,
            StageFound: self._stage_found,
            StageLost: self._stage_lost,
            StageSnapshotted: self._stage_snapshotted,
        }

    @property
    def position(self) -> int:
        """Number of the last frame that came; -1 where the rollout has not begun. A move counts when it is made."""
        making = self._making
        past = making.fallback if making is not None and making.request_id is not None else self._past
        return NOWHERE if past is None else past.position

    @property
    def busy(self) -> bool:
        taking = self._taking
        is_asked = taking is not None and taking.request_id is not None
        return self._turn is not None or self._making is not None or is_asked or bool(self._waiting)

    # -- attachments ---------------------------------------------------------------------------------------------

    def _attached(self, input: Attached) -> None:
        super()._attached(input)
        if input.seen is None and self._past is not None:  # a fork's first client is told where it begins
            self._tell(RolloutAt("", self.position))

    def _greet(self) -> Event:
        left = (self._lease.expires_ns - self._now) / SECOND
        return SessionCreated(self.session_id, Settings(), self.attachment, self.token, left)

    def _welcome_back(self, replay: Replay) -> list[Event]:
        events: list[Event] = [
            SessionResumed(self.session_id, Settings(), self.attachment, self.token, replay.voids, self._inputs.taken)
        ]
        if replay.gap is not None:
            reason = "journal_overflow" if replay.overflowed else "journal_gap"
            events.append(ResyncRequired(*replay.gap, reason, ()))
        return [*events, RolloutAt("", self.position)]

    # -- forks ---------------------------------------------------------------------------------------------------

    def fork_refusal(self, at: int | None) -> str | None:
        """The code where a fork at frame `at` cannot be, else None."""
        if self.closed or self._past is None:
            return "not_started"
        if self._making is not None or self._is_lost or self._is_doubted:
            return "state_not_ready"
        return self._out_of_reach(self._past, self._past.position if at is None else at)

    def forked(
        self, session_id: str, slot: int, generation: int, ids: Ids, now: int, at: int | None = None
    ) -> "RolloutSession":
        """A second rollout that goes on from frame `at`; whoever opens it copies the stages' state along.

        Raises Illegal where `fork_refusal` would name a code.
        """
        past = self._past
        if past is None or self.fork_refusal(at) is not None:
            raise Illegal("this rollout cannot be forked there")
        twin = RolloutSession(session_id, slot, generation, self.limits, ids, now, self._stage)
        twin._past = past.rewound(past.position if at is None else at)
        twin._is_ahead = True  # what is copied is all that the stage has, be it of a step that still runs
        return twin

    # -- what the client asks ------------------------------------------------------------------------------------

    def _step_asked(self, input: StepAsked) -> None:
        self._lease.touch(self._now)
        actions = Actions.read(input.actions, input.frames) if 0 < input.frames <= self.limits.step_frames else None
        if actions is None:
            self._fail(input.request_id, "bad_actions" if 0 < input.frames <= self.limits.step_frames else "bad_frames")
            return
        own = StepAsked(
            actions.payload(0), input.frames, input.outputs, input.step, input.request_id, input.due_ms
        )  # a copy: what the door read may lie in its buffer
        self._admit(own)

    def _look_asked(self, input: LookAsked | WorldSnapshotAsked) -> None:
        self._lease.touch(self._now)
        if isinstance(input, LookAsked) and not 0 < input.frames <= self.limits.step_frames:
            self._fail(input.request_id, "bad_frames")
        else:
            self._admit(input)

    def _reset_asked(self, input: WorldResetAsked) -> None:
        self._move_asked(WorldResetAsked(_owned(input.payload), input.request_id), "reset")

    def _rewind_asked(self, input: RewindAsked) -> None:
        code = "not_started" if self._past is None else self._out_of_reach(self._past, input.step)
        if code is None:
            self._move_asked(input, "rewind")
        else:
            self._lease.touch(self._now)
            self._fail(input.request_id, code)

    def _restore_asked(self, input: WorldRestoreAsked) -> None:
        if input.step < 0:
            self._fail(input.request_id, "bad_snapshot")
        else:
            self._move_asked(WorldRestoreAsked(_owned(input.state), input.step, input.request_id), "restore")

    def _move_asked(self, move: Move, reason: str) -> None:
        self._lease.touch(self._now)
        if self.state is not SessionState.DRAINING:
            self._interrupt(reason)
        self._admit(move)

    def _out_of_reach(self, past: Past, step: int) -> str | None:
        if step < 0:
            return "bad_step"
        if step > past.position:
            return "rewind_ahead"
        return "rewind_too_far" if step < past.floor(self.limits.rewind_steps) else None

    def _fail(self, request_id: str, code: str) -> None:
        """A request that never ran ends with this code."""
        self._end(request_id, TurnState.FAILED, code)

    def _end(self, request_id: str, state: TurnState, reason: str = "") -> None:
        self._emit(RolloutAt(request_id, self.position))
        self._emit(TurnDone(request_id, 0, state.value, reason))

    # -- one after the other -------------------------------------------------------------------------------------

    def _next_ns(self) -> int | None:
        if self._making is not None:
            return self._making.since_ns + self._patience_ns
        return super()._next_ns()

    def _settle(self) -> None:
        self._expire()
        making = self._making
        if making is not None and self._now >= making.since_ns + self._patience_ns:
            if making.stamp is None:
                self._close("state_lost")
            else:  # the stage answered before: it is asked once more whether it is there
                self._unmade(making, "timeout")
        while not self.closed and self._may_begin():
            self._tidy()
            self._begin(*self._waiting.popleft())
        if self.closed or self._turn is not None or self._making is not None:
            return
        self._tidy()
        if self.state is SessionState.DRAINING and not self.busy:
            self._close("drained")

    def _may_begin(self) -> bool:
        if self._turn is not None or not self._waiting or self._is_doubted:
            return False
        wish = self._waiting[0][0]
        if self._making is not None:  # nobody need wait for a state that is to be thrown away
            return self._making.request_id is None and isinstance(wish, WorldResetAsked | WorldRestoreAsked)
        return not (isinstance(wish, WorldSnapshotAsked) and self._taking is not None)

    def _tidy(self) -> None:
        """Between two requests: cut off what never came, save what came."""
        past = self._past
        if past is None or self._making is not None:
            return
        if self._is_ahead:
            self._is_ahead = False
            self._feed(Payload("cut", {"step": past.position}), "cut", past.position)
        if self._taking is None and past.count >= self._save_at:
            self._take(past, None)

    def _begin(self, request: Wish, since_ns: int) -> None:
        match request:
            case StepAsked():
                self._begin_step(request, since_ns)
            case LookAsked():
                self._begin_look(request, request.step, _due_ns(request, since_ns))
            case WorldSnapshotAsked():
                if self._past is None:
                    self._fail(request.request_id, "not_started")
                else:
                    self._take(self._past, request.request_id)
            case WorldResetAsked():
                self._make(request.request_id, Past.started(request.payload))
            case WorldRestoreAsked():
                self._is_lost = True  # so that it is knocked at: what is given back in vain must not go unnoticed
                self._make(request.request_id, Past.restored(request.state, request.step))
            case RewindAsked():
                self._begin_rewind(request)
            case _:
                assert_never(request)

    def _begin_step(self, asked: StepAsked, since_ns: int) -> None:
        past = self._past
        if past is None:
            self._fail(asked.request_id, "not_started")
            return
        first = past.position + 1 if asked.step is None else asked.step
        due_ns = _due_ns(asked, since_ns)
        if first != past.position + 1:
            self._begin_look(asked, first, due_ns)
            return
        if past.count + asked.frames > self.limits.rollout_actions:
            self._effects.append(Count("history_full"))
            self._fail(asked.request_id, "history_full")
            return
        actions = Actions.read(asked.actions, asked.frames)
        assert actions is not None, "checked when it was asked"
        stamp = self._next_stamp(0, due_ns)
        self._turn = RolloutTurn(
            asked.request_id,
            stamp,
            set(asked.outputs),
            self._now,
            first=first,
            frames=asked.frames,
            outputs=asked.outputs,
            actions=actions,
        )
        self._effects.append(Submit(stamp, self._stage, asked.outputs, actions.payload(first), NO_META))

    def _begin_look(self, asked: Show, first: int, due_ns: int) -> None:
        past = self._past
        if past is None:
            self._fail(asked.request_id, "not_started")
        elif first + asked.frames - 1 > past.position:
            self._fail(asked.request_id, "step_out_of_order")
        elif first < past.floor(self.limits.rewind_steps):
            self._fail(asked.request_id, "step_unknown")
        else:
            self._show(asked.request_id, first, asked.frames - 1, asked.outputs, due_ns)

    def _show(self, request_id: str, step: int, left: int, outputs: frozenset[str], due_ns: int) -> None:
        """Show one frame, of which `left` more follow: a stage is looked at frame by frame."""
        stamp = self._next_stamp(0, due_ns)
        self._turn = RolloutTurn(
            request_id, stamp, set(outputs), self._now, first=step, outputs=outputs, left=left, due_ns=due_ns
        )
        self._effects.append(Submit(stamp, self._stage, outputs, Payload("look", {"step": step}), NO_META))

    def _begin_rewind(self, asked: RewindAsked) -> None:
        past = self._past
        code = "not_started" if past is None else self._out_of_reach(past, asked.step)
        if past is None or code is not None:
            self._fail(asked.request_id, code or "not_started")
            return
        self._past, self._making = past.rewound(asked.step), Making(asked.request_id, past, True, self._now)
        self._feed(Payload("rewind", {"step": asked.step}), "laid", asked.step)

    # -- the turn that runs --------------------------------------------------------------------------------------

    def _accepts(self, turn: RolloutTurn, input: StageSpoke) -> bool:
        spoken = turn.spoken.get(input.stage, 0)
        return spoken < turn.frames and input.payload.meta.get("step") == turn.first + spoken

    def _went_out(self, turn: RolloutTurn) -> None:
        came = min(turn.spoken.get(stage, 0) for stage in turn.outputs)
        while turn.told < came:
            if turn.actions is not None and self._past is not None:
                self._past.commit(turn.actions, turn.told)
            turn.told += 1

    def _complete(self, turn: RolloutTurn) -> None:
        if turn.outcome is Outcome.DONE and turn.told < turn.frames:
            self._broke(turn, "output_lost")
        elif turn.outcome is Outcome.DONE and turn.left:
            self._show(turn.request_id, turn.first + 1, turn.left - 1, turn.outputs, turn.due_ns)
        else:
            self._finish(CUES[turn.outcome], turn.reason)

    def _over(self, turn: RolloutTurn) -> None:
        if turn.actions is not None and turn.state is not TurnState.DONE:
            self._is_ahead = True
        self._emit(RolloutAt(turn.request_id, self.position))

    def _stage_spoke(self, input: StageSpoke) -> None:
        if self._is_replay(input.stamp):
            self._replayed(input)
        else:
            super()._stage_spoke(input)

    def _stage_ended(self, input: StageEnded) -> None:
        if self._is_replay(input.stamp):
            self._replay_ended(input)
            return
        turn = self._turn
        super()._stage_ended(input)
        if self.closed or turn is None or self._turn is not None or self._making is not None:
            return
        if input.reason in UNKNOWN_SESSION:
            self._close("state_lost")
        elif input.outcome is Outcome.FAILED and self._past is not None:
            self._is_ahead = self._is_doubted = True  # one failure costs one turn: the next one waits for the answer

    # -- making a state ------------------------------------------------------------------------------------------

    def _make(self, request_id: str | None, past: Past) -> None:
        """Make the stage's state that of `past`, which the rollout is from now on."""
        fallback = self._past
        self._stop_replay()
        self._past, self._is_ahead = past, False
        self._making = Making(request_id, fallback, False, self._now)
        if self._is_lost:
            self._knock(self._making)
        else:
            self._lay(past)

    def _make_again(self, past: Past) -> None:
        self._past, self._is_ahead = past, False
        self._making = Making(None, None, True, self._now)
        self._knock(self._making)

    def _knock(self, making: Making) -> None:
        making.knocked, making.since_ns = True, self._now
        self._feed(KNOCK, "knock", NOWHERE)

    def _lay(self, past: Past) -> None:
        if past.is_snapshot:
            self._effects.append(Restore(self._stage, past.base))
            self._feed(Payload("cut", {"step": past.reach}), "laid", past.reach)
        else:
            self._feed(past.base, "laid", past.reach)

    def _feed(self, payload: Payload, what: str, step: int) -> None:
        self._asks += 1
        self._answers.append(Awaited(what, step, self._asks))
        self._effects.append(Feed(self._stage, replace(payload, meta={**payload.meta, "ask": self._asks})))

    def _answered(self, meta: Mapping[str, Scalar]) -> Awaited | None:
        """What the stage answers; None where it did before. One that repeats no number answers in order."""
        ask = meta.get("ask")
        while self._answers:
            awaited = self._answers[0]
            if isinstance(ask, int) and ask < awaited.ask:
                return None
            del self._answers[0]
            if not isinstance(ask, int) or ask == awaited.ask:
                return awaited
        return None

    def _stage_found(self, input: StageFound) -> None:
        if input.stage != self._stage or input.payload.kind not in {"at", "refused"}:
            return
        meta = input.payload.meta
        awaited = self._answered(meta)
        if awaited is None:
            self._effects.append(Count("stale_finding"))
            return
        self._is_doubted = self._is_doubted and bool(self._answers)
        is_good = input.payload.kind == "at" and meta.get("step") == awaited.step
        code = meta.get("code")
        reason = code if isinstance(code, str) else "state_lost"
        making, past = self._making, self._past
        if awaited.what == "cut":
            if reason == NO_ROOM:
                self._close(NO_ROOM)
            elif not is_good:
                self._out_of_step()
        elif making is None or past is None or self._answers:
            return  # it answers for something that was given up for what is being made now
        elif not is_good:
            self._unmade(making, reason)
        elif awaited.what == "knock":
            self._is_lost = False
            making.since_ns = self._now
            self._lay(past)
        elif making.knocked and past.actions is not None:
            self._replay(making, past, past.actions)
        else:
            self._made(making)

    def _out_of_step(self) -> None:
        """The stage is not where it should be: make its state again."""
        if self._making is not None or self._past is None:
            return
        if self._turn is not None:
            self._broke(self._turn, "state_lost")
        self._effects.append(Count("states_out_of_step"))
        self._make_again(self._past)

    def _replay(self, making: Making, past: Past, actions: Actions) -> None:
        making.stamp, making.spoken, making.since_ns = self._next_stamp(REPLAY_LANE, 0), 0, self._now
        payload = actions.payload(past.reach + 1)
        # Whoever is made again at the same time is no company that the frames had before: it could change their bits.
        payload = replace(payload, meta={**payload.meta, "alone": True})
        self._effects.append(Submit(making.stamp, self._stage, frozenset({self._stage}), payload, NO_META))

    def _is_replay(self, stamp: Stamp) -> bool:
        making = self._making
        if making is None or making.stamp is None or not self._admits(stamp):
            return False
        return making.stamp[:4] == stamp[:4]

    def _replayed(self, input: StageSpoke) -> None:
        making, past = self._making, self._past
        if making is None or past is None or input.stamp.seq < making.spoken:
            self._effects.append(Count("repeated_output"))
            return
        step = past.reach + 1 + making.spoken
        if input.stamp.seq > making.spoken or input.payload.meta.get("step") != step:
            self._unmade(making, "output_lost")
            return
        making.spoken += 1
        making.since_ns = self._now
        self._effects.append(Credit(input.stamp, input.stage, 1))

    def _replay_ended(self, input: StageEnded) -> None:
        making, past = self._making, self._past
        if making is None or past is None:
            return
        if input.outcome is Outcome.DONE and making.spoken == past.count:
            making.stamp = None
            self._made(making)
        else:
            self._unmade(making, input.reason or "output_lost")

    def _stop_replay(self) -> None:
        making = self._making
        if making is not None and making.stamp is not None:
            self._raise_fence(REPLAY_LANE)
            self._abort(making.stamp)
            making.stamp = None

    def _made(self, making: Making) -> None:
        self._making = None
        self._save_at = self.limits.snapshot_frames
        if making.request_id is not None:
            self._end(making.request_id, TurnState.DONE)

    def _unmade(self, making: Making, reason: str) -> None:
        """The stage, which lives, could not do it."""
        self._stop_replay()
        if making.request_id is None or making.is_sure:
            making.attempts += 1
            if making.attempts < ATTEMPTS:
                self._knock(making)
            else:
                self._close("state_lost")
            return
        self._making, self._past = None, making.fallback
        self._fail(making.request_id, reason)
        if self._past is not None and making.knocked:
            self._make_again(self._past)
        else:
            self._is_ahead = self._past is not None

    def _stage_lost(self, input: StageLost) -> None:
        if input.stage != self._stage:
            return
        self._is_lost, self._is_doubted = True, False
        self._answers.clear()
        if self._turn is not None:
            self._broke(self._turn, LOST)
        if self._making is not None:
            self._stop_replay()
            self._knock(self._making)
        elif self._past is not None:
            self._make_again(self._past)

    # -- snapshots -----------------------------------------------------------------------------------------------

    def _take(self, past: Past, request_id: str | None) -> None:
        self._tickets += 1
        self._taking = Taking(self._tickets, past, past.position, request_id)
        self._effects.append(TakeSnapshot(self._stage, self._tickets))

    def _stage_snapshotted(self, input: StageSnapshotted) -> None:
        taking = self._taking
        if taking is None or input.ticket != taking.ticket:
            self._effects.append(Count("stale_snapshot"))
            return
        self._taking = None
        state = None if input.payload is None else _owned(input.payload)
        if state is None:
            self._effects.append(Count("snapshots_failed"))
            self._save_at = taking.past.count + self.limits.snapshot_frames
        elif taking.past is self._past:  # no rewind has made another line of it
            self._past.saved(state, taking.step)
            self._save_at = self.limits.snapshot_frames
        if taking.request_id is None:
            return
        if state is None:
            self._fail(taking.request_id, "snapshot_failed")
        else:
            self._emit(RolloutSnapshotted(taking.request_id, taking.step, state), nbytes=state.nbytes)
            self._end(taking.request_id, TurnState.DONE)

    def _end_turns(self, reason: str) -> None:
        self._stop_replay()
        making, self._making = self._making, None
        if making is not None and making.request_id is not None:
            self._past = making.fallback
        taking, self._taking = self._taking, None
        for asked in (making, taking):
            if asked is not None and asked.request_id is not None:
                self._end(asked.request_id, TurnState.INTERRUPTED, reason)
        super()._end_turns(reason)


def _owned(payload: Payload) -> Payload:
    """The same payload, in memory of its own."""
    return Payload(payload.kind, payload.meta, bytes(payload.body), payload.arrays)


def _due_ns(asked: Show, since_ns: int) -> int:
    """0 where it is not due at any time: it takes turns, frame by frame, with whoever else is there."""
    return since_ns + round(asked.due_ms * NS_PER_MS) if asked.due_ms else 0
