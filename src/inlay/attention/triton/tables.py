"""The work tables of a plan: the work of each program of the attention kernel, for one kind of layer.

Jobs (jobs.py) are cut into tiles of lanes and splits of keys. A tile against a split is one *work item*.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from inlay.attention.grouping import FIRST, LENGTH, POSITION, SHIFT, Table, spread
from inlay.attention.plan import Plan
from inlay.attention.triton.cost import CostModel, Flags, Shape
from inlay.attention.triton.jobs import BLOCK_KEYS, GROWS, TILES, Device, Jobs, firsts, jobs_of, sums

Ints = npt.NDArray[np.int32]

#: The least number of keys of a split, unless a job has fewer.
LEAST_SPLIT = 256


@dataclass(frozen=True, slots=True)
class Launch:
    """A range of work items with tiles of the same height."""

    tile: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class WorkTables:
    """The tables that the kernels read: int32, one row for each entry.

    Args:
        work: First lane, number of lanes, first piece, end of the pieces, first partial result. The last is -1 if the
            output is written directly.
        lanes: Query row, shift, turn.
        pieces: First slot, length, position, shift, masked, turn, and 1 if decode makes the piece longer.
        merged_rows, merged_first, merged_index: See ``kernels.merge``.
        shifts: The shift of each turn. Turn 0 is shift 0.
        launches: The ranges of work items to launch.
        partials: The number of partial results.
    """

    work: Ints
    lanes: Ints
    pieces: Ints
    merged_rows: Ints
    merged_first: Ints
    merged_index: Ints
    shifts: tuple[int, ...]
    launches: tuple[Launch, ...]
    partials: int
    shared_keys: int  # keys that are read for several parts at once


@dataclass(frozen=True, slots=True)
class Room:
    """The capacity of the tables of a recorded pass. Tables of other plans can replace them if they fit.

    Args:
        work: (tile height, number of work items) for each height.
        lanes, pieces, merged, partials, shifts: Numbers of rows; see WorkTables.
    """

    work: tuple[tuple[int, int], ...]
    lanes: int
    pieces: int
    merged: int
    partials: int
    shifts: int

    @classmethod
    def around(cls, tables: WorkTables) -> Room:
        """Return room for these tables and somewhat larger ones."""
        return cls(
            work=tuple((launch.tile, _rounded(launch.count)) for launch in tables.launches),
            lanes=_rounded(len(tables.lanes)),
            pieces=_rounded(len(tables.pieces)),
            merged=_rounded(len(tables.merged_rows)),
            partials=_rounded(tables.partials),
            shifts=_rounded(len(tables.shifts)),
        )

    def fill(self, tables: WorkTables) -> WorkTables | None:
        """Return the tables padded to this room, with entries that do nothing. None if they do not fit."""
        count = {launch.tile: launch for launch in tables.launches}
        fits = (
            count.keys() <= dict(self.work).keys()
            and all(tile not in count or count[tile].count <= most for tile, most in self.work)
            and len(tables.lanes) <= self.lanes
            and len(tables.pieces) <= self.pieces
            and len(tables.merged_rows) <= self.merged
            and tables.partials <= self.partials
            and len(tables.shifts) <= self.shifts
        )
        if not fits:
            return None
        nothing, first = np.array([0, 0, 0, 0, -1], dtype=np.int32), 0
        work, launches = list[Ints](), list[Launch]()
        for tile, most in self.work:
            of = count.get(tile, Launch(tile, 0, 0))
            launches.append(Launch(tile, first, most))
            first += most
            work.append(_filled(tables.work[of.first : of.first + of.count], most, nothing))
        zeros = np.zeros(7, dtype=np.int32)
        return replace(
            tables,
            work=np.concatenate(work),
            lanes=_filled(tables.lanes, self.lanes, zeros[:3]),
            pieces=_filled(tables.pieces, self.pieces, zeros),
            merged_rows=_filled(tables.merged_rows, self.merged, np.int32(-1)),
            merged_first=_filled(tables.merged_first, self.merged + 1, tables.merged_first[-1]),
            merged_index=_filled(tables.merged_index, self.partials, np.int32(0)),
            shifts=tables.shifts + (0,) * (self.shifts - len(tables.shifts)),
            launches=tuple(launches),
            partials=self.partials,
        )


def build_tables(plan: Plan, shape: Shape, device: Device, costs: CostModel) -> WorkTables:
    """Return the tables of a plan for layers of this shape."""
    return _cut(jobs_of(plan, shape, device, costs), plan.rows, shape, device)


def _cut(jobs: Jobs, rows: int, shape: Shape, device: Device) -> WorkTables:
    """Cut jobs into tiles and splits. The length of a split doubles until the partial results fit into their memory."""
    lanes = np.diff(jobs.lane_first)
    height = head_tile(shape, device)
    heights = np.array([tile for tile in TILES if tile <= device.tile])
    tile = heights[np.minimum(np.searchsorted(heights, lanes * height), heights.size - 1)]
    tiles = -(-lanes // (tile // height))
    programs = shape.kv_heads * -(-shape.group // height)
    even = int((tiles * jobs.keys).sum()) * programs // (2 * device.processors)
    split = -(-max(LEAST_SPLIT, even) // BLOCK_KEYS) * BLOCK_KEYS
    most = device.most_partials // shape.partial_bytes
    while True:
        splits = -(-jobs.keys // split)
        direct = _direct(jobs, splits, rows)
        partials = int((lanes * splits)[~direct].sum())
        if partials <= most or (splits <= 1).all():
            break
        split *= 2
    return _tables(jobs, tile, tile // height, splits, split, direct)


def head_tile(shape: Shape, device: Device) -> int:
    """Return how many query heads of one head of keys are in a tile."""
    return min(shape.group, device.tile)


def _direct(jobs: Jobs, splits: Table, rows: int) -> Flags:
    """Return which jobs compute the full result of their rows, without a merge."""
    job = np.repeat(np.arange(len(jobs)), np.diff(jobs.lane_first))
    results = np.bincount(jobs.lanes[0], weights=splits[job], minlength=rows)
    return np.asarray(np.logical_and.reduceat(results[jobs.lanes[0]] == 1, jobs.lane_first[:-1]))


def _tables(jobs: Jobs, tile: Table, tile_lanes: Table, splits: Table, split: int, direct: Flags) -> WorkTables:
    pieces, unit_first = _split(jobs, splits, split)
    job_of_unit = np.repeat(np.arange(len(jobs)), splits)
    lanes = np.diff(jobs.lane_first)
    tiles = (-(-lanes // tile_lanes))[job_of_unit]
    unit = np.repeat(np.arange(job_of_unit.size), tiles)
    job = job_of_unit[unit]
    before = spread(np.zeros_like(tiles), tiles) * tile_lanes[job]
    count = np.minimum(tile_lanes[job], lanes[job] - before)
    first_lane = jobs.lane_first[job] + before
    kept = np.where(direct[job], 0, count)
    partial = np.where(direct[job], -1, np.cumsum(kept) - kept)
    work = np.stack((first_lane, count, unit_first[unit], unit_first[unit + 1], partial))
    keys = sums(pieces[LENGTH], unit_first)[unit]
    order = np.lexsort((-keys, tile[job]))  # the longest first
    used, first = np.unique(tile[job][order], return_index=True)
    ends = np.append(first[1:], order.size)
    shifts, lane_turn, piece_turn = _turns(jobs.lanes[1], pieces[SHIFT])
    rows, row_first, index = _merges(jobs.lanes[0][spread(first_lane, kept)])
    return WorkTables(
        work=_ints(work[:, order].T),
        lanes=_ints(np.vstack((jobs.lanes, lane_turn)).T),
        pieces=_ints(np.vstack((pieces[:GROWS], piece_turn, pieces[GROWS])).T),
        merged_rows=_ints(rows),
        merged_first=_ints(row_first),
        merged_index=_ints(index),
        shifts=shifts,
        launches=tuple(Launch(int(t), int(f), int(e - f)) for t, f, e in zip(used, first, ends, strict=True)),
        partials=int(kept.sum()),
        shared_keys=int(jobs.keys[jobs.shared].sum()),
    )


def _split(jobs: Jobs, splits: Table, split: int) -> tuple[Table, Table]:
    """Cut pieces at the ends of splits. Returns the pieces, and where those of each split of each job begin."""
    job = np.repeat(np.arange(len(jobs)), np.diff(jobs.piece_first))
    length = jobs.pieces[LENGTH]
    ends = np.cumsum(length)
    begin = ends - length
    begin = begin - np.append(begin, 0)[np.minimum(jobs.piece_first[:-1], begin.size)][job]
    first = begin // split
    count = (begin + length - 1) // split - first + 1
    source, number = np.repeat(np.arange(job.size), count), spread(first, count)
    low = np.maximum(number * split - begin[source], 0)
    high = np.minimum((number + 1) * split - begin[source], length[source])
    pieces = jobs.pieces[:, source]
    pieces[FIRST] += low
    pieces[POSITION] += low
    pieces[LENGTH] = high - low
    pieces[GROWS] *= high == length[source]
    unit = firsts(splits)[job[source]] + number
    return pieces, np.searchsorted(unit, np.arange(int(splits.sum()) + 1))


def _turns(lanes: Table, pieces: Table) -> tuple[tuple[int, ...], Table, Table]:
    """Return the shifts, and the turn of each lane and piece: its index among the shifts, 0 for no shift."""
    shifts = np.unique(np.concatenate((lanes, pieces)))
    shifts = shifts[shifts != 0]
    lane, piece = (np.where(of == 0, 0, np.searchsorted(shifts, of) + 1) for of in (lanes, pieces))
    return (0, *shifts.tolist()), lane, piece


def _merges(row_of_partial: Table) -> tuple[Table, Table, Table]:
    """Return the rows with partial results, where the results of each row begin, and their indices."""
    index = np.argsort(row_of_partial, kind="stable")
    rows, first = np.unique(row_of_partial[index], return_index=True)
    return rows, np.append(first, index.size), index


def _rounded(count: int) -> int:
    """Return the next power of two, or 0 for 0."""
    return 0 if count == 0 else 1 << (count - 1).bit_length()


def _filled(table: Ints, length: int, row: Any) -> Ints:
    """Pad a table with copies of ``row`` to ``length``."""
    return np.concatenate((table, np.broadcast_to(row, (length - len(table), *table.shape[1:]))), dtype=np.int32)


def _ints(table: Table) -> Ints:
    return np.ascontiguousarray(table, dtype=np.int32)
