"""The index of texts by content: copies, cuts, and the work of a search."""

from __future__ import annotations

import random

import numpy as np
import pytest

from inlay.kv.identity import Context, TokenRun
from inlay.kv.index import WINDOW, windows_of
from inlay.kv.pool import Origin
from tests.unit.kv.offload.site import Site

OWNER = ("", b"")


def ids_of(seed: int, tokens: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(1000), k=tokens))


def store(site: Site, ids: tuple[int, ...], start: int = 0) -> TokenRun:
    """Store the text of a request."""
    run = TokenRun(ids, start, Context.under(b""), False)
    room = site.store.allocate(len(ids))
    site.store.insert(run, room, origin=Origin("", frozenset(), True))
    site.pool.free(room)
    return run


def found(site: Site, ids: tuple[int, ...]) -> tuple[int, int] | None:
    """The place and length of the first moved text among these tokens."""
    text = site.store.moved_text(OWNER, ids, windows_of(ids))
    return None if text is None else (text.offset, text.length)


@pytest.fixture
def site():
    made = Site([], tokens=4096)
    yield made
    made.close()


@pytest.mark.parametrize("gone", [0, 1])
def test_text_stored_twice_is_found_until_both_are_evicted(site, gone):
    text = ids_of(0, 64)
    runs = [store(site, ids_of(seed, 16) + text) for seed in (1, 2)]
    asked = ids_of(3, 5) + text
    assert found(site, asked) == (5, 64)
    for number in (gone, 1 - gone):
        assert found(site, asked) == (5, 64)
        site.store.discard(site.store.longest(runs[number]).segments)
    assert found(site, asked) is None


def test_remaining_part_of_a_truncated_text_is_found(site):
    text = ids_of(0, 128)
    match = site.store.longest(store(site, ids_of(1, 16) + text))
    with site.store.hold(match.part(0, 16 + 70)):
        site.store.discard(match.segments)  # all but what is held
    assert found(site, ids_of(3, 5) + text) == (5, 70)
    assert found(site, text[80:]) is None


def test_both_sides_of_a_split_are_found(site):
    text = ids_of(0, 128)
    store(site, ids_of(1, 16) + text)
    store(site, ids_of(1, 16) + text[:50] + ids_of(2, 40))  # cuts the first one
    assert found(site, ids_of(3, 7) + text) == (7, 128)


def test_hashes_of_a_suffix_are_a_suffix_of_the_hashes():
    ids = ids_of(0, 100)
    assert np.array_equal(windows_of(ids)[37:], windows_of(ids[37:]))
    assert windows_of(ids[: WINDOW - 1]).size == 0
