"""One of each session event, as a conversation tells it."""

from omni_live.protocols.duplex import default_settings
from omni_live.sessions import events as ev
from omni_live.sessions.items import Item, ItemStatus, Modality, Response, ResponseStatus, Role
from omni_live.sessions.settings import Settings

SETTINGS: Settings = default_settings("voice")
USER = Item("item_1", Role.USER, "hello there", spoken=True, audio_ms=900)
TYPED = Item("item_2", Role.USER, "hello", spoken=False)
SYSTEM = Item("item_3", Role.SYSTEM, "be kind", spoken=False)
OPENED = Item("item_4", Role.ASSISTANT, "", spoken=True, status=ItemStatus.IN_PROGRESS)
SPOKEN = Item("item_4", Role.ASSISTANT, "good day", spoken=True, audio_ms=1200)
CUT = Item("item_4", Role.ASSISTANT, "good", spoken=True, status=ItemStatus.INCOMPLETE, audio_ms=400)
WRITTEN = Item("item_5", Role.ASSISTANT, "good day", spoken=False)


def response(status: ResponseStatus, item: Item | None = None, reason: str = "", error_code: str = "") -> Response:
    return Response(
        "resp_1", 1, status, Modality.AUDIO, item, reason, error_code, metadata={"client_event_id": "e7"}, voice="amber"
    )


EVENTS: tuple[ev.Event, ...] = (
    ev.SessionCreated("sess_1", SETTINGS, 1, "token_1", 86_400.0),
    ev.SessionUpdated(SETTINGS, "e1"),
    ev.SessionResumed("sess_1", SETTINGS, 2, "token_2", ((3, 5), (9, 9)), 17),
    ev.SessionReplaced(),
    ev.ResyncRequired(4, 9, "journal_overflow", (USER, SPOKEN)),
    ev.SessionExpiring(60.0),
    ev.SessionClosed("idle"),
    ev.SessionClosed("max_age"),
    ev.HeartbeatAcked("e2"),
    ev.HeartbeatAcked(None),
    ev.InputAcked(12),
    ev.InputMissing(12),
    ev.ErrorTold("response_cancel_not_active", "Cancellation failed: no active response found.", "e3"),
    ev.ErrorTold("invalid_value", "No.", "e3", "session.model"),
    ev.SpeechStarted("item_1", 300),
    ev.SpeechStopped("item_1", 1200),
    ev.BufferCommitted("item_1", None),
    ev.BufferCommitted("item_2", "item_1"),
    ev.BufferCleared(),
    ev.TranscriptionDone("item_1", "hello there", 0.9),
    ev.TranscriptionFailed("item_1", "stage_error", "The transcription failed."),
    ev.OverlapDecided("hold", "speech", "resp_1"),
    ev.PlaybackAcknowledged(120.5, "resp_1", "e4"),
    ev.ItemAdded(USER, None),
    ev.ItemAdded(OPENED, "item_1"),
    ev.ItemDone(TYPED, "item_1"),
    ev.ItemDone(SYSTEM, None),
    ev.ItemDone(WRITTEN, None),
    ev.ItemTruncated("item_4", 0, 400, "good"),
    ev.ItemDeleted("item_4"),
    ev.ItemRetrieved(CUT),
    ev.ContextDropped(("item_1", "item_2")),
    ev.ResponseCreated(response(ResponseStatus.IN_PROGRESS, OPENED)),
    ev.OutputItemAdded("resp_1", OPENED),
    ev.PartAdded("resp_1", OPENED),
    ev.PartAdded("resp_1", WRITTEN),
    ev.TextDelta("resp_1", "item_5", "good"),
    ev.AudioDelta("resp_1", "item_4", b"\x01\x00" * 4800, 0, 3, ((2400, 4), (4800, 8))),
    ev.AudioTranscriptDelta("resp_1", "item_4", "good"),
    ev.AudioDone("resp_1", "item_4"),
    ev.AudioTranscriptDone("resp_1", "item_4", "good day"),
    ev.TextDone("resp_1", "item_5", "good day"),
    ev.PartDone("resp_1", SPOKEN),
    ev.OutputItemDone("resp_1", SPOKEN),
    ev.ResponseDone(response(ResponseStatus.COMPLETED, SPOKEN)),
    ev.ResponseDone(response(ResponseStatus.CANCELLED, CUT, "turn_detected")),
    ev.ResponseDone(response(ResponseStatus.CANCELLED, None, "client_cancelled")),
    ev.ResponseDone(response(ResponseStatus.CANCELLED, None, "drained")),
    ev.ResponseDone(response(ResponseStatus.INCOMPLETE, CUT, "max_output_tokens")),
    ev.ResponseDone(response(ResponseStatus.INCOMPLETE, CUT, "repetition")),
    ev.ResponseDone(response(ResponseStatus.FAILED, CUT, "", "replica_lost")),
)
