"""The policy engine, hand-cranked on a fake policy and on a small network that rounds as real ones do."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from omni_live.engines.contract import EngineOptions, SessionError, TurnError
from omni_live.engines.options import BadOption
from omni_live.pipelines.robot.adapter import Array, BadPolicy, Chunk, Policy, Query
from omni_live.pipelines.robot.fake import prompt_tag
from omni_live.pipelines.robot.policy import PolicyBroken, PolicyEngine
from omni_live.protocols.arrays import array, pack
from omni_live.protocols.openpi.contract import Contract, Field
from omni_live.protocols.openpi.fake_contract import DIM, HORIZON, LIMIT, STATE, contract
from omni_live.sessions.inputs import Outcome
from omni_live.sessions.payload import Payload, Scalar
from omni_live.sessions.stamp import LANES, SessionKey, Stamp, session_key
from tests.pipelines.rig import FakeHost, FakeTurn

MS = 1_000_000
FAKE = "omni_live.pipelines.robot.fake:FakePolicy"
HERE = __name__


class Clock(FakeHost):
    """A host whose time stands still until it is moved, and which remembers when it is to wake the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.ns = 1_000 * MS
        self.alarms: list[int] = []

    def now(self) -> int:
        return self.ns

    def wake_at(self, at_ns: int) -> None:
        self.alarms.append(at_ns)


class Slow:
    """A policy whose steps take their time, by the clock of the bench."""

    def __init__(self, policy: Policy, clock: Clock, step_ns: int) -> None:
        self.contract = policy.contract
        self._policy = policy
        self._clock = clock
        self._step_ns = step_ns

    def load(self) -> None: ...

    def predict_chunk(self, batch: Sequence[Query]) -> Sequence[Chunk]:
        self._clock.ns += self._step_ns
        return self._policy.predict_chunk(batch)


class Bench:
    """An engine, its clock, and what a runner does around them."""

    def __init__(self, policy: str = FAKE, step_ms: float = 0, replica: int = 0, **options: Scalar) -> None:
        self.host = Clock()
        small: dict[str, Scalar] = {"image": 4} if policy == FAKE else {}
        self.engine = PolicyEngine(EngineOptions({"policy": policy, **small, **options}, replica))
        self.engine.load(self.host)
        if step_ms:
            self.engine._policy = Slow(self.engine._policy, self.host, round(step_ms * MS))
        self.turns = 0

    def session(self, number: int) -> SessionKey:
        key = session_key(number, 1)
        self.engine.open(key, {})
        return key

    def ask(self, number: int, payload: Payload | None, due_ms: float = 0) -> FakeTurn:
        self.turns += 1
        turn = FakeTurn(Stamp(number * LANES, 1, 1, self.turns, 0, 0, self.host.ns + round(due_ms * MS)))
        self.engine.begin(turn)
        if payload is not None:
            turn.inbox.append(payload)
            turn.complete = True
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

    def run(self) -> None:
        for _ in range(1000):
            if not self.step():
                return
        raise AssertionError("the engine never rests")

    def tell(self, number: int, payload: Payload, due_ms: float = 0) -> Payload:
        """The chunk that answers an observation."""
        turn = self.ask(number, payload, due_ms)
        self.run()
        return chunk(turn)


def observation(tag: float = 1, second: float = 0, prompt: str = "go", pixel: int = 0, **meta: Scalar) -> Payload:
    state = np.zeros(STATE, np.float32)
    state[:2] = tag, second
    image = np.full((4, 4, 3), pixel, np.uint8)
    arrays: dict[str, Array] = {
        "observation/image": image,
        "observation/wrist_image": image,
        "observation/state": state,
    }
    return pack("observation", {"prompt": prompt, **meta}, **arrays)


def chunk(turn: FakeTurn) -> Payload:
    assert turn.ended == (Outcome.DONE, "")
    (sent,) = turn.sent
    assert sent.kind == "chunk"
    return sent


def actions(payload: Payload) -> Chunk:
    found = array(payload, "actions")
    assert found.dtype == np.float32
    return np.asarray(found, np.float32)


@pytest.fixture
def bench() -> Bench:
    return Bench()


# -- one query


def test_an_observation_is_answered_with_one_chunk(bench: Bench) -> None:
    bench.session(0)
    turn = bench.ask(0, observation(7, 8, "push the red disc", pixel=9, seed=11))
    bench.run()
    answer = chunk(turn)
    assert actions(answer).shape == (HORIZON, DIM)
    assert actions(answer)[0, :7].tolist() == [7, 8, 11, 9, 0, prompt_tag("push the red disc"), 1]
    assert answer.meta == {"infer_ms": 0.0, "queue_ms": 0.0, "batch": 1, "replica": 0, "continued": False}


def test_a_chunk_says_which_replica_made_it() -> None:
    bench = Bench(replica=3)
    bench.session(0)
    assert bench.tell(0, observation()).meta["replica"] == 3


def test_an_observation_that_comes_after_its_turn_began_is_waited_for(bench: Bench) -> None:
    bench.session(0)
    turn = bench.ask(0, None)
    bench.run()
    assert turn.ended is None
    bench.host.ns += 3 * MS
    turn.inbox.append(observation())
    bench.run()
    assert chunk(turn).meta["queue_ms"] == 3.0


def test_a_turn_whose_input_ends_without_an_observation_fails(bench: Bench) -> None:
    bench.session(0)
    turn = bench.ask(0, None)
    turn.complete = True
    bench.run()
    assert turn.ended == (Outcome.FAILED, "no_observation")


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(Payload("audio"), id="another kind"),
        pytest.param(Payload("observation", {"prompt": "go"}), id="no arrays"),
        pytest.param(
            pack("observation", {"prompt": "go"}, **{"observation/state": np.zeros(3, np.float32)}), id="shape"
        ),
        pytest.param(Payload("observation", {}, observation().body, observation().arrays), id="no prompt"),
        pytest.param(Payload("observation", {"prompt": 3}, observation().body, observation().arrays), id="prompt kind"),
        pytest.param(Payload("observation", {"prompt": "go"}, b"", observation().arrays), id="no body"),
    ],
)
def test_what_is_no_observation_fails_its_turn_alone(bench: Bench, payload: Payload) -> None:
    bench.session(0)
    bench.session(1)
    bad, good = bench.ask(0, payload), bench.ask(1, observation(5))
    bench.run()
    assert bad.ended == (Outcome.FAILED, "bad_observation")
    assert actions(chunk(good))[0, 0] == 5


def test_a_turn_without_room_is_answered_when_there_is(bench: Bench) -> None:
    bench.session(0)
    turn = bench.ask(0, observation())
    turn.credit = 0
    bench.run()
    assert not turn.sent
    turn.credit = 1
    bench.run()
    assert turn.ended == (Outcome.DONE, "")


def test_a_dropped_turn_is_never_served(bench: Bench) -> None:
    bench.session(0)
    turn = bench.ask(0, observation())
    bench.engine.drop(turn)
    bench.run()
    assert turn.ended is None and not turn.sent
    assert bench.engine.load_now().turns == 0


def test_a_turn_of_a_session_that_is_not_open_fails(bench: Bench) -> None:
    with pytest.raises(TurnError) as caught:
        bench.ask(0, observation())
    assert caught.value.code == "unknown_session"


# -- batches


def test_queries_that_wait_together_are_one_batch_and_each_gets_its_own_chunk(bench: Bench) -> None:
    for number in range(8):
        bench.session(number)
    turns = [bench.ask(n, observation(n + 1, 10 * n, f"task {n}", n)) for n in range(8)]
    assert bench.engine.load_now().turns == 8
    bench.run()
    for number, turn in enumerate(turns):
        answer = chunk(turn)
        assert answer.meta["batch"] == 8
        told = actions(answer)[0, :6].tolist()
        assert told == [number + 1, 10 * number, 1, number, 0, prompt_tag(f"task {number}")]


def test_a_step_serves_max_batch_queries_and_the_most_urgent_first() -> None:
    bench = Bench(max_batch=2)
    for number in range(4):
        bench.session(number)
    turns = [bench.ask(n, observation(n + 1), due_ms) for n, due_ms in enumerate((400, 100, 300, 200))]
    assert bench.step()
    assert [turn.ended is not None for turn in turns] == [False, True, False, True]
    bench.run()
    assert [chunk(turn).meta["batch"] for turn in turns] == [2, 2, 2, 2]


def test_a_robot_that_is_alone_is_answered_at_once() -> None:
    bench = Bench(step_ms=10)
    bench.session(0)
    for _ in range(3):
        bench.host.ns += MS
        assert bench.tell(0, observation()).meta["queue_ms"] == 0
    assert bench.host.alarms == []


@pytest.fixture
def pair() -> Bench:
    """A policy whose steps take 10 ms, and two robots that were served together."""
    bench = Bench(step_ms=10)
    for number in (0, 1):
        bench.session(number)
    for turn in [bench.ask(number, observation()) for number in (0, 1)]:
        bench.run()
        assert chunk(turn).meta == {"infer_ms": 10.0, "queue_ms": 0.0, "batch": 2, "replica": 0, "continued": False}
    return bench


def test_a_query_waits_for_who_is_about_to_ask_and_no_longer_than_the_window(pair: Bench) -> None:
    turn = pair.ask(0, observation())
    pair.run()
    assert turn.ended is None
    assert pair.host.alarms == [pair.host.ns + 2 * MS]
    pair.host.ns += 2 * MS
    pair.run()
    assert chunk(turn).meta["batch"] == 1
    assert chunk(turn).meta["queue_ms"] == 2.0


def test_who_came_during_a_step_waits_for_those_whom_it_served(pair: Bench) -> None:
    pair.session(2)
    late = pair.ask(2, None)
    pair.host.ns += 3 * MS
    for number in (0, 1):
        pair.ask(number, observation())
    pair.run()
    late.inbox.append(observation(7))
    pair.run()
    assert pair.host.alarms == [pair.host.ns + 2 * MS]
    others = [pair.ask(number, observation()) for number in (0, 1)]
    pair.run()
    assert [chunk(turn).meta["batch"] for turn in (late, *others)] == [3, 3, 3]


def test_the_wait_ends_when_the_last_one_comes(pair: Bench) -> None:
    first = pair.ask(0, observation(1))
    pair.run()
    pair.host.ns += MS
    second = pair.ask(1, observation(2))
    pair.run()
    assert [chunk(turn).meta["batch"] for turn in (first, second)] == [2, 2]
    assert [chunk(turn).meta["queue_ms"] for turn in (first, second)] == [1.0, 0.0]


@pytest.mark.parametrize("leaves", ["close", "reset of its turn", "poison"])
def test_a_session_that_is_not_about_to_ask_is_not_waited_for(pair: Bench, leaves: str) -> None:
    match leaves:
        case "close":
            pair.engine.close(session_key(1, 1))
        case "reset of its turn":
            pair.engine.drop(pair.ask(1, observation()))
        case _:
            pair.ask(1, Payload("audio"))
            pair.run()
            pair.host.ns += 500 * MS
    assert pair.tell(0, observation()).meta["queue_ms"] == 0


def test_queries_that_are_to_be_alone_wait_for_nobody_and_nobody_for_them(pair: Bench) -> None:
    assert pair.tell(1, observation(deterministic=True)).meta["queue_ms"] == 0
    assert pair.tell(0, observation()).meta["queue_ms"] == 0


def test_a_window_above_five_milliseconds_is_refused() -> None:
    with pytest.raises(BadOption, match="window_ms"):
        Bench(window_ms=5.1)


# -- deadlines


def test_a_chunk_says_whether_it_kept_its_deadline(bench: Bench) -> None:
    bench.session(0)
    assert bench.tell(0, observation(deadline_ms=50.0), due_ms=50).meta["deadline_missed"] is False
    turn = bench.ask(0, observation(deadline_ms=50.0), due_ms=50)
    bench.host.ns += 51 * MS
    bench.run()
    assert chunk(turn).meta["deadline_missed"] is True


def test_a_query_without_a_deadline_misses_none(bench: Bench) -> None:
    bench.session(0)
    assert "deadline_missed" not in bench.tell(0, observation(), due_ms=0).meta


# -- what goes wrong


def test_a_poison_observation_ends_its_own_turn_alone(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(fail_on=13)
    for number in range(4):
        bench.session(number)
    turns = [bench.ask(number, observation(tag)) for number, tag in enumerate((1, 13, 3, 4))]
    bench.run()
    assert turns[1].ended == (Outcome.FAILED, "policy_error")
    for number in (0, 2, 3):
        assert chunk(turns[number]).meta["batch"] == 1
        assert actions(chunk(turns[number]))[0, 0] == number + 1
    assert [record.exc_info is not None for record in caplog.records] == [True, True]
    assert bench.engine.load_now().turns == 0


def test_a_session_that_sent_poison_once_costs_the_others_no_second_batch() -> None:
    bench = Bench(fail_on=13)
    for number in range(3):
        bench.session(number)
    for number, tag in enumerate((13, 2, 3)):
        bench.ask(number, observation(tag))
    bench.run()
    turns = [bench.ask(number, observation(tag)) for number, tag in enumerate((13, 2, 3))]
    bench.run()
    assert turns[0].ended == (Outcome.FAILED, "policy_error")
    assert [chunk(turn).meta["batch"] for turn in turns[1:]] == [2, 2]


def test_two_poison_observations_of_one_batch_both_fail() -> None:
    bench = Bench(nan_on=13)
    for number in range(3):
        bench.session(number)
    turns = [bench.ask(number, observation(tag)) for number, tag in enumerate((13, 2, 13))]
    bench.run()
    assert [turn.ended for turn in turns] == [
        (Outcome.FAILED, "action_not_finite"),
        (Outcome.DONE, ""),
        (Outcome.FAILED, "action_not_finite"),
    ]


def test_a_session_goes_on_after_a_turn_that_failed() -> None:
    bench = Bench(fail_on=13)
    bench.session(0)
    turn = bench.ask(0, observation(13))
    bench.run()
    assert turn.ended == (Outcome.FAILED, "policy_error")
    assert actions(bench.tell(0, observation(2)))[0, 0] == 2


def test_a_failed_turn_that_is_dropped_first_is_not_reported_twice() -> None:
    bench = Bench(nan_on=13)
    bench.session(0)
    turn = bench.ask(0, observation(13))
    assert bench.engine.step()
    bench.engine.drop(turn)
    assert not bench.engine.step()


def test_a_receiver_that_is_gone_costs_the_others_of_the_batch_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.session(0)
    bench.session(1)
    lost, kept = bench.ask(0, observation(1)), bench.ask(1, observation(2))

    def emit(payload: Payload) -> None:
        raise TurnError(lost, "resource_exhausted")

    monkeypatch.setattr(lost, "emit", emit)
    bench.run()
    assert lost.ended == (Outcome.FAILED, "resource_exhausted")
    assert actions(chunk(kept))[0, 0] == 2


class Broken:
    """Answers the observation it is warmed up with, and nothing after the first real one."""

    def __init__(self, options: Mapping[str, Scalar]) -> None:
        self.contract = contract(4)
        self._well = True

    def load(self) -> None: ...

    def predict_chunk(self, batch: Sequence[Query]) -> Sequence[Chunk]:
        self._well = self._well and batch[0].texts["prompt"] == "warm up"
        if not self._well:
            raise RuntimeError("device-side assert")
        return [np.zeros((HORIZON, DIM), np.float32)]


def test_a_policy_that_is_broken_takes_its_worker_down() -> None:
    bench = Bench(f"{HERE}:Broken")
    bench.session(0)
    bench.ask(0, observation())
    with pytest.raises(PolicyBroken):
        bench.engine.step()


class Wrong:
    """Answers with whatever `answers` has for the tag of the observation."""

    answers: Mapping[int, Callable[[], object]] = {
        0: lambda: np.zeros((HORIZON, DIM), np.float32),
        1: lambda: np.zeros((HORIZON - 1, DIM), np.float32),
        2: lambda: np.zeros((HORIZON, DIM), np.float64),
        3: lambda: None,
        4: lambda: np.zeros((1, HORIZON, DIM), np.float32),
        5: lambda: [[0.0] * DIM] * HORIZON,
    }

    def __init__(self, options: Mapping[str, Scalar]) -> None:
        self.contract = contract(4)

    def load(self) -> None: ...

    def predict_chunk(self, batch: Sequence[Query]) -> Sequence[object]:
        return [self.answers[int(query.arrays["observation/state"][0])]() for query in batch]


@pytest.mark.parametrize("tag", [1, 2, 3, 4, 5])
def test_what_is_no_chunk_of_the_contract_fails_its_turn(tag: int) -> None:
    bench = Bench(f"{HERE}:Wrong")
    bench.session(0)
    bench.session(1)
    bad, good = bench.ask(0, observation(tag)), bench.ask(1, observation(0))
    bench.run()
    assert bad.ended == (Outcome.FAILED, "bad_actions")
    assert good.ended == (Outcome.DONE, "")


class Short:
    """Answers the first query of a batch only."""

    def __init__(self, options: Mapping[str, Scalar]) -> None:
        self.contract = contract(4)

    def load(self) -> None: ...

    def predict_chunk(self, batch: Sequence[Query]) -> Sequence[Chunk]:
        return [np.full((HORIZON, DIM), batch[0].arrays["observation/state"][0], np.float32)]


def test_chunks_that_cannot_be_told_apart_reach_nobody() -> None:
    bench = Bench(f"{HERE}:Short")
    bench.session(0)
    bench.session(1)
    turns = [bench.ask(0, observation(1)), bench.ask(1, observation(2))]
    bench.run()
    assert [actions(chunk(turn))[0, 0] for turn in turns] == [1, 2]
    assert [chunk(turn).meta["batch"] for turn in turns] == [1, 1]


class Unfit(Wrong):
    answers: Mapping[int, Callable[[], object]] = {0: lambda: np.zeros((HORIZON, DIM + 1), np.float32)}


def test_a_policy_that_contradicts_its_contract_does_not_load() -> None:
    with pytest.raises(PolicyBroken):
        Bench(f"{HERE}:Unfit")


@pytest.mark.parametrize("path", ["no.such.module:Policy", f"{HERE}:NoSuchPolicy", "json", ""])
def test_a_policy_that_cannot_be_imported_is_refused_by_name(path: str) -> None:
    with pytest.raises(BadPolicy, match="no policy"):
        PolicyEngine(EngineOptions({"policy": path}))


def test_an_option_that_nobody_knows_is_refused() -> None:
    with pytest.raises(BadOption, match="mystery"):
        Bench(mystery=1)


# -- the guard


def test_numbers_that_are_not_finite_are_refused_whatever_the_guard() -> None:
    for guard in ("refuse", "clamp"):
        bench = Bench(nan_on=13, guard=guard)
        bench.session(0)
        turn = bench.ask(0, observation(13))
        bench.run()
        assert turn.ended == (Outcome.FAILED, "action_not_finite")


def test_actions_beyond_the_bounds_are_refused() -> None:
    bench = Bench(huge_on=13)
    bench.session(0)
    turn = bench.ask(0, observation(13))
    bench.run()
    assert turn.ended == (Outcome.FAILED, "action_out_of_range")
    assert not turn.sent


def test_actions_beyond_the_bounds_can_be_clamped_and_the_chunk_says_so() -> None:
    bench = Bench(huge_on=13, guard="clamp")
    bench.session(0)
    answer = bench.tell(0, observation(13))
    assert answer.meta["clamped"] == 1
    assert actions(answer)[-1, -1] == LIMIT
    assert "clamped" not in bench.tell(0, observation(1)).meta


def test_an_unknown_guard_is_refused() -> None:
    with pytest.raises(BadOption, match="guard"):
        Bench(guard="hope")


# -- going on with a chunk


def test_a_chunk_goes_on_from_the_steps_that_are_fixed(bench: Bench) -> None:
    bench.session(0)
    bench.tell(0, observation(1))
    answer = bench.tell(0, observation(2, executed_steps=8, delay_steps=3))
    assert answer.meta["continued"] is True
    assert actions(answer)[:3, 0].tolist() == [1, 1, 1]
    assert actions(answer)[3, 0] == 2
    assert actions(answer)[3, 4] == HORIZON - 8


def test_a_first_chunk_owes_nothing_to_another(bench: Bench) -> None:
    bench.session(0)
    answer = bench.tell(0, observation(2, executed_steps=8, delay_steps=3))
    assert answer.meta["continued"] is False
    assert actions(answer)[0, 4] == 0


def test_a_chunk_that_is_not_asked_to_go_on_does_not(bench: Bench) -> None:
    bench.session(0)
    bench.tell(0, observation(1))
    assert bench.tell(0, observation(2)).meta["continued"] is False


def test_a_chunk_that_was_used_up_is_no_ground_to_go_on(bench: Bench) -> None:
    bench.session(0)
    bench.tell(0, observation(1))
    assert bench.tell(0, observation(2, executed_steps=HORIZON, delay_steps=2)).meta["continued"] is False


def test_no_more_steps_can_be_fixed_than_are_left(bench: Bench) -> None:
    bench.session(0)
    bench.tell(0, observation(1))
    answer = bench.tell(0, observation(2, executed_steps=HORIZON - 2, delay_steps=10))
    assert actions(answer)[:3, 0].tolist() == [1, 1, 2]


def test_each_chunk_goes_on_from_the_one_before(bench: Bench) -> None:
    bench.session(0)
    answers = [bench.tell(0, observation(tag, executed_steps=8, delay_steps=1)) for tag in (1, 2, 3)]
    assert actions(answers[-1])[:2, 0].tolist() == [2, 3]


class Forgetful(Wrong):
    """A policy that takes no notice of the previous chunk."""

    answers: Mapping[int, Callable[[], object]] = {
        tag: lambda tag=tag: np.full((HORIZON, DIM), tag, np.float32)  # type: ignore[misc]
        for tag in range(3)
    }


def test_a_policy_that_cannot_continue_is_not_said_to_have_done_so() -> None:
    bench = Bench(f"{HERE}:Forgetful")
    bench.session(0)
    bench.tell(0, observation(1))
    assert bench.tell(0, observation(2, executed_steps=4, delay_steps=2)).meta["continued"] is False


def test_a_reset_clears_the_chunk_and_the_count_of_turns(bench: Bench) -> None:
    key = bench.session(0)
    first = bench.tell(0, observation(1))
    bench.tell(0, observation(1))
    bench.engine.listen(key, Payload("reset"))
    again = bench.tell(0, observation(1, executed_steps=1, delay_steps=1))
    assert again.meta["continued"] is False
    assert actions(again).tobytes() == actions(first).tobytes()


def test_a_chunk_of_one_session_is_never_continued_in_another(bench: Bench) -> None:
    bench.session(0)
    bench.session(1)
    bench.tell(0, observation(1))
    turns = [bench.ask(n, observation(n + 5, executed_steps=1, delay_steps=2)) for n in range(2)]
    bench.run()
    assert [chunk(turn).meta["continued"] for turn in turns] == [True, False]
    assert [actions(chunk(turn))[0, 0] for turn in turns] == [1, 6]


def test_a_chunk_that_was_refused_is_not_gone_on_with() -> None:
    bench = Bench(huge_on=13)
    bench.session(0)
    bench.tell(0, observation(1))
    bench.ask(0, observation(13))
    bench.run()
    answer = bench.tell(0, observation(2, executed_steps=1, delay_steps=1))
    assert actions(answer)[0, 0] == 1


class Scribbler:
    """A policy that writes into what it is given, and then fails at the tag 9."""

    def __init__(self, options: Mapping[str, Scalar]) -> None:
        self.contract = contract(4)

    def load(self) -> None: ...

    def predict_chunk(self, batch: Sequence[Query]) -> Sequence[Chunk]:
        (query,) = batch
        tag = query.arrays["observation/state"][0]
        chunk = np.full((HORIZON, DIM), tag, np.float32)
        if query.previous is not None:
            chunk[: len(query.previous)] = query.previous
            query.previous[:] = 1000
        if tag == 9:
            raise RuntimeError("after the damage")
        return [chunk]


def test_a_policy_that_writes_to_the_previous_chunk_does_not_damage_what_is_kept() -> None:
    bench = Bench(f"{HERE}:Scribbler")
    bench.session(0)
    bench.tell(0, observation(1))
    turn = bench.ask(0, observation(9, executed_steps=0))
    bench.run()
    assert turn.ended == (Outcome.FAILED, "policy_error")
    assert actions(bench.tell(0, observation(2, executed_steps=0))).max() == 1


# -- fork, snapshot, restore


def test_a_fork_goes_on_from_the_same_chunk_on_its_own(bench: Bench) -> None:
    key, twin = bench.session(0), session_key(1, 1)
    bench.tell(0, observation(1))
    bench.engine.fork(key, twin)
    bench.tell(0, observation(2))
    answer = bench.tell(1, observation(3, executed_steps=1, delay_steps=1))
    assert actions(answer)[:2, 0].tolist() == [1, 3]
    assert actions(answer)[1, 2] == 2  # its second turn


def test_a_snapshot_restored_in_another_replica_goes_on_alike(bench: Bench) -> None:
    key = bench.session(0)
    bench.tell(0, observation(1))
    snapshot = bench.engine.snapshot(key)
    other = Bench()
    other.engine.restore(other.session(5), snapshot)
    ask = observation(2, executed_steps=4, delay_steps=2)
    assert actions(other.tell(5, ask)).tobytes() == actions(bench.tell(0, ask)).tobytes()


def test_a_snapshot_of_a_fresh_session_restores_a_fresh_one(bench: Bench) -> None:
    fresh, used = bench.session(0), bench.session(1)
    bench.tell(1, observation(1))
    bench.engine.restore(used, bench.engine.snapshot(fresh))
    answer = bench.tell(1, observation(2, executed_steps=1, delay_steps=1))
    assert answer.meta["continued"] is False
    assert actions(answer)[0, 2] == 1


@pytest.mark.parametrize(
    "payload",
    [
        Payload("fake", {"turns": 1}),
        Payload("robot", {}),
        Payload("robot", {"turns": True}),
        Payload("robot", {"turns": -1}),
        pack("robot", {"turns": 1}, actions=np.zeros((2, 2), np.float32)),
        pack("robot", {"turns": 1}, actions=np.full((HORIZON, DIM), np.nan, np.float32)),
        pack("robot", {"turns": 1}, other=np.zeros((HORIZON, DIM), np.float32)),
    ],
)
def test_a_bad_snapshot_is_refused_and_changes_nothing(bench: Bench, payload: Payload) -> None:
    key = bench.session(0)
    bench.tell(0, observation(1))
    with pytest.raises(SessionError) as caught:
        bench.engine.restore(key, payload)
    assert caught.value.code == "bad_snapshot"
    assert bench.tell(0, observation(2, executed_steps=1, delay_steps=1)).meta["continued"] is True


def test_a_closed_session_leaves_nothing_behind(bench: Bench) -> None:
    key = bench.session(0)
    bench.tell(0, observation(1))
    assert bench.engine.load_now().bytes_used == HORIZON * DIM * 4
    bench.engine.close(key)
    assert bench.engine.load_now().sessions == bench.engine.load_now().bytes_used == 0


# -- the same again


def test_a_seed_that_is_not_given_is_the_number_of_the_turn(bench: Bench) -> None:
    for number in (0, 1):
        bench.session(number)
        seeds = [actions(bench.tell(number, observation(1)))[0, 2] for _ in range(3)]
        assert seeds == [1, 2, 3]


def table(number: int, **meta: Scalar) -> Payload:
    random = np.random.default_rng(number)
    arrays: dict[str, Array] = {
        "observation/image": random.integers(0, 256, (64, 64, 3), np.uint8),
        "observation/state": random.random(2, np.float32),
    }
    return pack("observation", {"prompt": "push the red disc to the left zone", "seed": number, **meta}, **arrays)


def test_the_table_policy_gives_the_same_bytes_alone_and_among_others_where_it_is_asked_to() -> None:
    bench = Bench("omni_live.pipelines.robot.table_policy:TablePolicy")
    for number in range(5):
        bench.session(number)
    alone = [actions(bench.tell(n, table(n, deterministic=True))).tobytes() for n in range(5)]
    turns = [bench.ask(n, table(n, deterministic=n < 2)) for n in range(5)]
    bench.run()
    assert [chunk(turn).meta["batch"] for turn in turns] == [1, 1, 3, 3, 3]
    assert [actions(chunk(turn)).tobytes() for turn in turns[:2]] == alone[:2]
    for turn, lone in zip(turns[2:], alone[2:], strict=True):
        np.testing.assert_allclose(actions(chunk(turn)).ravel(), np.frombuffer(lone, np.float32), atol=1e-4)


def test_the_table_policy_goes_on_with_its_last_chunk() -> None:
    bench = Bench("omni_live.pipelines.robot.table_policy:TablePolicy")
    bench.session(0)
    first = actions(bench.tell(0, table(1)))
    answer = bench.tell(0, table(2, executed_steps=4, delay_steps=3))
    assert answer.meta["continued"] is True
    np.testing.assert_allclose(actions(answer)[:3], first[4:7], atol=1e-4)
    assert not np.allclose(actions(answer)[:3], actions(bench.tell(0, table(2)))[:3], atol=1e-3)


@pytest.mark.parametrize("seed", [-1, 2**63, -(2**80)])
def test_any_whole_number_will_do_as_a_seed(seed: int) -> None:
    bench = Bench(f"{HERE}:Seeded")
    bench.session(0)
    first = actions(bench.tell(0, observation(seed=seed)))
    assert actions(bench.tell(0, observation(seed=seed))).tobytes() == first.tobytes()


class Seeded:
    """Noise from the seed."""

    def __init__(self, options: Mapping[str, Scalar]) -> None:
        self.contract = contract(4)

    def load(self) -> None: ...

    def predict_chunk(self, batch: Sequence[Query]) -> Sequence[Chunk]:
        return [np.random.default_rng(query.seed).random((HORIZON, DIM), np.float32) for query in batch]


TINY = Contract(
    embodiment="tiny",
    observation=(Field("observation/state", (48,), "float32"),),
    action_horizon=4,
    action_dim=8,
    rate_hz=10.0,
    action_low=-100,
    action_high=100,
)


class Tiny:
    """A small network on random weights, whose sums round differently at different batch sizes."""

    def __init__(self, options: Mapping[str, Scalar]) -> None:
        self.contract = TINY

    def load(self) -> None:
        torch.manual_seed(0)
        widths = (48, 512, 512, 32)
        self._weights = [torch.randn(a, b) / a**0.5 for a, b in pairwise(widths)]

    def predict_chunk(self, batch: Sequence[Query]) -> Sequence[Chunk]:
        x = torch.from_numpy(np.stack([query.arrays["observation/state"] for query in batch]))
        for weights in self._weights:
            x = torch.tanh(x @ weights)
        return list(x.reshape(-1, 4, 8).numpy())


def states(count: int) -> list[Payload]:
    random = np.random.default_rng(3)
    return [
        pack("observation", {"prompt": "", "deterministic": True}, **{"observation/state": state})
        for state in random.normal(size=(count, 48)).astype(np.float32)
    ]


def test_a_deterministic_query_gives_the_same_bytes_alone_and_among_others() -> None:
    bench = Bench(f"{HERE}:Tiny")
    observations = states(9)
    alone = []
    for number, payload in enumerate(observations):
        bench.session(number)
        alone.append(actions(bench.tell(number, payload)).tobytes())
    turns = [bench.ask(number, payload) for number, payload in enumerate(observations)]
    bench.run()
    assert [actions(chunk(turn)).tobytes() for turn in turns] == alone
    assert {chunk(turn).meta["batch"] for turn in turns} == {1}


def test_other_queries_agree_with_themselves_alone_to_rounding() -> None:
    bench = Bench(f"{HERE}:Tiny")
    observations = [Payload(p.kind, {"prompt": ""}, p.body, p.arrays) for p in states(9)]
    for number in range(9):
        bench.session(number)
    alone = [actions(bench.tell(number, payload)) for number, payload in enumerate(observations)]
    turns = [bench.ask(number, payload) for number, payload in enumerate(observations)]
    bench.run()
    assert {chunk(turn).meta["batch"] for turn in turns} == {9}
    for turn, lone in zip(turns, alone, strict=True):
        np.testing.assert_allclose(actions(chunk(turn)), lone, atol=1e-5)
