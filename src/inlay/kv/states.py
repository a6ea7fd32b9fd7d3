"""Ownership of the slots for recurrent states. This is pure accounting; the tensors lie elsewhere.

A stored state belongs to the end of a segment: it is the state behind the segment's last token. So the same context
digest identifies both. A state goes with its segment's last token. It may also go alone, when others need its slot: the
least recently used one goes first.
"""

from __future__ import annotations

from collections import OrderedDict

from inlay.errors import CapacityError
from inlay.kv.segment import Segment, StoredState

#: A pool has this many slots at least: one for passes without state, one to read, one to write, one to keep.
LEAST_SLOTS = 4


class StatePool:
    """Slots for states: those of running requests, and stored ones.

    Slot 0 belongs to passes that keep no state.

    Args:
        slots: the number of slots.
        slot_bytes: the bytes of one slot.

    Attributes:
        evicted: the number of stored states that have gone to make room.
        hits, hit_tokens: the requests that continue a stored state, and the tokens in front of it, since the start.

    Raises:
        CapacityError: there are too few slots.
    """

    def __init__(self, slots: int, slot_bytes: int) -> None:
        if slots < LEAST_SLOTS:
            raise CapacityError(
                f"state_memory holds {slots} states of {slot_bytes} bytes, and a request needs up to {LEAST_SLOTS}; "
                f"give at least {LEAST_SLOTS * slot_bytes} bytes",
                code="cache.pool_too_small",
            )
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.evicted = self.hits = self.hit_tokens = 0
        self._free = list(range(slots - 1, 0, -1))
        self._stored: OrderedDict[StoredState, None] = OrderedDict()  # least recently used first

    @property
    def stored(self) -> int:
        """The number of stored states."""
        return len(self._stored)

    @property
    def free_slots(self) -> int:
        """The number of slots that hold nothing."""
        return len(self._free)

    @property
    def used_slots(self) -> int:
        """The number of slots of running requests and stored states."""
        return self.slots - 1 - len(self._free)

    def hit(self, tokens: int) -> None:
        """Count a request that continues the state behind its first ``tokens`` tokens."""
        self.hits += 1
        self.hit_tokens += tokens

    def allocate(self) -> int | None:
        """Return a slot, of an evicted state if no slot is free. Returns None if requests use all slots."""
        if not self._free:
            oldest = next((state for state in self._stored if not state.readers), None)
            if oldest is None or oldest.segment is None:
                return None
            self.evicted += 1
            self.drop(oldest.segment)
        return self._free.pop()

    def free(self, slot: int) -> None:
        """Take back a slot that holds no stored state."""
        assert slot not in self._free, "a state slot was freed twice"
        self._free.append(slot)

    def keep(self, segment: Segment, slot: int) -> StoredState | None:
        """Store a slot as the state behind a segment.

        Returns None, and frees the slot, if the segment has a state already. That one then counts as used.
        """
        if segment.state is not None:
            self.free(slot)
            self._stored.move_to_end(segment.state)
            return None
        state = StoredState(slot, None)
        self.adopt(segment, state)
        return state

    def new(self) -> StoredState | None:
        """Return a state that no segment has yet, acquired once. None if requests use all slots."""
        slot = self.allocate()
        return None if slot is None else StoredState(slot, None, readers=1)

    def adopt(self, segment: Segment, state: StoredState) -> None:
        """Store a state as the one behind a segment. Does nothing if the segment has one already."""
        if segment.state is None:
            segment.state, state.segment = state, segment
            self._stored[state] = None

    def move(self, state: StoredState, segment: Segment) -> None:
        """Give a state to the segment that ends where its former segment ended."""
        assert state.segment is not None, "a dropped state belongs to no segment"
        state.segment.state, state.segment, segment.state = None, segment, state

    def drop(self, segment: Segment) -> None:
        """Forget the state behind a segment, if it has one. Its slot is free once no request reads it."""
        state = segment.state
        if state is None:
            return
        segment.state = state.segment = None
        del self._stored[state]
        if not state.readers:
            self.free(state.slot)

    def acquire(self, state: StoredState) -> None:
        """Keep a state from eviction until it is released. This counts as a use."""
        state.readers += 1
        if state.segment is not None:
            self._stored.move_to_end(state)

    def release(self, state: StoredState) -> None:
        """Let a state go after ``acquire``."""
        state.readers -= 1
        if not state.readers and state.segment is None:
            self.free(state.slot)
