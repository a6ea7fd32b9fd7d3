"""Plain causal passes through libraries, with stand-ins that have the same interface."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from inlay.attention.plan import Item, Part, build_plan
from inlay.attention.triton import plain
from inlay.attention.triton.plain import LIBRARIES, PlainPart, PlainPrefill, plain_parts
from inlay.slots import SlotRange
from tests.model.attention.triton.cases import backend, fp16, interpreted, same
from tests.unit.attention.kernel_cases import Layer, bf16, expected_of, fp32, fresh_of, pool_for

pytestmark = interpreted

LONG = Part.of(40, 130, (Item(SlotRange(8, 40), 0),), (SlotRange(48, 130),))
FIRST = Part.of(0, 140, (), (SlotRange(200, 140),))


def attention(query: Tensor, keys: Tensor, values: Tensor, scale: float, back: int, softcap: float) -> Tensor:
    """Causal attention, aligned to the last key. query: (rows, heads, head_dim), keys: (keys, kv_heads, head_dim)."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = (each.float().repeat_interleave(groups, dim=1) for each in (keys, values))
    scores = torch.einsum("rhd,khd->hrk", query.float(), keys) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    behind = torch.arange(len(query))[:, None] + len(keys) - len(query) - torch.arange(len(keys))
    hidden = (behind < 0) | ((behind > back) if back >= 0 else False)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hrk,khd->rhd", weights, values).to(query.dtype)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    """As in FlashAttention 2: (batch, rows, heads, head_dim)."""
    assert causal
    assert softmax_scale is not None
    assert window_size == (-1, -1) or window_size[1] == 0
    return attention(q[0], k[0], v[0], softmax_scale, window_size[0], softcap)[None]


def single_prefill_with_kv_cache(
    q: Tensor, k: Tensor, v: Tensor, scale_q: Any = None, scale_k: Any = None, scale_v: Any = None, o_dtype: Any = None,
    custom_mask: Any = None, packed_custom_mask: Any = None, causal: bool = False, kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False, sm_scale: float | None = None,
    window_left: int = -1, logits_soft_cap: float | None = None, rope_scale: Any = None, rope_theta: Any = None,
    backend: str = "auto", return_lse: bool = False,
) -> Tensor:  # fmt: skip
    """As in FlashInfer."""
    assert causal
    assert kv_layout == "HND"
    assert sm_scale is not None
    return attention(q, k.transpose(0, 1), v.transpose(0, 1), sm_scale, window_left, logits_soft_cap or 0.0)


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=flash_attn_func))
    flashinfer = SimpleNamespace(single_prefill_with_kv_cache=single_prefill_with_kv_cache)
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)


def chooser(**seconds: float) -> PlainPrefill:
    """A chooser with given times, in the order in which they are measured: ours first."""
    times = iter(seconds.values())
    return PlainPrefill({name: LIBRARIES[name][1] for name in list(seconds)[1:]}, lambda call: next(times))


LAYER = Layer(stored=bf16, fresh=bf16)
OPTIONS = LAYER.options


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize(
    "options", [OPTIONS, replace(OPTIONS, window=50, softcap=3.0)], ids=["plain", "window and softcap"]
)
def test_a_plain_pass_through_a_library_is_the_references(name, options):
    layer, parts = replace(LAYER, options=options), [LONG, FIRST]
    pool, fresh = pool_for(layer, parts), fresh_of(layer, 270)
    using = backend(plain=chooser(**{"ours": 2.0, name: 1.0}))
    for _ in range(2):  # measured, and then as it was chosen
        found = using.attend(*fresh, pool, build_plan(parts), 0, options)
        same(layer, found, expected_of(layer, parts, fresh, pool))


def answered(using: PlainPrefill, ours: Tensor, layer: Layer = LAYER) -> Tensor:
    parts = [FIRST]
    pool, (query, key, value) = pool_for(layer, parts), fresh_of(layer, 140)
    pool.write(0, SlotRange(200, 140), key, value)
    return using.attend(
        query, pool.keys[0], pool.values[0], plain_parts(build_plan(parts)), layer.options, lambda: ours
    )


def right(layer: Layer = LAYER) -> Tensor:
    parts = [FIRST]
    return expected_of(layer, parts, fresh_of(layer, 140), pool_for(layer, parts))


def test_the_fastest_is_taken_and_measured_once(caplog):
    with caplog.at_level(logging.INFO):
        using = chooser(ours=2.0, FlashAttention=1.0, FlashInfer=0.5)
        ours = right()
        assert answered(using, ours) is not ours
        assert answered(using, ours) is not ours
        slow = chooser(ours=1.0, FlashAttention=2.0, FlashInfer=1.5)
        assert answered(slow, ours) is ours
    assert [record.getMessage() for record in caplog.records] == [
        "plain prefills of 140 rows run in FlashInfer",
        "plain prefills of 140 rows run in Triton's kernels",
    ]


def test_library_that_differs_or_fails_is_not_used(monkeypatch, caplog):
    ours = right()
    using = chooser(ours=2.0, FlashAttention=1.0)
    assert answered(using, ours + 0.5).equal(ours + 0.5)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    assert answered(chooser(ours=2.0, FlashAttention=1.0), ours) is ours
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("FlashAttention differs from Triton's kernels by ")
    assert said[1].startswith("FlashAttention cannot compute plain prefills here (")


def test_plain_parts_are_detected():
    assert plain_parts(build_plan([LONG, FIRST])) == [PlainPart(0, 130, 8, 170), PlainPart(130, 140, 200, 140)]
    own = (SlotRange(300, 130),)
    for part in (
        Part.of(40, 127, (Item(SlotRange(8, 40), 0),), (SlotRange(48, 127),)),  # too short
        Part.of(40, 130, (Item(SlotRange(8, 40), 0),), own),  # slots apart
        Part.of(45, 130, (Item(SlotRange(260, 40), 0),), own),  # positions apart
        Part.of(40, 130, (Item(SlotRange(260, 40), 0, 5),), own),  # at a shift
        Part.of(40, 130, (Item(SlotRange(260, 40), 100),), own),  # keys of later positions
        Part.at(torch.arange(130).mul(2).numpy(), (), own),
    ):
        assert plain_parts(build_plan([FIRST, part])) is None
    assert plain_parts(build_plan([Part.of(40, 1, (), (SlotRange(8, 1),))])) is None


def test_plain_layers_are_detected():
    using = chooser(ours=1.0, FlashAttention=1.0)

    def takes(layer: Layer, **options: Any) -> bool:
        pool, (query, _, _) = pool_for(layer, [FIRST]), fresh_of(layer, 140)
        return using.takes(query, pool.keys[0], pool.values[0], replace(OPTIONS, **options))

    assert takes(LAYER)
    assert takes(Layer(stored=fp16, fresh=fp16), window=5)
    assert not takes(Layer(stored=fp32, fresh=fp32))
    assert not takes(Layer(stored=bf16, fresh=fp32))
    assert not takes(LAYER, sinks=torch.zeros(4))
    assert not takes(LAYER, slopes=torch.zeros(4))
    assert not takes(Layer(head_dim=512, stored=bf16, fresh=bf16))


def test_libraries_are_looked_for_on_a_gpu_alone(monkeypatch):
    monkeypatch.setattr(plain, "find_spec", lambda name: object() if name == "flashinfer" else None)
    assert plain.installed(torch.device("cpu")) is None
    found = plain.installed(torch.device("cuda"))
    assert found is not None
    assert list(found.libraries) == ["FlashInfer"]
    monkeypatch.setattr(plain, "find_spec", lambda name: None)
    assert plain.installed(torch.device("cuda")) is None
