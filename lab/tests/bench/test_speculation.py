"""``inlay bench speculation``: its workloads, its rows, and its errors."""

from __future__ import annotations

import json

import pytest

from inlay.cli.main import main
from inlay.errors import ParameterError
from inlay_lab.bench.speculation import TASKS, SpeculationSetting, workload
from tests.raising import raises


@pytest.mark.parametrize("task", TASKS)
def test_the_prompts_of_a_task_differ(task):
    work = workload(task, 6, SpeculationSetting(model="demo", tokens=9))
    assert len({json.dumps(prompt) for prompt in work.prompts}) == 6
    lengths = {params.max_tokens for params in work.params}
    assert lengths == {9} if task != "story" else lengths <= set(range(4, 10)) and len(lengths) > 1
    assert {params.greedy for params in work.params} == {task != "story"}


def test_quotes_are_from_given_passages(tmp_path):
    (tmp_path / "passages.jsonl").write_text(
        "".join(json.dumps({"name": name, "text": f"Text {name}."}) + "\n" for name in "ab")
    )
    (tmp_path / "questions.jsonl").write_text(
        "".join(json.dumps({"passage": name, "question": "Which?", "answers": [name]}) + "\n" for name in "ab")
    )
    work = workload("quotes", 3, SpeculationSetting(model="demo", data=tmp_path))
    assert [prompt[0]["content"].rpartition("\n")[2] for prompt in work.prompts] == ["Text a.", "Text b.", "Text a."]


@pytest.mark.parametrize("wrong", [{"runs": 0}, {"batches": (0,)}, {"tokens": 1}, {"prompts": 0}])
def test_numbers_too_small_are_rejected(wrong):
    with pytest.raises(ParameterError):
        SpeculationSetting(model="demo", **wrong)


def test_an_unknown_task_is_rejected():
    with raises("parameter.unknown_choice", ParameterError, names="poem"):
        SpeculationSetting(model="demo", tasks=("poem",))


@pytest.mark.long
def test_both_engines_give_the_same_answers(capsys):
    assert main(["bench", "speculation", "--quick", "--model", "demo", "--batch", "1,3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(row["task"], row["batch"]) for row in result["rows"]] == [(task, n) for n in (1, 3) for task in TASKS]
    for row in result["rows"]:
        assert row["equal_answers"] == row["answers"] == 2 * row["batch"]
        assert row["accepted"] <= row["drafted"]
        assert row["off_tokens_s"] > 0
    assert sum(row["accepted"] for row in result["rows"]) > 0
