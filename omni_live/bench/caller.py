"""A user at a session: a microphone that never stops, a loudspeaker, and a record of everything that came."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np

from omni_live.bench.timeline import content_ns, ending
from omni_live.bench.wavs import RATE_HZ
from omni_live.clients.clock import MS, Clock, MonotonicClock, S
from omni_live.clients.converse import Talking, acknowledge, listen
from omni_live.clients.duplex import Session
from omni_live.clients.duplex_events import Event, ReplyEnded, ReplyStarted
from omni_live.clients.jitter import Pcm
from omni_live.clients.playback import ACK_MS, BLOCK_MS, Player

T = TypeVar("T")

BLOCK: Final = RATE_HZ * BLOCK_MS // 1000


class Silent(Exception):
    """Something that had to come did not come; the text says what."""


class Tap:
    """A session whose events are kept on their way to whoever reads them."""

    def __init__(self, session: Talking, kept: list[Event]) -> None:
        self._session = session
        self._kept = kept

    async def send_audio(self, pcm: bytes) -> None:
        await self._session.send_audio(pcm)

    async def ack_playback(self, response_id: str, item_id: str, played_ms: float) -> str:
        return await self._session.ack_playback(response_id, item_id, played_ms)

    def drop_transport(self) -> None:
        self._session.drop_transport()

    async def __anext__(self) -> Event:
        event = await self._session.__anext__()
        self._kept.append(event)
        return event


@dataclass(slots=True)
class Saying:
    """Something on its way through the microphone."""

    pcm: Pcm
    begun_ns: int | None = None
    """When its first sample passed the microphone."""
    at: int = 0
    """The next sample to be sent."""
    sent: list[tuple[int, int]] = field(default_factory=list)
    """(sample behind a block, when the block was handed to the session)."""

    @property
    def over(self) -> bool:
        return self.at >= len(self.pcm)

    def passed_ns(self, sample: int) -> int:
        """When the sample passed the microphone, or will."""
        if self.begun_ns is None:
            raise Silent("the microphone did not begin")
        return self.begun_ns + sample * S // RATE_HZ

    def sent_ns(self, sample: int) -> int:
        """When the block with the sample went out."""
        return next((at_ns for end, at_ns in self.sent if end > sample), self.passed_ns(sample))


class Caller:
    """Made by `calling`. Its methods are for one task."""

    def __init__(self, session: Session, clock: Clock, player: Player) -> None:
        self.session = session
        self.player = player
        self.events: list[Event] = []
        self.echo_gain = 0.0
        """How much of what the loudspeaker plays comes back into the microphone."""
        self._clock = clock
        self._saying: deque[Saying] = deque()
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def now_ns(self) -> int:
        return self._clock.now_ns()

    def say(self, pcm: Pcm) -> Saying:
        """Put sound into the microphone, behind what is in it already."""
        saying = Saying(pcm)
        self._saying.append(saying)
        return saying

    async def until(self, found: Callable[[], T | None], within_s: float, what: str = "") -> T:
        """What `found` returns as soon as it is not None; asked at each event and each block of the microphone.

        Raises Silent (`what` did not come) after so long, and what ended the call.
        """
        deadline_ns = self.now_ns() + round(within_s * S)
        while (value := found()) is None:
            if self.now_ns() >= deadline_ns:
                raise Silent(f"{what or 'an answer'} did not come within {within_s:g} s")
            for task in self._tasks:
                if task.done():
                    task.result()
                    raise Silent(f"the session ended before {what or 'an answer'} came")
            self._changed.clear()
            await self._changed.wait()
        return value

    async def pause(self, seconds: float) -> None:
        """Let so much time pass."""
        end_ns = self.now_ns() + round(seconds * S)
        await self.until(lambda: True if self.now_ns() >= end_ns else None, seconds + 60.0)

    async def sent(self, saying: Saying, sample: int) -> None:
        """Wait until the block with the sample is sent."""
        await self.until(lambda: saying.at > sample or None, 60.0, "the microphone")

    async def finished(self, saying: Saying) -> None:
        """Wait until all of it is sent."""
        await self.until(lambda: saying.over or None, 120.0, "the end of the recording")

    async def reply(self, since: int, within_s: float = 30.0) -> str:
        """The id of the first reply that started behind the first `since` events."""

        def started() -> str | None:
            return next((event.response_id for event in self.events[since:] if isinstance(event, ReplyStarted)), None)

        return await self.until(started, within_s, "a reply")

    async def content(self, response_id: str, within_s: float = 30.0) -> int:
        """When the first content of the reply came; also where it ended without any (then its end)."""

        def came() -> int | None:
            came_ns = content_ns(self.events, response_id)
            end = self.ended(response_id)
            return came_ns[0] if came_ns else (end.at_ns if end else None)

        return await self.until(came, within_s, "the reply's content")

    def ended(self, response_id: str) -> ReplyEnded | None:
        return ending(reversed(self.events), response_id)

    async def end(self, response_id: str, within_s: float = 60.0) -> ReplyEnded:
        return await self.until(lambda: self.ended(response_id), within_s, "the reply's end")

    # -- the inside ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        tapped = Tap(self.session, self.events)
        self._tasks = [
            asyncio.create_task(self._speak(tapped)),
            asyncio.create_task(listen(tapped, self.player, self._noted)),
        ]
        for task in self._tasks:
            task.add_done_callback(lambda _: self._changed.set())

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _noted(self, _: Event) -> None:
        self._changed.set()

    async def _speak(self, session: Talking) -> None:
        due_ns = acked_ns = self._clock.now_ns()
        while True:
            due_ns += BLOCK_MS * MS
            await self._clock.sleep_until_ns(due_ns)
            played = self.player.pull(self.player.rate_hz * BLOCK_MS // 1000, due_ns)
            block, saying = self._next_block(due_ns)
            await session.send_audio(self._with_echo(block, played).astype("<i2").tobytes())
            if saying is not None:
                saying.sent.append((saying.at, self._clock.now_ns()))
            if due_ns >= acked_ns + ACK_MS * MS:
                acked_ns = due_ns
                await acknowledge(session, self.player)
            self._changed.set()

    def _next_block(self, due_ns: int) -> tuple[Pcm, Saying | None]:
        """The block that the microphone took until `due_ns`, and what is in it."""
        block = np.zeros(BLOCK, np.int16)
        if not self._saying:
            return block, None
        saying = self._saying[0]
        if saying.begun_ns is None:
            saying.begun_ns = due_ns - BLOCK_MS * MS
        piece = saying.pcm[saying.at : saying.at + BLOCK]
        block[: len(piece)] = piece
        saying.at += len(piece)
        if saying.over:
            self._saying.popleft()
        return block, saying

    def _with_echo(self, block: Pcm, played: Pcm) -> Pcm:
        if not self.echo_gain:
            return block
        places = np.arange(BLOCK) * (len(played) / BLOCK)
        echo = np.interp(places, np.arange(len(played)), played.astype(np.float64)) * self.echo_gain
        mixed: Pcm = np.clip(np.round(block + echo), -(2**15), 2**15 - 1).astype(np.int16)
        return mixed


@contextlib.asynccontextmanager
async def calling(session: Session, clock: Clock | None = None) -> AsyncIterator[Caller]:
    """Let a caller use the session until the block is left."""
    caller = Caller(session, clock or MonotonicClock(), Player(session.options.output_rate_hz))
    caller.start()
    try:
        yield caller
    finally:
        await caller.stop()
