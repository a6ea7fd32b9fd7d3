"""Passes that are recorded and replayed, with a recorder that calls them again in place of CUDA's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from inlay.attention.plan import Item, Part, Plan, advance, build_plan
from inlay.attention.triton.tables import Device, Room, Shape, build_tables
from inlay.engine.allocation import Work
from inlay.engine.runner import SIZES, PassGraphs, Runner
from inlay.slots import SlotRange
from tests.conftest import tiny
from tests.model.attention.triton.cases import SHARING, backend, interpreted
from tests.model.attention.triton.test_tables import check_results, covered, wanted
from tests.unit.attention.kernel_cases import one_on

pytestmark = [interpreted, pytest.mark.long]

SHARED = 20


class Played:
    """Records steps by keeping them. played: how often one was called."""

    def __init__(self) -> None:
        self.recorded = self.played = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        step()

        def replay() -> None:
            self.played += 1
            step()

        return replay


def decoding(rows: int, *, shift: int = 0, start: int = 64) -> list[Part]:
    """Decode steps after the same stored keys, each with a shift of its own and room for eight tokens."""
    return [
        Part.of(SHARED + n * shift, 1, (Item(SlotRange(0, SHARED), 0, n * shift),), (SlotRange(start + 9 * n, 1),))
        for n in range(rows)
    ]


def runners(play: Played) -> tuple[Runner, Runner]:
    """One that records, and one that does not, over pools with the same keys."""
    loaded = tiny("llama")
    made = Runner(loaded, backend(), 512, record=play), Runner(loaded, backend(), 512)
    text = torch.randint(0, 256, (SHARED,), generator=torch.Generator().manual_seed(3)).tolist()
    for runner in made:
        runner.run([Work(tuple(text), Part.of(0, SHARED, (), (SlotRange(0, SHARED),)))], [])
    return made


def steps(runner: Runner, plan: Plan, count: int) -> torch.Tensor:
    """Logits of decode steps, (steps, rows, vocabulary)."""
    found = []
    for step in range(count):
        work = [Work((5 * n + step,), part) for n, part in enumerate(plan.parts)]
        found.append(runner.run(work, list(range(len(work))), plan).clone())
        plan = advance(plan, [one_on(part) for part in plan.parts])
    return torch.stack(found)


@pytest.mark.parametrize("shift", [0, 3])
def test_replayed_steps_equal_computed_steps(shift):
    """Batches that grow and shrink, advance, and come back: with one recording of a size, or a further one."""
    play = Played()
    recording, plain = runners(play)
    for rows in (3, 4, 2, 3):
        parts = decoding(rows, shift=shift)
        expected = steps(plain, build_plan(parts), 2)
        torch.testing.assert_close(steps(recording, build_plan(parts), 2), expected, atol=1e-5, rtol=0)
    assert play.played == 8
    assert play.recorded <= 3


def test_padding_rows_store_nothing():
    play = Played()
    recording, plain = runners(play)
    steps(recording, build_plan(decoding(3)), 2)
    steps(plain, build_plan(decoding(3)), 2)
    for one, other in zip(recording.storage.keys, plain.storage.keys, strict=True):
        assert torch.equal(one != 0, other != 0)
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def prompts(*lengths: int, shift: int = 0) -> list[Work]:
    """New text after the same stored keys, of each prompt at a shift of its own."""
    return [
        Work(
            tuple((7 * at + number) % 250 for at in range(length)),
            Part.of(
                SHARED + number * shift, length, (Item(SlotRange(0, SHARED), 0, number * shift),),
                (SlotRange(64 + 48 * number, length),),
            ),
        )
        for number, length in enumerate(lengths)
    ]  # fmt: skip


def behind(work: list[Work]) -> list[int]:
    """The last row of each."""
    ends = list(accumulate(each.part.rows for each in work))
    return [end - 1 for end in ends]


@pytest.mark.parametrize("shift", [0, pytest.param(3, marks=pytest.mark.triton)])
def test_replayed_prefills_equal_computed_prefills(shift):
    """The first pass of a shape is computed, the second one is recorded; passes with fewer rows are padded."""
    play = Played()
    recording, plain = runners(play)
    for lengths, played in (((9, 5), 0), ((9, 5), 1), ((7, 2), 2), ((4, 1), 2)):
        work = prompts(*lengths, shift=shift)
        expected = plain.run(work, behind(work))
        torch.testing.assert_close(recording.run(work, behind(work)), expected, atol=1e-5, rtol=0)
        assert play.played == recording.graphs.played_prefills == played, lengths
    for one, other in zip(recording.storage.keys, plain.storage.keys, strict=True):
        assert torch.equal(one != 0, other != 0), "rows that fill a pass up store something"
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.triton
@pytest.mark.parametrize("wanted", [[], [3], [0, 6, 11]])
def test_any_rows_of_a_played_prefill_have_their_logits(wanted):
    play = Played()
    recording, plain = runners(play)
    work = prompts(9, 3)
    for _ in range(3):
        torch.testing.assert_close(recording.run(work, wanted), plain.run(work, wanted), atol=1e-5, rtol=0)
    assert (play.recorded, play.played) == (1, 2)


@pytest.mark.triton
def test_decode_steps_in_a_pass_with_a_prompt_are_replayed():
    play = Played()
    recording, plain = runners(play)
    for start in (100, 200, 300):
        parts = decoding(3, start=start)
        work = [Work((n,), part) for n, part in enumerate(parts)]
        work += [Work((5, 6, 7), Part.of(SHARED, 3, (Item(SlotRange(0, SHARED), 0),), (SlotRange(start + 80, 3),)))]
        found, expected = recording.run(work, behind(work)), plain.run(work, behind(work))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert play.played == 2


def test_large_batches_are_computed():
    play = Played()
    graphs = PassGraphs(backend(), lambda *_: pytest.fail("it was recorded"), play)
    rows = SIZES[-1] + 1
    assert graphs.run([0] * rows, build_plan(decoding(rows)), range(rows)) is None
    (work,) = prompts(rows)
    assert graphs.run(work.ids, build_plan([work.part]), [rows - 1]) is None
    assert play.recorded == 0


def test_a_model_that_cannot_be_recorded_is_computed(caplog):
    def fail(step: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    loaded = tiny("llama")
    runner = Runner(loaded, backend(), 512, record=fail)
    for _ in range(2):
        assert steps(runner, build_plan(decoding(2)), 2).isfinite().all()
    assert [record.getMessage() for record in caplog.records] == [
        "passes of this model cannot be recorded (operation not permitted when stream is capturing); they run without "
        "recordings"
    ]


def test_a_recording_without_memory_fails_its_step_alone(caplog):
    attempts = []

    def scarce(step: Callable[[], None]) -> Callable[[], None]:
        attempts.append(step)
        if len(attempts) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        step()
        return step

    runner = Runner(tiny("llama"), backend(), 512, record=scarce)
    with pytest.raises(torch.OutOfMemoryError):
        steps(runner, build_plan(decoding(2)), 1)
    assert steps(runner, build_plan(decoding(2)), 1).isfinite().all()
    assert len(attempts) == 2
    assert not caplog.records


def test_table_buffer_takes_smaller_plans_and_rejects_larger_ones():
    shape, device = Shape(4, 2, 64, 2), Device(8)
    made = {
        rows: build_tables(build_plan(decoding(rows, shift=3)), shape, device, SHARING) for rows in (3, 4, 5, 9, 17)
    }
    room = Room.around(made[5])
    for rows in (3, 4, 5):
        filled = room.fill(made[rows])
        plan = build_plan(decoding(rows, shift=3))
        assert filled is not None
        assert sorted(covered(plan, filled)) == sorted(wanted(plan))
        rows_left, partials = len(made[rows].merged_rows), made[rows].partials
        assert filled.merged_rows[rows_left:].tolist() == [-1] * (len(filled.merged_rows) - rows_left)
        assert set(filled.merged_first[rows_left:].tolist()) == {partials}
        cut = {"merged_rows": rows_left, "merged_first": rows_left + 1, "merged_index": partials}
        check_results(
            plan, replace(filled, partials=partials, **{name: getattr(filled, name)[:n] for name, n in cut.items()})
        )
    assert room.fill(made[17]) is None
