"""lab/benchmarks/kv_cache_dtype.py prints the table of docs/internals/results.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import run_file
from tests.pages import DOCS

FILE = Path(__file__).parents[2] / "benchmarks" / "kv_cache_dtype.py"


@pytest.mark.long
def test_table_equals_the_page(capsys: pytest.CaptureFixture[str]):
    run_file(FILE, "random:tiny", "2x400", "1x700")
    head, line, *rows, last = capsys.readouterr().out.splitlines()
    assert f"{head}\n{line}\n" in (DOCS / "internals/results.md").read_text()
    found = json.loads(last)["rows"]
    for printed, row, name in zip(rows, found, ("2 × 400", "1 × 700"), strict=True):
        cells = printed.strip("| ").split(" | ")
        assert cells[0] == f"`random:tiny`, {name}"
        assert cells[3].split(", ")[0] == f"{row['int8']['step_ms'] / row['bfloat16']['step_ms']:.2f}"
        assert row["int8"]["kv_mb"] < row["bfloat16"]["kv_mb"]
