"""How much new tokens attend to each stored key, in PyTorch, for every backend, where its memory lies.

The scores are computed a second time, as no kernel gives weights away. That takes as long as the product of queries and
keys alone: rows × keys × heads × head_dim multiplications a layer, for the few rows that somebody asks about.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inlay.attention.backend import AttentionOptions
from inlay.attention.grouping import FIRST, LENGTH, MASKED, POSITION, SHIFT
from inlay.attention.plan import Part
from inlay.attention.storage import KVStorage

BLOCK_BYTES = 2**24  # of the scores that are looked at together; one row of all heads takes more where keys are many


class AttentionMass:
    """How much the rows of one request attend to what stands at each position, over all layers and passes.

    by_position: (positions,), the sum of attention weights over rows, heads and layers.
    """

    def __init__(self, positions: int) -> None:
        self.by_position: npt.NDArray[np.float64] = np.zeros(positions)

    def add(self, part: Part, mass: npt.NDArray[np.float32]) -> None:
        """Take in one layer's. mass: (keys,), of the part's items in their order."""
        at = 0
        for length, position, shift in part.items[[LENGTH, POSITION, SHIFT]].T.tolist():
            first = position + shift
            self.by_position[first : first + length] += mass[at : at + length]
            at += length


def attention_mass(
    query: Tensor, pool: KVStorage, part: Part, layer: int, options: AttentionOptions
) -> Tensor:  # (keys,) fp32
    """See Backend.attention_mass."""
    keys = int(part.items[LENGTH].sum())
    rows = max(1, BLOCK_BYTES // max(1, 4 * keys * query.shape[0]))
    positions = torch.from_numpy(np.ascontiguousarray(part.positions)).to(query.device)
    mass = torch.zeros(keys, device=query.device)
    for at in range(0, part.rows, rows):
        scores = _scores(query[:, at : at + rows].float(), positions[at : at + rows], pool, part, layer, options)
        if options.sinks is not None:
            sinks = options.sinks.to(query.device, torch.float32)[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, sinks), 2)
        mass += torch.softmax(scores, 2)[..., :keys].sum((0, 1))
    return mass


def _scores(
    query: Tensor, positions: Tensor, pool: KVStorage, part: Part, layer: int, options: AttentionOptions
) -> Tensor:  # (heads, rows, keys), -inf where a row does not see a key
    kv_heads = pool.keys[layer].shape[0]
    scores = torch.empty(query.shape[0], query.shape[1], int(part.items[LENGTH].sum()), device=query.device)
    turned, at_shift, done = query, 0, 0
    for first, length, position, shift, masked in part.items[[FIRST, LENGTH, POSITION, SHIFT, MASKED]].T.tolist():
        if shift != at_shift:
            turned, at_shift = _turned(query, shift, options), shift
        grouped = turned.reshape(kv_heads, -1, turned.shape[2])
        keys = pool.read_keys(layer, slice(first, first + length)).float()
        part_scores = grouped @ keys.transpose(1, 2) * options.scale
        part_scores = part_scores.reshape(query.shape[0], query.shape[1], length)
        if options.softcap is not None:
            part_scores = options.softcap * torch.tanh(part_scores / options.softcap)
        distance = positions[:, None] - (torch.arange(position, position + length, device=query.device) + shift)
        if options.slopes is not None:
            part_scores = part_scores - options.slopes.to(query.device, torch.float32)[:, None, None] * distance
        if masked:
            part_scores = part_scores.masked_fill(distance < 0, -torch.inf)
        if options.window is not None:
            part_scores = part_scores.masked_fill(distance >= options.window, -torch.inf)
        scores[..., done : done + length] = part_scores
        done += length
    return scores


def _turned(query: Tensor, shift: int, options: AttentionOptions) -> Tensor:
    """Queries as a shift sees them, fp32."""
    if shift == 0:
        return query
    assert options.rotary is not None, "a shift needs positions that move"
    cos, sin = (table.to(query.device) for table in options.rotary.angles([shift]))
    return options.rotary.turn(query, cos, sin)
