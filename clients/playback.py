"""What is played, and the count of it: the conversation rests on what the user heard, so samples are counted, not time.

A `Player` takes the session's events and gives sound to whoever pulls it: a sound card's callback, or a `SimulatedCard`
that pulls in step with a clock. It obeys the server's decisions about overlap: `hold` pauses the reply, `drop` goes on,
and a barge-in, a new utterance or a cancelled response discards what is not played yet.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from omni_live.clients.clock import S
from omni_live.clients.duplex_events import (
    UNKNOWN,
    Event,
    OverlapDecision,
    ReplyEnded,
    Sound,
    SoundEnded,
    SpeechStarted,
)
from omni_live.clients.jitter import Depth, JitterBuffer, Pcm

BLOCK_MS = 20
ACK_MS = 250
"""The server is told the played position about this often."""
SILENT = 100
"""Samples up to this (of 32767) count as silence: 50 dB under full scale."""


class WrongRate(Exception):
    """Sound came at another rate than the one that is played."""


@dataclass(slots=True)
class Span:
    """Samples played without a break: where on the player's timeline, where in the reply, since when."""

    timeline: int
    start: int
    samples: int
    at_ns: int

    @property
    def end(self) -> int:
        return self.start + self.samples


@dataclass(frozen=True, slots=True)
class Gap:
    """An underrun: the reply fell silent before `start` for so many samples, and then went on."""

    start: int
    samples: int


@dataclass(frozen=True, slots=True)
class Position:
    """How far a reply has been heard."""

    response_id: str
    item_id: str
    played_ms: float


@dataclass(slots=True)
class Reply:
    """One reply's sound and what became of it. All positions are samples from its start."""

    response_id: str
    item_id: str
    buffer: JitterBuffer
    cut: bool = False
    """Interrupted: what was not played by then never will be."""
    discarded: int = 0
    """Samples that came and were not played, because it was cut."""
    after_cut: int = 0
    """Samples that came after it was cut; a part of `discarded`."""
    dry: int = 0
    """Samples of silence since the buffer ran dry."""
    told: int = 0
    """The position that was last acknowledged."""
    spans: list[Span] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    recorded: list[tuple[int, Pcm]] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Nothing of it is left to play."""
        return self.cut or (self.buffer.complete and not self.buffer.samples)

    @property
    def played(self) -> int:
        """Samples handed to the card."""
        return sum(span.samples for span in self.spans)

    def heard(self, timeline: int) -> int:
        """The position reached when the listener hears this moment of the timeline."""
        for span in reversed(self.spans):
            if timeline > span.timeline:
                return span.start + min(span.samples, timeline - span.timeline)
        return 0

    def sound(self) -> Pcm:
        """Everything that came, silence where samples are missing. Empty unless recorded."""
        whole = np.zeros(max((start + len(pcm) for start, pcm in self.recorded), default=0), dtype=np.int16)
        for start, pcm in self.recorded:
            whole[start : start + len(pcm)] = pcm
        return whole

    def played_sound(self) -> Pcm:
        """What was played of it, without pauses. Empty unless recorded."""
        whole = self.sound()
        return np.concatenate([whole[:0], *(whole[span.start : span.end] for span in self.spans)])

    def played_at_ns(self, position: int, rate_hz: int) -> int | None:
        """When the sample was played; None if it was not."""
        for span in self.spans:
            if span.start <= position < span.end:
                return span.at_ns + (position - span.start) * S // rate_hz
        return None


class Player:
    """Plays replies one after another. Thread-safe: a card's callback pulls while the event loop takes events."""

    def __init__(
        self,
        rate_hz: int = 24_000,
        *,
        depth_ms: int = 60,
        most_depth_ms: int = 400,
        latency_ms: float = 0.0,
        speech_interrupts: bool = True,
        record: bool = False,
        keep: int = 1000,
    ) -> None:
        """`latency_ms` is what the card holds back: pulled is not heard yet.

        `speech_interrupts` False: the session was asked not to let speech interrupt, so a new utterance discards
        nothing by itself. `record` keeps the sound of replies; `keep` replies are remembered after they are over.
        """
        self.rate_hz = rate_hz
        self.timeline = 0
        """Samples pulled so far, silence included."""
        self.replies: OrderedDict[str, Reply] = OrderedDict()
        self.depth = Depth(rate_hz * depth_ms // 1000, rate_hz * most_depth_ms // 1000)
        self._latency = round(rate_hz * latency_ms / 1000)
        self._speech_interrupts = speech_interrupts
        self._record = record
        self._keep = keep
        self._held: str | None = None
        self._sounded = 0
        self._lock = threading.Lock()

    # -- the event loop's side -----------------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        """Any event of the session; raises WrongRate."""
        with self._lock:
            match event:
                case Sound():
                    self._sound(event)
                case SoundEnded():
                    self._complete(event.response_id)
                case ReplyEnded(status="cancelled"):
                    self._cut(event.response_id)
                case ReplyEnded():
                    self._complete(event.response_id)
                case OverlapDecision():
                    self._decided(event)
                case SpeechStarted() if self._speech_interrupts:
                    self._cut_all()
                case _:
                    pass

    def positions(self) -> list[Position]:
        """How far the replies have been heard that got further since this was last asked."""
        with self._lock:
            timeline = self.timeline - self._latency
            moved = []
            for reply in self.replies.values():
                heard = reply.heard(timeline)
                if heard > reply.told:
                    reply.told = heard
                    moved.append(Position(reply.response_id, reply.item_id, heard * 1000 / self.rate_hz))
            self._forget()
            return moved

    @property
    def idle(self) -> bool:
        """Whether there is nothing left to play."""
        with self._lock:
            return all(reply.over for reply in self.replies.values())

    @property
    def sounded(self) -> int:
        """Samples of replies played so far."""
        with self._lock:
            return self._sounded

    @property
    def underruns(self) -> int:
        with self._lock:
            return sum(len(reply.gaps) for reply in self.replies.values())

    def latency(self, latency_ms: float) -> None:
        """The card is known now."""
        with self._lock:
            self._latency = round(self.rate_hz * latency_ms / 1000)

    # -- the card's side -----------------------------------------------------------------------------------------

    def pull(self, samples: int, at_ns: int) -> Pcm:
        """The next samples, silence where there is nothing to play; the first of them is played at `at_ns`."""
        out = np.zeros(samples, dtype=np.int16)
        with self._lock:
            filled = 0
            for reply in self.replies.values():
                if reply.over:
                    continue
                if reply.response_id == self._held:
                    break
                filled = self._play(reply, out, filled, at_ns)
                if filled == samples or not reply.buffer.complete:
                    break
            self.timeline += samples
        return out

    # -- the inside ----------------------------------------------------------------------------------------------

    def _play(self, reply: Reply, out: Pcm, filled: int, at_ns: int) -> int:
        """Fills `out` from `filled` on; returns how far it is filled now."""
        began = reply.buffer.begun
        for piece in reply.buffer.pull(len(out) - filled):
            if reply.dry:
                reply.gaps.append(Gap(piece.start, reply.dry))
                reply.dry = 0
                self.depth.grow()
            out[filled : filled + len(piece.pcm)] = piece.pcm
            self._note(reply, filled, piece.start, len(piece.pcm), at_ns)
            filled += len(piece.pcm)
            self._sounded += len(piece.pcm)
            began = True
        if began and not reply.buffer.complete:
            reply.dry += len(out) - filled
        return filled

    def _note(self, reply: Reply, filled: int, start: int, samples: int, at_ns: int) -> None:
        timeline = self.timeline + filled
        last = reply.spans[-1] if reply.spans else None
        if last and last.end == start and last.timeline + last.samples == timeline:
            last.samples += samples
        else:
            reply.spans.append(Span(timeline, start, samples, at_ns + filled * S // self.rate_hz))

    def _sound(self, event: Sound) -> None:
        if event.rate_hz != self.rate_hz:
            raise WrongRate(f"sound came at {event.rate_hz} Hz and is played at {self.rate_hz} Hz")
        reply = self.replies.get(event.response_id)
        if reply is None:
            reply = Reply(event.response_id, event.item_id, JitterBuffer(self.depth))
            self.replies[event.response_id] = reply
        pcm = np.frombuffer(event.pcm, dtype="<i2").astype(np.int16, copy=False)
        if reply.cut:
            reply.discarded += len(pcm)
            reply.after_cut += len(pcm)
            return
        start = reply.buffer.end if event.start_sample == UNKNOWN else event.start_sample
        reply.buffer.push(start, pcm)
        if self._record:
            reply.recorded.append((start, pcm))

    def _complete(self, response_id: str) -> None:
        reply = self.replies.get(response_id)
        if reply is not None:
            reply.buffer.complete = True

    def _decided(self, event: OverlapDecision) -> None:
        match event.action:
            case "hold":
                self._held = event.response_id or self._current()
            case "drop":
                self._held = None
            case "barge_in" if event.response_id:
                self._cut(event.response_id)
            case "barge_in":
                self._cut_all()
            case _:
                pass  # vllm-omni's listen: nothing changes for what is played

    def _current(self) -> str | None:
        return next((reply.response_id for reply in self.replies.values() if not reply.over), None)

    def _cut(self, response_id: str) -> None:
        if self._held == response_id:
            self._held = None
        reply = self.replies.get(response_id)
        if reply is None or reply.over:
            return
        reply.cut = True
        reply.dry = 0
        reply.discarded += reply.buffer.clear()

    def _cut_all(self) -> None:
        for response_id in self.replies:
            self._cut(response_id)

    def _forget(self) -> None:
        over = [response_id for response_id, reply in self.replies.items() if reply.over]
        for response_id in over[: max(0, len(self.replies) - self._keep)]:
            del self.replies[response_id]


class SimulatedCard:
    """Pulls from a player in step with a clock, as a sound card would: block by block, never early, none left out."""

    def __init__(self, player: Player, started_ns: int) -> None:
        self.block = player.rate_hz * BLOCK_MS // 1000
        self._player = player
        self._started_ns = started_ns
        self._blocks = 0

    @property
    def next_ns(self) -> int:
        """When the next block is due."""
        return self._started_ns + self._blocks * BLOCK_MS * 1_000_000

    def run_to(self, now_ns: int) -> None:
        """Pull every block that is due by now."""
        while self.next_ns <= now_ns:
            self._player.pull(self.block, self.next_ns)
            self._blocks += 1


def silences(pcm: Pcm, rate_hz: int, at_least_ms: int = 100) -> list[tuple[int, int]]:
    """The silent stretches of a recording: (first sample, number of samples) each."""
    loud = np.flatnonzero(np.abs(pcm.astype(np.int32)) > SILENT)
    edges = np.concatenate([[-1], loud, [len(pcm)]])
    lengths = np.diff(edges) - 1
    long = np.flatnonzero(lengths >= rate_hz * at_least_ms // 1000)
    return [(int(edges[index]) + 1, int(lengths[index])) for index in long]
