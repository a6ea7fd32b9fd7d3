"""docs/guides/batches.md: its commands run, its requests are answered, and its errors are real."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from inlay.cli.main import main
from tests.system.batch.helpers import bodies, read

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/batches.md").read_text()
ERRORS = [
    '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 1}}',
    '{"method": "POST", "url": "/v1/chat/completions", "body": {}}',
    '{"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", '
    '"body": {"messages": [{"role": "user", "content": "x"}], "echo": true}}',
]


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with the project's examples in it."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_its_command_answers_the_example(capsys):
    (command,) = blocks("sh")
    assert main(shlex.split(command)[1:]) == 0
    report = json.loads(capsys.readouterr().out)
    asked = {json.loads(line)["custom_id"] for line in Path("examples/batch/requests.jsonl").read_text().splitlines()}
    assert set(bodies(Path("answers.jsonl"))) == asked
    assert report["cached_share"] > 0.5
    assert set(report) - {"model", "output"} <= set(re.findall(r"`(\w+)`", PAGE))


def test_python_example_runs(capsys):
    (code,) = blocks("python")
    exec(compile(code, "batch.md", "exec"), {})
    answered, share = capsys.readouterr().out.split()
    assert int(answered) == len(bodies(Path("answers.jsonl")))
    assert float(share) > 0.5


def test_example_requests_are_answered(capsys):
    Path("in").write_text("".join(blocks("json request")))
    assert main(["batch", "in", "out", "--schema", "examples/records/records.xml"]) == 0
    assert set(bodies(Path("out"))) == {"mayor", "captain", "phone"}
    assert bodies(Path("out"))["captain"]["choices"][0]["text"] == "Rolan Fader"
    assert bodies(Path("out"))["phone"]["choices"][0]["message"]["content"] == "48213"


def test_shown_answers_equal_the_output():
    _, shown = blocks("json answer")
    Path("in").write_text("\n".join(ERRORS))
    assert main(["batch", "in", "out", "--model", "random:tiny"]) == 1
    assert read(Path("out"))[:2] == [json.loads(row) for row in shown.splitlines()]
