"""The command: wav files in, a wav file out, a line of sense for everything that goes wrong; and a person's turns."""

import argparse
import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from omni_live.clients import talk
from omni_live.clients.duplex_events import (
    Committed,
    Detached,
    Event,
    Heard,
    Reattached,
    ReplyEnded,
    ReplyStarted,
    Sound,
    SoundEnded,
    SpeechStarted,
    Words,
)
from omni_live.clients.playback import Player
from omni_live.clients.wav import read_pcm, write_wav

HEARD_HZ, SPOKEN_HZ = 16_000, 24_000


def _parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    talk.add_arguments(parser)
    return parser.parse_args(arguments)


async def _run(server, *arguments: str) -> int:
    """`run` has a loop of its own, so it goes on a thread of its own."""
    return await asyncio.to_thread(talk.run, _parse("--url", server.url, *arguments))


class Answering:
    """Answers each utterance with a ramp of samples, half a second long or as long as it may go on. Scripted."""

    def __init__(self, server, *lengths_ms: int) -> None:
        self.server = server
        self.lengths_ms = list(lengths_ms)
        self.replies = 0
        self._spoken = False
        self._active = False
        server.answer = self.take

    def take(self, event: dict):
        if event["type"] != "input_audio_buffer.append":
            return None
        if any(event["audio"]):
            self._spoken = True
            return self._interrupt() if self._active else None
        if not self._spoken:
            return None
        self._spoken = False
        return self._answer()

    async def _interrupt(self) -> None:
        self._active = False
        await self.server.say("input_audio_buffer.speech_started", item_id="u", audio_start_ms=0)
        await self._done("cancelled")

    async def _answer(self) -> None:
        self.replies += 1
        name, item = f"r{self.replies}", f"u{self.replies}"
        await self.server.say("input_audio_buffer.committed", item_id=item)
        await self.server.say(
            "conversation.item.input_audio_transcription.completed", item_id=item, transcript=f"question {self.replies}"
        )
        await self.server.say("response.created", response={"id": name})
        await self.server.say(
            "response.output_audio_transcript.delta", response_id=name, delta=f"answer {self.replies}"
        )
        length = self.lengths_ms.pop(0) * SPOKEN_HZ // 1000
        pcm = np.arange(1, length + 1).astype("<i2")
        await self.server.sound(name, pcm.tobytes(), 0)
        if length > SPOKEN_HZ:
            self._active = True  # more would come, but for the interruption
        else:
            await self._done("completed")

    async def _done(self, status: str) -> None:
        await self.server.say("response.done", response={"id": f"r{self.replies}", "status": status})


@pytest.fixture
def questions(tmp_path: Path) -> list[Path]:
    """Two recordings of 0.3 s, with speech from the first sample to the last; the second is of another kind."""
    tone = (8000 * np.sin(np.arange(4800) / 8)).astype(np.int16)
    write_wav(tmp_path / "one.wav", tone, HEARD_HZ)
    write_wav(tmp_path / "two.wav", np.repeat(tone, 2), 2 * HEARD_HZ)
    return [tmp_path / "one.wav", tmp_path / "two.wav"]


async def test_two_questions_get_two_answers_in_one_file(server, questions, tmp_path: Path, capsys) -> None:
    answering = Answering(server, 500, 300)
    out = tmp_path / "out.wav"
    files = ["--in", str(questions[0]), "--in", str(questions[1]), "--out", str(out)]
    assert await _run(server, *files) == 0
    assert answering.replies == 2
    pcm = read_pcm(out, SPOKEN_HZ)
    assert list(pcm) == [*range(1, 12_001), *range(1, 7_201)]
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "turn 1 (one.wav)"
    assert "  heard     question 1" in shown
    assert "  answered  answer 2" in shown
    assert any("from the last of your words to the first of the answer" in line for line in shown)


@pytest.mark.parametrize("frames", [[], ["--text-frames"]])
async def test_an_interruption_and_lost_sockets_in_one_object_per_turn(
    server, questions, tmp_path: Path, capsys, frames
) -> None:
    Answering(server, 5000, 300)
    out = tmp_path / "out.wav"
    files = ["--in", str(questions[0]), "--in", str(questions[1]), "--out", str(out), "--json", *frames]
    assert await _run(server, *files, "--interrupt-at", "0.4", "--drop-socket-at", "0.1") == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["heard"], second["heard"]) == ("question 1", "question 2")
    assert first["interrupted"]
    assert not second["interrupted"]
    assert first["replies"][0]["status"] == "cancelled"
    assert 380 <= first["replies"][0]["played_ms"] < 2000
    assert second["interrupts"] == "r1"
    assert second["stop_ms"] > 0
    assert first["underruns"] == second["underruns"] == 0
    played = round(first["replies"][0]["played_ms"] * 24)
    assert len(read_pcm(out, SPOKEN_HZ)) == played + 300 * 24
    assert len(server.resumes) == 1


async def test_a_question_without_an_answer_is_a_failure(server, questions, capsys) -> None:
    assert await _run(server, "--in", str(questions[0]), "--reply-timeout", "0.3") == 1
    captured = capsys.readouterr()
    assert "no answer in time to one.wav" in captured.err
    assert "(nothing)" in captured.out


async def test_a_session_closed_too_early_is_a_failure(server, questions, capsys) -> None:
    async def close(event: dict) -> None:
        if event["type"] == "input_audio_buffer.append":
            await server.tell("session.closed", reason="drained")

    server.answer = close
    assert await _run(server, "--in", str(questions[0]), "--in", str(questions[1])) == 1
    assert "the server closed the session before everything was said" in capsys.readouterr().err


async def test_what_is_wrong_with_the_files_or_the_server_is_one_sentence(
    server, questions, tmp_path: Path, capsys
) -> None:
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"RIFF")
    wrong = {
        ("--in", str(broken)): "broken.wav: not a wav file",
        ("--in", str(tmp_path / "none.wav")): "none.wav: No such file",
        ("--in", str(questions[0]), "--url", "ws://127.0.0.1:1/v1/duplex"): "no session at ws://127.0.0.1:1/v1/duplex",
    }
    for arguments, sentence in wrong.items():
        assert await _run(server, *arguments) == 1
        error = capsys.readouterr().err
        assert sentence in error
        assert len(error.splitlines()) == 1
    Answering(server, 100)
    assert await _run(server, "--in", str(questions[0]), "--out", str(tmp_path / "none" / "out.wav")) == 1
    assert "out.wav: No such file" in capsys.readouterr().err


async def test_settings_and_key_reach_the_server(server, questions, monkeypatch) -> None:
    Answering(server, 100)
    monkeypatch.setenv(talk.KEY_VARIABLE, "secret")
    keys = []
    react = server._react

    async def note(event: dict) -> None:
        keys.append(server.socket.request.headers["Authorization"])
        await react(event)

    server._react = note
    settings = ["--instructions", "Be brief.", "--voice", "kokf", "--seed", "7", "--model", "other"]
    assert await _run(server, "--in", str(questions[0]), *settings) == 0
    session = server.taken[0]["session"]
    assert (session["instructions"], session["audio"]["output"]["voice"]) == ("Be brief.", "kokf")
    assert session["omni_live"]["seed"] == 7
    assert server.paths[0].endswith("?model=other")
    assert keys[0] == "Bearer secret"


def test_an_interruption_names_the_utterance_whose_reply_it_interrupts() -> None:
    assert talk.parse_interrupt("1.5") == (1, 1.5)
    assert talk.parse_interrupt("3:0.25") == (3, 0.25)
    for text in ("x", "0:1", "1:-1", "1:2:3", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            talk.parse_interrupt(text)


# -- with a person ---------------------------------------------------------------------------------------------------


class Person:
    """A session and a microphone in one: the test puts in what the server says and what the microphone takes."""

    def __init__(self, clock) -> None:
        self.clock = clock
        self.sent: list[bytes] = []
        self.acks: list[tuple[str, float]] = []
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.blocks: asyncio.Queue[np.ndarray] = asyncio.Queue()

    async def send_audio(self, pcm: bytes) -> None:
        self.sent.append(pcm)

    async def ack_playback(self, response_id: str, item_id: str, played_ms: float) -> str:
        self.acks.append((response_id, played_ms))
        return ""

    def drop_transport(self) -> None:
        raise AssertionError("nobody asked for that")

    async def __anext__(self) -> Event:
        return await self.events.get()

    async def microphone(self):
        while True:
            yield await self.blocks.get()

    def say(self, kind: type[Event], **fields) -> None:
        self.events.put_nowait(kind(at_ns=self.clock.now, **fields))

    async def exchange(self, number: int, response_id: str) -> None:
        self.say(SpeechStarted, item_id=f"u{number}", audio_start_ms=0)
        self.blocks.put_nowait(np.full(320, 5000, np.int16))
        await self.clock.advance(100)
        self.blocks.put_nowait(np.zeros(320, np.int16))
        await self.clock.advance(200)
        self.say(Committed, item_id=f"u{number}")
        self.say(Heard, item_id=f"u{number}", transcript=f"question {number}")
        self.say(ReplyStarted, response_id=response_id)
        self.say(Words, response_id=response_id, text=f"answer {number}")
        pcm = np.full(2400, 3000, np.int16).tobytes()
        self.say(Sound, response_id=response_id, item_id="i", pcm=pcm, rate_hz=SPOKEN_HZ, start_sample=0)
        self.say(SoundEnded, response_id=response_id)
        self.say(ReplyEnded, response_id=response_id, status="completed", reason="")
        await self.clock.advance(0)


async def test_a_person_s_turns_are_told_one_by_one_with_their_latency(manual_clock) -> None:
    person, player, stop, told = Person(manual_clock), Player(SPOKEN_HZ), asyncio.Event(), []
    talking = asyncio.create_task(
        talk.live(person, person.microphone(), player, stop=stop, on_turn=told.append, clock=manual_clock)
    )
    for number in (1, 2):
        await person.exchange(number, f"r{number}")
        player.pull(4800, manual_clock.now)
        await manual_clock.advance(250)
    stop.set()
    reports = await talking
    assert [(report.heard, report.answered) for report in told] == [
        ("question 1", "answer 1"),
        ("question 2", "answer 2"),
    ]
    assert [report.v2v_ms for report in told] == [300, 300]
    assert person.acks == [("r1", 100.0), ("r2", 100.0)]
    assert len(person.sent) == 4
    assert len(reports) == 2


async def test_the_end_of_an_interrupted_reply_is_told_with_its_own_turn(manual_clock) -> None:
    person, player, stop, told = Person(manual_clock), Player(SPOKEN_HZ), asyncio.Event(), []
    talking = asyncio.create_task(
        talk.live(person, person.microphone(), player, stop=stop, on_turn=told.append, clock=manual_clock)
    )
    person.say(SpeechStarted, item_id="u1", audio_start_ms=0)
    person.say(Heard, item_id="u1", transcript="question")
    person.say(ReplyStarted, response_id="r1")
    person.say(SpeechStarted, item_id="u2", audio_start_ms=0)
    person.say(ReplyEnded, response_id="r1", status="cancelled", reason="turn_detected")
    await manual_clock.advance(0)
    stop.set()
    reports = await talking
    assert [(report.index, report.heard, report.interrupted) for report in told] == [(1, "question", True)]
    assert len(reports) == 2


async def test_what_the_guard_holds_back_is_not_sent(manual_clock) -> None:
    person, stop = Person(manual_clock), asyncio.Event()
    hush = np.zeros(320, np.int16)
    talking = asyncio.create_task(
        talk.live(person, person.microphone(), Player(), stop=stop, hear=lambda _: hush, clock=manual_clock)
    )
    person.blocks.put_nowait(np.full(320, 5000, np.int16))
    await manual_clock.advance(0)
    stop.set()
    await talking
    assert person.sent == [hush.tobytes()]


async def test_a_lost_connection_is_told_and_its_return_too(manual_clock, capsys) -> None:
    person, stop = Person(manual_clock), asyncio.Event()
    talking = asyncio.create_task(talk.live(person, person.microphone(), Player(), stop=stop, clock=manual_clock))
    person.say(Detached, why="gone")
    person.say(Reattached, attachment=2, away_ms=120.0, voids=())
    await manual_clock.advance(0)
    stop.set()
    await talking
    assert "connection is lost" in (error := capsys.readouterr().err)
    assert "back after 120 ms" in error
