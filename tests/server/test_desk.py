"""The desk: who gets a session, and that everything comes back."""

import asyncio
from dataclasses import replace

import pytest

from omni_live.protocols.desk import Refused, ResumeRefused
from omni_live.server.desk import SessionLine, random_id
from omni_live.sessions.effects import Emit, RaiseFence, Release, Replace
from omni_live.sessions.events import SessionCreated, SessionReplaced, SessionResumed
from omni_live.sessions.inputs import AudioAppended, BargeInAsked, CloseAsked, Detached, Heartbeat, TextAppended
from omni_live.sessions.limits import Limits
from omni_live.sessions.settings import Settings

from .house import Box, HandClock, House

ONE = replace(Limits(), max_sessions=1, wait_deadline_s=5.0, wait_queue=2)
SETTINGS = Settings()


async def opened(house: House, box: Box | None = None, owner: str = "") -> SessionLine:
    return await house.desk.open("voice", SETTINGS, box or Box(), owner)


async def settle() -> None:
    """Let every task come to its next wait."""
    for _ in range(5):
        await asyncio.sleep(0)


def created(box: Box) -> SessionCreated:
    first = box.events()[0]
    assert isinstance(first, SessionCreated)
    return first


async def test_an_opened_session_has_an_id_nobody_guesses_and_greets() -> None:
    house, box = House(), Box()
    line = await opened(house, box)
    assert line.session_id.startswith("sess_")
    assert len(line.session_id) == len("sess_") + 32
    assert created(box).session_id == line.session_id
    assert random_id("sess") != random_id("sess")


async def test_g3_release_closing_gives_back_everything_exactly_once() -> None:
    house, box = House(), Box()
    line = await opened(house, box)
    line.tell(CloseAsked())
    line.tell(CloseAsked())
    line.tell(Detached(1))
    assert [effect for effect in box.effects if isinstance(effect, Release)] == [Release("close_requested")]
    assert house.at_rest()
    await house.desk.emptied()


async def test_g2_caps_exactly_the_cap_is_admitted_and_the_next_one_waits_for_a_place() -> None:
    house = House(replace(ONE, max_sessions=3))
    lines = [await opened(house) for _ in range(3)]
    waiting = asyncio.create_task(opened(house))
    await settle()
    assert not waiting.done()
    assert house.slots.taken == 3
    lines[1].tell(CloseAsked())
    await waiting
    assert house.slots.taken == 3


async def test_the_queue_is_first_come_first_served_and_bounded() -> None:
    house = House(ONE)
    line = await opened(house)
    first = asyncio.create_task(opened(house))
    await settle()
    second = asyncio.create_task(opened(house))
    await settle()
    with pytest.raises(Refused) as refused:
        await opened(house)
    assert refused.value.code == "overloaded"
    assert refused.value.retry_after_s is not None
    line.tell(CloseAsked())
    (await first).tell(CloseAsked())
    (await second).tell(CloseAsked())
    assert house.at_rest()


async def test_whoever_waited_too_long_is_refused_with_a_time() -> None:
    clock = HandClock()
    house = House(ONE, clock)
    line = await opened(house)
    waiting = asyncio.create_task(opened(house))
    await settle()
    clock.advance(ONE.wait_deadline_s)
    with pytest.raises(Refused) as refused:
        await waiting
    assert refused.value.code == "overloaded"
    line.tell(CloseAsked())
    assert house.at_rest()


async def test_a_task_cancelled_while_it_waits_leaves_nothing_behind() -> None:
    house = House(ONE)
    line = await opened(house)
    waiting = asyncio.create_task(opened(house))
    await settle()
    waiting.cancel()
    await settle()
    assert house.desk.waiting() == 0
    line.tell(CloseAsked())
    assert house.at_rest()


async def test_a_task_cancelled_just_as_it_is_admitted_gives_the_place_to_the_next() -> None:
    house = House(ONE)
    line = await opened(house)
    first, second = (asyncio.create_task(opened(house)) for _ in range(2))
    await settle()
    line.tell(CloseAsked())
    first.cancel()
    (await second).tell(CloseAsked())
    assert first.cancelled() or first.exception() is None
    await settle()
    assert house.at_rest()


async def test_a_task_cancelled_just_as_it_lapses_leaves_nothing_behind() -> None:
    clock = HandClock()
    house = House(ONE, clock)
    line = await opened(house)
    waiting = asyncio.create_task(opened(house))
    await settle()
    clock.advance(ONE.wait_deadline_s)
    waiting.cancel()
    await settle()
    line.tell(CloseAsked())
    assert house.at_rest()


async def test_a_model_that_is_not_served_is_refused_by_its_own_code() -> None:
    with pytest.raises(Refused) as refused:
        await House().desk.open("gpt", SETTINGS, Box(), "")
    assert refused.value.code == "model_not_found"


async def test_a_model_whose_stages_are_not_ready_is_refused_and_nothing_is_kept() -> None:
    house = House(ready=False)
    with pytest.raises(Refused) as refused:
        await opened(house)
    assert refused.value.code == "replica_unavailable"
    assert refused.value.retry_after_s is not None
    assert house.at_rest()
    house.workers_ready()
    assert (await opened(house)).attachment == 1


async def test_a_resume_moves_the_session_and_the_old_line_reaches_nothing() -> None:
    house, old, new = House(), Box(), Box()
    line = await opened(house, old)
    again = house.desk.resume(line.session_id, created(old).resume_token, 0, 0, new, "")
    assert isinstance(old.events()[-1], SessionReplaced)
    assert Replace(1) in old.effects
    assert isinstance(new.events()[0], SessionResumed)
    before = len(new.effects)
    line.tell(Heartbeat())
    line.tell(Detached(1))
    assert len(new.effects) == before
    again.tell(Heartbeat())
    assert len(new.effects) > before
    assert not any(isinstance(event, SessionReplaced) for event in new.events())


async def test_a_detached_session_is_resumed_without_a_word_to_the_old_transport() -> None:
    house, old, new = House(), Box(), Box()
    line = await opened(house, old)
    line.tell(TextAppended("hello", respond=False))
    line.tell(Detached(1))
    before = len(old.effects)
    house.desk.resume(line.session_id, created(old).resume_token, 0, 0, new, "")
    assert len(old.effects) == before
    numbered = [effect.seq for effect in old.effects if isinstance(effect, Emit) and effect.seq]
    assert [effect.seq for effect in new.effects if isinstance(effect, Emit) and effect.seq] == numbered


async def test_another_key_s_session_is_as_unknown_as_one_that_never_was() -> None:
    house, box = House(), Box()
    line = await opened(house, box, owner="team-a")
    told = []
    for session_id, owner in ((line.session_id, "team-b"), ("sess_0", "team-a")):
        with pytest.raises(ResumeRefused) as refused:
            house.desk.resume(session_id, created(box).resume_token, 0, 0, Box(), owner)
        told.append((refused.value.code, refused.value.message))
    assert told[0] == told[1]


async def test_a_token_is_good_until_something_is_heard_on_the_attachment_it_opened() -> None:
    house, box = House(), Box()
    line = await opened(house, box)
    token = created(box).resume_token
    house.desk.resume(line.session_id, token, 0, 0, Box(), "")
    house.desk.resume(line.session_id, token, 0, 0, Box(), "").tell(Heartbeat())
    with pytest.raises(ResumeRefused) as refused:
        house.desk.resume(line.session_id, token, 0, 0, Box(), "")
    assert refused.value.code == "invalid_resume_token"


async def test_a_session_that_lost_its_transport_closes_after_its_grace() -> None:
    clock = HandClock()
    house = House(clock=clock)
    line = await opened(house)
    line.tell(Detached(1))
    assert house.slots.taken == 1
    clock.advance(Limits().detach_grace_s + 1)
    assert house.at_rest()


async def test_a_fence_reaches_the_mailbox_before_the_terminal_event() -> None:
    house, box = House(), Box()
    line = await opened(house, box)
    line.tell(TextAppended("hello"))
    box.effects.clear()
    line.tell(BargeInAsked())
    assert isinstance(box.effects[0], RaiseFence)
    assert any(isinstance(effect, Emit) for effect in box.effects)


async def test_draining_refuses_the_new_and_those_who_wait_and_closes_the_idle() -> None:
    house, box = House(ONE), Box()
    await opened(house, box)
    waiting = asyncio.create_task(opened(house))
    await settle()
    house.desk.drain(house.clock.now())
    with pytest.raises(Refused) as refused:
        await waiting
    assert refused.value.code == "draining"
    with pytest.raises(Refused):
        await opened(house)
    assert box.effects[-1] == Release("drained")
    assert house.at_rest()


async def test_draining_lets_a_running_turn_go_on_until_all_are_closed() -> None:
    house, box = House(), Box()
    line = await opened(house, box)
    line.tell(TextAppended("hello"))
    house.desk.drain(house.clock.now())
    assert house.slots.taken == 1
    house.desk.close_all("drained")
    assert box.effects[-1] == Release("drained")
    assert house.at_rest()


async def test_g6_isolation_a_bug_in_one_session_closes_that_session_only(caplog: pytest.LogCaptureFixture) -> None:
    house, box, other = House(), Box(), Box()
    line = await opened(house, box)
    neighbour = await opened(house, other)
    line.tell(AudioAppended(None))  # type: ignore[arg-type]  # stands for a bug
    assert box.effects[-1] == Release("internal_error")
    assert "session_failed" in caplog.text
    neighbour.tell(Heartbeat())
    assert house.slots.taken == 1


async def test_the_metrics_count_sessions_by_pipeline_and_state() -> None:
    house = House()
    await opened(house)
    with pytest.raises(Refused):
        await house.desk.open("gpt", SETTINGS, Box(), "")
    page = house.metrics.render().decode()
    assert 'omni_live_sessions{pipeline="voice",state="open"} 1.0' in page
    assert 'omni_live_refused_total{code="model_not_found"} 1.0' in page
    assert 'omni_live_replicas{pipeline="voice",stage="ears",state="ready"} 1.0' in page
