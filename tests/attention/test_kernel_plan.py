"""How the compiled kernel groups a plan (csrc/plan.cpp), by what its blocks cover, and which tables it refuses."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.attention.backend import AttentionOptions
from inlay.attention.cpu import CpuBackend, kernel, tables
from inlay.attention.plan import Piece, Span, build_plan, pieces_at
from inlay.kv.pool import Run, cut
from tests.attention import kernel_cases
from tests.attention.kernel_cases import Layer, fresh_of, one_on, pool_for, random_spans

pytestmark = kernel_cases.pytestmark

LONG = 64  # rows from which on a span keeps to itself
spans_of = st.builds(
    random_spans, st.integers(0, 2**32), decode=st.booleans(), longest=st.sampled_from([3, 9, 90]), keys=st.just(12)
)

Reading = tuple[int, int, int, int]  # row, slot, position as encoded, shift


def attention_of(spans: Sequence[Span], *, share: bool = True) -> Any:
    return kernel.Attention(*tables(spans), share, "", 1)


def wanted(spans: Sequence[Span]) -> Iterator[Reading]:
    """What the rows read, by the definition of a span."""
    row = 0
    for span in spans:
        for index in range(span.length):
            for piece in (*span.context, *pieces_at(cut(span.slots, 0, index + 1), span.start)):
                for n in range(piece.run.length):
                    yield row, piece.run.first + n, piece.start + n, piece.shift
            row += 1


def covered(spans: Sequence[Span], blocks: list[Any]) -> Iterator[Reading]:
    """What the blocks have the rows read."""
    positions = [span.start + index for span in spans for index in range(span.length)]
    for rows, stretches in blocks:
        for slot, length, start, shift, causal in stretches:
            for row in rows:
                for n in range(length):
                    if not causal or start + shift + n <= positions[row]:
                        yield row, slot + n, start + n, shift


def owners(spans: Sequence[Span]) -> list[int]:
    """The span of every row."""
    return [number for number, span in enumerate(spans) for _ in range(span.length)]


@given(spans=spans_of, share=st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_key_is_read_once_by_every_row_that_asks(spans, share):
    blocks = attention_of(spans, share=share).blocks()
    assert Counter(covered(spans, blocks)) == Counter(wanted(spans))


@given(spans=spans_of)
@settings(max_examples=150, deadline=None)
def test_sharing_is_maximal(spans):
    """All rows of short spans that read a key at a shift stand in one block, and no two blocks have the same rows."""
    blocks, owner = attention_of(spans).blocks(), owners(spans)
    holders = defaultdict(list)
    for number, (rows, stretches) in enumerate(blocks):
        if spans[owner[rows[0]]].length >= LONG:
            assert len({owner[row] for row in rows}) == 1
            continue
        for slot, length, start, shift, causal in stretches:
            for n in range(length):
                holders[slot + n, start + n, shift, causal].append(number)
    assert all(len(numbers) == 1 for numbers in holders.values())
    assert len({tuple(rows) for rows, _ in blocks}) == len(blocks)


@given(spans=spans_of)
@settings(max_examples=80, deadline=None)
def test_nothing_is_shared_unless_asked_for(spans):
    owner = owners(spans)
    for rows, _ in attention_of(spans, share=False).blocks():
        assert len({owner[row] for row in rows}) == 1


def test_thirty_neighbouring_segments_are_one_stretch():
    context = tuple(Piece(Run(10 * n, 10), 10 * n) for n in range(30))
    blocks = attention_of([Span(300, 1, context, (Run(300, 1),)), Span(300, 1, context, (Run(310, 1),))]).blocks()
    assert sorted((rows, stretches) for rows, stretches in blocks) == [
        ([0], [(300, 1, 300, 0, False)]),
        ([0, 1], [(0, 300, 0, 0, False)]),
        ([1], [(310, 1, 300, 0, False)]),
    ]


@given(seed=st.integers(0, 2**32), share=st.booleans())
@settings(max_examples=80, deadline=None)
def test_an_advanced_plan_covers_what_a_new_one_does(seed, share):
    spans = random_spans(seed, decode=True, keys=12)
    attention = attention_of(spans, share=share)
    for _ in range(6):
        attention.advance()
        spans = [one_on(span) for span in spans]
        assert Counter(covered(spans, attention.blocks())) == Counter(wanted(spans))


def test_only_decode_steps_advance():
    with pytest.raises(ValueError, match="only a plan of decode steps advances"):
        attention_of([Span(0, 2, (), (Run(0, 2),))]).advance()


SPANS = [Span(9, 2, (Piece(Run(0, 5), 0), Piece(Run(8, 3), 2, 4)), (Run(16, 2),)), Span(4, 1, (), (Run(20, 1),))]
NONSENSE = [-1, -(2**63), 2**63 - 1, 2**32 + 1, 2**40]
MAY_BE_NEGATIVE = {(0, 0), (1, 2), (1, 3)}  # starts and shifts
MAY_BE_LARGE = {(2, 1)}  # more slots of its own than a span needs


@pytest.mark.parametrize("number", NONSENSE)
@pytest.mark.parametrize(("table", "column"), [(t, c) for t, width in enumerate((6, 4, 2)) for c in range(width)])
def test_tables_of_nonsense_are_refused(table, column, number):
    if (number == -1 and (table, column) in MAY_BE_NEGATIVE) or (number > 0 and (table, column) in MAY_BE_LARGE):
        return
    for row in range(len(tables(SPANS)[table])):
        changed = tables(SPANS)
        changed[table][row, column] = number
        with pytest.raises(ValueError, match="plan"):
            attend_tables(*changed)


def attend_tables(*changed: Any) -> None:
    layer, plan = kernel_cases.with_rotary(Layer()), build_plan(SPANS)
    plan.work["cpu"] = kernel.Attention(*changed, True, "", 1)
    CpuBackend().attend(*fresh_of(layer, 3), pool_for(layer, SPANS), plan, 0, layer.options)


def test_tables_of_the_wrong_shape_are_refused():
    spans, pieces, own = tables(SPANS)
    with pytest.raises(ValueError, match="wrong width"):
        kernel.Attention(spans[:, :5].copy(), pieces, own, True, "", 1)
    for wrong in (spans[0], spans.tolist()):
        with pytest.raises(TypeError):
            kernel.Attention(wrong, pieces, own, True, "", 1)
    with pytest.raises(ValueError, match="no kernel for the instruction set 'mmx'"):
        kernel.Attention(spans, pieces, own, True, "mmx", 1)


def attend(layer: Layer, options: AttentionOptions, pool_spans: Sequence[Span] = SPANS) -> torch.Tensor:
    plan = build_plan(SPANS)
    return CpuBackend().attend(*fresh_of(layer, plan.rows), pool_for(layer, pool_spans), plan, 0, options)


def test_what_cannot_be_attended_is_refused():
    layer = Layer()
    with pytest.raises(ValueError, match="a shift needs rotary positions"):
        attend(layer, layer.options)
    turning = kernel_cases.with_rotary(layer)
    wider = kernel_cases.rotary(layer.head_dim + 2)
    with pytest.raises(ValueError, match="more dimensions are turned than a head has"):
        attend(layer, AttentionOptions(1.0, rotary=wider))
    with pytest.raises(ValueError, match="window"):
        attend(layer, AttentionOptions(1.0, window=-4, rotary=turning.options.rotary))
    with pytest.raises(ValueError, match="negative"):
        attend(layer, AttentionOptions(-1.0, rotary=turning.options.rotary))
    with pytest.raises(ValueError, match="slots that the pool does not have"):
        attend(turning, turning.options, [Span(0, 1, (), (Run(0, 1),))])
    with pytest.raises(ValueError, match="multiple of KV heads"):
        attend(kernel_cases.with_rotary(Layer(heads=3)), turning.options)


def test_a_smaller_pool_is_noticed_on_a_plan_that_ran():
    layer = kernel_cases.with_rotary(Layer())
    plan, backend = build_plan(SPANS), CpuBackend()
    fresh = fresh_of(layer, plan.rows)
    backend.attend(*fresh, pool_for(layer, SPANS), plan, 0, layer.options)
    with pytest.raises(ValueError, match="slots that the pool does not have"):
        backend.attend(*fresh, pool_for(layer, [Span(0, 1, (), (Run(0, 1),))]), plan, 0, layer.options)
