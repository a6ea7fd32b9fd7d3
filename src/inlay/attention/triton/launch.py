"""How the attention kernel is launched for a shape and a tile: blocks of keys, warps and stages.

Shared memory holds a tile of queries, and ``stages`` blocks of keys and of values; the limit is that of the smallest
GPUs that are served. Registers hold a tile of outputs and of scores: tiles are no higher than what compiles without
spilling (tests/attention/triton/compiled.py tells). No device has confirmed that this is what is fastest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import triton

from inlay.attention.triton.cost import Shape
from inlay.attention.triton.jobs import BLOCK_KEYS, TILES

_SHARED_MEMORY = 99 * 1024
_TILE_BYTES, _WIDE_TILE_BYTES = 32 * 1024, 16 * 1024  # products of fp32 have no units of their own
_LEAST_KEYS = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """keys: that a program looks at together. stages: blocks of keys under way at the same time."""

    keys: int
    warps: int
    stages: int


def block_width(head_dim: int) -> int:
    """How many dimensions a block has: the next power of two; products take no fewer than 16."""
    return max(16, int(triton.next_power_of_2(head_dim)))


@cache
def settings_of(shape: Shape, tile: int) -> Settings | None:
    """The largest blocks that fit beside a tile of this height; None where none do."""
    width = block_width(shape.head_dim) * (4 if shape.wide else max(shape.itemsize, 2))  # 8 bits are widened
    if tile > TILES[0] and tile * width > (_WIDE_TILE_BYTES if shape.wide else _TILE_BYTES):
        return None
    for stages in (2, 1):
        for keys in (BLOCK_KEYS, BLOCK_KEYS // 2, _LEAST_KEYS):
            if tile * width + 2 * stages * keys * width <= _SHARED_MEMORY:
                return Settings(keys, 8 if tile >= 64 else 4, stages)
    return None


@cache
def largest_tile(shape: Shape) -> int:
    """The height of the largest tile that fits."""
    return max(tile for tile in TILES if settings_of(shape, tile) is not None)
