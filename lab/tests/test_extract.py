"""The extraction benchmark finds the documents that were put into its prompts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_every_document_is_found():
    file = Path(__file__).parents[1] / "benchmarks" / "extract.py"
    words = [sys.executable, str(file), "--prompts", "30", "--words", "600", "--documents", "5"]
    result = subprocess.run(words, capture_output=True, text=True, check=True)
    row = json.loads(result.stdout.splitlines()[-1])
    assert (row["prompts"], row["recall"], row["whole"]) == (30, 1.0, 1.0)
    assert row["seconds"] > 0
