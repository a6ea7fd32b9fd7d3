"""Attention in plain fp32 PyTorch, one row at a time: the specification that every backend is tested against.

It reads the plan's parts, not its groups, so that a mistake in the grouping shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inlay.attention.backend import AttentionOptions
from inlay.attention.plan import Part, Plan
from inlay.attention.storage import KVStorage, LayerShape


class ReferenceBackend:
    """Slow, simple and right."""

    name = "reference"
    device = torch.device("cpu")
    scratch_bytes = 0

    def make_pool(self, layers: Sequence[LayerShape], dtype: torch.dtype, slots: int) -> KVStorage:
        """See Backend.make_pool."""
        return KVStorage(layers, dtype, slots)

    def prepare(self, plan: Plan) -> None:
        """See Backend.prepare. Parts are read as they are."""

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


def _attend_row(
    query: Tensor, part: Part, position: int, pool: KVStorage, layer: int, options: AttentionOptions
) -> Tensor:  # (heads, head_dim)
    scores, values = [], []
    for first, length, start, shift, masked in part.items.T.tolist():
        seen_at = torch.arange(start, start + length) + shift
        visible = seen_at <= position if masked else torch.ones(length, dtype=torch.bool)
        if options.window is not None:
            visible &= position - seen_at < options.window
        slots = torch.arange(first, first + length)[visible]
        distance = position - seen_at[visible]
        repeat = query.shape[0] // pool.keys[layer].shape[0]
        keys = pool.keys[layer][:, slots].float().repeat_interleave(repeat, 0)  # (heads, keys, head_dim)
        values.append(pool.values[layer][:, slots].float().repeat_interleave(repeat, 0))
        score = torch.einsum("hd,hkd->hk", _turned(query, shift, options), keys) * options.scale
        if options.softcap is not None:
            score = options.softcap * torch.tanh(score / options.softcap)
        if options.slopes is not None:
            score = score - options.slopes.float()[:, None] * distance
        scores.append(score)
    joined = torch.cat(scores, 1)
    if options.sinks is not None:
        joined = torch.cat((joined, options.sinks.float()[:, None]), 1)
    weights = torch.softmax(joined, 1)[:, : sum(v.shape[1] for v in values)]
    return torch.einsum("hk,hkd->hd", weights, torch.cat(values, 1))


def _turned(query: Tensor, shift: int, options: AttentionOptions) -> Tensor:
    if shift == 0:
        return query
    assert options.rotary is not None, "a shift needs positions that move"
    cos, sin = options.rotary.angles([shift])
    return options.rotary.turn(query, cos, sin)
