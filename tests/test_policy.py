"""A reuse policy is parsed once, has a written form, and is ordered by how much approximation it accepts."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.errors import ParameterError
from inlay.policy import BEST, CONTEXTS, LEVELS, POSITIONS, WORDS, ReusePolicy, default_policy

REUSE = ("off", "exact", *CONTEXTS)

written = st.sampled_from(WORDS)


@given(written, st.sampled_from([None, *POSITIONS]))
def test_the_written_form_reads_as_the_same_policy(word, positions):
    policy = ReusePolicy.parse(word, positions)
    assert ReusePolicy.parse(str(policy), policy.positions) == policy
    assert str(policy) == ("anchored" if word == "modular" else word)
    assert ReusePolicy.named(word) == ReusePolicy.parse(word)


def test_modular_is_the_best_context_there_is():
    assert ReusePolicy.parse("modular") == ReusePolicy.parse("anchored") == BEST
    assert [ReusePolicy.parse(word).modular for word in REUSE] == [False, False, True, True]
    assert [ReusePolicy.parse(word).reads_nothing for word in REUSE] == [True, False, False, False]
    assert [ReusePolicy.parse(word).anchored for word in REUSE] == [False, False, False, True]


@pytest.mark.parametrize("word", ["", "Exact", None, 3, ["off"]])
def test_what_is_no_policy_is_told_so(word):
    with pytest.raises(ParameterError, match=r"^reuse is .*; use one of off, exact, isolated, anchored, modular$"):
        ReusePolicy.parse(word)
    with pytest.raises(ParameterError, match=r"^positions is .*; use one of schema, packed$"):
        ReusePolicy.parse("off", word if word is not None else "")


def test_a_ceiling_bounds_what_is_asked_for():
    for word, ceiling in product(WORDS, LEVELS):
        policy, most = ReusePolicy.parse(word), ReusePolicy.parse(ceiling)
        assert policy.within(most) == (LEVELS.index(policy.level) <= LEVELS.index(ceiling))
        allowed = policy.within(most)
        assert ReusePolicy.bounded(policy, BEST, most) == (policy if allowed else None)
        assert ReusePolicy.bounded(None, policy, most) == (policy if allowed else most)


@given(st.lists(written, min_size=1))
def test_the_least_of_several_is_within_them_all(words):
    least = ReusePolicy.least(*words, None)
    assert str(least) in {str(ReusePolicy.parse(word)) for word in words}
    assert all(least.within(ReusePolicy.parse(word)) for word in words)


def test_positions_are_the_best_that_a_model_allows():
    assert [ReusePolicy.parse(word).settled(None).positions for word in REUSE] == ["packed"] * 4
    assert [ReusePolicy.parse(word).settled("it turns").positions for word in REUSE] == ["packed"] * 2 + ["schema"] * 2
    assert ReusePolicy.parse("off", "packed").settled("it turns").packed
    with pytest.raises(ParameterError, match="positions 'packed' with reuse 'isolated' reads segments at a shift"):
        ReusePolicy.parse("isolated", "packed").settled("it turns")


def test_the_default_goes_by_whether_there_are_modules():
    assert default_policy(modules=True) == BEST
    assert default_policy(modules=False) == ReusePolicy.parse("exact")
