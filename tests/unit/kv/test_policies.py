"""Eviction policies. Under each, ends are evicted before prefixes, and segments in use stay."""

from __future__ import annotations

import gc
import random
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.errors import CapacityError
from inlay.kv.identity import Context, KeyMaker, TokenRun, specify
from inlay.kv.policies import DEFAULT_EVICTION, POLICIES, PassCost, Use, cost, hybrid, lfu, lru, lru2
from inlay.kv.pool import KVPool, Segment
from inlay.kv.store import SegmentStore
from tests.generated import examples
from tests.unit.kv.accounting import audit

KEYS = KeyMaker(b"model", "float32", "none", b"", positioned=False)
COST = PassCost()


def store(policy: str, chunks: int = 4) -> SegmentStore:
    return SegmentStore(KVPool(chunks * 4 * 16, 16, 4), KEYS, POLICIES[policy])


def put(s: SegmentStore, run: TokenRun) -> None:
    slots = s.allocate(len(run.ids))
    s.insert(run, slots)
    s.pool.free(slots)


def module(number: int, tokens: int = 4) -> TokenRun:
    return specify(tuple(range(100 * number, 100 * number + tokens)), 0, (), KEYS)


def text(number: int, tokens: int = 4) -> TokenRun:
    return TokenRun(tuple(range(100 * number, 100 * number + tokens)), 0, Context())


def read(s: SegmentStore, run: TokenRun, times: int = 1) -> None:
    for _ in range(times):
        s.read(s.longest(run))


def kept(s: SegmentStore, *runs: TokenRun) -> list[bool]:
    found = {segment.run.ids for segment in s}
    return [run.ids in found for run in runs]


def test_ranks():
    old_often, new_once = Use(4, seen=5, frequency=9, last=5, before=4), Use(4, seen=8, frequency=1, last=8)
    assert lru(old_often, COST) < lru(new_once, COST)
    for policy in (lru2, lfu, cost):
        assert policy(new_once, COST) < policy(old_often, COST)
    own, schemas = Use(4, seen=9, frequency=9), Use(4, module=True, seen=1, frequency=1)
    assert hybrid(own, COST) < hybrid(schemas, COST)
    assert cost(Use(4, 0, frequency=1), COST) < cost(Use(4, 30_000, frequency=1), COST), "what stands behind much"
    faded, fresh = Use(4, frequency=5, floor=0.0), Use(4, frequency=1, floor=7.0)
    assert lfu(faded, COST) < lfu(fresh, COST)


@pytest.mark.parametrize(("policy", "stays"), [("lru", [False, True]), ("lfu", [True, False]), ("lru2", [True, False])])
def test_frequently_read_segment_stays_under_frequency_policies(policy, stays):
    s = store(policy, 2)
    put(s, module(1))
    read(s, module(1), 3)
    put(s, module(2))
    put(s, module(3))
    assert kept(s, module(1), module(2)) == stays


@pytest.mark.parametrize("policy", ["lfu", "lru2", "hybrid", "cost"])
def test_repeated_lookup_counts_as_one_use(policy):
    """A request that waits for room looks up at every step; repeated lookups do not raise the frequency."""
    s = store(policy, 2)
    put(s, module(1))
    read(s, module(1))
    put(s, module(2))
    for _ in range(20):
        s.longest(module(2))
    put(s, module(3))
    assert kept(s, module(1), module(2)) == [True, False]


def test_the_default_keeps_modules_before_text_of_requests():
    s = store(DEFAULT_EVICTION, 2)
    put(s, module(1))
    put(s, text(2))
    read(s, text(2), 5)
    put(s, text(3))
    assert kept(s, module(1), text(2)) == [True, False]


@pytest.mark.parametrize("policy", ["lfu", "cost"])
def test_old_eviction_scores_fade(policy):
    """A formerly popular segment is evicted once the same amount of other text has come and gone."""
    s = store(policy, 2)
    put(s, module(0))
    read(s, module(0), 5)
    for number in range(1, 40):
        put(s, module(number))
        read(s, module(number))
    assert kept(s, module(0)) == [False]


def test_returning_segment_keeps_its_use_count():
    s = store("lfu", 2)
    put(s, module(1))
    read(s, module(1), 3)
    s.clear()
    put(s, module(1))
    put(s, module(2))
    read(s, module(2))
    put(s, module(3))
    assert kept(s, module(1), module(2)) == [True, False]


def test_history_of_evicted_segments_is_small():
    """Neither the segment nor its name is kept: a server remembers many thousands."""
    s = store("lfu", 2)
    tracemalloc.start()
    try:
        for number in range(2000):
            put(s, module(number))
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 2000 * 300


@pytest.mark.parametrize("policy", POLICIES)
def test_ends_are_evicted_before_prefixes(policy):
    """The end costs more to compute and was read more often under its own name; it is of no use alone."""
    s = store(policy, 4)
    prefix = specify(tuple(range(8)), 0, (), KEYS)
    end = prefix.rest(4)
    put(s, prefix.prefix(4))
    put(s, prefix)
    read(s, end, 5)
    put(s, module(5, 8))
    read(s, module(5, 8), 9)
    put(s, module(6))
    assert s.longest(prefix).tokens == 4
    put(s, module(7))
    audit(s)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 10_000))
def test_held_segments_stay_and_the_rest_is_reachable(policy, seed):
    """Random prompts with common prefixes, some with references. After every step the latter are stored, and no
    chunk is lost.
    """
    draw, s = random.Random(seed), store(policy, 8)
    holds = []
    for _ in range(60):
        ids = tuple(draw.choice((1, 2)) for _ in range(draw.randrange(1, 14)))
        run = TokenRun(ids, 0, Context())
        if draw.random() < 0.3:
            found = s.longest(run)
            holds.append((s.hold(found), ids[: found.tokens]))
        if holds and draw.random() < 0.4:
            holds.pop(draw.randrange(len(holds)))[0].release()
        with suppress(CapacityError):
            put(s, run)
        read(s, run)
        for _, held in holds:
            assert s.longest(TokenRun(held, 0, Context())).tokens == len(held)
        assert all(s.longest(segment.run).tokens == segment.tokens for segment in list(s))
        audit(s, holds=[hold for hold, _ in holds])
        # All kept segments are reached from the root: no end outlives its prefix.
        reached, places = set(), [TokenRun((), 0, Context())]
        while places:
            at = s.place(places.pop())
            for segment in s:
                if segment.place == at:
                    reached.add(segment)
                    places.append(segment.run.rest(segment.tokens))
        assert reached == set(s)


def test_removed_item_is_not_referenced():
    s = store("lru")
    put(s, text(1))
    put(s, text(2))
    s.evict(s.longest(text(1)).segments)
    gc.collect()
    stored = [one for one in gc.get_objects() if type(one) is Segment]
    assert not any(one.run.ids == text(1).ids for one in stored)
    assert any(one.run.ids == text(2).ids for one in stored)
