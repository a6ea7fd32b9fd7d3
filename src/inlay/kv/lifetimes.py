"""Lifetimes: until when what is stored may be found, where somebody has said so."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count

from inlay.kv.identity import KeyMaker, SegmentSpec, TokenRun

MOST_CLAIMS = 65_536
MOST_TOKENS = 4 * 2**20  # of all that is claimed
_HELD_S = 1.0  # until something that was read when it expired is looked at again


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """Tokens of a prompt as they stand there, up to the end of a run.

    run: from where it begins in the store. first: the number of the first of the tokens.
    """

    run: TokenRun
    first: int
    key: bytes

    @classmethod
    def of(cls, run: TokenRun, first: int, keys: KeyMaker) -> Passage:
        named = keys.key(run.digest, run.ids, run.start) + first.to_bytes(8, "little")
        return cls(run, first, named)

    @property
    def ids(self) -> tuple[int, ...]:
        """All that has to be known to find it."""
        return self.run.ids


#: What has a lifetime.
Claimed = SegmentSpec | Passage


class Lifetimes:
    """Claims, on one monotonic clock; of several on one thing, the one that ends last counts.

    What nobody has claimed has no end.
    """

    def __init__(self) -> None:
        self._ends: dict[bytes, float] = {}
        self._tokens = 0  # of all that has an end
        self._heap: list[tuple[float, int, Claimed]] = []  # with claims that are over, or were made longer
        self._numbers = count()

    def claim(self, thing: Claimed, ttl_s: float, now: float) -> bool:
        """Have something found for so long from now on; returns whether that makes its life longer, or gives it one."""
        end = now + ttl_s
        before = self._ends.get(thing.key)
        if before is not None and end <= before:
            return False
        self._tokens += len(thing.ids) if before is None else 0
        self._ends[thing.key] = end
        heappush(self._heap, (end, next(self._numbers), thing))
        if len(self._heap) > 64 + 2 * len(self._ends):
            self._heap = [entry for entry in self._heap if self._ends.get(entry[2].key) == entry[0]]
            heapify(self._heap)
        return True

    def expired(self, now: float) -> Iterator[Claimed]:
        """The things whose lives are over, and of too many claims those that end first; each once."""
        while self._heap and (self._heap[0][0] <= now or self._too_many):
            end, _, thing = heappop(self._heap)
            if self._ends.get(thing.key) == end:
                self.forget(thing)
                yield thing

    def forget(self, thing: Claimed) -> None:
        """It has no end any more."""
        if self._ends.pop(thing.key, None) is not None:
            self._tokens -= len(thing.ids)

    def again(self, thing: Claimed, now: float) -> None:
        """One that is still read is over a moment later."""
        self.claim(thing, _HELD_S, now)

    def left_s(self, thing: Claimed, now: float) -> float:
        """For how long it is to be found; inf for what has no end."""
        return self._ends.get(thing.key, math.inf) - now

    @property
    def _too_many(self) -> bool:
        return len(self._ends) > MOST_CLAIMS or self._tokens > MOST_TOKENS
