"""Chooses the chunks to evict when the pool is full: those that the policy ranks lowest, and no more than needed.

Segments are evicted from their ends, because a chunk is useless without the text before it. A request that is one
chunk short takes one chunk of the lowest-ranked segment, and the rest stays.

Evicting single chunks would fragment the pool over time. So among the chunks that are due soon, those that form long
runs go first. A large pool evicts a few spare chunks, so that a sequence may find the next chunk free.
``lab/benchmarks/pool_runs.py`` measures the effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from inlay.kv.policies import EvictionQueue
from inlay.kv.pool import KVPool
from inlay.kv.segment import Segment

#: Spare chunks to evict: this part of the pool, and at most this many.
_SPARE, _MOST_SPARE = 1 / 32, 256
#: Candidates are this many times the spare chunks; those that lie side by side go.
_ALIKE = 4


def victims(
    segments: EvictionQueue[Segment], chunks: int, pool: KVPool, may_go: Callable[[Segment], bool] | None = None
) -> list[tuple[Segment, int]]:
    """Segments to shorten so that ``chunks`` chunks become free, each with the number of tokens to keep.

    Empty if that many chunks cannot be freed. Tokens with references stay. A chunk is free when all its owners are
    gone, so a segment stays if other owners keep its chunks.

    Args:
        segments: the eviction queue. Its order decides, except for the two rules in the module docstring.
        may_go: excludes segments; None for no exclusion.
    """
    spare = min(int(pool.chunks * _SPARE), _MOST_SPARE)
    oldest = _Oldest(pool, chunks + _ALIKE * spare)
    with segments.next() as ordered:
        for segment in ordered:
            if (may_go is None or may_go(segment)) and not oldest.add(segment):
                break
    if len(oldest.freeable) < chunks:
        return []
    return oldest.choose(chunks + spare)


def next_to_go(segments: EvictionQueue[Segment], chunks: int, pool: KVPool) -> list[Segment]:
    """The first segments of the eviction queue whose ends free ``chunks`` chunks; all if there are fewer."""
    oldest, found = _Oldest(pool, chunks), []
    with segments.next() as ordered:
        for segment in ordered:
            found.append(segment)
            if not oldest.add(segment):
                break
    return found


@dataclass(eq=False, slots=True)
class _End:
    """The end of a segment: (first token, chunk) from the last chunk on.

    ``behind`` are the ends of the segments that follow and are unreachable without it. ``gone`` counts evicted chunks.
    """

    segment: Segment
    chunks: list[tuple[int, int]]
    behind: list[_End]
    gone: int = 0


class _Oldest:
    """The ends of the first segments in the eviction queue, enough to free ``most`` chunks.

    ``freeable`` are these chunks: all their owners are among these ends.
    """

    def __init__(self, pool: KVPool, most: int) -> None:
        self.freeable: dict[int, None] = {}  # in eviction order
        self._pool = pool
        self._most = most
        self._owners: dict[int, list[tuple[_End, int]]] = {}  # chunk → the ends that own it, and its place in them
        self._places: dict[bytes, list[_End]] = {}  # by index node
        self._left: Counter[int] = Counter()  # chunk → how many of its owners are evicted

    def add(self, segment: Segment) -> bool:
        """Add the next segment of the queue. Returns True if more are needed."""
        held = segment.held
        # EvictionQueue yields the segments behind this one first, so their ends are known.
        end = _End(segment, [], self._places.get(segment.behind, []))
        self._places.setdefault(segment.place, []).append(end)
        for first, chunk in _from_its_end(segment, self._pool.chunk_size):
            if len(self.freeable) >= self._most or first < held:
                break
            owners = self._owners.setdefault(chunk, [])
            owners.append((end, len(end.chunks)))
            end.chunks.append((first, chunk))
            if len(owners) == self._pool.owners(chunk):
                self.freeable[chunk] = None
        return len(self.freeable) < self._most

    def choose(self, chunks: int) -> list[tuple[Segment, int]]:
        """As ``victims``: free that many chunks, or all there are."""
        freed: set[int] = set()
        touched: dict[_End, None] = {}
        for run in self._runs(chunks):
            for chunk in reversed(run):  # most segments end at their highest slots
                if len(freed) >= chunks:
                    break
                for end, at in self._owners[chunk]:
                    self._let_go(end, at + 1, touched, freed)
        return [(end.segment, end.chunks[end.gone - 1][0]) for end in touched]

    def _let_go(self, end: _End, chunks: int, touched: dict[_End, None], freed: set[int]) -> None:
        """Evict the first ``chunks`` chunks of an end, and all that follows it."""
        todo = [(end, chunks)]
        while todo:
            end, chunks = todo.pop()
            if not end.gone:
                todo += [(other, len(other.chunks)) for other in end.behind if other.chunks]
            for _, chunk in end.chunks[end.gone : chunks]:
                self._left[chunk] += 1
                if self._left[chunk] == self._pool.owners(chunk):
                    freed.add(chunk)
            end.gone = max(end.gone, chunks)
            touched[end] = None

    def _runs(self, chunks: int) -> list[range]:
        """The freeable chunks as runs: the shortest that is long enough, or else all, longest first."""
        runs: list[range] = []
        for chunk in sorted(self.freeable):
            if runs and runs[-1].stop == chunk:
                runs[-1] = range(runs[-1].start, chunk + 1)
            else:
                runs.append(range(chunk, chunk + 1))
        age = {chunk: number for number, chunk in enumerate(self.freeable)}
        runs.sort(key=lambda run: (-len(run) - self._pool.free_beside(run.start, run.stop), age[run[-1]]))
        fitting = min((run for run in runs if len(run) >= chunks), key=len, default=None)
        return runs if fitting is None else [fitting]


def _from_its_end(segment: Segment, size: int) -> Iterator[tuple[int, int]]:
    """The chunks of a segment from its last on, each with its first token of the segment."""
    end = segment.tokens
    last: tuple[int, int] | None = None  # two consecutive slot ranges may share a chunk
    for run in reversed(segment.slots):
        end -= run.length
        for chunk in range((run.end - 1) // size, run.first // size - 1, -1):
            first = end + max(0, chunk * size - run.first)
            if last is not None and last[1] != chunk:
                yield last
            last = first, chunk
    if last is not None:
        yield last
