"""The few calls that a planner and a bench make of a world's door: one socket, many rollouts, answers by request.

A connection that ends raises `WorldError`; a planner then begins anew, since a dream is worth nothing once it is over.

    WorldError    the door refused, or a request did not end as it should
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException
from websockets.typing import Subprotocol

from omni_live.clients.planning import Branches, Images
from omni_live.protocols.fields import Faulty, Wire
from omni_live.protocols.world.arrays import array_value
from omni_live.protocols.world.messages import MSGPACK_SUBPROTOCOL, dump, load

CREDITS: Final = 65_536
_ANSWER_S: Final = 30.0


class WorldError(Exception):
    """The door refused, or a request did not end as it should; `code` says why."""

    def __init__(self, code: str, message: str = "") -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code = code


@dataclass(slots=True)
class Answer:
    """What has come of a request so far."""

    done: asyncio.Future[None]
    images: list[Images] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)
    """Sessions, by id."""
    forks: int = 0
    """So many children are the answer, whether or not more is said of them; 0 where it is none to a fork."""


class Door:
    """One connection to a world's door."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._answers: dict[str, Answer] = {}
        self._asked = 0

    async def open(self, *, seed: int = 0, image: Images | None = None, outputs: Sequence[str] = ("latent",)) -> str:
        """A session's id. Raises WorldError."""
        begin: dict[str, Wire] = {} if image is None else {"image": array_value(image)}
        answer = await self._ask("session.open", {"seed": seed, "outputs": list(outputs), "credits": CREDITS, **begin})
        return answer.opened[0]

    async def reset(self, session: str, image: Images, seed: int = 0) -> None:
        await self._ask("reset", {"session_id": session, "image": array_value(image), "seed": seed})

    async def fork(self, session: str, count: int) -> list[str]:
        """So many children's ids, at most 64. Raises WorldError, also where there is no room for all."""
        return (await self._ask("fork", {"session_id": session, "count": count}, count)).opened

    async def step(
        self, session: str, actions: NDArray[np.float32], outputs: Sequence[str] = ("latent",)
    ) -> list[Images]:
        """Make frames of the actions float32[K, 2, 2]; the pictures, where `outputs` has "frame"."""
        answer = await self._ask(
            "step", {"session_id": session, "actions": array_value(actions), "outputs": list(outputs)}
        )
        return answer.images

    async def look(self, session: str, step: int) -> Images:
        """The picture of a frame that was made."""
        return (await self._ask("look", {"session_id": session, "step": step, "outputs": ["frame"]})).images[0]

    async def close(self, session: str) -> None:
        """Give the session up; nobody waits for it to end."""
        await self._socket.send(dump({"type": "session.close", "session_id": session}, binary=True))

    async def _ask(self, kind: str, fields: dict[str, Wire], forks: int = 0) -> Answer:
        self._asked += 1
        request_id = f"r{self._asked}"
        answer = Answer(asyncio.get_running_loop().create_future(), forks=forks)
        self._answers[request_id] = answer
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._socket.send(dump({"type": kind, "request_id": request_id, **fields}, binary=True))
                await answer.done
        except TimeoutError:
            raise WorldError("timeout", kind) from None
        except WebSocketException as error:
            raise WorldError("connection_lost", str(error)) from None
        finally:
            del self._answers[request_id]
        return answer

    async def listen(self) -> None:
        """Take what comes until the connection ends, which ends all that is asked."""
        try:
            async for frame in self._socket:
                self._hear(load(frame))
        except (WebSocketException, Faulty) as error:
            self._lost(str(error))
        else:
            self._lost("the server closed the connection")

    def _lost(self, why: str) -> None:
        for answer in self._answers.values():
            if not answer.done.done():
                answer.done.set_exception(WorldError("connection_lost", why))

    def _hear(self, event: dict[str, Wire]) -> None:
        answer = self._answers.get(str(event.get("request_id")))
        if answer is None or answer.done.done():
            return
        match event:
            case {"type": "session.opened", "session_id": str(session)}:
                answer.opened.append(session)
                if len(answer.opened) == answer.forks:
                    answer.done.set_result(None)
            case {"type": "frame", "image": {"data": bytes(data), "shape": list(shape)}}:
                sizes = [size for size in shape if isinstance(size, int)]
                answer.images.append(np.frombuffer(data, np.uint8).reshape(sizes))
            case {"type": "done", "status": "done"}:
                answer.done.set_result(None)
            case {"type": "done", "status": str(status)}:
                answer.done.set_exception(WorldError(status, str(event.get("reason"))))
            case {"type": "error", "code": str(code)}:
                answer.done.set_exception(WorldError(code, str(event.get("message"))))
            case _:
                pass  # news of a session that a planner has no use for


@contextlib.asynccontextmanager
async def door(url: str, api_key: str | None = None) -> AsyncIterator[Door]:
    """A world's door, until the block is left. Raises WorldError where there is none."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
    try:
        socket = await connect(
            url,
            subprotocols=[Subprotocol(MSGPACK_SUBPROTOCOL)],
            additional_headers=headers,
            compression=None,
            max_size=None,
            proxy=None,
        )
    except (OSError, TimeoutError, WebSocketException) as error:
        raise WorldError("cannot_connect", str(error)) from None
    trouble: WorldError | None = None
    try:
        async with socket, asyncio.TaskGroup() as group:
            line = Door(socket)
            group.create_task(line.listen())
            try:
                yield line
            finally:
                await socket.close()  # heard to the end: unread frames would hold up the closing
    except* WorldError as errors:
        trouble = _first(errors)
    if trouble is not None:
        raise trouble


def _first(errors: BaseExceptionGroup[WorldError]) -> WorldError:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


class ServedDreams:
    """Dreams of a served world: a session at the picture, forked for each branch."""

    def __init__(self, line: Door) -> None:
        self._door = line
        self._root = ""

    async def roll(self, image: Images, branches: Branches, looks: tuple[int, ...]) -> Images:
        """See `Dreams`. Raises WorldError."""
        if self._root:
            await self._door.reset(self._root, image)
        else:
            self._root = await self._door.open(image=image)
        forks = await self._door.fork(self._root, len(branches))
        try:
            found = await asyncio.gather(
                *(self._branch(session, moves, looks) for session, moves in zip(forks, branches, strict=True))
            )
        finally:
            for session in forks:
                await self._door.close(session)
        return np.stack(found)

    async def _branch(self, session: str, moves: NDArray[np.float32], looks: tuple[int, ...]) -> Images:
        await self._door.step(session, moves)
        return np.stack([await self._door.look(session, step) for step in looks])
