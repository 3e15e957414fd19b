"""The session object of OpenAI's Realtime API against `Settings`, both ways.

What GA cannot say stands under the one key `omni_live`. Fields that vllm-omni's clients send flat are read too.
Merging follows GA: what is present changes, what is absent stays, `""` clears the instructions, null clears turn
detection and transcription; a null elsewhere leaves the value as it is. Whether a change is allowed now (model, voice
after audio) is the session's business, not the codec's.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, TypeVar

from omni_live.protocols import audio
from omni_live.protocols.fields import Fields, Wire, needed
from omni_live.sessions.items import Modality
from omni_live.sessions.settings import Overlap, Settings, TurnDetection

T = TypeVar("T")

GA_RATE_HZ: Final = 24000
MAX_INSTRUCTION_CHARS: Final = 32_768
MAX_OUTPUT_TOKENS: Final = 4096

EAGERNESS_MS: Final = {"low": 2000, "medium": 1000, "auto": 1000, "high": 500}
"""semantic_vad's eagerness as the silence after which a turn ends for certain."""

_G711: Final = {audio.ULAW: "audio/pcmu", audio.ALAW: "audio/pcma"}
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NO_EFFECT: Final = ("id", "object", "expires_at", "client_secret", "include", "tracing", "truncation", "reasoning")
_NO_EFFECT_FLAT: Final = (
    "idle_timeout_s",
    "metadata",
    "overlap_barge_in_ms",
    "overlap_silence_rms",
    "parallel_tool_calls",
    "playback_commit_policy",
    "response_format",
    "session_id",
    "use_tts_template",
)


# -- outwards ----------------------------------------------------------------------------------------------------


def describe(settings: Settings, session_id: str, facts: Mapping[str, Wire] | None = None) -> dict[str, Wire]:
    """The full effective session object; `facts` go under `omni_live` as they are."""
    voice: dict[str, Wire] = {"voice": settings.voice} if settings.voice else {}
    return {
        "type": "realtime",
        "object": "realtime.session",
        "id": session_id,
        "model": settings.model,
        "output_modalities": [settings.modality.value],
        "instructions": settings.instructions,
        "audio": {
            "input": {
                "format": format_object(settings.input_encoding, settings.input_rate_hz),
                "noise_reduction": None,
                "transcription": {"model": settings.model} if settings.transcription else None,
                "turn_detection": _describe_turn_detection(settings.turn_detection),
            },
            "output": {
                "format": format_object(settings.output_encoding, settings.output_rate_hz),
                "speed": settings.speed,
                **voice,
            },
        },
        "tools": [],
        "tool_choice": "auto",
        "max_output_tokens": "inf" if settings.max_output_tokens is None else settings.max_output_tokens,
        "truncation": "auto",
        "tracing": None,
        "prompt": None,
        "omni_live": {**_describe_own(settings), **(facts or {})},
    }


def format_object(encoding: str, rate_hz: int) -> dict[str, Wire]:
    """GA's format object; the rate is left out where GA has no word for it (`omni_live` has)."""
    if encoding in _G711:
        return {"type": _G711[encoding]}
    return {"type": "audio/pcm", "rate": GA_RATE_HZ} if rate_hz == GA_RATE_HZ else {"type": "audio/pcm"}


def _describe_turn_detection(detection: TurnDetection | None) -> Wire:
    if detection is None:
        return None
    return {
        "type": "server_vad",
        "threshold": detection.threshold,
        "prefix_padding_ms": detection.prefix_padding_ms,
        "silence_duration_ms": detection.silence_duration_ms,
        "idle_timeout_ms": None,
        "create_response": detection.create_response,
        "interrupt_response": detection.interrupt_response,
    }


def _describe_own(settings: Settings) -> dict[str, Wire]:
    own: dict[str, Wire] = {
        "input_rate_hz": settings.input_rate_hz,
        "input_encoding": settings.input_encoding,
        "output_rate_hz": settings.output_rate_hz,
        "output_encoding": settings.output_encoding,
        "lead_ms": settings.lead_ms,
        "answers_commits": settings.answers_commits,
        "seed": settings.seed,
        "temperature": settings.temperature,
        "overlap": {
            "hold_ms": settings.overlap.hold_ms,
            "short_ack_ms": settings.overlap.short_ack_ms,
            "echo_margin_db": settings.overlap.echo_margin_db,
            "listen_only": settings.overlap.listen_only,
        },
    }
    if settings.turn_detection is not None:
        own["min_silence_ms"] = settings.turn_detection.min_silence_ms
        own["speculative_ms"] = settings.turn_detection.speculative_ms
        own["min_speech_ms"] = settings.turn_detection.min_speech_ms
    return own


# -- inwards -----------------------------------------------------------------------------------------------------


def merge(settings: Settings, session: Fields) -> Settings:
    """The settings with what the session object changes. Raises Faulty."""
    session.choice("type", ("realtime",))
    session.ignore(_NO_EFFECT)
    session.ignore(_NO_EFFECT_FLAT)
    settings = _merge_plain(settings, session)
    settings = _merge_flat_audio(settings, session)
    block = session.inner("audio")
    if block is not None:
        settings = _merge_audio(settings, block)
    settings = _merge_turn_detection(settings, session)
    settings = _merge_flat_overlap(settings, session)
    settings = _merge_extra_body(settings, session)
    own = session.inner("omni_live")
    if own is not None:
        settings = _merge_own(settings, own)
    _refuse_tools(session)
    session.done()
    return settings


def _merge_plain(settings: Settings, session: Fields) -> Settings:
    return replace(
        settings,
        model=_or(_name(session, "model"), settings.model),
        instructions=_or(session.text("instructions", MAX_INSTRUCTION_CHARS), settings.instructions),
        modality=_or(modality(session), settings.modality),
        temperature=_or(session.number("temperature", 0.0, 2.0), settings.temperature),
        max_output_tokens=output_tokens(session, settings.max_output_tokens),
    )


def _merge_flat_audio(settings: Settings, session: Fields) -> Settings:
    """The names of OpenAI's beta, which vllm-omni's clients still use."""
    settings = _merge_input_format(settings, session, "input_audio_format")
    settings = _merge_output_format(settings, session, "output_audio_format")
    rate = session.integer("sample_rate_hz", audio.LOW_HZ, audio.HIGH_HZ)
    return replace(
        settings,
        input_rate_hz=_or(rate, settings.input_rate_hz),
        voice=_or(voice_name(session), settings.voice),
        speed=_or(session.number("speed", 0.25, 1.5), settings.speed),
        transcription=_transcription(session, "input_audio_transcription", settings.transcription),
    )


def _merge_audio(settings: Settings, block: Fields) -> Settings:
    heard = block.inner("input")
    if heard is not None:
        settings = _merge_input_format(settings, heard, "format")
        rate = heard.integer("sample_rate_hz", audio.LOW_HZ, audio.HIGH_HZ)
        settings = replace(
            settings,
            input_rate_hz=_or(rate, settings.input_rate_hz),
            transcription=_transcription(heard, "transcription", settings.transcription),
        )
        settings = _merge_turn_detection(settings, heard)
        heard.ignore(("noise_reduction",))
        heard.done()
    spoken = block.inner("output")
    if spoken is not None:
        settings = _merge_output_format(settings, spoken, "format")
        rate = spoken.integer("sample_rate_hz", audio.LOW_HZ, audio.HIGH_HZ)
        settings = replace(
            settings,
            output_rate_hz=_or(rate, settings.output_rate_hz),
            voice=_or(voice_name(spoken), settings.voice),
            speed=_or(spoken.number("speed", 0.25, 1.5), settings.speed),
        )
        spoken.done()
    block.done()
    return settings


def _merge_input_format(settings: Settings, fields: Fields, name: str) -> Settings:
    named = audio_format(fields, name)
    if named is None:
        return settings
    encoding, rate = named
    return replace(settings, input_encoding=encoding, input_rate_hz=_or(rate, settings.input_rate_hz))


def _merge_output_format(settings: Settings, fields: Fields, name: str) -> Settings:
    named = audio_format(fields, name)
    if named is None:
        return settings
    encoding, rate = named
    return replace(settings, output_encoding=encoding, output_rate_hz=_or(rate, settings.output_rate_hz))


def audio_format(fields: Fields, name: str) -> tuple[str, int | None] | None:
    """(encoding, rate or None) of a format given as a name or as an object; None where it is not given."""
    if not isinstance(fields.raw(name), dict):
        spelling = fields.text(name)
        rate = None
        if spelling is None:
            return None
    else:
        block = needed(fields, name, fields.inner(name))
        spelling = needed(block, "type", block.text("type"))
        rate = block.integer("rate", audio.LOW_HZ, audio.HIGH_HZ)
        rate = _or(block.integer("sample_rate_hz", audio.LOW_HZ, audio.HIGH_HZ), rate)
        block.done()
    encoding = audio.encoding_named(spelling)
    if encoding is None:
        fields.refuse("invalid_value", name, "is no audio format this server knows")
    if encoding in (audio.ULAW, audio.ALAW):
        rate = audio.G711_HZ
    elif rate is None and spelling == "audio/pcm":
        rate = GA_RATE_HZ
    return encoding, rate


def _merge_turn_detection(settings: Settings, fields: Fields) -> Settings:
    if fields.is_null("turn_detection"):
        return replace(settings, turn_detection=None)
    block = fields.inner("turn_detection")
    if block is None:
        return settings
    detection = settings.turn_detection or TurnDetection()
    kind = block.choice("type", ("server_vad", "semantic_vad"))
    if kind is None and settings.turn_detection is None:
        block.missing("type")
    if block.integer("idle_timeout_ms") is not None:
        block.refuse("unsupported_value", "idle_timeout_ms", "is not supported")
    silence = block.integer("silence_duration_ms", 0, 60_000)
    if kind == "semantic_vad":
        silence = EAGERNESS_MS[block.choice("eagerness", EAGERNESS_MS) or "auto"]
    detection = replace(
        detection,
        threshold=_or(block.number("threshold", 0.0, 1.0), detection.threshold),
        prefix_padding_ms=_or(block.integer("prefix_padding_ms", 0, 10_000), detection.prefix_padding_ms),
        silence_duration_ms=_or(silence, detection.silence_duration_ms),
        create_response=_or(block.flag("create_response"), detection.create_response),
        interrupt_response=_or(block.flag("interrupt_response"), detection.interrupt_response),
    )
    block.done()
    # an end "for certain" that comes before the end "if it looks finished" makes the latter meaningless
    least = min(detection.min_silence_ms, detection.silence_duration_ms)
    return replace(settings, turn_detection=replace(detection, min_silence_ms=least))


def _merge_flat_overlap(settings: Settings, fields: Fields) -> Settings:
    overlap = settings.overlap
    policy = fields.choice("overlap_policy", ("listen_only", "barge_in_on_speech"))
    if policy is not None:
        overlap = replace(overlap, listen_only=policy == "listen_only")
    short = fields.integer("overlap_short_ack_ms", 0, 60_000)
    return replace(settings, overlap=replace(overlap, short_ack_ms=_or(short, overlap.short_ack_ms)))


def _merge_extra_body(settings: Settings, fields: Fields) -> Settings:
    """vllm-omni's `auto_response`, which its client always sends; the rest is for other models and has no effect."""
    extra = fields.inner("extra_body")
    if extra is None:
        return settings
    return replace(settings, answers_commits=_or(extra.flag("auto_response"), settings.answers_commits))


def _merge_own(settings: Settings, own: Fields) -> Settings:
    settings = replace(
        settings,
        input_rate_hz=_or(own.integer("input_rate_hz", audio.LOW_HZ, audio.HIGH_HZ), settings.input_rate_hz),
        input_encoding=_or(own.choice("input_encoding", audio.ENCODINGS), settings.input_encoding),
        output_rate_hz=_or(own.integer("output_rate_hz", audio.LOW_HZ, audio.HIGH_HZ), settings.output_rate_hz),
        output_encoding=_or(own.choice("output_encoding", audio.ENCODINGS), settings.output_encoding),
        lead_ms=_or(own.integer("lead_ms", 0, 60_000), settings.lead_ms),
        answers_commits=_or(own.flag("answers_commits"), settings.answers_commits),
        seed=_or(own.integer("seed", 0, 2**31 - 1), settings.seed),
        temperature=_or(own.number("temperature", 0.0, 2.0), settings.temperature),
    )
    settings = _merge_own_detection(settings, own)
    block = own.inner("overlap")
    if block is not None:
        settings = replace(settings, overlap=_merge_overlap(settings.overlap, block))
    own.ignore(("limits", "expires_in_s"))
    own.done()
    return settings


def _merge_own_detection(settings: Settings, own: Fields) -> Settings:
    least = own.integer("min_silence_ms", 0, 60_000)
    tentative = own.integer("speculative_ms", 0, 60_000)
    speech = own.integer("min_speech_ms", 0, 10_000)
    detection = settings.turn_detection
    if detection is None:
        return settings
    detection = replace(
        detection,
        min_silence_ms=_or(least, detection.min_silence_ms),
        speculative_ms=_or(tentative, detection.speculative_ms),
        min_speech_ms=_or(speech, detection.min_speech_ms),
    )
    return replace(settings, turn_detection=detection)


def _merge_overlap(overlap: Overlap, block: Fields) -> Overlap:
    overlap = replace(
        overlap,
        hold_ms=_or(block.integer("hold_ms", 0, 60_000), overlap.hold_ms),
        short_ack_ms=_or(block.integer("short_ack_ms", 0, 60_000), overlap.short_ack_ms),
        echo_margin_db=_or(block.number("echo_margin_db", 0.0, 100.0), overlap.echo_margin_db),
        listen_only=_or(block.flag("listen_only"), overlap.listen_only),
    )
    block.done()
    return overlap


# -- pieces that response.create uses too ------------------------------------------------------------------------


def modality(fields: Fields) -> Modality | None:
    """GA's output_modalities, or the beta's modalities, of which text beside audio means audio with a transcript."""
    asked = fields.texts("output_modalities")
    if asked is not None:
        if asked not in (["audio"], ["text"]):
            fields.refuse("invalid_value", "output_modalities", 'must be ["audio"] or ["text"]')
        return Modality(asked[0])
    asked = fields.texts("modalities")
    if asked is None:
        return None
    if not asked or not set(asked) <= {"audio", "text"}:
        fields.refuse("invalid_value", "modalities", 'must hold "audio", "text" or both')
    return Modality.AUDIO if "audio" in asked else Modality.TEXT


def output_tokens(fields: Fields, now: int | None) -> int | None:
    """GA's max_output_tokens ("inf" is None), or one of its older names."""
    for name in ("max_output_tokens", "max_response_output_tokens", "max_tokens"):
        value = fields.raw(name)
        if value == "inf":
            now = None
        elif value is not None:
            now = fields.integer(name, 1, MAX_OUTPUT_TOKENS)
    return now


def voice_name(fields: Fields) -> str | None:
    if isinstance(fields.raw("voice"), dict):
        block = needed(fields, "voice", fields.inner("voice"))
        name = needed(block, "id", _name(block, "id"))
        block.done()
        return name
    return _name(fields, "voice")


def _name(fields: Fields, name: str) -> str | None:
    """A name out of a registry: never a path."""
    value = fields.text(name)
    if value is not None and not _NAME.fullmatch(value):
        fields.refuse("invalid_value", name, "must be 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    return value


def _transcription(fields: Fields, name: str, now: bool) -> bool:
    if fields.is_null(name):
        return False
    block = fields.inner(name)
    if block is None:
        return now
    block.ignore(("model", "language", "prompt", "delay", "keywords", "languages"))
    block.done()
    return True


def _refuse_tools(session: Fields) -> None:
    if session.array("tools"):
        session.refuse("unsupported_value", "tools", "must be empty: this pipeline calls no tools")
    session.ignore(("tool_choice",))
    for name in ("prompt", "ref_audio", "initial_user_text", "input_audio_noise_reduction"):
        if session.has(name) and not session.is_null(name):
            session.refuse("unsupported_value", name, "is not supported")


def _or(value: T | None, otherwise: T) -> T:
    return otherwise if value is None else value
