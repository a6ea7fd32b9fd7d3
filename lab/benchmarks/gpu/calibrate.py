"""Measure the cost model of the Triton backend: which rows read keys together (docs/internals/gpu-kernels.md).

    python lab/benchmarks/gpu/calibrate.py
    export INLAY_TRITON_COSTS=lab/benchmarks/results/DEVICE/costs.json

The cost of reading keys is the copy bandwidth. The other coefficients come from steps that differ in one thing: merged
partial results, tiles of the same keys, programs, kernels. Then pairs of a shared and an unshared step show whether the
choice was right.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from attention import Case, Sequences
from common import Ceilings, Clock, device_of, named, options, report


def main() -> None:
    asked = options(__doc__ or "", dtype="float16")
    device = device_of(asked)
    if asked.dry:
        asked.dtype = "float32"
    clock = Clock(device, asked.runs)
    ceilings = Ceilings.measure(clock, device, [asked.dtype], dry=asked.dry)
    costs = fit(asked, device, clock, ceilings)
    folder = asked.out / named(device)
    folder.mkdir(parents=True, exist_ok=True)
    costs.write(folder / "costs.json")
    rows = [choice(case, device, clock, costs) for case in pairs(asked)]
    report("calibrate", asked, device, ceilings, rows)


def fit(asked: Any, device: Any, clock: Clock, ceilings: Ceilings) -> Any:
    """The coefficients, from the ceilings and a few steps."""
    import torch

    from inlay.attention.triton.tables import CostModel

    nothing = torch.zeros(1, device=device)
    launch = clock.seconds(lambda: nothing.add_(1))
    chain = clock.seconds(lambda: [nothing.add_(1) for _ in range(17)])
    numbers = torch.ones(2**12 if asked.dry else 2**26, device=device)
    cached = torch.ones(2**8 if asked.dry else 2**21, device=device)  # stays in the cache between two reads
    once, often = clock.seconds(lambda: cached.sum()), clock.seconds(lambda: [cached.sum() for _ in range(9)])
    written = clock.seconds(lambda: numbers.mul_(1.0))
    return CostModel(
        byte_s=bounded(1 / (ceilings.copy_gb_s * 1e9)),
        cached_byte_s=bounded((often - once) / 8 / cached.nbytes),
        partial_byte_s=bounded(written / numbers.nbytes),
        multiply_s=bounded(2 / (ceilings.gemm_tflop_s[asked.dtype] * 1e12)),
        launch_s=bounded((chain - launch) / 16),
        work_s=bounded(launch / 256),
        measured_on=named(device),
    )


def bounded(seconds: float) -> float:
    """Clamp a time: the difference of two measurements may be below zero."""
    return min(max(seconds, 0.0), 0.5)


def pairs(asked: Any) -> list[Case]:
    if asked.dry:
        return [Case(asked.dtype, 4, 2, 64, 2, 80, 64)]
    return [
        Case(asked.dtype, 32, kv_heads, 128, batch, shared + 128, shared)
        for kv_heads in (32, 8) for batch in (2, 8, 32, 128) for shared in (64, 128, 256, 512, 2048)
    ]  # fmt: skip


def choice(case: Case, device: Any, clock: Clock, costs: Any) -> dict[str, Any]:
    """The model's choice for a case, and the measured times with sharing always on and off."""
    import numpy as np

    from inlay.attention.triton.backend import largest_tile
    from inlay.attention.triton.tables import CostModel, Shape

    sequences = Sequences(case, device)
    always = replace(CostModel(), partial_byte_s=0.0, multiply_s=0.0, launch_s=0.0, work_s=0.0, cached_byte_s=0.0)
    together = clock.seconds(sequences.ours(share=True, costs=always))
    apart = clock.seconds(sequences.ours(share=False))
    shape = Shape(case.heads, case.kv_heads, case.head_dim, sequences.dtype.itemsize, None, case.dtype == "float32")
    lanes, keys = np.array([case.batch]), np.array([sequences.shared])
    chosen = costs.choose(lanes, lanes, keys, shape, largest_tile(shape), 2**20)
    return {
        "case": asdict(case),
        "together_us": together * 1e6,
        "apart_us": apart * 1e6,
        "chosen": bool(chosen[0]),
        "right": bool(chosen[0]) == (together < apart),
    }


if __name__ == "__main__":
    main()
