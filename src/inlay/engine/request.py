"""One request on its way through the engine: where it stands, and the parts that its state falls into."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from inlay.engine.allocation import SequenceAllocation, Work
from inlay.engine.answer import Answer, SamplingState
from inlay.engine.prompt_scores import PromptScores
from inlay.engine.sampler.sampler import Sampled
from inlay.errors import CapacityError, ContextError, InlayError, ParameterError
from inlay.kv.identity import SegmentSpec, TokenRun
from inlay.kv.segment import Found
from inlay.prompt.request import EngineRequest
from inlay.prompt.splice import Fresh, Splice, splice_of
from inlay.types import RequestMetrics, RequestOutput, SamplingParams, Usage


class PromptState:
    """A prompt, which all its answers share: what was asked for, and the splice that the engine has chosen for it.

    Where nothing of that depends on what is stored, the splice is made at once, on the thread of whoever asks.
    """

    __slots__ = ("_open", "_public", "_splice", "_stored", "request")

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self._open = request.open_segments()
        self._stored: frozenset[bytes] | None = None
        self._public: frozenset[bytes] | None = None
        self._splice = None if self._open else splice_of(request)

    @property
    def splice(self) -> Splice:
        assert self._splice is not None, "it is chosen when the first of its answers is admitted"
        return self._splice

    @property
    def public(self) -> frozenset[bytes]:
        """The keys of public schemas' segments that it may be read from, and of those that they attend to."""
        if self._public is None:
            seen: set[SegmentSpec] = set()
            for part in self.request.parts:
                for spec in () if part.owned else part.candidates:
                    at: SegmentSpec | None = spec
                    while at is not None and at not in seen:
                        seen.add(at)
                        at = at.parent
            self._public = frozenset(spec.key for spec in seen)
        return self._public

    def choose(self, stored: Callable[[Iterable[SegmentSpec]], frozenset[bytes]]) -> None:
        """Choose among the candidates of its parts, by what is stored now; nothing once that is settled."""
        if not self._open:
            return
        found = stored(self._open)
        if found != self._stored:
            self._stored, self._splice = found, splice_of(self.request, found)

    def settle(self) -> None:
        """Keep the choice: the other answers read what the first one does, and so does one that was preempted."""
        self._open = []


@dataclass(eq=False, slots=True)
class PrefillRecord:
    """How a prompt's tokens came about.

    admitted_at: when the request first had a place in the pool, on the clock of its arrival. fetch_s: how long that
    took. encode_s: how long modules took that it missed. awaited: the keys of segments that came up from a lower tier
    while it waited for them, and waited_since: from when on. encoded: the keys of modules that it computed and lower
    tiers were given.
    """

    usage: Usage | None = None
    admitted_at: float | None = None
    fetch_s: float = 0.0
    encode_s: float = 0.0
    awaited: frozenset[bytes] = frozenset()
    waited_since: float | None = None
    encoded: list[bytes] = field(default_factory=list)

    @property
    def waited_s(self) -> float:
        """For how long it has waited for a lower tier."""
        return 0.0 if self.waited_since is None else time.perf_counter() - self.waited_since


@dataclass(eq=False)
class Request:
    """One answer on its way.

    Of several answers to one prompt, the first leads and the others follow it: each is a request of its own, and they
    share the prompt through the store like any others.

    index: which of the prompt's answers it is. priority: who goes first; a lower number does.
    deadline: when it ends in any case, on the clock of ``arrival``. tenant, weight, sequences: see scheduler.Job.
    tokens_attached: how many tokens it had said when it was given its allocation.
    scores: the log-probabilities of its prompt's tokens, where they are asked for; the first answer has them.
    damaged: whether its logits were no numbers to choose from. error: what ended it before its time.
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
    tokens_attached: int = 0
    prefill: PrefillRecord = field(default_factory=PrefillRecord)
    preemptions: int = 0
    scores: PromptScores | None = None
    damaged: bool = False
    error: BaseException | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """The prompt's."""
        return self.prompt.request.ids

    @property
    def positions(self) -> tuple[int, ...]:
        """The prompt's."""
        return self.prompt.request.positions

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
    def distributions(self) -> list[Tensor]:
        """What the model expected at each token of ``force``."""
        return self.sampling.distributions

    @property
    def prompt_left(self) -> int:
        """See scheduler.Job."""
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
        splice, said = self.prompt.splice, tuple(self.token_ids)
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

    def wait_for(self, keys: frozenset[bytes]) -> None:
        """Note that segments come up from a lower tier for it."""
        self.prefill.awaited |= keys
        self.prefill.waited_since = self.prefill.waited_since or time.perf_counter()

    def may_be_kept(self, spec: SegmentSpec, *, private: bool) -> bool:
        """Whether tiers below the pool may hold a segment that it computes: a public schema's, unless ``private``."""
        if private:
            return True
        return not spec.before.private and spec.key in self.prompt.public

    def count(
        self,
        modules: dict[bytes, tuple[SegmentSpec, Found]],
        beginnings: Sequence[Found | None],
        known: bool,
        misses: Mapping[str, int],
    ) -> None:
        """Say how the prompt's tokens came about.

        modules, beginnings: what was stored; see kv_manager.py. known: whether the last token was, too. misses: tokens
        of modules that were not, by why.
        """
        if self.prefill.usage is None:
            stored = {key: found.tokens for key, (_, found) in modules.items()}
            begun = [0 if found is None else found.tokens for found in beginnings]
            usage = usage_of(self.prompt.splice, stored, begun, recomputed=int(known), awaited=self.prefill.awaited)
            self.prefill.usage = replace(usage, misses=tuple(sorted(misses.items())))

    def force(self, tokens: Sequence[int]) -> None:
        """Make it say these tokens and keep what the model expected. Raises ContextError where they don't fit."""
        limit = self.sampling.limit
        if limit < len(tokens):
            raise ContextError(
                f"a prompt of {len(self.ids)} tokens and its continuation of {len(tokens)} are "
                f"{len(tokens) - limit} too long for the model's context; shorten one of them"
            )
        self.sampling.forced = tokens

    def decode_work(self) -> Work:
        """The step that computes the KV of the token said last, and the logits behind it."""
        return Work((self.token_ids[-1],), self.allocation.next_row(self.positions[-1] + len(self.token_ids)))

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
        chosen = self.sampling.choose(logits, sampled, len(self.token_ids))
        try:
            if isinstance(chosen, InlayError):
                raise chosen
            self.sampling.row.take(chosen.token_id)
        except InlayError as error:
            self._damage(error)
            return
        self.answer.add(chosen, self.sampling, time.perf_counter())

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

    def output(self) -> RequestOutput:
        """What a leader's request has come to so far."""
        asked, family = self.prompt.request, self.family
        return RequestOutput(
            request_id=self.id,
            prompt=asked.text,
            prompt_token_ids=asked.ids,
            prompt_positions=asked.positions,
            outputs=[
                member.answer.completion(member.index, logprobs=self.params.logprobs is not None) for member in family
            ],
            finished=self.answered,
            usage=self.usage or Usage(len(asked.ids), 0, len(asked.ids), 0, 0, 0),  # one that waits has found nothing
            metrics=self._metrics(),
            prompt_logprobs=None if self.scores is None else self.scores.entries,
        )

    def _metrics(self) -> RequestMetrics:
        answers = [member.answer for member in self.family]
        first = min((answer.first_token_at for answer in answers if answer.first_token_at is not None), default=None)
        last = max((answer.finished_at or 0.0 for answer in answers), default=0.0)
        admitted, fetch_s = self.prefill.admitted_at, self.prefill.fetch_s
        return RequestMetrics(
            ttft_s=None if first is None else first - self.arrival,
            encode_s=self.prefill.encode_s,
            total_s=last - self.arrival if self.answered else None,
            queue_s=None if admitted is None else admitted - self.arrival - fetch_s,
            fetch_s=fetch_s,
            compute_s=None if first is None or admitted is None else first - admitted,
        )


def usage_of(
    splice: Splice,
    stored: Mapping[bytes, int],
    beginnings: Sequence[int],
    *,
    recomputed: int = 0,
    awaited: Container[bytes] = (),
) -> Usage:
    """How the tokens of a splice came about.

    stored: of each module segment, by key, how many tokens were stored when it was admitted; none where it is left out.
    beginnings: for each part, how many tokens of it were stored as they stand here.
    recomputed: how many were stored and are computed all the same. awaited: the keys of those that came up from a
    lower tier.
    """
    total = exact = module = shifted = lower = 0
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
        lower += read if part.spec.key in awaited else 0
    cached = exact + module
    return Usage(total, cached, total - cached, exact, module, shifted, recomputed, lower)
