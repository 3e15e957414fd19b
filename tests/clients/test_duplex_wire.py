"""Frames both ways, and both sides back to back: the client's codec against the server's."""

import json

import msgpack
import pytest

from omni_live.clients.duplex import Options
from omni_live.clients.duplex_events import (
    Expiring,
    Heard,
    Other,
    OverlapDecision,
    Refusal,
    ReplyEnded,
    Resync,
    Sound,
    read,
)
from omni_live.clients.duplex_wire import BadFrame, Fields, decode, encode
from omni_live.protocols.duplex.codec import Decoder, Encoder, default_settings
from omni_live.sessions import events as ev
from omni_live.sessions.effects import Emit
from omni_live.sessions.inputs import (
    AudioAppended,
    AudioCommitted,
    BargeInAsked,
    PlaybackAcked,
    Sequenced,
    SettingsAsked,
    TextAppended,
)
from omni_live.sessions.items import Item, Modality, Response, ResponseStatus, Role

PCM = bytes(range(200))


@pytest.mark.parametrize("binary", [True, False])
def test_sound_survives_a_frame(binary: bool) -> None:
    frame = encode({"type": "input_audio_buffer.append", "audio": PCM, "input_seq": 3}, binary=binary)
    assert isinstance(frame, bytes) is binary
    delta = encode({"type": "response.output_audio.delta", "delta": PCM}, binary=binary)
    assert decode(delta).sound("delta") == PCM


def test_json_sound_is_base64() -> None:
    frame = encode({"type": "input_audio_buffer.append", "audio": b"\x00\x01"}, binary=False)
    assert json.loads(frame)["audio"] == "AAE="


@pytest.mark.parametrize(
    "frame",
    [
        "{",
        "[]",
        '{"type": 3}',
        "{}",
        "[" * 100_000,
        b"\xc1",
        b"",
        msgpack.packb([1]),
        msgpack.packb({"type": "a"}) + b"x",
        '{"type":"response.output_audio.delta","delta":"!!"}',
        b"\x91" * 100_000,
    ],
)
def test_a_frame_that_is_no_event_is_refused(frame: str | bytes) -> None:
    with pytest.raises(BadFrame):
        decode(frame)


def test_a_field_of_another_type_than_expected_is_refused() -> None:
    fields = Fields({"a": 1, "b": "x", "c": [1], "d": b"\x00", "e": True})
    for call in (
        lambda: fields.text("a"),
        lambda: fields.integer("b"),
        lambda: fields.integer("e"),
        lambda: fields.number("b"),
        lambda: fields.fields("a"),
        lambda: fields.several("c"),
        lambda: fields.ranges("c"),
        lambda: fields.ranges("a"),
        lambda: fields.sound("b"),
        lambda: fields.sound("d"),
    ):
        with pytest.raises(BadFrame):
            call()


def _sent(binary: bool, event: ev.Event, seq: int = 1) -> list[Fields]:
    encoder = Encoder(binary=binary)
    settings = default_settings("voice")
    encoder.frames(Emit(ev.SessionCreated("sess_1", settings, 1, "token", 100.0), 0))
    return [decode(frame) for frame in encoder.frames(Emit(event, seq))]


@pytest.mark.parametrize("binary", [True, False])
def test_the_client_reads_what_the_server_writes(binary: bool) -> None:
    item = Item("item_1", Role.ASSISTANT, "Hello.", True)
    response = Response("resp_1", 1, ResponseStatus.CANCELLED, Modality.AUDIO, item, reason="turn_detected")
    (sound,) = [read(f, 5) for f in _sent(binary, ev.AudioDelta("resp_1", "item_1", PCM, 480, 2))]
    assert sound == Sound(at_ns=5, response_id="resp_1", item_id="item_1", pcm=PCM, rate_hz=24000, start_sample=480)
    (ended,) = [read(f, 5) for f in _sent(binary, ev.ResponseDone(response))]
    assert ended == ReplyEnded(at_ns=5, response_id="resp_1", status="cancelled", reason="turn_detected")
    (decided,) = [read(f, 5) for f in _sent(binary, ev.OverlapDecided("hold", "speech", "resp_1"))]
    assert decided == OverlapDecision(at_ns=5, action="hold", reason="speech", response_id="resp_1")
    (heard,) = [read(f, 5) for f in _sent(binary, ev.TranscriptionDone("item_0", "Hi.", 1.0))]
    assert heard == Heard(at_ns=5, item_id="item_0", transcript="Hi.")
    (refusal,) = [read(f, 5) for f in _sent(binary, ev.ErrorTold("bad", "Not so.", "event_3"))]
    assert refusal == Refusal(at_ns=5, code="bad", message="Not so.", event_id="event_3")
    (expiring,) = [read(f, 5) for f in _sent(binary, ev.SessionExpiring(60.0))]
    assert expiring == Expiring(at_ns=5, seconds_left=60.0)
    (resync,) = [read(f, 5) for f in _sent(binary, ev.ResyncRequired(3, 9, "journal_gap", (item,)))]
    assert isinstance(resync, Resync)
    assert (resync.first, resync.last, resync.items[0]["id"]) == (3, 9, "item_1")
    (other,) = [read(f, 5) for f in _sent(binary, ev.BufferCleared())]
    assert isinstance(other, Other)
    assert other.type == "input_audio_buffer.cleared"


@pytest.mark.parametrize("binary", [True, False])
def test_the_server_reads_what_the_client_writes(binary: bool) -> None:
    decoder = Decoder(binary=binary)
    settings = default_settings("voice")

    def told(event: dict) -> object:
        (sequenced,) = decoder.decode(encode({**event, "input_seq": 4}, binary=binary), settings)
        assert isinstance(sequenced, Sequenced)
        assert sequenced.seq == 4
        return sequenced.input

    options = Options(
        instructions="Be brief.",
        voice="kokf",
        manual=True,
        max_output_tokens=40,
        modality="audio",
        omni_live={"seed": 7, "lead_ms": 400, "overlap": {"listen_only": True}},
    )
    asked = told({"type": "session.update", "event_id": "event_1", "session": options.session()})
    assert isinstance(asked, SettingsAsked)
    assert asked.event_id == "event_1"
    settings = asked.settings
    assert (settings.input_rate_hz, settings.output_rate_hz, settings.seed, settings.lead_ms) == (16000, 24000, 7, 400)
    assert (settings.instructions, settings.voice, settings.turn_detection) == ("Be brief.", "kokf", None)
    assert settings.overlap.listen_only
    assert told({"type": "input_audio_buffer.append", "audio": PCM}) == AudioAppended(PCM)
    assert told({"type": "barge_in", "event_id": "event_2"}) == BargeInAsked("event_2")
    assert told({"type": "input.text.append", "text": "Hi", "response_create": True}) == TextAppended("Hi", True)
    assert told({"type": "input_audio_buffer.commit", "response_create": False}) == AudioCommitted(False, None)
    ack = {"type": "playback.ack", "played_ms": 12.5, "response_id": "r", "item_id": "i"}
    assert told(ack) == PlaybackAcked(12.5, "r", "i", None)
