"""The record of a conversation as its client saw it: what was sent when, what came when, what was played when.

All times are the client's monotonic nanoseconds, all positions samples from the start of the utterance or the reply.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from omni_live.clients.clock import MS, S
from omni_live.clients.duplex_events import (
    Committed,
    Event,
    Heard,
    NotHeard,
    OverlapDecision,
    ReplyEnded,
    ReplyStarted,
    Sound,
    SpeechStarted,
    SpeechStopped,
    Words,
)
from omni_live.clients.jitter import Pcm
from omni_live.clients.playback import SILENT, Gap, Player, Reply, silences


@dataclass(frozen=True, slots=True)
class Utterance:
    """Something to be said: 16-bit mono at the session's input rate."""

    name: str
    pcm: Pcm
    speech_start: int
    """The first sample of speech."""
    speech_end: int
    """The sample behind the last one of speech."""
    text: str = ""
    """What is said, where that is known."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A block of an utterance, when it was handed to the session."""

    at_ns: int
    start: int
    samples: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A piece of a reply's sound, when its frame was read."""

    at_ns: int
    start: int
    """UNKNOWN (-1) where the server does not say."""
    samples: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What the server made of speech during a reply."""

    at_ns: int
    action: str
    reason: str
    response_id: str


@dataclass(frozen=True, slots=True)
class ReplyReport:
    response_id: str
    text: str
    status: str
    """completed, cancelled, incomplete or failed; empty where no terminal came."""
    reason: str
    rate_hz: int
    created_ns: int
    ended_ns: int | None
    arrivals: tuple[Arrival, ...]
    received: int
    played: int
    discarded: int
    """Samples that came but were cut off."""
    after_end: int
    """Samples that came after the terminal. The server promises none."""
    missing: int
    """Samples lost between server and client."""
    first_played_ns: int | None
    first_audible_ns: int | None
    """When the first sample that is not silence was played; None also where replies are not recorded."""
    last_played_ns: int | None
    """When the last sample had been played."""
    gaps: tuple[Gap, ...]
    silences: tuple[tuple[int, int], ...]
    """(first sample, samples) of each silent stretch in what came; empty where replies are not recorded."""

    @property
    def played_ms(self) -> float:
        return self.played * 1000 / self.rate_hz


@dataclass(frozen=True, slots=True)
class TurnReport:
    """One utterance and what came of it."""

    index: int
    source: str
    said: str
    """What was said, where that is known beforehand."""
    heard: str
    """What the server understood."""
    started_ns: int
    speech_start_ns: int | None
    """When the first sample of speech passed the microphone."""
    speech_end_ns: int | None
    """When the last one did, on the microphone's own count of samples."""
    sent: tuple[Sent, ...]
    speech_started_ns: int | None
    """When the server said that somebody speaks."""
    committed_ns: int | None
    decisions: tuple[Decision, ...]
    replies: tuple[ReplyReport, ...]
    interrupts: str
    """The response that this utterance was to interrupt; empty for none."""
    stop_ms: float | None
    """From the first sample of this utterance's speech to the last one played of the reply that it interrupted."""
    timed_out: bool

    @property
    def answered(self) -> str:
        return " ".join(reply.text.strip() for reply in self.replies if reply.text.strip())

    @property
    def interrupted(self) -> bool:
        return any(reply.status == "cancelled" or reply.discarded for reply in self.replies)

    @property
    def underruns(self) -> int:
        return sum(len(reply.gaps) for reply in self.replies)

    @property
    def first_audio_ns(self) -> int | None:
        """When the first sound of a reply arrived."""
        return min((reply.arrivals[0].at_ns for reply in self.replies if reply.arrivals), default=None)

    @property
    def v2v_ms(self) -> float | None:
        """Voice to voice: from the last sample of speech to the arrival of the reply's first sound."""
        return self._after_speech_ms(self.first_audio_ns)

    @property
    def v2v_played_ms(self) -> float | None:
        """Voice to voice as a listener has it: to the first sample played that is not silence."""
        audible = [reply.first_audible_ns for reply in self.replies if reply.first_audible_ns is not None]
        return self._after_speech_ms(min(audible, default=None))

    def _after_speech_ms(self, at_ns: int | None) -> float | None:
        if at_ns is None or self.speech_end_ns is None:
            return None
        return (at_ns - self.speech_end_ns) / MS


@dataclass(slots=True)
class _Reply:
    response_id: str
    created_ns: int
    text: str = ""
    status: str = ""
    reason: str = ""
    ended_ns: int | None = None
    arrivals: list[Arrival] = field(default_factory=list)
    after_end: int = 0


@dataclass(slots=True)
class Turn:
    """A turn that is still being recorded."""

    index: int
    source: str
    said: str
    started_ns: int
    speech_start_ns: int | None = None
    speech_end_ns: int | None = None
    interrupts: str = ""
    timed_out: bool = False
    sent: list[Sent] = field(default_factory=list)
    speech_started_ns: int | None = None
    committed_ns: int | None = None
    last_ns: int = 0
    """The last thing that happened in it."""
    heard: dict[str, str | None] = field(default_factory=dict)
    """Transcripts by item, None while one is awaited."""
    decisions: list[Decision] = field(default_factory=list)
    replies: list[_Reply] = field(default_factory=list)

    @property
    def answering(self) -> bool:
        return any(reply.ended_ns is None for reply in self.replies)

    @property
    def answered(self) -> bool:
        """Whether a reply came to its end without being interrupted."""
        return any(reply.status not in ("", "cancelled") for reply in self.replies)

    @property
    def transcribing(self) -> bool:
        return None in self.heard.values()

    @property
    def waved_off(self) -> bool:
        """Whether it turned out to be no turn at all: an acknowledgement, an echo."""
        return bool(self.decisions) and self.decisions[-1].action == "drop" and self.speech_started_ns is None


class Conversation:
    """Takes a session's events and puts each with the turn it belongs to.

    What the user says belongs to the turn begun last; what the server answers, to the turn that was on when the
    response was created.
    """

    def __init__(self, player: Player) -> None:
        self.turns: list[Turn] = []
        self.speaking = False
        """Whether the server takes the user for speaking."""
        self._player = player
        self._replies: dict[str, tuple[Turn, _Reply]] = {}
        self._items: dict[str, Turn] = {}

    @property
    def turn(self) -> Turn | None:
        return self.turns[-1] if self.turns else None

    def turn_of(self, name: str) -> Turn | None:
        """The turn of a response or of a user's item; None for one that belongs to none."""
        answered = self._replies.get(name)
        return answered[0] if answered else self._items.get(name)

    def begin(self, source: str, at_ns: int, said: str = "") -> Turn:
        turn = Turn(len(self.turns) + 1, source, said, at_ns, last_ns=at_ns)
        self.turns.append(turn)
        return turn

    def take(self, event: Event) -> None:
        turn = self.turn
        if turn is None:
            return
        turn.last_ns = event.at_ns
        match event:
            case SpeechStarted() | SpeechStopped() | Committed() | Heard() | NotHeard():
                self._user(turn, event)
            case OverlapDecision():
                turn.decisions.append(Decision(event.at_ns, event.action, event.reason, event.response_id))
            case ReplyStarted():
                self._started(turn, event)
            case Words() | Sound() | ReplyEnded():
                self._reply(event)
            case _:
                pass

    def _user(self, turn: Turn, event: SpeechStarted | SpeechStopped | Committed | Heard | NotHeard) -> None:
        turn = self._items.setdefault(event.item_id, turn)
        match event:
            case SpeechStarted():
                self.speaking = True
                turn.speech_started_ns = turn.speech_started_ns or event.at_ns
            case SpeechStopped():
                self.speaking = False
            case Committed():
                self.speaking = False
                turn.committed_ns = event.at_ns
                turn.heard.setdefault(event.item_id, None)
            case Heard():
                turn.heard[event.item_id] = event.transcript.strip()
            case NotHeard():
                turn.heard[event.item_id] = ""

    def _started(self, turn: Turn, event: ReplyStarted) -> None:
        reply = _Reply(event.response_id, event.at_ns)
        turn.replies.append(reply)
        self._replies[event.response_id] = (turn, reply)

    def _reply(self, event: Words | Sound | ReplyEnded) -> None:
        if event.response_id not in self._replies:
            return
        turn, reply = self._replies[event.response_id]
        turn.last_ns = event.at_ns
        match event:
            case Words():
                reply.text += event.text
            case Sound():
                samples = len(event.pcm) // 2
                reply.arrivals.append(Arrival(event.at_ns, event.start_sample, samples))
                reply.after_end += samples if reply.ended_ns is not None else 0
            case ReplyEnded():
                reply.status, reply.reason, reply.ended_ns = event.status, event.reason, event.at_ns

    # -- reports -------------------------------------------------------------------------------------------------

    def report(self, turn: Turn) -> TurnReport:
        """The turn as it stands."""
        replies = tuple(self._reply_report(reply) for reply in turn.replies)
        return TurnReport(
            index=turn.index,
            source=turn.source,
            said=turn.said,
            heard=" ".join(text for text in turn.heard.values() if text),
            started_ns=turn.started_ns,
            speech_start_ns=turn.speech_start_ns,
            speech_end_ns=turn.speech_end_ns,
            sent=tuple(turn.sent),
            speech_started_ns=turn.speech_started_ns,
            committed_ns=turn.committed_ns,
            decisions=tuple(turn.decisions),
            replies=replies,
            interrupts=turn.interrupts,
            stop_ms=self._stop_ms(turn),
            timed_out=turn.timed_out,
        )

    def _stop_ms(self, turn: Turn) -> float | None:
        played = self._player.replies.get(turn.interrupts)
        if played is None or not played.cut or not played.spans or turn.speech_start_ns is None:
            return None
        return (self._last_ns(played) - turn.speech_start_ns) / MS

    def _last_ns(self, played: Reply) -> int:
        last = played.spans[-1]
        return last.at_ns + last.samples * S // self._player.rate_hz

    def _reply_report(self, reply: _Reply) -> ReplyReport:
        rate_hz = self._player.rate_hz
        played = self._player.replies.get(reply.response_id)
        sound = played.sound() if played else np.zeros(0, np.int16)
        loud = np.flatnonzero(np.abs(sound.astype(np.int32)) > SILENT)
        return ReplyReport(
            response_id=reply.response_id,
            text=reply.text,
            status=reply.status,
            reason=reply.reason,
            rate_hz=rate_hz,
            created_ns=reply.created_ns,
            ended_ns=reply.ended_ns,
            arrivals=tuple(reply.arrivals),
            received=sum(arrival.samples for arrival in reply.arrivals),
            played=played.played if played else 0,
            discarded=played.discarded if played else 0,
            after_end=reply.after_end,
            missing=played.buffer.missing if played else 0,
            first_played_ns=played.spans[0].at_ns if played and played.spans else None,
            first_audible_ns=played.played_at_ns(int(loud[0]), rate_hz) if played and len(loud) else None,
            last_played_ns=self._last_ns(played) if played and played.spans else None,
            gaps=tuple(played.gaps) if played else (),
            silences=tuple(silences(sound, rate_hz)),
        )


def _ms(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def as_json(report: TurnReport) -> Mapping[str, object]:
    """The report as plain values. Times are milliseconds from the start of the turn, where not said otherwise."""

    def since(at_ns: int | None) -> float | None:
        return None if at_ns is None else round((at_ns - report.started_ns) / MS, 1)

    return {
        "turn": report.index,
        "source": report.source,
        "said": report.said,
        "heard": report.heard,
        "answered": report.answered,
        "v2v_ms": _ms(report.v2v_ms),
        "v2v_played_ms": _ms(report.v2v_played_ms),
        "stop_ms": _ms(report.stop_ms),
        "underruns": report.underruns,
        "interrupted": report.interrupted,
        "interrupts": report.interrupts,
        "timed_out": report.timed_out,
        "started_monotonic_ns": report.started_ns,
        "speech_start_ms": since(report.speech_start_ns),
        "speech_end_ms": since(report.speech_end_ns),
        "speech_started_ms": since(report.speech_started_ns),
        "committed_ms": since(report.committed_ns),
        "decisions": [
            {"at_ms": since(one.at_ns), "action": one.action, "reason": one.reason, "response_id": one.response_id}
            for one in report.decisions
        ],
        "replies": [
            {
                "response_id": reply.response_id,
                "status": reply.status,
                "reason": reply.reason,
                "text": reply.text,
                "created_ms": since(reply.created_ns),
                "ended_ms": since(reply.ended_ns),
                "first_played_ms": since(reply.first_played_ns),
                "first_audible_ms": since(reply.first_audible_ns),
                "last_played_ms": since(reply.last_played_ns),
                "received_ms": _ms(reply.received * 1000 / reply.rate_hz),
                "played_ms": _ms(reply.played_ms),
                "discarded_ms": _ms(reply.discarded * 1000 / reply.rate_hz),
                "after_end_samples": reply.after_end,
                "missing_samples": reply.missing,
                "underruns_ms": [_ms(gap.samples * 1000 / reply.rate_hz) for gap in reply.gaps],
                "arrivals": [[since(one.at_ns), one.start, one.samples] for one in reply.arrivals],
            }
            for reply in report.replies
        ],
    }
