"""What a conversation session tells its client, one event for each of OpenAI's GA events plus the duplex additions.

The order of events is the core's business (PROTOCOLS: R, I, X rules); a door only names and encodes them. Events that
carry `response_id` of a fenced response are content unless they are terminals.
"""

from omni_live.sessions.items import Item, Response
from omni_live.sessions.payload import Payload
from omni_live.sessions.settings import Settings
from omni_live.sessions.values import value

# -- the session -------------------------------------------------------------------------------------------------


@value
class SessionCreated:
    """The first event of every attachment that is not a resume. Not journaled."""

    session_id: str
    settings: Settings
    attachment: int
    resume_token: str
    expires_at_s: float
    """Seconds until the maximum age, from now."""


@value
class SessionUpdated:
    settings: Settings
    event_id: str | None = None


@value
class SessionResumed:
    """The first event after a resume; replayed events follow. Not journaled."""

    session_id: str
    settings: Settings
    attachment: int
    resume_token: str
    voids: tuple[tuple[int, int], ...]
    """Ranges (first, last) of output sequence numbers the client has not seen and never will: fenced content."""
    input_seq: int
    """The last input sequence number that was taken; the client sends everything after it again."""


@value
class SessionReplaced:
    """Another connection resumed this session; nothing follows on this one. Not journaled."""


@value
class ResyncRequired:
    """Output (first..last) fell out of the journal; the session goes on after it."""

    first: int
    last: int
    reason: str
    """journal_gap or journal_overflow."""
    items: tuple[Item, ...]
    """The conversation as it stands, so that nothing but sound is lost."""


@value
class SessionExpiring:
    """The maximum age is near."""

    seconds_left: float


@value
class SessionClosed:
    """The last event."""

    reason: str


@value
class HeartbeatAcked:
    event_id: str | None


@value
class InputAcked:
    """Client input up to this sequence number was taken. Not journaled; the latest stands for all."""

    input_seq: int


@value
class InputMissing:
    """Input after `input_seq` was skipped: send it again from there. Not journaled."""

    input_seq: int


@value
class ErrorTold:
    """Something the client asked was refused, or went wrong; the session stays open."""

    code: str
    message: str
    event_id: str | None = None
    param: str | None = None
    kind: str = "invalid_request_error"


# -- the user's side ---------------------------------------------------------------------------------------------


@value
class SpeechStarted:
    item_id: str
    audio_start_ms: int


@value
class SpeechStopped:
    item_id: str
    audio_end_ms: int


@value
class BufferCommitted:
    item_id: str
    previous_item_id: str | None


@value
class BufferCleared:
    pass


@value
class TranscriptionDone:
    """conversation.item.input_audio_transcription.completed"""

    item_id: str
    transcript: str
    seconds: float


@value
class TranscriptionFailed:
    item_id: str
    code: str
    message: str


@value
class OverlapDecided:
    """The user spoke during a reply: `hold` (silent for the moment), `drop` (it was nothing, going on), `barge_in`."""

    action: str
    reason: str
    response_id: str


@value
class PlaybackAcknowledged:
    played_ms: float
    response_id: str | None
    event_id: str | None


# -- the conversation --------------------------------------------------------------------------------------------


@value
class ItemAdded:
    item: Item
    previous_item_id: str | None


@value
class ItemDone:
    item: Item
    previous_item_id: str | None


@value
class ItemTruncated:
    item_id: str
    content_index: int
    audio_end_ms: int
    text: str
    """The item's transcript as it stands now."""


@value
class ItemDeleted:
    item_id: str


@value
class ItemRetrieved:
    item: Item


@value
class ContextDropped:
    """The oldest items no longer fit the model's context; they are gone from the conversation."""

    item_ids: tuple[str, ...]


# -- responses ---------------------------------------------------------------------------------------------------


@value
class ResponseCreated:
    response: Response


@value
class OutputItemAdded:
    response_id: str
    item: Item


@value
class PartAdded:
    response_id: str
    item: Item


@value
class TextDelta:
    response_id: str
    item_id: str
    delta: str


@value
class AudioDelta:
    """A piece of the reply: int16 little endian mono at the pipeline's output rate."""

    response_id: str
    item_id: str
    pcm: bytes
    start_sample: int
    epoch: int
    marks: tuple[tuple[int, int], ...] = ()
    """(sample, characters): so much of the transcript has been spoken at that sample of the reply."""


@value
class AudioTranscriptDelta:
    response_id: str
    item_id: str
    delta: str


@value
class AudioDone:
    response_id: str
    item_id: str


@value
class AudioTranscriptDone:
    response_id: str
    item_id: str
    transcript: str


@value
class TextDone:
    response_id: str
    item_id: str
    text: str


@value
class PartDone:
    response_id: str
    item: Item


@value
class OutputItemDone:
    response_id: str
    item: Item


@value
class ResponseDone:
    """The turn's one terminal event; nothing with its response_id follows."""

    response: Response


# -- plain turns -------------------------------------------------------------------------------------------------


@value
class TurnSpoke:
    """One chunk of a plain turn's output."""

    request_id: str
    turn: int
    stage: str
    payload: Payload


@value
class TurnDone:
    """A plain turn's one terminal event."""

    request_id: str
    turn: int
    status: str
    """done, interrupted, failed or incomplete."""
    reason: str


# -- rollouts ----------------------------------------------------------------------------------------------------


@value
class RolloutAt:
    """Where a rollout stands; comes right before the end of each request that could move it, and after a resume."""

    request_id: str
    step: int
    """Number of the last frame; -1 where the rollout has not begun."""


@value
class RolloutSnapshotted:
    """What a rollout is made of, as it stood after frame `step`."""

    request_id: str
    step: int
    state: Payload


Event = (
    SessionCreated
    | SessionUpdated
    | SessionResumed
    | SessionReplaced
    | ResyncRequired
    | SessionExpiring
    | SessionClosed
    | HeartbeatAcked
    | InputAcked
    | InputMissing
    | ErrorTold
    | SpeechStarted
    | SpeechStopped
    | BufferCommitted
    | BufferCleared
    | TranscriptionDone
    | TranscriptionFailed
    | OverlapDecided
    | PlaybackAcknowledged
    | ItemAdded
    | ItemDone
    | ItemTruncated
    | ItemDeleted
    | ItemRetrieved
    | ContextDropped
    | ResponseCreated
    | OutputItemAdded
    | PartAdded
    | TextDelta
    | AudioDelta
    | AudioTranscriptDelta
    | AudioDone
    | AudioTranscriptDone
    | TextDone
    | PartDone
    | OutputItemDone
    | ResponseDone
    | TurnSpoke
    | TurnDone
    | RolloutAt
    | RolloutSnapshotted
)
