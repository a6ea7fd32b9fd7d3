"""The policy meter: in idle time, several recomputations are compared with full prefill on live requests.

``auto`` chooses by the results (measured.py). They are numbers over many requests, without any text. The meter ends
after a fixed number of answers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from inlay.engine.background.divergence import AnswerComparison
from inlay.engine.background.forced_runs import ForcedAnswer, ForcedRuns
from inlay.engine.background.profiler import Profiler
from inlay.engine.request import Request
from inlay.engine.runner import Runner
from inlay.kv.store import SegmentStore
from inlay.policy import BEST, Recompute
from inlay.prompt.composed import ComposedPrompt, choose_tokens, compose, inexact_modules
from inlay.tolerance import Measured

#: The recomputations that are compared. The first is none.
RECOMPUTATIONS = (None, *(Recompute("profiled", share) for share in (0.05, 0.15, 0.3)))
#: The number of answers before the first result, and before the last one. A new result is given at each doubling.
FIRST, ENOUGH = 16, 64
#: Standard errors between a mean and its 95% bound, for the smallest number of answers.
_T95 = 2.13


@dataclass(frozen=True, slots=True)
class _Found:
    """One answer under one recomputation. ``recomputed`` is the share of its inexact module tokens."""

    kl: float
    top1: float
    recomputed: float


class PolicyMeter(ForcedRuns):
    """Compares recomputations of one store's ``modular`` requests with full prefill.

    An answer counts if all its modules have deviation profiles. The profiler makes missing ones first.

    Attributes:
        version: changes with every new result.
    """

    failure = "policies could not be compared on an answer"

    def __init__(self, store: SegmentStore, runner: Runner, profiler: Profiler) -> None:
        super().__init__(store, runner, most_prompts=len(RECOMPUTATIONS))
        self._profiler = profiler
        self._found: dict[str, list[list[_Found]]] = {}  # by positions, for each recomputation
        self._rows: tuple[Measured, ...] = ()
        self.version = 0

    def answered(self, request: Request) -> None:
        """Consider a request that has ended. Requests under an adapter are of another model."""
        answer, asked = request.answer, request.prompt.request
        policy = asked.policy
        if not policy.best or policy.across_adapters or asked.adapter or asked.forced or request.leader is not None:
            return
        if self._is_enough(str(policy.positions), sum(map(len, self._waiting.values()))):
            return
        if request.usage is None or not request.usage.module_tokens:
            return
        if answer.finish_reason is None or request.error is not None or not answer.token_ids:
            return
        self._profiler.add(*request.prompt.profiled_modules())
        self._add(asked, request.prompt.composed, answer.token_ids)

    def rows(self) -> tuple[Measured, ...]:
        """Return the latest results, by policy and positions. Thread-safe."""
        return self._rows

    def _is_enough(self, positions: str, waiting: int = 0) -> bool:
        return len(self._found.get(positions, [[]])[0]) + waiting >= ENOUGH

    def _prompts(self, sample: ForcedAnswer) -> tuple[ComposedPrompt, ...]:
        if self._is_enough(str(sample.request.policy.positions)):
            return ()
        plain = self._plain(sample)
        profiles = self._profiler.profiles
        if not inexact_modules(plain) or any(part.spec.lossless.key not in profiles for part in inexact_modules(plain)):
            return ()
        made = [choose_tokens(recompute, plain, profiles) for recompute in RECOMPUTATIONS]
        stored = self._stored(sample)
        return tuple(compose(sample.request, stored, chosen.offsets) for chosen in made)

    def _plain(self, sample: ForcedAnswer) -> ComposedPrompt:
        """Return the composed prompt without recomputation or promoted text."""
        return compose(sample.request, self._stored(sample))

    def _stored(self, sample: ForcedAnswer) -> frozenset[bytes]:
        open_ones = sample.request.open_segments()
        return frozenset(spec.key for spec in open_ones if self._store.get(spec) is not None)

    def _compared(self, sample: ForcedAnswer, found: Sequence[AnswerComparison]) -> None:
        positions = str(sample.request.policy.positions)
        modules = inexact_modules(self._plain(sample))
        tokens = sum(part.length for part in modules)
        of_all = self._found.setdefault(positions, [[] for _ in RECOMPUTATIONS])
        for recompute, one, so_far in zip(RECOMPUTATIONS, found, of_all, strict=True):
            share = 0.0 if recompute is None else recompute.tokens(tokens) / tokens
            so_far.append(_Found(one.kl, one.agreeing / one.steps, share))
        if len(of_all[0]) in (FIRST, 2 * FIRST, ENOUGH):
            self._rows = tuple(
                _row(recompute, at, so_far)
                for at, each in self._found.items()
                if len(each[0]) >= FIRST
                for recompute, so_far in zip(RECOMPUTATIONS, each, strict=True)
            )
            self.version += 1


def suffices(rows: Iterable[Measured]) -> bool:
    """Return True if results need no further answers: they are of enough answers, or of ``inlay check``."""
    return any(row.policy == str(BEST) and (row.same is not None or row.prompts >= ENOUGH) for row in rows)


def _row(recompute: Recompute | None, positions: str, found: Sequence[_Found]) -> Measured:
    kl = [one.kl for one in found]
    reach = _T95 * statistics.stdev(kl) / math.sqrt(len(kl))
    return Measured(
        policy=str(BEST) if recompute is None else f"{BEST}+{recompute}",
        positions=positions,
        prompts=len(found),
        kl=statistics.fmean(kl),
        kl_high=statistics.fmean(kl) + reach,
        top1=statistics.fmean(one.top1 for one in found),
        same=None,
        same_low=None,
        recomputed=statistics.fmean(one.recomputed for one in found),
        ttft_ms=None,
    )
