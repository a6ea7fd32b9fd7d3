"""A prompt of many pieces: what laying it out costs grows with the pieces, and its parts see what they should."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from inlay.attention import plan
from inlay.attention.plan import Context, Item, Part, items_at
from inlay.slots import SlotRange


def test_parts_of_a_growing_context_see_what_stood_before_them():
    rng = np.random.default_rng(0)
    context, items, position, slot = Context(), [], 0, 0
    parts: list[tuple[Part, Part]] = []
    for number in range(60):
        length = int(rng.integers(1, 4))
        slot += int(rng.integers(0, 3))
        own = [SlotRange(slot, length)]
        if number % 2:
            before = np.hstack([plan.table_of([item]) for item in items])
            parts.append((Part.of(position, length, context.table, own), Part.of(position, length, before, own)))
        added = items_at(own, position)
        if number % 5 == 0:
            added = (Item(own[0], position, shift=3, left_out=(slot,)),)
        context.extend(added)
        items += added
        position, slot = position + length, slot + length
    for part, expected in parts:  # asked for when much has been added
        assert part.items.tolist() == expected.items.tolist()
        assert part.pairs == expected.pairs


def test_a_piece_is_turned_into_numbers_once(monkeypatch: pytest.MonkeyPatch):
    seen, table_of = [], plan.table_of

    def counted(items):
        seen.append(len(items))
        return table_of(items)

    monkeypatch.setattr(plan, "table_of", counted)
    context = Context()
    parts = []
    for number in range(500):
        context.extend(items_at([SlotRange(2 * number, 1)], number))
        parts.append(Part.of(number + 1, 1, context.table, [SlotRange(5000 + 2 * number, 1)]))
    assert sum(seen) == 500
    assert [part.items.shape[1] for part in parts[::100]] == [number + 2 for number in range(0, 500, 100)]


@pytest.mark.parametrize("among", [False, True])
def test_parts_that_wait_hold_no_tables_of_their_own(among):
    tracemalloc.start()
    try:
        context, parts = Context(), []
        for number in range(1000):
            context.extend(items_at([SlotRange(2 * number, 1)], number))
            own = [SlotRange(5000 + 2 * number, 1)]
            parts.append(Part.at(np.array([number + 1]), context.table, own, among=among))
        waiting, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    tables = sum(part.items.nbytes for part in parts)
    assert waiting < tables / 10
