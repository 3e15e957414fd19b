"""What a session is told: by its client (through a door), by stages, by pools, by the clock."""

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum

from omni_live.sessions.history import History
from omni_live.sessions.items import Item, Modality
from omni_live.sessions.payload import NO_META, Payload, Scalar
from omni_live.sessions.settings import Settings
from omni_live.sessions.stamp import Stamp
from omni_live.sessions.values import value


class Outcome(StrEnum):
    """How a stage's part of a turn ended."""

    DONE = "done"
    INCOMPLETE = "incomplete"
    FAILED = "failed"


# -- from stages and pools ---------------------------------------------------------------------------------------


@value
class StageSpoke:
    """A stage of the final-output set produced one chunk."""

    stamp: Stamp
    stage: str
    payload: Payload
    outcome: Outcome | None = None
    """How the stage's part of the turn ended, where this was its last chunk; no StageEnded follows then."""
    reason: str = ""


@value
class StageEnded:
    """A stage of the final-output set finished (or failed) its part of the turn; nothing follows from it."""

    stamp: Stamp
    stage: str
    outcome: Outcome
    reason: str = ""
    """A stable code where the outcome is not DONE: max_output_tokens, repetition, stage_error, replica_lost, ..."""


@value
class StageFound:
    """Something about the client's input (ears) or the session's state, without an epoch."""

    stage: str
    payload: Payload


@value
class StageLost:
    """The replica that held this stage's state is gone; a later Submit or Feed reaches another one, with none."""

    stage: str


@value
class StageSnapshotted:
    """What a stage keeps of the session, or None where it keeps nothing or is gone."""

    stage: str
    ticket: int
    payload: Payload | None


# -- from the client ---------------------------------------------------------------------------------------------


@value
class Attached:
    """A transport takes the session. `seen` is the last output sequence number it has; None starts anew.

    `sent` is the last input sequence number that the client has sent (0: it sends none).
    """

    attachment: int
    token: str | None = None
    seen: int | None = None
    sent: int = 0


@value
class Detached:
    """The transport is gone. Not a close."""

    attachment: int


@value
class Sequenced:
    """A client input with its sequence number, from 1."""

    seq: int
    input: "ClientInput"


@value
class EventAcked:
    """The client has everything up to this output sequence number."""

    seq: int


@value
class Heartbeat:
    event_id: str | None = None


@value
class CloseAsked:
    reason: str = "close_requested"
    event_id: str | None = None


@value
class Asked:
    """A plain turn: one payload in, the outputs of the named stages back (one-shot calls, robots, rollouts)."""

    entry: str
    outputs: frozenset[str]
    payload: Payload
    params: Mapping[str, Scalar] = field(default_factory=lambda: NO_META)
    request_id: str = ""
    due_ms: float = 0.0
    """So long after it was asked the answer is late; engines take the earliest first."""
    latest: bool = False
    """Whatever waits of the session is out of date: it ends as interrupted (`superseded`)."""


@value
class ResetAsked:
    """Begin anew: the fence moves, what runs or waits ends as interrupted (`reset`), the stages forget the session."""

    stages: tuple[str, ...]
    """Those that keep something of it."""
    event_id: str | None = None


@value
class CancelAsked:
    response_id: str | None = None
    event_id: str | None = None


# -- from the client of a conversation ---------------------------------------------------------------------------


@value
class AudioAppended:
    """Microphone audio: int16 little endian mono at the pipeline's input rate. Has no reply."""

    pcm: bytes


@value
class AudioCommitted:
    """End the user's turn by hand. `respond` None leaves the settings to decide whether an answer follows."""

    respond: bool | None = None
    event_id: str | None = None


@value
class AudioCleared:
    event_id: str | None = None


@value
class SettingsAsked:
    """The whole of the settings that shall hold from now on; the door merged what the client sent into them."""

    settings: Settings
    event_id: str | None = None


@value
class ItemCreateAsked:
    item: Item
    after: str | None = None
    """None appends, "root" puts it first, else the id of the item before."""
    event_id: str | None = None


@value
class ItemDeleteAsked:
    item_id: str
    event_id: str | None = None


@value
class ItemRetrieveAsked:
    item_id: str
    event_id: str | None = None


@value
class ItemTruncateAsked:
    """The client played only so much of the item."""

    item_id: str
    audio_end_ms: int
    content_index: int = 0
    event_id: str | None = None


@value
class RespondAsked:
    """Ask for a response now; every None leaves the session's setting."""

    modality: Modality | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    seed: int | None = None
    metadata: Mapping[str, str] | None = None
    out_of_band: bool = False
    """`conversation: "none"`: runs beside the conversation and leaves it as it was."""
    event_id: str | None = None


@value
class TextAppended:
    """The user types instead of speaking: one whole user turn."""

    text: str
    respond: bool = True
    event_id: str | None = None


@value
class BargeInAsked:
    """The client itself found that the user interrupts."""

    event_id: str | None = None


@value
class PlaybackAcked:
    """So much of the response's audio has been played, in milliseconds from its first sample."""

    played_ms: float
    response_id: str | None = None
    item_id: str | None = None
    event_id: str | None = None


# -- from the client of a rollout: each is answered by one TurnDone, or by an ErrorTold where it was not taken ---------


@value
class WorldResetAsked:
    """Begin a rollout anew, at frame 0: the fence moves, what runs or waits ends as interrupted (`reset`)."""

    payload: Payload
    """Kind "reset", meta `seed`; array `image` where it is to begin with a picture."""
    request_id: str = ""


@value
class StepAsked:
    """Make the next `frames` frames; or, where the session has made them already, see the same ones again."""

    actions: Payload
    """One array, (frames, ...): a row for each frame."""
    frames: int
    outputs: frozenset[str]
    """Stages whose output is wanted."""
    step: int | None = None
    """Number of the first frame; None: the one after the last."""
    request_id: str = ""
    due_ms: float = 0.0
    """So long after it was asked the first frame is late; engines take the earliest first. 0: it is never late."""


@value
class LookAsked:
    """See frames that were made before, from `step` on."""

    step: int
    outputs: frozenset[str]
    frames: int = 1
    request_id: str = ""
    due_ms: float = 0.0


@value
class RewindAsked:
    """Go back to `step`: the fence moves, what runs or waits ends as interrupted (`rewind`)."""

    step: int
    request_id: str = ""


@value
class WorldSnapshotAsked:
    """Take what the rollout is made of, behind the requests that came before; RolloutSnapshotted brings it."""

    request_id: str = ""


@value
class WorldRestoreAsked:
    """Go on from a snapshot of any rollout: the fence moves, what runs or waits ends as interrupted (`restore`)."""

    state: Payload
    step: int
    """Where that rollout stood."""
    request_id: str = ""


ClientInput = (
    EventAcked
    | Heartbeat
    | CloseAsked
    | Asked
    | ResetAsked
    | CancelAsked
    | AudioAppended
    | AudioCommitted
    | AudioCleared
    | SettingsAsked
    | ItemCreateAsked
    | ItemDeleteAsked
    | ItemRetrieveAsked
    | ItemTruncateAsked
    | RespondAsked
    | TextAppended
    | BargeInAsked
    | PlaybackAcked
    | WorldResetAsked
    | StepAsked
    | LookAsked
    | RewindAsked
    | WorldSnapshotAsked
    | WorldRestoreAsked
)


@value
class SnapshotAsked:
    """Answered by the effect `SnapshotReady` with this ticket, or by an error event where the moment is wrong."""

    ticket: int


@value
class RestoreAsked:
    """Go back to (or on from) a snapshot: the fence moves, what runs is cut, the history is the snapshot's."""

    history: History
    state: Payload | None


# -- from the clock ----------------------------------------------------------------------------------------------


@value
class Woke:
    """A Wake came due."""


@value
class DrainAsked:
    """The server is going away: let the turn in flight finish until `deadline_ns`, take no new ones."""

    deadline_ns: int


Input = (
    StageSpoke
    | StageEnded
    | StageFound
    | StageLost
    | StageSnapshotted
    | SnapshotAsked
    | RestoreAsked
    | Attached
    | Detached
    | Sequenced
    | ClientInput
    | Woke
    | DrainAsked
)
