"""What the duplex door says: in OpenAI's own types where they have them, and to the letter in golden frames."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_live.protocols.duplex import Encoder
from omni_live.protocols.duplex.client_events import READERS
from omni_live.protocols.frames import load_msgpack
from omni_live.sessions import events as ev
from omni_live.sessions.effects import Emit
from omni_live.sessions.items import ResponseStatus
from omni_live.sessions.settings import Settings

from . import oracle
from .samples import CUT, EVENTS, SETTINGS, SPOKEN, response

ADDITIONS = {
    "overlap.decision",
    "playback.acknowledged",
    "session.closed",
    "session.heartbeat_ack",
    "session.input_ack",
    "session.input_missing",
    "session.replaced",
    "session.resumed",
    "session.resync_required",
    "turn.event",
}


def attached(settings: Settings = SETTINGS, *, binary: bool = False, frame_bytes: int = 960 * 1024) -> Encoder:
    encoder = Encoder(binary=binary, frame_bytes=frame_bytes)
    encoder.frames(Emit(ev.SessionCreated("sess_1", settings, 1, "token_1", 60.0), 0))
    return encoder


def said(encoder: Encoder, event: ev.Event, seq: int = 7) -> list[dict[str, Any]]:
    return [json.loads(frame) for frame in encoder.frames(Emit(event, seq))]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_every_frame_is_an_event_that_openai_s_types_take_or_a_documented_addition(event: ev.Event) -> None:
    frames = said(attached(), event)
    assert frames
    for frame in frames:
        if frame["type"] in oracle.realtime_types():
            oracle.realtime().validate_python(frame, strict=True)
        else:
            assert frame["type"] in ADDITIONS
            assert isinstance(frame["event_id"], str)


def test_the_samples_hold_every_event_of_a_conversation() -> None:
    plain = {ev.TurnSpoke, ev.TurnDone, ev.RolloutAt, ev.RolloutSnapshotted}
    assert {type(event) for event in EVENTS} == set(get_args(ev.Event)) - plain


def test_the_oracle_notices_a_frame_that_is_not_openai_s() -> None:
    (frame,) = said(attached(), ev.ResponseDone(response(ResponseStatus.COMPLETED, SPOKEN)))
    frame["response"]["metadata"] = {"turn": {"id": 1}}
    with pytest.raises(ValueError, match="metadata"):
        oracle.realtime().validate_python(frame, strict=True)


GOLDEN = [
    (ev.SpeechStarted("item_1", 300),
     ('{"type":"input_audio_buffer.speech_started","item_id":"item_1","audio_start_ms":300,'
     '"server_event_seq":7,"event_id":"event_7"}')),
    (ev.OverlapDecided("barge_in", "speech", "resp_1"),
     ('{"type":"overlap.decision","action":"barge_in","reason":"speech","response_id":"resp_1",'
     '"server_event_seq":7,"event_id":"event_7"}')),
    (ev.TextDelta("resp_1", "item_5", "gr\u00fc\u00df"),
     ('{"type":"response.output_text.delta","response_id":"resp_1","item_id":"item_5","output_index":0,'
     '"content_index":0,"delta":"gr\\u00fc\\u00df","server_event_seq":7,"event_id":"event_7"}')),
    (ev.AudioDelta("resp_1", "item_4", b"\x01\x00\x02\x00", 2400, 3, ((2402, 5),)),
     ('{"type":"response.output_audio.delta","response_id":"resp_1","item_id":"item_4","output_index":0,'
     '"content_index":0,"delta":"AQACAA==","format":"pcm16","sample_rate_hz":24000,"metadata":{"epoch":3,'
     '"start_sample":2400,"audio_duration_ms":0.08333333333333333,"audio_text_marks":[{"audio_end_ms":100,'
     '"text_chars":5}]},"server_event_seq":7,"event_id":"event_7"}')),
    (ev.ErrorTold("invalid_value", "No.", "e3", "session.model"),
     ('{"type":"error","error":{"type":"invalid_request_error","code":"invalid_value","message":"No.",'
     '"param":"session.model","event_id":"e3"},"server_event_seq":7,"event_id":"event_7"}')),
    (ev.SessionClosed("idle"),
     '{"type":"session.closed","reason":"idle","server_event_seq":7,"event_id":"event_7"}'),
]  # fmt: skip


@pytest.mark.parametrize(("event", "frame"), GOLDEN, ids=[type(event).__name__ for event, _ in GOLDEN])
def test_a_frame_is_to_the_letter_what_it_was(event: ev.Event, frame: str) -> None:
    assert attached().frames(Emit(event, 7)) == [frame]


def test_created_carries_what_a_resume_needs_and_the_full_settings() -> None:
    (frame,) = said(Encoder(), ev.SessionCreated("sess_1", SETTINGS, 4, "token_9", 86_400.0), seq=0)
    assert (frame["session_id"], frame["resume_token"], frame["attachment_generation"]) == ("sess_1", "token_9", 4)
    assert frame["session"]["id"] == "sess_1"
    assert frame["session"]["audio"]["input"]["format"] == {"type": "audio/pcm", "rate": 24000}
    assert frame["session"]["omni_live"]["lead_ms"] == SETTINGS.lead_ms
    assert frame["session"]["omni_live"]["expires_in_s"] == 86_400.0


def test_resumed_carries_the_void_ranges_and_the_input_that_was_taken() -> None:
    (frame,) = said(Encoder(), ev.SessionResumed("sess_1", SETTINGS, 2, "token_2", ((3, 5), (9, 9)), 17), seq=0)
    assert frame["void_ranges"] == [[3, 5], [9, 9]]
    assert frame["input_seq"] == 17
    assert frame["resume_token"] == "token_2"


def test_events_that_are_not_journaled_have_ids_of_their_own_and_no_number() -> None:
    encoder = attached()
    frames = [said(encoder, ev.InputAcked(n), seq=0)[0] for n in (1, 2)]
    assert all("server_event_seq" not in frame for frame in frames)
    assert len({frame["event_id"] for frame in frames}) == 2


def test_a_replayed_event_has_the_id_it_had() -> None:
    event = ev.BufferCleared()
    assert attached().frames(Emit(event, 7)) == attached().frames(Emit(event, 7))


def test_an_expired_session_is_told_in_openai_s_words_before_ours() -> None:
    frames = said(attached(), ev.SessionClosed("max_age"))
    assert [frame["type"] for frame in frames] == ["error", "session.closed"]
    assert frames[0]["error"]["code"] == "session_expired"


def test_msgpack_says_the_same_with_raw_sound() -> None:
    for event in EVENTS:
        json_frames = said(attached(), event)
        packed = [
            load_msgpack(frame) for frame in attached(binary=True).frames(Emit(event, 7)) if isinstance(frame, bytes)
        ]
        for plain, frame in zip(json_frames, packed, strict=True):
            if plain["type"] == "response.output_audio.delta":
                plain["delta"] = base64.b64decode(plain["delta"])
            assert frame == plain


def test_a_long_piece_of_sound_is_split_so_that_no_frame_is_too_large() -> None:
    pcm = np.arange(200_000, dtype="<i2").tobytes()
    frames = attached(frame_bytes=64 * 1024).frames(Emit(ev.AudioDelta("resp_1", "item_4", pcm, 0, 3, ((9, 1),)), 7))
    assert all(len(frame) <= 64 * 1024 for frame in frames)
    events = [json.loads(frame) for frame in frames]
    assert b"".join(base64.b64decode(event["delta"]) for event in events) == pcm
    assert [event.get("server_event_seq") for event in events] == [None] * (len(events) - 1) + [7]
    assert len({event["event_id"] for event in events}) == len(events)
    starts = [event["metadata"]["start_sample"] for event in events]
    sizes = [len(base64.b64decode(event["delta"])) // 2 for event in events]
    assert starts == [sum(sizes[:index]) for index in range(len(sizes))]


def tone(samples: int) -> bytes:
    return (np.sin(np.arange(samples) * 0.05) * 8000).astype("<i2").tobytes()


@pytest.mark.parametrize(
    ("rate", "encoding", "width"), [(8000, "g711_ulaw", 1), (16000, "pcm16", 2), (48000, "pcm16", 2)]
)
def test_sound_is_converted_to_the_client_s_rate_and_none_of_it_is_lost(rate: int, encoding: str, width: int) -> None:
    encoder = attached(replace(SETTINGS, output_rate_hz=rate, output_encoding=encoding))
    frames: list[dict[str, Any]] = []
    for index in range(10):
        frames += said(encoder, ev.AudioDelta("resp_1", "item_4", tone(2400), index * 2400, 3), seq=index + 1)
    frames += said(encoder, ev.AudioDone("resp_1", "item_4"), seq=11)
    deltas = [frame for frame in frames if frame["type"] == "response.output_audio.delta"]
    samples = sum(len(base64.b64decode(frame["delta"])) for frame in deltas) // width
    assert abs(samples - rate) <= 1
    assert frames[-1]["type"] == "response.output_audio.done"
    assert all(frame["format"] == encoding and frame["sample_rate_hz"] == rate for frame in deltas)


def test_a_replay_that_begins_inside_a_reply_counts_its_samples_from_there() -> None:
    encoder = attached(replace(SETTINGS, output_rate_hz=12000))
    frames = said(encoder, ev.AudioDelta("resp_1", "item_4", tone(2400), 4800, 3))
    assert frames[0]["metadata"]["start_sample"] == 2400


def test_a_response_shows_its_item_only_once_it_is_over() -> None:
    created = said(attached(), ev.ResponseCreated(response(ResponseStatus.IN_PROGRESS, CUT)))[0]["response"]
    done = said(attached(), ev.ResponseDone(response(ResponseStatus.CANCELLED, CUT, "turn_detected")))[0]["response"]
    assert created["output"] == []
    assert created["status_details"] is None
    assert done["output"][0]["content"] == [{"type": "output_audio", "transcript": "good"}]
    assert done["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
    assert done["metadata"] == {"client_event_id": "e7"}


def test_an_out_of_band_response_belongs_to_no_conversation() -> None:
    beside = replace(response(ResponseStatus.COMPLETED, SPOKEN), in_conversation=False)
    assert said(attached(), ev.ResponseDone(beside))[0]["response"]["conversation_id"] is None


@given(st.text(alphabet=st.characters(exclude_categories=()), max_size=50))
def test_any_text_a_model_makes_can_be_sent(text: str) -> None:
    for binary in (False, True):
        (frame,) = attached(binary=binary).frames(Emit(ev.TextDelta("resp_1", "item_5", text), 1))
        assert frame if isinstance(frame, bytes) else frame.encode("utf-8")


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "duplex.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", sorted(ADDITIONS | set(READERS) | {"session.resume"}))
def test_the_page_names_every_addition_and_every_event_a_client_may_send(kind: str) -> None:
    stem, _, last = kind.rpartition(".")
    assert f"`{kind}`" in PAGE or (f"`{stem}." in PAGE and f"`.{last}`" in PAGE)
