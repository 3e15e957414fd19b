"""Continuity: model state that outlives a turn. The bytes live in a replica; the session owns what they stand for.

The session tells the thinker its context as a difference: how many leading messages of what the state stands for still
hold, and the messages after them. A cut to what was heard, a deleted item, a discarded tentative turn and a state
lost with its replica are then one case: the number of messages that still hold gets smaller.

A turn that is cut may or may not have reached the stage before its fence did. So what a turn was given counts only
once the turn is finished; until then the state stands for what that has in common with what it stood for before.
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
    """The leading messages that the state holds for certain."""
    given: tuple[Message, ...] | None = None
    """All that the turn under way was given."""

    def lost(self) -> None:
        """The replica is gone, and the state with it."""
        self.known, self.given = (), None

    def keeps(self, messages: Sequence[Message]) -> int:
        """How many leading messages the state holds already."""
        same = 0
        for have, want in zip(self.known, messages, strict=False):
            if have != want:
                break
            same += 1
        return same

    def context(self, messages: Sequence[Message], remember: bool = True) -> Payload:
        """The difference to `messages`, which the state is about to stand for (unless they are a side turn's).

        meta: `keep`, the number of leading messages that still hold. body: JSON, a list of [role, text].
        """
        keep = self.keeps(messages)
        if remember:
            self.given = tuple(messages)
            self.known = self.given[:keep]
        body = json.dumps([[m.role.value, m.text] for m in messages[keep:]], ensure_ascii=False).encode()
        return Payload("messages", {"keep": keep}, body)

    def said(self, message: Message) -> None:
        """The turn is finished: the state holds what it was given and what the model wrote itself."""
        if self.given is not None:
            self.known = (*self.given, message)
            self.given = None

    def oldest(self, count: int) -> frozenset[str]:
        """The items of the `count` oldest messages; a system message at the front is not counted."""
        messages = self._messages()
        return frozenset(message.item_id for message in messages[skipped(messages) :][:count])

    def dropped(self, item_ids: frozenset[str]) -> int:
        """These items are gone: how many messages the stage shall forget, behind a system message at the front.

        Only messages at the front can be forgotten; of a message further back the next context says that it is gone.
        """
        messages = self._messages()
        first = last = skipped(messages)
        while last < len(messages) and messages[last].item_id in item_ids:
            last += 1
        gone = frozenset(message.item_id for message in messages[first:last])
        self.known = tuple(message for message in self.known if message.item_id not in gone)
        if self.given is not None:
            self.given = tuple(message for message in self.given if message.item_id not in gone)
        return last - first

    def _messages(self) -> tuple[Message, ...]:
        return self.known if self.given is None else self.given


def skipped(messages: Sequence[Message]) -> int:
    """1 where a system message stands at the front, which no stage ever drops."""
    return 1 if messages and messages[0].role is Role.SYSTEM else 0


def read_context(payload: Payload) -> tuple[int, list[tuple[Role, str]]]:
    """The receiving end of `Continuity.context`: (keep, [(role, text), ...])."""
    keep = payload.meta["keep"]
    if not isinstance(keep, int):
        raise TypeError("keep is not a number")
    return keep, [(Role(role), str(text)) for role, text in json.loads(bytes(payload.body))]
