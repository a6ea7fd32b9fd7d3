"""Records the composition of an engine's passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from inlay.client.base import Base
from inlay.engine.forward import ForwardPass, StepObserver
from inlay.engine.request import Request


class Observed(StepObserver):
    """Every pass so far, and each request's rows of logits, (vocabulary,), one a token.

    tokens: of each pass. lengths: of the spans of each pass.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.lengths: list[list[int]] = []
        self.logits: dict[Request, list[Tensor]] = {}

    def computed(self, made: ForwardPass, logits: Tensor, running: Sequence[Any], seconds: float) -> None:
        self.lengths.append([len(work.ids) for work in made.work])
        self.tokens.append(sum(self.lengths[-1]))
        for request in dict.fromkeys(request for request, _ in made.sampled):
            del self.logits.setdefault(request, [])[len(request.token_ids) :]  # rows of a rejected draft
        for (request, _), row in zip(made.sampled, logits, strict=True):
            self.logits[request].append(row.clone())


def observed(llm: Base) -> Observed:
    """The passes of an engine from now on."""
    found = Observed()
    llm.observe(found)
    return found
