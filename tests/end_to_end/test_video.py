"""Video through its door on a real server, with the real world, decoded by PyAV and held against the world's frames."""

import contextlib
import io
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import av
import msgpack
import numpy as np
import pytest
from numpy.typing import NDArray
from websockets.sync.client import ClientConnection, connect

from tests.end_to_end.served import Served, served

SUBPROTOCOL: Any = "omni-live.world.v1+msgpack"
PUSH, BACK = [1.0, 0.25], [-1.0, -0.5]
SEED = 3

Message = dict[str, Any]
Pictures = NDArray[np.uint8]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("video"), "pipelines: {world: }\n") as running:
        running.settle()
        yield running


@pytest.fixture(autouse=True)
def at_rest(server: Served) -> Iterator[None]:
    yield
    server.assert_at_rest()


class Viewer:
    """One connection to the video door; keeps every chunk that comes."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.chunks: list[tuple[Message, bytes]] = []

    def send(self, kind: str, **fields: object) -> None:
        self.socket.send(json.dumps({"type": kind, **fields}))

    def receive(self) -> Message:
        frame = self.socket.recv(timeout=30)
        assert isinstance(frame, str), "a fragment that nothing announced"
        message: Message = json.loads(frame)
        if message["type"] == "video.chunk_metadata":
            fragment = self.socket.recv(timeout=30)
            assert isinstance(fragment, bytes)
            assert len(fragment) == message["byte_length"]
            self.chunks.append((message, fragment))
        return message

    def until(self, kind: str) -> Message:
        while (message := self.receive())["type"] != kind:
            assert message["type"] not in {"error", "session.done"}, message
        return message

    def interact(self, event_id: str, **event: object) -> Message:
        self.send("session.interaction", interaction={"event_id": event_id, "event": event})
        return self.until("session.interaction.queued")

    def pictures(self) -> list[Pictures]:
        """The joined fragments, decoded."""
        with av.open(io.BytesIO(b"".join(fragment for _, fragment in self.chunks)), "r") as container:
            return [frame.to_ndarray(format="rgb24").astype(np.uint8) for frame in container.decode(video=0)]


@contextlib.contextmanager
def viewing(server: Served) -> Iterator[Viewer]:
    url = f"ws://127.0.0.1:{server.port}/v1/realtime/video"
    with connect(url, max_size=None, proxy=None) as socket:
        yield Viewer(socket)


def true_frames(server: Served, actions: list[Any]) -> list[Pictures]:
    """What the world door shows after each of these frames' actions."""
    url = f"ws://127.0.0.1:{server.port}/v1/world"
    with connect(url, subprotocols=[SUBPROTOCOL], max_size=None, proxy=None) as socket:

        def receive(kind: str) -> Message:
            while (message := msgpack.unpackb(socket.recv(timeout=30)))["type"] != kind:
                assert message["type"] != "error", message
            return dict(message)

        socket.send(msgpack.packb({"type": "session.open", "seed": SEED, "credits": 4096}))
        session = receive("session.opened")["session_id"]
        socket.send(msgpack.packb({"type": "step", "session_id": session, "actions": actions}))
        images = [receive("frame")["image"] for _ in actions]
        socket.send(msgpack.packb({"type": "session.close", "session_id": session}))
        receive("session.closed")
    return [np.frombuffer(image["data"], np.uint8).reshape(image["shape"]) for image in images]


def psnr_db(seen: Pictures, truth: Pictures) -> float:
    away = float(np.mean((seen.astype(float) - truth) ** 2))
    return float(10 * np.log10(255**2 / max(1e-9, away)))


def test_the_joined_fragments_are_the_worlds_frames(server: Served) -> None:
    with viewing(server) as viewer:
        viewer.send("session.start", seed=SEED, num_frames=20, paced=False, action=PUSH)
        config = viewer.until("video.start")["config"]
        assert (config["width"], config["height"], config["fps"]) == (64, 64, 5.0)
        done = viewer.until("session.done")
        assert (done["chunks"], done["frames"], done["stopped"]) == (3, 20, False)
        assert [(chunk["first_frame"], chunk["num_frames"]) for chunk, _ in viewer.chunks] == [(0, 8), (8, 8), (16, 4)]
        seen = viewer.pictures()
    truth = true_frames(server, [[PUSH, PUSH]] * 20)
    assert len(seen) == 20
    found = [psnr_db(*pair) for pair in zip(seen, truth, strict=True)]
    assert min(found) > 28, found


def test_any_block_plays_alone_behind_the_head(server: Served) -> None:
    with viewing(server) as viewer:
        viewer.send("session.start", seed=SEED, num_frames=9, block_frames=3, paced=False)
        viewer.until("session.done")
        whole = viewer.pictures()
        (first, fragment), _, last = viewer.chunks
        viewer.chunks = [(first, fragment[: first["init_length"]]), last]
        assert np.array_equal(viewer.pictures(), whole[6:])


def test_an_interactions_first_frame_is_exactly_the_named_one(server: Served) -> None:
    with viewing(server) as viewer:
        viewer.send("session.start", seed=SEED, num_frames=32, fps=30, action=PUSH)
        while not viewer.chunks:
            viewer.receive()
        named = viewer.interact("turn", action=BACK)["first_frame"]
        assert viewer.until("interaction.applied")["first_frame"] == named
        viewer.until("session.done")
        seen = viewer.pictures()
    assert 8 <= named <= 24
    (started,) = (chunk for chunk, _ in viewer.chunks if chunk["started_event_ids"])
    assert (started["first_frame"], started["started_event_ids"]) == (named, ["turn"])
    rows = [row for chunk, _ in viewer.chunks for row in chunk["actions"]]
    assert rows == [[PUSH, PUSH]] * named + [[BACK, BACK]] * (32 - named)
    truth = true_frames(server, rows)
    unturned = true_frames(server, [[PUSH, PUSH]] * (named + 1))
    assert min(psnr_db(*pair) for pair in zip(seen, truth, strict=True)) > 28
    assert psnr_db(seen[named], truth[named]) > psnr_db(seen[named], unturned[named]) + 1
    assert np.array_equal(truth[:named], unturned[:named])


def test_a_prompt_names_a_direction_and_the_last_row_of_a_list_holds_on(server: Served) -> None:
    with viewing(server) as viewer:
        viewer.send("session.start", seed=SEED, block_frames=2, fps=60, prompt="push it to the left")
        while not viewer.chunks:
            viewer.receive()
        named = viewer.interact("list", action=[[0.5, 0.0], [0.0, 0.5]])["first_frame"]
        while viewer.chunks[-1][0]["first_frame"] < named + 4:
            viewer.receive()
        viewer.send("session.stop")
        done = viewer.until("session.done")
        assert done["stopped"]
        assert done["frames"] == sum(chunk["num_frames"] for chunk, _ in viewer.chunks) == len(viewer.pictures())
    rows = [row for chunk, _ in viewer.chunks for row in chunk["actions"]]
    assert rows[:named] == [[[-1.0, 0.0]] * 2] * named
    assert rows[named : named + 4] == [[[0.5, 0.0]] * 2, *[[[0.0, 0.5]] * 2] * 3]


def test_a_killed_replica_costs_no_frame_and_changes_none(server: Served) -> None:
    with viewing(server) as viewer:
        viewer.send("session.start", seed=SEED, num_frames=48, fps=10, action=PUSH)
        while len(viewer.chunks) < 2:
            viewer.receive()
        os.kill(server.worker("dynamics"), signal.SIGKILL)
        assert viewer.until("session.done")["frames"] == 48
        seen = viewer.pictures()
    truth = true_frames(server, [[PUSH, PUSH]] * 48)
    assert min(psnr_db(*pair) for pair in zip(seen, truth, strict=True)) > 28


def test_a_client_that_leaves_in_mid_video_leaves_nothing(server: Served) -> None:
    for _ in range(8):
        with viewing(server) as viewer:
            viewer.send("session.start", paced=False)
            while not viewer.chunks:
                viewer.receive()


def test_bad_messages_are_told_and_the_video_goes_on(server: Served) -> None:
    bad: list[tuple[Message | str | bytes, str]] = [
        ("{", "bad_frame"),
        (b"\x80", "bad_frame"),
        ({"type": "nonsense"}, "unknown_type"),
        ({"type": "session.start"}, "already_started"),
        ({"type": "session.interaction"}, "bad_field"),
        ({"type": "session.interaction", "interaction": {"event": {"action": [1, 2, 3]}}}, "bad_field"),
        ({"type": "session.interaction", "interaction": {"event": {"action": [7, 0]}}}, "bad_field"),
        ({"type": "session.interaction", "interaction": {"event": {"camera": {"yaw": 1}}}}, "unsupported"),
        ({"type": "session.interaction", "interaction": {"event": {"prompt": "a castle"}}}, "prompt_unknown"),
    ]
    with viewing(server) as viewer:
        viewer.send("session.interaction", interaction={"event": {"action": PUSH}})
        assert viewer.receive()["code"] == "not_started"
        viewer.send("session.start", model="nobody")
        assert viewer.receive()["code"] == "model_not_found"
        viewer.send("session.start", num_frames=24, fps=20)
        viewer.until("video.start")
        for message, code in bad:
            viewer.socket.send(message if isinstance(message, str | bytes) else json.dumps(message))
            while (told := viewer.receive())["type"] == "video.chunk_metadata":
                pass
            assert (told["type"], told["code"]) == ("error", code), message
        viewer.send("session.ping")
        viewer.until("session.pong")
        assert viewer.until("session.done")["frames"] == 24
