"""What one request for answers came to, for everybody who counts: metrics, the log line, a tenant's limits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from inlay.openai import Endpoint, Failure
from inlay.server.follow import News
from inlay.types import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from inlay.server.metric_families import Step
    from inlay.server.metrics import Metrics
    from inlay.server.tenants import Tenant


class Tally:
    """Kept while a request is answered; ``end`` comes once."""

    def __init__(self, metrics: Metrics, endpoint: Endpoint, tenant: Tenant) -> None:
        self._metrics = metrics
        self._watch = metrics.begin(endpoint, tenant)
        self._outputs: dict[int, RequestOutput] = {}  # the last of each prompt
        self._said: dict[tuple[int, int], int] = {}  # tokens of each answer, by prompt and choice
        self.said = 0  # tokens of all answers
        self._asked_at = 0.0
        self._took: dict[Step, float] = {}

    @property
    def outputs(self) -> list[RequestOutput]:
        """The last output of each prompt that has one."""
        return [output for _, output in sorted(self._outputs.items())]

    @property
    def tokens(self) -> int:
        """Of prompts and answers."""
        return self.said + sum(output.usage.prompt_tokens for output in self._outputs.values())

    def asked(self, params: SamplingParams) -> None:
        """The engine is asked now."""
        self._watch.asked(params)
        self._asked_at = time.perf_counter()

    def note(self, changed: Sequence[News]) -> None:
        """The engine has said something."""
        if not self._outputs:
            # What is not the engine's own time: laying the prompt out, and the ways there and back.
            ttft_s = changed[0][1].metrics.ttft_s or 0.0
            self.took("lay_out", max(0.0, time.perf_counter() - self._asked_at - ttft_s))
        self._outputs.update(changed)
        more = []
        for number, output in changed:
            for answer in output.outputs:
                at, tokens = (number, answer.index), len(answer.token_ids)
                more.append(tokens - self._said.get(at, 0))
                self._said[at] = tokens
        self.said += sum(more)
        self._watch.tokens(sum(more), steps=max(more, default=0))

    def took(self, step: Step, seconds: float) -> None:
        """The server itself took so long for a step; several times are added up."""
        self._took[step] = self._took.get(step, 0.0) + seconds

    def end(self, failure: Failure | None) -> None:
        """It is over. failure: what was answered in place of an answer, or ended it."""
        for step, seconds in self._took.items():
            self._metrics.overhead(step, seconds)
        self._watch.end(self.outputs, failure)
