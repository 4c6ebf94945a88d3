"""Sampling against its definition: a naive twin that sorts everything, in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from gpu_runner.choose import choose_rows
from gpu_runner.random_numbers import uniform
from gpu_runner.sampler import Draw, sample
from gpu_runner.step import Sampled, Sequence
from kvmanager.protocol import SamplingParams
from tests.gpu_runner.torch_support import with_params

EOS = (3,)


def sequence(sampling: SamplingParams, prompt: list[int], output: list[int]) -> Sequence:
    return Sequence(0, 0, sampling, len(prompt), prompt + output, [], 0)


def draw_one(
    logits: list[float],
    sampling: SamplingParams,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
) -> Sampled:
    draw = Draw(0, sequence(sampling, prompt or [0], output or []), 0)
    return sample(torch.tensor([logits]), [draw], EOS)[0]


def choose(probs: np.ndarray, top_k: int, top_p: float, min_p: float, number: float) -> int:
    token = np.empty(1, np.int64)
    parameters = [np.array([value]) for value in (top_k, float(top_p), float(min_p), float(number))]
    choose_rows(probs.astype(np.float32)[None], *parameters, token)
    return int(token[0])


def naive_kept(probs: np.ndarray, top_k: int, top_p: float, min_p: float) -> list[int]:
    """Ids that min_p, then top_k, then top_p leave over."""
    probs = probs.astype(np.float32)
    floor = np.float32(probs.max() * min_p)
    order = sorted(
        (token for token in range(len(probs)) if probs[token] >= floor), key=lambda t: (-probs[t], t)
    )
    if 0 < top_k < len(probs):
        order = order[:top_k]
    goal, mass, kept = top_p * math.fsum(map(float, probs[order])), 0.0, []
    for token in order:
        kept.append(token)
        mass += float(probs[token])
        if top_p < 1.0 and mass >= goal:
            break
    return sorted(token for token in kept if probs[token] > 0)


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert draw_one([1.0, 5.0, 5.0, 2.0], with_params()).token_id == 1


def test_rows_shared_by_forks_and_mixed_parameters() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0, 0.0, 0.0], [7.0, 0.0, 1.0, 0.0, 0.0]])
    plain, random = sequence(with_params(), [0], []), sequence(with_params(temperature=1.0, top_k=1), [0], [])
    draws = [Draw(1, random, 0), Draw(0, plain, 0), Draw(1, random, 4), Draw(0, random, 2)]
    before = logits.clone()
    found = sample(logits, draws, EOS)
    assert [(item.choice, item.token_id) for item in found] == [(0, 0), (0, 1), (4, 0), (2, 1)]
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("number", "token"), [(0.0, 0), (0.0999, 0), (0.1001, 1), (0.2999, 1), (0.3001, 2), (0.9999999, 3)]
)
def test_inverse_cdf_goes_in_id_order(number: float, token: int) -> None:
    assert choose(np.array([0.1, 0.2, 0.3, 0.4]), 0, 1.0, 0.0, number) == token


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (0, 1.0, 0.0, [0, 1, 2, 3, 4]),
        (2, 1.0, 0.0, [1, 3]),
        (1, 1.0, 0.0, [1]),
        (0, 0.5, 0.0, [1, 3]),
        (0, 0.3, 0.0, [1]),
        (0, 1e-9, 0.0, [1]),
        (0, 1.0, 0.99, [1, 3]),
        (3, 0.99, 0.0, [1, 2, 3]),
        (99, 0.9, 0.5, [1, 2, 3]),
    ],
)
def test_filters_keep(top_k: int, top_p: float, min_p: float, kept: list[int]) -> None:
    probs = np.array([0.1, 0.3, 0.2, 0.3, 0.1])
    assert naive_kept(probs, top_k, top_p, min_p) == kept
    numbers = np.linspace(0, 1, 400, endpoint=False)
    assert sorted({choose(probs, top_k, top_p, min_p, number) for number in numbers}) == kept


@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 300),
    spread=st.sampled_from([0.0, 0.01, 1.0, 8.0, 60.0]),
    ties=st.booleans(),
    top_k=st.integers(0, 40),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    number=st.floats(0, 1, exclude_max=True),
)
@example(seed=0, size=3, spread=0.01, ties=False, top_k=2, top_p=1.0, min_p=1.0, number=0.0)
def test_choose_is_the_sorted_definition(
    seed: int, size: int, spread: float, ties: bool, top_k: int, top_p: float, min_p: float, number: float
) -> None:
    logits = np.random.default_rng(seed).normal(size=size) * spread
    if ties:
        logits = np.round(logits)
    probs = torch.softmax(torch.from_numpy(logits).float(), -1).numpy()
    kept = naive_kept(probs, top_k, top_p, min_p)
    token = choose(probs, top_k, top_p, min_p, number)
    # A float sum can put the cut one token further or nearer; where it is, the number falls as defined.
    sets = [kept]
    if top_p < 1.0:
        sets += [naive_kept(probs, top_k, top_p * (1 + shift), min_p) for shift in (1e-9, -1e-9)]
    places = []
    for ids in sets:
        below = np.cumsum(probs[ids].astype(np.float64)) / probs[ids].sum(dtype=np.float64)
        places += [
            ids[min(int(np.searchsorted(below, number + shift, "right")), len(ids) - 1)]
            for shift in (0, 1e-9, -1e-9)
        ]
    assert token in places


def test_frequencies_are_those_of_the_distribution() -> None:
    """20,000 positions: each token's count within 5 standard deviations."""
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]])
    params = with_params(temperature=0.7, seed=11)
    draws = [Draw(0, Sequence(0, 0, params, 1, [0] * (1 + position), [], 0), 2) for position in range(200)]
    probs = torch.softmax(logits[0] / 0.7, -1).numpy().astype(np.float64)
    counts = np.zeros(5)
    for seed in range(100):
        for item in draws:
            item.sequence.sampling = with_params(temperature=0.7, seed=seed)
        for found in sample(logits, draws, EOS):
            counts[found.token_id] += 1
    expected = probs * 20_000
    assert np.all(np.abs(counts - expected) < 5 * np.sqrt(expected * (1 - probs)))


def test_random_numbers_depend_on_each_part_and_lie_in_the_unit_interval() -> None:
    found = {
        uniform(seed, choice, position)
        for seed in range(20)
        for choice in range(20)
        for position in range(20)
    }
    assert len(found) == 8000
    assert all(0.0 <= number < 1.0 for number in found)
    assert abs(sum(found) / 8000 - 0.5) < 0.02
    assert uniform(2**63 - 1, 0, 0) != uniform(0, 0, 0)


def test_repetition_counts_prompt_and_output() -> None:
    params = with_params(repetition_penalty=2.0)
    logits = [4.0, 3.0, 2.5, -1.0]
    assert draw_one(logits, params, prompt=[0]).token_id == 1
    assert draw_one(logits, params, prompt=[0], output=[1, 1]).token_id == 2
    assert draw_one([-1.0, -1.5], params, prompt=[0]).token_id == 1  # a negative logit is multiplied


def test_presence_and_frequency_count_output_only() -> None:
    logits = [4.0, 3.0, 2.4]
    assert draw_one(logits, with_params(presence_penalty=1.5), prompt=[0]).token_id == 0
    assert draw_one(logits, with_params(presence_penalty=1.5), output=[0, 0, 0]).token_id == 1
    assert draw_one(logits, with_params(frequency_penalty=0.5), output=[0]).token_id == 0
    assert draw_one(logits, with_params(frequency_penalty=0.6), output=[0, 0, 0, 1, 1]).token_id == 2


def test_logit_bias_works_for_greedy_and_sampled() -> None:
    assert draw_one([4.0, 3.0], with_params(logit_bias={1: 2.0})).token_id == 1
    assert draw_one([4.0, 3.0], with_params(logit_bias={0: -100.0}, temperature=1.0)).token_id == 1


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-38, 1e-20])
def test_the_least_temperatures_choose_the_likeliest(temperature: float) -> None:
    assert draw_one([20.0, -3.0, 20.001, 20.0], with_params(temperature=temperature)).token_id == 2


def test_any_top_k_above_the_vocabulary_keeps_all() -> None:
    draws = [
        draw_one([1.0, 1.1, 1.2], with_params(temperature=1.0, seed=seed, top_k=top_k)).token_id
        for top_k in (0, 3, 1 << 63, 1 << 80)
        for seed in range(8)
    ]
    assert draws == draws[:8] * 4


def test_min_tokens_holds_back_every_end() -> None:
    logits = [1.0, 5.0, 2.0, 9.0]
    params = with_params(min_tokens=2, stop_token_ids=(1,))
    assert draw_one(logits, params).token_id == 2
    assert draw_one(logits, params, output=[2]).token_id == 2
    assert draw_one(logits, params, output=[2, 2]).token_id == 3


def test_logprobs_are_of_the_plain_distribution() -> None:
    logits = [1.0, 5.0, 2.0, 4.0]
    found = draw_one(logits, with_params(logprobs=2, logit_bias={2: 50.0}, temperature=0.5))
    wanted = torch.log_softmax(torch.tensor(logits), -1)
    assert found.token_id == 2
    assert found.logprobs is not None
    assert found.logprobs.logprob == pytest.approx(float(wanted[2]))
    assert found.logprobs.rank == 3
    assert [token for token, _ in found.logprobs.top] == [1, 3]
    assert [value for _, value in found.logprobs.top] == pytest.approx([float(wanted[1]), float(wanted[3])])


def test_logprobs_without_alternatives_and_without_logprobs() -> None:
    found = draw_one([1.0, 5.0], with_params(logprobs=0))
    assert found.logprobs is not None
    assert found.logprobs.top == ()
    assert draw_one([1.0, 5.0], with_params()).logprobs is None
