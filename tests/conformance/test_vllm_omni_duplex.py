"""vllm-omni's DuplexClient, unmodified, against `omni-live serve`. vllm_omni_client.py holds what its user writes."""

import base64
import json
import re
from collections.abc import Mapping
from typing import Any, Final

import pytest

from tests.end_to_end.caller import DINNER, FRANCE, PLANETS, VOICES, session, settings
from tests.end_to_end.served import Served
from tests.protocols.oracle import realtime, realtime_types

from .apart import HERE, run

STORY: Final = "01_kokm.wav"
STOP: Final = "06_kokf.wav"
SPEAKS_HZ: Final = 24_000

SAID: Final = {
    FRANCE: "What is the capital city of France?",
    PLANETS: "How many planets are there in the solar system?",
    DINNER: "What should I cook for dinner tonight?",
}

Told = Mapping[str, Any]


def scene(voice: Served, name: str, *recordings: str, beside: str | None = None) -> Any:
    """What came of a scene of vllm_omni_client.py. Every event in it is what OpenAI's own types take."""
    paths = [str(VOICES / recording) for recording in recordings]
    packages = ["vllm-omni", *([beside] if beside else [])]
    came = json.loads(run(packages, str(HERE / "vllm_omni_client.py"), name, voice.url, *paths))
    for part in [came, *came.values()]:
        for event in part.get("told", ()) if isinstance(part, dict) else ():
            if event["type"] in realtime_types():
                realtime().validate_python(event)
    return came


def heard(told: list[Told]) -> list[str]:
    """The transcripts of the user's turns."""
    kind = "conversation.item.input_audio_transcription.completed"
    return [event["transcript"] for event in told if event["type"] == kind]


def kinds(told: list[Told]) -> list[str]:
    return [event["type"] for event in told]


def sound(reply: Told) -> bytes:
    return base64.b64decode(reply["sound"])


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def errors_per_word(said: str, understood: str) -> float:
    """The word error rate: the least insertions, deletions and changes over the words said."""
    row = list(range(len(words(understood)) + 1))
    for count, word in enumerate(words(said), 1):
        last, row[0] = row[0], count
        for at, other in enumerate(words(understood), 1):
            last, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, last + (word != other))
    return row[-1] / len(words(said))


async def test_turns_that_the_client_ends_are_answered_without_a_request(voice: Served) -> None:
    came = scene(voice, "turns", FRANCE, PLANETS)
    assert heard(came["told"]) == [SAID[FRANCE], SAID[PLANETS]]
    for reply in came["replies"]:
        assert reply["decision"] == "speak"
        assert reply["response"]["status"] == "completed"
        assert reply["transcript"] == reply["response"]["output"][0]["content"][0]["transcript"]
        assert reply["played_ms"] == len(sound(reply)) * 1000 / (2 * SPEAKS_HZ) > 500
    assert "paris" in words(came["replies"][0]["transcript"])
    assert "planets" in words(came["replies"][1]["transcript"])
    pieces = kinds(came["told"]).count("response.output_audio.delta")
    assert kinds(came["told"]).count("playback.acknowledged") == pieces
    assert kinds(came["told"])[-1] == "session.closed"

    heard_hz = {"omni_live": {"input_rate_hz": SPEAKS_HZ}, "turn_detection": None}
    async with session(voice.port, settings(**heard_hz)) as caller:
        for reply in came["replies"]:
            await caller.say(sound(reply) + bytes(SPEAKS_HZ))
            await caller.send("input_audio_buffer.commit")
            await caller.wait("conversation.item.input_audio_transcription.completed")
            assert errors_per_word(reply["transcript"], caller.transcripts()[-1]) <= 0.15


def test_turns_that_the_server_finds_are_answered(voice: Served) -> None:
    came = scene(voice, "hands_free", FRANCE, DINNER)
    assert heard(came["told"]) == [SAID[FRANCE], SAID[DINNER]]
    assert [reply["response"]["status"] for reply in came["replies"]] == ["completed", "completed"]
    assert all(sound(reply) for reply in came["replies"])


def test_speech_into_a_reply_ends_it_and_the_item_keeps_what_was_played(voice: Served) -> None:
    came = scene(voice, "barge_in", STORY, STOP)
    cut, kept = came["cut"], came["kept"]["content"][0]["transcript"]
    assert cut["response"]["status"] == "cancelled"
    assert cut["response"]["status_details"]["reason"] == "turn_detected"
    assert cut["transcript"].startswith(kept)
    assert 0 < len(words(kept)) < len(words(cut["transcript"]))
    assert came["reply"]["response"]["status"] == "completed"
    ended = next(at for at, event in enumerate(came["told"]) if event.get("response", {}).get("status") == "cancelled")
    after = [event for event in came["told"][ended + 1 :] if event.get("response_id") == cut["id"]]
    assert not [event for event in after if event["type"].startswith("response.")], "content of a cancelled reply"


def test_a_reply_that_is_cancelled_ends_and_the_next_question_is_answered(voice: Served) -> None:
    came = scene(voice, "cancel", STORY, FRANCE)
    assert came["cancelled"]["response"]["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}
    assert "paris" in words(came["reply"]["transcript"])
    assert came["error"] == "response_cancel_not_active"


@pytest.mark.parametrize("beside", [None, "websockets-15"])
def test_G7_a_conversation_over_dropped_sockets_is_sample_for_sample_the_same(
    voice: Served, beside: str | None
) -> None:
    held = scene(voice, "undisturbed", STORY, PLANETS, beside=beside)
    came = scene(voice, "dropped", STORY, PLANETS, beside=beside)
    assert (held["sockets"], came["sockets"]) == (1, 5)
    assert kinds(came["told"]).count("session.resumed") == kinds(came["told"]).count("connection.resumed") == 4
    assert heard(came["told"]) == heard(held["told"])
    for reply, undisturbed in zip(came["replies"], held["replies"], strict=True):
        assert reply["transcript"] == undisturbed["transcript"]
        assert sound(reply) == sound(undisturbed)
    seqs = [event["server_event_seq"] for event in came["told"] if "server_event_seq" in event]
    assert seqs == list(range(1, len(seqs) + 1)), "an event is missing, or came twice"


def test_the_configurations_that_vllm_omni_ships_for_its_models_are_taken(voice: Served) -> None:
    presets = scene(voice, "presets", FRANCE)
    for name, rate in (("minicpmo_4_5", 24_000), ("nemotron_voicechat", 22_050), ("personaplex", 24_000)):
        came = presets[name]
        assert heard(came["told"]) == [SAID[FRANCE]], name
        assert came["reply"]["response"]["status"] == "completed", name
        deltas = [event for event in came["told"] if event["type"] == "response.output_audio.delta"]
        assert {(event["format"], event["sample_rate_hz"]) for event in deltas} == {("pcm16", rate)}, name
        assert abs(came["reply"]["played_ms"] - len(sound(came["reply"])) / (2 * rate) * 1000) < 1, name


def test_what_the_server_refuses_is_raised_and_the_session_goes_on(voice: Served) -> None:
    came = scene(voice, "errors", FRANCE)
    assert came["empty"] == "input_audio_buffer_commit_empty"
    assert came["video"] == "unsupported_value"
    assert came["model"] == "model_not_found"
    assert came["reply"]["response"]["status"] == "completed"


def test_an_application_that_fails_leaves_no_session_behind(voice: Served) -> None:
    scene(voice, "breaks", STORY)
    assert not voice.metric("omni_live_sessions", state="detached")
