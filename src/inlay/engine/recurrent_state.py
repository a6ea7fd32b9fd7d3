"""The recurrent state of a running request: its slots, and the tokens behind which a state is kept.

A request owns one slot, which it overwrites in every pass. Its first pass may read a stored state instead. States are
kept within a pass at marks: at the ends of modules and marked parts, before the generation prompt, one token before the
prompt's end, and where the store has KV of this prompt but no state. Their slots go to the store with the KV.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from inlay.engine.lookup import Lookup
from inlay.kv.identity import KeyMaker, SegmentSpec, TokenRun
from inlay.kv.segment import StoredState
from inlay.kv.states import StatePool
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


@dataclass(eq=False, slots=True)
class RecurrentState:
    """The slots of a running request.

    Attributes:
        slot: its own slot. None once it belongs to the store.
        source: the stored state that it continues. None once its first passes have read it, or if there is none.
        tokens: the number of tokens that its state covers, counting those of the pass in preparation.
        marks: the numbers of tokens behind which a state will be kept, increasing.
        kept: (tokens, slot) of the states that its passes have kept and the store does not hold yet.
        stored: the states that it has given to the store.
    """

    pool: StatePool
    slot: int | None
    source: StoredState | None = None
    tokens: int = 0
    marks: list[int] = field(default_factory=list)
    kept: list[tuple[int, int]] = field(default_factory=list)
    stored: list[StoredState] = field(default_factory=list)
    _begun: bool = False

    def mark(self, tokens: int) -> None:
        """Keep the state behind the first ``tokens`` tokens, unless they are computed already."""
        place = bisect_left(self.marks, tokens)
        if tokens > max(self.tokens, LEAST_TOKENS - 1) and self.marks[place : place + 1] != [tokens]:
            self.marks.insert(place, tokens)

    def advance(self, rows: int) -> StateSpan:
        """Return the span of the next ``rows`` tokens. A mark without a free slot is left out."""
        assert self.slot is not None, "a running request has a slot"
        end, marks = self.tokens + rows, []
        while self.marks and self.marks[0] <= end:
            at = self.marks.pop(0)
            slot = self.pool.allocate()
            if slot is not None:
                marks.append((at - self.tokens, slot))
                self.kept.append((at, slot))
        source = self.slot if self.tokens else None
        if self.source is not None and not self._begun:
            source = self.source.slot
        elif self.source is not None:  # the pass before this one has read it
            self.pool.release(self.source)
            self.source = None
        self._begun, self.tokens = True, end
        return StateSpan(source, self.slot, tuple(marks))

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
        if self.source is not None:
            self.pool.release(self.source)
        for _, slot in self.kept:
            self.pool.free(slot)
        if self.slot is not None:
            self.pool.free(self.slot)
        self.slot, self.source = None, None
        self.kept.clear()

    def _give(self, store: SegmentStore, run: TokenRun, tokens: int, slot: int) -> None:
        state = store.keep_state(run, tokens, slot)
        if state is not None:
            self.stored.append(state)


def begin_state(pool: StatePool, lookup: Lookup) -> RecurrentState | None:
    """Return the state of a request that continues the state found. None if requests use all slots."""
    if lookup.state is not None:
        pool.acquire(lookup.state)
    slot = pool.allocate()
    if slot is None:
        if lookup.state is not None:
            pool.release(lookup.state)
        return None
    return RecurrentState(pool, slot, lookup.state, lookup.state_tokens)


def public_prefix(parts: Iterable[PromptPart], composed: ComposedPrompt, keys: KeyMaker) -> SegmentSpec | None:
    """Return the text of a public schema at the start of a prompt, for the tiers below the pool. None if short."""
    tokens = sum(len(part.ids) for part in takewhile(lambda part: not part.owned and part.kept, parts))
    first = composed[0]
    if not isinstance(first, NewSpan) or first.run is None or not LEAST_TOKENS <= tokens <= len(first.ids):
        return None
    run = first.run.prefix(tokens)
    key = keys.key(run.digest, run.ids, run.start)
    return SegmentSpec(run.ids, run.start, run.before, run.continues, parent=None, key=key, record=run.after(tokens))


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
    if lookup.stored_tokens > lookup.state_tokens:
        state.mark(lookup.stored_tokens)
    end = sum(len(part.ids) for part in composed if isinstance(part, NewSpan))
    if interval:
        for tokens in range(interval, end, interval)[-share:]:
            state.mark(tokens)
    # Another request with the same prompt computes the last token for its logits, so it needs the state before it.
    state.mark(end - 1)
