"""The work tables: every row reads the keys of its parts exactly once, in any grouping."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.attention.plan import Item, Part, Plan, build_plan
from inlay.attention.triton.tables import (
    BLOCK_KEYS,
    LEAST_SPLIT,
    TILES,
    CostModel,
    Device,
    Shape,
    WorkTables,
    build_tables,
    coefficients,
)
from inlay.errors import ParameterError
from inlay.slots import SlotRange
from tests.model.attention.triton.cases import SHARING
from tests.raising import raises
from tests.unit.attention.kernel_cases import random_parts

SHAPE = Shape(heads=4, kv_heads=2, head_dim=64, itemsize=2)
DEVICE = Device(processors=8)

Reading = tuple[int, int, int, int]  # row, slot, position as encoded, shift


def covered(plan: Plan, tables: WorkTables, window: int | None = None) -> Iterator[Reading]:
    """The keys that the work items read for the rows."""
    for first, lanes, begin, end, _ in tables.work.tolist():
        for row, lane_shift, turn in tables.lanes[first : first + lanes].tolist():
            for slot, length, position, shift, masked, piece_turn, _ in tables.pieces[begin:end].tolist():
                total = lane_shift + shift
                assert tables.shifts[turn + piece_turn] == total
                for n in range(length):
                    behind = plan.positions[row] - (position + total + n)
                    if (not masked or behind >= 0) and (window is None or behind < window):
                        yield row, slot + n, position + n, total


def wanted(plan: Plan, window: int | None = None) -> Iterator[Reading]:
    """The keys of the parts."""
    row = 0
    for part in plan.parts:
        for at in part.positions.tolist():
            for slot, length, position, shift, masked in part.items.T.tolist():
                for n in range(length):
                    behind = at - (position + shift + n)
                    if (not masked or behind >= 0) and (window is None or behind < window):
                        yield row, slot + n, position + n, shift
            row += 1


@given(
    seed=st.integers(0, 2**32), decode=st.booleans(), share=st.booleans(), longest=st.sampled_from([5, 90]),
    window=st.sampled_from([None, None, 30]), group=st.sampled_from([1, 2, 24, 200]),
    processors=st.sampled_from([1, 200]),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_every_key_is_read_once_by_every_row_that_asks(seed, decode, share, longest, window, group, processors):
    plan = build_plan(random_parts(seed, decode=decode, longest=longest, keys=12), share=share)
    shape = Shape(2 * group, 2, 64, 2, window)
    tables = build_tables(plan, shape, Device(processors), SHARING)
    assert Counter(covered(plan, tables, window)) == Counter(wanted(plan, window))
    check_results(plan, tables)


def check_results(plan: Plan, tables: WorkTables) -> None:
    """Every row's result is written at once by one work item, or merged of partial results that are its own."""
    written, partial = Counter[int](), dict[int, int]()
    for first, lanes, _, _, at in tables.work.tolist():
        for n, row in enumerate(tables.lanes[first : first + lanes, 0].tolist()):
            if at < 0:
                written[row] += 1
            else:
                assert at + n not in partial
                partial[at + n] = row
    assert sorted(partial) == list(range(tables.partials))
    for row, begin, end in zip(
        tables.merged_rows.tolist(), tables.merged_first[:-1].tolist(), tables.merged_first[1:].tolist(), strict=True
    ):
        assert {partial[index] for index in tables.merged_index[begin:end].tolist()} == {row}
        written[row] += 1
    assert len(tables.merged_index) == tables.partials
    assert written == Counter(range(plan.rows))


def test_tiles_are_as_high_as_the_lanes_need():
    """Four rows of 8 heads to one of keys, with 200 rows in a part."""
    plan = build_plan([Part.of(0, rows, (), (SlotRange(300 * n, rows),)) for n, rows in enumerate((1, 4, 7, 200))])
    tables = build_tables(plan, Shape(8, 1, 64, 2), DEVICE, SHARING)
    assert {launch.tile: launch.count for launch in tables.launches} == {16: 1, 32: 1, 64: 1, 128: 13}
    assert sorted(launch.tile for launch in tables.launches) == list(TILES)


def shared_by(rows: int, keys: int, shift: int = 0) -> Plan:
    """Decode steps that read the same keys, each at a further shift, and one of their own."""
    return build_plan(
        [
            Part.of(keys + n * shift, 1, (Item(SlotRange(0, keys), 0, n * shift),), (SlotRange(keys + n, 1),))
            for n in range(rows)
        ]
    )


@pytest.mark.parametrize("shift", [0, 7])
def test_keys_are_read_once_for_all_whatever_their_shifts(shift):
    tables = build_tables(shared_by(16, 1000, shift), SHAPE, Device(processors=1), SHARING)
    assert tables.shared_keys == 1000
    assert tables.pieces[:, 1].sum() == 1000 + 16
    assert tables.partials == 32


def test_few_heads_are_split_to_fill_the_device():
    for processors, splits in ((1, 1), (16, 16), (10_000, 8192 // LEAST_SPLIT)):
        tables = build_tables(shared_by(1, 8191), SHAPE, Device(processors), SHARING)
        assert len(tables.work) == splits
        assert (tables.pieces[:-1, 1] % BLOCK_KEYS == 0).all()


def test_partial_results_stay_within_their_bound():
    for most in (2**12, 2**16, 2**20):
        plan = build_plan(
            [Part.of(64, 40, (Item(SlotRange(0, 64), 0),), (SlotRange(64 + 40 * n, 40),)) for n in range(24)]
        )
        tables = build_tables(plan, SHAPE, Device(1000, most_partials=most), SHARING)
        assert tables.partials * SHAPE.partial_bytes <= most
    assert tables.shared_keys == 0
    assert build_tables(plan, SHAPE, Device(1000, most_partials=2**22), SHARING).shared_keys == 64


def test_sharing_is_used_if_the_cost_model_says_faster():
    costs = CostModel()
    chosen = {
        (rows, keys): build_tables(shared_by(rows, keys), SHAPE, DEVICE, costs).shared_keys > 0
        for rows in (1, 2, 8, 64) for keys in (16, 128, 1024, 8192, 2**17)
    }  # fmt: skip
    assert chosen[64, 8192]
    assert not any(chosen[1, keys] for keys in (16, 128, 1024, 8192))
    for (rows, keys), together in chosen.items():
        lanes, length = np.array([rows]), np.array([keys])
        gain = costs.apart(lanes, length, SHAPE) - costs.together(lanes, length, SHAPE, DEVICE.tile)
        assert together == (rows > 1 and gain[0] > 2 * costs.launch_s)


@given(
    byte=st.floats(1e-14, 1e-11), partial=st.floats(0, 1e-11), multiply=st.floats(0, 1e-13), launch=st.floats(0, 1e-4),
    rows=st.integers(1, 40), keys=st.integers(1, 3000),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_sharing_is_not_used_if_the_cost_model_says_slower(byte, partial, multiply, launch, rows, keys):
    costs = CostModel(byte_s=byte, partial_byte_s=partial, multiply_s=multiply, launch_s=launch)
    tables = build_tables(shared_by(rows, keys), SHAPE, DEVICE, costs)
    lanes, length = np.array([rows]), np.array([keys])
    if costs.together(lanes, length, SHAPE, DEVICE.tile)[0] >= costs.apart(lanes, length, SHAPE)[0]:
        assert tables.shared_keys == 0


def test_coefficients_are_read_from_the_file_that_the_environment_names(tmp_path, monkeypatch):
    file = tmp_path / "costs.json"
    measured = replace(CostModel(), launch_s=1e-6, measured_on="a device")
    measured.write(file)
    assert coefficients() == CostModel()
    monkeypatch.setenv("INLAY_TRITON_COSTS", str(file))
    assert coefficients() == measured
    for text, code in (
        ("{", "parameter.invalid_costs"),
        (json.dumps({"byte": 1}), "parameter.invalid_costs"),
        (json.dumps({"byte_s": -1}), "parameter.out_of_range"),
    ):
        file.write_text(text)
        with raises(code, ParameterError):
            coefficients()
