"""Which dtype experiments are measured in: the one in which this machine multiplies faster, for baselines' sake.

Stock models are the baseline. On CPUs without instructions for bf16, PyTorch's products in it are some ten times slower
than in fp32, and a comparison in it would flatter inlay, whose own kernels widen it.
"""

from __future__ import annotations

from functools import cache, partial

import torch

from inlay.models.load import DTYPES
from inlay_lab.bench.machine import clocked, in_turns

_SIDE = 256


@cache
def fast_dtype() -> str:
    """ "bfloat16" or "float32", by the time of a small square product in PyTorch."""
    squares = {name: torch.randn(_SIDE, _SIDE).to(dtype) for name, dtype in DTYPES.items()}
    with torch.inference_mode():
        timed = in_turns({name: clocked(partial(torch.mm, each, each)) for name, each in squares.items()}, 5)
    return min(timed, key=lambda name: timed[name].fastest)
