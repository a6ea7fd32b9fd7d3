"""Every row of lab/benchmarks/growth.py runs at its smallest size."""

import json
from pathlib import Path

import pytest

from tests.commands import run_file

FILE = Path(__file__).parents[2] / "benchmarks" / "growth.py"


def test_every_row_runs(capsys: pytest.CaptureFixture[str]):
    rows = run_file(FILE, "--sizes", "1")["ROWS"]
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name: list(sizes) for name, sizes in printed["seconds"].items()} == {
        name: [str(sizes[0])] for name, (_, sizes) in rows.items()
    }
