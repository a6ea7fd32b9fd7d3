"""Lifetimes: until when what is stored may be found, where somebody has said so."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

import numpy as np

from inlay.kv.identity import KeyMaker, SegmentSpec, TokenRun

#: Of all that is claimed; each claim counts as so many more. Where there is more, claims are dropped until a part of
#: that is free, so that what is dropped is looked for once for many claims.
MOST_TOKENS, CLAIM_TOKENS = 4 * 2**20, 64
_FREED = 16
_HELD_S = 1.0  # until something that was read when it expired is looked at again


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """Tokens of a prompt as they stand there: ``first`` to ``end`` of a run, which all passages of it share.

    run: from where it begins in the store.
    """

    run: TokenRun
    first: int
    end: int
    key: bytes

    @classmethod
    def all_of(cls, run: TokenRun, ranges: Iterable[tuple[int, int]], keys: KeyMaker) -> list[Passage]:
        """Passages of one run. ranges: first and end of each, by increasing ends.

        The keys come of one walk over the run, of which nothing is kept behind the last passage.
        """
        ranges = list(ranges)
        run = run.beginning(ranges[-1][1])
        digest, at, passages = hashlib.sha256(keys.place(run.digest, run.start)), 0, []
        for first, end in ranges:
            digest.update(np.asarray(run.ids[at:end], "<u4").tobytes())
            at, named = end, digest.copy()
            named.update(b"from" + first.to_bytes(8, "little"))
            passages.append(cls(run, first, end, named.digest()))
        return passages


#: What has a lifetime.
Claimed = SegmentSpec | Passage


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """Until when something is found. salt: whose it is."""

    thing: Claimed
    end: float
    salt: str

    @property
    def run(self) -> TokenRun:
        """The tokens that have to be known to find it."""
        return self.thing.run if isinstance(self.thing, Passage) else self.thing


@dataclass(slots=True, eq=False)
class _Table:
    """The claims of one salt, by key, the oldest first.

    runs: how many claims there are on each. tokens: as of Lifetimes.
    """

    claims: OrderedDict[bytes, Claim] = field(default_factory=OrderedDict)
    runs: dict[TokenRun, int] = field(default_factory=dict)
    tokens: int = 0

    def add(self, claim: Claim) -> int:
        """Returns how many tokens there are more."""
        others = self.runs.get(claim.run, 0)
        self.runs[claim.run] = others + 1
        self.claims[claim.thing.key] = claim
        more = CLAIM_TOKENS + (0 if others else len(claim.run.ids))
        self.tokens += more
        return more

    def remove(self, claim: Claim) -> int:
        """Returns how many tokens there are less."""
        del self.claims[claim.thing.key]
        others = self.runs.pop(claim.run) - 1
        if others:
            self.runs[claim.run] = others
        less = CLAIM_TOKENS + (0 if others else len(claim.run.ids))
        self.tokens -= less
        return less


class Lifetimes:
    """Claims, on one monotonic clock; of several on one thing, the one that ends last counts.

    What nobody has claimed has no end. Of too many claims the oldest are dropped, of the salt that has most: what they
    were on has no end any more, and nobody takes the others' place.

    tokens: of the runs that claims are on, each counted once, and CLAIM_TOKENS for each claim.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._claims: dict[bytes, Claim] = {}
        self._tables: dict[str, _Table] = {}
        self._heap: list[tuple[float, int, bytes]] = []  # with claims that are over, or were made longer
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._claims)

    def claim(self, thing: Claimed, ttl_s: float, now: float, salt: str = "") -> bool:
        """Have something found for so long from now on; returns whether that makes its life longer, or gives it one.

        salt: whose claim it is; "" for everybody's.
        """
        end = now + ttl_s
        before = self._claims.get(thing.key)
        if before is not None and end <= before.end:
            return False
        self.forget(thing)
        claim = self._claims[thing.key] = Claim(thing, end, salt)
        self.tokens += self._tables.setdefault(salt, _Table()).add(claim)
        heappush(self._heap, (end, next(self._numbers), thing.key))
        if self.tokens > MOST_TOKENS:
            self._drop_some()
        if len(self._heap) > 64 + 2 * len(self._claims):
            self._heap = [entry for entry in self._heap if self._ends(entry)]
            heapify(self._heap)
        return True

    def expired(self, now: float, most: int) -> list[list[Claim]]:
        """The claims that are over, each once: those on one run together, and of at most so many runs."""
        over: dict[TokenRun, list[Claim]] = {}
        while self._heap and self._heap[0][0] <= now:
            if self._ends(self._heap[0]):
                claim = self._claims[self._heap[0][2]]
                if len(over) == most and claim.run not in over:
                    break
                self.forget(claim.thing)
                over.setdefault(claim.run, []).append(claim)
            heappop(self._heap)
        return list(over.values())

    def forget(self, thing: Claimed) -> None:
        """It has no end any more."""
        claim = self._claims.pop(thing.key, None)
        if claim is not None:
            table = self._tables[claim.salt]
            self.tokens -= table.remove(claim)
            if not table.claims:
                del self._tables[claim.salt]

    def again(self, thing: Claimed, now: float, salt: str = "") -> None:
        """One that is still read is over a moment later."""
        self.claim(thing, _HELD_S, now, salt)

    def left_s(self, thing: Claimed, now: float) -> float:
        """For how long it is to be found; inf for what has no end."""
        claim = self._claims.get(thing.key)
        return math.inf if claim is None else claim.end - now

    def _ends(self, entry: tuple[float, int, bytes]) -> bool:
        """Whether an entry of the heap is that of a claim as it is now."""
        claim = self._claims.get(entry[2])
        return claim is not None and claim.end == entry[0]

    def _drop_some(self) -> None:
        tables = [(-table.tokens, salt) for salt, table in self._tables.items()]
        heapify(tables)
        while self.tokens > MOST_TOKENS - MOST_TOKENS // _FREED:
            salt = tables[0][1]
            table = self._tables[salt]
            self.forget(next(iter(table.claims.values())).thing)
            heapreplace(tables, (-table.tokens, salt))
