"""The attention plan: which query rows of one forward pass read which stored keys, and at which shift.

Each request has a *part*: its rows and the items that they read. A plan concatenates the parts of a pass, so a request
that joins or leaves changes only its own part. ``groups`` finds which rows read the same keys, once for all backends.
Plans are plain integer tables without torch.

Groups are the items of all parts, cut at each other's borders. Rows of several requests that read the same slots at the
same shift form one group. This is the chunk-first phase of ChunkAttention (arXiv 2402.15220, section 3.3), for shared
sets that need not be prefixes. A group with the rows of one request is sequence-first work. The work is vectorized over
whole columns: 64 rows over 1,000 modules each are 64,000 items, in every pass that mixes prefill with decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from inlay.slots import SlotRange, cut

Table = npt.NDArray[np.int64]

#: The rows of a table of items or stretches.
FIRST, LENGTH, POSITION, SHIFT, MASKED = range(5)

#: A part with this many rows fills a kernel's tiles by itself. It gains nothing from sharing them.
LONG = 64

MOST_BITS = 63  # bits of a number to sort


@dataclass(slots=True)
class Groups:
    """Sets of query rows, each with the stretches of keys that exactly these rows read.

    Args:
        rows: Numbers of query rows, increasing within a group.
        row_first: Group g has ``rows[row_first[g] : row_first[g + 1]]``.
        stretches: (5, stretches), in the layout of a part's items. Within a group, equal shifts are adjacent.
        stretch_first: Group g has ``stretches[:, stretch_first[g] : stretch_first[g + 1]]``.
        growing: The stretch that ends in a row's own slot, one for each row, if all rows decode. Else empty.
    """

    rows: Table
    row_first: Table
    stretches: Table
    stretch_first: Table
    growing: Table

    def __len__(self) -> int:
        return self.row_first.size - 1

    def advance(self) -> None:
        """Advance to the next decode step: every row's own stretch grows by one key."""
        self.stretches[LENGTH, self.growing] += 1


def group(items: Sequence[Table], rows: Sequence[int], slots: Table, *, share: bool = True) -> Groups:
    """Return the groups of parts with these items and numbers of rows.

    Args:
        items: The items of each part.
        rows: The number of rows of each part.
        slots: (rows,), the slots of the rows' own keys.
        share: True if rows of several parts may be in one group.
    """
    part = np.repeat(np.arange(len(rows)), [table.shape[1] for table in items])
    return group_items(np.hstack(items), part, np.array(rows), slots, share=share)


def group_items(table: Table, part: Table, counts: Table, slots: Table, *, share: bool = True) -> Groups:
    """Like ``group``, for the items of all parts in one table.

    Args:
        table: (5, items), the items of all parts.
        part: (items,), the part of each item.
        counts: (parts,), the number of rows of each part.
        slots, share: See ``group``.
    """
    if counts.size == 1 and (alone := _alone(table, int(counts[0]), slots)) is not None:
        return alone
    owner = np.where((counts >= LONG) | (not share), np.arange(counts.size) + 1, 0)[part]
    line, lines = _lines(table, owner)
    slot_bits = int((table[FIRST] + table[LENGTH]).max()).bit_length()
    intervals = _Intervals((line << slot_bits) | table[FIRST], table[LENGTH], part, counts.size)
    number = _number(*intervals.sets)  # the group of every interval
    row_index, row_first = _rows_of(intervals, number, part, counts)
    stretches, stretch_first = _stretches(intervals, number, lines, slot_bits)
    groups = Groups(row_index, row_first, stretches, stretch_first, np.empty(0, dtype=np.int64))
    if (counts == 1).all():
        groups.growing = _growing(groups, slots)
    return groups


def _alone(table: Table, rows: int, slots: Table) -> Groups | None:
    """Return the single group of a pass with one part: a fast path for prefill. None if a key is read twice."""
    order, _ = _sorted(table[SHIFT], table[MASKED], table[POSITION] - table[FIRST], table[FIRST])
    table = table[:, order]
    before, behind = table[:, :-1], table[:, 1:]
    same = (before[SHIFT] == behind[SHIFT]) & (before[MASKED] == behind[MASKED])
    same &= before[POSITION] - before[FIRST] == behind[POSITION] - behind[FIRST]
    left = behind[FIRST] - before[FIRST] - before[LENGTH]
    if (same & (left < 0)).any():
        return None
    first = np.flatnonzero(np.append(True, ~same | (left > 0)))
    stretches = table[:, first]
    stretches[LENGTH] = np.add.reduceat(table[LENGTH], first)
    stretches = stretches[:, _reading_order(stretches)]
    borders = np.array([0, rows]), stretches, np.array([0, first.size])
    groups = Groups(np.arange(rows), *borders, np.empty(0, dtype=np.int64))
    if rows == 1:
        groups.growing = _growing(groups, slots)
    return groups


def _reading_order(stretches: Table, group: Table | None = None) -> Table:
    """Return the order in which rows read stretches: by shift, 0 last, then by position.

    It does not depend on where the keys lie. New keys, which have the shift 0 and the last positions, come last. So a
    row's sums have the same bits alone and with a draft (docs/internals/kernel.md).
    """
    shift, groups = stretches[SHIFT], () if group is None else (group,)
    return _sorted(*groups, (shift == 0).astype(np.int64), shift, stretches[POSITION], stretches[FIRST])[0]


def _sorted(*columns: Table) -> tuple[Table, npt.NDArray[np.bool_]]:
    """Return the order that sorts rows by their columns, first column most significant, and where new values begin.

    The sort is stable. If a row and its index fit into one 63-bit number, plain numbers are sorted. This is ten times
    faster than any sort of an index.
    """
    count = columns[0].size
    least = [int(column.min()) for column in columns]
    widths = [int(column.max() - low).bit_length() for column, low in zip(columns, least, strict=True)]
    index_bits = count.bit_length()
    new = np.ones(count, dtype=bool)
    if sum(widths) + index_bits > MOST_BITS:
        order = np.lexsort(columns[::-1])
        new[1:] = False
        for column in columns:
            there = column[order]
            new[1:] |= there[1:] != there[:-1]
        return order, new
    key = columns[0] - least[0]
    for column, low, width in zip(columns[1:], least[1:], widths[1:], strict=True):
        key <<= width
        key |= column - low
    key <<= index_bits
    key |= np.arange(count)
    key.sort()
    order = key & ((1 << index_bits) - 1)
    key >>= index_bits
    np.not_equal(key[1:], key[:-1], out=new[1:])
    return order, new


def _lines(table: Table, owner: Table) -> tuple[Table, Table]:
    """Return the line of each item, and the shift, mask and offset of each line: (3, lines).

    Items on one line have the same offset from slot to position, the same shift and mask, and may be shared.
    """
    columns = (table[SHIFT], table[MASKED], table[POSITION] - table[FIRST])
    order, new = _sorted(*columns, owner)
    line = np.empty_like(order)
    line[order] = np.cumsum(new) - 1
    first = order[new]
    return line, np.stack([column[first] for column in columns])


class _Intervals:
    """The slots of all items, cut at the borders on each line, with the set of parts that read each interval.

    Attributes:
        start: Line and first slot of each interval, as one number.
        length: Slots of each interval.
        first, end: An item covers the intervals from ``first`` up to ``end`` - 1.
        sets: Two sums of random numbers, one number for each part. Together they identify the set of parts.
    """

    def __init__(self, start: Table, length: Table, part: Table, parts: int) -> None:
        ends = np.concatenate((start, start + length))
        order, new = _sorted(ends)
        last = np.flatnonzero(np.append(new[1:], True))  # the last event of each border
        border = ends[order[last]]
        sums = [np.cumsum(np.concatenate((name, -name))[order])[last[:-1]] for name in _names(parts)[:, part]]
        covered = (sums[0] | sums[1]) != 0
        index = np.concatenate(([0], np.cumsum(covered)))  # border → number of intervals before it
        at = np.empty_like(order)
        at[order] = np.repeat(index, np.diff(last, prepend=-1))
        self.first, self.end = at[: start.size], at[start.size :]
        self.start, self.length = border[:-1][covered], np.diff(border)[covered]
        self.sets = (sums[0][covered], sums[1][covered])


def _names(parts: int) -> Table:  # (2, parts)
    """Fixed random numbers. Two sets of parts with equal 128-bit sums do not occur in practice."""
    return np.random.default_rng(1).integers(-(2**63), 2**63, (parts, 2)).T.copy()


def _number(one: Table, other: Table) -> Table:
    """Number pairs in the order of their first occurrence. Equal pairs get equal numbers."""
    order, _ = _sorted(one >> 24)  # enough bits to separate almost all pairs; the comparison below uses both full sums
    one, other = one[order], other[order]
    first = np.flatnonzero(np.append(True, (one[1:] != one[:-1]) | (other[1:] != other[:-1])))
    rank = np.empty_like(first)
    rank[_sorted(order[first])[0]] = np.arange(first.size)
    number = np.empty_like(order)
    number[order] = np.repeat(rank, np.diff(np.append(first, order.size)))
    return number


def _rows_of(intervals: _Intervals, number: Table, part: Table, counts: Table) -> tuple[Table, Table]:
    """Return the rows of every group: all rows of the parts that read the group's first interval."""
    groups = int(number.max()) + 1
    is_first = np.zeros(number.size, dtype=bool)
    is_first[np.flatnonzero(np.diff(np.maximum.accumulate(number), prepend=-1))] = True
    before = np.concatenate(([0], np.cumsum(is_first)))  # number of groups that begin before an interval
    begin, covers = before[intervals.first], before[intervals.end] - before[intervals.first]
    of_group, of_part = spread(begin, covers), np.repeat(part, covers)
    first_row = np.cumsum(counts) - counts
    rows = spread(first_row[of_part], counts[of_part])
    group = np.repeat(of_group, counts[of_part])
    rows = rows[_sorted(group, rows)[0]]
    return rows, np.concatenate(([0], np.cumsum(np.bincount(group, minlength=groups))))


def spread(first: Table, counts: Table) -> Table:
    """Concatenate the ranges ``first[i] … first[i] + counts[i] - 1``."""
    return np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())


def _stretches(intervals: _Intervals, number: Table, lines: Table, slot_bits: int) -> tuple[Table, Table]:
    """Return the stretches of every group. Adjacent intervals on a line are joined.

    Args:
        intervals: the cut items.
        number: the group of each interval.
        lines: see ``_lines``.
        slot_bits: the bits of a slot in a number of line and slot.
    """
    order, _ = _sorted(number)
    group, start, length = number[order], intervals.start[order], intervals.length[order]
    new = (group[1:] != group[:-1]) | (start[1:] != start[:-1] + length[:-1])
    first = np.flatnonzero(np.append(True, new))
    group, start = group[first], start[first]
    slot, (shift, masked, offset) = start & ((1 << slot_bits) - 1), lines[:, start >> slot_bits]
    stretches = np.stack((slot, np.add.reduceat(length, first), slot + offset, shift, masked))
    stretches = stretches[:, _reading_order(stretches, group)]
    return stretches, np.concatenate(([0], np.cumsum(np.bincount(group))))


def _growing(groups: Groups, slots: Table) -> Table:
    """The stretches that end in their row's own slot; see ``Groups.growing``."""
    alone = np.repeat(np.diff(groups.row_first) == 1, np.diff(groups.stretch_first))
    row = groups.rows[np.repeat(groups.row_first[:-1], np.diff(groups.stretch_first))]
    at = groups.stretches
    own = alone & (at[SHIFT] == 0) & (at[FIRST] + at[LENGTH] - 1 == slots[row])
    return np.flatnonzero(own)


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
            reads all items. The rows' own keys are among them and are masked by position.
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
        """Split into the first ``rows`` rows and the rest, which reads the keys of the first rows from the pool."""
        return self.only(slice(None, rows)), self.only(slice(rows, None))

    def only(self, some: slice | Table) -> Part:
        """Return the part of some rows, given as increasing numbers. They read the other rows' keys from the pool."""
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
    """Turn a decode plan into the plan of the next step, in place. The grouping stays, and only lengths grow.

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
