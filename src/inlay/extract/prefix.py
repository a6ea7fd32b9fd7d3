"""What a cache of exact prefixes would save on a log: the usual way, to compare with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ELEMENT = np.dtype(">u4")
"""An element of a sequence, in bytes: the highest byte first, so that bytes sort as elements do."""


def shared_prefixes(sequences: Sequence[bytes]) -> list[int]:
    """For each sequence, how many elements it has in common, from its start, with the best of those before it.

    This is a prefix cache that is never full and finds every single element (those of real servers work in blocks).
    """
    order = sorted(range(len(sequences)), key=sequences.__getitem__)
    left: dict[int, int | None] = dict(zip(order, [None, *order], strict=False))
    right: dict[int, int | None] = dict(zip(order, [*order[1:], None], strict=False))
    common = {one: _common(sequences[other], sequences[one]) for one, other in zip(order[1:], order, strict=False)}
    shared = [0] * len(sequences)
    # taken out from the last to the first, each finds only earlier ones beside it; the nearest has most in common
    for one in reversed(range(len(sequences))):
        lower, upper = left[one], right[one]
        to_lower = common.get(one, 0) if lower is not None else 0
        to_upper = common.get(upper, 0) if upper is not None else 0
        shared[one] = max(to_lower, to_upper)
        if upper is not None:
            left[upper] = lower
            common[upper] = min(to_lower, to_upper)
        if lower is not None:
            right[lower] = upper
    return shared


def _common(one: bytes, other: bytes) -> int:
    """How many elements two sequences begin with in common."""
    size = min(len(one), len(other))
    differ = np.frombuffer(one[:size], ELEMENT) != np.frombuffer(other[:size], ELEMENT)
    return int(differ.argmax()) if differ.any() else size // ELEMENT.itemsize
