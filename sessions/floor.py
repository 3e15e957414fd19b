"""Who has the floor: what the ears' findings mean while nobody, the user, or the reply is speaking.

The floor turns findings into decisions; the conversation carries them out. Its rules:

- Speech while no reply plays is the user's turn. At a short pause the turn is tried tentatively; the longer the pause
  and the more finished the sentence, the surer it is over (`TurnDetection`).
- Speech during a reply is first nothing. After `hold_ms` the reply is held; if the speech ends before `short_ack_ms`
  the reply goes on and the speech was an acknowledgement; else it interrupts, and all of it is the next turn.
  Where speech must not interrupt, the reply is never held, and the longer speech is the next turn all the same.
- During a reply, speech far under the user's usual level is the reply's own echo and counts for nothing.
"""

from dataclasses import dataclass

from omni_live.sessions.findings import Finding, Heard, SpeechBegan, SpeechFaded, SpeechPaused, SpeechWent
from omni_live.sessions.settings import Overlap, TurnDetection

# -- decisions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the client that the user speaks."""

    utterance: int
    start: int


@dataclass(frozen=True, slots=True)
class HoldReply:
    utterance: int


@dataclass(frozen=True, slots=True)
class GoOnReply:
    reason: str


@dataclass(frozen=True, slots=True)
class Interrupt:
    """The speech is an interruption; `Announce` comes with it."""

    utterance: int
    start: int


@dataclass(frozen=True, slots=True)
class Try:
    """Start the turn tentatively on this transcript."""

    utterance: int
    text: str


@dataclass(frozen=True, slots=True)
class GiveUpTry:
    """The user went on: the tentative turn never was."""

    utterance: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The user's turn is over; `heard` is None where the transcript is still to come."""

    utterance: int
    end: int
    heard: Heard | None


@dataclass(frozen=True, slots=True)
class Forget:
    """The utterance was no turn; `announced` says whether the client was told of it."""

    utterance: int
    announced: bool
    end: int


@dataclass(frozen=True, slots=True)
class Transcribed:
    """The transcript of a committed utterance."""

    heard: Heard


Decision = Announce | HoldReply | GoOnReply | Interrupt | Try | GiveUpTry | Commit | Forget | Transcribed

LET_GO_MS = 256
"""Silence after which a held reply goes on: longer than the gaps inside a phrase."""

UNFINISHED = 0.4
FINISHED = 0.7
"""Measured on speech with pauses put in: between these scores pauses in the midst and true ends overlap."""

USUAL_WEIGHT = 0.3
"""How much the latest utterance counts for the user's usual level."""


@dataclass(slots=True)
class Speech:
    """The utterance under way."""

    utterance: int
    start: int
    overlap: bool
    """It began during a reply, and nobody decided yet what it is."""
    at: int
    voiced: int = 0
    loud: int = 0
    """Voiced samples at or above the echo level."""
    end: int = 0
    silence: int = 0
    frames: int = 0
    level_db: float = 0.0
    """The mean over the voiced frames."""
    announced: bool = False
    held: bool = False
    heard: Heard | None = None
    tried: str | None = None


class Floor:
    """Counts in samples of the pipeline's input rate. `playing` is asked for at each finding: is a reply audible?"""

    def __init__(self, rate_hz: int, detection: TurnDetection | None, overlap: Overlap) -> None:
        self._per_ms = rate_hz // 1000
        self.detection = detection
        self.overlap = overlap
        self.usual_db: float | None = None
        self._speech: Speech | None = None
        self._committed: dict[int, int] = {}
        """Utterances whose transcript is still to come, each with the end of its speech."""
        self._answered = 0
        """The latest utterance whose transcript is known: whatever else comes of it is a repetition."""

    @property
    def speaking(self) -> bool:
        """Whether the user has the floor: an announced utterance is under way."""
        return self._speech is not None and self._speech.announced

    def take(self, finding: Finding, playing: bool) -> list[Decision]:
        match finding:
            case SpeechBegan():
                return self._began(finding, playing)
            case SpeechWent():
                return self._went(finding, playing)
            case SpeechPaused():
                return self._paused(finding, playing)
            case SpeechFaded():
                return self._faded(finding)
            case Heard():
                return self._heard(finding)

    def reset(self) -> None:
        """The utterance under way was taken away; transcripts of earlier ones still come."""
        self._speech = None

    def lost(self) -> None:
        """The ears are gone with everything they were about to say."""
        self._speech = None
        self._committed.clear()

    # -- findings ------------------------------------------------------------------------------------------------

    def _began(self, finding: SpeechBegan, playing: bool) -> list[Decision]:
        decisions = self._closed(None)
        speech = Speech(finding.utterance, finding.start, overlap=playing, at=finding.start)
        self._speech = speech
        if self.detection is None or playing:
            return decisions
        return decisions + self._announce(speech)

    def _went(self, finding: SpeechWent, playing: bool) -> list[Decision]:
        speech = self._speech
        if speech is None or speech.utterance != finding.utterance or self.detection is None:
            return []
        step = max(0, finding.voiced - speech.voiced - speech.silence)
        speech.voiced, speech.at, speech.end, speech.silence = finding.voiced, finding.at, finding.at, 0
        speech.frames += 1
        speech.level_db += (finding.level_db - speech.level_db) / speech.frames
        if speech.overlap:
            return self._overlapped(speech, finding.level_db, step, playing)
        if speech.tried is not None:
            speech.tried = None
            return [GiveUpTry(speech.utterance)]
        return []

    def _overlapped(self, speech: Speech, level_db: float, step: int, playing: bool) -> list[Decision]:
        rules = self.overlap
        if self.usual_db is None or level_db >= self.usual_db - rules.echo_margin_db:
            speech.loud += step
        if not playing:
            return self._outlived(speech) if speech.loud else []
        interrupts = not rules.listen_only and self.detection is not None and self.detection.interrupt_response
        loud_ms = speech.loud // self._per_ms
        if speech.loud and loud_ms >= rules.short_ack_ms:
            speech.overlap = speech.held = False
            speech.announced = True
            named = Interrupt if interrupts else Announce
            return [named(speech.utterance, speech.start)]
        if interrupts and rules.hold_ms and loud_ms >= rules.hold_ms and not speech.held:
            speech.held = True
            return [HoldReply(speech.utterance)]
        return []

    def _outlived(self, speech: Speech) -> list[Decision]:
        """The reply ended before it was decided what the speech is: it is the user's turn."""
        speech.overlap = False
        held, speech.held = speech.held, False
        return ([GoOnReply("reply_over")] if held else []) + self._announce(speech)

    def _paused(self, finding: SpeechPaused, playing: bool) -> list[Decision]:
        speech = self._speech
        if speech is None or speech.utterance != finding.utterance or self.detection is None:
            return []
        speech.end, speech.silence = finding.end, finding.silence
        if not speech.overlap:
            return self._judge(speech)
        if not playing and speech.loud:
            return self._outlived(speech) + self._judge(speech)
        decisions: list[Decision] = []
        silence_ms = speech.silence // self._per_ms
        if speech.held and silence_ms >= LET_GO_MS:
            speech.held = False
            decisions.append(GoOnReply("short_ack"))
        if silence_ms >= self.detection.silence_duration_ms:
            self._speech = None
            decisions.append(Forget(speech.utterance, False, speech.end))
        return decisions

    def _faded(self, finding: SpeechFaded) -> list[Decision]:
        speech = self._speech
        if speech is None or speech.utterance != finding.utterance:
            return []
        self._speech = None
        decisions: list[Decision] = [GoOnReply("faded")] if speech.held else []
        if speech.tried is not None:
            decisions.append(GiveUpTry(speech.utterance))
        if speech.announced:
            decisions.append(Forget(speech.utterance, True, speech.end))
        return decisions

    def _heard(self, finding: Heard) -> list[Decision]:
        end = self._committed.get(finding.utterance)
        if end is not None and not finding.final and finding.end < end:
            return []  # it does not cover what was said; the one that does is under way
        speech = self._speech
        if end is not None or speech is None or speech.utterance != finding.utterance:
            fresh = end is not None or (finding.final and finding.utterance > self._answered)
            self._committed.pop(finding.utterance, None)
            self._answered = max(self._answered, finding.utterance if fresh else 0)
            return [Transcribed(finding)] if fresh else []
        if finding.final:  # the ears closed it: it was as long as an utterance may be
            return self._closed(finding)
        speech.heard = finding
        if speech.overlap or not speech.announced or not speech.silence or self.detection is None:
            return []
        decisions: list[Decision] = []
        if finding.text and finding.end >= speech.end and self.detection.speculative_ms and speech.tried is None:
            speech.tried = finding.text
            decisions.append(Try(speech.utterance, finding.text))
        return decisions + self._judge(speech)

    # -- rules ---------------------------------------------------------------------------------------------------

    def _announce(self, speech: Speech) -> list[Decision]:
        speech.announced = True
        return [Announce(speech.utterance, speech.start)]

    def _judge(self, speech: Speech) -> list[Decision]:
        """Whether the pause ends the turn."""
        detection = self.detection
        if detection is None or not speech.announced:
            return []
        heard = speech.heard if speech.heard is not None and speech.heard.end >= speech.end else None
        if speech.silence < patience_ms(detection, heard) * self._per_ms:
            return []
        return self._end(speech, heard)

    def _closed(self, heard: Heard | None) -> list[Decision]:
        """The ears closed the utterance under way by themselves."""
        speech = self._speech
        if speech is None or self.detection is None:
            return []
        if speech.announced:
            return self._end(speech, heard)
        self._speech = None
        let_go: list[Decision] = [GoOnReply("faded")] if speech.held else []
        return [*let_go, Forget(speech.utterance, False, speech.end)]

    def _end(self, speech: Speech, heard: Heard | None) -> list[Decision]:
        self._speech = None
        weight = 1.0 if self.usual_db is None else USUAL_WEIGHT
        self.usual_db = weight * speech.level_db + (1 - weight) * (self.usual_db or 0.0)
        if heard is None:
            self._committed[speech.utterance] = speech.end
        else:
            self._answered = speech.utterance
        return [Commit(speech.utterance, speech.end, heard)]


def patience_ms(detection: TurnDetection, heard: Heard | None) -> float:
    """How long a pause must be to end the turn: the shorter, the more finished the sentence seems.

    Below `UNFINISHED` and above `FINISHED` a score says no more than that it lies there.
    """
    longest = detection.silence_duration_ms
    if heard is None or not heard.text:
        return longest
    shortest = min(detection.min_silence_ms, longest)
    surely = min(1.0, max(0.0, (heard.completeness - UNFINISHED) / (FINISHED - UNFINISHED)))
    return longest - (longest - shortest) * surely
