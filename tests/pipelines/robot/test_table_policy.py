"""The shipped policy: it solves the table, goes on from its last chunk, and answers each query for itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_live.clients.envs.table import TASKS, Observation, TableEnv
from omni_live.engines.options import BadOption
from omni_live.pipelines.robot.adapter import Chunk, Query
from omni_live.pipelines.robot.table_policy import SHIPPED, BadWeights, TablePolicy, noise_of
from omni_live.protocols.openpi.tabletop import CONTRACT
from omni_live.sessions.payload import Scalar

EXECUTED = 4
MOST_STEPS = 150


def made(options: Mapping[str, Scalar] | None = None) -> TablePolicy:
    policy = TablePolicy(options or {})
    policy.load()
    return policy


@pytest.fixture(scope="module")
def policy() -> TablePolicy:
    return made()


def query(seen: Observation, seed: int, previous: NDArray[np.float32] | None = None, delay: int = 0) -> Query:
    arrays, texts = CONTRACT.checked(seen)
    return Query(arrays, texts, seed, previous, delay)


@dataclass(slots=True)
class Robot:
    """One world and the chunk that is being executed in it."""

    env: TableEnv
    seed: int
    chunk: Chunk | None = None
    delay: int = 0
    """Rows of each chunk that are fixed by the one before; 0: each chunk is on its own."""

    def asks(self) -> Query:
        going_on = self.chunk[EXECUTED:] if self.chunk is not None and self.delay else None
        return query(self.env.observe(), self.seed + self.env.steps, going_on, self.delay)

    def acts(self, chunk: Chunk) -> None:
        self.chunk = chunk
        for action in chunk[:EXECUTED]:
            if not self.finished:
                self.env.step(action)

    @property
    def finished(self) -> bool:
        return self.env.success() or self.env.steps >= MOST_STEPS


def robots(count: int, delay: int = 0) -> list[Robot]:
    made = [Robot(TableEnv(1000 + number), 1000 * number, delay=delay) for number in range(count)]
    for number, robot in enumerate(made):
        robot.env.reset(TASKS[number % 12])
    return made


def drive(policy: TablePolicy, all_robots: Sequence[Robot]) -> int:
    """Lets all act until they are finished, in batches; how many succeeded."""
    while left := [robot for robot in all_robots if not robot.finished]:
        for robot, chunk in zip(left, policy.predict_chunk([robot.asks() for robot in left]), strict=True):
            robot.acts(chunk)
    return sum(robot.env.success() for robot in all_robots)


def views(count: int) -> list[Query]:
    """Queries of different worlds, tasks and seeds."""
    env = TableEnv(77)
    return [query(env.reset(TASKS[number % 12]), seed=number) for number in range(count)]


def test_it_solves_at_least_11_of_12_fresh_worlds(policy: TablePolicy) -> None:
    assert drive(policy, robots(12)) >= 11


def test_it_solves_them_also_when_each_chunk_goes_on_from_the_last(policy: TablePolicy) -> None:
    assert drive(policy, robots(12, delay=2)) >= 11


def test_it_does_what_the_sentence_says(policy: TablePolicy) -> None:
    """In one and the same world, with the same noise, each of the twelve sentences is carried out."""
    twelve = [Robot(TableEnv(5), 0) for _ in TASKS]
    for robot, task in zip(twelve, TASKS, strict=True):
        robot.env.reset(task)
    assert drive(policy, twelve) >= 11


def test_a_chunk_is_what_the_contract_says(policy: TablePolicy) -> None:
    for chunk in policy.predict_chunk(views(3)):
        assert chunk.shape == (CONTRACT.action_horizon, CONTRACT.action_dim)
        assert chunk.dtype == np.float32
        assert (np.abs(chunk) <= 1).all()


def test_the_same_query_alone_gives_the_same_bits(policy: TablePolicy) -> None:
    one, other = made(), policy
    for asked in views(5):
        assert np.array_equal(one.predict_chunk([asked])[0], other.predict_chunk([asked])[0])


@pytest.mark.parametrize("size", [2, 7, 32])
def test_who_else_is_in_the_batch_does_not_matter_but_for_rounding(policy: TablePolicy, size: int) -> None:
    asked = views(size)
    together = policy.predict_chunk(asked)
    for query, chunk in zip(asked, together, strict=True):
        assert np.allclose(policy.predict_chunk([query])[0], chunk, atol=1e-4)


def test_the_seed_decides_the_noise_and_so_the_chunk(policy: TablePolicy) -> None:
    asked = views(1)[0]
    one, other = policy.predict_chunk([asked, replace(asked, seed=99)])
    assert not np.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, 2**200])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    assert np.array_equal(noise_of(seed), noise_of(seed))
    assert noise_of(seed).shape == (16, 2)
    assert not np.array_equal(noise_of(seed), noise_of(seed + 1))


def test_the_noise_of_a_seed_never_changes() -> None:
    assert noise_of(0)[0].tolist() == pytest.approx([0.059911, 0.015560], abs=1e-6)


def test_what_is_seen_may_be_read_only(policy: TablePolicy) -> None:
    asked = views(1)[0]
    for array in asked.arrays.values():
        array.setflags(write=False)
    policy.predict_chunk([asked])


def test_a_prompt_as_long_as_a_book_is_answered(policy: TablePolicy) -> None:
    asked = views(1)[0]
    policy.predict_chunk([replace(asked, texts={"prompt": "push \ud800 " * 100_000})])


# -- real-time chunking


@pytest.mark.parametrize("delay", [1, 4, 8])
def test_the_fixed_rows_are_the_last_chunks_to_the_bit(policy: TablePolicy, delay: int) -> None:
    asked = views(6)
    last = policy.predict_chunk(asked)
    going_on = [
        replace(one, seed=one.seed + 50, previous=chunk[EXECUTED:], delay_steps=delay)
        for one, chunk in zip(asked, last, strict=True)
    ]
    for chunk, before in zip(policy.predict_chunk(going_on), last, strict=True):
        assert np.array_equal(chunk[:delay], before[EXECUTED : EXECUTED + delay])


def _seams(policy: TablePolicy, *, delay: int) -> float:
    """The mean size of the jump from the last action executed to the first of the next chunk that is new."""
    jumps = []
    for robot in robots(24):
        chunks = []
        for _ in range(6):
            going_on = robot.chunk[EXECUTED:] if robot.chunk is not None and delay else None
            asked = query(robot.env.observe(), robot.seed + robot.env.steps, going_on, delay)
            chunks.append(policy.predict_chunk([asked])[0])
            robot.acts(chunks[-1])
        jumps += [np.abs(new[delay] - old[EXECUTED + delay]).max() for old, new in pairwise(chunks)]
    return float(np.mean(jumps))


def test_a_chunk_that_goes_on_leaves_the_last_one_smoothly(policy: TablePolicy) -> None:
    assert _seams(policy, delay=2) < 0.75 * _seams(policy, delay=0)


def test_the_rows_that_are_not_fixed_still_follow_what_is_seen(policy: TablePolicy) -> None:
    """A last chunk that leads away is left: the end of the new one points where it would without it."""
    asked = views(12)
    free = policy.predict_chunk(asked)
    away = [replace(one, previous=-chunk[:8], delay_steps=2) for one, chunk in zip(asked, free, strict=True)]
    led = policy.predict_chunk(away)
    agreement = [float((a[12:] * b[12:]).sum()) for a, b in zip(free, led, strict=True)]
    assert np.mean(agreement) > 0
    assert np.mean([value > 0 for value in agreement]) > 0.6


# -- options and weights


def test_an_option_that_is_none_is_refused() -> None:
    with pytest.raises(BadOption, match="stepps"):
        TablePolicy({"stepps": 3})
    with pytest.raises(BadOption):
        TablePolicy({"steps": 0})


def test_the_flow_may_take_more_steps() -> None:
    asked = views(1)
    four, ten = made({"steps": 4}), made({"steps": 10})
    assert not np.array_equal(four.predict_chunk(asked)[0], ten.predict_chunk(asked)[0])


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    shipped = (resources.files("omni_live.pipelines.robot.weights") / SHIPPED).read_bytes()
    path = tmp_path / "weights.safetensors"
    for damaged in (b"", shipped[:1000], shipped[:-1], shipped.replace(b"points", b"pointy")):
        path.write_bytes(damaged)
        with pytest.raises(BadWeights):
            made({"weights": str(path)})
    path.write_bytes(shipped)
    asked = views(1)
    assert np.array_equal(made({"weights": str(path)}).predict_chunk(asked)[0], made().predict_chunk(asked)[0])


def test_weights_that_are_not_there_are_named() -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        made({"weights": "/nowhere"})
