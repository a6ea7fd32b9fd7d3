"""Encoding: computing the KV of segments that are not stored yet, many of them packed into one forward pass.

In every layer the keys and values of all new tokens are written to the pool before any token attends, so a module
and the text that it is anchored to can be encoded in the same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from inlay.attention.plan import Piece, Span, pieces_at
from inlay.cache.contexts import in_encoding_order
from inlay.cache.pool import Run, cut
from inlay.cache.segment import Segment, SegmentSpec
from inlay.cache.splice import pieces
from inlay.cache.store import SegmentStore
from inlay.engine.request import Work
from inlay.engine.runner import Runner

Progress = Callable[[int, int], None]


class Encoder:
    """Fills the store with segments.

    max_tokens: how many tokens go into one forward pass at most.
    """

    def __init__(self, store: SegmentStore, runner: Runner, max_tokens: int) -> None:
        self._store = store
        self._runner = runner
        self._max_tokens = max_tokens

    def encode(self, specs: Iterable[SegmentSpec], progress: Progress | None = None) -> dict[bytes, Segment]:
        """Make sure that segments are stored, and return them by key, with what the missing ones attend to.

        progress: called with the number of tokens done and to do.
        Raises CapacityError; then nothing new is stored.
        """
        wanted = list(specs)
        found = self._stored(wanted)
        ordered = in_encoding_order(spec for spec in wanted if spec.key not in found)
        found |= self._stored(ordered)
        missing = [spec for spec in ordered if spec.key not in found]
        with self._store.pinned(found.values()):
            runs = self._allocate(missing)
            try:
                self._compute(missing, found, runs, progress)
            except BaseException:
                for taken in runs.values():
                    self._store.pool.free(taken)
                raise
        found.update((spec.key, self._store.add(spec, runs[spec.key])) for spec in missing)
        return found

    def _stored(self, specs: Iterable[SegmentSpec]) -> dict[bytes, Segment]:
        return {spec.key: segment for spec in specs if (segment := self._store.get(spec)) is not None}

    def _allocate(self, missing: Sequence[SegmentSpec]) -> dict[bytes, tuple[Run, ...]]:
        runs: dict[bytes, tuple[Run, ...]] = {}
        try:
            for spec in missing:
                runs[spec.key] = self._store.allocate(len(spec.ids))
        except BaseException:
            for taken in runs.values():
                self._store.pool.free(taken)
            raise
        return runs

    def _compute(
        self,
        missing: Sequence[SegmentSpec],
        found: dict[bytes, Segment],
        runs: dict[bytes, tuple[Run, ...]],
        progress: Progress | None,
    ) -> None:
        def stored(spec: SegmentSpec) -> tuple[Piece, ...]:
            if spec.key in found:
                segment = found[spec.key]
                return pieces(segment, spec.start - segment.start, segment.tokens)
            return pieces_at(cut(runs[spec.key], 0, len(spec.ids)), spec.start)

        work = []
        for spec in missing:
            context = tuple(piece for other in spec.context for piece in stored(other))
            work.append(Work(spec.ids, Span(spec.start, len(spec.ids), context, runs[spec.key])))
        total, done = sum(len(spec.ids) for spec in missing), 0
        for batch in batches(work, self._max_tokens):
            self._runner.run(batch, rows=[])
            done += sum(w.span.length for w in batch)
            if progress is not None:
                progress(done, total)


def batches(work: Sequence[Work], max_tokens: int) -> list[list[Work]]:
    """Cut a list of work, in order, into batches of at most ``max_tokens`` tokens, splitting work where it must."""
    made: list[list[Work]] = []
    room = 0
    for item in work:
        rest: Work | None = item
        while rest is not None:
            if room == 0:
                made.append([])
                room = max_tokens
            if rest.span.length <= room:
                part, rest = rest, None
            else:
                part, rest = rest.split(room)
            made[-1].append(part)
            room -= part.span.length
    return made
