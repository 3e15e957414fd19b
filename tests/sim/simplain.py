"""Plain pipelines with whole and chunk edges, and clients that ask for turns, cancel, drop their line and return."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from simclients import Act, Client, Desk, Manners, Watched
from simlaws import Ledger
from simworkers import BrokenError, Host, Make
from simworld import World

from omni_live.pipelines.spec import EdgeSpec, Handover, PipelineSpec, StageSpec
from omni_live.sessions.events import Event, TurnDone, TurnSpoke
from omni_live.sessions.ids import CountedIds
from omni_live.sessions.inputs import Asked, CancelAsked
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.plain import PlainSession
from omni_live.sessions.session import Session
from omni_live.sessions.stamp import Stamp, session_key


class Source(Make):
    """Makes `units` numbered units of a request, or breaks where the request is poison."""

    def turn(self, host: Host, stamp: Stamp, params: Mapping[str, Scalar], payload: Payload) -> Iterable[Payload]:
        assert payload.meta["owner"] == host.session, "a request reached another session (G6)"
        if payload.meta["poison"]:
            raise BrokenError
        units = payload.meta["units"]
        assert isinstance(units, int)
        return [Payload("unit", {**payload.meta, "turn": stamp.turn, "index": index}) for index in range(units)]


class Relay(Make):
    """Hands on what is its own session's and of this turn."""

    def turn(self, host: Host, stamp: Stamp, params: Mapping[str, Scalar], payload: Payload) -> Iterable[Payload]:
        assert payload.meta["owner"] == host.session, "a unit reached another session (G6)"
        assert payload.meta["turn"] == stamp.turn, f"a unit of turn {payload.meta['turn']} reached {stamp} (G5)"
        return (payload,)


MIB = 1 << 20


def stages(names: str) -> tuple[StageSpec, ...]:
    return tuple(StageSpec(name, "nowhere:Engine", bytes_per_session=MIB) for name in names)


CHAIN = PipelineSpec(
    "chain",
    stages("abc"),
    edges=(EdgeSpec("a", "b", credits=2), EdgeSpec("b", "c", credits=3)),
    entries={"x": "a"},
    outputs={"mid": "b", "end": "c"},
)
MIXED = replace(
    CHAIN,
    name="mixed",
    stages=stages("abcd"),
    edges=(
        EdgeSpec("a", "b", Handover.WHOLE),
        EdgeSpec("b", "c", credits=1),
        EdgeSpec("a", "d", credits=4),
    ),
    outputs={"end": "c", "beside": "d"},
)
MAKE: Mapping[str, Make] = {"a": Source(), "b": Relay(), "c": Relay(), "d": Relay()}


class WatchedPlain(Watched, PlainSession):
    def check(self) -> None:
        assert len(self._waiting) <= self.limits.mailbox_turns, f"{len(self._waiting)} requests wait (G11)"


class Asker(Client):
    """Asks for turns, cancels some, breaks its line, closes and comes anew."""

    def __init__(
        self, world: World, desk: Desk, name: str, manners: Manners, pipeline: str, poison: float, floods: int
    ) -> None:
        super().__init__(world, desk, name, manners)
        self.pipeline = pipeline
        self.poison = poison
        self.floods = floods
        self._outputs = tuple(world.plan.pipeline(pipeline).outputs.values())
        self._requests = 0
        self._heard: Counter[tuple[str, str]] = Counter()
        self.ends: dict[str, str] = {}
        """How each request ended, as the client heard it."""

    def make_session(self, slot: int, generation: int) -> tuple[Session, Ledger]:
        key = session_key(slot, generation)
        limits, now = self.world.plan.limits, self.world.now()
        session = WatchedPlain(f"sess_{self.name}", slot, generation, limits, CountedIds(f"{key:x}."), now)
        ledger = Ledger(self.world, key, self.name)
        session.watch(self.world, ledger)
        return session, ledger

    def opened(self) -> None:
        self._heard.clear()

    def ask(self, units: int | None = None) -> str:
        session, ledger = self.session, self.ledger
        if session is None or ledger is None:
            return ""
        world = self.world
        self._requests += 1
        request = f"{self.name}-{self._requests}"
        poison = units is None and world.chance(self.poison)
        outputs = frozenset(name for name in self._outputs if units or world.chance(0.6)) or frozenset(self._outputs)
        units = units or world.random.randint(1, 9)
        meta: Mapping[str, Scalar] = {"owner": int(ledger.key), "units": units, "poison": poison}
        self.tell(Asked("a", outputs, Payload("request", meta), request_id=request))
        return request

    def acts(self) -> dict[Act, int]:
        return {self.ask: 40, self.cancel: 12, self.babble: 4, self.flood: self.floods}

    def flood(self) -> None:
        """Ask for more than may wait."""
        for _ in range(self.world.plan.limits.mailbox_turns + 6):
            self.ask(units=1)

    def cancel(self) -> None:
        self.tell(CancelAsked())

    def babble(self) -> None:
        """Things that are legal and useless."""
        self.tell(CancelAsked("no such request"))
        self.beat()

    def got(self, event: Event) -> None:
        match event:
            case TurnSpoke(request, _, stage, payload):
                assert self.ledger is not None
                assert payload.meta["owner"] == self.ledger.key, f"{self.name} got another's content (G6)"
                assert self.forgot or request not in self.ends, f"{self.name}: {request} speaks after its end (G1, G4)"
                index = payload.meta["index"]
                if not self.gap_to and not self.forgot:
                    assert index == self._heard[request, stage], f"{self.name}: {request} has holes (G7)"
                self._heard[request, stage] += 1
            case TurnDone(request, _, status):
                assert self.forgot or request not in self.ends, f"{self.name}: {request} ends twice (G4, G7)"
                self.ends[request] = status
            case _:
                pass
