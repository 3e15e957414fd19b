"""What a robot says to a policy server and hears from it, as frames: the only place that knows their field names.

Our server repeats a request's id in the answer. OpenPI's own server, and whoever speaks like it, knows no ids, reads
the whole map as an observation, and says what went wrong as text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_live.protocols.fields import Faulty
from omni_live.protocols.openpi.codec import pack, unpack

Actions = NDArray[np.float32]
"""(steps, dimensions), in the contract's units."""

MAX_SENTENCE: Final = 200
"""Characters of what a server says went wrong; a traceback is longer, and its last line says most."""


@dataclass(frozen=True, slots=True)
class Timing:
    """What the server says of a chunk; None where it says nothing."""

    infer_ms: float | None = None
    queue_ms: float | None = None
    batch: int | None = None
    """Robots that were served in the same step."""
    replica: int | None = None
    continued: bool = False
    """The chunk goes on where the last one was."""
    deadline_missed: bool = False


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a request says beside the observation; None leaves it to the server."""

    seed: int | None = None
    deterministic: bool = False
    deadline_ms: float | None = None
    latest: bool = False
    executed_steps: int | None = None
    delay_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A chunk. `request_id` None: the server knows no ids."""

    request_id: int | None
    actions: Actions
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True, slots=True)
class Done:
    """The session was reset."""

    request_id: int | None


@dataclass(frozen=True, slots=True)
class Refusal:
    """The server would not do it, or could not."""

    request_id: int | None
    code: str
    message: str
    retry_after_s: float | None = None


Reply = Answer | Done | Refusal


def ask(observation: Mapping[str, object], wishes: Wishes, session_id: str, request_id: int) -> bytes:
    """A request for a chunk, for a server of ours."""
    wanted = {
        "seed": wishes.seed,
        "deterministic": wishes.deterministic or None,
        "deadline_ms": wishes.deadline_ms,
        "latest": wishes.latest or None,
        "executed_steps": wishes.executed_steps,
        "delay_steps": wishes.delay_steps,
    }
    said = {name: value for name, value in wanted.items() if value is not None}
    return pack({**observation, **said, "request_id": request_id, "session_id": session_id})


def ask_plainly(observation: Mapping[str, object]) -> bytes:
    """A request for a chunk, for a server that knows nothing but observations."""
    return pack(dict(observation))


def ask_reset(session_id: str, request_id: int) -> bytes:
    """A request to forget what the session did so far."""
    return pack({"reset": [session_id], "request_id": request_id})


def read(frame: str | bytes) -> Reply:
    """What the server answers. Raises Faulty where nobody can tell."""
    if isinstance(frame, str):
        return _told(frame)
    reply = unpack(frame)
    if isinstance(reply, np.ndarray):
        return Answer(None, _actions(reply))
    if not isinstance(reply, dict):
        raise Faulty("bad_reply", "The server's answer is no map.")
    request_id = _whole(reply, "request_id")
    if "error" in reply or reply.get("type") == "error":
        return _refusal(reply, request_id)
    if "actions" in reply:
        return Answer(request_id, _actions(reply["actions"]), _timing(reply.get("server_timing")))
    if "status" in reply:
        return Done(request_id)
    raise Faulty("bad_reply", "The server's answer holds no actions.")


def read_metadata(frame: str | bytes) -> dict[str, object]:
    """What the server begins with. Raises Faulty where that is no map."""
    metadata = None if isinstance(frame, str) else unpack(frame)
    if not isinstance(metadata, dict):
        raise Faulty("bad_metadata", "The server does not begin with a map of metadata.")
    return metadata


def _told(text: str) -> Reply:
    if text == "reset successful":
        return Done(None)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    code, colon, message = last.partition(": ")
    if len(lines) == 1 and colon and code.isidentifier() and code.islower():
        return Refusal(None, code, message[:MAX_SENTENCE])
    return Refusal(None, "server_error", last[:MAX_SENTENCE])


def _refusal(reply: Mapping[str, object], request_id: int | None) -> Refusal:
    """Ours holds a map of code and message under `error`; vllm-omni's holds them itself."""
    error = reply.get("error")
    said: Mapping[str, object] = error if isinstance(error, dict) else reply
    code, message = said.get("code"), said.get("message", error)
    return Refusal(
        request_id,
        code if isinstance(code, str) else "server_error",
        message[:MAX_SENTENCE] if isinstance(message, str) else "",
        _real(said, "retry_after_s"),
    )


def _actions(value: object) -> Actions:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu" or value.ndim != 2 or not len(value):
        raise Faulty("bad_reply", "The server's actions are no array of steps by dimensions.", "actions")
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is not executed
        return value.astype(np.float32)


def _timing(said: object) -> Timing:
    if not isinstance(said, dict):
        return Timing()
    return Timing(
        infer_ms=_real(said, "infer_ms"),
        queue_ms=_real(said, "queue_ms"),
        batch=_whole(said, "batch"),
        replica=_whole(said, "replica"),
        continued=said.get("continued") is True,
        deadline_missed=said.get("deadline_missed") is True,
    )


def _real(said: Mapping[str, object], name: str) -> float | None:
    value = said.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(said: Mapping[str, object], name: str) -> int | None:
    value = said.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
