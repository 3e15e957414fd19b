"""What a prompt means to a world that is moved and not told: the direction that its words name.

For worlds whose actions are movements in the picture's plane, to the right and downwards.
"""

import re
from collections.abc import Mapping
from math import hypot
from typing import Final

Direction = tuple[float, float]

_DIRECTIONS: Final[Mapping[str, Direction]] = {
    "left": (-1.0, 0.0),
    "right": (1.0, 0.0),
    "up": (0.0, -1.0),
    "down": (0.0, 1.0),
}
_STILL: Final = frozenset({"stop", "stay", "still", "wait"})
_WORD: Final = re.compile(r"[a-z]+")


def direction(prompt: str) -> Direction | None:
    """The prompt's direction, of length 1, or 0 where it says to stop; None where it names none."""
    words = _WORD.findall(prompt.lower())
    named = [_DIRECTIONS[word] for word in dict.fromkeys(words) if word in _DIRECTIONS]
    right, down = sum(x for x, _ in named), sum(y for _, y in named)
    length = hypot(right, down)
    if length:
        return right / length, down / length
    return (0.0, 0.0) if not named and _STILL.intersection(words) else None
