"""What a duplex session tells its client, as far as a client acts on it; everything else arrives as `Other`.

Each event carries `at_ns`, the client's monotonic time when its frame was read. Times and positions of sound are in
samples or milliseconds of media, never of arrival.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from omni_live.clients.duplex_wire import Fields

GA_RATE_HZ = 24_000
"""The rate of sound whose event names none."""

UNKNOWN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsUpdated(Event):
    """The server took a session.update; `session` is the whole of the settings as it shows them."""

    session: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Detached(Event):
    """The socket is gone; the client is trying to get back. Input is kept meanwhile."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reattached(Event):
    """The session goes on over a new socket."""

    attachment: int
    away_ms: float
    voids: tuple[tuple[int, int], ...]
    """Ranges of output numbers that will never come: content of interrupted replies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLost(Event):
    """Microphone audio that did not fit the buffer any more, the oldest first; the server will not hear it."""

    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resync(Event):
    """Output first..last fell out of the server's journal: its sound is lost, the conversation is not."""

    reason: str
    first: int
    last: int
    items: tuple[Mapping[str, object], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expiring(Event):
    """The session's maximum age is near."""

    seconds_left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed(Event):
    """The last event."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal(Event):
    """The server refused something, or something went wrong; the session stays open.

    `event_id` is that of the client event which is meant.
    """

    code: str
    message: str
    event_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechStarted(Event):
    item_id: str
    audio_start_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechStopped(Event):
    item_id: str
    audio_end_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(Event):
    """The user's turn is over."""

    item_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard(Event):
    """What the user said, as the server understood it."""

    item_id: str
    transcript: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NotHeard(Event):
    item_id: str
    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapDecision(Event):
    """The user speaks during a reply: `hold` (pause it), `drop` (it was nothing, go on) or `barge_in` (discard it)."""

    action: str
    reason: str
    response_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyStarted(Event):
    response_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sound(Event):
    """A piece of a reply: int16 little endian mono."""

    response_id: str
    item_id: str
    pcm: bytes
    rate_hz: int
    start_sample: int
    """Position in the reply, counted at `rate_hz`; UNKNOWN where the server does not say."""

    @property
    def samples(self) -> int:
        return len(self.pcm) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundEnded(Event):
    """No more sound of this reply will come."""

    response_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Words(Event):
    """A piece of a reply's text: of its transcript if it is spoken."""

    response_id: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyEnded(Event):
    """A reply's one terminal: completed, cancelled, incomplete or failed; nothing of it follows."""

    response_id: str
    status: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncated(Event):
    """The conversation keeps only so much of an item."""

    item_id: str
    audio_end_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Other(Event):
    """Any other event, as it came."""

    type: str
    fields: Mapping[str, object]


def _other(at_ns: int, frame: Fields) -> Event:
    return Other(at_ns=at_ns, type=frame.type, fields=frame.values)


def _updated(at_ns: int, frame: Fields) -> Event:
    return SettingsUpdated(at_ns=at_ns, session=frame.fields("session").values)


def _closed(at_ns: int, frame: Fields) -> Event:
    return Closed(at_ns=at_ns, reason=frame.text("reason"))


def _resync(at_ns: int, frame: Fields) -> Event:
    items = tuple(item.values for item in frame.several("items"))
    first, last = frame.integer("first"), frame.integer("last")
    return Resync(at_ns=at_ns, reason=frame.text("reason"), first=first, last=last, items=items)


def _turn_event(at_ns: int, frame: Fields) -> Event:
    if frame.text("event") != "session_expiring":
        return _other(at_ns, frame)
    return Expiring(at_ns=at_ns, seconds_left=frame.number("seconds_left"))


def _refusal(at_ns: int, frame: Fields) -> Event:
    error = frame.fields("error")
    code = error.text("code") or error.text("type")
    return Refusal(at_ns=at_ns, code=code, message=error.text("message"), event_id=error.text("event_id"))


def _speech_started(at_ns: int, frame: Fields) -> Event:
    return SpeechStarted(at_ns=at_ns, item_id=frame.text("item_id"), audio_start_ms=frame.integer("audio_start_ms"))


def _speech_stopped(at_ns: int, frame: Fields) -> Event:
    return SpeechStopped(at_ns=at_ns, item_id=frame.text("item_id"), audio_end_ms=frame.integer("audio_end_ms"))


def _committed(at_ns: int, frame: Fields) -> Event:
    return Committed(at_ns=at_ns, item_id=frame.text("item_id"))


def _heard(at_ns: int, frame: Fields) -> Event:
    return Heard(at_ns=at_ns, item_id=frame.text("item_id"), transcript=frame.text("transcript"))


def _not_heard(at_ns: int, frame: Fields) -> Event:
    error = frame.fields("error")
    return NotHeard(at_ns=at_ns, item_id=frame.text("item_id"), code=error.text("code"), message=error.text("message"))


def _overlap(at_ns: int, frame: Fields) -> Event:
    action, reason = frame.text("action"), frame.text("reason")
    return OverlapDecision(at_ns=at_ns, action=action, reason=reason, response_id=frame.text("response_id"))


def _reply_started(at_ns: int, frame: Fields) -> Event:
    return ReplyStarted(at_ns=at_ns, response_id=frame.fields("response").text("id"))


def _sound(at_ns: int, frame: Fields) -> Event:
    return Sound(
        at_ns=at_ns,
        response_id=frame.text("response_id"),
        item_id=frame.text("item_id"),
        pcm=frame.sound("delta"),
        rate_hz=frame.integer("sample_rate_hz", GA_RATE_HZ),
        start_sample=frame.fields("metadata").integer("start_sample", UNKNOWN),
    )


def _sound_ended(at_ns: int, frame: Fields) -> Event:
    return SoundEnded(at_ns=at_ns, response_id=frame.text("response_id"))


def _words(at_ns: int, frame: Fields) -> Event:
    return Words(at_ns=at_ns, response_id=frame.text("response_id"), text=frame.text("delta"))


def _reply_ended(at_ns: int, frame: Fields) -> Event:
    response = frame.fields("response")
    details = response.fields("status_details")
    reason = details.text("reason") or details.fields("error").text("code")
    return ReplyEnded(at_ns=at_ns, response_id=response.text("id"), status=response.text("status"), reason=reason)


def _truncated(at_ns: int, frame: Fields) -> Event:
    return Truncated(at_ns=at_ns, item_id=frame.text("item_id"), audio_end_ms=frame.integer("audio_end_ms"))


READERS: Mapping[str, Callable[[int, Fields], Event]] = {
    "session.updated": _updated,
    "session.closed": _closed,
    "session.resync_required": _resync,
    "turn.event": _turn_event,
    "error": _refusal,
    "input_audio_buffer.speech_started": _speech_started,
    "input_audio_buffer.speech_stopped": _speech_stopped,
    "input_audio_buffer.committed": _committed,
    "conversation.item.input_audio_transcription.completed": _heard,
    "conversation.item.input_audio_transcription.failed": _not_heard,
    "overlap.decision": _overlap,
    "response.created": _reply_started,
    "response.output_audio.delta": _sound,
    "response.output_audio.done": _sound_ended,
    "response.output_audio_transcript.delta": _words,
    "response.output_text.delta": _words,
    "response.done": _reply_ended,
    "conversation.item.truncated": _truncated,
}


def read(frame: Fields, at_ns: int) -> Event:
    """The event that a frame holds; raises BadFrame."""
    return READERS.get(frame.type, _other)(at_ns, frame)
