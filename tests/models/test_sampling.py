"""Picking tokens: greedy, penalised, drawn by a counter; and replies that loop."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from omni_live.models.gguf_weights import Misuse
from omni_live.models.sampling import Loop, Sampler, Sampling, probability, sample

GREEDY = Sampling(repetition_penalty=1.0)
WARM = Sampling(temperature=1.0, repetition_penalty=1.0, seed=7)


def logits(*rows: list[float]) -> Tensor:
    return torch.tensor(rows)


def drawn(sampling: Sampling, turn: int, steps: int, row: Tensor) -> list[int]:
    sampler = Sampler(sampling, turn=turn)
    return [sample(row[None].clone(), [sampler])[0] for _ in range(steps)]


def test_greedy_takes_the_likeliest_of_each_row() -> None:
    rows = [Sampler(GREEDY, turn=1) for _ in range(2)]
    assert sample(logits([0.0, 2.0, 1.0], [5.0, 2.0, 1.0]), rows) == [1, 0]


@pytest.mark.parametrize(("best", "second", "expected"), [(2.0, 1.9, 1), (2.0, 1.0, 0), (-1.0, -1.05, 1)])
def test_a_token_already_said_counts_for_less(best: float, second: float, expected: int) -> None:
    sampler = Sampler(Sampling(repetition_penalty=1.1), turn=1)
    sampler.took(0)
    assert sample(logits([best, second, -9.0]), [sampler]) == [expected]


def test_the_context_counts_as_said_and_stop_tokens_never_do() -> None:
    sampler = Sampler(Sampling(repetition_penalty=2.0), turn=1, stops=frozenset({2}), context=(0, 2, 0))
    assert sampler.said() == [0]
    assert sample(logits([3.0, 2.0, 2.5]), [sampler]) == [2]
    assert sampler.stopped


def test_a_reply_stops_only_at_a_stop_token() -> None:
    sampler = Sampler(GREEDY, turn=1, stops=frozenset({1}))
    stopped = []
    for row in ([1.0, 0.0], [1.0, 0.0], [0.0, 1.0]):
        sample(logits(row), [sampler])
        stopped.append(sampler.stopped)
    assert stopped == [False, False, True]
    assert sampler.position == 3


def test_draws_depend_on_seed_turn_and_position_only() -> None:
    row = torch.zeros(500)
    alone = drawn(WARM, 3, 20, row)
    assert drawn(WARM, 3, 20, row) == alone
    assert drawn(WARM, 4, 20, row) != alone
    assert drawn(Sampling(temperature=1.0, repetition_penalty=1.0, seed=8), 3, 20, row) != alone
    resumed = Sampler(WARM, turn=3)
    resumed.position = 12
    assert [sample(row[None].clone(), [resumed])[0] for _ in range(8)] == alone[12:]


def test_a_row_draws_the_same_in_any_company() -> None:
    row = torch.linspace(0, 3, 300)
    alone = drawn(WARM, 1, 10, row)
    mine, other = Sampler(WARM, turn=1), Sampler(Sampling(temperature=0.5, seed=1), turn=9)
    together = [sample(torch.stack([row.flip(0), row]), [other, mine])[1] for _ in range(10)]
    assert together == alone


def test_draws_follow_the_softmax() -> None:
    row = torch.tensor([2.0, 1.0, 0.0, -1.0])
    counts = Counter(drawn(WARM, 1, 3000, row))
    for token, chance in enumerate(torch.softmax(row, -1).tolist()):
        assert counts[token] / 3000 == pytest.approx(chance, abs=0.03)


def test_a_cold_temperature_is_nearly_greedy() -> None:
    assert set(drawn(Sampling(temperature=0.01, repetition_penalty=1.0), 1, 50, torch.tensor([0.0, 1.0, 0.5]))) == {1}


def test_top_p_keeps_to_the_nucleus() -> None:
    row = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    seen = set(drawn(Sampling(temperature=1.0, top_p=0.7, repetition_penalty=1.0), 1, 300, row))
    assert seen == {0, 1}


def test_a_flat_distribution_has_a_nucleus_beyond_the_usual_size() -> None:
    seen = set(drawn(Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.0), 1, 2000, torch.zeros(1000)))
    assert 256 < len(seen) <= 901


@given(st.floats(0.01, 1.0), st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_any_setting_draws_a_token_of_the_vocabulary(top_p: float, seed: int, turn: int) -> None:
    row = torch.linspace(-4, 4, 64)
    assert 0 <= drawn(Sampling(temperature=0.8, top_p=top_p, seed=seed), turn, 1, row)[0] < 64


def test_the_probability_of_a_token_is_its_softmax() -> None:
    row = torch.tensor([1.0, 2.0, 3.0])
    assert probability(row, 2) == pytest.approx(float(torch.softmax(row, -1)[2]))


@pytest.mark.parametrize(
    ("temperature", "top_p", "penalty"),
    [(-0.1, 1.0, 1.0), (float("nan"), 1.0, 1.0), (0.0, 0.0, 1.0), (0.0, 1.1, 1.0), (0.0, 1.0, 0.9)],
)
def test_settings_out_of_range_are_refused(temperature: float, top_p: float, penalty: float) -> None:
    with pytest.raises(Misuse):
        Sampling(temperature=temperature, top_p=top_p, repetition_penalty=penalty)


def test_each_row_wants_its_sampler() -> None:
    with pytest.raises(Misuse):
        sample(torch.zeros(2, 4), [Sampler(GREEDY, turn=1)])


def pushes_until_loop(tokens: list[int]) -> int | None:
    loop = Loop()
    return next((count for count, token in enumerate(tokens, 1) if loop.push(token)), None)


@pytest.mark.parametrize("period", [1, 2, 3, 7, 20])
def test_a_reply_that_goes_round_is_noticed_in_its_third_round(period: int) -> None:
    found = pushes_until_loop(list(range(50)) + [100 + number % period for number in range(200)])
    assert found is not None
    assert found <= 50 + 2 * period + 8


def test_the_same_sentence_thrice_is_noticed_even_with_others_between() -> None:
    sentence = list(range(10))
    assert pushes_until_loop([*sentence, 50, 51, *sentence, 60, *sentence]) is not None


def test_a_reply_that_repeats_phrases_is_left_alone() -> None:
    phrase = list(range(6))
    assert pushes_until_loop([*phrase, 50, 51, *phrase, 60, 61, *phrase, 70, 71, *phrase]) is None
    assert pushes_until_loop(list(range(400))) is None
