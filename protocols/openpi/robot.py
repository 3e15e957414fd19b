"""A robot on a connection: its requests become turns of its session, and the turns' ends become answers.

Every request is answered exactly once. Requests without an id are answered in the order in which they came, because
their clients can't tell one answer from another; those with an id as soon as they can be. An answer that a fence has
made stale meanwhile is not sent; its request is told why instead.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from omni_live.protocols.arrays import BadPayload, array
from omni_live.protocols.desk import Line
from omni_live.protocols.openpi import dialects
from omni_live.protocols.openpi.dialects import Infer, Reset
from omni_live.sessions.effects import Effect, Emit, RaiseFence, Release, Replace
from omni_live.sessions.events import ErrorTold, TurnDone, TurnSpoke
from omni_live.sessions.inputs import Asked, CancelAsked, CloseAsked, Detached, EventAcked, Input, ResetAsked
from omni_live.sessions.payload import Payload
from omni_live.sessions.stamp import LANES, Fence, Stamp
from omni_live.sessions.turn import TurnState

STAGE: Final = "policy"
"""The one stage of a pipeline that has a contract."""

ANSWER_BYTES: Final = 512
"""What an answer that waits counts for beside its content."""

UNDATED_MS: Final = 1000.0
"""A request that names no deadline is due so long after it came: those that name an earlier one go first."""

_TIMING: Final = ("infer_ms", "queue_ms", "batch", "replica", "continued", "clamped", "deadline_missed")
"""What the stage says of a chunk that goes into `server_timing`."""

WHY: Final[Mapping[str, str]] = {
    "reset": "The session was reset before this chunk was out.",
    "superseded": "A later observation took this one's place.",
    "client_cancelled": "The request was cancelled.",
    "action_not_finite": "The policy made an action that is no finite number; it was held back.",
    "action_out_of_range": "The policy made an action out of its range; it was held back.",
    "replica_lost": "The policy's process died during this request; the session goes on.",
    "replica_unavailable": "The policy is not ready.",
    "timeout": "The policy took too long for this request.",
    "drained": "The server is going away.",
}


@dataclass(slots=True, eq=False)
class Pending:
    """A request on its way to its answer."""

    asked: Infer | Reset
    came_s: float
    nbytes: int = 0
    answer: str | bytes | None = None
    admits: Callable[[], bool] | None = None
    """Of an answer that a fence may take back: whether it still counts."""
    is_settled: bool = False

    def frame(self) -> str | bytes:
        """What is sent, decided when the socket takes it."""
        if self.answer is None or (self.admits is not None and not self.admits()):
            return dialects.error(self.asked.dialect, "reset", WHY["reset"], self.asked.request_id)
        return self.answer


@dataclass(slots=True)
class Answers:
    """What one connection owes its client."""

    nbytes: int = 0
    """Of the observations that wait or are worked on."""
    ready_bytes: int = 0
    _order: deque[Pending] = field(default_factory=deque)
    _ready: deque[Pending] = field(default_factory=deque)

    def expect(self, pending: Pending) -> None:
        self.nbytes += pending.nbytes
        if pending.asked.request_id is None:
            self._order.append(pending)

    def settle(self, pending: Pending, answer: str | bytes, admits: Callable[[], bool] | None = None) -> None:
        pending.answer, pending.admits, pending.is_settled = answer, admits, True
        self.nbytes -= pending.nbytes
        self.ready_bytes += len(answer) + ANSWER_BYTES
        if pending.asked.request_id is not None:
            self._ready.append(pending)
            return
        while self._order and self._order[0].is_settled:
            self._ready.append(self._order.popleft())

    def next(self) -> Pending | None:
        """The next one to send."""
        if not self._ready:
            return None
        pending = self._ready.popleft()
        self.ready_bytes -= len(pending.answer or "") + ANSWER_BYTES
        return pending


class Robot:
    """A session of a connection, and its mailbox. `now` gives seconds; `wake` is called when an answer is there."""

    def __init__(
        self,
        name: str | None,
        answers: Answers,
        now: Callable[[], float],
        wake: Callable[[], None],
        over: Callable[["Robot", str, bool], None],
    ) -> None:
        self.name = name
        """The client's name for it; None for the connection's own."""
        self.line: Line | None = None
        self._answers = answers
        self._now = now
        self._wake = wake
        self._over = over
        self._pending: dict[str, Pending] = {}
        self._fence: Fence | None = None
        self._is_replaced = False
        """What fences are raised now, this mailbox does not hear."""
        self._seen = 0
        """Output that need not be kept any longer."""
        self._total_ms: float | None = None

    def ask(self, pending: Pending, asked: Infer, payload: Payload, request_id: str) -> None:
        self._pending[request_id] = pending
        if self._seen:
            self._tell(EventAcked(self._seen))
            self._seen = 0
        due_ms = UNDATED_MS if asked.deadline_ms is None else asked.deadline_ms
        outputs = frozenset((STAGE,))
        self._tell(Asked(STAGE, outputs, payload, request_id=request_id, due_ms=due_ms, latest=asked.latest))

    def reset(self) -> None:
        self._tell(ResetAsked((STAGE,)))

    def leave(self) -> None:
        """The connection is gone. What was asked is given up: on the next one it would answer another request."""
        if self.line is None:
            return
        if self.name is None:
            self._tell(CloseAsked("disconnected"))
            return
        for request_id in tuple(self._pending):
            self._tell(CancelAsked(request_id))
        self._tell(Detached(self.line.attachment))

    def drop(self) -> None:
        """Give up a session that nothing was asked of."""
        line, self.line = self.line, None
        if line is not None:
            line.tell(CloseAsked("superseded"))

    # -- protocols.desk.Mailbox

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Emit():
                    self._told(effect)
                case RaiseFence(fence):
                    if fence.slot % LANES == 0:
                        self._fence = fence
                case Replace():
                    self._is_replaced = True
                    self._end("replaced", "Another connection has taken over this session.")
                case Release(reason):
                    self._end(reason, "The session is closed.")
                case _:
                    pass  # the orchestrator's business
        self._wake()

    def _told(self, emit: Emit) -> None:
        match emit.event:
            case TurnSpoke(request_id, _, _, payload):
                pending = self._pending.get(request_id)
                if pending is not None and isinstance(pending.asked, Infer):
                    self._spoke(pending, pending.asked, payload, emit.content)
            case TurnDone(request_id, _, status, reason):
                self._done(request_id, status, reason)
                self._seen = emit.seq
            case ErrorTold(code, message, event_id):
                self._refuse(self._pending.pop(event_id or "", None), code, message)
            case _:
                pass  # a robot is told nothing else

    def _spoke(self, pending: Pending, asked: Infer, payload: Payload, content: Stamp | None) -> None:
        try:
            actions = array(payload, "actions")
        except BadPayload:
            return  # its end finds no answer
        timing: dict[str, int | float | bool] = {}
        for name in _TIMING:
            found = payload.meta.get(name)
            if isinstance(found, int | float):
                timing[name] = found
        if self._total_ms is not None:
            timing["prev_total_ms"] = self._total_ms
        pending.answer = dialects.reply(asked, actions, timing)
        pending.admits = None if content is None else lambda: self._admits(content)

    def _done(self, request_id: str, status: str, reason: str) -> None:
        pending = self._pending.pop(request_id, None)
        if pending is None:
            return
        if status == TurnState.DONE.value and pending.answer is not None:
            self._total_ms = round((self._now() - pending.came_s) * 1000, 3)
            self._answers.settle(pending, pending.answer, pending.admits)
        else:
            code = reason or "policy_error"
            self._refuse(pending, code, WHY.get(code, "The policy failed on this request."))

    def _end(self, reason: str, message: str) -> None:
        """The session is over, or somebody else's."""
        waiting, self._pending = self._pending, {}
        for pending in waiting.values():
            self._refuse(pending, f"session_{reason}", message)
        self._over(self, reason, bool(waiting))
        self.line = None

    def _refuse(self, pending: Pending | None, code: str, message: str) -> None:
        if pending is not None:
            asked = pending.asked
            self._answers.settle(pending, dialects.error(asked.dialect, code, message, asked.request_id))

    def _admits(self, content: Stamp) -> bool:
        return not self._is_replaced and (self._fence is None or self._fence.admits(content))

    def _tell(self, told: Input) -> None:
        if self.line is not None:
            self.line.tell(told)
