"""One answer: its sampling state, its generated tokens, and the conditions that end it in the engine.

The engine handles tokens only. Stop strings are detected on text (output/), which then ends the answer.

An answer may report the log-probabilities of its prompt's tokens too (``PromptScores``). Cached KV has no logits, so a
scored prompt reads nothing from the store. The logits of a whole prompt never exist at once: a pass is limited to the
tokens whose logits fit a bound, and processes them in blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from inlay.errors import InlayError
from inlay.events import Fault, TokenEvent
from inlay.logprobs import FlatLogprobs, Logprob, RankedLogprob
from inlay.sampling.params import SamplingParams
from inlay.sampling.report import Sampled
from inlay.sampling.row import Row

PASS_LOGITS = 2**26  # logits per pass: 256 MiB in fp32
BLOCK = 64  # rows per block


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


class PromptScores:
    """The log-probabilities of every token of one prompt but the first.

    Attributes:
        ids: of the prompt.
        top: the number of most probable tokens to report.
        entries: per token, itself first, then the most probable others; None for the first token.
        told: True if the listener has received them.
    """

    def __init__(self, ids: Sequence[int], top: int) -> None:
        self._ids = ids
        self._top = top
        self.entries: FlatLogprobs[dict[int, Logprob] | None] = FlatLogprobs([None])
        self.told = False

    @property
    def complete(self) -> bool:
        """True if all tokens are scored. A prompt is scored from its start on."""
        return len(self.entries) == len(self._ids)

    def wanted(self, first: int, rows: int) -> int:
        """How many rows from token ``first`` on are needed: none for the prompt's last token or for the answer."""
        return max(0, min(rows, len(self._ids) - 1 - first))

    def add(self, first: int, logits: Tensor) -> None:
        """Add the logits of the tokens from ``first`` on, (rows, vocabulary). Raises InlayError if they are damaged."""
        for at in range(0, len(logits), BLOCK):
            self._add(first + at, logits[at : at + BLOCK].float())

    def _add(self, first: int, scores: Tensor) -> None:
        targets = self._ids[first + 1 : first + 1 + len(scores)]
        columns = torch.tensor(targets, device=scores.device)[:, None]
        totals = scores.logsumexp(dim=1, keepdim=True)
        if not bool(totals.isfinite().all()):
            raise InlayError(
                "the logits of the prompt hold NaN or inf; the model's weights or inputs are damaged",
                code="model.invalid_numbers",
            )
        chosen = scores.gather(1, columns)
        earlier = torch.arange(scores.shape[1], device=scores.device) < columns  # ties rank by token id
        before = (scores > chosen) | ((scores == chosen) & earlier)
        ranks = (1 + before.sum(dim=1)).tolist()
        own = (chosen - totals)[:, 0].tolist()
        leaders = scores.topk(min(self._top, scores.shape[1]), dim=1)
        others = (leaders.values - totals).tolist(), leaders.indices.tolist()
        for row, (token, logprob, rank) in enumerate(zip(targets, own, ranks, strict=True), first + 1):
            entry: list[RankedLogprob] = [(token, logprob, rank)]
            for place, (value, other) in enumerate(zip(*(each[row - first - 1] for each in others), strict=True), 1):
                if other != token and value > -torch.inf:
                    entry.append((other, value, place))
            if row == len(self.entries):  # False for rows that are recomputed after a preemption
                self.entries.append(entry)


def most_rows(vocabulary: int) -> int:
    """The most tokens in a pass that scores a prompt."""
    return max(1, PASS_LOGITS // vocabulary)
