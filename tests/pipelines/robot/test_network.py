"""The policy's network with random weights: shapes, sentences, and chunks that go on from earlier ones."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from omni_live.clients.envs.table import TASKS, prompt
from omni_live.pipelines.robot.network import (
    ACTION_DIM,
    HORIZON,
    STATE_DIM,
    TEXT_DIM,
    TEXT_LIMIT,
    Network,
    prefix_of,
    prefix_weights,
    text_code,
)
from omni_live.protocols.openpi.tabletop import CONTRACT

COUNT = 5


@pytest.fixture(scope="module")
def network() -> Network:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    network = Network().eval().requires_grad_(False)
    for parameter in network.flow.modulate.parameters():
        torch.nn.init.normal_(parameter, std=0.1)  # zeros to begin with: the sentence and the time would not matter
    return network


@pytest.fixture(scope="module")
def context(network: Network) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (COUNT, 64, 64, 3), dtype=torch.uint8, generator=generator)
    states = torch.rand((COUNT, STATE_DIM), generator=generator)
    texts = torch.from_numpy(np.stack([text_code(prompt(task)) for task in TASKS[:COUNT]]))
    return network.context(images, states, texts)


@pytest.fixture(scope="module")
def noise() -> Tensor:
    return torch.randn((COUNT, HORIZON, ACTION_DIM), generator=torch.Generator().manual_seed(2))


def earlier(rows: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).uniform(-1, 1, (rows, ACTION_DIM)).astype(np.float32)


def test_the_network_fits_the_contract_and_has_the_size_that_is_written_down(network: Network) -> None:
    assert (CONTRACT.action_horizon, CONTRACT.action_dim) == (HORIZON, ACTION_DIM)
    assert CONTRACT.observation[1].shape == (STATE_DIM,)
    assert sum(parameter.numel() for parameter in network.parameters()) == 647_280


def test_a_chunk_has_the_contracts_shape_and_bounds(network: Network, context: Tensor, noise: Tensor) -> None:
    chunks = network.sample(context, 40 * noise, network.clocks(4))
    assert chunks.shape == (COUNT, HORIZON, ACTION_DIM)
    assert chunks.dtype == torch.float32
    assert float(chunks.abs().max()) == 1.0


def test_one_step_of_the_flow_is_its_velocity_at_the_noise(network: Network, context: Tensor, noise: Tensor) -> None:
    expected = noise + network.velocity(context, noise, torch.zeros(COUNT), torch.zeros(COUNT, HORIZON))
    found = network.sample(context, noise, network.clocks(1))
    assert torch.allclose(found, expected.clamp(-1, 1), atol=1e-5)


def test_a_chunk_does_not_depend_on_who_is_in_the_batch(network: Network, context: Tensor, noise: Tensor) -> None:
    clocks = network.clocks(4)
    together = network.sample(context, noise, clocks)
    for row in range(COUNT):
        alone = network.sample(context[row : row + 1], noise[row : row + 1], clocks)
        assert torch.allclose(together[row], alone[0], atol=1e-5)


def test_keypoints_move_with_what_is_in_the_picture(network: Network) -> None:
    images = torch.zeros((2, 64, 64, 3), dtype=torch.uint8)
    images[0, 40:48, 8:16] = images[1, 8:16, 40:48] = 255
    seen = network.eyes(images, torch.zeros(2, STATE_DIM), torch.zeros(2, TEXT_DIM))
    x, y = seen[:, :32], seen[:, 32:64]
    assert float((x[1] - x[0]).abs().max()) > 1e-3
    assert bool(torch.isfinite(seen).all())
    assert float(torch.cat([x, y]).abs().max()) <= 1.0


def test_a_sentence_is_told_from_each_other_one() -> None:
    codes = [text_code(prompt(task)) for task in TASKS]
    for at, code in enumerate(codes):
        assert code.shape == (TEXT_DIM,)
        assert code.dtype == np.float32
        assert all(np.abs(code - other).max() > 0.1 for other in codes[:at])


def test_the_hash_of_a_word_never_changes_since_the_weights_depend_on_it() -> None:
    code = text_code("push")
    assert {int(at): float(code[at]) for at in np.flatnonzero(code)} == {81: -1.0}


def test_case_and_space_do_not_matter_but_the_order_of_words_does() -> None:
    assert np.array_equal(text_code("  Push THE\tdisc "), text_code("push the disc"))
    assert not np.array_equal(text_code("disc push the"), text_code("push the disc"))


@given(st.text())
def test_any_text_has_a_code(text: str) -> None:
    assert np.isfinite(text_code(text)).all()


def test_a_sentence_counts_up_to_its_limit() -> None:
    long = "a" * TEXT_LIMIT
    assert np.array_equal(text_code(long), text_code(long + " and more" * 100_000))


@given(st.integers(0, 20), st.integers(0, 20))
def test_the_prefix_binds_less_and_less(overlap: int, delay: int) -> None:
    weights = prefix_weights(overlap, delay)
    common = min(overlap, HORIZON)
    fixed = min(delay, common)
    end = min(common, fixed + 2)
    assert (weights[:fixed] == 1).all()
    assert (weights[end:] == 0).all()
    assert ((weights[fixed:end] > 0) & (weights[fixed:end] < 1)).all()
    assert (np.diff(weights[max(0, fixed - 1) : end + 1]) < 0).all()


def test_the_weights_are_those_of_the_paper() -> None:
    assert prefix_weights(12, 4)[4] == pytest.approx(2 / 3 * math.expm1(2 / 3) / math.expm1(1))


@pytest.mark.parametrize("rows", [1, 7, 15, 16])
@pytest.mark.parametrize("delay", [0, 1, 4, 16])
def test_fixed_rows_are_the_earlier_chunks_to_the_bit(
    network: Network, context: Tensor, noise: Tensor, rows: int, delay: int
) -> None:
    previous = [earlier(rows, seed) for seed in range(COUNT)]
    prefix = prefix_of(previous, [delay] * COUNT)
    found = network.sample(context, noise, network.clocks(4), prefix).numpy()
    fixed = min(rows, delay)
    for chunk, before in zip(found, previous, strict=True):
        assert np.array_equal(chunk[:fixed], before[:fixed])
        assert fixed == rows or not np.array_equal(chunk[fixed:rows], before[fixed:])


def test_bound_rows_come_nearer_to_the_earlier_chunk(network: Network, context: Tensor, noise: Tensor) -> None:
    previous = np.stack([earlier(12, seed) for seed in range(COUNT)])
    clocks = network.clocks(4)
    free = network.sample(context, noise, clocks).numpy()
    bound = network.sample(context, noise, clocks, prefix_of(list(previous), [3] * COUNT)).numpy()
    near, far = (np.abs(chunks[:, 3:5] - previous[:, 3:5]).mean((0, 2)) for chunks in (bound, free))
    assert near[0] < 0.7 * far[0]
    assert near[1] < far[1]


def test_robots_in_a_batch_go_on_each_from_its_own_chunk(network: Network, context: Tensor, noise: Tensor) -> None:
    previous = [None, earlier(16, 1), earlier(3, 2), None, earlier(10, 4)]
    delays = [0, 2, 3, 0, 5]
    clocks = network.clocks(4)
    together = network.sample(context, noise, clocks, prefix_of(previous, delays))
    for row in range(COUNT):
        part = slice(row, row + 1)
        alone = network.sample(context[part], noise[part], clocks, prefix_of(previous[part], delays[part]))
        assert torch.allclose(together[row], alone[0], atol=1e-5)


def test_without_an_earlier_chunk_there_is_no_prefix() -> None:
    assert prefix_of([None, None], [3, 0]) is None
