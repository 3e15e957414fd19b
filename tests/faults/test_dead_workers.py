"""A worker is killed; G9: its sessions lose at most the running turn, within a second, and nobody else notices."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ..end_to_end.caller import DINNER, FRANCE, items, retold, session, settings, silence, speech
from ..end_to_end.served import Served, wait_until
from ..end_to_end.warm import warm_server

LIMITS = "limits: {restarts: 100, restart_backoff_ms: 50, restart_backoff_cap_ms: 50}\n"
TELL_ME = "Tell me a long story about a small robot in a big garden."
WHAT_DID_I = "What did I ask you before?"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with warm_server(tmp_path_factory.mktemp("killed"), f"{LIMITS}pipelines: {{voice: }}\n") as server:
        yield server


@pytest.fixture
def voice(server: Served) -> Iterator[Served]:
    yield server
    server.assert_at_rest()


def kill(pid: int) -> float:
    """Kill it; when that was."""
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


@pytest.mark.parametrize("stage", ["thinker", "talker"])
async def test_G9_a_killed_worker_costs_the_running_turn_and_nothing_else(
    voice: Served, stage: str, record_property: Any
) -> None:
    async with session(voice.port, settings(tokens=100)) as caller, session(voice.port) as bystander:
        first = await caller.speak(FRANCE)
        assert first["status"] == "completed"
        noticed = len(bystander.events)

        await caller.send("input.text.append", text=TELL_ME)
        await caller.wait("response.output_audio.delta")
        killed_s = kill(voice.worker(stage))
        failed = await caller.wait("response.done")
        record_property("failed_after_s", round(failed["at_s"] - killed_s, 4))
        assert failed["response"]["status"] == "failed"
        assert failed["response"]["status_details"]["error"]["code"] == "replica_lost"
        assert failed["at_s"] - killed_s < 1.0

        wait_until(lambda: not voice.is_ready(), "the server is ready without a worker")
        record_property("ready_again_after_s", round(wait_until(voice.is_ready, "not ready again", 60.0), 2))

        await caller.update(settings(tokens=24))
        told = await items(caller)
        answered = await caller.ask(WHAT_DID_I)
        assert answered["status"] in ("completed", "incomplete")
        assert [item["role"] for item in told[:3]] == ["user", "assistant", "user"]
        # What was heard differs from run to run, and KV computed in other pieces differs in its last bits, so that a
        # reply may come to a word where two are as good as each other; another context shows from the first ones on.
        wanted = await retold(voice.port, told, WHAT_DID_I)
        assert caller.words(answered["id"]).split()[:4] == wanted.split()[:4]
        spoken = await caller.speak(DINNER)
        assert caller.transcripts()[-1] == "What should I cook for dinner tonight?"
        assert spoken["status"] in ("completed", "incomplete") and caller.audio(spoken["id"])

        assert [event["type"] for event in bystander.events[noticed:]] == []
        assert (await bystander.ask("Hello."))["status"] in ("completed", "incomplete")


async def test_G9_a_turn_asked_for_while_no_replica_is_there_waits_for_the_next_one(voice: Served) -> None:
    async with session(voice.port) as caller:
        kill(voice.worker("thinker"))
        wait_until(lambda: not voice.is_ready(), "the loss was not noticed")
        response = await caller.ask("What is the capital city of France?")
        assert response["status"] == "completed"
        assert "Paris" in caller.words(response["id"])


async def test_G9_killed_ears_cost_what_the_user_was_saying_and_the_next_words_are_heard(
    voice: Served, record_property: Any
) -> None:
    async with session(voice.port) as caller:
        await caller.ask("Hello.")
        said = speech(FRANCE)
        await caller.say(said[: len(said) // 2])
        await caller.wait("input_audio_buffer.speech_started")
        killed_s = kill(voice.worker("ears"))
        stopped = await caller.wait("input_audio_buffer.speech_stopped")
        await caller.wait("input_audio_buffer.cleared")
        record_property("told_after_s", round(stopped["at_s"] - killed_s, 4))
        assert stopped["at_s"] - killed_s < 1.0
        wait_until(voice.is_ready, "not ready again", 60.0)
        await caller.say(silence(0.5))
        response = await caller.speak(DINNER)
        assert caller.transcripts() == ["What should I cook for dinner tonight?"]
        assert response["status"] in ("completed", "incomplete") and caller.audio(response["id"])


async def test_G9_a_reply_goes_on_without_ears(voice: Served) -> None:
    async with session(voice.port, settings(tokens=60)) as caller:
        undisturbed = await caller.ask(TELL_ME)
    async with session(voice.port, settings(tokens=60)) as again:
        await again.send("input.text.append", text=TELL_ME)
        await again.wait("response.output_audio.delta")
        kill(voice.worker("ears"))
        response = await again.answer()
        assert response["status"] == undisturbed["status"]
        assert again.audio(response["id"]) == caller.audio(undisturbed["id"])


async def test_G9_a_hung_worker_whose_turn_is_cancelled_is_replaced(voice: Served, record_property: Any) -> None:
    async with session(voice.port, settings(tokens=100)) as caller:
        await caller.send("input.text.append", text=TELL_ME)
        await caller.wait("response.output_audio.delta")
        hung = voice.worker("thinker")
        os.kill(hung, signal.SIGSTOP)
        asked_s = time.monotonic()
        await caller.send("response.cancel")
        done = await caller.wait("response.done")
        assert done["response"]["status"] == "cancelled"
        assert done["at_s"] - asked_s < 0.5
        wait_until(lambda: not _lives(hung), "the hung worker lives on")
        record_property("replaced_after_s", round(time.monotonic() - asked_s, 2))
        response = await caller.ask("What is the capital city of France?")
        assert response["status"] in ("completed", "incomplete")


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
