"""The report: the published figure, ours, and the reason for a difference; figures; missing experiments."""

from __future__ import annotations

import json

import pytest

from inlay.errors import ParameterError
from inlay_lab.reproduce.experiment import Scale
from inlay_lab.reproduce.plots import draw_lines, draw_pairs
from inlay_lab.reproduce.record import Kept
from inlay_lab.reproduce.report import failed, figure, write_report
from inlay_lab.reproduce.run import Entry, Status

from .samples import MACHINE, experiment, outcome

PAIRS = {"labels": ["a", "b"], "one": [2.0, 3.0], "other": [0.1, 0.2], "title": "Both"}


def entry(name="one", draw=None):
    return Entry(experiment(name, draw=draw), Status.MEASURED, Kept(outcome(), MACHINE, 12.5, "2026-01-31"))


def drawing(data, path):
    assert data == {"points": [1, 2]}
    draw_pairs(PAIRS, path, names=("long", "short"), axis="s")


def failing(data, path):
    raise KeyError("points")


def test_published_and_measured_figures_are_in_one_row(tmp_path):
    missing = Entry(experiment("two"), Status.NOT_HERE, reason="it needs a GPU")
    write_report([entry(draw=drawing), missing], Scale.QUICK, MACHINE, tmp_path)
    text = (tmp_path / "report.md").read_text()
    lines = text.splitlines()
    assert "| times as fast | 2× (table 1; A100) | 3× | another machine |" in lines
    assert "| tokens | 5 to 8 (§2) | 7 | the same |" in lines
    assert "| grows | linear (figure 5) | linear | the same |" in lines
    assert "| alone |  | 0.25 ms |  |" in lines
    assert "| one | A paper, table 1 | times as fast | 2× | 3× | measured, 12 s |" in lines
    assert "| two | A paper, table 1 |  |  |  | not runnable here |" in lines
    assert "**Not runnable here**: it needs a GPU." in lines
    assert "Measured on 2026-01-31 in 12 s; the load was 0.5 when it began." in text
    assert "2 of 2 cores of Some CPU (AVX2), 16 GiB" in text
    assert "![Title of one](images/one.png)" in lines
    assert (tmp_path / "images" / "one.png").stat().st_size > 5000
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["experiments"][0]["rows"][0]["published"]["value"] == 2.0


def test_failing_plot_loses_only_the_plot(tmp_path, caplog):
    write_report([entry(draw=failing)], Scale.QUICK, MACHINE, tmp_path)
    assert "one could not be drawn" in caplog.text
    assert "![" not in (tmp_path / "report.md").read_text()


def test_unwritable_report_is_one_sentence(tmp_path):
    (tmp_path / "report.md").mkdir()
    with pytest.raises(ParameterError, match=r"--out .*report.md cannot be written"):
        write_report([entry()], Scale.QUICK, MACHINE, tmp_path)
    (tmp_path / "images").touch()
    with pytest.raises(ParameterError, match=r"--out .*one.png cannot be written"):
        write_report([entry(draw=drawing)], Scale.QUICK, MACHINE, tmp_path)


def test_failed_experiments_are_named():
    assert failed([entry(), Entry(experiment("two"), Status.FAILED, reason="so")]) == ["two"]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "ms", "—"),
        (0, "bytes", "0 bytes"),
        (1234.5, "ms", "1,234 ms"),
        (99.96, "ms", "100 ms"),
        (12.345, "×", "12.3×"),
        (0.035156, "MiB", "0.0352 MiB"),
        (0.00012, "s", "0.00012 s"),
        (1e-7, "s", "1e-07 s"),
        ((9.3, 63.7), "×", "9.3 to 63.7×"),
        ("linear", "", "linear"),
        (-3.456, "points", "-3.46 points"),
    ],
)
def test_figures_are_written_in_three_digits(value, unit, text):
    assert figure(value, unit) == text


def test_lines_are_drawn(tmp_path):
    panel = {"title": "t", "x": "x", "y": "y", "lines": {"a": [(1, 2), (2, 3)], "b": [(1, 1)]}}
    draw_lines([panel, panel | {"log": True}], tmp_path / "lines.png")
    assert (tmp_path / "lines.png").stat().st_size > 5000
