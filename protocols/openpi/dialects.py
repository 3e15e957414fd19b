"""What a request asks for, and how its answer is written: three dialects of one protocol.

                  a request says so by                     actions go out as        a reset's answer     an error
    OPENPI        saying nothing else                      map with server_timing   map                  text
    ROBOARENA     `endpoint`, `infer` or `reset`           bare float32 array       text                 text
    VLLM_OMNI     its path, `sampling_params`, or the      bare float32 array       map                  map
                  nd/type/kind marking of its arrays

A request that carries a `request_id` comes from a client that knows us: whatever the dialect, it is answered with a map
that repeats the id. On vllm-omni's path everything follows vllm-omni, `endpoint` or not, since its unchanged clients
(DreamZero's among them, which send one) know no other server there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np

from omni_live.protocols.fields import MAX_ID_CHARS, Faulty, shown
from omni_live.protocols.openpi.codec import Array, pack

MAX_SEED: Final = 2**63 - 1
MAX_DEADLINE_MS: Final = 3_600_000.0
MAX_STEPS: Final = 10_000
"""Of a chunk that have been executed or are fixed."""
MAX_SESSIONS: Final = 1024
"""That one request may reset by name."""

RESET_DONE: Final = "reset successful"
"""RoboArena's sentence; its clients read no other."""


class Dialect(Enum):
    OPENPI = "openpi"
    ROBOARENA = "roboarena"
    VLLM_OMNI = "vllm-omni"


@dataclass(frozen=True, slots=True)
class Infer:
    """A robot wants a chunk of actions.

    observation      what the request holds beside the fields below; still to be checked against the policy's contract
    session          the client's name for the robot, None for the connection's own
    deadline_ms      the answer is worth nothing later than this after the request came
    latest           this observation takes the place of those of the same session that still wait
    executed_steps   of the session's last chunk, when the new one takes over
    delay_steps      of the new chunk, which the robot will have executed from the last one before it has the new one
    """

    observation: dict[str, object]
    session: str | None
    request_id: str | int | None
    seed: int | None
    deterministic: bool
    deadline_ms: float | None
    latest: bool
    executed_steps: int | None
    delay_steps: int | None
    dialect: Dialect


@dataclass(frozen=True, slots=True)
class Reset:
    """Sessions are to be cleared: those named, or all of the connection's where none is."""

    sessions: tuple[str, ...] | None
    request_id: str | int | None
    dialect: Dialect


_OURS: Final = (
    "request_id",
    "session_id",
    "env_id",
    "env_ids",
    "endpoint",
    "reset",
    "seed",
    "deterministic",
    "deadline_ms",
    "latest",
    "executed_steps",
    "delay_steps",
    "sampling_params",
)
"""Fields of a request that are no part of the observation. vllm-omni's sampling parameters have no effect here."""


def read(request: object, dialect: Dialect = Dialect.OPENPI) -> Infer | Reset:
    """What an unpacked frame asks for; `dialect` is what the path or the marking of its arrays speaks for.

    Raises Faulty (bad_request), which names the field.
    """
    if not isinstance(request, dict):
        raise Faulty("bad_request", "A request must be a map.")
    spoken = _dialect(request, dialect)
    request_id = _request_id(request)
    sessions = _reset_sessions(request)
    if sessions is not _INFER:
        return Reset(sessions.named, request_id, spoken)
    _given(request, "sampling_params", dict)
    return Infer(
        observation={key: value for key, value in request.items() if key not in _OURS},
        session=_session(request),
        request_id=request_id,
        seed=_integer(request, "seed", MAX_SEED),
        deterministic=_flag(request, "deterministic"),
        deadline_ms=_milliseconds(request, "deadline_ms"),
        latest=_flag(request, "latest"),
        executed_steps=_integer(request, "executed_steps", MAX_STEPS),
        delay_steps=_integer(request, "delay_steps", MAX_STEPS),
        dialect=spoken,
    )


def addressee(request: object, dialect: Dialect = Dialect.OPENPI) -> tuple[Dialect, str | int | None]:
    """In which dialect, and under which request id, an error about a request goes back that `read` refused."""
    if not isinstance(request, dict):
        return dialect, None
    try:
        return _dialect(request, dialect), _request_id(request)
    except Faulty:
        return _dialect(request, dialect), None


# -- answers


def reply(infer: Infer, actions: Array, timing: Mapping[str, int | float | bool], state: Array | None = None) -> bytes:
    """The frame that brings a chunk (steps, dimensions), as float32.

    `timing` must be Python's own numbers: openpi-client's ActionChunkBroker takes row after row of every array in a
    reply, so a `state` of fewer rows than the chunk breaks it.
    """
    chunk = np.asarray(actions, dtype=np.float32)
    if infer.dialect is not Dialect.OPENPI and infer.request_id is None:
        return pack(chunk)
    answer: dict[str, object] = {"actions": chunk}
    if state is not None:
        answer["state"] = state
    answer["server_timing"] = dict(timing)
    if infer.request_id is not None:
        answer["request_id"] = infer.request_id
    return pack(answer)


def reset_reply(reset: Reset) -> str | bytes:
    """The frame that says that a reset is done: text or binary."""
    if reset.request_id is not None:
        return pack({"status": RESET_DONE, "request_id": reset.request_id})
    return RESET_DONE if reset.dialect is Dialect.ROBOARENA else pack({"status": RESET_DONE})


def error(
    dialect: Dialect,
    code: str,
    message: str,
    request_id: str | int | None = None,
    retry_after_s: float | None = None,
) -> str | bytes:
    """The frame that says what went wrong: one line of text, which OpenPI's clients raise, or binary."""
    sentence = " ".join(message.split())
    answer: dict[str, object] = {}
    if dialect is Dialect.VLLM_OMNI:
        answer |= {"type": "error", "message": sentence, "code": code}
    if request_id is not None:
        details: dict[str, object] = {"code": code, "message": sentence}
        if retry_after_s is not None:
            details["retry_after_s"] = retry_after_s
        answer |= {"error": details, "request_id": request_id}
    return pack(answer) if answer else f"{code}: {sentence}"


# -- the fields of a request


@dataclass(frozen=True, slots=True)
class _Sessions:
    """Those to reset; None for all."""

    named: tuple[str, ...] | None


_INFER: Final = _Sessions(())
"""By its identity: nothing is to be reset, actions are wanted."""


def _dialect(request: Mapping[str, object], dialect: Dialect) -> Dialect:
    if dialect is Dialect.VLLM_OMNI or "sampling_params" in request:
        return Dialect.VLLM_OMNI
    return Dialect.ROBOARENA if "endpoint" in request else dialect


def _reset_sessions(request: Mapping[str, object]) -> _Sessions:
    """The sessions that a request resets, `_INFER` where it wants actions."""
    endpoint, reset, ids = request.get("endpoint"), _plain(request.get("reset")), request.get("env_ids")
    if endpoint is not None and (not isinstance(endpoint, str) or endpoint not in ("infer", "reset")):
        raise _bad("endpoint", "must be 'infer' or 'reset'")
    says_which = reset is not None and not isinstance(reset, bool)
    if endpoint == "reset":
        return _named(request, reset if says_which else ids)
    if says_which or reset is True:
        if endpoint == "infer" or any(key not in _OURS for key in request):
            raise _bad("reset", "stands beside an observation: a reset is a request of its own")
        return _named(request, reset if says_which else ids)
    if ids is not None:
        raise _bad("env_ids", "names robots to reset: ask for each robot's actions with its 'env_id'")
    return _INFER


def _named(request: Mapping[str, object], ids: object) -> _Sessions:
    if ids is None:
        own = _session(request)
        return _Sessions(None if own is None else (own,))
    if isinstance(ids, np.ndarray) and ids.size <= MAX_SESSIONS:
        ids = ids.reshape(-1).tolist()
    if isinstance(ids, str):
        return _Sessions(None if ids == "all" else (_name("reset", ids),))
    if not isinstance(ids, list) or len(ids) > MAX_SESSIONS:
        raise _bad("reset", f"must be true, 'all' or a list of up to {MAX_SESSIONS} session ids")
    return _Sessions(tuple(dict.fromkeys(_name("reset", each) for each in ids)))


def _session(request: Mapping[str, object]) -> str | None:
    """The client's name for the robot. RoboArena's may come as an array of one text."""
    given = [(key, value) for key in ("session_id", "env_id") if not _is_empty(value := request.get(key))]
    if len(given) > 1:
        raise _bad("env_id", "stands beside 'session_id': give one of them, which is the robot's")
    for key, value in given:
        if isinstance(value, np.ndarray) and value.size == 1:
            return _name(key, value.reshape(-1)[0])
        return _name(key, value)
    return None


def _is_empty(name: object) -> bool:
    return name is None or (isinstance(name, str) and not name)


def _name(key: str, value: object) -> str:
    value = _plain(value)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) <= MAX_ID_CHARS:
        raise _bad(key, f"must be a printable text of up to {MAX_ID_CHARS} characters, or a number without a fraction")
    return value


def _request_id(request: Mapping[str, object]) -> str | int | None:
    value = _plain(request.get("request_id"))
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    return _name("request_id", value)


def _plain(value: object) -> object:
    """A numpy scalar as Python's: clients take seeds and flags out of arrays."""
    return value.item() if isinstance(value, np.generic) else value


def _given(request: Mapping[str, object], key: str, kind: type) -> object:
    value = _plain(request.get(key))
    if value is not None and not isinstance(value, kind):
        raise _bad(key, f"must be {_KIND_NAMES[kind]}")
    return value


_KIND_NAMES: Final = {dict: "a map", bool: "true or false"}


def _flag(request: Mapping[str, object], key: str) -> bool:
    return _given(request, key, bool) is True


def _integer(request: Mapping[str, object], key: str, most: int) -> int | None:
    value = _plain(request.get(key))
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise _bad(key, f"must be a number without a fraction, from 0 to {most}")
    return value


def _milliseconds(request: Mapping[str, object], key: str) -> float | None:
    value = _plain(request.get(key))
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_DEADLINE_MS:
        raise _bad(key, f"must be a number of milliseconds, up to {MAX_DEADLINE_MS:.0f}")
    return float(value)


def _bad(key: str, what: str) -> Faulty:
    return Faulty("bad_request", f"{shown(key)} {what}.", key)
