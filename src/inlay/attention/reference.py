"""Attention in plain fp32 PyTorch, one row at a time: the specification that every backend is tested against.

It reads the plan's spans, not its work items, so that a mistake in the grouping shows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inlay.attention.backend import AttentionOptions
from inlay.attention.plan import Plan, Span, pieces_at
from inlay.kv.pool import KVPool, cut


class ReferenceBackend:
    """Slow, simple and right."""

    name = "reference"

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, pool: KVPool, plan: Plan, layer: int, options: AttentionOptions
    ) -> Tensor:
        """See Backend.attend."""
        pool.write(layer, plan.slots, key, value)
        rows: list[Tensor] = []
        for span in plan.spans:
            for index in range(span.length):
                rows.append(_attend_row(query[:, len(rows)].float(), span, index, pool, layer, options))
        return torch.stack(rows).to(query.dtype)


def _attend_row(
    query: Tensor, span: Span, index: int, pool: KVPool, layer: int, options: AttentionOptions
) -> Tensor:  # (heads, head_dim)
    own = pieces_at(cut(span.slots, 0, index + 1), span.start)
    position = span.start + index
    scores, values = [], []
    for piece in (*span.context, *own):
        slots = slice(piece.run.first, piece.run.end)
        repeat = query.shape[0] // pool.keys[layer].shape[0]
        keys = pool.keys[layer][:, slots].float().repeat_interleave(repeat, 0)  # (heads, keys, head_dim)
        values.append(pool.values[layer][:, slots].float().repeat_interleave(repeat, 0))
        score = torch.einsum("hd,hkd->hk", _turned(query, piece.shift, options), keys) * options.scale
        if options.softcap is not None:
            score = options.softcap * torch.tanh(score / options.softcap)
        distance = position - (torch.arange(piece.start, piece.end) + piece.shift)
        if options.slopes is not None:
            score = score - options.slopes.float()[:, None] * distance
        if options.window is not None:
            score = score.masked_fill(distance >= options.window, -torch.inf)
        scores.append(score)
    joined = torch.cat(scores, 1)
    if options.sinks is not None:
        joined = torch.cat((joined, options.sinks.float()[:, None]), 1)
    weights = torch.softmax(joined, 1)[:, : sum(v.shape[1] for v in values)]
    return torch.einsum("hk,hkd->hd", weights, torch.cat(values, 1))


def _turned(query: Tensor, shift: int, options: AttentionOptions) -> Tensor:
    if shift == 0:
        return query
    assert options.rotary is not None, "a shift needs rotary positions"
    cos, sin = options.rotary.angles([shift])
    return options.rotary.turn(query, cos, sin)
