"""Lifetimes end segments at a time. Pins keep segments in the pool, within a share of it and a budget per owner."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

import numpy as np

from inlay.errors import PinError
from inlay.kv.identity import KeyMaker, SegmentSpec, TokenRun
from inlay.kv.pool import Hold, PrefixMatch
from inlay.kv.store import SegmentStore

#: The most tokens of all claims together, and the tokens that one claim counts as. Over the limit, claims are dropped
#: until 1 / _FREED of it is free, so that one search serves many claims.
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
    """The lifetime of one segment or passage. ``salt`` is the cache salt of the claim."""

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
    """The lifetimes of segments and passages (*claims*), on one monotonic clock. The latest end of each counts.

    Text without a claim never expires. If there are too many claims, the oldest of the largest salt are dropped, and
    their text no longer expires. So no tenant displaces the claims of another.

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


BY_KEY = "key"  # the reason of a pin by segment key


@dataclass(eq=False, slots=True)
class _Pin:
    """A pinned segment. ``hold`` references the segment, or a form of it, once it is stored.

    ``reasons`` are by owner; the pin ends with the last of them.
    """

    spec: SegmentSpec
    reasons: dict[str, set[str]] = field(default_factory=dict)
    hold: Hold = field(default_factory=Hold)


class Pins:
    """The pins of one store. Call with the engine lock held.

    A segment may be pinned before it is stored. It counts as the whole chunks of its tokens, once per owner and once
    for the pool. An owner may have several reasons and remove each by itself: BY_KEY, or the name of one pin of a
    schema.

    Args:
        forms: a segment and its forms that may replace it in the pool, most exact first.
        share: the part of the pool that all pins together may take, 0 to 1.
    """

    def __init__(
        self, store: SegmentStore, forms: Callable[[SegmentSpec], Iterable[SegmentSpec]], share: float = 0.25
    ) -> None:
        self._store = store
        self._forms = forms
        self._most = int(store.pool.chunks * share)
        self._pins: dict[bytes, _Pin] = {}
        self._chunks: frozenset[int] | None = frozenset()  # pinned chunks; None if they must be recounted

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def bytes(self) -> int:
        """Bytes of all pins."""
        return self._bytes(sum(self._size(pin.spec) for pin in self._pins.values()))

    @property
    def chunks(self) -> frozenset[int]:
        """The pool's pinned chunks."""
        if self._chunks is None:
            held = (slots for pin in self._pins.values() for slots in pin.hold.slots())
            self._chunks = frozenset(chunk for slots in held for chunk in self._store.pool.chunks_of(slots))
        return self._chunks

    def bytes_of(self, owner: str) -> int:
        """Bytes of an owner's pins."""
        return self._bytes(sum(self._size(pin.spec) for pin in self._pins.values() if owner in pin.reasons))

    def of(self, owner: str) -> list[SegmentSpec]:
        """The segments that an owner has pinned."""
        return [pin.spec for pin in self._pins.values() if owner in pin.reasons]

    def by_key(self) -> list[SegmentSpec]:
        """The segments that any owner has pinned by key."""
        return [pin.spec for pin in self._pins.values() if any(BY_KEY in why for why in pin.reasons.values())]

    def specs(self) -> list[SegmentSpec]:
        """All pinned segments."""
        return [pin.spec for pin in self._pins.values()]

    def is_pinned(self, spec: SegmentSpec, owner: str | None = None) -> bool:
        """True if this owner, or any owner if None, has pinned the segment."""
        pin = self._pins.get(spec.lossless.key)
        return pin is not None and (owner is None or owner in pin.reasons)

    def pin(
        self,
        specs: Iterable[SegmentSpec],
        owner: str,
        reason: str,
        budget: int | None = None,
        *,
        instead: str | None = None,
    ) -> None:
        """Pin segments. A segment that is not stored yet is kept from the time it is stored.

        Args:
            budget: the most bytes of this owner's pins; None for no bound but the pool's share.
            instead: a reason of the same owner to remove. Pins that have no other reason do not count for either bound.

        Raises:
            PinError: a bound is exceeded; nothing has changed then.
        """
        wanted = {spec.lossless.key: spec.lossless for spec in specs}
        left = [pin for pin in self._pins.values() if set(pin.reasons) != {owner} or pin.reasons[owner] != {instead}]
        own = {pin.spec.key for pin in left if pin.reasons.get(owner, set()) - {instead}}
        has = self._bytes(sum(self._size(self._pins[key].spec) for key in own))
        asked = self._bytes(sum(self._size(spec) for spec in wanted.values() if spec.key not in own))
        if budget is not None and has + asked > budget:
            raise PinError(
                f"these pins take {_size(asked)} beside the {_size(has)} that you have pinned, and {_size(budget)} are "
                "yours to pin; unpin something, or pin fewer modules"
            )
        all_pinned = {pin.spec.key: pin.spec for pin in left} | wanted
        all_chunks = sum(map(self._size, all_pinned.values()))
        if all_chunks > self._most:
            raise PinError(
                f"with these, pins take {_size(self._bytes(all_chunks))} of the KV pool, and "
                f"{_size(self._bytes(self._most))} of it may be pinned; unpin something, pin fewer modules, or give "
                "more kv_memory or pin_memory"
            )
        for spec in wanted.values():
            self._pins.setdefault(spec.key, _Pin(spec)).reasons.setdefault(owner, set()).add(reason)
            self.stored(spec)
        if instead is not None:
            self.unpin(self.of(owner), owner, instead)

    def unpin(self, specs: Iterable[SegmentSpec], owner: str | None, reason: str) -> None:
        """Remove this reason of an owner, or of all owners if None, from segments."""
        for spec in specs:
            pin = self._pins.get(spec.lossless.key)
            if pin is None:
                continue
            for each in list(pin.reasons) if owner is None else [owner]:
                pin.reasons.get(each, set()).discard(reason)
            pin.reasons = {each: why for each, why in pin.reasons.items() if why}
            if not pin.reasons:
                self.release(pin.spec)

    def release(self, spec: SegmentSpec) -> None:
        """Unpin a segment for all owners and reasons."""
        pin = self._pins.pop(spec.lossless.key, None)
        if pin is not None:
            pin.hold.release()
            self._chunks = None

    def stored(self, spec: SegmentSpec) -> None:
        """Called when a segment, or a form of it, may have entered the pool. Acquires it if it is pinned."""
        pin = self._pins.get(spec.lossless.key)
        if pin is None:
            return
        found = next((found for form in self._forms(pin.spec) if (found := self._store.get(form)) is not None), None)
        if found is not None and not _holds(pin.hold, found):
            held = pin.hold
            pin.hold = self._store.hold(found)
            held.release()
            self._chunks = None

    def _size(self, spec: SegmentSpec) -> int:
        return self._store.pool.chunks_for(len(spec.ids))

    def _bytes(self, chunks: int) -> int:
        pool = self._store.pool
        return chunks * pool.chunk_size * pool.bytes_per_token


def _holds(hold: Hold, found: PrefixMatch) -> bool:
    return all(hold.tokens.get(each.segment, 0) >= each.end for each in found.ranges)


def _size(size: int) -> str:
    """Bytes as text for a message; in KiB if MiB would show zero."""
    return f"{size / 2**20:,.1f} MiB" if size >= 0.05 * 2**20 else f"{size / 2**10:,.1f} KiB"
