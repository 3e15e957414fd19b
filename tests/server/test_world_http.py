"""The world door's HTTP twins, with real sessions behind them and the test as the world."""

import asyncio
import base64
import json
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgpack
import numpy as np
import pytest

from omni_live.protocols.desk import Line, Mailbox, Refused
from omni_live.protocols.websocket import OWNER_KEY
from omni_live.protocols.world.contract import Served
from omni_live.protocols.world.rollouts import Rollout
from omni_live.server.app import http_app
from omni_live.server.metrics import Metrics
from omni_live.server.world_http import world_routes
from omni_live.sessions.effects import Effect, Feed
from omni_live.sessions.inputs import Attached, DrainAsked, EventAcked, Input
from omni_live.sessions.limits import Limits
from omni_live.sessions.settings import Settings
from tests.protocols.lone_desk import Meter
from tests.protocols.video.house import WORLD, House, Picture, dreamt

SERVED = {"world": Served(WORLD, {"frame": "decoder", "latent": "dynamics"})}
SESSIONS = "/v1/world/sessions"
ROWS = [[[n / 8, -0.5], [0.25, 1.0]] for n in range(8)]


class World(House):
    """A session whose turns run by themselves, or when the test lets them."""

    by_itself = True
    is_silent = False
    """The stage does not answer."""
    _runs = False

    @classmethod
    def at(cls, session_id: str, mailbox: Mailbox, limits: Limits) -> "World":
        world = cls.__new__(cls)
        world.session_id = session_id
        world._open(limits, mailbox)
        return world

    def forked(self, session_id: str, mailbox: Mailbox, at: int | None) -> "World":
        twin = self.at(session_id, mailbox, self.session.limits)
        return twin._beginning_at(self, at)

    def _beginning_at(self, parent: "World", at: int | None) -> "World":
        ids = self.session._ids
        self.session = parent.session.forked(self.session_id, 0, 1, ids, 0, at)
        self.pictures = list(parent.pictures or ())
        super().tell(Attached(1))
        return self

    def tell(self, input: Input) -> None:
        super().tell(input)
        while self.by_itself and self.turns and not (self._is_busy or self._runs):
            self.run()

    def run(self, frames: int | None = None) -> None:
        self._runs = True
        super().run(frames)
        self._runs = False
        while self.by_itself and self.turns:
            self.run()

    def _perform(self, effect: Effect) -> None:
        if not (self.is_silent and isinstance(effect, Feed)):
            super()._perform(effect)


class Desk:
    """Opens a world for each who asks, once `gate` is set, until `room` is used up."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.worlds: list[World] = []
        self.room = 100
        self.gate = asyncio.Event()
        self.gate.set()
        self.given_up = 0

    def _seat(self) -> str:
        if len(self.standing()) >= self.room:
            raise Refused("overloaded", "The server has no room for another session.", 2.5)
        return f"sess_{len(self.worlds) + 1}"

    def standing(self) -> list[World]:
        return [world for world in self.worlds if not world.closes()]

    async def open(self, model: str, settings: Settings, mailbox: Mailbox, owner: str) -> Line:
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        self.worlds.append(World.at(self._seat(), mailbox, self.limits))
        return self.worlds[-1]

    def fork(self, line: Line, at: int | None, mailbox: Mailbox, owner: str) -> Line:
        parent = next(world for world in self.worlds if world is line)
        code = parent.session.fork_refusal(at)
        if code is not None:
            raise Refused(code, "The rollout cannot be forked there.")
        self.worlds.append(parent.forked(self._seat(), mailbox, at))
        return self.worlds[-1]

    def resume(self, *_: object) -> Line:
        raise AssertionError("nobody resumes over HTTP")


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def body(self) -> dict[str, Any]:
        read = msgpack.unpackb if self.headers["content-type"] == "application/msgpack" else json.loads
        found: dict[str, Any] = read(self.content)
        return found

    @property
    def code(self) -> str:
        return str(self.body["error"]["code"])

    def pictures(self) -> list[Picture]:
        return [np.frombuffer(_bytes(frame["image"]["data"]), np.uint8) for frame in self.body["frames"]]


def _bytes(data: str | bytes) -> bytes:
    return data if isinstance(data, bytes) else base64.b64decode(data)


@dataclass
class Twins:
    """The routes and their desk."""

    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self.desk = Desk(self.limits)
        self.meter = Meter()
        routes = world_routes(self.desk, self.limits, SERVED, self.meter)
        self.app = http_app(Metrics(), tuple, tuple, routes)

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        owner: str = "ann",
        left: asyncio.Event | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Answer:
        """One request; `left` is set where its client hangs up."""
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        given = {"content-type": "application/json", "content-length": str(len(content))}
        given |= headers
        scope = {
            "type": "http",
            "method": method,
            "path": f"{SESSIONS}{path}",
            "raw_path": b"",
            "query_string": b"",
            "root_path": "",
            "http_version": "1.1",
            "scheme": "http",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            OWNER_KEY: owner,
        }
        unread = [{"type": "http.request", "body": content, "more_body": False}]
        gone, sent = left or asyncio.Event(), list[Any]()

        async def receive() -> Any:
            if unread:
                return unread.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        async with asyncio.timeout(10):
            await self.app(scope, receive, send)
        start, *bodies = sent
        found = {name.decode(): value.decode() for name, value in start["headers"]}
        return Answer(start["status"], found, b"".join(part.get("body", b"") for part in bodies))

    async def opened(self, seed: int = 3, **fields: object) -> tuple[str, World]:
        answer = await self.ask("POST", "", {"seed": seed, **fields})
        assert answer.status == 201, answer.content
        return f"/{answer.body['session_id']}", self.desk.worlds[-1]

    async def step(self, path: str, rows: object, **fields: object) -> Answer:
        return await self.ask("POST", f"{path}/step", {"actions": rows, **fields})


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0)


def seen(pictures: list[Picture]) -> list[bytes]:
    return [picture.tobytes() for picture in pictures]


async def soon(group: asyncio.TaskGroup, work: Coroutine[Any, Any, Answer]) -> asyncio.Task[Answer]:
    """Begin it, and let it come as far as it does by itself."""
    task = group.create_task(work)
    for _ in range(20):
        await asyncio.sleep(0)
    return task


# -- what a call brings ------------------------------------------------------------------------------------------------


async def test_a_step_brings_the_frames_that_it_made() -> None:
    house = Twins()
    answer = await house.ask("POST", "", {"seed": 3})
    assert answer.status == 201
    assert {"session_id": "sess_1", "step": 0, "status": "done"}.items() <= answer.body.items()
    assert answer.body["world"]["frame"] == [4, 4, 3]
    assert 0 < answer.body["expires_in_s"] <= 86_400
    stepped = await house.step("/sess_1", ROWS)
    assert (stepped.status, stepped.body["step"], stepped.body["status"]) == (200, 8, "done")
    assert seen(stepped.pictures()) == seen(dreamt(3, ROWS))
    assert [frame["step"] for frame in stepped.body["frames"]] == list(range(1, 9))
    assert {"output": "frame", "format": "raw"}.items() <= stepped.body["frames"][0].items()
    assert house.meter.handed == len(stepped.content)


async def test_msgpack_carries_the_same_with_bytes_as_they_are() -> None:
    house = Twins()
    path, _ = await house.opened()
    body = msgpack.packb(
        {"actions": {"dtype": "<f4", "shape": [8, 2, 2], "data": np.array(ROWS, np.float32).tobytes()}}
    )
    kind = "application/msgpack"
    packed = await house.ask(
        "POST", f"{path}/step", body, headers={"content-type": kind, "accept": f"text/plain, {kind};q=0.9"}
    )
    assert (packed.status, packed.headers["content-type"]) == (200, kind)
    assert isinstance(packed.body["frames"][0]["image"]["data"], bytes)
    assert seen(packed.pictures()) == seen(dreamt(3, ROWS))
    refused = await house.ask("POST", f"{path}/rewind", {"step": 99}, headers={"accept": kind})
    assert (refused.status, refused.headers["content-type"], refused.code) == (409, kind, "rewind_ahead")


async def test_a_rollout_is_rewound_looked_at_snapshotted_restored_and_reset() -> None:
    house = Twins()
    path, _ = await house.opened()
    frames = seen((await house.step(path, ROWS)).pictures())
    rewound = await house.ask("POST", f"{path}/rewind", {"step": 4})
    assert (rewound.status, rewound.body["step"], rewound.body["frames"]) == (200, 4, [])
    assert seen((await house.ask("POST", f"{path}/look", {"step": 2, "frames": 2})).pictures()) == frames[1:3]
    assert seen((await house.step(path, ROWS[2:4], step=3)).pictures()) == frames[2:4], "made already"
    taken = await house.ask("POST", f"{path}/snapshot", b"", headers={"content-type": ""})
    assert (taken.status, taken.body["step"]) == (200, 4)
    other, _ = await house.opened(seed=9)
    restored = await house.ask("POST", f"{other}/restore", {"blob": taken.body["blob"]})
    assert (restored.status, restored.body["step"]) == (200, 4)
    assert seen((await house.step(other, ROWS[4:])).pictures()) == frames[4:]
    reset = await house.ask("POST", f"{other}/reset", {"seed": 3})
    assert (reset.status, reset.body["step"]) == (200, 0)
    assert seen((await house.step(other, ROWS)).pictures()) == frames


async def test_forks_go_their_own_ways_from_the_same_frame() -> None:
    house = Twins()
    path, _ = await house.opened()
    frames = seen((await house.step(path, ROWS)).pictures())
    forked = await house.ask("POST", f"{path}/fork", {"step": 4, "count": 2})
    assert (forked.status, forked.body["step"]) == (200, 8)
    children = forked.body["forks"]
    assert [(child["step"], child["forked_from"]) for child in children] == [(4, "sess_1")] * 2
    assert seen((await house.step(f"/{children[0]['session_id']}", ROWS[4:])).pictures()) == frames[4:]
    assert seen((await house.step(f"/{children[1]['session_id']}", ROWS[:4])).pictures()) != frames[4:]


async def test_a_fork_without_room_for_all_makes_none_and_the_parent_lives() -> None:
    house = Twins()
    path, world = await house.opened()
    house.desk.room = 3
    refused = await house.ask("POST", f"{path}/fork", {"count": 3})
    assert (refused.status, refused.code, refused.headers["retry-after"]) == (503, "overloaded", "2")
    assert house.desk.standing() == [world]
    assert (await house.step(path, ROWS)).status == 200
    assert len((await house.ask("POST", f"{path}/fork", {"count": 2})).body["forks"]) == 2


async def test_a_session_is_shown_and_ended() -> None:
    house = Twins()
    path, world = await house.opened()
    shown = await house.ask("GET", path)
    assert (shown.status, shown.body["step"], shown.body["calls"]) == (200, 0, 0)
    assert (await house.ask("DELETE", path)).status == 204
    assert world.closes()
    for answer in (await house.ask("DELETE", path), await house.ask("GET", path), await house.step(path, ROWS)):
        assert (answer.status, answer.code) == (404, "session_not_found")


async def test_what_an_answer_brought_is_not_kept_for_a_resume() -> None:
    house = Twins()
    path, world = await house.opened()
    await house.step(path, ROWS)
    for _ in range(100):
        await house.ask("GET", path)
    assert isinstance(world.told[-101], EventAcked)
    assert world.session._journal.replay(0, 0).entries == ()
    assert isinstance(world._mailbox, Rollout)
    assert world._mailbox.nbytes == 0, "heartbeats between calls"


# -- whose it is, and who may ------------------------------------------------------------------------------------------


async def test_another_owner_s_session_is_not_told_apart_from_none() -> None:
    house = Twins()
    path, _ = await house.opened()
    for method, verb in (("GET", ""), ("DELETE", ""), ("POST", "/step"), ("POST", "/cancel"), ("POST", "/fork")):
        theirs = await house.ask(method, f"{path}{verb}", {}, owner="bob")
        nobodys = await house.ask(method, f"/sess_0{verb}", {}, owner="bob")
        assert (theirs.status, theirs.content) == (nobodys.status, nobodys.content)
        assert theirs.status == 404
    assert (await house.step(path, ROWS)).status == 200


# -- several calls -----------------------------------------------------------------------------------------------------


async def test_calls_on_one_session_run_in_the_order_in_which_they_came() -> None:
    house = Twins()
    path, world = await house.opened()
    world.by_itself = False
    async with asyncio.TaskGroup() as group:
        first = await soon(group, house.step(path, ROWS[:3]))
        rewind = await soon(group, house.ask("POST", f"{path}/rewind", {"step": 1}))
        fork = await soon(group, house.ask("POST", f"{path}/fork", {}))
        second = await soon(group, house.step(path, ROWS[:2]))
        assert (await house.ask("GET", path)).body["calls"] == 4
        assert not any(task.done() for task in (first, rewind, fork, second))
        world.run()
        await until(lambda: bool(world.turns))
        world.run()
    assert [task.result().body["step"] for task in (first, rewind, fork, second)] == [3, 1, 1, 3]
    assert seen(second.result().pictures()) == seen(dreamt(3, [ROWS[0], *ROWS[:2]]))[1:]


async def test_a_call_behind_too_many_is_refused() -> None:
    house = Twins(Limits(mailbox_turns=2))
    path, world = await house.opened()
    world.by_itself = False
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            await soon(group, house.step(path, ROWS[:1]))
        refused = await house.step(path, ROWS[:1])
        assert (refused.status, refused.code) == (429, "mailbox_full")
        assert int(refused.headers["retry-after"]) >= 1
        world.by_itself = True
        world.run()


async def test_a_cancelled_step_keeps_its_frames_and_says_where_it_stands() -> None:
    house = Twins()
    path, world = await house.opened()
    world.by_itself = False
    async with asyncio.TaskGroup() as group:
        running = await soon(group, house.step(path, ROWS))
        waiting = await soon(group, house.step(path, ROWS, request_id="later"))
        world.run(3)
        assert (await house.ask("POST", f"{path}/cancel", {"target": "nobody"})).code == "response_cancel_not_active"
        withdrawn = await house.ask("POST", f"{path}/cancel", {"target": "later"})
        assert (withdrawn.status, waiting.done(), running.done()) == (200, True, False)
        cancelled = await house.ask("POST", f"{path}/cancel")
        assert (cancelled.status, cancelled.body["step"]) == (200, 3)
    assert (waiting.result().status, waiting.result().body["status"]) == (200, "interrupted")
    answer = running.result()
    assert (answer.status, answer.body["status"], answer.body["step"]) == (200, "interrupted", 3)
    assert answer.body["frames"] == [], "a fence moved"
    world.by_itself = True
    looked = await house.ask("POST", f"{path}/look", {"step": 1, "frames": 3})
    assert seen(looked.pictures()) == seen(dreamt(3, ROWS[:3]))
    assert (await house.ask("POST", f"{path}/cancel")).status == 409


async def test_a_session_that_is_ended_ends_its_calls() -> None:
    house = Twins()
    path, world = await house.opened()
    world.by_itself = False
    async with asyncio.TaskGroup() as group:
        calls = [await soon(group, house.step(path, ROWS)) for _ in range(3)]
        assert (await house.ask("DELETE", path)).status == 204
    assert [(task.result().status, task.result().code) for task in calls] == [(404, "session_not_found")] * 3


# -- clients that hang up ----------------------------------------------------------------------------------------------


async def test_a_step_goes_on_when_its_client_hangs_up_and_its_number_brings_it_again() -> None:
    house = Twins()
    path, world = await house.opened()
    world.by_itself = False
    left = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        body = {"actions": ROWS, "step": 1}
        lost = await soon(group, house.ask("POST", f"{path}/step", body, left=left))
        world.run(2)
        left.set()
        again = await soon(group, house.step(path, ROWS, step=1))
        assert not lost.done()
        world.by_itself = True
        world.run()
    assert seen(again.result().pictures()) == seen(dreamt(3, ROWS))
    assert (await house.ask("GET", path)).body["calls"] == 0


async def test_an_open_whose_client_hangs_up_leaves_nothing() -> None:
    house = Twins()
    house.desk.gate.clear()
    left = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        await soon(group, house.ask("POST", "", {}, left=left))
        left.set()
    assert (house.desk.given_up, house.desk.worlds) == (1, [])


async def test_an_open_whose_client_hangs_up_while_it_begins_closes_its_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = Twins()
    monkeypatch.setattr(World, "is_silent", True)
    left = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        await soon(group, house.ask("POST", "", {}, left=left))
        left.set()
    (world,) = house.desk.worlds
    assert world.closes()


# -- things that end ---------------------------------------------------------------------------------------------------


async def test_a_step_whose_replica_was_lost_says_so_and_where_the_rollout_stands() -> None:
    house = Twins()
    path, world = await house.opened()
    world.by_itself = False
    async with asyncio.TaskGroup() as group:
        lost = await soon(group, house.step(path, ROWS))
        world.run(3)
        world.lose_replica()
        world.by_itself = True
        world.run()
    answer = lost.result()
    assert (answer.status, answer.code, answer.body["step"]) == (502, "replica_lost", 3)
    assert seen((await house.step(path, ROWS[3:])).pictures()) == seen(dreamt(3, ROWS))[3:]


async def test_a_server_that_goes_away_lets_the_running_call_finish() -> None:
    house = Twins()
    path, world = await house.opened()
    idle, _ = await house.opened()
    world.by_itself = False
    async with asyncio.TaskGroup() as group:
        running = await soon(group, house.step(path, ROWS))
        waiting = await soon(group, house.step(path, ROWS))
        for each in house.desk.worlds:
            each.tell(DrainAsked(10**12))
        world.by_itself = True
        world.run()
    assert (running.result().status, len(running.result().pictures())) == (200, 8)
    assert (waiting.result().status, waiting.result().code) == (503, "draining")
    assert int(waiting.result().headers["retry-after"]) >= 1
    assert (await house.ask("GET", idle)).status == 404
    assert house.desk.standing() == []


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "body", "status", "code", "param"),
    [
        ("step", {"actions": ROWS[:1], "step": 7}, 409, "step_out_of_order", "step"),
        ("look", {"step": 5}, 409, "step_out_of_order", "step"),
        ("rewind", {"step": 9}, 409, "rewind_ahead", "step"),
        ("fork", {"step": 9}, 409, "rewind_ahead", "step"),
        ("step", {}, 400, "bad_field", "actions"),
        ("step", {"actions": [[1, 2]]}, 400, "bad_field", "actions"),
        ("step", {"actions": [[[0, 2], [0, 0]]]}, 400, "bad_field", "actions"),
        ("step", {"actions": ROWS[:1], "due_ms": -1}, 400, "bad_field", "due_ms"),
        ("step", {"actions": ROWS[:1], "outputs": ["sound"]}, 400, "bad_field", "outputs"),
        ("step", {"actions": ROWS[:1], "format": "gif"}, 400, "bad_field", "format"),
        ("step", {"actions": ROWS * 40}, 400, "bad_frames", None),
        ("step", {"actions": ROWS[:1], "session_id": "sess_1"}, 400, "bad_field", "session_id"),
        ("step", {"actions": ROWS[:1], "type": "step"}, 400, "bad_field", "type"),
        ("look", {"step": 1, "colour": "red"}, 400, "bad_field", "colour"),
        ("rewind", {"step": True}, 400, "bad_field", "step"),
        ("fork", {"count": 65}, 400, "bad_field", "count"),
        ("restore", {"blob": "AAAA"}, 400, "bad_snapshot", "blob"),
        ("restore", {"blob": "!"}, 400, "bad_field", "blob"),
        ("reset", {"image": {"dtype": "|u1", "shape": [1, 1, 3], "data": "AAAA"}}, 400, "bad_field", "image"),
        ("credit", {"frames": 1}, 404, "not_found", None),
    ],
)
async def test_a_bad_call_is_told_why_and_changes_nothing(
    verb: str, body: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    house = Twins()
    path, _ = await house.opened()
    refused = await house.ask("POST", f"{path}/{verb}", body)
    assert (refused.status, refused.code, refused.body["error"]["param"]) == (status, code, param)
    assert refused.body["error"]["message"]
    assert seen((await house.step(path, ROWS)).pictures()) == seen(dreamt(3, ROWS))


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "bad_frame"),
        (b"[]", "bad_frame"),
        (b"null", "bad_frame"),
        (b'{"seed": NaN}', "bad_frame"),
        (b'{"seed": 1, "seed": 2}', "bad_frame"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "bad_frame"),
        (b'{"seed": 1e400}', "bad_field"),
        (b'{"seed": 9007199254740993}', "bad_field"),
        (b'{"image": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "bad_frame"),
        (b'{"image": ' + b'{"a":' * 100 + b"1" + b"}" * 100 + b"}", "bad_frame"),
        (b'{"seed": "\xff"}', "bad_frame"),
        (b'\xef\xbb\xbf{"seed": 1}', "bad_frame"),
        (b'{"model": "\\ud800"}', "bad_field"),
        (b'{"model": "nowhere"}', "model_not_found"),
        (b'{"seed": 1, "other": 2}', "bad_field"),
    ],
)
async def test_a_bad_open_is_refused_and_opens_nothing(body: bytes, code: str) -> None:
    house = Twins()
    refused = await house.ask("POST", "", body)
    assert (refused.status, refused.code) == (404 if code == "model_not_found" else 400, code)
    assert house.desk.worlds == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": ""}, 415),
        ({"content-encoding": "gzip"}, 415),
        ({"content-length": "99999999"}, 413),
        ({"content-length": "9" * 40}, 413),
        ({"content-type": "Application/JSON; charset=utf-8"}, 201),
    ],
)
async def test_a_body_of_another_kind_or_size_is_refused(headers: dict[str, str], status: int) -> None:
    house = Twins()
    answer = await house.ask("POST", "", {"seed": 1}, headers=headers)
    assert answer.status == status
    assert len(house.desk.standing()) == (status == 201)


async def test_a_body_is_counted_where_its_length_is_not_said() -> None:
    house = Twins(Limits(client_frame_bytes=1000))
    refused = await house.ask("POST", "", {"model": "x" * 1000}, headers={"content-length": "0"})
    assert (refused.status, refused.code) == (413, "too_large")


async def test_an_answer_is_bounded_by_the_frames_that_it_may_hold() -> None:
    house = Twins(Limits(outbox_bytes=4 * 48))
    path, _ = await house.opened()
    refused = await house.step(path, ROWS)
    assert (refused.status, refused.code) == (400, "bad_frames")
    assert "at most 4 frames" in refused.body["error"]["message"]
    assert len((await house.step(path, ROWS[:4])).pictures()) == 4
