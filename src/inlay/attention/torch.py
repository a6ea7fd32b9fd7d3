"""Attention in PyTorch, for installs without the compiled kernel (cpu.py) and for GPUs without Triton.

On a CPU it calls PyTorch's flash kernel, whose log-sum-exp gives one partial result in one call. On other devices it
uses plain matrix products.

Pass 1 rotates the queries of a group, once for every shift that its keys are read at.
Pass 2 attends to every stretch of keys. They are read in place in the pool.
Pass 3 merges the partial results through their log-sum-exp, in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor

from inlay.attention.backend import AttentionOptions
from inlay.attention.mass import attention_mass
from inlay.attention.plan import FIRST, MASKED, SHIFT, Part, Plan, Table
from inlay.attention.storage import LARGEST, DeviceStorage, KVStorage, LayerShape

_CPU = torch.device("cpu")

#: PyTorch's CPU kernel. It returns the log-sum-exp of each row beside the output.
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass(frozen=True, slots=True)
class _GroupView:
    """Some rows of a group against adjacent keys in the pool.

    Args:
        rows: Rows of the pass: a slice if they are adjacent, else their numbers.
        causal: True if row i sees the first i + 1 keys. Then there is no mask.
        mask: (rows, keys) bool, True if the row sees the key. None if all rows see all keys or ``causal`` is set.
        distance: (rows, keys) int64, row position minus key position. Set only for ALiBi.
    """

    rows: slice | Tensor
    shift: int
    slots: slice
    causal: bool
    mask: Tensor | None = None
    distance: Tensor | None = None


@dataclass(slots=True)
class _Work:
    """A plan's views by kind of layer, made when the first layer of a kind runs."""

    views: dict[tuple[object, ...], list[_GroupView]] = field(default_factory=dict)

    def advance(self) -> None:
        """See PreparedTables.advance."""
        self.views.clear()


class TorchBackend:
    """Attention in PyTorch's own operations, one call for each stretch of keys, on ``device``."""

    name = "torch"
    scratch_bytes = 0  # one stretch at a time; its partial results count as tensors of the pass

    def __init__(self, device: torch.device = _CPU) -> None:
        self.device = device

    def make_pool(self, layers: Sequence[LayerShape], dtype: torch.dtype, slots: int) -> KVStorage:
        """See Backend.make_pool. Raises ParameterError for fp8 on the CPU."""
        on_cpu = self.device == _CPU
        return KVStorage(layers, dtype, slots) if on_cpu else DeviceStorage(layers, dtype, slots, self.device)

    def prepare(self, plan: Plan) -> None:
        """See Backend.prepare."""
        plan.work.setdefault(self.name, _Work())

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
        self.prepare(plan)
        output, lse = _attend(query, pool, _views(plan, options), layer, options)
        if options.sinks is not None:
            total = torch.logaddexp(lse, options.sinks.float()[:, None])
            output = output * torch.exp(lse - total).unsqueeze(-1)
        return output.transpose(0, 1).to(query.dtype)

    def attention_mass(
        self, query: Tensor, pool: KVStorage, part: Part, layer: int, options: AttentionOptions
    ) -> Tensor:
        """See Backend.attention_mass."""
        return attention_mass(query, pool, part, layer, options)


def _attend(
    query: Tensor, pool: KVStorage, views: list[_GroupView], layer: int, options: AttentionOptions
) -> tuple[Tensor, Tensor]:  # (heads, rows, head_dim), (heads, rows) fp32, natural log
    plain = options.softcap is not None or options.slopes is not None or query.device.type != "cpu"
    partial = _plain_partial if plain else _flash_partial
    heads, rows, head_dim = query.shape
    output = torch.zeros(heads, rows, head_dim, device=query.device)
    lse = torch.full((heads, rows), -torch.inf, device=query.device)
    turned, whose, shift = query, cast("slice | Tensor", slice(0, rows)), 0
    for view in views:
        if view.shift != shift or not _are_same(view.rows, whose):
            turned, whose, shift = _turn(query[:, _there(view.rows, query)], view.shift, options), view.rows, view.shift
        keys, values = pool.read_keys(layer, view.slots), pool.read_values(layer, view.slots)
        if pool.dtype in LARGEST:
            keys, values = keys.to(query.dtype), values.to(query.dtype)
        part, part_lse = partial(turned, keys, values, view, options)
        if len(views) == 1 and part.shape == query.shape:
            return part, part_lse
        _merge(output, lse, _there(view.rows, query), part, part_lse)
    return output, lse


def _merge(output: Tensor, lse: Tensor, rows: slice | Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into the result so far of these rows, in fp32."""
    before = lse[:, rows]
    total = torch.logaddexp(before, part_lse)
    finite = _finite(total)
    old, new = torch.exp(before - finite).unsqueeze(-1), torch.exp(part_lse - finite).unsqueeze(-1)
    output[:, rows] = output[:, rows] * old + part * new
    lse[:, rows] = total


def _turn(query: Tensor, shift: int, options: AttentionOptions) -> Tensor:
    """Rotate queries by -shift."""
    if shift == 0:
        return query
    assert options.rotary is not None, "a shift needs positions that move"
    cos, sin = (each.to(query.device) for each in options.rotary.angles([shift]))
    return options.rotary.turn(query, cos, sin).to(query.dtype)


def _flash_partial(
    query: Tensor, keys: Tensor, values: Tensor, view: _GroupView, options: AttentionOptions
) -> tuple[Tensor, Tensor]:  # (heads, rows, head_dim), (heads, rows) fp32
    heads, rows, head_dim = query.shape
    mask = view.mask
    if mask is None and not view.causal:  # heads that share keys become rows, so the kernel packs each key once
        query = query.reshape(keys.shape[0], -1, head_dim)
    additive = None if mask is None else torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    output, lse = flash_attention(
        query[None], keys[None], values[None], is_causal=view.causal, attn_mask=additive, scale=options.scale
    )
    output, lse = output.reshape(heads, rows, head_dim), lse.reshape(heads, rows)
    if mask is not None:  # a row that sees none of these keys has weight zero
        blind = ~mask.any(1)
        output = output.masked_fill(blind[:, None], 0.0)
        lse = lse.masked_fill(blind, -torch.inf)
    return output, lse


def _plain_partial(
    query: Tensor, keys: Tensor, values: Tensor, view: _GroupView, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Return the result of ``_flash_partial`` in separate steps, with soft-cap and ALiBi, which that kernel lacks."""
    heads, rows, head_dim = query.shape
    grouped = query.reshape(keys.shape[0], -1, rows, head_dim).float()
    scores = grouped @ keys.float().transpose(1, 2).unsqueeze(1) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.slopes is not None:
        assert view.distance is not None
        scores = scores - options.slopes.float().reshape(keys.shape[0], -1, 1, 1) * view.distance.to(query.device)
    mask = torch.ones(rows, keys.shape[1], dtype=torch.bool).tril() if view.causal else view.mask
    if mask is not None:
        scores = scores.masked_fill(~mask.to(query.device), -torch.inf)
    lse = torch.logsumexp(scores, -1)
    output = torch.exp(scores - _finite(lse).unsqueeze(-1)) @ values.float().unsqueeze(1)
    return output.reshape(heads, rows, head_dim), lse.reshape(heads, rows)


def _views(plan: Plan, options: AttentionOptions) -> list[_GroupView]:
    """The views of a plan for a kind of layer, made once per pass."""
    made = cast(_Work, plan.work[TorchBackend.name]).views
    kind = (options.window, options.slopes is not None)
    if kind not in made:
        made[kind] = [view for rows, run in _runs(plan) for view in _views_of(plan, rows, run, options)]
    return made[kind]


@dataclass(frozen=True, slots=True)
class _KeyRun:
    """Adjacent keys in the pool that a group reads at one shift. positions: (keys,), as the rows see them."""

    first: int
    shift: int
    masked: bool
    positions: Table


def _runs(plan: Plan) -> Iterator[tuple[Table, _KeyRun]]:
    """Yield every group's rows with each run that they read.

    Unmasked stretches in adjacent slots become one run, at whatever positions they are.
    """
    groups = plan.groups
    for number in range(len(groups)):
        rows = groups.rows[groups.row_first[number] : groups.row_first[number + 1]]
        table = groups.stretches[:, groups.stretch_first[number] : groups.stretch_first[number + 1]]
        table = table[:, np.lexsort((table[FIRST], table[MASKED], table[SHIFT]))]
        first, shift, masked, positions = -1, 0, 0, list[Table]()
        for slot, length, position, at_shift, is_masked in table.T.tolist():
            seen_at = np.arange(position, position + length) + at_shift
            end = first + sum(each.size for each in positions)
            if positions and not masked and (end, shift, masked) == (slot, at_shift, is_masked):
                positions.append(seen_at)
                continue
            if positions:
                yield rows, _KeyRun(first, shift, bool(masked), np.concatenate(positions))
            first, shift, masked, positions = slot, at_shift, is_masked, [seen_at]
        yield rows, _KeyRun(first, shift, bool(masked), np.concatenate(positions))


def _views_of(plan: Plan, rows: Table, run: _KeyRun, options: AttentionOptions) -> Iterator[_GroupView]:
    """Split a run's rows into those that see all of it, those on the causal diagonal, and those that need a mask."""
    at = plan.positions[rows]
    if not run.masked:
        yield from _seen(at, rows, run, False, options)
    elif (np.diff(at) > 0).all():
        begin = int(np.searchsorted(at, run.positions[0]))
        middle = begin + run.positions.size
        causal = np.array_equal(at[begin:middle], run.positions)
        if not causal:
            middle = int(np.searchsorted(at, run.positions[-1]))
        yield from _seen(at[begin:middle], rows[begin:middle], run, True, options, causal=causal)
        yield from _seen(at[middle:], rows[middle:], run, False, options)
    else:
        yield from _seen(at, rows, run, True, options)


def _seen(
    at: Table, rows: Table, run: _KeyRun, masked: bool, options: AttentionOptions, *, causal: bool = False
) -> Iterator[_GroupView]:
    """Yield the view of these rows at these positions, or nothing if they see no key."""
    biased = options.slopes is not None
    if not rows.size:
        return
    index, whole = _index(rows), slice(run.first, run.first + run.positions.size)
    if options.window is None and not biased and (causal or not masked):
        yield _GroupView(index, run.shift, whole, causal)
        return
    distance = torch.from_numpy(at)[:, None] - torch.from_numpy(run.positions)[None]
    seen = distance < (torch.iinfo(torch.int64).max if options.window is None else options.window)
    if bool(seen.all()) and (causal or not masked):
        yield _GroupView(index, run.shift, whole, causal, None, distance if biased else None)
        return
    if masked:
        seen &= distance >= 0
    columns = seen.any(0).nonzero()
    if columns.numel():
        first, last = int(columns[0]), int(columns[-1]) + 1
        slots = slice(run.first + first, run.first + last)
        yield _GroupView(
            index, run.shift, slots, False, seen[:, first:last], distance[:, first:last] if biased else None
        )


def _are_same(one: slice | Tensor, other: slice | Tensor) -> bool:
    return one == other if isinstance(one, slice) and isinstance(other, slice) else one is other


def _there(rows: slice | Tensor, query: Tensor) -> slice | Tensor:
    """Rows as an index on the query's device."""
    return rows if isinstance(rows, slice) else rows.to(query.device)


def _index(rows: Table) -> slice | Tensor:
    if rows[-1] - rows[0] == rows.size - 1 and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows)


def _finite(lse: Tensor) -> Tensor:
    """Replace -inf by zero, so that a row that saw no key gets weight 0 and not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
