"""How a plan is grouped, by the keys that its groups read for each row."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.attention.plan import LONG, Groups, Item, Part, advance, build_plan, items_at
from inlay.slots import SlotRange, cut
from tests.generated import examples
from tests.unit.attention.kernel_cases import Asked, one_on, random_asked

asked_of = st.builds(
    random_asked, st.integers(0, 2**32), decode=st.booleans(), longest=st.sampled_from([3, 9, 90]), keys=st.just(12)
)

Reading = tuple[int, int, int, int]  # row, slot, position as encoded, shift
Block = tuple[list[int], list[tuple[int, ...]]]  # rows; stretches: first slot, length, position, shift, masked


def parts_of(asked: Sequence[Asked]) -> list[Part]:
    return [Part.of(*each) for each in asked]


def blocks_of(groups: Groups) -> list[Block]:
    rows, stretches = groups.row_first, groups.stretch_first
    return [
        (
            groups.rows[rows[n] : rows[n + 1]].tolist(),
            [tuple(s) for s in groups.stretches[:, stretches[n] : stretches[n + 1]].T.tolist()],
        )
        for n in range(len(groups))
    ]


def wanted(asked: Sequence[Asked]) -> Iterator[Reading]:
    """The keys that the rows read, by the definition of a part."""
    row = 0
    for part in asked:
        for index in range(part.length):
            for item in (*part.context, *items_at(cut(part.slots, 0, index + 1), part.start)):
                for n in range(item.slots.length):
                    yield row, item.slots.first + n, item.position + n, item.shift
            row += 1


def covered(asked: Sequence[Asked], blocks: list[Block]) -> Iterator[Reading]:
    """The keys that the groups read for the rows."""
    positions = [part.start + index for part in asked for index in range(part.length)]
    for rows, stretches in blocks:
        for slot, length, start, shift, masked in stretches:
            for row in rows:
                for n in range(length):
                    if not masked or start + shift + n <= positions[row]:
                        yield row, slot + n, start + n, shift


def owners(asked: Sequence[Asked]) -> list[int]:
    """The part of every row."""
    return [number for number, part in enumerate(asked) for _ in range(part.length)]


@given(asked=asked_of, share=st.booleans())
@settings(max_examples=examples(150), deadline=None)
def test_every_key_is_read_once_by_every_row_that_needs_it(asked, share):
    blocks = blocks_of(build_plan(parts_of(asked), share=share).groups)
    assert Counter(covered(asked, blocks)) == Counter(wanted(asked))


@given(asked=asked_of)
@settings(max_examples=examples(80), deadline=None)
def test_part_is_grouped_alone_as_in_a_batch(asked):
    for number, one in enumerate(asked):
        alone = blocks_of(build_plan(parts_of([one])).groups)
        first = sum(part.length for part in asked[:number])
        beside = blocks_of(build_plan(parts_of(asked), share=False).groups)
        assert alone == [([row - first for row in rows], found) for rows, found in beside if rows[0] == first]


@given(asked=asked_of)
@settings(max_examples=examples(150), deadline=None)
def test_sharing_is_maximal(asked):
    """All rows of short parts that read a key at a shift stand in one group, and no two groups have the same rows."""
    blocks, owner = blocks_of(build_plan(parts_of(asked)).groups), owners(asked)
    holders = defaultdict(list)
    for number, (rows, stretches) in enumerate(blocks):
        if asked[owner[rows[0]]].length >= LONG:
            assert len({owner[row] for row in rows}) == 1
            continue
        for slot, length, start, shift, masked in stretches:
            for n in range(length):
                holders[slot + n, start + n, shift, masked].append(number)
    assert all(len(numbers) == 1 for numbers in holders.values())
    assert len({tuple(rows) for rows, _ in blocks}) == len(blocks)


@given(asked=asked_of)
@settings(max_examples=examples(80), deadline=None)
def test_nothing_is_shared_by_default(asked):
    owner = owners(asked)
    for rows, _ in blocks_of(build_plan(parts_of(asked), share=False).groups):
        assert len({owner[row] for row in rows}) == 1


def test_thirty_adjacent_segments_are_one_range():
    context = tuple(Item(SlotRange(10 * n, 10), 10 * n) for n in range(30))
    parts = [Part.of(300, 1, context, (SlotRange(slot, 1),)) for slot in (300, 310)]
    assert sorted(blocks_of(build_plan(parts).groups)) == [
        ([0], [(300, 1, 300, 0, 0)]),
        ([0, 1], [(0, 300, 0, 0, 0)]),
        ([1], [(310, 1, 300, 0, 0)]),
    ]


@given(seed=st.integers(0, 2**32), share=st.booleans())
@settings(max_examples=examples(80), deadline=None)
def test_advanced_plan_covers_the_same_keys_as_a_new_one(seed, share):
    asked = random_asked(seed, decode=True, keys=12)
    plan = build_plan(parts_of(asked), share=share)
    for _ in range(6):
        plan = advance(plan, [one_on(part) for part in plan.parts])
        asked = [
            Asked(e.start + 1, 1, (*e.context, Item(e.slots[0], e.start)), (SlotRange(e.slots[0].first + 1, 1),))
            for e in asked
        ]
        assert Counter(covered(asked, blocks_of(plan.groups))) == Counter(wanted(asked))
