"""Shadow sampling: a sample of answers that read approximations is compared with full prefill, in idle time.

A sampled answer runs twice more with its tokens forced (forced_runs.py): over its own composed prompt, and over the
fully computed prompt.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from inlay.engine.background.divergence import AnswerComparison, DivergenceLog, Subject
from inlay.engine.background.forced_runs import ForcedAnswer, ForcedRuns
from inlay.engine.request import Request
from inlay.engine.runner import Runner
from inlay.kv.store import SegmentStore
from inlay.prompt.composed import CachedSpan, ComposedPrompt
from inlay.types import ShadowStats


class ShadowSampler(ForcedRuns):
    """Compares answers of one store's requests with full prefill.

    Args:
        log: collects the comparisons.
        share: the share of answers that read approximations to sample, 0 to 1.
        seed: of the sampling.
    """

    failure = "an answer could not be compared with full prefill"

    def __init__(
        self, store: SegmentStore, runner: Runner, divergence: DivergenceLog, *, share: float, seed: int | None = None
    ) -> None:
        super().__init__(store, runner, most_prompts=1)
        self.divergence = divergence
        self._chosen = share
        self._random = random.Random(seed)
        self._samples = 0

    def answered(self, request: Request) -> None:
        """Consider a request that has ended for sampling."""
        answer, asked = request.answer, request.prompt.request
        if request.usage is None or request.leader is not None or asked.forced:
            return
        if all(not isinstance(part, CachedSpan) or part.exact for part in request.prompt.composed):
            return
        whole = answer.finish_reason is not None and request.error is None and answer.token_ids
        if whole and self._random.random() < self._chosen:
            self._add(asked, request.prompt.composed, answer.token_ids)

    def stats(self) -> ShadowStats:
        """Counters and totals. Thread-safe."""
        return ShadowStats(
            waiting=sum(map(len, list(self._waiting.values()))) + (self._begun is not None),
            samples=self._samples,
            tokens=self.tokens,
            seconds=self.seconds,
            dropped=tuple(self._dropped.items()),
            totals=self.divergence.totals(),
        )

    def _prompts(self, sample: ForcedAnswer) -> tuple[ComposedPrompt, ...]:
        return (sample.composed,)

    def _compared(self, sample: ForcedAnswer, found: Sequence[AnswerComparison]) -> None:
        (one,), asked = found, sample.request
        subject = Subject(asked.salt, asked.schema, asked.schema_digest, asked.policy)
        self.divergence.add(subject, one, asked.scope.tenant)
        self._samples += 1
