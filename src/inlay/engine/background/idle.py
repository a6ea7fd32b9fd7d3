"""Idle time: background computation while no request runs.

A worker computes in short passes, because a new request waits for the end of the current pass. Then the worker returns
the slots that the pool has lent it, and continues or restarts in the next idle time.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar

from torch import Tensor

from inlay.engine.allocation import Work
from inlay.engine.pass_cost import FLOOR, PassBudget
from inlay.engine.runner import Runner
from inlay.kv.store import SegmentStore

logger = logging.getLogger(__name__)

_LEAST = 8 * FLOOR  # tokens at the cost of a request's pass
#: The share of a busy engine's time for work that requests want, and the most seconds of it that are saved up.
BUSY_SHARE, _MOST_SAVED_S = 1 / 16, 0.5


class IdleWorker(ABC):
    """Computes something for one store in the background, one pass at a time.

    Attributes:
        tokens: the tokens computed so far.
        seconds: the time spent so far.
        failure: the log message if an error ends the current work.
        share: a pass of this worker has 1 / ``share`` of the tokens of a request's pass.
        like_prompts: if True, its passes take as long as prefill passes with as many tokens.
        wanted: True if it has work whose result a running request would have used.
    """

    failure: ClassVar[str]
    share: ClassVar[int] = 8
    like_prompts: ClassVar[bool] = True

    def __init__(self, store: SegmentStore, runner: Runner) -> None:
        self._store = store
        self._runner = runner
        self.tokens = 0
        self.seconds = 0.0

    def step(self, tokens: int) -> bool:
        """Compute at most that many tokens. Returns False if there is nothing to do or no room for it."""
        began = time.perf_counter()
        try:
            if not self._begin():
                return False
            self._compute(tokens)
        except BaseException as error:  # an error here must not end any request
            logger.exception(self.failure)
            self._drop()
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
        finally:
            self.seconds += time.perf_counter() - began
        return True

    @property
    def wanted(self) -> bool:
        return False

    @abstractmethod
    def give_up(self) -> None:
        """Return the slots that the pool has lent, because requests need the time."""

    @abstractmethod
    def _begin(self) -> bool:
        """Start on something, if nothing is started and there is room. Returns True if something is started."""

    @abstractmethod
    def _compute(self, tokens: int) -> None:
        """Compute at most that many tokens of the current work."""

    @abstractmethod
    def _drop(self) -> None:
        """Drop the current work after an error, and return its slots."""

    def _run(self, work: Sequence[Work], rows: Sequence[int] = ()) -> Tensor:
        """Run one forward pass. Returns the logits of the given rows."""
        logits = self._runner.run(work, rows)
        self.tokens += sum(each.part.rows for each in work)
        return logits


class IdleTime:
    """Divides idle time among workers, in their order: the first one with work goes first.

    Args:
        budget: limits the time of passes.
        most: the limit of tokens in a pass.
    """

    def __init__(self, workers: Sequence[IdleWorker | None], budget: PassBudget, most: int) -> None:
        self._workers = [worker for worker in workers if worker is not None]
        self._budget = budget
        self._most = most
        self._saved_s = 0.0  # of a busy engine's time; below 0 after an overdraft

    @property
    def due(self) -> bool:
        """True if a busy engine should run one pass of work that requests want."""
        return self._saved_s > 0 and any(worker.wanted for worker in self._workers)

    def busy_for(self, seconds: float) -> None:
        """Record the duration of a pass of requests. A share of that time goes to work that requests want."""
        self._saved_s = min(self._saved_s + seconds * BUSY_SHARE / (1 - BUSY_SHARE), _MOST_SAVED_S)

    def use_share(self) -> None:
        """Run one short pass of work that requests want, beside running requests."""
        began = time.perf_counter()
        for worker in self._workers:
            if worker.wanted and self._use(worker, whole=False):
                break
        else:
            self._saved_s = 0.0  # no room for any: retry after some time
        self._saved_s -= time.perf_counter() - began

    def use(self, *, whole: bool = False, only: Collection[IdleWorker | None] | None = None) -> bool:
        """Run one pass. Returns True if a worker had work.

        Args:
            whole: if True, the pass may be as long as any; otherwise it is short.
            only: the workers that may run; None for all.
        """
        return any(self._use(worker, whole) for worker in self._workers if only is None or worker in only)

    def give_up(self, *, wanted: bool = True) -> None:
        """Stop the current work and return its slots.

        Args:
            wanted: if True, work that requests want is stopped as well.
        """
        for worker in self._workers:
            if wanted or not worker.wanted:
                worker.give_up()

    def _use(self, worker: IdleWorker, whole: bool) -> bool:
        most = self._budget.tokens(self._most)
        if not whole:
            most = max(_LEAST // worker.share, most // worker.share)
        before, began = worker.tokens, time.perf_counter()
        worked = worker.step(most)
        if worker.like_prompts:
            self._budget.took(worker.tokens - before, time.perf_counter() - began)
        return worked
