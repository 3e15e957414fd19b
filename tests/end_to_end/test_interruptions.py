"""G1 and G8: what was interrupted falls silent, and the conversation goes on with what was heard of it, no more."""

from typing import Any

from .caller import FRANCE, PLANETS, Caller, items, retold, session, settings, speech
from .served import Served

STORY = "Tell me a long story about a small robot in a big garden."
WHAT_DID_I = "What did I ask you before?"
CONTENT = ("response.output_audio.delta", "response.output_audio_transcript.delta", "response.output_text.delta")
PACED = settings(tokens=80, lead_ms=300)


def assert_silent(caller: Caller) -> None:
    """No response says anything behind its terminal."""
    over: set[str] = set()
    for event in caller.events:
        if event["type"] == "response.done":
            over.add(event["response"]["id"])
        else:
            assert event.get("response_id") not in over or event["type"] not in CONTENT, "a fenced reply goes on"


async def begun(caller: Caller) -> str:
    """A reply that is being heard; its id."""
    await caller.send("input.text.append", text=STORY)
    await caller.wait("response.created")
    for _ in range(2):
        delta = await caller.wait("response.output_audio_transcript.delta")
    await caller.wait("response.output_audio.delta")
    return str(delta["response_id"])


async def assert_goes_on(voice: Served, caller: Caller) -> None:
    """The next turn is answered, on the conversation as the session tells it."""
    told = await items(caller)
    await caller.update(settings())
    response = await caller.ask(WHAT_DID_I)
    assert response["status"] in ("completed", "incomplete")
    assert_silent(caller)
    assert caller.words(response["id"]) == await retold(voice.port, told, WHAT_DID_I)


def assert_heard(caller: Caller, response_id: str, truncated: dict[str, Any], played_ms: float) -> None:
    """The item was cut to what was played: the words that were spoken by then, to one mark."""
    end_ms = truncated["audio_end_ms"]
    assert played_ms <= end_ms <= played_ms + 1000  # the position goes on between two words about it
    deltas = caller.of("response.output_audio.delta", response_id=response_id)
    marks = [mark for delta in deltas for mark in delta["metadata"]["audio_text_marks"]]
    spoken = max((mark["text_chars"] for mark in marks if mark["audio_end_ms"] <= end_ms), default=0)
    next_one = min((mark["text_chars"] for mark in marks if mark["audio_end_ms"] > end_ms), default=spoken)
    said = caller.words(response_id)
    assert truncated["transcript"] == said[: len(truncated["transcript"])]
    assert spoken - 1 <= len(truncated["transcript"]) <= max(spoken, next_one)
    assert len(truncated["transcript"]) < len(said)


async def test_G1_G8_a_cancelled_reply_is_silent_and_only_what_was_heard_stays(voice: Served) -> None:
    async with session(voice.port, PACED) as caller:
        response_id = await begun(caller)
        await caller.send("playback.ack", played_ms=200, response_id=response_id)
        await caller.send("response.cancel", response_id=response_id)
        done = await caller.wait("response.done")
        assert done["response"]["id"] == response_id
        assert done["response"]["status"] == "cancelled"
        assert done["response"]["status_details"]["reason"] == "client_cancelled"
        truncated = await caller.wait("conversation.item.truncated")
        assert_heard(caller, response_id, truncated, 200)
        kept = await caller.item(truncated["item_id"])
        assert kept["content"][0]["transcript"] == truncated["transcript"]
        await assert_goes_on(voice, caller)


async def test_G1_a_reply_that_is_cancelled_before_its_first_sound_is_never_heard(voice: Served) -> None:
    async with session(voice.port, PACED) as caller:
        await caller.send("input.text.append", text=STORY)
        created = await caller.wait("response.created")
        await caller.send("response.cancel")
        done = await caller.wait("response.done")
        assert done["response"]["status"] == "cancelled"
        assert done["response"]["output"] == []
        await assert_goes_on(voice, caller)
        assert caller.audio(created["response"]["id"]) == b""
        assert [item["role"] for item in await items(caller)] == ["user", "user", "assistant"]


async def test_a_cancel_with_nothing_to_cancel_is_refused_and_hurts_nobody(voice: Served) -> None:
    async with session(voice.port) as caller:
        await caller.send("response.cancel", event_id="mine")
        error = (await caller.wait("error"))["error"]
        assert (error["code"], error["event_id"]) == ("response_cancel_not_active", "mine")
        assert (await caller.ask("Hello."))["status"] in ("completed", "incomplete")


async def test_G1_G8_speech_over_a_reply_interrupts_it_and_is_answered(voice: Served) -> None:
    async with session(voice.port, PACED) as caller:
        response_id = await begun(caller)
        await caller.send("playback.ack", played_ms=150, response_id=response_id)
        await caller.say(speech(FRANCE))
        hold = await caller.wait("overlap.decision")
        assert (hold["action"], hold["response_id"]) == ("hold", response_id)
        decided = await caller.wait("overlap.decision")
        assert (decided["action"], decided["response_id"]) == ("barge_in", response_id)
        done = await caller.wait("response.done")
        assert (done["response"]["id"], done["response"]["status"]) == (response_id, "cancelled")
        assert done["response"]["status_details"]["reason"] == "turn_detected"
        assert_heard(caller, response_id, await caller.wait("conversation.item.truncated"), 150)
        answered = await caller.answer()
        assert caller.transcripts() == ["What is the capital city of France?"]
        assert "Paris" in caller.words(answered["id"])
        await assert_goes_on(voice, caller)


async def test_G1_the_clients_own_barge_in_silences_the_reply(voice: Served) -> None:
    async with session(voice.port, PACED) as caller:
        response_id = await begun(caller)
        await caller.send("barge_in")
        done = await caller.wait("response.done")
        assert (done["response"]["id"], done["response"]["status"]) == (response_id, "cancelled")
        await assert_goes_on(voice, caller)


async def test_G1_many_interruptions_in_a_row_leave_one_conversation(voice: Served) -> None:
    async with session(voice.port, settings(lead_ms=300)) as caller:
        for _ in range(6):
            await caller.send("input.text.append", text=STORY)  # cuts the reply to the one before
        response = await caller.answer()
        while response["status"] == "cancelled":
            response = await caller.answer()
        assert response["status"] in ("completed", "incomplete")
        assert_silent(caller)
        assert [event["response"]["status"] for event in caller.of("response.done")].count("cancelled") == 5


async def test_a_user_who_waits_for_the_end_of_a_reply_interrupts_nothing(voice: Served) -> None:
    async with session(voice.port) as caller:
        first = await caller.speak(FRANCE)
        second = await caller.speak(PLANETS)
        assert (first["status"], second["status"]) == ("completed", "completed")
        assert not caller.of("overlap.decision")
        assert not caller.of("conversation.item.truncated")
        told = await items(caller)
        assert [item["role"] for item in told] == ["user", "assistant", "user", "assistant"]
        assert [item["content"][0]["transcript"] for item in told] == [
            "What is the capital city of France?",
            caller.words(first["id"]),
            "How many planets are there in the solar system?",
            caller.words(second["id"]),
        ]
