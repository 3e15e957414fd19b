"""Scripted conversations on a clock that only the test moves: when what is said, and what the report says of it."""

import asyncio
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from omni_live.clients.converse import Plan, converse, load_utterance, speech_bounds
from omni_live.clients.duplex_events import (
    Closed,
    Committed,
    Event,
    Heard,
    OverlapDecision,
    ReplyEnded,
    ReplyStarted,
    Sound,
    SoundEnded,
    SpeechStarted,
    SpeechStopped,
    Words,
)
from omni_live.clients.playback import Player
from omni_live.clients.talk import lines, played_replies
from omni_live.clients.turns import Utterance, as_json
from omni_live.clients.wav import BadWav, write_wav

RATE = 16_000
HIGH = 24_000
BLOCK = 320  # samples in 20 ms


def _utterance(name: str = "a", ms: int = 400, start_ms: int = 100, end_ms: int = 300) -> Utterance:
    pcm = np.full(ms * 16, 1000, np.int16)
    return Utterance(name, pcm, start_ms * 16, end_ms * 16, f"{name}?")


class FakeSession:
    """What `converse` needs of a session: takes audio into a list, gives the events that the test puts in."""

    def __init__(self, clock) -> None:
        self.clock = clock
        self.blocks: list[tuple[int, np.ndarray]] = []
        self.acks: list[tuple[str, float]] = []
        self.drops: list[int] = []
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    async def send_audio(self, pcm: bytes) -> None:
        self.blocks.append((self.clock.now, np.frombuffer(pcm, np.int16)))

    async def ack_playback(self, response_id: str, item_id: str, played_ms: float) -> str:
        self.acks.append((response_id, played_ms))
        return "event_1"

    def drop_transport(self) -> None:
        self.drops.append(self.clock.now)

    async def __anext__(self) -> Event:
        event = await self._events.get()
        if isinstance(event, Closed):
            raise StopAsyncIteration
        return event

    # -- the test's side

    def say(self, kind: type[Event], **fields) -> None:
        self._events.put_nowait(kind(at_ns=self.clock.now, **fields))

    def hears(self, item_id: str, text: str) -> None:
        self.say(SpeechStarted, item_id=item_id, audio_start_ms=0)
        self.say(SpeechStopped, item_id=item_id, audio_end_ms=0)
        self.say(Committed, item_id=item_id)
        self.say(Heard, item_id=item_id, transcript=text)

    def begins(self, response_id: str, text: str = "Well.") -> None:
        self.say(ReplyStarted, response_id=response_id)
        self.say(Words, response_id=response_id, text=text)

    def sounds(self, response_id: str, ms: int, start_ms: int = 0, silent_ms: int = 0) -> None:
        pcm = np.full(ms * 24, 2000, np.int16)
        pcm[: silent_ms * 24] = 0
        self.say(
            Sound,
            response_id=response_id,
            item_id="i",
            pcm=pcm.tobytes(),
            rate_hz=HIGH,
            start_sample=start_ms * 24,
        )

    def ends(self, response_id: str, status: str = "completed", reason: str = "") -> None:
        self.say(SoundEnded, response_id=response_id)
        self.say(ReplyEnded, response_id=response_id, status=status, reason=reason)

    def spoken_at(self) -> list[int]:
        """The times, in ms from the first block, at which a block with speech in it went out."""
        return [(at - self.blocks[0][0]) // 1_000_000 for at, block in self.blocks if block.any()]


@pytest.fixture
def session(manual_clock) -> FakeSession:
    return FakeSession(manual_clock)


@pytest.fixture
def player() -> Player:
    return Player(HIGH, record=True)


def _start(session: FakeSession, player: Player, *utterances: Utterance, **options) -> asyncio.Task:
    return asyncio.create_task(converse(session, utterances, player=player, clock=session.clock, **options))


async def _finish(task: asyncio.Task, clock, ms: int = 2000):
    await clock.advance(ms)
    assert task.done(), "the conversation has not come to its end"
    return task.result()


async def test_an_utterance_is_sent_block_by_block_as_a_microphone_would(session, player, manual_clock) -> None:
    task = _start(session, player, _utterance(ms=100))
    await manual_clock.advance(200)
    task.cancel()
    assert [block.any() for _, block in session.blocks] == [True] * 5 + [False] * 5
    assert all(len(block) == BLOCK for _, block in session.blocks)
    times = [at for at, _ in session.blocks]
    assert [b - a for a, b in itertools.pairwise(times)] == [20_000_000] * 9


async def test_a_turn_is_reported_with_what_was_heard_answered_and_when(session, player, manual_clock) -> None:
    started = manual_clock.now
    task = _start(session, player, _utterance())
    await manual_clock.advance(700)
    session.hears("u1", "a?")
    session.begins("r1", "It is so.")
    session.sounds("r1", 500, silent_ms=30)
    session.ends("r1")
    (report,) = await _finish(task, manual_clock)
    assert (report.source, report.said, report.heard, report.answered) == ("a", "a?", "a?", "It is so.")
    assert report.speech_start_ns == started + 100_000_000
    assert report.speech_end_ns == started + 300_000_000
    assert report.v2v_ms == 400
    assert report.v2v_played_ms == 450  # the next block at 720 ms, and 30 ms of silence in it
    assert report.underruns == 0
    assert not report.interrupted
    assert not report.timed_out
    (reply,) = report.replies
    assert (reply.status, reply.received, reply.played, reply.discarded) == ("completed", 12_000, 12_000, 0)
    assert reply.last_played_ns - reply.first_played_ns == 500_000_000
    assert [(one.start, one.samples) for one in report.sent] == [(n * BLOCK, BLOCK) for n in range(20)]
    assert report.sent[0].at_ns == started + 20_000_000


async def test_the_next_utterance_waits_until_the_reply_has_been_played(session, player, manual_clock) -> None:
    task = _start(session, player, _utterance("a"), _utterance("b"), plan=Plan(pause_s=0.1))
    await manual_clock.advance(700)
    session.hears("u1", "a?")
    session.begins("r1")
    session.sounds("r1", 1000)
    session.ends("r1")
    await manual_clock.advance(1900)
    assert session.spoken_at()[:20] == list(range(0, 400, 20))
    second = session.spoken_at()[20]
    assert second == 1780  # heard from 720 to 1720 ms, the first block went out at 20
    session.hears("u2", "b?")
    session.begins("r2")
    session.ends("r2")
    reports = await _finish(task, manual_clock)
    assert [report.heard for report in reports] == ["a?", "b?"]
    assert [len(report.replies) for report in reports] == [1, 1]
    assert reports[1].stop_ms is None


async def test_an_interruption_begins_so_long_into_the_reply_and_stops_it(session, player, manual_clock) -> None:
    task = _start(session, player, _utterance("a"), _utterance("b"), plan=Plan(interrupts={1: 0.5}))
    await manual_clock.advance(700)
    session.hears("u1", "a?")
    session.begins("r1")
    session.sounds("r1", 3000)
    # the reply is heard from 720 ms on, "b" goes out from 1220 on, its speech 100 later
    await manual_clock.advance(900)
    assert session.spoken_at()[20] == 1200  # counted from the first block, which was at 20
    session.say(OverlapDecision, action="hold", reason="speech", response_id="r1")
    await manual_clock.advance(100)
    session.say(OverlapDecision, action="barge_in", reason="speech", response_id="r1")
    session.say(SpeechStarted, item_id="u2", audio_start_ms=0)
    session.ends("r1", "cancelled", "turn_detected")
    await manual_clock.advance(300)
    session.hears("u2", "b?")
    session.begins("r2", "Sorry.")
    session.sounds("r2", 200)
    session.ends("r2")
    first, second = await _finish(task, manual_clock)
    assert first.interrupted
    assert first.replies[0].reason == "turn_detected"
    assert first.replies[0].played == 21_600  # 720 to 1620 ms: the block under way at 1600 is played
    assert first.replies[0].discarded == 3 * HIGH - 21_600
    assert second.interrupts == "r1"
    assert second.stop_ms == 320  # speech from 1300 ms on, silence from 1620
    assert [one.action for one in second.decisions] == ["hold", "barge_in"]
    assert second.answered == "Sorry."
    assert len(played_replies(player)) == 21_600 + 200 * 24
    assert "cut off   after 0.90 s" in "\n".join(lines(first))
    assert "320 ms after" in "\n".join(lines(second))


async def test_what_was_heard_is_told_at_once_when_a_reply_is_cut_and_regularly_before(
    session, player, manual_clock
) -> None:
    task = _start(session, player, _utterance(), plan=Plan(reply_timeout_s=1))
    await manual_clock.advance(700)
    session.begins("r1")
    session.sounds("r1", 3000)
    await manual_clock.advance(1000)
    regular = [played for _, played in session.acks]
    assert len(regular) in (3, 4)
    assert all(240 <= b - a <= 280 for a, b in itertools.pairwise(regular))
    session.ends("r1", "cancelled")
    await manual_clock.advance(0)
    assert session.acks[-1] == ("r1", player.replies["r1"].played / 24)
    task.cancel()


async def test_an_acknowledgement_that_interrupts_nothing_needs_no_answer(session, player, manual_clock) -> None:
    task = _start(session, player, _utterance("a"), _utterance("mm-hm"), plan=Plan(interrupts={1: 0.2}))
    await manual_clock.advance(700)
    session.hears("u1", "a?")
    session.begins("r1")
    session.sounds("r1", 2000)
    await manual_clock.advance(500)
    session.say(OverlapDecision, action="hold", reason="speech", response_id="r1")
    await manual_clock.advance(200)
    session.say(OverlapDecision, action="drop", reason="short_ack", response_id="r1")
    session.ends("r1")
    first, second = await _finish(task, manual_clock, 3000)
    assert not first.interrupted
    assert first.replies[0].played == 2 * HIGH
    assert first.underruns == 0
    assert second.replies == ()
    assert not second.timed_out
    assert second.stop_ms is None


async def test_an_utterance_without_an_answer_is_given_up_after_the_timeout(session, player, manual_clock) -> None:
    task = _start(session, player, _utterance("a"), _utterance("b"), plan=Plan(reply_timeout_s=5))
    await manual_clock.advance(6000)
    session.hears("u2", "b?")
    session.begins("r2")
    session.ends("r2", "failed", "stage_error")
    first, second = await _finish(task, manual_clock)
    assert first.timed_out
    assert first.v2v_ms is None
    assert "no answer in time" in "\n".join(lines(first))
    assert not second.timed_out
    assert second.replies[0].reason == "stage_error"


async def test_a_held_reply_that_is_never_decided_does_not_hang_the_conversation(session, player, manual_clock) -> None:
    task = _start(session, player, _utterance(), plan=Plan(reply_timeout_s=5))
    await manual_clock.advance(700)
    session.begins("r1")
    session.sounds("r1", 1000)
    session.ends("r1")
    session.say(OverlapDecision, action="hold", reason="speech", response_id="r1")
    (report,) = await _finish(task, manual_clock, 7000)
    assert report.timed_out


async def test_a_transcript_that_comes_after_the_reply_is_waited_for(session, player, manual_clock) -> None:
    task = _start(session, player, _utterance())
    await manual_clock.advance(700)
    session.say(Committed, item_id="u1")
    session.begins("r1")
    session.ends("r1")
    await manual_clock.advance(1000)
    session.say(Heard, item_id="u1", transcript=" a? ")
    (report,) = await _finish(task, manual_clock)
    assert report.heard == "a?"


async def test_an_underrun_is_in_the_report(session, player, manual_clock) -> None:
    task = _start(session, player, _utterance())
    await manual_clock.advance(700)
    session.begins("r1")
    session.sounds("r1", 200)
    await manual_clock.advance(500)
    session.sounds("r1", 300, start_ms=200)
    session.ends("r1")
    (report,) = await _finish(task, manual_clock)
    assert report.underruns == 1
    assert as_json(report)["replies"][0]["underruns_ms"] == [300.0]  # dry from 920 to 1220 ms


async def test_a_user_cut_in_two_by_a_pause_gets_one_turn_with_both_parts(session, player, manual_clock) -> None:
    task = _start(session, player, _utterance())
    await manual_clock.advance(300)
    session.hears("u1", "Well,")
    session.begins("r1")
    session.ends("r1", "cancelled", "turn_detected")
    await manual_clock.advance(300)
    session.hears("u2", "what now?")
    session.begins("r2", "Nothing.")
    session.ends("r2")
    (report,) = await _finish(task, manual_clock)
    assert report.heard == "Well, what now?"
    assert [reply.status for reply in report.replies] == ["cancelled", "completed"]


async def test_the_socket_is_dropped_when_the_plan_says_so(session, player, manual_clock) -> None:
    started = manual_clock.now
    task = _start(session, player, _utterance(), plan=Plan(drops_s=(0.5, 0.1)))
    await manual_clock.advance(1000)
    task.cancel()
    assert session.drops == [started + 100_000_000, started + 500_000_000]


async def test_a_session_that_the_server_closes_leaves_the_reports_so_far(session, player, manual_clock) -> None:
    task = _start(session, player, _utterance("a"), _utterance("b"))
    await manual_clock.advance(100)
    session.say(Closed, reason="drained")
    reports = await _finish(task, manual_clock, 10)
    assert [report.source for report in reports] == ["a"]


async def test_turns_are_told_as_soon_as_they_are_over_an_interrupted_one_with_its_interruption(
    session, player, manual_clock
) -> None:
    told = []
    names = [_utterance(name) for name in "abc"]
    task = _start(session, player, *names, plan=Plan(interrupts={1: 0.1}), on_turn=told.append)
    await manual_clock.advance(700)
    session.hears("u1", "a?")
    session.begins("r1")
    session.sounds("r1", 1000)
    await manual_clock.advance(500)
    session.hears("u2", "b?")
    session.ends("r1", "cancelled")
    session.begins("r2")
    session.ends("r2")
    assert told == []
    await manual_clock.advance(1000)
    assert [report.source for report in told] == ["a", "b"]
    task.cancel()


async def test_a_report_is_plain_json(session, player, manual_clock) -> None:
    task = _start(session, player, _utterance())
    await manual_clock.advance(700)
    session.hears("u1", "a?")
    session.begins("r1")
    session.sounds("r1", 100)
    session.ends("r1")
    (report,) = await _finish(task, manual_clock)
    shown = json.loads(json.dumps(as_json(report)))
    assert shown["v2v_ms"] == 400.0
    assert shown["replies"][0]["arrivals"] == [[700.0, 0, 2400]]


# -- utterances ------------------------------------------------------------------------------------------------------


def _recording(path: Path) -> None:
    pcm = np.zeros(RATE, np.int16)
    pcm[4000:12_000] = (8000 * np.sin(np.arange(8000))).astype(np.int16)
    write_wav(path, pcm, RATE)


def test_speech_is_found_by_its_energy_where_nothing_else_says_where_it_is(tmp_path: Path) -> None:
    _recording(tmp_path / "a.wav")
    utterance = load_utterance(tmp_path / "a.wav")
    assert (utterance.speech_start, utterance.speech_end, utterance.text) == (4000, 12_000, "")


def test_a_list_of_transcripts_beside_the_file_says_where_speech_is(tmp_path: Path) -> None:
    _recording(tmp_path / "a.wav")
    listed = [{"file": "a.wav", "text": "Hm.", "speech_start_s": 0.5, "speech_end_s": 0.625}]
    (tmp_path / "transcripts.json").write_text(json.dumps(listed))
    utterance = load_utterance(tmp_path / "a.wav")
    assert (utterance.speech_start, utterance.speech_end, utterance.text) == (8000, 10_000, "Hm.")


@pytest.mark.parametrize("content", ["{", '{"a": 1', "[1]", '[{"file": 1}]'])
def test_a_broken_list_of_transcripts_is_refused_by_name(tmp_path: Path, content: str) -> None:
    _recording(tmp_path / "a.wav")
    (tmp_path / "transcripts.json").write_text(content)
    with pytest.raises(BadWav, match=r"transcripts\.json"):
        load_utterance(tmp_path / "a.wav")


def test_a_recording_of_nothing_is_all_speech_and_no_error() -> None:
    assert speech_bounds(np.zeros(1000, np.int16), RATE) == (0, 1000)
    assert speech_bounds(np.zeros(10, np.int16), RATE) == (0, 10)
