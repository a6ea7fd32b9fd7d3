"""Eviction: policies that rank a segment by its use, and the queue of items in their order.

The pool, the disk tier and ``inlay bench eviction`` use the same functions. Segments with references or pins are never
ranked. Text behind a segment is always evicted before it, independent of rank.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar


@dataclass(slots=True)
class Use:
    """The known use of a segment.

    Attributes:
        tokens, context: its length, and the number of tokens before it.
        module: True for a module, False for other text.
        seen: time of the last lookup.
        frequency: number of reads.
        last, before: times of the last two reads; 0 for never.
        floor: the highest worth of an evicted segment at the last read, so that old uses count less.
        returned: how many of these reads only loaded the segment from a lower tier. Only ``uses`` subtracts them.
        read_s: the last read, in seconds of ``time.monotonic``.
    """

    tokens: int
    context: int = 0
    module: bool = False
    seen: float = 0
    frequency: int = 0
    last: float = 0
    before: float = 0
    floor: float = 0.0
    returned: int = 0
    read_s: float = 0.0

    @property
    def uses(self) -> int:
        """How often it was computed or read."""
        return self.frequency - self.returned

    def read(self, at: float, floor: float) -> None:
        """Record a read."""
        self.seen = at
        self.before, self.last = self.last, at
        self.read_s = time.monotonic()
        self.frequency += 1
        self.floor = floor


@dataclass(frozen=True, slots=True)
class PassCost:
    """The cost of prefill: ``token_s`` seconds a token, plus ``pair_s`` for each token that it attends to.

    Only their ratio affects an order. An engine measures it (engine/pass_cost.py). The defaults fit half a billion
    parameters on two cores; they serve traces and pools that are too small to measure in.
    """

    token_s: float = 2.5e-3
    pair_s: float = 3e-7

    def seconds(self, tokens: int, context: int) -> float:
        """Seconds to compute ``tokens`` tokens behind ``context`` others."""
        return tokens * (self.token_s + self.pair_s * (context + tokens / 2))


#: The lowest rank is evicted first: (class, worth within the class, time of the last lookup). A use never lowers it.
Rank = tuple[int, float, float]
Policy = Callable[[Use, PassCost], Rank]


def lru(use: Use, cost: PassCost) -> Rank:
    """Least recently used first."""
    return 0, 0.0, use.seen


def lru2(use: Use, cost: PassCost) -> Rank:
    """Least recently used twice first (LRU-K, O'Neil et al. 1993). Segments that were used once go before all
    others.
    """
    return 0, use.before, use.seen


def lfu(use: Use, cost: PassCost) -> Rank:
    """Least frequently used first; old uses count less (LFU with dynamic aging, Arlitt et al. 2000)."""
    return 0, use.floor + use.frequency, use.seen


def hybrid(use: Use, cost: PassCost) -> Rank:
    """Requests' own text first, least recently used; then modules as in ``lfu``."""
    return (1, use.floor + use.frequency, use.seen) if use.module else (0, 0.0, use.seen)


def cost(use: Use, cost: PassCost) -> Rank:
    """Fewest saved seconds per byte first (GreedyDual-Size-Frequency, Cherkasova 1998).

    H = L + frequency × seconds to compute it ÷ bytes. All tokens of a pool have the same size, so tokens stand for
    bytes.
    """
    return 0, use.floor + use.frequency * cost.seconds(use.tokens, use.context) / max(1, use.tokens), use.seen


POLICIES: Mapping[str, Policy] = {"lru": lru, "lru2": lru2, "lfu": lfu, "hybrid": hybrid, "cost": cost}

#: The best policy on most traces of ``inlay bench eviction``.
DEFAULT_EVICTION = "hybrid"


#: Use is remembered for this many evicted items, so that a returning item keeps its rank.
_MOST_GONE = 16_384
#: Heap entries per live item before stale entries are dropped.
_STALE = 2


class Evictable(Protocol):
    """An item with a use. ``listed`` is the number of its queue entry; None for none."""

    use: Use
    listed: int | None


T = TypeVar("T", bound=Evictable)


class EvictionQueue(Generic[T]):
    """Items in the order of eviction.

    The pool lists its segments here, and each tier its entries (``offload/tier.py``). Every item has one valid heap
    entry, with the rank that it had when it was listed. A use never lowers a rank, so it only updates the item. An
    outdated entry that comes first goes back into the heap with its new rank. So taking the first items costs no more
    if there are many.

    Args:
        behind: returns the items that are useless without a given item. None if there are no such items.

    Attributes:
        floor: the worth of evicted items; see Use.
    """

    def __init__(self, policy: Policy, cost: PassCost, behind: Callable[[T], Iterable[T]] | None = None) -> None:
        self.floor = 0.0
        self.policy = policy
        self.cost = cost
        self._behind = behind
        self._heap: list[tuple[Rank, int]] = []
        self._items: dict[int, T] = {}  # by the number of the valid entry; a removed item leaves no reference
        # By the hash of the name: frequency, returned, last, before.
        self._gone: OrderedDict[int, tuple[int, int, float, float]] = OrderedDict()
        self._now = self._numbers = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(self, thing: T, name: Hashable = None, *, returns: bool = False) -> None:
        """Add an item that is used now.

        Args:
            name: under which its use is remembered after eviction.
            returns: True if the item only returns from a lower tier.
        """
        gone = None if name is None else self._gone.pop(hash(name), None)
        if gone is not None:
            thing.use.frequency, thing.use.returned, thing.use.last, thing.use.before = gone
            thing.use.returned += returns
        self.read(thing)
        self.put(thing)

    def put(self, thing: T) -> None:
        """Add an item, or list it again, with the use that it has."""
        if thing.listed is not None:
            del self._items[thing.listed]
        self._push(thing)

    def add_behind(self, thing: T, other: T) -> None:
        """Add the second part of an item that was cut in two. It inherits the use of the first part."""
        thing.use = replace(other.use, tokens=thing.use.tokens, context=thing.use.context)
        self.put(thing)

    def touch(self, thing: T) -> None:
        """Record a lookup. Many lookups may precede a read."""
        self._now += 1
        thing.use.seen = self._now

    def read(self, thing: T) -> None:
        """Record a read."""
        self._now += 1
        thing.use.read(self._now, self.floor)

    def remove(self, thing: T, name: Hashable = None) -> None:
        """Remove an item and remember its use under its name."""
        if thing.listed is not None:
            del self._items[thing.listed]
        thing.listed = None
        if name is not None:
            use = thing.use
            self._gone[hash(name)] = use.frequency, use.returned, use.last, use.before
            if len(self._gone) > _MOST_GONE:
                self._gone.popitem(last=False)
        self._tidy()

    def evicted(self, thing: T) -> None:
        """Record an eviction. This raises the floor, so that items of less worth lose rank unless they are used
        again.
        """
        self.floor = max(self.floor, self.policy(thing.use, self.cost)[1])

    @contextmanager
    def next(self) -> Iterator[Iterator[T]]:
        """All items in the order of eviction. Nothing may change meanwhile."""
        met: list[tuple[Rank, int]] = []
        try:
            with closing(self._ends_first(met)) as things:
                yield things
        finally:
            for entry in met:
                heappush(self._heap, entry)

    def _push(self, thing: T) -> None:
        self._numbers += 1
        thing.listed = self._numbers
        self._items[self._numbers] = thing
        heappush(self._heap, (self.policy(thing.use, self.cost), self._numbers))
        self._tidy()

    def _tidy(self) -> None:
        if len(self._heap) > 64 + _STALE * len(self._items):
            self._heap = [entry for entry in self._heap if entry[1] in self._items]
            heapify(self._heap)

    def _ends_first(self, met: list[tuple[Rank, int]]) -> Generator[T, None, None]:
        done: set[int] = set()
        waiting: dict[int, list[T]] = {}  # number of an item → the items that must come after it
        left: dict[int, int] = {}  # number of an item → how many must come before it
        while (entry := self._pop()) is not None:
            met.append(entry)
            todo = [self._items[entry[1]]]
            while todo:
                thing = todo.pop()
                number = thing.listed
                assert number is not None, "what is removed has no entry"
                if number not in left:
                    others = () if self._behind is None else self._behind(thing)
                    before = [n for other in others if (n := other.listed) is not None and n not in done]
                    left[number] = len(before)
                    for other in before:
                        waiting.setdefault(other, []).append(thing)
                if left[number]:
                    continue
                done.add(number)
                yield thing
                for other_thing in waiting.pop(number, ()):
                    assert other_thing.listed is not None, "nothing changes meanwhile"
                    left[other_thing.listed] -= 1
                    if not left[other_thing.listed]:
                        todo.append(other_thing)

    def _pop(self) -> tuple[Rank, int] | None:
        """The entry of lowest rank, with an up-to-date rank."""
        while self._heap:
            entry = heappop(self._heap)
            rank, number = entry
            thing = self._items.get(number)
            if thing is None:
                continue
            now = self.policy(thing.use, self.cost)
            if now == rank:
                return entry
            heappush(self._heap, (now, number))
        return None
