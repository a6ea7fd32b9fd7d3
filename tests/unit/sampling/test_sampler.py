import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inlay.attention.cpu import available
from inlay.errors import InlayError
from inlay.sampling import compiled, plain
from inlay.sampling import sampler as sampler_choose
from inlay.sampling.params import SamplingParams
from inlay.sampling.plain import exponential
from inlay.sampling.row import Row
from inlay.sampling.sampler import request_seed, sample
from tests.counting import calls_of
from tests.generated import examples
from tests.threads import computing
from tests.unit.sampling.rows import choose, kept, normal, probabilities, row


@pytest.fixture(autouse=True, params=["compiled", "plain", "device"])
def way(request, monkeypatch):
    """Runs every test of this file with the compiled kernel, without it, and as on a device."""
    if request.param == "device":
        monkeypatch.setattr(sampler_choose, "on_device", lambda logits: True)
    elif request.param == "plain":
        monkeypatch.setattr(compiled, "takes", lambda logits: False)
        monkeypatch.setattr(sampler_choose, "kernel", None)
    elif not available():
        pytest.skip("the kernel was not built")


GREEDY = SamplingParams(temperature=0)
LARGE = 151_936


def tokens(logits: torch.Tensor, params: SamplingParams, steps: int, seed: int = 5) -> list[int]:
    """One draw for each of the first ``steps`` steps."""
    rows = [row(params, step, seed) for step in range(steps)]
    return [one.token_id for one in choose(logits.expand(steps, -1), rows)]


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
    drawn = [sampler_choose.draw(seed, step) for seed, step in ((0, 0), (0, 1), (1, 0))]
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
    SamplingParams(typical_p=0.7),
    SamplingParams(typical_p=0.9, top_p=0.9, min_p=0.001, logprobs=0),
    SamplingParams(repetition_penalty=1.4, frequency_penalty=0.5, logit_bias={3: 30.0}),
    SamplingParams(temperature=0, repetition_penalty=0.7, presence_penalty=-1.0, logprobs=20),
]


def mixed(vocabulary: int = 5000) -> tuple[torch.Tensor, list[Row]]:
    count = len(MIXED)
    logits = normal(count, vocabulary, seed=11) + 40 * torch.arange(count)[:, None]
    return logits, [row(params, 3 * n, 100 + n, [n, 17], prompt_ids=range(50)) for n, params in enumerate(MIXED)]


def take(batch: tuple[torch.Tensor, list[Row]], places: list[int]) -> tuple[torch.Tensor, list[Row]]:
    return batch[0][places], [batch[1][place] for place in places]


@pytest.mark.parametrize("vocabulary", [4999, 5000, 5024])
def test_draw_depends_only_on_its_row(vocabulary):
    batch = mixed(vocabulary)
    together = choose(*batch)
    assert [choose(*take(batch, [place]))[0] for place in range(len(MIXED))] == together
    order = [int(place) for place in torch.randperm(len(MIXED), generator=torch.Generator().manual_seed(1))]
    assert choose(*take(batch, order)) == [together[place] for place in order]
    assert choose(*take(batch, [4, 4, 4])) == [together[4]] * 3


def test_typical_row_does_not_reorder_another_row():
    """Logits that differ in the last bit tie after a large temperature; their order stays that of the logits."""
    base = torch.full((1, 64), 1.0)
    base[0, ::2] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    base[0, 5] = 3.0
    hot = SamplingParams(temperature=50.0, top_p=0.99)
    other = row(SamplingParams(top_p=0.9, typical_p=0.5))
    for step in range(40):
        (alone,) = choose(base, [row(hot, step)])
        assert choose(base.expand(2, -1), [row(hot, step), other])[0] == alone


_SOME = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    top_k=st.sampled_from([0, 0, 1, 30, 700]),
    top_p=st.sampled_from([1.0, 1.0, 0.5, 0.99]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3]),
    typical_p=st.sampled_from([1.0, 1.0, 0.4, 0.9]),
    frequency_penalty=st.sampled_from([0.0, 1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logprobs=st.sampled_from([None, 0, 3]),
)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    params=st.lists(_SOME, min_size=2, max_size=6),
    vocabulary=st.integers(2, 1500),
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([0.0, 0.3, 3, 20]),
    threads=st.sampled_from([1, 2]),
    data=st.data(),
)
def test_batching_never_changes_a_token(params, vocabulary, seed, scale, threads, data):
    logits = normal(len(params), vocabulary, seed=seed, scale=scale).bfloat16()
    rows = [row(one, place, seed + place, prompt_ids=[0, 1]) for place, one in enumerate(params)]
    with computing(threads):
        together = choose(logits, rows)
    place = data.draw(st.integers(0, len(params) - 1))
    assert choose(logits[place : place + 1], [rows[place]]) == [together[place]]


def test_exponential_has_the_same_bits_at_any_position():
    """The property above depends on this."""
    numbers = normal(5000, scale=20.0).neg().abs().neg().clamp(min=-64)
    whole = exponential(numbers.clone())
    for start in range(70):
        for length in (1, 3, 16, 31, 100, 3000):
            part = exponential(numbers[start : start + length].clone())
            assert torch.equal(part.view(torch.int32), whole[start : start + length].view(torch.int32))


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.9999)], ids=["by id", "by score"])
def test_every_token_has_its_share_of_random_numbers(monkeypatch, params):
    def token(draw: int, forbidden: tuple[int, ...] = ()) -> int:
        monkeypatch.setattr(sampler_choose, "random_bits", lambda rows: np.array([draw] * len(rows), dtype=np.uint64))
        return choose(torch.zeros(1, 4), [row(params, never=forbidden)])[0].token_id

    quarter = 2**62
    assert [token(number * quarter) for number in range(4)] == [0, 1, 2, 3]
    assert [token(number * quarter - 1) for number in range(1, 5)] == [0, 1, 2, 3]
    assert [token(draw, (0, 3)) for draw in (0, 2**63 - 1, 2**63, 2**64 - 1)] == [1, 1, 2, 2]


def test_the_order_by_score_breaks_ties_by_id():
    logits = normal(3000).bfloat16().float()
    assert len(logits.unique()) < 1500
    order = sorted(range(3000), key=lambda token: (-logits[token].item(), token))
    for top_k in (10, 400, 2500):
        ids, _ = kept(logits, SamplingParams(top_k=top_k))
        assert len(ids) >= top_k
        assert ids.tolist() == order[: len(ids)]


def test_draws_differ_with_step_and_seed():
    logits = torch.zeros(1, 1000)
    params = SamplingParams()
    first = choose(logits, [row(params, 0, 0)])
    assert choose(logits, [row(params, 0, 0)]) == first
    assert choose(logits, [row(params, 1, 0)]) != first
    assert choose(logits, [row(params, 0, 1)]) != first


def test_greedy_takes_the_lowest_id_of_a_tie():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    assert [one.token_id for one in choose(logits, [row(GREEDY)] * 2)] == [1, 0]
    wide = torch.zeros(1, LARGE)
    wide[0, [77_777, 100_000]] = 1.0
    assert choose(wide, [row(GREEDY)])[0].token_id == 77_777


def test_forbidden_tokens_are_never_chosen_and_logits_are_unchanged():
    logits = torch.tensor([[9.0, 1.0, 0.0], [9.0, 1.0, 0.0]])
    before = logits.clone()
    assert [one.token_id for one in choose(logits, [row(GREEDY, never=[0]), row(GREEDY)])] == [1, 0]
    drawn = {
        choose(logits[:1], [row(params, step, 1, [0])])[0].token_id
        for step in range(50)
        for params in (SamplingParams(), SamplingParams(top_k=2), SamplingParams(top_p=0.999))
    }
    assert drawn == {1, 2}
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_float_type_are_taken(dtype):
    logits = normal(3, 300).to(dtype)
    params = [GREEDY, SamplingParams(logprobs=3), SamplingParams(top_p=0.5)]
    rows = [row(one) for one in params]
    assert choose(logits, rows) == choose(logits.float(), rows)


def test_logprobs_equal_the_raw_log_softmax():
    logits = normal(2, 500, seed=2)
    params = SamplingParams(temperature=0.2, top_k=4, logprobs=5)
    best = int(logits[0].argmax())
    for place, found in enumerate(choose(logits, [row(params, 0, 3, [best]), row(params, 1, 4)])):
        expected = logits[place].log_softmax(dim=-1)
        order = logits[place].argsort(descending=True).tolist()
        assert found.top[0].token_id == found.token_id
        assert found.top[0].logprob == found.logprob
        assert [one.token_id for one in sorted(found.top, key=lambda one: one.rank)][:5] == order[:5]
        for one in found.top:
            assert one.logprob == pytest.approx(float(expected[one.token_id]), abs=1e-5)
            assert one.rank == order.index(one.token_id) + 1


def test_chosen_token_is_listed_once_with_the_top_tokens():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    params = replace(GREEDY, logprobs=2)
    inside = choose(logits, [row(params)])[0]
    assert [(one.token_id, one.rank) for one in inside.top] == [(0, 1), (1, 2)]
    outside = choose(logits, [row(params, never=[0, 1, 2])])[0]
    assert [(one.token_id, one.rank) for one in outside.top] == [(3, 4), (0, 1), (1, 2)]
    alone = choose(logits, [row(replace(GREEDY, logprobs=0), never=[0])])[0]
    assert [(one.token_id, one.rank) for one in alone.top] == [(1, 2)]
    none = choose(logits, [row(GREEDY)])[0]
    assert (none.logprob, none.top) == (None, ())
    everything = choose(logits, [row(replace(GREEDY, logprobs=20))])[0]
    assert [one.token_id for one in everything.top] == [0, 1, 2, 3]


def test_ranks_of_tied_tokens_go_by_id():
    logits = torch.zeros(1, 2000)
    found = choose(logits, [row(replace(GREEDY, logprobs=3), never=range(10))])[0]
    assert [(one.token_id, one.rank) for one in found.top] == [(10, 11), (0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5, logprobs=2), SamplingParams(typical_p=0.5)]
)
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (math.nan, "hold NaN; the model's weights or inputs are damaged"),
        (math.inf, "hold +inf; the model's weights or inputs are damaged"),
        (None, "leave no token to choose: every one is -inf or forbidden"),
    ],
)
@pytest.mark.parametrize("vocabulary", [50, 20_000])
def test_invalid_row_gets_an_error_and_other_rows_their_tokens(params, vocabulary, damage, reason):
    logits = normal(3, vocabulary)
    rows = [row(params, 4, place) for place in range(3)]
    expected = choose(logits, rows)
    if damage is None:
        logits[1] = -math.inf
    else:
        logits[1, 20] = damage
    first, second, third = sample(logits, rows)
    assert [first, third] == [expected[0], expected[2]]
    assert isinstance(second, InlayError)
    assert str(second) == f"the logits of token 5 of the answer {reason}"


def test_invalid_logit_of_a_forbidden_token_is_detected():
    logits = normal(1, 50).index_fill(1, torch.tensor([3]), math.nan)
    (found,) = sample(logits, [row(GREEDY, never=[3])])
    assert "hold NaN" in str(found)


def test_a_row_with_every_token_forbidden_is_an_error():
    (found,) = sample(torch.zeros(1, 2), [row(GREEDY, never=[0, 1])])
    assert "leave no token" in str(found)


def test_no_rows_are_no_work():
    assert sample(torch.zeros(0, 100), []) == []


@pytest.mark.parametrize("temperature", [1e-5, 100])
def test_extreme_temperatures_stay_finite(temperature):
    logits = normal(100, scale=30.0)
    found = probabilities(logits, SamplingParams(temperature=temperature))
    torch.testing.assert_close(found, (logits.double() / temperature).softmax(dim=-1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("changes", [{"typical_p": 0.5}, {"typical_p": 0.2}], ids=str)
def test_the_host_does_not_sort_a_large_vocabulary_for_typical_p(monkeypatch, changes):
    logits = normal(LARGE, scale=6.0)
    sorts = calls_of(monkeypatch, plain, "sorted_rows")
    found, weights = plain.kept(logits, row(SamplingParams(**changes)))
    assert max(values.shape[1] for (values,) in sorts) < 2000
    monkeypatch.setattr(plain, "SHORT_LIST", LARGE)
    whole, all_weights = plain.kept(logits, row(SamplingParams(**changes)))
    assert max(values.shape[1] for (values,) in sorts) == LARGE
    assert torch.equal(found, whole)
    assert torch.equal(weights, all_weights)


def test_request_without_a_seed_gets_its_own():
    unseeded = SamplingParams()
    assert request_seed(SamplingParams(seed=2**64 - 1), 3, 4) == 2**64 - 1
    assert request_seed(SamplingParams(seed=0), 3, 4) == 0
    seeds = {request_seed(unseeded, number, entropy) for number in range(20) for entropy in (0, 1, 2**128)}
    assert len(seeds) == 60
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert request_seed(unseeded, 3, 4) == request_seed(unseeded, 3, 4) == 14701779412035992182


def test_answers_of_one_request_have_different_seeds():
    seeded = SamplingParams(seed=7)
    seeds = [request_seed(seeded, 0, 0, answer) for answer in range(5)]
    assert seeds[0] == 7, "the first answer is the one that n=1 gives"
    assert len(set(seeds)) == 5
    assert not set(seeds[1:]) & {request_seed(SamplingParams(seed=8), 0, 0, answer) for answer in range(5)}
    assert request_seed(SamplingParams(), 1, 2, 3) != request_seed(SamplingParams(), 1, 2, 4)
    assert seeds[1] == 15287739843744312862
