"""A prompt of many pieces: the cost of its layout grows linearly, and its parts see the right tokens."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from inlay import Prompt, Schema
from inlay.attention import plan
from inlay.attention.plan import Item, Part, PlanContext, build_plan, items_at
from inlay.engine.allocation import Prefill, SequenceAllocation, Work, scattered
from inlay.slots import SlotRange
from tests.counting import calls_of
from tests.model.engine.driving import Driver, check_stock


def test_parts_of_a_growing_context_see_earlier_items_only():
    rng = np.random.default_rng(0)
    context, items, position, slot = PlanContext(), [], 0, 0
    parts: list[tuple[Part, Part]] = []
    for number in range(60):
        length = int(rng.integers(1, 4))
        slot += int(rng.integers(0, 3))
        own = [SlotRange(slot, length)]
        if number % 2:
            before = np.hstack([plan.table_of([item]) for item in items])
            parts.append((Part.of(position, length, context.table, own), Part.of(position, length, before, own)))
        added = items_at(own, position)
        if number % 5 == 0:
            added = (Item(own[0], position, shift=3, left_out=(slot,)),)
        context.extend(added)
        items += added
        position, slot = position + length, slot + length
    for part, expected in parts:  # asked for when much has been added
        assert part.items.tolist() == expected.items.tolist()
        assert part.pairs == expected.pairs


def seen_by_rows(parts):
    """Of each row the slots that it sees, by their positions as it reads them."""
    rows = []
    for part in parts:
        for position in part.positions.tolist():
            seen = []
            for first, length, start, shift, masked in part.items.T.tolist():
                keys = [(start + shift + n, first + n, shift) for n in range(length)]
                seen += [key for key in keys if not masked or key[0] <= position]
            rows.append((position, sorted(seen)))
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_merged_parts_equal_their_parts(seed):
    """Text, modules at shifts, and recomputed tokens among the others of a module."""
    rng = np.random.default_rng(seed)
    context, parts, at, slot = PlanContext(), [], 0, 0
    for _ in range(12):
        length = int(rng.integers(1, 9))
        lies = SlotRange(slot + int(rng.integers(0, 2)), length)
        slot = lies.end
        if rng.random() < 0.4:
            parts.append(Part.of(at, length, context.table, [lies]))
            context.extend(items_at([lies], at))
        else:
            shift = int(rng.integers(0, at + 1))
            recomputed = np.flatnonzero(rng.random(length) < 0.4)
            left_out = tuple((lies.first + recomputed).tolist())
            context.extend([Item(lies, at - shift, shift, left_out=left_out)])
            if recomputed.size:
                own = SlotRange(slot, recomputed.size)
                slot = own.end
                parts.append(Part.at(at + recomputed, context.table, [own], among=True))
                context.extend(scattered([own], at + recomputed))
        at += length + int(rng.integers(0, 3))
    one = Part.joined(parts)
    assert one.slots.tolist() == [each for part in parts for each in part.slots.tolist()]
    assert seen_by_rows([one]) == seen_by_rows(parts)
    first, rest = one.split(one.rows // 2) if one.rows > 1 else (one, one)
    assert seen_by_rows([first, rest])[: one.rows] == seen_by_rows(parts)


def test_recomputed_tokens_of_many_modules_run_together():
    context, prefill, slot = PlanContext(), [], 0
    for number in range(50):
        context.extend([Item(SlotRange(slot, 9), 0, shift=10 * number, left_out=(slot + 4,))])
        own = SlotRange(slot + 10, 1)
        part = Part.at(np.array([10 * number + 4]), context.table, [own], among=True)
        prefill.append(Prefill(Work((7,), part), None, (), None))
        context.extend(items_at([own], 10 * number + 4))
        slot += 20
    allocation = SequenceAllocation(prefill=prefill)
    taken, completed = allocation.take(30)
    assert ([work.part.rows for work in taken], len(completed)) == ([30], 30)
    taken, completed = allocation.take(30)
    assert ([work.part.rows for work in taken], len(completed)) == ([20], 20)
    assert len(build_plan([taken[0].part]).groups) == 1


def test_span_is_converted_to_numbers_once(monkeypatch: pytest.MonkeyPatch):
    converted = calls_of(monkeypatch, plan, "table_of")
    context = PlanContext()
    parts = []
    for number in range(500):
        context.extend(items_at([SlotRange(2 * number, 1)], number))
        parts.append(Part.of(number + 1, 1, context.table, [SlotRange(5000 + 2 * number, 1)]))
    assert sum(len(items) for (items,) in converted) == 500
    assert [part.items.shape[1] for part in parts[::100]] == [number + 2 for number in range(0, 500, 100)]


@pytest.mark.parametrize("among", [False, True])
def test_queued_parts_hold_no_tables(among):
    tracemalloc.start()
    try:
        context, parts = PlanContext(), []
        for number in range(1000):
            context.extend(items_at([SlotRange(2 * number, 1)], number))
            own = [SlotRange(5000 + 2 * number, 1)]
            parts.append(Part.at(np.array([number + 1]), context.table, own, among=among))
        waiting, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    tables = sum(part.items.nbytes for part in parts)
    assert waiting < tables / 10


def test_encoded_modules_read_shared_text_once(monkeypatch: pytest.MonkeyPatch):
    """Of a schema with text between its modules, each of which sees all text before it."""
    converted = calls_of(monkeypatch, plan, "table_of")
    driver = Driver(max_num_batched_tokens=512)
    pieces = "".join(f'No. {n}: <module name="m{n}">It is {n}.</module>' for n in range(40))
    _, specs = driver.llm.schemas.add(
        Schema.from_string(f'<schema name="s">{pieces}</schema>'), driver.llm.policy("anchored")
    )
    driver.encode(specs)
    assert sum(len(items) for (items,) in converted) <= 2 * len(specs), "once a batch"
    request = driver.request(Prompt.from_string('<prompt schema="s"><m3/><m39/>Well?</prompt>'), 4, reuse="exact")
    driver.run(request)
    check_stock(driver, request)
