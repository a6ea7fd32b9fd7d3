"""One answer on its way through the engine: its state, and the events for its listener."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from inlay.engine.allocation import SequenceAllocation, Wait, Work
from inlay.engine.answer import Answer, PromptScores, SamplingState
from inlay.engine.lookup import Lookup
from inlay.engine.prompt_embedding import PromptEmbedding
from inlay.engine.prompt_state import PrefillRecord, PromptState, lasting_tokens, reads_of, usage_of
from inlay.engine.token_selection import Selection, place_of
from inlay.errors import CapacityError, InlayError, ParameterError
from inlay.events import Fault, TokenEvent
from inlay.kv.choices import Kept
from inlay.kv.identity import SegmentSpec, TokenRun
from inlay.kv.segment import PrefixMatch
from inlay.prompt.composed import CachedSpan, ComposedPrompt, NewSpan, RecomputedSpan
from inlay.sampling.params import SamplingParams
from inlay.sampling.report import Sampled
from inlay.types import RequestMetrics, Usage


@dataclass(eq=False)
class Request:
    """One answer in the engine.

    Of several answers to one prompt, the first is the leader and the others are its followers. Each is a request of
    its own and shares the prompt through the store.

    Attributes:
        index: the number of the answer within its prompt.
        priority: lower numbers go first.
        deadline: end of the request, on the clock of ``arrival``.
        tenant, weight, sequences: see jobs.Job.
        waits_for: KV that another job computes, as of the last check.
        tokens_attached: the number of generated tokens at the last admission.
        scores: the log-probabilities of the prompt's tokens, if requested. Only the first answer has them.
        embedding: the embedding of the prompt, if requested. Only the first answer has it.
        selection: the running token selection for selective recomputation.
        damaged: True if its logits were NaN or allowed no token.
        error: the fault that ended it early.
        error_told: the error that the listener has received.
        reported: the prompt's figures that the listener has received.
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
        """See jobs.Job."""
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
            known: True if the last token was stored too.
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
        """Add the prompt's figures to an event, if they have changed."""
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
