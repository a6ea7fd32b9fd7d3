"""The cost of scattered slots in prefill, and the cost of making a plan.

Prefill: one layer of a prompt, with its own slots in one run or in many, as in a pool long in use.

Plans: the host's time for one request's part and for the whole plan with its groups. In ``modules``, decoding requests
read a thousand modules each: all the same, half in common, or none in common. In ``repair``, a tenth of a stored
segment is recomputed, so rows and left-out slots are scattered over all of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inlay.attention.backend import AttentionOptions, Backend
from inlay.attention.plan import Item, Part, build_plan
from inlay.attention.storage import LayerShape
from inlay.models.load import DTYPES
from inlay.slots import SlotRange
from inlay_lab.bench.machine import CacheFlush, clocked, in_turns


@dataclass(frozen=True)
class PrefillCase:
    """A prompt of ``tokens`` tokens in chunks of ``chunk``, measured at each number of slot runs in ``runs``."""

    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    runs: tuple[int, ...]
    chunk: int


def measure_prefill(case: PrefillCase, backend: Backend, runs: int, flush: CacheFlush) -> dict[str, Any]:
    """Milliseconds for each number of runs, and its ratio to the first of them."""
    steps = {str(count): clocked(prefill_step(case, count, backend), flush) for count in case.runs}
    timed = in_turns(steps, runs)
    first = timed[str(case.runs[0])].seconds
    return {
        "dtype": case.dtype,
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "tokens": case.tokens,
        "runs": timed[str(case.runs[0])].runs,
        "ms": {count: round(timing.ms, 4) for count, timing in timed.items()},
        "fastest_ms": {count: round(timing.fastest * 1000, 4) for count, timing in timed.items()},
        "ratio": {count: round(timing.seconds / first, 3) for count, timing in timed.items()},
    }


def prefill_step(case: PrefillCase, count: int, backend: Backend) -> Callable[[], Tensor]:
    """The prompt's attention, (tokens, heads, head_dim), with its slots in ``count`` runs."""
    ranges = scattered(case.tokens // case.chunk, count, case.chunk)
    dtype, generator = DTYPES[case.dtype], torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(heads, case.tokens, case.head_dim, generator=generator).to(dtype)
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    pool = backend.make_pool([LayerShape(case.kv_heads, case.head_dim)], dtype, max(each.end for each in ranges))
    plan = build_plan([Part.of(0, case.tokens, (), ranges)])
    options = AttentionOptions(scale=case.head_dim**-0.5)
    return lambda: backend.attend(query, key, value, pool, plan, 0, options)


def scattered(chunks: int, count: int, chunk: int) -> list[SlotRange]:
    """``chunks`` chunks in ``count`` runs, in random order, with at least one chunk between any two runs."""
    draw = random.Random(0)
    borders = [0, *sorted(draw.sample(range(1, chunks), count - 1)), chunks]
    lengths = [end - begin for begin, end in pairwise(borders)]
    firsts, at = [0] * count, 0
    for number in draw.sample(range(count), count):
        firsts[number] = at
        at += lengths[number] + 1
    return [SlotRange(first * chunk, length * chunk) for first, length in zip(firsts, lengths, strict=True)]


def measure_plans(requests: int, modules: int, tokens: int, runs: int) -> list[dict[str, Any]]:
    """Milliseconds of one request's part and of the whole plan, and its number of entries.

    Args:
        requests: Decoding requests in the plan.
        modules: Modules that each request reads.
        tokens: Tokens of the partly recomputed segment.
    """
    behind = 2 * (requests + 1) * modules * _SIZE
    common = {"the same": modules, "half the same": modules // 2, "their own": 0}
    rows = []
    for name, same in common.items():
        own = modules - same
        read = [[*range(same), *range(same + n * own, same + (n + 1) * own)] for n in range(requests)]
        makers = [_decoding(numbers, behind + 64 * n) for n, numbers in enumerate(read)]
        rows.append({"what": "modules", "read": name} | _measured(makers, runs))
    rows.append(
        {"what": "repair", "read": f"a tenth of {tokens:,} tokens anew"} | _measured([_recompute(tokens)], runs)
    )
    return rows


_SIZE = 10  # tokens of a module


def _decoding(modules: list[int], slot: int) -> Callable[[], Part]:
    """A decoding request that reads these modules, each at its own shift."""
    items = [Item(SlotRange(12 * n, _SIZE), 0, _SIZE * place) for place, n in enumerate(modules)]
    return lambda: Part.of(_SIZE * len(modules), 1, items, (SlotRange(slot, 1),))


def _recompute(tokens: int) -> Callable[[], Part]:
    anew = np.sort(np.random.default_rng(0).choice(tokens, tokens // 10, replace=False))
    stored = Item(SlotRange(0, tokens), 0, 100, masked=True, left_out=tuple(anew.tolist()))
    return lambda: Part.at(anew + 100, (stored,), (SlotRange(2 * tokens, tokens),))


def _measured(makers: list[Callable[[], Part]], runs: int) -> dict[str, Any]:
    parts = [make() for make in makers]
    timed = in_turns({"part": clocked(makers[0]), "plan": clocked(lambda: build_plan(parts).groups)}, runs)
    return {
        "requests": len(parts),
        "items": sum(part.items.shape[1] for part in parts),
        "entries": build_plan(parts).groups.stretches.shape[1],
        "ms": {name: round(timing.ms, 4) for name, timing in timed.items()},
        "fastest_ms": {name: round(timing.fastest * 1000, 4) for name, timing in timed.items()},
    }
