"""Encoding: computing the KV of segments that are not stored yet, many of them packed into one forward pass.

In every layer the keys and values of all new tokens are written to the pool before any token attends, so a module
and the text that it is anchored to can be encoded in the same pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

from inlay.attention.plan import Piece, Span, pieces_at
from inlay.cache.contexts import in_encoding_order
from inlay.cache.index import Found
from inlay.cache.pool import Run, cut
from inlay.cache.segment import SegmentSpec
from inlay.cache.splice import pieces
from inlay.cache.store import SegmentStore
from inlay.engine.pass_budget import PassBudget
from inlay.engine.runner import Runner
from inlay.engine.seat import Work

Progress = Callable[[int, int], None]


class Encoder:
    """Fills the store with segments.

    max_tokens: how many tokens go into one forward pass at most. budget: how many, so that it takes no longer than it
        should.
    """

    def __init__(self, store: SegmentStore, runner: Runner, max_tokens: int, budget: PassBudget) -> None:
        self._store = store
        self._runner = runner
        self._max_tokens = max_tokens
        self._budget = budget

    def encode(self, specs: Iterable[SegmentSpec], progress: Progress | None = None) -> None:
        """Make sure that segments are stored, and what the missing ones attend to.

        progress: called with the number of tokens done and to do.
        Raises CapacityError; then nothing new is stored.
        """
        for done, total in self.passes(specs, self._max_tokens):
            if progress is not None:
                progress(done, total)

    def passes(self, specs: Iterable[SegmentSpec], max_tokens: int) -> Generator[tuple[int, int]]:
        """The same, a forward pass of at most ``max_tokens`` tokens at a time; others may run between two of them.

        Yields how many tokens are done and how many there are to do, after every pass.
        """
        wanted = [spec for spec in specs if self._store.get(spec) is None]
        ordered = [(spec, self._store.get(spec)) for spec in in_encoding_order(wanted)]
        found = {spec.key: stored for spec, stored in ordered if stored is not None}
        missing = [spec for spec, stored in ordered if stored is None]
        if not missing:
            return
        with self._store.hold(*found.values()):
            block = self._store.allocate(sum(len(spec.ids) for spec in missing))
            try:
                slots = _side_by_side(missing, block)
                yield from self._compute(missing, found, slots, max_tokens)
                for spec in missing:
                    self._store.insert(spec.run, slots[spec.key])
            finally:
                self._store.pool.free(block)  # the store has its own share of what it keeps

    def _compute(
        self,
        missing: Sequence[SegmentSpec],
        found: dict[bytes, Found],
        slots: dict[bytes, tuple[Run, ...]],
        max_tokens: int,
    ) -> Generator[tuple[int, int]]:
        def stored(spec: SegmentSpec) -> tuple[Piece, ...]:
            if spec.key in found:
                return pieces(found[spec.key], spec.start, len(spec.ids))
            return pieces_at(slots[spec.key], spec.start)

        work = []
        for spec in missing:
            context = tuple(piece for other in spec.context for piece in stored(other))
            work.append(Work(spec.ids, Span(spec.start, len(spec.ids), context, slots[spec.key])))
        total, done = sum(len(spec.ids) for spec in missing), 0
        for batch in batches(work, lambda: self._budget.tokens(max_tokens)):
            began, tokens = time.perf_counter(), sum(w.span.length for w in batch)
            self._runner.run(batch, rows=[])
            self._budget.took(tokens, time.perf_counter() - began)
            done += tokens
            yield done, total


def _side_by_side(specs: Sequence[SegmentSpec], block: tuple[Run, ...]) -> dict[bytes, tuple[Run, ...]]:
    """Slots for every spec, one behind the other: small modules share chunks."""
    slots, at = {}, 0
    for spec in specs:
        slots[spec.key] = cut(block, at, len(spec.ids))
        at += len(spec.ids)
    return slots


def batches(work: Sequence[Work], max_tokens: Callable[[], int]) -> Iterator[list[Work]]:
    """Cut a list of work, in order, into batches, splitting work where it must.

    max_tokens: asked before every batch, for the most tokens that it may have.
    """
    batch: list[Work] = []
    room = max_tokens()
    for item in work:
        rest = item
        while rest.span.length > room:
            if room:
                part, rest = rest.split(room)
                batch.append(part)
            yield batch
            batch, room = [], max_tokens()
        batch.append(rest)
        room -= rest.span.length
    if batch:
        yield batch
