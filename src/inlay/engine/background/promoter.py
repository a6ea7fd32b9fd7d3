"""Promotion: in idle time, prompt prefixes that were requested again are encoded exactly.

Modules are encoded without each other, so a prompt that combines them reads an approximation. On the second request for
a combination, its prefix is encoded as in full prefill, one stretch after another. The next request with this prefix
reads the result (``ReusePolicy.reads_promoted``). So answers approach those of full prefill.

Requests never wait for promotion, which pauses when a request arrives. Promoted prefixes take at most a share of the
pool, counted in whole chunks. Promotion evicts KV in the order of the eviction policy, as a request does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from typing import TypeVar

from inlay.engine.allocation import Prefill, SequenceAllocation, allocation_of
from inlay.engine.background.idle import IdleWorker
from inlay.engine.lookup import look_up, tail_tokens
from inlay.engine.runner import Runner
from inlay.errors import CapacityError
from inlay.kv.identity import TokenRun
from inlay.kv.pool import Origin, PrefixMatch
from inlay.kv.store import SegmentStore
from inlay.prompt.composed import Node, Prefix
from inlay.slots import SlotRange, cut

#: The number of requests for a prefix before it is promoted, and the largest such number. Each time the prefix is
#: dropped for another one, its number doubles. So combinations that do not fit together stop replacing each other.
_AGAIN, _MOST_AGAIN = 2, 64
#: Limits for counted nodes, and for tokens of prefixes that wait for promotion. The least recently requested ones of
#: the largest salt are dropped, so no salt displaces another.
MOST_NODES, MOST_WAITING = 2**14, 2**20
#: The most salts. The salt with the fewest entries is dropped first, and of equals the least recent one. So many
#: one-time salts do not displace returning ones.
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
    """``times``: the requests for a node since it was last dropped. ``needed``: so many promote it."""

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
        """Append a prefix to the queue. It replaces a waiting prefix with the same last node."""
        self.stop_waiting(target.key)
        self.waiting[target.key] = target
        self.waiting_tokens += target.tokens

    def stop_waiting(self, key: bytes) -> None:
        target = self.waiting.pop(key, None)
        self.waiting_tokens -= 0 if target is None else target.tokens


class Popularity:
    """Counts requests for prefixes, and knows the promoted prefixes. ``slots``: the pool slots of all promoted nodes.

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
        if over > 0:
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
        if over > 0:
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


#: Most tokens of a prefix that are allocated at once, in one or more parts.
_STRETCH = 512


@dataclass(eq=False, slots=True)
class _Promotion:
    """Consecutive parts of a prefix that are being computed.

    ``runs`` is the work, including the stored text in front. ``kept`` counts the parts that are stored already. Each
    part is stored by itself, so that each may be dropped. ``padding`` is the number of empty slots behind the parts.
    """

    target: Target
    nodes: tuple[Node, ...]
    allocation: SequenceAllocation
    runs: tuple[Prefill, ...]
    padding: int
    kept: int = 0

    def next(self) -> tuple[TokenRun, TokenRun, tuple[SlotRange, ...]] | None:
        """Return the next part to store, the text before it, and its slots. None until the part is wholly computed."""
        if self.kept == len(self.nodes):
            return None
        run = self.nodes[self.kept].run
        for prefill in self.runs:
            assert prefill.keep is not None, "a beginning is kept"
            at, computed = run.start - prefill.keep.start, len(prefill.keep.ids) - prefill.tokens_left
            if 0 <= at < len(prefill.keep.ids):
                if at + len(run.ids) > computed:
                    return None
                return run, prefill.keep.prefix(at), cut(prefill.slots, at, len(run.ids))
        return None


class Promoter(IdleWorker):
    """Encodes the repeated prefixes of one store's prompts. ``share`` is the part of the pool that it may take."""

    failure = "a combination of modules could not be encoded: it is read as its modules are"

    def __init__(self, store: SegmentStore, runner: Runner, *, share: float) -> None:
        super().__init__(store, runner)
        self._most = int(share * store.pool.chunks * store.pool.chunk_size)
        self.popularity = Popularity(self._forget, self._is_stored)
        self._begun: _Promotion | None = None
        self._done: Node | None = None  # the first part of the last computed stretch

    def asked(self, salt: str, prefix: Prefix) -> None:
        """Record a request for a prefix. ``salt`` is the request's cache salt."""
        self.popularity.ask(salt, prefix, self._stored(prefix))

    def forget_modules(self, keys: frozenset[bytes]) -> None:
        """Drop promoted text of expired modules. ``keys`` name all forms of the modules."""
        if self._begun is not None and self._begun.target.reads(keys):
            self._give_back()  # without storing the computed part
        self.give_up()
        self._done = None
        self.popularity.forget_modules(keys)

    def forget_salt(self, salt: str) -> None:
        """Forget what was asked for with a salt."""
        if self._begun is not None and self._begun.target.salt == salt:
            self._give_back()
        self.give_up()
        self._done = None
        self.popularity.forget_salt(salt)

    def clear(self) -> None:
        """Forget all requests and promotions, because the store is being cleared."""
        self.give_up()
        self.popularity.clear()

    def give_up(self) -> None:
        """Release pool slots, because requests need the time. The computed part is stored, and the rest continues
        later.
        """
        if self._begun is not None:
            for prefill in self._begun.allocation.prefill:
                computed = prefill.begun()
                if computed is not None:
                    self._insert(self._begun.target, *computed)
        self._give_back()

    def _drop(self) -> None:
        target = self.popularity.next() if self._begun is None else self._begun.target
        self._give_back()  # without storing the failed pass
        if target is not None:
            self.popularity.give_up(target)

    def _give_back(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.allocation.hold.release()
            self._store.pool.free(begun.allocation.tail)

    def _stored(self, prefix: Prefix) -> int:
        return prefix.stored(lambda run: self._store.longest(run).tokens)

    def _begin(self) -> bool:
        """Find the next part to encode, and room for it."""
        if self._begun is not None:
            return True
        while (target := self.popularity.next()) is not None:
            number = self._stored(target.prefix)
            if number > target.last:
                self.popularity.done(target)
                continue
            nodes = self._stretch(target, number)
            allocation = None if not nodes or nodes[0] is self._done else self._allocate(target, nodes)
            if allocation is None:  # no room, or the store could not keep the computed part
                self.popularity.give_up(target)
                continue
            tokens = sum(len(node.run.ids) for node in nodes)
            self._begun = _Promotion(target, nodes, allocation, tuple(allocation.prefill), self._slots(tokens) - tokens)
            return True
        return False

    def _stretch(self, target: Target, first: int) -> tuple[Node, ...]:
        """The next parts to encode from number ``first`` on, as many as the share allows. Empty if one part is too
        long.
        """
        room = self._most - self.popularity.slots_of(target.nodes[:first], target.salt)
        count = tokens = 0
        for node in target.nodes[first:]:
            tokens += len(node.run.ids)
            if self._slots(tokens) > room or (count and tokens > _STRETCH):
                break
            count += 1
        return target.nodes[first : first + count]

    def _slots(self, tokens: int) -> int:
        """The slots of the whole chunks for that many tokens."""
        return self._store.pool.chunks_for(tokens) * self._store.pool.chunk_size

    def _allocate(self, target: Target, nodes: tuple[Node, ...]) -> SequenceAllocation | None:
        """Allocate slots for parts behind the text before them; None if there is no room."""
        over = self.popularity.slots + self._slots(sum(len(node.run.ids) for node in nodes)) - self._most
        if over > 0 and not self.popularity.make_room(over, target):
            return None
        composed = target.prefix.composed(nodes[-1].parts)
        lookup = look_up(self._store, composed)
        if lookup.missing:  # its leading modules are encoded only for a request
            return None
        with ExitStack() as undo:
            hold = undo.enter_context(self._store.hold(*lookup.found))
            try:
                slots = self._store.allocate(tail_tokens(composed, lookup) - 1, urgent=True)
            except CapacityError:
                return None
            undo.callback(self._store.pool.free, slots)
            allocation = allocation_of(composed, lookup, (), slots, hold, target.prefix.adapter)
            undo.pop_all()
        return allocation

    def _compute(self, tokens: int) -> None:
        begun = self._begun
        assert begun is not None, "something is begun"
        work, _ = begun.allocation.take(tokens)
        self._run(work)
        while (computed := begun.next()) is not None:
            run, before, slots = computed
            # A part that was given up may have stored the end of one part and the start of the next as one segment.
            found = self._insert(begun.target, run, slots) if self._store.cut_behind(before) else PrefixMatch(())
            if found.tokens == len(run.ids):
                padding = 0 if begun.kept else begun.padding
                self.popularity.promoted(begun.target, begun.nodes[begun.kept], padding)
            begun.kept += 1
        if not begun.allocation.prompt_left:
            self._give_back()
            self._done = begun.nodes[0]

    def _insert(self, target: Target, run: TokenRun, slots: Sequence[SlotRange]) -> PrefixMatch:
        modules = target.prefix.modules(run.end)
        return self._store.insert(run, slots, origin=Origin(target.salt, modules))

    def _is_stored(self, run: TokenRun) -> bool:
        return self._store.longest(run).tokens == len(run.ids)

    def _forget(self, run: TokenRun) -> None:
        """Forget a stored part and the text behind it, except what is shared or has references."""
        self._store.discard(self._store.own_ends(run))
