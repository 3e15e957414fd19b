"""G7: a dropped socket costs nothing. The client comes back, and the sound is that of a session whose socket held."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest

from omni_live.clients.duplex import Options, Patience, Session, connect
from omni_live.clients.duplex_events import Event, Heard, Reattached, ReplyEnded, Sound

from .caller import DINNER, FRANCE, HEARS_HZ, speech
from .served import Served

STORY = "Tell me a short story about a robot."
OPTIONS = Options(max_output_tokens=40, omni_live={"seed": 7, "lead_ms": 0})
AT_ONCE = Patience(first_s=0.01)


@dataclass(slots=True)
class Listening:
    """Everything a session's client was told, its socket dropped when so many bytes of sound have come."""

    session: Session
    drops: Sequence[int] = ()
    events: list[Event] = field(default_factory=list)
    sound: bytes = b""

    async def until_answered(self) -> bytes:
        """The sound of the reply."""
        drops = sorted(self.drops)
        async with asyncio.timeout(60):
            async for event in self.session:
                self.take(event)
                while drops and len(self.sound) >= drops[0]:
                    drops.pop(0)
                    self.session.drop_transport()
                if isinstance(event, ReplyEnded):
                    return self.sound
        raise AssertionError("the session ended before its reply")

    def take(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Sound):
            assert event.start_sample * 2 == len(self.sound), "a piece is missing, or came twice"
            self.sound += event.pcm

    def heard(self) -> list[str]:
        return [event.transcript for event in self.events if isinstance(event, Heard)]

    def came_back(self) -> int:
        return sum(isinstance(event, Reattached) for event in self.events)


@contextlib.asynccontextmanager
async def talking(
    voice: Served, drops: Sequence[int] = (), *, binary: bool = True, options: Options = OPTIONS
) -> AsyncIterator[Listening]:
    async with connect(voice.url, options=options, binary=binary, patience=AT_ONCE) as session:
        yield Listening(session, drops)


@pytest.mark.parametrize("binary", [True, False], ids=["msgpack", "json"])
@pytest.mark.parametrize(("lead_ms", "tokens"), [(0, 40), (200, 20)], ids=["at once", "paced"])
async def test_G7_a_reply_over_dropped_sockets_is_sample_for_sample_the_same(
    voice: Served, binary: bool, lead_ms: int, tokens: int
) -> None:
    options = Options(max_output_tokens=tokens, omni_live={"seed": 7, "lead_ms": lead_ms})
    async with talking(voice, options=options) as held:
        await held.session.text(STORY)
        undisturbed = await held.until_answered()
    assert len(undisturbed) > 100_000
    async with talking(voice, (1, 24_000, 24_001, 60_000, 99_000), binary=binary, options=options) as dropped:
        await dropped.session.text(STORY)
        assert await dropped.until_answered() == undisturbed
        assert dropped.came_back() >= 1


async def test_G7_a_socket_that_drops_before_the_first_sound_costs_nothing(voice: Served) -> None:
    async with talking(voice) as held:
        await held.session.text(STORY)
        undisturbed = await held.until_answered()
    async with talking(voice) as dropped:
        await dropped.session.text(STORY)
        dropped.session.drop_transport()
        assert await dropped.until_answered() == undisturbed


@pytest.mark.parametrize("fraction", [0.15, 0.4, 0.7])
async def test_G7_speech_over_a_dropped_socket_is_heard_whole_and_answered_alike(
    voice: Served, fraction: float
) -> None:
    said = speech(FRANCE)
    async with talking(voice) as held:
        await held.session.send_audio(said)
        undisturbed = await held.until_answered()
    async with talking(voice) as dropped:
        at = round(len(said) * fraction) // 2 * 2
        await _in_pieces(dropped.session, said[:at])
        dropped.session.drop_transport()
        await _in_pieces(dropped.session, said[at:])
        assert await dropped.until_answered() == undisturbed
        assert dropped.heard() == held.heard() == ["What is the capital city of France?"]
        assert dropped.came_back() == 1
        assert not dropped.session.counts.lost_bytes


async def test_G12_what_is_said_while_the_socket_is_down_is_heard_utterance_by_utterance(voice: Served) -> None:
    async with talking(voice) as dropped:
        dropped.session.drop_transport()
        await _in_pieces(dropped.session, speech(FRANCE) + speech(DINNER))
        async with asyncio.timeout(60):
            async for event in dropped.session:
                dropped.take(event)
                if len(dropped.heard()) == 2:
                    break
        # two recognisers work at once, so transcripts may overtake each other
        said = ["What is the capital city of France?", "What should I cook for dinner tonight?"]
        assert sorted(dropped.heard()) == said
        assert dropped.came_back() == 1


async def _in_pieces(session: Session, pcm: bytes) -> None:
    size = 2 * HEARS_HZ // 10
    for at in range(0, len(pcm), size):
        await session.send_audio(pcm[at : at + size])
        await asyncio.sleep(0)
