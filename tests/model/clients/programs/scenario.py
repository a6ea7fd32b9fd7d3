"""Shared by the programs of the matrix: the server's address, the format of results, and the test prompts.

Each program runs by itself, with its client's packages first on the path, and imports nothing of inlay.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

BASE = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
MODEL = "demo"

ASKED = "How is the weather in Rome?"
AGAIN = "And in Oslo?"

#: As frameworks write them: nothing says that there are no other properties.
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": CITY}}]
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": CITY}}


def run(*scenarios: Callable[[], None]) -> None:
    """Run each scenario in turn. Prints a line of JSON for each: its name, and the end of a traceback or null."""
    for scenario in scenarios:
        error = None
        try:
            scenario()
        except Exception:
            error = traceback.format_exc()[-3_000:]
        print(json.dumps({"scenario": scenario.__name__, "error": error}), flush=True)
