"""A new dialect needs only its package and an entry in the list of dialects to be served."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.long
def test_a_second_dialect_is_served_as_it_declares_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.server.server.second_dialect"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    said = found["whole"]["said"]
    assert said
    assert found["streamed"] == [{"said": said}, "data: over"]
    assert found["wrong"] == [400, {"wrong": "there is nothing to say; give say"}]
    assert found["other"] == "prompt"
    assert found["batch"] == {"a": {"said": said}, "b": {"wrong": "line 2: there is nothing to say; give say"}}
    assert found["described"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/SayBody"}
