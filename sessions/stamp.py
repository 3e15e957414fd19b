"""Stamps and fences: what says whether a piece of work still counts.

Every unit of turn work and every output carries a `Stamp`. A session owns `LANES` neighbouring rows of the fence
table: lane 0 is the conversation, the others are side slots (a tentative turn, an out-of-band response). A row
holds (generation, epoch); a stamp is admitted where both equal the row's, so a raised epoch or a reused slot makes
everything older stale wherever it is met.
"""

from dataclasses import dataclass
from typing import NamedTuple, NewType

LANES = 4
"""Fence rows per session: the conversation and three side slots."""

SessionKey = NewType("SessionKey", int)
"""generation << 32 | session slot: what workers know a session by."""


def session_key(slot: int, generation: int) -> SessionKey:
    return SessionKey(generation << 32 | slot)


class Stamp(NamedTuple):
    """Names one unit of work: whose, of which epoch and turn, from which stage, in which order, how urgent."""

    slot: int
    """Row of the fence table: session slot * LANES + lane."""
    generation: int
    """How often the session slot was given away before; never reused with the same slot."""
    epoch: int
    turn: int
    stage: int = 0
    """Index of the producing stage in its pipeline."""
    seq: int = 0
    """Counts a stage's outputs within the turn, from 0."""
    deadline_ns: int = 0
    """Monotonic time after which the user would notice; 0 is no deadline. Engines take the earliest first."""

    @property
    def session_slot(self) -> int:
        return self.slot // LANES

    @property
    def lane(self) -> int:
        return self.slot % LANES

    @property
    def session(self) -> SessionKey:
        return session_key(self.slot // LANES, self.generation)


@dataclass(frozen=True, slots=True)
class Fence:
    """One lane's row: everything stamped with another generation or epoch is stale."""

    slot: int
    generation: int
    epoch: int = 1

    def raised(self) -> "Fence":
        return Fence(self.slot, self.generation, self.epoch + 1)

    def admits(self, stamp: Stamp) -> bool:
        return stamp.epoch == self.epoch and stamp.generation == self.generation and stamp.slot == self.slot

    def stamp(self, turn: int, deadline_ns: int = 0) -> Stamp:
        return Stamp(self.slot, self.generation, self.epoch, turn, 0, 0, deadline_ns)
