"""Client messages of the video protocol, read. Each is an object with a `type`, in a JSON text frame.

An action is a track: rows of which each makes a frame, and the last holds on. `[x, y]` is a track of one row, and a
row may be one vector for the whole frame or, where the world takes several actions in a frame, all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_live.protocols.fields import MAX_ID_CHARS, Faulty, Fields, Wire, needed, shown
from omni_live.protocols.frames import load_json
from omni_live.protocols.video.prompts import direction
from omni_live.protocols.world.arrays import read_actions
from omni_live.protocols.world.contract import WorldContract
from omni_live.protocols.world.messages import read_begin
from omni_live.sessions.payload import Payload

FORMAT: Final = "m4s"
"""Fragments of an MP4 file; vllm-omni's only format."""
BLOCK_FRAMES: Final = 8
MAX_BLOCK_FRAMES: Final = 64
MAX_FPS: Final = 120.0
MAX_FRAMES: Final = 1_000_000

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Start:
    model: str
    """A name that is served."""
    begin: Payload
    """What the rollout is reset with."""
    seed: int
    track: Floats
    """(rows, *action): what is done from the first frame on."""
    num_frames: int | None
    """None: until the client stops it."""
    fps: float
    block_frames: int
    paced: bool


@dataclass(frozen=True, slots=True)
class Interaction:
    event_id: str | None
    track: Floats
    """(rows, *action): what is done from the first frame that is not begun on."""


@dataclass(frozen=True, slots=True)
class Stop:
    pass


@dataclass(frozen=True, slots=True)
class Ping:
    pass


Asked = Start | Interaction | Stop | Ping


def load(frame: str | bytes) -> dict[str, Wire]:
    """The frame's object. Raises Faulty (invalid_json, invalid_event)."""
    if isinstance(frame, bytes):
        raise Faulty("invalid_event", "The frame is binary; requests are JSON text.")
    return load_json(frame)


def event_of(message: Mapping[str, Wire]) -> str | None:
    """The id of the interaction's event, where the message has a good one."""
    interaction = message.get("interaction")
    given = interaction.get("event_id") if isinstance(interaction, dict) else None
    return given if isinstance(given, str) and 0 < len(given) <= MAX_ID_CHARS and given.isprintable() else None


def read(message: dict[str, Wire], worlds: Mapping[str, WorldContract], running: WorldContract | None) -> Asked:
    """What the message asks for. Raises Faulty.

    `worlds` are served, the first is taken where a client names none; `running` is the world that was started here.
    """
    fields = Fields(message)
    kind = fields.text("type")
    asked: Asked
    match kind:
        case None:
            fields.missing("type")
        case "session.start":
            if running is not None:
                raise Faulty("already_started", "A connection carries one video, and it has begun.", "type")
            asked = _start(fields, worlds)
        case "session.interaction":
            if running is None:
                raise Faulty("not_started", "There is no video to interact with yet.", "type")
            asked = _interaction(needed(fields, "interaction", fields.inner("interaction")), running)
        case "session.stop":
            asked = Stop()
        case "session.ping":
            asked = Ping()
        case _:
            raise Faulty("unknown_type", f"There is no message of type {shown(kind)}.", "type")
    fields.done()
    return asked


def _start(fields: Fields, worlds: Mapping[str, WorldContract]) -> Start:
    model = fields.identifier("model") or next(iter(worlds))
    contract = worlds.get(model)
    if contract is None:
        raise Faulty("model_not_found", "There is no world of that name.", "model")
    fields.choice("format", (FORMAT,))
    height, width, _ = contract.frame
    for name, size in (("width", width), ("height", height)):
        if fields.integer(name) not in {None, size}:
            fields.refuse("invalid_value", name, f"must be {size}: this world has one size")
    begin = read_begin(fields, contract)
    seed = begin.meta["seed"]
    assert isinstance(seed, int)
    paced = fields.flag("paced")
    return Start(
        model,
        begin,
        seed,
        _track(fields, contract, needs=False),
        fields.integer("num_frames", 1, MAX_FRAMES),
        fields.number("fps", 1, MAX_FPS) or contract.rate_hz,
        fields.integer("block_frames", 1, MAX_BLOCK_FRAMES) or BLOCK_FRAMES,
        paced is None or paced,
    )


def _interaction(fields: Fields, contract: WorldContract) -> Interaction:
    event_id = fields.identifier("event_id")
    if fields.integer("transition_chunks"):
        raise Faulty("unsupported", "Actions do not fade into one another here.", fields.param("transition_chunks"))
    event = needed(fields, "event", fields.inner("event"))
    track = _track(event, contract, needs=True)
    event.done()
    fields.done()
    return Interaction(event_id, track)


def _track(fields: Fields, contract: WorldContract, *, needs: bool) -> Floats:
    """What is to be done, said as an action or as a prompt. Raises Faulty."""
    if fields.raw("camera") is not None:
        raise Faulty("unsupported", "The camera of this world does not move.", fields.param("camera"))
    prompt, has_action = fields.text("prompt", 4096), fields.raw("action") is not None
    if prompt is not None and has_action:
        fields.refuse("invalid_value", "prompt", "stands beside an action: one of both says what is done")
    if has_action:
        return _rows(fields, contract)
    if prompt is not None:
        return _spoken(prompt, fields.param("prompt"), contract)
    if needs:
        fields.missing("action")
    return np.zeros((1, *contract.action), np.float32)


def _spoken(prompt: str, param: str, contract: WorldContract) -> Floats:
    vector = direction(prompt) if contract.action[-1] == 2 else None
    if vector is None:
        raise Faulty("prompt_unknown", "This world understands left, right, up, down and stop.", param)
    moved = np.broadcast_to(np.array(vector, np.float32), (1, *contract.action))
    return np.clip(moved, contract.action_low, contract.action_high)


def _rows(fields: Fields, contract: WorldContract) -> Floats:
    value = fields.raw("action")
    is_vector = isinstance(value, list) and bool(value) and not isinstance(value[0], list)
    rows: Wire = [value] if is_vector else value
    is_full = isinstance(rows, list) and bool(rows) and _depth(rows[0]) == len(contract.action)
    shape = contract.action if is_full else contract.action[-1:]
    checked = Fields({fields.param("action"): rows})
    given = read_actions(checked, fields.param("action"), shape, contract.action_low, contract.action_high)
    between = (1,) * (len(contract.action) + 1 - given.ndim)
    spread = given.reshape(len(given), *between, *shape)
    return np.ascontiguousarray(np.broadcast_to(spread, (len(given), *contract.action)))


def _depth(value: Wire) -> int:
    depth = 0
    while isinstance(value, list) and value:
        depth, value = depth + 1, value[0]
    return depth
