"""The dynamics engine, hand-cranked on a fake world: rollouts, their ends, and what a session keeps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_live.engines.contract import EngineOptions, SessionError, TurnError
from omni_live.engines.options import BadOption
from omni_live.pipelines.world.adapter import BadWorld, Floats, Images, World, WorldBroken
from omni_live.pipelines.world.dynamics import MAX_FRAMES, PAGE_RECORDS, UNDELIVERED, Dynamics
from omni_live.pipelines.world.fake import SIDE, FakeWorld
from omni_live.protocols.arrays import array, pack
from omni_live.runtime.fences import FenceTable
from omni_live.runtime.outbox import Outbox
from omni_live.runtime.ports import CLIENT, Route, WorkerId
from omni_live.runtime.runner import Runner
from omni_live.runtime.wire import Ended, FeedSession, FeedTurn, OpenSession, OpenTurn, Spoke, inline
from omni_live.sessions.inputs import Outcome
from omni_live.sessions.payload import ArraySpec, Payload, Scalar
from omni_live.sessions.stamp import LANES, Fence, SessionKey, Stamp, session_key
from tests.pipelines.rig import FakeHost, FakeTurn

FAKE: Final = "omni_live.pipelines.world.fake:FakeWorld"
HERE: Final = __name__
PAGE: Final = PAGE_RECORDS * 192  # a fake latent is 48 float32
STEPS: Final = FakeWorld.STEPS


class Rounding(FakeWorld):
    """Rounds a little differently in batches of different sizes, as real worlds do, and notes every batch."""

    noted: list[list[int]]

    def __init__(self, options: Mapping[str, Scalar]) -> None:
        super().__init__(options)
        self.noted = []

    def denoise(self, x: Floats, step_index: NDArray[np.int64], context: Floats, actions: Floats) -> Floats:
        self.noted.append(step_index.tolist())
        x = super().denoise(x, step_index, context, actions)
        return np.asarray(x * np.float32(1 + 1e-6 * len(x)), np.float32)


class Clock(FakeHost):
    def __init__(self) -> None:
        super().__init__()
        self.ns = 1

    def now(self) -> int:
        self.ns += 1
        return self.ns


class Bench:
    """An engine, and what a runner does around it."""

    def __init__(self, world: str = f"{HERE}:Rounding", **options: Scalar) -> None:
        self.host = Clock()
        self.engine = Dynamics(EngineOptions({"world": world, "pool_bytes": 512 * PAGE, **options}))
        self.engine.load(self.host)
        self.turns = 0
        self.used = 0

    @property
    def batches(self) -> list[list[int]]:
        """The denoising steps of each batch that sessions had."""
        world = self.engine._world
        assert isinstance(world, Rounding)
        return world.noted[2:]  # the first two warmed it up

    def open(self, number: int, seed: int = 0) -> SessionKey:
        key = session_key(number, 1)
        self.engine.open(key, {})
        assert self.tell(number, "reset", seed=seed) == ("at", 0)
        return key

    def tell(self, number: int, kind: str, **meta: Scalar) -> tuple[str, Scalar]:
        """What the session reports: where it is, or why not."""
        return self.told(number, Payload(kind, meta))

    def told(self, number: int, payload: Payload) -> tuple[str, Scalar]:
        self.engine.listen(session_key(number, 1), payload)
        session, found = self.host.found.pop()
        assert session == session_key(number, 1)
        return found.kind, found.meta["step" if found.kind == "at" else "code"]

    def ask(self, number: int, payload: Payload | None, due_ns: int = 0, room: int = 1000) -> FakeTurn:
        self.turns += 1
        turn = FakeTurn(Stamp(number * LANES, 1, 1, self.turns, 0, 0, due_ns), room=room)
        self.engine.begin(turn)
        if payload is not None:
            turn.inbox.append(payload)
            turn.complete = True
        return turn

    def roll(self, number: int, step: int, count: int = 1, pace: float = 0.5, room: int = 1000) -> FakeTurn:
        return self.ask(number, acts(step, count, pace), room=room)

    def rolled(self, number: int, step: int, count: int = 1, pace: float = 0.5) -> list[bytes]:
        """The frames, once they are all there."""
        turn = self.roll(number, step, count, pace)
        self.run()
        assert turn.ended == (Outcome.DONE, "")
        return frames(turn, step)

    def look(self, number: int, **meta: Scalar) -> FakeTurn:
        turn = self.ask(number, Payload("look", meta))
        self.run()
        return turn

    def step(self) -> bool:
        try:
            return self.engine.step()
        except TurnError as error:
            turn = error.turn
            assert isinstance(turn, FakeTurn)
            self.engine.drop(turn)
            turn.finish(Outcome.FAILED, error.code)
            return True

    def run(self, most: int = 20_000) -> None:
        for _ in range(most):
            if not self.step():
                return
        raise AssertionError("the engine never rests")


def acts(step: int, count: int = 1, pace: float = 0.5) -> Payload:
    """Actions that differ from frame to frame, beginning with `pace`."""
    given = np.empty((count, 2, 2), np.float32)
    given[:] = (np.arange(step, step + count, dtype=np.float32) % 7 / 10)[:, None, None] - 0.3
    given[:, 0, 0] = pace
    return pack("actions", {"step": step}, actions=given)


def frames(turn: FakeTurn, first: int) -> list[bytes]:
    """The latents of a turn, which must be numbered from `first`."""
    for at, payload in enumerate(turn.sent):
        latent = array(payload, "latent")
        assert payload.kind == "latent" and payload.meta == {"step": first + at}
        assert latent.dtype == np.float32 and latent.shape == FakeWorld.LATENT
    return [bytes(payload.body) for payload in turn.sent]


def failed(turn: FakeTurn) -> str:
    assert turn.ended is not None and turn.ended[0] is Outcome.FAILED
    return turn.ended[1]


@pytest.fixture
def bench() -> Bench:
    return Bench()


# -- a rollout


def test_each_action_pair_makes_one_frame_in_order(bench: Bench) -> None:
    bench.open(0)
    assert len(set(bench.rolled(0, 1, 5))) == 5
    assert len(bench.rolled(0, 6, 1)) == 1


def test_a_denoising_step_is_one_step_of_the_engine(bench: Bench) -> None:
    bench.open(0)
    turn = bench.roll(0, 1, 2)
    for done in range(1, 2 * STEPS + 1):
        assert bench.step()
        assert len(turn.sent) == done // STEPS
    assert turn.ended == (Outcome.DONE, "")
    assert not bench.step()
    assert bench.batches == [[index] for index in (0, 1, 2, 3, 0, 1, 2, 3)]


def test_a_turn_that_asks_for_another_step_than_the_next_fails(bench: Bench) -> None:
    bench.open(0)
    bench.rolled(0, 1, 2)
    for step in (0, 2, 4, -1):
        turn = bench.roll(0, step)
        bench.run()
        assert failed(turn) == "step_out_of_order" and not turn.sent
    bench.rolled(0, 3)


def test_frames_follow_from_seed_and_actions_alone(bench: Bench) -> None:
    for number, seed in ((0, 5), (1, 5), (2, 9)):
        bench.open(number, seed)
    first, again, other = (bench.rolled(number, 1, 4) for number in range(3))
    assert first == again != other
    assert bench.tell(0, "reset", seed=5) == ("at", 0)
    assert bench.rolled(0, 1, 4) == first
    assert bench.tell(0, "reset", seed=5) == ("at", 0)
    assert bench.rolled(0, 1, 4, pace=0.6)[0] != first[0]


def test_one_turn_of_many_frames_makes_the_same_as_many_turns_of_one() -> None:
    bench = Bench()
    bench.open(0)
    bench.open(1)
    assert bench.rolled(0, 1, 6) == [bench.rolled(1, step)[0] for step in range(1, 7)]


def test_a_session_that_was_not_reset_has_nothing_to_go_on_from(bench: Bench) -> None:
    bench.engine.open(session_key(0, 1), {})
    turns = [bench.roll(0, 1), bench.ask(0, Payload("look", {"step": 0})), bench.ask(0, Payload("look"))]
    bench.run()
    assert [failed(turn) for turn in turns] == ["not_started"] * 3
    assert bench.tell(0, "rewind", step=0) == ("refused", "not_started")
    assert bench.tell(0, "cut", step=0) == ("refused", "not_started")
    with pytest.raises(SessionError, match="not_started"):
        bench.engine.snapshot(session_key(0, 1))
    bench.engine.fork(session_key(0, 1), session_key(1, 1))
    assert bench.tell(1, "reset") == ("at", 0)


def test_a_turn_of_an_unknown_session_fails_at_once(bench: Bench) -> None:
    with pytest.raises(TurnError, match="unknown_session"):
        bench.roll(0, 1)
    for act in (bench.engine.snapshot, lambda key: bench.engine.fork(key, session_key(9, 1))):
        with pytest.raises(SessionError, match="unknown_session"):
            act(session_key(0, 1))


@pytest.mark.parametrize(
    "payload",
    [
        pack("actions", {"step": 1}, actions=np.zeros((1, 2, 2))),
        pack("actions", {"step": 1}, actions=np.zeros((2, 2), np.float32)),
        pack("actions", {"step": 1}, actions=np.zeros((1, 2, 3), np.float32)),
        pack("actions", {"step": 1}, actions=np.zeros((0, 2, 2), np.float32)),
        pack("actions", {"step": 1}, actions=np.zeros((MAX_FRAMES + 1, 2, 2), np.float32)),
        pack("actions", {"step": 1}, actions=np.full((1, 2, 2), np.nan, np.float32)),
        pack("actions", {"step": 1}, others=np.zeros((1, 2, 2), np.float32)),
        Payload("actions", {"step": 1}, b"1234", (ArraySpec("actions", "<f4", (1, 2, 2)),)),
        Payload("dance", {"step": 1}),
    ],
)
def test_actions_that_are_none_end_their_turn_alone(bench: Bench, payload: Payload) -> None:
    bench.open(0)
    turn = bench.ask(0, payload)
    bench.run()
    assert failed(turn) == "bad_actions"
    bench.rolled(0, 1)


def test_a_turn_whose_input_ends_without_actions_fails(bench: Bench) -> None:
    bench.open(0)
    turn = bench.ask(0, None)
    bench.run()
    assert turn.ended is None
    turn.complete = True
    bench.run()
    assert failed(turn) == "no_actions"


def test_turns_of_one_session_go_one_after_the_other(bench: Bench) -> None:
    bench.open(0)
    first, second, third = bench.roll(0, 1, 2), bench.roll(0, 3, 1), bench.roll(0, 3, 1)
    bench.run()
    assert len(frames(first, 1)) == 2 and len(frames(second, 3)) == 1
    assert failed(third) == "step_out_of_order"


def test_no_frame_is_begun_without_room_for_it(bench: Bench) -> None:
    bench.open(0)
    turn = bench.roll(0, 1, 3, room=1)
    bench.run()
    assert len(turn.sent) == 1 and len(bench.batches) == STEPS
    assert bench.tell(0, "cut", step=9) == ("at", 1)
    turn.credit = 2
    bench.run()
    assert len(frames(turn, 1)) == 3 and turn.ended == (Outcome.DONE, "")


# -- batches


def test_frames_at_different_denoising_steps_share_a_batch(bench: Bench) -> None:
    for number in range(3):
        bench.open(number)
    bench.roll(0, 1)
    bench.step()
    bench.roll(1, 1)
    bench.step()
    bench.step()
    bench.roll(2, 1)
    bench.run()
    assert bench.batches == [[0], [1, 0], [2, 1], [3, 2, 0], [3, 1], [2], [3]]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_batch_gives_what_each_gives_alone(deterministic: bool) -> None:
    alone, bench = Bench(), Bench(deterministic=deterministic)
    turns = []
    for number in range(5):
        alone.open(number, seed=number)
        bench.open(number, seed=number)
    for number in range(5):
        turns.append(bench.roll(number, 1, 4, pace=0.1 * number))
        bench.step()
    bench.run()
    for number, turn in enumerate(turns):
        wanted, found = alone.rolled(number, 1, 4, pace=0.1 * number), frames(turn, 1)
        if deterministic:
            assert found == wanted
        else:
            assert found != wanted  # else the fake would not show anything here
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_allclose(np.frombuffer(one, "<f4"), np.frombuffer(other, "<f4"), atol=1e-4)
    assert {len(batch) for batch in bench.batches} == ({1} if deterministic else {1, 2, 3, 4, 5})


def test_a_turn_that_wants_to_be_alone_gives_what_it_gives_without_company() -> None:
    alone, bench = Bench(), Bench()
    alone.open(0)
    for number in range(4):
        bench.open(number)
    shy = bench.ask(0, Payload("actions", {"step": 1, "alone": True}, acts(1, 4).body, acts(1, 4).arrays))
    others = [bench.roll(number, 1, 4) for number in range(1, 4)]
    bench.run()
    assert frames(shy, 1) == alone.rolled(0, 1, 4)
    assert frames(others[0], 1) != alone.rolled(0, 5, 4), "the fake shows company"
    assert {len(batch) for batch in bench.batches} == {1, 3}


def test_a_batch_is_no_larger_than_it_may_be_and_takes_the_most_urgent(bench: Bench) -> None:
    bench = Bench(max_batch=2)
    for number in range(4):
        bench.open(number)
    undated, late, soon, sooner = (bench.ask(n, acts(1), due) for n, due in enumerate((0, 300, 200, 100)))
    for _ in range(STEPS):
        bench.step()
    assert [len(turn.sent) for turn in (undated, late, soon, sooner)] == [0, 0, 1, 1]
    bench.run()
    assert [len(turn.sent) for turn in (undated, late)] == [1, 1]
    assert max(len(batch) for batch in bench.batches) == 2


def test_undated_turns_take_turns_frame_by_frame() -> None:
    bench = Bench(deterministic=True)
    bench.open(0)
    bench.open(1)
    long, short = bench.roll(0, 1, 10), bench.roll(1, 1, 1)
    for _ in range(2 * STEPS):
        bench.step()
    assert short.ended and len(long.sent) == 1


# -- ends in the middle


@pytest.mark.parametrize("done", range(3 * STEPS))
def test_a_turn_that_is_dropped_commits_whole_frames_only(done: int) -> None:
    bench, whole = Bench(), Bench()
    bench.open(0)
    whole.open(0)
    turn = bench.roll(0, 1, 3)
    for _ in range(done):
        bench.step()
    bench.engine.drop(turn)
    steps = len(bench.batches)
    bench.run()
    assert len(bench.batches) == steps == done
    kept = done // STEPS
    assert len(turn.sent) == kept
    assert bench.tell(0, "cut", step=99) == ("at", kept)
    assert frames(turn, 1) + bench.rolled(0, kept + 1, 3 - kept) == whole.rolled(0, 1, 3)


@pytest.mark.parametrize("done", range(2 * STEPS))
def test_a_fence_stops_a_step_of_many_frames_before_its_next_denoising_step(done: int, tmp_path: Path) -> None:
    """As a worker runs it: what the model computes after the fence has moved is counted, and is nothing."""
    bench = Bench()
    fences, outbox = FenceTable.create(tmp_path / "fences", 4), Outbox(tmp_path, WorkerId(1), 1 << 20)
    runner = Runner(1, {"dynamics": bench.engine}, fences, outbox, wake=lambda: None)
    key, fence = session_key(0, 1), Fence(0, 1)
    fences.write(fence)
    reset = inline(Payload("reset", {"seed": 0}))
    runner.receive(0, OpenSession(0, "dynamics", key, {}))
    runner.receive(0, FeedSession(1, "dynamics", key, reset))
    stamp, actions = fence.stamp(1), inline(acts(1, 5))
    runner.receive(0, OpenTurn(2, "dynamics", stamp, {}, (Route(CLIENT, WorkerId(0), 64),), 1))
    runner.receive(0, FeedTurn(3, "dynamics", stamp, actions, True))
    while len(bench.batches) < done:
        assert runner.step()
    fences.write(fence.raised())
    while runner.step():
        pass
    assert len(bench.batches) == done
    said = [message for _, message in outbox.take()]
    assert sum(isinstance(message, Spoke) for message in said) == done // STEPS, "whole frames, and no others"
    assert [message.reason for message in said if isinstance(message, Ended)] == ["stale"]


def test_a_rollout_whose_session_was_moved_goes_on_no_more(bench: Bench) -> None:
    bench.open(0)
    bench.rolled(0, 1, 2)
    for kind, step in (("rewind", 3), ("reset", 4)):
        turn = bench.roll(0, step, 2)
        for _ in range(STEPS + 1):
            bench.step()
        bench.tell(0, kind, step=step)
        bench.run()
        assert failed(turn) == "step_out_of_order" and len(turn.sent) == 1
    assert bench.tell(0, "rewind", step=0) == ("at", 0)


def test_a_session_may_close_under_its_turn(bench: Bench) -> None:
    key = bench.open(0)
    turn = bench.roll(0, 1, 2)
    bench.step()
    bench.engine.drop(turn)
    bench.engine.close(key)
    bench.engine.close(key)
    bench.run()
    assert bench.engine.load_now().bytes_used == bench.engine.load_now().sessions == 0


@pytest.mark.parametrize("number", [0, 1, 2])
def test_poison_actions_end_their_own_turn_alone(number: int, caplog: pytest.LogCaptureFixture) -> None:
    poison = 0.75
    bench, sound = Bench(fail_on=poison), Bench()
    for at in range(3):
        bench.open(at)
        sound.open(at)
    turns = [bench.roll(at, 1, 2, pace=poison if at == number else 0.5) for at in range(3)]
    bench.run()
    for at, turn in enumerate(turns):
        if at == number:
            assert failed(turn) == "world_error" and not turn.sent
        else:
            assert turn.ended == (Outcome.DONE, "") and len(turn.sent) == 2
    assert "event=world_failed" in caplog.text
    assert bench.rolled(number, 1) == sound.rolled(number, 1)  # of the poison frame nothing stayed


def test_who_sent_poison_once_is_served_alone_and_so_are_its_forks() -> None:
    bench = Bench(fail_on=0.75)
    bench.open(0)
    bench.open(1)
    bench.roll(0, 1, pace=0.75)
    bench.run()
    bench.engine.fork(session_key(0, 1), session_key(2, 1))
    before = len(bench.batches)
    for number in range(3):
        bench.roll(number, 1)
    bench.run()
    assert all(len(batch) == 1 for batch in bench.batches[before:])


def test_who_was_in_a_batch_with_poison_is_batched_again_after_a_step_alone() -> None:
    bench = Bench(fail_on=0.75)
    for number in range(3):
        bench.open(number)
    bench.roll(0, 1, 3)
    bench.roll(1, 1, 3)
    bench.roll(2, 1, pace=0.75)
    bench.run()
    assert [len(batch) for batch in bench.batches].count(2) >= 2 * STEPS


def test_a_frame_that_is_no_number_is_neither_kept_nor_shown(bench: Bench) -> None:
    bench = Bench(nan_on=0.75)
    bench.open(0)
    bench.open(1)
    given = acts(1, 3)
    actions = np.array(array(given, "actions"))
    actions[2, 0, 0] = 0.75
    poison, other = bench.ask(0, pack("actions", {"step": 1}, actions=actions)), bench.roll(1, 1, 3)
    bench.run()
    assert failed(poison) == "frame_not_finite" and len(frames(poison, 1)) == 2
    assert len(frames(other, 1)) == 3
    bench.rolled(0, 3)


class Broken(FakeWorld):
    """Runs until it is told to stop."""

    stopped = False

    def denoise(self, x: Floats, step_index: NDArray[np.int64], context: Floats, actions: Floats) -> Floats:
        if self.stopped:
            raise FloatingPointError
        return super().denoise(x, step_index, context, actions)


def test_a_world_that_cannot_go_on_from_zeros_takes_its_worker_down() -> None:
    bench = Bench(f"{HERE}:Broken")
    bench.open(0)
    bench.roll(0, 1)
    world = bench.engine._world
    assert isinstance(world, Broken)
    world.stopped = True
    with pytest.raises(WorldBroken):
        bench.run()


class Narrow(FakeWorld):
    def finish(self, x: Floats, context: Floats) -> Floats:
        return x[:, :1]


def test_a_world_that_gives_other_latents_than_it_says_is_not_served() -> None:
    with pytest.raises(WorldBroken):
        Bench(f"{HERE}:Narrow")


def test_an_output_that_refuses_a_frame_fails_its_turn_and_no_other(bench: Bench) -> None:
    bench.open(0)
    bench.open(1)
    bad, good = bench.roll(0, 1), bench.roll(1, 1)

    def refuse(payload: Payload) -> None:
        raise TurnError(bad, "peer_lost")

    bad.emit = refuse  # type: ignore[method-assign]
    bench.run()
    assert failed(bad) == "peer_lost" and good.ended == (Outcome.DONE, "")
    assert bench.tell(0, "cut", step=0) == ("at", 0)  # the session cuts what it never got
    bench.rolled(0, 1)


# -- looks, resets, rewinds


def test_any_kept_frame_can_be_looked_at(bench: Bench) -> None:
    bench.open(0)
    made = bench.rolled(0, 1, 3)
    assert [frames(bench.look(0, step=step), step)[0] for step in (1, 2, 3)] == made
    assert frames(bench.look(0), 3) == [made[2]]
    start = array(bench.look(0, step=0).sent[0], "latent")
    np.testing.assert_array_equal(start, np.full(FakeWorld.LATENT, np.float32(50) / np.float32(255)))
    for step in (4, -1):
        assert failed(bench.look(0, step=step)) == "step_unknown"


def test_a_look_waits_for_room_and_not_for_frames(bench: Bench) -> None:
    bench.open(0)
    bench.roll(0, 1, 100)
    turn = bench.ask(0, Payload("look", {"step": 0}), room=0)
    bench.step()
    assert turn.ended is None
    turn.credit = 1
    bench.step()
    assert turn.ended == (Outcome.DONE, "")


def test_a_seed_names_one_of_the_starts_and_an_image_is_a_start_of_its_own(bench: Bench) -> None:
    for seed, grey in ((0, 50), (1, 100), (5, 100), (7, 200)):
        assert bench.open(seed, seed) == session_key(seed, 1)
        start = array(bench.look(seed, step=0).sent[0], "latent")
        np.testing.assert_array_equal(start, np.full(FakeWorld.LATENT, np.float32(grey) / np.float32(255)))
    by_seed = bench.rolled(5, 1, 2)
    image = np.full((SIDE, SIDE, 3), 100, np.uint8)
    assert bench.told(5, pack("reset", {"seed": 5}, image=image)) == ("at", 0)
    assert bench.rolled(5, 1, 2) == by_seed
    assert bench.told(5, pack("reset", {"seed": 5}, image=image // 2)) == ("at", 0)
    assert bench.rolled(5, 1, 2) != by_seed


@pytest.mark.parametrize(
    "image", [np.zeros((SIDE, SIDE, 3), np.float32), np.zeros((SIDE, SIDE, 4), np.uint8), np.zeros((1, 2), np.uint8)]
)
def test_a_start_that_is_no_frame_is_refused(bench: Bench, image: NDArray[np.uint8]) -> None:
    bench.open(0)
    bench.rolled(0, 1, 2)
    assert bench.told(0, pack("reset", {}, image=image)) == ("refused", "bad_reset")
    assert bench.told(0, pack("reset", {}, picture=image)) == ("refused", "bad_reset")
    bench.rolled(0, 3)


@pytest.mark.parametrize("step", [0, 1, 4, 9, 10])
def test_rewinding_and_acting_again_gives_the_same_frames(bench: Bench, step: int) -> None:
    bench.open(0, 3)
    made = bench.rolled(0, 1, 10)
    assert bench.tell(0, "rewind", step=step) == ("at", step)
    if step < 10:
        assert failed(bench.look(0, step=step + 1)) == "step_unknown"
        assert bench.rolled(0, step + 1, 10 - step) == made[step:]


def test_a_rewind_into_the_future_or_nowhere_is_refused(bench: Bench) -> None:
    bench.open(0)
    bench.rolled(0, 1, 3)
    assert bench.tell(0, "rewind", step=4) == ("refused", "rewind_ahead")
    assert bench.tell(0, "rewind", step=-1) == ("refused", "bad_step")
    assert bench.tell(0, "rewind") == ("refused", "bad_step")
    assert bench.tell(0, "rewind", step="1") == ("refused", "bad_step")
    bench.rolled(0, 4)


@pytest.mark.parametrize("length", [8, 12, 300])
def test_a_rewind_reaches_just_as_far_back_as_it_should(length: int) -> None:
    bench = Bench(rewind_steps=8)
    bench.open(0)
    made = bench.rolled(0, 1, length)
    assert bench.tell(0, "rewind", step=length - 9) == ("refused", "bad_step" if length == 8 else "rewind_too_far")
    assert bench.tell(0, "rewind", step=length - 8) == ("at", length - 8)
    assert bench.rolled(0, length - 7, 8) == made[-8:]


def test_frames_that_were_never_delivered_are_cut_without_a_loss_of_reach() -> None:
    bench = Bench(rewind_steps=8)
    bench.open(0)
    made = bench.rolled(0, 1, 200 + UNDELIVERED)
    assert bench.tell(0, "cut", step=200 + UNDELIVERED) == ("at", 200 + UNDELIVERED)
    assert bench.tell(0, "cut", step=200) == ("at", 200)
    assert bench.tell(0, "rewind", step=191) == ("refused", "rewind_too_far")
    assert bench.tell(0, "rewind", step=192) == ("at", 192)
    assert bench.rolled(0, 193, 8) == made[192:200]
    assert bench.tell(0, "cut", step=3) == ("refused", "rewind_too_far")


def test_what_a_session_says_that_is_no_command_is_ignored(bench: Bench) -> None:
    bench.open(0)
    bench.engine.listen(session_key(0, 1), Payload("hello"))
    assert not bench.host.found


# -- options


@pytest.mark.parametrize(
    "options", [{"max_batch": 0}, {"rewind_steps": -1}, {"pool_bytes": 100}, {"deterministic": 1}, {"speed": 2}]
)
def test_an_option_that_is_none_is_refused(options: dict[str, Scalar]) -> None:
    with pytest.raises(BadOption):
        Dynamics(EngineOptions({"world": FAKE, **options})).load(FakeHost())


@pytest.mark.parametrize("path", ["", "no_such_module:World", f"{HERE}:Missing", "os"])
def test_a_world_that_is_not_there_is_named(path: str) -> None:
    with pytest.raises(BadWorld, match="no world"):
        Bench(path)


def test_the_fake_world_is_a_world() -> None:
    world: World = FakeWorld({})
    starts: Images = world.starts()
    assert starts.shape == (4, SIDE, SIDE, 3) and starts.dtype == np.uint8
    np.testing.assert_array_equal(world.decode(world.encode(starts)), starts)
    noise: Sequence[Floats] = list(world.begin([1, 1, 2], [0, 1, 0]))
    assert len({each.tobytes() for each in noise}) == 3
    assert not np.isin(noise[0], noise[1]).any()  # not one sequence, shifted
