"""Forced runs: the tokens of a given answer are run again behind other composed prompts, and behind full prefill.

The model's distributions at each step give the divergence from full prefill (divergence.py). Only the prompt's tokens,
the composed prompts and the first tokens of the answer are kept for this. ``ShadowSampler`` compares a sample of the
answers that read approximations: once over their own composed prompt, and once over full prefill.

Requests never wait for a forced run, and its KV is not stored. When a request arrives, the current run releases its
slots and starts again later. A run allocates slots of the pool like a request, at most an eighth of the pool.
"""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inlay.engine.allocation import SequenceAllocation, allocation_of
from inlay.engine.background.divergence import AnswerComparison, DivergenceLog, Subject, divergences
from inlay.engine.background.idle import IdleWorker
from inlay.engine.lookup import look_up, tail_tokens
from inlay.engine.request import Request
from inlay.engine.runner import Runner
from inlay.errors import CapacityError, InlayError
from inlay.kv.store import SegmentStore
from inlay.prompt.composed import CachedSpan, ComposedPrompt, NewSpan
from inlay.prompt.request import EngineRequest
from inlay.types import DROP_REASONS, ShadowStats

#: Most tokens of an answer that are compared.
_MOST_STEPS = 64
#: Limits of waiting answers and of their tokens. The oldest of the salt with the most is dropped first.
MOST_WAITING, _MOST_TOKENS = 64, 2**18
#: Starts of a run before it is dropped because requests keep coming.
_MOST_TRIES = 16
#: Numbers of the distributions that are kept, and that are compared in one pass.
_KEPT, _AT_ONCE = 2**24, 2**20
_PART = 8  # a run may take this fraction of the pool: 1 / _PART


@dataclass(frozen=True, slots=True)
class ForcedAnswer:
    """An answer to compare. ``composed`` is its composed prompt; ``said`` are its first tokens."""

    request: EngineRequest
    composed: ComposedPrompt
    said: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return len(self.request.ids) + len(self.said)

    def reads(self, keys: frozenset[bytes]) -> bool:
        """Return True if its prompt has any of these modules."""
        return any(not keys.isdisjoint(spec.names) for part in self.request.parts for spec in part.candidates)

    def behind(self, composed: ComposedPrompt) -> ComposedPrompt:
        """Return a composed prompt with the answer. The last run is computed in any case, for its distributions."""
        last = composed[-1]
        assert isinstance(last, NewSpan), "the last token of a prompt is always computed"
        most = len(last.ids) - 1
        run = None if last.run is None or not most else last.run.prefix(most)
        ahead = (NewSpan(last.ids[:-1], last.start, run),) if most else ()
        return (*composed[:-1], *ahead, NewSpan((last.ids[-1], *self.said[:-1]), last.start + most))

    def in_full(self) -> ComposedPrompt:
        """Return the same text fully computed, without gaps."""
        *ahead, last = self.request.ids
        run = NewSpan((last, *self.said[:-1]), len(ahead))
        return (NewSpan(tuple(ahead), 0), run) if ahead else (run,)


@dataclass(eq=False, slots=True)
class _Run:
    """A sample in progress. ``allocation`` is that of the current run, and ``tries`` counts its starts.

    ``prompts`` are compared with full prefill, which runs last. ``given`` has the log-probabilities of each finished
    prompt, (steps, vocabulary), and ``rows`` those of the current prompt. ``kl``, ``agreeing`` and ``steps`` cover the
    steps compared so far.
    """

    sample: ForcedAnswer
    prompts: tuple[ComposedPrompt, ...]
    allocation: SequenceAllocation | None = None
    tries: int = 0
    given: list[Tensor] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    agreeing: list[int] = field(default_factory=list)
    steps: int = 0

    @property
    def full(self) -> bool:
        """True if the current run is full prefill."""
        return len(self.given) == len(self.prompts)

    def restart(self) -> None:
        """Forget the results of the current run."""
        self.rows = []
        self.kl, self.agreeing, self.steps = [0.0] * len(self.prompts), [0] * len(self.prompts), 0


class ForcedRuns(IdleWorker):
    """Compares composed prompts of one store's answered requests with full prefill.

    Args:
        most_prompts: the most composed prompts of an answer that ``_prompts`` returns.
    """

    share = 32  # small passes: there may always be work, and an arriving request waits for half a pass on average
    like_prompts = False

    def __init__(self, store: SegmentStore, runner: Runner, *, most_prompts: int) -> None:
        super().__init__(store, runner)
        self._most = store.pool.chunks * store.pool.chunk_size // _PART
        self._most_steps = max(1, min(_MOST_STEPS, _KEPT // most_prompts // runner.vocabulary))
        self._at_once = max(1, _AT_ONCE // runner.vocabulary)
        self._waiting: OrderedDict[str, deque[ForcedAnswer]] = OrderedDict()  # by salt, the last served at the end
        self._begun: _Run | None = None
        self._dropped = dict.fromkeys(DROP_REASONS, 0)

    @abstractmethod
    def _prompts(self, sample: ForcedAnswer) -> tuple[ComposedPrompt, ...]:
        """Return the composed prompts to compare, at least one. Empty if the sample is of no use."""

    @abstractmethod
    def _compared(self, sample: ForcedAnswer, found: Sequence[AnswerComparison]) -> None:
        """Take the comparisons of these composed prompts."""

    def _add(self, request: EngineRequest, composed: ComposedPrompt, token_ids: Sequence[int]) -> None:
        """Queue an answer."""
        said = tuple(token_ids[: self._most_steps])
        self._waiting.setdefault(request.salt, deque()).append(ForcedAnswer(request, composed, said))
        while self._is_too_much():
            most = max(self._waiting, key=lambda salt: len(self._waiting[salt]))
            self._take(most)
            self._dropped["busy"] += 1

    def clear(self) -> None:
        """Drop all waiting answers, because the store forgets the KV that they read."""
        while self._waiting:
            self._take(next(iter(self._waiting)))
            self._dropped["gone"] += 1
        if self._begun is not None:
            self._leave("gone")

    def forget_salt(self, salt: str) -> None:
        """Drop the answers of a salt, because its text was evicted."""
        self._forget(lambda sample: sample.request.salt == salt)

    def forget_modules(self, keys: frozenset[bytes]) -> None:
        """Drop the answers to prompts with any of these modules, which have expired or were evicted."""
        self._forget(lambda sample: sample.reads(keys))

    def _forget(self, gone: Callable[[ForcedAnswer], bool]) -> None:
        for salt, waiting in list(self._waiting.items()):
            kept = deque(sample for sample in waiting if not gone(sample))
            self._dropped["gone"] += len(waiting) - len(kept)
            if kept:
                self._waiting[salt] = kept
            else:
                del self._waiting[salt]
        if self._begun is not None and gone(self._begun.sample):
            self._leave("gone")

    def give_up(self) -> None:
        """Release pool slots, because requests need the time. The current run starts again later."""
        begun = self._begun
        if begun is not None and begun.allocation is not None:
            begun.allocation.hold.release()
            self._store.pool.free(begun.allocation.tail)
            begun.allocation = None
            begun.restart()

    def _drop(self) -> None:
        self._leave("failed")

    def _leave(self, reason: str) -> None:
        """Drop the current sample."""
        self.give_up()
        self._begun = None
        self._dropped[reason] += 1

    def _is_too_much(self) -> bool:
        samples = [sample for waiting in self._waiting.values() for sample in waiting]
        return len(samples) > MOST_WAITING or sum(sample.tokens for sample in samples) > _MOST_TOKENS

    def _take(self, salt: str) -> ForcedAnswer:
        """Take the oldest sample of a salt and move the salt to the end."""
        waiting = self._waiting.pop(salt)
        sample = waiting.popleft()
        if waiting:
            self._waiting[salt] = waiting
        return sample

    def _begin(self) -> bool:
        while self._begun is not None or self._waiting:
            if self._begun is None:
                sample = self._take(next(iter(self._waiting)))
                prompts = self._prompts(sample)
                if not prompts:
                    self._dropped["gone"] += 1
                    continue
                self._begun = _Run(sample, prompts)
                self._begun.restart()
            begun = self._begun
            if begun.allocation is not None:
                return True
            begun.tries += 1
            reason = self._place(begun) if begun.tries <= _MOST_TRIES else "busy"
            if reason is None:
                return True
            self._leave(reason)
        return False

    def _place(self, begun: _Run) -> str | None:
        """Allocate the next run of a sample. Returns the reason if that fails."""
        sample = begun.sample
        composed = sample.in_full() if begun.full else sample.behind(begun.prompts[len(begun.given)])
        lookup = look_up(self._store, composed)
        if lookup.missing:  # modules that it read are gone
            return "gone"
        tokens = tail_tokens(composed, lookup) - 1
        if tokens > self._most:
            return "no room"
        with ExitStack() as undo:
            hold = undo.enter_context(self._store.hold(*lookup.found))
            try:
                slots = self._store.allocate(tokens, urgent=True)
            except CapacityError:
                return "no room"
            undo.callback(self._store.pool.free, slots)
            begun.allocation = allocation_of(composed, lookup, (), slots, hold, sample.request.adapter)
            undo.pop_all()
        return None

    def _compute(self, tokens: int) -> None:
        begun = self._begun
        assert begun is not None, "a sample is begun"
        allocation = begun.allocation
        assert allocation is not None, "it has room"
        ahead = allocation.prompt_left - allocation.prefill[-1].tokens_left
        if ahead:
            work, _ = allocation.take(min(tokens, ahead))
            self._run(work)
            return
        work, _ = allocation.take(min(tokens, self._at_once))
        logits = self._run(work, range(sum(each.part.rows for each in work)))
        self._expected(begun, logits.float().log_softmax(dim=-1))
        if not allocation.prompt_left:
            self._end_run(begun)

    def _expected(self, begun: _Run, rows: Tensor) -> None:
        """Add the distributions of the next steps: log-probabilities, (steps, vocabulary)."""
        if not begun.full:
            begun.rows.append(rows)
            return
        tops = rows.argmax(dim=-1)
        for number, whole in enumerate(begun.given):
            given = whole[begun.steps : begun.steps + len(rows)]
            begun.kl[number] += float(divergences(rows, given).sum())
            begun.agreeing[number] += int((tops == given.argmax(dim=-1)).sum())
        begun.steps += len(rows)

    def _end_run(self, begun: _Run) -> None:
        if not begun.full:
            given = torch.cat(begun.rows)
            self.give_up()
            begun.given.append(given)
            begun.tries = 0
            return
        found = [
            AnswerComparison(kl / begun.steps, begun.steps, agreeing)
            for kl, agreeing in zip(begun.kl, begun.agreeing, strict=True)
        ]
        if not all(math.isfinite(each.kl) for each in found):
            raise InlayError(
                "the logits to compare hold NaN or inf; the model's weights or inputs are damaged",
                code="model.invalid_numbers",
            )
        self._compared(begun.sample, found)
        self.give_up()
        self._begun = None


class ShadowSampler(ForcedRuns):
    """Compares answers of one store's requests with full prefill.

    Args:
        log: collects the comparisons.
        share: the share of answers that read approximations to sample, 0 to 1.
        seed: of the sampling.
    """

    failure = "an answer could not be compared with full prefill"

    def __init__(
        self, store: SegmentStore, runner: Runner, divergence: DivergenceLog, *, share: float, seed: int | None = None
    ) -> None:
        super().__init__(store, runner, most_prompts=1)
        self.divergence = divergence
        self._chosen = share
        self._random = random.Random(seed)
        self._samples = 0

    def answered(self, request: Request) -> None:
        """Consider a request that has ended for sampling."""
        answer, asked = request.answer, request.prompt.request
        if request.usage is None or request.leader is not None or asked.forced:
            return
        if all(not isinstance(part, CachedSpan) or part.exact for part in request.prompt.composed):
            return
        whole = answer.finish_reason is not None and request.error is None and answer.token_ids
        if whole and self._random.random() < self._chosen:
            self._add(asked, request.prompt.composed, answer.token_ids)

    def stats(self) -> ShadowStats:
        """Counters and totals. Thread-safe."""
        return ShadowStats(
            waiting=sum(map(len, list(self._waiting.values()))) + (self._begun is not None),
            samples=self._samples,
            tokens=self.tokens,
            seconds=self.seconds,
            dropped=tuple(self._dropped.items()),
            totals=self.divergence.totals(),
        )

    def _prompts(self, sample: ForcedAnswer) -> tuple[ComposedPrompt, ...]:
        return (sample.composed,)

    def _compared(self, sample: ForcedAnswer, found: Sequence[AnswerComparison]) -> None:
        (one,), asked = found, sample.request
        subject = Subject(asked.salt, asked.schema, asked.schema_digest, asked.policy)
        self.divergence.add(subject, one, asked.scope.tenant)
        self._samples += 1
