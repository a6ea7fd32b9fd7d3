"""Chooses the order of a prompt's free sets: the order with the longest stored prefix, or else the most requested one.

The stored part of an order is followed in the prefix index, member by member and token by token. Only stored orders are
followed, and only up to a limit. Behind the stored part, members are ordered by their number of requests at this place,
then by their requests in any set, then as written. So equal requests converge on one order and reuse it.

Orders belong to one salt. Requests are counted per salt. Lookups for a request with a salt use its private text, even
over a public schema (``prompt/composed.py``; the processor's parts under ``exact``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from inlay.engine.background.promoter import RequestCounts
from inlay.kv.index import Cursor
from inlay.kv.store import SegmentStore
from inlay.prompt.composed import AsModules, InPlace, NewSpan, compose_parts, prefix_of
from inlay.prompt.free_order import cut_at, in_line, placed_at
from inlay.prompt.request import EngineRequest, PromptPart

#: Limits of index lookups, for one set and for all sets of a request; later sets stay as written. A border between
#: modules and the text read in their place counts as ``_BORDER`` lookups, and more if much text precedes it, because
#: its record must be built.
_MOST_LOOKS, MOST_FOR_ALL, _BORDER, _BORDER_TOKENS = 1_024, 2_048, 16, 256

#: Limit of all work for a waiting request: its lookups, plus its parts each time.
MOST_WORK = 16_384

Orders = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class OrderEffort:
    """The work spent on one request's orders: lookups, and parts that were visited."""

    done: int = 0

    @property
    def spent(self) -> bool:
        """True if the last choice must be used."""
        return self.done >= MOST_WORK


class OrderChooser:
    """Chooses orders by the contents of one store, and counts them. Call with the engine lock held."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self.counts = RequestCounts()

    @property
    def version(self) -> tuple[int, int]:
        """Changes with the stored contents, unless a segment replaces another of equal length."""
        return len(self._store), self._store.tokens

    def choose(self, request: EngineRequest, work: OrderEffort | None = None) -> Orders:
        """The order of each free set of a request, as member numbers. Adds the effort to ``work``."""
        search = _Search(self._store, self.counts, request)
        orders = search.orders()
        if work is not None:
            work.done += search.looks + len(request.parts)
        return orders

    def asked(self, request: EngineRequest) -> None:
        """Count the orders of a request that is already ordered."""
        root = _Root()
        for between, members in zip(*cut_at(request.parts, in_line(request.free_sets)), strict=False):
            root.add(between)
            keys = [_key(parts) for parts in members]
            self.counts.ask(request.salt, [*keys, *_paths(root.name, keys)])
            for parts in members:
                root.add(parts)


@dataclass(slots=True)
class _TextBefore:
    """The text before the next member.

    ``end`` is the position behind the text. ``cursor`` is the index node there; None if a part of the text is missing.
    ``modules`` is set if all of the text is read as exact modules. Then ``parts`` is the text itself, and ``known`` is
    True once the cursor was looked up.
    """

    end: int
    cursor: Cursor | None = None
    modules: AsModules | None = None
    parts: tuple[PromptPart, ...] = ()
    known: bool = False


class _Search:
    """Searches the orders of a request's sets, from first to last, because the lookup of a set depends on the text
    before it.

    ``looks`` counts the lookups.
    """

    def __init__(self, store: SegmentStore, counts: RequestCounts, request: EngineRequest) -> None:
        self._store = store
        self._counts = counts
        self._request = request
        self._salt = request.salt.encode()
        prefix = prefix_of(request)
        self._heals = request.policy.reads_promoted
        self._whose = None if prefix is None else prefix.whose
        self.looks = 0
        # The settled text before the next set: its parts, its name, and its place in the store.
        self._before: list[PromptPart] = []
        self._root = _Root()
        self._modules = AsModules.none(self._salt, request.adapter) if self._heals else None
        self._cursor: Cursor | None = None
        # The set that is being ordered.
        self._members: list[tuple[PromptPart, ...]] = []
        self._keys: list[bytes] = []
        self._behind: tuple[PromptPart, ...] = ()
        self._most = 0

    def orders(self) -> Orders:
        """The order of each free set of the request."""
        written = [tuple(range(len(each.members))) for each in self._request.free_sets]
        if self._heals and self._whose is None:
            return tuple(written)  # no stored text can replace its modules
        line = sorted(range(len(written)), key=lambda number: self._request.free_sets[number].start)
        sets = [self._request.free_sets[number] for number in line]
        between, inside = cut_at(self._request.parts, sets)
        for at, number in enumerate(line):
            if self.looks >= MOST_FOR_ALL:
                break
            self._settle(between[at], first=not at)
            nearest = [part for member in inside[at + 1][:1] for part in member[:1]] if at + 1 < len(line) else []
            written[number] = self._order(sets[at].start, inside[at], (*between[at + 1], *nearest))
            chosen = [part for one in written[number] for part in inside[at][one]]
            self._settle(placed_at(chosen, sets[at].start))
        return tuple(written)

    def _order(
        self, start: int, members: list[tuple[PromptPart, ...]], behind: tuple[PromptPart, ...]
    ) -> tuple[int, ...]:
        """The order of the set that starts at ``start``."""
        self._members, self._behind = members, behind
        self._keys = [_key(parts) for parts in members]
        self._most = min(self.looks + _MOST_LOOKS, MOST_FOR_ALL)
        state = _TextBefore(start, self._cursor, self._modules, () if self._modules is None else tuple(self._before))
        every = tuple(range(len(members)))
        begun = self._best(state, every, self._root.name)[1]
        path = [self._root.name, *_paths(self._root.name, [self._keys[number] for number in begun])][-1]
        return (*begun, *self._by_popularity(tuple(number for number in every if number not in begun), path))

    def _settle(self, parts: Sequence[PromptPart], *, first: bool = False) -> None:
        """Advance behind the next parts in their final order. ``first`` is True if the first set follows."""
        self._most = MOST_FOR_ALL
        self._root.add(parts)
        parts = [part for part in parts if part.ids]
        self._before += parts
        if self._modules is not None:
            count, modules = self._modules.longer(parts)
            if count == len(parts):
                self._modules = modules
                return
            self._modules, first = None, True
        if first or not all(part.kept for part in parts):  # text that is not stored starts a new lookup behind it
            self._cursor = self._border(self._before)
            return
        for part in parts:
            if self._cursor is None:
                break
            found, behind = self._store.follow(self._cursor, part.ids)
            self._cursor = behind if found == len(part.ids) else None

    def _best(self, state: _TextBefore, left: tuple[int, ...], path: bytes) -> tuple[int, tuple[int, ...]]:
        """Return the number of stored tokens in the best order of ``left``, and this order as far as it is stored.

        ``path`` names the text before them.
        """
        if not left:
            self.looks += 1
            return self._follow(state.cursor, self._behind)[0], ()
        paths = {number: _path(path, self._keys[number]) for number in left}
        ranked = []
        for number in sorted(left, key=lambda one: self._asked(one, paths[one]), reverse=True):
            tokens, behind = self._step(state, self._members[number])
            order: tuple[int, ...] = ()
            if behind is not None:
                more, order = self._best(behind, _without(left, number), paths[number])
                tokens += more
            ranked.append((tokens, number, order))
        # max() keeps the first of equals: the most requested one, or the one written first.
        tokens, number, order = max(ranked, key=lambda one: one[0])
        return tokens, (number, *order)

    def _by_popularity(self, left: tuple[int, ...], path: bytes) -> Iterator[int]:
        while left:
            paths = {number: _path(path, self._keys[number]) for number in left}
            number = max(left, key=lambda one: self._asked(one, paths[one]))
            yield number
            left, path = _without(left, number), paths[number]

    def _asked(self, number: int, path: bytes) -> tuple[int, int]:
        """How often a member was requested at this place, and in any set. ``path`` names it here."""
        return self._counts.of(self._request.salt, path), self._counts.of(self._request.salt, self._keys[number])

    def _step(self, state: _TextBefore, member: tuple[PromptPart, ...]) -> tuple[int, _TextBefore | None]:
        """How many tokens of a member are stored here, and the state behind it if all are."""
        self.looks += 1
        if self.looks > self._most:
            return 0, None
        parts = tuple(placed_at(member, state.end))
        end = state.end + sum(len(part.ids) for part in parts)
        cursor = state.cursor
        if state.modules is not None:
            count, modules = state.modules.longer(parts)
            if count == len(parts):
                return 0, _TextBefore(end, None, modules, (*state.parts, *parts))
            if count:
                cursor = self._border((*state.parts, *parts[:count]))
            elif not state.known:
                cursor = state.cursor = self._border(state.parts)
                state.known = True
            parts = parts[count:]
        tokens, behind = self._follow(cursor, parts)
        if behind is not None:
            return tokens, _TextBefore(end, behind)
        # A partial match is useless in place of modules, and below a chunk it is only a common phrase.
        return 0 if self._heals or tokens < self._store.pool.chunk_size else tokens, None

    def _border(self, parts: Sequence[PromptPart]) -> Cursor | None:
        """The place in the store behind these parts; None if they are not stored."""
        self.looks += _BORDER + sum(1 + len(part.ids) // _BORDER_TOKENS for part in parts)
        if self.looks > self._most:
            return None
        adapter = self._request.adapter
        next_part = PromptPart((0,), max((part.start + len(part.ids) for part in parts), default=0))
        longer, in_place = (*parts, next_part), InPlace()
        if self._heals:
            count, _ = AsModules.none(self._salt, adapter).longer(parts)
            in_place = InPlace(frozenset(part.start for part in longer[count:]), self._whose or b"")
        last = compose_parts(longer, salt=self._salt, in_place=in_place, adapter=adapter)[-1]
        assert isinstance(last, NewSpan), "a part without candidates is computed"
        assert last.run is not None, "it is kept"
        ids = last.run.ids[:-1]  # the run may begin with earlier tokens
        found, cursor = self._store.follow(self._store.cursor(last.run), ids)
        return cursor if found == len(ids) else None

    def _follow(self, cursor: Cursor | None, parts: Sequence[PromptPart]) -> tuple[int, Cursor | None]:
        """How many tokens of the parts are stored behind a cursor, and the cursor behind all of them; None if any is
        missing.
        """
        tokens = 0
        for number, part in enumerate(parts):
            self.looks += bool(number)  # the caller has counted the first one
            if cursor is None or not part.kept or self.looks > self._most:
                return tokens, None
            found, cursor = self._store.follow(cursor, part.ids)
            tokens += found
            if found < len(part.ids):
                return tokens, None
        return tokens, cursor


def _without(numbers: tuple[int, ...], number: int) -> tuple[int, ...]:
    return tuple(other for other in numbers if other != number)


def _key(parts: Sequence[PromptPart]) -> bytes:
    """The name of a member, independent of its place."""
    return _hash(b"member", b"".join(np.asarray(part.ids, "<u4").tobytes() for part in parts))


class _Root:
    """The name of the place where a set begins: a hash of all text before it."""

    def __init__(self) -> None:
        self._said = hashlib.sha256(b"root ")

    @property
    def name(self) -> bytes:
        return self._said.digest()

    def add(self, parts: Iterable[PromptPart]) -> None:
        """Append parts."""
        for part in parts:
            self._said.update(np.asarray(part.ids, "<u4").tobytes())


def _path(before: bytes, member: bytes) -> bytes:
    """The name of a member behind a path."""
    return _hash(b"path", before + member)


def _paths(root: bytes, members: Sequence[bytes]) -> Iterator[bytes]:
    path = root
    for member in members:
        path = _path(path, member)
        yield path


def _hash(kind: bytes, said: bytes) -> bytes:
    return hashlib.sha256(kind + b" " + said).digest()
