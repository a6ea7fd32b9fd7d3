"""Groups of rows that read the same keys: the items of all parts, cut at each other's borders.

Rows of several requests that read the same slots at the same shift form one group. This is the chunk-first phase of
ChunkAttention (arXiv 2402.15220, section 3.3), for shared sets that need not be prefixes. A group with the rows of
one request is sequence-first work. The work is vectorized over whole columns: 64 rows over 1,000 modules each are
64,000 items, in every pass that mixes prefill with decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
    """The single group of a pass with one part, a fast path for prefill. None if a key is read twice."""
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
    borders = np.array([0, rows]), stretches, np.array([0, first.size])
    groups = Groups(np.arange(rows), *borders, np.empty(0, dtype=np.int64))
    if rows == 1:
        groups.growing = _growing(groups, slots)
    return groups


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
    """The rows of every group: those of the parts that read the group's first interval."""
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
    """The stretches of every group. Adjacent intervals on a line are joined. lines: see ``_lines``."""
    order, _ = _sorted(number)
    group, start, length = number[order], intervals.start[order], intervals.length[order]
    new = (group[1:] != group[:-1]) | (start[1:] != start[:-1] + length[:-1])
    first = np.flatnonzero(np.append(True, new))
    group, start = group[first], start[first]
    slot, (shift, masked, offset) = start & ((1 << slot_bits) - 1), lines[:, start >> slot_bits]
    stretches = np.stack((slot, np.add.reduceat(length, first), slot + offset, shift, masked))
    return stretches, np.concatenate(([0], np.cumsum(np.bincount(group))))


def _growing(groups: Groups, slots: Table) -> Table:
    """The stretches that end in their row's own slot; see ``Groups.growing``."""
    alone = np.repeat(np.diff(groups.row_first) == 1, np.diff(groups.stretch_first))
    row = groups.rows[np.repeat(groups.row_first[:-1], np.diff(groups.stretch_first))]
    at = groups.stretches
    own = alone & (at[SHIFT] == 0) & (at[FIRST] + at[LENGTH] - 1 == slots[row])
    return np.flatnonzero(own)
