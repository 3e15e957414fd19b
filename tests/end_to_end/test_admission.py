"""G2 and G3: exactly the cap is admitted, the others wait or are refused in time, and each close makes room for one."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from .caller import dialled, session
from .served import Served
from .warm import warm_server

CAP = 3
WAIT_S = 1.0
DEPLOY = f"""
limits: {{max_sessions: {CAP}, wait_queue: 1, wait_deadline_s: {WAIT_S}}}
pipelines: {{voice: }}
"""
PROMPT_S = 0.25
"""What a refusal may take beyond its deadline, on a machine that does other things as well."""


@pytest.fixture(scope="module")
def capped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with warm_server(tmp_path_factory.mktemp("capped"), DEPLOY) as server:
        yield server


@pytest.fixture
def voice(capped: Served) -> Iterator[Served]:
    yield capped
    capped.assert_at_rest()


async def refused(port: int) -> tuple[InvalidStatus, float]:
    """The refusal of an open, and after how long it came."""
    began = time.monotonic()
    with pytest.raises(InvalidStatus) as caught:
        async with dialled(port):
            pass
    return caught.value, time.monotonic() - began


def assert_overloaded(refusal: InvalidStatus) -> None:
    assert refusal.response.status_code == 503
    assert b'"overloaded"' in refusal.response.body
    assert int(refusal.response.headers["retry-after"]) >= 1


async def waiting(voice: Served) -> None:
    """Returns once somebody waits for admission."""
    while not await asyncio.to_thread(voice.metric, "omni_live_admission_waiting"):
        await asyncio.sleep(0.01)


async def test_G2_the_cap_is_reached_one_waits_and_the_rest_is_refused_at_once(
    voice: Served, record_property: Any
) -> None:
    async with session(voice.port), session(voice.port), session(voice.port):
        assert voice.metric("omni_live_slots_taken") == CAP
        queued = asyncio.create_task(refused(voice.port))
        await waiting(voice)
        refusals = await asyncio.gather(*(refused(voice.port) for _ in range(5)))
        for refusal, after_s in refusals:
            assert_overloaded(refusal)
            assert after_s < PROMPT_S
        late, after_s = await queued
        assert_overloaded(late)
        record_property("refused_at_once_ms", round(1000 * max(after_s for _, after_s in refusals), 1))
        record_property("past_the_deadline_ms", round(1000 * (after_s - WAIT_S), 1))
        assert WAIT_S <= after_s < WAIT_S + PROMPT_S
        assert voice.metric("omni_live_slots_taken") == CAP


async def test_G2_whoever_waits_gets_the_place_of_a_session_that_closes(voice: Served) -> None:
    async with session(voice.port), session(voice.port):
        async with session(voice.port) as leaving:
            entering = asyncio.create_task(_answered(voice.port))
            await waiting(voice)
            await leaving.close()
        assert await entering
        assert not voice.metric("omni_live_admission_waiting")


async def _answered(port: int) -> bool:
    async with session(port) as caller:
        response = await caller.ask("Hello.")
        return bool(caller.audio(response["id"]))


async def test_G3_somebody_who_waits_and_goes_away_leaves_the_queue(voice: Served) -> None:
    async with session(voice.port), session(voice.port), session(voice.port):
        gone = asyncio.create_task(refused(voice.port))
        await waiting(voice)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        while await asyncio.to_thread(voice.metric, "omni_live_admission_waiting"):
            await asyncio.sleep(0.01)


async def test_G2_G3_opens_and_closes_that_race_never_pass_the_cap_nor_lose_a_place(voice: Served) -> None:
    admitted = refusals = most = now = 0

    async def come_and_go(number: int) -> None:
        nonlocal admitted, refusals, most, now
        for turn in range(12):
            try:
                async with dialled(voice.port) as caller:
                    await caller.wait("session.created")
                    admitted, now = admitted + 1, now + 1
                    most = max(most, now)
                    await caller.send("session.heartbeat")
                    await caller.wait("session.heartbeat_ack")
                    now -= 1  # before the server can know of the close: it never holds fewer than are counted here
                    if (number + turn) % 3:
                        await caller.close()
                    else:
                        await caller.send("session.close")  # and gone, without waiting for the word
            except InvalidStatus as refusal:
                assert_overloaded(refusal)
                refusals += 1

    await asyncio.gather(*(come_and_go(number) for number in range(6)))
    assert admitted + refusals == 72
    assert admitted >= 12
    assert most == CAP
    # and the places are all there
    async with session(voice.port), session(voice.port), session(voice.port) as last:
        assert voice.metric("omni_live_slots_taken") == CAP
        assert (await last.ask("Hello."))["status"] in ("completed", "incomplete")
