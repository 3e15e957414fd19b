"""What a client must remember of its rollouts to lose nothing over a dropped socket, and to make nothing twice.

The rules. A request keeps its id until it is over. What came of a session is acknowledged by its last number, and a
resume names that number, so that the server says the rest again. Behind that the client sends a heartbeat: what the
server has not said a word about by the time it answers, was lost on the way, or waits; it is asked again. That is safe
for a step, whose number says which frames are meant: those that are there are shown, not made. It is safe for whatever
says where the rollout is to stand, and for a look. It is not for an open or a fork, which fail if they were sent.

Each frame that the server sends takes a credit. It is given back when the frame came; where frames are iterated, when
they were taken, as long as nothing else is asked of the session that would have to wait for them.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from omni_live.clients.world_errors import Interrupted, RequestFailed, Unrepeatable, WorldError
from omni_live.clients.world_wire import (
    Done,
    Facts,
    Frame,
    Images,
    Latents,
    Message,
    Opened,
    Shown,
    Snapshotted,
    write,
)

ACK_EVERY: Final = 16
"""So many messages behind, an acknowledgement is due."""
ROUNDS: Final = 3
"""So often a request is asked again because frames of it are missing."""
BEAT: Final = "beat-"
RESUME: Final = "resume-"
CANCEL: Final = "cancel-"
"""Begin the ids of what is no request of the application's; the rest names the session, or the request."""


@dataclass(slots=True, eq=False)
class Ask:
    """A request, and what came of it."""

    request_id: str
    message: Message
    repeats: bool = True
    """Asked twice it does no more than once."""
    first: int = 0
    frames: int = 0
    outputs: tuple[str, ...] = ()
    forks: int = 0
    """Sessions that an open or a fork brings."""
    holds: bool = False
    """Its frames keep their credits until they are taken."""

    is_sent: bool = False
    is_heard: bool = False
    """The server has said something about it: it has arrived."""
    is_cancelled: bool = False
    """Nobody needs it; where the rollout stands is known when it is gone."""
    is_over: bool = False
    error: WorldError | None = None
    ready: deque[Frame] = field(default_factory=deque)
    """Whole frames in order, to be taken."""
    opened: list["Book"] = field(default_factory=list)
    blob: bytes = b""
    held: int = 0
    """Messages of frames that keep their credits."""
    came: int = 0
    """Whole frames so far."""
    rounds: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """The server has no more to say about it."""
    _parts: dict[int, dict[str, Images | Latents]] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return self.came >= self.frames

    def takes(self, shown: Shown) -> bool:
        """Whether it is a part of a frame that is not there yet."""
        at = self.first + self.came
        if self.is_over or not at <= shown.step < self.first + self.frames or shown.output not in self.outputs:
            return False
        part = self._parts.setdefault(shown.step, {})
        if shown.output in part:
            return False
        part[shown.output] = shown.content
        while len(self._parts.get(at, ())) == len(self.outputs):
            self.ready.append(_whole(at, self._parts.pop(at)))
            self.came += 1
            at += 1
        return True

    def end(self, error: WorldError | None = None) -> None:
        """What comes of it from now on is nobody's."""
        if not self.is_over:
            self.is_over, self.error = True, error
        self._parts.clear()
        self.news.set()


def _whole(step: int, parts: dict[str, Images | Latents]) -> Frame:
    image, latent = parts.get("frame"), parts.get("latent")
    return Frame(step, _as_image(image), _as_latent(latent))


def _as_image(content: Images | Latents | None) -> Images | None:
    return None if content is None else content.astype("u1", copy=False)


def _as_latent(content: Images | Latents | None) -> Latents | None:
    return None if content is None else content.astype("f4", copy=False)


class Book:
    """One session's. `window` is how many frames the server may send ahead of credit."""

    def __init__(self, opened: Opened, window: int, form: str, outputs: tuple[str, ...]) -> None:
        self.session_id = opened.session_id
        self.facts: Facts = opened.facts
        self.forked_from = opened.forked_from
        self.position = opened.step
        """Number of the last frame that was made, as far as the server has told."""
        self.form, self.outputs = form, outputs
        self.window = window
        self.is_attached = True
        self.error: WorldError | None = None
        """Why the session is over."""
        self.asks: dict[str, Ask] = {}
        self.seen = 0
        """The last number that came."""
        self._token = opened.token
        self._told = 0
        self._owed = 0
        """Credits to give back."""
        self._holders: set[Ask] = set()
        """Requests, be they over, of whose frames some are not taken."""
        self._outbox: deque[Ask | Message] = deque()
        self._next = opened.step + 1
        self._beats = 0
        self._beat = ""
        """Id of the heartbeat behind which all is said that the server has to say; requests wait for it."""
        self._is_beat_sent = False

    # -- what is asked -------------------------------------------------------------------------------------------

    def number(self, frames: int, step: int | None) -> int:
        """The number of a step's first frame: the given one, or the one after all that was asked for."""
        first = self._next if step is None else step
        self._next = max(self._next, first + frames)
        return first

    def put(self, ask: Ask) -> None:
        """Ask, as soon as there is a socket. Raises the error that the session ended with."""
        if self.error is not None:
            raise self.error
        for earlier in (*self.asks.values(), *self._holders):
            self.release(earlier)  # whoever waits for this one would wait for those frames
        self.asks[ask.request_id] = ask
        self._outbox.append(ask)

    def take(self, ask: Ask) -> Frame:
        """The next frame of those that are ready; its credits go back."""
        frame = ask.ready.popleft()
        count = min(ask.held, len(ask.outputs))
        ask.held -= count
        self._owed += count
        if not ask.held:
            self._holders.discard(ask)
        return frame

    def release(self, ask: Ask) -> None:
        """Its frames' credits go back when they come."""
        self._owed += ask.held
        ask.held, ask.holds = 0, False
        self._holders.discard(ask)

    def give_up(self, ask: Ask) -> None:
        """Nobody waits for it any more: it is cancelled, or never asked."""
        self.release(ask)
        self.cancel(ask)
        ask.end()

    def cancel(self, ask: Ask) -> None:
        """Have the server cut it short, if it is one that can be; or don't ask it at all."""
        if ask.request_id not in self.asks or ask.is_cancelled:
            return
        ask.is_cancelled = True
        if not ask.is_sent:
            self._outbox.remove(ask)
            self._drop(ask)
            ask.end(Interrupted("client_cancelled", self.position))
        elif ask.frames:
            self._outbox.append(self._cancelling(ask))

    def cancelled(self) -> Ask | None:
        """A request that is cancelled and not gone yet: until then it is not known which number comes next."""
        return next((ask for ask in self.asks.values() if ask.is_cancelled), None)

    def _cancelling(self, ask: Ask) -> Message:
        return write("cancel", self.session_id, CANCEL + ask.request_id, target=ask.request_id)

    def _drop(self, ask: Ask) -> None:
        """The server has no more to say about it."""
        self.asks.pop(ask.request_id, None)
        ask.gone.set()
        if not any(ask.frames for ask in self.asks.values()):
            self._next = self.position + 1  # what was asked for and not made is asked for no more

    # -- what is said --------------------------------------------------------------------------------------------

    def next(self) -> Message | None:
        """What is to be sent now, in order; None where there is nothing, or no socket."""
        if not self.is_attached or self.error is not None:
            return None
        message = self._own()
        if message is not None or self._beat or not self._outbox:
            return message
        entry = self._outbox.popleft()
        if isinstance(entry, Ask):
            entry.is_sent = True
            return entry.message
        return entry

    def _own(self) -> Message | None:
        """What is said for the session's own sake."""
        if self._owed * 4 >= self.window:
            frames, self._owed = self._owed, 0
            return write("credit", self.session_id, frames=frames)
        if self.seen - self._told >= ACK_EVERY:
            self._told = self.seen
            return write("ack", self.session_id, seq=self.seen)
        if self._beat and not self._is_beat_sent:
            self._is_beat_sent = True
            return write("heartbeat", self.session_id, self._beat)
        return None

    # -- what is heard -------------------------------------------------------------------------------------------

    def numbered(self, seq: int) -> None:
        self.seen = max(self.seen, seq)

    def shown(self, shown: Shown) -> None:
        """A frame came, or a part of one."""
        ask = self.asks.get(shown.request_id)
        if ask is None or not ask.takes(shown):
            self._owed += 1
            return
        ask.is_heard = True
        self.position = max(self.position, shown.step)
        if ask.holds:
            ask.held += 1
            self._holders.add(ask)
        else:
            self._owed += 1
        ask.news.set()

    def snapshotted(self, event: Snapshotted) -> None:
        ask = self.asks.get(event.request_id)
        if ask is not None:
            ask.is_heard, ask.blob = True, event.blob

    def done(self, done: Done) -> None:
        """A request is over, if nothing of it is missing."""
        self.position = done.step
        ask = self.asks.get(done.request_id)
        if ask is None:
            return
        if done.status == "done" and not ask.is_whole and not ask.is_over and ask.rounds < ROUNDS:
            self._again(ask)
            return
        self._drop(ask)
        ask.end(_trouble(done, ask))

    def refused(self, request_id: str, error: WorldError) -> None:
        """The server did not do it."""
        ask = self.asks.get(request_id.removeprefix(CANCEL))
        if ask is None:
            return
        self._drop(ask)
        is_cancel = request_id.startswith(CANCEL)  # there was nothing to cancel
        ask.end(Interrupted("client_cancelled", self.position) if is_cancel else error)

    def brought(self, ask: Ask) -> None:
        """A fork has brought all of its sessions."""
        self._drop(ask)
        ask.end()

    def over(self, error: WorldError) -> None:
        """The session has ended, and all that is asked of it."""
        self.error = self.error or error
        for ask in tuple(self.asks.values()):
            self._drop(ask)
            ask.end(error)
        self._outbox.clear()

    # -- a socket is lost, and there is another one --------------------------------------------------------------

    def dropped(self) -> None:
        """The socket is gone, and what was handed to it may be."""
        self.is_attached, self._beat = False, ""
        for ask in tuple(self.asks.values()):
            if ask.is_sent and not ask.repeats:
                self._drop(ask)
                ask.end(Unrepeatable("connection_lost", "it may have been done, or not"))
        # Cancels are said again, by what is still there.
        self._outbox = deque(entry for entry in self._outbox if isinstance(entry, Ask) and not entry.is_sent)

    def resume(self) -> Message:
        """What brings the session to a new socket."""
        held = sum(ask.held for ask in self._holders)
        self._owed = 0
        return write(
            "session.resume",
            self.session_id,
            RESUME + self.session_id,
            token=self._token,
            last_seq=self.seen,
            model=self.facts.model or None,
            format=self.form,
            outputs=list(self.outputs),
            credits=max(1, self.window - held),
        )

    def resumed(self, token: str, position: int) -> None:
        """The server goes on where it was."""
        self._token, self.position, self.is_attached = token, position, True
        self._told = self.seen
        self._beats += 1
        self._beat, self._is_beat_sent = f"{BEAT}{self._beats}", False

    def missed(self) -> None:
        """The server no longer has all that it said: of nothing is it known whether it arrived."""
        for ask in self.asks.values():
            ask.is_heard = False

    def beaten(self, request_id: str) -> int:
        """All is said of what arrived; how many requests are asked again."""
        if request_id != self._beat:
            return 0
        self._beat = ""
        sent = [ask for ask in self.asks.values() if ask.is_sent]
        cut = [ask for ask in sent if ask.is_cancelled and ask.frames]
        lost = [ask for ask in sent if not ask.is_heard and ask not in cut]
        self._outbox.extendleft(self._cancelling(ask) for ask in cut)
        self._outbox.extendleft(reversed(lost))
        return len(lost)

    def _again(self, ask: Ask) -> None:
        ask.rounds, ask.is_heard = ask.rounds + 1, False
        self._outbox.appendleft(ask)


def _trouble(done: Done, ask: Ask) -> WorldError | None:
    match done.status:
        case "done" if ask.is_whole:
            return None
        case "done":
            return RequestFailed("frames_lost", done.step)
        case "interrupted":
            return Interrupted(done.reason or "interrupted", done.step)
        case _:
            return RequestFailed(done.reason or "failed", done.step)
