"""Reads the logits that an engine samples from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inlay import LLM, SamplingParams
from inlay.models.load import LoadedModel


class Recorder:
    """An LLM whose logits are kept: ``logits[request id]`` is a list of (vocabulary,) rows, one a token."""

    def __init__(self, loaded: LoadedModel, **settings: Any) -> None:
        self.llm = LLM(loaded, kv_memory="64MiB", chunk_size=settings.pop("chunk_size", 16), **settings)
        self.logits: dict[str, list[Tensor]] = {}
        engine = self.llm.client.engine
        run = engine._runner.run
        pass_of = engine._pass

        def made(step: Any) -> Any:
            self._made = pass_of(step)
            return self._made

        def recorded(work: Any, rows: Any, plan: Any = None) -> Tensor:
            logits = run(work, rows, plan)
            if rows:
                for (request, _), row in zip(self._made.sampled, logits, strict=True):
                    self.logits.setdefault(request.id, []).append(row.clone())
            return logits

        engine._pass = made  # type: ignore[method-assign]
        engine._runner.run = recorded  # type: ignore[method-assign]

    def greedy(self, prompts: Any, tokens: int = 6, **policy: Any) -> list[tuple[Any, Tensor]]:
        """Outputs with their logits, (tokens, vocabulary)."""
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        outputs = self.llm.generate(prompts, params, **policy)
        return [(output, torch.stack(self.logits.pop(output.request_id))) for output in outputs]


def close(logits: Tensor, expected: Tensor) -> None:
    """Within 1e-4 absolute, the contract of fp32."""
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
