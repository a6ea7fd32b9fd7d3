"""Idle time: what is computed while nobody is under way, by whoever has something that nobody waits for.

It is done in short passes, since a request that comes meanwhile waits for the end of one. Then what was begun gives
back what the pool has lent it, and goes on, or begins again, when there is time.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar

from torch import Tensor

from inlay.engine.allocation import Work
from inlay.engine.pass_budget import FLOOR, PassBudget
from inlay.engine.runner import Runner
from inlay.kv.store import SegmentStore

logger = logging.getLogger(__name__)

_LEAST = 8 * FLOOR  # tokens, as a pass of requests has them
#: The share of a busy engine's time that workers may take for what requests have asked for, and the most seconds of it
#: that are saved up.
BUSY_SHARE, _MOST_SAVED_S = 1 / 16, 0.5


class IdleWorker(ABC):
    """Computes something of one store that nobody waits for, a part at a time. tokens, seconds: what that has cost.

    failure: what the log says where a fault ends what was begun.
    share: of the tokens that a pass of requests may have, its own have one in so many.
    like_prompts: whether its passes take as long as those of so many prompt tokens do.
    wanted: whether it has something to do that requests under way would have used.
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
        """Compute at most that many tokens. Returns whether there was anything to do, and room for it."""
        began = time.perf_counter()
        try:
            if not self._begin():
                return False
            self._compute(tokens)
        except BaseException as error:  # of something that nobody waits for, and no reason for anybody's end
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
        """Give back what the pool has lent, since others need the time."""

    @abstractmethod
    def _begin(self) -> bool:
        """Find something to do and room for it, unless something is begun; returns whether something is then."""

    @abstractmethod
    def _compute(self, tokens: int) -> None:
        """Compute that many tokens of what is begun, at most."""

    @abstractmethod
    def _drop(self) -> None:
        """Forget what was begun, and give back its room: a fault has ended it."""

    def _run(self, work: Sequence[Work], rows: Sequence[int] = ()) -> Tensor:
        """One forward pass; the logits of the rows that are wanted."""
        logits = self._runner.run(work, rows)
        self.tokens += sum(each.part.rows for each in work)
        return logits


class IdleTime:
    """Divides idle time among workers: who stands first has something to do goes first.

    budget: of passes. most: tokens that a pass may have in any case.
    """

    def __init__(self, workers: Sequence[IdleWorker | None], budget: PassBudget, most: int) -> None:
        self._workers = [worker for worker in workers if worker is not None]
        self._budget = budget
        self._most = most
        self._saved_s = 0.0  # of a busy engine's time, for work that is wanted; below 0 where too much was taken

    @property
    def due(self) -> bool:
        """Whether a busy engine is to run one pass of work that requests want."""
        return self._saved_s > 0 and any(worker.wanted for worker in self._workers)

    def busy_for(self, seconds: float) -> None:
        """Note that a pass of requests has taken so long; a share of that time goes to work that is wanted."""
        self._saved_s = min(self._saved_s + seconds * BUSY_SHARE / (1 - BUSY_SHARE), _MOST_SAVED_S)

    def use_share(self) -> None:
        """Run one short pass of work that requests want, on their time."""
        began = time.perf_counter()
        for worker in self._workers:
            if worker.wanted and self._use(worker, whole=False):
                break
        else:
            self._saved_s = 0.0  # there is no room for any: look again when some time has gone by
        self._saved_s -= time.perf_counter() - began

    def use(self, *, whole: bool = False, only: Collection[IdleWorker | None] | None = None) -> bool:
        """Have one pass computed; returns whether there was any use for it.

        whole: whether it may be as long as any; else it is short. only: for whom; None for whoever there is.
        """
        return any(self._use(worker, whole) for worker in self._workers if only is None or worker in only)

    def give_up(self, *, wanted: bool = True) -> None:
        """Let others have the time and the room. wanted: also give up work that requests want."""
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
