"""One answer on its way through the engine: where it stands, and what its listener hears of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from inlay.engine.allocation import SequenceAllocation, Work
from inlay.engine.answer import Answer, SamplingState
from inlay.engine.lookup import Lookup
from inlay.engine.pending import Wait
from inlay.engine.prompt_scores import PromptScores
from inlay.engine.prompt_state import PrefillRecord, PromptState, usage_of
from inlay.engine.sampler.report import Sampled
from inlay.engine.selection import Selection, place_of
from inlay.errors import CapacityError, InlayError, ParameterError
from inlay.events import Fault, TokenEvent
from inlay.kv.identity import SegmentSpec, TokenRun
from inlay.kv.segment import Found
from inlay.kv.tiers.tier import Kept
from inlay.prompt.splice import Cached, Fresh, Repaired, Splice
from inlay.sampling_params import SamplingParams
from inlay.types import RequestMetrics, Usage


@dataclass(eq=False)
class Request:
    """One answer on its way.

    Of several answers to one prompt, the first leads and the others follow it: each is a request of its own, and they
    share the prompt through the store like any others.

    index: which of the prompt's answers it is. priority: who goes first; a lower number does.
    deadline: when it ends in any case, on the clock of ``arrival``. tenant, weight, sequences: see jobs.Job.
    waits_for: what somebody else computes, where it was last found to need that.
    tokens_attached: how many tokens it had said when it was given its allocation.
    scores: the log-probabilities of its prompt's tokens, where they are asked for; the first answer has them.
    selection: the pass that chooses what is computed anew of its modules, while it runs.
    damaged: whether its logits were no numbers to choose from. error: what ended it before its time.
    error_told, reported: what of that, and of how the prompt came about, its listener has heard.
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
    selection: Selection | None = None
    damaged: bool = False
    error: BaseException | None = None
    error_told: BaseException | None = None
    reported: tuple[Usage | None, float, float | None] | None = None

    @property
    def sent(self) -> float:
        """When it was made, on the clock of ``arrival``."""
        return self.arrival

    @property
    def ids(self) -> tuple[int, ...]:
        """The prompt's."""
        return self.prompt.request.ids

    @property
    def positions(self) -> tuple[int, ...]:
        """The prompt's."""
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
        """What it has said."""
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
        """How many tokens of its prompt, and of what it had said before it was preempted, a pass has or will have."""
        return len(self.ids) + self.tokens_attached - self.prompt_left

    @property
    def finished(self) -> bool:
        return self.answer.finish_reason is not None or self.error is not None

    @property
    def family(self) -> tuple[Request, ...]:
        """It and the answers that follow it."""
        return (self, *self.followers)

    @property
    def answered(self) -> bool:
        """Whether it and all that follow it have finished."""
        if not self.followers:
            return self.finished
        return all(member.finished for member in self.family)

    @property
    def failure(self) -> BaseException | None:
        """What ended it, or one that follows it, before its time."""
        return next((member.error for member in self.family if member.error is not None), None)

    def splice_now(self) -> Splice:
        """What it attends to, all that it has said included: after a preemption that is computed again.

        As long as it has to be found out what is computed anew of its modules, what the pass for that attends to.
        """
        splice, said = self.prompt.selecting or self.prompt.splice, tuple(self.token_ids)
        if not said:
            return splice
        last = splice[-1]
        assert isinstance(last, Fresh), "somebody computes the last token of a prompt"
        run = last.run
        longer = None if run is None else TokenRun(run.ids + said, run.start, run.before, run.continues)
        return (*splice[:-1], Fresh(last.ids + said, last.start, longer))

    def attach(self, allocation: SequenceAllocation) -> None:
        """Take a place in the pool."""
        self.allocation, self.tokens_attached = allocation, len(self.token_ids)
        self.prompt.settle()
        self.prefill.admitted_at = self.prefill.admitted_at or time.perf_counter()

    def read_again(self) -> None:
        """Forget how its prompt came about: what it has read was not what it should be, so it is admitted anew."""
        if not self.token_ids:
            self.prefill.usage = None

    def wait_for(self, keys: frozenset[bytes]) -> None:
        """Note that segments come up from a lower tier for it, or are sought there."""
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
        modules: dict[bytes, tuple[SegmentSpec, Found]],
        beginnings: Sequence[Found | None],
        known: bool,
        misses: Mapping[str, int],
        came_from: Callable[[bytes], str | None],
    ) -> None:
        """Say how the prompt's tokens came about.

        modules, beginnings: what was stored; see lookup.py. known: whether the last token was, too. misses: tokens
        of modules that were not, by why. came_from: the tier that gave a segment, by its key.
        """
        if self.prefill.usage is None:
            earlier = self.prefill.found  # what a selecting pass has computed was not stored for it
            stored = {key: min(found.tokens, earlier.get(key, found.tokens)) for key, (_, found) in modules.items()}
            begun = [
                0 if found is None else min(found.tokens, earlier.get(_place(part), found.tokens))
                for part, found in zip(self.prompt.splice, beginnings, strict=True)
            ]
            usage = usage_of(
                self.prompt.splice,
                stored,
                begun,
                recomputed=int(known),
                awaited={key: came_from(key) or "" for key in self.prefill.awaited},
                repaired=self.prompt.repaired,
                adapter=self.adapter,
            )
            self.prefill.usage = replace(
                usage, misses=tuple(sorted(misses.items())), selecting_tokens=self.prefill.selecting_tokens
            )

    def begin_selecting(self, lookup: Lookup, misses: Mapping[str, int]) -> None:
        """Run the pass that chooses what is computed anew of its modules; it has its allocation for that.

        lookup: what was stored. misses: see ``count``.
        """
        prompt, prefill = self.prompt, self.prefill
        assert prompt.selecting is not None, "nothing is to be chosen"
        assert prompt.request.policy.repair is not None, "nothing is to be chosen"
        self.selection = Selection(prompt.request.policy.repair, prompt.selecting, self.allocation)
        prompt.selector = self
        if not prefill.found:
            prefill.misses = misses
            prefill.found = {key: found.tokens for key, (_, found) in lookup.modules.items()}
            for part, found in zip(prompt.selecting, lookup.beginnings, strict=True):
                if found is not None and not isinstance(part, Cached) and found.tokens < len(part.ids):
                    prefill.found[_place(part)] = found.tokens

    def end_selecting(self) -> None:
        """Forget that pass, whether or not it has come to its end."""
        if self.selection is not None:
            self.selection = self.prompt.selector = None

    def decode_work(self, *, ahead: bool = False) -> Work:
        """The step that computes the KV of the token said last, and the logits behind it.

        ahead: whether that token is one more than is known here, as a device has it; its id is 0 then.
        """
        row = self.allocation.next_row(self.positions[-1] + len(self.token_ids) + ahead)
        ids = (0 if ahead else self.token_ids[-1],)
        return Work(ids, row, adapter=self.adapter, states=self.allocation.states)

    def decoded(self) -> None:
        """Note that the step of ``decode_work`` has run."""
        self.allocation.decode()

    def score(self, first: int, logits: Tensor) -> None:
        """Take the logits of the prompt's tokens ``first`` and on, (rows, vocabulary)."""
        assert self.scores is not None, "nobody asked for them"
        try:
            self.scores.add(first, logits)
        except InlayError as error:
            self._damage(error)

    def accept(self, logits: Tensor, sampled: Sampled | InlayError) -> None:
        """Take the next token, and end where it ends the answer, or where there is none. logits: (vocabulary,)."""
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
        self.error = kind(f"request {self.id}: {error}")
        self.damaged = True

    def refuse(self, error: Exception) -> None:
        """End it, since it can never run again.

        An answer of no given length that has outgrown the pool is as long as it gets: what it has said stays.
        """
        if isinstance(error, CapacityError) and self.token_ids and self.params.max_tokens is None:
            self.answer.finish("length", time.perf_counter())
        else:
            self.error = error

    def finish(self) -> None:
        """End it as it is, where its listener has found that it is whole."""
        self.answer.finish("stop", time.perf_counter())
        self.answer.heard()

    def events(self) -> list[TokenEvent]:
        """What a leader's listener has not heard of yet: an event of each answer that has news."""
        events = []
        for member in self.family:
            answer, error = member.answer, member.error
            if len(answer.token_ids) > answer.told or answer.ended or error is not member.error_told:
                events.append(answer.event(self.id, member.index, error, self.arrival))
        if events:
            self._report(events[0])
        return events

    def failures(self) -> list[TokenEvent]:
        """An event of each answer that has failed, with nothing else: where ``events`` cannot be told."""
        errors = [(member.index, member.error) for member in self.family]
        return [TokenEvent(self.id, index, error=Fault.of(error)) for index, error in errors if error is not None]

    def heard(self) -> None:
        """Note that its listener has heard of all of ``events``."""
        for member in self.family:
            member.answer.heard()
            member.error_told = member.error
        if self.scores is not None:
            self.scores.told = self.scores.complete

    def _report(self, event: TokenEvent) -> None:
        """Say with an event how the prompt came about, where that has changed."""
        scores = self.scores  # another answer may have its first token before the prompt is scored
        if scores is not None and scores.complete and not scores.told and self.error is None:
            event.prompt_logprobs = scores.entries
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
        event.orders = self.prompt.orders
        event.metrics = RequestMetrics(
            ttft_s=None if first is None else first - self.arrival,
            encode_s=prefill.encode_s,
            queue_s=None if admitted is None else admitted - self.arrival - prefill.fetch_s,
            fetch_s=prefill.fetch_s,
            compute_s=None if first is None or admitted is None else first - admitted,
        )


def _place(part: Cached | Repaired | Fresh) -> object:
    run = None if isinstance(part, Cached) else part.run
    return None if run is None else place_of(run)
