"""Which tables the compiled kernel takes for a plan, and which it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from inlay.attention.backend import AttentionOptions
from inlay.attention.cpu import CpuBackend
from inlay.attention.kernel import kernel
from inlay.attention.plan import Item, Part, advance, build_plan
from inlay.slots import SlotRange
from tests.unit.attention import kernel_cases
from tests.unit.attention.kernel_cases import Layer, fresh_of, one_on, pool_for, random_parts
from tests.unit.attention.test_grouping import blocks_of

pytestmark = kernel_cases.pytestmark

PARTS = [
    Part.of(9, 2, (Item(SlotRange(0, 5), 0), Item(SlotRange(8, 3), 2, 4)), (SlotRange(16, 2),)),
    Part.of(4, 1, (), (SlotRange(20, 1),)),
]


def tables(parts: Sequence[Part]) -> list[Any]:
    """A plan as the kernel takes it: positions, slots, rows, their borders, stretches, their borders, growing."""
    plan = build_plan(parts)
    made = plan.groups
    return [plan.positions, plan.slots, made.rows, made.row_first, made.stretches, made.stretch_first, made.growing]


@pytest.mark.parametrize("seed", range(5))
def test_the_kernel_works_on_the_groups_of_the_plan(seed):
    plan = build_plan(random_parts(seed, decode=True))
    CpuBackend().prepare(plan)
    work: Any = plan.work["cpu"]
    for _ in range(3):
        assert [(rows, [tuple(map(int, s)) for s in stretches]) for rows, stretches in work.blocks()] == blocks_of(
            plan.groups
        )
        plan = advance(plan, [one_on(part) for part in plan.parts])


def test_only_decode_steps_advance():
    with pytest.raises(ValueError, match="only a plan of decode steps advances"):
        kernel.Attention(*tables([Part.of(0, 2, (), (SlotRange(0, 2),))]), "", 1).advance()


NONSENSE = [-1, -(2**63), 2**63 - 1, 2**32 + 1, 2**40]
MAY_BE_NEGATIVE = {(0, 0), (4, 2), (4, 3)}  # positions and shifts


@pytest.mark.parametrize("number", NONSENSE)
@pytest.mark.parametrize(("table", "field"), [(0, 0), (1, 0), (2, 0), (3, 0), *((4, f) for f in range(5)), (5, 0)])
def test_invalid_tables_are_rejected(table, field, number):
    if number == -1 and (table, field) in MAY_BE_NEGATIVE:
        return
    for column in range(tables(PARTS)[table].shape[-1]):
        changed = tables(PARTS)
        changed[table].reshape(-1, changed[table].shape[-1])[field, column] = number
        with pytest.raises(ValueError, match="plan"):
            attend_tables(*changed)


def test_missing_range_cannot_grow():
    for number in NONSENSE:
        changed = [*tables(PARTS)[:6], np.array([number])]
        with pytest.raises(ValueError, match="plan"):
            attend_tables(*changed)


def test_rows_in_disorder_are_refused():
    changed = tables(PARTS)
    assert changed[2].tolist() == [2, 0, 1]
    changed[2][:] = [2, 1, 0]
    with pytest.raises(ValueError, match="the rows of a plan's block are in disorder"):
        attend_tables(*changed)


def attend_tables(*changed: Any) -> None:
    layer, plan = kernel_cases.with_rotary(Layer()), build_plan(PARTS)
    plan.work["cpu"] = kernel.Attention(*changed, "", 1)
    CpuBackend().attend(*fresh_of(layer, 3), pool_for(layer, PARTS), plan, 0, layer.options)


def test_tables_of_the_wrong_shape_are_refused():
    positions, slots, rows, row_first, stretches, stretch_first, growing = tables(PARTS)
    with pytest.raises(ValueError, match="a table of 5 rows"):
        kernel.Attention(
            positions, slots, rows, row_first, stretches[:4].copy(), stretch_first, growing, "", 1
        )  # fmt: skip
    with pytest.raises(ValueError, match="do not fit each other"):
        kernel.Attention(positions, slots, rows, row_first[:-1].copy(), stretches, stretch_first, growing, "", 1)
    for wrong in (stretches[0], stretches.tolist()):
        with pytest.raises(TypeError):
            kernel.Attention(positions, slots, rows, row_first, wrong, stretch_first, growing, "", 1)
    with pytest.raises(ValueError, match="no kernel for the instruction set 'mmx'"):
        kernel.Attention(positions, slots, rows, row_first, stretches, stretch_first, growing, "mmx", 1)


def attend(layer: Layer, options: AttentionOptions, pool_parts: Sequence[Part] = PARTS) -> torch.Tensor:
    plan = build_plan(PARTS)
    return CpuBackend().attend(*fresh_of(layer, plan.rows), pool_for(layer, pool_parts), plan, 0, options)


def test_unsupported_passes_are_rejected():
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
        attend(turning, turning.options, [Part.of(0, 1, (), (SlotRange(0, 1),))])
    with pytest.raises(ValueError, match="multiple of KV heads"):
        attend(kernel_cases.with_rotary(Layer(heads=3)), turning.options)


def test_smaller_pool_is_rejected_for_a_used_plan():
    layer = kernel_cases.with_rotary(Layer())
    plan, backend = build_plan(PARTS), CpuBackend()
    fresh = fresh_of(layer, plan.rows)
    backend.attend(*fresh, pool_for(layer, PARTS), plan, 0, layer.options)
    with pytest.raises(ValueError, match="slots that the pool does not have"):
        backend.attend(*fresh, pool_for(layer, [Part.of(0, 1, (), (SlotRange(0, 1),))]), plan, 0, layer.options)
