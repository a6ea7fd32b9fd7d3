"""Codecs: their bytes, their error, and that applying one twice equals applying it once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inlay.kv.offload.codecs import CODECS, DTYPES, E4M3, from_floats, to_e4m3, to_floats

SHAPE = (2, 3, 50, 32)
LOSSY = [name for name in CODECS if name != "none"]


def slab_of(kv_dtype: str, shape=SHAPE, seed: int = 0):
    """Numbers as keys and values have them: a few channels of keys are much larger than the others."""
    numbers = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    numbers[0, :, :, ::8] *= 30
    return from_floats(numbers, kv_dtype)


def through(codec: str, slab, kv_dtype: str, shape=SHAPE):
    return CODECS[codec].decode(CODECS[codec].encode(slab, kv_dtype), shape, kv_dtype)


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
def test_encoded_size_equals_the_declared_size(codec, kv_dtype):
    form, slab = CODECS[codec], slab_of(kv_dtype)
    data = form.encode(slab, kv_dtype)
    assert data.shape == (form.nbytes(SHAPE, kv_dtype),)
    assert sum(part.nbytes for part in form.parts(SHAPE, kv_dtype)) == data.size
    assert through(codec, slab, kv_dtype).shape == slab.shape


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_none_codec_changes_nothing(kv_dtype):
    assert np.array_equal(through("none", slab_of(kv_dtype), kv_dtype), slab_of(kv_dtype))


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_int8_error_is_bounded_by_channel_or_token(kv_dtype):
    slab = slab_of(kv_dtype)
    exact, found = to_floats(slab, kv_dtype), to_floats(through("int8", slab, kv_dtype), kv_dtype)
    rounding = {"float32": 2**-20, "float16": 2**-11, "bfloat16": 2**-8}[kv_dtype] * np.abs(exact)
    for which, axis in enumerate((1, 2)):
        step = np.abs(exact[which]).max(axis, keepdims=True) / 127
        assert (np.abs(found[which] - exact[which]) <= step * 0.51 + rounding[which]).all()


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_fp8_error_is_bounded_by_the_number(kv_dtype):
    slab = slab_of(kv_dtype)
    exact, found = to_floats(slab, kv_dtype), to_floats(through("fp8", slab, kv_dtype), kv_dtype)
    smallest = np.abs(exact).max((2, 3), keepdims=True) / 448 * 2**-9
    assert (np.abs(found - exact) <= np.maximum(np.abs(exact) * 0.07, smallest)).all()


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("codec", LOSSY)
def test_encoding_twice_equals_encoding_once(codec, kv_dtype):
    """Each tier encodes a segment again when it moves between tiers."""
    once = through(codec, slab_of(kv_dtype), kv_dtype)
    twice = through(codec, once, kv_dtype)
    if kv_dtype == "float32":
        assert np.allclose(to_floats(twice, kv_dtype), to_floats(once, kv_dtype), rtol=1e-6, atol=0)
    else:
        assert np.array_equal(twice, once)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("number", [0.0, 1e-38, -65504.0])
def test_constant_rows_stay_finite(codec, number):
    slab = from_floats(np.full(SHAPE, number, np.float32), "float32")
    found = to_floats(through(codec, slab, "float32"), "float32")
    assert np.allclose(found, number, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("codec", CODECS)
def test_few_tokens(codec, tokens):
    shape = (2, 1, tokens, 5)
    slab = slab_of("bfloat16", shape)
    assert through(codec, slab, "bfloat16", shape).shape == slab.shape


def test_bfloat16_equals_pytorch():
    numbers = np.random.default_rng(1).standard_normal(10_000).astype(np.float32) * 100
    expected = torch.from_numpy(numbers).bfloat16()
    assert np.array_equal(from_floats(numbers, "bfloat16"), expected.view(torch.uint8).numpy())
    assert np.array_equal(to_floats(from_floats(numbers, "bfloat16"), "bfloat16"), expected.float().numpy())


def test_e4m3_equals_pytorch():
    generator = np.random.default_rng(2)
    numbers = np.concatenate(
        [generator.uniform(-448, 448, 5000), generator.uniform(-0.05, 0.05, 5000), E4M3[np.arange(256) & 127 != 127]]
    ).astype(np.float32)
    expected = torch.from_numpy(numbers).to(torch.float8_e4m3fn)
    assert np.array_equal(to_e4m3(numbers), expected.view(torch.uint8).numpy())
    codes = np.setdiff1d(np.arange(256), (0x7F, 0xFF)).astype(np.uint8)
    assert np.array_equal(E4M3[codes], torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy())


@pytest.mark.parametrize(("heads", "width"), [(2, 32), (2, 64), (8, 128)])
@pytest.mark.parametrize("codec", LOSSY)
def test_codecs_take_half_the_bytes_of_bfloat16(codec, heads, width):
    shape = (2, heads, 1024, width)
    assert CODECS[codec].nbytes(shape, "bfloat16") <= 0.53 * CODECS["none"].nbytes(shape, "bfloat16")
