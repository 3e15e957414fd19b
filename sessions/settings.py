"""A conversation session's settings: what a client may change while it runs."""

from dataclasses import dataclass

from omni_live.sessions.items import Modality


@dataclass(frozen=True, slots=True)
class TurnDetection:
    """Server-side voice activity detection. The names are OpenAI's server_vad fields, in milliseconds."""

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 736
    """Silence after which a turn ends for certain, whatever the transcript looks like."""
    min_silence_ms: int = 480
    """Silence after which it ends where the running transcript looks finished."""
    speculative_ms: int = 96
    """Silence after which the turn is started tentatively; 0 never does."""
    min_speech_ms: int = 96
    create_response: bool = True
    interrupt_response: bool = True


@dataclass(frozen=True, slots=True)
class Overlap:
    """What speech during a reply means."""

    hold_ms: int = 200
    """Speech after which the reply's audio is held back; 0 never holds."""
    short_ack_ms: int = 700
    """Speech shorter than this is an acknowledgement ("mm-hm"): the reply goes on. Longer speech interrupts."""
    echo_margin_db: float = 12.0
    """Speech this much under the user's usual level is taken for the reply's own echo and ignored."""
    listen_only: bool = False
    """True: speech never interrupts; it is heard as the next turn."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole of it. A door shows them as its session object; `SettingsAsked` replaces them."""

    model: str = "voice"
    instructions: str = ""
    modality: Modality = Modality.AUDIO
    voice: str = ""
    """Empty: the pipeline's default voice."""
    max_output_tokens: int | None = None
    """None: the pipeline's limit."""
    temperature: float = 0.0
    seed: int = 0
    turn_detection: TurnDetection | None = TurnDetection()
    """None: the client commits by hand."""
    answers_commits: bool = False
    """Whether a commit by hand is answered without being asked for where turn detection is off."""
    transcription: bool = True
    """Send transcripts of the user's audio."""
    overlap: Overlap = Overlap()
    lead_ms: int = 800
    """Audio is released at most this far ahead of playback; 0 releases it as it comes."""
    speed: float = 1.0
    input_rate_hz: int = 16000
    """The client's sample rates; the door converts, the core counts at the pipeline's rates."""
    output_rate_hz: int = 24000
    input_encoding: str = "pcm16"
    """How the client's audio is coded: pcm16, pcm_f32le, g711_ulaw or g711_alaw. The door converts this, too."""
    output_encoding: str = "pcm16"
