"""Client messages of the world protocol, read; and frames of either kind, loaded and dumped.

A message is a map with a `type`: a JSON text frame, or a msgpack map in a binary frame. Reading raises `Faulty`, and
`request_of` says beforehand which request that is about.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from omni_live.protocols.arrays import pack
from omni_live.protocols.fields import MAX_ID_CHARS, Fault, Faulty, Fields, Wire, needed, shown
from omni_live.protocols.frames import dump_json, dump_msgpack, load_json, load_msgpack
from omni_live.protocols.world.arrays import FORMATS, RAW, read_actions, read_bytes, read_picture, unseal
from omni_live.protocols.world.contract import WorldContract
from omni_live.sessions.inputs import (
    CancelAsked,
    ClientInput,
    CloseAsked,
    EventAcked,
    Heartbeat,
    LookAsked,
    RewindAsked,
    StepAsked,
    WorldResetAsked,
    WorldRestoreAsked,
    WorldSnapshotAsked,
)
from omni_live.sessions.payload import Payload

MSGPACK_SUBPROTOCOL: Final = "omni-live.world.v1+msgpack"
"""Who offers it gets binary frames; both kinds are read from either client."""

OUTPUTS: Final = ("frame", "latent")
MAX_FORKS: Final = 64
"""Children of one fork."""
MAX_CREDITS: Final = 65_536
_MAX_SEED: Final = 2**53 - 1
_MAX_DUE_MS: Final = 600_000.0
_OWN_CODES: Final = frozenset({"unknown_type", "bad_snapshot"})
"""What is wrong with a message, where it is not one of its fields."""


@dataclass(frozen=True, slots=True)
class Show:
    """How a session's frames go out."""

    form: str = RAW
    outputs: tuple[str, ...] = ("frame",)
    credits: int | None = None
    """Frames that may be sent before the client gives credit; None: the server's default."""


@dataclass(frozen=True, slots=True)
class Open:
    request_id: str
    model: str | None
    begin: Payload
    """What the rollout is reset with."""
    show: Show


@dataclass(frozen=True, slots=True)
class Resume:
    request_id: str
    session_id: str
    token: str
    seen: int
    show: Show
    model: str | None


@dataclass(frozen=True, slots=True)
class Fork:
    request_id: str
    session_id: str
    step: int | None
    count: int
    show: Show | None
    """None: as the parent's."""


@dataclass(frozen=True, slots=True)
class Describe:
    request_id: str


@dataclass(frozen=True, slots=True)
class Credit:
    session_id: str
    frames: int


@dataclass(frozen=True, slots=True)
class Told:
    """An input for a session. Steps and looks without outputs or a format take the session's."""

    request_id: str
    session_id: str
    input: ClientInput
    form: str | None = None


Request = Open | Resume | Fork | Describe | Credit | Told


def load(frame: str | bytes) -> dict[str, Wire]:
    """A frame's map. Raises Faulty (invalid_json, invalid_msgpack, invalid_event)."""
    return load_json(frame) if isinstance(frame, str) else load_msgpack(frame)


def dump(message: dict[str, Wire], *, binary: bool) -> str | bytes:
    """The message as a frame."""
    return dump_msgpack(message) if binary else dump_json(message)


def request_of(message: Mapping[str, Wire]) -> str | None:
    """The request's id, where the message has a good one."""
    given = message.get("request_id")
    return given if isinstance(given, str) and 0 < len(given) <= MAX_ID_CHARS and given.isprintable() else None


def model_of(message: Mapping[str, Wire]) -> str | None:
    """The world that the message names, where it names one."""
    given = message.get("model")
    return given if isinstance(given, str) else None


def session_of(message: Mapping[str, Wire]) -> str:
    """The session that the message is for, "" where it names none."""
    given = message.get("session_id")
    return given if isinstance(given, str) else ""


def named(fault: Fault) -> Fault:
    """What is wrong with a message that `read` would not take, as the client is told of it."""
    return fault if fault.code in _OWN_CODES else replace(fault, code="bad_field")


def read(message: dict[str, Wire], contract: WorldContract, next_id: Callable[[], str]) -> Request:
    """What the message asks for. Raises Faulty."""
    fields = Fields(message)
    kind = fields.text("type")
    request_id = fields.identifier("request_id") or next_id()
    match kind:
        case None:
            fields.missing("type")
        case "session.open":
            begin = read_begin(fields, contract)
            asked: Request = Open(request_id, fields.identifier("model"), begin, read_show(fields))
        case "describe":
            asked = Describe(request_id)
        case "session.resume":
            session_id = needed(fields, "session_id", fields.identifier("session_id"))
            token = needed(fields, "token", fields.identifier("token"))
            asked = Resume(
                request_id, session_id, token, fields.integer("last_seq") or 0, read_show(fields), model_of(message)
            )
            fields.ignore(("model",))
        case _:
            asked = _of_session(kind, request_id, fields, contract)
    fields.done()
    return asked


def _of_session(kind: str, request_id: str, fields: Fields, contract: WorldContract) -> Request:
    session_id = needed(fields, "session_id", fields.identifier("session_id"))
    if kind == "credit":
        return Credit(session_id, needed(fields, "frames", fields.integer("frames", 1, MAX_CREDITS)))
    if kind == "fork":
        return read_fork(request_id, session_id, fields)
    reader = _READERS.get(kind)
    if reader is None:
        raise Faulty("unknown_type", f"There is no message of type {shown(kind)}.", "type")
    form = fields.choice("format", FORMATS) if kind in {"step", "look"} else None
    return Told(request_id, session_id, reader(request_id, fields, contract), form)


def read_begin(fields: Fields, contract: WorldContract) -> Payload:
    """The reset that a rollout begins with: a seed, and a picture to begin from or none."""
    seed = fields.integer("seed", 0, _MAX_SEED) or 0
    image = read_picture(fields, "image", contract.frame)
    return Payload("reset", {"seed": seed}) if image is None else pack("reset", {"seed": seed}, image=image)


def read_show(fields: Fields) -> Show:
    form = fields.choice("format", FORMATS) or RAW
    outputs = _outputs(fields)
    return Show(form, outputs or ("frame",), fields.integer("credits", 1, MAX_CREDITS))


def read_fork(request_id: str, session_id: str, fields: Fields) -> Fork:
    count = fields.integer("count", 1, MAX_FORKS) or 1
    given = any(fields.has(name) for name in ("format", "outputs", "credits"))
    show = read_show(fields) if given else None
    return Fork(request_id, session_id, fields.integer("step"), count, show)


def read_step(request_id: str, fields: Fields, contract: WorldContract) -> ClientInput:
    actions = read_actions(fields, "actions", contract.action, contract.action_low, contract.action_high)
    return StepAsked(
        pack("actions", actions=actions),
        len(actions),
        frozenset(_outputs(fields)),
        fields.integer("step"),
        request_id,
        _due(fields),
    )


def read_look(request_id: str, fields: Fields, _: WorldContract) -> ClientInput:
    step = needed(fields, "step", fields.integer("step"))
    frames = fields.integer("frames", 1) or 1
    return LookAsked(step, frozenset(_outputs(fields)), frames, request_id, _due(fields))


def read_reset(request_id: str, fields: Fields, contract: WorldContract) -> ClientInput:
    return WorldResetAsked(read_begin(fields, contract), request_id)


def read_rewind(request_id: str, fields: Fields, _: WorldContract) -> ClientInput:
    return RewindAsked(needed(fields, "step", fields.integer("step")), request_id)


def read_restore(request_id: str, fields: Fields, _: WorldContract) -> ClientInput:
    step, state = unseal(needed(fields, "blob", read_bytes(fields, "blob")))
    return WorldRestoreAsked(state, step, request_id)


def _snapshot(request_id: str, _: Fields, __: WorldContract) -> ClientInput:
    return WorldSnapshotAsked(request_id)


def _cancel(request_id: str, fields: Fields, _: WorldContract) -> ClientInput:
    return CancelAsked(fields.identifier("target"), request_id)


def _ack(_: str, fields: Fields, __: WorldContract) -> ClientInput:
    return EventAcked(needed(fields, "seq", fields.integer("seq")))


def _heartbeat(request_id: str, _: Fields, __: WorldContract) -> ClientInput:
    return Heartbeat(request_id)


def _close(_: str, __: Fields, ___: WorldContract) -> ClientInput:
    return CloseAsked("close_requested")


_READERS: Final[Mapping[str, Callable[[str, Fields, WorldContract], ClientInput]]] = {
    "step": read_step,
    "look": read_look,
    "reset": read_reset,
    "rewind": read_rewind,
    "restore": read_restore,
    "snapshot": _snapshot,
    "cancel": _cancel,
    "ack": _ack,
    "heartbeat": _heartbeat,
    "session.close": _close,
}


def _outputs(fields: Fields) -> tuple[str, ...]:
    names = fields.texts("outputs")
    if names is None:
        return ()
    if not names or len(set(names)) != len(names) or not set(names) <= set(OUTPUTS):
        fields.refuse("invalid_value", "outputs", f"must be some of {', '.join(OUTPUTS)}")
    return tuple(names)


def _due(fields: Fields) -> float:
    return fields.number("due_ms", 0, _MAX_DUE_MS) or 0.0
