"""Shared parts of the GPU scripts: options, timing on a device, the device's limits, and the folder of results.

Timing uses events of the device, between flushes of its cache; medians are reported. With ``--dry`` the same code runs
in tiny sizes on the CPU, with Triton's interpreter. Its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
DTYPES = ("float16", "bfloat16", "float32")


def options(description: str, *, runs: int = 20, **more: Any) -> argparse.Namespace:
    """Parse the command line.

    Args:
        runs: Default number of runs.
        more: Further options by name, with their default values. A list's first item sets its type.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU, in Triton's interpreter")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of results; each device has one in it")
    parser.add_argument("--runs", type=int, default=runs, help="runs of each")
    for name, default in more.items():
        kind = type(default[0]) if isinstance(default, list) else type(default)
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=default, nargs="+" if isinstance(default, list) else None
        )
    found = parser.parse_args()
    if found.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
        found.runs = 1
    return found


def device_of(asked: argparse.Namespace) -> Any:
    """The device to measure. Ends the script with a message if there is none."""
    import torch

    if asked.dry:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit("PyTorch finds no GPU here; --dry tries the script on the CPU, in tiny sizes")
    return torch.device("cuda", 0)


class Clock:
    """Measures median times of calls.

    Args:
        runs: Counted runs of each call, after two warm-up runs.
    """

    def __init__(self, device: Any, runs: int) -> None:
        import torch

        self._torch, self._device, self._runs = torch, device, runs
        self._other = torch.empty(2**28 if device.type == "cuda" else 1, dtype=torch.uint8, device=device)

    def seconds(self, call: Callable[[], object]) -> float:
        """The median time of a call, from one flushed cache to the end of its launched work."""
        if self._device.type != "cuda":
            took = []
            for _ in range(self._runs):
                began = time.perf_counter()
                call()
                took.append(time.perf_counter() - began)
            return statistics.median(took)
        cuda = self._torch.cuda
        for _ in range(2):
            call()
        pairs = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(self._runs)]
        for began, ended in pairs:
            self._other.zero_()
            began.record()
            call()
            ended.record()
        cuda.synchronize()
        return statistics.median(began.elapsed_time(ended) for began, ended in pairs) / 1000


@dataclass(frozen=True)
class Ceilings:
    """Peak rates of the device.

    Attributes:
        copy_gb_s: GB/s of copying a large tensor on it; bytes read and written both count.
        from_host_gb_s: GB/s of copying pinned memory to it.
        gemm_tflop_s: TFLOP/s of a large square product, by dtype.
    """

    copy_gb_s: float
    from_host_gb_s: float
    gemm_tflop_s: dict[str, float]

    def floor(self, read: float, flops: float, dtype: str) -> float:
        """The least seconds for this many bytes and operations."""
        return max(read / (self.copy_gb_s * 1e9), flops / (self.gemm_tflop_s[dtype] * 1e12))

    @classmethod
    def measure(cls, clock: Clock, device: Any, dtypes: list[str], *, dry: bool) -> Ceilings:
        import torch

        size, square = (2**20, 64) if dry else (2**30, 8192)
        source = torch.ones(size, dtype=torch.uint8, device=device)
        host = torch.ones(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        target = torch.empty_like(source)
        rates = {}
        for dtype in dtypes:
            one = torch.randn(square, square, device=device).to(getattr(torch, dtype))
            rates[dtype] = 2 * square**3 / clock.seconds(lambda one=one: one @ one) / 1e12
        copied = 2 * size / clock.seconds(lambda: target.copy_(source)) / 1e9
        carried = size / clock.seconds(lambda: target.copy_(host, non_blocking=True)) / 1e9
        return cls(copied, carried, rates)


def named(device: Any) -> str:
    """The device's name, as in a file's name."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"dry {platform.machine()}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def report(script: str, asked: argparse.Namespace, device: Any, ceilings: Ceilings | None, rows: list[Any]) -> None:
    """Print a result as the last line, and store it in the folder of its device."""
    import torch
    import triton

    result = {
        "script": script,
        "device": named(device),
        "dry": asked.dry,
        "ceilings": None if ceilings is None else asdict(ceilings),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "rows": rows,
    }
    folder = asked.out / result["device"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{script}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
