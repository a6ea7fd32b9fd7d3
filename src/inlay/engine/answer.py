"""One answer: its sampling state, its generated tokens, and the conditions that end it in the engine.

The engine handles tokens only. Stop strings are detected on text (output/), which then ends the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from inlay.errors import InlayError
from inlay.events import Fault, TokenEvent
from inlay.logprobs import RankedLogprob
from inlay.sampling.params import SamplingParams
from inlay.sampling.report import Sampled
from inlay.sampling.row import Row


@dataclass(eq=False, slots=True)
class SamplingState:
    """The sampling state of one answer, and its end conditions.

    Attributes:
        row: its row in the sampler, with its guide.
        stop_ids: the model's end-of-sequence tokens; empty if they are ignored.
        limit: the most tokens to generate.
        forced: the given tokens of the answer, if it is not sampled.
    """

    params: SamplingParams
    row: Row
    stop_ids: frozenset[int]
    limit: int
    forced: Sequence[int] = ()

    def choose(self, sampled: Sampled | InlayError, said: int) -> Sampled | InlayError:
        """The token behind ``said`` others: the sampled one, or the forced one if the answer is given."""
        if not self.forced or isinstance(sampled, InlayError):
            return sampled
        return Sampled(self.forced[said])


@dataclass(eq=False, slots=True)
class Answer:
    """The tokens of one request's answer, and which of them have been emitted.

    Attributes:
        told: the number of tokens that the listener has acknowledged.
        logprobs, distributions: of the tokens behind these; see TokenEvent.
        ended: True if it has ended and the listener does not know.
        drafted, accepted: draft tokens that were run for it, and those of them that it has.
        first_token_at, last_at: times of its first token, and of its last one or its end, on ``time.perf_counter``.
    """

    token_ids: list[int] = field(default_factory=list)
    told: int = 0
    logprobs: list[tuple[RankedLogprob, ...]] = field(default_factory=list)
    distributions: list[bytes] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | None = None
    ended: bool = False
    first_token_at: float | None = None
    last_at: float = 0.0
    drafted: int = 0
    accepted: int = 0

    def add(self, sampled: Sampled, sampling: SamplingState, logits: Tensor, now: float) -> None:
        """Append the next token and check for the end. ``logits``, (vocabulary,), are those it was chosen from."""
        self.first_token_at = self.first_token_at or now
        self.last_at = now
        self.token_ids.append(sampled.token_id)
        if sampled.logprob is not None:
            self.logprobs.append(sampled.top)
        if sampling.forced:
            self.distributions.append(_log_probabilities(logits))
        self._check_end(sampled.token_id, sampling)

    def finish(self, reason: Literal["stop", "length"], now: float) -> None:
        """End the answer."""
        self.finish_reason, self.last_at, self.ended = reason, now, True

    def event(self, request_id: str, index: int, error: BaseException | None, arrival: float) -> TokenEvent:
        """The event for the listener. ``error`` is the fault that ended the request early, if any."""
        return TokenEvent(
            request_id,
            index,
            self.token_ids[self.told :],
            self.told,
            self.logprobs,
            self.distributions,
            self.finish_reason,
            self.stop_reason,
            None if error is None else Fault.of(error),
            self.last_at - arrival,
            drafted=self.drafted,
            accepted=self.accepted,
        )

    def heard(self) -> None:
        """Record that the listener has received the event."""
        self.told, self.ended = len(self.token_ids), False
        if self.logprobs:
            self.logprobs = []
        if self.distributions:
            self.distributions = []

    def _check_end(self, token: int, sampling: SamplingState) -> None:
        said, guide = len(self.token_ids), sampling.row.guide
        may_end = said >= sampling.params.min_tokens
        if may_end and token in sampling.params.stop_ids:
            self.finish_reason, self.stop_reason = "stop", token
        elif may_end and token in sampling.stop_ids:
            self.finish_reason = "stop"
        elif guide is not None and guide.complete:
            self.finish_reason = "stop"  # even before min_tokens, because no token can follow
        elif said >= sampling.limit:
            self.finish_reason = "length"
        self.ended = self.finish_reason is not None


def _log_probabilities(logits: Tensor) -> bytes:
    return logits.float().log_softmax(dim=-1).numpy(force=True).astype("<f4", copy=False).tobytes()
