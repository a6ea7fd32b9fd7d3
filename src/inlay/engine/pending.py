"""Running prefills that other requests may wait for, so that no text is computed and stored twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from inlay.engine.allocation import Prefill
from inlay.kv.identity import TokenRun
from inlay.kv.index import shared_length
from inlay.kv.store import SegmentStore

#: Wait for a running prefill only if it computes at least this many useful tokens.
_WORTH_WAITING = 16


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait for the first ``tokens`` tokens of ``run``, which ``prefill`` computes."""

    prefill: Prefill
    run: TokenRun
    tokens: int


class PendingPrefills:
    """The prefills of one store's requests and encodings that others may wait for."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._by_first: dict[int, list[Prefill]] = {}  # keyed by the first token of the pending run

    def __len__(self) -> int:
        return sum(map(len, self._by_first.values()))

    def add(self, prefills: Iterable[Prefill]) -> None:
        """Register the prefills whose results the store will keep."""
        for prefill in prefills:
            if prefill.pending is not None:
                self._by_first.setdefault(prefill.pending.ids[0], []).append(prefill)

    def remove(self, prefill: Prefill) -> None:
        """Remove a prefill; does nothing if it is not registered."""
        first = None if prefill.pending is None else prefill.pending.ids[0]
        if first is not None and prefill in self._by_first.get(first, ()):
            self._by_first[first].remove(prefill)
            if not self._by_first[first]:
                del self._by_first[first]

    def goes_on(self, wait: Wait) -> bool:
        """Return True while the prefill is registered for this run and has computed fewer than ``wait.tokens``
        tokens.
        """
        prefill, run = wait.prefill, wait.run
        still = prefill.pending is run and prefill.computed < wait.tokens
        return still and prefill in self._by_first.get(run.ids[0], ())

    def computing(self, run: TokenRun, done: int, most: int) -> Iterator[tuple[Prefill, int]]:
        """Yield the prefills that compute enough of ``run`` from token ``done`` on.

        Args:
            run: The tokens that the caller needs.
            done: Number of tokens that the caller already has.
            most: Number of tokens to compare at most, counted from the start of ``run``.

        Yields:
            The prefill and the number of tokens it shares with ``run``, counted from where the two were compared.
        """
        if done >= most:
            return
        worth = min(_WORTH_WAITING, most - done)
        for at in sorted({0, done}):  # the prefill may have begun before ``done`` tokens were stored
            place = None
            for prefill in self._by_first.get(run.ids[at], ()):
                assert prefill.pending is not None, "what is computed for nobody else is not waited for"
                common = shared_length(prefill.pending.ids, run.ids, at, most)
                if at + common < done + worth:
                    continue
                place = place or self._store.place(run.rest(at))
                if self._store.place(prefill.pending) == place:
                    yield prefill, common
