"""What a robot policy must offer to be served: three members, and no knowledge of sessions, batching or deadlines."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from omni_live.protocols.openpi.contract import Contract
from omni_live.sessions.payload import Scalar
from omni_live.sessions.values import value

Array = NDArray[np.generic]
Chunk = NDArray[np.float32]
"""(action_horizon, action_dim), in the contract's units; `Query.previous` may have fewer rows."""


class BadPolicy(ValueError):
    """A policy's path names nothing that can be imported, or its options do not fit together."""


@value
class Query:
    """One robot's observation, as the contract states it, and what of its last chunk is still to come."""

    arrays: Mapping[str, Array]
    """The contract's fields by key. Valid during the call only, and perhaps not writable: copy what you keep."""
    texts: Mapping[str, str]
    seed: int
    """All of a query's randomness comes from here, so that the same query and seed give the same actions."""
    previous: Chunk | None = None
    """The session's last chunk from the step on at which the new one begins (row 0); None: there is nothing to go on
    with. Between 1 and action_horizon rows."""
    delay_steps: int = 0
    """So many first steps of the new chunk are fixed, as `previous` has them: the arm executes them meanwhile."""


class Policy(Protocol):
    """A policy. It is made as `Policy(options)`, which must be cheap, and called from one thread."""

    contract: Contract
    """Known before `load`: the server announces it."""

    def load(self) -> None:
        """Load weights and warm up; may take long."""

    def predict_chunk(self, batch: Sequence[Query]) -> Sequence[Chunk]:
        """One chunk for each query, in order; float32 of (action_horizon, action_dim).

        The queries come from different sessions: nothing of one may show in another's chunk. A policy that cannot
        continue a chunk ignores `previous`. May raise anything; the queries are then tried one by one.
        """


def load_policy(path: str, options: Mapping[str, Scalar]) -> Policy:
    """The policy that `module:Class` names, made with these options. Raises BadPolicy where there is none."""
    module, _, name = path.partition(":")
    try:
        made: Callable[[Mapping[str, Scalar]], Policy] = vars(importlib.import_module(module))[name]
    except (ImportError, KeyError, ValueError) as error:
        raise BadPolicy(f"no policy {path!r}: {error}") from error
    return made(options)
