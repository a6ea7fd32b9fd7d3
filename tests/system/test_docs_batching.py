"""The example of docs/guides/many-requests.md runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def test_the_example():
    (code,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/guides/many-requests.md").read_text(), re.DOTALL | re.MULTILINE
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("'") + result.stdout.count('"') >= 16, "eight answers"
