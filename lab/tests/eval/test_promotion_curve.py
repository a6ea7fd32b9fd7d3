"""The promotion curve: with idle time between repetitions, modular answers approach those of full prefill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inlay import LLM, ParameterError
from inlay.cli.main import main
from inlay_lab.eval.modular_qa import measure_modular_qa
from inlay_lab.eval.repeated import measure_repeated
from inlay_lab.eval.report import write_report
from inlay_lab.eval.setting import Setting
from tests.model.check.models import save, small_model

pytestmark = pytest.mark.long

SMALL = {"documents": 3, "spare": 1, "questions": 5}


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch):
    monkeypatch.setattr("inlay_lab.eval.modular_qa.MAX_TOKENS", 4)


def test_repeated_prompts_reach_full_prefill():
    llm = LLM(small_model(), kv_memory="128MiB", profile="off")
    told: list[tuple[int, int]] = []
    rows = measure_repeated(llm, Setting(reuse=("modular",), repeat=3, **SMALL), lambda *done: told.append(done))
    assert [(row["documents"], row["repetition"], row["questions"]) for row in rows] == [(3, n, 5) for n in (1, 2, 3)]
    assert rows[0]["kl"] > 1e-3
    assert rows[0]["approximate"] > 0.3
    assert rows[0]["promoted_tokens"] > 0
    for row in rows[1:]:
        assert row["most_kl"] < 1e-6
        assert row["approximate"] == 0
        assert row["promoted_tokens"] == 0
    assert told[-1] == (15, 15)


def test_combinations_without_memory_are_not_promoted_repeatedly():
    """A tenth of this pool holds four of the five combinations."""
    llm = LLM(small_model(), kv_memory="64MiB", profile="off")
    rows = measure_repeated(llm, Setting(reuse=("modular",), repeat=8, **SMALL))
    assert sum(row["promoted_tokens"] > 0 for row in rows[1:]) <= 3
    assert all(row["approximate"] < rows[0]["approximate"] / 10 for row in rows[1:])


def test_other_measurements_promote_nothing():
    llm = LLM(small_model(), kv_memory="64MiB", profile="off")
    twice = [measure_modular_qa(llm, Setting(reuse=("modular",), **SMALL))["rows"][-1] for _ in range(2)]
    assert llm.stats().promoted_tokens == 0
    assert twice[0]["kl"] == pytest.approx(twice[1]["kl"])


def test_profiled_policy_is_scored_with_profiles(monkeypatch):
    llm = LLM(small_model(), kv_memory="64MiB")
    generate, used = llm.generate, []

    def noting(*args, **options):
        outputs = generate(*args, **options)
        used.extend(output.usage for output in outputs if "profiled" in str(options["reuse"]))
        return outputs

    monkeypatch.setattr(llm, "generate", noting)
    setting = Setting(reuse=("isolated+profiled:0.3",), scaffold=True, **SMALL)
    measure_modular_qa(llm, setting)
    assert sum(usage.recomputed_tokens for usage in used) > 0
    assert [usage.linked_tokens for usage in used] == [0] * len(used)


def test_the_report_has_a_table_and_a_drawing(tmp_path: Path):
    llm = LLM(small_model(), kv_memory="64MiB", profile="off")
    setting = Setting(reuse=("off",), repeat=2, **SMALL)
    result = measure_modular_qa(llm, setting) | {"repeated": measure_repeated(llm, setting)}
    write_report(result, tmp_path)
    assert (tmp_path / "repeated.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.md").read_text()
    assert "](repeated.png)" in page
    first, second = result["repeated"]
    assert f"| 3 | 1 | 5 | {first['exact_match']:.3f} | {first['reference']:.3f} | {first['kl']:.3g} |" in page
    assert f"| {second['most_kl']:.3g} | {second['approximate']:.1%} | " in page


def test_promotion_curve_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = str(save(tmp_path / "model"))
    arguments = ["--documents", "2", "--spare", "0", "--questions", "1", "--reuse", "modular", "--repeat", "2"]
    assert main(["eval", "modular-qa", "--model", model, *arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["repeated"]
    assert main(["eval", "modular-qa", "--model", model, *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [row["repetition"] for row in rows] == [1, 2]
    at = lines.index("modular, asked again and again, with idle time in between")
    assert lines[at + 1].split() == [
        "documents",
        "time",
        "exact",
        "match",
        "KL",
        "(nats)",
        "largest",
        "KL",
        "approximate",
        "promoted",
    ]
    assert [line.split()[:2] for line in lines[at + 2 : at + 4]] == [["2", "1"], ["2", "2"]]
    arguments[arguments.index("--repeat")] = "--healing"
    assert main(["eval", "modular-qa", "--model", model, *arguments, "--json"]) == 0
    printed = capsys.readouterr()
    assert "--repeat 2" in printed.err
    assert len(json.loads(printed.out.splitlines()[-1])["repeated"]) == 2


def test_negative_repetitions_are_rejected():
    with pytest.raises(ParameterError, match="repeat is -1; it must be at least 0"):
        Setting(repeat=-1)
