"""What every attention backend does, whatever it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from inlay.attention.plan import Plan
from inlay.attention.rope import Rotary
from inlay.kv.pool import KVPool


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How one layer attends.

    scale: factor on query · key.
    window: how many positions back a query sees, itself included; None for all. Positions are counted, not keys.
    softcap: scores become softcap · tanh(score / softcap); None for no cap.
    sinks: (heads,) logits that take part in the softmax and carry no value; None for none.
    slopes: (heads,) ALiBi: a score falls by slope times the distance in positions; None for no such bias.
    rotary: how queries turn when they read at a shift; None where no shift may be asked for.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    rotary: Rotary | None = None


class Backend(Protocol):
    """An implementation of attention over the pool."""

    name: str

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, pool: KVPool, plan: Plan, layer: int, options: AttentionOptions
    ) -> Tensor:
        """Store the new keys and values, then attend as the plan says.

        query: (heads, rows, head_dim), already rotated to the rows' positions.
        key, value: (kv_heads, rows, head_dim), of the same rows; go to ``plan.slots`` of ``layer``.
        Returns (rows, heads, head_dim) in the query's dtype. Partial results are merged in fp32.
        """
        ...
