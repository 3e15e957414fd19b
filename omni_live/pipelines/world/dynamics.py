"""The dynamics stage: actions in, latents of frames out, one after the other, from a past that the engine keeps.

One engine step is one denoising step of a batch. Its rows are the frames that are due, over all sessions, each at a
denoising step of its own: a turn that comes joins at the next step, and one that is dropped stops within one. A frame
is committed whole, after its last denoising step, and only then is it emitted; of one that is half denoised nothing
stays. A session's turns make their frames in the order in which they began.

Frames are numbered from 0, the one that a session starts with; step n makes frame n. The position of a session is the
number of its last committed frame. Frames follow from start, seed and actions: the noise of frame n is a function of
(seed, n), so that going back and acting again gives the same frames, on a fork and on another replica too. To the bit,
where rows are computed alone: a turn that has no company, or any with the option `deterministic`.

Latents lie in pages of one pool (see engines.pages), so a fork shares its past with its parent. Kept are those that
can be rewound to, the context that they need, and some for frames that a session never delivers and cuts off again.

A batch that fails is served again row by row, so that poison actions end their own turn alone, and the session that
sent them is not batched with others any more. A world that then fails on a blank is broken: the worker goes down with
it, to be started anew.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from omni_live.engines.contract import EngineOptions, Host, Load, SessionError, Turn, TurnError
from omni_live.engines.options import BadOption, Options, param_int
from omni_live.engines.pages import PagePool, Pages, PoolFull, record_bytes
from omni_live.pipelines.world.adapter import TABLE_WORLD, UNDATED_NS, Floats, Images, World, WorldBroken, load_world
from omni_live.protocols.arrays import Array, BadPayload, array, pack
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.stamp import SessionKey

MIB: Final = 2**20
PAGE_RECORDS: Final = 8
"""Latents in a page: what a fork copies at most when it goes its own way."""
MAX_FRAMES: Final = 1024
"""Frames that one turn may ask for."""
UNDELIVERED: Final = 64
"""Frames that may be cut off again without costing a session some of its `rewind_steps`."""
_OWN: Final = frozenset({"world", "max_batch", "rewind_steps", "pool_bytes", "deterministic"})
"""The engine's options; the world gets all others."""
_SEEDS: Final = 2**63 - 1
_ACTION: Final = (2, 2)
"""A frame takes two actions of two numbers."""

log = logging.getLogger(__name__)


class Refused(Exception):
    """What a session was told cannot be done; `code` says why, and its state is as before."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass(slots=True)
class Memory:
    """What is kept of a session."""

    pages: Pages | None = None
    """Its latents, numbered as the frames are; None before its first reset."""
    seed: int = 0
    moves: int = 0
    """How often its position was moved other than by a frame: what was begun before that can't go on."""
    is_suspect: bool = False
    """The world failed on its actions. Served alone from then on, it cannot cost others another batch."""

    refused: str = ""
    """Why the last restore, or the fork that it is to be, was refused. A session learns of that from the cut that it
    sends behind either."""

    @property
    def position(self) -> int:
        """Number of the last frame; -1 where there is none."""
        return -1 if self.pages is None else self.pages.end - 1

    def started(self) -> Pages:
        """Its latents. Raises Refused where there are none yet."""
        if self.pages is None:
            raise Refused("not_started")
        return self.pages

    def replace(self, pages: Pages, seed: int) -> None:
        if self.pages is not None:
            self.pages.close()
        self.pages, self.seed, self.refused = pages, seed, ""
        self.moves += 1

    def clear(self) -> None:
        """Be as it was when the session was opened."""
        if self.pages is not None:
            self.pages.close()
        self.pages, self.refused = None, ""
        self.moves += 1


@dataclass(slots=True, eq=False)
class Ask:
    """A turn that waits for its input, or, where it only looks at a frame, for room to show it."""

    turn: Turn
    memory: Memory
    since_ns: int
    look: int | None = None


@dataclass(slots=True, eq=False)
class Rollout:
    """A turn that makes frames."""

    turn: Turn
    memory: Memory
    since_ns: int
    actions: Floats
    first: int
    """Number of its first frame."""
    wants_alone: bool = False
    """Its frames are to have the bits that they have without company."""
    moves: int = -1
    """The memory's, when the first frame began; -1 before."""
    made: int = 0
    frame: "Frame | None" = None
    failed_along: bool = False
    """The batch that it was in failed: it gets its next step alone."""

    @property
    def is_alone(self) -> bool:
        return self.wants_alone or self.failed_along or self.memory.is_suspect


@dataclass(slots=True, eq=False)
class Frame:
    """A frame that is being denoised."""

    rollout: Rollout
    since_ns: int
    x: Floats
    context: Floats
    action: Floats
    index: int = 0
    """The denoising step that is due."""

    @property
    def due_ns(self) -> tuple[int, int]:
        return self.rollout.turn.stamp.deadline_ns or self.since_ns + UNDATED_NS, self.since_ns


class Dynamics:
    """Engine of the dynamics stage. Options: world (`module:Class`), max_batch, rewind_steps, pool_bytes,
    deterministic; the world gets all others.

    A turn's input is one payload: "actions", with array `actions` float32 (frames, 2, 2) and meta `step`, the number
    of the first frame, which must be the position + 1, and `alone`, true where no row of another session's may be in a
    batch with them; or "look", with meta `step`, a frame that is kept (default: the
    last). The output is a payload "latent" for each frame, array `latent` float32 (c, h, w), meta `step`.
    Turns fail with: bad_actions, no_actions, step_out_of_order, step_unknown, not_started, pool_full, world_error,
    frame_not_finite, unknown_session; all but the frames that were not emitted stay committed.

    A session is told: "clear" (it has no past any more, and stands at -1), "reset" (meta `seed`; array `image` uint8,
    one frame, or none: one of the world's starts by the seed), "rewind" (meta `step`: back to it), "cut" (the same, for
    frames that were never delivered; from a position that is not beyond it, it does nothing; right after a restore or a
    fork that failed, it is refused as that was). It reports "at", meta `step`: the position; or "refused", meta `code`
    (bad_reset, not_started, bad_step, rewind_ahead, rewind_too_far, pool_full, world_error, bad_snapshot) and `step`;
    both with the meta `ask` of what it answers.
    """

    inline = False

    def __init__(self, options: EngineOptions) -> None:
        values = options.values
        read = Options("dynamics", EngineOptions({key: value for key, value in values.items() if key in _OWN}))
        path = read.text("world", TABLE_WORLD)
        self._max_batch = read.whole("max_batch", 32, 1, 1024)
        self._rewind_steps = read.whole("rewind_steps", 256, 0, 1_000_000)
        self._pool_bytes = read.whole("pool_bytes", 256 * MIB, 1, 2**40)
        self._deterministic = read.flag("deterministic", False)
        self._world: World = load_world(path, {key: value for key, value in values.items() if key not in _OWN})
        self._memories: dict[SessionKey, Memory] = {}
        self._asks: dict[int, Ask] = {}
        self._rollouts: dict[int, Rollout] = {}
        """Both by the turn's id, in the order in which they came."""
        self._failures: deque[TurnError] = deque()
        """A step may fail several turns, but can raise only one error at a time."""

    def load(self, host: Host) -> None:
        """Load the world and see that it runs. Raises WorldBroken where it does not; BadOption for too small a pool."""
        self._host = host
        world = self._world
        world.load()
        self._shape = world.LATENT
        self._context = world.CONTEXT
        page_bytes = PAGE_RECORDS * record_bytes(self._shape, np.float32)
        try:
            self._pool = PagePool(page_bytes, self._pool_bytes)
        except ValueError as error:
            raise BadOption(f"dynamics: pool_bytes: {error}") from None
        self._starts: Images = world.starts()
        self._fingerprint = world.fingerprint()
        self._keep = self._rewind_steps + UNDELIVERED + self._context
        for size in {1, min(8, self._max_batch)}:
            self._try_out(size)

    # -- sessions

    def open(self, session: SessionKey, params: Mapping[str, Scalar]) -> None:
        self._memories[session] = Memory()

    def close(self, session: SessionKey) -> None:
        memory = self._memories.pop(session, None)
        if memory is not None and memory.pages is not None:
            memory.pages.close()

    def listen(self, session: SessionKey, payload: Payload) -> None:
        memory = self._memory(session)
        step = param_int(payload.meta, "step", -1)
        answer: dict[str, Scalar]
        try:
            match payload.kind:
                case "clear":
                    memory.clear()
                case "reset":
                    self._reset(memory, payload)
                case "rewind":
                    self._rewind(memory, step)
                case "cut":
                    self._cut(memory, step)
                case _:
                    return
        except Refused as refused:
            kind, answer = "refused", {"code": refused.code, "step": step}
        else:
            kind, answer = "at", {"step": memory.position}
        if "ask" in payload.meta:
            answer["ask"] = payload.meta["ask"]
        self._host.find(session, Payload(kind, answer))

    def _reset(self, memory: Memory, payload: Payload) -> None:
        seed = param_int(payload.meta, "seed", 0) & _SEEDS
        latent = self._encoded(self._image(payload, seed))
        old = memory.pages
        if not self._pool.free_pages and (old is None or not old.freeable()):
            raise Refused(PoolFull.code)
        fresh = Pages(self._pool, self._shape, np.float32)
        memory.replace(fresh, seed)  # before the first page is taken: the one that it needs may be one of the old
        fresh.append(latent)

    def _image(self, payload: Payload, seed: int) -> Images:
        if not payload.arrays:
            start: Images = self._starts[seed % len(self._starts)]
            return start
        try:
            image = array(payload, "image")
        except BadPayload:
            raise Refused("bad_reset") from None
        if image.shape != self._starts.shape[1:] or image.dtype != np.uint8:
            raise Refused("bad_reset")
        return np.asarray(image, np.uint8)

    def _encoded(self, image: Images) -> Floats:
        """Always alone, so that a start is the same latent whoever begins with it."""
        try:
            latent: Floats = _like(self._world.encode(image[None]), (1, *self._shape))[0]
        except Exception as error:  # the world is somebody else's code: what it raises concerns this image only
            log.exception("event=encode_failed")
            raise Refused("world_error") from error
        if not np.isfinite(latent).all():
            raise Refused("world_error")
        return latent

    def _rewind(self, memory: Memory, step: int) -> None:
        if 0 <= step < self._floor(memory.started()):
            raise Refused("rewind_too_far")
        self._go_back(memory, step)

    def _cut(self, memory: Memory, step: int) -> None:
        code, memory.refused = memory.refused, ""
        if code:
            raise Refused(code)
        if step < memory.started().end - 1:
            self._go_back(memory, step)

    def _go_back(self, memory: Memory, step: int) -> None:
        pages = memory.started()
        if step < 0:
            raise Refused("bad_step")
        if step >= pages.end:
            raise Refused("rewind_ahead")
        if step < self._oldest(pages):
            raise Refused("rewind_too_far")
        pages.truncate(step + 1)
        memory.moves += 1

    def _oldest(self, pages: Pages) -> int:
        """The oldest frame whose context is kept."""
        return pages.first + self._context - 1 if pages.first else 0

    def _floor(self, pages: Pages) -> int:
        """The oldest frame that can be rewound to."""
        return max(self._oldest(pages), pages.end - 1 - self._rewind_steps)

    def fork(self, session: SessionKey, into: SessionKey) -> None:
        """Where no page is free the fork could not go its own way: it is empty then, and its first cut is refused."""
        memory = self._memory(session)
        if memory.pages is None:
            self._memories[into] = Memory(refused=memory.refused)
        elif not self._pool.free_pages:
            self._memories[into] = Memory(refused=PoolFull.code)
        else:
            self._memories[into] = Memory(memory.pages.fork(), memory.seed, is_suspect=memory.is_suspect)

    def snapshot(self, session: SessionKey) -> Payload:
        pages = self._memory(session).pages
        if pages is None:
            raise SessionError(session, "not_started")
        first = max(pages.first, self._floor(pages) - self._context + 1)
        meta: dict[str, Scalar] = {
            "seed": self._memory(session).seed,
            "position": pages.end - 1,
            "first": first,
            "world": self._fingerprint,
        }
        return pack("world", meta, latents=pages.span(first, pages.end))

    def restore(self, session: SessionKey, payload: Payload) -> None:
        memory = self._memory(session)
        try:
            self._restore(memory, payload)
        except Refused as refused:
            memory.refused = refused.code
            raise SessionError(session, refused.code) from None

    def _restore(self, memory: Memory, payload: Payload) -> None:
        try:
            seed, first, latents = self._restorable(payload)
        except BadPayload:
            raise Refused("bad_snapshot") from None
        pages = Pages(self._pool, self._shape, np.float32, first)
        try:
            for latent in latents:
                pages.append(latent)
        except PoolFull as full:
            pages.close()
            raise Refused(full.code) from None
        memory.replace(pages, seed)

    def _restorable(self, payload: Payload) -> tuple[int, int, Floats]:
        """Seed, number of the first latent, latents. Raises BadPayload."""
        meta = payload.meta
        if payload.kind != "world" or meta.get("world") != self._fingerprint:
            raise BadPayload("not a snapshot of this world")
        seed, first, position = (param_int(meta, name, -1) for name in ("seed", "first", "position"))
        latents = array(payload, "latents")
        count = position - first + 1
        if not 0 <= seed <= _SEEDS or first < 0 or count < (self._context if first else 1):
            raise BadPayload("its numbers don't fit together")
        if latents.shape != (count, *self._shape) or latents.dtype != np.float32:
            raise BadPayload("its latents are of another shape")
        sound = np.asarray(latents, np.float32)
        if not np.isfinite(sound).all():
            raise BadPayload("its latents are no numbers")
        return seed, first, sound

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
        self._asks[id(turn)] = Ask(turn, memory, self._host.now())

    def drop(self, turn: Turn) -> None:
        self._leave(turn)
        self._failures = deque(failure for failure in self._failures if failure.turn is not turn)

    def step(self) -> bool:
        if self._failures:
            raise self._failures.popleft()
        for ask in list(self._asks.values()):
            self._hear(ask)
        due = self._due()
        if due:
            self._serve(self._chosen(due))
            return True
        return bool(self._failures)

    def _hear(self, ask: Ask) -> None:
        """Take its input, and answer it where that needs no denoising."""
        try:
            if ask.look is None and (payload := ask.turn.take()) is not None:
                self._heard(ask, payload)
            elif ask.look is None and ask.turn.exhausted():
                self._fail(ask.turn, "no_actions")
            if ask.look is not None and ask.turn.room() > 0:
                self._show(ask, ask.look)
        except BadPayload:
            self._fail(ask.turn, "bad_actions")
        except Refused as refused:
            self._fail(ask.turn, refused.code)

    def _heard(self, ask: Ask, payload: Payload) -> None:
        if payload.kind == "look":
            ask.look = param_int(payload.meta, "step", ask.memory.started().end - 1)
        elif payload.kind == "actions":
            # A copy: what is read here may lie in shared memory, where others wait for the room.
            actions = _actions(array(payload, "actions")).copy()
            first = param_int(payload.meta, "step", -1)
            del self._asks[id(ask.turn)]
            alone = payload.meta.get("alone") is True
            self._rollouts[id(ask.turn)] = Rollout(ask.turn, ask.memory, ask.since_ns, actions, first, alone)
        else:
            raise BadPayload(f"a payload {payload.kind!r}, neither actions nor a look")

    def _show(self, ask: Ask, step: int) -> None:
        pages = ask.memory.started()
        if not pages.first <= step < pages.end:
            raise Refused("step_unknown")
        if self._emit(ask.turn, step, np.asarray(pages.get(step), np.float32)):
            self._finish(ask.turn)

    # -- a step

    def _due(self) -> list[Frame]:
        """Whose next denoising step may be done: of each session, the frame of the turn that came first."""
        due: list[Frame] = []
        busy: set[int] = set()
        for rollout in list(self._rollouts.values()):
            if id(rollout.memory) in busy:
                continue
            busy.add(id(rollout.memory))
            try:
                frame = self._under_way(rollout)
            except Refused as refused:
                self._fail(rollout.turn, refused.code)
            else:
                if frame is not None:
                    due.append(frame)
        return due

    def _under_way(self, rollout: Rollout) -> Frame | None:
        """The frame that it is at, begun where there is room for it. Raises Refused."""
        memory = rollout.memory
        pages = memory.started()
        number = rollout.first + rollout.made
        if number != pages.end or rollout.moves not in {-1, memory.moves}:
            raise Refused("step_out_of_order")
        if rollout.frame is None and rollout.turn.room() > 0:
            rollout.moves = memory.moves
            since_ns = self._host.now() if rollout.made else rollout.since_ns
            x = self._world.begin([memory.seed], [number])[0]
            rollout.frame = Frame(rollout, since_ns, x, self._past(pages), rollout.actions[rollout.made])
        return rollout.frame

    def _past(self, pages: Pages) -> Floats:
        """The context of the next frame, (CONTEXT * c, h, w); before frame 0 it always was as in frame 0."""
        known = np.asarray(pages.last(min(self._context, len(pages))), np.float32)
        missing = self._context - len(known)
        if missing:
            known = np.concatenate([known[:1].repeat(missing, axis=0), known])
        depth, height, width = self._shape
        return known.reshape(self._context * depth, height, width)

    def _chosen(self, due: list[Frame]) -> list[Frame]:
        due.sort(key=lambda frame: frame.due_ns)
        if self._deterministic or due[0].rollout.is_alone:
            return due[:1]
        return [frame for frame in due if not frame.rollout.is_alone][: self._max_batch]

    def _serve(self, frames: Sequence[Frame]) -> None:
        try:
            finished = self._denoise(frames)
        except Exception:  # the world is somebody else's code: what it raises concerns these frames only
            log.exception("event=world_failed session=%s batch=%d", _sessions(frames), len(frames))
            self._one_by_one(frames)
            return
        for frame in frames:
            frame.rollout.failed_along = False
        for row, latent in finished.items():
            self._commit(frames[row].rollout, latent)

    def _denoise(self, frames: Sequence[Frame]) -> dict[int, Floats]:
        """One denoising step; the latents of those frames that are finished, by row. Where the world raises, nothing
        has changed."""
        context = np.stack([frame.context for frame in frames])
        x = _like(
            self._world.denoise(
                np.stack([frame.x for frame in frames]),
                np.array([frame.index for frame in frames], np.int64),
                context,
                np.stack([frame.action for frame in frames]),
            ),
            (len(frames), *self._shape),
        )
        ends = [row for row, frame in enumerate(frames) if frame.index == self._world.STEPS - 1]
        latents: Sequence[Floats] = ()
        if ends:
            latents = list(_like(self._world.finish(x[ends], context[ends]), (len(ends), *self._shape)))
        for frame, row in zip(frames, x, strict=True):
            frame.x = row
            frame.index += 1
        return dict(zip(ends, latents, strict=True))

    def _one_by_one(self, frames: Sequence[Frame]) -> None:
        """Find the row at which a batch failed: each gets a step of its own, and the one that fails ends its turn."""
        if len(frames) > 1:
            for frame in frames:
                frame.rollout.failed_along = True
            return
        rollout = frames[0].rollout
        rollout.memory.is_suspect = True
        self._fail(rollout.turn, "world_error")
        self._try_out(1)

    def _try_out(self, size: int) -> None:
        context = np.zeros((size, self._context * self._shape[0], *self._shape[1:]), np.float32)
        index = np.arange(size, dtype=np.int64) % self._world.STEPS
        shape = (size, *self._shape)
        try:
            x = _like(self._world.begin([0] * size, list(range(size))), shape)
            x = _like(self._world.denoise(x, index, context, np.zeros((size, *_ACTION), np.float32)), shape)
            _like(self._world.finish(x, context), shape)
        except Exception as error:  # it is raised again, as what it means
            raise WorldBroken("the world cannot go on from zeros") from error

    def _commit(self, rollout: Rollout, latent: Floats) -> None:
        """Keep the frame, then say so: a frame that was emitted is always there to go on from."""
        if not np.isfinite(latent).all():
            self._fail(rollout.turn, "frame_not_finite")
            return
        pages = rollout.memory.started()
        try:
            number = pages.append(latent)
        except PoolFull as full:
            self._fail(rollout.turn, full.code)
            return
        pages.trim(self._keep)
        rollout.frame = None
        rollout.made += 1
        if self._emit(rollout.turn, number, latent) and rollout.made == len(rollout.actions):
            self._finish(rollout.turn)

    def _emit(self, turn: Turn, step: int, latent: Floats) -> bool:
        """False where the turn is over by that; the others of a batch still get theirs."""
        try:
            turn.emit(pack("latent", {"step": step}, latent=latent))
        except TurnError as error:
            self._leave(turn)
            self._failures.append(error)
            return False
        return True

    def _finish(self, turn: Turn) -> None:
        self._leave(turn)
        turn.finish()

    def _fail(self, turn: Turn, code: str) -> None:
        """The turn's end is raised from one of the next steps; until then it is served no more."""
        self._leave(turn)
        self._failures.append(TurnError(turn, code))

    def _leave(self, turn: Turn) -> None:
        self._asks.pop(id(turn), None)
        self._rollouts.pop(id(turn), None)

    def load_now(self) -> Load:
        turns = len(self._asks) + len(self._rollouts)
        used, cap = self._pool.used_bytes, self._pool.cap_bytes
        return Load(len(self._memories), turns, len(self._rollouts), used, cap)

    def shut(self) -> None:
        self._asks.clear()
        self._rollouts.clear()
        for session in list(self._memories):
            self.close(session)


def _actions(given: Array) -> Floats:
    """Raises BadPayload where they are not a number of frames' actions."""
    if given.dtype != np.float32 or given.ndim != 3 or given.shape[1:] != _ACTION:
        raise BadPayload(f"actions are float32 (frames, 2, 2), not {given.dtype}{given.shape}")
    if not 1 <= len(given) <= MAX_FRAMES:
        raise BadPayload(f"actions for {len(given)} frames")
    actions = np.asarray(given, np.float32)
    if not np.isfinite(actions).all():
        raise BadPayload("actions that are no numbers")
    return actions


def _like(given: object, shape: tuple[int, ...]) -> Floats:
    """Raises ValueError where the world gave something else than it should."""
    if not isinstance(given, np.ndarray) or given.dtype != np.float32 or given.shape != shape:
        raise ValueError(f"the world gave no float32{shape}")
    return given


def _sessions(frames: Sequence[Frame]) -> str:
    return ",".join(str(frame.rollout.turn.session) for frame in frames)
