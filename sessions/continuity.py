"""Continuity: model state that outlives a turn. The bytes live in a replica; the session owns what they stand for.

The session tells the thinker its context as a difference: how many leading messages of what the state stands for still
hold, and the messages after them. A cut to what was heard, a deleted item, a discarded tentative turn and a state
lost with its replica are then one case: the number of messages that still hold gets smaller.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from omni_live.sessions.items import Role
from omni_live.sessions.payload import Payload


@dataclass(frozen=True, slots=True)
class Message:
    """What the model sees of an item."""

    item_id: str
    role: Role
    text: str


@dataclass(slots=True)
class Continuity:
    """What one session's state in a stage stands for."""

    known: tuple[Message, ...] = ()

    def lost(self) -> None:
        """The replica is gone, and the state with it."""
        self.known = ()

    def keeps(self, messages: Sequence[Message]) -> int:
        """How many leading messages the state holds already."""
        same = 0
        for have, want in zip(self.known, messages, strict=False):
            if have != want:
                break
            same += 1
        return same

    def context(self, messages: Sequence[Message], remember: bool = True) -> Payload:
        """The difference to `messages`, which the state stands for from now on (unless it is a side turn's).

        meta: `keep`, the number of leading messages that still hold. body: JSON, a list of [role, text].
        """
        keep = self.keeps(messages)
        if remember:
            self.known = tuple(messages)
        body = json.dumps([[m.role.value, m.text] for m in messages[keep:]], ensure_ascii=False).encode()
        return Payload("messages", {"keep": keep}, body)

    def said(self, message: Message) -> None:
        """The model wrote this message itself, so the state holds it."""
        self.known = (*self.known, message)

    def dropped(self, item_ids: frozenset[str]) -> None:
        """The stage dropped these messages for lack of room."""
        self.known = tuple(m for m in self.known if m.item_id not in item_ids)


def read_context(payload: Payload) -> tuple[int, list[tuple[Role, str]]]:
    """The receiving end of `Continuity.context`: (keep, [(role, text), ...])."""
    keep = payload.meta["keep"]
    if not isinstance(keep, int):
        raise TypeError("keep is not a number")
    return keep, [(Role(role), str(text)) for role, text in json.loads(bytes(payload.body))]
