"""The decoder stage: latents in, frames out, one for each, in batches across sessions.

It keeps nothing of a session. One engine step is one call of the world's decoder, with at most one latent of each
turn, the most urgent first. A batch that fails is served again row by row, so that a poison latent ends its own turn
alone; a world that then fails on zeros is broken, and the worker goes down with it.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from omni_live.engines.contract import EngineOptions, Host, Load, Turn, TurnError
from omni_live.engines.options import Options, param_int
from omni_live.engines.stateless import Stateless
from omni_live.pipelines.world.adapter import TABLE_WORLD, UNDATED_NS, Floats, Images, World, WorldBroken, load_world
from omni_live.protocols.arrays import BadPayload, array, pack
from omni_live.sessions.payload import Payload, Scalar

_OWN: Final = frozenset({"world", "max_batch", "deterministic"})
"""The engine's options; the world gets all others."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Film:
    """A turn whose latents become frames."""

    turn: Turn
    since_ns: int
    latent: Floats | None = None
    """The one whose frame is next."""
    step: int = -1
    alone: bool = False
    """The batch that it was in failed."""

    @property
    def due_ns(self) -> tuple[int, int]:
        return self.turn.stamp.deadline_ns or self.since_ns + UNDATED_NS, self.since_ns


class Decoder(Stateless):
    """Engine of the decoder stage. Options: world (`module:Class`), max_batch, deterministic (rows are computed
    alone); the world gets all others.

    Input: payloads "latent", array `latent` float32 (c, h, w), meta `step`. Output: for each a payload "frame", array
    `image` uint8 (height, width, 3), meta `step`. Turns fail with: bad_latent, world_error.
    """

    inline = False

    def __init__(self, options: EngineOptions) -> None:
        super().__init__()
        values: Mapping[str, Scalar] = options.values
        read = Options("decoder", EngineOptions({key: value for key, value in values.items() if key in _OWN}))
        path = read.text("world", TABLE_WORLD)
        # The table world's pictures leave the cache where there are more: 0.3 ms each in batches of 8, 0.5 of 32.
        self._max_batch = read.whole("max_batch", 8, 1, 1024)
        self._deterministic = read.flag("deterministic", False)
        self._world: World = load_world(path, {key: value for key, value in values.items() if key not in _OWN})
        self._films: dict[int, Film] = {}
        self._failures: deque[TurnError] = deque()
        """A step may fail several turns, but can raise only one error at a time."""

    def load(self, host: Host) -> None:
        """Load the world and see that it decodes. Raises WorldBroken where it does not."""
        self._host = host
        self._world.load()
        self._shape = self._world.LATENT
        self._image = self._world.starts().shape[1:]
        for size in {1, min(8, self._max_batch)}:
            self._try_out(size)

    def begin(self, turn: Turn) -> None:
        self._films[id(turn)] = Film(turn, self._host.now())

    def drop(self, turn: Turn) -> None:
        self._films.pop(id(turn), None)
        self._failures = deque(failure for failure in self._failures if failure.turn is not turn)

    def step(self) -> bool:
        if self._failures:
            raise self._failures.popleft()
        due = [film for film in list(self._films.values()) if self._is_due(film)]
        if due:
            self._serve(self._chosen(due))
            return True
        return bool(self._failures)

    def _is_due(self, film: Film) -> bool:
        turn = film.turn
        if film.latent is None and turn.room() > 0:
            payload = turn.take()
            if payload is not None:
                self._taken(film, payload)
            elif turn.exhausted():
                del self._films[id(turn)]
                turn.finish()
        return film.latent is not None

    def _taken(self, film: Film, payload: Payload) -> None:
        try:
            film.latent = _latent(payload, self._shape)  # valid until the next one is taken, after this one's frame
        except BadPayload:
            self._fail(film, "bad_latent")
            return
        film.step = param_int(payload.meta, "step", -1)
        film.since_ns = self._host.now()

    def _chosen(self, due: list[Film]) -> list[Film]:
        due.sort(key=lambda film: film.due_ns)
        if self._deterministic or due[0].alone:
            return due[:1]
        return [film for film in due if not film.alone][: self._max_batch]

    def _serve(self, films: Sequence[Film]) -> None:
        try:
            images = self._decoded(np.stack([film.latent for film in films if film.latent is not None]))
        except Exception:  # the world is somebody else's code: what it raises concerns these latents only
            log.exception("event=decode_failed batch=%d", len(films))
            self._one_by_one(films)
            return
        for film, image in zip(films, images, strict=True):
            film.latent, film.alone = None, False
            try:
                film.turn.emit(pack("frame", {"step": film.step}, image=image))
            except TurnError as error:  # the others of the batch still get theirs
                del self._films[id(film.turn)]
                self._failures.append(error)

    def _decoded(self, latents: Floats) -> Images:
        images: object = self._world.decode(latents)
        if (
            not isinstance(images, np.ndarray)
            or images.dtype != np.uint8
            or images.shape != (len(latents), *self._image)
        ):
            raise ValueError(f"the world decoded {len(latents)} latents to something else than so many frames")
        return images

    def _one_by_one(self, films: Sequence[Film]) -> None:
        """Find the latent at which a batch failed: each gets a step of its own."""
        if len(films) > 1:
            for film in films:
                film.alone = True
            return
        self._fail(films[0], "world_error")
        self._try_out(1)

    def _try_out(self, size: int) -> None:
        try:
            self._decoded(np.zeros((size, *self._shape), np.float32))
        except Exception as error:  # it is raised again, as what it means
            raise WorldBroken("the world cannot decode zeros") from error

    def _fail(self, film: Film, code: str) -> None:
        """The turn's end is raised from one of the next steps; until then it is served no more."""
        del self._films[id(film.turn)]
        self._failures.append(TurnError(film.turn, code))

    def load_now(self) -> Load:
        queued = sum(film.turn.waiting() + (film.latent is not None) for film in self._films.values())
        return Load(len(self.sessions), len(self._films), queued, 0, 0)

    def shut(self) -> None:
        self._films.clear()


def _latent(payload: Payload, shape: tuple[int, ...]) -> Floats:
    """Raises BadPayload where it is none of this world."""
    latent = array(payload, "latent")
    if payload.kind != "latent" or latent.shape != shape or latent.dtype != np.float32:
        raise BadPayload("not a latent of this world")
    return np.asarray(latent, np.float32)
