"""What a session wants done. Effects are values; the orchestrator performs them in order."""

from collections.abc import Mapping

from omni_live.sessions.events import Event
from omni_live.sessions.history import History
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.stamp import Fence, Stamp
from omni_live.sessions.values import value


@value
class Submit:
    """Start a turn: open it on every stage between `entry` and `outputs`, then hand `payload` to `entry`."""

    stamp: Stamp
    entry: str
    outputs: frozenset[str]
    payload: Payload
    params: Mapping[str, Scalar]
    """Turn options for every stage of the turn: seed, voice, temperature, max_tokens, ..."""


@value
class Feed:
    """Hand a session-addressed payload (client audio, a command about it, a context) to one stage's replica.

    Feeds to one stage arrive in the order in which they were given. They carry no epoch.
    """

    stage: str
    payload: Payload


@value
class RaiseFence:
    """Write the row. Comes before the abort and before the terminal event, always."""

    fence: Fence


@value
class Abort:
    """Tell every stage of the turn to stop; nobody waits for it."""

    stamp: Stamp


@value
class Credit:
    """The client side took `units` chunks of this turn's output from `stage`: it may send as many more."""

    stamp: Stamp
    stage: str
    units: int


@value
class Emit:
    """Send `event` to the client. Fenced content is never sent, also if it waits in an outbox."""

    event: Event
    seq: int
    """Output sequence number, 0 for frames that are not journaled."""
    content: Stamp | None = None
    """The stamp of a content event; None for everything that must go out whatever the fence says."""
    nbytes: int = 0


@value
class Hold:
    """Hand no content to the socket until `Unhold`, also none that waits in the connection's outbox."""


@value
class Unhold:
    """Go on with the content that was held."""


@value
class Replace:
    """Another attachment took over: tell the transport of `attachment` so and let it go."""

    attachment: int


@value
class Wake:
    """Call `handle(Woke(), now)` at `at_ns` (monotonic) or as soon after as possible; the latest Wake counts."""

    at_ns: int


@value
class Count:
    """Add to a counter of /metrics (G12: whatever is dropped by policy is counted)."""

    name: str
    amount: int = 1


@value
class TakeSnapshot:
    """Ask a stage for what it keeps of the session; `StageSnapshotted` with the same ticket answers."""

    stage: str
    ticket: int


@value
class Restore:
    """Give a stage back what a snapshot kept; it may be another replica's."""

    stage: str
    payload: Payload


@value
class SnapshotReady:
    """The answer to `SnapshotAsked`, for whoever asked."""

    ticket: int
    history: History
    state: Payload | None
    """The thinker's state, None where it keeps none: the history alone is enough to go on, only slower."""


@value
class Release:
    """The session is closed: free its slot, handles, tickets and subscriptions, exactly once. The last effect."""

    reason: str


Effect = (
    Submit
    | Feed
    | RaiseFence
    | Abort
    | Credit
    | Emit
    | Hold
    | Unhold
    | Replace
    | Wake
    | Count
    | TakeSnapshot
    | Restore
    | SnapshotReady
    | Release
)
