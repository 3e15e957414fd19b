"""Rollouts through the world door of a real server, with the real model, by a plain websocket client."""

import io
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from tests.end_to_end.served import Served, served
from tests.end_to_end.world_talk import ACTIONS, Message, pictures, talking, warm


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("world"), "pipelines: {world: }\n") as running:
        warm(running)
        yield running


@pytest.fixture(autouse=True)
def at_rest(server: Served) -> Iterator[None]:
    yield
    server.assert_at_rest()


def test_g9_survival_a_rollout_gives_the_same_frames_after_fork_rewind_and_restore(server: Served) -> None:
    with talking(server) as talk:
        assert talk.world["frame"] == [64, 64, 3]
        session = talk.open()
        frames = talk.step(session, ACTIONS)
        assert len(frames) == len(ACTIONS)
        assert len(set(frames)) > 10
        assert talk.step(session, ACTIONS[4:6], step=5) == frames[4:6], "a number that was made already"
        *looked, _ = talk.ask("look", session_id=session, step=1, frames=3)
        assert [frame["image"]["data"] for frame in looked] == frames[:3]

        (child,) = talk.until(talk.send("fork", session_id=session, step=20), "session.opened", "error")
        assert (child["forked_from"], child["step"]) == (session, 20)
        assert talk.step(child["session_id"], ACTIONS[20:]) == frames[20:]

        (rewound,) = talk.ask("rewind", session_id=session, step=10)
        assert rewound["step"] == 10
        taken, _ = talk.ask("snapshot", session_id=session)
        assert talk.step(session, ACTIONS[10:]) == frames[10:]

        other = talk.open(seed=9)
        (restored,) = talk.ask("restore", session_id=other, blob=taken["blob"])
        assert (restored["status"], restored["step"]) == ("done", 10)
        assert talk.step(other, ACTIONS[10:]) == frames[10:]
        (refused,) = talk.ask("restore", session_id=other, blob=taken["blob"][:-1] + b"\0")
        assert refused["code"] == "bad_snapshot"
        for each in (session, child["session_id"], other):
            talk.close(each)


def test_a_client_that_comes_back_gets_what_it_missed(server: Served) -> None:
    with talking(server) as talk:
        session, token = talk.open(), talk.token
        seen = talk.last_seq[session]
        frames = talk.step(session, ACTIONS[:6])
    with talking(server) as talk:
        talk.send("session.resume", session_id=session, token=token, last_seq=seen)
        told = [talk.receive() for _ in range(8)]
        assert [message["type"] for message in told] == ["session.resumed", *["frame"] * 6, "done"]
        assert [message["image"]["data"] for message in told[1:7]] == frames
        assert told[0]["step"] == 6
        talk.close(session)


def test_a_rollout_goes_on_after_its_worker_was_killed(server: Served) -> None:
    with talking(server) as talk:
        session = talk.open()
        frames = talk.step(session, ACTIONS[:20])
        os.kill(server.worker("dynamics"), signal.SIGKILL)
        done: Message = {}
        while done.get("status") != "done":  # what ran as it died fails, and is asked again
            *_, done = talk.ask("rewind", session_id=session, step=10)
        again: list[bytes] = []
        while len(again) != 10:
            *made, done = talk.ask("step", session_id=session, actions=ACTIONS[10:20], step=11)
            again = [frame["image"]["data"] for frame in made]
        assert again == frames[10:20]
        talk.close(session)


def test_a_step_cut_short_keeps_whole_frames(server: Served) -> None:
    with talking(server) as talk:
        session = talk.open()
        request = talk.send("step", session_id=session, actions=ACTIONS * 5)
        while talk.receive()["type"] != "frame":
            pass
        talk.send("cancel", session_id=session, target=request)
        done = talk.until(request)[-1]
        assert done["status"] == "interrupted"
        assert 1 <= done["step"] < 200
        *looked, end = talk.ask("look", session_id=session, step=done["step"])
        assert (len(looked), end["status"]) == (1, "done")
        talk.close(session)


def test_frames_wait_for_credit(server: Served) -> None:
    with talking(server, binary=False) as talk:
        request = talk.send("session.open", seed=1, credits=2)
        session = talk.until(request)[0]["session_id"]
        request = talk.send("step", session_id=session, actions=ACTIONS[:5], format="png")
        assert [talk.receive()["step"] for _ in range(2)] == [1, 2]
        talk.send("describe")
        assert talk.receive()["type"] == "server.world", "the third frame waits"
        talk.send("credit", session_id=session, frames=8)
        found = talk.until(request)
        assert [message["step"] for message in found] == [3, 4, 5, 5]
        assert found[0]["format"] == "png"
        talk.close(session)


def test_opened_forked_and_closed_sessions_leave_nothing(server: Served) -> None:
    with talking(server) as talk:
        for _ in range(100):
            session = talk.open()
            found = talk.send("fork", session_id=session, count=4)
            children = [talk.until(found, "session.opened")[0]["session_id"] for _ in range(4)]
            for each in (*children, session):
                talk.close(each)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"type": "nonsense", "session_id": "x"}, "unknown_type"),
        ({"type": "step", "session_id": "x", "actions": [[1, 2]]}, "bad_field"),
        ({"type": "step", "session_id": "x", "actions": [[[0, 0], [0, 0]]]}, "session_not_found"),
        ({"type": "session.open", "image": {"dtype": "|u1", "shape": [1, 1, 3], "data": "AAAA"}}, "bad_field"),
    ],
)
def test_a_bad_request_is_told_and_the_socket_stays_open(server: Served, message: Message, code: str) -> None:
    with talking(server, binary=False) as talk:
        talk.socket.send("{")
        assert talk.receive()["code"] == "bad_frame"
        kind = message.pop("type")
        assert talk.ask(kind, **message)[-1]["code"] == code


def test_a_picture_comes_raw_as_png_or_as_jpeg_and_is_the_same_picture(server: Served) -> None:
    with talking(server) as talk:
        session = talk.open()
        raw = talk.step(session, ACTIONS[:3])
        pictures = [np.frombuffer(data, np.uint8).reshape(64, 64, 3) for data in raw]
        for form, furthest in (("png", 0), ("jpeg", 24)):
            *found, _ = talk.ask("look", session_id=session, step=1, frames=3, format=form)
            assert [frame["format"] for frame in found] == [form] * 3
            for frame, picture in zip(found, pictures, strict=True):
                with Image.open(io.BytesIO(frame["image"]["data"])) as opened:
                    read = np.asarray(opened.convert("RGB"), np.int16)
                assert np.abs(read - picture).mean() <= furthest / 4
                assert np.median(np.abs(read - picture)) <= furthest
        talk.close(session)


def test_latents_come_alone_or_beside_the_picture(server: Served) -> None:
    with talking(server) as talk:
        session = talk.open(outputs=["latent"])
        *alone, done = talk.ask("step", session_id=session, actions=ACTIONS[:4])
        assert (done["status"], [frame["output"] for frame in alone]) == ("done", ["latent"] * 4)
        assert all("image" not in frame for frame in alone)
        latents = [frame["latent"]["data"] for frame in alone]
        *both, _ = talk.ask("look", session_id=session, step=1, frames=4, outputs=["frame", "latent"])
        assert sorted(frame["output"] for frame in both) == ["frame"] * 4 + ["latent"] * 4
        assert [frame["latent"]["data"] for frame in both if frame["output"] == "latent"] == latents
        talk.close(session)


def test_a_rollout_begins_from_a_picture_in_any_form_that_holds_it_whole(server: Served) -> None:
    with talking(server) as talk:
        first = talk.open()
        data = talk.step(first, ACTIONS[:9])[-1]
        picture = np.frombuffer(data, np.uint8).reshape(64, 64, 3)
        png = io.BytesIO()
        Image.fromarray(picture).save(png, "PNG")
        array = {"dtype": "|u1", "shape": [64, 64, 3], "data": data}
        made = []
        for image in (array, {"format": "png", "data": png.getvalue()}):
            session = talk.open(seed=5, image=image)
            made.append(talk.step(session, ACTIONS[:5]))
            talk.close(session)
        assert made[0] == made[1]
        other = talk.open(seed=5)
        assert talk.step(other, ACTIONS[:5]) != made[0], "the seed's own beginning is another"
        (done,) = talk.ask("reset", session_id=other, seed=5, image=array)
        assert (done["status"], done["step"]) == ("done", 0)
        assert talk.step(other, ACTIONS[:5]) == made[0], "a reset begins as an open does"
        for each in (first, other):
            talk.close(each)


@pytest.mark.parametrize("binary", [True, False])
def test_a_socket_that_drops_in_mid_step_costs_no_frame_and_repeats_none(server: Served, binary: bool) -> None:
    actions = ACTIONS * 4
    with talking(server, binary=binary) as talk:
        undisturbed, session = talk.open(), talk.open()
        whole = talk.step(undisturbed, actions)
        talk.close(undisturbed)
        token = talk.token
        talk.send("step", session_id=session, actions=actions)
        seen = []
        while len(seen) < 7:
            message = talk.receive()
            assert message["session_id"] == session
            seen.append(message)
        last_seq = talk.last_seq[session]
    with talking(server, binary=binary) as talk:
        talk.send("session.resume", session_id=session, token=token, last_seq=last_seq, credits=4096)
        resumed = talk.receive()
        assert resumed["type"] == "session.resumed"
        while (message := talk.receive())["type"] != "done":
            seen.append(message)
        assert (message["status"], message["step"]) == ("done", len(actions))
        assert [frame["step"] for frame in seen] == list(range(1, len(actions) + 1))
        assert pictures(seen) == whole
        talk.close(session)


def test_a_rollout_can_be_rewound_256_steps_and_no_more(server: Served) -> None:
    with talking(server) as talk:
        session = talk.open()
        for _ in range(8):
            frames = talk.step(session, ACTIONS)
        (refused,) = talk.ask("rewind", session_id=session, step=320 - 257)
        assert (refused["status"], refused["reason"], refused["step"]) == ("failed", "rewind_too_far", 320)
        assert talk.look(session, 281, 40) == frames, "nothing was touched"
        talk.rewind(session, 320 - 256)
        talk.close(session)
