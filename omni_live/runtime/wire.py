"""What processes say to each other: msgpack arrays with a type tag, one per frame.

Each direction has a union and a decoder of its own, so that a peer can say only what is its to say. Nothing here
executes what it reads. A frame is the message's length in 4 bytes, little endian, and the message.

`order` counts the calls on a worker's port over both of its lanes. The worker performs them in that order, whichever
lane is faster; only what has no order (abort, credit, ping, drain, freed) overtakes.
"""

from typing import Final, NamedTuple

import msgspec

from omni_live.connectors.contract import Ticket
from omni_live.engines.contract import Load
from omni_live.runtime.ports import End, Route, WorkerId
from omni_live.sessions.inputs import Outcome
from omni_live.sessions.payload import ArraySpec, Payload, Scalar
from omni_live.sessions.stamp import SessionKey, Stamp

SERVER = WorkerId(0)
"""The server's name among workers, whose ids count from 1."""
INLINE_BYTES: Final = 8192
"""Bodies up to this travel in the message, larger ones through shared memory."""
MAX_FRAME: Final = 96 * 2**20
"""No frame is larger. Above the largest client frame (64 MiB), which travels inline where no arena has room for it."""
LENGTH_BYTES: Final = 4


class WireError(Exception):
    """A frame that is no message of this direction."""


class Inline(msgspec.Struct, frozen=True, array_like=True, tag=0, gc=False):
    """A payload within its message."""

    kind: str
    meta: dict[str, Scalar]
    body: bytes
    arrays: tuple[ArraySpec, ...]


Body = Inline | Ticket


class Freed(NamedTuple):
    """Names a ticket that its receiver is done with."""

    segment: int
    offset: int
    generation: int
    owner: int = 0
    """As in the ticket."""
    spoilt: bool = False
    """Whoever had it died, and may have lent it to others, who read it still: that memory is never written again."""


class WireStage(NamedTuple):
    name: str
    engine: str
    """`module:Class`"""
    options: dict[str, Scalar]


# -- server to worker --------------------------------------------------------------------------------------------


class Configure(msgspec.Struct, array_like=True, tag=1):
    """The first message on the control lane."""

    worker: int
    directory: str
    stages: list[WireStage]
    arena_bytes: int
    kept_bytes: int
    """What the outputs that one turn keeps for its whole edges may come to."""
    title: str


class Call(msgspec.Struct, array_like=True, gc=False):
    """A call on the worker's port that keeps its place among the others."""

    order: int
    stage: str


class OpenSession(Call, array_like=True, tag=2, gc=False):
    session: SessionKey
    params: dict[str, Scalar]


class CloseSession(Call, array_like=True, tag=3, gc=False):
    session: SessionKey


class OpenTurn(Call, array_like=True, tag=4, gc=False):
    """Comes from a producer, too (Route.opens); `order` then says how many of the server's calls go before it."""

    stamp: Stamp
    params: dict[str, Scalar]
    routes: tuple[Route, ...]
    inputs: int
    first: "Chunk | None" = None
    """What is there to begin with."""


class Forward(Call, array_like=True, tag=5, gc=False):
    stamp: Stamp
    route: Route


class FeedSession(Call, array_like=True, tag=6, gc=False):
    session: SessionKey
    body: Body


class FeedTurn(Call, array_like=True, tag=7, gc=False):
    stamp: Stamp
    body: Body
    last: bool


class Fork(Call, array_like=True, tag=8, gc=False):
    session: SessionKey
    into: SessionKey


class Snapshot(Call, array_like=True, tag=9, gc=False):
    session: SessionKey
    ticket: int


class Restore(Call, array_like=True, tag=10, gc=False):
    session: SessionKey
    body: Body


class Abort(msgspec.Struct, array_like=True, tag=11, gc=False):
    stage: str
    stamp: Stamp


class Drain(msgspec.Struct, array_like=True, tag=12, gc=False):
    pass


class Ping(msgspec.Struct, array_like=True, tag=13, gc=False):
    serial: int


# -- between a producer and a receiver ---------------------------------------------------------------------------


class Hello(msgspec.Struct, array_like=True, tag=20, gc=False):
    """Who opened a link between workers."""

    worker: int


class Chunk(msgspec.Struct, array_like=True, tag=21, gc=False):
    """One unit of a turn's work on its way to the next stage; without a body it only says that this was all."""

    sender: str
    receiver: str
    stamp: Stamp
    body: Body | None
    owe: bool = False
    """The sender runs low: give back, when you take this one, all the credit that you hold back."""
    last: bool = False
    outcome: Outcome = Outcome.DONE
    reason: str = ""
    through: tuple[End, ...] = ()


class Credit(msgspec.Struct, array_like=True, tag=22, gc=False):
    """`units` chunks of the sender's output for this receiver were taken."""

    sender: str
    receiver: str
    stamp: Stamp
    units: int


class Free(msgspec.Struct, array_like=True, tag=23, gc=False):
    tickets: list[Freed]


# -- worker to server --------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, array_like=True, tag=30, gc=False):
    pass


class Spoke(msgspec.Struct, array_like=True, tag=31, gc=False):
    """A chunk for the client. `outcome` where it is the stage's last word on the turn, too."""

    stage: str
    stamp: Stamp
    body: Body
    outcome: Outcome | None = None
    reason: str = ""
    through: tuple[End, ...] = ()


class Ended(msgspec.Struct, array_like=True, tag=32, gc=False):
    """The end of a stage's part. On the media lane, behind what it said, where the stage has a client.

    Each OpenTurn is answered by one of these, by the last Spoke, or by an End that came through another stage.
    """

    stage: str
    stamp: Stamp
    outcome: Outcome
    reason: str
    through: tuple[End, ...] = ()


class Found(msgspec.Struct, array_like=True, tag=33, gc=False):
    stage: str
    session: SessionKey
    body: Body


class Snapshotted(msgspec.Struct, array_like=True, tag=34, gc=False):
    stage: str
    session: SessionKey
    ticket: int
    body: Body | None


class Report(msgspec.Struct, array_like=True, tag=35, gc=False):
    stage: str
    sessions: int
    turns: int
    queued: int
    bytes_used: int
    bytes_cap: int

    def load(self) -> Load:
        return Load(self.sessions, self.turns, self.queued, self.bytes_used, self.bytes_cap)


class Counted(msgspec.Struct, array_like=True, tag=36, gc=False):
    """What was dropped or refused since the last report (G12)."""

    amounts: dict[str, int]


class Pong(msgspec.Struct, array_like=True, tag=37, gc=False):
    serial: int


Calls = OpenSession | CloseSession | OpenTurn | Forward | FeedSession | FeedTurn | Fork | Snapshot | Restore
FromServer = Configure | Calls | Abort | Credit | Free | Drain | Ping
FromProducer = Hello | OpenTurn | Chunk | Free
FromReceiver = Credit | Free
FromWorker = Ready | Spoke | Ended | Found | Snapshotted | Report | Counted | Pong | Free
Message = FromServer | FromProducer | FromReceiver | FromWorker

_ENCODER = msgspec.msgpack.Encoder()
FROM_SERVER: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)
FROM_PRODUCER: msgspec.msgpack.Decoder[FromProducer] = msgspec.msgpack.Decoder(FromProducer)
FROM_RECEIVER: msgspec.msgpack.Decoder[FromReceiver] = msgspec.msgpack.Decoder(FromReceiver)
FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def frame(message: Message) -> bytes:
    """The message with its length in front. Raises WireError where it cannot travel: too large, an int past 64 bits."""
    try:
        encoded = _ENCODER.encode(message)
    except (OverflowError, TypeError, ValueError) as error:
        raise WireError(f"{type(message).__name__} cannot travel") from error
    if len(encoded) > MAX_FRAME:
        raise WireError(f"{type(message).__name__} of {len(encoded)} bytes")
    return len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded


def inline(payload: Payload) -> Inline:
    body, meta = payload.body, payload.meta
    return Inline(
        payload.kind,
        meta if type(meta) is dict else dict(meta),
        body if type(body) is bytes else bytes(body),
        payload.arrays,
    )


def unwrapped(body: Inline) -> Payload:
    return Payload(body.kind, body.meta, body.body, body.arrays)


def freed(ticket: Ticket) -> Freed:
    return Freed(ticket.segment, ticket.offset, ticket.generation, ticket.owner)
