"""A dreamt table to play with: each key is a frame.

arrows  push    space  wait    u  go back 8 frames    f  fork, and go on in the fork    p  back to its parent    q  quit
"""

from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np

from omni_live.clients.world import World
from omni_live.clients.world_errors import Refused, RequestFailed
from omni_live.clients.world_wire import Images

BACK: Final = 8
MOVES: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {"up": (0.0, -1.0), "down": (0.0, 1.0), "left": (-1.0, 0.0), "right": (1.0, 0.0), " ": (0.0, 0.0)}
)
HELP: Final = "arrows push, space waits, u back 8, f fork, p parent, q quit"


class Shows(Protocol):
    """Where the pictures go; `keyboard.Screen` is one."""

    def show(self, image: Images, words: str) -> None: ...


async def play(world: World, keys: AsyncIterator[str], screen: Shows) -> list[str]:
    """Until q, or there are no more keys; what was done, by key. Raises WorldError.

    What the server refuses is told on the screen, and the game goes on.
    """
    branches, done = [world], list[str]()
    image = await _seen(world)
    screen.show(image, _words(branches, ""))
    async for key in keys:
        if key == "q":
            break
        if key not in MOVES and key not in "ufp":
            continue
        trouble = ""
        try:
            image = await _do(key, branches)
            done.append(key)
        except (Refused, RequestFailed) as error:
            trouble = str(error)
        screen.show(image, _words(branches, trouble))
    return done


async def _do(key: str, branches: list[World]) -> Images:
    """What the key says; the picture then. The last of `branches` is played."""
    world = branches[-1]
    if key == "u":
        await world.rewind(max(0, world.position - BACK))
    elif key == "f":
        branches += await world.fork()
    elif key == "p":
        if len(branches) > 1:
            await branches.pop().close()
    else:
        (frame,) = await world.step(np.array([[MOVES[key]] * 2], np.float32))
        assert frame.image is not None, "it was asked for"
        return frame.image
    return await _seen(branches[-1])


async def _seen(world: World) -> Images:
    (frame,) = await world.look()
    assert frame.image is not None, "it was asked for"
    return frame.image


def _words(branches: list[World], trouble: str) -> str:
    return f"frame {branches[-1].position}, branch {len(branches)}   {trouble or HELP}"
