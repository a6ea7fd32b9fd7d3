"""Attention in plain fp32 PyTorch, one row at a time: the specification that every backend is tested against.

It reads the plan's parts and not its groups, so that tests find mistakes in the grouping.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inlay.attention.backend import AttentionOptions
from inlay.attention.plan import LENGTH, Part, Plan
from inlay.attention.storage import KVStorage, LayerShape


class ReferenceBackend:
    """A slow and simple backend for tests."""

    name = "reference"
    device = torch.device("cpu")
    scratch_bytes = 0

    def make_pool(self, layers: Sequence[LayerShape], dtype: torch.dtype, slots: int) -> KVStorage:
        """See Backend.make_pool."""
        return KVStorage(layers, dtype, slots)

    def prepare(self, plan: Plan) -> None:
        """See Backend.prepare. Does nothing, because parts are read directly."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pool: KVStorage,
        plan: Plan,
        layer: int,
        options: AttentionOptions,
    ) -> Tensor:
        """See Backend.attend."""
        pool.write(layer, plan.slots, key, value)
        rows: list[Tensor] = []
        for part in plan.parts:
            for position in part.positions.tolist():
                rows.append(_attend_row(query[:, len(rows)].float(), part, position, pool, layer, options))
        return torch.stack(rows).to(query.dtype)

    def attention_mass(
        self, query: Tensor, pool: KVStorage, part: Part, layer: int, options: AttentionOptions
    ) -> Tensor:
        """See Backend.attention_mass."""
        mass = torch.zeros(int(part.items[LENGTH].sum()))
        for row, position in enumerate(part.positions.tolist()):
            weights, _, seen = _weights(query[:, row].float(), part, position, pool, layer, options)
            mass[seen] += weights.sum(0)
        return mass


def _attend_row(
    query: Tensor, part: Part, position: int, pool: KVStorage, layer: int, options: AttentionOptions
) -> Tensor:  # (heads, head_dim)
    weights, slots, _ = _weights(query, part, position, pool, layer, options)
    values = pool.read_values(layer, slots).float().repeat_interleave(_repeat(query, pool, layer), 0)
    return torch.einsum("hk,hkd->hd", weights, values)


def _weights(
    query: Tensor, part: Part, position: int, pool: KVStorage, layer: int, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor]:  # (heads, keys seen), (keys seen,), (keys,) bool: which keys are seen
    scores, read, seen = [], [], []
    for first, length, start, shift, masked in part.items.T.tolist():
        seen_at = torch.arange(start, start + length) + shift
        visible = seen_at <= position if masked else torch.ones(length, dtype=torch.bool)
        if options.window is not None:
            visible &= position - seen_at < options.window
        slots = torch.arange(first, first + length)[visible]
        distance = position - seen_at[visible]
        keys = pool.read_keys(layer, slots).float().repeat_interleave(_repeat(query, pool, layer), 0)
        score = torch.einsum("hd,hkd->hk", _turned(query, shift, options), keys) * options.scale
        if options.softcap is not None:
            score = options.softcap * torch.tanh(score / options.softcap)
        if options.slopes is not None:
            score = score - options.slopes.float()[:, None] * distance
        scores.append(score)
        read.append(slots)
        seen.append(visible)
    joined = torch.cat(scores, 1)
    if options.sinks is not None:
        joined = torch.cat((joined, options.sinks.float()[:, None]), 1)
    slots = torch.cat(read)
    return torch.softmax(joined, 1)[:, : slots.numel()], slots, torch.cat(seen)


def _repeat(query: Tensor, pool: KVStorage, layer: int) -> int:
    return query.shape[0] // pool.keys[layer].shape[0]


def _turned(query: Tensor, shift: int, options: AttentionOptions) -> Tensor:
    if shift == 0:
        return query
    assert options.rotary is not None, "a shift needs positions that move"
    cos, sin = options.rotary.angles([shift])
    return options.rotary.turn(query, cos, sin)
