"""One request on its way through the engine: what it attends to, what is left to compute, what it has said."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from inlay.engine.allocation import Seat, Work
from inlay.engine.sampler.row import Row
from inlay.engine.sampler.sampler import Sampled
from inlay.engine.stream import TextStream
from inlay.errors import CapacityError, ContextError, InlayError, ParameterError
from inlay.kv.identity import SegmentSpec, TokenRun
from inlay.kv.segment import Found
from inlay.prompt.splice import Fresh, Splice
from inlay.types import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SamplingParams, Usage


@dataclass(eq=False)
class Request:
    """One answer's whole state.

    Of several answers to one prompt, the first leads and the others follow it: each is a request of its own, and they
    share the prompt through the store like any others.

    priority: who goes first; a lower number does. deadline: when it ends in any case, on the clock of ``arrival``.
    tenant, weight, sequences: see scheduler.Job.
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
    priority: int = 0
    deadline: float | None = None
    tenant: str = ""
    weight: float = 1.0
    sequences: int = 1
    usage: Usage | None = None
    seat: Seat = field(default_factory=Seat)
    seated_at: int = 0  # how many tokens it had said when it sat down
    preemptions: int = 0
    damaged: bool = False  # whether its logits were no numbers to choose from
    token_ids: list[int] = field(default_factory=list)
    forced: Sequence[int] = ()  # the tokens that it has to say, where they are given
    distributions: list[Tensor] = field(default_factory=list)  # of forced tokens: (vocabulary,), fp32, natural logs
    logprob: float | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    error: BaseException | None = None  # what ended it before its time
    encode_s: float = 0.0
    fetch_s: float = 0.0
    seated: float | None = None  # when it first had a seat
    first_token_at: float | None = None
    finished_at: float | None = None

    @property
    def prompt_left(self) -> int:
        """See scheduler.Job."""
        return self.seat.prompt_left

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def family(self) -> tuple[Request, ...]:
        """It and the answers that follow it."""
        return (self, *self.followers)

    def rename(self, name: str) -> None:
        """Give it and those who follow it another id."""
        for member in self.family:
            member.id = name

    @property
    def answered(self) -> bool:
        """Whether it and all that follow it have finished."""
        return all(member.finished for member in self.family)

    @property
    def failure(self) -> BaseException | None:
        """What ended it, or one that follows it, before its time."""
        return next((member.error for member in self.family if member.error is not None), None)

    def splice_now(self) -> Splice:
        """What it attends to, all that it has said included: after a preemption that is computed again."""
        if not self.token_ids:
            return self.splice
        last, said = self.splice[-1], tuple(self.token_ids)
        assert isinstance(last, Fresh), "somebody computes the last token of a prompt"
        run = last.run
        longer = None if run is None else TokenRun(run.ids + said, run.start, run.before, run.continues)
        return (*self.splice[:-1], Fresh(last.ids + said, last.start, longer))

    def sit(self, seat: Seat) -> None:
        """Take a seat in the pool."""
        self.seat, self.seated_at = seat, len(self.token_ids)
        self.seated = self.seated or time.perf_counter()

    def count(
        self, modules: dict[bytes, tuple[SegmentSpec, Found]], beginnings: Sequence[Found | None], known: bool
    ) -> None:
        """Say how the prompt's tokens came about.

        modules, beginnings: what was stored; see placing.py. known: whether the last token was, too.
        """
        if self.usage is None:
            stored = {key: found.tokens for key, (_, found) in modules.items()}
            begun = [0 if found is None else found.tokens for found in beginnings]
            self.usage = usage_of(self.splice, stored, begun, recomputed=int(known))

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
        return Work((self.token_ids[-1],), self.seat.next_row(self.positions[-1] + len(self.token_ids)))

    def decoded(self) -> None:
        """Note that the step of ``decode_work`` has run."""
        self.seat.decode()

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
            kind = ParameterError if isinstance(error, ParameterError) else InlayError
            self.error = kind(f"request {self.id}: {error}")
            self.damaged = True
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
            self._finish(now)

    def refuse(self, error: Exception) -> None:
        """End it, since it can never run again.

        An answer of no given length that has outgrown the pool is as long as it gets: what it has said stays.
        """
        if isinstance(error, CapacityError) and self.token_ids and self.params.max_tokens is None:
            self.finish_reason = "length"
            self._finish(time.perf_counter())
        else:
            self.error = error

    def output(self) -> RequestOutput:
        """What a leader's request has come to so far."""
        usage = self.usage or Usage(len(self.ids), 0, len(self.ids), 0, 0, 0)  # one that still waits has found nothing
        family = self.family
        first = min((member.first_token_at for member in family if member.first_token_at is not None), default=None)
        last = max((member.finished_at or 0.0 for member in family), default=0.0)
        seated = self.seated
        metrics = RequestMetrics(
            ttft_s=None if first is None else first - self.arrival,
            encode_s=self.encode_s,
            total_s=last - self.arrival if self.answered else None,
            queue_s=None if seated is None else seated - self.arrival - self.fetch_s,
            fetch_s=self.fetch_s,
            compute_s=None if first is None or seated is None else first - seated,
        )
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.ids,
            prompt_positions=self.positions,
            outputs=[member.completion() for member in family],
            finished=self.answered,
            usage=usage,
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

    def _finish(self, now: float) -> None:
        self.finished_at = now
        self.stream.finish()  # what it held back may complete a stop string
        if self.finish_reason == "length" and self.stream.stopped is not None:
            self.finish_reason, self.stop_reason = "stop", self.stream.stopped

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


def usage_of(splice: Splice, stored: Mapping[bytes, int], beginnings: Sequence[int], *, recomputed: int = 0) -> Usage:
    """How the tokens of a splice came about.

    stored: of each module segment, by key, how many tokens were stored when it was admitted; none where it is left out.
    beginnings: for each part, how many tokens of it were stored as they stand here.
    recomputed: how many were stored and are computed all the same.
    """
    total = exact = module = shifted = 0
    for part, begun in zip(splice, beginnings, strict=True):
        if isinstance(part, Fresh):
            total += len(part.ids)
            exact += begun
            continue
        total += part.length
        read = min(stored.get(part.spec.key, 0), part.length)
        exact += read if part.exact else 0
        module += 0 if part.exact else read
        shifted += read if part.displaced else 0
    cached = exact + module
    return Usage(total, cached, total - cached, exact, module, shifted, recomputed)
