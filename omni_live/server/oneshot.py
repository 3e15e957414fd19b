"""One-shot calls: a session is opened, has exactly one turn, and is closed, on every way out of it.

The turn takes the way of every other turn (G10): the same desk, the same core, the same orchestrator.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

from omni_live.protocols.desk import Desk, Line
from omni_live.sessions.effects import Effect, Emit, Release
from omni_live.sessions.events import (
    AudioDelta,
    AudioTranscriptDelta,
    ErrorTold,
    Event,
    ResponseDone,
    TextDelta,
    TranscriptionDone,
    TranscriptionFailed,
)
from omni_live.sessions.inputs import AudioAppended, AudioCommitted, ClientInput, CloseAsked, TextAppended
from omni_live.sessions.items import ResponseStatus
from omni_live.sessions.settings import Settings

APPEND_BYTES: Final = 32 * 1024
"""Audio goes to the ears in pieces of a second, which fit through any connector."""


class TurnRefused(Exception):
    """The session would not take what was asked of it (`code`)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class TurnLost(Exception):
    """The session closed before its turn was over; `str()` is the reason of the close."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of the turn."""

    status: ResponseStatus | None
    """None where the user said nothing that could be understood, which is not answered."""
    reason: str = ""
    """Of a status that is not `completed`."""
    text: str = ""
    pcm: bytes = b""
    """int16 little endian mono at the pipeline's output rate; empty where the settings ask for text."""
    heard: str = ""
    """The transcript of audio that was asked with."""


class Visit:
    """A session that lasts as long as its block; iterating gives what it says, until it is over."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._more = asyncio.Event()
        self.over = ""
        """Why the session is over; empty while it is not."""

    def take(self, effects: list[Effect]) -> None:
        """See protocols.desk.Mailbox. Bounded by the one reply, which the limits bound."""
        for effect in effects:
            if isinstance(effect, Emit):
                self._events.append(effect.event)
            elif isinstance(effect, Release):
                self.over = effect.reason
        self._more.set()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self.over:
                raise StopAsyncIteration
            self._more.clear()
            await self._more.wait()
        return self._events.popleft()


@asynccontextmanager
async def visiting(desk: Desk, model: str, settings: Settings, owner: str = "") -> AsyncIterator[tuple[Line, Visit]]:
    """A session that closes when the block is left, however that comes about. Raises desk.Refused."""
    visit = Visit()
    line = await desk.open(model, settings, visit, owner)
    try:
        yield line, visit
    finally:
        if not visit.over:
            line.tell(CloseAsked("one_shot"))


async def one_shot(desk: Desk, model: str, settings: Settings, said: str | bytes, owner: str = "") -> Answer:
    """One turn of a conversation pipeline: text, or audio (int16 little endian mono at the pipeline's input rate).

    A task that is cancelled meanwhile ends the turn and leaves nothing behind. Raises desk.Refused, TurnRefused,
    TurnLost.
    """
    # Nobody listens along, so nothing is paced; nor does silence end a turn whose end is known.
    settings = replace(settings, lead_ms=0, turn_detection=None)
    async with visiting(desk, model, settings, owner) as (line, visit):
        for told in _inputs(said):
            line.tell(told)
        return await _heard_out(visit)


def _inputs(said: str | bytes) -> Sequence[ClientInput]:
    if isinstance(said, str):
        return [TextAppended(said)]
    pieces = [AudioAppended(said[at : at + APPEND_BYTES]) for at in range(0, len(said), APPEND_BYTES)]
    return [*pieces, AudioCommitted(respond=True)]


async def _heard_out(visit: Visit) -> Answer:
    words: list[str] = []
    sound: list[bytes] = []
    heard = ""
    async for event in visit:
        match event:
            case TextDelta() | AudioTranscriptDelta():
                words.append(event.delta)
            case AudioDelta():
                sound.append(event.pcm)
            case TranscriptionDone(transcript=heard):
                if not heard:
                    return Answer(None)
            case TranscriptionFailed():
                raise TurnRefused(event.code, event.message)
            case ErrorTold():
                raise TurnRefused(event.code, event.message)
            case ResponseDone(response=response):
                reason = response.reason or response.error_code
                return Answer(response.status, reason, "".join(words), b"".join(sound), heard)
            case _:
                pass
    raise TurnLost(visit.over)
