"""Rollouts from a client's side, through a fake door that loses sockets in awkward moments."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from omni_live.clients.duplex import Patience
from omni_live.clients.world import Link, World, connect
from omni_live.clients.world_errors import (
    ConnectFailed,
    ConnectionLost,
    Interrupted,
    Refused,
    RequestFailed,
    SessionLost,
    TimedOut,
    Unrepeatable,
    WorldError,
)

from .conftest import HastyClock, ManualClock
from .fake_world import FakeDoor, FakeSession, fake_door, undisturbed

ACTIONS = np.random.default_rng(0).uniform(-1, 1, (24, 2, 2)).astype(np.float32)


@pytest.fixture
async def door() -> AsyncIterator[FakeDoor]:
    async with fake_door() as running:
        yield running


@pytest.fixture
async def link(door: FakeDoor) -> AsyncIterator[Link]:
    async with connect(door.url, clock=HastyClock(), timeout_s=20) as found:
        yield found


@pytest.fixture
async def world(link: Link) -> World:
    return await link.open(seed=3)


def shown(frames: list[Any]) -> list[bytes]:
    return [frame.image.tobytes() for frame in frames]


def of(door: FakeDoor, world: World) -> FakeSession:
    return door.sessions[world.session_id]


# -- an undisturbed line


async def test_a_step_brings_its_frames_in_order(world: World) -> None:
    frames = await world.step(ACTIONS[:5])
    assert [frame.step for frame in frames] == [1, 2, 3, 4, 5]
    assert shown(frames) == undisturbed(3, ACTIONS[:5])
    assert world.position == 5


async def test_one_action_makes_one_frame(world: World) -> None:
    (frame,) = await world.step(ACTIONS[0])
    assert frame.image is not None
    assert frame.image.shape == (4, 4, 3)
    assert frame.latent is None


async def test_frames_are_iterated_as_they_come(door: FakeDoor, world: World) -> None:
    door.pause_after = 2
    steps = []
    async for frame in world.step(ACTIONS[:4]):
        steps.append(frame.step)
        if frame.step == 2:
            door.go.set()  # only now is the third one made
    assert steps == [1, 2, 3, 4]


async def test_frames_and_latents_of_a_step_come_together(world: World) -> None:
    frames = await world.step(ACTIONS[:3], outputs=("frame", "latent"))
    assert shown(frames) == undisturbed(3, ACTIONS[:3])
    assert [float(frame.latent[0, 0, 0]) for frame in frames if frame.latent is not None] == [1, 2, 3]


async def test_steps_that_are_asked_together_are_numbered_one_after_the_other(door: FakeDoor, world: World) -> None:
    first, second = await asyncio.gather(world.step(ACTIONS[:4]), world.step(ACTIONS[4:8]))
    assert shown(first) + shown(second) == undisturbed(3, ACTIONS[:8])
    assert [message["step"] for message in door.asked("step")] == [1, 5]


async def test_a_look_shows_frames_again(world: World) -> None:
    frames = await world.step(ACTIONS[:6])
    assert shown(await world.look(2, 3)) == shown(frames[1:4])
    assert shown(await world.look()) == shown(frames[-1:])


async def test_rewind_reset_snapshot_and_restore_move_the_rollout(world: World, link: Link) -> None:
    frames = await world.step(ACTIONS[:6])
    blob = await world.snapshot()
    await world.rewind(2)
    assert world.position == 2
    assert shown(await world.step(ACTIONS[2:6])) == shown(frames[2:])
    await world.reset(seed=4)
    assert shown(await world.step(ACTIONS[:2])) == undisturbed(4, ACTIONS[:2])
    other = await link.open(seed=9)
    await other.restore(blob)
    assert other.position == 6
    assert shown(await other.step(ACTIONS[6:8])) == undisturbed(3, ACTIONS[:8])[6:]


async def test_forks_go_on_by_themselves(world: World) -> None:
    await world.step(ACTIONS[:4])
    (early,) = await world.fork(step=2)
    children = await world.fork(count=3)
    assert (early.position, early.forked_from) == (2, world.session_id)
    assert shown(await early.step(ACTIONS[2:4])) == undisturbed(3, ACTIONS[:4])[2:]
    found = await asyncio.gather(*(child.step(ACTIONS[4:6]) for child in children))
    assert all(shown(frames) == undisturbed(3, ACTIONS[:6])[4:] for frames in found)


async def test_sessions_are_closed_with_the_link(door: FakeDoor) -> None:
    async with connect(door.url) as link:
        world = await link.open()
        await world.fork(count=2)
        assert len(door.sessions) == 3
        await world.close()
        assert len(door.sessions) == 2
    await door.until(lambda: not door.sessions)


@pytest.mark.parametrize("again", [False, True])
async def test_whoever_leaves_while_the_line_is_down_closes_the_sessions_all_the_same(
    door: FakeDoor, again: bool
) -> None:
    async with connect(door.url, clock=HastyClock()) as link:
        await link.open()
        await link.open()
        if again:
            door.lose("session.close", "before")
        link.drop_transport()
    await door.until(lambda: not door.sessions)
    assert link.counts.resumes == 1 + again


async def test_a_closed_rollout_says_so(world: World) -> None:
    await world.close()
    await world.close()
    with pytest.raises(SessionLost, match="close_requested"):
        await world.step(ACTIONS[:1])


async def test_what_the_block_raises_comes_out_as_it_is(door: FakeDoor) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with connect(door.url):
            raise KeyError("mine")


# -- memory


async def test_credits_come_back_as_frames_are_taken_and_not_before(door: FakeDoor, link: Link) -> None:
    world = await link.open(seed=3, ahead=4)
    session = of(door, world)
    taken = 0
    async for _ in world.step(ACTIONS):
        if taken == 0:
            await door.until(lambda: session.credits == 0)
            assert sum(message["frames"] for message in door.asked("credit")) == 0
        taken += 1
    assert taken == len(ACTIONS)
    assert sum(message["frames"] for message in door.asked("credit")) >= len(ACTIONS) - 4


async def test_a_look_in_the_middle_of_an_iteration_is_not_waited_for_in_vain(link: Link) -> None:
    world = await link.open(seed=3, ahead=4)
    frames = []
    async for frame in world.step(ACTIONS):
        frames.append(frame)
        if frame.step == 2:
            assert shown(await world.look(1)) == undisturbed(3, ACTIONS[:1])
    assert shown(frames) == undisturbed(3, ACTIONS)


async def test_a_look_behind_frames_that_came_and_were_not_taken_is_not_waited_for_in_vain(
    door: FakeDoor, link: Link
) -> None:
    world = await link.open(seed=3, ahead=4)
    frames = world.step(ACTIONS[:4])
    async for frame in frames:
        if frame.step == 1:
            await door.until(lambda: of(door, world).credits == 0)
            assert shown(await world.look(1, 4)) == undisturbed(3, ACTIONS[:4])
            assert shown(await world.look(1, 4)) == undisturbed(3, ACTIONS[:4])
            break
    assert [len(await world.look(1, 4)) for _ in range(3)] == [4] * 3


async def test_what_came_is_acknowledged_so_that_the_journal_stays_small(door: FakeDoor, world: World) -> None:
    await world.step(ACTIONS)
    await door.until(lambda: of(door, world).acked >= 16)


async def test_nothing_is_kept_of_requests_that_are_over(link: Link, world: World) -> None:
    for at in range(0, 20, 2):
        await world.step(ACTIONS[at : at + 2])
        await world.snapshot()
    (child,) = await world.fork()
    await child.close()
    line = link._line
    assert not world._book.asks
    assert not world._book._outbox
    assert not line._openings
    assert set(line._books) == {world.session_id}


# -- interruptions


async def test_a_cancelled_step_tells_what_came_and_where_the_rollout_stands(door: FakeDoor, world: World) -> None:
    door.pause_after = 3
    async with asyncio.TaskGroup() as group:
        stepping = group.create_task(_interrupted(world))
        await door.until(lambda: of(door, world).made == 3)
        await world.cancel()
    error = stepping.result()
    assert (error.code, error.step) == ("client_cancelled", 3)
    assert shown(list(error.frames)) == undisturbed(3, ACTIONS[:3])
    assert shown(await world.step(ACTIONS[3:5])) == undisturbed(3, ACTIONS[:5])[3:]


async def _interrupted(world: World) -> Interrupted:
    with pytest.raises(Interrupted) as raised:
        await world.step(ACTIONS[:8])
    return raised.value


async def test_whoever_no_longer_waits_has_the_step_cancelled(door: FakeDoor, world: World) -> None:
    door.pause_after = 2
    async with asyncio.TaskGroup() as group:
        stepping = group.create_task(_all(world, ACTIONS[:6]))
        await door.until(lambda: of(door, world).made == 2)
        stepping.cancel()
    await door.until(lambda: door.asked("cancel"))
    await world.rewind(1)
    assert shown(await world.step(ACTIONS[1:3])) == undisturbed(3, ACTIONS[:3])[1:]


async def test_what_is_asked_behind_a_cancelled_step_is_numbered_when_that_is_gone(
    door: FakeDoor, world: World
) -> None:
    door.pause_after = 2
    async with asyncio.TaskGroup() as group:
        stepping = group.create_task(_all(world, ACTIONS[:6]))
        await door.until(lambda: of(door, world).made == 2)
        stepping.cancel()
        await asyncio.wait([stepping])
        frames = await world.step(ACTIONS[2:4])
    assert [frame.step for frame in frames] == [3, 4]
    assert shown(frames) == undisturbed(3, ACTIONS[:4])[2:]


async def test_leaving_an_iteration_cancels_what_is_left_of_it(door: FakeDoor, world: World) -> None:
    door.pause_after = 2
    async for frame in world.step(ACTIONS[:6]):
        if frame.step == 2:
            break
    await door.until(lambda: door.asked("cancel"))
    await world.rewind(2)
    assert shown(await world.step(ACTIONS[2:4])) == undisturbed(3, ACTIONS[:4])[2:]


async def test_a_request_that_fails_has_a_code_and_the_position(world: World) -> None:
    await world.step(ACTIONS[:2])
    with pytest.raises(RequestFailed) as raised:
        await world.step(ACTIONS[:1], step=9)
    assert (raised.value.code, raised.value.step) == ("step_out_of_order", 2)
    with pytest.raises(RequestFailed, match="rewind_ahead"):
        await world.rewind(7)
    assert [frame.step for frame in await world.step(ACTIONS[2:4])] == [3, 4]


async def test_a_refused_open_is_an_error_and_the_line_goes_on(door: FakeDoor, link: Link) -> None:
    door.refusals["session.open"] = "overloaded"
    with pytest.raises(Refused, match="overloaded"):
        await link.open()
    door.refusals.clear()
    assert (await link.open()).position == 0


async def test_no_answer_in_time_is_an_error(door: FakeDoor) -> None:
    async with connect(door.url, timeout_s=0.01) as link:
        door.deaf = True
        with pytest.raises(TimedOut):
            await link.open()
        assert not link._line._openings or next(iter(link._line._openings.values())).ask.is_cancelled


@pytest.mark.parametrize(
    "actions", [ACTIONS[:, :1], ACTIONS[:0], np.full((1, 2, 2), np.nan), np.full((1, 2, 2), 1.5), np.zeros(3)]
)
async def test_actions_that_are_none_of_this_world_are_refused_before_they_are_sent(
    world: World, actions: np.ndarray
) -> None:
    with pytest.raises(ValueError, match="action"):
        world.step(actions)


# -- lost sockets


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_step_whose_socket_is_lost_comes_whole_and_is_made_once(
    door: FakeDoor, link: Link, world: World, when: str
) -> None:
    door.lose("step", when)
    frames = await world.step(ACTIONS[:8])
    assert shown(frames) == undisturbed(3, ACTIONS[:8])
    assert of(door, world).made == 8
    assert len({message["request_id"] for message in door.asked("step")}) == 1, "the request's id is kept"
    assert (link.counts.drops, link.counts.resumes) == (1, 1)


@pytest.mark.parametrize("frames", [0, 1, 4, 7])
async def test_a_socket_lost_between_two_frames_loses_none_and_repeats_none(
    door: FakeDoor, link: Link, world: World, frames: int
) -> None:
    door.lose("step", "during", frames)
    steps = [frame async for frame in world.step(ACTIONS[:8])]
    assert shown(steps) == undisturbed(3, ACTIONS[:8])
    assert len(door.asked("step")) == 1, "what has arrived is not asked again"
    assert [message["last_seq"] for message in door.asked("session.resume")] == [1 + frames]
    assert link.counts.asked_again == 0


async def test_a_step_that_still_runs_when_the_line_is_back_goes_on(door: FakeDoor, world: World) -> None:
    door.pause_after = 5
    door.lose("step", "during", 4)
    async with asyncio.TaskGroup() as group:
        stepping = group.create_task(_all(world, ACTIONS[:8]))
        await door.until(lambda: door.asked("heartbeat"))
        door.go.set()
    assert shown(stepping.result()) == undisturbed(3, ACTIONS[:8])
    assert of(door, world).made == 8


async def test_a_step_that_waits_unheard_when_the_line_is_back_is_made_once(door: FakeDoor, world: World) -> None:
    door.pause_after = 0
    async with asyncio.TaskGroup() as group:
        stepping = group.create_task(_all(world, ACTIONS[:8]))
        await door.until(lambda: door.asked("step"))
        door.sockets[-1].transport.abort()
        await door.until(lambda: len(door.asked("step")) == 2)
        door.go.set()
    assert shown(stepping.result()) == undisturbed(3, ACTIONS[:8])
    assert of(door, world).made == 8
    assert shown(await world.step(ACTIONS[8:9])) == undisturbed(3, ACTIONS[:9])[8:]


async def _all(world: World, actions: np.ndarray) -> list[Any]:
    return await world.step(actions)


async def test_steps_in_flight_are_asked_again_in_their_order(door: FakeDoor, world: World) -> None:
    door.lose("step", "before")
    first, second = await asyncio.gather(world.step(ACTIONS[:4]), world.step(ACTIONS[4:8]))
    assert shown(first) + shown(second) == undisturbed(3, ACTIONS[:8])
    assert of(door, world).made == 8


async def test_a_step_whose_frames_the_server_has_forgotten_comes_whole(door: FakeDoor, world: World) -> None:
    door.lose("step", "during", 3)
    door.forget_journal = True
    assert shown(await world.step(ACTIONS[:8])) == undisturbed(3, ACTIONS[:8])
    assert of(door, world).made == 8


async def test_a_socket_that_is_lost_again_while_the_line_comes_back_is_no_matter(
    door: FakeDoor, link: Link, world: World
) -> None:
    door.lose("step", "during", 3)
    door.lose("session.resume", "before")
    door.lose("session.resume", "after")  # the new token is lost on its way
    door.lose("heartbeat", "before")
    assert shown(await world.step(ACTIONS[:8])) == undisturbed(3, ACTIONS[:8])
    assert shown(await world.step(ACTIONS[8:9])) == undisturbed(3, ACTIONS[:9])[8:]
    assert (link.counts.drops, link.counts.resumes) == (4, 2)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["rewind", "reset", "restore", "snapshot", "look"])
async def test_what_can_be_asked_again_is(door: FakeDoor, world: World, kind: str, when: str) -> None:
    frames = shown(await world.step(ACTIONS[:4]))
    blob = await world.snapshot()
    door.lose(kind, when)
    match kind:
        case "rewind":
            await world.rewind(2)
            assert shown(await world.step(ACTIONS[2:4])) == frames[2:]
        case "reset":
            await world.reset(seed=8)
            assert shown(await world.step(ACTIONS[:2])) == undisturbed(8, ACTIONS[:2])
        case "restore":
            await world.restore(blob)
            assert shown(await world.step(ACTIONS[4:5])) == undisturbed(3, ACTIONS[:5])[4:]
        case "snapshot":
            assert await world.snapshot() == blob
        case "look":
            assert shown(await world.look(1, 4)) == frames


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_fork_on_its_way_ends_in_an_error_and_the_parent_lives(door: FakeDoor, world: World, when: str) -> None:
    await world.step(ACTIONS[:2])
    door.lose("fork", when)
    with pytest.raises(Unrepeatable):
        await world.fork(count=2)
    (child,) = await world.fork()
    assert shown(await child.step(ACTIONS[2:4])) == undisturbed(3, ACTIONS[:4])[2:]
    assert len(door.asked("fork")) == (1 if when == "before" else 2), "the lost one is not asked again"


async def test_an_open_on_its_way_ends_in_an_error(door: FakeDoor, link: Link) -> None:
    door.lose("session.open", "before")
    with pytest.raises(Unrepeatable):
        await link.open()
    assert (await link.open()).position == 0


@contextlib.asynccontextmanager
async def down(door: FakeDoor, clock: ManualClock) -> AsyncIterator[tuple[Link, World]]:
    """A line that has just lost its socket; it comes back after 50 ms."""
    async with connect(door.url, clock=clock, chance=lambda: 0.5) as link:
        world = await link.open(seed=3)
        link.drop_transport()
        while link._line.is_up:
            await asyncio.sleep(0)
        yield link, world


async def test_a_fork_that_is_asked_while_the_line_is_down_waits_for_it(door: FakeDoor) -> None:
    clock = ManualClock()
    async with down(door, clock) as (link, world), asyncio.TaskGroup() as group:
        forking = group.create_task(world.fork())
        await clock.advance(40)
        assert not door.asked("session.resume")
        await clock.advance(20)
        assert [child.position for child in await forking] == [0]
        assert link.counts.resumes == 1


async def test_an_open_that_nobody_waits_for_any_more_is_not_asked(door: FakeDoor) -> None:
    clock = ManualClock()
    async with down(door, clock) as (link, world), asyncio.TaskGroup() as group:
        opening = group.create_task(link.open())
        await clock.advance(40)
        opening.cancel()
        await clock.advance(20)
        await world.step(ACTIONS[:1])
        assert len(door.asked("session.open")) == 1
        assert not link._line._openings


async def test_a_step_that_is_asked_while_the_line_is_down_comes_behind_the_one_that_was_lost(door: FakeDoor) -> None:
    clock = ManualClock()
    async with connect(door.url, clock=clock, chance=lambda: 0.5) as link, asyncio.TaskGroup() as group:
        world = await link.open(seed=3)
        door.lose("step", "before")
        first = group.create_task(_all(world, ACTIONS[:4]))
        while link._line.is_up:
            await asyncio.sleep(0)
        second = group.create_task(_all(world, ACTIONS[4:8]))
        await clock.advance(60)
        assert shown(await first) + shown(await second) == undisturbed(3, ACTIONS[:8])


async def test_a_lost_step_that_is_cancelled_while_the_line_is_down_is_not_asked_again(door: FakeDoor) -> None:
    clock = ManualClock()
    async with connect(door.url, clock=clock, chance=lambda: 0.5) as link, asyncio.TaskGroup() as group:
        world = await link.open(seed=3)
        door.lose("step", "before")
        stepping = group.create_task(_interrupted(world))
        while link._line.is_up:
            await asyncio.sleep(0)
        await world.cancel()
        await clock.advance(60)
        assert (await stepping).step == 0
        assert not door.asked("step")
        assert shown(await world.step(ACTIONS[:2])) == undisturbed(3, ACTIONS[:2])


async def test_a_step_that_arrived_unheard_and_was_cancelled_is_no_other_step(door: FakeDoor) -> None:
    clock = ManualClock()
    async with connect(door.url, clock=clock, chance=lambda: 0.5) as link, asyncio.TaskGroup() as group:
        world = await link.open(seed=3)
        door.lose("step", "after")
        door.pause_after = 3
        stepping = group.create_task(_interrupted(world))
        while link._line.is_up:
            await asyncio.sleep(0)
        await world.cancel()
        following = group.create_task(_all(world, ACTIONS[3:5]))
        await clock.advance(60)
        assert (await stepping).step == 3
        assert shown(await following) == undisturbed(3, ACTIONS[:5])[3:]


async def test_a_rewind_that_nobody_waits_for_any_more_is_waited_for_by_the_next_step(door: FakeDoor) -> None:
    clock = ManualClock()
    async with connect(door.url, clock=clock, chance=lambda: 0.5) as link, asyncio.TaskGroup() as group:
        world = await link.open(seed=3)
        await world.step(ACTIONS[:6])
        door.lose("rewind", "before")
        rewinding = group.create_task(world.rewind(2))
        while link._line.is_up:
            await asyncio.sleep(0)
        rewinding.cancel()
        following = group.create_task(_all(world, ACTIONS[2:4]))
        await clock.advance(60)
        assert shown(await following) == undisturbed(3, ACTIONS[:4])[2:]


async def test_all_sessions_of_a_socket_come_back(door: FakeDoor, link: Link) -> None:
    worlds = [await link.open(seed=seed) for seed in range(5)]
    door.lose("step", "during", 2)
    found = await asyncio.gather(*(world.step(ACTIONS[:6]) for world in worlds))
    assert [shown(frames) for frames in found] == [undisturbed(seed, ACTIONS[:6]) for seed in range(5)]
    assert len(door.asked("session.resume")) == 5


async def test_a_cancel_on_its_way_is_said_again(door: FakeDoor, world: World) -> None:
    door.pause_after = 3
    door.lose("cancel", "before")
    async with asyncio.TaskGroup() as group:
        stepping = group.create_task(_interrupted(world))
        await door.until(lambda: of(door, world).made == 3)
        await world.cancel()
    assert stepping.result().step == 3


async def test_credits_of_frames_that_nobody_took_yet_are_not_given_twice(door: FakeDoor, link: Link) -> None:
    world = await link.open(seed=3, ahead=4)
    steps = []
    async for frame in world.step(ACTIONS[:12]):
        steps.append(frame.step)
        if len(steps) == 2:
            await door.until(lambda: of(door, world).credits == 0)
            link.drop_transport()
            await door.until(lambda: door.asked("session.resume"))
    assert steps == list(range(1, 13))
    assert door.asked("session.resume")[0]["credits"] < 4


@pytest.mark.parametrize("seed", range(40))
async def test_whatever_is_lost_the_rollout_is_as_if_nothing_was(door: FakeDoor, link: Link, seed: int) -> None:
    chance = np.random.default_rng(seed)
    world = await link.open(seed=seed, ahead=int(chance.choice([1, 3, 64])))
    actions = np.zeros((0, 2, 2), np.float32)
    for _ in range(12):
        kind = str(chance.choice(["step", "iterated", "together", "rewind", "look"]))
        for _ in range(int(chance.integers(3))):
            when = str(chance.choice(["before", "after", "during"]))
            lost = "step" if when == "during" else str(chance.choice(["step", "rewind", "session.resume", "heartbeat"]))
            door.lose(lost, when, int(chance.integers(4)))
        more = chance.uniform(-1, 1, (4, 2, 2)).astype(np.float32)
        at = len(actions)
        match kind:
            case "rewind":
                at = int(chance.integers(at + 1))
                await world.rewind(at)
                actions = actions[:at]
                continue
            case "look":
                assert at == 0 or shown(await world.look(1, at)) == undisturbed(seed, actions)
                continue
            case "step":
                frames = list(await world.step(more))
            case "iterated":
                frames = [frame async for frame in world.step(more)]
            case _:
                both = await asyncio.gather(world.step(more[:2]), world.step(more[2:]))
                frames = [*both[0], *both[1]]
        actions = np.concatenate([actions, more])
        assert [frame.step for frame in frames] == [at + 1, at + 2, at + 3, at + 4]
        assert shown(frames) == undisturbed(seed, actions)[at:]
        assert world.position == at + 4


# -- the end


async def test_a_session_that_somebody_else_took_is_lost(door: FakeDoor, world: World) -> None:
    await door.tell(of(door, world), "session.replaced")
    with pytest.raises(SessionLost, match="replaced"):
        await _step_on(world)


async def test_a_session_that_the_server_ends_fails_what_runs(door: FakeDoor, world: World) -> None:
    door.pause_after = 1
    async with asyncio.TaskGroup() as group:
        stepping = group.create_task(_lost(world))
        await door.until(lambda: of(door, world).made == 1)
        await door.say(of(door, world), "session.closed", reason="idle", step=1)
    assert stepping.result().code == "idle"


async def _lost(world: World) -> SessionLost:
    with pytest.raises(SessionLost) as raised:
        await world.step(ACTIONS[:4])
    return raised.value


async def test_a_session_that_cannot_be_resumed_is_lost_and_the_others_go_on(door: FakeDoor, link: Link) -> None:
    gone, kept = await link.open(seed=1), await link.open(seed=2)
    del door.sessions[gone.session_id]
    link.drop_transport()
    assert shown(await kept.step(ACTIONS[:2])) == undisturbed(2, ACTIONS[:2])
    with pytest.raises(SessionLost, match="session_not_found"):
        await gone.step(ACTIONS[:1])


async def test_no_way_back_in_time_ends_everything_with_an_error(door: FakeDoor, link: Link, world: World) -> None:
    door.http_status = 503
    door.lose("step", "during", 2)
    with pytest.raises(ConnectionLost, match="no way back within 30 s"):
        await world.step(ACTIONS[:4])
    with pytest.raises(ConnectionLost):
        await link.open()


async def test_a_server_that_drops_every_socket_is_given_up(door: FakeDoor) -> None:
    async with connect(door.url, clock=HastyClock(), patience=Patience(grace_s=1.0), chance=lambda: 1.0) as link:
        world = await link.open(seed=3)
        for _ in range(100):
            door.lose("session.resume", "before")
        link.drop_transport()
        with pytest.raises(ConnectionLost):
            await world.step(ACTIONS[:1])
        assert link.counts.drops < 100


async def test_nonsense_from_the_server_ends_the_line_with_an_error(door: FakeDoor, world: World) -> None:
    await door.tell(of(door, world), "frame", output="frame", step=1, image={"dtype": "|u1", "shape": [1], "data": b""})
    with pytest.raises(ConnectionLost, match="bad_reply"):
        await _step_on(world)


async def _step_on(world: World) -> None:
    while True:
        await world.step(ACTIONS[:1])


@pytest.mark.parametrize(("status", "code"), [(401, "invalid_api_key"), (404, "not_found"), (500, "http_status")])
async def test_a_server_that_lets_nobody_in_is_an_error(door: FakeDoor, status: int, code: str) -> None:
    door.http_status = status
    with pytest.raises(ConnectFailed) as raised:
        async with connect(door.url):
            pass
    assert raised.value.code == code
    assert isinstance(raised.value, WorldError)


async def test_no_server_is_an_error() -> None:
    with pytest.raises(ConnectFailed):
        async with connect("ws://127.0.0.1:1/v1/world"):
            pass
