"""A store's events of changes, compared with its contents."""

from __future__ import annotations

import random

import pytest

from inlay.kv.changes import ChangeLog, border_keys, end_key, short_key
from inlay.kv.identity import Context, KeyMaker, SegmentSpec, TokenRun, specify
from inlay.kv.pool import KVPool
from inlay.kv.store import SegmentStore

KEYS = KeyMaker(b"model", "float32", "none", b"", False)
NUMBERS = tuple(range(1000, 1400))


def make(chunks: int = 64) -> tuple[SegmentStore, ChangeLog]:
    store, log = SegmentStore(KVPool(chunks * 16 * 16, 16, 16), KEYS), ChangeLog(KEYS)
    store.listen(log)
    return store, log


def keep(store: SegmentStore, run: TokenRun) -> None:
    slots = store.allocate(len(run.ids))
    store.insert(run, slots)
    store.pool.free(slots)


def module(*ids: int) -> SegmentSpec:
    return specify(ids, 0, (), KEYS)


def held(log: ChangeLog) -> set[int]:
    changes = log.since(0, 0)
    assert changes.whole
    return set(changes.added)


def test_module_is_reported_by_its_end_key():
    store, log = make()
    spec = module(*NUMBERS[:200])
    keep(store, spec)
    assert held(log) == {end_key(spec, KEYS)}


def test_split_module_is_still_reported():
    store, log = make()
    one, other = module(1, 2, 3, 4), module(1, 2, 5, 6)
    keep(store, one)
    keep(store, other)
    assert len(store) == 3
    assert {end_key(one, KEYS), end_key(other, KEYS)} < held(log)


def test_other_text_is_reported_at_every_border():
    store, log = make()
    run = TokenRun(NUMBERS[:150], 0, Context())
    keep(store, run)
    borders = dict(border_keys(run, KEYS))
    assert list(borders) == [64, 128]
    assert held(log) == {*borders.values(), end_key(run, KEYS)}


@pytest.mark.parametrize("first", [1, 63, 64, 65, 100])
def test_border_keys_do_not_depend_on_stream_pieces(first: int):
    whole = TokenRun(NUMBERS[:300], 0, Context())
    rest = whole.rest(first)
    later = {first + tokens: key for tokens, key in border_keys(rest, KEYS)}
    assert later == {tokens: key for tokens, key in border_keys(whole, KEYS) if tokens > first}
    assert end_key(rest, KEYS) == end_key(whole, KEYS)


def test_another_context_gives_other_keys():
    context = Context().extend((7, 8), 0, b"", True)
    alone, behind = TokenRun(NUMBERS[:70], 0, Context()), TokenRun(NUMBERS[:70], 2, context)
    assert end_key(alone, KEYS) != end_key(behind, KEYS)
    private = TokenRun(NUMBERS[:70], 0, Context().keep_private(b"salt"))
    assert end_key(alone, KEYS) != end_key(private, KEYS)


def test_follower_receives_only_new_changes():
    store, log = make()
    keep(store, module(1, 2, 3))
    first = log.since(0, 0)
    assert first.whole
    keep(store, module(4, 5, 6))
    second = log.since(first.epoch, first.last)
    assert not second.whole
    assert list(second.added) == [end_key(module(4, 5, 6), KEYS)]
    store.clear()
    third = log.since(second.epoch, second.last)
    assert set(third.removed) == {end_key(module(1, 2, 3), KEYS), end_key(module(4, 5, 6), KEYS)}
    assert not held(log)


def test_follower_that_missed_too_much_receives_everything():
    store, _ = make()
    log = ChangeLog(KEYS, most=3)
    store.listen(log)
    for number in range(5):
        keep(store, module(number, 1))
    assert not log.since(log.epoch, 2).whole
    assert log.since(log.epoch, 1).whole
    assert log.since(log.epoch + 1, 4).whole
    assert log.since(log.epoch, 99).whole


def test_lower_tiers_are_reported_on_change():
    _, log = make()
    log.set_below({5, 3})
    first = log.since(0, 0)
    assert first.below is not None
    assert list(first.below) == [3, 5]
    log.set_below({3, 5})
    assert log.since(first.epoch, first.last).below is None
    log.set_below({3})
    later = log.since(first.epoch, first.last).below
    assert later is not None
    assert list(later) == [3]


def test_follower_ends_with_the_contents_of_the_store():
    """Modules and texts come and go; a follower that gets the events in parts knows the contents."""
    draws = random.Random(5)
    store, log = make(chunks=24)
    known: set[int] = set()
    epoch = number = 0
    for _ in range(300):
        length = draws.randint(1, 120)
        ids = tuple(draws.randint(1, 3) for _ in range(length))
        keep(store, module(*ids) if draws.random() < 0.5 else TokenRun(ids, 0, Context()))
        if draws.random() < 0.05:
            store.clear()
        if draws.random() < 0.3:
            changes = log.since(epoch, number)
            known = (set() if changes.whole else known - set(changes.removed)) | set(changes.added)
            epoch, number = changes.epoch, changes.last
            assert known == held(log)
    ends = {short_key(segment.behind) for segment in store}
    assert ends <= held(log)
    store.clear()
    assert not len(log)
