"""Lifetimes: stored text with a time limit, and its expiry."""

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

#: Limit for all claims together, and the tokens that one claim counts as. Over the limit, claims are dropped until 1 /
#: _FREED of it is free, so that one search serves many claims.
MOST_TOKENS, CLAIM_TOKENS = 4 * 2**20, 64
_FREED = 16
_HELD_S = 1.0  # delay before text that was in use at its expiry is checked again


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """Tokens ``first`` to ``end`` of a prompt. All passages of a prompt share its run.

    Attributes:
        run: the prompt from the start of its stored text.
    """

    run: TokenRun
    first: int
    end: int
    key: bytes

    @classmethod
    def all_of(cls, run: TokenRun, ranges: Iterable[tuple[int, int]], keys: KeyMaker) -> list[Passage]:
        """Passages of one run. All keys come from one walk over the run.

        Args:
            ranges: first and end of each, by increasing ends. The run is kept only up to the last end.
        """
        ranges = list(ranges)
        run = run.prefix(ranges[-1][1])
        digest, at, passages = hashlib.sha256(keys.place(run.digest, run.start)), 0, []
        for first, end in ranges:
            digest.update(np.asarray(run.ids[at:end], "<u4").tobytes())
            at, named = end, digest.copy()
            named.update(b"from" + first.to_bytes(8, "little"))
            passages.append(cls(run, first, end, named.digest()))
        return passages


#: Things with a lifetime.
Claimed = SegmentSpec | Passage


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """The lifetime of one thing. ``salt`` is the cache salt of the claim."""

    thing: Claimed
    end: float
    salt: str

    @property
    def run(self) -> TokenRun:
        """The tokens that are needed to find it."""
        return self.thing.run if isinstance(self.thing, Passage) else self.thing


@dataclass(slots=True, eq=False)
class _Claims:
    """The claims of one salt, by key, the oldest first.

    ``runs`` counts the claims per run; ``tokens`` counts as in Lifetimes.
    """

    claims: OrderedDict[bytes, Claim] = field(default_factory=OrderedDict)
    runs: dict[TokenRun, int] = field(default_factory=dict)
    tokens: int = 0

    def add(self, claim: Claim) -> int:
        """Add a claim. Returns by how many tokens the table has grown."""
        others = self.runs.get(claim.run, 0)
        self.runs[claim.run] = others + 1
        self.claims[claim.thing.key] = claim
        more = CLAIM_TOKENS + (0 if others else len(claim.run.ids))
        self.tokens += more
        return more

    def remove(self, claim: Claim) -> int:
        """Remove a claim. Returns by how many tokens the table has shrunk."""
        del self.claims[claim.thing.key]
        others = self.runs.pop(claim.run) - 1
        if others:
            self.runs[claim.run] = others
        less = CLAIM_TOKENS + (0 if others else len(claim.run.ids))
        self.tokens -= less
        return less


class Lifetimes:
    """Claims on one monotonic clock. Of several claims on one thing, the latest end counts.

    Text without a claim never expires. If there are too many claims, the oldest of the largest salt are dropped, and
    their
    text no longer expires. So no tenant displaces the claims of another.

    Attributes:
        tokens: the tokens of all claimed runs, each run counted once, plus CLAIM_TOKENS per claim.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._claims: dict[bytes, Claim] = {}
        self._tables: dict[str, _Claims] = {}
        self._heap: list[tuple[float, int, bytes]] = []  # includes claims that have ended or were extended
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._claims)

    def claim(self, thing: Claimed, ttl_s: float, now: float, salt: str = "") -> bool:
        """Keep a thing findable for ``ttl_s`` seconds from now on. Returns True if this extends or creates its
        lifetime.

        Args:
            salt: the cache salt of the claim; "" for public.
        """
        end = now + ttl_s
        before = self._claims.get(thing.key)
        if before is not None and end <= before.end:
            return False
        self.forget(thing)
        claim = self._claims[thing.key] = Claim(thing, end, salt)
        self.tokens += self._tables.setdefault(salt, _Claims()).add(claim)
        heappush(self._heap, (end, next(self._numbers), thing.key))
        if self.tokens > MOST_TOKENS:
            self._drop_some()
        if len(self._heap) > 64 + 2 * len(self._claims):
            self._heap = [entry for entry in self._heap if self._ends(entry)]
            heapify(self._heap)
        return True

    def expired(self, now: float, most: int) -> list[list[Claim]]:
        """Remove and return the expired claims, grouped by run, for at most ``most`` runs."""
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
        """Remove the lifetime of a thing."""
        claim = self._claims.pop(thing.key, None)
        if claim is not None:
            table = self._tables[claim.salt]
            self.tokens -= table.remove(claim)
            if not table.claims:
                del self._tables[claim.salt]

    def again(self, thing: Claimed, now: float, salt: str = "") -> None:
        """Expire again a moment later, because it is still being read."""
        self.claim(thing, _HELD_S, now, salt)

    def left_s(self, thing: Claimed, now: float) -> float:
        """Seconds left; inf without a lifetime."""
        claim = self._claims.get(thing.key)
        return math.inf if claim is None else claim.end - now

    def _ends(self, entry: tuple[float, int, bytes]) -> bool:
        """True if a heap entry describes the current state of a claim."""
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
