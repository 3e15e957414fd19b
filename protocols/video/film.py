"""A video on a connection: a rollout whose frames are made in blocks, along an action that the client may change.

A block is begun when its actions are settled. Blocks are begun one at a time, each when the one before is made and
little enough of what was begun is still to be played: paced, never more than `AHEAD` blocks beyond real time; unpaced,
never more than `AHEAD` that are not sent. An interaction therefore finds nothing asked that it would have to take
back: it changes every block that is not begun, and which frame comes first of those is known at once.

A begun block stays what it is. Frames that a fence made stale (their replica died) are looked at again; those that
were never made are made, with the same actions.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_live.protocols.arrays import BadPayload, array, pack
from omni_live.protocols.desk import Line
from omni_live.protocols.fields import Wire
from omni_live.protocols.video.messages import FORMAT, Floats, Interaction, Start
from omni_live.protocols.websocket.outbox import CLOSE_CODES, NORMAL, TRY_AGAIN
from omni_live.protocols.world.contract import WorldContract
from omni_live.sessions import events as ev
from omni_live.sessions.effects import Effect, Emit, RaiseFence, Release
from omni_live.sessions.inputs import CancelAsked, CloseAsked, EventAcked, Input, LookAsked, StepAsked, WorldResetAsked
from omni_live.sessions.payload import Payload
from omni_live.sessions.stamp import Fence, Stamp
from omni_live.sessions.turn import TurnState

AHEAD: Final = 2
"""Blocks beyond what is being played, or where nothing is paced, that are not sent."""
ATTEMPTS: Final = 3
"""So often in a row a request may bring no frame; then the video ends."""
_EVENTS: Final = 1024
"""Ids of interactions that are remembered. Reached: the oldest may be used again."""
_SLACK_S: Final = 1e-6

Message = dict[str, Wire]
Picture = NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class Block:
    """Frames that go out together. A video's frame n is what the world shows after n + 1 actions."""

    index: int
    first: int
    """Number of its first frame in the video."""
    actions: Floats
    """(frames, *action)"""
    started: tuple[str, ...]
    """Interactions that take effect with it."""
    active: tuple[str, ...]
    completed: tuple[str, ...]
    pictures: list[Picture] = field(default_factory=list)
    contents: list[Stamp] = field(default_factory=list)
    seq: int = 0
    """Of the last event that brought a picture."""

    @property
    def is_whole(self) -> bool:
        return len(self.pictures) == len(self.actions)


class Film:
    """One video: its session's mailbox. `say` takes messages for the client, `wake` hears that there may be more to do.

    Times are seconds of one monotonic clock.
    """

    def __init__(
        self,
        request_id: str,
        start: Start,
        contract: WorldContract,
        stage: str,
        say: Callable[[Message], None],
        wake: Callable[[], None],
    ) -> None:
        """`stage` is the one that makes pictures."""
        self.request_id = request_id
        self.contract = contract
        self.close_code: int | None = None
        """Set when the video is over."""
        self._start = start
        self._stage = stage
        self._say_it = say
        self._wake = wake
        self._line: Line | None = None
        self._is_running = False
        self._position = -1
        """The rollout's last frame that is made; the video's frame n is the rollout's n + 1."""
        self._fences: dict[int, Fence] = {}
        self._asked: str | None = None
        """The request under way."""
        self._asks = 0
        self._attempts = 0
        self._blocks: deque[Block] = deque()
        """Begun and not sent."""
        self._next_block = 0
        self._next_frame = 0
        self._track, self._track_from = start.track, 0
        self._active: tuple[str, ...] = ()
        self._pending: tuple[str, Floats] | None = None
        self._events: deque[str] = deque(maxlen=_EVENTS)
        self._numbers = 0
        self._chunks = self._frames = 0
        """Sent."""
        self._played_s = 0.0
        """When all that is sent will have been played."""

    # -- from the client

    def attach(self, line: Line) -> None:
        """Begin: the session is open."""
        self._line = line
        self._ask(lambda request_id: WorldResetAsked(self._start.begin, request_id))

    def interact(self, asked: Interaction) -> None:
        """Answered with `session.interaction.queued`, which names the first frame that it touches, or an error."""
        if self.close_code is not None:
            return  # `session.done` is the last word
        event_id = asked.event_id or self._made_up()
        if self._is_all_begun:
            self._refuse("no_frames_left", "Every frame of the video is made or begun.", event_id)
            return
        if event_id in self._events:
            self._refuse("event_id_conflict", "There was an interaction of that id.", event_id)
            return
        self._drop_pending("superseded")
        self._events.append(event_id)
        self._pending = event_id, asked.track
        self._say("session.interaction.queued", event_id=event_id, first_frame=self._next_frame)
        self._wake()

    def stop(self) -> None:
        """Make and send nothing more."""
        self._end("stopped")

    def leave(self) -> None:
        """The connection is gone."""
        self._tell(CloseAsked("close_requested"))
        self._line = None

    # -- what is to be done now

    def beat(self, now_s: float) -> float | None:
        """Begin what may be begun; when to be called again, None where something must happen first."""
        if not self._is_running or self.close_code is not None:
            return None
        due_s = self._due_s(now_s)
        if due_s is not None and due_s <= now_s + _SLACK_S:
            self._begin()
            due_s = None
        self._ask_on()
        return due_s

    def _due_s(self, now_s: float) -> float | None:
        """When the next block may be begun as far as time decides, None where time does not."""
        if self._is_all_begun or not all(block.is_whole for block in self._blocks):
            return None
        if not self._start.paced:
            return now_s if len(self._blocks) < AHEAD else None
        waiting = sum(len(block.actions) for block in self._blocks)
        ahead = (AHEAD - 1) * self._start.block_frames
        return max(self._played_s, now_s) + (waiting - ahead) / self._start.fps

    def next(self) -> Block | None:
        """The block that is to be sent now. It stays the next one until it was `sent`, or a fence took it back."""
        return self._blocks[0] if self._blocks and self._blocks[0].is_whole else None

    def sent(self, block: Block, now_s: float) -> None:
        """The block was handed to the client."""
        assert self.next() is block
        self._blocks.popleft()
        self._chunks += 1
        self._frames += len(block.actions)
        self._played_s = max(self._played_s, now_s) + len(block.actions) / self._start.fps
        self._tell(EventAcked(block.seq))  # the journal need not keep it: nobody resumes a video
        if self._is_all_begun and not self._blocks:
            self._end("complete")

    def described(self, block: Block, init_bytes: int, nbytes: int) -> Message:
        """The message before the block's fragment, of `nbytes`, of which the first `init_bytes` are the file's head."""
        actions: Wire = block.actions.astype(float).tolist()
        return {
            "type": "video.chunk_metadata",
            "request_id": self.request_id,
            "kind": "media",
            "transport_chunk_index": block.index,
            "generation_chunk_index": block.index,
            "first_frame": block.first,
            "num_frames": len(block.actions),
            "fps": self._start.fps,
            "byte_length": nbytes,
            "init_length": init_bytes,
            "actions": actions,
            "started_event_ids": list(block.started),
            "active_event_ids": list(block.active),
            "completed_event_ids": list(block.completed),
        }

    def fail(self, code: str, message: str) -> None:
        """The video cannot go on."""
        self._end(code, message)

    @property
    def fps(self) -> float:
        return self._start.fps

    # -- blocks

    @property
    def _is_all_begun(self) -> bool:
        return self._start.num_frames is not None and self._next_frame >= self._start.num_frames

    def _begin(self) -> None:
        started: tuple[str, ...] = ()
        completed: tuple[str, ...] = ()
        first = self._next_frame
        if self._pending is not None:
            event_id, self._track = self._pending
            self._pending, self._track_from = None, first
            started, completed, self._active = (event_id,), self._active, (event_id,)
            self._say("interaction.applied", event_id=event_id, first_frame=first, chunk=self._next_block)
        most, frames = self._start.num_frames, self._start.block_frames
        count = frames if most is None else min(frames, most - first)
        rows = np.minimum(np.arange(first, first + count) - self._track_from, len(self._track) - 1)
        self._blocks.append(Block(self._next_block, first, self._track[rows], started, self._active, completed))
        self._next_block += 1
        self._next_frame += count

    def _ask_on(self) -> None:
        """Ask for frames of the first block that lacks some."""
        block = next((block for block in self._blocks if not block.is_whole), None)
        if block is None or self._asked is not None:
            return
        had = len(block.pictures)
        step, lacks = block.first + had + 1, len(block.actions) - had
        outputs = frozenset({self._stage})
        if step <= self._position:
            made = min(lacks, self._position - step + 1)
            self._ask(lambda request_id: LookAsked(step, outputs, made, request_id))
        else:
            actions = pack("actions", actions=block.actions[had:])
            self._ask(lambda request_id: StepAsked(actions, lacks, outputs, step, request_id))

    def _ask(self, asking: Callable[[str], Input]) -> None:
        self._asks += 1
        self._asked = f"{self.request_id}.{self._asks}"
        self._tell(asking(self._asked))

    # -- protocols.desk.Mailbox

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Emit():
                    self._told(effect)
                case RaiseFence(fence):
                    self._fences[fence.slot] = fence
                    self._drop_stale()
                case Release(reason):
                    self._line = None
                    self._end(reason, "The session is closed.")
                case _:
                    pass  # the orchestrator's business
        self._wake()

    def _told(self, emit: Emit) -> None:
        match emit.event:
            case ev.TurnSpoke(request_id, _, _, payload) if request_id == self._asked and emit.content is not None:
                self._shown(payload, emit.content, emit.seq)
            case ev.RolloutAt(_, step):
                self._position = step
            case ev.TurnDone(request_id, _, status, reason) if request_id == self._asked:
                self._asked = None
                self._answered(status == TurnState.DONE.value, reason or status)
            case ev.ErrorTold(code, message, event_id) if event_id is not None and event_id == self._asked:
                self._asked = None
                self._end(code, message)
            case _:
                pass  # a video is told nothing else

    def _shown(self, payload: Payload, content: Stamp, seq: int) -> None:
        block = next((block for block in self._blocks if not block.is_whole), None)
        if block is None or not self._admits(content):
            return
        try:
            picture = np.asarray(array(payload, "image"), np.uint8)
        except BadPayload:
            picture = np.zeros((0, 0, 3), np.uint8)
        wanted = block.first + len(block.pictures) + 1
        if picture.shape != self.contract.frame or payload.meta.get("step") != wanted:
            self._end("bad_frame", "The world made no frame.")
            return
        block.pictures.append(picture)
        block.contents.append(content)
        block.seq = seq
        self._attempts = 0

    def _answered(self, is_done: bool, reason: str) -> None:
        if self._is_running:
            self._attempts += not is_done
            if self._attempts >= ATTEMPTS:
                self._end(reason, "The world made no more frames.")
        elif is_done:
            self._is_running = True
            self._say("video.start", format=FORMAT, config=self._config())
        else:
            self._end(reason, "The world could not begin.")

    def _config(self) -> Message:
        height, width, _ = self.contract.frame
        start = self._start
        return {
            "model": start.model,
            "seed": start.seed,
            "width": width,
            "height": height,
            "fps": start.fps,
            "num_frames": start.num_frames,
            "block_frames": start.block_frames,
            "paced": start.paced,
        }

    def _admits(self, content: Stamp) -> bool:
        fence = self._fences.get(content.slot)
        return fence is None or fence.admits(content)

    def _drop_stale(self) -> None:
        for block in self._blocks:
            if not all(map(self._admits, block.contents)):
                block.pictures, block.contents = [], []

    # -- the end

    def _end(self, reason: str, message: str | None = None) -> None:
        """The video is over; `message` says what went wrong, where something did."""
        if self.close_code is not None:
            return
        self.close_code = NORMAL if message is None else CLOSE_CODES.get(reason, TRY_AGAIN)
        self._drop_pending(reason)
        self._blocks.clear()
        if message is not None:
            self._refuse(reason, message)
        stopped = reason == "stopped"
        self._say("session.done", chunks=self._chunks, frames=self._frames, stopped=stopped, reason=reason)
        asked, self._asked = self._asked, None
        if asked is not None:
            self._tell(CancelAsked(asked))
        self._tell(CloseAsked("close_requested"))
        self._wake()

    def _drop_pending(self, reason: str) -> None:
        if self._pending is not None:
            self._say("interaction.dropped", event_id=self._pending[0], reason=reason)
            self._pending = None

    def _made_up(self) -> str:
        self._numbers += 1
        return f"event-{self._numbers}"

    def _refuse(self, code: str, message: str, event_id: str | None = None) -> None:
        facts: Message = {} if event_id is None else {"event_id": event_id}
        self._say("error", code=code, message=message, **facts)

    def _say(self, kind: str, **facts: Wire) -> None:
        self._say_it({"type": kind, "request_id": self.request_id, **facts})

    def _tell(self, input: Input) -> None:
        if self._line is not None:
            self._line.tell(input)
