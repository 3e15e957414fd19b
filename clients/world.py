"""Rollouts of a served world model: stepped, looked at, rewound, forked, snapshotted and restored.

    async with connect("ws://127.0.0.1:8765/v1/world") as link:
        world = await link.open(seed=7)
        frames = await world.step(actions)                  # all of them
        async for frame in world.step(more):                # or each as it comes
            show(frame.image)
        (branch,) = await world.fork(step=2)

Sessions outlive their socket. When it drops, the link comes back by itself, and what was asked goes on: a step comes
whole, each of its frames once and made once. What can't be asked again safely, an open or a fork, ends as
`Unrepeatable` if it was on its way. The errors stand in world_errors.py; all are `WorldError` with a `code`.

Frames that are iterated are sent only as far ahead as `ahead` says, so that a slow reader slows the world down and
fills no memory; whatever else is asked of the same world meanwhile comes behind them, and lets the rest of them come.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from types import TracebackType
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from omni_live.clients.clock import Clock, MonotonicClock
from omni_live.clients.dial import Address
from omni_live.clients.duplex import Patience
from omni_live.clients.world_book import Ask, Book
from omni_live.clients.world_errors import Interrupted, SessionLost
from omni_live.clients.world_link import Counts, Line, Opening
from omni_live.clients.world_wire import Facts, Frame, Images, Message, actions_value, image_value, write
from omni_live.protocols.fields import Wire
from omni_live.protocols.world.arrays import FORMATS, RAW
from omni_live.protocols.world.messages import MAX_CREDITS, MAX_FORKS, MSGPACK_SUBPROTOCOL, OUTPUTS

AHEAD: Final = 256
"""Frames that the server may send ahead of a reader."""
TIMEOUT_S: Final = 30.0
MAX_FRAME_BYTES: Final = 64 * 1024 * 1024


class Frames:
    """Frames on their way. Awaited it gives all of them, iterated each as it comes; nothing is asked before that.

    Either raises WorldError: `Interrupted` where they were cut short. Whoever no longer waits, or leaves the iteration
    early, has the rest cancelled.
    """

    def __init__(self, world: "World", ask: Callable[[], Ask]) -> None:
        self._world = world
        self._make = ask
        self._ask: Ask | None = None

    def __await__(self) -> Generator[object, None, list[Frame]]:
        return self._all().__await__()

    async def __aiter__(self) -> AsyncIterator[Frame]:
        ask = await self._begun(holds=True)
        try:
            while ask.ready or not ask.is_over:
                if ask.ready:
                    yield self._world.taken(ask)
                else:
                    await self._world.news(ask)
        finally:
            self._world.cut(ask)
        if ask.error is not None:
            raise ask.error

    async def _all(self) -> list[Frame]:
        ask = await self._begun(holds=False)
        try:
            await self._world.settled(ask)
        except Interrupted as error:
            raise Interrupted(error.code, error.step, tuple(ask.ready)) from None
        return list(ask.ready)

    async def _begun(self, *, holds: bool) -> Ask:
        if self._ask is not None:
            raise ValueError("these frames were asked for already")
        async with self._world.turn:
            await self._world.clear()
            ask = self._ask = self._make()
            ask.holds = holds
            self._world.put(ask)
        return ask

    def cancel(self) -> None:
        """Cut them short: whoever waits gets `Interrupted`."""
        if self._ask is not None:
            self._world.cut(self._ask)


class World:
    """A rollout on a server. Made by `Link.open` and `World.fork`."""

    def __init__(self, line: Line, book: Book) -> None:
        self.turn = asyncio.Lock()
        """Held by what moves the rollout: only then is it known which number comes next."""
        self._line = line
        self._book = book

    @property
    def session_id(self) -> str:
        return self._book.session_id

    @property
    def position(self) -> int:
        """Number of the last frame that was made, as far as it is known here; 0 is the one it began with."""
        return self._book.position

    @property
    def facts(self) -> Facts:
        return self._book.facts

    @property
    def forked_from(self) -> str | None:
        return self._book.forked_from

    # -- frames

    def step(
        self,
        actions: ArrayLike,
        *,
        step: int | None = None,
        outputs: Sequence[str] | None = None,
        format: str | None = None,
        due_ms: float | None = None,
    ) -> Frames:
        """Make a frame of each row of `actions`, float32 (frames, *the world's action), or one of a single action.

        `step` is the first one's number: a frame that is there already is shown again, whatever the actions. `outputs`
        are "frame", "latent" or both. Raises ValueError for actions of another shape, or out of the world's range.
        """
        rows = self._rows(actions)
        names, form = self._shown(outputs, format)
        value = actions_value(rows)

        def ask() -> Ask:
            first = self._book.number(len(rows), step)
            message = self._write("step", actions=value, step=first, due_ms=due_ms, format=form, outputs=list(names))
            return Ask(_id(message), message, first=first, frames=len(rows), outputs=names)

        return Frames(self, ask)

    def look(
        self,
        step: int | None = None,
        frames: int = 1,
        *,
        outputs: Sequence[str] | None = None,
        format: str | None = None,
    ) -> Frames:
        """Frames that were made, again; None: the last one."""
        names, form = self._shown(outputs, format)

        def ask() -> Ask:
            first = self.position if step is None else step
            message = self._write("look", step=first, frames=frames, format=form, outputs=list(names))
            return Ask(_id(message), message, first=first, frames=frames, outputs=names)

        return Frames(self, ask)

    # -- what moves it

    async def rewind(self, step: int) -> None:
        """Go back to where frame `step` was the last one; what was asked before and is not done is interrupted."""
        await self._move("rewind", step=step)

    async def reset(self, seed: int = 0, image: Images | None = None) -> None:
        """Begin anew, from a picture uint8 (height, width, 3) or the world's own; as `rewind` otherwise."""
        await self._move("reset", seed=seed, image=image_value(image))

    async def restore(self, snapshot: bytes) -> None:
        """Go on from a snapshot, be it another session's or server's; as `rewind` otherwise."""
        await self._move("restore", blob=snapshot)

    async def snapshot(self) -> bytes:
        """All that `restore` needs, behind what was asked before."""
        async with self.turn:
            ask = self._plain("snapshot")
            self.put(ask)
        await self.settled(ask)
        return ask.blob

    async def cancel(self) -> None:
        """Cut short all that is asked of this rollout: whoever waits gets `Interrupted`. Whole frames stay."""
        for ask in reversed(tuple(self._book.asks.values())):  # the last one first, so that none begins
            if ask.frames:
                self._book.cancel(ask)
        self._line.wake(self._book)

    async def fork(self, step: int | None = None, count: int = 1) -> list["World"]:
        """So many rollouts, at most 64, that go on from frame `step`, or from where this one stands: all or none.

        Raises WorldError, `Unrepeatable` where the socket was lost meanwhile: children of such a fork end by
        themselves, after the server's grace.
        """
        if not 1 <= count <= MAX_FORKS:
            raise ValueError(f"a fork makes 1 to {MAX_FORKS} rollouts, not {count}")
        book = self._book
        async with self.turn:
            show: Message = {"format": book.form, "credits": book.window}
            message = self._write("fork", step=step, count=count, outputs=list(book.outputs), **show)
            ask = Ask(_id(message), message, repeats=False, forks=count)
            self._line.open(Opening(ask, book, book.window, book.form, book.outputs))
        await self.settled(ask)
        return [World(self._line, made) for made in ask.opened]

    async def close(self) -> None:
        """Give the session up, and what is asked of it. Returns when the server has; does nothing where it is over."""
        if self._book.error is not None:
            return
        ask = self._plain("session.close")
        self.put(ask)
        try:
            await self.settled(ask)
        except SessionLost:
            return

    def discard(self) -> None:
        """Give the session up and wait for nothing."""
        if self._book.error is None:
            self.put(self._plain("session.close"))

    # -- for Frames

    def put(self, ask: Ask) -> None:
        self._line.put(self._book, ask)

    def taken(self, ask: Ask) -> Frame:
        frame = self._book.take(ask)
        self._line.wake(self._book)
        return frame

    def cut(self, ask: Ask) -> None:
        self._book.release(ask)
        self._book.cancel(ask)
        self._line.wake(self._book)

    async def settled(self, ask: Ask) -> None:
        await self._line.settled(ask, self._book)

    async def clear(self) -> None:
        await self._line.clear(self._book)

    async def news(self, ask: Ask) -> None:
        await self._line.news(ask)

    # -- the inside

    async def _move(self, kind: str, **fields: Wire) -> None:
        async with self.turn:
            ask = self._plain(kind, **fields)
            self.put(ask)
            await self.settled(ask)

    def _plain(self, kind: str, **fields: Wire) -> Ask:
        message = self._write(kind, **fields)
        return Ask(_id(message), message)

    def _write(self, kind: str, **fields: Wire) -> Message:
        return write(kind, self.session_id, self._line.next_id(), **fields)

    def _shown(self, outputs: Sequence[str] | None, form: str | None) -> tuple[tuple[str, ...], str]:
        return _outputs(self._book.outputs if outputs is None else outputs), _format(form or self._book.form)

    def _rows(self, actions: ArrayLike) -> NDArray[np.float32]:
        contract = self.facts.contract
        rows = np.ascontiguousarray(actions, "<f4")
        if rows.shape == contract.action:
            rows = rows[None]
        if rows.shape[1:] != contract.action or not len(rows):
            size = " x ".join(map(str, contract.action))
            raise ValueError(f"an action of this world is {size} numbers, and not of shape {list(rows.shape)}")
        if not (np.isfinite(rows).all() and contract.action_low <= rows.min() <= rows.max() <= contract.action_high):
            raise ValueError(f"actions are from {contract.action_low:g} to {contract.action_high:g}")
        return rows


class Link:
    """A line to a world's door, with any number of rollouts. Made by `connect`."""

    def __init__(self, line: Line) -> None:
        self._line = line

    @property
    def facts(self) -> Facts:
        """Of the world that is opened where none is named."""
        return self._line.facts

    @property
    def counts(self) -> Counts:
        return self._line.counts

    async def open(
        self,
        *,
        seed: int = 0,
        image: Images | None = None,
        model: str | None = None,
        outputs: Sequence[str] = ("frame",),
        format: str = RAW,
        ahead: int = AHEAD,
    ) -> World:
        """A rollout that has begun, at frame 0: from a picture uint8 (height, width, 3), or the world's own start.

        `outputs` and `format` ("raw", "png", "jpeg"; the latter two need Pillow) are what its steps and looks bring
        that say nothing else. Raises WorldError.
        """
        names, form = _outputs(outputs), _format(format)
        if not 1 <= ahead <= MAX_CREDITS:
            raise ValueError(f"the server may be 1 to {MAX_CREDITS} frames ahead, not {ahead}")
        message = write(
            "session.open",
            "",
            self._line.next_id(),
            model=model,
            seed=seed,
            image=image_value(image),
            outputs=list(names),
            format=form,
            credits=ahead,
        )
        ask = Ask(_id(message), message, repeats=False, forks=1)
        self._line.open(Opening(ask, None, ahead, form, names))
        await self._line.settled(ask)
        return World(self._line, ask.opened[0])

    def drop_transport(self) -> None:
        """Lose the socket without a word, as a network does. For tests and demonstrations."""
        self._line.drop_transport()


class connect:  # noqa: N801  it is called like a function, as in websockets
    """A link to the world's door at `url`, until the block is left, which closes its sessions.

    `patience` is for dropped sockets, `timeout_s` for an answer and between two frames. Raises ConnectFailed.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        patience: Patience | None = None,
        clock: Clock | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        address = Address(url, api_key, subprotocols=(MSGPACK_SUBPROTOCOL,), max_frame_bytes=MAX_FRAME_BYTES)
        self._line = Line(address, patience or Patience(), timeout_s, clock or MonotonicClock(), chance)
        self._group = asyncio.TaskGroup()
        self._running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Link:
        await self._line.begin()
        await self._group.__aenter__()
        self._running = self._group.create_task(self._line.run())
        return Link(self._line)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The group is told of no error: it would hand the block's own one on inside a group.
        try:
            await self._line.close()
        finally:
            if self._running is not None:
                self._running.cancel()
            await self._group.__aexit__(None, None, None)


def _id(message: Message) -> str:
    request_id = message["request_id"]
    assert isinstance(request_id, str)
    return request_id


def _outputs(names: Sequence[str]) -> tuple[str, ...]:
    if not names or len(set(names)) != len(names) or not set(names) <= set(OUTPUTS):
        raise ValueError(f"outputs are some of {', '.join(OUTPUTS)}, not {list(names)}")
    return tuple(names)


def _format(form: str) -> str:
    if form not in FORMATS:
        raise ValueError(f"a format is one of {', '.join(FORMATS)}, not {form!r}")
    return form
