"""Launch settings of the attention kernel for a shape and a tile: key block, warps and stages.

Shared memory holds a tile of queries, and ``stages`` blocks of keys and of values. The limit is that of the smallest
supported GPUs. Registers hold a tile of outputs and of scores, so tiles are limited to the heights that compile
without spilling (checked by tests/attention/triton/compiled.py). These settings were not tuned on a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import triton

from inlay.attention.triton.cost import Shape
from inlay.attention.triton.jobs import BLOCK_KEYS, TILES

_SHARED_MEMORY = 99 * 1024
_TILE_BYTES, _WIDE_TILE_BYTES = 32 * 1024, 16 * 1024  # smaller for fp32, which has no matrix units of its own
_LEAST_KEYS = 16


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """Launch settings.

    Args:
        keys: Keys that a program processes at a time.
        stages: Key blocks that are in flight at the same time.
    """

    keys: int
    warps: int
    stages: int


def block_width(head_dim: int) -> int:
    """Return the number of dimensions of a block: the next power of two, at least 16 as products require."""
    return max(16, int(triton.next_power_of_2(head_dim)))


@cache
def settings_of(shape: Shape, tile: int) -> LaunchSettings | None:
    """Return the settings with the largest key block that fits beside a tile of this height, or None."""
    width = block_width(shape.head_dim) * (4 if shape.wide else max(shape.itemsize, 2))  # 8-bit numbers are widened
    if tile > TILES[0] and tile * width > (_WIDE_TILE_BYTES if shape.wide else _TILE_BYTES):
        return None
    for stages in (2, 1):
        for keys in (BLOCK_KEYS, BLOCK_KEYS // 2, _LEAST_KEYS):
            if tile * width + 2 * stages * keys * width <= _SHARED_MEMORY:
                return LaunchSettings(keys, 8 if tile >= 64 else 4, stages)
    return None


@cache
def largest_tile(shape: Shape) -> int:
    """Return the height of the largest tile that fits."""
    return max(tile for tile in TILES if settings_of(shape, tile) is not None)
