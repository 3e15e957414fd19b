"""A model-predictive planner: it dreams what its actions would do, and does what turned out best in the dream.

It sees the camera's picture and the prompt, no more. At each decision a world begins at the picture and is forked, each
branch is rolled with actions of its own, places are read off the dreamt pictures by colour, and the first frames of the
best branch are carried out. Then it looks again.
"""

import time
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from omni_live.clients.envs.table import Observation, TableEnv
from omni_live.clients.planning import (
    PUSHER,
    Branches,
    Images,
    Search,
    first_branches,
    goal,
    next_branches,
    places,
    score,
)


class Dreams(Protocol):
    """A world to dream in."""

    async def roll(self, image: Images, branches: Branches, looks: tuple[int, ...]) -> Images:
        """Pictures uint8[N, looks, height, width, 3] of the frames `looks`, counted from 1, of each of N branches that
        begin at the picture `image`."""


@dataclass(slots=True)
class Planner:
    """Decides by dreaming. `chance` fixes what is tried."""

    dreams: Dreams
    search: Search = field(default_factory=Search)
    chance: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    async def decide(self, observation: Observation) -> NDArray[np.float32]:
        """Actions float32[n, 2] for the next control steps. Raises UnknownTask, and what the dreams raise."""
        image, wanted = observation["observation/image"], goal(observation["prompt"])
        search = self.search
        branches = first_branches(places(image, wanted.colour), places(image, PUSHER), wanted, search, self.chance)
        costs = score(await self.dreams.roll(image, branches, search.looks), wanted)
        for _ in range(search.rounds - 1):
            # What was best may stay the best: the round before counts as well.
            more = next_branches(branches, costs, search, self.chance)
            found = score(await self.dreams.roll(image, more, search.looks), wanted)
            branches, costs = np.concatenate([branches, more]), np.concatenate([costs, found])
        best: NDArray[np.float32] = branches[int(np.argmin(costs))]
        return best[: search.execute].reshape(-1, best.shape[-1])


@dataclass(frozen=True, slots=True)
class RandomPolicy:
    """Moves straight in directions drawn by chance: what a planner has to beat."""

    chance: np.random.Generator
    steps: int = 6

    async def decide(self, observation: Observation) -> NDArray[np.float32]:
        """Actions float32[steps, 2]."""
        angle = self.chance.uniform(0.0, 2 * np.pi)
        return np.repeat(np.array([[np.cos(angle), np.sin(angle)]], np.float32), self.steps, 0)


class Decider(Protocol):
    """What drives the table."""

    async def decide(self, observation: Observation) -> NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """How episodes went."""

    success: tuple[bool, ...]
    steps: int
    decisions_ms: tuple[float, ...]

    @property
    def share(self) -> float:
        """Of episodes that ended well."""
        return sum(self.success) / max(1, len(self.success))

    def figures(self) -> dict[str, float | int | None]:
        """What was measured, by name."""
        took = self.decisions_ms
        return {
            "episodes": len(self.success),
            "success": round(self.share, 4),
            "steps": self.steps,
            "decisions": len(took),
            "decision_ms_p50": round(float(np.percentile(took, 50)), 2) if took else None,
        }


async def drive_table(decider: Decider, episodes: int, *, seed: int = 0, max_steps: int = 150) -> Outcome:
    """So many episodes at the true table of `seed`, one after another."""
    table = TableEnv(seed)
    success, steps, took_ms = [], 0, []
    for _ in range(episodes):
        seen, is_done = table.reset(), False
        while not is_done and table.steps < max_steps:
            began = time.perf_counter()
            actions = await decider.decide(seen)
            took_ms.append((time.perf_counter() - began) * 1e3)
            for action in actions[: max_steps - table.steps]:
                seen, is_done = table.step(action)
                if is_done:
                    break
        success.append(is_done)
        steps += table.steps
    return Outcome(tuple(success), steps, tuple(took_ms))
