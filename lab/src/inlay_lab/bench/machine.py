"""Timing in turns, a description of the machine, and its peak rates.

Meters run in turns, so that a slow moment of the machine affects all of them; medians are reported. The peak rates are
measured in the same run as the results that are compared with them.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import torch
import transformers

from inlay.models.load import DTYPES

#: Runs something once and returns the seconds that count.
Meter = Callable[[], float]

#: Called with the number of steps done and their total.
Progress = Callable[[int, int], None]

_ONCE_S = 10.0  # a longer meter runs once
_HALF_S = 1.0  # a longer meter runs half as often: it averages over much already
_ENOUGH_S, _MOST = 0.25, 40  # short meters repeat until all together take this many seconds, or this often


@dataclass(frozen=True, slots=True)
class Timing:
    """The median of several runs, and the fastest of them, which a busy machine disturbs least."""

    seconds: float
    fastest: float
    runs: int

    @property
    def ms(self) -> float:
        return self.seconds * 1000


def clocked(call: Callable[[], object], before: Callable[[], object] | None = None) -> Meter:
    """A meter of a whole call.

    Args:
        before: Called first each time; its time does not count.
    """

    def meter() -> float:
        if before is not None:
            before()
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    return meter


def new_sender() -> str:
    """An unused cache salt: its request finds public entries only, and computes its own text every time."""
    return uuid4().hex


def in_turns(meters: Mapping[str, Meter], runs: int, progress: Progress | None = None) -> dict[str, Timing]:
    """Run each meter in turns, ``runs`` times or more if they are short, and return the medians.

    Every turn has its own order, because earlier work leaves caches and threads in some state. A first turn warms up
    and does not count. A meter that took more than ten seconds in that turn is not repeated.

    Args:
        progress: Called with the number of turns done and their total.
    """
    first = {name: meter() for name, meter in meters.items()}
    samples: dict[str, list[float]] = {name: [] for name in meters}
    repeats = min(_MOST, int(_ENOUGH_S / max(sum(first.values()), 1e-9)))
    wanted = {name: max(repeats, _runs(seconds, runs)) for name, seconds in first.items()}
    turns, order, shuffle = max(wanted.values()), list(meters), random.Random(0).shuffle
    for turn in range(turns):
        if progress is not None:
            progress(turn + 1, turns + 1)
        shuffle(order)
        for name in order:
            if turn < wanted[name]:
                samples[name].append(meters[name]())
    return {name: _timing(took or [first[name]]) for name, took in samples.items()}


def part_of(progress: Progress | None, part: int, parts: int) -> Progress | None:
    """Return the progress of one of ``parts`` equal parts, behind ``part`` of them, as progress of the whole."""
    if progress is None:
        return None
    return lambda done, total: progress(part * total + done, parts * total)


def _timing(took: list[float]) -> Timing:
    return Timing(statistics.median(took), min(took), len(took))


def _runs(first: float, runs: int) -> int:
    if first > _ONCE_S:
        return 0
    return (runs + 1) // 2 if first > _HALF_S else runs


GB = 1e9
_GEMM, _QUICK_GEMM = 2048, 512
_COPY_BYTES, _QUICK_COPY_BYTES = 1 << 28, 1 << 26  # far larger than any cache; a quick run's may not be
_FLUSH_BYTES, _QUICK_FLUSH_BYTES = 1 << 26, 1 << 22
_RUNS = 7
_MOST_S = 2.0  # longest time of one matrix product
_PROBE = 256


@dataclass(frozen=True)
class Ceilings:
    """Rates of this machine with torch's threads, medians of several runs.

    Attributes:
        gemm_gflops: GFLOP/s (10^9) of a square matrix product, by dtype name.
        copy_gb_s: GB/s (10^9 bytes) of copying a large tensor. Bytes read and bytes written both count.
    """

    gemm_gflops: dict[str, float]
    copy_gb_s: float

    def seconds(self, flops: float, read: float, dtype: str) -> tuple[float, str]:
        """The least time for this work, and its bound: "memory" or "compute"."""
        computing, reading = flops / (self.gemm_gflops[dtype] * 1e9), read / (self.copy_gb_s * GB)
        return (computing, "compute") if computing > reading else (reading, "memory")

    def report(self) -> dict[str, Any]:
        """The rates for a benchmark's JSON."""
        return asdict(self)


def measure_ceilings(dtypes: list[str], *, quick: bool = False) -> Ceilings:
    """Measure the rates for these dtypes, by smaller products if the processor is slow at a dtype.

    Args:
        quick: Use smaller operands, for tests; such rates say little.
    """
    source = torch.ones((_QUICK_COPY_BYTES if quick else _COPY_BYTES) // 4)
    target = torch.empty_like(source).fill_(0)
    meters = {"copy": clocked(partial(target.copy_, source))}
    sizes = {}
    for dtype in dtypes:
        size = _QUICK_GEMM if quick else _GEMM
        while size > _PROBE and 2 * size**3 > most_operations(dtype):
            size //= 2
        square = torch.randn(size, size).to(DTYPES[dtype])
        meters[dtype] = clocked(partial(torch.mm, square, square))
        sizes[dtype] = size
    with torch.inference_mode():
        timed = in_turns(meters, _RUNS)
    rates = {dtype: round(2 * size**3 / timed[dtype].seconds / 1e9, 1) for dtype, size in sizes.items()}
    return Ceilings(rates, round(2 * source.nbytes / timed["copy"].seconds / GB, 2))


@cache
def most_operations(dtype: str) -> float:
    """The most floating-point operations that one measured product may have. Some processors are slow at bf16."""
    square = torch.randn(_PROBE, _PROBE).to(DTYPES[dtype])
    with torch.inference_mode():
        seconds = min(clocked(partial(torch.mm, square, square))() for _ in range(2))
    return _MOST_S * 2 * _PROBE**3 / seconds


@cache
def fast_dtype() -> str:
    """Return "bfloat16" or "float32", by the time of a small square product in PyTorch.

    Without bf16 instructions, PyTorch's bf16 products are some ten times slower than its fp32 products. Stock models in
    bf16 would flatter inlay there, because its own kernels widen bf16.
    """
    squares = {name: torch.randn(_PROBE, _PROBE).to(dtype) for name, dtype in DTYPES.items()}
    with torch.inference_mode():
        timed = in_turns({name: clocked(partial(torch.mm, each, each)) for name, each in squares.items()}, 5)
    return min(timed, key=lambda name: timed[name].fastest)


class CacheFlush:
    """Evicts everything else from the processor's caches, by reading a tensor larger than they are.

    In a model, the weights between two attention layers do the same. So a kernel that is timed repeatedly must not find
    its keys in a cache, nor must the next column, which may read the same keys.
    """

    def __init__(self, *, quick: bool = False) -> None:
        size = _QUICK_FLUSH_BYTES if quick else max(_FLUSH_BYTES, 2 * _last_cache_bytes())
        self._other = torch.ones(size // 4)

    def __call__(self) -> None:
        self._other.sum()


def _last_cache_bytes() -> int:
    """The size of the third-level cache, or 0 if the system does not report it."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text.removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 0


def describe_machine() -> dict[str, Any]:
    """Describe the machine and its load. A load far above the number of threads used means that other work ran too."""
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
