"""Users who talk to the server: alone, several at once, and with pauses in what they say.

Every scene opens its own sessions over the socket and speaks in real time. What it returns are records of what
happened; `voice` makes figures of them.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from omni_live.bench.caller import Caller, Tap, calling
from omni_live.bench.pauses import Paused
from omni_live.bench.server import Endpoint
from omni_live.bench.timeline import PausedTurn, first_sound_ns, stale_chunks
from omni_live.bench.wavs import RATE_HZ, aligned
from omni_live.clients.converse import converse
from omni_live.clients.duplex import Options, Session, connect
from omni_live.clients.duplex_events import Committed, Event
from omni_live.clients.playback import Player
from omni_live.clients.turns import TurnReport, Utterance

Step = Callable[[], None]
"""Called after each thing done: the progress bar's business."""


@dataclass(slots=True)
class Site:
    """Where the scenes take place."""

    endpoint: Endpoint
    model: str
    options: Options
    stale: int = 0
    """Content behind the end of its reply, over all scenes."""

    @contextlib.asynccontextmanager
    async def session(self, options: Options | None = None) -> AsyncIterator[Session]:
        endpoint = self.endpoint
        async with connect(
            endpoint.url, model=self.model, api_key=endpoint.api_key, options=options or self.options
        ) as session:
            yield session

    @contextlib.asynccontextmanager
    async def caller(self, options: Options | None = None) -> AsyncIterator[Caller]:
        async with self.session(options) as session, calling(session) as caller:
            try:
                yield caller
            finally:
                self.note(caller.events)

    def note(self, events: Sequence[Event]) -> None:
        self.stale += stale_chunks(events)


# -- talking, alone and together -------------------------------------------------------------------------------------


async def talk(site: Site, utterances: Sequence[Utterance], step: Step) -> list[TurnReport]:
    """One user says everything, one utterance after the other, and hears each reply out."""
    events: list[Event] = []
    async with site.session() as session:
        player = Player(session.options.output_rate_hz)
        reports = await converse(
            Tap(session, events), utterances, player=player, rate_hz=RATE_HZ, on_turn=lambda _: step()
        )
    site.note(events)
    return reports


async def talk_together(site: Site, utterances: Sequence[Utterance], step: Step) -> list[TurnReport]:
    """As many users as utterances, each on a socket of their own, end their turns at the same moment."""
    events: list[list[Event]] = [[] for _ in utterances]
    async with contextlib.AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(site.session()) for _ in utterances]
        talks = [
            converse(Tap(session, kept), [utterance], player=Player(session.options.output_rate_hz), rate_hz=RATE_HZ)
            for session, kept, utterance in zip(sessions, events, aligned(list(utterances)), strict=True)
        ]
        reports = await asyncio.gather(*talks)
    for kept in events:
        site.note(kept)
    step()
    return [report for several in reports for report in several]


def rounds(utterances: Sequence[Utterance], users: int, count: int) -> list[list[Utterance]]:
    """Who says what in each round: everybody something else, as far as there is enough, and each round anew."""
    return [[utterances[(index * users + user) % len(utterances)] for user in range(users)] for index in range(count)]


# -- pauses ----------------------------------------------------------------------------------------------------------


async def speak_with_pause(site: Site, paused: Paused, options: Options) -> PausedTurn:
    """One user says one utterance with a pause in it; over as soon as it is known what the server made of it."""
    utterance = paused.utterance
    async with site.caller(options) as caller:
        saying = caller.say(utterance.pcm)
        await caller.sent(saying, 0)
        end_ns = saying.passed_ns(utterance.speech_end)

        def known() -> bool | None:
            cut = any(isinstance(event, Committed) and event.at_ns < end_ns for event in caller.events)
            return True if cut or first_sound_ns(caller.events, end_ns) is not None else None

        await caller.until(known, len(utterance.pcm) / RATE_HZ + 15.0, "a reply")
        start_ns, go_on_ns = saying.passed_ns(paused.pause_start), saying.passed_ns(paused.pause_end)
        return PausedTurn(start_ns, go_on_ns, end_ns, tuple(caller.events))
