"""A video with a real session behind it, and a world whose pictures say how they came to be."""

from collections import deque
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_live.protocols.arrays import array, pack
from omni_live.protocols.desk import Mailbox
from omni_live.protocols.fields import Wire
from omni_live.protocols.video.film import Block, Film, Message
from omni_live.protocols.video.messages import Start, read
from omni_live.protocols.world.contract import WorldContract
from omni_live.sessions.effects import Abort, Effect, Emit, Feed, RaiseFence, Release, Restore, Submit, TakeSnapshot
from omni_live.sessions.ids import CountedIds
from omni_live.sessions.inputs import (
    Attached,
    Input,
    Outcome,
    StageEnded,
    StageFound,
    StageLost,
    StageSnapshotted,
    StageSpoke,
)
from omni_live.sessions.limits import Limits
from omni_live.sessions.payload import Payload
from omni_live.sessions.rollout import RolloutSession
from omni_live.sessions.settings import Settings

WORLD = WorldContract(frame=(4, 4, 3), latent=(1, 1, 1), action=(2, 2), rate_hz=5.0)
WORLDS = {"world": WORLD}

Picture = NDArray[np.uint8]


def start(**fields: Wire) -> Start:
    asked = read({"type": "session.start", **fields}, WORLDS, None)
    assert isinstance(asked, Start)
    return asked


def begun(seed: object) -> Picture:
    """Frame 0 of the rollout."""
    return _painted(repr(seed).encode())


def follows(picture: Picture, row: NDArray[np.float32]) -> Picture:
    return _painted(picture.tobytes() + row.tobytes())


def dreamt(seed: int, rows: list[Any]) -> list[Picture]:
    """The pictures after each of these frames' actions."""
    pictures = [begun(seed)]
    for row in rows:
        pictures.append(follows(pictures[-1], np.asarray(row, np.float32)))
    return pictures[1:]


def _painted(facts: bytes) -> Picture:
    return np.frombuffer(sha256(facts).digest() + bytes(16), np.uint8).reshape(4, 4, 3)


class House:
    """The session's line, its two stages and the client, without time: nothing happens unless it is told to."""

    def __init__(self, limits: Limits | None = None, **fields: Wire) -> None:
        self.said: list[Message] = []
        self.film = Film("video-1", start(**fields), WORLD, "decoder", self.said.append, lambda: None)
        self._open(limits or Limits(), self.film)
        self.film.attach(self)

    @classmethod
    def behind(cls, mailbox: Mailbox) -> "House":
        """A session for a door's mailbox."""
        house = cls.__new__(cls)
        house._open(Limits(), mailbox)
        return house

    def _open(self, limits: Limits, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self.session = RolloutSession("sess_1", 0, 1, limits, CountedIds(), 0, "dynamics")
        self.pictures: list[Picture] | None = None
        """What the world has; None: nothing."""
        self.turns: deque[Submit] = deque()
        self.turns_begun: list[Submit] = []
        self.seen: list[Picture] = []
        self.told: list[Input] = []
        self._frames_made: dict[int, int] = {}
        """Of each turn."""
        self._inbox: deque[Input] = deque()
        self._is_busy = False
        self.tell(Attached(1))

    # -- protocols.desk.Line

    session_id = "sess_1"
    settings = Settings(model="world")
    attachment = 1
    token = ""

    def tell(self, input: Input) -> None:
        self.told.append(input)
        self._inbox.append(input)
        if self._is_busy:
            return
        self._is_busy = True
        while self._inbox and not self.session.closed:
            effects = self.session.handle(self._inbox.popleft(), 0)
            for effect in sorted(effects, key=lambda effect: not isinstance(effect, RaiseFence)):
                self._perform(effect)
        self._is_busy = False

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Emit() | RaiseFence() | Release():
                self._mailbox.take([effect])
            case Feed(_, payload):
                self._inbox.append(StageFound("dynamics", self._hear(payload)))
            case Submit():
                self.turns.append(effect)
                self.turns_begun.append(effect)
            case Abort():
                self.turns.clear()
            case Restore(_, payload):
                self.pictures = list(array(payload, "pictures").astype(np.uint8))
            case TakeSnapshot(stage, ticket):
                state = None if self.pictures is None else pack("world", pictures=np.stack(self.pictures))
                self._inbox.append(StageSnapshotted(stage, ticket, state))
            case _:
                pass

    def _hear(self, payload: Payload) -> Payload:
        step, ask = payload.meta.get("step", -1), payload.meta["ask"]
        assert isinstance(step, int)
        if payload.kind == "reset":
            self.pictures = [begun(payload.meta["seed"])]
        elif payload.kind == "clear":
            self.pictures = None
        elif self.pictures is None:
            return Payload("refused", {"code": "not_started", "step": step, "ask": ask})
        else:
            del self.pictures[step + 1 :]
        return Payload("at", {"step": len(self.pictures or ()) - 1, "ask": ask})

    # -- the world

    def run(self, frames: int | None = None) -> None:
        """Make so many frames more of the turn that is under way (all of them, and end it)."""
        submit = self.turns[0]
        begun = self._frames_made.get(submit.stamp.turn, 0)
        for number in range(begun, _frames(submit) if frames is None else min(begun + frames, _frames(submit))):
            self._frames_made[submit.stamp.turn] = number + 1
            shown = self._made(submit, number)
            for stage in submit.outputs:
                self.tell(StageSpoke(submit.stamp._replace(seq=number), stage, shown))
        if frames is None:
            self.turns.popleft()
            for stage in submit.outputs:
                self.tell(StageEnded(submit.stamp, stage, Outcome.DONE))

    def _made(self, submit: Submit, number: int) -> Payload:
        assert self.pictures is not None
        first = submit.payload.meta["step"]
        assert isinstance(first, int)
        step = first + number
        if submit.payload.kind == "actions":
            assert len(self.pictures) == step, "out of order"
            row = array(submit.payload, "actions")[number].astype(np.float32)
            self.pictures.append(follows(self.pictures[-1], row))
        return pack("frame", {"step": step}, image=self.pictures[step])

    def break_down(self, reason: str = "world_error") -> None:
        """The turn under way fails; what it made stays made."""
        submit = self.turns.popleft()
        self.tell(StageEnded(submit.stamp, "decoder", Outcome.FAILED, reason))

    def lose_replica(self) -> None:
        """The stage dies, and another has nothing."""
        self.turns.clear()
        self.pictures = None
        self.tell(StageLost("dynamics"))

    # -- the client

    def make(self, now_s: float = 0.0) -> bool:
        """Make what is begun, or one block more; False where none may be begun."""
        self.film.beat(now_s)
        if not self.turns:
            return False
        while self.turns:
            self.run()
            if not all(block.is_whole for block in self.film._blocks):
                self.film.beat(now_s)  # its next request
        return True

    def send(self, now_s: float = 0.0) -> Block | None:
        """Take the next block, where one is ready."""
        block = self.film.next()
        if block is not None:
            self.seen += block.pictures
            self.film.sent(block, now_s)
        return block

    def kinds(self) -> list[Wire]:
        return [message["type"] for message in self.said]

    def last(self, kind: str) -> Message:
        return next(message for message in reversed(self.said) if message["type"] == kind)

    def closes(self) -> bool:
        return self.session.closed


def _frames(submit: Submit) -> int:
    return 1 if submit.payload.kind == "look" else submit.payload.arrays[0].shape[0]
