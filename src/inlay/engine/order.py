"""The order of a prompt's free sets: the one whose beginning is stored furthest, and else the one asked for most.

What is stored of an order is followed member by member, token by token, in the prefix index. A set is not tried in all
its orders: only what is stored is followed, so many times at most. Where nothing more is stored, the member that was
asked for most at this place goes first, then the one that was asked for most in any set, then as it is written; so
those who ask for the same come to the same order, and read it from then on.

Orders are a salt's own. What is asked for is counted for each, and what is followed of a request with a salt is its
owner's, also over a public schema (``prompt/beginning.py``; the processor's parts under ``exact``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from inlay.engine.popularity import Counts
from inlay.kv.index import Cursor
from inlay.kv.store import SegmentStore
from inlay.prompt.beginning import AsModules, beginning_of
from inlay.prompt.free_order import FreeSet, members_of, placed_at
from inlay.prompt.request import EngineRequest, PromptPart
from inlay.prompt.splice import Fresh, InPlace, splice_parts

#: How often the index is asked what is stored, for one set. A border between modules and what is read in their place
#: counts as so many: the record of what stands before it is made for that.
_MOST_LOOKS, _BORDER = 1_024, 16

Orders = tuple[tuple[int, ...], ...]


class OrderChooser:
    """Chooses orders by what one store has, and counts them. On the engine's turn."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self.counts = Counts()

    @property
    def version(self) -> tuple[int, int]:
        """It changes with what is stored, but for what takes another's place."""
        return len(self._store), self._store.tokens

    def choose(self, request: EngineRequest) -> Orders:
        """Of each free set of a request, the numbers of its members in the order to take."""
        orders = [tuple(range(len(each.members))) for each in request.free_sets]
        for number in sorted(range(len(orders)), key=lambda number: request.free_sets[number].start):
            placed = request.ordered(orders)  # what stands before a set says what is stored of it
            orders[number] = _Search(self._store, self.counts, placed, placed.free_sets[number]).order()
        return tuple(orders)

    def asked(self, request: EngineRequest) -> None:
        """Note the orders that a request has been given; it is one that stands in them."""
        for each in request.free_sets:
            members = [_key(parts) for parts in members_of(request.parts, each)]
            self.counts.ask(request.salt, [*members, *_paths(_root(request, each), members)])


@dataclass(slots=True)
class _State:
    """What stands before the next member. end: the position behind it.

    cursor: in what is stored of it; None where something is missing.
    modules: as long as all of it is exact as modules, where these are read; else None. parts: as long, what it is.
    known: as long, whether the cursor was looked for, at which something else may follow.
    """

    end: int
    cursor: Cursor | None = None
    modules: AsModules | None = None
    parts: tuple[PromptPart, ...] = ()
    known: bool = False


class _Search:
    """Looks for the order of one set."""

    def __init__(self, store: SegmentStore, counts: Counts, request: EngineRequest, of: FreeSet) -> None:
        self._store = store
        self._counts = counts
        self._request = request
        self._of = of
        self._salt = request.salt.encode()
        self._members = members_of(request.parts, of)
        self._keys = [_key(parts) for parts in self._members]
        next_set = min(
            (each.start for each in request.free_sets if each.start > of.start), default=request.positions[-1]
        )
        end = of.start + of.tokens
        self._behind = tuple(part for part in request.parts if end <= part.start <= next_set)
        beginning = beginning_of(request)
        self._heals = request.policy.heals
        self._whose = None if beginning is None else beginning.whose
        self._looks = 0

    def order(self) -> tuple[int, ...]:
        """The order to take."""
        left = tuple(range(len(self._members)))
        if self._heals and self._whose is None:
            return left  # nothing of it is read in place of modules, or could be
        return self._best(self._start(), left, _root(self._request, self._of))[1]

    def _start(self) -> _State:
        before = tuple(part for part in self._request.parts if part.ids and part.start < self._of.start)
        if self._heals:
            count, modules = AsModules.none(self._salt, self._request.adapter).longer(before)
            if count == len(before):
                return _State(self._of.start, None, modules, before)
        return _State(self._of.start, self._border(before))

    def _best(self, state: _State, left: tuple[int, ...], path: bytes) -> tuple[int, tuple[int, ...]]:
        """How many tokens are stored of the best order of these members, and that order.

        path: what names what stands before them.
        """
        if not left:
            return self._follow(state.cursor, self._behind)[0], ()
        paths = {number: _path(path, self._keys[number]) for number in left}
        ranked = []
        for number in sorted(left, key=lambda one: self._asked(one, paths[one]), reverse=True):
            tokens, behind = self._step(state, self._members[number])
            order: tuple[int, ...] | None = None
            if behind is not None:
                more, order = self._best(behind, _without(left, number), paths[number])
                tokens += more
            ranked.append((tokens, number, order))
        # Of those that are alike the first one: it was asked for most, or is written first.
        tokens, number, order = max(ranked, key=lambda one: one[0])
        if order is None:  # nothing is stored behind it
            order = tuple(self._by_popularity(_without(left, number), paths[number]))
        return tokens, (number, *order)

    def _by_popularity(self, left: tuple[int, ...], path: bytes) -> Iterator[int]:
        while left:
            paths = {number: _path(path, self._keys[number]) for number in left}
            number = max(left, key=lambda one: self._asked(one, paths[one]))
            yield number
            left, path = _without(left, number), paths[number]

    def _asked(self, number: int, path: bytes) -> tuple[int, int]:
        """How often a member was asked for at this place, and how often in any set. path: what names it here."""
        return self._counts.of(self._request.salt, path), self._counts.of(self._request.salt, self._keys[number])

    def _step(self, state: _State, member: tuple[PromptPart, ...]) -> tuple[int, _State | None]:
        """How many tokens of a member are stored behind others, and the state behind it where all of them are."""
        parts = tuple(placed_at(member, state.end))
        end = state.end + sum(len(part.ids) for part in parts)
        cursor = state.cursor
        if state.modules is not None:
            count, modules = state.modules.longer(parts)
            if count == len(parts):
                return 0, _State(end, None, modules, (*state.parts, *parts)) if self._looks < _MOST_LOOKS else None
            if count:
                cursor = self._border((*state.parts, *parts[:count]))
            elif not state.known:
                cursor = state.cursor = self._border(state.parts)
                state.known = True
            parts = parts[count:]
        tokens, behind = self._follow(cursor, parts)
        if behind is not None:
            return tokens, _State(end, behind)
        # A part of what is read in place of modules is worth nothing, nor are a few words that many texts begin with.
        return 0 if self._heals or tokens < self._store.pool.chunk_size else tokens, None

    def _border(self, parts: tuple[PromptPart, ...]) -> Cursor | None:
        """Where what follows these parts is stored, or None where they are not."""
        self._looks += _BORDER
        if self._looks > _MOST_LOOKS:
            return None
        adapter = self._request.adapter
        next_part = PromptPart((0,), max((part.start + len(part.ids) for part in parts), default=0))
        longer, in_place = (*parts, next_part), InPlace()
        if self._heals:
            count, _ = AsModules.none(self._salt, adapter).longer(parts)
            in_place = InPlace(frozenset(part.start for part in longer[count:]), self._whose or b"")
        last = splice_parts(longer, salt=self._salt, in_place=in_place, adapter=adapter)[-1]
        assert isinstance(last, Fresh), "a part without candidates is computed"
        assert last.run is not None, "it is kept"
        ids = last.run.ids[:-1]  # of what one run has in front of it
        found, cursor = self._store.follow(self._store.cursor(last.run), ids)
        return cursor if found == len(ids) else None

    def _follow(self, cursor: Cursor | None, parts: Sequence[PromptPart]) -> tuple[int, Cursor | None]:
        """How many tokens of parts are stored behind a cursor, and where one is behind all of them; else None."""
        tokens = 0
        for part in parts:
            self._looks += 1
            if cursor is None or not part.kept or self._looks > _MOST_LOOKS:
                return tokens, None
            found, cursor = self._store.follow(cursor, part.ids)
            tokens += found
            if found < len(part.ids):
                return tokens, None
        return tokens, cursor


def _without(numbers: tuple[int, ...], number: int) -> tuple[int, ...]:
    return tuple(other for other in numbers if other != number)


def _key(parts: Sequence[PromptPart]) -> bytes:
    """What names a member, wherever it stands."""
    return _hash(b"member", b"".join(np.asarray(part.ids, "<u4").tobytes() for part in parts))


def _root(request: EngineRequest, of: FreeSet) -> bytes:
    """What names a place in a prompt at which a set begins."""
    before = (np.asarray(part.ids, "<u4").tobytes() for part in request.parts if part.start < of.start)
    return _hash(b"root", b"".join(before))


def _path(before: bytes, member: bytes) -> bytes:
    """What names a member behind what stands before it."""
    return _hash(b"path", before + member)


def _paths(root: bytes, members: Sequence[bytes]) -> Iterator[bytes]:
    path = root
    for member in members:
        path = _path(path, member)
        yield path


def _hash(kind: bytes, said: bytes) -> bytes:
    return hashlib.sha256(kind + b" " + said).digest()
