"""Every version of the compiled kernel against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.attention.cpu import CpuBackend
from inlay.attention.plan import Item, Part, build_plan
from inlay.attention.registry import get_backend
from inlay.attention.storage import KVStorage, LayerShape
from inlay.slots import SlotRange
from tests.generated import examples
from tests.unit.attention import kernel_cases
from tests.unit.attention.kernel_cases import (
    Layer,
    bf16,
    check,
    every_set,
    fp32,
    fresh_of,
    int8,
    pool_for,
    random_parts,
    threads,
    with_rotary,
)

pytestmark = kernel_cases.pytestmark

DTYPES = [(fp32, fp32), (bf16, bf16), (bf16, fp32), (fp32, bf16), (int8, fp32), (int8, bf16)]
SHORT = [
    Part.of(90, 5, (Item(SlotRange(0, 71), 0), Item(SlotRange(75, 6), 3, shift=9)), (SlotRange(120, 5),)),
    Part.of(40, 1, (Item(SlotRange(0, 71), 0),), (SlotRange(140, 1),)),
    Part.of(10, 1, (Item(SlotRange(75, 6), 3, shift=9),), (SlotRange(150, 1),)),
]


@every_set
@pytest.mark.parametrize(("stored", "fresh"), DTYPES)
@pytest.mark.parametrize("head_dim", [5, 8, 24, 40, 64, 80, 96, 128, 256])
def test_head_sizes(instruction_set, head_dim, stored, fresh):
    layer = Layer(head_dim=head_dim, stored=stored, fresh=fresh, heads=6)
    check(with_rotary(layer, head_dim // 2 * 2), SHORT, instruction_set)


@every_set
@pytest.mark.parametrize(("stored", "fresh"), [(fp32, fp32), (bf16, bf16), (int8, fp32), (int8, bf16)])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_group_sizes(instruction_set, group, stored, fresh):
    layer = Layer(heads=2 * group, kv_heads=2, head_dim=32, stored=stored, fresh=fresh)
    check(with_rotary(layer), SHORT, instruction_set)


layers = st.builds(
    Layer,
    kv_heads=st.just(2),
    heads=st.sampled_from([2, 6, 8, 32]),
    head_dim=st.sampled_from([8, 16, 32, 40]),
    chunk=st.sampled_from([16, 32, 64, 128]),
)


@st.composite
def variations(draw: st.DrawFn) -> Layer:
    layer = draw(layers)
    stored, fresh = draw(st.sampled_from(DTYPES))
    layer = with_rotary(
        replace(layer, stored=stored, fresh=fresh),
        draw(st.sampled_from([None, layer.head_dim // 2, 2])),
        interleaved=draw(st.booleans()),
    )
    options = replace(
        layer.options,
        window=draw(st.sampled_from([None, None, 1, 20, 150, 2**31 - 1, 2**40])),
        softcap=draw(st.sampled_from([None, 2.0])),
        sinks=draw(st.sampled_from([None, torch.linspace(-2, 2, layer.heads)])),
        slopes=draw(st.sampled_from([None, torch.linspace(0.01, 0.3, layer.heads)])),
    )
    return replace(layer, options=options)


@every_set
@pytest.mark.parametrize("decode", [False, True])
@given(layer=variations(), seed=st.integers(0, 2**32), share=st.booleans())
@settings(max_examples=examples(40), deadline=None)
def test_any_pass(instruction_set, decode, layer, seed, share):
    check(layer, random_parts(seed, decode=decode), instruction_set, share=share)


@every_set
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("window", [None, 40])
def test_long_and_short_parts_in_one_pass_match_the_reference(instruction_set, seed, window):
    """Parts of 64 rows and more keep to themselves; short ones share."""
    layer = with_rotary(Layer(head_dim=8, heads=2, kv_heads=1))
    parts = random_parts(seed, longest=150)
    assert any(part.rows >= 64 for part in parts)
    check(replace(layer, options=replace(layer.options, window=window)), parts, instruction_set)


@every_set
@pytest.mark.parametrize(("stored", "fresh"), [(fp32, fp32), (bf16, bf16), (int8, fp32), (int8, bf16)])
def test_modules_packed_for_encoding(instruction_set, stored, fresh):
    lengths, parts, slot = [70, 1, 64, 13, 63, 2], [], 0
    for length in lengths:
        parts.append(Part.of(0, length, (), (SlotRange(slot, length),)))
        slot += 80
    check(Layer(stored=stored, fresh=fresh, heads=2, kv_heads=1), parts, instruction_set)


def long_reads() -> list[Part]:
    """Thousands of shared keys, and a tail of its own for each row."""
    shared = Item(SlotRange(0, 3000), 0)
    return [
        Part.of(3400 + n, 1, (shared, Item(SlotRange(3000, 90), 3100, 6 * (n % 2))), (SlotRange(3100 + 9 * n, 1),))
        for n in range(5)
    ]


@every_set
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(
    ("heads", "stored", "fresh"), [(1, fp32, fp32), (8, fp32, fp32), (8, bf16, bf16), (1, int8, fp32), (8, int8, bf16)]
)
def test_splits_of_many_keys_on_many_threads(monkeypatch, instruction_set, count, heads, stored, fresh):
    threads(monkeypatch, count)
    layer = with_rotary(Layer(heads=heads, kv_heads=1, stored=stored, fresh=fresh))
    check(replace(layer, options=replace(layer.options, sinks=torch.ones(heads))), long_reads(), instruction_set)
    check(layer, long_reads(), instruction_set, share=False)


def context_at(first: Sequence[int], keys: int, shift: int) -> tuple[Item, ...]:
    """A moved module of 100 keys, and text of this many keys, in pieces of 300 at these slots."""
    text = [Item(SlotRange(first[n], min(300, keys - 300 * n)), 300 * n) for n in range(-(-keys // 300))]
    return (Item(SlotRange(5000, 100), 40, shift), *text)


@every_set
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize(("stored", "fresh"), [(fp32, fp32), (bf16, bf16), (int8, bf16)])
@pytest.mark.parametrize(
    ("keys", "shift", "kind"),
    [(600, 0, "plain"), (405, 77, "plain"), (405, 77, "interleaved"), (1000, -12, "capped"), (1000, -12, "biased")],
)
def test_a_row_has_the_same_bits_alone_and_with_a_draft(
    monkeypatch, instruction_set, count, group, stored, fresh, keys, shift, kind
):
    """The keys of the shorter text cross a border between splits within the draft. Slots differ too."""
    threads(monkeypatch, count)
    head_dim = 64 if kind == "plain" else 48 if kind == "interleaved" else 128
    layer = Layer(heads=2 * group, kv_heads=2, head_dim=head_dim, stored=stored, fresh=fresh)
    layer = with_rotary(layer, interleaved=kind == "interleaved")
    slopes = 2.0 ** -torch.arange(2.0 * group) if kind == "biased" else None
    softcap = 8.0 if kind in ("capped", "biased") else None
    layer = replace(layer, options=replace(layer.options, softcap=softcap, slopes=slopes))
    backend, rows, start = CpuBackend(instruction_set), 17, keys + 200
    together = Part.of(start, rows, context_at([0, 400, 800, 1200], keys, shift), (SlotRange(2000, rows),))
    pool, fresh_rows = pool_for(layer, [together]), fresh_of(layer, rows)
    expected = backend.attend(*fresh_rows, pool, build_plan([together]), 0, layer.options)
    elsewhere = KVStorage([LayerShape(2, head_dim)], layer.stored, 6000)
    order = [1200, 400, 0, 800]
    for tensor, there in zip((pool.keys[0], pool.values[0]), (elsewhere.keys[0], elsewhere.values[0]), strict=True):
        there[:, 5000:5100] = tensor[:, 5000:5100]
        for slot, other in zip([0, 400, 800, 1200], order, strict=True):
            there[:, other : other + 300] = tensor[:, slot : slot + 300]
    for row in range(rows):
        own = Item(SlotRange(3000, row), start)
        part = Part.of(start + row, 1, context_at(order, keys, shift) + (own,) * (row > 0), (SlotRange(3000 + row, 1),))
        one = [tensor[:, row : row + 1].contiguous() for tensor in fresh_rows]
        found = backend.attend(*one, elsewhere, build_plan([part]), 0, layer.options)
        assert torch.equal(found, expected[row : row + 1]), row


@every_set
def test_a_long_prefill_on_many_threads(monkeypatch, instruction_set):
    threads(monkeypatch, 5)
    parts = [
        Part.of(900, 130, (Item(SlotRange(0, 900), 0),), (SlotRange(900, 60), SlotRange(970, 70))),
        Part.of(0, 3, (), (SlotRange(1040, 3),)),
    ]
    check(Layer(heads=3, kv_heads=1, head_dim=8), parts, instruction_set)


@every_set
@pytest.mark.parametrize("count", [1, 2])
def test_row_that_sees_no_shared_key_matches_the_reference(monkeypatch, instruction_set, count):
    """One row's window ends before the shared keys begin; its weight there is zero, and not NaN."""
    threads(monkeypatch, count)
    shared = Item(SlotRange(0, 1200), 0)
    parts = [Part.of(1200, 1, (shared,), (SlotRange(1200, 1),)), Part.of(90_000, 1, (shared,), (SlotRange(1210, 1),))]
    layer = Layer()
    for sinks in (None, torch.tensor([-3.0, 0.0, 3.0, -torch.inf])):
        check(replace(layer, options=replace(layer.options, window=30, sinks=sinks)), parts, instruction_set)


@pytest.mark.parametrize("fresh", [fp32, bf16])
@pytest.mark.parametrize("head_dim", [5, 64])
def test_int8_storage_equals_the_specification(head_dim, fresh):
    """Equal bit for bit, so any backend may write them. Includes zeros, tiny and huge numbers, and NaN."""
    layer = Layer(head_dim=head_dim, stored=int8, fresh=fresh)
    parts = [Part.of(0, 8, (), (SlotRange(0, 8),))]
    query, key, value = fresh_of(layer, 8)
    key[0, 1], key[0, 2], key[1, 3], value[0, 0] = 0.0, key[0, 2] * 1e-36, key[1, 3] * 1e30, -3.0
    value[1, 4, 2], value[1, 5, 1] = torch.nan, -torch.inf
    pools = [pool_for(layer, parts) for _ in range(2)]
    CpuBackend().attend(query, key, value, pools[0], build_plan(parts), 0, layer.options)
    pools[1].write(0, SlotRange(0, 8), key, value)
    for one, other in ((pools[0].keys[0], pools[1].keys[0]), (pools[0].values[0], pools[1].values[0])):
        assert torch.equal(one[..., :head_dim], other[..., :head_dim])
    for read in (KVStorage.read_keys, KVStorage.read_values):
        one, other = (read(pool, 0, slice(0, 8)) for pool in pools)
        torch.testing.assert_close(one, other, atol=0, rtol=0, equal_nan=True)
    kept = pools[0].read_values(0, slice(0, 4)), value[:, :4].float()
    assert (kept[0] - kept[1]).abs().max() <= 0.5001 / 127 * kept[1].abs().max()
    assert pools[0].read_values(0, slice(4, 6))[1].isnan().all(), "a broken model shows"


def test_int8_rounding_of_ties_equals_the_specification():
    """Of 65,536 numbers in bf16 some lie so near to the middle of two that the last bit of a factor decides."""
    layer = Layer(head_dim=64, stored=int8, fresh=bf16)
    parts = [Part.of(0, 512, (), (SlotRange(0, 512),))]
    query, key, value = fresh_of(layer, 512)
    pools = [pool_for(layer, parts) for _ in range(2)]
    CpuBackend().attend(query, key, value, pools[0], build_plan(parts), 0, layer.options)
    pools[1].write(0, SlotRange(0, 512), key, value)
    for memory in ("keys", "values"):
        one, other = (getattr(pool, memory)[0][:, :512] for pool in pools)
        assert torch.equal(one, other)


@every_set
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_invalid_int8_values_stay_visible(instruction_set, backend):
    layer = with_rotary(Layer(head_dim=64, heads=4, stored=int8))
    parts = [Part.of(0, 3, (), (SlotRange(0, 3),))]
    query, key, value = fresh_of(layer, 3)
    value[0, 1, 7] = torch.nan
    attention = CpuBackend(instruction_set) if backend == "cpu" else get_backend("torch")
    output = attention.attend(query, key, value, pool_for(layer, parts), build_plan(parts), 0, layer.options)
    assert output[1:, :2].isnan().any()
    assert not output[:, 2:].isnan().any()


@every_set
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -1])
def test_nan_key_with_any_bits_gives_nan(instruction_set, bits, rows):
    """Memory full of ones is no number either."""
    layer = Layer(head_dim=64, heads=2)
    parts = [Part.of(0, rows, (), (SlotRange(0, rows),))]
    query, key, value = fresh_of(layer, rows)
    key[:, 0, 3] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    for softcap in (None, 20.0):
        options = replace(layer.options, softcap=softcap)
        pool = pool_for(layer, parts)
        output = CpuBackend(instruction_set).attend(query, key, value, pool, build_plan(parts), 0, options)
        assert output.isnan().any(-1).all()


@every_set
def test_great_scores_do_not_overflow(instruction_set):
    layer = Layer(head_dim=64)
    check(replace(layer, options=replace(layer.options, scale=40.0)), SHORT[1:2], instruction_set)
