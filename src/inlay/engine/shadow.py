"""Shadow sampling: a share of the answers that have read approximations, run again in full in idle time.

An answer that was chosen is run twice more, told what to say: once over the splice that it was given on, and once over
its prompt computed whole. What the model expected at each step of the two says how far reuse has taken the answer from
full prefill (drift.py). Of an answer nothing is kept for that but its prompt's tokens, its splice and its first tokens.

Nobody waits for it, and nothing of it is kept or found by anybody. Where a request comes, what is begun gives back its
room, and that run begins again later. It takes room in the pool as a request does, an eighth of it at most.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict, deque
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inlay.engine.allocation import SequenceAllocation, allocation_of
from inlay.engine.drift import Comparison, DriftLog, Subject, divergences
from inlay.engine.idle import IdleWorker
from inlay.engine.lookup import look_up, tail_tokens
from inlay.engine.request import Request
from inlay.engine.runner import Runner
from inlay.errors import CapacityError, InlayError
from inlay.kv.store import SegmentStore
from inlay.prompt.request import EngineRequest
from inlay.prompt.splice import Cached, Fresh, Splice
from inlay.types import DROP_REASONS, ShadowStats

#: Of an answer, so many tokens are compared at most.
_MOST_STEPS = 64
#: So many answers wait at most, with so many tokens; of the salt that has most, the one that has waited for longest
#: goes first.
MOST_WAITING, _MOST_TOKENS = 64, 2**18
#: So often a run is begun before it is left, since requests keep coming.
_MOST_TRIES = 16
#: So many numbers are kept of what the model expected in the first run, and are compared in one pass.
_KEPT, _AT_ONCE = 2**24, 2**20
_PART = 8  # of the pool, that a run may take: one in so many


@dataclass(frozen=True, slots=True)
class _Sample:
    """An answer that is to be compared. splice: what it was given on. said: its first tokens."""

    request: EngineRequest
    splice: Splice
    said: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return len(self.request.ids) + len(self.said)

    @property
    def subject(self) -> Subject:
        asked = self.request
        return Subject(asked.salt, asked.schema, asked.schema_digest, asked.policy)

    def as_given(self) -> Splice:
        """What it attends to, with its answer; the last run is computed in any case, for what the model expects."""
        last = self.splice[-1]
        assert isinstance(last, Fresh), "somebody computes the last token of a prompt"
        most = len(last.ids) - 1
        run = None if last.run is None or not most else last.run.beginning(most)
        ahead = (Fresh(last.ids[:-1], last.start, run),) if most else ()
        return (*self.splice[:-1], *ahead, Fresh((last.ids[-1], *self.said[:-1]), last.start + most))

    def in_full(self) -> Splice:
        """The same without any reuse, and without gaps."""
        *ahead, last = self.request.ids
        run = Fresh((last, *self.said[:-1]), len(ahead))
        return (Fresh(tuple(ahead), 0), run) if ahead else (run,)


@dataclass(eq=False, slots=True)
class _Begun:
    """A sample of which a run is under way, or will be. allocation: of that run, while it has one. tries: how often it
    was given one.

    given: what the model expected in the first run, log-probabilities (steps, vocabulary), when that is over.
    rows: those of the run under way. kl, agreeing, steps: of the steps that are compared.
    """

    sample: _Sample
    allocation: SequenceAllocation | None = None
    tries: int = 0
    given: Tensor | None = None
    rows: list[Tensor] = field(default_factory=list)
    kl: float = 0.0
    steps: int = 0
    agreeing: int = 0


class ShadowSampler(IdleWorker):
    """Compares answers of one store's requests with full prefill.

    drift: counts what comes of it. share: of the answers that have read approximations, 0 to 1. seed: of the choice.
    """

    failure = "an answer could not be compared with full prefill"
    share = 32  # there may always be something to compare: whoever comes waits for half a pass of it in the mean
    like_prompts = False

    def __init__(
        self, store: SegmentStore, runner: Runner, drift: DriftLog, *, share: float, seed: int | None = None
    ) -> None:
        super().__init__(store, runner)
        self.drift = drift
        self._share = share
        self._random = random.Random(seed)
        self._most = store.pool.chunks * store.pool.chunk_size // _PART
        self._most_steps = max(1, min(_MOST_STEPS, _KEPT // runner.vocabulary))
        self._at_once = max(1, _AT_ONCE // runner.vocabulary)
        self._waiting: OrderedDict[str, deque[_Sample]] = OrderedDict()  # by salt, the one served last at the end
        self._begun: _Begun | None = None
        self._samples = 0
        self._dropped = dict.fromkeys(DROP_REASONS, 0)

    def answered(self, request: Request) -> None:
        """Note that a request has ended, whose answer may be chosen."""
        answer, asked = request.answer, request.prompt.request
        if request.usage is None or request.leader is not None or asked.forced:
            return
        if all(not isinstance(part, Cached) or part.exact for part in request.prompt.splice):
            return
        whole = answer.finish_reason is not None and request.error is None and answer.token_ids
        if not whole or self._random.random() >= self._share:
            return
        said = tuple(answer.token_ids[: self._most_steps])
        self._waiting.setdefault(asked.salt, deque()).append(_Sample(asked, request.prompt.splice, said))
        while self._is_too_much():
            most = max(self._waiting, key=lambda salt: len(self._waiting[salt]))
            self._take(most)
            self._dropped["busy"] += 1

    def stats(self) -> ShadowStats:
        """What it did; may be called from any thread."""
        return ShadowStats(
            waiting=sum(map(len, list(self._waiting.values()))) + (self._begun is not None),
            samples=self._samples,
            tokens=self.tokens,
            seconds=self.seconds,
            dropped=tuple(self._dropped.items()),
            totals=self.drift.totals(),
        )

    def clear(self) -> None:
        """Forget the answers that wait: what they have read is forgotten."""
        while self._waiting:
            self._take(next(iter(self._waiting)))
            self._dropped["gone"] += 1
        if self._begun is not None:
            self._leave("gone")

    def give_up(self) -> None:
        """Give back what the pool has lent, since others need the time; the run that was begun begins again later."""
        begun = self._begun
        if begun is not None and begun.allocation is not None:
            begun.allocation.hold.release()
            self._store.pool.free(begun.allocation.tail)
            begun.allocation = None
            begun.rows = []
            begun.kl, begun.steps, begun.agreeing = 0.0, 0, 0

    def _drop(self) -> None:
        self._leave("failed")

    def _leave(self, reason: str) -> None:
        """Leave what is begun as it is."""
        self.give_up()
        self._begun = None
        self._dropped[reason] += 1

    def _is_too_much(self) -> bool:
        samples = [sample for waiting in self._waiting.values() for sample in waiting]
        return len(samples) > MOST_WAITING or sum(sample.tokens for sample in samples) > _MOST_TOKENS

    def _take(self, salt: str) -> _Sample:
        """The sample of a salt that has waited for longest; other salts come first from then on."""
        waiting = self._waiting.pop(salt)
        sample = waiting.popleft()
        if waiting:
            self._waiting[salt] = waiting
        return sample

    def _begin(self) -> bool:
        while self._begun is not None or self._waiting:
            if self._begun is None:
                salt = next(iter(self._waiting))
                self._begun = _Begun(self._waiting[salt][0])
                self._take(salt)
            begun = self._begun
            if begun.allocation is not None:
                return True
            begun.tries += 1
            reason = self._place(begun) if begun.tries <= _MOST_TRIES else "busy"
            if reason is None:
                return True
            self._leave(reason)
        return False

    def _place(self, begun: _Begun) -> str | None:
        """Give the next run of a sample its room; returns the reason where there is none."""
        sample = begun.sample
        splice = sample.as_given() if begun.given is None else sample.in_full()
        lookup = look_up(self._store, splice)
        if lookup.missing:  # of modules that it has read
            return "gone"
        tokens = tail_tokens(splice, lookup) - 1
        if tokens > self._most:
            return "no room"
        with ExitStack() as undo:
            hold = undo.enter_context(self._store.hold(*lookup.found))
            try:
                slots = self._store.allocate(tokens, urgent=True)
            except CapacityError:
                return "no room"
            undo.callback(self._store.pool.free, slots)
            begun.allocation = allocation_of(splice, lookup, (), slots, hold, sample.request.adapter)
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

    def _expected(self, begun: _Begun, rows: Tensor) -> None:
        """Take what the model expects at the next steps. rows: log-probabilities, (steps, vocabulary)."""
        if begun.given is None:
            begun.rows.append(rows)
            return
        given = begun.given[begun.steps : begun.steps + len(rows)]
        begun.kl += float(divergences(rows, given).sum())
        begun.agreeing += int((rows.argmax(dim=-1) == given.argmax(dim=-1)).sum())
        begun.steps += len(rows)

    def _end_run(self, begun: _Begun) -> None:
        if begun.given is None:
            given = torch.cat(begun.rows)
            self.give_up()
            begun.given, begun.tries = given, 0
            return
        found = Comparison(begun.kl / begun.steps, begun.steps, begun.agreeing)
        if not math.isfinite(found.kl):
            raise InlayError("the model's logits are no numbers to compare")
        self.drift.add(begun.sample.subject, found, begun.sample.request.tenant)
        self._samples += 1
        self.give_up()
        self._begun = None
