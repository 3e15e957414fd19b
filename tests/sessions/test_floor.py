"""Who has the floor: each rule of the floor by example."""

from dataclasses import replace

import pytest

from omni_live.sessions.findings import (
    Finding,
    Heard,
    SpeechBegan,
    SpeechFaded,
    SpeechPaused,
    SpeechWent,
    read_finding,
    write_finding,
)
from omni_live.sessions.floor import (
    Announce,
    Commit,
    Decision,
    Floor,
    Forget,
    GiveUpTry,
    GoOnReply,
    HoldReply,
    Interrupt,
    Transcribed,
    Try,
    patience_ms,
)
from omni_live.sessions.payload import Payload
from omni_live.sessions.settings import Overlap, TurnDetection

RATE = 16_000
FRAME = 512
MS = 16
DETECTION, OVERLAP = TurnDetection(silence_duration_ms=500, min_silence_ms=400), Overlap()


class Listener:
    """Ears whose owner says what there is to find; whether a reply plays is a field."""

    def __init__(
        self, detection: TurnDetection | None = DETECTION, overlap: Overlap = OVERLAP, playing: bool = False
    ) -> None:
        self.floor = Floor(RATE, detection, overlap)
        self.playing = playing
        self.utterance = 0
        self.at = 10 * RATE
        self.first = 0
        self.end = 0
        self.decisions: list[Decision] = []

    def take(self, finding: Finding) -> list[Decision]:
        decisions = self.floor.take(finding, self.playing)
        self.decisions += decisions
        return decisions

    def speak(self, ms: int, level_db: float = -25.0, new: bool = False) -> list[Decision]:
        """What was decided while somebody spoke so long."""
        decisions: list[Decision] = []
        for _ in range(-(-ms * MS // FRAME)):
            if new or not self.utterance:
                new = False
                self.utterance += 1
                self.first = self.at
                decisions += self.take(SpeechBegan(self.utterance, self.at - 300 * MS, level_db))
            self.at += FRAME
            self.end = self.at
            decisions += self.take(SpeechWent(self.utterance, self.at, self.at - self.first, level_db))
        return decisions

    def pause(self, ms: int) -> list[Decision]:
        decisions: list[Decision] = []
        for _ in range(-(-ms * MS // FRAME)):
            self.at += FRAME
            silence = self.at - self.end
            if silence >= 3 * FRAME:
                decisions += self.take(SpeechPaused(self.utterance, self.end, silence))
        return decisions

    def hear(self, text: str, completeness: float = 1.0, final: bool = False, end: int | None = None) -> list[Decision]:
        return self.take(Heard(self.utterance, 0, self.at if end is None else end, text, completeness, final))

    @property
    def start(self) -> int:
        return self.first - 300 * MS


def kinds(decisions: list[Decision]) -> list[type[Decision]]:
    return [type(decision) for decision in decisions]


# -- nobody plays ------------------------------------------------------------------------------------------------


def test_speech_while_nothing_plays_is_announced_at_once() -> None:
    ears = Listener()
    assert ears.speak(32) == [Announce(1, ears.start)]
    assert ears.floor.speaking
    assert ears.speak(640) == []


def test_a_turn_without_a_transcript_ends_after_the_whole_silence() -> None:
    ears = Listener()
    ears.speak(640)
    assert ears.pause(480) == []
    assert ears.pause(32) == [Commit(1, ears.end, None)]
    assert not ears.floor.speaking


@pytest.mark.parametrize(("completeness", "patience"), [(0.0, 500), (0.4, 500), (0.55, 450), (0.7, 400), (1.0, 400)])
def test_the_more_finished_the_sentence_the_shorter_the_pause_that_ends_it(completeness: float, patience: int) -> None:
    heard = Heard(1, 0, 0, "Is it raining", completeness, False)
    assert patience_ms(DETECTION, heard) == pytest.approx(patience)
    ears = Listener()
    ears.speak(640)
    ears.pause(160)
    ears.hear("Is it raining", completeness)
    waited = 160
    while not any(isinstance(decision, Commit) for decision in ears.decisions):
        ears.pause(32)
        waited += 32
    assert patience <= waited < patience + 32


def test_an_empty_transcript_says_nothing_about_the_end_of_the_turn() -> None:
    assert patience_ms(DETECTION, Heard(1, 0, 0, "", 1.0, False)) == 500
    assert patience_ms(DETECTION, None) == 500


def test_the_shortest_silence_is_never_longer_than_the_longest() -> None:
    detection = TurnDetection(silence_duration_ms=200, min_silence_ms=400)
    assert patience_ms(detection, Heard(1, 0, 0, "Yes.", 1.0, False)) == 200


def test_a_transcript_at_a_pause_starts_the_turn_tentatively_and_the_pause_ends_it() -> None:
    ears = Listener()
    ears.speak(640)
    ears.pause(160)
    assert ears.hear("What time is it?") == [Try(1, "What time is it?")]
    (commit,) = ears.pause(256)
    assert isinstance(commit, Commit)
    assert commit.heard is not None
    assert commit.heard.text == "What time is it?"


def test_a_user_who_goes_on_makes_the_tentative_turn_undone() -> None:
    ears = Listener()
    ears.speak(640)
    ears.pause(160)
    ears.hear("What time")
    assert ears.speak(32) == [GiveUpTry(1)]
    assert ears.speak(320) == []
    ears.pause(160)
    assert ears.hear("What time is it?") == [Try(1, "What time is it?")]


def test_the_transcript_of_an_earlier_pause_neither_starts_nor_shortens_anything() -> None:
    ears = Listener()
    ears.speak(640)
    ears.pause(160)
    early = ears.at
    ears.speak(640)
    ears.pause(96)
    assert ears.hear("What time", end=early) == []
    assert ears.pause(384) == []
    assert ears.pause(32) == [Commit(1, ears.end, None)]


def test_without_speculation_a_transcript_only_shortens_the_pause() -> None:
    ears = Listener(replace(DETECTION, speculative_ms=0))
    ears.speak(640)
    ears.pause(160)
    assert ears.hear("What time is it?") == []
    assert kinds(ears.pause(256)) == [Commit]


def test_a_transcript_that_comes_after_the_pause_was_long_enough_for_it_ends_the_turn_at_once() -> None:
    ears = Listener()
    ears.speak(640)
    ears.pause(448)
    assert kinds(ears.hear("What time is it?")) == [Try, Commit]


def test_an_utterance_that_fades_was_never_there() -> None:
    ears = Listener()
    ears.speak(64)
    end = ears.end
    assert ears.take(SpeechFaded(1)) == [Forget(1, True, end)]
    assert not ears.floor.speaking
    assert ears.take(SpeechFaded(1)) == []


def test_an_utterance_that_fades_after_a_try_gives_the_try_up_first() -> None:
    ears = Listener()
    ears.speak(640)
    ears.pause(160)
    ears.hear("Um")
    assert kinds(ears.take(SpeechFaded(1))) == [GiveUpTry, Forget]


def test_findings_about_another_utterance_are_ignored() -> None:
    ears = Listener()
    ears.speak(320)
    for finding in (
        SpeechWent(9, ears.at, 99 * FRAME, -20.0),
        SpeechPaused(9, ears.at, RATE),
        SpeechFaded(9),
        Heard(9, 0, ears.at, "ghost", 1.0, False),
    ):
        assert ears.take(finding) == []
    assert ears.floor.speaking


# -- transcripts that come late, early or twice ----------------------------------------------------------------------


def committed_blind() -> Listener:
    """A turn that ended before its transcript came."""
    ears = Listener()
    ears.speak(640)
    ears.pause(512)
    return ears


def test_a_late_transcript_is_that_of_the_committed_utterance() -> None:
    ears = committed_blind()
    (decision,) = ears.hear("What time is it?", final=True)
    assert isinstance(decision, Transcribed)
    assert decision.heard.text == "What time is it?"


def test_a_transcript_that_covers_the_speech_is_good_enough_even_if_it_was_made_before_the_commit() -> None:
    ears = committed_blind()
    assert kinds(ears.hear("What time is it?", final=False)) == [Transcribed]
    assert ears.hear("What time is it?", final=True) == [], "the ears repeat themselves at a commit"


def test_a_transcript_of_only_a_part_is_not_taken_for_the_whole() -> None:
    ears = committed_blind()
    assert ears.hear("What", final=False, end=ears.end - FRAME) == []
    assert kinds(ears.hear("What time is it?", final=True)) == [Transcribed]


def test_a_repeated_final_transcript_is_told_once() -> None:
    ears = committed_blind()
    ears.hear("Yes.", final=True)
    assert ears.hear("Yes.", final=True) == []


def test_the_final_transcript_of_a_turn_that_was_committed_with_one_is_a_repetition() -> None:
    ears = Listener()
    ears.speak(640)
    ears.pause(160)
    ears.hear("Yes.")
    ears.pause(256)
    assert ears.hear("Yes.", final=True) == []


def test_transcripts_of_two_committed_utterances_may_come_in_any_order() -> None:
    ears = committed_blind()
    ears.speak(640, new=True)
    ears.pause(512)
    assert kinds(ears.hear("The second.", final=True)) == [Transcribed]
    assert kinds(ears.take(Heard(1, 0, ears.at, "The first.", 1.0, True))) == [Transcribed]


def test_a_transcript_still_comes_after_the_utterance_under_way_was_taken_away() -> None:
    ears = committed_blind()
    ears.floor.reset()
    assert kinds(ears.hear("What time is it?")) == [Transcribed]


def test_after_the_ears_are_lost_only_a_final_transcript_means_anything() -> None:
    ears = committed_blind()
    ears.floor.lost()
    assert ears.hear("What time is it?", final=False) == []


def test_an_utterance_that_the_ears_close_by_themselves_is_a_turn() -> None:
    ears = Listener()
    ears.speak(640)
    (commit,) = ears.hear("And so on and so forth", final=True)
    assert isinstance(commit, Commit)
    assert commit.heard is not None
    assert kinds(ears.speak(32, new=True)) == [Announce]


def test_an_utterance_that_is_followed_by_another_was_closed_and_its_transcript_is_still_to_come() -> None:
    ears = Listener()
    ears.speak(640)
    end = ears.end
    decisions = ears.speak(32, new=True)
    assert decisions == [Commit(1, end, None), Announce(2, ears.start)]
    assert kinds(ears.take(Heard(1, 0, end, "And so on", 1.0, True))) == [Transcribed]


# -- a reply plays ---------------------------------------------------------------------------------------------------


def overlapping(overlap: Overlap = OVERLAP, detection: TurnDetection | None = DETECTION) -> Listener:
    return Listener(detection, overlap, playing=True)


def test_speech_during_a_reply_is_nothing_at_first_and_holds_it_after_200_ms() -> None:
    ears = overlapping()
    assert ears.speak(192) == []
    assert ears.speak(32) == [HoldReply(1)]
    assert ears.speak(320) == []
    assert not ears.floor.speaking


def test_a_short_acknowledgement_lets_the_reply_go_on_and_is_forgotten() -> None:
    ears = overlapping()
    ears.speak(320)
    assert ears.pause(224) == []
    assert ears.pause(32) == [GoOnReply("short_ack")]
    assert ears.pause(224) == []
    assert ears.pause(32) == [Forget(1, False, ears.end)]


def test_speech_just_under_700_ms_does_not_interrupt_and_longer_speech_does() -> None:
    ears = overlapping()
    assert kinds(ears.speak(672)) == [HoldReply]
    assert ears.speak(32) == [Interrupt(1, ears.start)]
    assert ears.floor.speaking


def test_an_interruption_is_the_next_turn_from_its_first_sample_on() -> None:
    ears = overlapping()
    ears.speak(704)
    ears.playing = False
    ears.speak(320)
    assert kinds(ears.pause(512)) == [Commit]


def test_the_silence_inside_an_acknowledgement_does_not_make_it_long() -> None:
    ears = overlapping()
    ears.speak(224)
    ears.pause(416)
    assert kinds(ears.speak(224)) == [HoldReply], "448 ms of speech and 416 of silence"
    assert kinds(ears.speak(256)) == [Interrupt]


def test_a_reply_that_was_let_go_is_held_again_when_the_speech_goes_on() -> None:
    ears = overlapping()
    ears.speak(320)
    assert kinds(ears.pause(256)) == [GoOnReply]
    assert kinds(ears.speak(32)) == [HoldReply]


def test_nothing_is_held_where_the_hold_is_switched_off() -> None:
    ears = overlapping(Overlap(hold_ms=0))
    assert kinds(ears.speak(704)) == [Interrupt]


def test_an_overlap_that_fades_lets_go_and_was_never_told() -> None:
    ears = overlapping()
    ears.speak(224)
    assert ears.take(SpeechFaded(1)) == [GoOnReply("faded")]
    ears.speak(32, new=True)
    assert ears.take(SpeechFaded(2)) == []


def test_a_reply_that_ends_meanwhile_leaves_the_speech_as_the_users_turn() -> None:
    ears = overlapping()
    ears.speak(96)
    ears.playing = False
    assert ears.speak(32) == [Announce(1, ears.start)]


def test_a_held_reply_that_ends_meanwhile_is_let_go_first() -> None:
    ears = overlapping()
    ears.speak(320)
    ears.playing = False
    assert ears.speak(32) == [GoOnReply("reply_over"), Announce(1, ears.start)]


def test_a_reply_that_ends_in_the_pause_leaves_the_speech_as_the_users_turn() -> None:
    ears = overlapping()
    ears.speak(96)
    ears.pause(128)
    ears.playing = False
    assert ears.pause(32) == [Announce(1, ears.start)]
    assert kinds(ears.pause(352)) == [Commit]


def knowing(level_db: float = -20.0) -> Listener:
    """Knows how loud the user usually is."""
    ears = Listener()
    ears.speak(640, level_db)
    ears.pause(512)
    assert ears.floor.usual_db == pytest.approx(level_db)
    ears.playing = True
    ears.decisions.clear()
    return ears


def test_speech_more_than_12_db_under_the_usual_level_is_echo_and_counts_for_nothing() -> None:
    ears = knowing()
    assert ears.speak(3000, -32.1, new=True) == []
    assert kinds(ears.pause(512)) == [Forget]


def test_speech_of_no_less_than_12_db_under_the_usual_level_interrupts() -> None:
    ears = knowing()
    assert kinds(ears.speak(800, -32.0, new=True)) == [HoldReply, Interrupt]


def test_only_the_loud_part_of_an_overlap_counts() -> None:
    ears = knowing()
    assert ears.speak(1000, -40.0, new=True) == []
    assert kinds(ears.speak(672, -20.0)) == [HoldReply]
    assert kinds(ears.speak(32, -20.0)) == [Interrupt]


def test_echo_after_the_end_of_the_reply_is_no_turn() -> None:
    ears = knowing()
    ears.speak(320, -50.0, new=True)
    ears.playing = False
    assert ears.speak(64, -50.0) == []
    assert kinds(ears.pause(512)) == [Forget]


def test_the_usual_level_is_the_mean_of_an_utterance_and_follows_slowly() -> None:
    ears = Listener()
    ears.speak(320, -20.0)
    ears.speak(320, -30.0)
    ears.pause(512)
    assert ears.floor.usual_db == pytest.approx(-25.0)
    ears.speak(640, -35.0, new=True)
    ears.pause(512)
    assert ears.floor.usual_db == pytest.approx(-28.0)


@pytest.mark.parametrize(
    ("overlap", "detection"),
    [
        (Overlap(listen_only=True), DETECTION),
        (Overlap(), replace(DETECTION, interrupt_response=False)),
    ],
)
def test_speech_that_may_not_interrupt_is_heard_as_the_next_turn(overlap: Overlap, detection: TurnDetection) -> None:
    ears = overlapping(overlap, detection)
    assert ears.speak(672) == []
    assert ears.speak(32) == [Announce(1, ears.start)]
    assert kinds(ears.pause(512)) == [Commit]


def test_an_acknowledgement_is_no_turn_where_speech_may_not_interrupt_either() -> None:
    ears = overlapping(Overlap(listen_only=True))
    ears.speak(320)
    assert kinds(ears.pause(512)) == [Forget]


def test_an_overlap_that_the_ears_close_by_themselves_is_forgotten() -> None:
    ears = overlapping(Overlap(short_ack_ms=60_000))
    ears.speak(1000)
    assert kinds(ears.hear("la la la", final=True)) == [GoOnReply, Forget]


# -- by hand ---------------------------------------------------------------------------------------------------------


def test_without_turn_detection_findings_decide_nothing_and_transcripts_come_through() -> None:
    ears = Listener(None)
    assert ears.speak(960) == []
    assert ears.pause(960) == []
    assert ears.hear("partial", final=False) == []
    (decision,) = ears.take(Heard(2, 0, ears.at, "What time is it?", 1.0, True))
    assert isinstance(decision, Transcribed)


# -- findings on the wire ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "finding",
    [
        SpeechBegan(1, 100, -30.5),
        SpeechWent(1, 612, 512, -20.0),
        SpeechPaused(2, 5000, 1536),
        SpeechFaded(3),
        Heard(4, 0, 9000, "Grüße, 世界", 0.75, True),
    ],
)
def test_a_finding_survives_the_way_from_the_ears(finding: Finding) -> None:
    assert read_finding(write_finding(finding)) == finding


def test_a_payload_of_another_kind_is_no_finding() -> None:
    assert read_finding(Payload("pcm")) is None
