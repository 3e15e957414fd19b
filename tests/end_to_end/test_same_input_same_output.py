"""What a session says follows from what was said to it and from its seed, not from when, how or beside whom."""

import asyncio
from dataclasses import dataclass
from typing import Any

from .caller import DINNER, FRANCE, HEARS_HZ, PLANETS, Caller, session, settings, speech
from .served import Served

STORY = "Tell me a short story about a robot."


async def typed(port: int, text: str = STORY, *, seed: int = 7, binary: bool = False, **more: Any) -> bytes:
    """The sound of the answer to a session's first words."""
    async with session(port, settings(seed, **more), binary=binary) as caller:
        response = await caller.ask(text)
        return caller.audio(response["id"])


async def test_G10_the_same_text_with_the_same_seed_gives_the_same_bytes(voice: Served) -> None:
    once = await typed(voice.port)
    assert once
    assert await typed(voice.port) == once
    assert await typed(voice.port, seed=8) != once


async def test_JSON_and_msgpack_carry_the_same_sound(voice: Served) -> None:
    assert await typed(voice.port, binary=True) == await typed(voice.port, binary=False)


async def test_pacing_changes_when_a_reply_comes_and_nothing_of_it(voice: Served) -> None:
    assert await typed(voice.port, lead_ms=300, tokens=12) == await typed(voice.port, lead_ms=0, tokens=12)


async def _live(caller: Caller, pcm: bytes) -> None:
    """As a microphone gives it, 20 ms at a time."""
    size = 2 * HEARS_HZ // 50
    due = asyncio.get_running_loop().time()
    for at in range(0, len(pcm), size):
        await caller.send("input_audio_buffer.append", audio=pcm[at : at + size])
        due += 0.02
        await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))


async def test_speech_in_real_time_and_all_at_once_is_answered_alike(voice: Served) -> None:
    async with session(voice.port) as hasty, session(voice.port) as live:
        at_once = await hasty.speak(FRANCE)
        await _live(live, speech(FRANCE))
        in_time = await live.answer()
        assert live.transcripts() == hasty.transcripts() == ["What is the capital city of France?"]
        assert live.audio(in_time["id"]) == hasty.audio(at_once["id"]) != b""


async def test_G6_sessions_that_speak_at_once_hear_their_own_answers_and_nobody_elses(voice: Served) -> None:
    topics = {FRANCE: "France", PLANETS: "planets", DINNER: "help"}
    alone: list[Outcome] = []
    for name in topics:
        async with session(voice.port) as caller:
            alone.append(_outcome(caller, await caller.speak(name)))
    async with session(voice.port) as one, session(voice.port) as two, session(voice.port) as three:
        callers = (one, two, three)
        spoken = [caller.speak(name) for caller, name in zip(callers, topics, strict=True)]
        together = [_outcome(*pair) for pair in zip(callers, await asyncio.gather(*spoken), strict=True)]
    assert [outcome.heard for outcome in together] == [outcome.heard for outcome in alone]
    for (name, topic), was, now in zip(topics.items(), alone, together, strict=True):
        assert [word in now.words for word in topics.values()] == [word == topic for word in topics.values()], name
        # Rounding in a step that serves several sessions may tip a word; the same words are the same sound.
        assert now.sound == was.sound or now.words != was.words


@dataclass(frozen=True, slots=True)
class Outcome:
    heard: list[str]
    words: str
    sound: bytes


def _outcome(caller: Caller, response: dict[str, Any]) -> Outcome:
    return Outcome(caller.transcripts(), caller.words(response["id"]), caller.audio(response["id"]))
