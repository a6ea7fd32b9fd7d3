"""Triton's kernels, in its interpreter, against the reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.attention.backend import AttentionOptions
from inlay.attention.plan import Item, Part, advance, build_plan
from inlay.attention.reference import ReferenceBackend
from inlay.attention.rope import UNTURNED
from inlay.attention.storage import LayerShape
from inlay.attention.triton import work
from inlay.engine.unshared_runner import UnsharedRunner
from inlay.errors import ParameterError
from inlay.slots import SlotRange
from tests.counting import calls_of
from tests.model.attention.triton.cases import backend, check, fp16, interpreted, same, variations
from tests.model.families.unshared import tiny_unshared
from tests.raising import raises
from tests.unit.attention.kernel_cases import (
    Layer,
    bf16,
    fp32,
    fresh_of,
    normal,
    one_on,
    pool_for,
    random_parts,
    with_rotary,
)

pytestmark = [interpreted, pytest.mark.sampled(3)]

SHORT = [
    Part.of(90, 5, (Item(SlotRange(0, 71), 0), Item(SlotRange(75, 6), 3, shift=9)), (SlotRange(120, 5),)),
    Part.of(40, 1, (Item(SlotRange(0, 71), 0),), (SlotRange(140, 1),)),
    Part.of(10, 1, (Item(SlotRange(75, 6), 3, shift=9),), (SlotRange(150, 1),)),
]


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [*product([16, 64, 80, 128, 256, 512], [fp32]), *product([16, 80], [fp16, bf16])]
)
def test_head_sizes(head_dim, dtype):
    check(with_rotary(Layer(head_dim=head_dim, stored=dtype, fresh=dtype, heads=6)), SHORT)


@pytest.mark.parametrize("group", [1, 3, 8, 130])
def test_group_sizes(group):
    """Of 130 heads to one of keys, a tile holds some alone."""
    check(with_rotary(Layer(heads=group, kv_heads=1, head_dim=16)), SHORT)


@pytest.mark.parametrize("stored", [fp16, bf16])
def test_queries_keep_their_precision_over_narrower_keys(stored):
    check(with_rotary(Layer(stored=stored, fresh=fp32)), SHORT)


@pytest.mark.parametrize("decode", [False, True])
@given(layer=variations(), seed=st.integers(0, 2**32), share=st.booleans())
@settings(max_examples=6, deadline=None)
def test_any_pass(decode, layer, seed, share):
    check(layer, random_parts(seed, decode=decode), share=share)


@pytest.mark.triton
@pytest.mark.parametrize("decode", [False, True])
@given(layer=variations(), seed=st.integers(0, 2**32), share=st.booleans())
@settings(max_examples=120, deadline=None)
def test_any_pass_at_length(decode, layer, seed, share):
    check(layer, random_parts(seed, decode=decode), share=share)


@pytest.mark.triton
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("window", [None, 40])
def test_long_and_short_parts_in_one_pass_match_the_reference(seed, window):
    """Parts of 64 rows and more keep to themselves; short ones share."""
    layer = with_rotary(Layer(head_dim=16, heads=2, kv_heads=1))
    parts = random_parts(seed, longest=150)
    check(replace(layer, options=replace(layer.options, window=window)), parts)


def test_modules_packed_for_encoding():
    parts, slot = [], 0
    for length in (70, 1, 64, 13, 2):
        parts.append(Part.of(0, length, (), (SlotRange(slot, length),)))
        slot += 80
    check(Layer(heads=2, kv_heads=1), parts)


def at_any_shift(rows: int = 5, keys: int = 200) -> list[Part]:
    """Requests that read the same module, each at a position of its own, and a tail after it."""
    return [
        Part.of(
            50 + 70 * n + keys,
            1,
            (Item(SlotRange(0, keys), 10, 40 + 70 * n), Item(SlotRange(keys, 20), 500, 3)),
            (SlotRange(300 + 9 * n, 1),),
        )
        for n in range(rows)
    ]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [fp32, fp16])
def test_one_tile_of_keys_serves_rows_at_different_shifts(interleaved, dtype):
    layer, using = with_rotary(Layer(stored=dtype, fresh=dtype), interleaved=interleaved), backend()
    parts = at_any_shift()
    check(layer, parts, using)
    plan, pool = build_plan(parts), pool_for(layer, parts)
    using.attend(*fresh_of(layer, plan.rows), pool, plan, 0, layer.options)
    assert using.shared_keys(plan) == 220


def test_alibi_and_no_positions_at_any_shift():
    for slopes in (None, torch.tensor([0.5, 0.25, 0.125, 0.0625])):
        check(Layer(options=AttentionOptions(0.3, slopes=slopes, rotary=UNTURNED)), at_any_shift())


def long_reads(keys: int = 1500) -> list[Part]:
    """Many shared keys, and a tail of its own for each row."""
    shared = Item(SlotRange(0, keys), 0)
    return [
        Part.of(
            keys + 400 + n,
            1,
            (shared, Item(SlotRange(keys, 90), keys + 100, 6 * (n % 2))),
            (SlotRange(1600 + 9 * n, 1),),
        )
        for n in range(5)
    ]


@pytest.mark.parametrize("processors", [1, 16])
@pytest.mark.parametrize("share", [False, True])
def test_splits_of_many_keys(processors, share):
    layer = with_rotary(Layer(heads=4, kv_heads=1))
    sinks = replace(layer, options=replace(layer.options, sinks=torch.tensor([-3.0, 0.0, 3.0, -torch.inf])))
    check(sinks, long_reads(), backend(processors=processors), share=share)


def test_a_long_prefill():
    parts = [
        Part.of(300, 130, (Item(SlotRange(0, 300), 0),), (SlotRange(300, 60), SlotRange(370, 70))),
        Part.of(0, 3, (), (SlotRange(440, 3),)),
    ]
    check(Layer(heads=3, kv_heads=1), parts)


def test_row_that_sees_no_shared_key_matches_the_reference():
    """One row's window ends before the shared keys begin; its weight there is zero, and not NaN."""
    shared = Item(SlotRange(0, 400), 0)
    parts = [Part.of(400, 1, (shared,), (SlotRange(400, 1),)), Part.of(90_000, 1, (shared,), (SlotRange(410, 1),))]
    layer = Layer()
    for sinks in (None, torch.tensor([-3.0, 0.0, 3.0, -torch.inf])):
        check(replace(layer, options=replace(layer.options, window=30, sinks=sinks)), parts)


def test_great_scores_do_not_overflow():
    layer = Layer(head_dim=64)
    check(replace(layer, options=replace(layer.options, scale=40.0)), SHORT[1:2])
    check(replace(layer, options=replace(layer.options, scale=40.0, softcap=50.0)), SHORT[1:2])


def test_keys_outside_the_window_are_not_read():
    pool = backend().make_pool([LayerShape(2, 16)], fp32, 64)
    pool.keys[0][:, :20] = pool.values[0][:, :20] = torch.nan
    plan = build_plan([Part.of(40, 3, (Item(SlotRange(0, 12), 0), Item(SlotRange(12, 16), 20)), (SlotRange(28, 3),))])
    ones = torch.ones(2, 3, 16)
    output = backend().attend(ones, ones, ones, pool, plan, 0, AttentionOptions(0.3, window=12))
    assert output.isfinite().all()


def test_shared_keys_and_values_are_stored_once():
    pool = backend().make_pool([LayerShape(1, 16, shared=True)], fp32, 64)
    assert pool.values[0] is pool.keys[0]
    plan = build_plan([Part.of(0, 9, (), (SlotRange(0, 9),))])
    query, key = normal(4, 9, 16), normal(1, 9, 16, seed=1)
    options = AttentionOptions(0.3)
    output = backend().attend(query, key, key, pool, plan, 0, options)
    torch.testing.assert_close(output, ReferenceBackend().attend(query, key, key, pool, plan, 0, options))


def test_growing_step_uploads_no_tables(monkeypatch):
    uploads = calls_of(monkeypatch, work, "upload")
    layer, using = with_rotary(Layer()), backend()
    parts = at_any_shift(keys=20)
    plan, pool = build_plan(parts), pool_for(layer, [one_on(one_on(part)) for part in parts])
    for _ in range(3):
        using.attend(*fresh_of(layer, plan.rows), pool, plan, 0, layer.options)
        assert len(uploads) == 2  # positions and slots; the tables
        plan = advance(plan, [one_on(part) for part in plan.parts])


@pytest.mark.parametrize("most_steps", [256, 2])
@pytest.mark.parametrize(("window", "share"), [(None, True), (6, True), (6, False)])
def test_an_advanced_plan_equals_a_new_one(monkeypatch, window, share, most_steps):
    """Decode steps grow lengths on the device; the result must be that of a plan built from scratch."""
    monkeypatch.setattr("inlay.attention.triton.backend.MOST_STEPS", most_steps)
    shared = Item(SlotRange(0, 7), 0)
    parts = [
        Part.of(12, 1, (shared, Item(SlotRange(8, 2), 10)), (SlotRange(10, 1),)),
        Part.of(30, 1, (Item(SlotRange(0, 7), 0, shift=5),), (SlotRange(40, 1),)),
        Part.of(9, 1, (shared,), (SlotRange(60, 1),)),
    ]
    layer, using = with_rotary(Layer(heads=2, kv_heads=2)), backend()
    options = replace(layer.options, window=window)
    pool = using.make_pool([LayerShape(2, layer.head_dim)], fp32, 128)
    pool.keys[0].copy_(normal(*pool.keys[0].shape))
    pool.values[0].copy_(normal(*pool.values[0].shape, seed=1))
    plan = build_plan(parts, share=share)
    for step in range(5):
        fresh = fresh_of(layer, 3, seed=step)
        output = using.attend(*fresh, pool, plan, 0, options)
        again = ReferenceBackend().attend(*fresh, pool, build_plan(plan.parts), 0, options)
        same(layer, output, again)
        if step == 2:  # a kind of layer that asks for the first time when lengths have grown
            later = using.attend(*fresh, pool, plan, 0, replace(options, window=9))
            same(
                layer,
                later,
                ReferenceBackend().attend(*fresh, pool, build_plan(plan.parts), 0, replace(options, window=9)),
            )
        plan = advance(plan, [one_on(part) for part in plan.parts])
    assert plan.positions.tolist() == [17, 35, 14]


@pytest.mark.triton
@given(seed=st.integers(0, 2**32), share=st.booleans(), window=st.sampled_from([None, 25]))
@settings(max_examples=40, deadline=None)
def test_any_advanced_plan(seed, share, window):
    layer, using = with_rotary(Layer(heads=2, kv_heads=1)), backend()
    options = replace(layer.options, window=window)
    parts = random_parts(seed, decode=True)
    pool = pool_for(layer, [one_on(one_on(one_on(part))) for part in parts])
    plan = build_plan(parts, share=share)
    for step in range(3):
        fresh = fresh_of(layer, plan.rows, seed=step)
        output = using.attend(*fresh, pool, plan, 0, options)
        same(layer, output, ReferenceBackend().attend(*fresh, pool, build_plan(plan.parts), 0, options))
        plan = advance(plan, [one_on(part) for part in plan.parts])


def test_unsupported_shapes_and_dtypes_are_rejected():
    for layer, dtype, code in (
        (
            LayerShape(1, 576),
            fp32,
            "parameter.unavailable_backend",
        ),
        (LayerShape(1, 64), torch.float64, "parameter.unavailable_dtype"),
    ):
        with raises(code, ParameterError):
            backend().make_pool([layer], dtype, 64)


def test_tensors_of_wrong_shape_are_rejected():
    pool = backend().make_pool([LayerShape(2, 16)], fp32, 64)
    plan = build_plan([Part.of(0, 3, (), (SlotRange(0, 3),))])
    good = torch.ones(2, 3, 16)
    for query, key, options, sentence in (
        (torch.ones(2, 4, 16), good, AttentionOptions(1.0), "do not fit"),
        (torch.ones(3, 3, 16), good, AttentionOptions(1.0), "3 query heads cannot share 2 heads of keys evenly"),
        (good, torch.ones(2, 3, 8), AttentionOptions(1.0), "do not fit"),
        (good, good, AttentionOptions(1.0, sinks=torch.ones(3)), "there are 2 heads and 3 sinks"),
    ):
        with pytest.raises(ValueError, match=sentence):
            backend().attend(query, key, good, pool, plan, 0, options)


def test_unshared_runner_takes_no_pool_memory():
    runner = UnsharedRunner(tiny_unshared("lfm2"), backend())
    assert runner.probe().bytes_per_token > 0
    assert (runner.storage.keys, runner.graphs) == ([], None)
