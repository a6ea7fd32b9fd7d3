"""``inlay reproduce``: its report, its list, and its errors."""

from __future__ import annotations

import json

import pytest

from inlay_lab.reproduce.catalog import EXPERIMENTS
from tests.commands import run


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_report_of_some_experiments(tmp_path, capsys):
    status, out, err = run(capsys, "reproduce", "--quick", "--only", "token-memory,retrieval")
    assert status == 0, err
    assert out.splitlines()[-1] == "reproduction/report.md"
    assert [line.split(":")[0] for line in err.splitlines()] == [
        *("[1/2] token-memory", "[1/2] token-memory"),
        *("[2/2] retrieval", "[2/2] retrieval"),
    ]
    text = (tmp_path / "reproduction" / "report.md").read_text()
    for each in EXPERIMENTS.values():
        assert f"\n## {each.title}\n" in text
    assert "document tokens found, epsilon 0.05" in text
    assert "**Not asked for**: run it with --only growth." in text
    assert "**Not runnable here**: it needs a GPU" in text
    for name in ("token-memory", "retrieval"):
        assert (tmp_path / "reproduction" / "images" / f"{name}.png").is_file()


def test_json(tmp_path, capsys):
    status, out, _ = run(capsys, "reproduce", "--only", "token-memory", "--out", "there", "--json")
    assert status == 0
    found = json.loads(out)
    assert [each["name"] for each in found["experiments"]] == list(EXPERIMENTS)
    assert found == json.loads((tmp_path / "there" / "report.json").read_text())


def test_list(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    status, out, _ = run(capsys, "reproduce", "--list", "--full")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == ["experiment", *EXPERIMENTS]
    assert list(tmp_path.iterdir()) == []


def test_failure_sets_the_exit_status(tmp_path, capsys):
    (tmp_path / "d" / "gpu").mkdir(parents=True)
    (tmp_path / "d" / "gpu" / "attention.json").write_text("{")
    status, _, err = run(capsys, "reproduce", "--only", "gpu-kernels", "--stored", "d")
    assert status == 1
    assert "[1/1] gpu-kernels: failed:" in err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--quick", "--full"], "--quick and --full are two scales; give one of them"),
        (["--only", "figure9"], "there is no experiment 'figure9'; use one of first-token, growth"),
        (["--longbench", ".", "--only", "quality"], "--longbench and --model go together"),
        (["--model", "demo"], "--longbench and --model go together"),
        (["--longbench", "nowhere", "--model", "demo"], "--longbench: there is no folder nowhere; give one"),
        (["--stored", "nowhere"], "--stored: there is no folder nowhere; give one that is there"),
        (["--out", "/dev/null/x"], "--out: /dev/null/x/results cannot be made"),
    ],
)
def test_errors_are_one_sentence(arguments, sentence, capsys):
    status, out, err = run(capsys, "reproduce", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"inlay: {sentence}")
