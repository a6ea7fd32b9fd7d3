"""The embedding of a prompt: the last hidden state of its last token, or the mean over all its tokens.

Cached tokens have no hidden states. The last token is always computed, so its embedding reads the cache like any other
request. A mean needs every token, so its prompt reads nothing from the store.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from inlay.errors import InlayError

Pooling = Literal["last", "mean"]


class PromptEmbedding:
    """Collects the hidden states of one prompt, pass by pass.

    Args:
        tokens: of the prompt.
        pooling: "last" or "mean".

    Attributes:
        told: True if the listener has received it.
    """

    def __init__(self, tokens: int, pooling: Pooling) -> None:
        self._tokens = tokens
        self._mean = pooling == "mean"
        self._sum: Tensor | None = None  # (hidden,), fp32
        self._count = 0 if self._mean else tokens - 1  # tokens that are in the sum, or are not needed
        self.told = False

    @property
    def complete(self) -> bool:
        return self._count == self._tokens

    def wanted(self, first: int, rows: int) -> range:
        """Return the needed rows among these, of the tokens from ``first`` on. Recomputed tokens count once."""
        return range(min(max(0, self._count - first), rows), min(rows, self._tokens - first))

    def add(self, hidden: Tensor) -> None:
        """Add the hidden states of the wanted rows, (rows, hidden). Raises InlayError if they are damaged."""
        total = hidden.float().sum(0)
        if not bool(total.isfinite().all()):
            raise InlayError(
                "the hidden states of the prompt hold NaN or inf; the model's weights or inputs are damaged",
                code="model.invalid_numbers",
            )
        self._sum = total if self._sum is None else self._sum + total
        self._count += len(hidden)

    def vector(self) -> bytes:
        """Return the complete embedding as little-endian fp32."""
        assert self._sum is not None, "a prompt has a token"
        pooled = self._sum / self._tokens if self._mean else self._sum
        return pooled.to("cpu", torch.float32).numpy().astype("<f4").tobytes()
