"""``inlay schema from-prompts``: its output, its files, and one sentence for each error."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from inlay.pml import Prompt, Schema, resolve
from tests import commands
from tests.commands import pipe

WORDS = (
    "harbour",
    "ferry",
    "island",
    "ticket",
    "winter",
    "north",
    "wind",
    "museum",
    "charts",
    "lamp",
    "church",
    "fish",
)


def document(seed: int) -> str:
    return f"# Guide {seed}\n{' '.join(random.Random(seed).choices(WORDS, k=50))} {seed}.\n"


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "messages": [
                {"role": "system", "content": "You help."},
                {"role": "user", "content": f"{document(n % 2)}{n}?"},
            ]
        }
        for n in range(12)
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    return commands.run(capsys, "schema", "from-prompts", *arguments)


def test_the_report(log, capsys):
    status, out, _ = run(capsys, "log.jsonl", "--model", "random:tiny")
    assert status == 0
    for words in (
        "12 prompts",
        "(always present)",
        "guide-0",
        "saved by a prefix cache",
        "union of 2: guide-",
    ):
        assert words in out


def test_files_and_json(log, capsys):
    arguments = ["--model", "random:tiny", "--output", "s.xml", "--prompts", "p.jsonl", "--json"]
    status, out, _ = run(capsys, "log.jsonl", *arguments)
    assert status == 0
    report = json.loads(out)
    assert len(out.splitlines()) == 1
    each = len(document(0))
    assert report["saved_by_schema"] == 11 * len("You help.") + 5 * each + 5 * len(document(1))
    assert report["tokens"] == report["prompts"] * len("You help.") + 6 * (each + len(document(1))) + 26
    assert (report["schema"], list(map(sorted, report["unions"]))) == ("log", [["guide-0", "guide-1"]])
    assert report["written"] == {"output": "s.xml", "prompts": "p.jsonl"}
    schema = Schema.from_file("s.xml")
    rows = [json.loads(line) for line in Path("p.jsonl").read_text().splitlines()]
    assert [row["line"] for row in rows] == list(range(1, 13))
    for number, row in enumerate(rows):
        assert resolve(schema, Prompt.from_string(row["prompt"])).imported == {f"guide-{number % 2}"}


def test_unrepresentable_prompts_are_null(log, capsys):
    with Path("log.jsonl").open("a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n")
        messages = [{"role": "system", "content": "You help."}, {"role": "user", "content": "\0"}]
        file.write(json.dumps({"messages": messages}) + "\n")
    assert run(capsys, "log.jsonl", "--model", "random:tiny", "--prompts", "p.jsonl")[0] == 0
    last, very_last = [json.loads(line) for line in Path("p.jsonl").read_text().splitlines()][-2:]
    assert (last["prompt"], last["why"]) == (None, "it lacks the text that is always present in the schema")
    assert very_last["prompt"] is None
    assert "U+0000" in very_last["why"]


def test_existing_files_are_not_overwritten(log, capsys):
    Path("s.xml").write_text("mine")
    status, _, err = run(capsys, "log.jsonl", "--output", "s.xml")
    assert (status, Path("s.xml").read_text()) == (2, "mine")
    assert err.splitlines()[-1] == "inlay: s.xml exists; choose another name, or overwrite it with --force"
    assert run(capsys, "log.jsonl", "--model", "random:tiny", "--output", "s.xml", "--force")[0] == 0
    assert Schema.from_file("s.xml").modules


def test_standard_input_and_a_name(log, capsys, monkeypatch):
    pipe(monkeypatch, Path("log.jsonl").read_bytes())
    status, out, _ = run(capsys, "-", "--model", "random:tiny", "--name", "trips of may", "--json")
    assert (status, json.loads(out)["schema"]) == (0, "trips of may")


def test_bad_lines_are_skipped_and_counted(log, capsys):
    with Path("log.jsonl").open("a") as file:
        file.write("oops\n7\n")
    status, _, err = run(capsys, "log.jsonl", "--model", "random:tiny")
    assert status == 2
    assert err.splitlines()[-1].startswith("inlay: log.jsonl:13: this is not JSON")
    status, out, _ = run(capsys, "log.jsonl", "--model", "random:tiny", "--skip-bad", "--json")
    report = json.loads(out)
    assert (status, report["prompts"], report["skipped_lines"]) == (0, 12, 2)
    assert "2 bad lines were skipped; the first is log.jsonl:13: this is not JSON" in report["notes"][-1]


def test_repeated_tool_results_are_found_and_counted(log, capsys):
    """Logs of agents: the same page of documentation comes back from a tool again and again."""
    page = document(7)
    ask = {"role": "user", "content": "What does the page say?"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {}}]}
    rows = [[ask, call, {"role": "tool", "tool_call_id": "c", "content": f"{n} found. {page}"}] for n in range(6)]
    Path("tools.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    status, out, _ = run(capsys, "tools.jsonl", "--model", "random:tiny", "--json")
    report = json.loads(out)
    assert (status, report["prompts"]) == (0, 6)
    assert any(page.strip() in module["text"] or module["tokens"] >= len(page) - 2 for module in report["modules"])
    assert report["notes"][-1] == ("6 turns of tools count as the user's: PML has system, user and assistant alone")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("none.jsonl", "none.jsonl: no such file; check the path"),
        ("empty.jsonl --model random:tiny", "empty.jsonl: holds no prompts; write one request a line"),
        ("log.jsonl --model ./nowhere", "./nowhere: no such directory"),
        ("log.jsonl --min-prompts 1", "min_prompts is 1; it must be at least 2"),
        ("log.jsonl --max-modules 0", "max_modules is 0; it must be from 1 to 5,000"),
        ("log.jsonl --output no/s.xml", "no/s.xml: there is no folder no; make it first"),
        ("one.jsonl --model random:tiny --output s.xml", "no text repeats often and long enough for a schema"),
    ],
)
def test_errors_are_one_sentence(log, capsys, arguments, sentence):
    Path("empty.jsonl").write_text("\n")
    Path("one.jsonl").write_text('"Only one."\n')
    before = sorted(log.iterdir())
    status, out, err = run(capsys, *arguments.split())
    assert status == 2
    assert sentence in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("inlay: ")
    assert "Traceback" not in err + out
    assert sorted(log.iterdir()) == before


def test_log_without_repeated_text_is_reported(log, capsys):
    Path("one.jsonl").write_text('"Only one."\n')
    status, out, _ = run(capsys, "one.jsonl", "--model", "random:tiny")
    assert status == 0
    assert "note: no text repeats often and long enough for a module" in out
