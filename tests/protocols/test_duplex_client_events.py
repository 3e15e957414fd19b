"""What a duplex client says: an event becomes the input it asks for, and nothing gets an exception out."""

import base64
import json
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_live.protocols.duplex import Decoder, OpenAsked, ResumeAsked, Told, default_settings, describe
from omni_live.protocols.duplex.client_events import READERS
from omni_live.protocols.fields import Fault
from omni_live.sessions import inputs as told
from omni_live.sessions.items import Item, ItemStatus, Modality, Role
from omni_live.sessions.settings import Settings, TurnDetection

SETTINGS = default_settings("voice")
PCM = np.arange(4800, dtype="<i2").tobytes()
AT_16K = replace(SETTINGS, input_rate_hz=16000)


def decode(event: dict[str, Any], settings: Settings = SETTINGS) -> list[Told]:
    return Decoder().decode(json.dumps(event), settings)


def fault(frame: str | bytes, *, binary: bool = False) -> Fault:
    (only,) = Decoder(binary=binary).decode(frame, SETTINGS)
    assert isinstance(only, Fault)
    return only


def update(session: dict[str, Any], settings: Settings = SETTINGS) -> Settings:
    (asked,) = decode({"type": "session.update", "session": session}, settings)
    assert isinstance(asked, told.SettingsAsked), asked
    return asked.settings


def refused(session: dict[str, Any]) -> Fault:
    (only,) = decode({"type": "session.update", "event_id": "e1", "session": session})
    assert isinstance(only, Fault), only
    assert only.event_id == "e1"
    return only


MESSAGE = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}

CASES: list[tuple[dict[str, Any], told.ClientInput]] = [
    ({"type": "session.event_ack", "server_event_seq": 7}, told.EventAcked(7)),
    ({"type": "session.event_ack", "last_server_event_seq": 9}, told.EventAcked(9)),
    ({"type": "session.heartbeat"}, told.Heartbeat("e1")),
    ({"type": "session.close", "reason": "bye"}, told.CloseAsked(event_id="e1")),
    ({"type": "input_audio_buffer.commit"}, told.AudioCommitted(None, "e1")),
    ({"type": "input_audio_buffer.commit", "response_create": True}, told.AudioCommitted(True, "e1")),
    ({"type": "input_audio_buffer.commit", "final": False}, told.AudioCommitted(False, "e1")),
    ({"type": "input_audio_buffer.clear"}, told.AudioCleared("e1")),
    ({"type": "barge_in"}, told.BargeInAsked("e1")),
    ({"type": "turn.signal", "event": "user_started", "payload": {"a": 1}}, told.BargeInAsked("e1")),
    ({"type": "input.commit"}, told.AudioCommitted(True, "e1")),
    ({"type": "input.commit", "create_response": False}, told.AudioCommitted(False, "e1")),
    ({"type": "turn.signal", "event": "user_committed"}, told.AudioCommitted(None, "e1")),
    ({"type": "input.text.append", "text": "hi"}, told.TextAppended("hi", True, "e1")),
    ({"type": "push_text", "text": "hi", "response_create": False}, told.TextAppended("hi", False, "e1")),
    ({"type": "playback.ack", "played_ms": 120, "response_id": "r", "item_id": "i", "committed_ms": 100},
     told.PlaybackAcked(120.0, "r", "i", "e1")),
    ({"type": "conversation.item.create", "item": MESSAGE},
     told.ItemCreateAsked(Item("", Role.USER, "hello", spoken=False), None, "e1")),
    ({"type": "conversation.item.create", "previous_item_id": "root",
      "item": {"type": "message", "id": "i1", "role": "assistant", "status": "incomplete",
               "content": [{"type": "output_audio", "transcript": "good"}]}},
     told.ItemCreateAsked(Item("i1", Role.ASSISTANT, "good", spoken=True, status=ItemStatus.INCOMPLETE), "root", "e1")),
    ({"type": "conversation.item.delete", "item_id": "i1"}, told.ItemDeleteAsked("i1", "e1")),
    ({"type": "conversation.item.retrieve", "item_id": "i1"}, told.ItemRetrieveAsked("i1", "e1")),
    ({"type": "conversation.item.truncate", "item_id": "i1", "content_index": 0, "audio_end_ms": 400},
     told.ItemTruncateAsked("i1", 400, 0, "e1")),
    ({"type": "response.create"}, told.RespondAsked(event_id="e1")),
    ({"type": "response.create", "response": {"conversation": "none", "output_modalities": ["text"],
      "instructions": "rhyme", "max_output_tokens": 50, "metadata": {"a": "b"}, "omni_live": {"seed": 3}}},
     told.RespondAsked(Modality.TEXT, "rhyme", 50, 3, {"a": "b"}, True, "e1")),
    ({"type": "response.cancel"}, told.CancelAsked(None, "e1")),
    ({"type": "response.cancel", "response_id": "r1"}, told.CancelAsked("r1", "e1")),
]  # fmt: skip


@pytest.mark.parametrize(("event", "wanted"), CASES, ids=lambda value: value["type"] if isinstance(value, dict) else "")
def test_an_event_becomes_the_input_it_asks_for(event: dict[str, Any], wanted: told.ClientInput) -> None:
    assert decode({**event, "event_id": "e1"}) == [wanted]


@pytest.mark.parametrize(("event", "wanted"), CASES, ids=lambda value: value["type"] if isinstance(value, dict) else "")
def test_msgpack_asks_for_the_same(event: dict[str, Any], wanted: told.ClientInput) -> None:
    assert Decoder(binary=True).decode(msgpack.packb({**event, "event_id": "e1"}), SETTINGS) == [wanted]


def test_a_numbered_event_keeps_its_number() -> None:
    assert decode({"type": "barge_in", "input_seq": 3}) == [told.Sequenced(3, told.BargeInAsked())]


def test_a_numbered_event_that_is_wrong_uses_up_its_number() -> None:
    first, second = decode({"type": "barge_in", "input_seq": 3, "wrong": 1})
    assert first == told.Sequenced(3, told.EventAcked(0))
    assert isinstance(second, Fault)


# -- audio -------------------------------------------------------------------------------------------------------


def test_audio_at_the_pipeline_s_rate_passes_as_it_is() -> None:
    event = {"type": "input_audio_buffer.append", "audio": base64.b64encode(PCM).decode()}
    assert decode(event, AT_16K) == [told.AudioAppended(PCM)]


def test_msgpack_audio_is_raw_bytes() -> None:
    frame = msgpack.packb({"type": "input_audio_buffer.append", "audio": PCM})
    assert Decoder(binary=True).decode(frame, AT_16K) == [told.AudioAppended(PCM)]


def test_an_append_may_name_its_own_format_and_rate_and_hint_at_what_it_holds() -> None:
    samples = (np.frombuffer(PCM, "<i2") / 32768).astype("<f4")
    event = {
        "type": "input_audio_buffer.append",
        "audio": base64.b64encode(samples.tobytes()).decode(),
        "format": "pcm_f32le",
        "sample_rate_hz": 16000,
        "is_speech": True,
        "video_frames": [],
        "duration_ms": 300,
        "audio_end_ms": 300,
        "vad": {"active": True},
    }
    assert decode(event) == [told.AudioAppended(PCM)]


def test_a_manual_commit_takes_along_what_is_left_in_the_filter() -> None:
    decoder = Decoder()
    by_hand = replace(SETTINGS, turn_detection=None)
    append = json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(bytes(48000)).decode()})
    (appended,) = decoder.decode(append, by_hand)
    commit = decoder.decode(json.dumps({"type": "input_audio_buffer.commit", "input_seq": 2}), by_hand)
    assert isinstance(appended, told.AudioAppended)
    tail, sequenced = commit
    assert isinstance(tail, told.AudioAppended)
    assert len(appended.pcm) + len(tail.pcm) == 32000
    assert sequenced == told.Sequenced(2, told.AudioCommitted())


BAD_AUDIO = ["", "A", "AAA", "AA==\n", "A A=", "AA-_", "AAAA====", "ä", "AQ=="]


@pytest.mark.parametrize("audio", BAD_AUDIO)
def test_audio_that_is_not_whole_samples_in_base64_is_refused(audio: str) -> None:
    only = fault(json.dumps({"type": "input_audio_buffer.append", "event_id": "e1", "audio": audio}))
    assert (only.code, only.param, only.event_id) == ("invalid_audio", "audio", "e1")


def test_float_audio_that_is_not_finite_is_refused() -> None:
    audio = np.array([0.0, np.nan], "<f4").tobytes()
    event = {"type": "input_audio_buffer.append", "audio": base64.b64encode(audio).decode(), "format": "pcm_f32le"}
    assert fault(json.dumps(event)).code == "invalid_audio"


# -- the session object ------------------------------------------------------------------------------------------


def test_an_update_changes_what_it_names_and_nothing_else() -> None:
    before = replace(SETTINGS, instructions="be kind", voice="amber", seed=4)
    after = update({"type": "realtime", "instructions": "be brief"}, before)
    assert after == replace(before, instructions="be brief")


def test_empty_instructions_clear_them() -> None:
    assert update({"instructions": ""}, replace(SETTINGS, instructions="be kind")).instructions == ""


def test_null_turns_detection_and_transcription_off_and_absence_leaves_them() -> None:
    off = update({"audio": {"input": {"turn_detection": None, "transcription": None}}})
    assert off.turn_detection is None
    assert not off.transcription
    assert update({"audio": {"input": {}}}, off) == off
    on = update({"audio": {"input": {"turn_detection": {"type": "server_vad"}, "transcription": {}}}}, off)
    assert on.turn_detection == TurnDetection()
    assert on.transcription


def test_turn_detection_merges_by_field() -> None:
    first = update({"audio": {"input": {"turn_detection": {"type": "server_vad", "threshold": 0.7}}}})
    second = update({"audio": {"input": {"turn_detection": {"create_response": False}}}}, first)
    assert second.turn_detection == replace(TurnDetection(), threshold=0.7, create_response=False)


def test_a_certain_end_never_comes_before_the_end_that_only_seems_one() -> None:
    detection = update({"turn_detection": {"type": "server_vad", "silence_duration_ms": 200}}).turn_detection
    assert detection is not None
    assert detection.min_silence_ms <= detection.silence_duration_ms == 200


def test_semantic_vad_is_taken_as_a_length_of_silence() -> None:
    eager = update({"audio": {"input": {"turn_detection": {"type": "semantic_vad", "eagerness": "high"}}}})
    patient = update({"audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}})
    assert eager.turn_detection is not None
    assert patient.turn_detection is not None
    assert eager.turn_detection.silence_duration_ms < patient.turn_detection.silence_duration_ms


@pytest.mark.parametrize(
    ("given", "encoding", "rate"),
    [
        ({"type": "audio/pcm", "rate": 24000}, "pcm16", 24000),
        ({"type": "audio/pcm"}, "pcm16", 24000),
        ({"type": "audio/pcmu"}, "g711_ulaw", 8000),
        ({"type": "audio/pcma"}, "g711_alaw", 8000),
        ("pcm16", "pcm16", 16000),
        ("g711_ulaw", "g711_ulaw", 8000),
        ({"type": "audio/pcm", "rate": 48000}, "pcm16", 48000),
    ],
)
def test_formats_are_known_by_all_of_their_names(given: object, encoding: str, rate: int) -> None:
    before = replace(SETTINGS, input_rate_hz=16000)
    after = update({"audio": {"input": {"format": given}}}, before)
    assert (after.input_encoding, after.input_rate_hz) == (encoding, rate)


def test_our_own_options_stand_under_one_key() -> None:
    own = {"input_rate_hz": 16000, "lead_ms": 0, "seed": 7, "min_silence_ms": 300, "speculative_ms": 0,
           "overlap": {"listen_only": True, "hold_ms": 0}}  # fmt: skip
    after = update({"omni_live": own})
    assert (after.input_rate_hz, after.lead_ms, after.seed) == (16000, 0, 7)
    assert after.turn_detection == replace(TurnDetection(), min_silence_ms=300, speculative_ms=0)
    assert after.overlap.listen_only
    assert after.overlap.hold_ms == 0


def test_what_vllm_omni_s_client_sends_is_read() -> None:
    after = update({
        "model": "voice", "modalities": ["text", "audio"], "input_audio_format": "pcm16",
        "output_audio_format": "pcm16", "sample_rate_hz": 16000,
        "audio": {"input": {"sample_rate_hz": 16000}, "output": {"sample_rate_hz": 24000}},
        "turn_detection": {"type": "server_vad", "interrupt_response": True}, "overlap_policy": "barge_in_on_speech",
        "overlap_short_ack_ms": 500, "overlap_barge_in_ms": 1200, "playback_commit_policy": "ack_only",
        "idle_timeout_s": 300, "extra_body": {"auto_response": True},
    })  # fmt: skip
    assert (after.input_rate_hz, after.output_rate_hz, after.modality) == (16000, 24000, Modality.AUDIO)
    assert after.overlap.short_ack_ms == 500
    assert after.answers_commits


def test_an_extra_body_that_says_nothing_of_answers_changes_nothing() -> None:
    assert update({"extra_body": {"force_listen_count": 0}}) == SETTINGS


def test_what_the_server_shows_can_be_sent_back_and_changes_nothing() -> None:
    settings = replace(
        SETTINGS, instructions="be kind", voice="amber", max_output_tokens=100, input_rate_hz=16000, lead_ms=0,
        answers_commits=True,
    )  # fmt: skip
    assert update(describe(settings, "sess_1", {"limits": {}}), settings) == settings


@pytest.mark.parametrize(
    ("session", "code", "param"),
    [
        ({"foo": 1}, "unknown_parameter", "session.foo"),
        ({"audio": {"input": {"foo": 1}}}, "unknown_parameter", "session.audio.input.foo"),
        ({"audio": []}, "invalid_type", "session.audio"),
        ({"instructions": 4}, "invalid_type", "session.instructions"),
        ({"output_modalities": ["audio", "text"]}, "invalid_value", "session.output_modalities"),
        ({"output_modalities": "audio"}, "invalid_type", "session.output_modalities"),
        ({"max_output_tokens": 0}, "invalid_value", "session.max_output_tokens"),
        ({"max_output_tokens": True}, "invalid_type", "session.max_output_tokens"),
        ({"max_output_tokens": 2**63}, "invalid_value", "session.max_output_tokens"),
        ({"audio": {"output": {"voice": "../../etc/passwd"}}}, "invalid_value", "session.audio.output.voice"),
        ({"audio": {"output": {"speed": 9}}}, "invalid_value", "session.audio.output.speed"),
        ({"audio": {"input": {"format": {"type": "audio/flac"}}}}, "invalid_value", "session.audio.input.format"),
        ({"tools": [{"type": "function"}]}, "unsupported_value", "session.tools"),
        ({"turn_detection": {"type": "psychic"}}, "invalid_value", "session.turn_detection.type"),
        ({"turn_detection": {"type": "server_vad", "idle_timeout_ms": 1}}, "unsupported_value",
         "session.turn_detection.idle_timeout_ms"),
        ({"type": "transcription"}, "invalid_value", "session.type"),
        ({"omni_live": {"lead_ms": 1.5}}, "invalid_type", "session.omni_live.lead_ms"),
        ({"model": ""}, "invalid_value", "session.model"),
    ],
)  # fmt: skip
def test_a_session_object_that_is_wrong_is_refused_by_name(session: dict[str, Any], code: str, param: str) -> None:
    only = refused(session)
    assert (only.code, only.param) == (code, param)


# -- the first frame ---------------------------------------------------------------------------------------------


def test_a_first_update_gives_the_settings_to_open_with() -> None:
    frame = json.dumps({"type": "session.update", "input_seq": 1, "session": {"model": "other"}})
    asked = Decoder().first(frame, SETTINGS)
    assert asked == OpenAsked(replace(SETTINGS, model="other"), (told.Sequenced(1, told.EventAcked(0)),))


def test_a_first_resume_names_the_session_and_what_was_seen() -> None:
    frame = json.dumps({
        "type": "session.resume", "session_id": "sess_1", "resume_token": "token_1",
        "last_received_server_event_seq": 9, "last_sent_input_seq": 4,
    })  # fmt: skip
    assert Decoder().first(frame, SETTINGS) == ResumeAsked("sess_1", "token_1", 9, 4)


def test_a_resume_on_an_open_session_is_refused() -> None:
    assert fault(json.dumps({"type": "session.resume"})).code == "invalid_session_resume"


# -- bad input ---------------------------------------------------------------------------------------------------

BAD_FRAMES: list[tuple[str | bytes, str]] = [
    ("", "invalid_json"),
    ("{", "invalid_json"),
    ("nonsense", "invalid_json"),
    ("\ufeff{}", "invalid_json"),
    ('{"type": NaN}', "invalid_json"),
    ('{"type": "barge_in", "x": ' + "9" * 5000 + "}", "invalid_json"),
    ("[]", "invalid_event"),
    ('"text"', "invalid_event"),
    ("null", "invalid_event"),
    ('{"a":' * 200 + "1" + "}" * 200, "invalid_event"),
    ("[" * 100_000, "invalid_event"),
    ('{"a":[' + "1," * 300_000 + "1]}", "invalid_event"),
    (b"\x80", "invalid_event"),
    ("{}", "missing_required_parameter"),
    ('{"type": 1}', "invalid_type"),
    ('{"type": "no.such.event"}', "invalid_value"),
    ('{"type": "\\ud800"}', "invalid_value"),
    ('{"type": "barge_in", "event_id": 4}', "invalid_type"),
    ('{"type": "barge_in", "event_id": ""}', "invalid_value"),
    ('{"type": "barge_in", "event_id": "' + "x" * 1000 + '"}', "invalid_value"),
    ('{"type": "barge_in", "extra": 1}', "unknown_parameter"),
    ('{"type": "barge_in", "\\ud800": 1}', "unknown_parameter"),
    ('{"type": "barge_in", "input_seq": 0}', "invalid_value"),
    ('{"type": "barge_in", "input_seq": 1.0}', "invalid_type"),
    ('{"type": "barge_in", "input_seq": 1e400}', "invalid_type"),
    ('{"type": "playback.ack", "played_ms": 1e400}', "invalid_value"),
    ('{"type": "playback.ack", "played_ms": -1}', "invalid_value"),
    ('{"type": "playback.ack", "played_ms": "1"}', "invalid_type"),
    ('{"type": "input_audio_buffer.append"}', "missing_required_parameter"),
    ('{"type": "input_audio_buffer.append", "audio": 4}', "invalid_type"),
    ('{"type": "input_audio_buffer.append", "audio": "AAAA", "video_frames": ["x"]}', "unsupported_value"),
    ('{"type": "conversation.item.create", "item": {"type": "function_call"}}', "invalid_value"),
    ('{"type": "conversation.item.create", "item": {"type": "message", "role": "user", "content": [1]}}',
     "invalid_type"),
    (('{"type": "conversation.item.create", "item": {"type": "message", "role": "user", "content": '
     '[{"type": "input_image", "image_url": "http://10.0.0.1/"}]}}'), "unsupported_content_type"),
    ('{"type": "conversation.item.truncate", "item_id": "i", "content_index": 0, "audio_end_ms": -1}', "invalid_value"),
    ('{"type": "conversation.item.truncate", "item_id": "i"}', "missing_required_parameter"),
    ('{"type": "response.create", "response": {"metadata": {"a": 1}}}', "invalid_type"),
    ('{"type": "response.create", "response": {"input": [1]}}', "unsupported_value"),
    ('{"type": "output_audio_buffer.clear"}', "invalid_value"),
]  # fmt: skip


@pytest.mark.parametrize(("frame", "code"), BAD_FRAMES, ids=[str(frame)[:40] for frame, _ in BAD_FRAMES])
def test_a_frame_that_is_wrong_is_one_fault_with_a_stable_code(frame: str | bytes, code: str) -> None:
    only = fault(frame)
    assert only.code == code
    only.message.encode("ascii")
    assert len(only.message) < 300


BAD_MSGPACK = [
    b"",
    b"\xc1",
    b"\x81\xa4type",
    msgpack.packb({"type": "barge_in"}) + b"\x00",
    msgpack.packb([1]),
    msgpack.packb({1: 2}),
    msgpack.packb({b"type": "barge_in"}),
    msgpack.packb({"type": msgpack.Timestamp(1)}),
    msgpack.packb({"type": msgpack.ExtType(4, b"cos\nsystem\n")}),
    b"\x91" * 2000 + b"\xc0",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\x81\xa1\xff\x01",
    msgpack.packb([[{} for _ in range(4000)] for _ in range(10)]),
]


@pytest.mark.parametrize("frame", BAD_MSGPACK, ids=range(len(BAD_MSGPACK)))
def test_msgpack_that_is_wrong_is_one_fault(frame: bytes) -> None:
    assert fault(frame, binary=True).code in ("invalid_msgpack", "invalid_event")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
NAMES = ("session", "item", "item_id", "audio", "response", "played_ms", "text", "event", "input_seq", "event_id")


@settings(suppress_health_check=[HealthCheck.too_slow])  # the first text of all takes a second to draw
@given(st.sampled_from(sorted(READERS)), st.dictionaries(st.sampled_from(NAMES), JSON_VALUES))
def test_no_field_of_no_event_gets_an_exception_out(kind: str, fields: dict[str, Any]) -> None:
    for heard in Decoder().decode(json.dumps({**fields, "type": kind}), SETTINGS):
        if isinstance(heard, Fault):
            heard.message.encode("ascii")
            assert "Traceback" not in heard.message


@given(st.binary(max_size=64) | st.text(alphabet=st.characters(exclude_categories=()), max_size=64))
def test_no_bytes_at_all_get_an_exception_out(frame: str | bytes) -> None:
    assert Decoder(binary=True).decode(frame, SETTINGS)
    assert Decoder(binary=True).first(frame, SETTINGS)


SESSION_NAMES = tuple(describe(SETTINGS, "sess_1"))


@given(st.dictionaries(st.sampled_from(SESSION_NAMES), JSON_VALUES))
def test_no_session_object_gets_an_exception_out(session: dict[str, Any]) -> None:
    (only,) = decode({"type": "session.update", "session": session})
    assert isinstance(only, Fault | told.SettingsAsked)
