"""docs/internals/methods.md: its LongBench commands run, and its tables have the real names."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from inlay.cli.main import main
from inlay_lab.eval.longbench.datasets import DATASETS
from inlay_lab.eval.longbench.metrics import METRICS
from tests.pages import DOCS, blocks, rows

from .test_data import EXAMPLE

pytestmark = pytest.mark.long

PAGE = DOCS / "internals/methods.md"
COMMANDS = [
    line
    for block in blocks(PAGE)
    if block.language == "sh"
    for line in block.text.splitlines()
    if line.startswith("inlay eval longbench")
]
pytest.importorskip("jieba", reason="jieba is not installed")
pytest.importorskip("rouge", reason="rouge is not installed")


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command.replace("examples/longbench", str(EXAMPLE)))
    assert main([*words[1:], "--limit", "1"]) == 0
    assert (tmp_path / "report" / "report.md").is_file() == ("--report" in command)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    named = {name.strip("`") for cells in rows(PAGE, "JSON", "meaning") for name in cells[0].split(", ")}
    assert named | {"dataset", "metric", "reuse", "positions", "samples"} == set(result["rows"][0])


def test_every_metric_and_dataset_has_a_row() -> None:
    table = rows(PAGE, "metric", "datasets")
    assert {cells[0] for cells in table} == {metric.label for metric in METRICS.values()}
    named = " ".join(cells[1] for cells in table)
    for dataset in DATASETS.values():
        assert dataset.title.partition(" (")[0] in named, dataset.name
