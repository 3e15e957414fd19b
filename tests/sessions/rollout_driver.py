"""Drives a rollout in virtual time, and stands in for the stage that keeps its state.

`World` answers in the order in which it is told things, as the contract of the dynamics stage has it. What a frame is
made of is written into the frame: the start, and the actions of every frame since. So two frames are equal where, and
only where, they came to be in the same way.
"""

from dataclasses import replace
from hashlib import sha256

from session_driver import GENERATION, MS, SLOT, Perform, S

from omni_live.sessions.effects import Effect, Feed, Restore, Submit, TakeSnapshot
from omni_live.sessions.events import ErrorTold, RolloutAt, RolloutSnapshotted, TurnDone, TurnSpoke
from omni_live.sessions.ids import CountedIds
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
from omni_live.sessions.limits import Limits
from omni_live.sessions.payload import ArraySpec, Payload
from omni_live.sessions.rollout import RolloutSession

STAGE = "dynamics"
ROW = 16
BOTH = frozenset({STAGE, "decoder"})
SHOWN = frozenset({"decoder"})


def actions(*numbers: int) -> Payload:
    """A row for each number."""
    body = b"".join(number.to_bytes(ROW, "little") for number in numbers)
    return Payload("actions", {}, body, (ArraySpec("actions", "<f4", (len(numbers), 2, 2)),))


def reset(seed: int = 0) -> Payload:
    return Payload("reset", {"seed": seed})


def begun(seed: object) -> bytes:
    """Frame 0."""
    return sha256(repr(seed).encode()).digest()


def follows(frame: bytes, row: bytes) -> bytes:
    return sha256(frame + row).digest()


class World:
    """The dynamics stage of one session. `frames` None: it has no state."""

    def __init__(self) -> None:
        self.frames: list[bytes] | None = None
        self.refused = ""
        """Why it is no fork: its first cut is refused for that."""

    def copy(self) -> "World":
        other = World()
        other.frames = None if self.frames is None else list(self.frames)
        return other

    def hear(self, payload: Payload) -> Payload:
        """The answer, with the number of what it answers."""
        answer = self._hear(payload)
        ask = {name: value for name, value in payload.meta.items() if name == "ask"}
        return replace(answer, meta={**answer.meta, **ask})

    def _hear(self, payload: Payload) -> Payload:
        step = payload.meta.get("step", -1)
        assert isinstance(step, int)
        if payload.kind == "clear":
            self.frames = None
            return Payload("at", {"step": -1})
        if payload.kind == "reset":
            if payload.meta.get("seed") == "bad":
                return Payload("refused", {"code": "bad_reset", "step": -1})
            self.frames = [begun(payload.meta["seed"])]
        elif self.frames is None:
            return Payload("refused", {"code": self.refused or "not_started", "step": step})
        elif payload.kind == "rewind" and step >= len(self.frames):
            return Payload("refused", {"code": "rewind_ahead", "step": step})
        else:
            del self.frames[step + 1 :]
        return Payload("at", {"step": len(self.frames) - 1})

    def step(self, row: bytes) -> bytes:
        assert self.frames is not None
        self.frames.append(follows(self.frames[-1], row))
        return self.frames[-1]

    def snapshot(self) -> Payload | None:
        return (
            None if self.frames is None else Payload("world", {"position": len(self.frames) - 1}, b"".join(self.frames))
        )

    def restore(self, state: Payload) -> None:
        if state.kind == "world":
            body = bytes(state.body)
            self.frames = [body[at : at + 32] for at in range(0, len(body), 32)]


class RolloutDrive(Perform):
    """A rollout, attached, and its stage, whose findings and snapshots come when `answer` lets them."""

    def __init__(
        self, limits: Limits | None = None, session: RolloutSession | None = None, world: World | None = None
    ) -> None:
        now = 5_000 * S
        limits = limits or Limits()
        rollout = session or RolloutSession("sess_1", SLOT, GENERATION, limits, CountedIds(), now, STAGE)
        super().__init__(rollout, now)
        self.rollout = rollout
        self.world = world or World()
        self.owed: list[StageFound | StageSnapshotted] = []
        self.is_prompt = True
        """Answers come at once."""
        self.requests = 0
        self.made: dict[tuple[int, ...], int] = {}
        """Frames that each turn has made."""
        self.tell(Attached(1))

    def tell(self, *inputs: object) -> list[Effect]:
        effects = super().tell(*inputs)  # type: ignore[arg-type]  # the inputs of a rollout
        while self.is_prompt and self.owed and not self.session.closed:
            effects = effects + super().tell(self.owed.pop(0))
        return effects

    def answer(self) -> None:
        """Everything that is owed."""
        while self.owed:
            super().tell(self.owed.pop(0))

    def _perform(self, effect: Effect) -> None:
        super()._perform(effect)
        match effect:
            case Feed(stage, payload):
                assert stage == STAGE
                self.owed.append(StageFound(STAGE, self.world.hear(payload)))
            case Restore(_, payload):
                self.world.restore(payload)
            case TakeSnapshot(_, ticket):
                self.owed.append(StageSnapshotted(STAGE, ticket, self.world.snapshot()))
            case _:
                pass

    # -- the client ------------------------------------------------------------------------------------------------

    def _request(self) -> str:
        self.requests += 1
        return f"request {self.requests}"

    def reset(self, seed: object = 0) -> str:
        request = self._request()
        self.tell(WorldResetAsked(Payload("reset", {"seed": seed}), request))  # type: ignore[dict-item]
        return request

    def step(self, *numbers: int, step: int | None = None, outputs: frozenset[str] = SHOWN) -> str:
        request = self._request()
        self.tell(StepAsked(actions(*numbers), len(numbers), outputs, step, request))
        return request

    def look(self, step: int, frames: int = 1) -> str:
        request = self._request()
        self.tell(LookAsked(step, SHOWN, frames, request))
        return request

    def rewind(self, step: int) -> str:
        request = self._request()
        self.tell(RewindAsked(step, request))
        return request

    def snapshot(self) -> str:
        request = self._request()
        self.tell(WorldSnapshotAsked(request))
        return request

    def restore(self, state: Payload, step: int) -> str:
        request = self._request()
        self.tell(WorldRestoreAsked(state, step, request))
        return request

    # -- the stages ------------------------------------------------------------------------------------------------

    def run(self, frames: int | None = None, shown: int | None = None) -> None:
        """The stage makes so many frames of the latest turn (all), of which `shown` (all) come; at the end it ends."""
        submit = self.submits[-1]
        if submit.stamp[:4] not in self.live:
            return
        if submit.payload.kind == "look":
            self._run_look(submit)
            return
        total = submit.payload.arrays[0].shape[0]
        first = submit.payload.meta["step"]
        assert isinstance(first, int)
        start = self.made.get(submit.stamp[:4], 0)
        stop = total if frames is None else min(total, start + frames)
        body = bytes(submit.payload.body)
        for index in range(start, stop):
            assert self.world.frames is not None and len(self.world.frames) == first + index, "out of order"
            frame = self.world.step(body[index * ROW : (index + 1) * ROW])
            self.made[submit.stamp[:4]] = index + 1
            if shown is None or index - start < shown:
                self._show(submit, index, first + index, frame)
        if stop == total and shown is None:
            self._end(submit)

    def _run_look(self, submit: Submit) -> None:
        step = submit.payload.meta["step"]
        assert isinstance(step, int) and self.world.frames is not None
        self._show(submit, 0, step, self.world.frames[step])
        self._end(submit)

    def _show(self, submit: Submit, seq: int, step: int, frame: bytes) -> None:
        for stage in sorted(submit.outputs):
            self.tell(StageSpoke(submit.stamp._replace(seq=seq), stage, Payload("frame", {"step": step}, frame)))

    def _end(self, submit: Submit, outcome: Outcome = Outcome.DONE, reason: str = "") -> None:
        for stage in sorted(submit.outputs):
            self.tell(StageEnded(submit.stamp, stage, outcome, reason))

    def run_all(self) -> None:
        """Whatever is asked of the stages."""
        for _ in range(1000):
            if not self.live:
                return
            self.run()
        raise AssertionError("it never comes to an end")

    def broke(self, reason: str = "stage_error") -> None:
        submit = self.submits[-1]
        self._end(submit, Outcome.FAILED, reason)

    def kill(self, stage: str = STAGE) -> None:
        """The replica dies; what it had and what it owed is gone."""
        if stage == STAGE:
            self.world.frames = None
            tickets = [owed.ticket for owed in self.owed if isinstance(owed, StageSnapshotted)]
            self.owed = []
            self.tell(StageLost(stage), *(StageSnapshotted(STAGE, ticket, None) for ticket in tickets))
        else:
            self.tell(StageLost(stage))

    # -- what came -------------------------------------------------------------------------------------------------

    def frames(self, request: str) -> dict[int, bytes]:
        """The frames of the request by their numbers, in the order in which they came."""
        found: dict[int, bytes] = {}
        for spoke in self.all(TurnSpoke):
            if spoke.request_id == request and spoke.stage == "decoder":
                step = spoke.payload.meta["step"]
                assert isinstance(step, int)
                assert step not in found, "a frame came twice (G7)"
                found[step] = bytes(spoke.payload.body)
        return found

    def ended(self, request: str) -> tuple[str, str]:
        """Status and reason of the one end of the request (G4)."""
        (end,) = [end for end in self.all(TurnDone) if end.request_id == request]
        return end.status, end.reason

    def at(self, request: str) -> int:
        (at,) = [at for at in self.all(RolloutAt) if at.request_id == request]
        return at.step

    def state(self, request: str) -> RolloutSnapshotted:
        (state,) = [state for state in self.all(RolloutSnapshotted) if state.request_id == request]
        return state

    def refused(self, request: str) -> list[str]:
        return [error.code for error in self.all(ErrorTold) if error.event_id == request]


def dreamt(seed: object, *numbers: int) -> list[bytes]:
    """Every frame from 0, made without a session."""
    frames = [begun(seed)]
    for number in numbers:
        frames.append(follows(frames[-1], number.to_bytes(ROW, "little")))
    return frames


__all__ = ["BOTH", "MS", "SHOWN", "STAGE", "RolloutDrive", "S", "World", "actions", "dreamt", "reset"]
