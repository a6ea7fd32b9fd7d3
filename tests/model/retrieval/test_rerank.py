"""The choice between texts of nearly equal relevance."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.errors import ParameterError
from inlay.retrieval import choose_cached, rerank

NUMBERS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), min_size=0, max_size=8)


def losses(relevance: list[float], chosen: list[int]) -> list[float]:
    """The relevance that each place loses against the retriever's choice."""
    best = sorted(relevance, reverse=True)[: len(chosen)]
    return [ideal - relevance[index] for ideal, index in zip(best, chosen, strict=True)]


@given(NUMBERS, st.integers(0, 4), st.integers(0, 8))
def test_rerank_is_optimal_within_epsilon(pairs, epsilon, most):
    relevance, value = [float(one) for one, _ in pairs], [float(one) for _, one in pairs]
    chosen = rerank(relevance, value, epsilon=epsilon, most=most)
    count = min(most, len(pairs))
    assert len(set(chosen)) == count
    assert all(loss <= epsilon for loss in losses(relevance, chosen))
    allowed = (sorted(each, key=lambda index: -relevance[index]) for each in combinations(range(len(pairs)), count))
    best = max(
        sum(value[index] for index in each)
        for each in allowed
        if all(loss <= epsilon for loss in losses(relevance, each))
    )
    assert sum(value[index] for index in chosen) == best


@given(NUMBERS, st.integers(0, 4), st.integers(0, 8))
def test_scorer_gets_only_texts_within_epsilon(pairs, epsilon, most):
    relevance, value = [float(one) for one, _ in pairs], [float(one) for _, one in pairs]
    asked: list[str] = []

    def scorer(texts):
        asked.extend(texts)
        return [value[int(text)] for text in texts]

    texts = list(map(str, range(len(pairs))))
    assert choose_cached(texts, relevance, scorer, epsilon=epsilon, most=most) == (
        rerank(relevance, value, epsilon=epsilon, most=most)
    )
    least = min(sorted(relevance, reverse=True)[:most], default=float("inf")) - epsilon
    possible = [text for text in texts if relevance[int(text)] >= least]
    assert asked == (possible if len(possible) > min(most, len(pairs)) else [])


def test_infinite_epsilon_allows_every_text():
    relevance, value = [float("inf"), 1.0, float("-inf")], [0.0, 1.0, 2.0]
    assert rerank(relevance, value, epsilon=float("inf"), most=2) == [1, 2]
    scored = choose_cached(
        ["a", "b", "c"],
        relevance,
        lambda texts: [value["abc".index(one)] for one in texts],
        epsilon=float("inf"),
        most=1,
    )
    assert scored == [2]


def test_many_equal_texts_are_compared_in_linear_time():
    count, compared = 3_000, Counter[str]()

    class Value(float):
        __hash__ = float.__hash__

        def __eq__(self, other: object) -> bool:
            compared["times"] += 1
            return float.__eq__(self, other)

        def __neg__(self) -> Value:
            return Value(-float(self))

    value = [Value(number * 7 % count) for number in range(count)]
    chosen = rerank([0.5] * count, value, epsilon=1.0, most=count)
    assert chosen == list(range(count))
    assert compared["times"] < 40 * count  # quadratic: 1,500 times their number


def test_without_epsilon_the_value_decides_between_equal_texts_only():
    assert rerank([0.9, 0.5, 0.9, 0.4], [0, 9, 1, 9], epsilon=0, most=2) == [0, 2]
    assert rerank([0.9, 0.5, 0.9, 0.5], [0, 1, 1, 9], epsilon=0, most=3) == [0, 2, 3]


@pytest.mark.parametrize(
    "wrong", [{"epsilon": -1, "most": 1}, {"epsilon": 0, "most": -1}, {"epsilon": float("nan"), "most": 1}]
)
def test_negative_settings_are_rejected(wrong):
    with pytest.raises(ParameterError) as error:
        rerank([1.0], [1.0], **wrong)
    assert error.value.code == "retrieval.wrong_setting"


@pytest.mark.parametrize(("relevance", "value"), [([1.0, float("nan")], [0, 0]), ([1.0, 0.5], [float("nan"), 0])])
def test_nan_is_rejected(relevance, value):
    with pytest.raises(ParameterError) as error:
        rerank(relevance, value, epsilon=0.5, most=2)
    assert error.value.code == "retrieval.wrong_setting"


def test_lists_of_different_lengths_are_rejected():
    with pytest.raises(ParameterError) as error:
        rerank([1.0, 2.0], [1.0], epsilon=0, most=1)
    assert error.value.code == "retrieval.wrong_setting"
