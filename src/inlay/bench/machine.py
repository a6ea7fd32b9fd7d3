"""What a benchmark ran on, and how fast that machine can go at best: measured in the same run as what is compared."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

from inlay.bench.timing import clocked, in_turns
from inlay.models.load import DTYPES

GB = 1e9
_GEMM, _QUICK_GEMM = 2048, 512
_COPY_BYTES, _QUICK_COPY_BYTES = 1 << 28, 1 << 26  # far larger than any cache; a quick run's may not be
_FLUSH_BYTES, _QUICK_FLUSH_BYTES = 1 << 26, 1 << 22
_RUNS = 7


@dataclass(frozen=True)
class Ceilings:
    """Rates of this machine with torch's threads, medians of several runs.

    gemm_gflops: GFLOP/s (10^9) of a square matrix product, by dtype name.
    copy_gb_s: GB/s (10^9 bytes) of copying a large tensor, bytes read and bytes written counted.
    """

    gemm_gflops: dict[str, float]
    copy_gb_s: float

    def seconds(self, flops: float, read: float, dtype: str) -> tuple[float, str]:
        """The least time for this work, and what it waits for: "memory" or "compute"."""
        computing, reading = flops / (self.gemm_gflops[dtype] * 1e9), read / (self.copy_gb_s * GB)
        return (computing, "compute") if computing > reading else (reading, "memory")

    def report(self) -> dict[str, Any]:
        """As it stands in a benchmark's JSON."""
        return asdict(self)


def measure_ceilings(dtypes: list[str], *, quick: bool = False) -> Ceilings:
    """Measure the rates for these dtypes. quick: smaller operands, for tests; such rates say little."""
    size = _QUICK_GEMM if quick else _GEMM
    source = torch.ones((_QUICK_COPY_BYTES if quick else _COPY_BYTES) // 4)
    target = torch.empty_like(source).fill_(0)
    meters = {"copy": clocked(partial(target.copy_, source))}
    for dtype in dtypes:
        square = torch.randn(size, size).to(DTYPES[dtype])
        meters[dtype] = clocked(partial(torch.mm, square, square))
    with torch.inference_mode():
        timed = in_turns(meters, _RUNS)
    rates = {dtype: round(2 * size**3 / timed[dtype].seconds / 1e9, 1) for dtype in dtypes}
    return Ceilings(rates, round(2 * source.nbytes / timed["copy"].seconds / GB, 2))


class CacheFlush:
    """Pushes everything else out of the processor's caches, by reading something larger than they are.

    Between two attention layers of a model its weights do the same, so a kernel that is timed again and again must not
    find its keys in a cache; and the column behind it, which may read the same keys, even less so.
    """

    def __init__(self, *, quick: bool = False) -> None:
        size = _QUICK_FLUSH_BYTES if quick else max(_FLUSH_BYTES, 2 * _last_cache_bytes())
        self._other = torch.ones(size // 4)

    def __call__(self) -> None:
        self._other.sum()


def _last_cache_bytes() -> int:
    """The size of the third-level cache; 0 where the system does not say."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text.removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 0


def describe_machine() -> dict[str, Any]:
    """What ran this, and how busy it was: a load of much more than the threads used means that others ran too."""
    return {
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": psutil.cpu_count(logical=False),
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "load_1m": round(psutil.getloadavg()[0], 2),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
