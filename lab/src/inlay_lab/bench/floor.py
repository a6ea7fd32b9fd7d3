"""The least time that a pass over a model can take on this machine, of rates that are measured in the same run.

Weights are read once at the rate of reading memory, while their products are computed at the rate of a matrix product
of as many rows; keys and values are read beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from inlay.attention.kernel import kernel
from inlay.models.linear import packed
from inlay.models.load import DTYPES
from inlay_lab.bench.machine import GB, clocked, in_turns, most_operations

_READ_BYTES, _QUICK_READ_BYTES = 1 << 28, 1 << 26  # larger than any cache; a quick run's may not be
_SIDES, _QUICK_SIDES = (1024, 2048), (256,)  # of square weights that stay in a cache
_MOST_ROWS = 2048  # more are not faster
_RUNS = 7


@dataclass(frozen=True)
class Floor:
    """max(weights_s, products_s) + kv_s, and which of the first two it is: "memory" or "compute".

    weights_s: weights by the rate of reading. products_s: floating-point operations by the rate of matrix products.
    kv_s: distinct keys and values by the rate of reading.
    """

    weights_s: float
    products_s: float
    kv_s: float

    @property
    def seconds(self) -> float:
        return max(self.weights_s, self.products_s) + self.kv_s

    @property
    def bound(self) -> str:
        return "compute" if self.products_s > self.weights_s else "memory"

    def report(self) -> dict[str, float]:
        """Its parts in milliseconds, as they stand in a benchmark's JSON."""
        parts = {"weights_ms": self.weights_s, "products_ms": self.products_s, "kv_ms": self.kv_s}
        return {name: round(seconds * 1000, 3) for name, seconds in parts.items()}


@dataclass
class Rates:
    """What this machine reads and multiplies, with torch's threads: medians of several runs, the faster of two ways.

    read_gb_s: GB/s (10^9 bytes) of reading a tensor that no cache holds.
    gemm_gflops: GFLOP/s (10^9) of matrix products in ``dtype`` over weights that a cache holds, by their rows; measured
        where they are asked for first, for a power of two of rows.
    """

    dtype: str
    read_gb_s: float
    gemm_gflops: dict[int, float] = field(default_factory=dict)
    quick: bool = False

    @classmethod
    def measured(cls, dtype: str, *, quick: bool = False) -> Rates:
        """Of this machine. quick: smaller operands, for tests; such rates say little."""
        return cls(dtype, _read_gb_s(_QUICK_READ_BYTES if quick else _READ_BYTES), quick=quick)

    def gemm(self, rows: int) -> float:
        """GFLOP/s at this many rows, or at the next power of two, which is no slower."""
        rows = min(1 << max(0, rows - 1).bit_length(), _MOST_ROWS)
        if rows not in self.gemm_gflops:
            sides = _QUICK_SIDES if self.quick else _SIDES
            self.gemm_gflops[rows] = round(max(_gemm_gflops(rows, side, self.dtype) for side in sides), 1)
        return self.gemm_gflops[rows]

    def floor(self, *, flops: float, rows: int, weight_bytes: float, kv_bytes: float) -> Floor:
        """Of a pass with this many rows."""
        read = self.read_gb_s * GB
        return Floor(weight_bytes / read, flops / (self.gemm(rows) * 1e9), kv_bytes / read)

    def at(self, rows: int) -> dict[str, float]:
        """What a floor of this many rows is made of, as it stands in a benchmark's JSON."""
        return {"read_gb_s": self.read_gb_s, "gemm_gflops": self.gemm(rows)}


def _read_gb_s(size: int) -> float:
    memory = torch.ones(size // 4)
    ways: dict[str, Callable[[], object]] = {"torch": memory.sum}
    if kernel is not None:
        kernel.use_huge_pages(memory.data_ptr(), memory.nbytes)  # as the weights are
        ways["kernel"] = partial(kernel.read, memory.data_ptr(), memory.nbytes, torch.get_num_threads())
    return round(memory.nbytes / _seconds(ways) / GB, 2)


def _gemm_gflops(rows: int, side: int, dtype: str) -> float:
    """By whichever is faster here: the layers that models run with, or torch; of a smaller product where it is slow."""
    most = most_operations(dtype)
    while 2 * rows * side**2 > most and side > _QUICK_SIDES[0]:
        side //= 2
    while 2 * rows * side**2 > most and rows > 1:
        rows //= 2
    x, weight = torch.randn(rows, side).to(DTYPES[dtype]), torch.randn(side, side).to(DTYPES[dtype])
    ways: dict[str, Callable[[], object]] = {
        "layer": partial(packed(weight, None), x),
        "torch": partial(torch.mm, x, weight.t()),
    }
    return 2 * rows * side**2 / _seconds(ways) / 1e9


@torch.inference_mode()
def _seconds(ways: dict[str, Callable[[], object]]) -> float:
    """The median of the way that takes the shortest time here."""
    timed = in_turns({name: clocked(way) for name, way in ways.items()}, _RUNS)
    return min(timing.seconds for timing in timed.values())
