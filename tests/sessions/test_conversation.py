"""Conversations by scenario: who speaks when, what is cut, what remains, what the model gets to see."""

from dataclasses import replace

import pytest
from session_driver import BRISK, BRISK_DETECTION, FRAME, HEARS, QUIET, SPEAKS, Drive, Start, Voice, told

from omni_live.sessions.effects import (
    Abort,
    Credit,
    Emit,
    Feed,
    Hold,
    RaiseFence,
    Restore,
    SnapshotReady,
    Submit,
    TakeSnapshot,
    Unhold,
)
from omni_live.sessions.events import (
    AudioDelta,
    ContextDropped,
    ItemAdded,
    ItemTruncated,
    OverlapDecided,
    PlaybackAcknowledged,
    ResponseCreated,
    ResponseDone,
    SpeechStarted,
    SpeechStopped,
    TextDelta,
    TranscriptionDone,
    TranscriptionFailed,
)
from omni_live.sessions.exchange import SIDE_LANE, Shape
from omni_live.sessions.ids import CountedIds
from omni_live.sessions.inputs import (
    Attached,
    AudioCleared,
    AudioCommitted,
    BargeInAsked,
    CancelAsked,
    Detached,
    ItemCreateAsked,
    ItemDeleteAsked,
    Outcome,
    PlaybackAcked,
    RespondAsked,
    RestoreAsked,
    SettingsAsked,
    SnapshotAsked,
    StageFound,
    StageLost,
    StageSnapshotted,
    StageSpoke,
    TextAppended,
)
from omni_live.sessions.items import Item, ItemStatus, Modality, ResponseStatus, Role
from omni_live.sessions.limits import Limits
from omni_live.sessions.payload import Payload
from omni_live.sessions.settings import Overlap, Settings
from omni_live.sessions.stamp import LANES

USER, ASSISTANT, SYSTEM = Role.USER, Role.ASSISTANT, Role.SYSTEM
COMPLETED, CANCELLED, FAILED, INCOMPLETE = (
    ResponseStatus.COMPLETED,
    ResponseStatus.CANCELLED,
    ResponseStatus.FAILED,
    ResponseStatus.INCOMPLETE,
)
STORY = (
    "Once upon ",
    "a time ",
    "there was ",
    "a king ",
    "who had ",
    "three sons ",
    "and no ",
    "daughter at ",
    "all. ",
)


def replied(drive: Drive, text: str = "Fine, thanks. ", ms: int = 250) -> Voice:
    """The turn that was submitted last is answered, and the answer is played out."""
    voice = drive.voice()
    voice.say(text, ms)
    voice.end()
    drive.pass_ms(ms + 100)
    return voice


def storytelling(drive: Drive, chunks: int = 9) -> Voice:
    """A long reply runs; it has sent so many chunks of 250 ms."""
    drive.tell(TextAppended("Tell me a story."))
    voice = drive.voice()
    for text in STORY[:chunks]:
        voice.say(text)
    return voice


# -- turns ---------------------------------------------------------------------------------------------------------


def test_a_polite_second_turn_continues_the_first(start: Start) -> None:
    drive = start(settings=replace(BRISK, instructions="Be brief."))
    drive.user.turn("How are you?")
    replied(drive, "Fine, thanks. ")
    drive.user.turn("What time is it?")
    replied(drive, "Noon. ")
    assert drive.statuses == [COMPLETED, COMPLETED]
    assert drive.texts == ["How are you?", "Fine, thanks. ", "What time is it?", "Noon. "]
    assert drive.seen[-1] == [
        (SYSTEM, "Be brief."),
        (USER, "How are you?"),
        (ASSISTANT, "Fine, thanks. "),
        (USER, "What time is it?"),
    ]
    assert drive.submits[1].payload.meta["keep"] == 3, "the model is told only what is new"
    assert [submit.stamp.turn for submit in drive.submits] == [1, 2]


def test_the_first_input_of_the_ears_is_their_configuration(start: Start) -> None:
    drive = start()
    (feed,) = drive.all(Feed)
    assert (feed.stage, feed.payload.kind) == ("ears", "configure")
    assert feed.payload.meta["detect"] is True
    assert feed.payload.meta["position"] == 0


def test_speech_goes_to_the_ears_as_it_comes(start: Start) -> None:
    drive = start()
    drive.user.listen(320)
    pcm = [feed.payload for feed in drive.all(Feed) if feed.payload.kind == "pcm"]
    assert [payload.nbytes for payload in pcm] == [2 * FRAME] * 10


def test_a_spoken_turn_leaves_at_the_voice_and_a_written_one_at_the_thinker(
    start: Start,
) -> None:
    drive = start()
    drive.tell(TextAppended("Hello.", respond=False), RespondAsked(), CancelAsked())
    drive.tell(RespondAsked(modality=Modality.TEXT))
    assert [(submit.entry, submit.outputs) for submit in drive.submits] == [
        ("thinker", frozenset({"code2wav"})),
        ("thinker", frozenset({"thinker"})),
    ]


def test_a_text_turn_is_told_as_it_comes_and_kept(start: Start) -> None:
    drive = start(settings=replace(BRISK, modality=Modality.TEXT))
    drive.tell(TextAppended("Hello."))
    voice = drive.voice()
    voice.write("Good ")
    voice.write("day.")
    assert [delta.delta for delta in drive.all(TextDelta)] == ["Good ", "day."]
    assert drive.all(Credit)[-1].stage == "thinker"
    voice.end()
    assert drive.texts == ["Hello.", "Good day."]
    assert not drive.items[1].spoken
    assert drive.statuses == [COMPLETED]
    drive.tell(TextAppended("And?"))
    assert drive.submits[-1].payload.meta["keep"] == 2


def test_a_cancelled_text_turn_keeps_what_was_told(start: Start) -> None:
    drive = start(settings=replace(BRISK, modality=Modality.TEXT))
    drive.tell(TextAppended("Hello."))
    drive.voice().write("Good ")
    drive.tell(CancelAsked())
    assert drive.texts == ["Hello.", "Good "]
    assert drive.items[1].status is ItemStatus.INCOMPLETE


def test_a_response_may_have_instructions_a_seed_and_a_length_of_its_own(start: Start) -> None:
    drive = start(settings=replace(BRISK, instructions="Be brief.", seed=3, max_output_tokens=50, temperature=0.5))
    drive.tell(TextAppended("Hello.", respond=False))
    drive.tell(RespondAsked(instructions="Shout.", max_output_tokens=7, seed=4))
    assert drive.seen[-1][0] == (SYSTEM, "Shout.")
    params = drive.submits[0].params
    assert (params["max_tokens"], params["temperature"], params["side"]) == (7, 0.5, False)
    other = start(settings=replace(BRISK, seed=4))
    other.tell(TextAppended("Hello."))
    assert other.submits[0].params["seed"] == params["seed"]
    drive.tell(CancelAsked(), RespondAsked())
    assert drive.submits[1].params["max_tokens"] == 50
    assert drive.seen[-1][0] == (SYSTEM, "Be brief.")


def test_seeds_depend_on_the_number_of_the_turn_alone(start: Start) -> None:
    calm, wild = start(), start()
    for drive in (calm, wild):
        drive.tell(TextAppended("One."))
    wild.pass_ms(500)
    replied(calm)
    wild.tell(CancelAsked())
    for drive in (calm, wild):
        drive.tell(TextAppended("Two."))
    assert calm.submits[1].params["seed"] == wild.submits[1].params["seed"] != calm.submits[0].params["seed"]


def test_typing_during_a_reply_interrupts_it(start: Start) -> None:
    drive = start()
    storytelling(drive)
    drive.pass_ms(300)
    drive.tell(TextAppended("Stop."))
    assert drive.statuses == [CANCELLED]
    assert drive.seen[-1][1:] == [(ASSISTANT, "Once upon "), (USER, "Stop.")]
    assert drive.busy


def test_a_pipeline_without_ears_takes_no_audio(start: Start) -> None:
    drive = start(shape=Shape(ears=""))
    drive.user.listen(320)
    drive.tell(AudioCommitted(), AudioCleared())
    assert drive.errors == ["unsupported_input"] * 10 + ["input_audio_buffer_commit_empty"]
    assert not drive.all(Feed)


# -- tentative turns -----------------------------------------------------------------------------------------------


def test_a_tentative_turn_emits_nothing_and_goes_out_at_once_when_the_pause_holds(start: Start) -> None:
    drive = start()
    drive.user.speak(800)
    drive.user.pause(192, "What time is it?")
    voice = drive.voice()
    voice.say("It is ")
    voice.say("noon. ")
    assert not drive.all(ResponseCreated)
    assert not drive.all(AudioDelta)
    assert not drive.all(Credit)
    drive.user.pause(256)
    drive.user.closed()
    assert len(drive.submits) == 1
    assert drive.count("tentative_adopted") == 1
    assert len(drive.all(AudioDelta)) == 2
    assert len(drive.all(Credit)) == 2
    voice.end()
    drive.pass_ms(1000)
    assert drive.texts == ["What time is it?", "It is noon. "]
    assert drive.statuses == [COMPLETED]
    drive.user.turn("Thanks.")
    assert drive.submits[-1].payload.meta["keep"] == 2


def test_a_tentative_text_turn_tells_what_it_had_when_it_is_adopted(start: Start) -> None:
    drive = start(settings=replace(BRISK, modality=Modality.TEXT))
    drive.user.speak(800)
    drive.user.pause(192, "What time is it?")
    voice = drive.voice()
    voice.write("It is ")
    voice.write("noon.")
    voice.end()
    assert not drive.all(TextDelta)
    drive.user.pause(256)
    assert [delta.delta for delta in drive.all(TextDelta)] == ["It is ", "noon."]
    assert drive.statuses == [COMPLETED]


def test_a_discarded_tentative_turn_leaves_no_trace(start: Start) -> None:
    drive, plain = start(), start()
    drive.user.speak(800)
    drive.user.pause(192, "What")
    voice = drive.voice()
    voice.say("Pardon? ")
    drive.user.speak(320)
    drive.user.pause(512, "What time is it?")
    plain.user.turn("What time is it?", ms=800 + 192 + 320)
    assert drive.count("tentative_discarded") == 1
    assert not told(voice.say("What? "))
    assert drive.texts == plain.texts == ["What time is it?"]
    assert drive.seen[-1] == plain.seen[-1] == [(USER, "What time is it?")]
    assert [created.response.turn for created in drive.all(ResponseCreated)] == [1]
    assert drive.submits[-1].params == plain.submits[-1].params
    assert drive.session.epoch == plain.session.epoch == 1, "the conversation's own epoch does not move"


def test_a_tentative_turn_on_another_text_than_the_final_one_is_discarded(start: Start) -> None:
    drive = start()
    drive.user.speak(800)
    drive.user.pause(192, "What time")
    drive.user.hear("What time is it?", final=False)
    drive.user.pause(256)
    assert drive.count("tentative_discarded") == 1
    assert drive.seen[-1] == [(USER, "What time is it?")]
    assert len(drive.all(ResponseCreated)) == 1


@pytest.mark.parametrize(
    "meanwhile",
    [
        ItemCreateAsked(Item("", SYSTEM, "Answer in French.", spoken=False), "root"),
        SettingsAsked(replace(BRISK, instructions="Answer in French.")),
        SettingsAsked(replace(BRISK, temperature=1.0)),
    ],
    ids=["an item", "instructions", "temperature"],
)
def test_a_tentative_turn_that_was_begun_on_something_else_is_begun_anew(
    start: Start, meanwhile: ItemCreateAsked | SettingsAsked
) -> None:
    drive = start()
    drive.user.speak(800)
    drive.user.pause(192, "What time is it?")
    drive.tell(meanwhile)
    drive.user.pause(256)
    assert len(drive.submits) == 2
    assert len(drive.all(ResponseCreated)) == 1
    assert drive.seen[-1][-1] == (USER, "What time is it?")
    assert len(drive.seen[-1]) == len(drive.talk._messages())


def test_a_tentative_turn_is_not_adopted_under_a_number_that_was_given_away(start: Start) -> None:
    drive = start()
    drive.user.speak(800)
    drive.user.pause(192, "What time is it?")
    drive.tell(RespondAsked(out_of_band=True, modality=Modality.TEXT))
    drive.user.pause(256)
    turns = [created.response.turn for created in drive.all(ResponseCreated)]
    assert turns == [1, 2]


def test_a_tentative_turn_that_fails_is_begun_anew_at_the_commit(start: Start) -> None:
    drive = start()
    drive.user.speak(800)
    drive.user.pause(192, "What time is it?")
    drive.voice().end(Outcome.FAILED, "stage_error")
    assert drive.statuses == []
    drive.user.pause(256)
    replied(drive)
    assert drive.statuses == [COMPLETED]


def test_no_turn_is_tried_where_no_answer_follows(start: Start) -> None:
    drive = start(settings=replace(BRISK, turn_detection=replace(BRISK_DETECTION, create_response=False)))
    drive.user.turn("What time is it?")
    assert drive.submits == []
    assert drive.texts == ["What time is it?"]


def test_content_of_a_finished_reply_survives_a_later_turn_that_was_tried_in_vain(start: Start) -> None:
    drive = start()
    drive.user.turn("What time is it?")
    replied(drive, "Noon. ")
    drive.tell(RespondAsked())
    replied(drive, "Still noon. ")
    lane = drive.submits[0].stamp.slot
    for _ in range(3):
        drive.user.speak(320)
        drive.user.pause(192, "Um")
        drive.user.speak(320)
        drive.user.pause(512, "")
        drive.user.closed()
    assert lane in {submit.stamp.slot for submit in drive.submits[2:]}
    assert drive.count("tentative_discarded") >= 3
    assert drive.count("voided_frames") == 0


def test_each_tentative_turn_is_tried_under_a_name_of_its_own(start: Start) -> None:
    drive = start()
    drive.user.speak(640)
    for _ in range(5):
        drive.user.pause(192, "Um, what")
        drive.user.speak(160)
    assert len({submit.stamp[:4] for submit in drive.submits}) == 5
    assert all(submit.stamp.slot % LANES in (1, 2) for submit in drive.submits)


# -- overlap -------------------------------------------------------------------------------------------------------


def test_g8_a_barge_in_cuts_the_reply_to_what_was_heard(start: Start) -> None:
    drive = start()
    voice = storytelling(drive)
    at = drive.now
    drive.user.speak(736)
    heard = voice.heard((drive.now - at) / 1e6)
    assert drive.statuses == [CANCELLED]
    done = drive.last(ResponseDone).response
    assert done.reason == "turn_detected"
    assert drive.texts == ["Tell me a story.", heard]
    assert heard.startswith("Once upon a time ")
    assert drive.items[1].status is ItemStatus.INCOMPLETE
    truncated = drive.last(ItemTruncated)
    assert (truncated.item_id, truncated.text) == (drive.items[1].id, heard)
    assert abs(truncated.audio_end_ms - 736) <= 32
    drive.user.pause(512, "What about the queen?")
    assert drive.seen[-1] == [(USER, "Tell me a story."), (ASSISTANT, heard), (USER, "What about the queen?")]


def test_a_barge_in_holds_fences_aborts_tells_and_lets_go_in_this_order(start: Start) -> None:
    drive = start()
    storytelling(drive)
    mark = len(drive.effects)
    drive.user.speak(736)
    names = [
        type(effect.event).__name__ if isinstance(effect, Emit) else type(effect).__name__
        for effect in drive.effects[mark:]
    ]
    wanted = ["Hold", "OverlapDecided", "RaiseFence", "Abort", "SpeechStarted", "OverlapDecided", "AudioDone"]
    wanted += ["ResponseDone", "Unhold"]
    assert [name for name in names if name in wanted] == wanted
    assert [(decided.action, decided.reason) for decided in drive.all(OverlapDecided)] == [
        ("hold", "speech"),
        ("barge_in", "speech"),
    ]


def test_g12_the_chunks_that_come_after_a_barge_in_are_dropped_and_counted(start: Start) -> None:
    drive = start()
    voice = storytelling(drive, 4)
    drive.user.speak(736)
    before = drive.count("stale_output")
    assert not told(voice.say(STORY[4]))
    assert not told(voice.end())
    assert drive.count("stale_output") == before + 2


def test_a_short_acknowledgement_lets_the_reply_go_on_where_it_was(start: Start) -> None:
    drive = start()
    storytelling(drive)
    drive.user.speak(320)
    assert drive.held
    sent = len(drive.all(AudioDelta))
    drive.user.pause(224)
    assert len(drive.all(AudioDelta)) == sent, "nothing goes out while it is held"
    drive.user.pause(512)
    assert not drive.held
    assert [decided.action for decided in drive.all(OverlapDecided)] == ["hold", "drop"]
    assert not drive.all(SpeechStarted)
    assert len(drive.all(AudioDelta)) > sent
    discards = [feed.payload.meta["utterance"] for feed in drive.all(Feed) if feed.payload.kind == "discard"]
    assert discards == [1]
    assert drive.statuses == []


def test_a_client_that_falls_silent_for_good_does_not_hold_its_reply_forever(start: Start) -> None:
    drive = start()
    voice = storytelling(drive)
    voice.end()
    drive.user.speak(320)
    assert drive.held
    drive.pass_ms(999)
    assert drive.held
    drive.pass_ms(1)
    assert not drive.held
    drive.pass_ms(3000)
    assert drive.statuses == [COMPLETED]


def test_speech_after_the_reply_is_done_truncates_it_and_leaves_the_turn_done(start: Start) -> None:
    drive = start(settings=replace(BRISK, lead_ms=0))
    voice = storytelling(drive)
    at = drive.now
    voice.end()
    assert drive.statuses == [COMPLETED]
    drive.user.speak(736)
    heard = voice.heard((drive.now - at) / 1e6)
    assert drive.texts[1] == heard != voice.text
    assert drive.last(ItemTruncated).text == heard
    assert drive.statuses == [COMPLETED]
    assert drive.all(OverlapDecided)[-1].action == "barge_in"
    assert drive.last(OverlapDecided).response_id == drive.last(ResponseDone).response.id
    drive.user.pause(512, "Stop.")
    assert drive.seen[-1][1] == (ASSISTANT, heard)


def test_g1_what_waits_to_be_sent_of_a_reply_that_is_done_is_stale_after_a_barge_in(start: Start) -> None:
    drive = start(settings=replace(BRISK, lead_ms=0))
    storytelling(drive).end()
    content = next(emit.content for emit in drive.emits if isinstance(emit.event, AudioDelta))
    assert content is not None
    assert drive.admits(content)
    drive.user.speak(736)
    assert not drive.admits(content)
    assert drive.count("voided_frames") > 0


def test_g1_the_content_of_a_turn_that_was_tried_first_is_stale_after_a_barge_in(start: Start) -> None:
    drive = start()
    drive.user.turn("Tell me a story.")
    assert drive.count("tentative_adopted") == 1
    voice = drive.voice()
    for text in STORY:
        voice.say(text)
    contents = [emit.content for emit in drive.emits if emit.content is not None]
    drive.user.speak(736)
    assert contents
    assert not any(drive.admits(content) for content in contents)


def test_a_barge_in_of_the_client_lets_go_of_a_reply_that_is_held_and_done(start: Start) -> None:
    drive = start(settings=Settings(lead_ms=0))
    storytelling(drive).end()
    drive.user.speak(320)
    assert drive.held
    drive.tell(BargeInAsked())
    assert not drive.held


def test_after_a_barge_in_the_next_words_are_no_overlap_any_more(start: Start) -> None:
    drive = start(settings=replace(BRISK, lead_ms=0))
    storytelling(drive).end()
    drive.user.speak(736)
    drive.user.pause(512, "")
    drive.user.closed()
    started = len(drive.all(SpeechStarted))
    drive.user.speak(32)
    assert len(drive.all(SpeechStarted)) == started + 1, "the client plays nothing any more"


def test_a_reply_that_was_cut_is_not_cut_again_further_on(start: Start) -> None:
    drive = start(settings=replace(BRISK, lead_ms=0))
    voice = storytelling(drive)
    voice.end()
    drive.pass_ms(600)
    drive.tell(BargeInAsked())
    heard = drive.texts[1]
    assert heard == voice.heard(600)
    drive.pass_ms(700)
    drive.tell(BargeInAsked())
    drive.user.turn("Hello?")
    assert drive.texts[1] == heard


def test_a_client_that_finds_the_barge_in_itself_is_believed(start: Start) -> None:
    drive = start()
    voice = storytelling(drive)
    drive.pass_ms(400)
    drive.tell(BargeInAsked())
    assert drive.texts[1] == voice.heard(400)
    assert drive.last(ResponseDone).response.reason == "turn_detected"


def test_a_barge_in_of_the_client_cuts_both_the_reply_that_plays_and_the_turn_that_thinks(start: Start) -> None:
    drive = start(settings=replace(BRISK, lead_ms=0))
    voice = storytelling(drive)
    voice.end()
    drive.pass_ms(300)
    drive.tell(RespondAsked(), BargeInAsked())
    assert drive.statuses == [COMPLETED, CANCELLED]
    assert drive.texts[1] == voice.heard(300)
    assert not drive.live


def test_a_barge_in_while_the_next_turn_thinks_and_the_last_reply_plays_restarts_nothing(start: Start) -> None:
    drive = start(settings=replace(BRISK, lead_ms=0))
    storytelling(drive).end()
    drive.pass_ms(300)
    drive.tell(RespondAsked())
    submits = len(drive.submits)
    drive.user.speak(736)
    assert len(drive.submits) == submits
    assert not drive.live
    assert drive.statuses == [COMPLETED, CANCELLED]


def test_speech_while_the_turn_thinks_interrupts_it_before_its_first_sound(start: Start) -> None:
    drive = start()
    drive.tell(TextAppended("Tell me a story."))
    drive.user.speak(736)
    done = drive.last(ResponseDone).response
    assert (done.status, done.item) == (CANCELLED, None)
    assert drive.texts == ["Tell me a story."]


@pytest.mark.parametrize(
    "settings",
    [
        replace(BRISK, overlap=Overlap(listen_only=True)),
        replace(BRISK, turn_detection=replace(BRISK_DETECTION, interrupt_response=False)),
    ],
    ids=["listen_only", "interrupt_response false"],
)
def test_speech_that_may_not_interrupt_is_answered_when_the_reply_is_over(start: Start, settings: Settings) -> None:
    drive = start(settings=settings)
    voice = storytelling(drive)
    drive.user.turn("And the queen?", ms=736)
    assert not drive.all(Hold)
    assert drive.statuses == []
    assert len(drive.submits) == 1
    voice.end()
    drive.pass_ms(3000)
    assert drive.statuses == [COMPLETED]
    assert len(drive.submits) == 2
    assert (USER, "And the queen?") in drive.seen[-1]
    assert (ASSISTANT, voice.text) in drive.seen[-1]
    assert not drive.all(ItemTruncated)


def test_an_answer_that_is_owed_waits_for_whoever_speaks(start: Start) -> None:
    drive = start(settings=replace(BRISK, overlap=Overlap(listen_only=True)))
    voice = storytelling(drive)
    drive.user.turn("And the queen?", ms=736)
    drive.user.speak(1500)
    voice.end()
    drive.user.speak(1500)
    assert drive.statuses == [COMPLETED]
    assert len(drive.submits) == 1, "the user is speaking again"
    drive.user.pause(512, "And the prince?")
    assert len(drive.all(ResponseCreated)) == 2
    drive.pass_ms(5000)
    assert len(drive.all(ResponseCreated)) == 2, "one answer for both"


def test_echo_of_the_reply_does_not_interrupt_it(start: Start) -> None:
    drive = start()
    drive.user.turn("Tell me a story.")
    voice = drive.voice()
    for text in STORY:
        voice.say(text)
    drive.user.speak(2000, level_db=-40.0)
    assert not drive.all(Hold)
    assert drive.statuses == []


# -- playback ------------------------------------------------------------------------------------------------------


def test_audio_goes_out_no_further_ahead_than_the_lead_and_credit_goes_with_it(start: Start) -> None:
    drive = start()
    storytelling(drive)
    assert len(drive.all(AudioDelta)) == 4
    assert len([credit for credit in drive.all(Credit) if credit.stage == "code2wav"]) == 4
    drive.pass_ms(200)
    assert len(drive.all(AudioDelta)) == 5
    drive.pass_ms(1000)
    assert len(drive.all(AudioDelta)) == 9


def test_a_turn_is_done_when_its_last_chunk_was_released_and_not_before(start: Start) -> None:
    drive = start()
    voice = storytelling(drive)
    voice.end()
    assert drive.statuses == []
    drive.pass_ms(9 * 250 - 800 - 251)
    assert drive.statuses == []
    drive.pass_ms(2)
    assert drive.statuses == [COMPLETED]
    assert drive.texts[1] == "".join(STORY)
    assert drive.items[1].audio_ms == 9 * 250


def test_deltas_say_where_they_begin_and_what_was_spoken_when(start: Start) -> None:
    drive = start()
    storytelling(drive, 3)
    deltas = drive.all(AudioDelta)
    assert [delta.start_sample for delta in deltas] == [0, 6000, 12000]
    assert [delta.epoch for delta in deltas] == [1, 1, 1]
    assert deltas[1].marks == ((6000, 10), (9000, 12))


def test_a_late_acknowledgement_corrects_what_was_heard(start: Start) -> None:
    drive = start()
    voice = storytelling(drive)
    drive.pass_ms(700)
    drive.tell(CancelAsked())
    assert drive.texts[1] == voice.heard(700)
    drive.tell(PlaybackAcked(400.0, drive.last(ResponseDone).response.id))
    assert drive.texts[1] == voice.heard(400)
    assert drive.last(ItemTruncated).audio_end_ms == 400
    drive.tell(TextAppended("Go on."))
    assert drive.seen[-1][1] == (ASSISTANT, voice.heard(400))


def test_a_late_acknowledgement_restarts_a_turn_that_thinks_on_the_corrected_context(start: Start) -> None:
    drive = start()
    voice = storytelling(drive)
    drive.pass_ms(700)
    drive.tell(TextAppended("Go on."))
    first = drive.submits[-1]
    effects = drive.tell(PlaybackAcked(300.0, drive.all(ResponseDone)[0].response.id))
    names = [type(effect) for effect in effects]
    assert names.index(RaiseFence) < names.index(Abort) < names.index(Submit)
    second = drive.submits[-1]
    assert second.stamp.turn == first.stamp.turn
    assert second.params == first.params
    assert drive.seen[-1] == [(USER, "Tell me a story."), (ASSISTANT, voice.heard(300)), (USER, "Go on.")]
    assert len(drive.all(ResponseCreated)) == 2
    replied(drive)
    assert drive.statuses == [CANCELLED, COMPLETED]


def test_an_acknowledgement_that_names_nothing_is_about_what_plays_and_not_about_what_thinks(start: Start) -> None:
    drive = start(settings=replace(BRISK, lead_ms=0))
    voice = storytelling(drive)
    voice.end()
    drive.tell(RespondAsked(), PlaybackAcked(500.0))
    drive.tell(BargeInAsked())
    assert drive.texts[1] == voice.heard(500)


def test_acknowledged_positions_pace_the_reply(start: Start) -> None:
    drive = start()
    storytelling(drive)
    drive.tell(PlaybackAcked(0.0))
    drive.pass_ms(5000)
    assert len(drive.all(AudioDelta)) == 5, "the client says nothing more: it has stopped"
    drive.tell(PlaybackAcked(1250.0))
    assert len(drive.all(AudioDelta)) > 5


def test_every_acknowledgement_is_answered_and_not_journaled(start: Start) -> None:
    drive = start()
    (emit,) = [effect for effect in drive.tell(PlaybackAcked(5.0, None, None, "ev_1")) if isinstance(effect, Emit)]
    assert emit == Emit(PlaybackAcknowledged(5.0, None, "ev_1"), 0)


# -- limits of a turn ----------------------------------------------------------------------------------------------


def test_a_reply_that_is_too_long_ends_as_incomplete_and_is_counted(start: Start) -> None:
    drive = start(settings=replace(BRISK, lead_ms=0), limits=Limits(max_reply_s=1.0))
    voice = storytelling(drive, 5)
    assert drive.count("reply_too_long") == 1
    done = drive.last(ResponseDone).response
    assert (done.status, done.reason) == (INCOMPLETE, "max_output_tokens")
    assert drive.texts[1] == voice.text, "what was made is played"
    assert not drive.live
    drive.tell(TextAppended("Go on."))
    assert drive.seen[-1][1] == (ASSISTANT, voice.text)
    assert not told(voice.say("more "))


def test_an_incomplete_turn_says_why_and_the_model_is_told_its_words(start: Start) -> None:
    drive = start()
    drive.tell(TextAppended("Hello."))
    voice = drive.voice()
    voice.say("Well then ")
    voice.end(Outcome.INCOMPLETE, "repetition")
    done = drive.last(ResponseDone).response
    assert (done.status, done.reason) == (INCOMPLETE, "repetition")
    drive.tell(TextAppended("Go on."))
    assert drive.seen[-1] == [(USER, "Hello."), (ASSISTANT, "Well then "), (USER, "Go on.")]


def test_a_turn_of_which_nothing_comes_for_too_long_fails(start: Start) -> None:
    drive = start(limits=Limits(turn_deadline_s=20))
    drive.tell(TextAppended("Hello."))
    drive.pass_ms(19_999)
    assert drive.statuses == []
    drive.pass_ms(1)
    done = drive.last(ResponseDone).response
    assert (done.status, done.error_code) == (FAILED, "timeout")
    assert not drive.live


def test_a_client_that_stopped_playing_does_not_keep_a_turn_forever(start: Start) -> None:
    drive = start(limits=Limits(turn_deadline_s=20))
    storytelling(drive).end()
    drive.tell(PlaybackAcked(0.0))
    drive.pass_ms(21_000)
    assert drive.statuses == [FAILED]


def test_output_that_comes_twice_is_heard_once(start: Start) -> None:
    drive = start()
    drive.tell(TextAppended("Hello."))
    voice = drive.voice()
    chunk = voice.chunk("Hello. ")
    drive.tell(chunk, chunk)
    voice.end()
    assert drive.texts[1] == "Hello. "
    assert drive.count("repeated_output") == 1


def test_g7_a_reply_with_a_hole_in_it_fails(start: Start) -> None:
    drive = start()
    drive.tell(TextAppended("Hello."))
    voice = drive.voice()
    voice.say("One ")
    voice.seq += 1
    voice.say("three ")
    done = drive.last(ResponseDone).response
    assert (done.status, done.error_code) == (FAILED, "output_lost")


def test_a_chunk_may_carry_text_without_sound_and_sound_without_text(start: Start) -> None:
    drive = start()
    drive.tell(TextAppended("Hello."))
    voice = drive.voice()
    stamp = voice.stamp
    drive.tell(StageSpoke(stamp, "code2wav", Payload("pcm", {"text": "Hello. ", "marks": (0, 0)})))
    drive.tell(StageSpoke(stamp._replace(seq=1), "code2wav", Payload("pcm", {"text": None}, bytes(4800))))
    assert [len(delta.pcm) for delta in drive.all(AudioDelta)] == [4800]
    voice.end()
    assert drive.texts[1] == "Hello. "


# -- what breaks ---------------------------------------------------------------------------------------------------


def test_a_failed_stage_fails_the_response_and_the_next_turn_works(start: Start) -> None:
    drive = start()
    voice = storytelling(drive, 2)
    effects = voice.end(Outcome.FAILED, "stage_error")
    names = [type(effect) for effect in effects]
    assert names.index(RaiseFence) < names.index(Abort) < names.index(Emit)
    done = drive.last(ResponseDone).response
    assert (done.status, done.error_code) == (FAILED, "stage_error")
    assert done.error_message
    drive.thinker.items.clear()
    drive.tell(TextAppended("Again."))
    assert drive.submits[-1].payload.meta["keep"] == 0, "nobody knows what the stage holds now"
    replied(drive)
    assert drive.statuses == [FAILED, COMPLETED]


def test_after_a_failure_the_model_is_told_everything_again(start: Start) -> None:
    drive = start()
    drive.tell(TextAppended("One?"))
    replied(drive)
    drive.tell(TextAppended("Two?"))
    drive.voice().end(Outcome.FAILED, "stage_error")
    drive.tell(RespondAsked())
    assert drive.submits[-1].payload.meta["keep"] == 0
    assert drive.seen[-1] == [(USER, "One?"), (ASSISTANT, "Fine, thanks. "), (USER, "Two?")]


def test_a_lost_thinker_costs_the_turn_and_not_the_history(start: Start) -> None:
    drive = start()
    drive.user.turn("How are you?")
    replied(drive)
    drive.tell(TextAppended("And now?"))
    voice = drive.voice()
    drive.tell(StageLost("thinker"))
    drive.thinker.items.clear()
    voice.end(Outcome.FAILED, "replica_lost")
    assert drive.statuses == [COMPLETED, FAILED]
    drive.tell(RespondAsked())
    assert drive.seen[-1] == [(USER, "How are you?"), (ASSISTANT, "Fine, thanks. "), (USER, "And now?")]
    replied(drive, "Better. ")
    assert drive.texts[-1] == "Better. "


def test_a_thinker_that_is_lost_while_its_reply_is_spoken_is_told_everything_again(start: Start) -> None:
    drive = start()
    voice = storytelling(drive)
    drive.tell(StageLost("thinker"))
    voice.end()
    drive.pass_ms(3000)
    assert drive.statuses == [COMPLETED]
    drive.thinker.items.clear()
    drive.tell(TextAppended("Go on."))
    assert drive.submits[-1].payload.meta["keep"] == 0


def test_lost_ears_end_what_they_were_about_to_say_and_are_configured_anew(start: Start) -> None:
    drive = start()
    drive.user.speak(640)
    drive.user.pause(512)
    drive.user.closed()
    drive.user.speak(640)
    (item,) = drive.items
    drive.tell(StageLost("ears"))
    (failed,) = drive.all(TranscriptionFailed)
    assert (failed.item_id, failed.code) == (item.id, "stage_lost")
    assert len(drive.all(SpeechStopped)) == len(drive.all(SpeechStarted)) == 2
    configure = [feed.payload for feed in drive.all(Feed) if feed.payload.kind == "configure"]
    assert len(configure) == 2
    assert configure[1].meta["position"] == drive.user.at
    assert configure[1].meta["utterance"] == 2
    drive.tell(AudioCommitted(event_id="ev_1"))
    assert drive.errors == ["input_audio_buffer_commit_empty"], "the audio is gone"
    drive.user.closed()
    drive.user.turn("Hello?")
    replied(drive)
    assert drive.statuses == [COMPLETED]


def test_lost_ears_let_a_held_reply_go_on(start: Start) -> None:
    drive = start()
    storytelling(drive)
    drive.user.speak(320)
    drive.tell(StageLost("ears"))
    assert not drive.held
    assert drive.last(OverlapDecided).action == "drop"


def test_a_transcript_that_never_comes_fails_and_holds_nobody_up(start: Start) -> None:
    drive = start(settings=QUIET)
    drive.user.listen(640)
    drive.tell(AudioCommitted(), RespondAsked())
    assert drive.submits == []
    drive.pass_ms(15_000)
    assert [failed.code for failed in drive.all(TranscriptionFailed)] == ["timeout"]
    assert len(drive.submits) == 1
    replied(drive)
    assert drive.statuses == [COMPLETED]


def test_a_turn_that_was_cut_before_the_thinker_saw_it_is_told_again(start: Start) -> None:
    drive = start()
    drive.auto_start = False
    drive.tell(TextAppended("Hello."), CancelAsked(), RespondAsked())
    assert drive.thinker.start(drive.submits[-1]) == [(USER, "Hello.")]


# -- the context ---------------------------------------------------------------------------------------------------


def test_items_that_no_longer_fit_are_dropped_at_both_ends(start: Start) -> None:
    drive = start(settings=replace(BRISK, instructions="Be brief."))
    for number in range(3):
        drive.tell(TextAppended(f"Question {number}?"))
        replied(drive, f"Answer {number}. ")
    drive.tell(StageFound("thinker", Payload("dropped", {"items": 3})))
    (dropped,) = drive.all(ContextDropped)
    assert len(dropped.item_ids) == 3
    assert drive.texts == ["Answer 1. ", "Question 2?", "Answer 2. "]
    assert drive.thinker.items == [(SYSTEM, "Be brief."), *[(item.role, item.text) for item in drive.items]]
    drive.tell(TextAppended("More?"))
    assert drive.submits[-1].payload.meta["keep"] == 4
    assert drive.seen[-1] == [
        (SYSTEM, "Be brief."),
        (ASSISTANT, "Answer 1. "),
        (USER, "Question 2?"),
        (ASSISTANT, "Answer 2. "),
        (USER, "More?"),
    ]


def test_items_are_dropped_in_the_order_of_the_conversation(start: Start) -> None:
    drive = start()
    drive.tell(TextAppended("One?"))
    replied(drive)
    ids = [item.id for item in drive.items]
    drive.tell(StageFound("thinker", Payload("dropped", {"items": 2})))
    assert list(drive.last(ContextDropped).item_ids) == ids


def test_what_was_dropped_is_counted_as_the_model_knew_it_whatever_the_client_did_meanwhile(start: Start) -> None:
    drive = start()
    drive.tell(TextAppended("One?"))
    replied(drive)
    drive.tell(TextAppended("Two?"))
    replied(drive, "Deux. ")
    drive.tell(ItemCreateAsked(Item("note", SYSTEM, "A note.", spoken=False), "root"))
    drive.tell(ItemDeleteAsked(drive.items[1].id))
    drive.tell(StageFound("thinker", Payload("dropped", {"items": 2})))
    drive.tell(RespondAsked())
    assert drive.seen[-1] == [(item.role, item.text) for item in drive.items if item.text]
    assert drive.texts[:2] == ["A note.", "Two?"]


def test_g11_the_number_of_items_is_bounded_and_the_client_is_told(start: Start) -> None:
    drive = start()
    drive.tell(TextAppended("First?"))
    replied(drive)
    for number in range(Limits().conversation_items):
        drive.tell(TextAppended(f"Line {number}.", respond=False))
    assert len(drive.items) == Limits().conversation_items
    assert sum(len(dropped.item_ids) for dropped in drive.all(ContextDropped)) == 2
    drive.tell(RespondAsked())
    assert drive.seen[-1] == [(USER, f"Line {number}.") for number in range(Limits().conversation_items)]


def test_g11_the_text_of_all_items_is_bounded_and_no_single_one_may_be_larger(start: Start) -> None:
    drive = start()
    third = "x" * (Limits().conversation_chars // 3)
    for _ in range(5):
        drive.tell(TextAppended(third, respond=False))
    assert len(drive.items) == 3
    drive.tell(TextAppended("x" * (Limits().conversation_chars + 1), event_id="ev_1"))
    drive.tell(
        ItemCreateAsked(Item("big", USER, "x" * (Limits().conversation_chars + 1), spoken=False), event_id="ev_2")
    )
    assert drive.errors == ["invalid_value", "invalid_value"]
    assert len(drive.items) == 3
    assert drive.submits == []


# -- beside the conversation -----------------------------------------------------------------------------------------


def test_an_out_of_band_response_runs_beside_the_conversation_and_leaves_it_as_it_was(start: Start) -> None:
    drive = start()
    voice = storytelling(drive, 2)
    drive.tell(RespondAsked(out_of_band=True, modality=Modality.TEXT, instructions="Summarise."))
    side = drive.voice()
    assert side.submit.stamp.slot % LANES == SIDE_LANE
    assert side.submit.params["side"] is True
    assert drive.seen[-1] == [(SYSTEM, "Summarise."), (USER, "Tell me a story.")]
    side.write("A story.")
    side.end()
    voice.say(STORY[2])
    voice.end()
    drive.pass_ms(1000)
    responses = [done.response for done in drive.all(ResponseDone)]
    assert [(response.in_conversation, response.status) for response in responses] == [
        (False, COMPLETED),
        (True, COMPLETED),
    ]
    assert drive.texts == ["Tell me a story.", voice.text]
    added = [event.item.id for event in drive.all(ItemAdded)]
    assert responses[0].item is not None
    assert responses[0].item.id not in added
    drive.tell(TextAppended("Go on."))
    assert drive.submits[-1].payload.meta["keep"] == 2


def test_an_interruption_leaves_the_out_of_band_response_alone(start: Start) -> None:
    drive = start()
    storytelling(drive, 2)
    drive.tell(RespondAsked(out_of_band=True, modality=Modality.TEXT))
    side = drive.voice()
    drive.user.speak(736)
    assert drive.statuses == [CANCELLED]
    side.write("A story.")
    side.end()
    assert drive.statuses == [CANCELLED, COMPLETED]


def test_the_end_of_an_out_of_band_response_does_not_touch_the_conversation(start: Start) -> None:
    drive = start()
    voice = storytelling(drive, 2)
    drive.tell(RespondAsked(out_of_band=True, modality=Modality.TEXT))
    side_id = drive.last(ResponseCreated).response.id
    drive.voice().end(Outcome.FAILED, "stage_error")
    assert [done.response.id for done in drive.all(ResponseDone)] == [side_id]
    assert drive.session.epoch == 1
    voice.say(STORY[2])
    voice.end()
    drive.pass_ms(1000)
    drive.tell(TextAppended("Go on."))
    assert drive.submits[-1].payload.meta["keep"] == 2, "the conversation's own state is as it was"


def test_a_second_out_of_band_response_is_refused_while_one_runs(start: Start) -> None:
    drive = start()
    drive.tell(RespondAsked(out_of_band=True), RespondAsked(out_of_band=True, event_id="ev_2"))
    assert drive.errors == ["too_many_responses"]
    assert len(drive.submits) == 1


# -- the transport -----------------------------------------------------------------------------------------------------


def test_a_reply_goes_on_while_nobody_is_attached(start: Start) -> None:
    drive = start()
    voice = storytelling(drive)
    sent = len(drive.all(AudioDelta))
    drive.tell(Detached(1))
    voice.end()
    drive.pass_ms(3000)
    assert len(drive.all(AudioDelta)) == sent
    assert not drive.busy
    assert drive.texts[1] == voice.text


def test_the_transcript_of_what_the_user_said_is_told_unless_it_is_switched_off(start: Start) -> None:
    drive = start()
    drive.user.turn("Hello?")
    (transcript,) = drive.all(TranscriptionDone)
    assert (transcript.item_id, transcript.transcript) == (drive.items[0].id, "Hello?")
    assert 0.9 < transcript.seconds < 1.5
    off = start(settings=replace(BRISK, transcription=False))
    off.user.turn("Hello?")
    assert not off.all(TranscriptionDone)
    assert off.texts == ["Hello?"]


def test_positions_are_counted_in_samples_and_told_in_milliseconds(start: Start) -> None:
    drive = start()
    drive.user.listen(640)
    drive.pass_ms(7777)
    drive.user.turn("Hello?")
    started, stopped = drive.last(SpeechStarted), drive.last(SpeechStopped)
    assert started.audio_start_ms == (640 - 300)
    assert stopped.audio_end_ms == 640 + 800
    assert drive.user.at == (640 + 800 + 512) * HEARS


def test_a_hold_is_let_go_exactly_once(start: Start) -> None:
    drive = start()
    storytelling(drive)
    drive.user.speak(320)
    drive.tell(CancelAsked())
    drive.user.speak(640)
    drive.user.pause(512, "Stop.")
    assert len(drive.all(Hold)) == len(drive.all(Unhold)) == 1


def test_the_audio_of_a_reply_is_what_the_voice_made_sample_by_sample(start: Start) -> None:
    drive = start()
    voice = storytelling(drive)
    voice.end()
    drive.pass_ms(3000)
    samples = sum(len(delta.pcm) // 2 for delta in drive.all(AudioDelta))
    assert samples == voice.samples == 9 * 250 * SPEAKS


# -- forks and snapshots ---------------------------------------------------------------------------------------------


def snapshot(drive: Drive, ticket: int = 1) -> SnapshotReady:
    drive.tell(SnapshotAsked(ticket))
    assert drive.last(TakeSnapshot) == TakeSnapshot("thinker", ticket)
    drive.tell(StageSnapshotted("thinker", ticket, Payload("kv")))
    return drive.last(SnapshotReady)


def test_a_restored_conversation_goes_on_from_where_the_snapshot_was_taken(start: Start) -> None:
    drive = start(settings=Settings(instructions="Be brief."))
    drive.user.turn("How are you?")
    replied(drive)
    ready = snapshot(drive)
    drive.tell(SettingsAsked(Settings(instructions="Shout.", turn_detection=None)))
    drive.tell(TextAppended("Tell me a story."))
    replied(drive, "Once. ")
    drive.tell(RestoreAsked(ready.history, ready.state))
    drive.thinker.items.clear()
    assert drive.texts == ["How are you?", "Fine, thanks. "]
    assert drive.last(Restore).payload == Payload("kv")
    configured = [feed.payload for feed in drive.all(Feed) if feed.payload.kind == "configure"]
    assert configured[-1].meta["detect"] is True
    drive.user.turn("And now?")
    assert drive.seen[-1] == [
        (SYSTEM, "Be brief."),
        (USER, "How are you?"),
        (ASSISTANT, "Fine, thanks. "),
        (USER, "And now?"),
    ]
    assert drive.submits[-1].params["seed"] == drive.submits[1].params["seed"], "the second turn once more"


def test_a_restore_cuts_what_runs_and_gives_no_name_twice(start: Start) -> None:
    drive = start()
    drive.user.turn("How are you?")
    ready = snapshot(drive)
    replied(drive)
    drive.user.turn("Tell me a story.")
    drive.voice().say("Once ")
    drive.tell(RespondAsked(out_of_band=True, modality=Modality.TEXT))
    drive.tell(RestoreAsked(ready.history, None))
    assert drive.statuses == [COMPLETED, CANCELLED, CANCELLED]
    assert not drive.live
    drive.thinker.items.clear()
    for _ in range(3):
        drive.user.turn("Again?")
        drive.tell(CancelAsked(), RespondAsked(out_of_band=True, modality=Modality.TEXT))
        drive.tell(CancelAsked())
    assert len({submit.stamp[:4] for submit in drive.submits}) == len(drive.submits)


def test_a_snapshot_holds_nothing_of_the_turn_that_runs(start: Start) -> None:
    drive = start()
    storytelling(drive, 2)
    ready = snapshot(drive)
    assert [item.text for item in ready.history.items] == ["Tell me a story."]


def test_one_snapshot_is_taken_at_a_time_and_a_late_one_is_nobodys(start: Start) -> None:
    drive = start()
    drive.tell(SnapshotAsked(1), SnapshotAsked(2))
    assert drive.errors == ["snapshot_in_progress"]
    drive.tell(StageSnapshotted("thinker", 9, None))
    assert drive.count("stale_snapshot") == 1
    assert not drive.all(SnapshotReady)
    drive.tell(StageSnapshotted("thinker", 1, None))
    assert drive.last(SnapshotReady).state is None


def test_a_fork_goes_on_by_itself(start: Start) -> None:
    drive = start()
    drive.user.turn("How are you?")
    replied(drive)
    twin = drive.talk.forked("sess_2", 4, 1, CountedIds("twin"), drive.now)
    twin.handle(Attached(1), drive.now)
    effects = twin.handle(TextAppended("And now?"), drive.now)
    (submit,) = [effect for effect in effects if isinstance(effect, Submit)]
    assert submit.payload.meta["keep"] == 2
    assert submit.stamp.turn == 2
    assert drive.texts == ["How are you?", "Fine, thanks. "]
    assert [item.text for item in twin.items] == ["How are you?", "Fine, thanks. ", "And now?"]
