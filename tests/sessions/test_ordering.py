"""The ordering rules of the wire protocols (PROTOCOLS: S, I, R, X, C), as far as the core keeps them: one test each."""

from dataclasses import replace

import pytest
from session_driver import BRISK, BRISK_DETECTION, QUIET, Drive, Start, Voice, told

from omni_live.sessions.effects import Abort, Emit, Feed, RaiseFence
from omni_live.sessions.events import (
    AudioDelta,
    AudioTranscriptDelta,
    BufferCleared,
    BufferCommitted,
    ErrorTold,
    Event,
    ItemAdded,
    ItemDeleted,
    ItemDone,
    ItemRetrieved,
    ItemTruncated,
    OutputItemDone,
    ResponseCreated,
    ResponseDone,
    SessionCreated,
    SessionUpdated,
    SpeechStarted,
    SpeechStopped,
    TranscriptionDone,
)
from omni_live.sessions.findings import Heard
from omni_live.sessions.inputs import (
    AudioCleared,
    AudioCommitted,
    CancelAsked,
    CloseAsked,
    ItemCreateAsked,
    ItemDeleteAsked,
    ItemRetrieveAsked,
    ItemTruncateAsked,
    Outcome,
    RespondAsked,
    SettingsAsked,
    TextAppended,
)
from omni_live.sessions.items import Item, ItemStatus, Modality, ResponseStatus, Role


def names(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


def since(drive: Drive, mark: int) -> list[Event]:
    return drive.events[mark:]


def reply(drive: Drive, *texts: str) -> Voice:
    """A reply of 250 ms a text runs."""
    drive.tell(TextAppended("Hello."))
    voice = drive.voice()
    for text in texts:
        voice.say(text)
    return voice


def final(drive: Drive, utterance: int, text: str) -> None:
    """The ears answer a commit."""
    drive.find(Heard(utterance, 0, drive.user.at, text, 1.0, True))


# -- S: the session ------------------------------------------------------------------------------------------------


def test_s1_the_first_event_is_session_created(start: Start) -> None:
    assert isinstance(start().events[0], SessionCreated)


def test_s2_each_accepted_update_is_answered_once_with_all_of_the_settings(start: Start) -> None:
    drive = start()
    asked = replace(BRISK, instructions="Be brief.", voice="kokm")
    assert told(drive.tell(SettingsAsked(asked, "ev_1"))) == [SessionUpdated(asked, "ev_1")]
    assert drive.talk.settings == asked
    assert told(drive.tell(SettingsAsked(asked, "ev_2"))) == [SessionUpdated(asked, "ev_2")]


def test_s2_answers_come_in_the_order_of_the_requests(start: Start) -> None:
    drive = start()
    mark = len(drive.events)
    drive.tell(
        SettingsAsked(BRISK, "1"),
        ItemRetrieveAsked("nothing", "2"),
        SettingsAsked(replace(BRISK, model="other"), "3"),
        SettingsAsked(BRISK, "4"),
    )
    answers = [event.event_id for event in since(drive, mark) if isinstance(event, SessionUpdated | ErrorTold)]
    assert answers == ["1", "2", "3", "4"]


def test_s5_another_model_is_refused_and_nothing_changes(start: Start) -> None:
    drive = start()
    before = drive.talk.settings
    (error,) = told(drive.tell(SettingsAsked(replace(BRISK, model="other", instructions="x"), "ev_1")))
    assert isinstance(error, ErrorTold)
    assert (error.code, error.event_id, error.param) == ("model_immutable", "ev_1", "model")
    assert drive.talk.settings == before
    assert not drive.session.closed


def test_s5_another_voice_is_accepted_until_the_session_has_spoken(start: Start) -> None:
    drive = start()
    drive.tell(SettingsAsked(replace(BRISK, voice="kokm")))
    reply(drive, "Hi. ").end()
    drive.tell(SettingsAsked(replace(BRISK, voice="kokf"), "ev_1"))
    assert drive.errors == ["cannot_update_voice"]
    assert drive.talk.settings.voice == "kokm"
    drive.tell(SettingsAsked(replace(BRISK, voice="kokm", temperature=0.5)))
    assert drive.talk.settings.temperature == 0.5


def test_a_change_of_turn_detection_reaches_the_ears_and_another_change_does_not(start: Start) -> None:
    drive = start()
    drive.tell(SettingsAsked(replace(BRISK, instructions="Be brief.")))
    assert len(drive.all(Feed)) == 1
    drive.tell(SettingsAsked(replace(BRISK, turn_detection=None)))
    assert drive.last(Feed).payload.meta["detect"] is False
    drive.tell(SettingsAsked(replace(BRISK, turn_detection=replace(BRISK_DETECTION, threshold=0.7))))
    assert drive.last(Feed).payload.meta["threshold"] == 0.7


# -- I: input --------------------------------------------------------------------------------------------------------


def test_i1_appended_audio_has_no_reply(start: Start) -> None:
    drive = start()
    mark = len(drive.events)
    drive.user.listen(960)
    assert since(drive, mark) == []


@pytest.mark.parametrize("ms", [0, 64, 96])
def test_i2_a_commit_of_less_than_100_ms_is_refused_and_nothing_else_happens(start: Start, ms: int) -> None:
    drive = start(settings=QUIET)
    drive.user.listen(ms)
    mark = len(drive.events)
    drive.tell(AudioCommitted(event_id="ev_1"))
    (error,) = since(drive, mark)
    assert isinstance(error, ErrorTold)
    assert (error.code, error.event_id) == ("input_audio_buffer_commit_empty", "ev_1")
    assert drive.items == []


def test_i3_a_commit_is_committed_added_done_for_one_item_and_empties_the_buffer(start: Start) -> None:
    drive = start(settings=QUIET)
    drive.tell(TextAppended("Before.", respond=False))
    drive.user.listen(128)
    mark = len(drive.events)
    drive.tell(AudioCommitted())
    events = since(drive, mark)
    assert names(events) == ["BufferCommitted", "ItemAdded", "ItemDone"]
    committed, added, done = events
    assert isinstance(committed, BufferCommitted)
    assert isinstance(added, ItemAdded)
    assert isinstance(done, ItemDone)
    assert committed.item_id == added.item.id == done.item.id
    assert committed.previous_item_id == added.previous_item_id == drive.items[0].id
    assert added.item.audio_ms == 128
    drive.tell(AudioCommitted())
    assert drive.errors == ["input_audio_buffer_commit_empty"]


def test_i3_no_response_follows_a_commit_by_hand_unless_it_is_asked_for(start: Start) -> None:
    drive = start(settings=QUIET)
    for number, respond in enumerate((False, None, True), 1):
        drive.user.listen(640)
        drive.tell(AudioCommitted(respond))
        final(drive, number, f"Line {number}.")
    assert len(drive.all(ResponseCreated)) == 1
    assert drive.seen == [[(Role.USER, "Line 1."), (Role.USER, "Line 2."), (Role.USER, "Line 3.")]]


def test_a_commit_by_hand_is_answered_unasked_where_the_settings_say_so(start: Start) -> None:
    drive = start(settings=replace(QUIET, answers_commits=True))
    drive.user.listen(640)
    drive.tell(AudioCommitted())
    final(drive, 1, "What time is it?")
    drive.voice().end()
    drive.user.listen(640)
    drive.tell(AudioCommitted(False))
    final(drive, 2, "Never mind.")
    assert drive.statuses == [ResponseStatus.COMPLETED]


def test_i3_a_response_that_is_asked_for_right_after_the_commit_answers_what_was_said(start: Start) -> None:
    drive = start(settings=QUIET)
    drive.user.listen(640)
    drive.tell(AudioCommitted(False), RespondAsked())
    assert len(drive.all(ResponseCreated)) == 1
    assert drive.submits == [], "it waits for the transcript"
    final(drive, 1, "What time is it?")
    assert drive.seen == [[(Role.USER, "What time is it?")]]
    voice = drive.voice()
    voice.say("Noon. ")
    voice.end()
    assert drive.statuses == [ResponseStatus.COMPLETED]
    assert len(drive.all(ResponseCreated)) == 1, "the commit and the request are one turn"


def test_i3_a_commit_and_a_request_that_both_want_an_answer_get_one(start: Start) -> None:
    drive = start(settings=QUIET)
    drive.user.listen(640)
    drive.tell(AudioCommitted(True), RespondAsked())
    final(drive, 1, "What time is it?")
    drive.voice().end()
    assert len(drive.all(ResponseCreated)) == 1


def test_i3_a_response_waits_for_all_that_was_committed_before_it(start: Start) -> None:
    drive = start(settings=QUIET)
    for _ in range(2):
        drive.user.listen(640)
        drive.tell(AudioCommitted())
    drive.tell(RespondAsked())
    final(drive, 1, "One.")
    assert drive.submits == []
    final(drive, 2, "")
    assert drive.seen == [[(Role.USER, "One.")]]


def test_i4_a_clear_is_answered_and_a_commit_after_it_finds_nothing(start: Start) -> None:
    drive = start(settings=QUIET)
    drive.user.listen(640)
    assert told(drive.tell(AudioCleared())) == [BufferCleared()]
    assert drive.last(Feed).payload.kind == "clear"
    drive.tell(AudioCommitted())
    assert drive.errors == ["input_audio_buffer_commit_empty"]


def test_i4_a_clear_takes_the_utterance_under_way_with_it(start: Start) -> None:
    drive = start()
    drive.user.speak(640)
    drive.user.pause(192, "Never mind")
    drive.tell(AudioCleared())
    drive.user.pause(640)
    assert drive.items == []
    assert drive.count("tentative_discarded") == 1
    assert not drive.all(ResponseCreated)
    drive.user.closed()
    drive.user.turn("Hello?")
    assert len(drive.all(ResponseCreated)) == 1


def test_i4_a_clear_does_not_take_what_was_committed_before(start: Start) -> None:
    drive = start()
    drive.user.speak(640)
    drive.user.pause(512)
    drive.tell(AudioCleared())
    final(drive, 1, "What time is it?")
    assert drive.texts == ["What time is it?"]
    assert len(drive.all(TranscriptionDone)) == 1
    assert len(drive.submits) == 1


def test_i5_voice_activity_is_started_stopped_committed_added_and_only_then_answered(start: Start) -> None:
    drive = start()
    mark = len(drive.events)
    drive.user.turn("Hello?")
    events = since(drive, mark)
    assert names(events) == [
        "SpeechStarted",
        "SpeechStopped",
        "BufferCommitted",
        "ItemAdded",
        "ItemDone",
        "TranscriptionDone",
        "ResponseCreated",
    ]
    started, stopped, committed, added, done, transcript, _ = events
    assert isinstance(started, SpeechStarted)
    assert isinstance(stopped, SpeechStopped)
    assert isinstance(committed, BufferCommitted)
    assert isinstance(added, ItemAdded)
    assert isinstance(done, ItemDone)
    assert isinstance(transcript, TranscriptionDone)
    told_of = {started.item_id, stopped.item_id, committed.item_id, added.item.id, done.item.id, transcript.item_id}
    assert told_of == {drive.items[0].id}
    assert stopped.audio_end_ms >= started.audio_start_ms


def test_i5_the_transcript_may_come_later_and_the_answer_comes_with_it(start: Start) -> None:
    drive = start()
    drive.user.speak(640)
    drive.user.pause(512)
    mark = len(drive.events)
    assert not drive.all(ResponseCreated)
    final(drive, 1, "Hello?")
    assert names(since(drive, mark)) == ["TranscriptionDone", "ResponseCreated"]
    assert drive.texts == ["Hello?"]


def test_i5_positions_only_grow(start: Start) -> None:
    drive = start()
    for number in range(3):
        drive.user.turn(f"Line {number}.")
        drive.tell(CancelAsked())
    starts = [event.audio_start_ms for event in drive.all(SpeechStarted)]
    ends = [event.audio_end_ms for event in drive.all(SpeechStopped)]
    assert starts == sorted(starts)
    assert ends == sorted(ends)
    assert all(begin <= end for begin, end in zip(starts, ends, strict=True))


def test_i5_without_create_response_nothing_is_answered(start: Start) -> None:
    drive = start(settings=replace(BRISK, turn_detection=replace(BRISK_DETECTION, create_response=False)))
    drive.user.turn("Hello?")
    assert not drive.all(ResponseCreated)
    assert len(drive.all(ItemDone)) == 1
    drive.tell(RespondAsked())
    assert len(drive.all(ResponseCreated)) == 1


def test_i6_each_committed_item_gets_exactly_one_transcript(start: Start) -> None:
    drive = start()
    drive.user.turn("One.")
    final(drive, 1, "One.")
    drive.tell(CancelAsked())
    drive.user.speak(640)
    drive.user.pause(512)
    final(drive, 2, "Two.")
    final(drive, 2, "Two again.")
    assert [done.transcript for done in drive.all(TranscriptionDone)] == ["One.", "Two."]
    assert drive.texts == ["One.", "Two."]


def test_a_commit_by_hand_takes_the_utterance_under_way(start: Start) -> None:
    drive = start()
    drive.user.speak(640)
    mark = len(drive.events)
    drive.tell(AudioCommitted(True))
    assert names(since(drive, mark)) == ["SpeechStopped", "BufferCommitted", "ItemAdded", "ItemDone"]
    assert drive.all(SpeechStarted)[0].item_id == drive.items[0].id
    drive.user.pause(640)
    final(drive, 1, "Hello?")
    assert len(drive.items) == 1
    assert drive.seen == [[(Role.USER, "Hello?")]]


def test_a_commit_by_hand_leaves_an_utterance_alone_that_is_committed_already(start: Start) -> None:
    drive = start()
    drive.user.speak(640)
    drive.user.pause(512)
    drive.user.closed()
    drive.user.listen(640)
    drive.tell(AudioCommitted(False))
    assert len({item.id for item in drive.items}) == 2
    final(drive, 1, "One.")
    final(drive, 2, "Two.")
    assert drive.texts == ["One.", "Two."]


def test_a_commit_by_hand_lets_a_held_reply_go_on(start: Start) -> None:
    drive = start()
    reply(drive, *["word "] * 8)
    drive.user.speak(320)
    assert drive.held
    drive.tell(AudioCommitted(False))
    assert not drive.held


def test_a_commit_by_hand_leaves_it_to_the_settings_whether_an_answer_follows(start: Start) -> None:
    drive = start()
    drive.user.listen(640)
    drive.tell(AudioCommitted(None))
    final(drive, 1, "Hello?")
    assert len(drive.all(ResponseCreated)) == 1


def test_an_item_that_was_deleted_before_its_transcript_came_is_not_answered(start: Start) -> None:
    drive = start()
    drive.user.speak(640)
    drive.user.pause(512)
    drive.tell(ItemDeleteAsked(drive.items[0].id))
    final(drive, 1, "Hello?")
    assert not drive.all(ResponseCreated)
    assert drive.items == []


# -- R: responses ------------------------------------------------------------------------------------------------------


def test_r1_r2_r3_a_spoken_response_opens_and_closes_in_order(start: Start) -> None:
    drive = start()
    mark = len(drive.events)
    reply(drive, "Hi. ").end()
    assert names(since(drive, mark)) == [
        "ItemAdded",
        "ItemDone",
        "ResponseCreated",
        "OutputItemAdded",
        "ItemAdded",
        "PartAdded",
        "AudioTranscriptDelta",
        "AudioDelta",
        "AudioDone",
        "AudioTranscriptDone",
        "PartDone",
        "OutputItemDone",
        "ItemDone",
        "ResponseDone",
    ]


def test_r2_a_written_response_opens_and_closes_in_order(start: Start) -> None:
    drive = start(settings=replace(BRISK, modality=Modality.TEXT))
    drive.tell(TextAppended("Hello."))
    mark = len(drive.events)
    drive.voice().write("Hi.")
    drive.voice().end()
    assert names(since(drive, mark)) == [
        "OutputItemAdded",
        "ItemAdded",
        "PartAdded",
        "TextDelta",
        "TextDone",
        "PartDone",
        "OutputItemDone",
        "ItemDone",
        "ResponseDone",
    ]


def test_r4_the_deltas_are_the_item_and_the_response(start: Start) -> None:
    drive = start()
    reply(drive, "One ", "two ", "three. ").end()
    text = "".join(delta.delta for delta in drive.all(AudioTranscriptDelta))
    item = drive.last(ResponseDone).response.item
    assert item is not None
    assert text == item.text == drive.last(OutputItemDone).item.text == drive.items[-1].text
    assert item.status is ItemStatus.COMPLETED


def test_r7_metadata_comes_back_as_it_was_given(start: Start) -> None:
    drive = start()
    metadata = {"client_event_id": "ev_9", "topic": "weather"}
    drive.tell(RespondAsked(metadata=metadata))
    drive.voice().end()
    assert drive.last(ResponseCreated).response.metadata == metadata
    assert drive.last(ResponseDone).response.metadata == metadata


def test_r8_a_second_response_is_refused_while_one_is_active(start: Start) -> None:
    drive = start()
    reply(drive, "Hi. ")
    (error,) = told(drive.tell(RespondAsked(event_id="ev_2")))
    assert isinstance(error, ErrorTold)
    assert (error.code, error.event_id) == ("conversation_already_has_active_response", "ev_2")
    assert len(drive.submits) == 1


def test_r8_a_response_beside_the_conversation_may_run_meanwhile_and_has_no_conversation_events(start: Start) -> None:
    drive = start()
    reply(drive, "Hi. ")
    mark = len(drive.events)
    drive.tell(RespondAsked(out_of_band=True, modality=Modality.TEXT))
    drive.voice().write("Summary.")
    voice = drive.voice()
    voice.end()
    events = since(drive, mark)
    assert not drive.errors
    assert not [event for event in events if isinstance(event, ItemAdded | ItemDone)]
    assert not drive.last(ResponseDone).response.in_conversation


@pytest.mark.parametrize("modality", list(Modality))
@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("cancel", ResponseStatus.CANCELLED),
        ("fail", ResponseStatus.FAILED),
        ("cut short", ResponseStatus.INCOMPLETE),
        ("close", ResponseStatus.CANCELLED),
    ],
)
def test_r9_what_was_opened_is_closed_however_the_response_ends(
    start: Start, modality: Modality, how: str, status: ResponseStatus
) -> None:
    drive = start(settings=replace(BRISK, modality=modality))
    drive.tell(TextAppended("Hello."))
    voice = drive.voice()
    mark = len(drive.events)
    if modality is Modality.AUDIO:
        voice.say("Hi. ")
    else:
        voice.write("Hi. ")
    match how:
        case "cancel":
            drive.tell(CancelAsked())
        case "fail":
            voice.end(Outcome.FAILED, "stage_error")
        case "cut short":
            voice.end(Outcome.INCOMPLETE, "max_output_tokens")
        case _:
            drive.tell(CloseAsked())
    closed = names(since(drive, mark))
    ends = ["PartDone", "OutputItemDone", "ItemDone", "ResponseDone"]
    assert [name for name in closed if name in ends] == ends
    item = drive.last(ResponseDone).response.item
    assert item is not None
    assert item.status is ItemStatus.INCOMPLETE
    assert drive.statuses == [status]


def test_r10_a_response_asked_for_right_after_a_cancel_is_accepted(start: Start) -> None:
    drive = start()
    reply(drive, "Hi. ")
    drive.tell(CancelAsked(), RespondAsked())
    assert drive.errors == []
    assert len(drive.submits) == 2


# -- X: interruptions -----------------------------------------------------------------------------------------------


def test_x1_the_abort_begins_before_speech_started_is_told_and_the_terminals_come_after_it(start: Start) -> None:
    drive = start()
    reply(drive, *["word "] * 8)
    drive.user.speak(672)
    mark = len(drive.effects)
    drive.user.speak(64)
    order = [
        type(effect.event) if isinstance(effect, Emit) else type(effect)
        for effect in drive.effects[mark:]
        if not isinstance(effect, Feed)
    ]
    assert order.index(RaiseFence) < order.index(Abort) < order.index(SpeechStarted) < order.index(ResponseDone)


def test_x2_nothing_with_the_id_of_a_response_follows_its_done(start: Start) -> None:
    drive = start()
    voice = reply(drive, *["word "] * 8)
    drive.tell(CancelAsked())
    mark = len(drive.events)
    voice.say("ghost ")
    voice.end()
    drive.pass_ms(5000)
    assert since(drive, mark) == []


def test_x3_a_cancel_before_the_first_sound_still_ends_the_response(start: Start) -> None:
    drive = start()
    reply(drive)
    events = told(drive.tell(CancelAsked()))
    assert names(events) == ["ResponseDone"]
    done = drive.last(ResponseDone).response
    assert (done.status, done.reason, done.item) == (ResponseStatus.CANCELLED, "client_cancelled", None)
    assert drive.texts == ["Hello."]


def test_x3_a_cancel_of_a_response_that_waits_for_a_transcript_ends_it_too(start: Start) -> None:
    drive = start(settings=QUIET)
    drive.user.listen(640)
    drive.tell(AudioCommitted(), RespondAsked(), CancelAsked())
    assert drive.statuses == [ResponseStatus.CANCELLED]
    final(drive, 1, "Hello?")
    assert drive.submits == []
    assert drive.texts == ["Hello?"]


def test_x4_a_cancel_with_nothing_active_is_an_error_and_nothing_else(start: Start) -> None:
    drive = start()
    (error,) = told(drive.tell(CancelAsked(event_id="ev_1")))
    assert isinstance(error, ErrorTold)
    assert (error.code, error.event_id) == ("response_cancel_not_active", "ev_1")
    assert error.message.startswith("Cancellation failed")
    assert drive.session.epoch == 1


def test_x4_a_cancel_with_a_stale_id_leaves_the_active_response_alone(start: Start) -> None:
    drive = start()
    reply(drive)
    old = drive.last(ResponseCreated).response.id
    drive.tell(CancelAsked(old))
    voice = reply(drive, "Hi. ")
    drive.tell(CancelAsked(old, "ev_2"))
    assert drive.errors == ["response_cancel_not_active"]
    voice.end()
    assert drive.statuses == [ResponseStatus.CANCELLED, ResponseStatus.COMPLETED]


def test_x5_a_truncate_is_told_once_removes_the_rest_and_shows_in_what_follows(start: Start) -> None:
    drive = start(settings=replace(BRISK, lead_ms=0))
    voice = reply(drive, "One two ", "three four ")
    voice.end()
    item_id = drive.items[-1].id
    (event,) = told(drive.tell(ItemTruncateAsked(item_id, 300)))
    assert event == ItemTruncated(item_id, 0, 300, "One two ")
    drive.tell(ItemRetrieveAsked(item_id))
    assert drive.last(ItemRetrieved).item.text == "One two "
    assert drive.last(ItemRetrieved).item.audio_ms == 300
    drive.tell(TextAppended("Go on."))
    assert drive.seen[-1] == [(Role.USER, "Hello."), (Role.ASSISTANT, "One two "), (Role.USER, "Go on.")]
    assert drive.statuses == [ResponseStatus.COMPLETED]


def test_x5_a_truncate_to_nothing_leaves_nothing_for_the_model(start: Start) -> None:
    drive = start(settings=replace(BRISK, lead_ms=0))
    reply(drive, "One two ").end()
    drive.tell(ItemTruncateAsked(drive.items[-1].id, 0), TextAppended("Go on."))
    assert drive.seen[-1] == [(Role.USER, "Hello."), (Role.USER, "Go on.")]


def test_x6_a_truncate_of_the_item_in_progress_cuts_it_there_and_is_told_once(start: Start) -> None:
    drive = start()
    reply(drive, *["one two "] * 8)
    drive.pass_ms(500)
    item_id = drive.items[-1].id
    events = told(drive.tell(ItemTruncateAsked(item_id, 400)))
    assert [event for event in events if isinstance(event, ItemTruncated)] == [
        ItemTruncated(item_id, 0, 400, "one two one ")
    ]
    assert drive.statuses == [ResponseStatus.CANCELLED]
    assert drive.texts[-1] == "one two one "


def test_x6_a_truncate_right_after_a_barge_in_corrects_what_was_heard(start: Start) -> None:
    drive = start()
    reply(drive, *["one two "] * 8)
    drive.user.speak(736)
    item_id = drive.items[-1].id
    drive.tell(ItemTruncateAsked(item_id, 260))
    assert drive.errors == []
    assert drive.texts[-1] == "one two "


def test_x7_a_truncate_past_the_end_is_an_error_but_not_by_the_length_of_a_chunk(start: Start) -> None:
    drive = start(settings=replace(BRISK, lead_ms=0))
    reply(drive, "One two ").end()
    item_id = drive.items[-1].id
    (event,) = told(drive.tell(ItemTruncateAsked(item_id, 510)))
    assert event == ItemTruncated(item_id, 0, 250, "One two ")
    for ms in (511, -1):
        drive.tell(ItemTruncateAsked(item_id, ms, event_id=f"ev_{ms}"))
    assert drive.errors == ["invalid_value", "invalid_value"]
    assert drive.last(ErrorTold).event_id == "ev_-1"


def test_x8_only_an_assistants_audio_can_be_truncated(start: Start) -> None:
    drive = start(settings=replace(BRISK, modality=Modality.TEXT))
    drive.user.turn("Hello?")
    voice = drive.voice()
    voice.write("Hi.")
    voice.end()
    user, assistant = drive.items
    drive.tell(ItemTruncateAsked(user.id, 0, event_id="ev_1"), ItemTruncateAsked(assistant.id, 0, event_id="ev_2"))
    drive.tell(ItemTruncateAsked("nothing", 0, event_id="ev_3"))
    assert drive.errors == ["unsupported_content_type", "unsupported_content_type", "item_truncate_invalid_item_id"]
    assert [item.text for item in drive.items] == ["Hello?", "Hi."]


def test_x8_the_last_audio_can_be_truncated_also_after_a_turn_that_never_spoke(start: Start) -> None:
    drive = start(settings=replace(BRISK, lead_ms=0))
    reply(drive, "One two ", "three four ").end()
    item_id = drive.items[-1].id
    drive.tell(RespondAsked(), CancelAsked(), ItemTruncateAsked(item_id, 260))
    assert drive.errors == []
    assert drive.texts[-1] == "One two "


def test_x9_the_first_who_cuts_gives_the_reason(start: Start) -> None:
    drive = start()
    reply(drive, *["word "] * 8)
    drive.user.speak(736)
    drive.tell(CancelAsked())
    assert [done.response.reason for done in drive.all(ResponseDone)] == ["turn_detected"]
    assert drive.errors == ["response_cancel_not_active"]


def test_a_truncate_while_a_later_turn_thinks_restarts_it_on_the_corrected_context(start: Start) -> None:
    drive = start(settings=replace(BRISK, lead_ms=0))
    reply(drive, "One two ", "three four ").end()
    item_id = drive.items[-1].id
    drive.tell(TextAppended("Go on."))
    first = drive.submits[-1]
    drive.tell(ItemTruncateAsked(item_id, 260))
    second = drive.submits[-1]
    assert (second.stamp.turn, second.params) == (first.stamp.turn, first.params)
    assert second.stamp.epoch > first.stamp.epoch
    assert drive.seen[-1] == [(Role.USER, "Hello."), (Role.ASSISTANT, "One two "), (Role.USER, "Go on.")]
    assert drive.count("turn_restarted") == 1
    voice = drive.voice()
    voice.say("Well. ")
    voice.end()
    assert len(drive.all(ResponseCreated)) == 2
    assert drive.statuses == [ResponseStatus.COMPLETED] * 2


def test_a_truncate_while_a_later_turn_speaks_leaves_that_turn_alone(start: Start) -> None:
    drive = start(settings=replace(BRISK, lead_ms=0))
    reply(drive, "One two ", "three four ").end()
    item_id = drive.items[-1].id
    voice = reply(drive, "Well. ")
    drive.tell(ItemTruncateAsked(item_id, 260))
    voice.say("Then. ")
    voice.end()
    assert len(drive.submits) == 2
    assert drive.statuses == [ResponseStatus.COMPLETED] * 2
    assert drive.texts[1] == "One two "


# -- C: the conversation ---------------------------------------------------------------------------------------------


def note(item_id: str = "", text: str = "A note.") -> Item:
    return Item(item_id, Role.USER, text, spoken=False)


def test_c1_a_created_item_is_added_and_done_under_the_id_it_was_given(start: Start) -> None:
    drive = start()
    events = told(drive.tell(ItemCreateAsked(note("mine"))))
    assert events == [ItemAdded(note("mine"), None), ItemDone(note("mine"), None)]
    drive.tell(ItemCreateAsked(note()))
    assert drive.items[1].id
    assert drive.items[1].id != "mine"


def test_c1_a_second_item_with_the_same_id_is_refused(start: Start) -> None:
    drive = start()
    drive.tell(ItemCreateAsked(note("mine")), ItemCreateAsked(note("mine", "Other."), event_id="ev_2"))
    assert drive.errors == ["item_create_duplicate_item_id"]
    assert drive.last(ErrorTold).event_id == "ev_2"
    assert drive.texts == ["A note."]


def test_c1_an_item_after_one_that_does_not_exist_is_refused(start: Start) -> None:
    drive = start()
    drive.tell(ItemCreateAsked(note("mine"), "nobody", "ev_1"))
    assert drive.errors == ["item_create_invalid_previous_item_id"]
    assert drive.items == []


def test_c2_a_deleted_item_is_gone_and_the_model_does_not_see_it(start: Start) -> None:
    drive = start()
    drive.tell(ItemCreateAsked(note("a", "One.")), ItemCreateAsked(note("b", "Two.")))
    assert told(drive.tell(ItemDeleteAsked("a"))) == [ItemDeleted("a")]
    drive.tell(RespondAsked())
    assert drive.seen[-1] == [(Role.USER, "Two.")]


def test_c2_items_that_do_not_exist_can_neither_be_deleted_nor_retrieved(start: Start) -> None:
    drive = start()
    drive.tell(ItemDeleteAsked("nobody", "ev_1"), ItemRetrieveAsked("nobody", "ev_2"))
    assert [(error.code, error.event_id) for error in drive.all(ErrorTold)] == [
        ("item_delete_invalid_item_id", "ev_1"),
        ("item_retrieve_invalid_item_id", "ev_2"),
    ]


def test_c2_a_retrieved_item_is_as_it_stands(start: Start) -> None:
    drive = start()
    drive.tell(ItemCreateAsked(note("mine")), ItemRetrieveAsked("mine"))
    assert drive.last(ItemRetrieved).item == note("mine")


def test_c2_the_item_of_a_running_response_can_be_deleted(start: Start) -> None:
    drive = start()
    voice = reply(drive, "One ")
    drive.tell(ItemDeleteAsked(drive.items[-1].id))
    voice.say("two ")
    voice.end()
    drive.pass_ms(1000)
    assert drive.statuses == [ResponseStatus.COMPLETED]
    assert drive.texts == ["Hello."]


def test_c3_the_chain_of_previous_ids_rebuilds_the_list(start: Start) -> None:
    drive = start()
    drive.tell(ItemCreateAsked(note("a")), ItemCreateAsked(note("b")), ItemCreateAsked(note("c"), "root"))
    drive.tell(ItemCreateAsked(note("d"), "a"))
    reply(drive, "Hi. ").end()
    drive.user.turn("And?")
    order: list[str] = []
    for added in drive.all(ItemAdded):
        at = 0 if added.previous_item_id is None else order.index(added.previous_item_id) + 1
        order.insert(at, added.item.id)
    assert order == [item.id for item in drive.items]
    assert order[:4] == ["c", "a", "d", "b"]


def test_c3_done_names_the_same_neighbour_as_added(start: Start) -> None:
    drive = start()
    reply(drive, "Hi. ").end()
    added = {event.item.id: event.previous_item_id for event in drive.all(ItemAdded)}
    assert {event.item.id: event.previous_item_id for event in drive.all(ItemDone)} == added


def test_no_audio_is_told_after_the_last_delta_of_a_response(start: Start) -> None:
    drive = start()
    voice = reply(drive, *["word "] * 6)
    voice.end()
    drive.pass_ms(3000)
    kinds = names(drive.events)
    assert len(drive.all(AudioDelta)) == 6
    assert max(at for at, kind in enumerate(kinds) if kind == "AudioDelta") < kinds.index("AudioDone")
