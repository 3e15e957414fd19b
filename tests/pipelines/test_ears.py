"""The ears engine, hand-cranked, on recorded speech and the real models."""

import threading
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from omni_live.engines.contract import EngineOptions, SessionError
from omni_live.pipelines.voice.ears import Ears
from omni_live.sessions.findings import Finding, Heard, SpeechBegan, SpeechPaused, SpeechWent, read_finding
from omni_live.sessions.payload import Payload
from omni_live.sessions.stamp import SessionKey, session_key
from tests.pipelines.rig import FakeHost

VOICE = Path(__file__).parents[1] / "data" / "voice"
ME, OTHER = session_key(0, 1), session_key(1, 1)


class WaitingHost(FakeHost):
    """Lets a test wait for the recogniser's threads."""

    def __init__(self) -> None:
        super().__init__()
        self.called = threading.Event()

    def wake(self) -> None:
        super().wake()
        self.called.set()


@pytest.fixture(scope="module")
def loaded() -> Iterator[tuple[Ears, WaitingHost]]:
    host = WaitingHost()
    ears = Ears(EngineOptions({}))
    ears.load(host)
    yield ears, host
    ears.shut()


@pytest.fixture
def ears(loaded: tuple[Ears, WaitingHost]) -> Iterator[Ears]:
    engine, host = loaded
    host.found.clear()
    for key in (ME, OTHER):
        engine.open(key, {})
    yield engine
    for key in (ME, OTHER):
        engine.close(key)


@pytest.fixture
def host(loaded: tuple[Ears, WaitingHost]) -> WaitingHost:
    return loaded[1]


def pcm(name: str) -> bytes:
    with wave.open(str(VOICE / name)) as file:
        return file.readframes(file.getnframes())


def findings(host: WaitingHost, key: SessionKey = ME) -> list[Finding]:
    read = [read_finding(payload) for owner, payload in host.found if owner == key]
    return [finding for finding in read if finding is not None]


def hear(ears: Ears, key: SessionKey, sound: bytes, size: int = 640) -> None:
    for at in range(0, len(sound), size):
        ears.listen(key, Payload("pcm", body=sound[at : at + size]))
        while ears.step():
            pass


def transcripts(ears: Ears, host: WaitingHost, count: int, key: SessionKey = ME) -> list[Heard]:
    """The session's transcripts once there are so many."""
    while True:
        host.called.clear()
        ears.step()
        heard = [finding for finding in findings(host, key) if isinstance(finding, Heard)]
        if len(heard) >= count:
            return heard
        assert host.called.wait(20), "no transcript came"


def test_speech_is_found_and_transcribed_at_the_pause(ears: Ears, host: WaitingHost) -> None:
    hear(ears, ME, pcm("00_kokf.wav"))
    (heard,) = transcripts(ears, host, 1)
    assert heard.text == "What is the capital city of France?"
    assert not heard.final
    kinds = [type(finding) for finding in findings(host)]
    assert kinds[0] is SpeechBegan
    assert kinds.index(SpeechWent) < kinds.index(SpeechPaused)
    assert abs(next(f.end for f in findings(host) if isinstance(f, SpeechPaused)) - 2.411 * 16_000) < 0.12 * 16_000


def test_a_commit_is_answered_by_the_transcript_there_is(ears: Ears, host: WaitingHost) -> None:
    hear(ears, ME, pcm("00_kokf.wav"))
    transcripts(ears, host, 1)
    ears.listen(ME, Payload("commit", {"utterance": 1}))
    heard = transcripts(ears, host, 2)
    assert [one.final for one in heard] == [False, True]
    assert heard[0].text == heard[1].text


def test_how_the_audio_is_cut_into_payloads_changes_nothing(ears: Ears, host: WaitingHost) -> None:
    sound = pcm("06_kokf.wav")
    hear(ears, ME, sound, 640)
    hear(ears, OTHER, sound, 1234)
    mine, other = transcripts(ears, host, 1), transcripts(ears, host, 1, OTHER)
    assert mine[0] == other[0]


def test_g6_two_microphones_are_two_conversations(ears: Ears, host: WaitingHost) -> None:
    first, second = pcm("00_kokf.wav"), pcm("05_kokm.wav")
    for at in range(0, max(len(first), len(second)), 640):
        for key, sound in ((ME, first), (OTHER, second)):
            ears.listen(key, Payload("pcm", body=sound[at : at + 640]))
        while ears.step():
            pass
    assert "France" in transcripts(ears, host, 1)[0].text
    assert "dinner" in transcripts(ears, host, 1, OTHER)[0].text


def test_a_commit_by_hand_of_silence_is_answered_with_nothing(ears: Ears, host: WaitingHost) -> None:
    hear(ears, ME, bytes(16_000))
    ears.listen(ME, Payload("commit", {"utterance": 0}))
    (heard,) = transcripts(ears, host, 1)
    assert (heard.text, heard.final) == ("", True)


def test_without_turn_detection_a_commit_takes_what_was_said(ears: Ears, host: WaitingHost) -> None:
    ears.listen(ME, Payload("configure", {"detect": False}))
    hear(ears, ME, pcm("05_kokm.wav"))
    assert findings(host) == []
    ears.listen(ME, Payload("commit", {"utterance": 0}))
    (heard,) = transcripts(ears, host, 1)
    assert heard.text == "What should I cook for dinner tonight?"
    assert heard.final


def test_another_replica_counts_on_where_the_first_one_stopped(ears: Ears, host: WaitingHost) -> None:
    ears.listen(ME, Payload("configure", {"detect": True, "position": 32_000, "utterance": 4}))
    hear(ears, ME, pcm("00_kokf.wav"))
    began = next(finding for finding in findings(host) if isinstance(finding, SpeechBegan))
    assert began.utterance == 5
    assert began.start > 32_000


def test_cleared_audio_still_counts(ears: Ears, host: WaitingHost) -> None:
    ears.listen(ME, Payload("pcm", body=np.zeros(16_000, "<i2").tobytes()))
    ears.listen(ME, Payload("clear"))
    hear(ears, ME, pcm("00_kokf.wav"))
    began = next(finding for finding in findings(host) if isinstance(finding, SpeechBegan))
    assert began.start >= 16_000


def test_an_unknown_command_is_refused(ears: Ears) -> None:
    with pytest.raises(SessionError, match="unknown_input"):
        ears.listen(ME, Payload("sing"))
