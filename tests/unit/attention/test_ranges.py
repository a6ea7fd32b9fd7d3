"""Every backend against full attention under an explicit mask.

Covers any ranges of stored segments, shifts, windows, slots left out and recomputed by rows at any place, and several
requests in one pass.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inlay.attention import cpu
from inlay.attention.backend import AttentionOptions, Backend
from inlay.attention.cpu import CpuBackend
from inlay.attention.plan import Item, Part, build_plan
from inlay.attention.registry import get_backend
from inlay.attention.rope import Rotary
from inlay.attention.storage import LayerShape
from inlay.slots import SlotRange
from tests.generated import examples

HEADS, KV_HEADS, HEAD_DIM, SLOTS = 4, 2, 8, 1024
ROTARY = Rotary(100.0 ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))
BACKENDS = ("reference", "torch", *(("cpu", "sliced") if cpu.available() else ()))


def backend_of(name: str) -> Backend:
    """By name; "sliced" is the kernel with room for the partial results of hardly one row."""
    return CpuBackend(most_partials=1) if name == "sliced" else get_backend(name)


@dataclass
class Key:
    """One key of a request: its slot, the position at which it is read, and the shift from where it was computed."""

    slot: int
    position: int
    shift: int


@dataclass
class Request:
    """A part, and the same as single keys: those of rows and those that are stored, all of them read by position."""

    part: Part
    stored: list[Key]
    rows: list[Key]


class Drawn:
    """Random requests over random segments; a request's tokens stand at positions from 0 on without a gap."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.slot = 0
        self.segments = [(self.take(n), n, self.draw.randint(0, 90)) for n in self.lengths(4, 60)]
        self.requests = [self.request() for _ in range(self.draw.randint(1, 4))]

    def lengths(self, most: int, longest: int) -> list[int]:
        return [self.draw.randint(1, longest) for _ in range(self.draw.randint(1, most))]

    def take(self, tokens: int) -> int:
        """So many slots side by side, sometimes with a gap after them."""
        first = self.slot
        self.slot += tokens + self.draw.choice([0, 0, 3])
        return first

    def request(self) -> Request:
        """Ranges of segments with new text between them; some of their tokens are recomputed."""
        context, stored, fresh, at = list[Item](), list[Key](), list[int](), 0
        for first, length, start in self.draw.sample(self.segments, self.draw.randint(0, len(self.segments))):
            fresh += range(at, at + self.draw.choice([0, 0, 2]))
            at = fresh[-1] + 1 if fresh and fresh[-1] >= at else at
            skip = self.draw.randrange(length)
            kept = self.draw.randint(1, length - skip)
            recomputed = sorted(self.draw.sample(range(kept), self.draw.choice([0, kept // 4, kept // 2])))
            left_out = tuple(first + skip + n for n in recomputed)
            shift = at - (start + skip)
            context.append(Item(SlotRange(first + skip, kept), start + skip, shift, masked=True, left_out=left_out))
            stored += [Key(first + skip + n, at + n, shift) for n in range(kept) if n not in recomputed]
            fresh += [at + n for n in recomputed]
            at += kept
        fresh += range(at, at + self.draw.randint(1, 70 if self.draw.random() < 0.2 else 5))
        ranges, left = [], len(fresh)
        while left:
            length = self.draw.randint(1, left)
            ranges.append(SlotRange(self.take(length), length))
            left -= length
        slots = [slot for each in ranges for slot in range(each.first, each.end)]
        rows = [Key(slot, position, 0) for slot, position in zip(slots, fresh, strict=True)]
        part = Part.at(np.array(fresh), context, ranges)
        if len(fresh) > 1 and self.draw.random() < 0.3:  # some of it in a pass before this one
            done = self.draw.randint(1, len(fresh) - 1)
            part, stored, rows = part.split(done)[1], stored + rows[:done], rows[done:]
        return Request(part, stored, rows)


def turned(tensor: Tensor, positions: Tensor) -> Tensor:  # (heads, tokens, head_dim) to the positions
    cos, sin = ROTARY.angles((-positions).tolist())
    return ROTARY.turn(tensor, cos, sin)


def expected(request: Request, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """Full attention of one request in plain torch. keys: without rotation, by slot. query: without rotation."""
    read = [*request.stored, *request.rows]
    slots, positions = torch.tensor([k.slot for k in read]), torch.tensor([k.position for k in read])
    rows = torch.tensor([row.position for row in request.rows])
    group = HEADS // KV_HEADS
    key = turned(keys[:, slots], positions).repeat_interleave(group, 0)
    scores = turned(query, rows) @ key.transpose(1, 2) * options.scale
    distance = rows[:, None] - positions[None]
    seen = distance >= 0 if options.window is None else (distance >= 0) & (distance < options.window)
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
    return (weights @ values[:, slots].repeat_interleave(group, 0)).transpose(0, 1)


@pytest.mark.parametrize("backend", BACKENDS)
@given(seed=st.integers(0, 2**32), window=st.sampled_from([None, None, 1, 12, 60]), share=st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_any_ranges_equal_masked_full_attention(backend, seed, window, share):
    drawn = Drawn(seed)
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(KV_HEADS, SLOTS, HEAD_DIM, generator=generator) for _ in range(2))
    options = AttentionOptions(scale=0.4, window=window, rotary=ROTARY)
    working = backend_of(backend)
    pool = working.make_pool([LayerShape(KV_HEADS, HEAD_DIM)], torch.float32, SLOTS)
    for tensor in (pool.keys[0], pool.values[0]):
        tensor.fill_(torch.nan)  # slots without stored tokens must not be read
    for request in drawn.requests:
        slots = torch.tensor([key.slot for key in request.stored], dtype=torch.long)
        made_at = torch.tensor([key.position - key.shift for key in request.stored], dtype=torch.long)
        pool.keys[0][:, slots], pool.values[0][:, slots] = turned(keys[:, slots], made_at), values[:, slots]
    rows = [row for request in drawn.requests for row in request.rows]
    slots, positions = torch.tensor([row.slot for row in rows]), torch.tensor([row.position for row in rows])
    query = torch.randn(HEADS, len(rows), HEAD_DIM, generator=generator)
    plan = build_plan([request.part for request in drawn.requests], share=share)
    fresh = turned(query, positions), turned(keys[:, slots], positions), values[:, slots]
    output = working.attend(*fresh, pool, plan, 0, options)
    at = 0
    for request in drawn.requests:
        mine = slice(at, at + len(request.rows))
        wanted = expected(request, query[:, mine], keys, values, options)
        torch.testing.assert_close(output[mine], wanted, atol=1e-4, rtol=1e-4)
        at = mine.stop


@pytest.mark.skipif(not cpu.available(), reason="installed without the compiled kernel")
def test_partial_results_stay_within_their_bound(monkeypatch):
    """Many short parts that share a segment leave partial results of every row; in slices they take what is allowed."""
    shared = Item(SlotRange(0, 64), 0)
    parts = [Part.of(64, 40, (shared,), (SlotRange(64 + 40 * n, 40),)) for n in range(24)]
    heads, head_dim, rows = 8, 64, 24 * 40
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(n, rows, head_dim, generator=generator) for n in (heads, 2, 2))
    outputs, used = [], []
    workspaces, make = [], cpu.kernel.Workspace

    def recorded(most: int) -> Any:
        workspaces.append(make(most))
        return workspaces[-1]

    monkeypatch.setattr(cpu.kernel, "Workspace", recorded)
    for most in (2**26, 2**20, 2**16):
        backend = CpuBackend(most_partials=most)
        pool = backend.make_pool([LayerShape(2, head_dim)], torch.float32, 64 + rows)
        pool.keys[0][:, :64] = pool.values[0][:, :64] = torch.linspace(-1, 1, 64)[None, :, None]
        outputs.append(backend.attend(query, key, value, pool, build_plan(parts), 0, AttentionOptions(0.1)))
        used.append(workspaces[-1].bytes)
        assert used[-1] <= backend.scratch_bytes
    assert used[0] > 2 * rows * heads * head_dim * 4
    assert used[1] - used[2] < 2**20
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], atol=1e-5, rtol=0)
