"""Promotion: beginnings of prompts that are asked for again, encoded exactly while there is nothing else to do.

Modules are encoded without each other, and a prompt that combines them reads an approximation. Where a combination is
asked for a second time, its beginning is encoded as full prefill has it, part by part, and the next request with it in
front reads that (``ReusePolicy.heals``). So answers come to those of full prefill by themselves.

Nobody waits for it: where a request comes, the part that is begun goes on later. It takes a share of the pool at most,
for which what was unused for longest goes, as for a request.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from inlay.engine.allocation import SequenceAllocation, allocation_of
from inlay.engine.idle import IdleWorker
from inlay.engine.lookup import look_up, tail_tokens
from inlay.engine.popularity import Popularity, Target
from inlay.engine.runner import Runner
from inlay.errors import CapacityError
from inlay.kv.identity import TokenRun
from inlay.kv.store import SegmentStore
from inlay.prompt.beginning import Beginning, Node


@dataclass(eq=False, slots=True)
class _Begun:
    """A part of a beginning of which something is computed."""

    target: Target
    node: Node
    allocation: SequenceAllocation


class Promoter(IdleWorker):
    """Encodes what is asked for again of one store's prompts. share: of the pool, how much it may take."""

    failure = "a combination of modules could not be encoded: it is read as its modules are"

    def __init__(self, store: SegmentStore, runner: Runner, *, share: float) -> None:
        super().__init__(store, runner)
        self._most = int(share * store.pool.chunks * store.pool.chunk_size)
        self.popularity = Popularity(self._forget)
        self._begun: _Begun | None = None
        self._done: Node | None = None  # the part that was computed last

    def asked(self, salt: str, beginning: Beginning) -> None:
        """Note that a request has asked for a beginning. salt: whose it is."""
        self.popularity.ask(salt, beginning, self._stored(beginning))

    def forget_modules(self, keys: frozenset[bytes]) -> None:
        """Forget what was encoded of modules whose time is over. keys: of segments that these may be read from."""
        self.give_up()
        self.popularity.forget_modules(keys)

    def clear(self) -> None:
        """Forget what was asked for, as the store forgets what it has."""
        self.give_up()
        self.popularity.clear()

    def give_up(self) -> None:
        """Give back what the pool has lent, since others need the time: the part that was begun goes on later."""
        if self._begun is not None:
            for prefill in self._begun.allocation.prefill:
                computed = prefill.begun()
                if computed is not None:
                    self._store.insert(*computed)
        self._give_back()

    def _drop(self) -> None:
        self._give_back()  # without what the pass was to compute
        self.popularity.clear()

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
            node = target.nodes[number]
            allocation = None if node is self._done else self._allocate(target, node)
            if allocation is None:  # there is no room for it, or what was computed of it could not be kept
                self.popularity.give_up(target)
                continue
            self._begun = _Begun(target, node, allocation)
            return True
        return False

    def _allocate(self, target: Target, node: Node) -> SequenceAllocation | None:
        """A place in the pool for a part, behind what stands before it; None where there is none."""
        over = self.popularity.tokens + len(node.run.ids) - self._most
        if over > 0 and not self.popularity.make_room(over, target):
            return None
        splice = target.beginning.splice(node.parts)
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
        assert begun is not None, "a part is begun"
        work, completed = begun.allocation.take(tokens)
        self._run(work)
        for prefill in completed:
            if prefill.keep is not None:
                self._store.insert(prefill.keep, prefill.slots)
        if not begun.allocation.prompt_left:
            self._give_back()
            self._done = begun.node
            self.popularity.promoted(begun.target, begun.node)

    def _forget(self, run: TokenRun) -> None:
        """Let go what is stored of a part, and said behind it, but for what others share or somebody holds."""
        self._store.discard(self._store.own_ends(run))
