"""A robot's line to its policy: one session on the server, over however many sockets it takes.

    async with connect("ws://127.0.0.1:8765/openpi", CONTRACT) as policy:
        chunk = await policy.infer(observation)

Nothing moves before the server's contract is known to be the robot's. Each request has an id of its own, so that the
answer to one can't be taken for the answer to another, however late it comes. OpenPI's own server knows neither
contracts nor ids: it is believed to serve this robot, asked for one chunk at a time, and connected to anew after an
answer that was not in time. When the socket drops, the line comes back by itself and asks again for what was asked.

Errors:

    RobotError
    ├── ConnectFailed      no policy server to begin with (`code`)
    ├── ContractMismatch   its policy is for another robot (`differences`)
    ├── PolicyError        a request failed (`code`), the next one may not
    │   ├── Overloaded     no room for one more robot (`retry_after_s`)
    │   └── TimedOut       no answer in time
    └── SessionLost        the session is over although nobody closed it (`code`), and with it what the policy knew
"""

import asyncio
import contextlib
import itertools
import logging
import random
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import numpy as np
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from omni_live.clients.clock import MS, Clock, MonotonicClock, S
from omni_live.clients.dial import TRY_AGAIN_STATUS, Address
from omni_live.clients.duplex import Patience, waits
from omni_live.clients.robot_wire import (
    Actions,
    Answer,
    Refusal,
    Reply,
    Timing,
    Wishes,
    ask,
    ask_plainly,
    ask_reset,
    read,
    read_metadata,
)
from omni_live.protocols.fields import Faulty, Wire
from omni_live.protocols.images import encode_image
from omni_live.protocols.openpi.contract import Contract

FIRST_FRAME_S: Final = 10.0
TRY_AGAIN: Final = 1013
"""Close code of a server that is full."""
FULL: Final = frozenset({"overloaded", "draining", "open_timeout", "replica_unavailable"})
"""Codes of a server that would open no session now."""

_GONE = (ConnectionClosed, OSError, TimeoutError)

log = logging.getLogger(__name__)


class RobotError(Exception):
    """Anything this client raises on purpose."""


class ConnectFailed(RobotError):
    """There is no policy server at the address, or it lets nobody in."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class ContractMismatch(RobotError):
    """The policy is for another robot."""

    def __init__(self, differences: Sequence[str]) -> None:
        super().__init__("the policy is not for this robot: " + "; ".join(differences))
        self.differences = tuple(differences)


class PolicyError(RobotError):
    """A request failed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code = code


class Overloaded(PolicyError):
    """The server has no room for one more robot."""

    def __init__(self, code: str, message: str, retry_after_s: float | None) -> None:
        super().__init__(code, message)
        self.retry_after_s = retry_after_s


class TimedOut(PolicyError):
    """No answer came in time; if it still comes, it is dropped."""

    def __init__(self, within_s: float, *, is_down: bool = False) -> None:
        super().__init__("timeout", f"no answer within {within_s:g} s" + (", the line is down" if is_down else ""))


class SessionLost(RobotError):
    """The session is over, or somebody else's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code = code


class _Dropped(Exception):
    """The socket is gone, and with it what was asked on it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What to do next, and how it came."""

    actions: Actions
    timing: Timing
    rtt_ms: float
    """From the request to its answer, tries that were lost with their socket included."""


@dataclass(slots=True)
class Counts:
    """What happened on the line so far."""

    drops: int = 0
    resumes: int = 0
    asked_again: int = 0
    """Requests that were lost with their socket."""
    stale: int = 0
    """Answers that nobody waited for any more."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What both sides agree on before anything moves."""

    contract: Contract
    is_stated: bool
    """False: the server stated none, and is believed to serve this robot."""


def agree(metadata: Mapping[str, object], robot: Contract | None) -> Terms:
    """Raises ContractMismatch, and ConnectFailed where neither side has a contract."""
    try:
        contract = Contract.of(cast("Mapping[str, Wire]", metadata))  # it looks at the kind of each field itself
    except Faulty as error:
        if "embodiment" in metadata and "action_horizon" in metadata:
            raise ConnectFailed("bad_metadata", str(error)) from error
        if robot is None:
            raise ConnectFailed("no_contract", "the server states no contract, so the robot has to") from error
        return Terms(robot, is_stated=False)
    differences = [] if robot is None else contract.differences(robot)
    if differences:
        raise ContractMismatch(differences)
    return Terms(contract, is_stated=True)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request on its way. `is_infer` False: a reset."""

    is_infer: bool
    is_answered: bool = False
    """The server has said something about it; else its answer may still come."""
    reply: asyncio.Future[Reply] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def settle(self, reply: Reply) -> None:
        self.is_answered = True
        if not self.reply.done():
            self.reply.set_result(reply)

    def fail(self, error: Exception) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)
            self.reply.exception()  # who asked may have given up: nobody is to be warned then


class Policy:
    """A policy on a server, as one robot sees it. Made by `connect`."""

    def __init__(
        self,
        address: Address,
        robot: Contract | None,
        session_id: str,
        patience: Patience,
        timeout_s: float,
        jpeg: bool,
        clock: Clock,
        chance: Callable[[], float],
    ) -> None:
        self.session_id = session_id
        self.counts = Counts()
        self._address = address
        self._robot = robot
        self._patience = patience
        self._timeout_s = timeout_s
        self._jpeg = jpeg
        self._clock = clock
        self._chance = chance
        self._terms: Terms | None = None
        self._socket: ClientConnection | None = None
        self._up = asyncio.Event()
        self._error: RobotError | None = None
        self._ids = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._episode = 0
        self._turn = asyncio.Lock()
        """Of a server that knows no ids."""

    @property
    def contract(self) -> Contract:
        return self._agreed.contract

    @property
    def is_stated(self) -> bool:
        """Whether the server stated the contract; otherwise it is the robot's own."""
        return self._agreed.is_stated

    @property
    def is_attached(self) -> bool:
        return self._socket is not None

    # -- what the robot asks for

    async def infer(
        self,
        observation: Mapping[str, object],
        *,
        seed: int | None = None,
        deterministic: bool = False,
        deadline_ms: float | None = None,
        latest: bool = False,
        executed_steps: int | None = None,
        delay_steps: int | None = None,
    ) -> Chunk:
        """A chunk of actions for what is observed. Of the observation goes out what the contract names.

        `executed_steps`, `delay_steps`: of the last chunk before the new one's first row, and of the new one before it
        can be here. Raises RobotError; the actions are as the server sent them, unsafe ones too (`chunks.unsafe`).
        """
        shown = self._shown(observation)
        wishes = Wishes(seed, deterministic, deadline_ms, latest, executed_steps, delay_steps)
        # after a lost socket the server's last chunk may be one that never came: there is nothing to go on with
        anew = Wishes(seed, deterministic, deadline_ms, latest)

        def request(number: int, is_again: bool) -> bytes:
            if not self.is_stated:
                return ask_plainly(shown)
            return ask(shown, anew if is_again else wishes, self.session_id, number)

        asked_ns = self._clock.now_ns()
        async with contextlib.nullcontext() if self.is_stated else self._turn:
            reply = await self._exchange(request, is_infer=True)
        if not isinstance(reply, Answer):
            raise PolicyError("bad_reply", "the server answered something else")
        return Chunk(reply.actions, reply.timing, (self._clock.now_ns() - asked_ns) / MS)

    async def reset(self) -> None:
        """A new episode: what is asked for is void at once; when this returns the server has forgotten the last one.

        A server that knows no resets, as OpenPI's, has nothing to forget and is told nothing. Raises RobotError.
        """
        self._episode += 1
        for waiting in tuple(self._waiting.values()):
            if waiting.is_infer:
                waiting.fail(PolicyError("reset", "the robot was reset"))
        if self.is_stated:
            await self._exchange(lambda number, _: ask_reset(self.session_id, number), is_infer=False)

    def drop_transport(self) -> None:
        """Lose the socket without a word, as a network does. For tests and demonstrations."""
        if self._socket is not None:
            self._socket.transport.abort()

    # -- the inside

    @property
    def _agreed(self) -> Terms:
        assert self._terms is not None
        return self._terms

    def _shown(self, observation: Mapping[str, object]) -> dict[str, object]:
        try:
            arrays, texts = self.contract.checked(observation)
        except Faulty as error:
            raise PolicyError(error.fault.code, str(error)) from error
        if not self._jpeg:
            return {**arrays, **texts}
        images = {
            key: encode_image(array.astype(np.uint8, copy=False))
            for key, array in arrays.items()
            if array.dtype == np.uint8 and array.ndim == 3
        }
        return {**arrays, **images, **texts}

    async def _exchange(self, request: Callable[[int, bool], bytes], *, is_infer: bool) -> Reply:
        """The answer to a request, made again on the next socket where one drops. Raises RobotError."""
        episode = self._episode
        is_again = False
        # a chunk is worth nothing later; a reset is, and nothing moves meanwhile
        within_s = self._timeout_s if is_infer else self._timeout_s + self._patience.grace_s
        try:
            async with asyncio.timeout(within_s):
                while True:
                    socket = await self._attached()
                    if is_infer and episode != self._episode:
                        raise PolicyError("reset", "the robot was reset")
                    with contextlib.suppress(_Dropped):
                        return await self._try(socket, request, is_again, is_infer)
                    self.counts.asked_again += 1
                    is_again = True
        except TimeoutError:
            raise TimedOut(within_s, is_down=not self.is_attached) from None

    async def _try(
        self, socket: ClientConnection, request: Callable[[int, bool], bytes], is_again: bool, is_infer: bool
    ) -> Reply:
        number = next(self._ids)
        waiting = self._waiting[number] = _Waiting(is_infer)
        try:
            with contextlib.suppress(ConnectionClosed):  # whoever reads the socket says what that means
                await socket.send(request(number, is_again))
            return await waiting.reply
        finally:
            del self._waiting[number]
            if not self.is_stated and not waiting.is_answered and self._socket is socket:
                self.drop_transport()  # on this socket the next answer would be this one

    async def _attached(self) -> ClientConnection:
        await self._up.wait()
        if self._error is not None:
            raise self._error
        assert self._socket is not None
        return self._socket

    async def open(self) -> None:
        """Connect and agree; `connect` does this. Raises ConnectFailed, ContractMismatch, Overloaded."""
        try:
            socket = await self._address.dial(self._patience.open_s)
        except InvalidStatus as error:
            raise _turned_away(error) from error
        except (OSError, TimeoutError, InvalidHandshake, InvalidURI) as error:
            raise ConnectFailed("connect_failed", f"no policy at {self._address.url}: {error}") from error
        try:
            await self._greeted(socket)
        except _GONE as error:
            raise ConnectFailed("connect_failed", f"the server at {self._address.url} hung up: {error}") from error
        finally:
            if self._socket is None:
                socket.transport.abort()
        if not self.is_stated:
            log.warning("event=contract_not_stated session=%s", self.session_id)

    async def _greeted(self, socket: ClientConnection) -> None:
        """Hear what the server begins with. Raises what `_GONE` names, RobotError."""
        try:
            async with asyncio.timeout(FIRST_FRAME_S):
                frame = await socket.recv()
            if isinstance(frame, str):
                raise _refused(_as_refusal(frame))
            self._terms = agree(read_metadata(frame), self._robot)
        except ConnectionClosed as error:
            if _is_full(error):
                raise Overloaded("overloaded", "the server is full", None) from error
            raise
        except Faulty as error:
            raise ConnectFailed(error.fault.code, str(error)) from error
        self._socket = socket
        self._up.set()

    async def run(self) -> None:
        """Keeps the line up until it can't be any more; what goes wrong, asking raises. `connect` does this."""
        try:
            while self._error is None:
                why = await self._serve()
                if self._error is None:
                    await self._come_back(why)
        except RobotError as error:
            self._end(error)

    def _end(self, error: RobotError) -> None:
        self._error = error
        self._up.set()
        self._fail_all(error)

    async def _serve(self) -> str:
        """Reads one socket until it is gone; why it is."""
        socket = self._socket
        assert socket is not None
        try:
            while True:
                self._heard(read(await socket.recv()))
        except ConnectionClosed as error:
            full = Overloaded("overloaded", "the server is full", None)
            self._fail_all(full if _is_full(error) else _Dropped())
            return str(error)
        except Faulty as error:
            self._fail_all(PolicyError(error.fault.code, str(error)))
            return str(error)
        finally:
            self._socket = None
            if self._error is None:
                self._up.clear()
            socket.transport.abort()

    def _fail_all(self, error: Exception) -> None:
        for waiting in tuple(self._waiting.values()):
            waiting.fail(error)

    def _heard(self, reply: Reply) -> None:
        if reply.request_id is None:
            self._heard_without_id(reply)
            return
        waiting = self._waiting.get(reply.request_id)
        if waiting is None:
            self.counts.stale += 1
        elif isinstance(reply, Refusal):
            waiting.fail(_refused(reply))
        else:
            waiting.settle(reply)

    def _heard_without_id(self, reply: Reply) -> None:
        """From a server that knows no ids; or ours could not even read a request, which may be any of them."""
        if isinstance(reply, Refusal):
            for waiting in self._waiting.values():
                waiting.is_answered = True
            self._fail_all(_refused(reply))
        elif self.is_stated or not self._waiting:
            self.counts.stale += 1
        else:
            next(iter(self._waiting.values())).settle(reply)

    # -- coming back

    async def _come_back(self, why: str) -> None:
        """A new socket. Raises SessionLost where there is none in time, ContractMismatch, ConnectFailed."""
        self.counts.drops += 1
        deadline_ns = self._clock.now_ns() + round(self._patience.grace_s * S)
        for wait_s in waits(self._patience, self._chance):
            await self._clock.sleep_until_ns(min(deadline_ns, self._clock.now_ns() + round(wait_s * S)))
            left_s = (deadline_ns - self._clock.now_ns()) / S
            if left_s <= 0:
                raise SessionLost("connection_lost", f"no way back within {self._patience.grace_s:g} s ({why})")
            if await self._is_back(min(left_s, self._patience.open_s)):
                self.counts.resumes += 1
                return

    async def _is_back(self, within_s: float) -> bool:
        """One attempt; False where another one may help."""
        try:
            socket = await self._address.dial(within_s)
        except InvalidStatus as error:
            if error.response.status_code in TRY_AGAIN_STATUS:
                return False
            raise _turned_away(error) from error
        except (OSError, TimeoutError, InvalidHandshake):
            return False
        try:
            await self._greeted(socket)
        except (*_GONE, Overloaded):
            return False
        finally:
            if self._socket is None:
                socket.transport.abort()
        return True

    async def close(self) -> None:
        """Say goodbye; `connect` does this."""
        socket = self._socket
        if self._error is None:
            self._end(SessionLost("session_closed", "the line is closed"))
        if socket is not None:
            await socket.close()


def _as_refusal(frame: str) -> Refusal:
    reply = read(frame)
    return reply if isinstance(reply, Refusal) else Refusal(None, "server_error", frame)


def _refused(refusal: Refusal) -> RobotError:
    """What the server's words mean for the robot."""
    code, message = refusal.code, refusal.message
    if code in FULL:
        return Overloaded(code, message, refusal.retry_after_s)
    return SessionLost(code, message) if code.startswith("session_") else PolicyError(code, message)


def _is_full(error: ConnectionClosed) -> bool:
    return error.rcvd is not None and error.rcvd.code == TRY_AGAIN


def _turned_away(error: InvalidStatus) -> RobotError:
    """What an HTTP answer instead of a websocket means."""
    status = error.response.status_code
    if status in (429, 503):
        after = error.response.headers.get("Retry-After", "")
        return Overloaded("overloaded", f"HTTP status {status}", float(after) if after.isdecimal() else None)
    names = {401: "invalid_api_key", 403: "forbidden", 404: "not_found"}
    return ConnectFailed(names.get(status, "http_status"), f"the server answers with HTTP status {status}")


@contextlib.asynccontextmanager
async def connect(
    url: str,
    robot: Contract | None,
    *,
    api_key: str | None = None,
    session_id: str | None = None,
    jpeg: bool = False,
    timeout_s: float = 10.0,
    patience: Patience | None = None,
    clock: Clock | None = None,
    chance: Callable[[], float] = random.random,
) -> AsyncIterator[Policy]:
    """A policy for the robot; its session survives dropped sockets until the block is left.

    `robot` is what the robot is built for; None takes whatever the server states. `session_id` names the session, which
    two robots must not share; a random one is made. `jpeg` sends images compressed (needs Pillow). `timeout_s` is for
    each answer. Raises ConnectFailed, ContractMismatch, Overloaded.
    """
    policy = Policy(
        Address(url, api_key, key_scheme="Api-Key"),
        robot,
        session_id or f"robot-{secrets.token_hex(8)}",
        patience or Patience(),
        timeout_s,
        jpeg,
        clock or MonotonicClock(),
        chance,
    )
    await policy.open()
    # not a TaskGroup: it would hand the block's own exceptions on inside a group
    running = asyncio.create_task(policy.run())
    try:
        yield policy
    finally:
        await policy.close()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
