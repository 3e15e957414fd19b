"""The OpenPI door over ASGI: robots that ask a policy for chunks of actions.

The server speaks first, with the policy's contract. A robot is a session: one for the connection, or one for each
`session_id` on it, which survives a lost connection for its grace. Nothing of the policy runs here.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, Self, assert_never

from omni_live.protocols.arrays import pack
from omni_live.protocols.desk import Desk, Line, Refused, ResumeRefused
from omni_live.protocols.fields import Fault, Faulty
from omni_live.protocols.images import decode_images, has_images
from omni_live.protocols.openpi import codec, dialects
from omni_live.protocols.openpi.contract import Contract
from omni_live.protocols.openpi.dialects import Dialect, Infer, Reset
from omni_live.protocols.openpi.robot import STAGE, WHY, Answers, Pending, Robot
from omni_live.protocols.websocket import Meter
from omni_live.protocols.websocket.asgi import Connection, Frame, Receive, Scope, Send
from omni_live.protocols.websocket.outbox import CLOSE_CODES, TRY_AGAIN
from omni_live.sessions.inputs import ResetAsked
from omni_live.sessions.limits import Limits
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.settings import Settings

PATHS: Final = ("/", "/openpi", "/v1/realtime/robot/openpi")
"""Where robots connect; a policy's name behind one of them chooses it."""

_VLLM_OMNI: Final = PATHS[2]

_LOST: Final = 256
"""Ended sessions of one connection that are remembered until somebody asks. Reached: the oldest is forgotten."""

_NAMES: Final = 4096
"""Robots with a name that are known again after their connection is lost. Reached: the oldest is forgotten."""

Name = tuple[str, str, str]
"""API key's name, policy, and what the client calls the robot's session: nobody reaches another key's robots."""


class OpenPiDoor:
    """An ASGI application for websocket scopes."""

    def __init__(
        self, desk: Desk, limits: Limits, policies: Mapping[str, Contract], meter: Meter, *, any_path: bool = False
    ) -> None:
        """`policies` are the pipelines that have a contract; the first is taken where the path names none.

        `any_path`: a path that means nothing is one that names none, as OpenPI's own server has it.
        """
        self.desk = desk
        self.limits = limits
        self.meter = meter
        self._policies = policies
        self._any_path = any_path
        self._known: OrderedDict[Name, Line] = OrderedDict()
        self._ids = count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = Connection(
            scope,
            receive,
            send,
            frame_bytes=self.limits.openpi_frame_bytes,
            write_deadline_s=self.limits.write_deadline_s,
            meter=self.meter,
        )
        if not await connection.connected():
            return
        policy = policy_at(scope["path"], self._policies)
        if policy is None and self._any_path:
            policy = next(iter(self._policies))
        if policy is None:
            await connection.reject(404, "model_not_found", "There is no policy of that name.")
            return
        await connection.accept()
        dialect = Dialect.VLLM_OMNI if scope["path"].startswith(_VLLM_OMNI) else Dialect.OPENPI
        contract = self._policies[policy]
        with _Talk(self, connection, policy, contract, dialect) as talk:
            if await connection.send(codec.pack(contract.metadata())):
                await talk.run()

    def next_id(self) -> str:
        """A request id that no other connection has, also where one takes over another's session."""
        return str(next(self._ids))

    def known(self, name: Name) -> Line | None:
        return self._known.get(name)

    def remember(self, name: Name, line: Line) -> None:
        self._known[name] = line
        self._known.move_to_end(name)
        while len(self._known) > _NAMES:
            self._known.popitem(last=False)

    def forget(self, name: Name, line: Line) -> None:
        """Unless the name is another session's by now."""
        if self._known.get(name) is line:
            del self._known[name]


def policy_at(path: str, policies: Mapping[str, Contract]) -> str | None:
    """The policy that a path names: the first where it names none; None where there is no such policy."""
    if path in PATHS or path.rstrip("/") in PATHS:
        return next(iter(policies), None)
    head, _, name = path.rpartition("/")
    return name if (head or "/") in PATHS and name in policies else None


@dataclass(frozen=True, slots=True)
class _Asking:
    """An observation on its way to a robot."""

    asked: Infer
    pending: Pending
    payload: Payload


class _Talk:
    """One connection and the robots on it. Left, it closes or detaches them."""

    def __init__(
        self, door: OpenPiDoor, connection: Connection, policy: str, contract: Contract, dialect: Dialect
    ) -> None:
        self._door = door
        self._connection = connection
        self._policy = policy
        self._contract = contract
        self._dialect = dialect
        self._loop = asyncio.get_running_loop()
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening: dict[str | None, list[_Asking]] = {}
        """Robots that wait for a session, and what they were asked meanwhile."""
        self._robots: dict[str | None, Robot] = {}
        self._lost: dict[str | None, str] = {}
        """Robots whose session ended while they asked for nothing, and why: they hear of it when they ask."""
        self._is_cleared = False
        """Everything was reset here, which holds for the robots that are taken up later, too."""
        self._answers = Answers()
        self._more = asyncio.Event()
        self._is_too_slow = False
        self._closing: tuple[int, str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for robot in tuple(self._robots.values()):
            robot.leave()

    async def run(self) -> None:
        """Take requests and give answers until either side ends it."""
        async with self._group:
            writer = self._group.create_task(self._write())
            while (frame := await self._connection.receive()) is not None:
                await self._hear(frame)
                await asyncio.sleep(0)  # who sends faster than is read must not keep the others waiting
            writer.cancel()
            for task in tuple(self._tasks):
                task.cancel()

    async def _write(self) -> None:
        try:
            while True:
                pending = self._answers.next()
                if pending is not None:
                    if not await self._connection.send_fresh(pending.frame):
                        return
                elif self._closing is not None:
                    await self._connection.close(*self._closing)
                    return
                else:
                    self._more.clear()
                    await self._more.wait()
        except OSError:
            return  # the client has gone; the reader hears of it, too

    # -- requests

    async def _hear(self, frame: Frame) -> None:
        came_s = self._loop.time()
        dialect, request_id = self._dialect, None
        try:
            message = _message(frame)
            dialect, request_id = dialects.addressee(message.value, self._spoken(message))
            request = message.value
            if has_images(request):
                request = await asyncio.to_thread(decode_images, request)
            asked = dialects.read(request, dialect)
        except Faulty as faulty:
            self._wrong(dialect, request_id, came_s, faulty.fault)
            return
        match asked:
            case Infer():
                self._infer(asked, came_s)
            case Reset():
                self._reset(asked, came_s)
            case _:
                assert_never(asked)

    def _spoken(self, message: codec.Message) -> Dialect:
        return Dialect.VLLM_OMNI if message.vllm_omni else self._dialect

    def _wrong(self, dialect: Dialect, request_id: str | int | None, came_s: float, fault: Fault) -> None:
        """Answer what is no request."""
        pending = Pending(Reset((), request_id, dialect), came_s)
        self._answers.expect(pending)
        self._refuse(pending, fault)

    def _infer(self, asked: Infer, came_s: float) -> None:
        try:
            arrays, texts = self._contract.checked(asked.observation)
        except Faulty as faulty:
            pending = Pending(asked, came_s)
            self._answers.expect(pending)
            self._refuse(pending, faulty.fault)
            return
        meta: dict[str, Scalar] = {**texts, **_options(asked)}
        payload = pack("observation", meta, **arrays)
        pending = Pending(asked, came_s, payload.nbytes)
        self._answers.expect(pending)
        if self._answers.nbytes > max(self._door.limits.openpi_frame_bytes, payload.nbytes):
            self._refuse(pending, Fault("mailbox_full", "Too many observations wait on this connection."))
            return
        self._ask(asked.session, _Asking(asked, pending, payload))

    def _reset(self, asked: Reset, came_s: float) -> None:
        pending = Pending(asked, came_s)
        self._answers.expect(pending)
        if asked.sessions is None:
            self._lost.clear()
            self._is_cleared = True
        names = (*self._robots, *self._opening) if asked.sessions is None else asked.sessions
        for name in dict.fromkeys(names):
            self._lost.pop(name, None)
            self._clear(name)
        self._answers.settle(pending, dialects.reset_reply(asked))
        self._wake()

    def _clear(self, name: str | None) -> None:
        robot, elsewhere = self._robots.get(name), self._known(name)
        if robot is not None:
            robot.reset()
        elif name in self._opening:
            for asking in self._opening[name]:
                self._refuse(asking.pending, Fault("reset", WHY["reset"]))
            self._opening[name].clear()
        elif elsewhere is not None:  # it stays with the connection that has it, or is left as it was
            elsewhere.tell(ResetAsked((STAGE,)))
        # What has no session yet has nothing to be cleared.

    # -- robots

    def _ask(self, name: str | None, asking: "_Asking") -> None:
        """Put it to the robot of that name, which gets a session if it has none."""
        if name in self._opening:
            self._opening[name].append(asking)
            return
        lost = self._lost.pop(name, None)
        if lost is not None:
            fault = Fault("session_expired", f"The session is over ({lost}); the next request begins one.")
            self._refuse(asking.pending, fault)
            return
        robot = self._robots.get(name)
        if robot is None and self._known(name) is not None:
            robot = self._resumed(name)
            if robot is None:
                fault = Fault("session_expired", "The session's grace is over; the next request begins one.")
                self._refuse(asking.pending, fault)
                return
        if robot is not None:
            robot.ask(asking.pending, asking.asked, asking.payload, self._door.next_id())
            return
        self._opening[name] = [asking]
        task = self._group.create_task(self._open(name))  # whoever waits for a place holds up nobody else here
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self, name: str | None) -> None:
        robot = self._new(name)
        refused: Refused | None = None
        try:
            desk, owner = self._door.desk, self._connection.owner
            robot.line = await desk.open(self._policy, Settings(model=self._policy), robot, owner)
        except Refused as error:
            refused = error
        finally:
            waiting = self._opening.pop(name)
        if refused is not None:
            self._turn_away(waiting, refused)
            return
        taken = self._resumed(name) if self._known(name) is not None else None
        if taken is not None:  # the same name came in on another connection meanwhile, and there is one of each
            robot.drop()
            robot = taken
        elif robot.line is not None:
            self._robots[name] = robot
            if name is not None:
                self._door.remember(self._key(name), robot.line)
        for asking in waiting:
            robot.ask(asking.pending, asking.asked, asking.payload, self._door.next_id())

    def _turn_away(self, waiting: Sequence["_Asking"], refused: Refused) -> None:
        after_s = refused.retry_after_s
        after = "" if after_s is None else f" Try again in {max(1, round(after_s))} s."
        for asking in waiting:
            self._refuse(asking.pending, Fault(refused.code, refused.message + after), after_s)
        if not self._robots and not self._opening:
            self._closing = TRY_AGAIN, refused.code
            self._wake()

    def _known(self, name: str | None) -> Line | None:
        return None if name is None else self._door.known(self._key(name))

    def _resumed(self, name: str | None) -> Robot | None:
        """The robot whose session another connection left, or has; None where there is none any more."""
        left = self._known(name)
        if name is None or left is None:
            return None
        robot = self._new(name)
        try:
            robot.line = self._door.desk.resume(left.session_id, left.token, None, 0, robot, self._connection.owner)
        except ResumeRefused:
            self._door.forget(self._key(name), left)
            return None
        self._robots[name] = robot
        self._door.remember(self._key(name), robot.line)
        if self._is_cleared:
            robot.reset()
        return robot

    def _new(self, name: str | None) -> Robot:
        return Robot(name, self._answers, self._loop.time, self._wake, self._over)

    def _over(self, robot: Robot, reason: str, was_told: bool) -> None:
        """The robot's session ended, or went to another connection."""
        if robot.line is None:
            return  # it never was anybody's
        if self._robots.get(robot.name) is robot:
            del self._robots[robot.name]
        if robot.name is not None and reason != "replaced":
            self._door.forget(self._key(robot.name), robot.line)
        if not was_told:
            self._lost[robot.name] = reason
            while len(self._lost) > _LOST:
                del self._lost[next(iter(self._lost))]
        if reason == "drained" and not self._robots:
            self._closing = CLOSE_CODES[reason], reason

    def _key(self, name: str) -> Name:
        return self._connection.owner, self._policy, name

    # -- answers

    def _wake(self) -> None:
        if self._answers.ready_bytes > self._door.limits.outbox_bytes and not self._is_too_slow:
            self._is_too_slow = True
            self._door.meter.connection_lost("slow_consumer")
            self._connection.abort()
        self._more.set()

    def _refuse(self, pending: Pending, fault: Fault, retry_after_s: float | None = None) -> None:
        asked = pending.asked
        told = dialects.error(asked.dialect, fault.code, fault.message, asked.request_id, retry_after_s)
        self._answers.settle(pending, told)
        self._wake()


def _message(frame: Frame) -> codec.Message:
    if isinstance(frame, str):
        raise Faulty("bad_frame", "Requests are binary msgpack frames.")
    return codec.read(frame, copy=False)  # what is kept of it is copied into the payload


def _options(asked: Infer) -> dict[str, Scalar]:
    """What the client said about the request, as far as the policy is to know it."""
    given: dict[str, Scalar] = {
        "seed": asked.seed,
        "deterministic": asked.deterministic or None,
        "deadline_ms": asked.deadline_ms,
        "executed_steps": asked.executed_steps,
        "delay_steps": asked.delay_steps,
    }
    return {name: value for name, value in given.items() if value is not None}
