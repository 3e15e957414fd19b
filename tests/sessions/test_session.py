"""What every session has, whatever it is about: attachments, leases, journals, drain and close."""

import pytest
from session_driver import MS, Drive, PlainDrive, Start, closing, told

from omni_live.sessions.effects import Count, Emit, RaiseFence, Release, Replace, Wake
from omni_live.sessions.errors import Illegal
from omni_live.sessions.events import (
    AudioDelta,
    ErrorTold,
    HeartbeatAcked,
    InputAcked,
    InputMissing,
    ResponseDone,
    ResyncRequired,
    SessionClosed,
    SessionCreated,
    SessionExpiring,
    SessionReplaced,
    SessionResumed,
    TurnSpoke,
)
from omni_live.sessions.inputs import (
    Asked,
    Attached,
    AudioAppended,
    CloseAsked,
    Detached,
    DrainAsked,
    EventAcked,
    Heartbeat,
    ItemRetrieveAsked,
    RespondAsked,
    Sequenced,
    TextAppended,
    Woke,
)
from omni_live.sessions.items import ResponseStatus
from omni_live.sessions.lease import SECOND
from omni_live.sessions.limits import Limits
from omni_live.sessions.payload import Payload
from omni_live.sessions.session import Session
from omni_live.sessions.stamp import LANES
from omni_live.sessions.turn import SessionState

SHORT = Limits(idle_lease_s=10, detach_grace_s=4, max_age_s=100, max_age_warning_s=5)


def resume(drive: Drive | PlainDrive, seen: int, attachment: int = 2) -> list[object]:
    """The events that the new transport gets, in order."""
    events = told(drive.tell(Attached(attachment, drive.session.token, seen)))
    return [event for event in events if not isinstance(event, SessionReplaced)]


def speaking(start: Start, chunks: int = 3, **options: object) -> Drive:
    """In the middle of a spoken reply."""
    drive = start(**options)
    drive.tell(TextAppended("Tell me a story."))
    voice = drive.voice()
    for number in range(chunks):
        voice.say(f"Word{number} ")
    return drive


# -- opening and attaching -----------------------------------------------------------------------------------------


def test_the_first_input_writes_all_rows_of_the_fence_table(start: Start) -> None:
    drive = start(attach=False)
    effects = drive.session.handle(Attached(1), drive.now)
    rows = [effect.fence for effect in effects if isinstance(effect, RaiseFence)]
    assert [(row.slot, row.generation, row.epoch) for row in rows] == [
        (3 * LANES + lane, 7, 1) for lane in range(LANES)
    ]
    assert effects[:LANES] == [RaiseFence(row) for row in rows]


def test_a_fresh_attachment_is_greeted_with_a_token_and_the_age_that_is_left(start: Start) -> None:
    drive = start(attach=False, limits=SHORT)
    (event,) = told(drive.tell(Attached(1)))
    assert isinstance(event, SessionCreated)
    assert (event.session_id, event.attachment, event.resume_token) == ("sess_1", 1, drive.session.token)
    assert event.expires_at_s == pytest.approx(99.0)
    assert drive.session.state is SessionState.OPEN


def test_a_wrong_token_an_empty_one_and_poison_do_not_resume(start: Start) -> None:
    drive = start()
    assert drive.session.resumable(drive.session.token) is None
    for token in ("token_wrong", "", "\ud800 \x00 ü", drive.session.token[:-1]):
        assert drive.session.resumable(token) == "invalid_resume_token"


def test_a_token_is_rotated_on_each_use_and_dies_with_the_first_word_on_the_new_attachment(start: Start) -> None:
    drive = start()
    first = drive.session.token
    resume(drive, 0)
    second = drive.session.token
    assert second != first
    assert drive.session.resumable(first) is None, "the client may never have got the new one"
    drive.tell(Sequenced(1, Heartbeat()))
    assert drive.session.resumable(first) == "invalid_resume_token"
    assert drive.session.resumable(second) is None


def test_a_client_that_never_gets_its_new_token_can_come_back_with_the_old_one_again_and_again(start: Start) -> None:
    drive = start()
    first = drive.session.token
    for attachment in (2, 3, 4):
        assert drive.session.resumable(first) is None
        drive.tell(Attached(attachment, first, 0))
    drive.tell(Heartbeat())
    assert drive.session.resumable(first) == "invalid_resume_token"


def test_what_the_stages_say_does_not_confirm_a_token(start: Start) -> None:
    drive = speaking(start, 1)
    first = drive.session.token
    resume(drive, 0)
    voice = drive.voice()
    voice.seq = 1
    voice.say("More ")
    drive.pass_ms(1000)
    assert drive.session.resumable(first) is None


def test_a_session_that_was_never_attached_or_is_closed_cannot_be_resumed(start: Start) -> None:
    drive = start(attach=False)
    assert drive.session.resumable("") == "session_resume_expired"
    drive.tell(Attached(1), CloseAsked())
    assert drive.session.resumable(drive.session.token) == "session_resume_expired"


def test_an_attachment_replaces_the_one_before_which_is_told_so_first(start: Start) -> None:
    drive = start()
    effects = [effect for effect in drive.tell(Attached(2, drive.session.token, 0)) if not isinstance(effect, Wake)]
    assert effects[0] == Emit(SessionReplaced(), 0)
    assert effects[1] == Replace(1)
    assert isinstance(effects[2], Emit)
    assert isinstance(effects[2].event, SessionResumed)
    assert drive.session.attachment == 2


def test_the_detach_of_a_replaced_attachment_changes_nothing(start: Start) -> None:
    drive = start()
    resume(drive, 0)
    assert Count("stale_detach") in drive.tell(Detached(1))
    assert drive.session.state is SessionState.OPEN


def test_an_attachment_after_a_detach_replaces_nobody(start: Start) -> None:
    drive = start()
    drive.tell(Detached(1))
    assert drive.session.state is SessionState.DETACHED
    assert Count("stale_detach") in drive.tell(Detached(1))
    resume(drive, 0)
    assert not drive.all(SessionReplaced)
    assert not drive.all(Replace)
    assert drive.session.state is SessionState.OPEN


# -- resuming ------------------------------------------------------------------------------------------------------


def test_g7_a_resume_in_the_middle_of_a_reply_replays_exactly_what_was_missed(start: Start) -> None:
    drive = speaking(start, 2)
    before = {effect.seq: effect for effect in drive.emits if effect.seq}
    seen = max(before) - 2
    drive.tell(Detached(1))
    assert not told(drive.voice().say("Late ")), "a chunk of another voice is stale or waits"
    effects = [effect for effect in drive.tell(Attached(2, drive.session.token, seen)) if isinstance(effect, Emit)]
    assert isinstance(effects[0].event, SessionResumed)
    assert effects[0].event.voids == ()
    assert [effect.seq for effect in effects[1:3]] == [seen + 1, seen + 2]
    assert effects[1:3] == [before[seen + 1], before[seen + 2]], "byte for byte"


def test_what_happens_while_detached_is_replayed_in_order(start: Start) -> None:
    drive = speaking(start, 1)
    voice = drive.voice()
    voice.seq = 1
    seen = max(effect.seq for effect in drive.emits)
    drive.tell(Detached(1))
    assert not told(voice.say("More "))
    voice.end()
    drive.pass_ms(600)
    assert drive.statuses == []
    events = resume(drive, seen)
    assert isinstance(events[0], SessionResumed)
    kinds = [type(event).__name__ for event in events[1:]]
    assert kinds[:2] == ["AudioTranscriptDelta", "AudioDelta"]
    assert kinds[-1] == "ResponseDone"
    assert drive.statuses == [ResponseStatus.COMPLETED]


def test_g1_g7_voided_content_is_named_and_not_replayed(start: Start) -> None:
    drive = speaking(start, 2)
    drive.tell(Detached(1))
    content = [effect.seq for effect in drive.emits if effect.content is not None]
    drive.tell(TextAppended("Stop.", respond=False))
    events = resume(drive, 0)
    resumed = events[0]
    assert isinstance(resumed, SessionResumed)
    void = [number for first, last in resumed.voids for number in range(first, last + 1)]
    assert void == content
    assert not [event for event in events if isinstance(event, AudioDelta)]
    assert [type(event).__name__ for event in events].count("ResponseDone") == 1


def test_a_gap_is_told_with_the_conversation_as_it_stands(start: Start) -> None:
    drive = start(limits=Limits(journal_bytes=2000))
    for number in range(5):
        drive.tell(TextAppended(f"Line {number}.", respond=False))
    drive.tell(Detached(1))
    events = resume(drive, 0)
    assert isinstance(events[1], ResyncRequired)
    assert (events[1].first, events[1].reason) == (1, "journal_overflow")
    assert [item.text for item in events[1].items] == [f"Line {number}." for number in range(5)]
    replayed = [effect.seq for effect in drive.emits if effect.seq > events[1].last]
    assert replayed


def test_a_gap_from_age_says_so(start: Start) -> None:
    drive = start(limits=Limits(journal_s=5))
    drive.tell(TextAppended("Hello.", respond=False))
    drive.pass_ms(6000)
    (_, resync, *rest) = resume(drive, 0)
    assert resync == ResyncRequired(1, 2, "journal_gap", tuple(drive.items))
    assert rest == []


def test_acknowledged_events_are_not_replayed(start: Start) -> None:
    drive = start()
    drive.tell(TextAppended("Hello.", respond=False), EventAcked(2))
    assert len(resume(drive, 2)) == 1


def test_a_resume_during_a_hold_holds_the_new_transport_too(start: Start) -> None:
    drive = speaking(start, 3)
    drive.user.speak(256)
    assert drive.held
    before = len(drive.effects)
    resume(drive, 0)
    names = [type(effect).__name__ for effect in drive.effects[before:]]
    assert names.index("Hold") < names.index("Emit", names.index("Replace"))


# -- the client's input --------------------------------------------------------------------------------------------


def test_sequenced_input_is_taken_once_and_its_gaps_are_asked_for_once(start: Start) -> None:
    drive = start()
    drive.tell(Sequenced(1, TextAppended("One.", respond=False)))
    assert told(drive.tell(Sequenced(3, TextAppended("Three.", respond=False)))) == [InputMissing(1)]
    assert told(drive.tell(Sequenced(4, TextAppended("Four.", respond=False)))) == []
    assert Count("duplicate_input") in drive.tell(Sequenced(1, TextAppended("One.", respond=False)))
    drive.tell(Sequenced(2, TextAppended("Two.", respond=False)), Sequenced(3, TextAppended("Three.", respond=False)))
    assert drive.texts == ["One.", "Two.", "Three."]
    assert drive.count("input_gap") == 2


def test_input_is_acknowledged_now_and_then(start: Start) -> None:
    drive = start()
    for seq in range(1, 41):
        drive.tell(Sequenced(seq, AudioAppended(bytes(64))))
        drive.pass_ms(1)
    assert [ack.input_seq for ack in drive.all(InputAcked)] == [1, 17, 33]


def test_a_resume_tells_what_input_was_taken_and_asks_for_a_gap_again(start: Start) -> None:
    drive = start()
    drive.tell(Sequenced(1, Heartbeat()), Sequenced(5, Heartbeat()))
    events = resume(drive, 0)
    assert isinstance(events[0], SessionResumed)
    assert events[0].input_seq == 1
    assert told(drive.tell(Sequenced(6, Heartbeat()))) == [InputMissing(1)]


def test_a_fresh_attachment_numbers_its_input_anew(start: Start) -> None:
    drive = start()
    drive.tell(Sequenced(1, Heartbeat()), Sequenced(2, Heartbeat()))
    drive.tell(Attached(2))
    drive.tell(Sequenced(1, TextAppended("Hello.", respond=False)))
    assert drive.texts == ["Hello."]


def test_a_heartbeat_is_answered_and_not_journaled(start: Start) -> None:
    drive = start()
    effects = [effect for effect in drive.tell(Heartbeat("ev_1")) if isinstance(effect, Emit)]
    assert effects == [Emit(HeartbeatAcked("ev_1"), 0)]


def test_what_the_other_kind_of_session_can_do_is_refused_and_the_session_goes_on(start: Start) -> None:
    drive = start()
    drive.tell(Asked("first", frozenset({"third"}), Payload("request")))
    plain = PlainDrive()
    plain.tell(Sequenced(1, TextAppended("Hello.")))
    assert drive.errors == plain.errors == ["unsupported_input"]
    assert not drive.session.closed
    assert not plain.session.closed


# -- leases --------------------------------------------------------------------------------------------------------


def test_an_idle_session_closes_when_its_time_is_over_and_not_before(start: Start) -> None:
    drive = start(limits=SHORT)
    drive.tell(Heartbeat())
    drive.pass_ms(9999)
    assert not drive.session.closed
    drive.pass_ms(1)
    assert drive.released == ["idle"]


@pytest.mark.parametrize("sign", [Heartbeat(), EventAcked(0), AudioAppended(bytes(2)), ItemRetrieveAsked("nothing")])
def test_any_sign_of_the_client_keeps_the_session(start: Start, sign: Heartbeat) -> None:
    drive = start(limits=SHORT)
    for _ in range(4):
        drive.tell(sign)
        drive.pass_ms(9000)
    assert not drive.session.closed


def test_a_running_turn_is_not_idleness_and_the_time_starts_when_it_is_over(start: Start) -> None:
    drive = start(limits=SHORT)
    drive.tell(RespondAsked())
    voice = drive.voice()
    for number in range(6):
        drive.pass_ms(4000)
        voice.say(f"Word{number} ")
    assert not drive.session.closed
    voice.end()
    drive.pass_ms(9000)
    assert drive.statuses == [ResponseStatus.COMPLETED]
    assert not drive.session.closed, "the client has only just heard the last of it"
    drive.pass_ms(2000)
    assert drive.released == ["idle"]


def test_a_detached_session_waits_for_the_grace_and_then_closes(start: Start) -> None:
    drive = speaking(start, limits=SHORT)
    drive.tell(Detached(1))
    drive.pass_ms(3999)
    assert not drive.session.closed
    drive.pass_ms(1)
    assert drive.released == ["detached"]


def test_without_a_grace_a_detach_closes(start: Start) -> None:
    drive = start(limits=Limits(detach_grace_s=0))
    drive.tell(Detached(1))
    assert drive.released == ["detached"]


def test_a_resume_within_the_grace_ends_it(start: Start) -> None:
    drive = start(limits=SHORT)
    drive.tell(Detached(1))
    drive.pass_ms(3000)
    resume(drive, 0)
    drive.pass_ms(5000)
    assert not drive.session.closed


def test_the_maximum_age_is_warned_of_exactly_once_and_then_reached(start: Start) -> None:
    drive = start(limits=SHORT)
    for _ in range(97):
        drive.tell(Heartbeat())
        drive.pass_ms(1000)
    assert drive.all(SessionExpiring) == [SessionExpiring(5.0)]
    drive.tell(Heartbeat())
    drive.pass_ms(5000)
    assert drive.released == ["max_age"]
    assert len(drive.all(SessionExpiring)) == 1


def test_a_wake_that_comes_too_early_finds_nothing_to_do_and_is_set_anew(start: Start) -> None:
    drive = start(limits=SHORT)
    effects = drive.tell(Woke())
    assert effects == [Wake(drive.session._lease.touched_ns + 10 * SECOND)]


def test_time_never_runs_backwards_for_a_session(start: Start) -> None:
    drive = start(limits=SHORT)
    drive.session.handle(Heartbeat(), drive.now - 5000 * MS)
    drive.pass_ms(8000)
    assert not drive.session.closed


# -- drain ---------------------------------------------------------------------------------------------------------


def test_a_drain_closes_a_session_that_does_nothing(start: Start) -> None:
    drive = start()
    assert closing(drive.tell(DrainAsked(drive.now + 30 * SECOND)))
    assert drive.released == ["drained"]


def test_a_drain_closes_a_session_that_was_never_attached_or_is_detached(start: Start) -> None:
    opening = start(attach=False)
    opening.tell(DrainAsked(opening.now))
    detached = speaking(start)
    detached.tell(Detached(1), DrainAsked(detached.now + 30 * SECOND))
    assert opening.released == detached.released == ["drained"]


def test_a_drain_lets_the_running_turn_finish_and_starts_no_other(start: Start) -> None:
    drive = speaking(start, 1)
    drive.tell(DrainAsked(drive.now + 30 * SECOND))
    assert drive.session.state is SessionState.DRAINING
    drive.tell(RespondAsked(event_id="ev_1"))
    assert drive.errors == ["draining"]
    drive.tell(DrainAsked(drive.now + 30 * SECOND))
    voice = drive.voice()
    voice.seq = 1
    voice.say("More ")
    voice.end()
    assert drive.statuses == [ResponseStatus.COMPLETED]
    assert drive.released == ["drained"]


def test_a_turn_that_outlasts_the_drain_is_interrupted_at_its_deadline(start: Start) -> None:
    drive = speaking(start, 1)
    drive.tell(DrainAsked(drive.now + 30 * SECOND))
    drive.pass_ms(29_999)
    assert not drive.session.closed
    drive.pass_ms(1)
    assert drive.released == ["drained"]
    assert drive.statuses == [ResponseStatus.CANCELLED]


def test_a_draining_session_can_be_resumed_by_a_new_transport_but_does_not_wait_for_one(start: Start) -> None:
    drive = speaking(start, 1)
    drive.tell(DrainAsked(drive.now + 30 * SECOND))
    resume(drive, 0)
    assert drive.session.state is SessionState.DRAINING
    drive.tell(Detached(2))
    assert drive.released == ["detached"]


def test_a_user_turn_that_ends_during_a_drain_is_not_answered(start: Start) -> None:
    drive = start()
    drive.tell(RespondAsked(out_of_band=True))
    drive.tell(DrainAsked(drive.now + 30 * SECOND))
    drive.user.turn("Hello?")
    assert drive.count("unanswered_draining") == 1
    assert len(drive.submits) == 1


# -- close ---------------------------------------------------------------------------------------------------------


def test_a_close_ends_the_turn_before_it_ends_the_session(start: Start) -> None:
    drive = speaking(start)
    effects = drive.tell(CloseAsked("close_requested"))
    assert closing(effects)
    names = [type(effect).__name__ for effect in effects]
    assert names[:LANES] == ["RaiseFence"] * LANES or "Abort" in names
    events = told(effects)
    done = next(event for event in events if isinstance(event, ResponseDone))
    assert done.response.status is ResponseStatus.CANCELLED
    assert isinstance(events[-1], SessionClosed)
    assert effects.index(next(effect for effect in effects if isinstance(effect, RaiseFence))) < names.index("Abort")
    assert names.index("Abort") < names.index("Emit")


def opening(drive: Drive) -> None:
    """Never attached."""


def idle(drive: Drive) -> None:
    drive.tell(Attached(1))


def thinking(drive: Drive) -> None:
    drive.tell(Attached(1), TextAppended("Hello."))


def speaking_and_held(drive: Drive) -> None:
    thinking(drive)
    drive.voice().say("One ")
    drive.user.speak(256)


def tentative(drive: Drive) -> None:
    drive.tell(Attached(1))
    drive.user.speak(640)
    drive.user.pause(192, "Hello?")
    assert len(drive.submits) == 1


def beside(drive: Drive) -> None:
    thinking(drive)
    drive.tell(RespondAsked(out_of_band=True))


def detached(drive: Drive) -> None:
    thinking(drive)
    drive.tell(Detached(1))


def draining(drive: Drive) -> None:
    thinking(drive)
    drive.tell(DrainAsked(drive.now + SECOND))


@pytest.mark.parametrize(
    "state",
    [opening, idle, thinking, speaking_and_held, tentative, beside, detached, draining],
    ids=lambda s: s.__name__,
)
def test_g3_a_close_releases_exactly_once_and_last_whatever_the_state(start: Start, state: object) -> None:
    drive = start(attach=False)
    assert callable(state)
    state(drive)
    effects = drive.tell(CloseAsked())
    assert isinstance(effects[-1], Release)
    assert drive.released == ["close_requested"]
    created = sum(type(event).__name__ == "ResponseCreated" for event in drive.events)
    journaled = [entry.event for entry in drive.session._journal._entries]
    assert sum(isinstance(event, ResponseDone) for event in journaled) == created
    for late in (Heartbeat(), Woke(), CloseAsked(), Attached(9), Detached(1), DrainAsked(0), AudioAppended(b"")):
        assert drive.session.handle(late, drive.now + 10**12) == [Count("input_after_close")]


def test_g5_input_after_the_close_is_only_counted(start: Start) -> None:
    drive = speaking(start)
    voice = drive.voice()
    drive.tell(CloseAsked())
    assert drive.tell(voice.chunk("ghost ")) == [Count("input_after_close")]
    assert drive.released == ["close_requested"]


def test_a_move_that_the_table_does_not_know_is_our_own_bug(start: Start) -> None:
    drive = start(attach=False)
    with pytest.raises(Illegal, match="opening"):
        drive.session.handle(Detached(0), drive.now)


def test_the_base_alone_is_no_session() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Session("sess_1", 0, 1, Limits(), lambda prefix: prefix, 0)  # type: ignore[abstract]


def test_a_plain_session_replays_its_output_too() -> None:
    drive = PlainDrive()
    drive.ask()
    submit = drive.submits[0]
    drive.speak(submit, 0)
    drive.tell(Detached(1))
    drive.speak(submit, 1)
    events = told(drive.tell(Attached(2, drive.session.token, 1)))
    assert [event.payload.meta["seq"] for event in events if isinstance(event, TurnSpoke)] == [1]


def test_a_plain_session_names_the_gap_of_its_output() -> None:
    drive = PlainDrive(Limits(journal_bytes=1000))
    drive.ask()
    for seq in range(4):
        drive.speak(drive.submits[0], seq)
    (resync, *_) = told(drive.tell(Attached(2, drive.session.token, 0)))[1:]
    assert resync == ResyncRequired(1, 1, "journal_overflow", ())
    assert not drive.all(ErrorTold)
