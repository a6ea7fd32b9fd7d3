"""How spans become work items."""

from __future__ import annotations

from inlay.attention.blocks import Blocks
from inlay.attention.plan import Piece, Span, build_plan
from inlay.kv.pool import Run


def rows_of(block) -> list[int]:
    return list(range(block.rows.start, block.rows.stop)) if isinstance(block.rows, slice) else block.rows.tolist()


def test_rows_that_read_one_run_at_one_shift_are_one_item():
    shared = Piece(Run(0, 8), 0, shift=3)
    plan = build_plan([Span(20, 2, (shared,), (Run(16, 2),)), Span(11, 3, (shared,), (Run(32, 3),))])
    chunk_first = [(rows_of(b), i.length) for b in Blocks(plan).blocks for i in b.items if i.shift == 3]
    assert chunk_first == [([0, 1, 2, 3, 4], 8)]


def test_the_same_run_at_two_shifts_is_two_items():
    plan = build_plan(
        [
            Span(20, 1, (Piece(Run(0, 8), 0, shift=3),), (Run(16, 1),)),
            Span(20, 1, (Piece(Run(0, 8), 0, shift=4),), (Run(32, 1),)),
        ]
    )
    assert sorted((i.shift, rows_of(b)) for b in Blocks(plan).blocks for i in b.items if i.first == 0) == [
        (3, [0]),
        (4, [1]),
    ]


def test_thirty_neighbouring_segments_are_one_item():
    context = tuple(Piece(Run(10 * n, 10), 10 * n) for n in range(30))
    plan = build_plan([Span(300, 4, context, (Run(512, 4),))])
    (item,) = [i for b in Blocks(plan).blocks for i in b.items if not i.causal]
    assert (item.first, item.length, item.starts) == (0, 300, [(0, 300)])


def test_neighbours_at_different_positions_keep_their_positions():
    context = (Piece(Run(0, 4), 10), Piece(Run(4, 4), 30))
    plan = build_plan([Span(50, 2, context, (Run(64, 2),))])
    (item,) = [i for b in Blocks(plan).blocks for i in b.items if not i.causal]
    assert item.key_positions().tolist() == [10, 11, 12, 13, 30, 31, 32, 33]


def test_a_decode_row_and_its_tail_are_one_item():
    plan = build_plan([Span(9, 1, (Piece(Run(0, 9), 0),), (Run(9, 1),))])
    assert [(i.first, i.length, i.causal) for b in Blocks(plan).blocks for i in b.items] == [(0, 10, False)]


def test_own_keys_in_two_runs_are_seen_causally():
    plan = build_plan([Span(0, 5, (), (Run(0, 2), Run(8, 3)))])
    items = sorted((rows_of(b), i.first, i.length, i.causal) for b in Blocks(plan).blocks for i in b.items)
    assert items == [([0, 1], 0, 2, True), ([2, 3, 4], 0, 2, False), ([2, 3, 4], 8, 3, True)]
    assert plan.slots.tolist() == [0, 1, 8, 9, 10]
