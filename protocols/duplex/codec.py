"""The duplex protocol without I/O: a client's frames to session inputs, session events to frames.

One `Decoder` and one `Encoder` belong to one connection. Neither ever raises for what the peer sent: a frame that
cannot be taken comes out as a `Fault`, which the door tells and goes on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from omni_live.protocols import audio
from omni_live.protocols.duplex import server_events as say
from omni_live.protocols.duplex.client_events import READERS, RawAudio, read_event
from omni_live.protocols.duplex.session_object import GA_RATE_HZ, merge
from omni_live.protocols.fields import MAX_INT, Fault, Faulty, Fields, Wire, needed, shown
from omni_live.protocols.frames import dump_json, dump_msgpack, load_json, load_msgpack
from omni_live.sessions import events as ev
from omni_live.sessions.effects import Emit
from omni_live.sessions.inputs import AudioAppended, AudioCommitted, ClientInput, EventAcked, Sequenced
from omni_live.sessions.settings import Settings

MSGPACK_SUBPROTOCOL: Final = "omni-live.duplex.v1+msgpack"
"""Who offers it gets the events as msgpack maps in binary frames, audio as raw bytes."""

HEARS_HZ: Final = 16000
SPEAKS_HZ: Final = 24000
"""The rates of the pipeline behind the door, where nothing else is said."""

Told = ClientInput | Sequenced | Fault
"""What a frame comes to: inputs for the session, in order, or a fault for the client."""


@dataclass(frozen=True, slots=True)
class OpenAsked:
    """The first frame opens a session: with these settings, then these inputs."""

    settings: Settings
    then: tuple[Told, ...] = ()


@dataclass(frozen=True, slots=True)
class ResumeAsked:
    """The first frame takes up a session whose transport was lost."""

    session_id: str
    token: str
    seen: int
    sent: int


def default_settings(model: str) -> Settings:
    """What holds before a client says anything: GA's sample rate on both sides."""
    return Settings(model=model, input_rate_hz=GA_RATE_HZ, output_rate_hz=GA_RATE_HZ)


class Decoder:
    """A client's frames. `binary`: msgpack was agreed on; JSON text frames are taken either way."""

    __slots__ = ("_binary", "_hears_hz", "_resampler")

    def __init__(self, *, binary: bool = False, hears_hz: int = HEARS_HZ) -> None:
        self._binary = binary
        self._hears_hz = hears_hz
        self._resampler: audio.Resampler | None = None

    def first(self, frame: str | bytes, defaults: Settings) -> OpenAsked | ResumeAsked | Fault:
        """What the first frame of a connection without a session asks for."""
        try:
            fields = self._load(frame)
        except Faulty as faulty:
            return faulty.fault
        event_id = None
        try:
            event_id = fields.identifier("event_id")
            kind = _kind(fields)
            if kind == "session.resume":
                return _resume(fields)
            if kind != "session.update":
                return OpenAsked(defaults, tuple(self._read(kind, fields, defaults, event_id)))
            seq = _input_seq(fields)
            settings = merge(defaults, needed(fields, "session", fields.inner("session")))
            fields.done()
        except Faulty as faulty:
            return faulty.about(event_id)
        return OpenAsked(settings, (_taken(seq),) if seq else ())

    def decode(self, frame: str | bytes, settings: Settings) -> list[Told]:
        """What one frame on an open session comes to; `settings` are those in force."""
        try:
            fields = self._load(frame)
        except Faulty as faulty:
            return [faulty.fault]
        event_id = None
        try:
            event_id = fields.identifier("event_id")
            return self._read(_kind(fields), fields, settings, event_id)
        except Faulty as faulty:
            return [faulty.about(event_id)]

    def _load(self, frame: str | bytes) -> Fields:
        if isinstance(frame, str):
            return Fields(load_json(frame))
        if not self._binary:
            raise Faulty("invalid_event", "This connection speaks JSON text frames; binary frames are for msgpack.")
        return Fields(load_msgpack(frame))

    def _read(self, kind: str, fields: Fields, settings: Settings, event_id: str | None) -> list[Told]:
        seq = _input_seq(fields)
        try:
            if kind not in READERS:
                raise _unknown(kind)
            read = read_event(kind, fields, settings, event_id)
            told = self._convert(read) if isinstance(read, RawAudio) else self._with_tail(read, settings)
        except Faulty as faulty:
            fault = faulty.about(event_id)
            # its number is used up all the same, or the session would ask for this frame again and again
            return [_taken(seq), fault] if seq else [fault]
        if seq:
            return [*told[:-1], Sequenced(seq, told[-1])]
        return list(told)

    def _convert(self, raw: RawAudio) -> list[ClientInput]:
        samples = audio.decode(raw.data, raw.encoding)
        if self._resampler is None or self._resampler.rates[0] != raw.rate_hz:
            self._resampler = audio.Resampler(raw.rate_hz, self._hears_hz)
        return [AudioAppended(self._resampler.feed(samples).tobytes())]

    def _with_tail(self, read: ClientInput, settings: Settings) -> list[ClientInput]:
        """A manual commit takes the last milliseconds with it, which are still in the filter."""
        if not isinstance(read, AudioCommitted) or settings.turn_detection is not None or self._resampler is None:
            return [read]
        tail = self._resampler.flush()
        return [AudioAppended(tail.tobytes()), read] if tail.size else [read]


def _kind(fields: Fields) -> str:
    return needed(fields, "type", fields.text("type"))


def _input_seq(fields: Fields) -> int:
    return fields.integer("input_seq", 1, MAX_INT) or 0


def _taken(seq: int) -> Sequenced:
    """Uses up an input number without asking anything of the session."""
    return Sequenced(seq, EventAcked(0))


def _unknown(kind: str) -> Faulty:
    if kind == "session.resume":
        return Faulty("invalid_session_resume", "A resume must be the first frame of a connection.", "type")
    return Faulty("invalid_value", f"Unknown event type {shown(kind)}.", "type")


def _resume(fields: Fields) -> ResumeAsked:
    fields.ignore(("model", "input_seq"))
    asked = ResumeAsked(
        needed(fields, "session_id", fields.identifier("session_id")),
        needed(fields, "resume_token", fields.identifier("resume_token")),
        fields.integer("last_received_server_event_seq") or 0,
        fields.integer("last_sent_input_seq") or 0,
    )
    fields.done()
    return asked


class Encoder:
    """Session events as frames; `facts` are shown under the session object's `omni_live`."""

    __slots__ = (
        "_binary",
        "_count",
        "_facts",
        "_frame_bytes",
        "_session_id",
        "_settings",
        "_speaks_hz",
        "_voice",
        "attachment",
    )

    def __init__(
        self,
        *,
        binary: bool = False,
        frame_bytes: int = 960 * 1024,
        speaks_hz: int = SPEAKS_HZ,
        facts: Mapping[str, Wire] | None = None,
    ) -> None:
        self._binary = binary
        self._frame_bytes = frame_bytes
        self._speaks_hz = speaks_hz
        self._facts: dict[str, Wire] = dict(facts or {})
        self._session_id = ""
        self._settings = Settings()
        self._voice: _Voice | None = None
        self._count = 0
        self.attachment = 0

    def fault(self, fault: Fault, kind: str = "invalid_request_error") -> str | bytes:
        """The error event for a fault."""
        body = say.error(kind, fault.code, fault.message, fault.param, fault.event_id)
        return self._dump(body, self._own_id())

    def frames(self, emit: Emit) -> list[str | bytes]:
        """The frames of one event, mostly one; the last of them carries its sequence number."""
        bodies = self._bodies(emit.event)
        last = len(bodies) - 1
        return [self._numbered(body, emit.seq, index == last, index) for index, body in enumerate(bodies)]

    def _numbered(self, body: dict[str, Wire], seq: int, last: bool, index: int) -> str | bytes:
        if not seq:
            return self._dump(body, self._own_id())
        if last:
            body["server_event_seq"] = seq
            return self._dump(body, f"event_{seq}")
        return self._dump(body, f"event_{seq}_{index}")

    def _own_id(self) -> str:
        self._count += 1
        return f"event_a{self.attachment}_{self._count}"

    def _dump(self, body: dict[str, Wire], event_id: str) -> str | bytes:
        body["event_id"] = event_id
        return dump_msgpack(body) if self._binary else dump_json(body)

    def _bodies(self, event: ev.Event) -> list[dict[str, Wire]]:
        if isinstance(event, ev.AudioDelta):
            return self._sound(event)
        if isinstance(event, ev.AudioDone):
            return [*self._last_sound(event), say.response_event(event, self._session_id, self._settings)]
        if isinstance(event, ev.TurnSpoke | ev.TurnDone | ev.RolloutAt | ev.RolloutSnapshotted):
            return []  # plain turns and rollouts have no words here
        body = self._body(event)
        if isinstance(event, ev.SessionClosed) and event.reason == "max_age":
            expired = "The session has reached its maximum age."
            return [say.error("invalid_request_error", "session_expired", expired, None, None), body]
        return [body]

    def _body(self, event: say.SoundFree | ev.SessionCreated | ev.SessionResumed) -> dict[str, Wire]:
        if isinstance(event, ev.SessionCreated):
            self._attach(event)
            body = say.session_created(event, self._facts)
        elif isinstance(event, ev.SessionResumed):
            self._attach(event)
            body = say.session_resumed(event, self._facts)
        elif isinstance(event, say.SessionEvent):
            if isinstance(event, ev.SessionUpdated):
                self._settings = event.settings
            body = say.session_event(event, self._session_id, self._facts)
        elif isinstance(event, say.UserEvent):
            body = say.user_event(event)
        elif isinstance(event, say.ItemEvent):
            body = say.item_event(event)
        else:
            body = say.response_event(event, self._session_id, self._settings)
        return body

    def _attach(self, event: ev.SessionCreated | ev.SessionResumed) -> None:
        self._session_id = event.session_id
        self._settings = event.settings
        self.attachment = event.attachment

    def _sound(self, event: ev.AudioDelta) -> list[dict[str, Wire]]:
        voice = self._voice
        if voice is None or voice.item_id != event.item_id:
            rate, encoding = self._settings.output_rate_hz, self._settings.output_encoding
            voice = self._voice = _Voice(event, self._speaks_hz, rate, encoding)
        size = (self._frame_bytes - 4096) // 4 * 3
        return voice.speak(event, size)

    def _last_sound(self, event: ev.AudioDone) -> list[dict[str, Wire]]:
        voice, self._voice = self._voice, None
        return voice.end() if voice is not None and voice.item_id == event.item_id else []


class _Voice:
    """The sound of one item on its way into the client's rate and encoding."""

    __slots__ = ("_encoding", "_epoch", "_rate", "_resampler", "_response_id", "_sample", "item_id")

    def __init__(self, first: ev.AudioDelta, speaks_hz: int, rate: int, encoding: str) -> None:
        self.item_id = first.item_id
        self._response_id = first.response_id
        self._epoch = first.epoch
        self._rate = rate
        self._encoding = encoding
        self._resampler = audio.Resampler(speaks_hz, rate)
        self._sample = self._there(first.start_sample)

    def speak(self, event: ev.AudioDelta, size: int) -> list[dict[str, Wire]]:
        """The delta events of one piece, each with at most `size` bytes of sound."""
        self._epoch = event.epoch
        if self._resampler.rates[0] == self._rate and self._encoding == audio.PCM16:
            sound = event.pcm
        else:
            sound = audio.encode(self._resampler.feed(audio.decode(event.pcm, audio.PCM16)), self._encoding)
        marks: list[Wire] = [
            {"audio_end_ms": round(sample * 1000 / self._resampler.rates[0]), "text_chars": chars}
            for sample, chars in event.marks
        ]
        step = size - size % 4
        pieces = [sound[at : at + step] for at in range(0, len(sound), step)] or [b""]
        return [self._delta(piece, marks if piece is pieces[-1] else []) for piece in pieces]

    def end(self) -> list[dict[str, Wire]]:
        tail = self._resampler.flush()
        return [self._delta(audio.encode(tail, self._encoding), [])] if tail.size else []

    def _there(self, sample: int) -> int:
        """A position of the pipeline's as one of the client's."""
        return round(sample * self._rate / self._resampler.rates[0])

    def _delta(self, sound: bytes, marks: list[Wire]) -> dict[str, Wire]:
        samples = len(sound) // audio.bytes_per_sample(self._encoding)
        start, self._sample = self._sample, self._sample + samples
        return {
            "type": "response.output_audio.delta",
            "response_id": self._response_id,
            "item_id": self.item_id,
            "output_index": 0,
            "content_index": 0,
            "delta": sound,
            "format": self._encoding,
            "sample_rate_hz": self._rate,
            "metadata": {
                "epoch": self._epoch,
                "start_sample": start,
                "audio_duration_ms": samples * 1000 / self._rate,
                "audio_text_marks": marks,
            },
        }
