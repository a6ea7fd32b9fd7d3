"""Promotion: beginnings of prompts that are asked for again, encoded exactly while there is nothing else to do.

Modules are encoded without each other, and a prompt that combines them reads an approximation. Where a combination is
asked for a second time, its beginning is encoded as full prefill has it, some parts after the other, and the next
request with it in front reads that (``ReusePolicy.heals``). So answers come to those of full prefill by themselves.

Nobody waits for it: where a request comes, what is begun goes on later. It takes a share of the pool at most, whole
chunks counted, for which what was unused for longest goes, as for a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from inlay.engine.allocation import Prefill, SequenceAllocation, allocation_of
from inlay.engine.idle import IdleWorker
from inlay.engine.lookup import look_up, tail_tokens
from inlay.engine.popularity import Popularity, Target
from inlay.engine.runner import Runner
from inlay.errors import CapacityError
from inlay.kv.identity import TokenRun
from inlay.kv.segment import Found, Origin
from inlay.kv.store import SegmentStore
from inlay.prompt.beginning import Beginning, Node
from inlay.slots import SlotRange, cut

#: So many tokens of a beginning have one place in the pool, in as many parts as these are.
_STRETCH = 512


@dataclass(eq=False, slots=True)
class _Begun:
    """Parts of a beginning, one behind the other, of which something is computed.

    runs: what is computed, with what is stored in front of it. kept: how many of the parts are stored by now, each by
    itself, as each may be let go. padding: slots of the pool that stay empty behind them.
    """

    target: Target
    nodes: tuple[Node, ...]
    allocation: SequenceAllocation
    runs: tuple[Prefill, ...]
    padding: int
    kept: int = 0

    def next(self) -> tuple[TokenRun, tuple[SlotRange, ...]] | None:
        """The next part to be stored, and where it lies, once all of it is computed."""
        if self.kept == len(self.nodes):
            return None
        run = self.nodes[self.kept].run
        for prefill in self.runs:
            assert prefill.keep is not None, "a beginning is kept"
            at, computed = run.start - prefill.keep.start, len(prefill.keep.ids) - prefill.tokens_left
            if 0 <= at < len(prefill.keep.ids):
                return (run, cut(prefill.slots, at, len(run.ids))) if at + len(run.ids) <= computed else None
        return None


class Promoter(IdleWorker):
    """Encodes what is asked for again of one store's prompts. share: of the pool, how much it may take."""

    failure = "a combination of modules could not be encoded: it is read as its modules are"

    def __init__(self, store: SegmentStore, runner: Runner, *, share: float) -> None:
        super().__init__(store, runner)
        self._most = int(share * store.pool.chunks * store.pool.chunk_size)
        self.popularity = Popularity(self._forget, self._is_stored)
        self._begun: _Begun | None = None
        self._done: Node | None = None  # the first of the parts that were computed last

    def asked(self, salt: str, beginning: Beginning) -> None:
        """Note that a request has asked for a beginning. salt: whose it is."""
        self.popularity.ask(salt, beginning, self._stored(beginning))

    def forget_modules(self, keys: frozenset[bytes]) -> None:
        """Forget what was encoded of modules whose time is over. keys: of segments that these may be read from."""
        if self._begun is not None and self._begun.target.reads(keys):
            self._give_back()  # without what is computed of it
        self.give_up()
        self.popularity.forget_modules(keys)

    def forget_salt(self, salt: str) -> None:
        """Forget what was asked for with a salt."""
        if self._begun is not None and self._begun.target.salt == salt:
            self._give_back()
        self.give_up()
        self.popularity.forget_salt(salt)

    def clear(self) -> None:
        """Forget what was asked for, as the store forgets what it has."""
        self.give_up()
        self.popularity.clear()

    def give_up(self) -> None:
        """Give back what the pool has lent, since others need the time: what was begun goes on later."""
        if self._begun is not None:
            for prefill in self._begun.allocation.prefill:
                computed = prefill.begun()
                if computed is not None:
                    self._insert(self._begun.target, *computed)
        self._give_back()

    def _drop(self) -> None:
        target = self.popularity.next() if self._begun is None else self._begun.target
        self._give_back()  # without what the pass was to compute
        if target is not None:
            self.popularity.give_up(target)

    def _give_back(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.allocation.hold.release()
            self._store.pool.free(begun.allocation.tail)

    def _stored(self, beginning: Beginning) -> int:
        return beginning.stored(lambda run: self._store.longest(run).tokens)

    def _begin(self) -> bool:
        """Find the next part to encode, and room for it."""
        if self._begun is not None:
            return True
        while (target := self.popularity.next()) is not None:
            number = self._stored(target.beginning)
            if number > target.last:
                self.popularity.done(target)
                continue
            nodes = self._stretch(target, number)
            allocation = None if not nodes or nodes[0] is self._done else self._allocate(target, nodes)
            if allocation is None:  # there is no room for it, or what was computed of it could not be kept
                self.popularity.give_up(target)
                continue
            tokens = sum(len(node.run.ids) for node in nodes)
            self._begun = _Begun(target, nodes, allocation, tuple(allocation.prefill), self._slots(tokens) - tokens)
            return True
        return False

    def _stretch(self, target: Target, first: int) -> tuple[Node, ...]:
        """The parts to encode next, from that number on, as many as fit beside those before them; none where one is
        too long."""
        room = self._most - self.popularity.slots_of(target.nodes[:first], target.salt)
        count = tokens = 0
        for node in target.nodes[first:]:
            tokens += len(node.run.ids)
            if self._slots(tokens) > room or (count and tokens > _STRETCH):
                break
            count += 1
        return target.nodes[first : first + count]

    def _slots(self, tokens: int) -> int:
        """How many slots of the pool so many tokens take."""
        return self._store.pool.chunks_for(tokens) * self._store.pool.chunk_size

    def _allocate(self, target: Target, nodes: tuple[Node, ...]) -> SequenceAllocation | None:
        """A place in the pool for parts, behind what stands before them; None where there is none."""
        over = self.popularity.slots + self._slots(sum(len(node.run.ids) for node in nodes)) - self._most
        if over > 0 and not self.popularity.make_room(over, target):
            return None
        splice = target.beginning.splice(nodes[-1].parts)
        lookup = look_up(self._store, splice)
        if lookup.missing:  # modules that begin it are encoded when they are asked for
            return None
        with ExitStack() as undo:
            hold = undo.enter_context(self._store.hold(*lookup.found))
            try:
                slots = self._store.allocate(tail_tokens(splice, lookup) - 1, urgent=True)
            except CapacityError:
                return None
            undo.callback(self._store.pool.free, slots)
            allocation = allocation_of(splice, lookup, (), slots, hold, target.beginning.adapter)
            undo.pop_all()
        return allocation

    def _compute(self, tokens: int) -> None:
        begun = self._begun
        assert begun is not None, "something is begun"
        work, _ = begun.allocation.take(tokens)
        self._run(work)
        while (computed := begun.next()) is not None:
            found = self._insert(begun.target, *computed)
            if found.tokens == len(computed[0].ids):
                padding = 0 if begun.kept else begun.padding
                self.popularity.promoted(begun.target, begun.nodes[begun.kept], padding)
            begun.kept += 1
        if not begun.allocation.prompt_left:
            self._give_back()
            self._done = begun.nodes[0]

    def _insert(self, target: Target, run: TokenRun, slots: Sequence[SlotRange]) -> Found:
        modules = target.beginning.modules(run.end)
        return self._store.insert(run, slots, origin=Origin(target.salt, modules))

    def _is_stored(self, run: TokenRun) -> bool:
        return self._store.longest(run).tokens == len(run.ids)

    def _forget(self, run: TokenRun) -> None:
        """Let go what is stored of a part, and said behind it, but for what others share or somebody holds."""
        self._store.discard(self._store.own_ends(run))
