"""The decoder engine, hand-cranked on a fake world, alone and behind the dynamics."""

import numpy as np
import pytest

from omni_live.engines.contract import EngineOptions, TurnError
from omni_live.engines.options import BadOption
from omni_live.pipelines.world.adapter import Floats, Images, WorldBroken
from omni_live.pipelines.world.decoder import Decoder
from omni_live.pipelines.world.dynamics import Dynamics
from omni_live.pipelines.world.fake import SIDE, FakeFailure, FakeWorld
from omni_live.protocols.arrays import Array, array, pack
from omni_live.sessions.inputs import Outcome
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.stamp import LANES, Stamp, session_key
from tests.pipelines.rig import FakeHost, FakeTurn, run

FAKE = "omni_live.pipelines.world.fake:FakeWorld"
HERE = __name__


class Touchy(FakeWorld):
    """Raises at a latent that holds a 0.75, and notes the sizes of its batches."""

    def load(self) -> None:
        self.sizes: list[int] = []
        self.is_broken = False

    def decode(self, latents: Floats) -> Images:
        self.sizes.append(len(latents))
        if self.is_broken or bool((latents == 0.75).any()):
            raise FakeFailure
        return super().decode(latents)


class Flat(FakeWorld):
    def decode(self, latents: Floats) -> Images:
        return super().decode(latents)[..., 0]


class Clock(FakeHost):
    """A host whose time goes on with each look at it."""

    def __init__(self) -> None:
        super().__init__()
        self.ns = 0

    def now(self) -> int:
        self.ns += 1
        return self.ns


class Bench:
    def __init__(self, **options: Scalar) -> None:
        self.engine = Decoder(EngineOptions({"world": f"{HERE}:Touchy", **options}))
        self.engine.load(Clock())
        world = self.engine._world
        assert isinstance(world, Touchy)
        self.world = world
        self.world.sizes.clear()

    def turn(self, number: int, *payloads: Payload, due_ns: int = 0, room: int = 1000) -> FakeTurn:
        turn = FakeTurn(Stamp(number * LANES, 1, 1, 1, 0, 0, due_ns), room=room)
        self.engine.begin(turn)
        turn.inbox.extend(payloads)
        turn.complete = True
        return turn

    def run(self) -> None:
        for _ in range(1000):
            try:
                if not self.engine.step():
                    return
            except TurnError as error:
                turn = error.turn
                assert isinstance(turn, FakeTurn)
                self.engine.drop(turn)
                turn.finish(Outcome.FAILED, error.code)
        raise AssertionError("the engine never rests")


def latent(grey: float, step: int = 1) -> Payload:
    return pack("latent", {"step": step}, latent=np.full(FakeWorld.LATENT, grey, np.float32))


def greys(turn: FakeTurn) -> list[int]:
    """Of the frames that a turn gave, each of one grey."""
    found = []
    for payload in turn.sent:
        image = array(payload, "image")
        assert payload.kind == "frame" and image.dtype == np.uint8 and image.shape == (SIDE, SIDE, 3)
        assert image.min() == image.max()
        found.append(int(image.flat[0]))
    return found


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_each_latent_becomes_a_frame_of_its_number_in_order(bench: Bench) -> None:
    turn = bench.turn(0, latent(0.2, 5), latent(0.4, 6), latent(1, 7))
    bench.run()
    assert greys(turn) == [51, 102, 255]
    assert [payload.meta["step"] for payload in turn.sent] == [5, 6, 7]
    assert turn.ended == (Outcome.DONE, "")


def test_sessions_share_a_batch(bench: Bench) -> None:
    turns = [bench.turn(number, latent(number / 5), latent(0)) for number in range(5)]
    bench.run()
    assert bench.world.sizes == [5, 5]
    assert [greys(turn) for turn in turns] == [[51 * number, 0] for number in range(5)]


def test_a_batch_is_no_larger_than_it_may_be_and_takes_the_most_urgent() -> None:
    bench = Bench(max_batch=2)
    late, soon, sooner = (bench.turn(n, latent(0), due_ns=due) for n, due in enumerate((300, 200, 100)))
    bench.engine.step()
    assert [len(turn.sent) for turn in (late, soon, sooner)] == [0, 1, 1]
    bench.run()
    assert bench.world.sizes == [2, 1] and len(late.sent) == 1


def test_rows_are_decoded_alone_where_that_is_asked_for() -> None:
    bench = Bench(deterministic=True)
    for number in range(3):
        bench.turn(number, latent(0))
    bench.run()
    assert bench.world.sizes == [1, 1, 1]


def test_nothing_is_taken_without_room_for_its_frame(bench: Bench) -> None:
    turn = bench.turn(0, latent(0), latent(1), room=1)
    bench.run()
    assert turn.waiting() == 1 and len(turn.sent) == 1 and turn.ended is None
    assert bench.engine.load_now().queued == 1
    turn.credit = 1
    bench.run()
    assert greys(turn) == [0, 255]


def test_a_turn_that_is_dropped_gives_no_more_frames(bench: Bench) -> None:
    turn = bench.turn(0, latent(0), latent(1))
    bench.engine.step()
    bench.engine.drop(turn)
    bench.run()
    assert len(turn.sent) == 1 and bench.engine.load_now().turns == 0


def test_a_poison_latent_ends_its_own_turn_alone(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    turns = [bench.turn(number, latent(grey), latent(0)) for number, grey in enumerate((0.2, 0.75, 0.4))]
    bench.run()
    assert turns[1].ended == (Outcome.FAILED, "world_error") and not turns[1].sent
    assert [greys(turns[0]), greys(turns[2])] == [[51, 0], [102, 0]]
    assert "event=decode_failed" in caplog.text


def test_who_was_in_a_batch_with_poison_is_batched_again_after_a_frame_alone(bench: Bench) -> None:
    for number, grey in enumerate((0.2, 0.75, 0.4)):
        bench.turn(number, *(latent(grey) for _ in range(4)))
    bench.run()
    assert bench.world.sizes[-3:] == [2, 2, 2]


@pytest.mark.parametrize(
    "payload",
    [
        pack("latent", {}, latent=np.zeros((3, 4, 5), np.float32)),
        pack("latent", {}, latent=np.zeros((3, 4, 4))),
        pack("latent", {}, others=np.zeros((3, 4, 4), np.float32)),
        pack("actions", {}, latent=np.zeros((3, 4, 4), np.float32)),
    ],
)
def test_what_is_no_latent_ends_its_turn(bench: Bench, payload: Payload) -> None:
    bad, good = bench.turn(0, payload), bench.turn(1, latent(0))
    bench.run()
    assert bad.ended == (Outcome.FAILED, "bad_latent") and greys(good) == [0]


def test_a_world_that_cannot_decode_zeros_takes_its_worker_down(bench: Bench) -> None:
    bench.turn(0, latent(0))
    bench.world.is_broken = True
    with pytest.raises(WorldBroken):
        bench.run()
    with pytest.raises(WorldBroken):
        Decoder(EngineOptions({"world": f"{HERE}:Flat"})).load(FakeHost())


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(BadOption):
        Bench(speed=1)
    with pytest.raises(BadOption):
        Bench(max_batch=0)


def test_actions_become_frames_through_both_stages() -> None:
    host = FakeHost()
    dynamics, decoder = (made(EngineOptions({"world": FAKE})) for made in (Dynamics, Decoder))
    for engine in (dynamics, decoder):
        engine.load(host)
        engine.open(session_key(0, 1), {})
    dynamics.listen(session_key(0, 1), Payload("reset", {"seed": 0}))
    actions: Array = np.full((3, 2, 2), 0.25, np.float32)
    for step, payload in ((0, Payload("look", {"step": 0})), (1, pack("actions", {"step": 1}, actions=actions))):
        first, second = (FakeTurn(Stamp(0, 1, 1, step + 1, stage)) for stage in (0, 1))
        first.receiver = second
        first.inbox.append(payload)
        first.complete = True
        dynamics.begin(first)
        decoder.begin(second)
        run(dynamics, decoder)
        assert second.ended == (Outcome.DONE, "")
        assert [sent.meta["step"] for sent in second.sent] == ([0] if step == 0 else [1, 2, 3])
        if step == 0:
            assert greys(second) == [50]
