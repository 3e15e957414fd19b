"""The user at a session, on a clock that does not wait."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import numpy as np
import pytest

from omni_live.bench.caller import BLOCK, Caller, Saying, Silent, calling
from omni_live.bench.wavs import RATE_HZ
from omni_live.clients.clock import MS
from omni_live.clients.duplex import Options, Session
from omni_live.clients.duplex_events import Event, ReplyEnded, ReplyStarted, Sound


class HastyClock:
    """Does not wait: whoever sleeps is at once as late as it wanted to be."""

    def __init__(self) -> None:
        self.now = 1_000_000_000

    def now_ns(self) -> int:
        return self.now

    async def sleep_until_ns(self, at_ns: int) -> None:
        self.now = max(self.now, at_ns)
        await asyncio.sleep(0)


class FakeSession:
    """Keeps what it is told; `answer` sees each block and may put events."""

    def __init__(self) -> None:
        self.options = Options()
        self.heard: list[np.ndarray] = []
        self.played: list[tuple[str, float]] = []
        self.events: asyncio.Queue[Event | None] = asyncio.Queue()
        self.answer: Callable[[np.ndarray], None] = lambda _: None

    async def send_audio(self, pcm: bytes) -> None:
        block = np.frombuffer(pcm, "<i2")
        self.heard.append(block)
        self.answer(block)

    async def ack_playback(self, response_id: str, item_id: str, played_ms: float) -> str:
        self.played.append((response_id, played_ms))
        return "event_1"

    def drop_transport(self) -> None:
        """Nothing to drop."""

    async def __anext__(self) -> Event:
        event = await self.events.get()
        if event is None:
            raise StopAsyncIteration
        return event


@asynccontextmanager
async def at(session: FakeSession, clock: HastyClock) -> AsyncIterator[Caller]:
    async with calling(cast("Session", session), clock) as caller:
        yield caller


def sound(at_ns: int, samples: int, start: int, value: int = 1000) -> Sound:
    pcm = np.full(samples, value, "<i2").tobytes()
    return Sound(at_ns=at_ns, response_id="r1", item_id="i1", pcm=pcm, rate_hz=24_000, start_sample=start)


async def test_the_microphone_sends_what_is_said_and_silence_around_it() -> None:
    session, clock = FakeSession(), HastyClock()
    said = np.arange(1, 2 * BLOCK + 101, dtype=np.int16)
    async with at(session, clock) as caller:
        await caller.pause(0.1)
        saying = caller.say(said)
        await caller.finished(saying)
        await caller.pause(0.1)
    whole = np.concatenate(session.heard)
    begins = int(np.flatnonzero(whole)[0])
    assert np.array_equal(whole[begins : begins + len(said)], said)
    assert not whole[:begins].any()
    assert not whole[begins + len(said) :].any()
    assert all(len(block) == BLOCK for block in session.heard)


async def test_a_sample_s_time_is_the_microphone_s_and_its_block_goes_out_when_it_is_full() -> None:
    session, clock = FakeSession(), HastyClock()
    async with at(session, clock) as caller:
        saying = caller.say(np.ones(3 * BLOCK, np.int16))
        await caller.finished(saying)
        began = saying.begun_ns
        assert began is not None
        assert saying.passed_ns(BLOCK + 16) == began + 21 * MS
        assert saying.sent_ns(BLOCK + 16) == began + 40 * MS


def test_what_has_not_begun_has_no_time() -> None:
    with pytest.raises(Silent):
        Saying(np.zeros(1, np.int16)).passed_ns(0)


async def test_two_things_said_follow_one_another() -> None:
    session, clock = FakeSession(), HastyClock()
    async with at(session, clock) as caller:
        first, second = caller.say(np.ones(BLOCK, np.int16)), caller.say(np.full(BLOCK, 2, np.int16))
        await caller.finished(second)
    assert first.begun_ns is not None
    assert second.begun_ns == first.begun_ns + 20 * MS


async def test_waiting_ends_with_what_was_waited_for() -> None:
    session, clock = FakeSession(), HastyClock()
    async with at(session, clock) as caller:
        await session.events.put(ReplyStarted(at_ns=5, response_id="r1"))
        assert await caller.reply(0) == "r1"
        await session.events.put(ReplyEnded(at_ns=6, response_id="r1", status="completed", reason=""))
        assert (await caller.end("r1")).status == "completed"
        assert caller.ended("r2") is None


async def test_waiting_gives_up_and_says_what_did_not_come() -> None:
    async with at(FakeSession(), HastyClock()) as caller:
        with pytest.raises(Silent, match="a reply did not come within 2 s"):
            await caller.reply(0, within_s=2.0)


async def test_waiting_ends_when_the_session_does() -> None:
    session = FakeSession()
    async with at(session, HastyClock()) as caller:
        await session.events.put(None)
        with pytest.raises(Silent, match="the session ended"):
            await caller.reply(0)


async def test_a_reply_s_content_is_its_end_where_it_has_none() -> None:
    session, clock = FakeSession(), HastyClock()
    async with at(session, clock) as caller:
        await session.events.put(ReplyEnded(at_ns=9, response_id="r1", status="failed", reason=""))
        assert await caller.content("r1") == 9


async def test_replies_are_played_and_acknowledged() -> None:
    session, clock = FakeSession(), HastyClock()
    async with at(session, clock) as caller:
        await session.events.put(sound(clock.now, 24_000, 0))
        await session.events.put(ReplyEnded(at_ns=clock.now, response_id="r1", status="completed", reason=""))
        await caller.pause(2.0)
    assert session.played[-1] == ("r1", pytest.approx(1000.0))


async def test_the_echo_is_what_is_played_turned_down() -> None:
    session, clock = FakeSession(), HastyClock()
    async with at(session, clock) as caller:
        caller.echo_gain = 0.1
        await session.events.put(sound(clock.now, 24_000, 0, value=1000))
        await session.events.put(ReplyEnded(at_ns=clock.now, response_id="r1", status="completed", reason=""))
        await caller.pause(2.0)
        caller.echo_gain = 0.0
        await caller.pause(0.2)
    whole = np.concatenate(session.heard)
    assert np.count_nonzero(whole == 100) == pytest.approx(RATE_HZ, abs=BLOCK)
    assert not whole[-2 * BLOCK :].any()
