"""Prefills in progress that other requests can share. A request with the same text waits, and then finds it stored.

Without the wait, it would compute the same text again and store a second copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from inlay.engine.allocation import Prefill
from inlay.kv.identity import TokenRun
from inlay.kv.index import shared_length
from inlay.kv.store import SegmentStore

#: The least number of tokens of another prefill that are worth waiting for.
_WORTH_WAITING = 16


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait for the first ``tokens`` tokens of a run that a prefill computes."""

    prefill: Prefill
    run: TokenRun
    tokens: int


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
