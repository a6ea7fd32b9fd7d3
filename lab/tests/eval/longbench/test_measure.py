"""The results of the example's rows in every mode, stored answer by answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inlay import LLM, ParameterError
from inlay.sampling.params import SamplingParams
from inlay_lab.eval.longbench import measure
from inlay_lab.eval.longbench.data import open_suite
from inlay_lab.eval.longbench.datasets import DATASETS
from inlay_lab.eval.longbench.measure import Setting, measure_longbench
from inlay_lab.eval.longbench.prompts import fitted
from inlay_lab.eval.setting import Mode

from .test_data import EXAMPLE, ROW, folder

pytestmark = pytest.mark.long

pytest.importorskip("jieba", reason="jieba is not installed")
pytest.importorskip("rouge", reason="rouge is not installed")
SETTING = Setting(reuse=("off", "exact", "anchored"))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", dtype="float32", kv_memory="64MiB", seed=0)


@pytest.fixture(scope="module")
def result(llm: LLM) -> dict[str, Any]:
    return measure_longbench(llm, open_suite(EXAMPLE), SETTING)


def test_every_dataset_has_a_row_in_every_mode(result: dict[str, Any]) -> None:
    told = [(row["dataset"], row["reuse"]) for row in result["rows"]]
    assert told == [(name, reuse) for name in (*DATASETS, "all") for reuse in SETTING.reuse]
    assert all(0 <= row["score"] <= 100 for row in result["rows"])
    assert all(row["samples"] == (42 if row["dataset"] == "all" else 2) for row in result["rows"])
    assert result["chat"]
    assert len(result["own_templates"]) == 15
    assert json.loads(json.dumps(result)) == result


def test_exact_equals_full_prefill_and_modules_are_read(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        if row["dataset"] == "all":
            continue
        if row["reuse"] != "anchored":
            assert (row["same_answers"], row["difference"], row["p_value"]) == (2, 0, 1)
            assert row["recomputed"] is None
        elif row["documents"] == 1:  # it sees all text before it
            assert (row["same_answers"], row["recomputed"]) == (2, None)
            assert row["cached"] > 0.25
        else:
            assert row["cached"] > 0.25
            assert row["recomputed"] == 0
        assert row["difference"] == pytest.approx(row["score"] - row["reference"], abs=0.011)


def test_mean_is_over_the_datasets(result: dict[str, Any]) -> None:
    for reuse in SETTING.reuse:
        rows = [row for row in result["rows"] if row["reuse"] == reuse]
        *each, mean = rows
        for name in ("score", "difference"):
            assert mean[name] == pytest.approx(sum(row[name] for row in each) / 21, abs=0.011)
        assert mean["difference_low"] <= mean["difference"] <= mean["difference_high"]


def test_model_answers_from_the_documents(result: dict[str, Any]) -> None:
    scores = {row["dataset"]: row["score"] for row in result["rows"] if row["reuse"] == "off"}
    assert scores["qasper"] == scores["multifieldqa_en"] == 100
    assert scores["hotpotqa"] >= 50


def test_kept_answers_are_not_asked_again(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite, log, asked = open_suite(EXAMPLE, ["qasper", "trec"]), tmp_path / "answers.jsonl", []
    ask = measure.ask

    def counted(llm: LLM, dataset: Any, case: Any, mode: Any, most: int) -> Any:
        if len(asked) == 5:
            raise KeyboardInterrupt
        asked.append((case.sample.name, mode.reuse))
        return ask(llm, dataset, case, mode, most)

    monkeypatch.setattr(measure, "ask", counted)
    with pytest.raises(KeyboardInterrupt):
        measure_longbench(llm, suite, SETTING, log=log)
    assert asked == [("qasper-1", "off"), ("qasper-1", "exact"), ("qasper-1", "anchored"), ("qasper-2", "off"),
                     ("qasper-2", "exact")]  # fmt: skip
    done: list[tuple[int, int]] = []
    asked[:] = asked[:4]  # one more may be asked
    with pytest.raises(KeyboardInterrupt):
        measure_longbench(llm, suite, SETTING, progress=lambda *counts: done.append(counts), log=log)
    assert asked[4:] == [("qasper-2", "anchored")]
    assert done[-1] == (6, 12)
    monkeypatch.setattr(measure, "ask", ask)
    whole = measure_longbench(llm, suite, SETTING, log=log)
    kept = log.read_text()
    assert len(kept.splitlines()) == 1 + 12
    monkeypatch.setattr(measure, "ask", None)
    assert measure_longbench(llm, suite, SETTING, log=log) == whole
    fewer = Setting(reuse=("anchored",), limit=1)
    assert [row["samples"] for row in measure_longbench(llm, suite, fewer, log=log)["rows"]] == [1, 1, 1, 1, 2, 2]
    assert log.read_text() == kept


def test_answers_end_as_in_the_benchmark(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params: list[SamplingParams] = []
    generate = llm.generate

    def kept(prompts: Any, given: SamplingParams, **rest: Any) -> Any:
        params.append(given)
        return generate(prompts, given, **rest)

    monkeypatch.setattr(llm, "generate", kept)
    measure_longbench(llm, open_suite(EXAMPLE, ["qasper", "samsum"]), Setting(reuse=("off",), limit=1))
    newline = llm.tokenizer.encode("\n", add_special_tokens=False)
    assert [(one.temperature, one.max_tokens, one.min_tokens, list(one.stop_ids)) for one in params] == [
        (0, 16, 0, []),
        (0, 16, 1, newline[-1:]),
    ]


def test_many_examples_become_many_modules(llm: LLM, tmp_path: Path) -> None:
    """A row of TREC has some four hundred examples."""
    context = "".join(f"Question: Who ? {n}\nType: P\n" for n in range(300))
    place = folder(tmp_path, {**ROW, "context": context, "answers": ["P"], "all_classes": ["P"]}, name="trec",
                   dataset2maxlen={"trec": 4})  # fmt: skip
    rows = measure_longbench(llm, open_suite(place), Setting(reuse=("anchored",)))["rows"]
    assert rows[1]["documents"] > 100
    assert rows[1]["cached"] > 0.9


def test_rows_are_read_before_anything_is_asked(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ask", None)
    with pytest.raises(ParameterError, match=r"qasper\.jsonl:2: it is not JSON"):
        measure_longbench(llm, open_suite(folder(tmp_path, ROW, "{")), SETTING)
    with pytest.raises(ParameterError, match=r"qasper\.jsonl is empty; get it anew, or leave it out"):
        measure_longbench(llm, open_suite(folder(tmp_path)), SETTING)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"reuse": ("much",)}, "reuse='much' is not a reuse policy"),
        ({"limit": 0}, "limit is 0; it must be at least 1"),
        ({"longest": 10}, "max-length is 10; it must be at least 64 tokens"),
    ],
)
def test_invalid_settings_are_rejected(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ParameterError, match=sentence):
        Setting(**wrong)


def test_schema_positions_give_the_same_answers(llm: LLM) -> None:
    """A prompt imports all modules in order, so it works on models that cannot shift segments."""
    suite = open_suite(EXAMPLE, ["hotpotqa", "triviaqa"])
    for dataset in suite.datasets:
        sample = next(suite.samples(dataset))
        case = fitted(llm, dataset, suite.templates[dataset.name], sample, 16, chat=True, longest=None)
        packed, schema = (measure.ask(llm, dataset, case, Mode("anchored", name), 16) for name in ("packed", "schema"))
        assert (packed.said, packed.tokens, packed.cached) == (schema.said, schema.tokens, schema.cached)
