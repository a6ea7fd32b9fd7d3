"""Every row of lab/benchmarks/growth.py runs at its smallest size."""

import json
import runpy
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "growth.py"


def test_every_row_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", [str(FILE), "--sizes", "1"])
    rows = runpy.run_path(str(FILE), run_name="__main__")["ROWS"]
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name: list(sizes) for name, sizes in printed["seconds"].items()} == {
        name: [str(sizes[0])] for name, (_, sizes) in rows.items()
    }
