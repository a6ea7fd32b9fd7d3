"""Waits of requests and encodings for lower tiers, and for a prefix that another task computes.

A request with the same text as a running prefill waits, and then finds it stored. Otherwise it would compute the same
text again and store a second copy. Looking up a long prompt takes time. So a waiting task is looked up again when the
stored contents change, not at every step. Runs on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import count

from inlay.engine.allocation import Prefill, Wait
from inlay.engine.encoder import Encoding, Task
from inlay.engine.jobs import Admission
from inlay.kv.identity import TokenRun
from inlay.kv.index import shared_length
from inlay.kv.offload.residency import Residency
from inlay.kv.store import SegmentStore

#: The least number of tokens of another prefill that are worth waiting for.
_WORTH_WAITING = 16


class PendingPrefills:
    """The prefills of one store's requests and encodings that other tasks may wait for."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._by_first: dict[int, list[Prefill]] = {}  # by the first token that they compute

    def __len__(self) -> int:
        return sum(map(len, self._by_first.values()))

    def add(self, prefills: Iterable[Prefill]) -> None:
        """Let other tasks wait for these prefills, if the store is to keep their tokens."""
        for prefill in prefills:
            if prefill.pending is not None:
                self._by_first.setdefault(prefill.pending.ids[0], []).append(prefill)

    def remove(self, prefill: Prefill) -> None:
        """Remove a prefill, if it is known. Waits for it are over."""
        first = None if prefill.pending is None else prefill.pending.ids[0]
        if first is not None and prefill in self._by_first.get(first, ()):
            self._by_first[first].remove(prefill)
            if not self._by_first[first]:
                del self._by_first[first]

    def goes_on(self, wait: Wait) -> bool:
        """True if the prefill is still running and has not reached the tokens waited for."""
        prefill, run = wait.prefill, wait.run
        still = prefill.pending is run and prefill.computed < wait.tokens
        return still and prefill in self._by_first.get(run.ids[0], ())

    def computing(self, run: TokenRun, done: int, most: int) -> Iterator[tuple[Prefill, int]]:
        """Yield (prefill, length of the shared text) for prefills that compute enough of a run's tokens behind
        ``done``.

        Args:
            done: the number of stored tokens of the run.
            most: the number of tokens of the run that are read in all.
        """
        if done >= most:
            return
        worth = min(_WORTH_WAITING, most - done)
        for at in sorted({0, done}):  # a prefill may have begun before these tokens were stored
            place = None
            for prefill in self._by_first.get(run.ids[at], ()):
                assert prefill.pending is not None, "what is computed for nobody else is not waited for"
                common = shared_length(prefill.pending.ids, run.ids, at, most)
                if at + common < done + worth:
                    continue
                place = place or self._store.place(run.rest(at))
                if self._store.place(prefill.pending) == place:
                    yield prefill, common


class AdmissionWaits:
    """The tasks that a KVCacheManager told to wait; see jobs.Waits."""

    def __init__(self, store: SegmentStore, residency: Residency, pending: PendingPrefills) -> None:
        self._store = store
        self._residency = residency
        self._pending = pending
        self._numbers = count()
        self._coming: dict[Task, None] = {}
        self._seen: object = None  # the residency's version at the last check
        self._were_alone = True  # no task ran then
        # By prefill and run, the tasks that need the fewest tokens first.
        self._for_prefills: dict[tuple[Prefill, TokenRun], list[tuple[int, int, Task]]] = {}
        self._for_selection: dict[Task, None] = {}  # these wait for their prompt's token selection pass

    @property
    def room(self) -> object:
        """See Waits."""
        return self._residency.room_version, self._store.lent

    def begun(self, job: Task, answer: Admission) -> None:
        """See Waits."""
        if answer is Admission.COMING:
            self._coming[job] = None
        elif job.waits_for is None:
            self._for_selection[job] = None
        else:
            wait = job.waits_for
            heap = self._for_prefills.setdefault((wait.prefill, wait.run), [])
            heappush(heap, (wait.tokens, next(self._numbers), job))

    def over(self, alone: bool) -> Iterable[Task]:
        """See Waits."""
        found: list[Task] = []
        seen = self._residency.version
        if seen != self._seen or (alone and not self._were_alone):
            found += self._coming
            self._coming.clear()
        self._seen, self._were_alone = seen, alone
        for key, heap in list(self._for_prefills.items()):
            while heap and not self._goes_on(heap[0][2]):
                found.append(heappop(heap)[2])
            if not heap:
                del self._for_prefills[key]
        chosen = [task for task in self._for_selection if isinstance(task, Encoding) or task.prompt.selector is None]
        for task in chosen:
            del self._for_selection[task]
        return [*found, *chosen]

    def _goes_on(self, task: Task) -> bool:
        return task.waits_for is not None and self._pending.goes_on(task.waits_for)
