"""Every backend against the reference, over random sharing sets, shifts, windows, caps and sinks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.attention import cpu
from inlay.attention import torch as torch_flash
from inlay.attention.backend import AttentionOptions
from inlay.attention.plan import Item, Part, advance, build_plan
from inlay.attention.registry import get_backend
from inlay.attention.rope import UNTURNED, Rotary
from inlay.attention.storage import KVStorage, LayerShape, quantized
from inlay.errors import ParameterError
from inlay.slots import SlotRange
from tests.counting import calls_of
from tests.generated import examples
from tests.raising import raises

BACKENDS = ("cpu", "torch") if cpu.available() else ("torch",)
CHUNK = 4


def rotary(head_dim: int, *, interleaved: bool = False) -> Rotary:
    return Rotary(10000.0 ** (-torch.arange(0, head_dim, 2).float() / head_dim), interleaved)


def make_pool(kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> KVStorage:
    pool = KVStorage([LayerShape(kv_heads, head_dim)], dtype, 1 << 13)
    generator = torch.Generator().manual_seed(5)
    for write in (pool.keys[0], pool.values[0]):
        numbers = torch.randn(kv_heads, write.shape[1], head_dim, generator=generator)
        write.copy_(quantized(numbers) if dtype == torch.int8 else numbers)
    return pool


def both(parts: list[Part], options: AttentionOptions, heads: int, pool: KVStorage, backend: str, dtype: torch.dtype):
    """The backend's output and the reference's, on the same new keys."""
    plan = build_plan(parts)
    generator = torch.Generator().manual_seed(7)
    kv_heads, head_dim = pool.layers[0].kv_heads, pool.layers[0].head_dim
    query = torch.randn(heads, plan.rows, head_dim, generator=generator).to(dtype)
    key, value = (torch.randn(kv_heads, plan.rows, head_dim, generator=generator).to(dtype) for _ in range(2))
    expected = get_backend("reference").attend(query, key, value, pool, plan, 0, options)
    return get_backend(backend).attend(query, key, value, pool, plan, 0, options), expected


@st.composite
def passes(draw: st.DrawFn) -> list[Part]:
    """Spans that share stored segments in any combination, order and shift."""
    segments, slot = [], 0
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 9))
        segments.append((SlotRange(slot, length), draw(st.integers(0, 40))))
        slot += -(-length // CHUNK) * CHUNK
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        chosen = draw(st.lists(st.sampled_from(segments), max_size=4, unique=True))
        at, context = draw(st.integers(0, 9)), []
        for run, start in chosen:
            shift = 0 if draw(st.booleans()) else at - start
            context.append(Item(run, start, shift))
            at = max(at, start + shift + run.length)
        slots = []
        length = draw(st.integers(1, 7))
        for size in draw(st.sampled_from([[length], [1, length]])):
            slots.append(SlotRange(slot, size))
            slot += size + draw(st.sampled_from([0, 3]))
        parts.append(Part.of(at, length, tuple(context), tuple(slots)))
    return parts


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
@given(
    parts=passes(), window=st.sampled_from([None, 1, 5, 20]), softcap=st.sampled_from([None, 3.0]), sinks=st.booleans()
)
@settings(max_examples=examples(60), deadline=None)
def test_backend_equals_reference(backend, heads, kv_heads, parts, window, softcap, sinks):
    options = AttentionOptions(
        scale=0.3,
        window=window,
        softcap=softcap,
        sinks=torch.linspace(-1, 1, heads) if sinks else None,
        rotary=rotary(8),
    )
    output, expected = both(parts, options, heads, make_pool(kv_heads, 8), backend, torch.float32)
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
@given(parts=passes(), window=st.sampled_from([None, 5]), softcap=st.sampled_from([None, 3.0]), biased=st.booleans())
@settings(max_examples=examples(40), deadline=None)
def test_attention_mass_equals_the_reference(backend, heads, kv_heads, parts, window, softcap, biased):
    """Of every key, summed over rows and heads; sinks take their part of it and give none."""
    options = AttentionOptions(
        scale=0.3,
        window=window,
        softcap=softcap,
        sinks=torch.linspace(-1, 1, heads) if biased else None,
        slopes=torch.linspace(0, 0.5, heads) if biased else None,
        rotary=UNTURNED if biased else rotary(8),
    )
    pool = make_pool(kv_heads, 8)
    query = torch.randn(heads, 16, 8, generator=torch.Generator().manual_seed(3))
    for part in parts:
        rows = query[:, : part.rows]
        mass = get_backend(backend).attention_mass(rows, pool, part, 0, options)
        expected = get_backend("reference").attention_mass(rows, pool, part, 0, options)
        torch.testing.assert_close(mass, expected, atol=2e-5, rtol=1e-4)
        if not biased:
            assert mass.sum().item() == pytest.approx(heads * part.rows, rel=1e-4)


@pytest.mark.parametrize("blocks_of", [1, 2 * 4 * 4 * 24, 4 * 24 * 8])
def test_attention_mass_is_equal_in_blocks(monkeypatch, blocks_of):
    """Of rows, and of heads: one at a time, some, or all."""
    part = Part.of(20, 7, (Item(SlotRange(0, 11), 0), Item(SlotRange(12, 6), 3, shift=9)), (SlotRange(20, 7),))
    options = AttentionOptions(scale=0.3, rotary=rotary(8), sinks=torch.linspace(-1, 1, 4))
    query, pool = torch.randn(4, 7, 8), make_pool(2, 8)
    whole = get_backend("torch").attention_mass(query, pool, part, 0, options)
    monkeypatch.setattr("inlay.attention.mass.BLOCK_BYTES", blocks_of)
    torch.testing.assert_close(get_backend("torch").attention_mass(query, pool, part, 0, options), whole)


def test_attention_mass_over_many_items_takes_few_steps(monkeypatch):
    """2,000 modules of a token each, every one at a shift of its own, are turned at once."""
    turns = calls_of(monkeypatch, Rotary, "turn")
    items = tuple(Item(SlotRange(2 * i, 1), 0, shift=i) for i in range(2000))
    part = Part.of(2000, 3, items, (SlotRange(4001, 3),))
    pool = KVStorage([LayerShape(2, 8)], torch.float32, 4100)
    options = AttentionOptions(scale=0.3, rotary=rotary(8))
    mass = get_backend("torch").attention_mass(torch.randn(4, 3, 8), pool, part, 0, options)
    assert mass.shape == (2003,)
    assert len(turns) == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("stored", [None, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_sizes_and_dtypes(backend, head_dim, dtype, stored):
    pool = make_pool(2, head_dim, stored or dtype)
    parts = [Part.of(20, 5, (Item(SlotRange(0, 11), 0), Item(SlotRange(12, 6), 3, shift=9)), (SlotRange(20, 5),))]
    options = AttentionOptions(scale=head_dim**-0.5, rotary=rotary(head_dim))
    output, expected = both(parts, options, 6, pool, backend, dtype)
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(output.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("alibi", [False, True])
@given(parts=passes())
@settings(max_examples=examples(30), deadline=None)
def test_layers_without_key_positions_are_read_at_any_shift(backend, alibi, parts):
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]) if alibi else None
    options = AttentionOptions(scale=0.3, slopes=slopes, rotary=UNTURNED)
    output, expected = both(parts, options, 4, make_pool(2, 8), backend, torch.float32)
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shared_keys_and_values_are_stored_once(backend):
    pool = get_backend(backend).make_pool([LayerShape(1, 8, shared=True)], torch.float32, 64)
    assert pool.values[0] is pool.keys[0]
    plan = build_plan([Part.of(0, 9, (), (SlotRange(0, 9),))])
    query, key = torch.randn(4, 9, 8), torch.randn(1, 9, 8)
    output = get_backend(backend).attend(query, key, key, pool, plan, 0, AttentionOptions(scale=0.3))
    scores = (query @ key.transpose(1, 2) * 0.3).masked_fill(~torch.ones(9, 9).tril().bool(), -torch.inf)
    torch.testing.assert_close(output, (scores.softmax(-1) @ key).transpose(0, 1), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotating_the_query_equals_shifting_the_keys(interleaved):
    turn = rotary(8, interleaved=interleaved)
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(3, 8, generator=generator), torch.randn(5, 8, generator=generator)
    cos, sin = turn.angles([-17])  # a shift of -17 turns by +17, like moving keys 17 positions on
    moved = key @ torch.eye(8)
    moved = turn.turn(moved, cos, sin)
    cos, sin = turn.angles([17])
    torch.testing.assert_close(query @ moved.T, turn.turn(query, cos, sin) @ key.T, atol=1e-5, rtol=1e-5)


def test_only_leading_dimensions_are_rotated():
    turn = rotary(4)
    query = torch.randn(2, 10)
    cos, sin = turn.angles([3])
    assert torch.equal(turn.turn(query, cos, sin)[:, 4:], query[:, 4:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 6])
def test_an_advanced_plan_equals_a_new_one(backend, window):
    """Decode steps advance lengths in place; the result must be that of a plan built from scratch."""
    shared = Item(SlotRange(0, 7), 0)
    parts = [
        Part.of(12, 1, (shared, Item(SlotRange(8, 2), 10)), (SlotRange(10, 1),)),
        Part.of(30, 1, (Item(SlotRange(0, 7), 0, shift=5),), (SlotRange(40, 1),)),
        Part.of(9, 1, (shared,), (SlotRange(60, 1),)),
    ]
    options = AttentionOptions(scale=0.3, window=window, rotary=rotary(8))
    pool, plan = make_pool(2, 8), build_plan(parts)
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        query, key, value = (torch.randn(2, 3, 8, generator=generator) for _ in range(3))
        output = get_backend(backend).attend(query, key, value, pool, plan, 0, options)
        fresh = get_backend("reference").attend(query, key, value, pool, build_plan(plan.parts), 0, options)
        torch.testing.assert_close(output, fresh, atol=2e-5, rtol=1e-4)
        plan = advance(plan, [part.next(int(part.slots[0]) + 1) for part in plan.parts])
    assert plan.positions.tolist() == [17, 35, 14]


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_outside_the_window_are_not_read(backend):
    pool = make_pool(2, 8)
    pool.keys[0][:, :20] = pool.values[0][:, :20] = torch.nan
    parts = [Part.of(40, 3, (Item(SlotRange(0, 12), 0), Item(SlotRange(12, 16), 20)), (SlotRange(28, 3),))]
    plan = build_plan(parts)
    query, key, value = torch.ones(2, 3, 8), torch.ones(2, 3, 8), torch.ones(2, 3, 8)
    options = AttentionOptions(scale=0.3, window=12)  # position 40 sees 29 and on: slot 21
    output = get_backend(backend).attend(query, key, value, pool, plan, 0, options)
    assert output.isfinite().all()


@pytest.mark.parametrize("window", [None, 30])
def test_stored_keys_are_not_copied(monkeypatch, window):
    """No stored key or value is copied: the kernel gets views of the pool."""
    seen = calls_of(monkeypatch, torch_flash, "flash_attention")
    pool = make_pool(2, 8)
    plan = build_plan(
        [Part.of(40, 3, (Item(SlotRange(0, 12), 0, shift=5), Item(SlotRange(12, 16), 20)), (SlotRange(28, 3),))]
    )
    query, key, value = torch.ones(6, 3, 8), torch.ones(2, 3, 8), torch.ones(2, 3, 8)
    options = AttentionOptions(scale=0.3, window=window, rotary=rotary(8))
    get_backend("torch").attend(query, key, value, pool, plan, 0, options)
    assert len(seen) == 3
    for _, keys, values in seen:
        assert keys.untyped_storage().data_ptr() == pool.keys[0].untyped_storage().data_ptr()
        assert values.untyped_storage().data_ptr() == pool.values[0].untyped_storage().data_ptr()


def test_unknown_backend():
    with raises("parameter.unknown_choice", ParameterError, names="auto, cpu"):
        get_backend("gpu")
