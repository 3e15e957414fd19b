"""Conversations under simulation: the real session core with people who interrupt, hesitate and lose their line."""

import os
from collections import Counter

import pytest
from simclients import Desk, Faults, at_rest
from simtalk import CHUNK_MS, Code2Wav, Ears, Talkative, Talker, Thinker
from simworld import S, World

from omni_live.config.deploy import Deploy, PipelineDeploy, StageDeploy
from omni_live.config.plan import Plan, plan
from omni_live.pipelines.registry import VOICE
from omni_live.sessions.effects import Release
from omni_live.sessions.events import ResponseDone
from omni_live.sessions.inputs import TextAppended
from omni_live.sessions.items import ResponseStatus
from omni_live.sessions.limits import Limits

SEEDS = [int(seed) for seed in os.environ.get("SEEDS", "").split()] or list(range(int(os.environ.get("RUNS", "6"))))

LIMITS = Limits(
    max_sessions=4,
    idle_lease_s=60,
    detach_grace_s=5,
    abort_deadline_ms=500,
    replica_wait_s=2,
    turn_deadline_s=10,
    restarts=1000,
    restart_backoff_ms=20,
    restart_backoff_cap_ms=100,
)

TRAVEL_MS = 25
"""What a frame takes to the client at most: it plays on until the news is there."""


def placed(replicas: int = 2) -> Plan:
    each = {name: StageDeploy(replicas=replicas) for name in VOICE.stage_names}
    return plan(Deploy((PipelineDeploy("voice", stages=each),), limits=LIMITS), {"voice": VOICE})


def talk(seed: int, kinds: tuple[str, ...], seconds: float = 20, acks: bool = True) -> tuple[World, list[Talkative]]:
    """People talk while workers break; calm returns, everyone is answered once more, and nothing is left behind."""
    judge = Thinker()
    world = World(placed(), seed, {"ears": Ears(), "thinker": judge, "talker": Talker(), "code2wav": Code2Wav()})
    desk = Desk(world, "voice")
    people = [Talkative(world, desk, f"person{index}", judge, acks) for index in range(5)]
    world.run(0.5)
    for person in people:
        world.after(0, S // 2, person.live)
    Faults(world, world.now() + int(seconds * S), kinds).start()
    world.run(seconds)
    for person in people:
        person.leaving = True
    world.run(20)
    for person in people:
        assert person.session is None or not person.session.busy, f"{person.name} waits for ever (G4, G9)"
        person.come_back()
    world.run(1)
    asked = [person for person in people if person.session is not None]
    for person in asked:
        person.tell(TextAppended("are you there"))
    world.run(8)
    for person in asked:
        if person.session is not None:
            last = [frame.event for frame in person.frames if isinstance(frame.event, ResponseDone)][-1:]
            assert [event.response.status for event in last] == [ResponseStatus.COMPLETED], (
                f"{person.name} is not answered"
            )
    for person in people:
        person.close()
    world.run(5)
    at_rest(world)
    for person in people:
        person.check()
    assert desk.most <= LIMITS.max_sessions
    released = Counter(note.session for note in world.trace if isinstance(note.detail, Release))
    assert set(released.values()) == {1}
    return world, people


@pytest.mark.parametrize("seed", SEEDS)
def test_people_talk_and_the_model_sees_what_was_heard(seed: int) -> None:
    world, people = talk(seed, ())
    assert world.counts["workers_lost"] == 0
    for what in ("turn_done", "turn_interrupted", "tentative_adopted"):
        assert world.counts[what] > 0, f"nothing that leads to {what} happened"
    failed = [
        event
        for person in people
        for session in person.recorded.values()
        for event in session.said
        if isinstance(event, ResponseDone) and event.response.status is ResponseStatus.FAILED
    ]
    assert failed == []
    for person in people:
        for item, (said_ms, played_ms, came) in person.heard.items():
            off_ms = abs(said_ms - played_ms)
            assert not came or off_ms <= CHUNK_MS + TRAVEL_MS, f"{person.name} {item}: {said_ms} of {played_ms} ms (G8)"


@pytest.mark.parametrize("seed", SEEDS)
def test_people_talk_while_workers_break(seed: int) -> None:
    world, _ = talk(seed, ("die", "stall", "lag", "repeat"))
    assert world.counts["workers_lost"] > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_people_who_say_nothing_of_their_playback_talk_too(seed: int) -> None:
    talk(seed, ("die", "lag"), acks=False)
