"""Attention on the CPU with PyTorch's flash kernel, whose log-sum-exp makes one partial result one call.

Pass 1 turns a block's queries, once for every shift that its work items ask for.
Pass 2 runs the kernel on every work item: the keys are read in the pool, where they lie.
Pass 3 merges the block's partial results through their log-sum-exp, in fp32.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from inlay.attention.contract import AttentionOptions
from inlay.attention.plan import Block, Plan, WorkItem
from inlay.cache.pool import KVPool

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class CpuBackend:
    """PyTorch's flash attention, a call per work item."""

    name = "cpu"

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
    if len(plan.blocks) == 1:
        return _attend_block(query, pool, plan, plan.blocks[0], layer, options)
    heads, rows, head_dim = query.shape
    output = torch.zeros(heads, rows, head_dim)
    lse = torch.full((heads, rows), -torch.inf)
    for block in plan.blocks:
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
    parts = []
    for item in block.items:
        mask = _mask(plan, block, item, options)
        partial = _flash_item if options.softcap is None else _softcap_item
        parts.append(partial(turned[item.shift], pool, layer, item, mask, options))
    if len(parts) == 1:
        return parts[0]
    outputs = torch.stack([output for output, _ in parts])  # (items, heads, rows, head_dim)
    lses = torch.stack([lse for _, lse in parts])  # (items, heads, rows), fp32
    total = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - _finite(total))
    return (outputs * weights.unsqueeze(-1)).sum(0), total


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


def _flash_item(
    query: Tensor, pool: KVPool, layer: int, item: WorkItem, mask: Tensor | None, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    keys, values = _stored(pool, layer, item)
    heads, rows, head_dim = query.shape
    if mask is None and not item.causal:  # heads that share keys become rows, so that the kernel packs a key once
        query = query.reshape(keys.shape[0], -1, head_dim)
    additive = None if mask is None else torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    causal = item.causal and mask is None
    output, lse = _flash(
        query[None], keys[None], values[None], is_causal=causal, attn_mask=additive, scale=options.scale
    )
    output, lse = output.reshape(heads, rows, head_dim), lse.reshape(heads, rows)
    if mask is not None:  # a row that sees none of these keys has no say
        blind = ~mask.any(1)
        output = output.masked_fill(blind[:, None], 0.0)
        lse = lse.masked_fill(blind, -torch.inf)
    return output, lse


def _softcap_item(
    query: Tensor, pool: KVPool, layer: int, item: WorkItem, mask: Tensor | None, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """The same in separate steps, since the flash kernel knows no soft-cap."""
    assert options.softcap is not None
    keys, values = _stored(pool, layer, item)
    heads, rows, head_dim = query.shape
    grouped = query.reshape(keys.shape[0], -1, rows, head_dim).float()
    scores = grouped @ keys.float().transpose(1, 2).unsqueeze(1) * options.scale
    scores = options.softcap * torch.tanh(scores / options.softcap)
    if mask is None and item.causal:
        mask = torch.ones(rows, item.length, dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    output = torch.exp(scores - _finite(lse).unsqueeze(-1)) @ values.float().unsqueeze(1)
    return output.reshape(heads, rows, head_dim), lse.reshape(heads, rows)


def _stored(pool: KVPool, layer: int, item: WorkItem) -> tuple[Tensor, Tensor]:
    slots = slice(item.first, item.first + item.length)
    return pool.keys[layer][:, slots], pool.values[layer][:, slots]


def _mask(plan: Plan, block: Block, item: WorkItem, options: AttentionOptions) -> Tensor | None:
    """(rows, keys) bool, True where a row sees a key; None where the item's own rule says it all."""
    if options.window is None:
        return None
    memo = (options.window, id(item))
    if memo not in block.memo:
        rows, keys = plan.positions[block.rows][:, None], item.key_positions()[None]
        seen = rows - keys < options.window
        if item.causal:
            seen &= keys <= rows
        trivial = bool((rows - keys < options.window).all())
        block.memo[memo] = None if trivial else seen
    return cast(Tensor | None, block.memo[memo])


def _finite(lse: Tensor) -> Tensor:
    """Zero in place of -inf, so that a row that saw nothing gives weight 0 and not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
