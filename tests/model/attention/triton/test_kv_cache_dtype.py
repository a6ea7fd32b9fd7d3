"""Whole tiny models over keys and values in 8 bits: Triton's kernels against PyTorch over the same rounded numbers.

A number between two roundings may become either, because fp32 sums differ in their last bits. The tolerance allows some
of them, and is far below the effect of rounding itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from inlay import LLM, ParameterError, Schema
from inlay.attention.plan import Item, Part, build_plan
from inlay.attention.storage import NARROW, DeviceStorage, LayerShape
from inlay.attention.torch import TorchBackend
from inlay.slots import SlotRange
from tests.conftest import tiny
from tests.model.attention.devices import pretend
from tests.model.attention.triton.cases import backend, interpreted
from tests.model.equivalence.test_modules import SCHEMA
from tests.raising import raises
from tests.unit.attention.kernel_cases import Layer, fresh_of, with_rotary

pytestmark = [interpreted, pytest.mark.sampled(3)]

TRIP = Schema.from_string(SCHEMA)
FORCED = [[5, 200, 77], [9]]


def distributions(kept: str, name: str, policies: Sequence[str]) -> Tensor:
    """Of forced tokens after prompts of different lengths, with the same modules at different places.

    (policies, times, tokens, vocabulary): once computed, and then over what is stored.
    """
    llm = LLM(tiny(name), kv_memory="4MiB", chunk_size=16, attention_backend="triton", kv_cache_dtype=kept, seed=0)
    llm.add_schema(TRIP)
    prompts = [
        TRIP.prompt().use("trip", days="3 days", likes="tea").use("food").text("Where to?"),
        TRIP.prompt().use("food").text("So?"),
    ]
    found = [torch.cat(llm.distributions(prompts, FORCED, reuse=reuse)) for reuse in policies for _ in range(2)]
    llm.shutdown()
    return torch.stack(found).unflatten(0, (len(policies), 2))


def check(kept: str, name: str, policies: Sequence[str], monkeypatch) -> None:
    found = distributions(kept, name, policies)
    pretend(monkeypatch)
    expected, unrounded = (distributions(each, name, policies) for each in (kept, "auto"))
    off, rounding = (found - expected).abs(), (expected - unrounded).abs()
    assert off.max() < 0.2 * rounding.max()
    assert off.mean() < 0.02 * rounding.mean()
    assert rounding.mean() < (0.02 if kept == "int8" else 0.2)


@pytest.mark.long
@pytest.mark.parametrize("kept", list(NARROW))
def test_answers_equal_attention_over_rounded_values(kept, monkeypatch):
    check(kept, "llama", ["anchored+linked:3"], monkeypatch)


@pytest.mark.triton
@pytest.mark.parametrize(
    ("kept", "name", "policies"),
    [("int8", "gpt2", ["exact", "isolated"]), ("fp8", "qwen2-mixed", ["isolated", "anchored+query:0.3"])],
)
def test_answers_of_other_families(kept, name, policies, monkeypatch):
    check(kept, name, policies, monkeypatch)


PARTS = [
    Part.of(30, 1, (Item(SlotRange(0, 20), 0, 7), Item(SlotRange(20, 5), 2, 1)), (SlotRange(40, 1),)),
    Part.of(9, 3, (Item(SlotRange(0, 9), 0),), (SlotRange(41, 3),)),
]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kept", list(NARROW))
def test_pytorch_on_a_device_reads_them_as_the_kernels_do(kept, shared):
    """shared: as in latent attention, where the values are the keys, and have their scales."""
    layer = with_rotary(Layer())
    query, key, value = fresh_of(layer, 4)
    outputs = []
    for using in (backend(), TorchBackend()):
        pool = DeviceStorage(
            [LayerShape(layer.kv_heads, layer.head_dim, shared)], NARROW[kept], 50, torch.device("cpu")
        )
        numbers = torch.randn(2, layer.kv_heads, 50, layer.head_dim, generator=torch.Generator().manual_seed(0))
        pool.write(0, SlotRange(0, 50), numbers[0], numbers[0 if shared else 1])
        fresh = (key, key if shared else value)
        outputs.append(using.attend(query, *fresh, pool, build_plan(PARTS), 0, layer.options))
    torch.testing.assert_close(*outputs, atol=2e-5, rtol=2e-5)
    assert outputs[0].abs().mean() > 0.1


def test_gpu_without_fp8_is_rejected_with_a_remedy(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    using = backend()
    using.device = torch.device("cuda", 0)
    with raises("parameter.unavailable_dtype", ParameterError, names="8.9"):
        using.make_pool([LayerShape(1, 16)], torch.float8_e4m3fn, 16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("inlay.attention.triton.backend.DeviceStorage", lambda *made: made)
    assert using.make_pool([LayerShape(1, 16)], torch.float8_e4m3fn, 16)[1] == torch.float8_e4m3fn
