"""The prefix index against a plain dictionary of all token prefixes under their contexts."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.engine.allocation import pieces
from inlay.errors import CapacityError
from inlay.kv.identity import EMPTY, Context, KeyMaker, TokenRun
from inlay.kv.index import PrefixIndex, shared_length
from inlay.kv.pool import Hold, KVPool, PrefixMatch
from inlay.kv.store import SegmentStore
from inlay.slots import SlotRange, cut
from tests.unit.kv.accounting import audit

#: Nothing, some text, the same after a gap, other text, and text in two parts that did not see each other.
CONTEXTS = (
    ((), 0),
    (((300, 301), 0, EMPTY, True),),
    (((300,), 0, EMPTY, True), ((301,), 5, b"x", True)),
    (((300, 302), 0, EMPTY, True),),
    (((300,), 0, EMPTY, True), ((301,), 1, EMPTY, False)),
)
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)  # few tokens: much is shared
RUNS = st.tuples(TOKENS, st.integers(0, len(CONTEXTS) - 1), st.sampled_from([0, 3]), st.sampled_from([0, 7]))


def make(positioned: bool = False, chunks: int = 64, chunk_size: int = 4) -> SegmentStore:
    keys = KeyMaker(b"model", "float32", "none", b"", positioned)
    return SegmentStore(KVPool(chunks * chunk_size * 16, 16, chunk_size), keys)


def run_of(ids: tuple[int, ...], context: int, gap: int, moved: int) -> TokenRun:
    """Tokens ``gap`` positions after a context, all of it moved."""
    record = Context()
    if context:
        for part, start, made, continues in CONTEXTS[context]:
            record = record.extend(part, start + moved, made, continues)
    return TokenRun(ids, record.end + gap if context else moved + gap, record)


class Oracle:
    """Every prefix that was stored, under what it could attend to: no segments, no digests."""

    def __init__(self, positioned: bool) -> None:
        self.positioned = positioned
        self.prefixes: set[tuple[object, tuple[int, ...]]] = set()

    def under(self, context: int, gap: int, moved: int) -> object:
        if self.positioned:
            return context, gap if context else gap + moved, moved if context else 0
        return context, gap if context else 0  # without a context it does not matter where a text stands

    def insert(self, ids: tuple[int, ...], *where: int) -> None:
        self.prefixes |= {(self.under(*where), ids[:n]) for n in range(1, len(ids) + 1)}

    def longest(self, ids: tuple[int, ...], *where: int) -> int:
        return max((n for n in range(1, len(ids) + 1) if (self.under(*where), ids[:n]) in self.prefixes), default=0)


def put(store: SegmentStore, run: TokenRun) -> PrefixMatch:
    """Insert a run from slots of its own, as a request does."""
    slots = store.allocate(len(run.ids))
    found = store.insert(run, slots)
    store.pool.free(slots)
    return found


def read(found: PrefixMatch) -> tuple[int, ...]:
    """The tokens that were found, one by one."""
    return tuple(token for each in found.ranges for token in each.segment.run.ids[each.first : each.end])


@settings(deadline=None)
@given(st.booleans(), st.lists(RUNS, min_size=1, max_size=12), st.lists(RUNS, max_size=6), st.integers(0, 12))
def test_longest_stored_prefix_is_found(positioned, runs, asked, most):
    store, oracle = make(positioned), Oracle(positioned)
    for ids, *where in runs:
        found = put(store, run_of(ids, *where))
        assert (read(found), found.tokens) == (ids, len(ids))
        oracle.insert(ids, *where)
        audit(store)
    for ids, *where in [*runs, *asked]:
        found = store.longest(run_of(ids, *where))
        assert found.tokens == oracle.longest(ids, *where)
        assert read(found) == ids[: found.tokens]
        least = store.longest(run_of(ids, *where), most=most)
        assert (least.tokens, read(least)) == (min(most, found.tokens), ids[: min(most, found.tokens)])
    # nothing is stored twice
    assert store.tokens == len(oracle.prefixes)


@settings(deadline=None)
@given(st.lists(RUNS, min_size=1, max_size=10))
def test_every_match_returns_the_written_tokens_and_positions(runs):
    """Model the pool as a record of writes: slot → (token, position). Each read returns the requested tokens."""
    store, written = make(), {}
    for ids, *where in runs:
        run = run_of(ids, *where)
        slots = store.allocate(len(ids))
        for n, token in enumerate(ids):
            ((slot,),) = [range(r.first, r.end) for r in cut(slots, n, 1)]
            written[slot] = (token, run.start + n)
        store.insert(run, slots)
        # the slots stay ours, so that none is written twice
    for ids, *where in runs:
        found = store.longest(run_of(ids, *where))
        seen = []
        for piece in pieces(found, 1000, found.tokens):
            for n, slot in enumerate(range(piece.slots.first, piece.slots.end)):
                token, position = written[slot]
                assert position == piece.position + n
                seen.append((token, position + piece.shift))
        assert seen == [(token, 1000 + n) for n, token in enumerate(ids)]


@settings(deadline=None)
@given(TOKENS, st.integers(0, 12), TOKENS)
def test_run_stored_in_two_parts_is_found_as_one(ids, at, other):
    """Splitting and joining never change a digest: a run after a part has the same name either way."""
    store = make()
    whole = run_of(ids, 1, 0, 0)
    at = min(at, len(ids) - 1)
    if at:
        put(store, TokenRun(ids[:at], whole.start, whole.before))
    put(store, whole.rest(at))
    put(store, run_of(other, 1, 0, 0))
    found = store.longest(whole)
    assert (read(found), found.tokens) == (ids, len(ids))
    audit(store)


@settings(deadline=None)
@given(st.lists(st.tuples(TOKENS, st.integers(0, 12)), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_overlapping_runs_keep_the_index_consistent(stored, randomly):
    """A run may be stored inside an existing segment with the same tokens. Each match is right, chunks are accounted
    for,
    and chunks with references stay.
    """
    store, truth = make(), set()
    holds: list[tuple[Hold, tuple[int, ...], tuple[int, ...]]] = []
    for ids, at in stored:
        whole = TokenRun(ids, 0, Context())
        part = whole.rest(min(at, len(ids) - 1))
        found = put(store, part)
        truth |= {ids[:n] for n in range(1, len(ids) + 1)}
        assert read(found) == part.ids[: found.tokens]
        if randomly.random() < 0.5:
            holds.append((store.hold(found), read(found), tuple(_slots(found))))
        audit(store, holds=[hold for hold, _, _ in holds])
        for other, _ in stored:
            got = store.longest(TokenRun(other, 0, Context()))
            assert read(got) == other[: got.tokens]
            assert got.tokens == 0 or other[: got.tokens] in truth
    for hold, ids, slots in holds:
        kept = [
            (token, slot)
            for segment in hold.segments
            for token, slot in zip(segment.run.ids, _each(segment.slots), strict=True)
        ]
        assert set(zip(ids, slots, strict=True)) <= set(kept)
        hold.release()
    store.clear()
    assert store.pool.free_chunks == store.pool.chunks


@settings(deadline=None)
@given(st.lists(RUNS, min_size=1, max_size=10), RUNS, st.integers(0, 12), st.integers(0, 12))
def test_any_range_of_a_run_is_found_at_its_slots(runs, asked, first, end):
    """Model the pool as a record of writes: slot → (context, the run's tokens so far), and compare each range with
    it.
    """
    store, oracle, written = make(), Oracle(positioned=False), {}
    for ids, *where in runs:
        slots = store.allocate(len(ids))
        for n, slot in enumerate(_each(cut(slots, 0, len(ids)))):
            written[slot] = (oracle.under(*where), ids[: n + 1])
        store.insert(run_of(ids, *where), slots)
        oracle.insert(ids, *where)
    for ids, *where in [*runs, asked]:
        part = store.longest(run_of(ids, *where), most=end).part(first, end)
        stop = max(first, min(end, oracle.longest(ids, *where)))
        assert (read(part), part.tokens) == (ids[first:stop], stop - first)
        under = oracle.under(*where)
        assert [written[slot] for slot in _slots(part)] == [(under, ids[: n + 1]) for n in range(first, stop)]


@settings(deadline=None)
@given(st.lists(RUNS, min_size=1, max_size=8), st.lists(RUNS, max_size=8), st.data())
def test_held_range_survives_splits_and_evictions(first, then, data):
    store, holds = make(), []
    for ids, *where in first:
        begin, end = sorted(data.draw(st.tuples(st.integers(0, len(ids)), st.integers(0, len(ids)))))
        part = put(store, run_of(ids, *where)).part(begin, end)
        holds.append((store.hold(part), ids[begin:end], _slots(part)))
    for ids, *where in then:
        put(store, run_of(ids, *where))
    store.clear()
    audit(store, holds=[hold for hold, _, _ in holds])
    lies = {slot: token for s in store for slot, token in zip(_each(s.slots), s.run.ids, strict=True)}
    for hold, ids, slots in holds:
        assert tuple(lies[slot] for slot in slots) == ids
        assert set(slots) <= {slot for runs in hold.slots() for slot in _each(runs)}
        hold.release()
    store.clear()
    assert store.pool.free_chunks == store.pool.chunks


@settings(deadline=None)
@given(TOKENS, TOKENS, st.data())
def test_recomputed_tokens_between_ranges_split_no_segment(module, other, data):
    """Recomputed tokens inside a module have a different context, so they match no stored segment."""
    store = make()
    stored = run_of(module, 0, 0, 0)
    put(store, stored)
    begin, end = sorted(data.draw(st.tuples(st.integers(0, len(module)), st.integers(0, len(module)))))
    before = run_of(other, 1, 0, 0)
    composed = before.after(len(other)).extend(module[:begin], before.end, stored.digest, continues=False)
    recomputed = TokenRun(module[begin:end], before.end + begin, composed, continues=False)
    if recomputed.ids:
        put(store, recomputed)
        assert not set(store.longest(recomputed).segments) & set(store.longest(stored).segments)
    found = store.longest(stored)
    assert [each.segment.run.ids for each in found.ranges] == [module]
    audit(store)


def _each(slots) -> list[int]:
    return [slot for run in slots for slot in range(run.first, run.end)]


def _slots(found: PrefixMatch) -> list[int]:
    return _each(found.slots)


def test_held_segment_survives_a_conflicting_split():
    for held in (True, False):
        store = make()
        module = TokenRun((1, 2, 3), 0, Context()).rest(1)
        hold = store.hold(put(store, module)) if held else Hold()
        put(store, TokenRun((1, 2, 4), 0, Context()))  # lies over the module's place
        put(store, TokenRun((1, 9), 0, Context()))  # would cut it just there
        audit(store, holds=[hold])
        assert store.longest(TokenRun((1, 2, 4), 0, Context())).tokens == 3
        assert store.longest(module).tokens == (2 if held else 1)
        assert store.longest(TokenRun((1, 9), 0, Context())).tokens == (1 if held else 2)


@settings(deadline=None)
@given(st.lists(RUNS, min_size=1, max_size=8), st.lists(RUNS, max_size=8))
def test_references_follow_splits(first, then):
    store = make()
    holds = [(store.hold(found), _slots(found)) for found in (put(store, run_of(ids, *where)) for ids, *where in first)]
    for ids, *where in then:
        put(store, run_of(ids, *where))
    audit(store, holds=[hold for hold, _ in holds])
    store.clear()
    for hold, slots in holds:
        kept = [slot for segment in hold.segments for slot in _each(segment.slots)]
        assert set(slots) <= set(kept)
        assert all(segment in set(store) for segment in hold.segments)
        hold.release()
    store.clear()
    audit(store)
    assert store.pool.free_chunks == store.pool.chunks


@settings(deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=10), st.data())
def test_ends_are_evicted_before_prefixes_and_held_segments_stay(runs, data):
    """With a chunk for every token: after each eviction all that is left can be reached from the root."""
    store = make(chunks=256, chunk_size=1)
    for ids in runs:
        put(store, TokenRun(ids, 0, Context()))
    held = data.draw(st.sampled_from(runs))
    with store.hold(store.longest(TokenRun(held, 0, Context()))) as hold:
        blocks = []
        while any(segment.held < segment.tokens for segment in store):
            blocks.append(store.allocate(store.pool.free_chunks + 1))
            audit(store, holds=[hold], blocks=blocks)
            reached = {s for ids in runs for s in store.longest(TokenRun(ids, 0, Context())).segments}
            assert reached == set(store)
        assert store.longest(TokenRun(held, 0, Context())).tokens == len(held)
        assert set(store) == set(hold.segments)
        with pytest.raises(CapacityError):
            store.allocate(store.pool.free_chunks + 1)


def test_thousands_of_random_operations_leak_no_chunk():
    """Requests that find, hold, compute, store, and leave in any order, in a pool that is always full."""
    store, randomly = make(chunks=40), random.Random(5)
    seated: list[tuple[Hold, tuple[SlotRange, ...]]] = []
    outcomes: Counter[str] = Counter()
    for number in range(3000):
        if seated and randomly.random() < 0.5:
            hold, slots = seated.pop(randomly.randrange(len(seated)))
            hold.release()
            store.pool.free(slots)
        else:
            ids = tuple(randomly.randrange(3) for _ in range(randomly.randrange(1, 30)))
            run = run_of(ids, randomly.randrange(len(CONTEXTS)), 0, 0)
            found = store.longest(run, most=len(ids) - 1)
            hold = store.hold(found)
            try:
                slots = store.allocate(len(ids) - found.tokens)
            except CapacityError:
                outcomes["full"] += 1
                hold.release()
                continue
            if randomly.random() < 0.8:  # the others are cancelled before they have computed anything
                own = cut(slots, 0, len(ids) - found.tokens)
                store.insert(run, found.slots + own)
                outcomes["stored"] += 1
            seated.append((hold, slots))
        if number % 50 == 0:
            audit(store, holds=[hold for hold, _ in seated], blocks=[slots for _, slots in seated])
    assert min(outcomes["full"], outcomes["stored"]) > 100
    for hold, slots in seated:
        hold.release()
        store.pool.free(slots)
    audit(store)
    store.clear()
    assert (len(store), store.pool.free_chunks) == (0, 40)


def test_a_held_segment_cannot_be_removed():
    pool = make().pool
    index = PrefixIndex(pool, KeyMaker(b"model", "float32", "none", b"", positioned=False))
    (segment,) = index.insert(TokenRun((1, 2), 0, Context()), pool.allocate(2)).segments
    with Hold() as hold:
        hold.add(segment, 1)
        with pytest.raises(AssertionError, match="held segment"):
            index.remove(segment)
    index.remove(segment)
    assert not list(index)


@given(TOKENS, TOKENS, st.integers(0, 12), st.integers(0, 12))
def test_shared_length(stored, wanted, at, end):
    end = min(end, len(wanted))
    at = min(at, end)
    expected = 0
    while expected < len(stored) and at + expected < end and stored[expected] == wanted[at + expected]:
        expected += 1
    assert shared_length(stored, wanted, at, end) == expected
