"""Which keys and values go when the pool is full: those that a policy ranks least, and no more of them than are needed.

Segments go from their ends: a chunk of a segment is of use only together with all that stands before it. So a newcomer
that is one chunk short takes one chunk of the segment that ranks least, and the rest stays.

What is stored comes and goes for as long as the engine runs, and chunks that go one by one would leave no two free ones
side by side. So among those that would go soon in any case, chunks go first that make long runs together; and a large
pool lets a few more go than are needed, so that a sequence may find the chunk behind its last one free. What that does
is measured by ``lab/benchmarks/pool_runs.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from inlay.kv.pool import KVPool
from inlay.kv.segment import Segment
from inlay.kv.use_order import UseOrder

#: How many more chunks go than are needed: this part of the pool, and no more than that.
_SPARE, _MOST_SPARE = 1 / 32, 256
#: Of so many times that, those go that lie together: they would be the next.
_ALIKE = 4


def victims(
    segments: UseOrder[Segment], chunks: int, pool: KVPool, may_go: Callable[[Segment], bool] | None = None
) -> list[tuple[Segment, int]]:
    """Segments, each with how many of its tokens may stay, whose ends free ``chunks`` chunks; none if they can't.

    In the order given, but for what is said above, and never what is held. A chunk is free when all its owners
    have gone, so a segment alone may free none, and one whose chunks others keep stays: its going would free nothing.
    may_go: None for all of them.
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


def next_to_go(segments: UseOrder[Segment], chunks: int, pool: KVPool) -> list[Segment]:
    """The first segments in the order given whose ends would free that many chunks; all where there are fewer."""
    oldest, found = _Oldest(pool, chunks), []
    with segments.next() as ordered:
        for segment in ordered:
            found.append(segment)
            if not oldest.add(segment):
                break
    return found


@dataclass(eq=False, slots=True)
class _End:
    """The end of a segment: its chunks from the last on, each with the first of its tokens that lies in it.

    behind: the ends of what follows this segment, which would be found no more without it. gone: how many chunks go.
    """

    segment: Segment
    chunks: list[tuple[int, int]]
    behind: list[_End]
    gone: int = 0


class _Oldest:
    """The ends of the segments that go first, as many as free ``most`` chunks.

    freeable: those chunks: all their owners are among these ends.
    """

    def __init__(self, pool: KVPool, most: int) -> None:
        self.freeable: dict[int, None] = {}  # those that go first first
        self._pool = pool
        self._most = most
        self._owners: dict[int, list[tuple[_End, int]]] = {}  # chunk → the ends that hold it, and where in them
        self._places: dict[bytes, list[_End]] = {}  # where the index keeps them
        self._left: Counter[int] = Counter()  # chunk → how many of its owners go

    def add(self, segment: Segment) -> bool:
        """The next segment in the order. Returns whether there is any need for more."""
        held = segment.held
        # What follows a segment comes before it (see UseOrder), so it has been here.
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
        """As ``victims``: what frees that many, or all there are."""
        freed: set[int] = set()
        touched: dict[_End, None] = {}
        for run in self._runs(chunks):
            for chunk in reversed(run):  # most segments end where their slots have the highest numbers
                if len(freed) >= chunks:
                    break
                for end, at in self._owners[chunk]:
                    self._let_go(end, at + 1, touched, freed)
        return [(end.segment, end.chunks[end.gone - 1][0]) for end in touched]

    def _let_go(self, end: _End, chunks: int, touched: dict[_End, None], freed: set[int]) -> None:
        """Chunks of an end, and all that follows it."""
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
        """What can be freed, as runs of chunks: first the shortest that is long enough, then the longest ones."""
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
    """The chunks of a segment from its last on, each with the first of its tokens that lies in it."""
    end = segment.tokens
    last: tuple[int, int] | None = None  # two runs of one chunk may follow each other
    for run in reversed(segment.slots):
        end -= run.length
        for chunk in range((run.end - 1) // size, run.first // size - 1, -1):
            first = end + max(0, chunk * size - run.first)
            if last is not None and last[1] != chunk:
                yield last
            last = first, chunk
    if last is not None:
        yield last
