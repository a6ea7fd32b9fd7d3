"""``inlay eval longbench``: its tables, its JSON, its report, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import run
from tests.model.check.models import save

EXAMPLE = Path(__file__).parents[3] / "examples" / "longbench"
QA = ["--data", str(EXAMPLE), "--datasets", "qasper,hotpotqa"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(tmp_path_factory.mktemp("model")))


def test_json_only(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", model, "--reuse", "isolated,off,exact", "--limit", "1", "--json"]
    status, out, _ = run(capsys, "eval", "longbench", *QA, *arguments)
    assert status == 0
    assert len(out.splitlines()) == 1
    result = json.loads(out)
    assert [row["dataset"] for row in result["rows"]] == [*["qasper"] * 3, *["hotpotqa"] * 3, *["all"] * 3]
    assert [row["reuse"] for row in result["rows"][:3]] == ["off", "isolated", "exact"]
    assert (Path(result["model"]), result["limit"], result["max_model_len"]) == (Path(model), 1, 4096)


def test_tables_before_the_json(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run(capsys, "eval", "longbench", *QA, "--model", model, "--reuse", "anchored")
    assert status == 0
    *lines, last = out.splitlines()
    assert lines[0] == "4 rows of 2 of 21 datasets."
    (at,) = (
        number for number, line in enumerate(lines) if line.split() == ["Dataset", "Metric", "Baseline", "anchored"]
    )
    for line, row in zip(lines[at + 1 : at + 4], json.loads(last)["rows"][::2], strict=True):
        assert f"{row['score']:.2f}" in line.split()
    assert sum(line.split()[:1] == ["HotpotQA"] for line in lines) == 2
    assert max(map(len, lines)) <= 80


def test_interrupted_report_is_continued(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "deep" / "report"
    arguments = ["--model", model, "--reuse", "off,anchored", "--json", "--report", str(place)]
    status, out, _ = run(capsys, "eval", "longbench", *QA, *arguments)
    assert status == 0
    assert json.loads((place / "report.json").read_text()) == json.loads(out)
    assert (place / "report.md").read_text().startswith("# LongBench\n")
    monkeypatch.setattr("inlay_lab.eval.longbench.measure.ask", None)
    assert run(capsys, "eval", "longbench", *QA, *arguments)[:2] == (0, out)
    status, _, err = run(capsys, "eval", "longbench", *QA, *arguments, "--dtype", "bfloat16")
    assert status == 2
    assert "give another directory, or delete the file" in err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--datasets squad", "datasets is 'squad'; use some of narrativeqa, qasper"),
        ("--data nowhere", "--data nowhere: there is no such folder; get it with: hf download"),
        ("--reuse much", "reuse='much' is not a reuse policy"),
        ("--limit 0", "limit is 0; it must be at least 1"),
        ("--limit all", "Invalid value for '--limit'"),
        ("--max-length 3", "max-length is 3; it must be at least 64 tokens"),
        ("--report pyproject.toml/x", "--report pyproject.toml/x cannot be made"),
        ("--model ./nowhere", "./nowhere: no such directory"),
    ],
)
def test_errors_are_one_sentence(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLE.parents[1])
    status, out, err = run(capsys, "eval", "longbench", *QA, *arguments.split())
    assert status == 2
    assert sentence in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("inlay: ")
    assert not out


def test_data_folder_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "eval", "longbench")
    assert status == 2
    assert "--data" in err
