"""What a duplex client may say: one reader for each event type, from `Fields` to a session input.

Names and fields are those of OpenAI's GA Realtime API, then vllm-omni's duplex additions with their aliases. Fields
that only hint (`is_speech`, `vad`, ...) are accepted and have no effect. `input_seq` and `event_id` are read by the
codec, which also turns appended audio into the pipeline's form.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from omni_live.protocols import audio
from omni_live.protocols.duplex.session_object import audio_format, merge, modality, output_tokens, voice_name
from omni_live.protocols.fields import MAX_INT, Fields, Wire, needed
from omni_live.sessions.inputs import (
    AudioCleared,
    AudioCommitted,
    BargeInAsked,
    CancelAsked,
    ClientInput,
    CloseAsked,
    EventAcked,
    Heartbeat,
    ItemCreateAsked,
    ItemDeleteAsked,
    ItemRetrieveAsked,
    ItemTruncateAsked,
    PlaybackAcked,
    RespondAsked,
    SettingsAsked,
    TextAppended,
)
from omni_live.sessions.items import Item, ItemStatus, Role
from omni_live.sessions.settings import Settings

MAX_AUDIO_MS: Final = 86_400_000.0
_HINTS: Final = ("audio_end_ms", "duration_ms", "is_speech", "rms", "transcript", "vad")


@dataclass(frozen=True, slots=True)
class RawAudio:
    """Appended audio as the client coded it; the codec converts it."""

    data: bytes
    encoding: str
    rate_hz: int


Read = ClientInput | RawAudio
Reader = Callable[[Fields, Settings, str | None], Read]


def read_event(kind: str, fields: Fields, settings: Settings, event_id: str | None) -> Read:
    """The input that an event of a known type asks for. Raises Faulty; KeyError where the type is unknown."""
    read = READERS[kind](fields, settings, event_id)
    fields.done()
    return read


# -- the session -------------------------------------------------------------------------------------------------


def _session_update(fields: Fields, settings: Settings, event_id: str | None) -> Read:
    return SettingsAsked(merge(settings, needed(fields, "session", fields.inner("session"))), event_id)


def _event_ack(fields: Fields, _: Settings, __: str | None) -> Read:
    seq = fields.integer("server_event_seq")
    last = fields.integer("last_server_event_seq")
    return EventAcked(needed(fields, "server_event_seq", seq if last is None else last))


def _heartbeat(_: Fields, __: Settings, event_id: str | None) -> Read:
    return Heartbeat(event_id)


def _close(fields: Fields, _: Settings, event_id: str | None) -> Read:
    fields.ignore(("reason",))
    return CloseAsked(event_id=event_id)


# -- the user's audio --------------------------------------------------------------------------------------------


def _append(fields: Fields, settings: Settings, _: str | None) -> Read:
    fields.ignore(_HINTS)
    if fields.array("video_frames"):
        fields.refuse("unsupported_value", "video_frames", "must be empty: this pipeline does not see")
    named = audio_format(fields, "format")
    encoding, rate = named or (settings.input_encoding, settings.input_rate_hz)
    rate = fields.integer("sample_rate_hz", audio.LOW_HZ, audio.HIGH_HZ) or rate or settings.input_rate_hz
    return RawAudio(_audio_bytes(fields), encoding, rate)


def _audio_bytes(fields: Fields) -> bytes:
    value = fields.raw("audio")
    if isinstance(value, bytes):
        data = value
    else:
        text = needed(fields, "audio", fields.text("audio", max_chars=MAX_INT))
        data = audio.from_base64(text)
    if not data:
        fields.refuse("invalid_audio", "audio", "is empty")
    return data


def _commit(fields: Fields, _: Settings, event_id: str | None) -> AudioCommitted:
    fields.ignore(("is_speech",))
    respond = fields.flag("response_create")
    other = fields.flag("create_response")
    respond = other if respond is None else respond
    if fields.flag("final") is False:
        respond = False
    return AudioCommitted(respond, event_id)


def _commit_and_respond(fields: Fields, settings: Settings, event_id: str | None) -> Read:
    """vllm-omni's own name for a commit, which there wants an answer unless it says otherwise."""
    commit = _commit(fields, settings, event_id)
    return replace(commit, respond=True) if commit.respond is None else commit


def _clear(_: Fields, __: Settings, event_id: str | None) -> Read:
    return AudioCleared(event_id)


def _barge_in(_: Fields, __: Settings, event_id: str | None) -> Read:
    return BargeInAsked(event_id)


def _signal(fields: Fields, _: Settings, event_id: str | None) -> Read:
    fields.ignore(("payload",))
    signal = needed(fields, "event", fields.choice("event", ("user_started", "barge_in", "user_committed")))
    return AudioCommitted(None, event_id) if signal == "user_committed" else BargeInAsked(event_id)


def _text(fields: Fields, _: Settings, event_id: str | None) -> Read:
    text = needed(fields, "text", fields.text("text"))
    respond = fields.flag("response_create")
    return TextAppended(text, True if respond is None else respond, event_id)


def _playback(fields: Fields, _: Settings, event_id: str | None) -> Read:
    fields.ignore(("committed_ms", "truncate"))
    return PlaybackAcked(
        needed(fields, "played_ms", fields.number("played_ms", 0.0, MAX_AUDIO_MS)),
        fields.identifier("response_id"),
        fields.identifier("item_id"),
        event_id,
    )


# -- items -------------------------------------------------------------------------------------------------------


def _item_create(fields: Fields, _: Settings, event_id: str | None) -> Read:
    after = fields.identifier("previous_item_id")
    return ItemCreateAsked(_item(needed(fields, "item", fields.inner("item"))), after, event_id)


def _item(fields: Fields) -> Item:
    needed(fields, "type", fields.choice("type", ("message",)))
    fields.ignore(("object",))
    role = Role(needed(fields, "role", fields.choice("role", tuple(Role))))
    status = fields.choice("status", ("completed", "incomplete", "in_progress"))
    texts: list[str] = []
    spoken = False
    for index, part in enumerate(needed(fields, "content", fields.array("content", 64))):
        text, heard = _content(role, part, fields.param(f"content[{index}]"), fields)
        texts.append(text)
        spoken = spoken or heard
    item_id = fields.identifier("id") or ""
    fields.done()
    done = ItemStatus.INCOMPLETE if status == "incomplete" else ItemStatus.COMPLETED
    return Item(item_id, role, "\n".join(texts), spoken, done)


_TEXT_PARTS: Final[Mapping[Role, tuple[str, ...]]] = MappingProxyType(
    {
        Role.SYSTEM: ("input_text", "text"),
        Role.USER: ("input_text", "text"),
        Role.ASSISTANT: ("output_text", "text"),
    }
)
_SPOKEN_PARTS: Final = ("input_audio", "output_audio", "audio")


def _content(role: Role, part: Wire, path: str, item: Fields) -> tuple[str, bool]:
    """(text, whether it was spoken) of one content part."""
    if not isinstance(part, dict):
        item.refuse("invalid_type", "content", "must hold objects")
    fields = Fields(part, path)
    kind = needed(fields, "type", fields.text("type"))
    if kind in _TEXT_PARTS[role]:
        text, spoken = needed(fields, "text", fields.text("text")), False
    elif kind in _SPOKEN_PARTS and fields.has("transcript") and role is not Role.SYSTEM:
        text, spoken = needed(fields, "transcript", fields.text("transcript")), True
        fields.ignore(("audio", "format"))
    else:
        fields.refuse(
            "unsupported_content_type",
            "type",
            f"cannot be this for role {role.value}: send text, or audio's transcript",
        )
    fields.done()
    return text, spoken


def _item_delete(fields: Fields, _: Settings, event_id: str | None) -> Read:
    return ItemDeleteAsked(_item_id(fields), event_id)


def _item_retrieve(fields: Fields, _: Settings, event_id: str | None) -> Read:
    return ItemRetrieveAsked(_item_id(fields), event_id)


def _item_truncate(fields: Fields, _: Settings, event_id: str | None) -> Read:
    return ItemTruncateAsked(
        _item_id(fields),
        needed(fields, "audio_end_ms", fields.integer("audio_end_ms", 0, int(MAX_AUDIO_MS))),
        needed(fields, "content_index", fields.integer("content_index", 0, 64)),
        event_id,
    )


def _item_id(fields: Fields) -> str:
    return needed(fields, "item_id", fields.identifier("item_id"))


# -- responses ---------------------------------------------------------------------------------------------------


def _cancel(fields: Fields, _: Settings, event_id: str | None) -> Read:
    return CancelAsked(fields.identifier("response_id"), event_id)


def _respond(fields: Fields, settings: Settings, event_id: str | None) -> Read:
    asked = fields.inner("response")
    if asked is None:
        return RespondAsked(event_id=event_id)
    _refuse_other_voice(asked, settings)
    for name in ("input", "tools", "prompt"):
        if asked.raw(name):
            asked.refuse("unsupported_value", name, "is not supported")
    asked.ignore(("tool_choice", "parallel_tool_calls", "reasoning", "temperature", "extra_body"))
    own = asked.inner("omni_live")
    seed = None
    if own is not None:
        seed = own.integer("seed", 0, 2**31 - 1)
        own.done()
    read = RespondAsked(
        modality=modality(asked),
        instructions=asked.text("instructions"),
        max_output_tokens=output_tokens(asked, None),
        seed=seed,
        metadata=asked.text_map("metadata"),
        out_of_band=asked.choice("conversation", ("auto", "none")) == "none",
        event_id=event_id,
    )
    asked.done()
    return read


def _refuse_other_voice(asked: Fields, settings: Settings) -> None:
    """A response speaks with the session's voice and in its format; naming them again is fine."""
    voices = [voice_name(asked)]
    formats = [audio_format(asked, "output_audio_format")]
    block = asked.inner("audio")
    if block is not None:
        spoken = block.inner("output")
        if spoken is not None:
            voices.append(voice_name(spoken))
            formats.append(audio_format(spoken, "format"))
            spoken.done()
        block.done()
    if any(voice not in (None, settings.voice) for voice in voices):
        asked.refuse("unsupported_value", "audio.output.voice", "must be the session's voice")
    if any(named is not None and named[0] != settings.output_encoding for named in formats):
        asked.refuse("unsupported_value", "audio.output.format", "must be the session's format")


READERS: Final[Mapping[str, Reader]] = MappingProxyType(
    {
        "session.update": _session_update,
        "session.event_ack": _event_ack,
        "session.heartbeat": _heartbeat,
        "session.close": _close,
        "close": _close,
        "close_session": _close,
        "input_audio_buffer.append": _append,
        "input_audio_buffer.commit": _commit,
        "input.commit": _commit_and_respond,
        "input_audio_buffer.clear": _clear,
        "input.cancel": _clear,
        "barge_in": _barge_in,
        "turn.signal": _signal,
        "signal_turn": _signal,
        "input.text.append": _text,
        "push_text": _text,
        "playback.ack": _playback,
        "audio.playback_ack": _playback,
        "conversation.item.create": _item_create,
        "conversation.item.delete": _item_delete,
        "conversation.item.retrieve": _item_retrieve,
        "conversation.item.truncate": _item_truncate,
        "response.create": _respond,
        "response.cancel": _cancel,
    }
)
"""Every type a client may send on an open session; session.resume stands before one."""
