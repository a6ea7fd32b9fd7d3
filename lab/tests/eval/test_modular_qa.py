"""The run: the same questions in every mode, and figures that follow from the answers."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import pytest
import torch

from inlay import LLM, ModelError, ParameterError
from inlay.check.run import divergence
from inlay.models.load import LoadedModel
from inlay.pml import Import, Prompt
from inlay_lab.eval.modular_cases import draw_rounds
from inlay_lab.eval.modular_qa import measure_modular_qa
from inlay_lab.eval.questions import TASKS
from inlay_lab.eval.setting import Setting
from tests.conftest import tiny
from tests.model.check.models import small_model

pytestmark = pytest.mark.long

SMALL = {"documents": 2, "questions": 10, "spare": 1}


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch):
    monkeypatch.setattr("inlay_lab.eval.modular_qa.MAX_TOKENS", 6)


def make(loaded: LoadedModel | None = None) -> LLM:
    return LLM(loaded or small_model(), kv_memory="64MiB")


def key(prompt: Prompt) -> tuple[str, ...]:
    """The unique key of a case's prompt."""
    return tuple(child.name if isinstance(child, Import) else child.text for child in prompt.children)


def right_answers() -> dict[tuple[str, ...], str]:
    rounds = draw_rounds(documents=2, spare=1, questions=10, seed=0)
    return {key(each.prompt(case)): case.answer for each in rounds for case in each.cases}


def say(monkeypatch: pytest.MonkeyPatch, llm: LLM, answer) -> None:
    """Make the model's answer to a prompt ``answer(reuse, right)``."""
    generate, right = llm.generate, right_answers()

    def answering(prompts, params, *, reuse, positions):
        outputs = generate(prompts, params, reuse=reuse, positions=positions)
        return [
            replace(output, outputs=[replace(output.outputs[0], text=answer(str(reuse), right[key(prompt)]))])
            for prompt, output in zip(prompts, outputs, strict=True)
        ]

    monkeypatch.setattr(llm, "generate", answering)


def test_rows_of_every_mode_and_task():
    llm = make()
    told = []
    setting = Setting(reuse=("off", "exact", "isolated"), positions=("packed", "schema"), **SMALL)
    result = measure_modular_qa(llm, setting, lambda done, total: told.append((done, total)))
    modes = [
        ("off", "packed"),
        ("exact", "packed"),
        ("exact", "schema"),
        ("isolated", "packed"),
        ("isolated", "schema"),
    ]
    rows = {(row["reuse"], row["positions"], row["task"]): row for row in result["rows"]}
    assert list(rows) == [(*mode, task) for mode in modes for task in (*TASKS, "all")]
    assert told == [(10 * done, 50) for done in range(1, 6)]
    for (reuse, positions, task), row in rows.items():
        assert (row["documents"], row["questions"]) == (2, 10 if task == "all" else 2)
        assert 0 <= row["low"] <= row["exact_match"] <= row["high"] <= 1
        differs = reuse == "isolated" or positions == "schema"
        assert (row["kl"] > 1e-3) if differs else (0 <= row["kl"] < 1e-6)
        assert (row["cached"] == 0) if reuse == "off" else (0.5 < row["cached"] < 1 or reuse == "exact")
    assert all(rows["off", "packed", task]["kl"] == 0 for task in TASKS)
    assert (result["model"], result["seed"], result["tasks"]) == ("small", 0, list(TASKS))
    assert not len(llm.store)


def test_mean_row_is_the_mean_of_the_tasks():
    *tasks, whole = measure_modular_qa(make(), Setting(reuse=("anchored",), **SMALL))["rows"]
    assert whole["task"] == "all"
    assert whole["kl"] == pytest.approx(sum(row["kl"] for row in tasks) / len(tasks), rel=1e-3)


def test_the_same_questions_in_every_mode(monkeypatch):
    llm = make()
    asked: dict[str, list[tuple[str, ...]]] = {}
    forced: dict[str, list[tuple[int, ...]]] = {}
    generate, distributions = llm.generate, llm.distributions

    def generating(prompts, params, *, reuse, positions):
        asked.setdefault(str(reuse), []).extend(map(key, prompts))
        return generate(prompts, params, reuse=reuse, positions=positions)

    def forcing(prompts, said, *, reuse, positions):
        forced.setdefault(str(reuse), []).extend(said)
        return distributions(prompts, said, reuse=reuse, positions=positions)

    monkeypatch.setattr(llm, "generate", generating)
    monkeypatch.setattr(llm, "distributions", forcing)
    measure_modular_qa(llm, Setting(**SMALL))
    assert list(asked) == list(forced) == ["off", "isolated", "anchored", "modular"]
    assert asked["off"] == asked["isolated"] == asked["anchored"] == asked["modular"] == list(right_answers())
    assert forced["off"] == forced["isolated"] == forced["anchored"]  # all are measured on full prefill's answer


def test_right_answers_count(monkeypatch):
    llm = make()
    say(monkeypatch, llm, lambda reuse, right: f" {right}\n")
    for row in measure_modular_qa(llm, Setting(**SMALL))["rows"]:
        assert (row["exact_match"], row["high"]) == (1, 1)
        assert (row["only_reference"], row["only_this"], row["p_value"]) == (0, 0, 1)


def test_every_answer_is_reported(monkeypatch):
    llm = make()
    say(monkeypatch, llm, lambda reuse, right: f" {right}\n" if reuse == "off" else "nothing")
    told = []
    setting = Setting(reuse=("off", "isolated"), **SMALL)
    rows = measure_modular_qa(llm, setting, tell=told.append)["rows"]
    cases = [(each, case) for each in draw_rounds(documents=2, questions=10, spare=1, seed=0) for case in each.cases]
    for mode in setting.reuse:
        answers = [row for row in told if row["reuse"] == mode]
        for row, (each, case) in zip(answers, cases, strict=True):
            assert (row["task"], row["subtask"], row["question"]) == (case.task, case.subtask, case.question)
            assert row["documents"] == [each.documents[number].text for number in case.imported]
            assert row["instruction"] == (each.instructions[case.form] if case.task == "form" else None)
            assert row["answer"] == case.answer
            assert row["said"] == (case.answer if mode == "off" else "nothing")
            assert row["right"] == (mode == "off")
            assert row["positions"] == "packed"
        for summary in (row for row in rows if row["reuse"] == mode):
            of_task = [row for row in answers if summary["task"] in ("all", row["task"])]
            assert summary["kl"] == pytest.approx(sum(row["kl"] for row in of_task) / len(of_task), rel=1e-3)
            cached, tokens = (sum(row[name] for row in of_task) for name in ("cached_tokens", "prompt_tokens"))
            assert summary["cached"] == round(cached / tokens, 4)


def test_reference_answers_are_reported_only_on_request():
    told = []
    measure_modular_qa(make(), Setting(reuse=("anchored",), **SMALL), tell=told.append)
    assert {row["reuse"] for row in told} == {"anchored"}


def test_almost_right_answers_do_not_count(monkeypatch):
    llm = make()
    say(monkeypatch, llm, lambda reuse, right: right if reuse == "off" else right + ".")
    rows = measure_modular_qa(llm, Setting(reuse=("off", "isolated"), **SMALL))["rows"]
    off, isolated = (row for row in rows if row["task"] == "all")
    assert (off["exact_match"], isolated["exact_match"], isolated["low"]) == (1, 0, 0)
    assert (isolated["only_reference"], isolated["only_this"]) == (10, 0)
    assert isolated["p_value"] == pytest.approx(2 / 2**10, rel=1e-3)


def test_reference_runs_even_if_not_requested(monkeypatch):
    llm = make()
    say(monkeypatch, llm, lambda reuse, right: "" if reuse == "off" else right)
    rows = measure_modular_qa(llm, Setting(reuse=("anchored", "anchored"), **SMALL))["rows"]
    assert [row["reuse"] for row in rows] == ["anchored"] * 6
    assert (rows[-1]["only_reference"], rows[-1]["only_this"]) == (0, 10)
    assert all(row["kl"] > 0 for row in rows)


def test_scaffolds_restore_attention_between_documents(monkeypatch):
    llm = make()
    say(monkeypatch, llm, lambda reuse, right: right)
    told = []
    setting = Setting(reuse=("off", "exact", "isolated", "anchored"), scaffold=True, **SMALL)
    rows = measure_modular_qa(llm, setting, tell=told.append)["rows"]
    modes = [
        ("off", False),
        ("exact", False),
        *((reuse, on) for reuse in ("isolated", "anchored") for on in (False, True)),
    ]
    assert [(row["reuse"], row["scaffold"]) for row in rows if row["task"] == "all"] == modes
    assert [(row["reuse"], row["scaffold"]) for row in told[::10]] == modes
    for task in TASKS:
        alone, together = (
            next(row for row in rows if (row["reuse"], row["scaffold"], row["task"]) == ("anchored", scaffold, task))
            for scaffold in (False, True)
        )
        assert alone["kl"] > 1e-3
        # The user turn contains only documents. Without an instruction, documents miss only each other's context.
        assert (together["kl"] < 1e-6) == (task != "form")
        assert alone["cached"] == together["cached"] > 0.5


def test_learned_positions():
    llm = make(tiny("gpt2"))
    with pytest.raises(ParameterError, match="does not allow"):
        measure_modular_qa(llm, Setting(positions=("packed",), **SMALL))
    rows = measure_modular_qa(llm, Setting(reuse=("isolated",), documents=2, questions=1, spare=0))["rows"]
    assert {row["positions"] for row in rows} == {"schema"}


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "has no chat template"),
        ("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
         "{{ m.content }}{% endfor %}", "no system role"),
    ],
)  # fmt: skip
def test_a_model_without_a_system_turn(template, reason):
    tokenizer = copy.deepcopy(small_model().tokenizer)
    tokenizer.chat_template = template
    llm = make(replace(small_model(), tokenizer=tokenizer))
    with pytest.raises(ModelError, match=f"modular-qa asks in a system and a user turn, but .*{reason}"):
        measure_modular_qa(llm, Setting(**SMALL))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"reuse": ("off", "much")}, "reuse='much' is not a reuse policy"),
        ({"reuse": ("",)}, "reuse='' is not a reuse policy"),
        ({"positions": ("loose",)}, "positions is 'loose'; use one of schema, packed"),
        ({"documents": 1}, "documents is 1; it must be at least 2: one of the tasks compares two of them"),
        ({"questions": 0}, "questions is 0; it must be at least 1"),
        ({"spare": -1}, "spare is -1; it must be at least 0"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
        (
            {"reuse": ("off", "exact"), "scaffold": True},
            "scaffold changes nothing under off, exact: only modules are encoded without each other; "
            "add isolated or anchored to reuse",
        ),
        ({"documents": 501}, "documents and spare are 1,002 together; use at most 1,000"),
        ({"documents": (2, 1)}, "documents is 1; it must be at least 2"),
        (
            {"tasks": ("single", "oldest")},
            "tasks is 'oldest'; use one of single, compare, count, unstated, form, superl",
        ),
        ({"order": "random"}, "order is 'random'; use one of schema, permuted"),
        ({"order": "permuted", "scaffold": True}, "scaffold names documents in the schema's order; use order 'schema'"),
    ],
)
def test_wrong_settings(wrong, sentence):
    with pytest.raises(ParameterError) as caught:
        Setting(**wrong)
    assert sentence in str(caught.value)


def test_divergence():
    fair, skewed = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    assert divergence(fair, fair) == 0
    assert divergence(fair, skewed) == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1))
    assert divergence(skewed, fair) == pytest.approx(0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5))
    both = divergence(torch.cat((fair, fair)), torch.cat((fair, skewed)))
    assert both == pytest.approx(divergence(fair, skewed) / 2)  # the mean over tokens
    certain = torch.tensor([[1.0, 0.0]]).log()
    assert divergence(certain, certain) == 0
    assert divergence(certain, fair) == pytest.approx(math.log(2))
    assert divergence(fair, certain) == math.inf


def counting_calls(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> list[str]:
    """Record the policy of every later request."""
    generate, asked = llm.generate, []

    def counted(prompts, params, *, reuse, positions):
        asked.extend([str(reuse)] * len(prompts))
        return generate(prompts, params, reuse=reuse, positions=positions)

    monkeypatch.setattr(llm, "generate", counted)
    return asked


def test_interrupted_run_is_continued(monkeypatch, tmp_path):
    llm, log, setting = make(), tmp_path / "answers.jsonl", Setting(reuse=("off", "anchored"), **SMALL)
    asked = counting_calls(monkeypatch, llm)

    def break_off(done: int, total: int) -> None:
        if done == total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_modular_qa(llm, setting, break_off, log=log)
    assert asked == ["off"] * 10
    asked.clear()
    told: list[dict] = []
    whole = measure_modular_qa(llm, setting, tell=told.append, log=log)
    assert asked == ["off"] * 10 + ["anchored"] * 10  # the divergence needs full prefill's answer
    assert len(told) == 20
    asked.clear()
    assert measure_modular_qa(llm, setting, log=log) == whole
    assert not asked


def test_only_missing_answers_are_asked(monkeypatch, tmp_path):
    llm, log = make(), tmp_path / "answers.jsonl"
    asked = counting_calls(monkeypatch, llm)
    few = {"documents": 2, "spare": 1, "questions": 10}
    measure_modular_qa(llm, Setting(reuse=("off",), **few), log=log)
    asked.clear()
    progress = []
    rows = measure_modular_qa(
        llm,
        Setting(reuse=("off", "exact"), **few | {"questions": 20}),
        lambda done, total: progress.append((done, total)),
        log=log,
    )["rows"]
    assert asked == [*["off"] * 10, *["exact"] * 10] * 2
    assert [row["questions"] for row in rows if row["task"] == "all"] == [20, 20]
    assert progress == [(done, 40) for done in (10, 20, 30, 40)]
    apart = measure_modular_qa(make(), Setting(reuse=("off", "exact"), **few | {"questions": 20}))["rows"]
    for row, alone in zip(rows, apart, strict=True):
        row, alone = ({name: value for name, value in each.items() if name != "ttft_s"} for each in (row, alone))
        assert row == alone | {name: pytest.approx(alone[name], abs=1e-6) for name in ("kl", "kl_high")}


def test_answers_of_another_model_are_rejected(tmp_path):
    log = tmp_path / "answers.jsonl"
    measure_modular_qa(make(), Setting(reuse=("off",), **SMALL), log=log)
    with pytest.raises(ParameterError, match="give another directory, or delete the file"):
        measure_modular_qa(make(tiny("llama")), Setting(reuse=("off",), **SMALL), log=log)


def test_several_numbers_of_documents():
    rows = measure_modular_qa(
        make(), Setting(reuse=("off", "anchored"), documents=(2, 3, 2), questions=5, tasks=("single", "shared"))
    )["rows"]
    assert [(row["documents"], row["spare"], row["reuse"], row["task"]) for row in rows] == [
        (documents, documents, reuse, task)
        for documents in (2, 3)
        for reuse in ("off", "anchored")
        for task in ("single", "shared", "all")
    ]
    assert [row["questions"] for row in rows] == [3, 3, 6] * 4


def test_difference_equals_the_paired_difference(monkeypatch):
    llm = make()
    right = iter([True, True, False, *[True] * 7])
    say(monkeypatch, llm, lambda reuse, answer: answer if reuse == "off" or next(right) else "")
    row = measure_modular_qa(llm, Setting(reuse=("anchored",), **SMALL))["rows"][-1]
    assert (row["reference"], row["exact_match"], row["difference"]) == (1, 0.9, -0.1)
    assert row["difference_low"] < -0.1 < row["difference_high"] < 0.3


def test_recomputed_is_a_share_of_module_tokens(monkeypatch):
    llm = make()
    generate = llm.generate

    @dataclass(frozen=True)
    class Counted:
        prompt_tokens: int
        cached_tokens: int
        module_tokens: int
        recomputed_tokens: int

    def recomputing(prompts, params, *, reuse, positions):
        outputs = generate(prompts, params, reuse=reuse, positions=positions)
        return [replace(each, usage=Counted(100, 60, 60, 20 if str(reuse) == "anchored" else 0)) for each in outputs]

    assert [row["recomputed"] for row in measure_modular_qa(llm, Setting(**SMALL))["rows"]] == [None] * 6 + [0.0] * 18
    monkeypatch.setattr(llm, "generate", recomputing)
    rows = measure_modular_qa(llm, Setting(reuse=("anchored", "isolated"), **SMALL))["rows"]
    assert [row["recomputed"] for row in rows] == [0.25] * 6 + [0.0] * 6


def test_time_to_first_token_is_of_a_lone_request(monkeypatch):
    llm, sizes = make(), []
    generate = llm.generate

    def timed(prompts, params, *, reuse, positions):
        sizes.append(len(prompts))
        outputs = generate(prompts, params, reuse=reuse, positions=positions)
        return [replace(each, metrics=replace(each.metrics, ttft_s=len(sizes))) for each in outputs]

    monkeypatch.setattr(llm, "generate", timed)
    rows = measure_modular_qa(llm, Setting(reuse=("off",), **SMALL))["rows"]
    assert sizes == [1] * 10
    assert [row["ttft_s"] for row in rows] == [1.5, 3.5, 5.5, 7.5, 9.5, 5.5]


def test_documents_in_any_order_need_packed_positions():
    rows = measure_modular_qa(make(), Setting(reuse=("anchored",), order="permuted", **SMALL))["rows"]
    assert {row["positions"] for row in rows} == {"packed"}
    with pytest.raises(ParameterError, match="order 'permuted' needs packed positions"):
        measure_modular_qa(make(), Setting(reuse=("anchored",), positions=("schema",), order="permuted", **SMALL))


def test_selection_passes_count_as_recomputed(monkeypatch):
    """``blend`` has such passes; a pass of new text does not count as one."""
    small = SMALL | {"tasks": ("single",)}
    rows = measure_modular_qa(
        make(), Setting(reuse=("anchored+query:0.2", "anchored+blend:0.2", "anchored+oracle:0.2"), **small)
    )["rows"]
    shares = {row["reuse"]: row["recomputed"] for row in rows if row["task"] == "all"}
    assert shares["anchored+query:0.2"] == shares["anchored+oracle:0.2"] == pytest.approx(0.2, abs=0.01)
    assert shares["anchored+blend:0.2"] > 0.5


def test_oracle_recomputes_the_largest_deviations_and_restores_profiles():
    llm = make()
    rows = measure_modular_qa(llm, Setting(reuse=("anchored", "anchored+oracle:0.5", "anchored+oracle:1"), **SMALL))
    kl = {row["reuse"]: row["kl"] for row in rows["rows"] if row["task"] == "all"}
    assert kl["anchored+oracle:1"] < 1e-6 < kl["anchored+oracle:0.5"] < kl["anchored"]
    assert llm.local.engine.kv_manager.profiles is llm.local.engine.profiler.profiles
