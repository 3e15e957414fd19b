"""The client over real sockets against a scripted server: nothing lost, nothing twice, whatever the socket does."""

import asyncio
import socket as sockets
from collections.abc import Callable

import pytest

from omni_live.clients.duplex import (
    ConnectFailed,
    Options,
    Patience,
    PeerBroke,
    Refused,
    Replaced,
    ResumeRefused,
    SessionLost,
    connect,
    waits,
    with_query,
)
from omni_live.clients.duplex_events import (
    Closed,
    Detached,
    InputLost,
    Reattached,
    Refusal,
    SettingsUpdated,
    Sound,
    Words,
)


def _pcm(block: int) -> bytes:
    """A block of sound that says which one it is."""
    return block.to_bytes(2, "little") * 320


async def _next(session, kind: type):
    """The next event of this type; those before it are let go."""
    async with asyncio.timeout(20):
        async for event in session:
            if isinstance(event, kind):
                return event
    raise AssertionError(f"the session ended without {kind.__name__}")


async def _turned(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # the client's inside has no event for it
            await asyncio.sleep(0)


async def _rest(session) -> list:
    async with asyncio.timeout(20):
        return [event async for event in session]


@pytest.mark.parametrize("binary", [True, False])
async def test_audio_goes_up_and_a_reply_comes_down(server, binary: bool) -> None:
    async with connect(server.url, binary=binary) as session:
        await session.send_audio(_pcm(1))
        await server.until(server.sound_taken)
        await server.sound("r1", _pcm(7), 0)
        sound = await _next(session, Sound)
    assert server.sound_taken() == _pcm(1)
    assert (sound.pcm, sound.response_id, sound.start_sample, sound.rate_hz) == (_pcm(7), "r1", 0, 24000)
    assert server.paths == ["/v1/duplex?model=voice"]


async def test_the_settings_hold_before_the_first_audio(server) -> None:
    async with connect(server.url, options=Options(input_rate_hz=48_000, instructions="Be brief.")) as session:
        assert isinstance(await anext(session), SettingsUpdated)
        await session.send_audio(_pcm(1))
        await server.until(server.sound_taken)
    first, second = server.taken[:2]
    assert first["type"] == "session.update"
    assert first["session"]["omni_live"]["input_rate_hz"] == 48_000
    assert first["session"]["instructions"] == "Be brief."
    assert second["type"] == "input_audio_buffer.append"


async def test_every_input_is_numbered_and_every_output_acknowledged(server, hasty_clock) -> None:
    async with connect(server.url, clock=hasty_clock) as session:
        await session.text("Hello")
        await session.commit()
        await session.cancel("r9")
        await session.barge_in()
        await session.clear()
        await session.respond(instructions="Sing.")
        await session.ack_playback("r1", "i1", 20.0)
        for number in range(3):
            await server.say("response.output_text.delta", response_id="r1", delta=str(number))
        await server.until(lambda: server.acked == 4)  # and session.updated
        await server.until(lambda: len(server.taken) == 8)
    assert [event["input_seq"] for event in server.taken] == list(range(1, 10))
    assert [event["type"] for event in server.taken[1:]] == [
        "input.text.append",
        "input_audio_buffer.commit",
        "response.cancel",
        "barge_in",
        "input_audio_buffer.clear",
        "response.create",
        "playback.ack",
        "session.close",
    ]
    acks = [event for event in server.received if event["type"] == "session.event_ack"]
    assert len(acks) <= 4


async def test_leaving_the_block_closes_the_session_on_the_server(server) -> None:
    async with connect(server.url) as session:
        await session.close()
        events = await _rest(session)
        with pytest.raises(SessionLost, match="closed"):
            await session.send_audio(_pcm(1))
    assert isinstance(events[-1], Closed)
    assert events[-1].reason == "close_requested"
    assert [event["type"] for event in server.taken].count("session.close") == 1


async def test_a_dropped_socket_loses_no_input_and_no_output_and_repeats_none(server, hasty_clock) -> None:
    words = []

    async def listen(session) -> None:
        words.extend([event.text async for event in session if isinstance(event, Words)])

    async with connect(server.url, clock=hasty_clock) as session, asyncio.timeout(60):
        listening = asyncio.create_task(listen(session))
        for block in range(200):
            await session.send_audio(_pcm(block))
            if block % 10 == 0:
                await server.say("response.output_text.delta", response_id="r1", delta=f"{block} ")
            if block in (30, 60, 90, 120):
                await _turned(lambda: session.attached)
                session.drop_transport() if block % 60 else server.drop()
                await _turned(lambda: not session.attached)
            if block % 7 == 0:
                await asyncio.sleep(0)
        await server.until(lambda: len(server.sound_taken()) == 200 * 640)
        await server.say("response.output_text.delta", response_id="r1", delta="end")
        await server.until(lambda: server.acked == server.seq)
        assert session.counts.resumes == 4
    await listening
    assert server.sound_taken() == b"".join(_pcm(block) for block in range(200))
    assert words == [*(f"{block} " for block in range(0, 200, 10)), "end"]


async def test_what_was_said_while_away_arrives_after_the_resume(server, manual_clock) -> None:
    async with connect(server.url, clock=manual_clock, chance=lambda: 0.5) as session:
        session.drop_transport()
        detached = await _next(session, Detached)
        await server.until(lambda: server.socket is None)
        for block in range(5):
            await session.send_audio(_pcm(block))
        await server.say("response.output_text.delta", response_id="r1", delta="missed")
        assert not session.attached
        await manual_clock.advance(50)
        reattached = await _next(session, Reattached)
        assert (await _next(session, Words)).text == "missed"
        await server.until(lambda: len(server.sound_taken()) == 5 * 640)
    assert detached.why
    assert reattached.away_ms == 50
    assert reattached.attachment == 2
    assert server.paths[1] == "/v1/duplex"
    assert server.resumes[0]["resume_token"] == "token_1"
    assert server.resumes[0]["last_received_server_event_seq"] == 1
    assert server.sound_taken() == b"".join(_pcm(block) for block in range(5))


async def test_the_last_input_is_sent_again_although_nothing_after_it_shows_that_it_is_missing(
    server, hasty_clock
) -> None:
    server.forget_input_after = 2
    async with connect(server.url, clock=hasty_clock) as session:
        await session.text("Hello")
        await server.until(lambda: any(event["type"] == "input.text.append" for event in server.received))
        session.drop_transport()
        await server.until(lambda: len(server.taken) == 2)
    assert server.taken[1]["text"] == "Hello"


async def test_the_rotated_token_is_used_for_the_next_resume(server, hasty_clock) -> None:
    async with connect(server.url, clock=hasty_clock) as session:
        for _ in range(3):
            session.drop_transport()
            await _next(session, Reattached)
    assert [resume["resume_token"] for resume in server.resumes] == ["token_1", "token_2", "token_3"]


async def test_input_that_the_server_did_not_take_is_sent_again_on_the_same_socket(server) -> None:
    server.forget_input_after = 3
    async with connect(server.url) as session:
        for block in range(6):
            await session.send_audio(_pcm(block))
        await server.until(lambda: len(server.sound_taken()) == 6 * 640)
        assert session.outbound.resent > 0
        assert session.counts.drops == 0
    assert server.sound_taken() == b"".join(_pcm(block) for block in range(6))


async def test_attempts_to_come_back_are_spread_and_wait_longer_each_time(hasty_clock, server) -> None:
    server.drop_before_resumed = 6
    async with connect(server.url, clock=hasty_clock, chance=lambda: 0.3) as session:
        hasty_clock.slept.clear()
        session.drop_transport()
        await _next(session, Reattached)
    tries = [slept / 1e9 for slept in hasty_clock.slept if slept != 200_000_000]
    assert tries[:7] == pytest.approx([0.03, 0.06, 0.12, 0.24, 0.48, 0.6, 0.6])


def test_waits_are_drawn_from_a_growing_range_up_to_a_bound() -> None:
    drawn = waits(Patience(first_s=0.1, longest_s=2.0), lambda: 1.0)
    assert [next(drawn) for _ in range(7)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])


async def test_a_full_buffer_drops_the_oldest_audio_and_says_so(server, manual_clock) -> None:
    async with connect(server.url, clock=manual_clock, max_buffer_bytes=20_000) as session:
        session.drop_transport()
        await _next(session, Detached)
        for block in range(60):
            await session.send_audio(_pcm(block))
        lost = await _next(session, InputLost)
        await manual_clock.advance(2000)
        await _next(session, Reattached)
        kept = 60 - lost.nbytes // 640
        assert 0 < kept < 60
        assert session.counts.lost_bytes == lost.nbytes
        await server.until(lambda: len(server.sound_taken()) == kept * 640)
    assert server.sound_taken() == b"".join(_pcm(block) for block in range(60 - kept, 60))


async def test_while_the_socket_is_up_sending_waits_for_room_instead_of_dropping(server) -> None:
    async with connect(server.url, max_buffer_bytes=20_000) as session:
        await session.send_audio(b"".join(_pcm(block) for block in range(500)))
        await server.until(lambda: len(server.sound_taken()) == 500 * 640)
        assert session.counts.lost_bytes == 0
    assert server.sound_taken() == b"".join(_pcm(block) for block in range(500))


@pytest.mark.parametrize(
    "code",
    [
        "invalid_session_resume",
        "session_resume_expired",
        "unsupported_session_resume",
        "invalid_resume_token",
        "session_resume_conflict",
    ],
)
async def test_a_refused_resume_ends_the_session_with_its_code(server, hasty_clock, code: str) -> None:
    server.refuse_resume = code
    async with connect(server.url, clock=hasty_clock) as session:
        session.drop_transport()
        with pytest.raises(ResumeRefused, match=code) as refused:
            await _rest(session)
        assert refused.value.code == code
        with pytest.raises(ResumeRefused):
            await session.send_audio(_pcm(1))
        await session.close()
    assert len(server.resumes) == 1


async def test_a_session_is_given_up_when_the_grace_is_over(server, hasty_clock) -> None:
    server.drop_before_resumed = 1000
    async with connect(server.url, clock=hasty_clock, patience=Patience(grace_s=10)) as session:
        before = hasty_clock.now
        session.drop_transport()
        with pytest.raises(ResumeRefused, match="10 s"):
            await _rest(session)
        assert hasty_clock.now - before == pytest.approx(10e9, rel=0.05)


async def test_a_busy_server_is_asked_again_and_a_forbidding_one_is_not(server, hasty_clock) -> None:
    async with connect(server.url, clock=hasty_clock) as session:
        server.http_status = 503
        session.drop_transport()
        await _next(session, Detached)
        await _turned(lambda: len(hasty_clock.slept) >= 6)
        server.http_status = None
        await _next(session, Reattached)
        server.http_status = 401
        session.drop_transport()
        with pytest.raises(ResumeRefused, match="401"):
            await _rest(session)


async def test_a_server_that_is_going_away_is_asked_again_until_another_takes_its_place(server, hasty_clock) -> None:
    async with connect(server.url, clock=hasty_clock) as session:
        server.refuse_resume = "draining"
        session.drop_transport()
        await server.until(lambda: len(server.resumes) == 3)
        server.refuse_resume = None
        await _next(session, Reattached)


async def test_a_session_that_another_connection_took_over_is_lost(server) -> None:
    async with connect(server.url) as session:
        await server.tell("session.replaced")
        with pytest.raises(Replaced):
            await _rest(session)
    assert server.resumes == []


async def test_a_session_that_the_server_closes_ends_the_iteration(server) -> None:
    async with connect(server.url) as session:
        await server.tell("session.closed", reason="max_age")
        events = await _rest(session)
    assert events[-1].reason == "max_age"


async def test_a_server_that_resumes_nothing_is_not_asked_to(server) -> None:
    server.resumable = False
    async with connect(server.url) as session:
        session.drop_transport()
        with pytest.raises(SessionLost, match="connection_lost"):
            await _rest(session)


async def test_a_frame_that_is_no_event_ends_the_session(server) -> None:
    async with connect(server.url, binary=False) as session:
        await server.socket.send("hello")
        with pytest.raises(PeerBroke):
            await _rest(session)


async def test_an_error_leaves_the_session_open(server) -> None:
    async with connect(server.url) as session:
        event_id = await session.cancel("r9")
        error = {"code": "response_cancel_not_active", "message": "no", "event_id": event_id}
        await server.say("error", error=error)
        refusal = await _next(session, Refusal)
        await session.send_audio(_pcm(1))
        await server.until(server.sound_taken)
    assert (refusal.code, refusal.event_id) == ("response_cancel_not_active", event_id)


async def test_a_refused_opening_says_why(server) -> None:
    server.refuse_open = "overloaded"
    with pytest.raises(Refused, match="overloaded"):
        async with connect(server.url):
            raise AssertionError("opened")


@pytest.mark.parametrize(("status", "code"), [(401, "invalid_api_key"), (503, "overloaded"), (404, "not_found")])
async def test_an_http_answer_is_a_refusal(server, status: int, code: str) -> None:
    server.http_status = status
    with pytest.raises(Refused) as refused:
        async with connect(server.url):
            raise AssertionError("opened")
    assert refused.value.code == code


async def test_no_server_and_no_address_are_told_apart_from_bugs() -> None:
    with sockets.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        for url in (f"ws://127.0.0.1:{port}/v1/duplex", "http:/nowhere", "ws://"):
            with pytest.raises(ConnectFailed):
                async with connect(url):
                    raise AssertionError("opened")


async def test_refused_settings_are_raised_before_anything_is_said(server) -> None:
    async def refuse(event: dict) -> None:
        error = {"code": "invalid_value", "message": "no such voice", "event_id": event["event_id"]}
        await server.tell("error", error=error)

    server._react = refuse
    with pytest.raises(Refused, match="no such voice"):
        async with connect(server.url, options=Options(voice="nobody")):
            raise AssertionError("opened")


async def test_frames_of_several_megabytes_pass_both_ways(server) -> None:
    big = bytes(3_000_000)
    async with connect(server.url, binary=True) as session:
        await session.send_audio(big)
        await server.sound("r1", big, 0)
        sound = await _next(session, Sound)
        await server.until(lambda: len(server.sound_taken()) == len(big))
    assert sound.pcm == big
    assert max(len(event["audio"]) for event in server.taken if "audio" in event) <= 32 * 1024


async def test_pieces_of_one_long_event_are_not_heard_twice_after_a_drop_between_them(server, hasty_clock) -> None:
    first = {"response_id": "r1", "item_id": "i", "delta": _pcm(1), "metadata": {"start_sample": 0}}
    async with connect(server.url, clock=hasty_clock) as session:
        await server.tell("response.output_audio.delta", **first)
        sounds = [await _next(session, Sound)]
        session.drop_transport()
        await _next(session, Reattached)
        await server.tell("response.output_audio.delta", **first)
        await server.sound("r1", _pcm(2), 320)
        sounds.append(await _next(session, Sound))
    assert [sound.start_sample for sound in sounds] == [0, 320]


async def test_an_exception_of_the_application_comes_out_as_it_is(server) -> None:
    with pytest.raises(ZeroDivisionError):
        async with connect(server.url):
            raise ZeroDivisionError
    await server.until(lambda: server.socket is None)
    assert server.taken[-1]["type"] == "session.close"


async def test_a_cancelled_application_is_done_at_once(server) -> None:
    async def talk() -> None:
        async with connect(server.url):
            await asyncio.get_running_loop().create_future()

    talking = asyncio.create_task(talk())
    await server.until(lambda: server.taken)
    talking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await talking
    await server.until(lambda: server.socket is None)


async def test_a_server_that_does_not_answer_a_close_is_left(server, monkeypatch) -> None:
    monkeypatch.setattr("omni_live.clients.duplex.CLOSE_WITHIN_S", 0.01)
    server.close_answered = False
    async with connect(server.url) as session:
        pass
    await server.until(lambda: server.socket is None)
    assert session.counts.drops == 0


async def test_an_application_that_does_not_listen_stops_the_reading_not_the_memory(server) -> None:
    async with connect(server.url) as session:
        for _ in range(1500):
            await server.say("response.output_text.delta", response_id="r1", delta="word")
        await server.until(lambda: server.acked >= 1000)
        assert len(session._events) <= 1024
        for _ in range(1500):
            await _next(session, Words)


async def test_half_a_sample_is_the_callers_mistake(server) -> None:
    async with connect(server.url) as session:
        with pytest.raises(ValueError, match="whole"):
            await session.send_audio(b"\0")


async def test_the_key_goes_into_the_header_and_not_into_the_address(server) -> None:
    async with connect(server.url, api_key="secret"):
        assert server.socket.request.headers["Authorization"] == "Bearer secret"
    assert "secret" not in "".join(server.paths)


def test_the_query_of_an_address_is_kept_and_the_model_is_the_callers() -> None:
    assert with_query("ws://h/v1/duplex?a=1&model=x", model="voice") == "ws://h/v1/duplex?a=1&model=voice"
    assert with_query("ws://h/v1/duplex?a=1&model=x") == "ws://h/v1/duplex?a=1"
