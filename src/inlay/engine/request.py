"""One request on its way through the engine: what it attends to, what is left to compute, what it has said."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from inlay.attention.plan import Piece, Span, extend, pieces_at
from inlay.cache.pool import Run, cut
from inlay.cache.segment import Segment
from inlay.cache.splice import Cached, Fresh, Splice, pieces
from inlay.engine.sampler_report import Sampled
from inlay.engine.sampler_row import Row
from inlay.engine.stream import TextStream
from inlay.errors import ContextError, InlayError
from inlay.types import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SamplingParams, Usage


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens to run through the model, and the span that they fill."""

    ids: tuple[int, ...]
    span: Span

    def split(self, tokens: int) -> tuple[Work, Work]:
        """The first ``tokens`` tokens, and the rest, which sees them as context."""
        span = self.span
        done = pieces_at(cut(span.slots, 0, tokens), span.start)
        first = Span(span.start, tokens, span.context, cut(span.slots, 0, tokens))
        rest_length = span.length - tokens
        rest = Span(span.start + tokens, rest_length, span.context + done, cut(span.slots, tokens, rest_length))
        return Work(self.ids[:tokens], first), Work(self.ids[tokens:], rest)


@dataclass(eq=False)
class Request:
    """One answer's whole state. ``tail`` is its open tail: slots of the KV that it alone writes.

    Of several answers to one prompt, the first leads: it computes the prompt, and the others read it from the leader's
    tail. Each of them computes the prompt's last token again, for the logits behind it.
    """

    id: str
    prompt: str | None
    ids: tuple[int, ...]
    positions: tuple[int, ...]
    splice: Splice
    params: SamplingParams
    row: Row
    stop_ids: frozenset[int]
    limit: int  # the most tokens that may be generated
    stream: TextStream
    spell: Callable[[int], str]  # one token's text, for log-probabilities
    index: int = 0  # which of the prompt's answers it is
    leader: Request | None = None
    followers: list[Request] = field(default_factory=list)
    arrival: float = field(default_factory=time.perf_counter)
    hits: frozenset[bytes] | None = None  # keys of its segments that were stored when it was first looked at
    usage: Usage | None = None
    segments: list[Segment] = field(default_factory=list)
    tail: tuple[Run, ...] = ()
    tail_tokens: int = 0
    readers: int = 0  # how many answers read its tail; the prompt's slots are given back behind the last of them
    released: bool = False
    context: tuple[Piece, ...] = ()
    prefill: list[Work] = field(default_factory=list)
    last_work: Work | None = None  # the prompt's end
    token_ids: list[int] = field(default_factory=list)
    forced: Sequence[int] = ()  # the tokens that it has to say, where they are given
    distributions: list[Tensor] = field(default_factory=list)  # of forced tokens: (vocabulary,), fp32, natural logs
    logprob: float | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    error: BaseException | None = None  # what ended it before its time
    encode_s: float = 0.0
    first_token_at: float | None = None
    finished_at: float | None = None

    @property
    def fresh_tokens(self) -> int:
        """How many prompt tokens it computes for itself."""
        return sum(len(part.ids) for part in self.splice if isinstance(part, Fresh))

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def family(self) -> tuple[Request, ...]:
        """It and the answers that follow it."""
        return (self, *self.followers)

    @property
    def answered(self) -> bool:
        """Whether it and all that follow it have finished."""
        return all(member.finished for member in self.family)

    @property
    def said(self) -> int:
        """How many tokens they have said together."""
        return sum(len(member.token_ids) for member in self.family)

    def place(self, segments: dict[bytes, Segment], tail: tuple[Run, ...]) -> None:
        """Turn the splice into work, now that all that it reads has a place in the pool."""
        self.tail = tail
        for part in self.splice:
            if isinstance(part, Cached):
                segment = segments[part.spec.key]
                self.context += pieces(segment, part.start - segment.start, part.length)
            else:
                slots = cut(tail, self.tail_tokens, len(part.ids))
                span = Span(part.start, len(part.ids), self.context, slots)
                self.prefill.append(Work(part.ids, span))
                self.context += pieces_at(slots, part.start)
                self.tail_tokens += len(part.ids)
        self.last_work = self.prefill[-1]

    def place_behind(self, leader: Request, tail: tuple[Run, ...]) -> None:
        """Make the prompt's last token its only work: all before it is, or will be in this step, the leader's."""
        assert leader.last_work is not None, "a leader is placed before its followers"
        last = leader.last_work
        if len(last.ids) > 1:
            last = last.split(len(last.ids) - 1)[1]
        slots = cut(tail, 0, 1)
        self.tail, self.tail_tokens = tail, 1
        self.prefill = [Work(last.ids, Span(last.span.start, 1, last.span.context, slots))]
        self.context = last.span.context + pieces_at(slots, last.span.start)

    def force(self, tokens: Sequence[int]) -> None:
        """Make it say these tokens and keep what the model expected. Raises ContextError where they don't fit."""
        if self.limit < len(tokens):
            raise ContextError(
                f"a prompt of {len(self.ids)} tokens and its continuation of {len(tokens)} are "
                f"{len(tokens) - self.limit} too long for the model's context; shorten one of them"
            )
        self.forced = tokens

    def decode_work(self) -> Work:
        """The step that computes the KV of the token said last, and the logits behind it."""
        position = self.positions[-1] + len(self.token_ids)
        slots = cut(self.tail, self.tail_tokens, 1)
        return Work((self.token_ids[-1],), Span(position, 1, self.context, slots))

    def decoded(self) -> None:
        """Note that the step of ``decode_work`` has run."""
        slots = cut(self.tail, self.tail_tokens, 1)
        self.context = extend(self.context, slots, self.positions[-1] + len(self.token_ids))
        self.tail_tokens += 1

    def choose(self, logits: Tensor, sampled: Sampled | InlayError) -> Sampled | InlayError:
        """The token that comes next: the one sampled, unless the answer is given. logits: (vocabulary,)."""
        if not self.forced or isinstance(sampled, InlayError):
            return sampled
        self.distributions.append(logits.float().log_softmax(dim=-1))
        return Sampled(self.forced[len(self.token_ids)])

    def accept(self, sampled: Sampled | InlayError) -> None:
        """Take the next token, and end where it ends the answer, or where there is none."""
        try:
            if isinstance(sampled, InlayError):
                raise sampled
            self.row.take(sampled.token_id)
        except InlayError as error:
            self.error = InlayError(f"request {self.id}: {error}")
            return
        now = time.perf_counter()
        self.first_token_at = self.first_token_at or now
        token = sampled.token_id
        self.token_ids.append(token)
        if sampled.logprob is not None:
            self.logprob = (self.logprob or 0.0) + sampled.logprob
            self.logprobs.append({t.token_id: Logprob(t.logprob, t.rank, self.spell(t.token_id)) for t in sampled.top})
        self.stream.push(token)
        self._check_end(token)
        if self.finished:
            self.finished_at = now
            self.stream.finish()  # what it held back may complete a stop string
            if self.finish_reason == "length" and self.stream.stopped is not None:
                self.finish_reason, self.stop_reason = "stop", self.stream.stopped

    def output(self) -> RequestOutput:
        """What a leader's request has come to so far."""
        assert self.usage is not None, "a request is admitted before it has output"
        family = self.family
        first = min((member.first_token_at for member in family if member.first_token_at is not None), default=None)
        last = max((member.finished_at or 0.0 for member in family), default=0.0)
        metrics = RequestMetrics(
            ttft_s=None if first is None else first - self.arrival,
            encode_s=self.encode_s,
            total_s=last - self.arrival if self.answered else None,
        )
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.ids,
            prompt_positions=self.positions,
            outputs=[member.completion() for member in family],
            finished=self.answered,
            usage=self.usage,
            metrics=metrics,
        )

    def completion(self) -> CompletionOutput:
        """The answer so far."""
        return CompletionOutput(
            index=self.index,
            text=self.stream.text,
            token_ids=tuple(self.token_ids),
            cumulative_logprob=self.logprob,
            logprobs=None if self.params.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _check_end(self, token: int) -> None:
        may_end = len(self.token_ids) >= self.params.min_tokens
        if may_end and self.stream.stopped is not None:
            self.finish_reason, self.stop_reason = "stop", self.stream.stopped
        elif may_end and token in self.params.stop_ids:
            self.finish_reason, self.stop_reason = "stop", token
        elif may_end and token in self.stop_ids:
            self.finish_reason = "stop"
        elif self.row.guide is not None and self.row.guide.complete:
            self.finish_reason = "stop"  # even before min_tokens: nothing can follow
        elif len(self.token_ids) >= self.limit:
            self.finish_reason = "length"


def usage_of(splice: Splice, hits: frozenset[bytes]) -> Usage:
    """How the tokens of a splice came about. hits: keys of the segments that were stored when it arrived."""
    total = exact = module = shifted = 0
    for part in splice:
        length = part.length if isinstance(part, Cached) else len(part.ids)
        total += length
        if isinstance(part, Cached) and part.spec.key in hits:
            exact += length if part.exact else 0
            module += 0 if part.exact else length
            shifted += length if part.displaced else 0
    cached = exact + module
    return Usage(total, cached, total - cached, exact, module, shifted)
