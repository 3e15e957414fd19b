"""A rollout on a connection: its session's events become messages, and its requests wait for the client's credit.

A session's messages go out in order. A frame goes out only against credit, and what comes behind it waits with it.
Steps and looks are put to the session only while all the frames that they may bring have credit (one request is let
through alone, however long it is), so that a client that stops reading stops the engine and fills no memory here.
Whatever moves the rollout, or cancels, overtakes: the session ends what it finds waiting.

Frames that a fence made stale are dropped; the `done` of their request says where the rollout stands.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

import numpy as np

from omni_live.protocols.arrays import BadPayload, array
from omni_live.protocols.desk import Line
from omni_live.protocols.fields import Wire
from omni_live.protocols.world.arrays import RAW, array_value, picture_value, seal
from omni_live.protocols.world.contract import Served
from omni_live.protocols.world.messages import Show
from omni_live.sessions import events as ev
from omni_live.sessions.effects import Effect, Emit, RaiseFence, Release, Replace
from omni_live.sessions.inputs import (
    CancelAsked,
    CloseAsked,
    Detached,
    EventAcked,
    Heartbeat,
    Input,
    LookAsked,
    StepAsked,
    WorldSnapshotAsked,
)
from omni_live.sessions.stamp import Fence, Stamp

MESSAGE_BYTES: Final = 256
"""What a message counts for beside its content."""

Message = dict[str, Wire]
Asks = StepAsked | LookAsked | WorldSnapshotAsked


@dataclass(frozen=True, slots=True)
class Item:
    """A message on its way out; of a frame, what it is made of when the socket takes it."""

    message: Message
    frame: ev.TurnSpoke | None = None
    content: Stamp | None = None
    form: str = RAW
    nbytes: int = MESSAGE_BYTES


class Rollout:
    """One session, as its client sees it: the session's mailbox. `wake` is called when something may be sent."""

    def __init__(
        self,
        model: str,
        world: Served,
        show: Show,
        credits: int,
        wake: Callable[["Rollout"], None],
        over: Callable[["Rollout", str], None],
        *,
        most_waiting: int,
    ) -> None:
        self.model = model
        self.world = world
        self.show = show
        self.line: Line | None = None
        self.session_id = ""
        self.position = -1
        """Number of the last frame that the session told of."""
        self.credits = credits if show.credits is None else show.credits
        self.nbytes = 0
        self._stages = world.outputs
        self._names = {stage: output for output, stage in world.outputs.items()}
        self._wake = wake
        self._over = over
        self._most_waiting = most_waiting
        self._items: deque[Item] = deque()
        self._asked: deque[Asks] = deque()
        """Steps and looks that wait for credit, and snapshots behind them."""
        self._owed: dict[str, int] = {}
        """Frames that each request may still bring."""
        self._frames_waiting = 0
        self._fences: dict[int, Fence] = {}
        self._forms: dict[str, str] = {}
        """Formats of requests that named one."""
        self._resumed: ev.SessionResumed | None = None
        self.expires_in_s = 0.0
        self._is_over = False

    def attach(self, line: Line) -> None:
        self.line, self.session_id = line, line.session_id

    # -- from the client

    def ask(self, input: Input, form: str | None = None) -> None:
        """Put it to the session, now or when there is credit for it."""
        match input:
            case StepAsked() | LookAsked():
                outputs = input.outputs or frozenset(self.show.outputs)
                self._queue(replace(input, outputs=frozenset(self._stages[name] for name in outputs)), form)
            case WorldSnapshotAsked():
                self._queue(input, None)
            case CancelAsked(target) if target is not None and self._withdrawn(target):
                self._say("done", target, status="interrupted", reason="client_cancelled", step=self.position)
                self._wake(self)
            case CancelAsked() | CloseAsked() | EventAcked() | Heartbeat():
                self.tell(input)
            case _:  # it moves the rollout: the session ends what waits
                self._put_all()
                self.tell(input)

    def _withdrawn(self, request_id: str) -> bool:
        """Take back what was never put to the session."""
        found = next((asked for asked in self._asked if asked.request_id == request_id), None)
        if found is None:
            return False
        self._asked.remove(found)
        self._forms.pop(request_id, None)
        return True

    def _queue(self, asked: Asks, form: str | None) -> None:
        if len(self._asked) >= self._most_waiting:
            self._say("error", asked.request_id, code="mailbox_full", message="Too many requests wait in this session.")
            self._wake(self)
            return
        if form is not None:
            self._forms[asked.request_id] = form
        self._asked.append(asked)
        self._put_what_may()

    def credit(self, frames: int) -> None:
        self.credits += frames
        self._put_what_may()
        self._wake(self)

    def tell(self, input: Input) -> None:
        if self.line is not None:
            self.line.tell(input)

    def leave(self) -> None:
        """The connection is gone; the session waits for its client to come back."""
        if self.line is not None:
            self.tell(Detached(self.line.attachment))

    def discard(self) -> None:
        """Close a session of which the client was told nothing, and never tell of it."""
        self._is_over = True
        self._items.clear()
        self.nbytes = 0
        self.tell(CloseAsked("close_requested"))

    def _put_what_may(self) -> None:
        while self._asked:
            owed, wanted = self._frames_waiting + sum(self._owed.values()), _frames(self._asked[0])
            if wanted and owed and owed + wanted > self.credits:
                return
            self._put(self._asked.popleft())

    def _put_all(self) -> None:
        while self._asked:
            self._put(self._asked.popleft())

    def _put(self, asked: Asks) -> None:
        if not isinstance(asked, WorldSnapshotAsked):
            self._owed[asked.request_id] = self._owed.get(asked.request_id, 0) + _frames(asked)
        self.tell(asked)

    # -- to the client

    @property
    def is_sendable(self) -> bool:
        return bool(self._items) and (self._items[0].frame is None or self.credits > 0)

    def pop(self) -> Item | None:
        """The next thing to send; None where there is nothing, or no credit for it."""
        if not self.is_sendable:
            return None
        item = self._items.popleft()
        self.nbytes -= item.nbytes
        if item.frame is not None:
            self.credits -= 1
            self._frames_waiting -= 1
            self._put_what_may()
        return item

    def admits(self, item: Item) -> bool:
        """Whether it may still be sent."""
        fence = None if item.content is None else self._fences.get(item.content.slot)
        return fence is None or item.content is None or fence.admits(item.content)

    def written(self, item: Item) -> Message:
        """The message; of a large picture that is to be compressed this takes milliseconds."""
        if item.frame is None:
            return item.message
        payload = item.frame.payload
        try:
            made = array(payload, "latent" if payload.kind == "latent" else "image")
        except BadPayload:
            return {**item.message, "type": "error", "code": "bad_frame", "message": "The world made no frame."}
        if payload.kind == "latent":
            return {**item.message, "latent": array_value(np.asarray(made, np.float32))}
        return {**item.message, "image": picture_value(np.asarray(made, np.uint8), item.form)}

    # -- protocols.desk.Mailbox

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Emit():
                    self._told(effect)
                case RaiseFence(fence):
                    self._fences[fence.slot] = fence
                    self._drop_stale()
                case Replace():
                    self._end("replaced")
                case Release(reason):
                    self._end(reason)
                case _:
                    pass  # the orchestrator's business
        self._put_what_may()
        self._wake(self)

    def _told(self, emit: Emit) -> None:
        seq = emit.seq
        match emit.event:
            case ev.TurnSpoke():
                self._frame(emit, emit.event)
            case ev.RolloutAt(request_id, step):
                self.position = step
                if not request_id and self._resumed is not None:
                    self._say_resumed(self._resumed)
            case ev.TurnDone(request_id, _, status, reason):
                self._forget(request_id)
                self._say("done", request_id, seq, status=status, reason=reason, step=self.position)
            case ev.RolloutSnapshotted(request_id, step, state):
                blob = seal(step, state)
                self._say("snapshot", request_id, seq, step=step, blob=blob)
            case ev.ErrorTold(code, message, event_id):
                self._forget(event_id or "")
                self._say("error", event_id, seq, code=code, message=message)
            case _:
                self._told_of_session(emit.event, seq)

    def _told_of_session(self, event: ev.Event, seq: int) -> None:
        match event:
            case ev.SessionCreated():
                self.expires_in_s = event.expires_at_s
            case ev.SessionResumed():
                self._resumed = event  # told with the position, which comes next
            case ev.ResyncRequired():
                self._say("session.resync", None, seq, **{"from": event.first, "to": event.last}, reason=event.reason)
            case ev.SessionExpiring(left_s):
                self._say("session.expiring", None, seq, in_s=left_s)
            case ev.SessionReplaced():
                self._give_up("replaced")
                self._say("session.replaced", None)
            case ev.SessionClosed(reason):
                self._give_up(reason)
                self._say("session.closed", None, seq, reason=reason, step=self.position)
            case ev.HeartbeatAcked(event_id):
                self._say("heartbeat", event_id)
            case _:
                pass  # the door says itself what it opened

    def _say_resumed(self, event: ev.SessionResumed) -> None:
        self._resumed = None
        voids: Wire = [list(void) for void in event.voids]
        self._say("session.resumed", None, token=event.resume_token, step=self.position, voids=voids)

    def _forget(self, request_id: str) -> None:
        self._owed.pop(request_id, None)
        self._forms.pop(request_id, None)

    def _frame(self, emit: Emit, spoke: ev.TurnSpoke) -> None:
        step = spoke.payload.meta.get("step")
        output = self._names.get(spoke.stage, "frame")
        form = RAW if output == "latent" else self._forms.get(spoke.request_id, self.show.form)
        message: Message = {
            "type": "frame",
            "session_id": self.session_id,
            "seq": emit.seq,
            "request_id": spoke.request_id,
            "step": step if isinstance(step, int) else -1,
            "output": output,
            "format": form,
        }
        item = Item(message, spoke, emit.content, form, spoke.payload.nbytes + MESSAGE_BYTES)
        self._pay(spoke.request_id)
        if self.admits(item) and not self._is_over:
            self._frames_waiting += 1
            self._add(item)

    def opened(self, request_id: str, facts: Message) -> None:
        """Tell the client of the session that it has now."""
        line = self.line
        token = "" if line is None else line.token
        own: Message = {"token": token, "step": self.position, "expires_in_s": self.expires_in_s}
        message = self._message("session.opened", request_id, 0, {**own, **facts})
        self._items.appendleft(Item(message))
        self.nbytes += MESSAGE_BYTES
        self._wake(self)

    def _say(self, kind: str, request_id: str | None, seq: int = 0, **fields: Wire) -> None:
        message = self._message(kind, request_id, seq, fields)
        blob = fields.get("blob")
        self._add(Item(message, nbytes=MESSAGE_BYTES + (len(blob) if isinstance(blob, bytes) else 0)))

    def _message(self, kind: str, request_id: str | None, seq: int, fields: Message) -> Message:
        message: Message = {"type": kind}
        if self.session_id:
            message["session_id"] = self.session_id
        if seq:
            message["seq"] = seq
        if request_id:
            message["request_id"] = request_id
        return {**message, **fields}

    def _add(self, item: Item) -> None:
        if not self._is_over:
            self._items.append(item)
            self.nbytes += item.nbytes

    def _pay(self, request_id: str) -> None:
        left = self._owed.get(request_id, 0) - 1
        if left > 0:
            self._owed[request_id] = left
        else:
            self._owed.pop(request_id, None)

    def _drop_stale(self) -> None:
        kept = deque(item for item in self._items if self.admits(item))
        if len(kept) != len(self._items):
            self._items = kept
            self.nbytes = sum(item.nbytes for item in kept)
            self._frames_waiting = sum(item.frame is not None for item in kept)

    def _end(self, reason: str) -> None:
        """The session is over, or somebody else's."""
        if self._is_over:
            return
        self._give_up(reason)
        self._is_over = True
        self._over(self, reason)

    def _give_up(self, reason: str) -> None:
        """What was never put to the session."""
        for asked in self._asked:
            self._say("done", asked.request_id, status="interrupted", reason=reason, step=self.position)
        self._asked.clear()


class Outlet:
    """What a connection has to send, of all its rollouts, one after the other in turns."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._ready: deque[Rollout] = deque()
        self._queued: set[int] = set()
        self._own: deque[Item] = deque()
        self._wake = wake

    def woke(self, rollout: Rollout) -> None:
        """The rollout may have something."""
        if rollout.is_sendable and id(rollout) not in self._queued:
            self._queued.add(id(rollout))
            self._ready.append(rollout)
        if self._ready:
            self._wake()

    @property
    def nbytes(self) -> int:
        """Of the messages of no session that wait."""
        return len(self._own) * MESSAGE_BYTES

    def say(self, message: Message) -> None:
        """A message of no session."""
        self._own.append(Item(message))
        self._wake()

    def next(self) -> tuple[Rollout | None, Item] | None:
        """What is to be sent now; None where there is nothing."""
        if self._own:
            return None, self._own.popleft()
        while self._ready:
            rollout = self._ready.popleft()
            item = rollout.pop()
            if rollout.is_sendable:
                self._ready.append(rollout)
            else:
                self._queued.discard(id(rollout))
            if item is not None:
                return rollout, item
        return None


def _frames(asked: Asks) -> int:
    return 0 if isinstance(asked, WorldSnapshotAsked) else asked.frames * len(asked.outputs)


def numbered(prefix: str) -> Callable[[], str]:
    """Ids that are told apart from every other connection's by their prefix."""
    numbers = count(1)
    return lambda: f"{prefix}-{next(numbers)}"
