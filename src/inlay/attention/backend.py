"""The interface of an attention backend and the options of one attention layer."""

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

    Args:
        scale: Factor on query · key.
        window: Width of the sliding window in positions, the query's own included. None: no window.
        softcap: Scores become softcap · tanh(score / softcap). None: no cap.
        sinks: Logits that enter the softmax without a value, (heads,). None: no sinks.
        slopes: ALiBi slopes, (heads,). A score falls by slope times the distance in positions. None: no bias.
        rotary: How a query is rotated when it reads at a shift. ``UNTURNED`` if keys carry no position, None if shifts
            are not allowed.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    rotary: Rotary | None = None


class Backend(Protocol):
    """An implementation of attention over a KV pool.

    A backend owns its device, its pools and its work tables. It serves one thread at a time. A backend that can record
    passes and replay them (GPU graphs) is also a ``RecordingBackend``.

    Attributes:
        name: Name in the settings, such as "torch".
        device: Device of the tensors of a pass.
        scratch_bytes: Upper bound of the memory that its calls take beside pools and tensors of a pass. A memory budget
            must leave room for it.
    """

    name: str
    device: torch.device

    @property
    def scratch_bytes(self) -> int: ...

    def make_pool(self, layers: Sequence[LayerShape], dtype: torch.dtype, slots: int) -> KVStorage:
        """Allocate a pool for the keys and values of ``slots`` tokens, on this backend's device and in its own
        layout.
        """
        ...

    def prepare(self, plan: Plan) -> None:
        """Make this backend's work tables for a plan, and keep them in the plan. ``attend`` calls this if needed."""
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

        Args:
            query: (heads, rows, head_dim), already rotated to the positions of the rows.
            key, value: (kv_heads, rows, head_dim), of the same rows. They are stored at ``plan.slots`` of ``layer``.
            pool: A pool that this backend has made.
            plan: Says which rows read which stored keys.
            layer: Number of the layer in the pool.
            options: How the layer attends.

        Returns:
            (rows, heads, head_dim) in the query's dtype. Partial results are merged in fp32.
        """
        ...

    def attention_mass(
        self, query: Tensor, pool: KVStorage, part: Part, layer: int, options: AttentionOptions
    ) -> Tensor:
        """Return how much the rows of one part attend to each key they read. Call it after ``attend`` stored their
        keys.

        Args:
            query: (heads, rows, head_dim), the rows of this part only, as given to ``attend``.
            pool: A pool that this backend has made.
            part: The rows and the keys that they read.
            layer: Number of the layer in the pool.
            options: How the layer attends.

        Returns:
            (keys,), fp32: the softmax weights summed over rows and heads, for the keys of ``part.items`` in their
            order. A key that no row sees has 0.
        """
        ...


class Recording(Protocol):
    """Work tables at fixed memory addresses, so that a pass recorded with them can be replayed.

    Attributes:
        plan: The plan that the pass is recorded with. Its number of rows is fixed.
    """

    plan: Plan

    def fill(self, plan: Plan) -> bool:
        """Load another plan into the recorded pass.

        Args:
            plan: May have fewer rows than the recording, and may be advanced afterwards.

        Returns:
            False if the plan's tables are too large for the recording.
        """
        ...


@runtime_checkable
class RecordingBackend(Backend, Protocol):
    """A backend that can record its passes (engine/runner.py)."""

    def capture(self, plan: Plan, rows: int) -> Recording:
        """Prepare a recording for passes of at most ``rows`` rows that resemble this plan.

        Rows beyond those of the loaded plan store nothing and give zero.
        """
        ...
