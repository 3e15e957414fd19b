"""The thinker: a llama that keeps each session's KV between turns and decodes several sessions' turns together.

A turn's input is one context payload (`sessions.continuity`): how many leading messages still hold, and those after
them. Whatever the reason (a reply cut to what was heard, a tentative turn given up, a lost replica), the KV is cut to
the longest common run of tokens and only the rest is prefilled. Each step serves every turn that can go on: prefills
in bounded pieces and one token of each decode, in one pass over the weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import numpy as np
import torch
from torch import Tensor

from omni_live.engines.contract import EngineOptions, Host, Load, SessionError, Turn, TurnError
from omni_live.engines.options import Options, param_int, param_real
from omni_live.models.chat import Context, Detokenizer, Item, Role, Template
from omni_live.models.gguf_weights import ConversationTooLong, Gguf, PoolFull, smollm2_path, tokenizer
from omni_live.models.llama import Feed, Llama, Slot, Snapshot
from omni_live.models.sampling import Loop, Sampler, Sampling, sample
from omni_live.protocols.arrays import array, pack
from omni_live.sessions.continuity import read_context
from omni_live.sessions.inputs import Outcome
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.stamp import SessionKey

PREFILL_TOKENS: Final = 128
"""Prompt tokens of one step over all turns: about 60 ms, the longest anyone waits for a fence or a decode."""


class Phase(Enum):
    WAITING = auto()
    """For its context."""
    PREFILL = auto()
    DECODE = auto()


@dataclass(slots=True)
class Mind:
    """One session's conversation and its KV."""

    context: Context
    slot: Slot | None = None
    items: list[Item] = field(default_factory=list)
    told_dropped: bool = False


@dataclass(slots=True)
class Thought:
    """One turn under way."""

    turn: Turn
    mind: Mind
    side: bool
    sampler: Sampler
    detokenizer: Detokenizer
    loop: Loop
    most: int
    phase: Phase = Phase.WAITING
    slot: Slot | None = None
    rest: list[int] = field(default_factory=list)
    """Prompt tokens not prefilled yet, or the one token to decode next."""
    ids: list[int] = field(default_factory=list)
    text: str = ""
    unsent: str = ""
    ending: tuple[Outcome, str] | None = None


class Thinker:
    """Engine of the thinker stage. Options: sessions, context, reserve, max_tokens, threads, repetition_penalty."""

    inline = False

    def __init__(self, options: EngineOptions) -> None:
        read = Options("thinker", options)
        self._sessions = read.whole("sessions", 256, 1, 4096)
        self._window = read.whole("context", 2048, 128, 8192)
        self._reserve = read.whole("reserve", 256, 16, 4096)
        self._max_tokens = read.whole("max_tokens", 120, 1, 4096)
        self._penalty = read.real("repetition_penalty", 1.1, 1.0, 2.0)
        self._top_p = read.real("top_p", 0.95, 0.01, 1.0)
        self._threads = read.whole("threads", 1, 1, 64)
        read.done()
        self._minds: dict[SessionKey, Mind] = {}
        self._thoughts: list[Thought] = []

    def load(self, host: Host) -> None:
        self._host = host
        weights = Gguf(smollm2_path())
        self._tokenizer = tokenizer(weights)
        self._llama = Llama(weights, sessions=self._sessions + 1, context=self._window, threads=self._threads)
        self._template = Template(self._tokenizer)
        self._warm_up()

    def _warm_up(self) -> None:
        """Run every kernel once, and keep the KV of the default opening: each session starts from a copy."""
        opening = Context(self._template, window=self._window, reserve=self._reserve).opening_ids()
        self._opening = self._llama.open()
        for start in range(0, len(opening), PREFILL_TOKENS):
            self._llama.prefill(self._opening, opening[start : start + PREFILL_TOKENS])
        slot = self._llama.fork(self._opening)
        ids = self._template.wrapped(Role.USER, self._template.text_ids(Item(Role.USER, "Hello, how are you today?")))
        for _ in range(2):
            self._llama.prefill(slot, ids)
            self._llama.decode([(slot, ids[0])])
        self._llama.close(slot)

    # -- sessions ------------------------------------------------------------------------------------------------

    def open(self, session: SessionKey, params: Mapping[str, Scalar]) -> None:
        self._minds[session] = Mind(Context(self._template, window=self._window, reserve=self._reserve))

    def close(self, session: SessionKey) -> None:
        mind = self._minds.pop(session, None)
        if mind is not None and mind.slot is not None:
            self._llama.close(mind.slot)

    def listen(self, session: SessionKey, payload: Payload) -> None:
        mind = self._mind(session)
        if payload.kind == "forget":
            for thought in list(self._thoughts):
                if thought.mind is mind and thought.phase is Phase.WAITING:
                    self._start(thought)  # its context came before this
            first = 1 if mind.items and mind.items[0].role is Role.SYSTEM else 0
            del mind.items[first : first + param_int(payload.meta, "items", 0)]
            mind.told_dropped = False

    def fork(self, session: SessionKey, into: SessionKey) -> None:
        mind = self._mind(session)
        twin = Mind(Context(self._template, window=self._window, reserve=self._reserve), items=list(mind.items))
        if mind.slot is not None:
            try:
                twin.slot = self._llama.fork(mind.slot)
            except PoolFull:
                raise SessionError(into, "overloaded") from None
        self._minds[into] = twin

    def snapshot(self, session: SessionKey) -> Payload:
        mind = self._mind(session)
        if mind.slot is None:
            return pack("kv", {})
        state = self._llama.snapshot(mind.slot)
        return pack("kv", {}, tokens=state.tokens, kv=state.kv)

    def restore(self, session: SessionKey, payload: Payload) -> None:
        """The KV alone; the messages come with the next turn, and what of them the KV holds is not prefilled again."""
        mind = self._mind(session)
        if mind.slot is not None:
            self._llama.close(mind.slot)
            mind.slot = None
        mind.items.clear()
        if payload.arrays:
            tokens = np.ascontiguousarray(array(payload, "tokens"), np.int32)
            mind.slot = self._llama.restore(Snapshot(tokens, np.ascontiguousarray(array(payload, "kv"), np.uint16)))

    def _mind(self, session: SessionKey) -> Mind:
        mind = self._minds.get(session)
        if mind is None:
            raise SessionError(session, "unknown_session")
        return mind

    # -- turns ---------------------------------------------------------------------------------------------------

    def begin(self, turn: Turn) -> None:
        mind = self._minds.get(turn.session)
        if mind is None:
            raise TurnError(turn, "unknown_session")
        params = turn.params
        sampling = Sampling(
            param_real(params, "temperature", 0.0), self._top_p, self._penalty, param_int(params, "seed", 0)
        )
        most = param_int(params, "max_tokens", 0) or self._max_tokens
        sampler = Sampler(sampling, turn=turn.stamp.turn, stops=self._template.spoken_stops)
        side = params.get("side") is True
        self._thoughts.append(
            Thought(turn, mind, side, sampler, Detokenizer(self._tokenizer), Loop(), min(most, self._reserve))
        )

    def drop(self, turn: Turn) -> None:
        for thought in self._thoughts:
            if thought.turn is turn:
                self._forget(thought)
                return

    def _forget(self, thought: Thought) -> None:
        self._thoughts.remove(thought)
        if thought.side and thought.slot is not None:
            self._llama.close(thought.slot)

    def step(self) -> bool:
        for thought in list(self._thoughts):
            if thought.phase is Phase.WAITING:
                self._start(thought)
            self._conclude(thought)
        batch = self._batch()
        if not batch:
            return False
        feeds = [feed for _, feed in batch]
        results = self._llama.step(feeds)
        decided = []
        for (thought, feed), logits in zip(batch, results, strict=True):
            del thought.rest[: len(feed.ids)]
            if not thought.rest:
                thought.phase = Phase.DECODE
                decided.append((thought, logits))
        if decided:
            self._pick(decided)
        return True

    def _batch(self) -> list[tuple[Thought, Feed]]:
        """Every decode that may go on, and prompts up to the bound, most urgent first."""
        batch: list[tuple[Thought, Feed]] = []
        room = PREFILL_TOKENS
        for thought in sorted(self._thoughts, key=lambda t: t.turn.stamp.deadline_ns):
            if thought.slot is None or not thought.rest or thought.unsent:
                continue
            if thought.phase is Phase.DECODE:
                batch.append((thought, Feed(thought.slot, (thought.rest[0],))))
            elif room:
                ids = thought.rest[:room]
                room -= len(ids)
                whole = len(ids) == len(thought.rest)
                batch.append((thought, Feed(thought.slot, ids, None if whole else ())))
        return batch

    def _start(self, thought: Thought) -> None:
        payload = thought.turn.take()
        if payload is None:
            return
        keep, said = read_context(payload)
        mind = thought.mind
        if keep > len(mind.items):
            raise TurnError(thought.turn, "context_lost")
        new = [Item(Role(role.value), text) for role, text in said]
        items = [*mind.items[:keep], *new]
        try:
            slot = self._slot(thought)
            plan = mind.context.plan(items, self._llama.tokens(slot))
        except ConversationTooLong:
            raise TurnError(thought.turn, "context_length_exceeded") from None
        except PoolFull:
            raise TurnError(thought.turn, "overloaded") from None
        if not thought.side:
            mind.items = items
        self._llama.truncate(slot, plan.keep)
        thought.slot, thought.rest, thought.phase = slot, list(plan.fresh), Phase.PREFILL
        if plan.dropped and not mind.told_dropped and not thought.side:
            mind.told_dropped = True
            self._host.find(thought.turn.session, Payload("dropped", {"items": plan.dropped}))

    def _slot(self, thought: Thought) -> Slot:
        """The session's own slot, which no older turn of it may use any more; a side turn gets a copy."""
        mind = thought.mind
        if thought.side:
            return self._llama.fork(self._opening if mind.slot is None else mind.slot)
        for other in list(self._thoughts):
            if other is not thought and other.mind is mind and not other.side:
                self._forget(other)
        if mind.slot is None:
            mind.slot = self._llama.fork(self._opening)
        return mind.slot

    def _pick(self, decided: list[tuple[Thought, Tensor]]) -> None:
        logits = torch.cat([rows for _, rows in decided])
        tokens = sample(logits, [thought.sampler for thought, _ in decided])
        for (thought, _), token in zip(decided, tokens, strict=True):
            self._took(thought, token)

    def _took(self, thought: Thought, token: int) -> None:
        if thought.sampler.stopped:
            self._finish(thought, Outcome.DONE, "")
            return
        thought.ids.append(token)
        thought.rest.append(token)
        thought.unsent += thought.detokenizer.push(token).text
        self._send(thought)
        if thought.loop.push(token):
            self._finish(thought, Outcome.INCOMPLETE, "repetition")
        elif len(thought.ids) >= thought.most:
            self._finish(thought, Outcome.INCOMPLETE, "max_output_tokens")

    def _send(self, thought: Thought) -> None:
        if thought.unsent and thought.turn.room():
            thought.turn.emit(Payload("text", {"text": thought.unsent, "start": len(thought.text)}))
            thought.text += thought.unsent
            thought.unsent = ""

    def _finish(self, thought: Thought, outcome: Outcome, reason: str) -> None:
        thought.unsent += thought.detokenizer.flush().text
        thought.ending = (outcome, reason)
        thought.rest.clear()
        self._conclude(thought)

    def _conclude(self, thought: Thought) -> None:
        """End the turn once its last text is sent; a receiver without room makes it wait."""
        self._send(thought)
        if thought.ending is None or thought.unsent:
            return
        outcome, reason = thought.ending
        if outcome is Outcome.DONE and not thought.side:
            thought.mind.items.append(Item(Role.ASSISTANT, thought.text))
            thought.mind.context.replied(thought.text, thought.ids)
        self._forget(thought)
        thought.turn.finish(outcome, reason)

    def load_now(self) -> Load:
        held = sum(self._llama.length(mind.slot) for mind in self._minds.values() if mind.slot is not None)
        shape = self._llama.shape
        bytes_a_token = shape.layers * 2 * shape.kv_heads * shape.head_dim * 2
        return Load(
            sessions=len(self._minds),
            turns=len(self._thoughts),
            queued=sum(thought.phase is not Phase.DECODE for thought in self._thoughts),
            bytes_used=held * bytes_a_token,
            bytes_cap=self._sessions * self._window * bytes_a_token,
        )

    def shut(self) -> None:
        self._thoughts.clear()
        self._minds.clear()
