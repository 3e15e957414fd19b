"""Users who listen to long replies: what must not stop one, what must stop it and how fast, and a long conversation.

The replies are asked for in writing, so that each is there at once; whatever happens during them is sound. Each has a
session of its own, because a small model that finds half sentences in its history soon has nothing left to say.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from omni_live.bench.caller import Caller
from omni_live.bench.scenes import Site, Step
from omni_live.bench.server import Endpoint
from omni_live.bench.timeline import CANCELLED, Silencing, content_ns, ending, others_began
from omni_live.bench.wavs import ECHO_DB, RATE_HZ, level_db, mhm, noise
from omni_live.clients.clock import MS
from omni_live.clients.duplex_events import Event, OverlapDecision, Sound
from omni_live.clients.turns import Utterance

LONG: Final = (
    "Tell me a long story about a brave little robot who crosses the sea.",
    "Explain in detail how a bicycle works.",
    "Tell me about the history of ships, in ten sentences.",
)
"""Prompts with long replies."""
QUESTION: Final = "What do you like about the sea in summer?"
SMALL_TALK: Final = (
    "Hello, my name is Anna.",
    QUESTION,
    "What should I pack for a day at the beach?",
    "Is it better to swim in the morning?",
    "Which fish live near the shore?",
    "How do I keep my food cool?",
    "Tell me about lighthouses.",
    "Why is the water salty?",
    "What games can children play in the sand?",
    "Do you know a song about boats?",
    "How far away is the horizon?",
    QUESTION,
)
EARLY, LATE, DISTURBED = 2, 12, 7
"""Turns of the twelve, from 1: the two that are compared, which ask the same, and the one that is interrupted."""

DISTURBANCES: Final = ("mhm", "noise", "echo")
ECHO_S: Final = 2.5
NOISE_S: Final = 1.0
AFTER_S: Final = 1.0
"""So long after a sound a reply that it ended would be over."""
SETTLE_S: Final = 0.3
"""After a reply was stopped, content that comes late has so long to come."""
LEAD_IN: Final = RATE_HZ // 10
"""What is left of the silence before an interruption's speech."""
FIRST_S, LAST_S = 0.1, 3.0
"""Moments at which replies are stopped, from their first sound."""


async def long_reply(caller: Caller, number: int) -> str:
    """Ask for a long reply, another for each number, and wait for its first sound; its id."""
    since = len(caller.events)
    await caller.session.text(LONG[number % len(LONG)])
    response_id = await caller.reply(since)
    await caller.content(response_id)
    return response_id


async def stop(caller: Caller, response_id: str) -> None:
    """Make sure that the reply is over."""
    if caller.ended(response_id) is None:
        await caller.session.cancel(response_id)
        await caller.end(response_id)
    await caller.pause(SETTLE_S)


async def introduce(caller: Caller, utterance: Utterance) -> None:
    """Say something, so that the server knows the user's voice, and stop the reply to it."""
    caller.say(utterance.pcm[: utterance.speech_end])
    await stop(caller, await caller.reply(0))


# -- what is no interruption -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Disturbed:
    """A reply during which something sounded."""

    cancelled: bool
    holds: int
    """How often it was held back for a moment."""


async def disturb(site: Site, kind: str, utterance: Utterance, trials: int, seed: int, step: Step) -> list[Disturbed]:
    """While replies play something sounds: `mhm`, `noise` or `echo`."""
    rng = np.random.default_rng(seed)
    found: list[Disturbed] = []
    for number in range(trials):
        async with site.caller() as caller:
            await introduce(caller, utterance)
            response_id = await long_reply(caller, number)
            await caller.pause(float(rng.uniform(0.3, 1.0)))
            if caller.ended(response_id) is None:
                await _sound(caller, kind, response_id, level_db(utterance.pcm), rng)
                await caller.pause(AFTER_S)
                found.append(disturbed(caller.events, response_id))
        step()
    return found


def disturbed(events: Sequence[Event], response_id: str) -> Disturbed:
    """What became of the reply."""
    end = ending(events, response_id)
    decisions = [event for event in events if isinstance(event, OverlapDecision) and event.response_id == response_id]
    holds = sum(decision.action == "hold" for decision in decisions)
    return Disturbed(end is not None and end.status == CANCELLED, holds)


async def _sound(caller: Caller, kind: str, response_id: str, user_db: float, rng: np.random.Generator) -> None:
    match kind:
        case "echo":
            caller.echo_gain = 10 ** ((user_db + ECHO_DB - _reply_db(caller, response_id)) / 20)
            await caller.pause(ECHO_S)
            caller.echo_gain = 0.0
        case "mhm":
            await caller.finished(caller.say(mhm(user_db)))
        case _:
            await caller.finished(caller.say(noise(str(rng.choice(["white", "pink"])), NOISE_S, rng)))


def _reply_db(caller: Caller, response_id: str) -> float:
    """How loud the reply is, from what has come of it."""
    sounds = (event for event in caller.events if isinstance(event, Sound) and event.response_id == response_id)
    whole = b"".join(event.pcm for event in sounds)
    return level_db(np.frombuffer(whole, "<i2").astype(np.int16))


# -- what is one -----------------------------------------------------------------------------------------------------


async def cancel_replies(site: Site, trials: int, step: Step) -> list[Silencing]:
    """Replies are stopped by response.cancel at moments spread over their first three seconds."""
    found: list[Silencing] = []
    for number, moment_s in enumerate(moments(trials)):
        async with site.caller() as caller:
            response_id = await long_reply(caller, number)
            await caller.pause(moment_s)
            if caller.ended(response_id) is None:
                cue_ns = caller.now_ns()
                await caller.session.cancel(response_id)
                found += await _silencing(caller, site.endpoint, response_id, cue_ns)
        step()
    return found


async def interrupt_replies(site: Site, utterances: Sequence[Utterance], trials: int, step: Step) -> list[Silencing]:
    """Replies are interrupted by speech that begins at moments spread over their first three seconds.

    The server has heard the voice before.
    """
    found: list[Silencing] = []
    for number, moment_s in enumerate(moments(trials)):
        utterance = utterances[number % len(utterances)]
        lead_in = min(LEAD_IN, utterance.speech_start)
        async with site.caller() as caller:
            await introduce(caller, utterance)
            response_id = await long_reply(caller, number)
            await caller.pause(moment_s)
            if caller.ended(response_id) is None:
                saying = caller.say(utterance.pcm[utterance.speech_start - lead_in :])
                await caller.sent(saying, lead_in)
                await caller.end(response_id)
                found += await _silencing(caller, site.endpoint, response_id, saying.sent_ns(lead_in))
        step()
    return found


def moments(count: int) -> list[float]:
    return [float(moment_s) for moment_s in np.linspace(FIRST_S, LAST_S, count)]


async def _silencing(caller: Caller, endpoint: Endpoint, response_id: str, cue_ns: int) -> list[Silencing]:
    """What came of the reply around the cue; nothing where it was not cancelled."""
    ended = await caller.end(response_id)
    await caller.pause(SETTLE_S)
    handed_ns = await endpoint.last_handed_ns()
    if ended.status != CANCELLED:
        return []
    arrived = content_ns(caller.events, response_id)
    if others_began((event for event in caller.events if event.at_ns >= cue_ns), response_id):
        handed_ns = None  # the server's record is of the other reply already
    return [Silencing(cue_ns, arrived[-1] if arrived else None, handed_ns)]


# -- a long conversation ---------------------------------------------------------------------------------------------


async def small_talk(site: Site, *, interrupted: bool, step: Step) -> list[float]:
    """Twelve turns in writing; the thinker's time to its first token in each, in ms.

    What comes first of a written reply is the thinker's first token, sent as soon as it is there: no other stage runs
    for it. Where it is `interrupted`, one of the replies is spoken and stopped in its middle, so that the thinker must
    forget what was not heard; that turn's value is its first sound.
    """
    first_ms: list[float] = []
    async with site.caller(replace(site.options, modality="text")) as caller:
        for number, words in enumerate(SMALL_TALK, 1):
            spoken = interrupted and number == DISTURBED
            first_ms.append(await (_spoken_turn(caller, words) if spoken else _written_turn(caller, words)))
            step()
    return first_ms


async def _written_turn(caller: Caller, words: str) -> float:
    since, asked_ns = len(caller.events), caller.now_ns()
    await caller.session.text(words)
    response_id = await caller.reply(since)
    first_ns = await caller.content(response_id)
    await caller.end(response_id)
    return (first_ns - asked_ns) / MS


async def _spoken_turn(caller: Caller, words: str) -> float:
    since, asked_ns = len(caller.events), caller.now_ns()
    await caller.session.text(words, respond=False)
    await caller.session.respond(output_modalities=["audio"])
    response_id = await caller.reply(since)
    first_ns = await caller.content(response_id)
    await caller.pause(1.0)
    await stop(caller, response_id)
    return (first_ns - asked_ns) / MS
