"""Reads the logits that an engine samples from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inlay import LLM, SamplingParams
from inlay.engine.forward import ForwardPass, StepObserver
from inlay.models.load import LoadedModel
from inlay.types import RequestOutput


class _Logits(StepObserver):
    def __init__(self, logits: dict[str, list[Tensor]]) -> None:
        self._logits = logits

    def computed(self, made: ForwardPass, logits: Tensor, running: Sequence[Any], seconds: float) -> None:
        for request in dict.fromkeys(request for request, _ in made.sampled):
            del self._logits.setdefault(request.id, [])[len(request.token_ids) :]  # rows of a rejected draft
        for (request, _), row in zip(made.sampled, logits, strict=True):
            self._logits[request.id].append(row.clone())


class Recorder:
    """An LLM whose logits are kept: ``logits[request id]`` is a list of (vocabulary,) rows, one a token."""

    def __init__(self, loaded: LoadedModel, **settings: Any) -> None:
        self.llm = LLM(
            loaded, kv_memory=settings.pop("kv_memory", "64MiB"), chunk_size=settings.pop("chunk_size", 16), **settings
        )
        self.logits: dict[str, list[Tensor]] = {}
        self.llm.observe(_Logits(self.logits))

    def greedy(self, prompts: Any, tokens: int = 6, **policy: Any) -> list[tuple[Any, Tensor]]:
        """Outputs with their logits, (tokens, vocabulary)."""
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        outputs = self.llm.generate(prompts, params, **policy)
        return [(output, self._rows(output)) for output in outputs]

    def _rows(self, output: RequestOutput) -> Tensor:
        """The rows of an answer's tokens, without those of a last draft."""
        return torch.stack(self.logits.pop(output.request_id)[: len(output.outputs[0].token_ids)])


def close(logits: Tensor, expected: Tensor) -> None:
    """Within 1e-4 absolute, the contract of fp32."""
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
