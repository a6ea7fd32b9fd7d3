"""The work tables of a plan: the work of each program of the attention kernel, for one kind of layer.

Jobs are cut into tiles of lanes and splits of keys. A tile against a split is one *work item*.

A *lane* is a query row that reads at one shift. A *piece* is a range of slots at consecutive positions. A *job* is a
set of lanes that read a list of pieces. In a chunk-first job, lanes of several requests read the same keys, each at its
own shift. A sequence-first job has the rows of one part and the keys that only this part reads. The code is vectorized
over whole columns, because a pass can have tens of thousands of pieces.

A cost model of a pass on the device decides which rows read keys together. Reading keys together (chunk-first) saves
memory traffic. It costs partial results, which are written, read again and merged. ``lab/benchmarks/gpu/calibrate.py``
measures the coefficients. Sharing is never chosen if the model predicts that it is slower.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from inlay.attention.plan import FIRST, LENGTH, POSITION, SHIFT, Groups, Plan, Table, group_items, spread
from inlay.errors import ParameterError

Counts = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Seconds = npt.NDArray[np.float64]

#: Environment variable with the path of a file of coefficients that were measured on this machine.
VARIABLE = "INLAY_TRITON_COSTS"


@dataclass(frozen=True, slots=True)
class Shape:
    """The heads of a layer.

    Args:
        itemsize: Bytes of a stored number.
        window: See AttentionOptions.
        wide: True if products are in fp32.
    """

    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    window: int | None = None
    wide: bool = False

    @property
    def group(self) -> int:
        """How many query heads read one head of keys."""
        return self.heads // self.kv_heads

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.kv_heads * self.head_dim * self.itemsize

    @property
    def partial_bytes(self) -> int:
        """Bytes of the partial results of one row, fp32."""
        return self.heads * (self.head_dim + 1) * 4


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients in seconds.

    Args:
        byte_s: For a byte of keys and values read from memory.
        cached_byte_s: For a byte that another tile of the same keys has just read.
        partial_byte_s: For a byte of a partial result, written and read again.
        multiply_s: For one multiplication or one addition of a matrix product.
        launch_s: For one more kernel.
        work_s: For one more work item.
        measured_on: Name of the device. None for coefficients that were not measured.
    """

    byte_s: float = 1 / 2.5e12
    cached_byte_s: float = 1 / 6e12
    partial_byte_s: float = 2 / 2.0e12
    multiply_s: float = 1 / 1.5e14
    launch_s: float = 4e-6
    work_s: float = 2e-8
    measured_on: str | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "measured_on" and not (isinstance(value, int | float) and 0 <= value < 1):
                raise ParameterError(
                    f"the cost {name} is {value!r}; it must be seconds, at least 0 and below 1",
                    code="parameter.out_of_range",
                )

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> CostModel:
        """Read coefficients that ``write`` has saved. Raises ParameterError."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ParameterError(
                f"{path}: the costs cannot be read ({error}); measure them with lab/benchmarks/gpu/calibrate.py",
                code="parameter.invalid_costs",
            ) from error
        names = {field.name for field in fields(cls)}
        if not isinstance(found, dict) or not names >= set(found):
            raise ParameterError(
                f"{path}: these are no costs; an object with some of {', '.join(sorted(names))} is",
                code="parameter.invalid_costs",
            )
        return cls(**found)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Save the coefficients as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def together(self, lanes: Counts, keys: Counts, shape: Shape, tile: int) -> Seconds:
        """Return the seconds of groups with lanes that read their keys together, partial results included.

        Args:
            lanes, keys: (groups,), the numbers of lanes and keys.
            tile: The most rows of a tile.
        """
        rows = lanes * shape.group
        tiles = -(-rows // tile)
        memory = keys * shape.key_bytes * (self.byte_s + (tiles - 1) * self.cached_byte_s)
        products = 2.0 * tiles * tile * keys * shape.kv_heads * shape.head_dim * self.multiply_s
        merged = lanes * shape.partial_bytes * self.partial_byte_s
        return np.asarray(np.maximum(memory, products) + merged + tiles * shape.kv_heads * self.work_s)

    def apart(self, parts: Counts, keys: Counts, shape: Shape) -> Seconds:
        """Return the seconds that the same groups take if each part reads the keys alone, beside its other keys."""
        return np.asarray(parts * keys * (shape.key_bytes * self.byte_s), dtype=np.float64)

    def choose(self, parts: Counts, lanes: Counts, keys: Counts, shape: Shape, tile: int, most_partials: int) -> Flags:
        """Return which groups are read together.

        Args:
            parts, lanes, keys: (groups,), the numbers of parts, lanes and keys.
            most_partials: The most lanes that may leave a partial result. Groups with the largest gain go first.
        """
        gain = self.apart(parts, keys, shape) - self.together(lanes, keys, shape, tile)
        gain[parts < 2] = 0
        chosen = np.zeros(parts.size, dtype=bool)
        order = np.argsort(-gain, kind="stable")
        order = order[gain[order] > 0]
        chosen[order[np.cumsum(lanes[order]) <= most_partials]] = True
        if gain[chosen].sum() <= 2 * self.launch_s:  # one more kernel for their tiles, and one that merges
            chosen[:] = False
        return chosen


def coefficients() -> CostModel:
    """Return the coefficients measured on this machine (file named by INLAY_TRITON_COSTS), else the defaults."""
    path = os.environ.get(VARIABLE)
    return CostModel.read(path) if path else CostModel()


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
    """Cut jobs into tiles of lanes and splits of keys, and return the tables.

    A split begins with the keys that keep all processors busy. Its length doubles until the partial results of all
    splits fit into ``device.most_partials``.

    Args:
        jobs: the lanes and the pieces that they read.
        rows: the number of rows of the plan.
        shape: of the layers.
        device: its limits.
    """
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
