"""The memory that the compiled kernel reads and writes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inlay.attention import cpu
from inlay.attention.cpu import CpuBackend
from inlay.attention.plan import Item, Part, advance, build_plan
from inlay.slots import SlotRange
from tests.unit.attention import kernel_cases
from tests.unit.attention.kernel_cases import (
    Layer,
    bf16,
    check,
    every_set,
    expected_of,
    fp32,
    fresh_of,
    one_on,
    pool_for,
    random_parts,
    same,
    threads,
    with_rotary,
)

pytestmark = kernel_cases.pytestmark
both_dtypes = pytest.mark.parametrize("stored", [fp32, bf16])


@every_set
@both_dtypes
@pytest.mark.parametrize("seed", range(6))
def test_every_number_of_the_output_is_written(monkeypatch, instruction_set, stored, seed):
    empty = torch.empty
    monkeypatch.setattr(cpu.torch, "empty", lambda *shape, **kw: empty(*shape, **kw).fill_(torch.nan))
    layer = with_rotary(Layer(stored=stored, fresh=stored, head_dim=40))
    check(layer, random_parts(seed, longest=80), instruction_set)


@every_set
@both_dtypes
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65])
def test_keys_at_the_very_end_of_the_pool(instruction_set, stored, length):
    """Memory after the last slot is outside the pool, and slots before the first one read are NaN."""
    part = Part.of(100, 1, (Item(SlotRange(127 - length, length), 3),), (SlotRange(127, 1),))
    check(Layer(stored=stored, fresh=stored, chunk=128), [part], instruction_set)


@every_set
def test_memory_of_a_larger_call_is_not_visible(instruction_set):
    """A thread's memory is kept from call to call: layers of other sizes on one plan, larger ones first."""
    parts = random_parts(3, longest=20)
    plan = build_plan(parts)
    backend = CpuBackend(instruction_set)
    for heads, head_dim, dtype in [(8, 256, fp32), (4, 16, bf16), (16, 8, fp32), (4, 16, fp32)]:
        layer = with_rotary(Layer(heads=heads, head_dim=head_dim, stored=dtype, fresh=dtype))
        pool, fresh = pool_for(layer, parts), fresh_of(layer, plan.rows)
        expected = expected_of(layer, parts, fresh, pool)
        same(layer, backend.attend(*fresh, pool, plan, 0, layer.options), expected)


@every_set
@both_dtypes
def test_only_the_rows_own_slots_of_the_pool_change(instruction_set, stored):
    layer = with_rotary(Layer(stored=stored, fresh=fp32))
    parts = random_parts(11, longest=20)
    plan, pool = build_plan(parts), pool_for(layer, parts)
    before = [tensor.clone() for tensor in (pool.keys[0], pool.values[0])]
    query, key, value = fresh_of(layer, plan.rows)
    CpuBackend(instruction_set).attend(query, key, value, pool, plan, 0, layer.options)
    own = plan.slots
    for tensor, old, new in zip((pool.keys[0], pool.values[0]), before, (key, value), strict=True):
        old[:, own] = new.to(stored)
        bits = torch.int32 if stored == fp32 else torch.int16
        assert torch.equal(tensor.view(bits), old.view(bits))


@every_set
@both_dtypes
def test_strided_inputs(instruction_set, stored):
    """transformers passes heads as transposed views of one projection."""
    parts = random_parts(5, longest=20)
    layer = with_rotary(Layer(stored=stored, fresh=stored))
    plan = build_plan(parts)
    fresh = fresh_of(layer, plan.rows)
    joined = torch.cat([part.transpose(0, 1) for part in fresh], 1)  # (rows, all heads, head_dim)
    views = [part.transpose(0, 1) for part in joined.split([part.shape[0] for part in fresh], 1)]
    assert not any(view.is_contiguous() for view in views)
    output = CpuBackend(instruction_set).attend(*views, pool_for(layer, parts), plan, 0, layer.options)
    straight = CpuBackend(instruction_set).attend(*fresh, pool_for(layer, parts), build_plan(parts), 0, layer.options)
    assert torch.equal(output, straight)


@every_set
@pytest.mark.parametrize("count", [1, 3])
def test_a_row_does_not_depend_on_others(monkeypatch, instruction_set, count):
    threads(monkeypatch, count)
    shared = Item(SlotRange(0, 700), 0)
    parts = [Part.of(700 + n, 1, (shared,), (SlotRange(700 + 8 * n, 1),)) for n in range(7)]
    layer = Layer()
    fresh = fresh_of(layer, 7)
    pool = pool_for(layer, parts)
    together = CpuBackend(instruction_set).attend(*fresh, pool, build_plan(parts), 0, layer.options)
    for n, part in enumerate(parts):
        row = [part[:, n : n + 1] for part in fresh]
        alone = CpuBackend(instruction_set).attend(*row, pool, build_plan([part]), 0, layer.options)
        torch.testing.assert_close(alone[0], together[n], atol=1e-5, rtol=0)


@every_set
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("rows", [2, 30])
@both_dtypes
def test_nan_affects_only_its_own_row(monkeypatch, instruction_set, count, rows, stored):
    """A broken model must not look like a working one, and one request's numbers must not reach another's."""
    threads(monkeypatch, count)
    shared = Item(SlotRange(0, 700), 0)
    parts = [Part.of(700, 1, (shared,), (SlotRange(700 + 2 * n, 1),)) for n in range(rows)]
    layer = Layer(stored=stored, fresh=stored)
    query, key, value = fresh_of(layer, rows)
    query[:, 1] = torch.nan
    output = CpuBackend(instruction_set).attend(
        query, key, value, pool_for(layer, parts), build_plan(parts), 0, layer.options
    )
    assert output[1].isnan().all()
    assert output[[n for n in range(rows) if n != 1]].isfinite().all()


@every_set
@both_dtypes
@pytest.mark.parametrize("window", [None, 25])
def test_decode_steps_advanced_in_place_equal_new_parts(instruction_set, stored, window):
    """Seven steps of a growing plan, compared with the reference on newly built parts."""
    layer = with_rotary(Layer(stored=stored, fresh=stored))
    layer = replace(layer, options=replace(layer.options, window=window))
    parts = random_parts(5, decode=True)
    assert len(parts) > 2
    plan, pool, backend = build_plan(parts), pool_for(layer, parts), CpuBackend(instruction_set)
    for seed in range(7):
        fresh = fresh_of(layer, plan.rows, seed)
        output = backend.attend(*fresh, pool, plan, 0, layer.options)
        same(layer, output, expected_of(layer, plan.parts, fresh, pool))
        plan = advance(plan, [one_on(part) for part in plan.parts])
