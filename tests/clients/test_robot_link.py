"""The robot's line over real sockets: contracts, late answers, lost sockets, refusals, servers that are not ours."""

import asyncio
import socket as sockets
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from omni_live.clients.duplex import Patience
from omni_live.clients.robot_link import (
    ConnectFailed,
    ContractMismatch,
    Overloaded,
    Policy,
    PolicyError,
    SessionLost,
    TimedOut,
    connect,
)
from omni_live.protocols.openpi import codec
from omni_live.protocols.openpi.tabletop import CONTRACT

from .policy_server import No, PolicyServer, policy_server

QUICK = Patience(open_s=5, grace_s=20, first_s=0.001, longest_s=0.01)


@pytest.fixture
async def server() -> AsyncIterator[PolicyServer]:
    async with policy_server() as running:
        yield running


def _seen(mark: float = 0.5) -> dict[str, object]:
    return {
        "observation/image": np.full((64, 64, 3), 7, np.uint8),
        "observation/state": np.array([mark, 0.0]),
        "prompt": "push the red disc to the left zone",
    }


def _chunk(mark: float) -> np.ndarray:
    return np.full((16, 2), mark, np.float32)


async def _turned(true) -> None:
    async with asyncio.timeout(20):
        while not true():  # the client's inside has no event for it
            await asyncio.sleep(0)


# -- contracts


async def test_a_robot_gets_a_chunk_and_what_the_server_says_of_it(server: PolicyServer) -> None:
    server.timing |= {"continued": True, "deadline_missed": False, "batch": 3}
    async with connect(server.url, CONTRACT, session_id="arm-1", api_key="k") as policy:
        chunk = await policy.infer(_seen(), seed=5, deterministic=True, deadline_ms=80, latest=True)
    assert chunk.actions.dtype == np.float32
    assert (chunk.actions == 0.25).all() and chunk.actions.shape == (16, 2)
    assert (chunk.timing.infer_ms, chunk.timing.batch, chunk.timing.continued) == (1.5, 3, True)
    assert chunk.rtt_ms > 0
    asked = server.requests[0]
    assert (asked.session, asked.seed, asked.deterministic, asked.deadline_ms, asked.latest) == (
        "arm-1",
        5,
        True,
        80,
        True,
    )
    assert asked.observation["observation/state"].dtype == np.float32
    assert server.headers == ["Api-Key k"]


async def test_a_policy_for_another_robot_is_refused_before_anything_is_asked(server: PolicyServer) -> None:
    robot = replace(CONTRACT, embodiment="arm", action_dim=7)
    with pytest.raises(ContractMismatch) as refused:
        async with connect(server.url, robot):
            raise AssertionError
    assert [difference.split(":")[0] for difference in refused.value.differences] == ["embodiment", "action_dim"]
    assert not server.frames


async def test_a_robot_that_states_nothing_takes_the_servers_contract(server: PolicyServer) -> None:
    async with connect(server.url, None) as policy:
        assert policy.contract == CONTRACT
        assert policy.is_stated


@pytest.mark.parametrize("metadata", [[], 5, {"embodiment": "x", "action_horizon": 0, "observation": {}}])
async def test_a_server_that_makes_no_sense_is_refused(server: PolicyServer, metadata: object) -> None:
    server.metadata = metadata
    with pytest.raises(ConnectFailed):
        async with connect(server.url, CONTRACT):
            raise AssertionError


async def test_a_robot_without_a_contract_needs_a_server_with_one(server: PolicyServer) -> None:
    server.metadata = {}
    with pytest.raises(ConnectFailed, match="no_contract"):
        async with connect(server.url, None):
            raise AssertionError


async def test_what_the_robot_sees_is_checked_before_it_goes_out(server: PolicyServer) -> None:
    async with connect(server.url, CONTRACT) as policy:
        for wrong in ({"observation/state": [np.nan, 0]}, {"observation/image": np.zeros((3, 64, 64), np.uint8)}):
            with pytest.raises(PolicyError, match="bad_observation"):
                await policy.infer(_seen() | wrong)
    assert not server.frames


async def test_images_go_out_as_jpeg_where_that_is_asked_for(server: PolicyServer) -> None:
    async with connect(server.url, CONTRACT, jpeg=True) as policy:
        await policy.infer(_seen())
    assert len(server.frames[0]) < 64 * 64 * 3 / 4
    assert np.abs(server.requests[0].observation["observation/image"].astype(int) - 7).max() < 5


# -- answers


async def test_an_answer_that_comes_after_its_time_is_not_taken_for_the_next(server: PolicyServer) -> None:
    late = asyncio.Event()

    async def policy_of(asked) -> np.ndarray:
        mark = float(asked.observation["observation/state"][0])
        if mark == 1:
            await late.wait()
        return _chunk(mark / 10)

    server.policy = policy_of
    async with connect(server.url, CONTRACT, timeout_s=0.2) as policy:
        with pytest.raises(TimedOut):
            await policy.infer(_seen(1))
        late.set()
        chunk = await policy.infer(_seen(2))
        assert chunk.actions[0, 0] == np.float32(0.2)
        await _turned(lambda: policy.counts.stale == 1)
        assert policy.counts.drops == 0


async def test_answers_may_come_in_any_order(server: PolicyServer) -> None:
    second = asyncio.Event()

    async def policy_of(asked) -> np.ndarray:
        mark = float(asked.observation["observation/state"][0])
        await second.wait() if mark == 1 else second.set()
        return _chunk(mark / 10)

    server.policy = policy_of
    async with connect(server.url, CONTRACT) as policy:
        chunks = await asyncio.gather(policy.infer(_seen(1)), policy.infer(_seen(2)))
    assert [float(chunk.actions[0, 0]) for chunk in chunks] == pytest.approx([0.1, 0.2])


async def test_a_reset_voids_what_is_asked_and_clears_the_session(server: PolicyServer) -> None:
    server.policy = lambda _: None
    async with connect(server.url, CONTRACT, session_id="arm-1") as policy:
        asking = asyncio.create_task(policy.infer(_seen()))
        await server.until(lambda: server.requests)
        await policy.reset()
        with pytest.raises(PolicyError) as failed:
            await asking
        assert failed.value.code == "reset"
    assert [reset.sessions for reset in server.resets] == [("arm-1",)]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("overloaded", Overloaded),
        ("draining", Overloaded),
        ("session_expired", SessionLost),
        ("session_replaced", SessionLost),
        ("action_not_finite", PolicyError),
    ],
)
async def test_a_refusal_says_what_it_means(server: PolicyServer, code: str, kind: type) -> None:
    server.policy = lambda _: No(code, "because")
    async with connect(server.url, CONTRACT) as policy:
        with pytest.raises(kind, match=f"{code}: because"):
            await policy.infer(_seen())
        server.policy = lambda _: _chunk(0)
        await policy.infer(_seen())


async def test_a_server_that_could_not_read_a_request_fails_it(server: PolicyServer) -> None:
    server.policy = lambda _: "bad_frame: The frame ends before its message does."
    async with connect(server.url, CONTRACT) as policy:
        with pytest.raises(PolicyError, match="bad_frame: The frame ends"):
            await policy.infer(_seen())


# -- the socket


async def test_a_request_whose_socket_drops_is_made_again_in_the_same_session(server: PolicyServer) -> None:
    server.policy = lambda _: server.sockets[-1].transport.abort() if len(server.requests) == 1 else _chunk(0.5)
    async with connect(server.url, CONTRACT, patience=QUICK) as policy:
        chunk = await policy.infer(_seen(), executed_steps=4, delay_steps=2, seed=9)
        assert chunk.actions[0, 0] == np.float32(0.5)
        assert (policy.counts.drops, policy.counts.resumes, policy.counts.asked_again) == (1, 1, 1)
    first, second = server.requests
    assert (first.session, first.seed) == (second.session, second.seed) == (policy.session_id, 9)
    assert (first.executed_steps, first.delay_steps) == (4, 2)
    assert (second.executed_steps, second.delay_steps) == (None, None)  # the chunk they meant may never have come


async def test_what_was_asked_before_a_reset_is_not_asked_again_after_a_dropped_socket(server: PolicyServer) -> None:
    server.policy = lambda _: None
    async with connect(server.url, CONTRACT, patience=QUICK) as policy:
        asking = asyncio.create_task(policy.infer(_seen()))
        await server.until(lambda: server.requests)
        server.http_status = 503
        policy.drop_transport()
        await _turned(lambda: policy.counts.asked_again == 1)
        resetting = asyncio.create_task(policy.reset())
        await asyncio.sleep(0)
        server.http_status = None
        await resetting
        with pytest.raises(PolicyError, match="reset"):
            await asking
    assert len(server.requests) == 1


async def test_a_line_that_drops_while_nothing_is_asked_comes_back(server: PolicyServer) -> None:
    async with connect(server.url, CONTRACT, patience=QUICK) as policy:
        policy.drop_transport()
        await server.until(lambda: len(server.sockets) == 2)
        await policy.infer(_seen())
    assert policy.counts.resumes == 1


async def test_a_reset_waits_for_the_line_longer_than_a_chunk_is_worth_anything(server: PolicyServer) -> None:
    async with connect(server.url, CONTRACT, patience=QUICK, timeout_s=0.2) as policy:
        server.http_status = 503
        policy.drop_transport()
        resetting = asyncio.create_task(policy.reset())
        await _turned(lambda: not policy.is_attached)
        with pytest.raises(TimedOut, match="the line is down"):
            await policy.infer(_seen())
        assert not resetting.done()
        server.http_status = None
        await resetting
    assert len(server.resets) == 1


async def test_a_server_that_comes_back_with_another_policy_is_refused(server: PolicyServer) -> None:
    async with connect(server.url, CONTRACT, patience=QUICK) as policy:
        server.metadata = replace(CONTRACT, action_dim=7).metadata()
        policy.drop_transport()
        with pytest.raises(ContractMismatch):
            await policy.infer(_seen())


async def test_a_server_that_stays_away_ends_the_line(hasty_clock) -> None:
    async with policy_server() as server:
        patience = Patience(grace_s=1)
        line = connect(server.url, CONTRACT, patience=patience, clock=hasty_clock, chance=lambda: 0.5)
        policy = await line.__aenter__()
        server.http_status = 503
        policy.drop_transport()
        with pytest.raises(SessionLost) as lost:
            await policy.infer(_seen())
        assert lost.value.code == "connection_lost"
        await line.__aexit__(None, None, None)


async def test_a_full_server_says_so_with_its_close_code(server: PolicyServer) -> None:
    server.close_at_once = 1013
    with pytest.raises(Overloaded):
        async with connect(server.url, CONTRACT):
            raise AssertionError


async def test_a_socket_closed_as_overloaded_fails_what_was_asked_on_it(server: PolicyServer) -> None:
    async def full(_) -> None:
        await server.sockets[-1].close(1013, "overloaded")

    server.policy = full
    async with connect(server.url, CONTRACT, patience=QUICK) as policy:
        with pytest.raises(Overloaded):
            await policy.infer(_seen())


@pytest.mark.parametrize(("status", "kind"), [(401, ConnectFailed), (404, ConnectFailed), (503, Overloaded)])
async def test_an_http_answer_is_told_as_what_it_means(server: PolicyServer, status: int, kind: type) -> None:
    server.http_status = status
    with pytest.raises(kind) as refused:
        async with connect(server.url, CONTRACT):
            raise AssertionError
    if isinstance(refused.value, Overloaded):
        assert refused.value.retry_after_s == 3


async def test_no_server_is_said_in_a_sentence() -> None:
    with sockets.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConnectFailed, match="connect_failed: no policy at"):
        async with connect(f"ws://127.0.0.1:{port}", CONTRACT):
            raise AssertionError


async def test_leaving_the_block_says_goodbye_and_its_own_error_comes_out_bare(server: PolicyServer) -> None:
    async def leave() -> Policy:
        async with connect(server.url, CONTRACT) as policy:
            raise LookupError("mine")
        return policy

    with pytest.raises(LookupError, match="mine"):
        await leave()
    await server.until(lambda: server.sockets[0].close_code == 1000)


async def test_a_line_that_was_left_asks_for_nothing_any_more(server: PolicyServer) -> None:
    async with connect(server.url, CONTRACT) as policy:
        await policy.infer(_seen())
    with pytest.raises(SessionLost, match="session_closed"):
        await policy.infer(_seen())


# -- OpenPI's own server


async def test_a_server_without_a_contract_serves_the_robot_that_has_one(server: PolicyServer, caplog) -> None:
    server.metadata, server.plain = {}, True
    async with connect(server.url, CONTRACT) as policy:
        assert not policy.is_stated
        assert policy.contract == CONTRACT
        await policy.reset()
        chunk = await policy.infer(_seen(), seed=3, executed_steps=2)
    assert chunk.actions.shape == (16, 2)
    assert set(codec.unpack(server.frames[0])) == {"observation/image", "observation/state", "prompt"}
    assert "contract_not_stated" in caplog.text


async def test_without_ids_an_error_is_that_of_the_one_request_under_way(server: PolicyServer) -> None:
    server.metadata, server.plain = {}, True
    server.policy = lambda _: "no" if len(server.requests) == 1 else _chunk(0.5)
    async with connect(server.url, CONTRACT) as policy:
        first, second = await asyncio.gather(policy.infer(_seen()), policy.infer(_seen()), return_exceptions=True)
    assert isinstance(first, PolicyError)
    assert not isinstance(second, BaseException)


async def test_a_bare_array_is_a_chunk(server: PolicyServer) -> None:
    server.metadata, server.plain = {}, True
    server.policy = lambda _: codec.pack(np.ones((8, 2)))
    async with connect(server.url, CONTRACT) as policy:
        assert (await policy.infer(_seen())).actions.shape == (8, 2)


async def test_without_ids_a_late_answer_costs_the_socket_and_is_not_taken_either(server: PolicyServer) -> None:
    late = asyncio.Event()

    async def policy_of(asked) -> np.ndarray:
        if len(server.requests) == 1:
            await late.wait()
        return _chunk(float(asked.observation["observation/state"][0]) / 10)

    server.metadata, server.plain, server.policy = {}, True, policy_of
    async with connect(server.url, CONTRACT, timeout_s=0.2, patience=QUICK) as policy:
        with pytest.raises(TimedOut):
            await policy.infer(_seen(1))
        late.set()
        assert (await policy.infer(_seen(2))).actions[0, 0] == np.float32(0.2)
        assert policy.counts.drops == 1


@pytest.mark.parametrize("how", ["reset", "cancel"])
async def test_without_ids_an_answer_that_nobody_waits_for_any_more_is_not_taken_for_the_next(
    server: PolicyServer, how: str
) -> None:
    late = asyncio.Event()

    async def policy_of(asked) -> np.ndarray:
        if len(server.requests) == 1:
            await late.wait()
        return _chunk(float(asked.observation["observation/state"][0]) / 10)

    server.metadata, server.plain, server.policy = {}, True, policy_of
    async with connect(server.url, CONTRACT, patience=QUICK) as policy:
        asking = asyncio.create_task(policy.infer(_seen(1)))
        await server.until(lambda: server.requests)
        if how == "reset":
            await policy.reset()
        else:
            asking.cancel()
        await asyncio.wait({asking})
        late.set()
        assert (await policy.infer(_seen(2))).actions[0, 0] == np.float32(0.2)


async def test_of_a_traceback_the_last_line_is_told(server: PolicyServer) -> None:
    server.metadata, server.plain = {}, True
    server.policy = lambda _: "Traceback (most recent call last):\n  File \"/a/b.py\", line 3\nKeyError: 'state'\n"
    async with connect(server.url, CONTRACT) as policy:
        with pytest.raises(PolicyError) as failed:
            await policy.infer(_seen())
    assert str(failed.value) == "server_error: KeyError: 'state'"


async def test_vllm_omnis_error_is_told(server: PolicyServer) -> None:
    server.metadata, server.plain = {}, True
    server.policy = lambda _: codec.pack({"type": "error", "message": "no model"})
    async with connect(server.url, CONTRACT) as policy:
        with pytest.raises(PolicyError, match="server_error: no model"):
            await policy.infer(_seen())


@pytest.mark.parametrize("frame", [b"\xc1", codec.pack([]), codec.pack({"actions": 5}), codec.pack({"x": 1})])
async def test_an_answer_nobody_can_read_fails_the_request_and_costs_the_socket(
    server: PolicyServer, frame: bytes
) -> None:
    server.policy = lambda _: frame
    async with connect(server.url, CONTRACT, patience=QUICK) as policy:
        with pytest.raises(PolicyError, match=r"bad_(reply|frame)"):
            await policy.infer(_seen())
        server.policy = lambda _: _chunk(0)
        await policy.infer(_seen())
    assert policy.counts.drops == 1
