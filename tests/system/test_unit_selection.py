"""``make test-unit`` runs files that import no model code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_unit_tests_can_be_collected():
    command = [sys.executable, "-m", "pytest", "tests/unit", "--collect-only", "-q", "-p", "no:xdist"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:]
