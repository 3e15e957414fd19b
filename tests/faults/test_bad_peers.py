"""Clients that freeze, vanish, come twice or come too late harm nobody but themselves, and not even that for long."""

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ..end_to_end.caller import Caller, dialled, resume, resumed, session, settings
from ..end_to_end.served import Served
from ..end_to_end.warm import warm_server

WRITE_S = 1.0
GRACE_S = 2.0
DEPLOY = f"""
limits: {{write_deadline_s: {WRITE_S}, detach_grace_s: {GRACE_S}, client_frame_bytes: 256 KiB}}
pipelines: {{voice: }}
"""
STORY = "Tell me a long story about a small robot in a big garden."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with warm_server(tmp_path_factory.mktemp("peers"), DEPLOY) as server:
        yield server


@pytest.fixture
def voice(server: Served) -> Iterator[Served]:
    yield server
    server.assert_at_rest()
    assert "Traceback" not in server.log()


async def until(voice: Served, name: str, value: float, within_s: float = 20.0, **labels: str) -> float:
    """When the metric had at least this value."""
    async with asyncio.timeout(within_s):
        while await asyncio.to_thread(lambda: voice.metric(name, **labels)) < value:
            await asyncio.sleep(0.01)
    return time.monotonic()


async def refusal(port: int, before: Caller, token: str | None = None) -> tuple[str, int]:
    """What a resume is answered: the error's code, and the code that the connection is closed with."""
    async with dialled(port, "") as late:
        if token is not None:
            before.token = token
        await resume(late, before)
        error = (await late.wait("error"))["error"]
        closed = await late.ended()
        assert closed.rcvd is not None
        return error["code"], closed.rcvd.code


async def test_a_reader_that_freezes_is_let_go_within_the_write_deadline_and_can_come_back(
    voice: Served, record_property: Any
) -> None:
    async with session(voice.port, settings(tokens=None)) as fine:
        undisturbed = await fine.ask(STORY)
        whole = fine.audio(undisturbed["id"])
    lost = voice.metric("omni_live_connections_ended_total", reason="write_deadline")
    async with dialled(voice.port, buffer_bytes=4096) as frozen:
        await frozen.wait("session.created")
        await frozen.update(settings(tokens=None))
        await frozen.send("input.text.append", text=STORY)
        await frozen.wait("response.output_audio.delta")
        frozen.freeze()
        frozen_s = time.monotonic()
        async with session(voice.port) as bystander:
            assert (await bystander.ask("Hello."))["status"] in ("completed", "incomplete")
        let_go_s = await until(voice, "omni_live_connections_ended_total", lost + 1, reason="write_deadline")
        record_property("let_go_after_s", round(let_go_s - frozen_s, 2))
        assert voice.metric("omni_live_outbox_bytes") == 0
        before = len(frozen.events)
        async with resumed(voice.port, frozen) as back:
            await back.wait("response.done")
        assert len(frozen.events) == before
        frozen.events += back.events
        assert frozen.audio(undisturbed_id(frozen)) == whole


def undisturbed_id(caller: Caller) -> str:
    return str(caller.of("response.created")[0]["response"]["id"])


async def test_a_client_that_vanishes_is_forgotten_when_its_grace_is_over(voice: Served, record_property: Any) -> None:
    async with dialled(voice.port) as gone:
        await gone.wait("session.created")
        await gone.update(settings(tokens=60))
        await gone.send("input.text.append", text=STORY)
        await gone.wait("response.output_audio.delta")
        gone.vanish()
    vanished_s = time.monotonic()
    await until(voice, "omni_live_sessions", 1, state="detached")
    while await asyncio.to_thread(lambda: voice.metric("omni_live_slots_taken")):
        await asyncio.sleep(0.01)
    kept_s = time.monotonic() - vanished_s
    record_property("kept_for_s", round(kept_s, 2))
    assert GRACE_S - 0.1 < kept_s < GRACE_S + 1.0
    assert await refusal(voice.port, gone) == ("session_resume_expired", 1008)


async def test_a_close_that_the_client_does_not_wait_for_is_a_close(voice: Served) -> None:
    async with dialled(voice.port) as gone:
        await gone.wait("session.created")
        await gone.send("input.text.append", text=STORY)
        await gone.send("session.close")
        await gone.socket.close()
    async with asyncio.timeout(GRACE_S / 2):
        while await asyncio.to_thread(lambda: voice.metric("omni_live_slots_taken")):
            await asyncio.sleep(0.01)


async def test_of_two_connections_of_a_session_the_newer_one_has_it(voice: Served) -> None:
    async with dialled(voice.port) as old:
        await old.wait("session.created")
        await old.update(settings(tokens=40))
        stale = old.token
        await old.send("input.text.append", text=STORY)
        await old.wait("response.output_audio.delta")
        async with resumed(voice.port, old) as new:
            await old.wait("session.replaced")
            closed = await old.ended()
            assert closed.rcvd is not None
            assert closed.rcvd.code == 1000
            done = await new.wait("response.done")
            # What was on its way to the old connection when the new one said what it has seen comes there again.
            heard = {event.get("server_event_seq") for event in old.events} - {None}
            again = [event.get("server_event_seq") for event in new.events if event.get("server_event_seq")]
            assert len(set(again)) == len(again)
            old.events += [event for event in new.events if event.get("server_event_seq") not in heard]
            assert old.audio(done["response"]["id"])  # whole, and each piece once
            assert (await new.ask("Hello."))["status"] in ("completed", "incomplete")
            assert await refusal(voice.port, old, stale) == ("invalid_resume_token", 1008)


async def test_two_that_resume_a_session_at_once_do_not_share_it(voice: Served) -> None:
    async with dialled(voice.port) as lost:
        await lost.wait("session.created")
        lost.vanish()
        await lost.ended()
    async with dialled(voice.port, "") as one, dialled(voice.port, "") as two:
        await asyncio.gather(resume(one, lost), resume(two, lost))
        ends = [asyncio.create_task(caller.ended()) for caller in (one, two)]
        done, waiting = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in waiting:
            end.cancel()
        assert len(done) == 1
        winner = two if ends[0] in done else one
        await winner.wait("session.resumed")
        assert (await winner.ask("Hello."))["status"] in ("completed", "incomplete")
        assert len(one.of("response.created") + two.of("response.created")) == 1
        await winner.close()


POISON: list[tuple[str, str | bytes]] = [
    ("not JSON", "{"),
    ("an array", "[1, 2]"),
    ("deep nesting", "[" * 5000 + "]" * 5000),
    ("no type", "{}"),
    ("an unknown type", '{"type": "no.such.event"}'),
    ("a lone surrogate", '{"type": "input.text.append", "text": "\\ud800"}'),
    ("not a number", '{"type": "playback.ack", "played_ms": NaN}'),
    ("a huge number", '{"type": "playback.ack", "played_ms": 1e400}'),
    (
        "a negative length",
        '{"type": "conversation.item.truncate", "item_id": "x", "content_index": 0, "audio_end_ms": -1}',
    ),
    ("bad base64", '{"type": "input_audio_buffer.append", "audio": "!!!!"}'),
    ("half a sample", '{"type": "input_audio_buffer.append", "audio": "AAAA"}'),
    ("an absurd rate", '{"type": "input_audio_buffer.append", "audio": "AAA=", "sample_rate_hz": 2147483647}'),
    ("settings of the wrong type", '{"type": "session.update", "session": {"omni_live": {"lead_ms": "soon"}}}'),
    ("a binary frame", b"\x93\x01\x02\x03"),
    ("a pickle", b"\x80\x04\x95\x00"),
    ("a number far ahead", '{"type": "session.heartbeat", "input_seq": 9007199254740991}'),
]


async def test_G6_a_poisonous_frame_harms_only_what_it_asked_for(voice: Served) -> None:
    async with (
        session(voice.port, settings(tokens=20)) as neighbour,
        session(voice.port, settings(tokens=20)) as caller,
    ):
        undisturbed = await neighbour.ask(STORY)
        for what, frame in POISON:
            caller.look_from_here()
            await caller.socket.send(frame)
            await caller.wait(lambda event: event["type"] in ("error", "session.input_missing"))
            assert caller.closed is None, what
        response = await caller.ask(STORY)
        assert caller.audio(response["id"]) == neighbour.audio(undisturbed["id"])
        assert_tight_lipped(caller)


def assert_tight_lipped(caller: Caller) -> None:
    """No error says anything about the inside."""
    for event in caller.of("error"):
        told = json.dumps({key: value for key, value in event.items() if key != "at_s"})
        for inside in ("/dev/shm", "/tmp", "/root", "/home", "Traceback", 'File "', "0x", ".py"):
            assert inside not in told


async def test_G6_a_frame_over_the_limit_ends_its_connection_and_the_session_comes_back(voice: Served) -> None:
    async with dialled(voice.port) as caller:
        await caller.wait("session.created")
        await caller.update(settings(tokens=20))
        with contextlib.suppress(Exception):
            await caller.socket.send("x" * (300 * 1024))
        closed = await caller.ended()
        assert closed.rcvd is None or closed.rcvd.code == 1009
        async with resumed(voice.port, caller) as back:
            assert (await back.ask("Hello."))["status"] in ("completed", "incomplete")
