"""One decode step as every column sees it: who shares what, what the keys hold, and where they lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inlay.attention.contract import AttentionOptions
from inlay.attention.plan import Span, pieces_at
from inlay.cache.pool import KVPool, LayerShape, Run, cut
from inlay.models.load import DTYPES

_STRIDE = 17  # how far apart in the noise two sequences begin


@dataclass(frozen=True)
class Case:
    """A batch in which every sequence decodes one token.

    context: stored tokens of each sequence (the paper's n_p + n_c); shared: the first of them that all have in common
    (n_s). A sequence attends to its context and to the new token itself.
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
        """Of query · key and weight · value, for all rows and heads."""
        return 4 * self.batch * self.heads * (self.context + 1) * self.head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value."""
        return 2 * self.kv_heads * self.head_dim * DTYPES[self.dtype].itemsize

    def kv_bytes(self, *, copies: bool) -> int:
        """Distinct bytes of keys and values. copies: with the shared part once for every sequence."""
        shared = self.shared * (self.batch if copies else 1)
        return (shared + self.batch * (self.context - self.shared + 1)) * self.token_bytes


class Content:
    """What a case's sequences hold, the same for every column: views of one block of noise.

    query: (heads, batch, head_dim); key, value: (kv_heads, batch, head_dim), of the new tokens.
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
        """Those of what a sequence holds behind it: (kv_heads, context - shared, head_dim) each."""
        at = slice(self._case.shared + _STRIDE * sequence, self._case.context + _STRIDE * sequence)
        return self._keys[:, at], self._values[:, at]


class Pages:
    """The sequences in the chunks of a pool, each with a place for its new token.

    copies: whether every sequence has the shared part once more for itself.
    """

    def __init__(self, case: Case, content: Content, *, copies: bool) -> None:
        self.content = content
        self.options = AttentionOptions(scale=case.head_dim**-0.5)
        self.pool, self.spans = _pool(case, copies), list[Span]()
        common: tuple[Run, ...] = ()
        if case.shared and not copies:
            common = self._store(case.shared, content.shared())
        for sequence in range(case.batch):
            self.spans.append(self._sequence(case, sequence, common))

    def _sequence(self, case: Case, sequence: int, common: tuple[Run, ...]) -> Span:
        keys, values = self.content.private(sequence)
        if case.shared and not common:
            shared_keys, shared_values = self.content.shared()
            keys, values = torch.cat((shared_keys, keys), 1), torch.cat((shared_values, values), 1)
        stored = keys.shape[1]
        own = self._store(stored + 1, (keys, values))
        context = pieces_at(common, 0) + pieces_at(cut(own, 0, stored), case.context - stored)
        return Span(case.context, 1, context, cut(own, stored, 1))

    def _store(self, tokens: int, states: tuple[Tensor, Tensor]) -> tuple[Run, ...]:
        """Take chunks for that many tokens, and write the first of them."""
        runs = self.pool.allocate(tokens)
        assert runs is not None, "the pool is made for the case"
        at = 0
        for run in cut(runs, 0, states[0].shape[1]):
            self.pool.write(0, run, states[0][:, at : at + run.length], states[1][:, at : at + run.length])
            at += run.length
        return cut(runs, 0, tokens)


def _pool(case: Case, copies: bool) -> KVPool:
    shared = 0 if copies else case.shared
    chunks = -(-shared // case.chunk) + case.batch * -(-(case.context - shared + 1) // case.chunk)
    capacity = chunks * case.chunk * case.token_bytes
    return KVPool([LayerShape(case.kv_heads, case.head_dim)], DTYPES[case.dtype], capacity, case.chunk)


class Dense:
    """Every sequence's own keys and values as one tensor, as a static cache of stock PyTorch code holds them.

    keys, values: (batch, kv_heads, context + 1, head_dim); the last place is the new token's.
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
