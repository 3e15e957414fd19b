"""Rollouts over HTTP by a real server with the real model, and by curl as the documentation has it."""

import base64
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from omni_live.protocols.world.arrays import seal
from omni_live.sessions.payload import Payload
from tests.end_to_end.served import Served, served, stop, wait_until
from tests.end_to_end.world_talk import ACTIONS, talking

SESSIONS = "/v1/world/sessions"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "world.md"
SOON_S = 0.25
DEPLOY = """
pipelines: {world: }
limits: {max_sessions: 6, wait_queue: 0, client_frame_bytes: 200000, open_timeout_s: 2, write_deadline_s: 1}
server: {api_keys: {ann: key-ann, bob: key-bob}}
"""

Body = dict[str, Any]


class Web:
    """A client with a key."""

    def __init__(self, server: Served, key: str = "key-ann") -> None:
        self.server = server
        self.key = key
        self.headers: dict[str, str] = {}
        """Of the last answer."""
        self.took_s = 0.0
        self.opened: list[str] = []

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Body]:
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        given = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)) as connection:
            began = time.monotonic()
            connection.request(method, f"{SESSIONS}{path}", content, given)
            response = connection.getresponse()
            answer = response.read()
            self.took_s = time.monotonic() - began
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        unpack = msgpack.unpackb if self.headers.get("content-type") == "application/msgpack" else json.loads
        return response.status, unpack(answer) if answer else {}

    def good(self, path: str, body: object = None, **headers: str) -> Body:
        status, answer = self.ask("POST", path, body, **headers)
        assert status in {200, 201}, answer
        return answer

    def open(self, seed: int = 3) -> str:
        self.opened.append(f"/{self.good('', {'seed': seed})['session_id']}")
        return self.opened[-1]

    def step(self, path: str, actions: object, **fields: object) -> list[bytes]:
        return pictures(self.good(f"{path}/step", {"actions": actions, **fields}))

    def close(self, *paths: str) -> None:
        for path in paths:
            assert self.ask("DELETE", path)[0] == 204

    def code(self, path: str, body: object = None, **headers: str) -> tuple[int, str]:
        status, answer = self.ask("POST", path, body, **headers)
        return status, answer["error"]["code"]


def pictures(answer: Body) -> list[bytes]:
    data = [frame["image"]["data"] for frame in answer["frames"]]
    return [one if isinstance(one, bytes) else base64.b64decode(one) for one in data]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("world_http"), DEPLOY, "--log-level", "warning") as running:
        yield running


@pytest.fixture
def web(server: Served) -> Iterator[Web]:
    client = Web(server)
    yield client
    for path in client.opened:  # a test that failed costs no other one its place
        client.ask("DELETE", path)
    assert client.ask("GET", "/sess_0")[0] == 404, "the server goes on"
    assert "Traceback" not in server.log()
    assert "never retrieved" not in server.log()
    wait_until(lambda: standing(server) == 0, "a session is left", 8.0)


def standing(server: Served) -> float:
    """Slots that are taken, as a page with a key in front of it says."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics", headers={"Authorization": "Bearer key-ann"})
        page = connection.getresponse().read().decode()
    found = re.search(r"^omni_live_slots_taken(?:\{.*\})? (\S+)$", page, re.MULTILINE)
    assert found is not None
    return float(found[1])


# -- the same rollouts -------------------------------------------------------------------------------------------------


def test_http_brings_the_same_frames_as_the_socket(tmp_path: Path) -> None:
    with served(tmp_path, "pipelines: {world: }\n") as server:
        server.settle()
        with talking(server) as talk:
            session = talk.open()
            frames = talk.step(session, ACTIONS)
            talk.close(session)
        web = Web(server)
        path = web.open()
        assert web.step(path, ACTIONS) == frames
        assert web.step(path, ACTIONS[4:6], step=5) == frames[4:6]
        assert pictures(web.good(f"{path}/look", {"step": 1, "frames": 3})) == frames[:3]
        (child,) = web.good(f"{path}/fork", {"step": 20})["forks"]
        assert (child["step"], child["forked_from"]) == (20, path[1:])
        assert web.step(f"/{child['session_id']}", ACTIONS[20:]) == frames[20:]
        assert web.good(f"{path}/rewind", {"step": 10})["step"] == 10
        blob = web.good(f"{path}/snapshot")["blob"]
        packed = msgpack.packb({"actions": ACTIONS[10:]})
        kind = "application/msgpack"
        assert pictures(web.good(f"{path}/step", packed, Content_Type=kind, Accept=kind)) == frames[10:]
        other = web.open(seed=9)
        assert web.good(f"{other}/restore", {"blob": blob})["step"] == 10
        assert web.step(other, ACTIONS[10:]) == frames[10:]
        assert web.good(f"{other}/reset", {"seed": 3})["step"] == 0
        assert web.step(other, ACTIONS[:5]) == frames[:5]
        web.close(path, other, f"/{child['session_id']}")
        server.assert_at_rest()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_documentation_s_commands_work_as_written(tmp_path: Path) -> None:
    (commands,) = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    with served(tmp_path, "pipelines: {world: }\n") as server:
        server.settle()
        here = commands.replace("127.0.0.1:8765", f"127.0.0.1:{server.port}").replace("curl -sS", "curl -sSf -w '\\n'")
        assert here.count("curl -sSf") == commands.count("curl")
        done = subprocess.run(["bash", "-eu"], check=False, input=here.encode(), cwd=tmp_path, capture_output=True)
        assert done.returncode == 0, done.stderr
        answers = [json.loads(line) for line in done.stdout.splitlines() if line]
        assert [frame["step"] for frame in answers[0]["frames"]] == [1, 2]
        assert answers[0]["frames"][0]["format"] == "png"
        assert msgpack.unpackb((tmp_path / "step.msgpack").read_bytes())["step"] == 1
        for child in answers[2]["forks"]:
            Web(server).close(f"/{child['session_id']}")
        server.assert_at_rest()


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_every_refusal_has_its_status(web: Web) -> None:
    path = web.open()
    web.step(path, ACTIONS)
    assert web.code(f"{path}/step", {"actions": ACTIONS[:1], "step": 99}) == (409, "step_out_of_order")
    assert web.code(f"{path}/rewind", {"step": 99}) == (409, "rewind_ahead")
    assert web.code(f"{path}/look", {"step": 99}) == (409, "step_out_of_order")
    assert web.code(f"{path}/cancel") == (409, "response_cancel_not_active")
    assert web.code(f"{path}/step", {"actions": [[1]]}) == (400, "bad_field")
    assert web.code(f"{path}/restore", {"blob": "AAAA"}) == (400, "bad_snapshot")
    assert web.code("", {"model": "nowhere"}) == (404, "model_not_found")
    assert web.code(f"{path}/step", {"actions": ACTIONS * 10}) == (400, "bad_frames")
    assert web.code(f"{path}/step", {"actions": ACTIONS * 400}) == (413, "too_large")
    assert web.code(f"{path}/step", b"a=1", Content_Type="text/plain") == (415, "unsupported_media_type")
    assert web.code("/sess_0/step", {}) == (404, "session_not_found")
    assert web.ask("PUT", path)[0] == 405
    foreign = Web(web.server, "key-bob")
    for method, verb in (("GET", ""), ("DELETE", ""), ("POST", "/step"), ("POST", "/fork")):
        assert foreign.ask(method, f"{path}{verb}", {})[0] == 404
    assert Web(web.server, "none").ask("GET", path)[0] == 401
    web.close(path)
    assert web.code(f"{path}/step", {"actions": ACTIONS[:1]}) == (404, "session_not_found")


def test_a_rollout_does_not_go_back_beyond_what_is_kept(web: Web) -> None:
    path = web.open()
    for first in range(0, 280, 40):
        web.good(f"{path}/step", {"actions": ACTIONS, "step": first + 1, "outputs": ["latent"]})
    assert web.code(f"{path}/rewind", {"step": 3}) == (409, "rewind_too_far")
    assert web.code(f"{path}/look", {"step": 3}) == (409, "step_unknown")
    assert web.code(f"{path}/fork", {"step": 3}) == (409, "rewind_too_far")
    web.close(path)


def test_a_full_server_says_when_to_try_again_and_a_delete_makes_room(web: Web) -> None:
    paths = [web.open(seed) for seed in range(5)]
    assert web.code(f"{paths[0]}/fork", {"count": 2}) == (503, "overloaded")
    paths.append(web.open())
    assert web.code("", {}) == (503, "overloaded")
    assert int(web.headers["retry-after"]) >= 1
    assert web.code(f"{paths[0]}/fork", {}) == (503, "overloaded")
    assert len(web.step(paths[0], ACTIONS[:2])) == 2, "the parent lives"
    web.close(paths.pop())
    paths.append(web.open())
    web.close(*paths)


def test_a_snapshot_that_holds_nothing_is_refused_and_the_rollout_is_what_it_was(web: Web) -> None:
    path = web.open()
    frames = web.step(path, ACTIONS[:4])
    blob = base64.b64encode(seal(3, Payload("world", {"step": 3}))).decode()
    status, answer = web.ask("POST", f"{path}/restore", {"blob": blob})
    assert 400 <= status < 500, answer
    assert pictures(web.good(f"{path}/look", {"step": 1, "frames": 4})) == frames
    web.close(path)


BAD = {
    "half an object": b'{"actions": [[[0, 0],',
    "an array": b"[]",
    "a number": b"1",
    "not utf-8": b'{"actions": "\xff\xfe"}',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "deep lists": b'{"actions": ' + b"[" * 9_000 + b"]" * 9_000 + b"}",
    "deeper lists": b'{"actions": ' + b"[" * 90_000,
    "deep objects": b'{"actions": ' + b'{"a":' * 9_000 + b"0" + b"}" * 9_000 + b"}",
    "a huge integer": b'{"actions": [[[0, 0], [0, ' + b"9" * 100_000 + b"]]]}",
    "a large integer": b'{"actions": [[[0, 0], [0, ' + b"9" * 4_000 + b"]]]}",
    "a huge float": b'{"actions": [[[0, 0], [0, 1e999]]]}',
    "not a number": b'{"actions": [[[0, 0], [0, NaN]]]}',
    "infinity": b'{"actions": [[[0, 0], [0, -Infinity]]]}',
    "a key twice": b'{"actions": [[[0, 0], [0, 0]]], "step": 1, "step": 1}',
    "a boolean": b'{"actions": [[[0, 0], [0, true]]]}',
    "text": b'{"actions": "up"}',
    "null": b'{"actions": null}',
    "an empty list": b'{"actions": []}',
    "ragged lists": b'{"actions": [[[0, 0], [0]]]}',
    "many empty lists": b'{"actions": [' + b"[]," * 60_000 + b"[]]}",
    "a float as a step": b'{"actions": [[[0, 0], [0, 0]]], "step": 1.0}',
    "a negative step": b'{"actions": [[[0, 0], [0, 0]]], "step": -1}',
    "a lying shape": b'{"actions": {"dtype": "<f4", "shape": [9, 2, 2], "data": "AAAA"}}',
    "a vast shape": b'{"actions": {"dtype": "<f4", "shape": [2147483648, 2147483648, 2], "data": ""}}',
    "another dtype": b'{"actions": {"dtype": "|O", "shape": [1, 2, 2], "data": "AAAAAAAAAAAAAAAAAAAAAA=="}}',
    "an unknown field": b'{"actions": [[[0, 0], [0, 0]]], "__proto__": 1}',
    "a lone surrogate": b'{"actions": [[[0, 0], [0, 0]]], "format": "\\ud800"}',
    "a path": b'{"actions": [[[0, 0], [0, 0]]], "format": "../../etc/passwd"}',
    "a nul": b'{"actions": [[[0, 0], [0, 0]]], "request_id": "a\\u0000b"}',
}
SECRETS = re.compile(r"/dev/shm|/tmp|Traceback|0x[0-9a-f]{8}|File \"|\.py")


@pytest.mark.parametrize("body", BAD.values(), ids=BAD.keys())
def test_a_bad_body_is_refused_at_once_and_the_neighbours_go_on(web: Web, body: bytes) -> None:
    path = web.open()
    log = web.server.log()
    status, answer = web.ask("POST", f"{path}/step", body)
    assert status == 400
    assert web.took_s < SOON_S
    assert answer["error"]["code"] in {"bad_frame", "bad_field"}
    assert not SECRETS.search(json.dumps(answer))
    assert web.server.log() == log, "nothing that a client can send is worth a line of the log"
    assert len(web.step(path, ACTIONS[:1], step=1)) == 1
    web.close(path)


def said(server: Served, request: bytes, *, half: bool = False) -> bytes:
    """What the server answers to these bytes until it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(request)
        if half:
            client.shutdown(socket.SHUT_WR)
        found = b""
        while chunk := client.recv(65536):
            found += chunk
        return found


@pytest.mark.parametrize(
    ("lengths", "body", "status"),
    [
        ("Content-Length: 5", b'{"seed": 1}', b"400"),
        ("Content-Length: 50", b'{"seed": 1}', b"408"),
        ("Content-Length: -1", b"", b"400"),
        ("Content-Length: 99999999999999999999999", b"", b"400"),
        ("Content-Length: 1000000000", b"", b"413"),
        ("Content-Length: 2\r\nContent-Length: 3", b"{}", b"400"),
        ("Content-Length: 2\r\nTransfer-Encoding: chunked", b"{}", b"400"),
        ("Transfer-Encoding: chunked", b"zz\r\n", b"400"),
    ],
)
def test_a_wrong_length_costs_its_connection_and_nothing_else(
    web: Web, lengths: str, body: bytes, status: bytes
) -> None:
    head = f"POST {SESSIONS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer key-ann\r\nConnection: close\r\n"
    kind = "Content-Type: application/json\r\n"
    answer = said(web.server, f"{head}{kind}{lengths}\r\n\r\n".encode() + body)
    assert answer.split(b" ")[1] == status


# -- clients, workers and servers that go ------------------------------------------------------------------------------


def began(shown: Body) -> bool:
    return bool(shown["calls"] or shown["step"])


def test_a_step_goes_on_when_its_client_hangs_up(web: Web) -> None:
    path = web.open()
    body = json.dumps({"actions": ACTIONS, "step": 1}).encode()
    head = f"POST {SESSIONS}{path}/step HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer key-ann\r\n"
    kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", web.server.port), timeout=20) as client:
        client.sendall(f"{head}{kind}".encode() + body)
        wait_until(lambda: began(web.ask("GET", path)[1]), "the step never began")
    again = web.step(path, ACTIONS, step=1)
    assert len(again) == len(ACTIONS)
    shown = web.ask("GET", path)[1]
    assert (shown["step"], shown["calls"]) == (len(ACTIONS), 0)
    web.close(path)


def test_a_client_that_reads_nothing_loses_its_connection_and_no_more(web: Web) -> None:
    path = web.open()
    body = json.dumps({"actions": ACTIONS * 6}).encode()
    head = f"POST {SESSIONS}{path}/step HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer key-ann\r\n"
    kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    before = web.server.fds()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", web.server.port))
        client.sendall(f"{head}{kind}".encode() + body)
        wait_until(lambda: web.ask("GET", path)[1]["step"] == 240, "the step never ended")
        wait_until(lambda: web.server.fds() <= before, "the connection stands", 10.0)
    assert len(web.step(path, ACTIONS[:2], step=241)) == 2
    web.close(path)


def test_a_step_cut_short_says_where_the_rollout_stands(web: Web) -> None:
    path = web.open()
    answers: list[Body] = []
    body = {"actions": ACTIONS * 6, "outputs": ["frame"]}
    stepping = threading.Thread(target=lambda: answers.append(Web(web.server).good(f"{path}/step", body)))
    stepping.start()
    wait_until(lambda: web.ask("GET", path)[1]["calls"] == 1, "the step never began")
    cancelled = web.good(f"{path}/cancel")
    stepping.join(20)
    assert answers[0]["status"] == "interrupted"
    assert answers[0]["step"] == cancelled["step"] < 240
    looked = web.good(f"{path}/look", {"step": cancelled["step"]})
    assert len(looked["frames"]) == 1
    web.close(path)


def test_a_step_whose_worker_is_killed_fails_and_the_rollout_goes_on(web: Web) -> None:
    path = web.open()
    frames = web.step(path, ACTIONS)
    failed: list[tuple[int, Body]] = []
    worker = web.server.worker("dynamics")
    body = {"actions": ACTIONS * 5}
    stepping = threading.Thread(target=lambda: failed.append(Web(web.server).ask("POST", f"{path}/step", body)))
    stepping.start()
    wait_until(lambda: web.ask("GET", path)[1]["calls"] == 1, "the step never began")
    os.kill(worker, signal.SIGKILL)
    stepping.join(30)
    status, answer = failed[0]
    assert (status, answer["error"]["code"]) == (502, "replica_lost")
    assert answer["step"] >= len(ACTIONS)
    assert pictures(web.good(f"{path}/look", {"step": 1, "frames": len(ACTIONS)})) == frames
    web.close(path)


def test_a_session_that_nobody_calls_ends_by_its_idle_lease(tmp_path: Path) -> None:
    with served(tmp_path, "pipelines: {world: }\nlimits: {idle_lease_s: 1}\n") as server:
        server.settle()
        web = Web(server)
        path = web.open()
        began = time.monotonic()
        while time.monotonic() - began < 2:  # calls keep it
            assert web.ask("GET", path)[0] == 200
            time.sleep(0.2)
        server.assert_at_rest()
        assert web.ask("GET", path)[0] == 404


def test_a_server_that_goes_away_lets_a_step_finish_and_does_not_hang(tmp_path: Path) -> None:
    with served(tmp_path, "pipelines: {world: }\n") as server:
        web = Web(server)
        path, _ = web.open(), web.open()
        answers: list[Body] = []
        body = {"actions": ACTIONS * 4}
        stepping = threading.Thread(target=lambda: answers.append(Web(server).good(f"{path}/step", body)))
        stepping.start()
        wait_until(lambda: web.ask("GET", path)[1]["calls"] == 1, "the step never began")
        began = time.monotonic()
        assert stop(server.process) == 0
        assert time.monotonic() - began < 10
        stepping.join(5)
        assert len(answers[0]["frames"]) == 160
        assert "Traceback" not in server.log()
