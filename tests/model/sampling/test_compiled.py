"""The compiled kernel against the specification: the same tokens, on any rows, with any instruction set."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.attention.cpu import available, instruction_sets
from inlay.models.load import load_tokenizer
from inlay.sampling import compiled, plain, sampler
from inlay.sampling.compiled import Chosen
from inlay.sampling.params import SamplingParams
from inlay.sampling.plain import exponential
from inlay.sampling.row import Row
from inlay.sampling.structured import Grammars, Guide
from tests.generated import examples
from tests.unit.sampling.rows import normal, row

pytestmark = pytest.mark.skipif(not available(), reason="the kernel was not built")

WIDE = 40_003  # more blocks than a short list, and no multiple of a vector's width


def check(logits: torch.Tensor, rows: list[Row]) -> None:
    """Check that all versions of the kernel choose what the specification does, and find the same damage."""
    bits = sampler.random_bits(rows)
    before = logits.clone()
    expected = Chosen(*(each.numpy() for each in plain.choose(logits, rows, bits)))
    whole = np.isfinite(expected.raw) & np.isfinite(expected.best)
    for name in instruction_sets():
        found = compiled.choose(logits, rows, bits, name)
        np.testing.assert_array_equal(found.tokens[whole], expected.tokens[whole], err_msg=name)
        np.testing.assert_array_equal(found.raw, expected.raw, err_msg=name)
        np.testing.assert_array_equal(found.best[whole], expected.best[whole], err_msg=name)
        assert not (np.isfinite(found.raw) & np.isfinite(found.best))[~whole].any()
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))


PARAMS = [
    {"temperature": 0},
    {},
    {"temperature": 1e-5},
    {"temperature": 100.0},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_p": 0.95, "temperature": 0.8},
    {"top_p": 0.5},
    {"top_p": 1e-9},
    {"top_p": 0.9999, "temperature": 100.0},
    {"top_p": 0.99, "min_p": 0.001},
    {"top_k": 1},
    {"top_k": 50, "top_p": 0.95, "temperature": 0.8},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {"top_k": 5000, "temperature": 3.0},
    {"top_k": 10**6},
]


def steps(changes: dict, count: int) -> list[Row]:
    return [row(SamplingParams(**changes), step, 7) for step in range(count)]


def shapes(count: int) -> dict[str, torch.Tensor]:
    """Logits of many kinds, (count, WIDE)."""
    base = normal(count, WIDE, seed=1, scale=1.0)
    peaked = base * 2
    peaked[:, ::200] += torch.linspace(14, 2, len(range(0, WIDE, 200)))
    outlier = base.clone()
    outlier[:, 5] = -1e30
    holes = base.clone()
    holes[:, 3::2] = -math.inf
    return {
        "flat": base,
        "peaked": peaked,
        "nearly equal": 3.0 + base * 1e-6,
        "equal": torch.full((count, WIDE), -2.5),
        "two values": (base > 0).float(),
        "an outlier": outlier,
        "with -inf": holes,
        "one token": torch.full((count, WIDE), -math.inf).index_fill(1, torch.tensor([WIDE - 1]), 1.0),
        "huge": base * 1e37,
        "tiny": base * 1e-41,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", shapes(1))
def test_kernel_chooses_the_tokens_of_the_specification(shape, dtype):
    rows = [made for changes in PARAMS for made in steps(changes, 3)]
    check(shapes(3)[shape].to(dtype).repeat(len(PARAMS), 1), rows)


_ROW = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    top_k=st.sampled_from([0, 0, 1, 30, 700]),
    top_p=st.sampled_from([1.0, 1.0, 0.01, 0.5, 0.99]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3]),
    frequency_penalty=st.sampled_from([0.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, -0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 9), st.floats(-100, 100, width=32), max_size=4),
    min_tokens=st.sampled_from([0, 9]),
)


@settings(max_examples=examples(50), deadline=None)
@given(
    params=st.lists(_ROW, min_size=1, max_size=6),
    vocabulary=st.integers(10, 9000),
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([0.0, 0.3, 3, 20]),
    holes=st.sampled_from([0.0, 0.3, 1.0]),
    damage=st.none() | st.sampled_from([math.nan, math.inf]),
    halves=st.booleans(),
)
def test_any_rows(params, vocabulary, seed, scale, holes, damage, halves):
    logits = normal(len(params), vocabulary + 3, seed=seed, scale=scale)
    logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) < holes] = -math.inf
    if damage is not None:
        logits[seed % len(params), seed % vocabulary] = damage
    rows = [
        row(one, 4, seed + place, never=[place], stop_ids=[place + 1], prompt_ids=range(place, min(300, vocabulary)))
        for place, one in enumerate(params)
    ]
    for made in rows:
        for token in (1, 1, 2):
            made.take(token)
    logits = logits.bfloat16() if halves else logits
    check(logits[:, :vocabulary], rows)  # rows that do not lie one right after the other


def test_rows_with_a_grammar():
    tokenizer = load_tokenizer("demo")
    vocabulary = len(tokenizer)
    grammars = Grammars(tokenizer, vocabulary, [tokenizer.eos_token_id])

    def guide(place: int) -> Guide | None:
        return grammars.guide({"regex": "[a-f]{3}" if place % 2 else "[0-9]+"}) if place % 3 else None

    params = [SamplingParams(**changes) for changes in PARAMS]
    rows = [row(one, 2, 3, [5], guide=guide(place)) for place, one in enumerate(params)]
    check(normal(len(rows), vocabulary), rows)
    limits = [None if place % 2 else range(place, vocabulary, 7 + place) for place in range(len(params))]
    limited = [replace(one, allowed_token_ids=allowed) for one, allowed in zip(params, limits, strict=True)]
    check(normal(len(rows), vocabulary), [row(one, 2, 3, guide=guide(place)) for place, one in enumerate(limited)])


def test_unknown_banned_ids_are_ignored():
    logits = normal(1, 50)
    (token,) = compiled.choose(logits, [row(SamplingParams(temperature=0))], np.zeros(1, np.uint64)).tokens
    strange = row(SamplingParams(temperature=0), never=[50, 2**40])
    (found,) = compiled.choose(logits, [strange], np.zeros(1, np.uint64)).tokens
    assert found == token == logits.argmax()


def test_random_bits_equal_numpys_generator():
    pairs = [(0, 0), (0, 1), (1, 0), (2**64 - 1, 5), (12345, 2**32), (3, 2**64 - 1)]
    rows = [row(SamplingParams(), step, seed) for seed, step in pairs]
    assert sampler.random_bits(rows).tolist() == [sampler.draw(seed, step) for seed, step in pairs]


def test_exponential_is_accurate():
    logs = -torch.linspace(0, 27, 100_001)
    torch.testing.assert_close(exponential(logs.clone()).double(), logs.double().exp(), rtol=2e-7, atol=0)
    assert exponential(torch.zeros(1)) == 1
