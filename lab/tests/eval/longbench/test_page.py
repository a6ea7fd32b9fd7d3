"""docs/benchmarks.md: its inlay commands run, and its tables have the real names."""

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

PAGE = DOCS / "benchmarks.md"
COMMANDS = [line for block in blocks(PAGE) if block.language == "sh" for line in block.text.splitlines()]
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
    named = {
        name
        for table in ("JSON | meaning",)
        for cells in rows(PAGE, *table.split(" | "))
        for name in cells[0].split(", ")
    }
    assert {name.strip("`") for name in named} | {"dataset", "metric", "reuse", "positions", "samples"} == set(
        result["rows"][0]
    )


def test_every_metric_and_option_is_told() -> None:
    assert {cells[0] for cells in rows(PAGE, "metric", "of", "value")} == {metric.label for metric in METRICS.values()}
    text = PAGE.read_text(encoding="utf-8")
    told = " ".join(cells[1] for cells in rows(PAGE, "metric", "of", "value"))
    for dataset in DATASETS.values():
        assert dataset.title.partition(" (")[0] in told, dataset.name
    assert len(COMMANDS) == 2
    assert "--max-length" in text
