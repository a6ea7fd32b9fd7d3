"""Attention with PyTorch's flash kernel for CPUs, whose log-sum-exp makes one partial result one call.

For installs without the compiled kernel (cpu.py).

Pass 1 turns a block's queries, once for every shift that its work items ask for.
Pass 2 runs the kernel on every work item: the keys are read in the pool, where they lie.
Pass 3 merges the block's partial results through their log-sum-exp, in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from inlay.attention.backend import AttentionOptions
from inlay.attention.blocks import Block, Blocks, WorkItem
from inlay.attention.plan import Plan
from inlay.kv.pool import KVPool

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass(frozen=True, slots=True)
class _View:
    """The part of a work item that its rows see.

    causal: row i sees the first i + 1 keys; only where there is no mask.
    mask: (rows, keys) bool, True where a row sees a key; None where all rows see all, or the causal rule says it.
    distance: (rows, keys) int64, how far behind a row's position a key stands; only for ALiBi.
    """

    slots: slice
    causal: bool
    mask: Tensor | None
    distance: Tensor | None = None


class TorchBackend:
    """PyTorch's flash attention, a call per work item."""

    name = "torch"

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, pool: KVPool, plan: Plan, layer: int, options: AttentionOptions
    ) -> Tensor:
        """See Backend.attend."""
        pool.write(layer, plan.slots, key, value)
        output, lse = _attend_blocks(query, pool, plan, layer, options)
        if options.sinks is not None:
            total = torch.logaddexp(lse, options.sinks.float()[:, None])
            output = output * torch.exp(lse - total).unsqueeze(-1)
        return output.transpose(0, 1).to(query.dtype)


def _attend_blocks(
    query: Tensor, pool: KVPool, plan: Plan, layer: int, options: AttentionOptions
) -> tuple[Tensor, Tensor]:  # (heads, rows, head_dim), (heads, rows) fp32, natural log
    if TorchBackend.name not in plan.work:
        plan.work[TorchBackend.name] = Blocks(plan)
    blocks = cast(Blocks, plan.work[TorchBackend.name]).blocks
    if len(blocks) == 1:
        return _attend_block(query, pool, plan, blocks[0], layer, options)
    heads, rows, head_dim = query.shape
    output = torch.zeros(heads, rows, head_dim)
    lse = torch.full((heads, rows), -torch.inf)
    for block in blocks:
        part, part_lse = _attend_block(query[:, block.rows], pool, plan, block, layer, options)
        before = lse[:, block.rows]
        total = _finite(torch.logaddexp(before, part_lse))
        old, new = torch.exp(before - total).unsqueeze(-1), torch.exp(part_lse - total).unsqueeze(-1)
        output[:, block.rows] = output[:, block.rows] * old + part * new
        lse[:, block.rows] = torch.logaddexp(before, part_lse)
    return output, lse


def _attend_block(
    query: Tensor, pool: KVPool, plan: Plan, block: Block, layer: int, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    turned = _turn(query, block, options)
    partial = _flash_partial if options.softcap is None and options.slopes is None else _plain_partial
    parts = []
    for item in block.items:
        view = _view(plan, block, item, options)
        if view is not None:
            keys, values = pool.keys[layer][:, view.slots], pool.values[layer][:, view.slots]
            parts.append(partial(turned[item.shift], keys, values, view, options))
    if not parts:  # every key lies outside the window
        return torch.zeros(query.shape), torch.full(query.shape[:2], -torch.inf)
    if len(parts) == 1:
        return parts[0]
    return _merge(parts)


def _merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Partial results of the same rows as one, in fp32."""
    lses = torch.stack([lse for _, lse in parts])  # (items, heads, rows)
    highest = _finite(lses.amax(0))
    weights = (lses - highest).exp_()
    sums = weights.sum(0)
    weights = (weights / sums.clamp_min(torch.finfo(torch.float32).tiny)).unsqueeze(-1)
    # One after the other: a stack of all outputs is large enough for the allocator to fetch fresh pages every time.
    output = parts[0][0] * weights[0]
    for (part, _), weight in zip(parts[1:], weights[1:], strict=True):
        output.addcmul_(part.float(), weight)
    return output, highest + sums.log()


def _turn(query: Tensor, block: Block, options: AttentionOptions) -> dict[int, Tensor]:
    """The block's queries as each shift sees them, by shift."""
    shifts = sorted({item.shift for item in block.items} - {0})
    turned = {0: query}
    if shifts:
        assert options.rotary is not None, "a shift needs rotary positions"
        memo = ("angles", id(options.rotary))
        if memo not in block.memo:
            block.memo[memo] = options.rotary.angles(shifts)
        cos, sin = cast(tuple[Tensor, Tensor], block.memo[memo])
        stacked = options.rotary.turn(query, cos[:, None, None], sin[:, None, None]).to(query.dtype)
        turned.update(zip(shifts, stacked, strict=True))
    return turned


def _flash_partial(
    query: Tensor, keys: Tensor, values: Tensor, view: _View, options: AttentionOptions
) -> tuple[Tensor, Tensor]:  # (heads, rows, head_dim), (heads, rows) fp32
    heads, rows, head_dim = query.shape
    mask = view.mask
    if mask is None and not view.causal:  # heads that share keys become rows, so that the kernel packs a key once
        query = query.reshape(keys.shape[0], -1, head_dim)
    additive = None if mask is None else torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    output, lse = _flash(
        query[None], keys[None], values[None], is_causal=view.causal, attn_mask=additive, scale=options.scale
    )
    output, lse = output.reshape(heads, rows, head_dim), lse.reshape(heads, rows)
    if mask is not None:  # a row that sees none of these keys has no say
        blind = ~mask.any(1)
        output = output.masked_fill(blind[:, None], 0.0)
        lse = lse.masked_fill(blind, -torch.inf)
    return output, lse


def _plain_partial(
    query: Tensor, keys: Tensor, values: Tensor, view: _View, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """The same in separate steps, since the flash kernel knows neither soft-cap nor a bias for each head."""
    heads, rows, head_dim = query.shape
    grouped = query.reshape(keys.shape[0], -1, rows, head_dim).float()
    scores = grouped @ keys.float().transpose(1, 2).unsqueeze(1) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.slopes is not None:
        assert view.distance is not None
        scores = scores - options.slopes.float().reshape(keys.shape[0], -1, 1, 1) * view.distance
    mask = torch.ones(rows, keys.shape[1], dtype=torch.bool).tril() if view.causal else view.mask
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    output = torch.exp(scores - _finite(lse).unsqueeze(-1)) @ values.float().unsqueeze(1)
    return output.reshape(heads, rows, head_dim), lse.reshape(heads, rows)


def _view(plan: Plan, block: Block, item: WorkItem, options: AttentionOptions) -> _View | None:
    """What of an item the block's rows see; None for nothing. Worked out once a pass for each kind of layer."""
    biased = options.slopes is not None
    if options.window is None and not biased:
        return _View(slice(item.first, item.first + item.length), item.causal, None)
    memo = (options.window, biased, id(item))
    if memo not in block.memo:
        distance = plan.positions[block.rows][:, None] - item.key_positions()[None]
        block.memo[memo] = _seen(distance, item, options.window, biased)
    return cast("_View | None", block.memo[memo])


def _seen(distance: Tensor, item: WorkItem, window: int | None, biased: bool) -> _View | None:
    seen = distance < (torch.iinfo(torch.int64).max if window is None else window)
    if bool(seen.all()):
        every = slice(item.first, item.first + item.length)
        return _View(every, item.causal, None, distance if biased else None)
    if item.causal:
        seen &= distance >= 0
    columns = seen.any(0).nonzero()
    if columns.numel() == 0:
        return None
    first, last = int(columns[0]), int(columns[-1]) + 1
    kept = slice(item.first + first, item.first + last)
    return _View(kept, False, seen[:, first:last], distance[:, first:last] if biased else None)


def _finite(lse: Tensor) -> Tensor:
    """Zero in place of -inf, so that a row that saw nothing gives weight 0 and not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
