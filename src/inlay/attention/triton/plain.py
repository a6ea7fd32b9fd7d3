"""Plain causal passes through FlashAttention or FlashInfer, if one of them is installed and faster on this device.

A part is plain if its rows and the keys they read have consecutive positions and consecutive slots, without a shift.
This is a prompt without modules, or a module that is encoded. If all parts of a pass are plain and long, each one
becomes one library call. The first such pass of a kind of layer runs through all libraries and measures them. A
library is used if it is faster than Triton's kernels and gives the same result.

Both calls were written from the libraries' documentation and have not been run here.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inlay.attention.backend import AttentionOptions
from inlay.attention.plan import FIRST, LENGTH, MASKED, POSITION, SHIFT, Part, Plan

logger = logging.getLogger(__name__)

#: Parts with fewer rows are left to Triton's kernels, which process many of them in one launch.
LEAST_ROWS = 128

_LARGEST_HEAD = 256  # of all libraries
_DTYPES = (torch.float16, torch.bfloat16)
_TOLERANCE = 2e-2  # relative to the norm of the Triton result, in bf16
_RUNS = 3


class PlainPart(NamedTuple):
    """Rows of a pass, and the slots that they read. The last row sees all of these."""

    first_row: int
    rows: int
    first_slot: int
    keys: int


#: query (rows, heads, head_dim), keys and values (kv_heads, keys, head_dim) → (rows, heads, head_dim)
Library = Callable[[Tensor, Tensor, Tensor, AttentionOptions], Tensor]


def plain_parts(plan: Plan) -> list[PlainPart] | None:
    """Return the parts of a plan if all are plain and long, else None."""
    found, row = list[PlainPart](), 0
    for part in plan.parts:
        if part.rows < LEAST_ROWS or not _is_plain(part):
            return None
        items = part.items
        found.append(PlainPart(row, part.rows, int(items[FIRST, 0]), int(items[LENGTH].sum())))
        row += part.rows
    return found or None


def _is_plain(part: Part) -> bool:
    items, positions = part.items, part.positions
    ends = items[[FIRST, POSITION]] + items[LENGTH]
    open_ends = ends[1][items[MASKED] == 0]  # every row sees these in full, so their positions must allow it
    return bool(
        items.size
        and not items[SHIFT].any()
        and (ends[:, :-1] == items[[FIRST, POSITION], 1:]).all()
        and ends[1, -1] == positions[-1] + 1
        and (open_ends <= positions[0] + 1).all()
        and (np.diff(positions) == 1).all()
    )


class PlainPrefill:
    """The choice between libraries and Triton's kernels for plain passes, for each kind of layer.

    Args:
        libraries: The libraries by name. One that fails or gives another result is dropped.
        seconds: Measures the seconds of a call.
    """

    def __init__(self, libraries: Mapping[str, Library], seconds: Callable[[Callable[[], Tensor]], float]) -> None:
        self.libraries = dict(libraries)
        self._seconds = seconds
        self._chosen: dict[object, Library | None] = {}

    def takes(self, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> bool:
        """Return True if libraries support this kind of layer."""
        return bool(
            self.libraries
            and query.dtype in _DTYPES
            and query.dtype == keys.dtype
            and query.shape[-1] <= _LARGEST_HEAD
            and values is not keys
            and options.sinks is None
            and options.slopes is None
        )

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        parts: list[PlainPart],
        options: AttentionOptions,
        ours: Callable[[], Tensor],
    ) -> Tensor:
        """Attend to stored keys.

        Args:
            query: (heads, rows, head_dim).
            keys, values: (kv_heads, slots, head_dim).
            parts: The plain parts of the pass.
            ours: Computes the same with Triton's kernels.

        Returns:
            (rows, heads, head_dim).
        """
        window, softcap = options.window is not None, options.softcap is not None
        kind = (query.shape[0], keys.shape[0], keys.shape[2], query.dtype, window, softcap)
        if kind not in self._chosen:
            self._chosen[kind] = self._measure(query, keys, values, parts, options, ours)
        library = self._chosen[kind]
        return ours() if library is None else _call(library, query, keys, values, parts, options)

    def _measure(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        parts: list[PlainPart],
        options: AttentionOptions,
        ours: Callable[[], Tensor],
    ) -> Library | None:
        """The fastest library that agrees with our kernels. None if our kernels are faster."""
        expected = ours().float()
        best, least, chosen = "Triton's kernels", self._seconds(ours), None
        for name, library in list(self.libraries.items()):

            def theirs(library: Library = library) -> Tensor:
                return _call(library, query, keys, values, parts, options)

            try:
                off = float((theirs().float() - expected).norm() / expected.norm().clamp_min(1e-9))
                took = self._seconds(theirs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # e.g. an incompatible version of the library
                logger.warning("%s cannot compute plain prefills here (%s); Triton's kernels do", name, error)
                del self.libraries[name]
                continue
            if not off <= _TOLERANCE:
                logger.warning("%s differs from Triton's kernels by %.2g; it is left aside", name, off)
                del self.libraries[name]
            elif took < least:
                best, least, chosen = name, took, library
        logger.info("plain prefills of %d rows run in %s", query.shape[1], best)
        return chosen


def _call(
    library: Library,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    parts: list[PlainPart],
    options: AttentionOptions,
) -> Tensor:
    found = []
    for part in parts:
        rows = query[:, part.first_row : part.first_row + part.rows].transpose(0, 1)
        read = slice(part.first_slot, part.first_slot + part.keys)
        found.append(library(rows, keys[:, read], values[:, read], options))
    return found[0] if len(found) == 1 else torch.cat(found)


def installed(device: torch.device) -> PlainPrefill | None:
    """Return the installed libraries for a GPU. None on other devices or without libraries."""
    if device.type != "cuda":
        return None
    there = {name: call for name, (module, call) in LIBRARIES.items() if find_spec(module) is not None}
    return PlainPrefill(there, device_seconds) if there else None


def flash_attention(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """Call ``flash_attn.flash_attn_func`` of FlashAttention 2. Since 2.1 its causal mask is aligned to the last key."""
    found: Tensor = import_module("flash_attn").flash_attn_func(
        query[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        softmax_scale=options.scale,
        causal=True,
        window_size=(-1 if options.window is None else options.window - 1, -1 if options.window is None else 0),
        softcap=options.softcap or 0.0,
    )
    return found[0]


def flashinfer(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """Call ``flashinfer.single_prefill_with_kv_cache``. Its causal mask is aligned to the last key."""
    found: Tensor = import_module("flashinfer").single_prefill_with_kv_cache(
        query.contiguous(),
        keys.contiguous(),
        values.contiguous(),
        causal=True,
        kv_layout="HND",
        sm_scale=options.scale,
        window_left=-1 if options.window is None else options.window - 1,
        logits_soft_cap=options.softcap or 0.0,
    )
    return found


#: By name: the module to import, and the function that calls it.
LIBRARIES: dict[str, tuple[str, Library]] = {
    "FlashAttention": ("flash_attn", flash_attention),
    "FlashInfer": ("flashinfer", flashinfer),
}


def device_seconds(call: Callable[[], Tensor]) -> float:
    """Return the median seconds of a call on the current device, after all earlier work has ended."""
    took = []
    for _ in range(1 + _RUNS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])
