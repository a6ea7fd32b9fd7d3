"""What every attention backend does, whatever it runs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from inlay.attention.plan import Part, Plan
from inlay.attention.rope import Rotary
from inlay.attention.storage import KVStorage, LayerShape


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How one layer attends.

    scale: factor on query · key.
    window: how many positions back a query sees, itself included; None for all. Positions are counted, not keys.
    softcap: scores become softcap · tanh(score / softcap); None for no cap.
    sinks: (heads,) logits that take part in the softmax and carry no value; None for none.
    slopes: (heads,) ALiBi: a score falls by slope times the distance in positions; None for no such bias.
    rotary: how queries turn when they read at a shift, ``UNTURNED`` where they need not; None where no shift may be
        asked for.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    rotary: Rotary | None = None


class Backend(Protocol):
    """An implementation of attention over a pool. It owns its device, its pools and its work tables.

    device: where the tensors of a pass lie. scratch_bytes: the most memory that its calls take beside pools and tensors
    of a pass; what a budget has to leave for it.

    One backend serves one thread at a time. One whose passes can be recorded and played again (graphs of a GPU) is a
    ``RecordingBackend`` as well.
    """

    name: str
    device: torch.device

    @property
    def scratch_bytes(self) -> int: ...

    def make_pool(self, layers: Sequence[LayerShape], dtype: torch.dtype, slots: int) -> KVStorage:
        """Memory for the keys and values of so many token slots, on this backend's device and in its own layout."""
        ...

    def prepare(self, plan: Plan) -> None:
        """Make this backend's work tables of a plan, once; they stay with the plan. ``attend`` does if need be."""
        ...

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pool: KVStorage,
        plan: Plan,
        layer: int,
        options: AttentionOptions,
    ) -> Tensor:
        """Store the new keys and values, then attend as the plan says.

        query: (heads, rows, head_dim), already rotated to the rows' positions.
        key, value: (kv_heads, rows, head_dim), of the same rows; go to ``plan.slots`` of ``layer``.
        pool: one that this backend has made.
        Returns (rows, heads, head_dim) in the query's dtype. Partial results are merged in fp32.
        """
        ...

    def attention_mass(
        self, query: Tensor, pool: KVStorage, part: Part, layer: int, options: AttentionOptions
    ) -> Tensor:
        """How much the rows of one part attend to each key that they read, when ``attend`` has stored their own.

        query: (heads, rows, head_dim), of this part's rows alone, as ``attend`` has them.
        Returns (keys,), fp32: the sum over rows and heads of the weights behind the softmax, for the keys of
        ``part.items`` in their order; 0 for a key that no row sees.
        """
        ...


class Recording(Protocol):
    """Tables in memory that stays where it is, so that a pass that was recorded with them can be played again.

    plan: what the pass is recorded with. It has a fixed number of rows.
    """

    plan: Plan

    def fill(self, plan: Plan) -> bool:
        """Let the pass that was recorded be this plan's, which may have fewer rows and may be advanced afterwards.

        Returns False where its tables are too large for that.
        """
        ...


@runtime_checkable
class RecordingBackend(Backend, Protocol):
    """A backend whose passes can be recorded (engine/graphs.py)."""

    def capture(self, plan: Plan, rows: int) -> Recording:
        """What passes of at most so many rows that are much like this one are recorded with.

        Rows beyond a plan's own store nothing, and what comes out for them is zero.
        """
        ...
