"""Workloads: their prompts and arrival times."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from itertools import chain, takewhile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inlay.pml import Prompt
from inlay_lab.bench.throughput.workload import (
    ZIPF,
    Sizes,
    Workload,
    hits,
    permuted_modules,
    shared_prefix,
    user_workload,
    warm_passages,
    zipf,
)

SIZES = Sizes(document=70, system=40, text=12, passage=16, passages=3, question=6, answer=3, summary=3)


def made(llm, kind: str, requests: int, rate: float) -> Workload:
    return asyncio.run(user_workload(kind, llm, SIZES, requests=requests, hit_rate=rate, clients=2))


def common(one, other) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def test_arrivals_are_a_seeded_poisson_process():
    workload = shared_prefix(262, requests=4000, prefix=0, question=1, completion=1)
    times = [ask.at for ask in workload.arriving(5.0, 0).asks]
    assert times[0] == 0
    gaps = torch.tensor(times).double().diff()
    assert float(gaps.mean()) == pytest.approx(1 / 5, rel=0.05)
    assert float(gaps.std()) == pytest.approx(1 / 5, rel=0.08)
    assert [ask.at for ask in workload.arriving(5.0, 0).asks] == times
    assert [ask.at for ask in workload.arriving(5.0, 1).asks] != times
    assert [ask.ids for ask in workload.arriving(5.0, 0).asks] == [ask.ids for ask in workload.asks]


def test_fewer_requests_are_the_first_ones():
    workload = shared_prefix(262, requests=5, prefix=3, question=2, completion=7).arriving(1.0, 0)
    assert workload.first(2).asks == workload.asks[:2]
    assert (workload.first(2).completion, workload.first(2).prefix) == (7, 3)
    assert [ask.at for ask in workload.small().asks] == [0.0, 0.0]
    assert workload.small().completion == 2


@given(st.integers(1, 60), st.floats(0, 1))
def test_hits_are_spread_evenly(requests, rate):
    said = list(hits(requests, rate))
    assert len(said) == requests
    for first in range(requests + 1):
        assert abs(sum(said[:first]) - first * rate) <= 0.5 + 1e-9


@pytest.mark.parametrize(("kind", "prefix", "own"), [("documents", 70, 6), ("summaries", 40, 12)])
def test_hits_start_with_the_resident_prefix_and_misses_do_not(llm, kind, prefix, own):
    workload = made(llm, kind, 12, 0.75)
    (resident,) = workload.resident
    assert len(resident) == prefix
    assert [len(ask.ids) for ask in workload.asks] == [prefix + own] * 12
    assert [ask.shared for ask in workload.asks].count(prefix) == 9
    for number, ask in enumerate(workload.asks):
        stored = max(common(ask.ids, text) for text in [resident, *(other.ids for other in workload.asks[:number])])
        assert ask.shared <= stored <= ask.shared + 3
    assert made(llm, kind, 4, 0.0).resident == ()


@pytest.mark.parametrize(("requests", "rate"), [(8, 0.5), (20, 0.0)])
def test_passages_are_stored_with_their_first_use(llm, requests, rate):
    workload = made(llm, "passages", requests, rate)
    tokens = {run.owner[-1]: run.ids for run in llm.schema("bench").runs if run.owner}
    names = [[item.name for item in ask.prompt.children if hasattr(item, "name")] for ask in workload.asks]
    assert all(len(set(each)) == 3 for each in names)
    stored = {item.name for prompt in workload.resident for item in prompt.children}
    drawn = list(chain.from_iterable(names))
    assert sum(name in stored for name in drawn) >= rate * len(drawn)
    assert bool(rate) <= len(stored) < len(set(drawn)) < len(drawn)
    for ask, each in zip(workload.asks, names, strict=True):
        assert ask.shared == sum(len(tokens[name]) for name in each if name in stored)
        stored |= set(each)


def test_popular_passages_are_drawn_more_often():
    draw = random.Random(0)
    drawn = Counter(chain.from_iterable(zipf(draw, 1) for _ in range(1500)))
    weights = [(rank + 1) ** -ZIPF for rank in range(1000)]
    expected = [1500 * weight / sum(weights) for weight in weights]
    assert drawn[0] == pytest.approx(expected[0], rel=0.3)
    assert sum(drawn[rank] for rank in range(10)) == pytest.approx(sum(expected[:10]), rel=0.15)
    orders = [tuple(zipf(draw, 3)) for _ in range(50)]
    assert any(order != tuple(sorted(order)) for order in orders)
    assert all(len(set(order)) == 3 for order in orders)


@given(st.lists(st.sets(st.integers(0, 9), min_size=1), min_size=1, max_size=8), st.floats(0, 1))
def test_warm_passages_are_the_fewest_for_the_hit_rate(drawn, rate):
    warm = warm_passages(drawn, rate)
    asked = list(chain.from_iterable(drawn))
    assert sum(rank in warm for rank in asked) >= rate * len(asked) - 1e-9
    assert warm == {rank for rank in asked if rank <= max(warm, default=-1)}
    if warm:
        less = warm - {max(warm)}
        assert sum(rank in less for rank in asked) < rate * len(asked)


def test_permuted_modules_are_all_resident(llm):
    workload = asyncio.run(permuted_modules(llm, requests=2, tokens=10, question=5, completion=1))
    assert all(isinstance(prompt, Prompt) for prompt in workload.resident)
    assert {item.name for prompt in workload.resident for item in prompt.children} == {f"m{n}" for n in range(12)}
    assert [ask.shared for ask in workload.asks] == [60, 60]
    assert workload.prompt_tokens(sharing=True) == sum(len(ask.ids) for ask in workload.asks) - 120
