"""Figures out of timelines: what a client sent and got, when. Values in, values out.

All times are monotonic nanoseconds; events are in the order in which they came.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from omni_live.clients.clock import MS
from omni_live.clients.duplex_events import (
    Committed,
    Event,
    ReplyEnded,
    ReplyStarted,
    Sound,
    SoundEnded,
    Words,
)

CANCELLED = "cancelled"


def median(values: Iterable[float]) -> float | None:
    """None where there are none, as in all of these."""
    found = sorted(values)
    return statistics.median(found) if found else None


def quantile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that so large a share of the values does not exceed (the nearest rank)."""
    found = sorted(values)
    return found[max(0, math.ceil(share * len(found)) - 1)] if found else None


def largest(values: Iterable[float]) -> float | None:
    return max(values, default=None)


# -- replies ---------------------------------------------------------------------------------------------------------


def ending(events: Iterable[Event], response_id: str) -> ReplyEnded | None:
    """The reply's terminal."""
    for event in events:
        if isinstance(event, ReplyEnded) and event.response_id == response_id:
            return event
    return None


def content_ns(events: Iterable[Event], response_id: str) -> list[int]:
    """When each piece of the reply's content came."""
    return [event.at_ns for event in events if isinstance(event, Sound | Words) and event.response_id == response_id]


def others_began(events: Iterable[Event], response_id: str) -> bool:
    """Whether content of another reply came, too."""
    return any(isinstance(event, Sound | Words) and event.response_id != response_id for event in events)


def stale_chunks(events: Iterable[Event]) -> int:
    """Pieces of content that came behind the end of their reply."""
    ended: set[str] = set()
    stale = 0
    for event in events:
        match event:
            case ReplyEnded():
                ended.add(event.response_id)
            case Sound() | Words() | SoundEnded() if event.response_id in ended:
                stale += 1
            case _:
                pass
    return stale


def first_sound_ns(events: Iterable[Event], after_ns: int) -> int | None:
    """When the first sound came of a reply that began after that time."""
    fresh: set[str] = set()
    for event in events:
        if isinstance(event, ReplyStarted) and event.at_ns >= after_ns:
            fresh.add(event.response_id)
        if isinstance(event, Sound) and event.response_id in fresh:
            return event.at_ns
    return None


# -- turns taken too early -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PausedTurn:
    """One utterance with a pause in it, as it went."""

    pause_start_ns: int
    pause_end_ns: int
    speech_end_ns: int
    events: Sequence[Event]

    @property
    def cut_off(self) -> bool:
        """Whether the server took the turn before the user had said everything.

        Whatever came before the end of the speech counts: it cannot have come from anything but the pause, or from a
        gap that was even shorter.
        """
        return any(isinstance(event, Committed) and event.at_ns < self.speech_end_ns for event in self.events)

    @property
    def v2v_ms(self) -> float | None:
        """From the last sample of speech to the first sound of the reply; None for a turn that was cut off."""
        if self.cut_off:
            return None
        first = first_sound_ns(self.events, self.speech_end_ns)
        return None if first is None else (first - self.speech_end_ns) / MS


# -- silence ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Silencing:
    """One reply that was stopped: `cue_ns` is when the server was told to, or heard the first sample of speech."""

    cue_ns: int
    arrived_ns: int | None
    """When the last content of the reply reached the client; None: there was none after all."""
    handed_ns: int | None
    """When the server handed its last content to the socket, by its own record; None where it has none."""

    @property
    def ms(self) -> float:
        """How long the reply outlived the cue; 0 where its last content was out before."""
        last_ns = self.arrived_ns if self.handed_ns is None else self.handed_ns
        return max(0.0, ((last_ns or self.cue_ns) - self.cue_ns) / MS)

    @property
    def lag_ms(self) -> float | None:
        """How long the last content took from the server to the client's hand; None where it is not known."""
        if self.arrived_ns is None or self.handed_ns is None:
            return None
        return (self.arrived_ns - self.handed_ns) / MS


def growth(early_ms: Iterable[float], late_ms: Iterable[float]) -> float | None:
    """The median of the later values over that of the earlier ones."""
    early, late = median(early_ms), median(late_ms)
    return None if early is None or late is None or early <= 0 else late / early


def worst(values: Iterable[float | None]) -> float | None:
    """The largest of those that are known."""
    return largest(value for value in values if value is not None)
