"""A conversation's history: all that is needed to go on with it elsewhere. Bounded by the context window."""

from dataclasses import dataclass

from omni_live.sessions.continuity import Message
from omni_live.sessions.items import Item
from omni_live.sessions.settings import Settings


@dataclass(frozen=True, slots=True)
class History:
    """What a fork, a snapshot or another server takes on."""

    settings: Settings
    items: tuple[Item, ...]
    turns: int
    """Turns so far: the next turn's seed depends on it."""
    known: tuple[Message, ...]
    """What the thinker's state stands for, if it is taken along."""
