"""What a duplex server says: each session event as an event object of OpenAI's GA Realtime API or a duplex addition.

GA names carry GA's required fields and stay within GA's closed sets, so that clients which validate take them; what
GA has no word for goes into extra fields. `content_index` and `output_index` are always 0: an item has one part, a
response one item. Sound is not here but in the codec, which converts it.
"""

from typing import Final, assert_never

from omni_live.protocols.duplex.session_object import describe, format_object
from omni_live.protocols.fields import Wire
from omni_live.sessions import events as ev
from omni_live.sessions.items import Item, ItemStatus, Response, ResponseStatus, Role
from omni_live.sessions.settings import Settings

Body = dict[str, Wire]

_GA_REASONS: Final = ("turn_detected", "client_cancelled", "max_output_tokens", "content_filter")
_FIRST: Final[Body] = {"output_index": 0, "content_index": 0}

SessionEvent = (
    ev.SessionUpdated
    | ev.SessionReplaced
    | ev.ResyncRequired
    | ev.SessionExpiring
    | ev.SessionClosed
    | ev.HeartbeatAcked
    | ev.InputAcked
    | ev.InputMissing
    | ev.ErrorTold
)
UserEvent = (
    ev.SpeechStarted
    | ev.SpeechStopped
    | ev.BufferCommitted
    | ev.BufferCleared
    | ev.TranscriptionDone
    | ev.TranscriptionFailed
    | ev.OverlapDecided
    | ev.PlaybackAcknowledged
)
ItemEvent = ev.ItemAdded | ev.ItemDone | ev.ItemTruncated | ev.ItemDeleted | ev.ItemRetrieved | ev.ContextDropped
ResponseEvent = (
    ev.ResponseCreated
    | ev.OutputItemAdded
    | ev.PartAdded
    | ev.TextDelta
    | ev.AudioTranscriptDelta
    | ev.AudioDone
    | ev.AudioTranscriptDone
    | ev.TextDone
    | ev.PartDone
    | ev.OutputItemDone
    | ev.ResponseDone
)

SoundFree = SessionEvent | UserEvent | ItemEvent | ResponseEvent


# -- the session -------------------------------------------------------------------------------------------------


def session_created(event: ev.SessionCreated, facts: Body) -> Body:
    return {
        "type": "session.created",
        "session": describe(event.settings, event.session_id, {**facts, "expires_in_s": event.expires_at_s}),
        "session_id": event.session_id,
        "attachment_generation": event.attachment,
        "resume_token": event.resume_token,
    }


def session_resumed(event: ev.SessionResumed, facts: Body) -> Body:
    return {
        "type": "session.resumed",
        "session_id": event.session_id,
        "session": describe(event.settings, event.session_id, facts),
        "resume_token": event.resume_token,
        "attachment_generation": event.attachment,
        "input_seq": event.input_seq,
        "void_ranges": [[first, last] for first, last in event.voids],
    }


def session_event(event: SessionEvent, session_id: str, facts: Body) -> Body:
    body: Body
    match event:
        case ev.SessionUpdated():
            body = {"type": "session.updated", "session": describe(event.settings, session_id, facts)}
        case ev.SessionReplaced():
            body = {"type": "session.replaced"}
        case ev.ResyncRequired():
            body = {
                "type": "session.resync_required",
                "reason": event.reason,
                "first": event.first,
                "last": event.last,
                "items": [item_object(item) for item in event.items],
            }
        case ev.SessionExpiring():
            body = {"type": "turn.event", "event": "session_expiring", "seconds_left": event.seconds_left}
        case ev.SessionClosed():
            body = {"type": "session.closed", "reason": event.reason}
        case ev.HeartbeatAcked():
            body = {"type": "session.heartbeat_ack", **_answering(event.event_id)}
        case ev.InputAcked():
            body = {"type": "session.input_ack", "input_seq": event.input_seq}
        case ev.InputMissing():
            body = {"type": "session.input_missing", "input_seq": event.input_seq}
        case ev.ErrorTold():
            body = error(event.kind, event.code, event.message, event.param, event.event_id)
        case _:
            assert_never(event)
    return body


def error(kind: str, code: str, message: str, param: str | None, event_id: str | None) -> Body:
    told: Body = {"type": kind, "code": code, "message": message, "param": param, "event_id": event_id}
    return {"type": "error", "error": told}


def _answering(event_id: str | None) -> Body:
    return {} if event_id is None else {"client_event_id": event_id}


# -- the user's side ---------------------------------------------------------------------------------------------


def user_event(event: UserEvent) -> Body:
    body: Body
    match event:
        case ev.SpeechStarted():
            body = {
                "type": "input_audio_buffer.speech_started",
                "item_id": event.item_id,
                "audio_start_ms": event.audio_start_ms,
            }
        case ev.SpeechStopped():
            body = {
                "type": "input_audio_buffer.speech_stopped",
                "item_id": event.item_id,
                "audio_end_ms": event.audio_end_ms,
            }
        case ev.BufferCommitted():
            body = {
                "type": "input_audio_buffer.committed",
                "item_id": event.item_id,
                "previous_item_id": event.previous_item_id,
            }
        case ev.BufferCleared():
            body = {"type": "input_audio_buffer.cleared"}
        case ev.TranscriptionDone():
            body = {
                "type": "conversation.item.input_audio_transcription.completed",
                "item_id": event.item_id,
                "content_index": 0,
                "transcript": event.transcript,
                "usage": {"type": "duration", "seconds": event.seconds},
            }
        case ev.TranscriptionFailed():
            body = {
                "type": "conversation.item.input_audio_transcription.failed",
                "item_id": event.item_id,
                "content_index": 0,
                "error": {"type": "transcription_error", "code": event.code, "message": event.message},
            }
        case ev.OverlapDecided():
            body = {
                "type": "overlap.decision",
                "action": event.action,
                "reason": event.reason,
                "response_id": event.response_id,
            }
        case ev.PlaybackAcknowledged():
            body = {
                "type": "playback.acknowledged",
                "played_ms": event.played_ms,
                "response_id": event.response_id,
                **_answering(event.event_id),
            }
        case _:
            assert_never(event)
    return body


# -- items -------------------------------------------------------------------------------------------------------


def item_event(event: ItemEvent) -> Body:
    body: Body
    match event:
        case ev.ItemAdded():
            body = {
                "type": "conversation.item.added",
                "previous_item_id": event.previous_item_id,
                "item": item_object(event.item),
            }
        case ev.ItemDone():
            body = {
                "type": "conversation.item.done",
                "previous_item_id": event.previous_item_id,
                "item": item_object(event.item),
            }
        case ev.ItemTruncated():
            body = {
                "type": "conversation.item.truncated",
                "item_id": event.item_id,
                "content_index": event.content_index,
                "audio_end_ms": event.audio_end_ms,
                "transcript": event.text,
            }
        case ev.ItemDeleted():
            body = {"type": "conversation.item.deleted", "item_id": event.item_id}
        case ev.ItemRetrieved():
            body = {"type": "conversation.item.retrieved", "item": item_object(event.item)}
        case ev.ContextDropped():
            body = {"type": "turn.event", "event": "context_dropped", "item_ids": list(event.item_ids)}
        case _:
            assert_never(event)
    return body


def item_object(item: Item) -> Body:
    """A message item; its audio is never sent back, only its transcript (rule R5)."""
    return {
        "id": item.id,
        "object": "realtime.item",
        "type": "message",
        "role": item.role.value,
        "status": item.status.value,
        "content": _content(item),
    }


def _content(item: Item) -> list[Wire]:
    if item.status is ItemStatus.IN_PROGRESS and not item.text:
        return []
    if item.role is Role.ASSISTANT:
        if item.spoken:
            return [{"type": "output_audio", "transcript": item.text}]
        return [{"type": "output_text", "text": item.text}]
    if item.spoken:
        return [{"type": "input_audio", "transcript": item.text}]
    return [{"type": "input_text", "text": item.text}]


# -- responses ---------------------------------------------------------------------------------------------------


def response_event(event: ResponseEvent, session_id: str, settings: Settings) -> Body:
    body: Body
    match event:
        case ev.ResponseCreated():
            body = {"type": "response.created", "response": response_object(event.response, session_id, settings)}
        case ev.ResponseDone():
            body = {"type": "response.done", "response": response_object(event.response, session_id, settings)}
        case ev.OutputItemAdded():
            body = _output_item("response.output_item.added", event.response_id, event.item)
        case ev.OutputItemDone():
            body = _output_item("response.output_item.done", event.response_id, event.item)
        case ev.PartAdded():
            body = _part("response.content_part.added", event.response_id, event.item)
        case ev.PartDone():
            body = _part("response.content_part.done", event.response_id, event.item)
        case ev.TextDelta():
            body = _of_part("response.output_text.delta", event.response_id, event.item_id, {"delta": event.delta})
        case ev.TextDone():
            body = _of_part("response.output_text.done", event.response_id, event.item_id, {"text": event.text})
        case ev.AudioTranscriptDelta():
            extra: Body = {"delta": event.delta}
            body = _of_part("response.output_audio_transcript.delta", event.response_id, event.item_id, extra)
        case ev.AudioTranscriptDone():
            extra = {"transcript": event.transcript}
            body = _of_part("response.output_audio_transcript.done", event.response_id, event.item_id, extra)
        case ev.AudioDone():
            body = _of_part("response.output_audio.done", event.response_id, event.item_id, {})
        case _:
            assert_never(event)
    return body


def _of_part(kind: str, response_id: str, item_id: str, body: Body) -> Body:
    return {"type": kind, "response_id": response_id, "item_id": item_id, **_FIRST, **body}


def _part(kind: str, response_id: str, item: Item) -> Body:
    part: Body = {"type": "audio", "transcript": item.text} if item.spoken else {"type": "text", "text": item.text}
    return _of_part(kind, response_id, item.id, {"part": part})


def _output_item(kind: str, response_id: str, item: Item) -> Body:
    return {"type": kind, "response_id": response_id, "output_index": 0, "item": item_object(item)}


def response_object(response: Response, session_id: str, settings: Settings) -> Body:
    output: Body = {"format": format_object(settings.output_encoding, settings.output_rate_hz)}
    if response.voice or settings.voice:
        output["voice"] = response.voice or settings.voice
    in_progress = response.status is ResponseStatus.IN_PROGRESS
    return {
        "id": response.id,
        "object": "realtime.response",
        "status": response.status.value,
        "status_details": None if in_progress else _status_details(response),
        "output": [] if in_progress or response.item is None else [item_object(response.item)],
        "conversation_id": _conversation_id(session_id) if response.in_conversation else None,
        "output_modalities": [response.modality.value],
        "max_output_tokens": "inf" if settings.max_output_tokens is None else settings.max_output_tokens,
        "audio": {"output": output},
        "usage": None,
        "metadata": dict(response.metadata) or None,
    }


def _conversation_id(session_id: str) -> str:
    return f"conv_{session_id.removeprefix('sess_')}"


def _status_details(response: Response) -> Body:
    details: Body = {"type": response.status.value}
    if response.reason in _GA_REASONS:
        details["reason"] = response.reason
    code = response.error_code or (response.reason if response.reason not in ("", *_GA_REASONS) else "")
    if code:
        kind = "server_error" if response.status is ResponseStatus.FAILED else response.status.value
        details["error"] = {"type": kind, "code": code, "message": response.error_message or code}
    return details
