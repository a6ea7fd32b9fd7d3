"""What is being computed that others need too: they wait for it, and find it stored.

Whoever comes while another computes the same text would else compute it a second time, and keep a second copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from inlay.engine.allocation import Prefill
from inlay.kv.identity import TokenRun
from inlay.kv.index import shared_length
from inlay.kv.store import SegmentStore

#: So many tokens of what somebody else is computing are worth waiting for.
_WORTH_WAITING = 16


@dataclass(frozen=True, slots=True)
class Wait:
    """For what somebody waits: the first ``tokens`` tokens of a run that a prefill computes for others."""

    prefill: Prefill
    run: TokenRun
    tokens: int


class PendingPrefills:
    """The prefills of one store's requests and encodings that others may wait for."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._by_first: dict[int, list[Prefill]] = {}  # by the first token that they compute

    def __len__(self) -> int:
        return sum(map(len, self._by_first.values()))

    def add(self, prefills: Iterable[Prefill]) -> None:
        """Let others wait for what these compute, as far as the store is to keep it."""
        for prefill in prefills:
            if prefill.pending is not None:
                self._by_first.setdefault(prefill.pending.ids[0], []).append(prefill)

    def remove(self, prefill: Prefill) -> None:
        """Let nobody wait for it any more, if anybody did."""
        first = None if prefill.pending is None else prefill.pending.ids[0]
        if first is not None and prefill in self._by_first.get(first, ()):
            self._by_first[first].remove(prefill)
            if not self._by_first[first]:
                del self._by_first[first]

    def goes_on(self, wait: Wait) -> bool:
        """Whether it has not come so far, nor has been ended."""
        prefill, run = wait.prefill, wait.run
        still = prefill.pending is run and prefill.computed < wait.tokens
        return still and prefill in self._by_first.get(run.ids[0], ())

    def computing(self, run: TokenRun, done: int, most: int) -> Iterator[tuple[Prefill, int]]:
        """Who computes enough of a run's tokens from ``done`` on, and how many; ``most``: of how many, read in all."""
        if done >= most:
            return
        worth = min(_WORTH_WAITING, most - done)
        for at in sorted({0, done}):  # it may have been begun before as much was stored
            place = None
            for prefill in self._by_first.get(run.ids[at], ()):
                assert prefill.pending is not None, "what is computed for nobody else is not waited for"
                common = shared_length(prefill.pending.ids, run.ids, at, most)
                if at + common < done + worth:
                    continue
                place = place or self._store.place(run.rest(at))
                if self._store.place(prefill.pending) == place:
                    yield prefill, common
