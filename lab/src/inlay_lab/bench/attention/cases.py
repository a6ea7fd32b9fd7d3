"""The decode step of the attention benchmark: stored tokens, shared tokens and their placement in memory.

The part on segments compares one long segment with many short ones, by the placement of the same tokens:

- ``one``: a single run of slots.
- ``neighbours``: segments side by side in the pool, read unshifted.
- ``scattered``: each segment in a chunk of its own, read unshifted.
- ``shifted``: scattered, each segment encoded at position 0 and read at its own shift.

Stored keys carry the rotation of their encoding positions, so all four give the same output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inlay.attention.backend import AttentionOptions, Backend
from inlay.attention.plan import Item, Part, build_plan, items_at
from inlay.attention.rope import Rotary
from inlay.attention.storage import KVStorage, LayerShape
from inlay.kv.pool import KVPool
from inlay.models.load import DTYPES
from inlay.slots import SlotRange, cut
from inlay_lab.bench.machine import CacheFlush, clocked, in_turns

_STRIDE = 17  # distance in the noise between the starts of two sequences


@dataclass(frozen=True)
class Case:
    """A batch in which every sequence decodes one token. A sequence attends to its context and to the new token.

    Attributes:
        context: Stored tokens of each sequence (the paper's n_p + n_c).
        shared: Tokens at the start of the context that all sequences share (n_s).
    """

    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    context: int
    shared: int
    chunk: int

    @property
    def flops(self) -> int:
        """Floating-point operations of query · key and weight · value, for all rows and heads."""
        return 4 * self.batch * self.heads * (self.context + 1) * self.head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value."""
        return 2 * self.kv_heads * self.head_dim * DTYPES[self.dtype].itemsize

    def kv_bytes(self, *, copies: bool) -> int:
        """Distinct bytes of keys and values.

        Args:
            copies: Count the shared part once for every sequence.
        """
        shared = self.shared * (self.batch if copies else 1)
        return (shared + self.batch * (self.context - self.shared + 1)) * self.token_bytes


class Content:
    """Queries, keys and values of a case, the same for every column: views of one block of noise.

    Attributes:
        query: (heads, batch, head_dim).
        key: Keys of the new tokens, (kv_heads, batch, head_dim).
        value: Values of the new tokens, (kv_heads, batch, head_dim).
    """

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(0)

        def noise(heads: int, tokens: int) -> Tensor:
            drawn = torch.randn(heads, tokens, case.head_dim, generator=generator)
            return drawn.to(DTYPES[case.dtype])

        self._case = case
        length = case.context + _STRIDE * case.batch
        self._keys, self._values = noise(case.kv_heads, length), noise(case.kv_heads, length)
        self.query = noise(case.heads, case.batch)
        self.key, self.value = noise(case.kv_heads, case.batch), noise(case.kv_heads, case.batch)

    def shared(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the shared part: (kv_heads, shared, head_dim) each."""
        return self._keys[:, : self._case.shared], self._values[:, : self._case.shared]

    def private(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence behind the shared part: (kv_heads, context - shared, head_dim) each."""
        at = slice(self._case.shared + _STRIDE * sequence, self._case.context + _STRIDE * sequence)
        return self._keys[:, at], self._values[:, at]


class Pages:
    """The sequences in the chunks of a pool, each with a slot for its new token.

    Args:
        copies: Store the shared part once for every sequence.
    """

    def __init__(self, case: Case, content: Content, *, copies: bool) -> None:
        self.content = content
        self.options = AttentionOptions(scale=case.head_dim**-0.5)
        self.pool, self.parts = _pool(case, copies), list[Part]()
        self.storage = KVStorage([LayerShape(case.kv_heads, case.head_dim)], DTYPES[case.dtype], self.pool.slots)
        common: tuple[SlotRange, ...] = ()
        if case.shared and not copies:
            common = self._store(case.shared, content.shared())
        for sequence in range(case.batch):
            self.parts.append(self._sequence(case, sequence, common))

    def _sequence(self, case: Case, sequence: int, common: tuple[SlotRange, ...]) -> Part:
        keys, values = self.content.private(sequence)
        if case.shared and not common:
            shared_keys, shared_values = self.content.shared()
            keys, values = torch.cat((shared_keys, keys), 1), torch.cat((shared_values, values), 1)
        stored = keys.shape[1]
        own = self._store(stored + 1, (keys, values))
        context = items_at(common, 0) + items_at(cut(own, 0, stored), case.context - stored)
        return Part.of(case.context, 1, context, cut(own, stored, 1))

    def _store(self, tokens: int, states: tuple[Tensor, Tensor]) -> tuple[SlotRange, ...]:
        """Allocate chunks for ``tokens`` tokens and write the given keys and values into the first of them."""
        runs = self.pool.allocate(tokens)
        assert runs is not None, "the pool is made for the case"
        at = 0
        for run in cut(runs, 0, states[0].shape[1]):
            self.storage.write(0, run, states[0][:, at : at + run.length], states[1][:, at : at + run.length])
            at += run.length
        return cut(runs, 0, tokens)


def _pool(case: Case, copies: bool) -> KVPool:
    shared = 0 if copies else case.shared
    chunks = -(-shared // case.chunk) + case.batch * -(-(case.context - shared + 1) // case.chunk)
    return KVPool(chunks * case.chunk * case.token_bytes, case.token_bytes, case.chunk)


class Dense:
    """Every sequence's own keys and values as one tensor, as a static cache of stock PyTorch code stores them.

    ``keys`` and ``values`` are (batch, kv_heads, context + 1, head_dim); the last position is the new token's.
    """

    def __init__(self, case: Case, content: Content) -> None:
        self.content = content
        self.scale = case.head_dim**-0.5
        shape = (case.batch, case.kv_heads, case.context + 1, case.head_dim)
        self.keys, self.values = (torch.empty(shape, dtype=DTYPES[case.dtype]) for _ in range(2))
        for sequence in range(case.batch):
            for target, shared, private in zip(
                (self.keys, self.values), content.shared(), content.private(sequence), strict=True
            ):
                target[sequence, :, : case.shared] = shared
                target[sequence, :, case.shared : case.context] = private

    def append(self) -> None:
        """Write the new tokens' keys and values, which is part of a step."""
        self.keys[:, :, -1] = self.content.key.transpose(0, 1)
        self.values[:, :, -1] = self.content.value.transpose(0, 1)


PLACEMENTS = ("one", "neighbours", "scattered", "shifted")
_ROWS = 32


@dataclass(frozen=True)
class SegmentCase:
    """A case of the part on segments.

    Attributes:
        query: "decode" (one row), "batch" (32 sequences, a row each) or "prefill" (32 rows of one sequence).
    """

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
    """The attention of the rows, (rows, heads, head_dim), with the tokens in this placement."""
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
    plan = build_plan(_parts(case, pieces, after))
    options = AttentionOptions(scale=case.head_dim**-0.5, rotary=rotary)
    return lambda: backend.attend(query, key, value, pool, plan, 0, options)


def pieces_of(case: SegmentCase, placement: str) -> tuple[tuple[Item, ...], int]:
    """The slots of the tokens, and the first slot behind them, at a chunk border."""
    size, apart = case.segment_tokens, case.segment_tokens
    if placement == "one":
        pieces: tuple[Item, ...] = (Item(SlotRange(0, case.tokens), 0),)
    else:
        if placement != "neighbours":
            apart = -(-size // case.chunk) * case.chunk
        at = [(number * apart, number * size) for number in range(case.segments)]
        shifted = placement == "shifted"
        pieces = tuple(Item(SlotRange(slot, size), 0 if shifted else p, p if shifted else 0) for slot, p in at)
    return pieces, -(-pieces[-1].slots.end // case.chunk) * case.chunk


def _filled(
    case: SegmentCase, pieces: tuple[Item, ...], after: int, rotary: Rotary, keys: Tensor, values: Tensor
) -> KVStorage:
    """A pool that stores the tokens and has room for at least a chunk per row behind them."""
    slots = after + case.rows * case.chunk
    pool = KVStorage([LayerShape(case.kv_heads, case.head_dim)], DTYPES[case.dtype], slots)
    at = 0
    for piece in pieces:
        cos, sin = rotary.angles([-position for position in range(piece.position, piece.end)])
        turned = rotary.turn(keys[:, at : at + piece.slots.length], cos, sin).to(pool.dtype)
        pool.write(0, piece.slots, turned, values[:, at : at + piece.slots.length].to(pool.dtype))
        at += piece.slots.length
    return pool


def _parts(case: SegmentCase, pieces: tuple[Item, ...], after: int) -> list[Part]:
    if case.query == "prefill":
        return [Part.of(case.tokens, case.rows, pieces, (SlotRange(after, case.rows),))]
    return [Part.of(case.tokens, 1, pieces, (SlotRange(after + row * case.chunk, 1),)) for row in range(case.rows)]
