"""``inlay eval modular-qa``: its tables, its JSON, and its errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from inlay.cli.main import main
from tests.commands import run
from tests.model.check.models import save

pytestmark = pytest.mark.long

KEYS = {
    *("reuse", "positions", "scaffold", "task", "documents", "questions", "exact_match", "low", "high", "kl"),
    *("only_reference", "only_this", "p_value", "cached", "spare", "reference", "recomputed", "ttft_s"),
    *("difference", "difference_low", "difference_high", "kl_high"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(save(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch):
    monkeypatch.setattr("inlay_lab.eval.modular_qa.MAX_TOKENS", 6)


def test_json_only(model, capsys):
    arguments = ["--documents", "2", "--questions", "5", "--reuse", "off,isolated", "--positions", "packed,schema"]
    status, out, _ = run(capsys, "eval", "modular-qa", "--model", model, *arguments, "--seed", "3", "--json")
    assert status == 0
    assert len(out.splitlines()) == 1
    result = json.loads(out)
    assert (Path(result["model"]), result["seed"], result["dtype"]) == (Path(model), 3, "float32")
    assert result["tasks"] == ["single", "compare", "count", "unstated", "form"]
    assert all(set(row) == KEYS for row in result["rows"])
    modes = list(dict.fromkeys((row["reuse"], row["positions"]) for row in result["rows"]))
    assert modes == [("off", "packed"), ("isolated", "packed"), ("isolated", "schema")]
    assert [row["task"] for row in result["rows"]] == [*result["tasks"], "all"] * 3


def of_tables(capsys, *arguments: str) -> tuple[list[str], dict]:
    """The lines of a command's tables, and its JSON output with --json."""
    said = [run(capsys, "eval", "modular-qa", *arguments, *more) for more in ((), ("--json",))]
    assert [status for status, _, _ in said] == [0, 0]
    assert '"rows"' not in said[0][1]
    return said[0][1].splitlines(), json.loads(said[1][1])


def test_tables(model, capsys):
    arguments = ["--documents", "2", "--spare", "0", "--questions", "1", "--reuse", "anchored"]
    lines, result = of_tables(capsys, "--model", model, *arguments)
    rows = result["rows"]
    asked = f"5 questions, {rows[-1]['cached']:.0%} of the prompts' tokens cached"
    assert lines[1].strip() == f"anchored, packed: {asked}"
    assert " ".join(lines[2].split()) == "task exact match 95% interval KL (nats) only off only this p"
    for line, row in zip(lines[3:], rows, strict=True):
        task, match, interval, *_, p_value = line.split()
        assert (task, match) == (row["task"], f"{row['exact_match']:.3f}")
        assert interval == f"{row['low']:.3f}–{row['high']:.3f}"
        assert p_value == f"{row['p_value']:.3g}"
    assert max(map(len, lines)) <= 80


def test_scaffolds_have_their_own_table(model, capsys):
    arguments = ["--documents", "2", "--questions", "5", "--reuse", "isolated", "--scaffold"]
    lines, result = of_tables(capsys, "--model", model, *arguments)
    titles = [line.partition(":")[0] for line in lines if line.endswith("of the prompts' tokens cached")]
    assert titles == ["isolated, packed", "isolated, packed, scaffold"]
    assert [row["scaffold"] for row in result["rows"]] == [False] * 6 + [True] * 6


def test_answers_are_kept(model, tmp_path, capsys):
    file = tmp_path / "answers.jsonl"
    arguments = ["--documents", "2", "--questions", "5", "--reuse", "isolated", "--json", "--answers", str(file)]
    status, out, _ = run(capsys, "eval", "modular-qa", "--model", model, *arguments)
    result, answers = json.loads(out), [json.loads(line) for line in file.read_text().splitlines()]
    assert status == 0
    assert [answer["task"] for answer in answers] == result["tasks"]
    assert {answer["reuse"] for answer in answers} == {"isolated"}
    status, out, err = run(capsys, "eval", "modular-qa", "--model", model, *arguments)
    assert (status, out, err) == (
        2, "", f"inlay: {file} exists; choose another name, or overwrite it with --force\n"
    )  # fmt: skip
    assert len(file.read_text().splitlines()) == 5
    assert run(capsys, "eval", "modular-qa", "--model", model, *arguments, "--seed", "1", "--force")[0] == 0
    assert json.loads(file.read_text().splitlines()[0])["question"] != answers[0]["question"]


def test_interrupted_report_is_continued(model, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "deep" / "report"
    arguments = [*("--documents", "2,3", "--questions", "9", "--tasks", "all", "--order", "permuted"), "--json"]
    arguments += ["--model", model, "--reuse", "off,anchored", "--report", str(folder)]
    status, out, _ = run(capsys, "eval", "modular-qa", *arguments)
    assert status == 0
    result = json.loads(out)
    assert (folder / "report.md").read_text().startswith("# modular-qa\n")
    assert json.loads((folder / "report.json").read_text()) == result
    drawings = {path.name for path in folder.glob("*.png")}
    assert drawings == {"ttft.png", "recomputed.png", "tasks.png", "documents.png"}
    assert (result["order"], len(result["tasks"])) == ("permuted", 9)
    assert {row["documents"] for row in result["rows"]} == {2, 3}
    answers = (folder / "answers.jsonl").read_text()
    assert len(answers.splitlines()) == 1 + 2 * 2 * 9
    monkeypatch.setattr("inlay_lab.eval.modular_qa.ask", None)
    status, again, _ = run(capsys, "eval", "modular-qa", *arguments)
    assert (status, again, (folder / "answers.jsonl").read_text()) == (0, out, answers)


def test_each_number_of_documents_has_its_table(model, capsys):
    arguments = ["--documents", "2,3", "--questions", "5", "--reuse", "off"]
    status, out, _ = run(capsys, "eval", "modular-qa", "--model", model, *arguments)
    assert status == 0
    titles = [line.partition(":")[0] for line in out.splitlines() if line.endswith("of the prompts' tokens cached")]
    assert titles == ["off, packed, 2 documents", "off, packed, 3 documents"]


def test_report_needs_a_folder_and_matplotlib(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    status, _, err = run(capsys, "eval", "modular-qa", "--report", str(tmp_path / "file" / "report"))
    assert status == 2
    assert "file/report cannot be made (Not a directory); give another directory" in err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = run(capsys, "eval", "modular-qa", "--report", str(tmp_path / "report"))
    assert status == 2
    assert "drawing needs matplotlib; install it with: pip install 'inlay-llm[plots]'" in err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--reuse off,much", "reuse='much' is not a reuse policy"),
        ("--reuse off,", "reuse='' is not a reuse policy"),
        ("--positions loose", "positions is 'loose'; use one of schema, packed"),
        ("--documents 0", "documents is 0; it must be at least 2"),
        ("--documents 6,", "--documents is '6,'; write a number, or several with commas"),
        ("--tasks single,oldest", "tasks is 'oldest'; use one of single, compare"),
        ("--order random", "order is 'random'; use one of schema, permuted"),
        ("--positions schema --order permuted", "order 'permuted' needs packed positions"),
        ("--questions 0", "questions is 0; it must be at least 1"),
        ("--questions many", "Invalid value for '--questions'"),
        ("--spare -1", "spare is -1; it must be at least 0"),
        ("--seed -1", "seed is -1; it must be at least 0"),
        ("--reuse off,exact --scaffold", "scaffold changes nothing under off, exact"),
        ("--dtype int4", "dtype is 'int4'"),
        ("--answers nowhere/answers.jsonl", "nowhere/answers.jsonl: there is no folder nowhere; make it first"),
        ("--model ./nowhere", "./nowhere: no such directory"),
        ("--documents 100 --questions 1", "the prompt ends at position"),
    ],
)
def test_errors_are_one_sentence(arguments, sentence, capsys):
    status, out, err = run(capsys, "eval", "modular-qa", *arguments.split())
    assert status == 2
    assert sentence in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("inlay: ")
    assert not out


def test_help_lists_the_command(capsys):
    assert main(["--help"]) == 0
    assert main(["eval", "--help"]) == 0
    assert "modular-qa" in capsys.readouterr().out
