"""G10: a one-shot call is a session with one turn, and what it gives is what a longer session's first turn gives."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from omni_live.config.deploy import Deploy
from omni_live.config.plan import plan
from omni_live.protocols.desk import Refused
from omni_live.runtime.running import running
from omni_live.server.desk import FrontDesk
from omni_live.server.metrics import Metrics
from omni_live.server.oneshot import one_shot, visiting
from omni_live.sessions.events import ResponseDone
from omni_live.sessions.inputs import TextAppended
from omni_live.sessions.items import Modality, ResponseStatus
from omni_live.sessions.limits import Limits
from omni_live.sessions.settings import Settings

from .caller import FRANCE, PLANETS, session, silence, speech
from .caller import settings as session_object
from .served import Served

STORY = "Tell me a short story about a robot."
SETTINGS = Settings(seed=7, max_output_tokens=24)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def desk() -> AsyncIterator[FrontDesk]:
    """A desk with workers of its own, at rest in the end."""
    metrics = Metrics()
    placed = plan(replace(Deploy.of("voice"), limits=Limits(max_sessions=2, wait_queue=1, wait_deadline_s=0.2)))
    async with running(placed, metrics) as runtime:
        desk = FrontDesk(placed, runtime.orchestrator, runtime.slots, runtime.clock, metrics)
        async with asyncio.timeout(120):
            while not runtime.orchestrator.pools.is_ready():
                await asyncio.sleep(0.02)
        yield desk
        assert not runtime.slots.taken
        assert not runtime.orchestrator.sessions
        runtime.orchestrator.pools.stop()


async def test_G10_a_one_shot_gives_what_a_sessions_first_turn_gives(voice: Served, desk: FrontDesk) -> None:
    async with session(voice.port) as typed, session(voice.port) as spoken:
        first = await typed.ask(STORY)
        await typed.ask("And then?")
        by_voice = session_object(audio={"input": {"turn_detection": None}})
        await spoken.update(by_voice)
        await spoken.say(speech(FRANCE))
        await spoken.send("input_audio_buffer.commit", response_create=True)
        answered = await spoken.answer()
    answer = await one_shot(desk, "voice", SETTINGS, STORY)
    assert answer.status is ResponseStatus(first["status"])
    assert answer.text == typed.words(first["id"])
    assert answer.pcm == typed.audio(first["id"])
    answer = await one_shot(desk, "voice", SETTINGS, speech(FRANCE))
    assert answer.heard == spoken.transcripts()[0] == "What is the capital city of France?"
    assert (answer.text, answer.pcm) == (spoken.words(answered["id"]), spoken.audio(answered["id"]))


async def test_a_one_shot_answers_speech_in_writing_where_it_is_asked_to(desk: FrontDesk) -> None:
    written = await one_shot(desk, "voice", replace(SETTINGS, modality=Modality.TEXT), speech(PLANETS))
    assert "planets" in written.text
    assert written.pcm == b""


async def test_a_one_shot_in_which_nothing_was_said_is_not_answered(desk: FrontDesk) -> None:
    assert (await one_shot(desk, "voice", SETTINGS, silence(1.0))).status is None


async def test_G3_a_caller_that_goes_away_leaves_nothing_whenever_that_is(desk: FrontDesk) -> None:
    for after_s in (0.0, 0.005, 0.1, 0.4, 0.8):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(after_s):
                await one_shot(desk, "voice", replace(SETTINGS, max_output_tokens=120), STORY)
        assert not desk.slots_taken()


async def test_a_one_shot_waits_for_admission_like_everybody_else(desk: FrontDesk) -> None:
    async with visiting(desk, "voice", SETTINGS) as (line, visit), visiting(desk, "voice", SETTINGS):
        waits = asyncio.create_task(one_shot(desk, "voice", SETTINGS, STORY))
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="no room"):
            await one_shot(desk, "voice", SETTINGS, STORY)
        with pytest.raises(Refused, match="no room"):
            await waits
        line.tell(TextAppended("Hello."))
        async for event in visit:
            if isinstance(event, ResponseDone):
                assert event.response.status is not ResponseStatus.FAILED
                break
