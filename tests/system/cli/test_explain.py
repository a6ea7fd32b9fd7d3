"""``inlay explain MODEL LOG``: one line for each cause, most expensive first, and one sentence for each error."""

from __future__ import annotations

import json

import pytest

from inlay.cli import main as command_line

ISLAND = "The island lies far out in the sea, behind the fog, and no ship calls there in winter. "
BRIDGE = "A bridge leads over the river to the other side, and back again in the evening of each day. "


def chat(day: str, text: str) -> dict:
    system = {"role": "system", "content": f"Today is {day}.\n{text}"}
    return {"messages": [system, {"role": "user", "content": "Where?"}]}


LOG = [
    chat("3 May", ISLAND + BRIDGE),
    chat("4 May", ISLAND + BRIDGE),
    {"custom_id": "a", "url": "/v1/chat/completions", "body": chat("4 May", BRIDGE + ISLAND)},
    {"prompt": "Something else."},
]


@pytest.fixture
def log(tmp_path):
    file = tmp_path / "log.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in LOG))
    return str(file)


def test_a_log_is_explained_most_expensive_cause_first(log, capsys):
    assert command_line.main(["explain", "demo", log, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["line"] for row in report["requests"]] == [1, 2, 3, 4]
    kinds = [row["prompts"][0]["causes"][0]["kind"] for row in report["requests"]]
    assert kinds == ["new", "date or number", "moved document", "new"]
    tokens = [cause["tokens"] for cause in report["causes"]]
    assert tokens == sorted(tokens, reverse=True)
    assert {cause["kind"] for cause in report["causes"]} == set(kinds)


def test_the_table_has_a_line_for_each_cause(log, capsys):
    assert command_line.main(["explain", "demo", log]) == 0
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert sum(line[2:5] == ["date", "or", "number"] for line in lines) == 1
    assert "Today is 3 May" in printed
    assert "Today is 4 May" in printed


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["demo"], "inlay explain MODEL LOG.jsonl"),
        (["--url", "http://127.0.0.1:9", "a", "b"], "--url"),
        (["demo", "bad.jsonl"], "bad.jsonl:2"),
        (["demo", "none.jsonl"], "none.jsonl"),
    ],
)
def test_error_names_its_position(arguments, place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('"A prompt."\n{"model": "demo"}\n')
    assert command_line.main(["explain", *arguments]) == 2
    assert place in capsys.readouterr().err
