"""The simulation notices a core that is broken: each of these breaks it in one place and must be found out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from simscenes import draw, play

from omni_live.protocols.websocket.outbox import Outbox
from omni_live.runtime.orchestrator import Orchestrator
from omni_live.runtime.slots import Slots
from omni_live.sessions.admission import Admission
from omni_live.sessions.continuity import Continuity
from omni_live.sessions.conversation import Conversation
from omni_live.sessions.events import RolloutAt
from omni_live.sessions.journal import Arrival, InputJournal, OutputJournal
from omni_live.sessions.past import Actions, Past
from omni_live.sessions.payload import Payload
from omni_live.sessions.plain import PlainSession
from omni_live.sessions.reply import Reply
from omni_live.sessions.rollout import Awaited, Making, RolloutSession, RolloutTurn
from omni_live.sessions.serial import SerialSession
from omni_live.sessions.session import Session

MOST_SEEDS = 150
"""Of the scenes in question: so many are played before a broken core counts as unnoticed."""
DREAMS = ("dreams", "dreams_faults")


@dataclass(frozen=True, slots=True)
class Broken:
    """A method in the place of another."""

    name: str
    where: type
    method: str
    wrong: Callable[..., object]
    scenes: tuple[str, ...]


def nothing(*_: object, **__: object) -> None:
    pass


def no_fence(talk: Conversation, exchange: object) -> None:
    talk._abort(exchange.stamp)  # type: ignore[attr-defined]


def one_too_many(journal: OutputJournal, seq: int) -> None:
    while journal._entries and journal._entries[0].seq <= seq + 1:
        journal.nbytes -= journal._entries.popleft().nbytes
    journal._acked = max(journal._acked, seq)


def repeats_count(journal: InputJournal, seq: int) -> Arrival:
    if seq in (journal.taken, journal.taken + 1):
        journal.taken = seq
        return Arrival.NEXT
    return Arrival.DUPLICATE if seq < journal.taken else Arrival.AHEAD


def lets_nobody_in(admission: Admission, place: int) -> list[object]:
    if admission._queue.pop(place, None) is None:
        cost = admission._held.pop(place)
        admission._whole = admission._whole.minus(cost.amount)
        admission._used[cost.pipeline] = admission._used[cost.pipeline].minus(cost.amount)
    return []


def answers_in_order(rollout: RolloutSession, _: object) -> Awaited | None:
    return rollout._answers.pop(0) if rollout._answers else None


def counts_what_is_asked(rollout: RolloutSession, turn: RolloutTurn) -> None:
    while turn.actions is not None and rollout._past is not None and turn.told < turn.frames:
        rollout._past.commit(turn.actions, turn.told)
        turn.told += 1


def leaves_the_stage_ahead(rollout: RolloutSession, turn: RolloutTurn) -> None:
    rollout._emit(RolloutAt(turn.request_id, rollout.position))


def replays_nothing(rollout: RolloutSession, making: Making, past: Past, actions: Actions) -> None:
    rollout._made(making)


def moves_without_a_fence(rollout: SerialSession[Any, Any], reason: str) -> None:
    if rollout._turn is not None:
        rollout._cut(rollout._turn, reason)
    rollout._drop_waiting(reason)


def knocks_with_a_start(rollout: RolloutSession, making: Making) -> None:
    making.knocked, making.since_ns = True, rollout._now
    rollout._feed(Payload("reset", {"seed": 0}), "knock", 0)


CORES = (
    Broken("fences nothing on an interruption", Conversation, "_fence", no_fence, ("interrupts",)),
    Broken("raises no epoch", Session, "_raise_fence", nothing, ("plain",)),
    Broken("replays fenced content", OutputJournal, "fence", lambda *_: 0, ("storm", "plain_faults")),
    Broken("acknowledges one frame too many", OutputJournal, "ack", one_too_many, ("storm",)),
    Broken("takes an input twice", InputJournal, "arrive", repeats_count, ("storm",)),
    Broken("keeps stale frames in the outbox", Outbox, "_purge", nothing, ("slow", "plain_faults")),
    Broken("leaks slots", Slots, "free", nothing, ("plain",)),
    Broken("leaves room empty", Admission, "give_back", lets_nobody_in, ("caps",)),
    Broken("trusts a state that is lost", Continuity, "lost", nothing, ("talk_faults", "verbs")),
    Broken("keeps what nobody heard", Reply, "heard", lambda reply, _: reply.text, ("interrupts",)),
    Broken("speaks on a context that changed", Conversation, "_think_again", nothing, ("interrupts", "storm")),
    Broken("adopts whatever was tried", Conversation, "_fits", lambda *_: True, ("tentative",)),
    Broken("fails no turn of a dead replica", Orchestrator, "_fail", nothing, ("plain_faults",)),
    Broken("gives no credit", Orchestrator, "_credit", nothing, ("plain",)),
    Broken("forgets who waits on close", PlainSession, "_end_turns", nothing, ("caps", "leases")),
    Broken("leaves the stage ahead of what came", RolloutSession, "_over", leaves_the_stage_ahead, DREAMS),
    Broken("counts frames that did not come", RolloutSession, "_went_out", counts_what_is_asked, DREAMS),
    Broken("makes a lost state without its actions", RolloutSession, "_replay", replays_nothing, DREAMS),
    Broken("moves a rollout without a fence", RolloutSession, "_interrupt", moves_without_a_fence, DREAMS),
    Broken("takes any answer for the next", RolloutSession, "_answered", answers_in_order, DREAMS),
    Broken("takes a start for what was given back", RolloutSession, "_knock", knocks_with_a_start, DREAMS),
)


def notices(scenes: tuple[str, ...]) -> bool:
    seeds = (seed for seed in range(100_000) if draw(seed).kind in scenes)
    for _ in range(MOST_SEEDS):
        try:
            play(next(seeds))
        except (AssertionError, KeyError, RuntimeError):  # the latter two are what a core that is broken stumbles over
            return True
    return False


@pytest.mark.parametrize("broken", CORES, ids=lambda broken: broken.name.replace(" ", "-"))
def test_the_simulation_notices_a_core_that(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broken.where, broken.method, broken.wrong)
    assert notices(broken.scenes), f"{MOST_SEEDS} schedules, and nobody notices a core that {broken.name}"
