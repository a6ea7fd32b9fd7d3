"""The plan: which query rows of one forward pass read which stored keys, turned by how much. Plain tables, no torch.

Each request has a *part*: its rows, and the items that they read. A plan puts the parts of a pass one behind the other,
so a request that joins or leaves changes its own part alone; ``groups`` then finds, once for all backends, which rows
read which keys together (grouping.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from inlay.attention.grouping import FIRST, LENGTH, MASKED, POSITION, SHIFT, Groups, group
from inlay.slots import SlotRange, cut

Table = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Item:
    """Stored keys side by side in the pool and at consecutive positions, as one request reads them.

    slots: where keys and values lie; any range of a segment.
    position: the one that the first key was encoded at.
    shift: how far behind that the request reads it.
    masked: whether a row sees only the keys at or before its own position, instead of all.
    left_out: slots of the range that no row sees, as they are computed anew elsewhere; increasing.
    """

    slots: SlotRange
    position: int
    shift: int = 0
    masked: bool = False
    left_out: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The position, as encoded, behind the last key."""
        return self.position + self.slots.length


def items_at(ranges: Sequence[SlotRange], position: int, shift: int = 0) -> tuple[Item, ...]:
    """Ranges that hold keys encoded at consecutive positions from ``position`` on."""
    found = []
    for each in ranges:
        found.append(Item(each, position, shift))
        position += each.length
    return tuple(found)


class Context:
    """What stands before the next tokens of a request, as a table like that of ``Part.items``, which grows.

    A prompt of a thousand pieces has a thousand parts, each of which sees what stands before it: their tables are
    beginnings of this one.
    """

    __slots__ = ("_columns", "_table")

    def __init__(self) -> None:
        self._table: Table = np.empty((5, 8), dtype=np.int64)
        self._columns = 0

    @property
    def table(self) -> Table:
        """(5, items), all that there is by now; what is added later does not change it."""
        return self._table[:, : self._columns]

    def extend(self, items: Sequence[Item]) -> None:
        """Add what stands behind."""
        more = table_of(items)
        end = self._columns + more.shape[1]
        if end > self._table.shape[1]:
            grown = np.empty((5, max(end, 2 * self._table.shape[1])), dtype=np.int64)
            grown[:, : self._columns] = self.table
            self._table = grown
        self._table[:, self._columns : end] = more
        self._columns = end


class Part:
    """New tokens of one request, a row each, and what they attend to. Parts do not change.

    positions: (rows,), increasing. slots: (rows,), where the rows' own keys and values go.
    items: (5, items), a row each for first slot, length, position of the first key, shift and masked. All rows read all
        of them, their own keys among them; own keys are masked by position.
    """

    __slots__ = ("_among", "_context", "_made", "_positions", "_slots", "_steps")

    def __init__(self, positions: Table, slots: Table, items: Table | None, steps: int = 0) -> None:
        self._positions, self._slots, self._made = positions, slots, items
        self._context: Table | None = None  # what ``_made`` is made of when it is first asked for
        self._among = False  # whether the rows stand among that, so that all of it is masked by position
        self._steps = steps  # of decoding since the tables were made: the row's own item has grown by so many

    @classmethod
    def of(cls, start: int, length: int, context: Sequence[Item] | Table, slots: Sequence[SlotRange]) -> Part:
        """Rows at consecutive positions from ``start`` on; see ``at``."""
        return cls.at(np.arange(start, start + length), context, slots)

    @classmethod
    def at(
        cls, positions: Table, context: Sequence[Item] | Table, slots: Sequence[SlotRange], *, among: bool = False
    ) -> Part:
        """Rows at any increasing positions.

        context: what they read besides their own keys, or a ``Context``'s table, which is kept as it is until somebody
        asks for the items: so a part that waits takes no room for them. slots: ranges of at least as many slots as
        there are rows. among: whether some of the context stands behind some rows, so that all of it is masked.
        """
        own = np.concatenate([np.arange(r.first, r.end) for r in cut(slots, 0, positions.size)])
        part = cls(positions, own, None)
        part._context = context if isinstance(context, np.ndarray) else table_of(context)
        part._among = among
        return part

    @classmethod
    def joined(cls, parts: Sequence[Part]) -> Part:
        """One part of the rows of several, which stand one behind the other: each sees in it what it sees in its own.

        parts: of one request, each of which reads the keys of those before it. Every key that a row may not see has
        a position behind it, so that masking all of them leaves the rest.
        """
        positions = np.concatenate([part.positions for part in parts])
        items = parts[-1].items.copy()
        items[MASKED] = True
        return cls(positions, np.concatenate([part.slots for part in parts]), _settled(items, positions))

    @property
    def _items(self) -> Table:
        if self._made is None:
            assert self._context is not None, "a part is made of items or of what they come from"
            items = np.hstack((self._context, _own_items(self._positions, self._slots)))
            if self._among:
                items[MASKED] = True
            self._made, self._context = _settled(items, self._positions), None
        return self._made

    @property
    def rows(self) -> int:
        return self._positions.size

    @property
    def positions(self) -> Table:
        return self._positions + self._steps if self._steps else self._positions

    @property
    def slots(self) -> Table:
        return self._slots + self._steps if self._steps else self._slots

    @property
    def first_slot(self) -> int:
        """The slot of the first row."""
        return int(self._slots[0]) + self._steps

    @property
    def items(self) -> Table:
        if not self._steps:
            return self._items
        items = self._items.copy()
        items[LENGTH, -1] += self._steps
        return items

    @property
    def start(self) -> int:
        """The position of the first row."""
        return int(self._positions[0]) + self._steps

    @property
    def ranges(self) -> tuple[SlotRange, ...]:
        """The slots that the rows read, their own among them."""
        return tuple(SlotRange(first, length) for first, length in self.items[[FIRST, LENGTH]].T.tolist())

    @property
    def pairs(self) -> int:
        """How many pairs of a row and a key that it sees there are."""
        items, masked = self.items, self.items[MASKED] > 0
        whole = self.rows * int(items[LENGTH, ~masked].sum())
        first = (items[POSITION] + items[SHIFT])[masked]
        seen = np.clip(self.positions[:, None] - first + 1, 0, items[LENGTH, masked])
        return whole + int(seen.sum())

    def split(self, rows: int) -> tuple[Part, Part]:
        """The first rows, and the rest, for which the first ones' keys are stored ones."""
        made = []
        for some in (slice(None, rows), slice(rows, None)):
            positions = self.positions[some]
            made.append(Part(positions, self.slots[some], _settled(self.items, positions)))
        return made[0], made[1]

    def next(self, slot: int) -> Part:
        """The next step of a request that decodes: one position on, behind the row of this part, in ``slot``."""
        assert self.rows == 1, "only a part of one row decodes"
        if slot == self._slots[0] + self._steps + 1:
            return Part(self._positions, self._slots, self._items, self._steps + 1)
        positions, slots = self.positions + 1, np.array([slot])
        items = np.hstack((self.items, _own_items(positions, slots)))
        return Part(positions, slots, _settled(items, positions))


class Prepared(Protocol):
    """What a backend has made of a plan."""

    def advance(self) -> None:
        """Every row stands one position and one slot further on, and sees what it wrote last."""
        ...


@dataclass
class Plan:
    """One forward pass's attention.

    parts: what is asked for, in row order; the specification.
    positions, slots: (rows,), of the query rows, and where their own keys and values go.
    share: whether rows of several requests that read the same keys may be worked on together (chunk-first).
    work: what backends have made of it, by backend.
    """

    parts: tuple[Part, ...]
    positions: Table
    slots: Table
    share: bool = True
    work: dict[str, Prepared] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.positions.size

    @cached_property
    def groups(self) -> Groups:
        """Which rows read which keys together: the work of every backend."""
        items = [part.items for part in self.parts]
        return group(items, [part.rows for part in self.parts], self.slots, share=self.share)


def build_plan(parts: Sequence[Part], *, share: bool = True) -> Plan:
    """The plan of a pass. share: see Plan."""
    positions = np.concatenate([part.positions for part in parts])
    return Plan(tuple(parts), positions, np.concatenate([part.slots for part in parts]), share)


def advance(plan: Plan, parts: Sequence[Part]) -> Plan:
    """The plan of the next decode step, by growing the last one in place: the grouping stays, lengths grow.

    plan: of one row a part; not to be used again. parts: the same requests one token on, each in the slot behind its
    last one.
    """
    assert plan.groups.growing.size == plan.rows, "only a plan of decode steps advances"
    plan.groups.advance()  # first, while they can still be made of the parts before
    plan.positions += 1
    plan.slots += 1
    for work in plan.work.values():
        work.advance()
    plan.parts = tuple(parts)
    return plan


def table_of(context: Sequence[Item]) -> Table:
    """Items as columns of a table; an item with slots left out as the ranges between them."""
    whole = [(i.slots.first, i.slots.length, i.position, i.shift, i.masked) for i in context if not i.left_out]
    parted = [item for item in context if item.left_out]
    table = np.array(whole, dtype=np.int64).reshape(-1, 5).T
    if not parted:
        return table
    counts = [len(item.left_out) + 1 for item in parted]
    starts = np.array([slot for i in parted for slot in (i.slots.first, *i.left_out)], dtype=np.int64)
    ends = np.array([slot for i in parted for slot in (*i.left_out, i.slots.first + i.slots.length)], dtype=np.int64)
    behind = np.ones_like(starts)
    behind[np.cumsum([0, *counts[:-1]])] = 0
    starts += behind  # a range begins behind the slot that is left out, but for an item's first
    each = np.array([(i.position - i.slots.first, i.shift, i.masked) for i in parted], dtype=np.int64)
    offset, shift, masked = np.repeat(each, counts, axis=0).T
    return np.hstack((table, np.stack((starts, ends - starts, starts + offset, shift, masked))))


def _own_items(positions: Table, slots: Table) -> Table:
    """The rows' own keys, in stretches of consecutive positions and slots."""
    first = np.flatnonzero(np.concatenate(([True], (np.diff(positions) != 1) | (np.diff(slots) != 1))))
    lengths = np.diff(np.append(first, positions.size))
    return np.stack((slots[first], lengths, positions[first], np.zeros_like(first), np.ones_like(first)))


def _settled(items: Table, positions: Table) -> Table:
    """Items as these rows see them: without keys behind the last row, masked only where that hides some, and joined.

    Neighbours at the same shift become one, so a prompt of many short segments costs what one long segment does.
    """
    items = items.copy()
    seen = items[POSITION] + items[SHIFT]
    masked = items[MASKED] > 0
    items[LENGTH] = np.where(masked, np.minimum(items[LENGTH], positions[-1] - seen + 1), items[LENGTH])
    items[MASKED] = masked & (seen + items[LENGTH] - 1 > positions[0])
    items = items[:, items[LENGTH] > 0]
    before, behind = items[:, :-1], items[:, 1:]
    goes_on = (before[FIRST] + before[LENGTH] == behind[FIRST]) & (
        before[POSITION] + before[LENGTH] == behind[POSITION]
    )
    goes_on &= (before[SHIFT] == behind[SHIFT]) & (before[MASKED] == behind[MASKED])
    first = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    joined = items[:, first]
    joined[LENGTH] = np.add.reduceat(items[LENGTH], first)
    return joined
