"""The least time of a forward pass on this machine, from rates that are measured in the same run.

Weights are read once at memory speed, while their products run at the speed of a matrix product with as many rows.
Reading keys and values comes on top.
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
    """The least time of a pass: max(weights_s, products_s) + kv_s.

    Attributes:
        weights_s: Seconds to read the weights.
        products_s: Seconds of the floating-point operations at the rate of matrix products.
        kv_s: Seconds to read the distinct keys and values.
        bound: The larger of the first two: "memory" or "compute".
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
        """The parts in milliseconds, for a benchmark's JSON."""
        parts = {"weights_ms": self.weights_s, "products_ms": self.products_s, "kv_ms": self.kv_s}
        return {name: round(seconds * 1000, 3) for name, seconds in parts.items()}


@dataclass
class Rates:
    """Rates of this machine with torch's threads: medians of several runs, the faster of two ways.

    Attributes:
        read_gb_s: GB/s (10^9 bytes) of reading a tensor larger than any cache.
        gemm_gflops: GFLOP/s (10^9) of matrix products in ``dtype`` over cached weights, by number of rows. Each power
            of two is measured when it is first needed.
    """

    dtype: str
    read_gb_s: float
    gemm_gflops: dict[int, float] = field(default_factory=dict)
    quick: bool = False

    @classmethod
    def measured(cls, dtype: str, *, quick: bool = False) -> Rates:
        """Measure this machine.

        Args:
            quick: Use smaller operands, for tests; such rates say little.
        """
        return cls(dtype, _read_gb_s(_QUICK_READ_BYTES if quick else _READ_BYTES), quick=quick)

    def gemm(self, rows: int) -> float:
        """GFLOP/s at this many rows, or at the next power of two, which is no slower."""
        rows = min(1 << max(0, rows - 1).bit_length(), _MOST_ROWS)
        if rows not in self.gemm_gflops:
            sides = _QUICK_SIDES if self.quick else _SIDES
            self.gemm_gflops[rows] = round(max(_gemm_gflops(rows, side, self.dtype) for side in sides), 1)
        return self.gemm_gflops[rows]

    def floor(self, *, flops: float, rows: int, weight_bytes: float, kv_bytes: float) -> Floor:
        """The floor of a pass with this many rows."""
        read = self.read_gb_s * GB
        return Floor(weight_bytes / read, flops / (self.gemm(rows) * 1e9), kv_bytes / read)

    def at(self, rows: int) -> dict[str, float]:
        """The rates behind a floor of this many rows, for a benchmark's JSON."""
        return {"read_gb_s": self.read_gb_s, "gemm_gflops": self.gemm(rows)}


def _read_gb_s(size: int) -> float:
    memory = torch.ones(size // 4)
    ways: dict[str, Callable[[], object]] = {"torch": memory.sum}
    if kernel is not None:
        kernel.use_huge_pages(memory.data_ptr(), memory.nbytes)  # as the weights are
        ways["kernel"] = partial(kernel.read, memory.data_ptr(), memory.nbytes, torch.get_num_threads())
    return round(memory.nbytes / _seconds(ways) / GB, 2)


def _gemm_gflops(rows: int, side: int, dtype: str) -> float:
    """The faster of our layers and torch. The product is smaller where this dtype is slow."""
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
    """The median of the fastest way."""
    timed = in_turns({name: clocked(way) for name, way in ways.items()}, _RUNS)
    return min(timing.seconds for timing in timed.values())
