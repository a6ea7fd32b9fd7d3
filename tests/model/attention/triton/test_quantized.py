"""Keys and values in 8 bits: the kernels over them, against the reference over the same numbers widened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inlay.attention.plan import Part, build_plan
from inlay.attention.reference import ReferenceBackend
from inlay.attention.storage import LARGEST, SCALE_BYTES, DeviceStorage, KVStorage, LayerShape, dequantize, quantize
from inlay.slots import SlotRange
from tests.model.attention.triton.cases import backend, fp16, interpreted, same, variations
from tests.model.attention.triton.test_kernels import SHORT
from tests.unit.attention.kernel_cases import Layer, bf16, end_of, fp32, fresh_of, normal, random_parts, with_rotary

pytestmark = [interpreted, pytest.mark.long]

NARROW = list(LARGEST)
HOST = torch.device("cpu")


def pool_of(layer: Layer, parts: Sequence[Part], dtype: torch.dtype) -> DeviceStorage:
    """A pool full of tokens of very different sizes."""
    slots = end_of(parts) + 3
    pool = DeviceStorage([LayerShape(layer.kv_heads, layer.head_dim)], dtype, slots, HOST)
    sizes = torch.logspace(-2, 1, slots)[None, :, None]
    keys, values = (normal(layer.kv_heads, slots, layer.head_dim, seed=seed) * sizes for seed in (0, 1))
    pool.write(0, SlotRange(0, slots), keys * 0.3, values)
    return pool


def widened(pool: DeviceStorage) -> KVStorage:
    """The same numbers in fp32."""
    made = KVStorage(pool.layers, fp32, pool.keys[0].shape[1])
    assert pool.scales[0] is not None
    for there, here, scales in zip((made.keys, made.values), (pool.keys, pool.values), pool.scales[0], strict=True):
        there[0].copy_(dequantize(here[0], scales))
    return made


def check(layer: Layer, parts: Sequence[Part], dtype: torch.dtype, *, share: bool = True) -> None:
    plan, pool = build_plan(parts, share=share), pool_of(layer, parts, dtype)
    query, key, value = fresh_of(layer, plan.rows)
    stored = [dequantize(*quantize(each, dtype)) for each in (key, value)]
    expected = ReferenceBackend().attend(query, *stored, widened(pool), build_plan(parts), 0, layer.options)
    output = backend().attend(query, key, value, pool, plan, 0, layer.options)
    same(replace(layer, stored=layer.fresh), output, expected)
    for found, numbers in zip((pool.keys[0], pool.values[0]), (key, value), strict=True):
        assert torch.equal(found[:, plan.slots].float(), quantize(numbers, dtype)[0].float()), "stored otherwise"


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("fresh", [fp32, fp16, bf16], ids=str)
def test_attention_is_that_over_the_same_numbers_in_fp32(fresh, dtype):
    check(with_rotary(Layer(fresh=fresh, heads=6, head_dim=24)), SHORT, dtype)


@pytest.mark.parametrize("decode", [False, True])
@given(layer=variations(), dtype=st.sampled_from(NARROW), seed=st.integers(0, 2**32), share=st.booleans())
@settings(max_examples=3, deadline=None)
def test_any_pass(decode, layer, dtype, seed, share):
    check(layer, random_parts(seed, decode=decode), dtype, share=share)


@pytest.mark.triton
@pytest.mark.parametrize("decode", [False, True])
@given(layer=variations(), dtype=st.sampled_from(NARROW), seed=st.integers(0, 2**32), share=st.booleans())
@settings(max_examples=40, deadline=None)
def test_any_pass_at_length(decode, layer, dtype, seed, share):
    check(layer, random_parts(seed, decode=decode), dtype, share=share)


def stored(numbers: Tensor, dtype: torch.dtype) -> tuple[DeviceStorage, DeviceStorage]:
    """Rows of keys and values, (rows, head_dim), as the kernel stores them and as ``write`` does."""
    rows, width = numbers.shape
    made = [DeviceStorage([LayerShape(1, width)], dtype, rows, HOST) for _ in range(2)]
    part = Part.of(0, rows, (), (SlotRange(0, rows),))
    fresh = numbers[None]
    backend().attend(fresh, fresh, -fresh, made[0], build_plan([part]), 0, Layer().options)
    made[1].write(0, SlotRange(0, rows), fresh, -fresh)
    return made[0], made[1]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_kernel_quantizes_bit_for_bit_as_specified(dtype):
    numbers = normal(40, 32) * torch.logspace(-35, 35, 40)[:, None]
    numbers[0], numbers[1] = 0.0, 1e-38
    numbers[2] = torch.linspace(-1, 1, 32) ** 9  # from the smallest to the largest that a row tells apart
    numbers[3] = torch.arange(32) / 2 + 0.5
    numbers[3, 0] = LARGEST[dtype]  # a scale of one, and ties
    numbers[4, 5], numbers[5, 6] = torch.nan, torch.inf
    ours, expected = stored(numbers, dtype)
    for one, other in ((ours.keys, expected.keys), (ours.values, expected.values)):
        assert torch.equal(one[0].view(torch.uint8) & 0x7F, other[0].view(torch.uint8) & 0x7F)
        assert torch.equal(one[0].float(), other[0].float())
    for one, other in zip(ours.scales[0], expected.scales[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert torch.isnan(ours.scales[0][0][0, 4:6]).all(), "what is no number must not become one"


@pytest.mark.parametrize(("dtype", "off"), [(torch.int8, 1 / 254), (torch.float8_e4m3fn, 1 / 16)], ids=str)
def test_dequantized_values_are_close(dtype, off):
    numbers = normal(50, 64) * torch.logspace(-20, 20, 50)[:, None]
    most = numbers.abs().amax(-1, keepdim=True)
    assert ((dequantize(*quantize(numbers, dtype)) - numbers).abs() <= off * most * 1.0001).all()


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_slabs_hold_scales_after_their_rows(dtype):
    layer = Layer()
    pool = pool_of(layer, SHORT, dtype)
    runs = (SlotRange(3, 5), SlotRange(20, 2))
    slab = pool.read_slab(0, runs)
    assert slab.shape == (2, layer.kv_heads, 7, layer.head_dim + SCALE_BYTES)
    scales = torch.from_numpy(slab[..., layer.head_dim :].copy()).view(fp32)[..., 0]
    assert torch.equal(scales[0], pool.scales[0][0][:, [3, 4, 5, 6, 7, 20, 21]])
    other = DeviceStorage(pool.layers, dtype, 60, HOST)
    other.write_slab(0, (SlotRange(50, 7),), slab)
    assert (other.read_slab(0, (SlotRange(50, 7),)) == slab).all()
    assert torch.equal(other.scales[0][1][:, 50:57], scales[1])
    assert not other.keys[0][:, :50].float().any()
