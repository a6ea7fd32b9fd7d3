"""The tokens that temperature, min-p, top-k, top-p and typical-p keep, against the warpers of transformers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from inlay.sampling.params import SamplingParams
from tests.generated import examples
from tests.unit.sampling.rows import kept, normal, probabilities


def warp(logits: torch.Tensor, warpers: list) -> torch.Tensor:
    return LogitsProcessorList(warpers)(torch.empty(1, 0, dtype=torch.long), logits[None])[0]


def before_top_p(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Logits, (vocabulary,), as transformers' own warpers leave them, in vLLM's order."""
    warpers = [TemperatureLogitsWarper(float(params.temperature))]
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    return warp(logits, warpers)


def before_typical_p(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    left = before_top_p(logits, params)
    return warp(left, [TopPLogitsWarper(params.top_p)]) if params.top_p < 1 else left


def oracle(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities, (vocabulary,), after all warpers."""
    left = before_typical_p(logits.float(), params)
    if params.typical_p < 1:
        left = warp(left, [TypicalLogitsWarper(params.typical_p)])
    return left.softmax(dim=-1)


FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 10**6},
    {"top_k": -1},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 1e-9},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 30, "top_p": 0.7},
    {"top_k": 700, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
    {"top_p": 0.95, "min_p": 0.1, "temperature": 0.6},
    {"top_k": 2000, "top_p": 0.99, "temperature": 3.0},
    {"typical_p": 0.9},
    {"typical_p": 0.2, "temperature": 1.5},
    {"typical_p": 0.95, "min_p": 0.01},
    {"typical_p": 0.8, "top_k": 50},
    {"typical_p": 0.6, "top_p": 0.9, "temperature": 0.7},
    {"typical_p": 0.7, "top_k": 600, "top_p": 0.95, "min_p": 0.001},
]


@pytest.mark.parametrize("changes", FILTERS, ids=str)
@pytest.mark.parametrize("vocabulary", [7, 600, 5000])
def test_filters_equal_transformers_warpers(vocabulary, changes):
    params = SamplingParams(**changes)
    for seed in range(4):
        logits = normal(vocabulary, seed=seed)
        expected, found = oracle(logits, params), probabilities(logits, params)
        # A token below 2**-40 of the best one's probability counts as impossible.
        assert torch.equal(found > 0, expected > 2.0**-40 * expected.max())
        torch.testing.assert_close(found, expected.double(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("changes", [{"top_p": 0.5}, {"top_k": 1500, "top_p": 0.5}], ids=str)
def test_a_flat_row_needs_more_than_the_short_list(changes):
    logits = normal(5000, scale=0.1)
    params = SamplingParams(**changes)
    kept = probabilities(logits, params) > 0
    assert kept.sum() > (1024 if "top_k" not in changes else 500)
    assert torch.equal(kept, oracle(logits, params) > 0)


def test_all_tokens_tied_with_the_kth_are_kept():
    logits = torch.zeros(3000)
    logits[2999] = 1.0
    params = SamplingParams(top_k=2)
    assert torch.equal(probabilities(logits, params) > 0, oracle(logits, params) > 0)
    assert (probabilities(logits, params) > 0).all()


def test_top_p_of_tied_top_k_tokens_counts_all_of_them():
    logits = torch.zeros(5000)
    logits[:100] = torch.linspace(1e-3, 2e-3, 100)
    params = SamplingParams(top_k=200, top_p=0.01)
    expected = oracle(logits, params) > 0
    assert 45 < expected.sum() < 55
    assert torch.equal(probabilities(logits, params) > 0, expected)


def test_top_p_takes_tied_tokens_in_order_of_their_ids():
    logits = torch.zeros(4000)
    ids, shares = kept(logits, SamplingParams(top_p=0.5))
    assert ids.tolist() == list(range(2000))
    assert shares == pytest.approx(1 / 2000)
    ids, _ = kept(logits.index_fill(0, torch.tensor([3999]), 1.0), SamplingParams(top_p=0.5))
    assert ids[:4].tolist() == [3999, 0, 1, 2]


_PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 10),
    top_k=st.just(0) | st.integers(1, 300),
    top_p=st.just(1.0) | st.floats(0.01, 1),
    min_p=st.just(0.0) | st.floats(0, 1),
    typical_p=st.just(1.0) | st.floats(0.05, 1),
)


def mass_before(order: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """(vocabulary,): the total probability of the tokens before each one in an order."""
    ranks = order.argsort()
    return (probabilities[ranks].cumsum(dim=0) - probabilities[ranks])[ranks.argsort()]


def close_to_top_p(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The tokens, (vocabulary,), of which fp32 can't tell whether those before them reach top-p."""
    probabilities = before_top_p(logits.double(), params).softmax(dim=-1)
    return (mass_before(-probabilities, probabilities) - params.top_p).abs() < 4e-6


def close_to_typical_p(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The same for typical-p; of a flat row, fp32 also can't tell which of many tokens is the more typical one."""
    logs = before_typical_p(logits.double(), params).log_softmax(dim=-1)
    untypical = (-logs + (logs.exp() * logs).nansum()).abs()
    before = mass_before(untypical, logs.exp())
    close = (before - params.typical_p).abs() < 4e-6
    last = untypical[before < params.typical_p].max()
    return close | ((untypical - last).abs() < 4e-6)


@settings(max_examples=examples(150), deadline=None)
@given(
    params=_PARAMS, vocabulary=st.integers(1, 400), seed=st.integers(0, 2**32), scale=st.sampled_from([0.01, 1, 5, 50])
)
def test_any_filters_equal_transformers_warpers(params, vocabulary, seed, scale):
    logits = normal(vocabulary, seed=seed, scale=scale)
    expected, found = oracle(logits, params), probabilities(logits, params)
    differing = ((found > 0) != (expected > 0)) & (expected.double() + found > 1e-10)
    if not differing.any():
        torch.testing.assert_close(found, expected.double(), rtol=1e-3, atol=1e-6)
        return
    # Sums of fp32 differ from sums of integers in the last digits, so a token at the very border may fall either way.
    assume(params.typical_p == 1 or params.top_p == 1 or not close_to_top_p(logits, params).any())
    close = close_to_top_p(logits, params) if params.typical_p == 1 else close_to_typical_p(logits, params)
    assert not (differing & ~close).any()


def test_typical_p_drops_an_untypical_most_probable_token():
    """Arithmetic by hand: one token of 0.1 over many small ones has far less surprise than is expected."""
    logits = torch.cat([torch.tensor([0.1]), torch.full((900,), 0.001)]).log()
    ids, shares = kept(logits, SamplingParams(typical_p=0.5))
    assert 0 not in ids
    assert len(ids) == 900, "all that tie are kept"
    assert shares == pytest.approx(1 / 900)


@pytest.mark.parametrize("changes", [{"typical_p": 0.5}, {"top_p": 0.97}, {"top_p": 0.9, "typical_p": 0.5}], ids=str)
def test_candidate_lists_grow_to_the_needed_length(changes):
    logits = normal(20_000, scale=0.3)
    params = SamplingParams(**changes)
    expected, found = oracle(logits, params), probabilities(logits, params)
    assert (expected > 0).sum() > 5000
    assert ((found > 0) != (expected > 0)).sum() <= 5, "5 of 20,000 at the border"


def test_negative_and_positive_zero_are_tied():
    ids, _ = kept(torch.tensor([-0.0, 0.0, -1.0, -0.0]), SamplingParams(top_k=3))
    assert ids.tolist() == [0, 1, 3]
