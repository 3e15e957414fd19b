"""Conversation items and responses, as OpenAI's Realtime API names them (PROTOCOLS: items, responses)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType


class Modality(StrEnum):
    AUDIO = "audio"
    TEXT = "text"


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


class ItemStatus(StrEnum):
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True, slots=True)
class Item:
    """One message of the conversation. The audio itself is not kept; `text` is its transcript."""

    id: str
    role: Role
    text: str
    spoken: bool
    """True where the content is audio with a transcript, False where it is text."""
    status: ItemStatus = ItemStatus.COMPLETED
    audio_ms: int = 0
    """Length of the audio, 0 for text."""


class ResponseStatus(StrEnum):
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    INCOMPLETE = "incomplete"


NO_METADATA: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Response:
    """What a client sees of a turn."""

    id: str
    turn: int
    status: ResponseStatus
    modality: Modality
    item: Item | None = None
    """The output item, None before it exists."""
    reason: str = ""
    """cancelled: turn_detected | client_cancelled; incomplete: max_output_tokens | content_filter, or our own code."""
    error_code: str = ""
    error_message: str = ""
    metadata: Mapping[str, str] = field(default_factory=lambda: NO_METADATA)
    in_conversation: bool = True
    voice: str = ""
