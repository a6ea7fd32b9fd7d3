"""The dtype of the experiments: the faster one in this machine's matrix products, so that comparisons are fair.

Stock models are the baseline. On CPUs without bf16 instructions, PyTorch's bf16 products are some ten times slower than
its fp32 products. A comparison in bf16 would flatter inlay there, because its own kernels widen bf16.
"""

from __future__ import annotations

from functools import cache, partial

import torch

from inlay.models.load import DTYPES
from inlay_lab.bench.machine import clocked, in_turns

_SIDE = 256


@cache
def fast_dtype() -> str:
    """Return "bfloat16" or "float32", by the time of a small square product in PyTorch."""
    squares = {name: torch.randn(_SIDE, _SIDE).to(dtype) for name, dtype in DTYPES.items()}
    with torch.inference_mode():
        timed = in_turns({name: clocked(partial(torch.mm, each, each)) for name, each in squares.items()}, 5)
    return min(timed, key=lambda name: timed[name].fastest)
