"""Which action a robot executes now, and when it asks for more: chunks of actions on a clock that counts control steps.

A chunk's first row belongs to the step before which its observation was made, or, where the arm held still since, to
the step at which the chunk comes. Two ways to execute chunks:

    in turn       so many rows of a chunk, then the robot holds still until the next one is there
    overlapping   the next chunk is asked for while the last one is executed, and takes over when it is there, at the
                  row that belongs to that step: the arm never waits. With `continues` the server is told how much of
                  the last chunk is executed meanwhile, and makes the new one agree with it (real-time chunking, Black
                  et al. 2025)

Nothing here waits or knows the time. A step always has an answer: an action, or None, which is to hold still.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_live.clients.robot_wire import Actions
from omni_live.protocols.openpi.contract import Contract

Action = NDArray[np.float32]
"""(dimensions,)"""

DELAYS_KEPT: Final = 8
"""Chunks whose delay counts for the estimate, which is the longest of them."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How chunks are executed."""

    execute_steps: int = 4
    """Of a chunk, before the next one is asked for."""
    overlaps: bool = False
    continues: bool = False

    def __post_init__(self) -> None:
        if self.execute_steps < 1:
            raise ValueError("execute_steps is at least 1")
        if self.continues and not self.overlaps:
            raise ValueError("a chunk that is not executed while the next one is made has nothing to go on with")


@dataclass(frozen=True, slots=True)
class Ask:
    """A chunk is wanted, for what is observed now."""

    number: int
    """No other request of the same executor has it, whatever the episode."""
    step: int
    executed_steps: int | None = None
    """Of the last chunk, before the new one's first row."""
    delay_steps: int | None = None
    """Of the new chunk, which are executed from the last one meanwhile."""


@dataclass(frozen=True, slots=True)
class _Plan:
    actions: Actions
    begins: int
    """The step to which the first row belongs."""


class Executor:
    """One robot's chunks. Per step: `due`, then `act`; `take` or `lost` whenever an answer comes."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.step = 0
        """The step that is executed next; since the last reset."""
        self.late_chunks = 0
        """That came when all of their steps were over."""
        self.holds = 0
        """Steps for which there was no action."""
        self._plan: _Plan | None = None
        self._open: Ask | None = None
        self._agreed = False
        """Whether the server's last chunk of this session is the plan: not so after a chunk got lost on its way."""
        self._asked = 0
        self._still_since = 0
        """No action was executed in this step or later."""
        self._delays: deque[int] = deque(maxlen=DELAYS_KEPT)

    def reset(self) -> None:
        """A new episode: what was asked for is void, and so is the plan. Delays are remembered: the network stays."""
        self.step = 0
        self._plan = None
        self._open = None
        self._agreed = False
        self._still_since = 0

    @property
    def is_asking(self) -> bool:
        return self._open is not None

    @property
    def delay_steps(self) -> int:
        """How many steps the next chunk will probably take to come."""
        return max((*self._delays, 1 if self.rules.overlaps else 0))

    def due(self) -> Ask | None:
        """The request that is to be made with what is observed now; None where none is, or one is on its way."""
        if self._open is not None or not self._is_time():
            return None
        self._asked += 1
        self._open = Ask(self._asked, self.step, *self._going_on())
        return self._open

    def take(self, ask: Ask, actions: Actions) -> bool:
        """The chunk that answers `ask` is here; False where it is of no use: nobody waits for it, or it is too late."""
        if ask != self._open:
            return False
        self._open = None
        self._delays.append(self.step - ask.step)
        begins = self.step if self._still_since <= ask.step else ask.step
        self._agreed = self.step - begins < len(actions)
        if self._agreed:
            self._plan = _Plan(actions, begins)
        else:
            self.late_chunks += 1
        return self._agreed

    def lost(self, ask: Ask) -> None:
        """No chunk will answer `ask`."""
        if ask == self._open:
            self._open = None
            self._agreed = False

    def stop(self, ask: Ask) -> None:
        """`ask` was answered with something unsafe: neither that nor the plan is executed on."""
        if ask == self._open:
            self._open = None
            self._plan = None
            self._agreed = False

    @property
    def has_action(self) -> bool:
        return self._row() is not None

    def act(self) -> Action | None:
        """The action of this step, which is over with that; None: hold still."""
        row = self._row()
        self.step += 1
        if row is None:
            self.holds += 1
        else:
            self._still_since = self.step
        return row

    def _row(self) -> Action | None:
        plan = self._plan
        if plan is None:
            return None
        done = self.step - plan.begins
        end = len(plan.actions) if self.rules.overlaps else min(self.rules.execute_steps, len(plan.actions))
        return plan.actions[done] if done < end else None

    def _is_time(self) -> bool:
        if self._plan is None:
            return True
        horizon = len(self._plan.actions)
        last = horizon - self.delay_steps if self.rules.overlaps else horizon
        return self.step - self._plan.begins >= min(self.rules.execute_steps, last)

    def _going_on(self) -> tuple[int, int] | tuple[None, None]:
        if self._plan is None or not self.rules.continues or not self._agreed:
            return None, None
        executed = self.step - self._plan.begins
        left = len(self._plan.actions) - executed
        return (executed, min(self.delay_steps, left)) if left > 0 else (None, None)


def unsafe(actions: Actions, contract: Contract) -> str | None:
    """Why a robot must not execute these actions; None where it may."""
    if actions.ndim != 2 or actions.shape[1] != contract.action_dim:
        return "bad_actions"
    if not np.isfinite(actions).all():
        return "action_not_finite"
    low, high = np.float32(contract.action_low), np.float32(contract.action_high)
    return "action_out_of_range" if ((actions < low) | (actions > high)).any() else None
