"""How much new tokens attend to each stored key, in PyTorch on the pool's device, for every backend.

The scores are computed a second time, because no kernel returns weights. The cost is rows × keys × heads × head_dim
multiplications a layer, like the product of queries and keys alone, for the few rows that are measured. All items are
processed together. A copy of the keys of a shifted item is rotated by the shift in fp32, instead of every query by
-shift; the scores are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inlay.attention.backend import AttentionOptions
from inlay.attention.plan import FIRST, LENGTH, MASKED, POSITION, SHIFT, Part, spread
from inlay.attention.storage import KVStorage

#: Bytes of keys, and of scores, that are processed at a time: about the cache of a core. With many keys, one row takes
#: more.
BLOCK_BYTES = 2**22
_DEVICE_BLOCKS = 16  # blocks are so many times larger on a device, where each product is a kernel launch


class AttentionMass:
    """How much the rows of one request attend to each position, over all layers and passes.

    Attributes:
        by_position: (positions,), the attention weights summed over rows, heads and layers.
    """

    def __init__(self, positions: int) -> None:
        self.by_position: npt.NDArray[np.float64] = np.zeros(positions)

    def add(self, part: Part, mass: npt.NDArray[np.float32]) -> None:
        """Add the mass of one layer.

        Args:
            part: the rows and the keys that they read.
            mass: (keys,), for the keys of the part's items in their order.
        """
        items = part.items
        np.add.at(self.by_position, spread(items[POSITION] + items[SHIFT], items[LENGTH]), mass)


def attention_mass(
    query: Tensor, pool: KVStorage, part: Part, layer: int, options: AttentionOptions
) -> Tensor:  # (keys,) fp32
    """See Backend.attention_mass."""
    heads, rows, head_dim = query.shape
    seen = _Keys.of(part, query.device)
    stored = pool.read_keys(layer, seen.slots)
    kv_heads, count, _ = stored.shape
    grouped = query.reshape(kv_heads, -1, rows, head_dim)
    positions = torch.from_numpy(np.ascontiguousarray(part.positions)).to(query.device)
    mass = torch.zeros(count, device=query.device)
    most = BLOCK_BYTES * (1 if query.device.type == "cpu" else _DEVICE_BLOCKS)
    together = max(1, most // (4 * count * head_dim))
    for first in range(0, kv_heads, together):
        some = slice(first, first + together)
        keys = seen.turned(stored[some].float(), options)
        of = torch.arange(heads, device=query.device).view(kv_heads, -1)[some].flatten()
        block = max(1, most // (4 * count * of.numel()))
        for at in range(0, rows, block):
            scores = grouped[some, :, at : at + block].float().flatten(1, 2) @ keys.transpose(1, 2) * options.scale
            scores = scores.view(of.numel(), -1, count)
            mass += _weights(scores, positions[at : at + block], seen, of, options).sum((0, 1))
    return mass


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys that a part reads, in the order of its items: (keys,) each, on the device except for the shifts."""

    slots: Tensor
    position: Tensor  # as read, shift included
    masked: Tensor
    shift: npt.NDArray[np.int64]

    @classmethod
    def of(cls, part: Part, device: torch.device) -> _Keys:
        items = part.items
        lengths = items[LENGTH]
        columns = (
            spread(items[FIRST], lengths),
            spread(items[POSITION] + items[SHIFT], lengths),
            np.repeat(items[MASKED] > 0, lengths),
        )
        slots, position, masked = (torch.from_numpy(column).to(device) for column in columns)
        return cls(slots, position, masked, np.repeat(items[SHIFT], lengths))

    def turned(self, keys: Tensor, options: AttentionOptions) -> Tensor:
        """Rotate keys, (heads, keys, head_dim) fp32, to the positions that they are read at."""
        if not self.shift.any():
            return keys
        assert options.rotary is not None, "a shift needs positions that move"
        return options.rotary.turn(keys, *options.rotary.angles_of(-self.shift, keys.device))


def _weights(scores: Tensor, positions: Tensor, keys: _Keys, heads: Tensor, options: AttentionOptions) -> Tensor:
    """Return the softmax weights of scores, (heads, rows, keys), which may be overwritten. heads: the head numbers."""
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    distance = positions[:, None] - keys.position
    if options.slopes is not None:
        scores -= options.slopes.to(scores.device, torch.float32)[heads, None, None] * distance
    hidden = keys.masked & (distance < 0)
    if options.window is not None:
        hidden |= distance >= options.window
    scores.masked_fill_(hidden, -torch.inf)
    if options.sinks is None:
        return torch.softmax(scores, 2)
    sinks = options.sinks.to(scores.device, torch.float32)[heads, None, None].expand(-1, scores.shape[1], 1)
    return torch.softmax(torch.cat((scores, sinks), 2), 2)[..., :-1]
