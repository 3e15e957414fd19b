"""A planner's dreams in a served world: a rollout that begins at each picture, forked for each branch.

A dream is worth nothing once it is over, so a lost fork ends the decision with its error.
"""

import asyncio
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from omni_live.clients.planning import Branches, Images
from omni_live.clients.world import Link, World
from omni_live.protocols.world.messages import MAX_FORKS


@dataclass(slots=True)
class ServedDreams:
    """`planner.Dreams` on a link. Whoever made it closes it."""

    link: Link
    _root: World | None = field(default=None, init=False)

    async def roll(self, image: Images, branches: Branches, looks: tuple[int, ...]) -> Images:
        """See `Dreams`. Raises WorldError."""
        root = self._root
        if root is None:
            # Latents only: of a branch few frames are looked at, and the others need not be drawn.
            root = self._root = await self.link.open(image=image, outputs=("latent",))
        else:
            await root.reset(image=image)
        found: list[Images] = []
        for start in range(0, len(branches), MAX_FORKS):
            found += await _rolled(root, branches[start : start + MAX_FORKS], looks)
        return np.stack(found)

    async def aclose(self) -> None:
        """Give the rollout up."""
        root, self._root = self._root, None
        if root is not None:
            await root.close()


async def _rolled(root: World, branches: Branches, looks: tuple[int, ...]) -> list[Images]:
    children = await root.fork(count=len(branches))
    try:
        return await asyncio.gather(
            *(_branch(child, moves, looks) for child, moves in zip(children, branches, strict=True))
        )
    finally:
        for child in children:
            child.discard()


async def _branch(child: World, moves: NDArray[np.float32], looks: tuple[int, ...]) -> Images:
    await child.step(moves)
    images: list[Images] = []
    for step in looks:
        (frame,) = await child.look(step, outputs=("frame",))
        assert frame.image is not None, "it was asked for"
        images.append(frame.image)
    return np.stack(images)
