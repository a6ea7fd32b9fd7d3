"""Counts requested prompt prefixes, and tracks the promoted ones, separately for each salt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from typing import TypeVar

from inlay.kv.identity import TokenRun
from inlay.prompt.prefix import Node, Prefix

#: Requests for a prefix before it is promoted. Each time it loses its place, the number doubles, up to the second one.
#: So combinations that do not fit together stop replacing each other.
_AGAIN, _MOST_AGAIN = 2, 64
#: Limits for counted nodes, and for tokens of prefixes that wait for promotion. The least recently requested ones of
#: the largest salt are dropped, so no salt displaces another.
MOST_NODES, MOST_WAITING = 2**14, 2**20
#: Limit for salts. The smallest goes first, and of equals the least recent one. So many one-time salts do not displace
#: returning ones.
MOST_SALTS = 256

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Target:
    """A prefix to encode, up to and including node number ``last``. ``tokens`` counts all its nodes."""

    salt: str
    prefix: Prefix
    last: int
    tokens: int

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.prefix.nodes[: self.last + 1]

    @property
    def key(self) -> bytes:
        return self.prefix.nodes[self.last].key

    def reads(self, keys: frozenset[bytes]) -> bool:
        """True if any of it is text of these segments."""
        return any(not keys.isdisjoint(node.segments) for node in self.nodes)


@dataclass(frozen=True, slots=True)
class _Promoted:
    """A promoted node. ``slots`` of the pool include the empty ones behind it."""

    node: Node
    slots: int


@dataclass(eq=False, slots=True)
class _Asked:
    """The requests for a node since it last lost its place, and the number of them before it is promoted."""

    times: int = 0
    needed: int = _AGAIN

    @property
    def enough(self) -> bool:
        return self.times >= self.needed

    def lost(self) -> None:
        """Record that its promoted KV was dropped for other KV."""
        self.times, self.needed = 0, min(2 * self.needed, _MOST_AGAIN)


@dataclass(eq=False, slots=True)
class _Table:
    """The state of one salt. Prefixes are dropped from their end, because a node is reachable only through the one
    before.

    ``asked`` counts requests per node key, least recent first. ``promoted`` has the same order. ``waiting`` is keyed by
    the last node. ``slots`` counts promoted nodes, and ``waiting_tokens`` counts waiting prefixes.
    """

    asked: OrderedDict[bytes, _Asked] = field(default_factory=OrderedDict)
    promoted: OrderedDict[bytes, _Promoted] = field(default_factory=OrderedDict)
    waiting: OrderedDict[bytes, Target] = field(default_factory=OrderedDict)
    slots: int = 0
    waiting_tokens: int = 0

    def wait(self, target: Target) -> None:
        """Append a prefix to the queue. It replaces a waiting one with the same end."""
        self.stop_waiting(target.key)
        self.waiting[target.key] = target
        self.waiting_tokens += target.tokens

    def stop_waiting(self, key: bytes) -> None:
        target = self.waiting.pop(key, None)
        self.waiting_tokens -= 0 if target is None else target.tokens


class Popularity:
    """Request counts of prefixes, and the promoted ones. ``slots`` are the pool slots of all promoted nodes.

    Args:
        forget: called with each run that is dropped.
        is_stored: returns True if all of a run is stored.
    """

    def __init__(self, forget: Callable[[TokenRun], None], is_stored: Callable[[TokenRun], bool]) -> None:
        self._forget = forget
        self._is_stored = is_stored
        self._tables: OrderedDict[str, _Table] = OrderedDict()

    @property
    def slots(self) -> int:
        return sum(table.slots for table in self._tables.values())

    def slots_of(self, nodes: Iterable[Node], salt: str) -> int:
        """The number of slots that a salt's promoted nodes take, among these nodes."""
        table = self._tables.get(salt)
        known = [] if table is None else [table.promoted.get(node.key) for node in nodes]
        return sum(each.slots for each in known if each is not None)

    def ask(self, salt: str, prefix: Prefix, stored: int) -> None:
        """Record a request for a prefix. ``stored`` is the number of its first nodes that are stored."""
        table = self._table(salt)
        nodes = prefix.nodes
        for node in nodes[stored:]:
            if self._unmark(table, node.key) is not None:  # it was evicted
                self._lost(table, node.key)
        for node in nodes:
            table.asked.setdefault(node.key, _Asked()).times += 1
        self._touch(table, nodes)
        last = max((at for at, node in enumerate(nodes) if node.module and table.asked[node.key].enough), default=-1)
        if last >= stored:
            table.wait(Target(salt, prefix, last, sum(len(node.run.ids) for node in nodes)))
        self._trim()

    def next(self) -> Target | None:
        """The next prefix to encode: the first in the queue of the salt with the fewest slots."""
        waiting = [table for table in self._tables.values() if table.waiting]
        return next(iter(min(waiting, key=_slots).waiting.values())) if waiting else None

    def done(self, target: Target) -> None:
        """Remove a prefix from the queue, because it is encoded or cannot be."""
        table = self._tables.get(target.salt)
        if table is not None:
            table.stop_waiting(target.key)

    def give_up(self, target: Target) -> None:
        """Remove a prefix for which there is no room. Its count starts again."""
        self.done(target)
        table = self._tables.get(target.salt)
        for node in target.nodes if table is not None else ():
            if table is not None and node.key not in table.promoted and node.key in table.asked:
                table.asked[node.key].times = 0

    def promoted(self, target: Target, node: Node, padding: int) -> None:
        """Record that a node of the prefix was encoded behind those before it.

        Args:
            padding: slots that stay empty behind it and the nodes encoded with it, because the pool allocates whole
                chunks.
        """
        table = self._table(target.salt)
        if node.key not in table.promoted:
            table.promoted[node.key] = _Promoted(node, len(node.run.ids) + padding)
            table.slots += table.promoted[node.key].slots
        self._touch(table, target.nodes)

    def make_room(self, slots: int, target: Target) -> bool:
        """Drop promoted nodes of this many slots, from the largest salts first. Nodes of the target itself stay.

        Returns True if enough was dropped.
        """
        own = {node.key for node in target.nodes}
        while slots > 0 and self._tables:
            table = max(self._tables.values(), key=_slots)
            oldest = next((key for key in table.promoted if key not in own), None)
            if oldest is None:
                return False
            slots -= table.promoted[oldest].slots
            self._lost(table, oldest)
            node = self._unmark(table, oldest)
            assert node is not None, "it was promoted"
            self._forget(node.run)
        return slots <= 0

    def forget_modules(self, keys: frozenset[bytes]) -> None:
        """Drop promoted and waiting prefixes that contain these modules. ``keys`` name all forms of the modules."""
        for table in self._tables.values():
            for target in [target for target in table.waiting.values() if target.reads(keys)]:
                table.stop_waiting(target.key)
            gone = [each.node for each in table.promoted.values() if not keys.isdisjoint(each.node.segments)]
            for node in gone:
                self._drop(table, node.key)
            for each in [*table.promoted.values()] if gone else ():
                if not self._is_stored(each.node.run):  # it followed a dropped node
                    self._unmark(table, each.node.key)

    def forget_salt(self, salt: str) -> None:
        """Forget everything about a salt. Its segments may have been evicted."""
        self._tables.pop(salt, None)

    def clear(self) -> None:
        """Forget everything. The store may have been cleared."""
        self._tables.clear()

    def _table(self, salt: str) -> _Table:
        table = self._tables.setdefault(salt, _Table())
        self._tables.move_to_end(salt)
        while len(self._tables) > MOST_SALTS:
            gone = self._tables.pop(_least(self._tables, salt, _slots))
            for key in list(gone.promoted):
                self._drop(gone, key)
        return table

    def _trim(self) -> None:
        """Enforce the limits."""
        tables = self._tables.values()
        over = sum(len(table.asked) for table in tables) - MOST_NODES
        for salt in _in_turns({salt: len(table.asked) for salt, table in self._tables.items()}, over):
            self._drop(self._tables[salt], next(iter(self._tables[salt].asked)))
        while sum(map(_waiting_tokens, tables)) > MOST_WAITING:
            most = max(tables, key=_waiting_tokens)
            most.stop_waiting(next(iter(most.waiting)))

    def _touch(self, table: _Table, nodes: Iterable[Node]) -> None:
        for node in reversed(list(nodes)):
            for known in (table.asked, table.promoted):
                if node.key in known:
                    known.move_to_end(node.key)

    def _lost(self, table: _Table, key: bytes) -> None:
        if key in table.asked:
            table.asked[key].lost()

    def _drop(self, table: _Table, key: bytes) -> None:
        """Forget a node and its promoted KV."""
        table.asked.pop(key, None)
        node = self._unmark(table, key)
        if node is not None:
            self._forget(node.run)

    def _unmark(self, table: _Table, key: bytes) -> Node | None:
        known = table.promoted.pop(key, None)
        if known is None:
            return None
        table.slots -= known.slots
        return known.node


class RequestCounts:
    """Request counts, separately for each salt. The least recently requested keys are dropped first."""

    def __init__(self) -> None:
        self._tables: OrderedDict[str, OrderedDict[bytes, int]] = OrderedDict()
        self._size = 0

    def of(self, salt: str, key: bytes) -> int:
        """The count of a key under a salt."""
        table = self._tables.get(salt)
        return 0 if table is None else table.get(key, 0)

    def ask(self, salt: str, keys: Iterable[bytes]) -> None:
        """Count one request for each key."""
        table = self._tables.setdefault(salt, OrderedDict())
        self._tables.move_to_end(salt)
        for key in keys:
            self._size += key not in table
            table[key] = table.get(key, 0) + 1
            table.move_to_end(key)
        while len(self._tables) > MOST_SALTS:
            self._size -= len(self._tables.pop(_least(self._tables, salt, len)))
        over = self._size - MOST_NODES
        for most in _in_turns({whose: len(asked) for whose, asked in self._tables.items()}, over):
            self._tables[most].popitem(last=False)
            self._size -= 1

    def clear(self) -> None:
        """Forget everything."""
        self._tables.clear()
        self._size = 0


def _least(tables: Mapping[str, _T], but: str, size: Callable[[_T], int]) -> str:
    """The smallest salt other than ``but``."""
    return min((salt for salt in tables if salt != but), key=lambda salt: size(tables[salt]))


def _in_turns(sizes: Mapping[str, int], count: int) -> Iterator[str]:
    """The salts to take one item from, ``count`` times: each time the largest at that point."""
    if count <= 0:
        return
    heap = [(-size, salt) for salt, size in sizes.items()]
    heapify(heap)
    for _ in range(count):
        size, salt = heap[0]
        yield salt
        heapreplace(heap, (size + 1, salt))


def _slots(table: _Table) -> int:
    return table.slots


def _waiting_tokens(table: _Table) -> int:
    return table.waiting_tokens
