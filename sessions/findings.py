"""What the ears stage finds in the client's audio.

Findings are facts about samples; only the session decides what they mean (tentative turn, commit, hold, fence,
ignore). They carry no epoch: an interruption never eats the microphone. Every position is a count of samples at
the pipeline's input rate since the session's first sample, so that arrival time plays no part.
"""

from dataclasses import dataclass, fields

from omni_live.sessions.payload import Payload


@dataclass(frozen=True, slots=True)
class SpeechBegan:
    """Voice activity starts; `utterance` counts up from 1 within the session."""

    utterance: int
    start: int
    """Sample at which the speech starts, prefix padding included."""
    level_db: float
    """RMS level of the speech so far, in dB relative to full scale (0 dB is a full-scale square wave)."""


@dataclass(frozen=True, slots=True)
class SpeechWent:
    """One more voiced frame; sent for each frame, so that the session can count overlap in samples."""

    utterance: int
    at: int
    """Sample just past the voiced frame."""
    voiced: int
    """Samples from the first voiced frame to `at` (pauses inside included)."""
    level_db: float


@dataclass(frozen=True, slots=True)
class SpeechPaused:
    """One more silent frame after speech; sent for each frame until the utterance is committed or dropped."""

    utterance: int
    end: int
    """Sample where the speech ends: by its level to 8 ms, else just past the last voiced frame. May move by some
    frames while the pause is young."""
    silence: int
    """Silent samples since `end`."""


@dataclass(frozen=True, slots=True)
class SpeechFaded:
    """The utterance was shorter than the minimum speech, or nothing was made of it in time: it never was."""

    utterance: int


@dataclass(frozen=True, slots=True)
class Heard:
    """A transcript of the utterance from its start to `end`; a later one for the same utterance replaces it."""

    utterance: int
    start: int
    end: int
    text: str
    completeness: float
    """How finished the sentence seems, 0 (surely goes on) to 1 (surely complete)."""
    final: bool
    """True for the transcript that answers a commit, and for the one of an utterance that reached its longest: the
    listener closes that by itself."""


Finding = SpeechBegan | SpeechWent | SpeechPaused | SpeechFaded | Heard


_KINDS: dict[str, type[Finding]] = {
    "speech_began": SpeechBegan,
    "speech_went": SpeechWent,
    "speech_paused": SpeechPaused,
    "speech_faded": SpeechFaded,
    "heard": Heard,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def write_finding(finding: Finding) -> Payload:
    """The payload in which a finding travels from the ears stage to the session."""
    return Payload(_NAMES[type(finding)], {f.name: getattr(finding, f.name) for f in fields(finding)})


def read_finding(payload: Payload) -> Finding | None:
    """The finding of a payload; None where its kind is no finding."""
    kind = _KINDS.get(payload.kind)
    return None if kind is None else kind(**payload.meta)  # type: ignore[arg-type]  # written by write_finding
