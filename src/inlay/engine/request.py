"""A request on its way through the engine, with its answer, the scores of its prompt, and its embedding.

``Answer`` has the sampling state, the tokens, the conditions that end it, and its events. The engine handles tokens
only. Stop strings are detected on text (output.py), which then ends the answer.

An answer may report the log-probabilities of its prompt's tokens too (``PromptScores``). Cached KV has no logits, so a
scored prompt reads nothing from the store. The logits of a whole prompt never exist at once: a pass is limited to the
tokens whose logits fit a bound, and processes them in blocks.

``PromptEmbedding``: the embedding of a prompt is the last hidden state of its last token, or the mean over all its
tokens. Cached tokens have no hidden states. The last token is always computed, so its embedding reads the cache like
any other request. A mean needs every token, so its prompt reads nothing from the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from inlay.engine.allocation import SequenceAllocation, Wait, Work
from inlay.engine.lookup import Lookup
from inlay.engine.prompt_state import PrefillRecord, PromptState, lasting_tokens, reads_of, usage_of
from inlay.engine.runner import Selection, place_of
from inlay.errors import CapacityError, InlayError, ParameterError
from inlay.events import Fault, TokenEvent
from inlay.kv.choices import Kept
from inlay.kv.identity import SegmentSpec, TokenRun
from inlay.kv.pool import PrefixMatch
from inlay.logprobs import FlatLogprobs, Logprob, RankedLogprob
from inlay.prompt.composed import CachedSpan, ComposedPrompt, NewSpan, RecomputedSpan
from inlay.sampling.params import SamplingParams
from inlay.sampling.row import Row
from inlay.sampling.sampler import Sampled
from inlay.types import RequestMetrics, Usage

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
        """Return the next token: the sampled token, or the given token of a forced answer.

        Args:
            sampled: the token that the sampler has chosen.
            said: the number of tokens that the answer has already.
        """
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
        drafted, accepted: the number of draft tokens that were run for the answer, and of those that it accepted.
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
        """Append the next token and check for the end.

        Args:
            sampled: the token that the sampler has chosen.
            sampling: the answer's sampling state.
            logits: (vocabulary,), from which the token was chosen.
            now: the time, on ``time.perf_counter``.
        """
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
        """Return how many of ``rows`` rows from token ``first`` on need logits.

        The prompt's last token and the answer need none here.
        """
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


Pooling = Literal["last", "mean"]


class PromptEmbedding:
    """Collects the hidden states of one prompt, pass by pass.

    Args:
        tokens: of the prompt.
        pooling: "last" or "mean".

    Attributes:
        told: True if the listener has received it.
    """

    def __init__(self, tokens: int, pooling: Pooling) -> None:
        self._tokens = tokens
        self._mean = pooling == "mean"
        self._sum: Tensor | None = None  # (hidden,), fp32
        self._count = 0 if self._mean else tokens - 1  # tokens that are in the sum, or are not needed
        self.told = False

    @property
    def complete(self) -> bool:
        return self._count == self._tokens

    def wanted(self, first: int, rows: int) -> range:
        """Return the needed rows among these, of the tokens from ``first`` on. Recomputed tokens count once."""
        return range(min(max(0, self._count - first), rows), min(rows, self._tokens - first))

    def add(self, hidden: Tensor) -> None:
        """Add the hidden states of the wanted rows, (rows, hidden). Raises InlayError if they are damaged."""
        total = hidden.float().sum(0)
        if not bool(total.isfinite().all()):
            raise InlayError(
                "the hidden states of the prompt hold NaN or inf; the model's weights or inputs are damaged",
                code="model.invalid_numbers",
            )
        self._sum = total if self._sum is None else self._sum + total
        self._count += len(hidden)

    def vector(self) -> bytes:
        """Return the complete embedding as little-endian fp32."""
        assert self._sum is not None, "a prompt has a token"
        pooled = self._sum / self._tokens if self._mean else self._sum
        return pooled.to("cpu", torch.float32).numpy().astype("<f4").tobytes()


@dataclass(eq=False)
class Request:
    """One answer in the engine.

    Of several answers to one prompt, the first is the leader and the others are its followers. Each is a request of
    its own and shares the prompt through the store.

    Attributes:
        index: the number of the answer within its prompt.
        priority: lower numbers go first.
        deadline: end of the request, on the clock of ``arrival``.
        tenant, weight, sequences: see scheduler.Job.
        waits_for: KV that another job computes, as of the last check.
        tokens_attached: the number of generated tokens at the last admission.
        scores: the log-probabilities of the prompt's tokens, if requested. Only the first answer has them.
        embedding: the embedding of the prompt, if requested. Only the first answer has it.
        selection: the running token selection for selective recomputation.
        damaged: True if its logits were NaN or allowed no token.
        error: the fault that ended it early.
        error_told: the error that the listener has received.
        reported: the usage and times of the prompt that the listener has received.
    """

    id: str
    prompt: PromptState
    sampling: SamplingState
    answer: Answer
    index: int = 0
    leader: Request | None = None
    followers: list[Request] = field(default_factory=list)
    arrival: float = field(default_factory=time.perf_counter)
    priority: int = 0
    deadline: float | None = None
    tenant: str = ""
    weight: float = 1.0
    sequences: int = 1
    allocation: SequenceAllocation = field(default_factory=SequenceAllocation)
    waits_for: Wait | None = None
    tokens_attached: int = 0
    prefill: PrefillRecord = field(default_factory=PrefillRecord)
    preemptions: int = 0
    scores: PromptScores | None = None
    embedding: PromptEmbedding | None = None
    selection: Selection | None = None
    damaged: bool = False
    error: BaseException | None = None
    error_told: BaseException | None = None
    reported: tuple[Usage | None, float, float | None] | None = None

    @property
    def sent(self) -> float:
        """The time of creation, on the clock of ``arrival``."""
        return self.arrival

    @property
    def ids(self) -> tuple[int, ...]:
        """The token ids of the prompt."""
        return self.prompt.request.ids

    @property
    def positions(self) -> tuple[int, ...]:
        """The positions of the prompt's tokens."""
        return self.prompt.request.positions

    @property
    def adapter(self) -> bytes:
        """See EngineRequest."""
        return self.prompt.request.adapter

    @property
    def params(self) -> SamplingParams:
        return self.sampling.params

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.answer.token_ids

    @property
    def usage(self) -> Usage | None:
        return self.prefill.usage

    @property
    def prompt_left(self) -> int:
        """See scheduler.Job."""
        return self.allocation.prompt_left

    @property
    def computed_tokens(self) -> int:
        """The number of computed tokens of the prompt, including those of this pass.

        Tokens generated before a preemption count as part of the prompt.
        """
        return len(self.ids) + self.tokens_attached - self.prompt_left

    @property
    def needs_all_rows(self) -> bool:
        """True if the rows of its prompt have logits, so that a pass can take only some of them."""
        scored = self.scores is not None and not self.scores.complete
        return scored or (self.params.pooling == "mean" and self.embedding is not None and not self.embedding.complete)

    @property
    def finished(self) -> bool:
        return self.answer.finish_reason is not None or self.error is not None

    @property
    def family(self) -> tuple[Request, ...]:
        """The request and its followers."""
        return (self, *self.followers)

    @property
    def answered(self) -> bool:
        """True if the request and all its followers have finished."""
        if not self.followers:
            return self.finished
        return all(member.finished for member in self.family)

    @property
    def failure(self) -> BaseException | None:
        """The first error among the request and its followers."""
        return next((member.error for member in self.family if member.error is not None), None)

    def compose_now(self) -> ComposedPrompt:
        """The composed prompt with all generated tokens, which are recomputed after a preemption.

        During token selection, this is the input of the selecting pass.
        """
        composed, said = self.prompt.selecting or self.prompt.composed, tuple(self.token_ids)
        if not said:
            return composed
        last = composed[-1]
        assert isinstance(last, NewSpan), "somebody computes the last token of a prompt"
        run = last.run
        longer = None if run is None else TokenRun(run.ids + said, run.start, run.before, run.continues)
        return (*composed[:-1], NewSpan(last.ids + said, last.start, longer))

    def attach(self, allocation: SequenceAllocation) -> None:
        """Take an allocation in the pool."""
        self.allocation, self.tokens_attached = allocation, len(self.token_ids)
        self.prompt.settle()
        self.prefill.admitted_at = self.prefill.admitted_at or time.perf_counter()

    def read_again(self) -> None:
        """Reset the usage, because the request read invalid KV and is admitted again."""
        if not self.token_ids:
            self.prefill.usage = None

    def wait_for(self, keys: frozenset[bytes]) -> None:
        """Record that segments are loading from a lower tier for it, or are looked up there."""
        self.prefill.awaited |= keys
        self.prefill.waited_since = self.prefill.waited_since or time.perf_counter()

    def may_be_kept(self, spec: SegmentSpec, kept: Kept) -> bool:
        """Return whether tiers below the pool may hold a segment that this request computes."""
        if kept is Kept.ALL:
            return True
        if spec.before.private:
            return False
        return kept is Kept.UNSALTED or spec.lossless.key in self.prompt.public

    def count(
        self,
        modules: dict[bytes, tuple[SegmentSpec, PrefixMatch]],
        prefixes: Sequence[PrefixMatch | None],
        known: bool,
        misses: Mapping[str, int],
        came_from: Callable[[bytes], str | None],
        prefix: SegmentSpec | None = None,
    ) -> None:
        """Set the usage of the prompt's tokens.

        Args:
            modules, prefixes: see lookup.Lookup.
            known: True if the prompt's last token was stored as well.
            misses: the missing tokens of modules, by reason.
            came_from: returns the tier that delivered a segment, by key.
            prefix: the prompt's prefix that lower tiers hold with a recurrent state. None for none.
        """
        if self.prefill.usage is None:
            earlier = self.prefill.found  # KV that the selecting pass computed does not count as stored
            stored = {key: min(found.tokens, earlier.get(key, found.tokens)) for key, (_, found) in modules.items()}
            begun = [
                0 if found is None else min(found.tokens, earlier.get(_place(part), found.tokens))
                for part, found in zip(self.prompt.composed, prefixes, strict=True)
            ]
            awaited = {key: came_from(key) or "" for key in self.prefill.awaited}
            usage = usage_of(
                self.prompt.composed,
                stored,
                begun,
                duplicates=int(known),
                awaited=awaited,
                recomputed=self.prompt.recomputed,
                adapter=self.adapter,
                prefix=None if prefix is None else (awaited.get(prefix.key, ""), len(prefix.ids)),
            )
            lasting = lasting_tokens(self.prompt.request.parts, self.prompt.composed, stored, begun)
            if self.prompt.request.diagnostics:
                self.prefill.reads = reads_of(
                    self.prompt.composed, stored, begun, awaited, self.prefill.reasons, self.prompt.recomputed
                )
            self.prefill.usage = replace(
                usage,
                misses=tuple(sorted(misses.items())),
                selecting_tokens=self.prefill.selecting_tokens,
                lasting_tokens=min(lasting, usage.written_tokens),
                found_tokens=sum(len(part.ids) for part in self.prompt.request.parts if part.found),
            )

    def begin_selecting(self, lookup: Lookup, misses: Mapping[str, int]) -> None:
        """Start the token selection for selective recomputation. The request has its allocation for it.

        Args:
            lookup: the stored parts.
            misses: see ``count``.
        """
        prompt, prefill = self.prompt, self.prefill
        assert prompt.selecting is not None, "nothing is to be chosen"
        assert prompt.request.policy.recompute is not None, "nothing is to be chosen"
        self.selection = Selection(prompt.request.policy.recompute, prompt.selecting, self.allocation)
        prompt.selector = self
        if not prefill.found:
            prefill.misses = misses
            prefill.found = {key: found.tokens for key, (_, found) in lookup.modules.items()}
            for part, found in zip(prompt.selecting, lookup.prefixes, strict=True):
                if found is not None and not isinstance(part, CachedSpan) and found.tokens < len(part.ids):
                    prefill.found[_place(part)] = found.tokens

    def end_selecting(self) -> None:
        """Discard the token selection, finished or not."""
        if self.selection is not None:
            self.selection = self.prompt.selector = None

    def decode_work(self, draft: Sequence[int] = (), *, ahead: bool = False) -> Work:
        """The decode step: it computes the KV of the last generated token, and the logits behind it.

        Args:
            draft: tokens that may follow, to compute in the same step.
            ahead: True if the last token is known only to the device; its id is then 0.
        """
        row = self.allocation.next_rows(self.positions[-1] + len(self.token_ids) + ahead, len(draft))
        ids = (0 if ahead else self.token_ids[-1], *draft)
        state = self.allocation.state
        assert not draft or state is None, "a recurrent state cannot go back behind a rejected draft"
        span = None
        if state is not None:
            state.release_read()
            span = state.advance(1)
        return Work(ids, row, adapter=self.adapter, states=self.allocation.states, state=span)

    def decoded(self) -> None:
        """Record that the step of ``decode_work`` has run."""
        self.allocation.decode()

    def score(self, first: int, logits: Tensor) -> None:
        """Add the logits of the prompt's tokens from ``first`` on, (rows, vocabulary)."""
        assert self.scores is not None, "nobody asked for them"
        try:
            self.scores.add(first, logits)
        except InlayError as error:
            self._damage(error)

    def embed(self, hidden: Tensor) -> None:
        """Add hidden states of the prompt's next tokens, (rows, hidden)."""
        assert self.embedding is not None, "nobody asked for it"
        try:
            self.embedding.add(hidden)
        except InlayError as error:
            self._damage(error)

    def accept(self, logits: Tensor, sampled: Sampled | InlayError) -> None:
        """Append the next token, and end the answer if it is the last one or an error. ``logits`` are (vocabulary,)."""
        if self.error is not None:
            return
        chosen = self.sampling.choose(sampled, len(self.token_ids))
        try:
            if isinstance(chosen, InlayError):
                raise chosen
            self.sampling.row.take(chosen.token_id)
        except InlayError as error:
            self._damage(error)
            return
        self.answer.add(chosen, self.sampling, logits, time.perf_counter())

    def _damage(self, error: InlayError) -> None:
        kind = ParameterError if isinstance(error, ParameterError) else InlayError
        self.error = kind(f"request {self.id}: {error}", code=vars(error).get("code"))
        self.damaged = True

    def refuse(self, error: Exception) -> None:
        """End the request, because it can never run again.

        If an answer without ``max_tokens`` has outgrown the pool, it ends with its length and keeps its tokens.
        """
        if isinstance(error, CapacityError) and self.token_ids and self.params.max_tokens is None:
            self.answer.finish("length", time.perf_counter())
        else:
            self.error = error

    def finish(self) -> None:
        """End the answer as complete, at its listener's request."""
        self.answer.finish("stop", time.perf_counter())
        self.answer.heard()

    def events(self) -> list[TokenEvent]:
        """The new events of a leader: one for each answer with news."""
        events = []
        for member in self.family:
            answer, error = member.answer, member.error
            if len(answer.token_ids) > answer.told or answer.ended or error is not member.error_told:
                events.append(answer.event(self.id, member.index, error, self.arrival))
        if events:
            self._report(events[0])
        return events

    def failures(self) -> list[TokenEvent]:
        """An error event for each failed answer, used when ``events`` cannot be delivered."""
        errors = [(member.index, member.error) for member in self.family]
        return [TokenEvent(self.id, index, error=Fault.of(error)) for index, error in errors if error is not None]

    def heard(self) -> None:
        """Record that the listener has received ``events``."""
        for member in self.family:
            member.answer.heard()
            member.error_told = member.error
        if self.scores is not None:
            self.scores.told = self.scores.complete
        if self.embedding is not None:
            self.embedding.told = self.embedding.complete

    def _report(self, event: TokenEvent) -> None:
        """Add the prompt's usage and times to an event, if they have changed."""
        scores = self.scores  # another answer may have its first token earlier
        if scores is not None and scores.complete and not scores.told and self.error is None:
            event.prompt_logprobs = scores.entries
        embedding = self.embedding
        if embedding is not None and embedding.complete and not embedding.told and self.error is None:
            event.embedding = embedding.vector()
        prefill, admitted = self.prefill, self.prefill.admitted_at
        first = self.answer.first_token_at
        if self.followers:
            firsts = [member.answer.first_token_at for member in self.family]
            first = min((at for at in firsts if at is not None), default=None)
        figures = prefill.usage, prefill.encode_s, first
        if figures == self.reported:
            return
        self.reported = figures
        event.usage = prefill.usage
        event.orders, event.reads = self.prompt.orders, prefill.reads
        event.metrics = RequestMetrics(
            ttft_s=None if first is None else first - self.arrival,
            encode_s=prefill.encode_s,
            queue_s=None if admitted is None else admitted - self.arrival - prefill.fetch_s,
            fetch_s=prefill.fetch_s,
            compute_s=None if first is None or admitted is None else first - admitted,
        )


def _place(part: CachedSpan | RecomputedSpan | NewSpan) -> object:
    run = None if isinstance(part, CachedSpan) else part.run
    return None if run is None else place_of(run)
