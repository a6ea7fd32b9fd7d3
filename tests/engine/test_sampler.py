import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inlay.engine import sampler
from inlay.engine.sampler import request_seed, sample, survivors
from inlay.errors import InlayError
from inlay.types import SamplingParams

GREEDY = SamplingParams(temperature=0)
LARGE = 151_936


def normal(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def oracle(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities, (vocabulary,), as transformers' own warpers leave them."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(params.temperature))])
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(torch.empty(1, 0, dtype=torch.long), logits[None].float())[0].softmax(dim=-1)


def probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    ids, kept = survivors(logits, params)
    assert len(set(ids.tolist())) == len(ids)
    assert (kept > 0).all()
    dense = torch.zeros(len(logits), dtype=torch.float64)
    dense[torch.from_numpy(ids)] = torch.from_numpy(kept)
    return dense


def tokens(logits: torch.Tensor, params: SamplingParams, steps: int, seed: int = 5) -> list[int]:
    """One draw for each of the first ``steps`` steps."""
    return [sample(logits[None], [params], [step], [seed])[0].token_id for step in range(steps)]


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
]


@pytest.mark.parametrize("changes", FILTERS, ids=str)
@pytest.mark.parametrize("vocabulary", [7, 600, 5000])
def test_filters_keep_what_the_warpers_of_transformers_keep(vocabulary, changes):
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


def test_all_that_tie_with_the_kth_token_are_kept():
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
    ids, kept = survivors(logits, SamplingParams(top_p=0.5))
    assert ids.tolist() == list(range(2000))
    assert kept == pytest.approx(1 / 2000)
    ids, _ = survivors(logits.index_fill(0, torch.tensor([3999]), 1.0), SamplingParams(top_p=0.5))
    assert ids[:4].tolist() == [3999, 0, 1, 2]


@pytest.mark.parametrize("changes", [{}, {"min_p": 0.05}, {"top_p": 0.9}, {"top_k": 8}], ids=str)
def test_draws_follow_the_probabilities(changes):
    params = SamplingParams(**changes)
    logits = normal(12, seed=3, scale=1.0)
    draws = 4000
    counts = Counter(tokens(logits, params, draws))
    expected = probabilities(logits, params)
    assert all(expected[token] > 0 for token in counts)
    squares = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in enumerate(expected.tolist()) if p > 0)
    assert squares < 40, "chi-square with at most 11 degrees of freedom: 40 is beyond 1 in 10,000"


def test_neighbouring_seeds_draw_independently():
    logits = torch.zeros(64)
    params = SamplingParams()
    rows = [tokens(logits, params, 64, seed=seed) for seed in (0, 1, 2, 2**63, 2**64 - 1)]
    assert len({tuple(row) for row in rows}) == len(rows)
    agreements = [sum(a == b for a, b in zip(rows[0], row, strict=True)) for row in rows[1:]]
    assert max(agreements) < 8


def test_the_generator_is_pinned():
    """Seeded answers must stay the same over releases of numpy."""
    drawn = [sampler._draw(seed, step) for seed, step in ((0, 0), (0, 1), (1, 0))]
    assert drawn == [213000021201967259, 9267267987884836803, 5599841837815857887]


MIXED = [
    SamplingParams(),
    GREEDY,
    SamplingParams(top_p=0.8, logprobs=2),
    SamplingParams(top_k=40, temperature=1.5),
    SamplingParams(min_p=0.01, temperature=0.7),
    SamplingParams(top_k=10**6),
    SamplingParams(top_k=1500, top_p=0.99, temperature=5.0),
    SamplingParams(temperature=4.0),
    SamplingParams(top_p=0.9, temperature=5.0),
]


def mixed(vocabulary: int = 5000) -> dict:
    rows = len(MIXED)
    return {
        "logits": normal(rows, vocabulary, seed=11) + 40 * torch.arange(rows)[:, None],
        "params": MIXED,
        "steps": [3 * row for row in range(rows)],
        "seeds": [100 + row for row in range(rows)],
        "forbidden": [[row, 17] for row in range(rows)],
    }


def take(batch: dict, rows: list[int]) -> dict:
    return {
        name: values[rows] if isinstance(values, torch.Tensor) else [values[row] for row in rows]
        for name, values in batch.items()
    }


@pytest.mark.parametrize("vocabulary", [4999, 5000])
def test_a_draw_depends_on_its_own_row_alone(vocabulary):
    batch = mixed(vocabulary)
    together = sample(**batch)
    alone = [sample(**take(batch, [row]))[0] for row in range(len(MIXED))]
    assert [one.token_id for one in together] == [one.token_id for one in alone]
    order = [5, 2, 8, 7, 0, 3, 6, 1, 4]
    assert [one.token_id for one in sample(**take(batch, order))] == [together[row].token_id for row in order]
    twice = sample(**take(batch, [4, 4, 4]))
    assert [one.token_id for one in twice] == [together[4].token_id] * 3


def test_rows_drawn_in_one_batch_give_what_they_give_alone(monkeypatch):
    batch = mixed()
    alone = sample(**batch)
    grouped = sampler._batches
    sizes = []

    def as_on_an_accelerator(params, vocabulary, device):
        batches = grouped(params, vocabulary, torch.device("cuda"))
        sizes.extend(map(len, batches))
        return batches

    monkeypatch.setattr(sampler, "_batches", as_on_an_accelerator)
    assert [one.token_id for one in sample(**batch)] == [one.token_id for one in alone]
    assert sizes == [4, 4]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.9999)], ids=["by id", "by score"])
def test_every_token_owns_its_part_of_the_random_numbers(monkeypatch, params):
    def token(draw: int, forbidden: tuple[int, ...] = ()) -> int:
        monkeypatch.setattr(sampler, "_draw", lambda seed, step: draw)
        return sample(torch.zeros(1, 4), [params], [0], [0], [forbidden])[0].token_id

    quarter = 2**62
    assert [token(number * quarter) for number in range(4)] == [0, 1, 2, 3]
    assert [token(number * quarter - 1) for number in range(1, 5)] == [0, 1, 2, 3]
    assert [token(draw, (0, 3)) for draw in (0, 2**63 - 1, 2**63, 2**64 - 1)] == [1, 1, 2, 2]


def test_the_order_by_score_breaks_ties_by_id():
    logits = normal(3000).bfloat16().float()
    assert len(logits.unique()) < 1500
    order = sorted(range(3000), key=lambda token: (-logits[token].item(), token))
    for top_k in (10, 400, 2500):
        ids, _ = survivors(logits, SamplingParams(top_k=top_k))
        assert len(ids) >= top_k
        assert ids.tolist() == order[: len(ids)]


def test_draws_differ_with_step_and_seed():
    logits = torch.zeros(1, 1000)
    params = [SamplingParams()]
    first = sample(logits, params, [0], [0])
    assert sample(logits, params, [0], [0]) == first
    assert sample(logits, params, [1], [0]) != first
    assert sample(logits, params, [0], [1]) != first


def test_greedy_takes_the_lowest_id_of_a_tie():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    assert [one.token_id for one in sample(logits, [GREEDY] * 2, [0, 0], [0, 0])] == [1, 0]
    wide = torch.zeros(1, LARGE)
    wide[0, [77_777, 100_000]] = 1.0
    assert sample(wide, [GREEDY], [0], [0])[0].token_id == 77_777


def test_forbidden_tokens_are_never_chosen_and_logits_stay_as_they_are():
    logits = torch.tensor([[9.0, 1.0, 0.0], [9.0, 1.0, 0.0]])
    before = logits.clone()
    assert [one.token_id for one in sample(logits, [GREEDY] * 2, [0] * 2, [0] * 2, [[0], []])] == [1, 0]
    drawn = {
        sample(logits[:1], [params], [step], [1], [[0]])[0].token_id
        for step in range(50)
        for params in (SamplingParams(), SamplingParams(top_k=2), SamplingParams(top_p=0.999))
    }
    assert drawn == {1, 2}
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_float_type_are_taken(dtype):
    logits = normal(3, 300).to(dtype)
    params = [GREEDY, SamplingParams(logprobs=3), SamplingParams(top_p=0.5)]
    assert sample(logits, params, [0] * 3, [0] * 3) == sample(logits.float(), params, [0] * 3, [0] * 3)


def test_logprobs_are_those_of_the_raw_logits():
    logits = normal(2, 500, seed=2)
    params = SamplingParams(temperature=0.2, top_k=4, logprobs=5)
    best = int(logits[0].argmax())
    for row, found in enumerate(sample(logits, [params] * 2, [0, 1], [3, 4], [[best], []])):
        expected = logits[row].log_softmax(dim=-1)
        order = logits[row].argsort(descending=True).tolist()
        assert found.top[0].token_id == found.token_id
        assert found.top[0].logprob == found.logprob
        assert [one.token_id for one in sorted(found.top, key=lambda one: one.rank)][:5] == order[:5]
        for one in found.top:
            assert one.logprob == pytest.approx(float(expected[one.token_id]), abs=1e-5)
            assert one.rank == order.index(one.token_id) + 1


def test_the_chosen_token_comes_beside_the_top_ones_once():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    params = replace(GREEDY, logprobs=2)
    inside = sample(logits, [params], [0], [0])[0]
    assert [(one.token_id, one.rank) for one in inside.top] == [(0, 1), (1, 2)]
    outside = sample(logits, [params], [0], [0], [[0, 1, 2]])[0]
    assert [(one.token_id, one.rank) for one in outside.top] == [(3, 4), (0, 1), (1, 2)]
    alone = sample(logits, [replace(GREEDY, logprobs=0)], [0], [0], [[0]])[0]
    assert [(one.token_id, one.rank) for one in alone.top] == [(1, 2)]
    none = sample(logits, [GREEDY], [0], [0])[0]
    assert (none.logprob, none.top) == (None, ())
    everything = sample(logits, [replace(GREEDY, logprobs=20)], [0], [0])[0]
    assert [one.token_id for one in everything.top] == [0, 1, 2, 3]


def test_ranks_of_tied_tokens_go_by_id():
    logits = torch.zeros(1, 2000)
    found = sample(logits, [replace(GREEDY, logprobs=3)], [0], [0], [list(range(10))])[0]
    assert [(one.token_id, one.rank) for one in found.top] == [(10, 11), (0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5)])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (math.nan, "holds NaN; the model's weights or inputs are damaged."),
        (math.inf, "holds +inf; the model's weights or inputs are damaged."),
        (None, "leaves no token to choose: every one is -inf or forbidden."),
    ],
)
def test_a_row_without_a_choice_is_named(params, damage, reason):
    logits = normal(3, 50)
    if damage is None:
        logits[1] = -math.inf
    else:
        logits[1, 20] = damage
    with pytest.raises(InlayError) as caught:
        sample(logits, [params] * 3, [0] * 3, [0] * 3)
    assert str(caught.value) == f"Row 1 of the logits {reason}"


def test_a_row_with_every_token_forbidden_is_named():
    with pytest.raises(InlayError, match="Row 0 of the logits leaves no token"):
        sample(torch.zeros(1, 2), [GREEDY], [0], [0], [[0, 1]])


@pytest.mark.parametrize("temperature", [1e-5, 100])
def test_extreme_temperatures_stay_finite(temperature):
    logits = normal(100, scale=30.0)
    found = probabilities(logits, SamplingParams(temperature=temperature))
    torch.testing.assert_close(found, (logits.double() / temperature).softmax(dim=-1), rtol=1e-4, atol=1e-6)


def test_a_large_vocabulary_is_not_sorted(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the vocabulary was sorted in full")

    for owner, name in ((torch.Tensor, "sort"), (torch.Tensor, "argsort"), (torch, "sort"), (torch, "argsort")):
        monkeypatch.setattr(owner, name, refuse)
    widths = []
    topk = torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", lambda self, k, **rest: widths.append(k) or topk(self, k, **rest))
    params = [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=50, logprobs=20), GREEDY]
    found = sample(normal(4, LARGE, scale=6.0), params, [0] * 4, [0] * 4)
    assert len(found[2].top) in (20, 21)
    assert sorted(widths) == [20, 1024, 1024]


def test_a_large_vocabulary_is_sorted_where_the_short_list_is_too_short(monkeypatch):
    calls = []
    sort = sampler._sort
    monkeypatch.setattr(sampler, "_sort", lambda *row: calls.append(1) or sort(*row))
    logits = normal(LARGE, scale=0.5)
    params = SamplingParams(top_p=0.5)
    expected = oracle(logits, params)
    kept = int((probabilities(logits, params) > 0).sum())
    assert calls == [1]
    # Sums over so many numbers of fp32 differ in where exactly they cross top-p.
    assert kept == pytest.approx(int((expected > 0).sum()), rel=1e-4)
    assert sample(logits[None], [params], [0], [0])[0].token_id in expected.nonzero()


def test_a_request_without_a_seed_gets_one_of_its_own():
    unseeded = SamplingParams()
    assert request_seed(SamplingParams(seed=2**64 - 1), 3, 4) == 2**64 - 1
    assert request_seed(SamplingParams(seed=0), 3, 4) == 0
    seeds = {request_seed(unseeded, number, entropy) for number in range(20) for entropy in (0, 1, 2**128)}
    assert len(seeds) == 60
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert request_seed(unseeded, 3, 4) == request_seed(unseeded, 3, 4) == 14701779412035992182
