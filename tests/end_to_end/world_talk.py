"""A plain client of the world door, to see it from outside."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import msgpack
from websockets.sync.client import ClientConnection, connect

from tests.end_to_end.served import Served, wait_until

SUBPROTOCOL: Any = "omni-live.world.v1+msgpack"

Message = dict[str, Any]


def moves(count: int, variant: int = 0) -> list[list[list[float]]]:
    """Actions for so many frames, which differ from variant to variant."""
    numbers = range(variant, count + variant)
    return [[[(n % 5 - 2) / 4, (n % 3 - 1) / 2], [(n % 7 - 3) / 6, 0.25]] for n in numbers]


ACTIONS = moves(40)


class Talk:
    """One connection; messages come in the order in which they were sent."""

    def __init__(self, socket: ClientConnection, *, binary: bool = True) -> None:
        self.socket = socket
        self.binary = binary
        self.numbers = 0
        self.last_seq: dict[str, int] = {}
        self.world = self.receive()

    def receive(self) -> Message:
        frame = self.socket.recv(timeout=30)
        message: Message = msgpack.unpackb(frame) if isinstance(frame, bytes) else json.loads(frame)
        if "seq" in message:
            seen = self.last_seq.get(message["session_id"], 0)
            assert message["seq"] > seen, "sequence numbers rise"
            self.last_seq[message["session_id"]] = message["seq"]
        return message

    def send(self, kind: str, **fields: object) -> str:
        self.numbers += 1
        request = f"r{self.numbers}"
        message = {"type": kind, "request_id": request, **fields}
        self.socket.send(msgpack.packb(message) if self.binary else json.dumps(message))
        return request

    def until(self, request: str, *kinds: str) -> list[Message]:
        """What comes of the request, up to its end."""
        found = []
        while True:
            message = self.receive()
            if message.get("request_id") == request:
                found.append(message)
                if message["type"] in (kinds or ("done", "error")):
                    return found

    def ask(self, kind: str, **fields: object) -> list[Message]:
        return self.until(self.send(kind, **fields))

    def open(self, seed: int = 3, **fields: object) -> str:
        opened, *_, done = self.ask("session.open", seed=seed, **{"credits": 4096, **fields})
        assert opened["type"] == "session.opened"
        assert (done["status"], done["step"]) == ("done", 0)
        self.token = opened["token"]
        return str(opened["session_id"])

    def step(self, session: str, actions: object, **fields: object) -> list[bytes]:
        *frames, done = self.ask("step", session_id=session, actions=actions, **fields)
        assert done["status"] == "done", done
        return pictures(frames)

    def step_together(self, asked: dict[str, object]) -> tuple[dict[str, list[bytes]], list[str]]:
        """Step these sessions at once: the frames of each, and whose frame came when."""
        for session, actions in asked.items():
            self.send("step", session_id=session, actions=actions)
        made: dict[str, list[bytes]] = {session: [] for session in asked}
        order: list[str] = []
        ended = 0
        while ended < len(asked):
            message = self.receive()
            if message["type"] == "frame":
                made[message["session_id"]].append(message["image"]["data"])
                order.append(message["session_id"])
            else:
                assert (message["type"], message["status"]) == ("done", "done"), message
                ended += 1
        return made, order

    def look(self, session: str, step: int, frames: int = 1) -> list[bytes]:
        *found, done = self.ask("look", session_id=session, step=step, frames=frames)
        assert done["status"] == "done", done
        return pictures(found)

    def rewind(self, session: str, step: int) -> None:
        (done,) = self.ask("rewind", session_id=session, step=step)
        assert (done["status"], done["step"]) == ("done", step)

    def fork(self, session: str, **fields: object) -> str:
        (child,) = self.until(self.send("fork", session_id=session, **fields), "session.opened", "error")
        assert child["forked_from"] == session
        return str(child["session_id"])

    def snapshot(self, session: str) -> bytes:
        taken, done = self.ask("snapshot", session_id=session)
        assert (done["status"], done["step"]) == ("done", taken["step"])
        return bytes(taken["blob"])

    def restore(self, session: str, blob: bytes) -> int:
        """The step at which the rollout stands now."""
        (done,) = self.ask("restore", session_id=session, blob=blob)
        assert done["status"] == "done", done
        return int(done["step"])

    def close(self, session: str) -> None:
        self.send("session.close", session_id=session)
        while (message := self.receive())["type"] != "session.closed":
            pass
        assert message["session_id"] == session


def pictures(messages: list[Message]) -> list[bytes]:
    return [message["image"]["data"] for message in messages if message["type"] == "frame"]


@contextlib.contextmanager
def talking(server: Served, *, binary: bool = True) -> Iterator[Talk]:
    url = f"ws://127.0.0.1:{server.port}/v1/world"
    with connect(url, subprotocols=[SUBPROTOCOL] if binary else None, max_size=None, proxy=None) as socket:
        yield Talk(socket, binary=binary)


def warm(server: Served) -> None:
    """Have every worker do some of everything once; what the server holds then is what it must come back to."""
    with talking(server) as talk:
        sessions = [talk.open(seed=seed) for seed in range(4)]
        talk.step_together({session: moves(100) for session in sessions})
        image = {"dtype": "|u1", "shape": [64, 64, 3], "data": bytes(64 * 64 * 3)}
        sessions.append(talk.open(image=image, outputs=["frame", "latent"]))
        for form in ("png", "jpeg"):
            talk.ask("step", session_id=sessions[-1], actions=moves(4), format=form)
        for session in sessions:
            talk.close(session)
    wait_until(lambda: not any(server.standing().values()), f"not at rest: {server.standing()}")
    server.settle()
