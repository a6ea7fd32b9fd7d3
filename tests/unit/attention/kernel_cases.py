"""Random passes for the compiled kernel, and their results by the specification."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from inlay.attention.backend import AttentionOptions
from inlay.attention.cpu import CpuBackend, instruction_sets
from inlay.attention.plan import Item, Part, build_plan
from inlay.attention.reference import ReferenceBackend
from inlay.attention.rope import Rotary
from inlay.attention.storage import KVStorage, LayerShape, quantized
from inlay.slots import SlotRange

#: Every version of the kernel that runs on this processor.
every_set = pytest.mark.parametrize("instruction_set", instruction_sets())
pytestmark = pytest.mark.skipif(not instruction_sets(), reason="installed without the compiled kernel")

fp32, bf16, int8 = torch.float32, torch.bfloat16, torch.int8


_PLAIN = AttentionOptions(scale=0.25)


@dataclass(frozen=True)
class Layer:
    """One layer's attention. stored: dtype of the pool; fresh: of queries, new keys and new values."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    stored: torch.dtype = fp32
    fresh: torch.dtype = fp32
    chunk: int = 16
    options: AttentionOptions = _PLAIN

    @property
    def tolerance(self) -> float:
        return 2e-5 if self.fresh == fp32 else 3e-2


def rotary(head_dim: int, rotated: int | None = None, *, interleaved: bool = False) -> Rotary:
    rotated = head_dim if rotated is None else rotated
    return Rotary(1000.0 ** (-torch.arange(0, rotated, 2).float() / max(rotated, 1)), interleaved)


def with_rotary(layer: Layer, rotated: int | None = None, *, interleaved: bool = False) -> Layer:
    turn = rotary(layer.head_dim, rotated, interleaved=interleaved)
    return replace(layer, options=replace(layer.options, scale=layer.head_dim**-0.5, rotary=turn))


def end_of(parts: Sequence[Part]) -> int:
    """The slot after the last one that a pass reads or writes."""
    return max(run.end for part in parts for run in part.ranges)


def normal(*shape: int, dtype: torch.dtype = fp32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pool_for(layer: Layer, parts: Sequence[Part]) -> KVStorage:
    """A pool that ends with the chunk of the last slot used, and holds NaN wherever nothing is stored."""
    slots = -(-end_of(parts) // layer.chunk) * layer.chunk
    pool = KVStorage([LayerShape(layer.kv_heads, layer.head_dim)], layer.stored, slots)
    stored = torch.zeros(slots, dtype=torch.bool)
    for part in parts:
        for run in part.ranges:
            stored[run.first : run.end] = True
    for part in parts:
        stored[part.slots] = False
    for seed, tensor in enumerate((pool.keys[0], pool.values[0])):
        numbers = normal(layer.kv_heads, slots, layer.head_dim, seed=seed).masked_fill(
            ~stored[None, :, None], torch.nan
        )
        tensor.copy_(quantized(numbers) if layer.stored == int8 else numbers)
    return pool


def fresh_of(layer: Layer, rows: int, seed: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value of a pass."""
    query = normal(layer.heads, rows, layer.head_dim, dtype=layer.fresh, seed=seed)
    key, value = (normal(layer.kv_heads, rows, layer.head_dim, dtype=layer.fresh, seed=seed + n) for n in (1, 2))
    return query, key, value


def expected_of(layer: Layer, parts: Sequence[Part], fresh: tuple[Tensor, Tensor, Tensor], pool: KVStorage) -> Tensor:
    return ReferenceBackend().attend(*fresh, pool, build_plan(parts), 0, layer.options)


def check(layer: Layer, parts: Sequence[Part], instruction_set: str | None = None, *, share: bool = True) -> None:
    """The kernel's output must be the reference's."""
    plan, pool = build_plan(parts, share=share), pool_for(layer, parts)
    fresh = fresh_of(layer, plan.rows)
    output = CpuBackend(instruction_set).attend(*fresh, pool, plan, 0, layer.options)
    same(layer, output, expected_of(layer, parts, fresh, pool))


def same(layer: Layer, output: Tensor, expected: Tensor) -> None:
    assert output.dtype == layer.fresh
    torch.testing.assert_close(output.float(), expected.float(), atol=layer.tolerance, rtol=layer.tolerance)


class Asked(NamedTuple):
    """The arguments of Part.of."""

    start: int
    length: int
    context: tuple[Item, ...]
    slots: tuple[SlotRange, ...]


def random_parts(seed: int, *, decode: bool = False, longest: int = 9, keys: int = 40) -> list[Part]:
    """See ``random_asked``."""
    return [Part.of(*asked) for asked in random_asked(seed, decode=decode, longest=longest, keys=keys)]


def random_asked(seed: int, *, decode: bool = False, longest: int = 9, keys: int = 40) -> list[Asked]:
    """Parts that share stored segments in any combination, whole or in part, at any shift.

    longest: of a part, in rows. keys: of a segment at most. After the slot of a decode step eight are free.
    """
    draw = random.Random(seed)
    segments, slot = [], 0
    for _ in range(draw.randint(1, 5)):
        segments.append((slot, draw.randint(1, keys), draw.randint(0, 200)))
        slot += segments[-1][1] + draw.choice([0, 0, 5])
    asked = []
    for _ in range(draw.randint(1, 6)):
        context = []
        for first, length, start in draw.choices(segments, k=draw.randint(0, 4)):
            skip = draw.randrange(length) if draw.random() < 0.4 else 0
            kept = draw.randint(1, length - skip) if draw.random() < 0.4 else length - skip
            shift = draw.choice([0, 0, 3, -7, 50])
            context.append(Item(SlotRange(first + skip, kept), start + skip, shift))
        length = 1 if decode else draw.randint(1, longest)
        cuts = sorted(draw.sample(range(1, length), min(length - 1, draw.randint(0, 2))))
        slots = []
        for begin, end in zip([0, *cuts], [*cuts, length], strict=True):
            slots.append(SlotRange(slot, end - begin))
            slot += end - begin + (8 if decode else draw.choice([0, 3]))
        asked.append(Asked(draw.randint(0, 300), length, tuple(context), tuple(slots)))
    return asked


def one_on(part: Part) -> Part:
    """The next decode step of a sequence."""
    return part.next(int(part.slots[0]) + 1)


def threads(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Plans made from here on are worked on by that many threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
