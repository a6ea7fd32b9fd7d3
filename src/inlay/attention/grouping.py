"""Which rows read which keys together: the items of all parts, cut at each other's borders and put into groups.

Rows of several requests that read the same slots at the same shift form one group (the chunk-first phase of
ChunkAttention, arXiv 2402.15220, section 3.3, for sharing sets that need not be prefixes); a group with the rows of one
request is sequence-first work. All of it is done in whole columns, since 64 rows over 1,000 modules each are 64,000
items, in every pass that mixes prefill with decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.int64]

#: The rows of a table of items or stretches.
FIRST, LENGTH, POSITION, SHIFT, MASKED = range(5)

#: A part with this many rows fills a kernel's tiles by itself and gains nothing from company.
LONG = 64

MOST_BITS = 63  # of a number that is sorted


@dataclass(slots=True)
class Groups:
    """Sets of query rows, each with the stretches of keys that just these rows read.

    rows: numbers of query rows, increasing within a group; those of group g are at row_first[g] … row_first[g + 1] - 1.
    stretches: (5, stretches), as a part's items; those of group g are at stretch_first[g] … stretch_first[g + 1] - 1,
        those of one shift together.
    growing: the stretches that end in a row's own slot, one a row, where all rows decode; else none.
    """

    rows: Table
    row_first: Table
    stretches: Table
    stretch_first: Table
    growing: Table

    def __len__(self) -> int:
        return self.row_first.size - 1

    def advance(self) -> None:
        """The next decode step: every row's own stretch is one key longer."""
        self.stretches[LENGTH, self.growing] += 1


def group(items: Sequence[Table], rows: Sequence[int], slots: Table, *, share: bool = True) -> Groups:
    """The groups of parts with these items and so many rows each.

    slots: where the rows' own keys go. share: whether rows of several parts may stand together.
    """
    part = np.repeat(np.arange(len(rows)), [table.shape[1] for table in items])
    return group_items(np.hstack(items), part, np.array(rows), slots, share=share)


def group_items(table: Table, part: Table, counts: Table, slots: Table, *, share: bool = True) -> Groups:
    """See ``group``. table: the items of all parts. part: of each item. counts: rows of each part."""
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
    """The one group of a pass's only part, as a prompt's first token waits for it; None where it reads a key twice."""
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
    """The order that sorts rows by their columns, the first one most significant, and which of them begin a new value.

    Equal rows stay as they stand. Rows that fit into one number with their index are sorted as plain numbers, which is
    ten times faster than anything that sorts an index.
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
    """The line of each item, and each line's shift, mask and offset: (3, lines).

    Items of one line agree on which position a slot has (the offset), on how it is read, and on who may read together.
    """
    columns = (table[SHIFT], table[MASKED], table[POSITION] - table[FIRST])
    order, new = _sorted(*columns, owner)
    line = np.empty_like(order)
    line[order] = np.cumsum(new) - 1
    first = order[new]
    return line, np.stack([column[first] for column in columns])


class _Intervals:
    """All items' slots between neighbouring borders on a line, with the set of parts that read each.

    start: each interval's line and first slot, as one number. length: its slots.
    first, end: the intervals that an item covers are first … end - 1.
    sets: two sums of random numbers, one number a part, that name the set of parts together.
    """

    def __init__(self, start: Table, length: Table, part: Table, parts: int) -> None:
        ends = np.concatenate((start, start + length))
        order, new = _sorted(ends)
        last = np.flatnonzero(np.append(new[1:], True))  # the last event of each border
        border = ends[order[last]]
        sums = [np.cumsum(np.concatenate((name, -name))[order])[last[:-1]] for name in _names(parts)[:, part]]
        covered = (sums[0] | sums[1]) != 0
        index = np.concatenate(([0], np.cumsum(covered)))  # of a border → intervals in front of it
        at = np.empty_like(order)
        at[order] = np.repeat(index, np.diff(last, prepend=-1))
        self.first, self.end = at[: start.size], at[start.size :]
        self.start, self.length = border[:-1][covered], np.diff(border)[covered]
        self.sets = (sums[0][covered], sums[1][covered])


def _names(parts: int) -> Table:  # (2, parts)
    """Random numbers, always the same: two sets of parts whose sums of 128 bits are alike do not occur."""
    return np.random.default_rng(1).integers(-(2**63), 2**63, (parts, 2)).T.copy()


def _number(one: Table, other: Table) -> Table:
    """Equal pairs get equal numbers, in the order in which they first occur."""
    order, _ = _sorted(one >> 24)  # bits enough to tell almost all apart; the two sums tell all
    one, other = one[order], other[order]
    first = np.flatnonzero(np.append(True, (one[1:] != one[:-1]) | (other[1:] != other[:-1])))
    rank = np.empty_like(first)
    rank[_sorted(order[first])[0]] = np.arange(first.size)
    number = np.empty_like(order)
    number[order] = np.repeat(rank, np.diff(np.append(first, order.size)))
    return number


def _rows_of(intervals: _Intervals, number: Table, part: Table, counts: Table) -> tuple[Table, Table]:
    """The rows of every group: those of the parts whose items cover the group's first interval."""
    groups = int(number.max()) + 1
    is_first = np.zeros(number.size, dtype=bool)
    is_first[np.flatnonzero(np.diff(np.maximum.accumulate(number), prepend=-1))] = True
    before = np.concatenate(([0], np.cumsum(is_first)))  # groups that begin in front of an interval
    begin, covers = before[intervals.first], before[intervals.end] - before[intervals.first]
    of_group, of_part = spread(begin, covers), np.repeat(part, covers)
    first_row = np.cumsum(counts) - counts
    rows = spread(first_row[of_part], counts[of_part])
    group = np.repeat(of_group, counts[of_part])
    rows = rows[_sorted(group, rows)[0]]
    return rows, np.concatenate(([0], np.cumsum(np.bincount(group, minlength=groups))))


def spread(first: Table, counts: Table) -> Table:
    """first[0], first[0] + 1, … counts[0] numbers; then those from first[1] on, and so forth."""
    return np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())


def _stretches(intervals: _Intervals, number: Table, lines: Table, slot_bits: int) -> tuple[Table, Table]:
    """The stretches of every group: its intervals, neighbours on a line as one. lines: see ``_lines``."""
    order, _ = _sorted(number)
    group, start, length = number[order], intervals.start[order], intervals.length[order]
    new = (group[1:] != group[:-1]) | (start[1:] != start[:-1] + length[:-1])
    first = np.flatnonzero(np.append(True, new))
    group, start = group[first], start[first]
    slot, (shift, masked, offset) = start & ((1 << slot_bits) - 1), lines[:, start >> slot_bits]
    stretches = np.stack((slot, np.add.reduceat(length, first), slot + offset, shift, masked))
    return stretches, np.concatenate(([0], np.cumsum(np.bincount(group))))


def _growing(groups: Groups, slots: Table) -> Table:
    """See Groups."""
    alone = np.repeat(np.diff(groups.row_first) == 1, np.diff(groups.stretch_first))
    row = groups.rows[np.repeat(groups.row_first[:-1], np.diff(groups.stretch_first))]
    at = groups.stretches
    own = alone & (at[SHIFT] == 0) & (at[FIRST] + at[LENGTH] - 1 == slots[row])
    return np.flatnonzero(own)
