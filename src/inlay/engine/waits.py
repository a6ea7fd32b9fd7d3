"""Tasks that wait for a lower tier, or for the prefix that another task computes, and the time of their next lookup.

Looking up a long prompt takes time. So a waiting task is retried when the stored contents change, not at every step.
Runs on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import count

from inlay.engine.allocation import Prefill
from inlay.engine.encoder import Encoding, Task
from inlay.engine.jobs import Admission
from inlay.engine.pending import PendingPrefills
from inlay.kv.identity import TokenRun
from inlay.kv.offload.residency import Residency
from inlay.kv.store import SegmentStore


class AdmissionWaits:
    """The tasks that a KVCacheManager told to wait; see jobs.Waits.

    alone: returns True if no task runs. Then a task may start before all layers of its segments are loaded.
    """

    def __init__(
        self,
        store: SegmentStore,
        residency: Residency,
        pending: PendingPrefills,
        alone: Callable[[], bool],
    ) -> None:
        self._store = store
        self._residency = residency
        self._pending = pending
        self._alone = alone
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

    def over(self) -> Iterable[Task]:
        """See Waits."""
        found: list[Task] = []
        seen, alone = self._residency.version, self._alone()
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
