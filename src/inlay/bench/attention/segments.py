"""Many short segments against one long one: what does it cost that the same tokens lie in many places?

Three placements of the same tokens against ``one``, a single run: ``neighbours`` side by side in the pool,
``scattered`` each in a chunk of its own, both read unshifted; and ``shifted``, scattered and each encoded at position
0, so that each is read at a shift of its own. Stored keys carry the rotation of the positions that they were encoded
at, so all four give the same output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inlay.attention.contract import AttentionOptions, Backend
from inlay.attention.plan import Piece, Span, build_plan
from inlay.bench.machine import CacheFlush
from inlay.bench.timing import clocked, in_turns
from inlay.cache.pool import KVPool, LayerShape, Run
from inlay.models.load import DTYPES
from inlay.models.rope import Rotary

PLACEMENTS = ("one", "neighbours", "scattered", "shifted")
_ROWS = 32


@dataclass(frozen=True)
class SegmentCase:
    """query: "decode" (one row), "batch" (32 sequences, a row each) or "prefill" (32 rows of one sequence)."""

    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    query: str
    segments: int
    segment_tokens: int
    chunk: int

    @property
    def tokens(self) -> int:
        return self.segments * self.segment_tokens

    @property
    def rows(self) -> int:
        return 1 if self.query == "decode" else _ROWS


def measure_segments(case: SegmentCase, backend: Backend, runs: int, flush: CacheFlush) -> dict[str, Any]:
    """Milliseconds of each placement, and its ratio to the single segment."""
    timed = in_turns({placement: clocked(step(case, placement, backend), flush) for placement in PLACEMENTS}, runs)
    one = timed["one"].seconds
    return {
        "dtype": case.dtype,
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "query": case.query,
        "rows": case.rows,
        "segments": case.segments,
        "segment_tokens": case.segment_tokens,
        "runs": timed["one"].runs,
        "ms": {placement: round(timing.ms, 4) for placement, timing in timed.items()},
        "fastest_ms": {placement: round(timing.fastest * 1000, 4) for placement, timing in timed.items()},
        "ratio": {placement: round(timing.seconds / one, 3) for placement, timing in timed.items()},
    }


def step(case: SegmentCase, placement: str, backend: Backend) -> Callable[[], Tensor]:
    """The rows' attention, (rows, heads, head_dim), with the tokens lying as ``placement`` says."""
    generator = torch.Generator().manual_seed(0)

    def noise(heads: int, tokens: int) -> Tensor:
        return torch.randn(heads, tokens, case.head_dim, generator=generator)

    keys, values = noise(case.kv_heads, case.tokens), noise(case.kv_heads, case.tokens)
    query, key, value = (
        noise(heads, case.rows).to(DTYPES[case.dtype]) for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    rotary = Rotary(10000.0 ** (-torch.arange(0, case.head_dim, 2).float() / case.head_dim))
    pieces, after = pieces_of(case, placement)
    pool = _filled(case, pieces, after, rotary, keys, values)
    plan = build_plan(_spans(case, pieces, after))
    options = AttentionOptions(scale=case.head_dim**-0.5, rotary=rotary)
    return lambda: backend.attend(query, key, value, pool, plan, 0, options)


def pieces_of(case: SegmentCase, placement: str) -> tuple[tuple[Piece, ...], int]:
    """Where the tokens lie, and the first slot behind them, at a chunk border."""
    size, apart = case.segment_tokens, case.segment_tokens
    if placement == "one":
        pieces: tuple[Piece, ...] = (Piece(Run(0, case.tokens), 0),)
    else:
        if placement != "neighbours":
            apart = -(-size // case.chunk) * case.chunk
        at = [(number * apart, number * size) for number in range(case.segments)]
        shifted = placement == "shifted"
        pieces = tuple(Piece(Run(slot, size), 0 if shifted else p, p if shifted else 0) for slot, p in at)
    return pieces, -(-pieces[-1].run.end // case.chunk) * case.chunk


def _filled(
    case: SegmentCase, pieces: tuple[Piece, ...], after: int, rotary: Rotary, keys: Tensor, values: Tensor
) -> KVPool:
    """A pool that holds the tokens, with room for a chunk or more per row behind them."""
    slots = after + case.rows * case.chunk
    token_bytes = 2 * case.kv_heads * case.head_dim * DTYPES[case.dtype].itemsize
    pool = KVPool([LayerShape(case.kv_heads, case.head_dim)], DTYPES[case.dtype], slots * token_bytes, case.chunk)
    at = 0
    for piece in pieces:
        cos, sin = rotary.angles([-position for position in range(piece.start, piece.end)])
        turned = rotary.turn(keys[:, at : at + piece.run.length], cos, sin).to(pool.dtype)
        pool.write(0, piece.run, turned, values[:, at : at + piece.run.length].to(pool.dtype))
        at += piece.run.length
    return pool


def _spans(case: SegmentCase, pieces: tuple[Piece, ...], after: int) -> list[Span]:
    if case.query == "prefill":
        return [Span(case.tokens, case.rows, pieces, (Run(after, case.rows),))]
    return [Span(case.tokens, 1, pieces, (Run(after + row * case.chunk, 1),)) for row in range(case.rows)]
