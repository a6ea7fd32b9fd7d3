"""The attention plan: which query rows of one forward pass read which stored keys, and at which shift.

Each request has a *part*: its rows and the items that they read. A plan concatenates the parts of a pass, so a
request that joins or leaves changes only its own part. ``groups`` finds which rows read the same keys (grouping.py),
once for all backends. Plans are plain integer tables without torch.
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
    """Stored keys in adjacent slots and at consecutive positions, as one request reads them.

    Args:
        slots: The slots of the keys and values, any range of a segment.
        position: The position that the first key was encoded at.
        shift: The distance in positions from there to the position that the request reads it at.
        masked: True if a row sees only keys at or before its own position. False: it sees all.
        left_out: Slots of the range that no row sees, because their tokens are recomputed elsewhere. Increasing.
    """

    slots: SlotRange
    position: int
    shift: int = 0
    masked: bool = False
    left_out: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The position, as encoded, after the last key."""
        return self.position + self.slots.length


def items_at(ranges: Sequence[SlotRange], position: int, shift: int = 0) -> tuple[Item, ...]:
    """Return items for ranges of keys that were encoded at consecutive positions, starting at ``position``."""
    found = []
    for each in ranges:
        found.append(Item(each, position, shift))
        position += each.length
    return tuple(found)


class PlanContext:
    """The items before the next tokens of a request, as a growing table in the layout of ``Part.items``.

    A prompt of a thousand segments has a thousand parts, and each part sees all items before it. The tables of the
    parts are prefixes of this one table, not copies.
    """

    __slots__ = ("_columns", "_table")

    def __init__(self) -> None:
        self._table: Table = np.empty((5, 8), dtype=np.int64)
        self._columns = 0

    @property
    def table(self) -> Table:
        """The items so far, (5, items). Items that are added later do not change it."""
        return self._table[:, : self._columns]

    def extend(self, items: Sequence[Item]) -> None:
        """Append items."""
        more = table_of(items)
        end = self._columns + more.shape[1]
        if end > self._table.shape[1]:
            grown = np.empty((5, max(end, 2 * self._table.shape[1])), dtype=np.int64)
            grown[:, : self._columns] = self.table
            self._table = grown
        self._table[:, self._columns : end] = more
        self._columns = end


class Part:
    """New tokens of one request, one row each, and the keys that they attend to. Immutable.

    Args:
        positions: (rows,), increasing.
        slots: (rows,), the slots for the keys and values of the rows.
        items: (5, items), with rows for first slot, length, position of the first key, shift and masked. Every row
            reads
            all items. The rows' own keys are among them and are masked by position.
    """

    __slots__ = ("_among", "_context", "_made", "_positions", "_slots", "_steps")

    def __init__(self, positions: Table, slots: Table, items: Table | None, steps: int = 0) -> None:
        self._positions, self._slots, self._made = positions, slots, items
        self._context: Table | None = None  # the items before the rows' own, until ``_made`` is built
        self._among = False  # the context has keys after some rows, so all of it is masked by position
        # decode steps since the tables were made: the length of the row's own item has grown by this
        self._steps = steps

    @classmethod
    def of(cls, start: int, length: int, context: Sequence[Item] | Table, slots: Sequence[SlotRange]) -> Part:
        """Return a part with rows at consecutive positions from ``start`` on; see ``at``."""
        return cls.at(np.arange(start, start + length), context, slots)

    @classmethod
    def at(
        cls, positions: Table, context: Sequence[Item] | Table, slots: Sequence[SlotRange], *, among: bool = False
    ) -> Part:
        """Return a part with rows at any increasing positions.

        Args:
            context: The items that the rows read besides their own keys, or the table of a ``PlanContext``. The
                items of the part are built on first use, so a waiting part needs no memory for them.
            slots: Ranges with at least one slot for each row.
            among: True if some of the context stands after some rows. All of it is masked then.
        """
        own = np.concatenate([np.arange(r.first, r.end) for r in cut(slots, 0, positions.size)])
        part = cls(positions, own, None)
        part._context = context if isinstance(context, np.ndarray) else table_of(context)
        part._among = among
        return part

    @classmethod
    def joined(cls, parts: Sequence[Part]) -> Part:
        """Join consecutive parts of one request into one. Each row sees the same keys as before.

        Every key that a row must not see has a later position, so a mask by position hides exactly these.

        Args:
            parts: Parts of one request. Each one reads the keys of those before it.
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
        """The slots that the rows read, their own included."""
        return tuple(SlotRange(first, length) for first, length in self.items[[FIRST, LENGTH]].T.tolist())

    @property
    def pairs(self) -> int:
        """The number of pairs of a row and a key that it sees."""
        items, masked = self.items, self.items[MASKED] > 0
        whole = self.rows * int(items[LENGTH, ~masked].sum())
        first = (items[POSITION] + items[SHIFT])[masked]
        seen = np.clip(self.positions[:, None] - first + 1, 0, items[LENGTH, masked])
        return whole + int(seen.sum())

    def split(self, rows: int) -> tuple[Part, Part]:
        """Split into the first ``rows`` rows and the rest. The rest reads the keys of the first rows from the pool."""
        return self.only(slice(None, rows)), self.only(slice(rows, None))

    def only(self, some: slice | Table) -> Part:
        """Return the part of some of the rows, given as increasing numbers. It reads other rows' keys from the pool."""
        positions = self.positions[some]
        return Part(positions, self.slots[some], _settled(self.items, positions))

    def ahead(self, slots: Table) -> Part:
        """Return the part of a decode row and of rows behind it, at the next positions.

        Args:
            slots: (rows,), the slots of the rows behind.
        """
        assert self.rows == 1, "only a part of one row decodes"
        positions = self.start + np.arange(1 + slots.size)
        items = np.hstack((self.items, _own_items(positions[1:], slots)))
        return Part(positions, np.append(self.first_slot, slots), _settled(items, positions))

    def next(self, slot: int) -> Part:
        """Return the part of the next decode step: one position on, stored in ``slot``."""
        assert self.rows == 1, "only a part of one row decodes"
        if slot == self._slots[0] + self._steps + 1:
            return Part(self._positions, self._slots, self._items, self._steps + 1)
        positions, slots = self.positions + 1, np.array([slot])
        items = np.hstack((self.items, _own_items(positions, slots)))
        return Part(positions, slots, _settled(items, positions))


class PreparedTables(Protocol):
    """The work tables that a backend has made of a plan."""

    def advance(self) -> None:
        """Move every row one position and one slot on. Each row then also sees the key that it wrote last."""
        ...


@dataclass
class Plan:
    """The attention of one forward pass.

    Args:
        parts: The requested attention in row order. This is the specification.
        positions: (rows,), position of each query row.
        slots: (rows,), slot for the key and value of each row.
        share: True if rows of several requests that read the same keys may be processed together (chunk-first).
        work: Work tables by backend name.
    """

    parts: tuple[Part, ...]
    positions: Table
    slots: Table
    share: bool = True
    work: dict[str, PreparedTables] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.positions.size

    @cached_property
    def groups(self) -> Groups:
        """The groups of rows that read the same keys. All backends work from them."""
        items = [part.items for part in self.parts]
        return group(items, [part.rows for part in self.parts], self.slots, share=self.share)


def build_plan(parts: Sequence[Part], *, share: bool = True) -> Plan:
    """Build the plan of a pass. See ``Plan`` for ``share``."""
    positions = np.concatenate([part.positions for part in parts])
    return Plan(tuple(parts), positions, np.concatenate([part.slots for part in parts]), share)


def plan_of_rows(plan: Plan, rows: Sequence[int]) -> Plan:
    """Return the plan of some rows of a pass, given as increasing numbers. The keys of all rows must be stored."""
    wanted, first, parts = np.asarray(rows, dtype=np.int64), 0, []
    for part in plan.parts:
        begin, end = np.searchsorted(wanted, (first, first + part.rows))
        if end > begin:
            parts.append(part.only(wanted[begin:end] - first))
        first += part.rows
    return build_plan(parts, share=plan.share)


def advance(plan: Plan, parts: Sequence[Part]) -> Plan:
    """Turn a decode plan into that of the next step in place. The grouping stays, only lengths grow.

    Args:
        plan: Has one row for each part. Do not use it after this call.
        parts: The same requests one token later. Each one uses the slot after its last one.
    """
    assert plan.groups.growing.size == plan.rows, "only a plan of decode steps advances"
    plan.groups.advance()  # first, while the groups can still be built from the old parts
    plan.positions += 1
    plan.slots += 1
    for work in plan.work.values():
        work.advance()
    plan.parts = tuple(parts)
    return plan


def table_of(context: Sequence[Item]) -> Table:
    """Return items as the columns of a table. An item with slots left out becomes the ranges between these slots."""
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
    starts += behind  # except for the first, a range begins after a slot that is left out
    each = np.array([(i.position - i.slots.first, i.shift, i.masked) for i in parted], dtype=np.int64)
    offset, shift, masked = np.repeat(each, counts, axis=0).T
    return np.hstack((table, np.stack((starts, ends - starts, starts + offset, shift, masked))))


def _own_items(positions: Table, slots: Table) -> Table:
    """The rows' own keys, as stretches of consecutive positions and slots."""
    first = np.flatnonzero(np.concatenate(([True], (np.diff(positions) != 1) | (np.diff(slots) != 1))))
    lengths = np.diff(np.append(first, positions.size))
    return np.stack((slots[first], lengths, positions[first], np.zeros_like(first), np.ones_like(first)))


def _settled(items: Table, positions: Table) -> Table:
    """Normalize items for these rows.

    Keys after the last row are cut, and an item is masked only if that hides a key. Adjacent items at the same shift
    are joined, so a prompt of many short segments costs no more than one long segment.
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
