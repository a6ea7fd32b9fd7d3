"""The recurrent state of a running request: its slots, and the tokens behind which a state is kept.

A request owns one slot, which it overwrites in every pass. A part of its prompt may begin with a stored state instead.
States are kept within a pass at marks: at the ends of modules and marked parts, before the generation prompt, one token
before the prompt's end, and where the store has KV of this prompt but no state. Their slots go to the store with the
KV.

A module that the request computes has a slot of its own. The state behind the module's last token goes to the store
with the module, and the text behind the module begins with it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from inlay.engine.lookup import Lookup
from inlay.errors import CapacityError
from inlay.kv.identity import TEXT_LABEL, KeyMaker, SegmentSpec, TokenRun
from inlay.kv.pool import StatePool, StoredState
from inlay.kv.store import SegmentStore
from inlay.models.mixers.states import StateSpan
from inlay.prompt.composed import ComposedPrompt, NewSpan
from inlay.prompt.request import PromptPart

#: The most states that one prompt keeps at the ends of its parts. Later parts count first.
MOST_MARKS = 8

#: One prompt takes no more than this part of all slots for the ends of its parts.
_SHARE = 8

#: A state is kept behind this many tokens at least. A shorter text is computed again as fast as it is found.
LEAST_TOKENS = 16


@dataclass(frozen=True, slots=True)
class StateStart:
    """The state in front of some tokens of a prompt.

    Attributes:
        tokens: the number of tokens in front of them.
        state: the state behind those. None if there are none.
    """

    tokens: int
    state: StoredState | None


@dataclass(eq=False, slots=True)
class RecurrentState:
    """The slots of a running request or encoding.

    Attributes:
        slot: its own slot. None once it belongs to the store, and for an encoding.
        modules: by key, the states of the modules that it computes. Each is acquired until its module is stored.
        held: the states that it has acquired, once for each use to come.
        tokens: the number of tokens that its state covers, counting those of the pass in preparation.
        marks: the numbers of tokens behind which a state will be kept, increasing.
        kept: (tokens, slot) of the states that its passes have kept and the store does not hold yet.
        stored: the states that it has given to the store.
    """

    pool: StatePool
    slot: int | None
    modules: dict[bytes, StoredState] = field(default_factory=dict)
    held: list[StoredState] = field(default_factory=list)
    tokens: int = 0
    marks: list[int] = field(default_factory=list)
    kept: list[tuple[int, int]] = field(default_factory=list)
    stored: list[StoredState] = field(default_factory=list)
    _read: list[StoredState] = field(default_factory=list)
    _begun: bool = False

    def begin(self, tokens: int, state: StoredState | None) -> StateStart:
        """Return the start of work behind ``tokens`` tokens. Acquires its state until a pass has read it."""
        if state is not None:
            self.pool.acquire(state)
            self.held.append(state)
        return StateStart(tokens, state)

    def mark(self, tokens: int) -> None:
        """Keep the state behind the first ``tokens`` tokens, unless they are computed already."""
        place = bisect_left(self.marks, tokens)
        if tokens > max(self.tokens, LEAST_TOKENS - 1) and self.marks[place : place + 1] != [tokens]:
            self.marks.insert(place, tokens)

    def release_read(self) -> None:
        """Release the states that earlier passes have read."""
        for state in self._read:
            self._release(state)
        self._read.clear()

    def advance(self, rows: int, start: StateStart | None = None) -> StateSpan:
        """Return the span of the next ``rows`` tokens. A mark without a free slot is left out.

        Args:
            start: the state in front of them. None to continue the tokens before.
        """
        assert self.slot is not None, "a running request has a slot"
        source: int | None = self.slot
        if start is not None:
            source = self._source(start)
            self.tokens = start.tokens
            del self.marks[: bisect_right(self.marks, start.tokens)]
        end, marks = self.tokens + rows, []
        while self.marks and self.marks[0] <= end:
            at = self.marks.pop(0)
            slot = self.pool.allocate()
            if slot is not None:
                marks.append((at - self.tokens, slot))
                self.kept.append((at, slot))
        self._begun, self.tokens = True, end
        return StateSpan(source, self.slot, tuple(marks))

    def advance_module(self, key: bytes, start: StateStart | None) -> StateSpan:
        """Return the span of the next tokens of a module that it computes. Arguments as of ``advance``."""
        slot = self.modules[key].slot
        return StateSpan(slot if start is None else self._source(start), slot)

    def store_module(self, store: SegmentStore, spec: SegmentSpec) -> None:
        """Give the state behind a module that it has computed to the store."""
        state = self.modules.pop(spec.key)
        store.adopt_state(spec, state)
        if state.segment is not None:
            self.stored.append(state)
        self._release(state)

    def store(self, store: SegmentStore, run: TokenRun) -> None:
        """Give the kept states within a stored run to the store."""
        first, end = run.before.tokens, run.before.tokens + len(run.ids)
        for tokens, slot in [each for each in self.kept if first < each[0] <= end]:
            self.kept.remove((tokens, slot))
            self._give(store, run, tokens - first, slot)

    def donate(self, store: SegmentStore, run: TokenRun) -> None:
        """Give the request's own slot to the store if it holds the state behind exactly this run."""
        if self.slot is None or not self._begun or self.tokens != run.before.tokens + len(run.ids):
            return
        slot, self.slot = self.slot, None
        self._give(store, run, len(run.ids), slot)

    def close(self, *, damaged: bool = False) -> None:
        """Free all slots. Of a damaged request, the store forgets the states too."""
        for state in self.stored:
            if damaged and state.segment is not None:
                self.pool.drop(state.segment)
        for state in self.held:
            self.pool.release(state)
        for _, slot in self.kept:
            self.pool.free(slot)
        if self.slot is not None:
            self.pool.free(self.slot)
        self.slot = None
        for each in (self.kept, self.held, self.modules, self._read):
            each.clear()

    def _source(self, start: StateStart) -> int | None:
        """Return the slot in front of the next tokens. The next pass releases it."""
        if start.state is None:
            return None
        self._read.append(start.state)
        return start.state.slot

    def _release(self, state: StoredState) -> None:
        self.held.remove(state)
        self.pool.release(state)

    def _give(self, store: SegmentStore, run: TokenRun, tokens: int, slot: int) -> None:
        state = store.keep_state(run, tokens, slot)
        if state is not None:
            self.stored.append(state)


def begin_state(pool: StatePool, lookup: Lookup, *, own: bool) -> RecurrentState | None:
    """Return the slots for what a lookup has not found. None if requests use all slots.

    Args:
        own: True for a request. False for an encoding, which computes modules alone.

    Raises:
        CapacityError: the pool can never hold the states of all its modules.
    """
    found = [state for each in lookup.found if (state := each.state) is not None]
    needed = len({*found}) + len(lookup.missing) + own
    if lookup.modules and needed > pool.slots - 1:
        raise CapacityError(
            f"a prompt needs {needed} states with those of its modules, and state_memory holds {pool.slots - 1}; "
            f"give state_memory at least {(needed + 1) * pool.slot_bytes} bytes",
            code="cache.too_many_states",
        )
    for state in found:  # they must not be evicted for the others
        pool.acquire(state)
    begun = RecurrentState(pool, pool.allocate() if own else None)
    for spec, _ in lookup.missing:
        new = pool.new()
        if new is not None:
            begun.modules[spec.key] = new
            begun.held.append(new)
    for state in found:
        pool.release(state)
    if (own and begun.slot is None) or len(begun.modules) < len(lookup.missing):
        begun.close()
        return None
    return begun


def schema_prefix(parts: Iterable[PromptPart], composed: ComposedPrompt, keys: KeyMaker) -> SegmentSpec | None:
    """Return the text of a schema at the start of a prompt, for the tiers below the pool. None if short.

    A private schema's text is private to its salt, as the prompt's other text is.
    """
    first = composed[0]
    if not isinstance(first, NewSpan) or first.run is None:
        return None
    private = first.run.before.private
    read = list(takewhile(lambda part: part.kept and part.copies and part.owned == private, parts))
    tokens = sum(len(part.ids) for part in read)
    if not LEAST_TOKENS <= tokens <= len(first.ids):
        return None
    run = first.run.prefix(tokens)
    key = keys.key(run.digest, run.ids, run.start)
    return SegmentSpec(
        run.ids,
        run.start,
        run.before,
        run.continues,
        parent=None,
        key=key,
        record=run.after(tokens),
        text=True,
        labels=(TEXT_LABEL, *dict.fromkeys(label for part in read for label in part.copies[1:])),
    )


def mark_prompt(
    state: RecurrentState, parts: Iterable[PromptPart], composed: ComposedPrompt, lookup: Lookup, interval: int = 0
) -> None:
    """Choose the tokens of a prompt behind which a state is kept.

    Args:
        interval: keep a state behind every multiple of this number of tokens as well. 0 for none.
    """
    ends, at = [], 0
    for part in parts:
        at += len(part.ids)
        if part.marked:
            ends.append(at)
    share = max(1, state.pool.slots // _SHARE)
    for tokens in ends[-min(MOST_MARKS, share) :]:
        state.mark(tokens)
    for tokens in lookup.beyond:
        state.mark(tokens)
    end = sum(part.length for part in composed)
    if interval:
        for tokens in range(interval, end, interval)[-share:]:
            state.mark(tokens)
    # Another request with the same prompt computes the last token for its logits, so it needs the state before it.
    state.mark(end - 1)
