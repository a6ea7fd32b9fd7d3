"""Forward passes of the stock model over packed spans, with our attention in every layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inlay.attention.contract import Backend
from inlay.attention.plan import Plan, build_plan
from inlay.cache.pool import KVPool
from inlay.engine.seat import Work
from inlay.models.interface import IMPLEMENTATION, PassContext, attention_implementation
from inlay.models.load import LoadedModel


class Runner:
    """Runs work through the model. Keys and values go to the pool; logits come back where asked for."""

    def __init__(self, loaded: LoadedModel, pool: KVPool, backend: Backend) -> None:
        self._loaded = loaded
        self._pool = pool
        self._backend = backend

    def run(self, work: Sequence[Work], rows: Sequence[int], plan: Plan | None = None) -> Tensor:
        """One forward pass over packed work.

        rows: the packed rows whose logits are wanted.
        plan: the plan of just this work, where the caller has it already.
        Returns (len(rows), vocabulary) in the model's dtype.
        """
        plan = plan or build_plan([w.span for w in work])
        ids = torch.tensor([token for w in work for token in w.ids])
        context = PassContext(self._backend, self._pool, plan, self._loaded.spec)
        with torch.inference_mode(), attention_implementation(self._loaded.model, IMPLEMENTATION):
            output = self._loaded.model(
                input_ids=ids[None],
                position_ids=plan.positions[None],
                use_cache=False,
                logits_to_keep=torch.tensor(rows, dtype=torch.long),
                inlay=context,
            )
        return output.logits[0]
