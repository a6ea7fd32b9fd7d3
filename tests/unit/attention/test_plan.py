"""How parts become tables, and how these are grouped."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest

from inlay.attention.plan import Item, Part, advance, build_plan
from inlay.slots import SlotRange
from tests.counting import calls_of

Stretch = tuple[int, ...]  # first slot, length, position, shift, masked


def grouped(parts: list[Part], *, share: bool = True) -> list[tuple[list[int], list[Stretch]]]:
    """The rows and stretches of every group."""
    groups = build_plan(parts, share=share).groups
    return [
        (
            groups.rows[groups.row_first[n] : groups.row_first[n + 1]].tolist(),
            [tuple(s) for s in groups.stretches[:, groups.stretch_first[n] : groups.stretch_first[n + 1]].T.tolist()],
        )
        for n in range(len(groups))
    ]


def items(part: Part) -> list[Stretch]:
    return [tuple(item) for item in part.items.T.tolist()]


def test_rows_with_one_range_at_one_shift_are_one_group():
    shared = Item(SlotRange(0, 8), 0, shift=3)
    groups = grouped([Part.of(20, 2, (shared,), (SlotRange(16, 2),)), Part.of(11, 3, (shared,), (SlotRange(32, 3),))])
    assert [(rows, s[1]) for rows, stretches in groups for s in stretches if s[3] == 3] == [([0, 1, 2, 3, 4], 8)]


def test_one_range_at_two_shifts_is_two_groups():
    groups = grouped(
        [
            Part.of(20, 1, (Item(SlotRange(0, 8), 0, shift=3),), (SlotRange(16, 1),)),
            Part.of(20, 1, (Item(SlotRange(0, 8), 0, shift=4),), (SlotRange(32, 1),)),
        ]
    )
    assert sorted((s[3], rows) for rows, stretches in groups for s in stretches if s[0] == 0) == [(3, [0]), (4, [1])]


def test_thirty_adjacent_segments_are_one_item():
    context = tuple(Item(SlotRange(10 * n, 10), 10 * n) for n in range(30))
    part = Part.of(300, 4, context, (SlotRange(512, 4),))
    assert items(part) == [(0, 300, 0, 0, 0), (512, 4, 300, 0, 1)]
    ((rows, stretches),) = grouped([part])
    assert (rows, len(stretches)) == ([0, 1, 2, 3], 2)


def test_adjacent_segments_at_different_positions_keep_their_positions():
    context = (Item(SlotRange(0, 4), 10), Item(SlotRange(4, 4), 30))
    assert items(Part.of(50, 2, context, (SlotRange(64, 2),)))[:2] == [(0, 4, 10, 0, 0), (4, 4, 30, 0, 0)]


def test_a_decode_row_and_its_tail_are_one_item():
    part = Part.of(9, 1, (Item(SlotRange(0, 9), 0),), (SlotRange(9, 1),))
    assert items(part) == [(0, 10, 0, 0, 0)]
    assert grouped([part]) == [([0], [(0, 10, 0, 0, 0)])]


def test_own_keys_in_two_ranges_are_masked_by_position():
    """Each run once, for all rows: keys below the diagonal take no entry of their own."""
    part = Part.of(0, 5, (), (SlotRange(0, 2), SlotRange(8, 3)))
    assert items(part) == [(0, 2, 0, 0, 1), (8, 3, 2, 0, 1)]
    plan = build_plan([part])
    assert plan.slots.tolist() == [0, 1, 8, 9, 10]
    assert len(plan.groups) == 1


def test_prompt_in_pieces_has_one_entry_per_range():
    scattered = [SlotRange(200 * n, 72) for n in range(57)]
    part = Part.of(0, 4096, (), scattered)
    assert part.items.shape == (5, 57)
    assert build_plan([part]).groups.stretches.shape == (5, 57)


def test_part_can_be_split_at_the_end_of_a_pass():
    whole = Part.of(10, 6, (Item(SlotRange(0, 10), 0),), (SlotRange(16, 4), SlotRange(32, 4)))
    first, rest = whole.split(3)
    assert (first.positions.tolist(), items(first)) == ([10, 11, 12], [(0, 10, 0, 0, 0), (16, 3, 10, 0, 1)])
    assert (rest.slots.tolist(), rest.start) == ([19, 32, 33], 13)
    assert items(rest) == [(0, 10, 0, 0, 0), (16, 4, 10, 0, 0), (32, 2, 14, 0, 1)]
    assert first.pairs + rest.pairs == whole.pairs == 6 * 10 + 21


def test_decode_steps_extend_their_range_or_start_a_new_one():
    part = Part.of(9, 1, (Item(SlotRange(0, 9), 0),), (SlotRange(9, 1),))
    near = part.next(10).next(11)
    assert (near.start, near.slots.tolist(), items(near)) == (11, [11], [(0, 12, 0, 0, 0)])
    far = near.next(40).next(41)
    assert (far.start, far.slots.tolist()) == (13, [41])
    assert items(far) == [(0, 12, 0, 0, 0), (40, 2, 12, 0, 0)]
    assert items(part) == [(0, 10, 0, 0, 0)]  # parts do not change


def test_advanced_plan_equals_a_new_one():
    shared = Item(SlotRange(0, 8), 0)
    parts = [Part.of(8 + n, 1, (shared,), (SlotRange(16 * (n + 1), 1),)) for n in range(3)]
    plan = build_plan(parts)
    assert plan.groups.growing.size == 3
    for _ in range(4):
        parts = [part.next(int(part.slots[0]) + 1) for part in parts]
        plan = advance(plan, parts)
    rebuilt = build_plan(parts)
    assert np.array_equal(plan.positions, rebuilt.positions)
    assert np.array_equal(plan.slots, rebuilt.slots)
    assert np.array_equal(plan.groups.stretches, rebuilt.groups.stretches)


def recomputed() -> tuple[Part, list[int]]:
    """205 recomputed tokens of a stored segment of 2,048, read 100 positions further on."""
    left_out = sorted(random.Random(0).sample(range(2048), 205))
    stored = Item(SlotRange(0, 2048), 0, shift=100, masked=True, left_out=tuple(left_out))
    return Part.at(np.array(left_out) + 100, (stored,), (SlotRange(4096, 128), SlotRange(8192, 128))), left_out


def test_scattered_rows_over_a_long_segment_take_few_entries():
    part, left_out = recomputed()
    assert part.items.shape[1] <= 1000
    assert build_plan([part]).groups.stretches.shape[1] <= 1000
    read = {slot for run in part.ranges for slot in range(run.first, run.end)}
    assert not read & set(left_out)
    assert max(slot for slot in read if slot < 2048) < left_out[-1]  # keys after the last row are not read


def test_rows_see_stored_and_new_tokens_before_them():
    part, left_out = recomputed()
    for row, position in enumerate(part.positions.tolist()):
        seen = []
        for _, length, start, shift, masked in part.items.T.tolist():
            seen += [p + shift for p in range(start, start + length) if not masked or p + shift <= position]
        assert sorted(seen) == list(range(100, position + 1)), row
    assert len(left_out) == part.rows


@pytest.mark.parametrize("share", [True, False])
def test_groups_do_not_depend_on_column_order(monkeypatch, share):
    """Numbers too wide to be packed into one with their index take the slow way, to the same groups."""
    draw = random.Random(3)
    segments = [(draw.randrange(2**33), draw.randint(1, 40), draw.randint(0, 200)) for _ in range(5)]

    def part(slot: int) -> Part:
        context = [Item(SlotRange(f, n), p, draw.choice([0, 7])) for f, n, p in draw.sample(segments, 3)]
        return Part.of(300, draw.randint(1, 70), context, (SlotRange(slot, 80),))

    parts = [part(2**34 + 1000 * n) for n in range(6)]
    near = grouped(parts, share=share)
    slow = calls_of(monkeypatch, np, "lexsort")
    monkeypatch.setattr("inlay.attention.plan.MOST_BITS", 0)
    assert grouped(parts, share=share) == near
    assert slow


def test_excluding_tokens_of_many_items_is_linear():
    """A request of a thousand recomputed modules has a thousand parts, which read a thousand items each."""
    draw = random.Random(3)
    items, seen = [], set()
    for number in range(300):
        first, length = 40 * number, draw.randint(1, 30)
        left_out = tuple(sorted(draw.sample(range(first, first + length), draw.randint(0, length))))
        items.append(Item(SlotRange(first, length), 50 * number, draw.randint(0, 1), left_out=left_out))
        seen |= {(slot, items[-1].position + slot - first) for slot in range(first, first + length)} - {
            (slot, items[-1].position + slot - first) for slot in left_out
        }
    calls = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        part = Part.of(20_000, 1, items, [SlotRange(15_000, 1)])
    finally:
        sys.setprofile(before)
    ranges = part.items[:, part.items[0] < 15_000].T.tolist()
    told = [(first + at, position + at) for first, length, position, *_ in ranges for at in range(length)]
    assert sorted(told) == sorted(seen)
    assert calls < 3 * len(items)
