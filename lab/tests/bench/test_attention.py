"""Every column of the attention benchmark computes the same step: its output equals the reference's."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch

from inlay.attention.plan import build_plan
from inlay.attention.registry import get_backend
from inlay.errors import ParameterError
from inlay.slots import join, total
from inlay_lab.bench.attention import measure
from inlay_lab.bench.attention.cases import PLACEMENTS, Case, Content, Pages, SegmentCase, pieces_of
from inlay_lab.bench.attention.cases import step as segment_step
from inlay_lab.bench.attention.measure import COLUMNS, MEMORY, PARTS, AttentionSetting, measure_attention, step, store
from inlay_lab.bench.attention.plans import PrefillCase, prefill_step, scattered
from inlay_lab.bench.attention.plot import draw_attention
from tests.counting import calls_of

pytestmark = pytest.mark.long

TINY = AttentionSetting(
    dtypes=("float32",),
    heads=((4, 2),),
    head_dim=16,
    chunk=8,
    batch=2,
    prompts=(16,),
    figure_prompt=16,
    completions=(0, 8),
    batches=(1, 2),
    segments=3,
    segment_tokens=5,
    prefill=64,
    prefill_runs=(1, 5),
    plan_requests=4,
    modules=12,
    recomputed=200,
    runs=1,
    quick=True,
)


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return measure_attention(TINY)


def changed(**settings: object) -> AttentionSetting:
    """TINY with other settings."""
    return replace(TINY, **settings)  # type: ignore[arg-type]


def plain_attention(case: Case, content: Content) -> torch.Tensor:
    """fp32 softmax attention of every sequence, from the content alone, without pool, plan or a column's memory."""
    rows = []
    for sequence in range(case.batch):
        keys, values = (
            torch.cat((shared, private, new[:, sequence : sequence + 1]), 1).float()
            for shared, private, new in zip(
                content.shared(), content.private(sequence), (content.key, content.value), strict=True
            )
        )
        repeat = case.heads // case.kv_heads
        keys, values = keys.repeat_interleave(repeat, 0), values.repeat_interleave(repeat, 0)
        query = content.query[:, sequence].float()
        weights = torch.softmax((keys @ query.unsqueeze(2)).squeeze(2) * case.head_dim**-0.5, 1)
        rows.append((weights.unsqueeze(1) @ values).squeeze(1))
    return torch.stack(rows)


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("shared", [0, 8, 19, 24])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 2e-2)])
def test_every_column_computes_the_same_attention(column, heads, shared, dtype, tolerance):
    case = Case(dtype, *heads, head_dim=32, batch=3, context=24, shared=shared, chunk=8)
    content = Content(case)
    output = step(column, store(MEMORY[column], case, content), get_backend("auto"))()
    assert output.shape == (3, heads[0], 32)
    torch.testing.assert_close(output.float(), plain_attention(case, content), atol=tolerance, rtol=tolerance)
    pages = Pages(case, content, copies=False)
    args = (content.query, content.key, content.value, pages.storage, build_plan(pages.parts), 0, pages.options)
    reference = get_backend("reference").attend(*args)
    torch.testing.assert_close(output.float(), reference.float(), atol=tolerance, rtol=tolerance)


def test_sequences_have_different_tokens_after_the_shared_prefix():
    case = Case("float32", 2, 2, 8, batch=3, context=24, shared=8, chunk=8)
    content = Content(case)
    (first, _), (second, _) = content.private(0), content.private(1)
    assert first.shape == (2, 16, 8)
    assert not (first[:, :, None] == second[:, None]).all(-1).flatten(1).all()
    output = step("ours", store("shared", case, content), get_backend("auto"))()
    assert (output[0] - output[1]).abs().max() > 1e-2


@pytest.mark.parametrize("copies", [False, True])
def test_pool_has_the_counted_bytes_of_a_case(copies):
    case = Case("bfloat16", 4, 2, 16, batch=5, context=47, shared=32, chunk=16)
    pages = Pages(case, Content(case), copies=copies)
    assert pages.pool.free_chunks == 0
    stored = {slot for part in pages.parts for run in part.ranges for slot in range(run.first, run.end)}
    assert len(stored) * pages.pool.bytes_per_token == case.kv_bytes(copies=copies)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
@pytest.mark.parametrize("query", ["decode", "batch", "prefill"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_placement_of_segments_gives_the_same_output(heads, query, dtype):
    case = SegmentCase(dtype, *heads, 32, query, 5, 7, 16)
    outputs = {name: segment_step(case, name, get_backend("auto"))() for name in PLACEMENTS}
    reference = segment_step(case, "one", get_backend("reference"))()
    tolerance = 2e-5 if dtype == "float32" else 3e-2
    for output in outputs.values():
        assert output.shape == (case.rows, heads[0], 32)
        torch.testing.assert_close(output.float(), reference.float(), atol=tolerance, rtol=tolerance)


def test_placements_are_as_named():
    case = SegmentCase("float32", 2, 2, 8, "decode", 3, 5, 16)

    def places(placement: str) -> list[tuple[int, int, int]]:
        return [(piece.slots.first, piece.position, piece.shift) for piece in pieces_of(case, placement)[0]]

    assert places("one") == [(0, 0, 0)]
    assert places("neighbours") == [(0, 0, 0), (5, 5, 0), (10, 10, 0)]
    assert places("scattered") == [(0, 0, 0), (16, 5, 0), (32, 10, 0)]
    assert places("shifted") == [(0, 0, 0), (16, 0, 5), (32, 0, 10)]


def test_json_has_every_part(measured):
    result = measured
    assert [(row["context"], row["shared"]) for row in result["table3"]] == [(16, 0), (16, 8), (16, 12), (16, 16)]
    assert [(row["context"], row["shared"]) for row in result["figure3"]] == [(16, 16), (24, 16)]
    assert [row["batch"] for row in result["figure4"]] == [1, 2]
    assert [row["rows"] for row in result["segments"]] == [1, 32, 32]
    for row in result["table3"] + result["figure3"] + result["figure4"]:
        assert list(row["columns"]) == list(COLUMNS)
        for cell in row["columns"].values():
            flops = 4 * row["batch"] * 4 * (row["context"] + 1) * 16
            assert cell["gflops"] == pytest.approx(flops / cell["ms"] / 1e6, rel=0.05, abs=0.01)
            assert cell["of_ceiling"] == pytest.approx(cell["ceiling_ms"] / cell["ms"], rel=0.05, abs=0.005)
            assert cell["tokens_s"] == pytest.approx(row["batch"] / cell["ms"] * 1000, rel=0.05)
    for row in result["segments"]:
        assert row["ratio"]["shifted"] == pytest.approx(row["ms"]["shifted"] / row["ms"]["one"], rel=0.05)
    (prefill,) = result["prefill"]
    assert prefill["ratio"]["5"] == pytest.approx(prefill["ms"]["5"] / prefill["ms"]["1"], rel=0.05)
    assert [(row["what"], row["requests"], row["items"]) for row in result["plan"][:3]] == [("modules", 4, 4 * 13)] * 3
    assert [row["entries"] for row in result["plan"][:3]] == [12 + 4, 6 + 4 * 6 + 4, 4 * 13]
    assert all(row["ms"]["plan"] > 0 for row in result["plan"])
    assert result["backend"] == get_backend("auto").name


def test_scattered_ranges_have_the_given_number_and_do_not_touch():
    for count in (1, 2, 7):
        ranges = scattered(16, count, 8)
        assert len(ranges) == count
        assert total(ranges) == 16 * 8
        slots = [slot for each in ranges for slot in range(each.first, each.end)]
        assert len(slots) == len(set(slots))
        assert len(join(sorted(ranges, key=lambda each: each.first))) == count


def test_scattered_prompt_equals_a_contiguous_one():
    case = PrefillCase("float32", 4, 2, 16, tokens=64, runs=(1, 5), chunk=8)
    one, many = (prefill_step(case, count, get_backend("auto"))() for count in case.runs)
    torch.testing.assert_close(many, one, atol=1e-5, rtol=0)


def test_progress_counts_cells():
    told: list[tuple[int, int]] = []
    setting = changed(parts=("figure3", "figure4"), columns=("ours",))
    measure_attention(setting, lambda done, total: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_sharing_columns_count_shared_bytes_once(measured):
    last = measured["table3"][-1]["columns"]
    token = 2 * 2 * 16 * 4  # keys and values of two heads, fp32
    assert last["ours"]["distinct_gb"] == last["paged"]["distinct_gb"] == round((16 + 2) * token / 1e9, 4)
    assert last["unshared"]["distinct_gb"] == last["sdpa"]["distinct_gb"] == round(2 * 17 * token / 1e9, 4)


@pytest.mark.parametrize(("free", "skipped"), [(0, set(COLUMNS)), (10_000, {"unshared", "sdpa", "flash", "naive"})])
def test_column_without_enough_memory_is_skipped_with_a_reason(monkeypatch, free, skipped):
    class Memory:
        available = free

    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory)
    monkeypatch.setattr("inlay_lab.bench.attention.measure.describe_machine", dict)
    setting = changed(parts=("figure4",), batches=(8,))
    (row,) = measure_attention(setting)["figure4"]
    assert {name for name, cell in row["columns"].items() if "skipped" in cell} == skipped
    assert all("GB may be used" in row["columns"][name]["skipped"] for name in skipped)


def test_caches_too_large_together_are_measured_one_by_one(monkeypatch):
    class Memory:
        available = 50_000

    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory)
    monkeypatch.setattr("inlay_lab.bench.attention.measure.describe_machine", dict)
    stores = calls_of(monkeypatch, measure, "store")
    setting = changed(parts=("figure4",), batches=(8,))
    (row,) = measure_attention(setting)["figure4"]
    assert [memory for memory, *_ in stores] == ["shared", "copies", "dense"]
    assert all("ms" in cell for cell in row["columns"].values())


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"parts": ("table4",)}, "part is 'table4'; use one of table3, figure3, figure4, segments"),
        ({"dtypes": ("float16",)}, "dtype is 'float16'; use one of float32, bfloat16"),
        ({"columns": ("ours", "xformers")}, "column is 'xformers'; use one of ours"),
        ({"heads": ((6, 4),)}, "heads are 6/4; query heads must be a multiple of KV heads"),
        ({"heads": ((0, 0),)}, "heads are 0/0"),
        ({"prompts": (0,)}, "prompt is 0; it must be at least 1"),
        ({"batches": (4, -1)}, "batch is -1; it must be at least 1"),
        ({"completions": (-1,)}, "completion is -1; it must be at least 0"),
        ({"runs": 0}, "runs is 0; it must be at least 1"),
    ],
)
def test_wrong_settings(wrong, sentence):
    with pytest.raises(ParameterError, match=sentence):
        AttentionSetting(**wrong)


def test_unknown_backend_is_rejected():
    with pytest.raises(ParameterError, match="attention backend 'gpu' does not exist"):
        measure_attention(changed(backend="gpu"))


@pytest.mark.parametrize("parts", [PARTS, ("figure4",)])
def test_a_drawing(measured, tmp_path, parts):
    """Every part but segments is drawn; a skipped column leaves no mark."""
    result = copy.deepcopy({name: value for name, value in measured.items() if name not in PARTS or name in parts})
    for row in result["figure4"]:
        row["columns"]["naive"] = {"skipped": "no memory"}
    file = tmp_path / "attention.svg"
    draw_attention(result, file)
    text = file.read_text()
    assert "<svg" in text
    assert ("figure 3" in text) is ("figure3" in parts)
    assert "figure 4" in text
