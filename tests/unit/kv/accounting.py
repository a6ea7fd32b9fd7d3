"""An audit of the store: the owners of chunks and the references to segments, counted independently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from inlay.engine.allocation import SequenceAllocation
from inlay.kv.pool import Hold
from inlay.kv.store import SegmentStore
from inlay.slots import SlotRange


def audit(
    store: SegmentStore,
    allocations: Iterable[SequenceAllocation] = (),
    *,
    holds: Iterable[Hold] = (),
    blocks: Iterable[Sequence[SlotRange]] = (),
) -> None:
    """Check the store's counts.

    The pool's owner counts equal the sum over the index, these allocations and these blocks of slots. Only these
    allocations
    and references hold segments. Each segment is stored where the index looks for it.
    """
    allocations = list(allocations)
    _audit_owners(store, allocations, blocks)
    _audit_holds(store, [*holds, *(allocation.hold for allocation in allocations)])
    _audit_states(store, allocations)
    _audit_index(store)


def _audit_owners(
    store: SegmentStore, allocations: list[SequenceAllocation], blocks: Iterable[Sequence[SlotRange]]
) -> None:
    pool = store.pool
    owners: Counter[int] = Counter()
    own = [runs for each in allocations for runs in (each.modules, each.tail, each.arrived)]
    for runs in [*(segment.slots for segment in store), *own, *blocks]:
        owners.update(pool.chunks_of(runs))
    assert [pool.owners(chunk) for chunk in range(pool.chunks)] == [owners[chunk] for chunk in range(pool.chunks)]
    free = [chunk for chunks in pool.free_ranges for chunk in range(chunks.first, chunks.end)]
    assert free == [chunk for chunk in range(pool.chunks) if not owners[chunk]]
    assert pool.free_chunks == len(free)
    slots = [slot for segment in store for run in segment.slots for slot in range(run.first, run.end)]
    assert len(slots) == len(set(slots)), "two segments lie in one slot"
    for allocation in allocations:
        assert allocation.tokens <= allocation.room


def _audit_holds(store: SegmentStore, holds: list[Hold]) -> None:
    stored = set(store)
    for hold in holds:
        assert stored.issuperset(hold.segments), "what is held is not stored"
    for segment in stored:
        assert segment.holds == {hold for hold in holds if segment in hold.segments}


def _audit_states(store: SegmentStore, allocations: list[SequenceAllocation]) -> None:
    """Each state slot has one owner: a segment in the store, a running request, or none. States have their readers."""
    states, running = store.states, [each.state for each in allocations if each.state is not None]
    if states is None:
        assert not running
        return
    stored = [segment.state for segment in store if segment.state is not None]
    assert all(segment.state.segment is segment for segment in store if segment.state is not None)
    assert len(stored) == states.stored
    read = Counter(state for each in running for state in each.held)
    assert {state: state.readers for state in {*stored, *read}} == {state: read[state] for state in {*stored, *read}}
    dropped = [state for state in read if state.segment is None]
    owned = [slot for each in running for slot in ([each.slot] if each.slot else []) + [slot for _, slot in each.kept]]
    used = [*(state.slot for state in (*stored, *dropped)), *owned]
    assert len(used) == len(set(used)), "two owners have one state slot"
    assert 0 not in used
    assert states.free_slots == states.slots - 1 - len(used)


def _audit_index(store: SegmentStore) -> None:
    heads = [(segment.place, segment.run.ids[0]) for segment in store]
    assert len(heads) == len(set(heads)), "two segments stand in each other's way"
    for segment in store:
        assert sum(run.length for run in segment.slots) == segment.tokens > 0
        assert segment.place == store.place(segment.run)
        assert segment.behind == store.place(segment.run.rest(segment.tokens))
