"""Scripted conversations: recordings are spoken to a session in real time, as a microphone would, and it is heard out.

The microphone never stops: between utterances it sends silence. The next utterance begins when the reply to the one
before has been played, or in the middle of it where the script says to interrupt. `Script` decides, `converse` waits.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from omni_live.clients.clock import MS, Clock, MonotonicClock, S
from omni_live.clients.duplex import SessionLost
from omni_live.clients.duplex_events import Event, OverlapDecision, ReplyEnded, SpeechStarted
from omni_live.clients.duplex_wire import BadFrame, Fields
from omni_live.clients.jitter import Pcm
from omni_live.clients.playback import ACK_MS, BLOCK_MS, Player, SimulatedCard
from omni_live.clients.turns import Conversation, Sent, Turn, TurnReport, Utterance
from omni_live.clients.wav import BadWav, read_pcm

TRANSCRIPT_WAIT_S = 2.0
"""A transcript may come after the reply; the turn waits for it so long."""


class Talking(Protocol):
    """What a conversation needs of a session (`duplex.Session`)."""

    async def send_audio(self, pcm: bytes) -> None: ...

    async def ack_playback(self, response_id: str, item_id: str, played_ms: float) -> str: ...

    def drop_transport(self) -> None: ...

    async def __anext__(self) -> Event: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """How a conversation goes beside what is said."""

    interrupts: Mapping[int, float] = field(default_factory=dict)
    """By number of the utterance, from 1: so many seconds into the reply to it, the next one begins."""
    pause_s: float = 0.3
    """Between the end of a reply and the next utterance."""
    reply_timeout_s: float = 30.0
    """A turn in which nothing happened for so long is given up."""
    drops_s: Sequence[float] = ()
    """Seconds after the start at which the socket is dropped."""


class Script:
    """Decides, block by block, what the microphone gives."""

    def __init__(
        self, utterances: Sequence[Utterance], plan: Plan, rate_hz: int, conversation: Conversation, player: Player
    ) -> None:
        self._utterances = utterances
        self._plan = plan
        self._rate_hz = rate_hz
        self._block = rate_hz * BLOCK_MS // 1000
        self._conversation = conversation
        self._player = player
        self._at = 0
        """The next sample of the utterance under way."""
        self._idle_ns: int | None = None
        """Since when the turn is over."""
        self._sounded = 0

    @property
    def begun(self) -> int:
        """How many utterances have begun."""
        return len(self._conversation.turns)

    def block(self, now_ns: int) -> Pcm | None:
        """The block that the microphone took until `now_ns`; None when everything is said and answered."""
        if self._may_begin(now_ns):
            if self.begun == len(self._utterances):
                return None
            self._begin(now_ns - BLOCK_MS * MS)
        return self._next(now_ns)

    def _may_begin(self, now_ns: int) -> bool:
        turn = self._conversation.turn
        if turn is None:
            return True
        if self._due_to_interrupt(turn, now_ns):
            return True
        if not self._over(turn, now_ns):
            self._idle_ns = None
            return False
        if self._idle_ns is None:
            self._idle_ns = now_ns
        return self.begun == len(self._utterances) or now_ns >= self._idle_ns + round(self._plan.pause_s * S)

    def _begin(self, at_ns: int) -> None:
        before = self._conversation.turn
        interrupted = self._audible(before) if before and before.index in self._plan.interrupts else None
        utterance = self._utterances[self.begun]
        turn = self._conversation.begin(utterance.name, at_ns, utterance.text)
        turn.interrupts = interrupted or ""
        turn.speech_start_ns = at_ns + utterance.speech_start * S // self._rate_hz
        turn.speech_end_ns = at_ns + utterance.speech_end * S // self._rate_hz
        self._at = 0
        self._idle_ns = None

    def _next(self, now_ns: int) -> Pcm:
        turn = self._conversation.turn
        out = np.zeros(self._block, np.int16)
        if turn is None:
            return out
        pcm = self._utterances[turn.index - 1].pcm[self._at : self._at + self._block]
        if len(pcm):
            out[: len(pcm)] = pcm
            turn.sent.append(Sent(now_ns, self._at, len(pcm)))
            turn.last_ns = now_ns
            self._at += len(pcm)
        return out

    def _spoken(self, turn: Turn) -> bool:
        return self._at >= self._utterances[turn.index - 1].speech_end

    def _due_to_interrupt(self, turn: Turn, now_ns: int) -> bool:
        after_s = self._plan.interrupts.get(turn.index)
        if after_s is None or turn.index == len(self._utterances) or not self._spoken(turn):
            return False
        audible = self._audible(turn)
        return audible is not None and now_ns >= self._player.replies[audible].spans[0].at_ns + round(after_s * S)

    def _audible(self, turn: Turn) -> str | None:
        """The turn's reply that is being played."""
        for reply in turn.replies:
            played = self._player.replies.get(reply.response_id)
            if played is not None and played.spans and not played.over:
                return reply.response_id
        return None

    def _over(self, turn: Turn, now_ns: int) -> bool:
        if self._at < len(self._utterances[turn.index - 1].pcm):
            return False
        if self._player.sounded > self._sounded:
            self._sounded = self._player.sounded
            turn.last_ns = now_ns
        if now_ns >= turn.last_ns + round(self._plan.reply_timeout_s * S):
            turn.timed_out = True
            return True
        if turn.answering or self._conversation.speaking or not self._player.idle or self._behind(turn):
            return False
        if turn.transcribing and now_ns < turn.last_ns + round(TRANSCRIPT_WAIT_S * S):
            return False
        return turn.answered or turn.waved_off

    def _behind(self, turn: Turn) -> bool:
        """Whether the turn before is still being answered: this one did not interrupt it."""
        return any(before.answering for before in self._conversation.turns[: turn.index - 1])


async def converse(
    session: Talking,
    utterances: Sequence[Utterance],
    *,
    player: Player,
    rate_hz: int = 16_000,
    plan: Plan | None = None,
    clock: Clock | None = None,
    on_turn: Callable[[TurnReport], None] | None = None,
) -> list[TurnReport]:
    """Hold a conversation; returns one report per utterance, fewer where the server closed the session.

    `rate_hz` is the session's input rate and that of the utterances. `on_turn` gets each report as soon as it is
    complete. Raises what ends the session.
    """
    conversation = Conversation(player)
    script = Script(utterances, plan or Plan(), rate_hz, conversation, player)
    stage = _Stage(session, script, conversation, player, clock or MonotonicClock(), on_turn)
    tasks = [
        asyncio.create_task(stage.speak((plan or Plan()).drops_s)),
        asyncio.create_task(listen(session, player, conversation.take)),
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
        await acknowledge(session, player)
    except SessionLost as lost:
        if lost.code != "session_closed":  # whichever of the two notices first that the server closed it
            raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    stage.report(len(conversation.turns))
    return stage.reports


@dataclass(slots=True)
class _Stage:
    """Where a scripted conversation takes place: its microphone, its loudspeaker, and who notes what happened."""

    session: Talking
    script: Script
    conversation: Conversation
    player: Player
    clock: Clock
    on_turn: Callable[[TurnReport], None] | None
    reports: list[TurnReport] = field(default_factory=list)

    async def speak(self, drops_s: Sequence[float]) -> None:
        """Microphone and loudspeaker, block by block, until the script is at its end."""
        due_ns = acked_ns = started_ns = self.clock.now_ns()
        card = SimulatedCard(self.player, started_ns)
        drops_ns = sorted((started_ns + round(at_s * S) for at_s in drops_s), reverse=True)
        while True:
            due_ns += BLOCK_MS * MS
            await self.clock.sleep_until_ns(due_ns)
            card.run_to(due_ns)
            while drops_ns and drops_ns[-1] <= due_ns:
                drops_ns.pop()
                self.session.drop_transport()
            if not await self._send(due_ns):
                return
            if due_ns >= acked_ns + ACK_MS * MS:
                acked_ns = due_ns
                await acknowledge(self.session, self.player)

    async def _send(self, now_ns: int) -> bool:
        begun = self.script.begun
        block = self.script.block(now_ns)
        if block is None:
            return False
        if self.script.begun > begun and not self.conversation.turns[-1].interrupts:
            self.report(begun)
        await self.session.send_audio(block.astype("<i2").tobytes())
        return True

    def report(self, count: int) -> None:
        """Tell of the first so many turns, as far as they are not told."""
        for turn in self.conversation.turns[len(self.reports) : count]:
            self.reports.append(self.conversation.report(turn))
            if self.on_turn is not None:
                self.on_turn(self.reports[-1])


async def listen(session: Talking, player: Player, *takers: Callable[[Event], None]) -> None:
    """Give the player, then the takers, each event, and tell the server at once what was heard of a reply it cut."""
    while True:
        try:
            event = await session.__anext__()
        except StopAsyncIteration:
            return
        player.take(event)
        for take in takers:
            take(event)
        if isinstance(event, SpeechStarted | OverlapDecision | ReplyEnded):
            await acknowledge(session, player)


async def acknowledge(session: Talking, player: Player) -> None:
    """Tell the server how far each reply has been heard."""
    for position in player.positions():
        await session.ack_playback(position.response_id, position.item_id, position.played_ms)


# -- utterances ------------------------------------------------------------------------------------------------------


def load_utterance(path: Path, rate_hz: int = 16_000) -> Utterance:
    """A recording to be spoken; raises BadWav.

    Where speech begins and ends comes from a `transcripts.json` beside the file that lists it, else from its energy.
    """
    pcm = read_pcm(path, rate_hz)
    listed = _listed(path)
    if listed is None:
        start, end = speech_bounds(pcm, rate_hz)
        return Utterance(path.name, pcm, start, end)
    start = round(listed.number("speech_start_s") * rate_hz)
    end = round(listed.number("speech_end_s", len(pcm) / rate_hz) * rate_hz)
    return Utterance(path.name, pcm, start, min(end, len(pcm)), listed.text("text"))


def _listed(path: Path) -> Fields | None:
    index = path.with_name("transcripts.json")
    if not index.is_file():
        return None
    try:
        entries = Fields({"entries": json.loads(index.read_text())}).several("entries")
        return next((entry for entry in entries if entry.text("file") == path.name), None)
    except (OSError, ValueError, BadFrame) as error:
        raise BadWav(f"{index}: not a list of transcripts") from error


def speech_bounds(pcm: Pcm, rate_hz: int) -> tuple[int, int]:
    """Where speech begins and ends in a recording, to 10 ms: where it is within 35 dB of its loudest.

    (0, length) for a recording of nothing.
    """
    window = rate_hz // 100
    whole = len(pcm) // window * window
    levels = np.sqrt(np.mean(pcm[:whole].astype(np.float64).reshape(-1, window) ** 2, axis=1))
    loud = np.flatnonzero(levels > max(30.0, levels.max(initial=0.0) * 10 ** (-35 / 20)))
    if not len(loud):
        return 0, len(pcm)
    return int(loud[0]) * window, int(loud[-1] + 1) * window
