"""The policy stage: robots' observations in, chunks of actions out, served in batches across sessions.

One step is one batch (see batching.py), so a fence is looked at between any two calls of the policy. Whatever a policy
does, a chunk reaches a robot only if it has the contract's shape and finite numbers within the contract's bounds. A
batch that fails is served again query by query, so that a poison observation ends its own turn alone, and the session
that sent it is not batched with others any more. A policy that then fails on the observation it was warmed up with is
broken: the worker goes down with it, to be started anew.

Of a session the engine keeps its last chunk, on which the next one may go on (real-time chunking), and how many turns
it has had since it was opened or reset: that number is the seed of an observation that brings none, so that a replay
of a session's observations gives the same actions, whatever else was served and whenever.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np

from omni_live.engines.contract import EngineOptions, Host, Load, SessionError, Turn, TurnError
from omni_live.engines.options import BadOption, Options, param_int
from omni_live.pipelines.robot.adapter import Array, Chunk, Policy, Query, load_policy
from omni_live.pipelines.robot.batching import Go, Hold, Rhythm, Rule, Steps, Waiting, decide
from omni_live.protocols.arrays import BadPayload, array, arrays, pack
from omni_live.protocols.openpi.contract import Contract, Field
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.stamp import SessionKey

NS_PER_MS: Final = 1_000_000
_OWN: Final = frozenset({"policy", "max_batch", "window_ms", "guard", "inline"})
"""The engine's options; the policy gets all others."""
_SEEDS: Final = 2**63 - 1
"""What every generator takes as a seed."""
_NEWEST: Final = 0.25
"""Weight of the newest step in the estimate of how long one takes."""

log = logging.getLogger(__name__)


class PolicyBroken(RuntimeError):
    """The policy cannot even answer the observation it was warmed up with."""


class Guard(StrEnum):
    """What becomes of actions beyond the contract's bounds."""

    REFUSE = "refuse"
    CLAMP = "clamp"


class Unsafe(Exception):
    """A chunk that must not reach a robot; `code` says why."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass(slots=True)
class Memory:
    """What is kept of a session."""

    turns: int = 0
    last: Chunk | None = None
    is_suspect: bool = False
    """The policy failed on an observation of it. Served alone from then on, it cannot cost others another batch."""


@dataclass(slots=True, eq=False)
class Request:
    """A turn under way. It waits for its observation, then for a step."""

    turn: Turn
    memory: Memory
    number: int
    """Of the turn, since the session was opened or reset."""
    since_ns: int
    query: Query | None = None
    has_deadline: bool = False
    alone: bool = False

    def waiting(self) -> Waiting:
        return Waiting(self.turn.session, self.since_ns, self.turn.stamp.deadline_ns, self.alone)


class _Step(NamedTuple):
    """One call of the policy."""

    size: int
    began_ns: int
    took_ns: int


class PolicyEngine:
    """Engine of the policy stage. Options: policy (`module:Class`), max_batch, window_ms, guard, inline.

    `guard` is `refuse` or `clamp`; `inline` is for policies that answer within microseconds.

    A turn's input is one payload "observation": the contract's arrays, and as meta its texts, `seed`, `deterministic`
    (a batch of its own, so that its bytes depend on nobody else), `deadline_ms` (there is one: the stamp has it),
    `executed_steps` and `delay_steps` (see Query; without the former the chunk owes nothing to the last one).
    The output is one payload "chunk": `actions` (action_horizon, action_dim) float32, and as meta `infer_ms` (the
    batch's step), `queue_ms` (until it began), `batch`, `replica`, `continued` (there was a previous chunk to go on
    with, and the steps fixed by it are the same in the new one), `clamped` (so many numbers, where any were),
    `deadline_missed` (where there was a deadline).
    Turns fail with: bad_observation, no_observation, policy_error, bad_actions, action_not_finite,
    action_out_of_range, unknown_session.
    """

    def __init__(self, options: EngineOptions) -> None:
        values = options.values
        read = Options("policy", EngineOptions({key: value for key, value in values.items() if key in _OWN}))
        path = read.text("policy", "omni_live.pipelines.robot.table_policy:TablePolicy")
        window_ms = read.real("window_ms", 2.0, 0.0, 5.0)
        self._rule = Rule(read.whole("max_batch", 32, 1, 1024), round(window_ms * NS_PER_MS))
        self._guard = _guard(read.text("guard", Guard.REFUSE))
        self._replica = options.replica
        self.inline = read.flag("inline", False)
        self._policy: Policy = load_policy(path, {key: value for key, value in values.items() if key not in _OWN})
        self._contract: Contract = self._policy.contract
        self._memories: dict[SessionKey, Memory] = {}
        self._requests: dict[int, Request] = {}
        """By the turn's id, in the order in which they came."""
        self._failures: deque[TurnError] = deque()
        """A step may fail several turns, but can raise only one error at a time."""
        self._rhythm = Rhythm()
        self._steps = Steps()

    def load(self, host: Host) -> None:
        """Load the policy and see that it does what its contract says. Raises PolicyBroken where it does not."""
        self._host = host
        self._policy.load()
        self._try_out()

    # -- sessions

    def open(self, session: SessionKey, params: Mapping[str, Scalar]) -> None:
        self._memories[session] = Memory()

    def close(self, session: SessionKey) -> None:
        self._memories.pop(session, None)
        self._rhythm.forget(session)

    def listen(self, session: SessionKey, payload: Payload) -> None:
        if payload.kind == "reset":
            memory = self._memory(session)
            memory.turns, memory.last = 0, None

    def fork(self, session: SessionKey, into: SessionKey) -> None:
        memory = self._memory(session)
        self._memories[into] = Memory(memory.turns, memory.last, memory.is_suspect)  # a chunk is never written to

    def snapshot(self, session: SessionKey) -> Payload:
        memory = self._memory(session)
        meta: dict[str, Scalar] = {"turns": memory.turns}
        return pack("robot", meta) if memory.last is None else pack("robot", meta, actions=memory.last)

    def restore(self, session: SessionKey, payload: Payload) -> None:
        memory = self._memory(session)
        turns = payload.meta.get("turns")
        if payload.kind != "robot" or isinstance(turns, bool) or not isinstance(turns, int) or turns < 0:
            raise SessionError(session, "bad_snapshot")
        last: Chunk | None = None
        if payload.arrays:
            try:
                last = _sound(array(payload, "actions"), self._contract).copy()
            except (BadPayload, Unsafe):
                raise SessionError(session, "bad_snapshot") from None
        memory.turns, memory.last = turns, last

    def _memory(self, session: SessionKey) -> Memory:
        memory = self._memories.get(session)
        if memory is None:
            raise SessionError(session, "unknown_session")
        return memory

    # -- turns

    def begin(self, turn: Turn) -> None:
        memory = self._memories.get(turn.session)
        if memory is None:
            raise TurnError(turn, "unknown_session")
        memory.turns += 1
        now = self._host.now()
        self._rhythm.asked(turn.session, now)
        self._requests[id(turn)] = Request(turn, memory, memory.turns, now)

    def drop(self, turn: Turn) -> None:
        self._requests.pop(id(turn), None)
        self._failures = deque(failure for failure in self._failures if failure.turn is not turn)

    def step(self) -> bool:
        if self._failures:
            raise self._failures.popleft()
        ready = [request for request in list(self._requests.values()) if self._is_ready(request)]
        if ready and self._is_one_batch(ready):
            self._serve(ready)
            return True
        if ready:
            now = self._host.now()
            waiting = [request.waiting() for request in ready]
            match decide(waiting, self._rhythm.absent(), self._rule, self._steps, now):
                case Go(chosen):
                    self._serve([ready[i] for i in chosen])
                    return True
                case Hold(until_ns):
                    self._host.wake_at(until_ns)
        return bool(self._failures)

    def _is_one_batch(self, ready: Sequence[Request]) -> bool:
        """They all go at once: there is room, and steps are too short for anybody to wait for others."""
        if len(ready) > self._rule.max_batch or self._rule.hold_ns(self._steps.length_ns):
            return False
        return len(ready) == 1 or not any(request.alone for request in ready)

    def _is_ready(self, request: Request) -> bool:
        if request.query is None:
            payload = request.turn.take()
            if payload is not None:
                try:
                    self._observed(request, payload)
                except BadPayload:
                    self._fail(request, "bad_observation")
            elif request.turn.exhausted():
                self._fail(request, "no_observation")
        return request.query is not None and request.turn.room() > 0

    def _observed(self, request: Request, payload: Payload) -> None:
        """Read an observation; its arrays stay where they are, since the payload is valid as long as the turn."""
        if payload.kind != "observation":
            raise BadPayload(f"a payload {payload.kind!r}, not an observation")
        meta = payload.meta
        found = arrays(payload)
        observed = {wanted.key: _field(found, wanted) for wanted in self._contract.observation}
        texts = {key: _text(meta, key) for key in self._contract.texts}
        previous, delay_steps = _going_on(request.memory.last, meta)
        seed = param_int(meta, "seed", request.number) & _SEEDS
        request.query = Query(observed, texts, seed, previous, delay_steps)
        request.has_deadline = meta.get("deadline_ms") is not None
        request.alone = meta.get("deterministic") is True or request.memory.is_suspect

    # -- a step

    def _serve(self, batch: Sequence[Request]) -> None:
        queries = [request.query for request in batch if request.query is not None]
        began_ns = self._host.now()
        try:
            chunks = self._asked_of_policy(queries)
        except Exception:  # the policy is somebody else's code: what it raises concerns these queries only
            log.exception("event=policy_failed session=%s batch=%d", _sessions(batch), len(batch))
            self._one_by_one(batch)
            return
        over_ns = self._host.now()
        step = _Step(len(batch), began_ns, over_ns - began_ns)
        before_ns = self._steps.length_ns or step.took_ns
        self._steps = Steps(round(before_ns + (step.took_ns - before_ns) * _NEWEST), over_ns)
        for request, query, chunk in zip(batch, queries, chunks, strict=True):
            self._answer(request, query, chunk, step)

    def _asked_of_policy(self, queries: Sequence[Query]) -> Sequence[object]:
        chunks: Sequence[object] = self._policy.predict_chunk(queries)
        if len(chunks) != len(queries):
            raise ValueError(f"{len(chunks)} chunks for {len(queries)} queries")
        return chunks

    def _one_by_one(self, batch: Sequence[Request]) -> None:
        """Find the query at which a batch failed: each gets a step of its own, and the one that fails ends its turn."""
        if len(batch) > 1:
            for request in batch:
                request.alone = True
            return
        batch[0].memory.is_suspect = True
        self._fail(batch[0], "policy_error")
        self._try_out()

    def _try_out(self) -> None:
        blank = Query(
            {wanted.key: np.zeros(wanted.shape, wanted.dtype) for wanted in self._contract.observation},
            dict.fromkeys(self._contract.texts, "warm up"),
            seed=0,
        )
        try:
            _shaped(self._asked_of_policy([blank])[0], self._contract)
        except Exception as error:  # it is raised again, as what it means
            raise PolicyBroken("the policy cannot answer an observation of zeros as its contract says") from error

    def _answer(self, request: Request, query: Query, given: object, step: _Step) -> None:
        try:
            actions, clamped = _guarded(given, self._contract, self._guard)
        except Unsafe as error:
            log.warning("event=chunk_refused session=%d code=%s", request.turn.session, error.code)
            self._fail(request, error.code)
            return
        meta: dict[str, Scalar] = {
            "infer_ms": step.took_ns / NS_PER_MS,
            "queue_ms": (step.began_ns - request.since_ns) / NS_PER_MS,
            "batch": step.size,
            "replica": self._replica,
            "continued": _goes_on(actions, query),
        }
        if clamped:
            meta["clamped"] = clamped
        if request.has_deadline:
            meta["deadline_missed"] = self._host.now() > request.turn.stamp.deadline_ns
        request.memory.last = actions
        self._leave(request)
        try:
            request.turn.emit(pack("chunk", meta, actions=actions))
        except TurnError as error:  # the others of the batch still get theirs
            self._failures.append(error)
        else:
            request.turn.finish()

    def _fail(self, request: Request, code: str) -> None:
        """The turn's end is raised from one of the next steps; until then it is served no more."""
        self._leave(request)
        self._failures.append(TurnError(request.turn, code))

    def _leave(self, request: Request) -> None:
        """Its turn is over here."""
        del self._requests[id(request.turn)]
        if not request.alone:  # nobody gains by waiting for one that is served alone
            self._rhythm.answered(request.turn.session, self._host.now())

    def load_now(self) -> Load:
        kept = sum(memory.last.nbytes for memory in self._memories.values() if memory.last is not None)
        queued = sum(request.query is not None for request in self._requests.values())
        return Load(len(self._memories), len(self._requests), queued, kept, 0)

    def shut(self) -> None:
        self._requests.clear()
        self._memories.clear()


def _guard(text: str) -> Guard:
    try:
        return Guard(text)
    except ValueError:
        raise BadOption(f"policy: guard is {' or '.join(Guard)}, not {text!r}") from None


def _sessions(batch: Sequence[Request]) -> str:
    return ",".join(str(request.turn.session) for request in batch)


def _field(given: Mapping[str, Array], wanted: Field) -> Array:
    found = given.get(wanted.key)
    if found is None or found.shape != wanted.shape or found.dtype != wanted.dtype:
        raise BadPayload(f"array {wanted.key!r} is not as the contract says")
    return found


def _text(meta: Mapping[str, Scalar], key: str) -> str:
    text = meta.get(key)
    if not isinstance(text, str):
        raise BadPayload(f"no text {key!r}")
    return text


def _going_on(last: Chunk | None, meta: Mapping[str, Scalar]) -> tuple[Chunk | None, int]:
    """What of the last chunk is still to come when the new one takes over, and how much of that is fixed."""
    executed = param_int(meta, "executed_steps", -1)
    if last is None or not 0 <= executed < len(last):
        return None, 0
    previous = last[executed:].copy()  # the policy may write to it
    return previous, min(max(param_int(meta, "delay_steps", 0), 0), len(previous))


def _goes_on(actions: Chunk, query: Query) -> bool:
    if query.previous is None:
        return False
    fixed = query.delay_steps
    return bool(np.allclose(actions[:fixed], query.previous[:fixed], rtol=1e-4, atol=1e-4))


# -- what may reach a robot


def _shaped(given: object, contract: Contract) -> Chunk:
    """Raises Unsafe where it is not a chunk at all."""
    if not isinstance(given, np.ndarray) or given.dtype != np.float32:
        raise Unsafe("bad_actions")
    if given.shape != (contract.action_horizon, contract.action_dim):
        raise Unsafe("bad_actions")
    return given


def _sound(given: object, contract: Contract) -> Chunk:
    actions = _shaped(given, contract)
    if not np.isfinite(actions).all():
        raise Unsafe("action_not_finite")
    return actions


def _guarded(given: object, contract: Contract, guard: Guard) -> tuple[Chunk, int]:
    """A copy of the chunk as it may be executed, and how many of its numbers had to be clamped. Raises Unsafe."""
    actions = _shaped(given, contract)
    low, high = np.float32(contract.action_low), np.float32(contract.action_high)
    if actions.min() >= low and actions.max() <= high:  # not so where one of them is not a number
        return actions.copy(), 0
    _sound(actions, contract)
    beyond = int(np.count_nonzero((actions < low) | (actions > high)))
    if beyond and guard is Guard.REFUSE:
        raise Unsafe("action_out_of_range")
    return np.clip(actions, low, high), beyond
