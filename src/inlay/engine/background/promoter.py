"""Promotion: in idle time, prompt prefixes that were requested again are encoded exactly.

Modules are encoded without each other, so a prompt that combines them reads an approximation. On the second request for
a combination, its prefix is encoded as in full prefill, one stretch after another. The next request with this prefix
reads the result (``ReusePolicy.reads_promoted``). So answers approach those of full prefill.

Requests never wait for promotion; it pauses when one arrives. It takes at most a share of the pool, counted in whole
chunks. It evicts the least recently used KV, as a request does.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from inlay.engine.allocation import Prefill, SequenceAllocation, allocation_of
from inlay.engine.background.idle import IdleWorker
from inlay.engine.background.popularity import Popularity, Target
from inlay.engine.lookup import look_up, tail_tokens
from inlay.engine.runner import Runner
from inlay.errors import CapacityError
from inlay.kv.identity import TokenRun
from inlay.kv.segment import Origin, PrefixMatch
from inlay.kv.store import SegmentStore
from inlay.prompt.prefix import Node, Prefix
from inlay.slots import SlotRange, cut

#: Most tokens of a prefix that are allocated at once, in one or more parts.
_STRETCH = 512


@dataclass(eq=False, slots=True)
class _Promotion:
    """Consecutive parts of a prefix that are being computed.

    ``runs`` is the work, including the stored text in front. ``kept`` counts the parts that are stored already, each by
    itself, so that each may be dropped. ``padding`` is the number of empty slots behind them.
    """

    target: Target
    nodes: tuple[Node, ...]
    allocation: SequenceAllocation
    runs: tuple[Prefill, ...]
    padding: int
    kept: int = 0

    def next(self) -> tuple[TokenRun, TokenRun, tuple[SlotRange, ...]] | None:
        """The next part to store, the text before it, and its slots, if it is wholly computed."""
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
