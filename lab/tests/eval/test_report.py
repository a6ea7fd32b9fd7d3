"""The report: figures over the tasks that count, and lines that begin without recomputation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from inlay import ParameterError
from inlay.check.statistics import difference_interval
from inlay_lab.eval import curve
from inlay_lab.eval.points import counting, points
from inlay_lab.eval.report import write_report

pytestmark = pytest.mark.long

#: By policy: the recomputed share, questions of 200 that only full prefill answered right, nats and seconds.
POLICIES = {
    "off": (None, 0, 0.0, 0.05),
    "isolated": (0.0, 30, 0.5, 0.004),
    "anchored+linked:16": (0.15, 20, 0.2, 0.009),
    "anchored+linked:4": (0.05, 25, 0.3, 0.006),
    "anchored": (0.0, 28, 0.4, 0.005),
}
REFERENCE = {"single": 0.9, "count": 0.8, "sort": 0.3}


def row(reuse: str, task: str, documents: int, **changed: Any) -> dict[str, Any]:
    recomputed, lost, kl, ttft_s = POLICIES[reuse]
    figures = {
        "reuse": reuse,
        "positions": "packed",
        "scaffold": False,
        "task": task,
        "documents": documents,
        "questions": 200,
        "reference": REFERENCE[task],
        "exact_match": REFERENCE[task] - lost / 200,
        "only_reference": lost,
        "only_this": 0,
        "kl": kl,
        "recomputed": recomputed,
        "ttft_s": ttft_s,
    }
    return figures | changed


def result(*documents: int, **changed: Any) -> dict[str, Any]:
    rows = []
    for count in documents or (6,):
        for reuse in POLICIES:
            rows += [row(reuse, task, count, **changed) for task in REFERENCE]
            rows.append(rows[-1] | {"task": "all", "questions": 600})
    model = {"model": "small", "dtype": "float32", "quantization": None, "seed": 3, "order": "schema"}
    return {"rows": rows, **model, "tasks": list(REFERENCE)}


def test_points_are_over_the_tasks_that_count():
    found = {point.label: point for point in points(result())}
    assert list(found) == list(POLICIES)
    linked = found["anchored+linked:4"]
    assert (linked.family, linked.documents, linked.questions) == ("anchored+linked", 6, 400)
    assert linked.reference == pytest.approx(0.85)
    assert linked.exact_match == pytest.approx(0.85 - 0.125)
    assert linked.difference == (-0.125, *difference_interval(50, 0, 400))
    assert (linked.kl, linked.recomputed, linked.ttft_s) == pytest.approx((0.3, 0.05, 0.006))
    assert found["off"].recomputed is None
    assert counting(result(), 6) == ["single", "count"]


def test_all_tasks_are_used_if_none_counts():
    assert {point.questions for point in points(result(reference=0.69))} == {600}
    assert counting(result(reference=0.69), 6) == []
    assert {point.questions for point in points(result(), ["sort"])} == {200}


def test_modes_of_one_policy_have_different_labels():
    several = result()
    several["rows"] += [each | {"positions": "schema", "scaffold": True} for each in several["rows"]]
    labels = [point.label for point in points(several)]
    assert "anchored+linked:4, packed" in labels
    assert "anchored+linked:4, schema, scaffold" in labels
    assert len(set(labels)) == 2 * len(POLICIES)


def test_tables_and_files(tmp_path: Path):
    write_report(result(6, 12), tmp_path)
    names = {"ttft.png", "recomputed.png", "tasks.png", "documents.png"}
    assert {path.name for path in tmp_path.iterdir()} == {"report.md", "report.json", *names}
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)
    assert json.loads((tmp_path / "report.json").read_text()) == result(6, 12)
    page = (tmp_path / "report.md").read_text()
    assert all(f"]({name})" in page for name in names)
    assert page.count("\n## ") == 2
    assert "Full prefill is right in 70% or more of: single, count. Not counted: sort." in page
    low, high = difference_interval(50, 0, 400)
    figures = f"5.0% | 6.0 | 400 | 0.725 | -0.125 | {low:+.3f} to {high:+.3f} | 0.3 |"
    assert page.count(f"| anchored+linked:4 | {figures}\n") == 2
    assert "| off |  | 50.0 | 400 | 0.850 | +0.000 | -0.010 to +0.010 ✓ | 0 |\n" in page
    assert "| reuse | single | count | sort |\n" in page
    low, _ = difference_interval(25, 0, 200)
    assert f"| anchored+linked:4 | 0.775 ({low:+.3f}) | 0.675 ({low:+.3f}) | 0.175 ({low:+.3f}) |\n" in page


def test_empty_plots_are_left_out(tmp_path: Path):
    only = result()
    only["rows"] = [each for each in only["rows"] if each["reuse"] == "off"]
    write_report(only, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"report.md", "report.json", "ttft.png"}


def test_unwritable_report_is_rejected(tmp_path: Path):
    (tmp_path / "report.json").mkdir()
    with pytest.raises(ParameterError, match=r"--report .*report\.json cannot be written"):
        write_report(result(), tmp_path)
    with pytest.raises(ParameterError, match=r"--report .*nowhere/ttft\.png cannot be written"):
        write_report(result(), tmp_path / "nowhere")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Figure]:
    """The figures of a report by file name."""
    figures: dict[str, Figure] = {}
    monkeypatch.setattr(curve, "save", lambda figure, path, option: figures.update({path.name: figure}))
    curve.draw_curves(result(6, 12), tmp_path)
    return figures


def lines(figure: Figure, panel: int) -> dict[str, list[tuple[float, float]]]:
    """The points of every line of a panel."""
    axes = figure.axes[panel]
    return {bars.get_label(): [(round(x, 4), round(y, 4)) for x, y in bars[0].get_xydata()] for bars in axes.containers}


def test_lines_start_at_the_policy_without_recomputation(drawn: dict[str, Figure]):
    assert lines(drawn["recomputed.png"], 0) == {
        "isolated": [(0, 0.7)],
        "anchored": [(0, 0.71)],
        "anchored+linked": [(0, 0.71), (5, 0.725), (15, 0.75)],
    }
    divergence = lines(drawn["recomputed.png"], 2)
    assert divergence["anchored+linked"] == [(0, 0.4), (5, 0.3), (15, 0.2)]
    timed = lines(drawn["ttft.png"], 1)
    assert timed["anchored+linked"] == [(5, 0.71), (6, 0.725), (9, 0.75)]
    assert timed["off"] == [(50, 0.85)]


def test_each_number_of_documents_and_task_has_its_panel(drawn: dict[str, Figure]):
    titles = [axes.get_title() for axes in drawn["recomputed.png"].axes]
    assert titles == ["6 documents, 400 questions", "12 documents, 400 questions", "", ""]
    titles = [axes.get_title() for axes in drawn["tasks.png"].axes]
    assert titles == [
        f"{task}, {documents} documents{' (does not count)' if task == 'sort' else ''}"
        for task in REFERENCE
        for documents in (6, 12)
    ]
    assert lines(drawn["documents.png"], 1)["isolated"] == [(6, 0.5), (12, 0.5)]


def test_full_prefill_is_a_horizontal_line(drawn: dict[str, Figure]):
    across = {line.get_label(): line.get_ydata()[0] for line in drawn["recomputed.png"].axes[0].lines}
    assert across["full prefill"] == pytest.approx(0.85)
    assert across["full prefill, −0.02"] == pytest.approx(0.83)


def test_many_lines_look_different(drawn: dict[str, Figure], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    many = result(6, 12)
    many["rows"] += [
        each | {"reuse": f"anchored+linked:{k}"}
        for k in range(100, 120)
        for each in many["rows"]
        if each["reuse"] == "isolated"
    ]
    curve.draw_curves(many, tmp_path)
    looks = [(bars[0].get_color(), bars[0].get_marker()) for bars in drawn["documents.png"].axes[0].containers]
    assert len(set(looks)) == len(looks) == 25


def test_error_bars_stay_within_zero_and_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """With few questions the bounds of a difference reach far beyond what a share can be."""
    figures: dict[str, Figure] = {}
    monkeypatch.setattr(curve, "save", lambda figure, path, option: figures.update({path.name: figure}))
    few = result(6, 12, questions=2, exact_match=1.0, reference=1.0, only_reference=1, only_this=1)
    curve.draw_curves(few, tmp_path)
    panels = [
        axes for figure in figures.values() for axes in figure.axes if axes.get_ylabel().startswith("exact match")
    ]
    assert panels
    for axes in panels:
        bottom, top = axes.get_ylim()
        assert -0.02 <= bottom < top <= 1.02
        for bars in axes.containers:
            for segments in bars[2]:
                for segment in segments.get_segments():
                    assert all(0 <= y <= 1 for _, y in segment)
