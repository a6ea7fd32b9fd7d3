"""One answer: how its next token is chosen, what it has said, and what ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from inlay.engine.sampler.row import Row
from inlay.engine.sampler.sampler import Sampled
from inlay.engine.stream import TextStream
from inlay.errors import InlayError
from inlay.types import CompletionOutput, Logprob, SamplingParams


@dataclass(eq=False, slots=True)
class SamplingState:
    """How the tokens of one answer are chosen, and which of them end it.

    row: its row in a pass's sampling, with its guide. stop_ids: the model's end-of-sequence tokens, where they count.
    limit: the most tokens that may be generated. forced: the tokens that it has to say, where they are given.
    distributions: of forced tokens: (vocabulary,), fp32, natural logarithms.
    """

    params: SamplingParams
    row: Row
    stop_ids: frozenset[int]
    limit: int
    forced: Sequence[int] = ()
    distributions: list[Tensor] = field(default_factory=list)

    def choose(self, logits: Tensor, sampled: Sampled | InlayError, said: int) -> Sampled | InlayError:
        """The token behind ``said`` others: the one sampled, unless the answer is given. logits: (vocabulary,)."""
        if not self.forced or isinstance(sampled, InlayError):
            return sampled
        self.distributions.append(logits.float().log_softmax(dim=-1))
        return Sampled(self.forced[said])


@dataclass(eq=False, slots=True)
class Answer:
    """What one request has said so far.

    spell: one token's text, for log-probabilities. first_token_at, finished_at: on the clock of ``time.perf_counter``.
    """

    stream: TextStream
    spell: Callable[[int], str]
    token_ids: list[int] = field(default_factory=list)
    logprob: float | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    first_token_at: float | None = None
    finished_at: float | None = None

    def add(self, sampled: Sampled, sampling: SamplingState, now: float) -> None:
        """Take the next token, and end where it ends the answer."""
        self.first_token_at = self.first_token_at or now
        self.token_ids.append(sampled.token_id)
        if sampled.logprob is not None:
            self.logprob = (self.logprob or 0.0) + sampled.logprob
            self.logprobs.append({t.token_id: Logprob(t.logprob, t.rank, self.spell(t.token_id)) for t in sampled.top})
        self.stream.push(sampled.token_id)
        self._check_end(sampled.token_id, sampling)
        if self.finish_reason is not None:
            self.finish(self.finish_reason, now)

    def finish(self, reason: Literal["stop", "length"], now: float) -> None:
        """End it."""
        self.finish_reason, self.finished_at = reason, now
        self.stream.finish()  # what it held back may complete a stop string
        if reason == "length" and self.stream.stopped is not None:
            self.finish_reason, self.stop_reason = "stop", self.stream.stopped

    def completion(self, index: int, *, logprobs: bool) -> CompletionOutput:
        """The answer so far. logprobs: whether they were asked for."""
        return CompletionOutput(
            index=index,
            text=self.stream.text,
            token_ids=tuple(self.token_ids),
            cumulative_logprob=self.logprob,
            logprobs=list(self.logprobs) if logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _check_end(self, token: int, sampling: SamplingState) -> None:
        said, guide = len(self.token_ids), sampling.row.guide
        may_end = said >= sampling.params.min_tokens
        if may_end and self.stream.stopped is not None:
            self.finish_reason, self.stop_reason = "stop", self.stream.stopped
        elif may_end and token in sampling.params.stop_ids:
            self.finish_reason, self.stop_reason = "stop", token
        elif may_end and token in sampling.stop_ids:
            self.finish_reason = "stop"
        elif guide is not None and guide.complete:
            self.finish_reason = "stop"  # even before min_tokens: nothing can follow
        elif said >= sampling.limit:
            self.finish_reason = "length"
