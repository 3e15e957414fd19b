"""What a client says to a world's door and hears from it, as frames: the only place that knows their field names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from omni_live.protocols.fields import Faulty, Fields, Wire, needed
from omni_live.protocols.world.arrays import array_value, read_array, read_bytes, read_picture
from omni_live.protocols.world.contract import WorldContract
from omni_live.protocols.world.messages import dump, load

Images = NDArray[np.uint8]
Latents = NDArray[np.float32]
Message = dict[str, Wire]

MAX_SENTENCE: Final = 200
"""Characters of what a server says went wrong."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a rollout. What was not asked for is None."""

    step: int
    image: Images | None = None
    """uint8 (height, width, 3)"""
    latent: Latents | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What the door says of a world."""

    model: str
    contract: WorldContract
    rewind_steps: int
    """Frames that a rollout goes back."""
    step_frames: int
    """Frames of one request."""
    detach_grace_s: float
    """How long a session lives on without a socket."""


@dataclass(frozen=True, slots=True)
class Opened:
    request_id: str
    session_id: str
    token: str
    step: int
    facts: Facts
    forked_from: str | None


@dataclass(frozen=True, slots=True)
class Resumed:
    session_id: str
    token: str
    step: int


@dataclass(frozen=True, slots=True)
class Shown:
    """One output of a frame: "frame" for its picture, or "latent"."""

    session_id: str
    seq: int
    request_id: str
    step: int
    output: str
    content: Images | Latents


@dataclass(frozen=True, slots=True)
class Snapshotted:
    session_id: str
    seq: int
    request_id: str
    step: int
    blob: bytes


@dataclass(frozen=True, slots=True)
class Done:
    """A request is over; `status` is done, interrupted or failed."""

    session_id: str
    seq: int
    request_id: str
    status: str
    reason: str
    step: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """The door would not do it; nothing changed, but for a fork of which some were made before."""

    session_id: str
    seq: int
    request_id: str
    code: str
    message: str
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class Missed:
    """Messages that the server no longer had when the client came back."""

    session_id: str
    seq: int


@dataclass(frozen=True, slots=True)
class Over:
    """The session is over, or somebody else's (`replaced`)."""

    session_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Beat:
    session_id: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Other:
    """What a client need not understand; its number still counts."""

    session_id: str
    seq: int


Told = Opened | Resumed | Shown | Snapshotted | Done | Refusal | Missed | Over | Beat | Other


def write(kind: str, session_id: str = "", request_id: str = "", **fields: Wire) -> Message:
    """A request. Fields that are None are left to the server."""
    message: Message = {"type": kind}
    if session_id:
        message["session_id"] = session_id
    if request_id:
        message["request_id"] = request_id
    return message | {name: value for name, value in fields.items() if value is not None}


def frame(message: Message) -> bytes:
    """The request as a binary frame."""
    dumped = dump(message, binary=True)
    assert isinstance(dumped, bytes)
    return dumped


def actions_value(actions: NDArray[np.float32]) -> Wire:
    return array_value(actions)


def image_value(image: Images | None) -> Wire:
    return None if image is None else array_value(np.ascontiguousarray(image))


def read_greeting(received: str | bytes) -> Facts:
    """What a world's door begins with. Raises Faulty where that is no world's door."""
    message = load(received)
    if message.get("type") != "server.world":
        raise Faulty("not_a_world", "The server does not begin as a world's door does.")
    return _facts(Fields(message))


def read(received: str | bytes, contract_of: Callable[[str], WorldContract]) -> Told:
    """What the server says. `contract_of` gives that of a session's world, by the session's id. Raises Faulty."""
    message = load(received)
    fields = Fields(message)
    about = _About(fields.text("session_id") or "", fields.integer("seq") or 0, fields.text("request_id") or "")
    kind = fields.text("type")
    if kind == "frame":
        return _shown(fields, about, contract_of(about.session_id))
    reader = _READERS.get(kind or "")
    return Other(about.session_id, about.seq) if reader is None else reader(fields, about)


class _About(NamedTuple):
    """What a message is about."""

    session_id: str
    seq: int
    request_id: str


def _shown(fields: Fields, about: _About, contract: WorldContract) -> Shown:
    output = needed(fields, "output", fields.text("output"))
    return Shown(*about, _step(fields), output, _content(fields, output, contract))


def _opened(fields: Fields, about: _About) -> Opened:
    token = needed(fields, "token", fields.text("token"))
    facts = _facts(Fields(_map(fields, "world")))
    return Opened(about.request_id, about.session_id, token, _step(fields), facts, fields.text("forked_from"))


def _resumed(fields: Fields, about: _About) -> Resumed:
    return Resumed(about.session_id, needed(fields, "token", fields.text("token")), _step(fields))


def _snapshot(fields: Fields, about: _About) -> Snapshotted:
    return Snapshotted(*about, _step(fields), needed(fields, "blob", read_bytes(fields, "blob")))


def _done(fields: Fields, about: _About) -> Done:
    status = needed(fields, "status", fields.text("status"))
    return Done(*about, status, fields.text("reason") or "", _step(fields))


def _error(fields: Fields, about: _About) -> Refusal:
    words = fields.text("message") or ""
    after_s = fields.number("retry_after_s", 0, 1e9)
    return Refusal(*about, fields.text("code") or "server_error", words[:MAX_SENTENCE], after_s)


_READERS: Final[Mapping[str, Callable[[Fields, _About], Told]]] = {
    "session.opened": _opened,
    "session.resumed": _resumed,
    "snapshot": _snapshot,
    "done": _done,
    "error": _error,
    "session.resync": lambda _, about: Missed(about.session_id, about.seq),
    "session.replaced": lambda _, about: Over(about.session_id, "replaced"),
    "session.closed": lambda fields, about: Over(about.session_id, fields.text("reason") or "closed"),
    "heartbeat": lambda _, about: Beat(about.session_id, about.request_id),
}


def _content(fields: Fields, output: str, contract: WorldContract) -> Images | Latents:
    if output == "latent":
        latent = needed(fields, "latent", read_array(fields, "latent", "<f4"))
        return np.asarray(latent, np.float32)
    return needed(fields, "image", read_picture(fields, "image", contract.frame))


def _step(fields: Fields) -> int:
    """-1 where the rollout has not begun."""
    return needed(fields, "step", fields.integer("step", -1))


def _facts(fields: Fields) -> Facts:
    height, width, channels = _sizes(fields, "frame", 3)
    contract = WorldContract(
        (height, width, channels),
        _three(_sizes(fields, "latent", 3)),
        _sizes(fields, "action"),
        _real(fields, "rate_hz"),
        _real(fields, "action_low"),
        _real(fields, "action_high"),
    )
    return Facts(
        fields.text("model") or "",
        contract,
        fields.integer("rewind_steps") or 0,
        fields.integer("step_frames") or 1,
        _real(fields, "detach_grace_s"),
    )


def _map(fields: Fields, name: str) -> Message:
    value = fields.raw(name)
    if not isinstance(value, dict):
        fields.missing(name)
    return value


def _sizes(fields: Fields, name: str, count: int | None = None) -> tuple[int, ...]:
    listed = needed(fields, name, fields.array(name, 8))
    sizes = tuple(size for size in listed if type(size) is int and size > 0)
    if len(sizes) != len(listed) or (count is not None and len(sizes) != count):
        raise Faulty("bad_reply", "The server's sizes are none.", name)
    return sizes


def _three(sizes: tuple[int, ...]) -> tuple[int, int, int]:
    a, b, c = sizes
    return a, b, c


def _real(fields: Fields, name: str) -> float:
    return needed(fields, name, fields.number(name, -1e9, 1e9))
