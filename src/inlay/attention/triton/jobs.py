"""The jobs of a plan for one kind of layer: which lanes read which pieces.

A *lane* is a query row that reads at one shift. A *piece* is a range of slots at consecutive positions. A *job* is a
set of lanes that read a list of pieces. In a chunk-first job, lanes of several requests read the same keys, each at
its own shift. A sequence-first job has the rows of one part and the keys that only this part reads. The code is
vectorized over whole columns, because a pass can have tens of thousands of pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from inlay.attention.grouping import FIRST, LENGTH, POSITION, SHIFT, Groups, Table, group_items, spread
from inlay.attention.plan import Plan
from inlay.attention.triton.cost import CostModel, Flags, Shape

#: The heights of tiles, in rows of lanes × query heads of one head of keys.
TILES = (16, 32, 64, 128)

#: The most keys that a program processes at a time. Splits are cut at multiples of this.
BLOCK_KEYS = 64

#: The row after those of stretches: 1 if decode makes the piece longer.
GROWS = 5


@dataclass(frozen=True, slots=True)
class Device:
    """The limits that tables are built for.

    Args:
        processors: Number of programs that run at the same time, at least.
        tile: The most rows of a tile.
        most_partials: The most bytes of partial results in a call.
    """

    processors: int
    tile: int = TILES[-1]
    most_partials: int = 256 * 2**20


@dataclass(frozen=True, slots=True)
class _Lanes:
    """Query rows by the shifts that they read at, in the order of the parts.

    Args:
        row, part, shift: Of each lane.
        first: True for the first lane of each part and shift.
        groups: Groups of lanes instead of rows.
    """

    row: Table
    part: Table
    shift: Table
    first: Flags
    groups: Groups


@dataclass(frozen=True, slots=True)
class Jobs:
    """Jobs with their lanes and pieces. ``lane_first`` and ``piece_first`` say where those of each job begin.

    Args:
        lanes: (2, lanes): row and shift.
        pieces: (6, pieces): the columns of stretches, and ``GROWS``.
        shared: (jobs,), True if the job is chunk-first.
    """

    lanes: Table
    lane_first: Table
    pieces: Table
    piece_first: Table
    shared: Flags

    def __len__(self) -> int:
        return self.shared.size

    @property
    def keys(self) -> Table:
        return sums(self.pieces[LENGTH], self.piece_first)


def jobs_of(plan: Plan, shape: Shape, device: Device, costs: CostModel) -> Jobs:
    """Return the jobs of a plan for layers of this shape."""
    lanes = _lanes(plan)
    stretches = np.vstack((lanes.groups.stretches, np.zeros_like(lanes.groups.stretches[0])))
    stretches[GROWS, lanes.groups.growing] = 1
    chosen = _chosen(plan, lanes, stretches, shape, device, costs)
    jobs = _joined(_together(lanes, stretches, chosen), _apart(plan, lanes, stretches, chosen))
    if shape.window is not None:
        jobs = _within(jobs, plan.positions, shape.window)
    return jobs


def _lanes(plan: Plan) -> _Lanes:
    """Split rows by the shifts that they read at, if that may let rows share keys. Else a row is a lane."""
    counts = np.array([part.rows for part in plan.parts])
    if not plan.share or not any(part.items[SHIFT].any() for part in plan.parts):
        part = np.repeat(np.arange(counts.size), counts)
        rows = np.arange(plan.rows)
        return _Lanes(rows, part, np.zeros_like(rows), np.diff(part, prepend=-1) > 0, plan.groups)
    tables = [part.items for part in plan.parts]
    part = np.repeat(np.arange(counts.size), [table.shape[1] for table in tables])
    items = np.hstack(tables)
    order = np.lexsort((items[SHIFT], part))
    items, part = items[:, order], part[order]
    new = np.append(True, (np.diff(part) != 0) | (np.diff(items[SHIFT]) != 0))
    reader_part, reader_shift = part[new], items[SHIFT, new]
    items[SHIFT] = 0
    rows_of = counts[reader_part]
    row = spread((np.cumsum(counts) - counts)[reader_part], rows_of)
    shift = np.repeat(reader_shift, rows_of)
    slots = np.where(shift == 0, plan.slots[row], -1)
    groups = group_items(items, np.cumsum(new) - 1, rows_of, slots)
    reader = np.repeat(np.arange(rows_of.size), rows_of)
    return _Lanes(row, np.repeat(reader_part, rows_of), shift, np.diff(reader, prepend=-1) > 0, groups)


def _chosen(plan: Plan, lanes: _Lanes, stretches: Table, shape: Shape, device: Device, costs: CostModel) -> Flags:
    """Return which groups are read together."""
    groups = lanes.groups
    readers = sums(lanes.first[groups.rows].astype(np.int64), groups.row_first)
    if not plan.share or not (readers > 1).any():
        return np.zeros(len(groups), dtype=bool)
    lengths = stretches[LENGTH]
    if shape.window is not None:
        reach = (plan.positions[lanes.row] - lanes.shift)[groups.rows]
        least = np.minimum.reduceat(reach, groups.row_first[:-1])
        lengths = lengths - _hidden(stretches, np.repeat(least, np.diff(groups.stretch_first)), shape.window)
    most = device.most_partials // shape.partial_bytes - plan.rows
    keys = sums(lengths, groups.stretch_first)
    return costs.choose(readers, np.diff(groups.row_first), keys, shape, device.tile, most)


def _together(lanes: _Lanes, stretches: Table, chosen: Flags) -> Jobs:
    """Make one job of each chosen group."""
    groups, number = lanes.groups, np.flatnonzero(chosen)
    rows, count = np.diff(groups.row_first)[number], np.diff(groups.stretch_first)[number]
    lane = groups.rows[spread(groups.row_first[number], rows)]
    pieces = stretches[:, spread(groups.stretch_first[number], count)]
    return Jobs(
        np.stack((lanes.row[lane], lanes.shift[lane])),
        firsts(rows),
        pieces,
        firsts(count),
        np.ones_like(chosen)[number],
    )


def _apart(plan: Plan, lanes: _Lanes, stretches: Table, chosen: Flags) -> Jobs:
    """Make one job of each part, with the pieces of all its groups that were not chosen."""
    groups = lanes.groups
    group = np.repeat(np.arange(len(groups)), np.diff(groups.row_first))
    taken = lanes.first[groups.rows] & ~chosen[group]
    group, lane = group[taken], groups.rows[taken]
    count = np.diff(groups.stretch_first)[group]
    part = np.repeat(lanes.part[lane], count)
    pieces = stretches[:, spread(groups.stretch_first[group], count)]
    pieces[SHIFT] += np.repeat(lanes.shift[lane], count)
    order = np.argsort(part, kind="stable")
    counts = np.array([each.rows for each in plan.parts])
    rows = np.arange(plan.rows)
    return Jobs(
        np.stack((rows, np.zeros_like(rows))),
        firsts(counts),
        pieces[:, order],
        firsts(np.bincount(part, minlength=counts.size)),
        np.zeros(counts.size, dtype=bool),
    )


def _joined(one: Jobs, other: Jobs) -> Jobs:
    return Jobs(
        np.hstack((one.lanes, other.lanes)),
        np.concatenate((one.lane_first, one.lane_first[-1] + other.lane_first[1:])),
        np.hstack((one.pieces, other.pieces)),
        np.concatenate((one.piece_first, one.piece_first[-1] + other.piece_first[1:])),
        np.concatenate((one.shared, other.shared)),
    )


def _within(jobs: Jobs, positions: Table, window: int) -> Jobs:
    """Drop keys that lie before the windows of all lanes of their job."""
    reach = positions[jobs.lanes[0]] - jobs.lanes[1]
    least = np.minimum.reduceat(reach, jobs.lane_first[:-1])
    number = np.repeat(np.arange(len(jobs)), np.diff(jobs.piece_first))
    hidden = _hidden(jobs.pieces, least[number], window)
    pieces = jobs.pieces.copy()
    pieces[FIRST] += hidden
    pieces[POSITION] += hidden
    pieces[LENGTH] -= hidden
    left = pieces[LENGTH] > 0
    counts = np.bincount(number[left], minlength=len(jobs))
    return replace(jobs, pieces=pieces[:, left], piece_first=firsts(counts))


def _hidden(pieces: Table, least: Table, window: int) -> Table:
    """Return how many keys of each piece lie before the window of a row at position ``least``."""
    return np.asarray(np.clip(least - window + 1 - pieces[POSITION] - pieces[SHIFT], 0, pieces[LENGTH]))


def sums(values: Table, first: Table) -> Table:
    """Return the sums of ``values[first[i] : first[i + 1]]``, 0 for an empty range."""
    totals = np.concatenate(([0], np.cumsum(values)))
    return np.asarray(totals[first[1:]] - totals[first[:-1]])


def firsts(counts: Table) -> Table:
    """Return the beginning of each run of ``counts`` items, and the end of the last one."""
    return np.concatenate(([0], np.cumsum(counts)))
