"""What a seed plays: a scene is drawn and played, calm returns, everybody is served, and nothing is left."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from simclients import FAST, SLOW, STUCK, Client, Desk, Manners, Pace
from simdream import DREAM, Decoder, Dreamer, Dynamics, Whims
from simplain import CHAIN, MAKE, MIXED, Asker
from simtalk import Code2Wav, Ears, Habits, Talkative, Talker, Thinker
from simworkers import Make
from simworld import MS, S, World

from omni_live.config.deploy import Deploy, PipelineDeploy, StageDeploy
from omni_live.config.plan import Plan, plan
from omni_live.pipelines.registry import VOICE
from omni_live.sessions.inputs import TextAppended
from omni_live.sessions.limits import KIB, Limits

LIMITS = Limits(
    max_sessions=6,
    idle_lease_s=30,
    detach_grace_s=4,
    abort_deadline_ms=400,
    replica_wait_s=1,
    turn_deadline_s=3,
    restarts=1000,
    restart_backoff_ms=20,
    restart_backoff_cap_ms=60,
    client_credits=3,
    mailbox_turns=8,
    transcript_patience_s=3,
)
FAULTS = ("die", "stall", "lag", "repeat", "swap", "choke")
LATE = Pace(20 * MS, 90 * MS, 4)
SPECS = {spec.name: spec for spec in (CHAIN, MIXED, VOICE, DREAM)}
SOUND_MAKE: Mapping[str, Make] = {
    "ears": Ears(),
    "talker": Talker(),
    "code2wav": Code2Wav(),
    "decoder": Decoder(),
}
REFUSALS = (
    "bad_reset",
    "bad_snapshot",
    "bad_step",
    "history_full",
    "not_started",
    "rewind_ahead",
    "rewind_too_far",
    "state_lost",
    "step_out_of_order",
    "step_unknown",
    "world_error",
)
"""What a rollout's client may be told of an odd request; `state_lost`: its snapshot is not of the frame it says."""
MAY_FAIL = {
    "sim_response_failed_timeout",
    "sim_turn_failed_stage_error",
    *(f"sim_turn_failed_{reason}" for reason in REFUSALS),
}
"""Turns that fail on sound workers: of a reply that a client neither takes nor leaves, of a poisoned request."""

PATIENCE_S = 12.0
"""What runs in the end is over by then: a transcript is waited for longest."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything that a seed decides before time begins."""

    kind: str
    asking: tuple[tuple[str, int], ...] = ()
    """Plain pipelines, each with the number of its clients."""
    people: int = 0
    dreamers: int = 0
    seconds: float = 2.0
    replicas: int = 2
    fused: bool = False
    faults: tuple[str, ...] = ()
    every_ns: int = S // 2
    """A fault strikes about twice as often."""
    poison: float = 0.0
    floods: int = 0
    """Weight with which a plain client asks for more than may wait."""
    limits: Limits = LIMITS
    most_of_each: int | None = None
    """Sessions of one pipeline, where that has a cap of its own."""
    manners: Manners = field(default_factory=Manners)
    habits: Habits = field(default_factory=Habits)
    whims: Whims = field(default_factory=Whims)
    wait_queue: int = 64
    wait_deadline_s: float = 10.0
    drains: bool = False
    """In the end the server goes away; else the clients do."""


Scenery = Callable[[random.Random], Scene]


def _plain(chance: random.Random) -> Scene:
    name = chance.choice(("chain", "mixed"))
    return Scene("plain", ((name, chance.randint(1, 5)),), seconds=chance.uniform(0.8, 2.5))


def _talk(chance: random.Random) -> Scene:
    acks = chance.random() < 0.7
    text = chance.random() < 0.2
    habits = Habits(acks=acks, exact=acks, text=text, frame_ms=chance.choice((32, 50)))
    manners = Manners(numbered=1 if acks else 0.5)  # what was played must come through in the end
    limits = replace(LIMITS, conversation_items=chance.choice((4, 8, 512)))
    people, seconds = chance.randint(1, 3), chance.uniform(2, 5)
    return Scene("talk", people=people, seconds=seconds, limits=limits, manners=manners, habits=habits)


def _troubled(scene: Scene, chance: random.Random) -> Scene:
    """The same with workers that break."""
    return replace(
        scene,
        kind=f"{scene.kind}_faults",
        faults=tuple(name for name in FAULTS if chance.random() < 0.6) or FAULTS,
        replicas=chance.choice((1, 2, 2)),
        fused=chance.random() < 0.3,
        every_ns=chance.choice((S // 5, S // 2, S)),
        manners=replace(scene.manners, closes=chance.choice((2, 12))),
    )


def _plain_faults(chance: random.Random) -> Scene:
    return _troubled(_plain(chance), chance)


def _talk_faults(chance: random.Random) -> Scene:
    return _troubled(_talk(chance), chance)


def _poison(chance: random.Random) -> Scene:
    return replace(_plain(chance), kind="poison", replicas=1, poison=0.25)


def _flood(_: random.Random) -> Scene:
    """One client asks for more than its session lets wait."""
    return Scene("flood", (("chain", 1),), seconds=0.4, floods=12)


def _caps(chance: random.Random) -> Scene:
    """More want in than may, of two pipelines, for little time each."""
    limits = replace(LIMITS, max_sessions=chance.randint(1, 4))
    if chance.random() < 0.5:
        limits = replace(limits, max_bytes=chance.randint(4, 12) * KIB * KIB)
    return Scene(
        "caps",
        (("chain", chance.randint(2, 5)), ("mixed", chance.randint(1, 4))),
        seconds=chance.uniform(1, 2.5),
        limits=limits,
        most_of_each=chance.choice((None, None, 1, 2)),
        manners=Manners(patience_ns=chance.choice((S // 5, S, 10 * S)), closes=12),
        wait_queue=chance.choice((0, 1, 3, 64)),
        wait_deadline_s=chance.choice((0.1, 0.5, 5)),
    )


def _storm(chance: random.Random) -> Scene:
    """Lines that break all the time, and clients that lost frames, inputs or patience."""
    manners = Manners(
        paces=chance.choice(((FAST,), (FAST, SLOW), (SLOW,))),
        numbered=0.8,
        skips=chance.choice((0.0, 0.05)),
        forgets=chance.choice((0.0, 0.3)),
        restless_ns=S // 10,
        drops=30,
        returns=40,
    )
    scene = Scene("storm", (("chain", 2),), seconds=1.5, manners=manners, habits=Habits(frame_ms=50))
    if chance.random() < 0.5:
        scene = replace(scene, asking=(), people=2, seconds=2.5)
    return replace(scene, limits=replace(LIMITS, detach_grace_s=chance.choice((0.3, 4))))


def _slow(chance: random.Random) -> Scene:
    """Clients that take frames slowly: outboxes and journals reach their bounds."""
    manners = Manners(paces=chance.choice(((SLOW,), (SLOW, STUCK), (STUCK,))), forgets=chance.choice((0.0, 0.2)))
    tight = chance.random() < 0.5
    limits = replace(
        LIMITS,
        outbox_bytes=chance.choice((4, 16)) * KIB if tight else 4 * KIB * KIB,
        journal_bytes=chance.choice((3, 12)) * KIB if tight else 8 * KIB * KIB,
        journal_s=chance.choice((1, 60)),
    )
    habits = Habits(acks=chance.random() < 0.5, hushes=30, frame_ms=50)
    return Scene("slow", people=2, seconds=2.5, limits=limits, manners=manners, habits=habits)


def _interrupts(chance: random.Random) -> Scene:
    """People who do not let the reply finish, on lines that keep what is to be silenced."""
    manners = Manners(paces=(chance.choice((FAST, SLOW)),), restless_ns=S // 4)
    acks = chance.random() < 0.7
    exact = acks and manners.paces == (FAST,)
    manners = replace(manners, numbered=1 if exact else 0.5)
    habits = Habits(acks=acks, exact=exact, speaks=20, hushes=30, fussy=25, frame_ms=50)
    return Scene("interrupts", people=2, seconds=4, manners=manners, habits=habits)


def _corrections(chance: random.Random) -> Scene:
    """What was heard is known late, and the turn that was made on something else begins anew."""
    manners = Manners(paces=(LATE,), numbered=chance.choice((0, 1)), restless_ns=S // 5)
    habits = Habits(reports=False, buffer_ms=200, speaks=10, hushes=20, types=30, frame_ms=50)
    scene = Scene("corrections", people=2, seconds=3, manners=manners, habits=habits)
    return replace(scene, faults=("lag",), every_ns=S // 8) if chance.random() < 0.7 else scene


def _tentative(chance: random.Random) -> Scene:
    """People who hesitate: short speech, short pauses."""
    manners = Manners(restless_ns=chance.choice((S // 4, S // 2)), numbered=0)
    habits = Habits(text=chance.random() < 0.3, speaks=50, hushes=60, fussy=12, frame_ms=32)
    return Scene("tentative", people=2, seconds=4, manners=manners, habits=habits)


def _verbs(chance: random.Random) -> Scene:
    """Forks, snapshots, restores, in the middle of everything else."""
    manners = Manners(restless_ns=S // 4)
    habits = Habits(acks=chance.random() < 0.7, verbs=True, fussy=8, frame_ms=50)
    scene = Scene("verbs", people=chance.randint(1, 2), seconds=3.5, manners=manners, habits=habits)
    return _troubled(scene, chance) if chance.random() < 0.5 else scene


def _both(chance: random.Random) -> Scene:
    """Two kinds of session on one server with one cap."""
    scene = replace(_talk(chance), kind="both", asking=(("chain", 2),), people=1, seconds=2)
    scene = replace(scene, limits=replace(LIMITS, max_sessions=chance.choice((2, 6))))
    return _troubled(scene, chance) if chance.random() < 0.5 else scene


def _leases(chance: random.Random) -> Scene:
    """Leases that run out in the middle."""
    limits = replace(
        LIMITS,
        idle_lease_s=chance.choice((0.4, 30)),
        detach_grace_s=chance.choice((0, 0.1, 0.4)),
        max_age_s=chance.choice((1.5, 86_400)),
        max_age_warning_s=0.5,
    )
    scene = _talk(chance) if chance.random() < 0.5 else _plain(chance)
    manners = Manners(drops=15, returns=20, restless_ns=chance.choice((S // 8, S)))
    habits = replace(scene.habits, exact=False)
    return replace(scene, kind="leases", limits=limits, manners=manners, habits=habits)


def _dreams(chance: random.Random) -> Scene:
    """Rollouts: short reaches and many snapshots, so that a few seconds come to each limit."""
    limits = replace(
        LIMITS,
        rewind_steps=chance.choice((3, 8, 12)),
        snapshot_frames=chance.choice((4, 8)),
        step_frames=8,
        rollout_actions=chance.choice((24, 200)),
    )
    manners = Manners(
        paces=chance.choice(((FAST,), (FAST, SLOW))),
        numbered=chance.choice((0.5, 1)),
        forgets=chance.choice((0.0, 0.2)),
        restless_ns=chance.choice((S // 20, S // 8)),
    )
    whims = Whims(poison=chance.choice((0.0, 0.1)), full=chance.choice((0.0, 0.3)))
    dreamers, seconds = chance.randint(1, 3), chance.uniform(1, 2.5)
    return Scene("dreams", dreamers=dreamers, seconds=seconds, limits=limits, manners=manners, whims=whims)


def _dreams_faults(chance: random.Random) -> Scene:
    scene = _troubled(_dreams(chance), chance)
    return replace(scene, whims=replace(scene.whims, lossy=chance.choice((0.0, 0.0, 0.2))))


SCENERY: Mapping[Scenery, int] = {
    _plain: 6,
    _plain_faults: 16,
    _poison: 4,
    _flood: 2,
    _caps: 8,
    _storm: 12,
    _slow: 9,
    _talk: 6,
    _talk_faults: 13,
    _interrupts: 9,
    _corrections: 8,
    _tentative: 6,
    _verbs: 12,
    _both: 4,
    _leases: 5,
    _dreams: 12,
    _dreams_faults: 18,
}
"""What a seed may draw, with how often it does in a hundred or so."""


def draw(seed: int) -> Scene:
    """The scene of a seed."""
    chance = random.Random(f"scene {seed}")
    scenery = chance.choices(tuple(SCENERY), tuple(SCENERY.values()))[0]
    return replace(scenery(chance), drains=chance.random() < 0.3)


@cache
def placed(names: tuple[str, ...], replicas: int, fused: bool, limits: Limits, most_of_each: int | None) -> Plan:
    def deploy(name: str) -> PipelineDeploy:
        spec = SPECS[name]
        each = {stage: StageDeploy(replicas=replicas, bytes_per_session=KIB * KIB) for stage in spec.stage_names}
        middle = spec.stage_names[1:3] if len(spec.stage_names) > 2 else spec.stage_names
        together = (middle,) if fused else ()
        return PipelineDeploy(name, max_sessions=most_of_each, stages=each, fuse=together)

    return plan(Deploy(tuple(deploy(name) for name in names), limits=limits), SPECS)


class Faults:
    """Breaks workers now and then until `until_ns`, then mends them."""

    def __init__(self, world: World, scene: Scene) -> None:
        self.world = world
        self.scene = scene
        self.until_ns = world.now() + int(scene.seconds * S)
        world.after(0, scene.every_ns, self._strike)

    def _strike(self) -> None:
        world = self.world
        world.laws.no_turn_lingers()
        live = world.live()
        if world.now() >= self.until_ns:
            for worker in live:
                worker.mend()
            return
        if live:
            worker = world.random.choice(live)
            kind = world.random.choice(self.scene.faults)
            world.tell(f"worker {worker.worker} of {', '.join(worker.stages)}: {kind}")
            match kind:
                case "die":
                    worker.die()
                case "stall":
                    worker.stall(2 * S)
                case "lag":
                    worker.lag(1 + world.draw() * 39)
                case "repeat":
                    worker.repeat(0.2)
                case "swap":
                    worker.swap(0.1)
                case "choke":
                    worker.choke()
                case other:
                    raise AssertionError(f"{other} is no fault")
        world.after(0, self.scene.every_ns, self._strike)


class Play:
    """One scene, played in one world."""

    def __init__(self, world: World, scene: Scene, judge: Thinker, dynamics: Dynamics) -> None:
        self.world = world
        self.scene = scene
        self.desk = Desk(world, scene.wait_queue, scene.wait_deadline_s)
        self.askers = [
            Asker(world, self.desk, f"{name}{index}", scene.manners, name, scene.poison, scene.floods)
            for name, count in scene.asking
            for index in range(count)
        ]
        self.crowd: list[Talkative] = []
        for index in range(scene.people):
            Talkative(world, self.desk, f"person{index}", scene.manners, scene.habits, judge, self.crowd)
        self.dreamers: list[Dreamer] = []
        for index in range(scene.dreamers):
            Dreamer(world, self.desk, f"dreamer{index}", scene.manners, scene.whims, dynamics, self.dreamers)

    @property
    def clients(self) -> Sequence[Client]:
        return (*self.askers, *self.crowd, *self.dreamers)

    def go(self) -> None:
        world, scene = self.world, self.scene
        for client in self.clients:
            client.live()
        if scene.faults:
            Faults(world, scene)
        world.run(scene.seconds)
        self._calm()
        self._serve()
        self._end()

    def _calm(self) -> None:
        """Nothing new is begun, and all that runs comes to its end."""
        world = self.world
        world.laws.no_turn_lingers()
        for client in self.clients:
            client.leave()
        world.run(1.2)
        assert world.run_until(lambda: not any(worker.busy for worker in world.live()), 3), "a worker stalls for ever"
        assert world.run_until(world.it.pools.is_ready, 5), "the pools are never ready again (G9)"
        assert world.run_until(self._quiet, PATIENCE_S), f"{self._busy()} wait for turns that never end (G4, G9)"
        for client in self.clients:
            client.mend()
        world.run(0.5)

    def _busy(self) -> list[str]:
        return [client.name for client in self.clients if client.session is not None and client.session.busy]

    def _quiet(self) -> bool:
        return not self._busy()

    def _serve(self) -> None:
        """Whoever still has a session gets an answer, and then has everything."""
        world, scene = self.world, self.scene
        requests: dict[Asker | Dreamer, str] = {
            asker: asker.ask(units=3) for asker in self.askers if asker.on_line and asker.session is not None
        }
        for dreamer in self.dreamers:
            assert dreamer.learnt(), f"{dreamer.name} has a fork that there was no room for (G9)"
            if dreamer.on_line and dreamer.session is not None:
                dreamer.begin()
                requests[dreamer] = dreamer.step(frames=3)
        people = [person for person in self.crowd if person.on_line and person.session is not None]
        for person in people:
            person.tell(TextAppended("are you there"))
        world.run(0.2)
        world.run_until(self._quiet, PATIENCE_S)
        world.run(0.5)
        for asker, request in requests.items():
            if asker.session is not None and asker.on_line:
                assert asker.ends.get(request) == "done", f"{asker.name} is not served, {request} is not done (G9)"
        for person in people:
            if person.session is not None and person.on_line:
                assert person.answered(), f"{person.name} is not answered (G9)"
                assert not person.tickets, f"{person.name} never gets snapshots {person.tickets} (G9)"
        for client in self.clients:
            client.has_everything()
        if not scene.faults:
            assert not world.counts["workers_lost"], "a worker is lost that was sound (G9)"
        if not scene.whims.lossy and "swap" not in scene.faults:  # these may spoil every attempt to make it again
            assert not world.counts["sim_closed_state_lost"], "a rollout is lost, and nothing that makes it is (G9)"
        if not scene.faults:
            failed = [name for name in world.counts if name.startswith(("sim_turn_failed", "sim_response_failed"))]
            assert set(failed) <= MAY_FAIL, f"{failed}: turns fail on sound workers (G9)"

    def _end(self) -> None:
        world = self.world
        if self.scene.drains:
            world.it.drain(world.now() + S)
        else:
            for client in self.clients:
                client.close()
        world.run(max(self.scene.limits.detach_grace_s, 1) + 1)
        for client in self.clients:
            client.quit()
        world.run(0.2)
        at_rest(world, self.desk)
        if self.scene.drains:
            world.it.pools.drain()
            world.run(0.5)
            assert not world.it.pools.replicas(), "a worker stays when all are told to go (G3)"
        world.laws.settle()


def at_rest(world: World, desk: Desk) -> None:
    """Nothing is left of any session: not in the server, not in a worker (G3, G11)."""
    it = world.it
    assert it.sessions == 0, f"sessions {list(it._bound)} are left (G3)"
    assert world.slots.taken == 0, f"{world.slots.taken} slots are taken (G3)"
    assert desk.admission.admitted.sessions == 0, f"{desk.admission.admitted} is admitted (G3)"
    assert desk.admission.waiting == 0, f"{desk.admission.waiting} wait for admission (G3)"
    assert not it._turns, f"turns are left: {list(it._turns)} (G3)"
    assert not it._vacancies, f"{it._vacancies} wait for a replica (G3)"
    assert world.alarms() == 0, f"{world.alarms()} timers are left (G3)"
    assert world.counts["sim_outbox"] == 0, f"{world.counts['sim_outbox']} bytes wait in outboxes (G11)"
    for replica in it.pools.replicas():
        assert not replica.sessions, f"replica {replica.worker} keeps {replica.sessions} (G3)"
    for worker in world.live():
        for stage in worker.stages.values():
            what = f"worker {worker.worker} stage {stage.name}"
            assert not stage.hosts, f"{what} has sessions left: {list(stage.hosts)} (G3)"
            assert not stage.turns, f"{what} has turns left: {list(stage.turns)} (G3)"
            assert not stage.finished, f"{what} keeps output of {list(stage.finished)} (G3)"
            assert not stage.early, f"{what} keeps early chunks of {list(stage.early)} (G3)"


def play(seed: int, say: Callable[[str], None] | None = None) -> World:
    """Play the seed's scene; raises AssertionError where a guarantee is broken."""
    scene = draw(seed)
    if say is not None:
        say(f"seed {seed}: {scene}")
    names = tuple(name for name, _ in scene.asking) + ((VOICE.name,) if scene.people else ())
    names += (DREAM.name,) if scene.dreamers else ()
    judge, dynamics = Thinker(), Dynamics()
    where = placed(names, scene.replicas, scene.fused, scene.limits, scene.most_of_each)
    world = World(where, seed, {**MAKE, **SOUND_MAKE, "thinker": judge, "dynamics": dynamics}, say)
    dynamics.is_full = lambda: world.chance(scene.whims.full)
    dynamics.is_lost = lambda: world.chance(scene.whims.lossy)
    Play(world, scene, judge, dynamics).go()
    return world
