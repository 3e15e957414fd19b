"""Session slots: which rows of the fence table are whose."""

from collections import deque
from typing import NamedTuple

LAST_GENERATION = 2**32 - 2
"""A row keeps the generation in 32 bits and a freed slot's rows the next one; a slot given away so often is retired."""


class Slot(NamedTuple):
    """A session's place in the fence table. The same pair is never given away twice."""

    slot: int
    generation: int


class SlotError(RuntimeError):
    """A slot was freed that is not taken in this generation; a bug of ours."""


class Slots:
    """Gives away `cap` slots. The longest free one goes first, so that a row is reused as late as possible."""

    def __init__(self, cap: int) -> None:
        self._free = deque(range(cap))
        # From 1: a row that was never written reads as generation 0 and admits nothing.
        self._generations = [0] * cap
        self._taken = bytearray(cap)

    @property
    def taken(self) -> int:
        return sum(self._taken)

    def take(self) -> Slot | None:
        """A free slot in a generation of its own, None at the cap."""
        if not self._free:
            return None
        slot = self._free.popleft()
        self._taken[slot] = 1
        self._generations[slot] += 1
        return Slot(slot, self._generations[slot])

    def free(self, slot: int, generation: int) -> None:
        """Take the slot back. Raises SlotError where it is not taken in this generation."""
        if not (0 <= slot < len(self._taken) and self._taken[slot] and self._generations[slot] == generation):
            raise SlotError(f"slot {slot} generation {generation} is not taken")
        self._taken[slot] = 0
        if generation < LAST_GENERATION:
            self._free.append(slot)
