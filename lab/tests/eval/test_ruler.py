"""Generated long-context tasks: every answer is in the passages, and LMCache's files are read."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from inlay import LLM, ParameterError
from inlay_lab.eval.reading import measure_reading
from inlay_lab.eval.reading_data import messages_of, read_data
from inlay_lab.eval.ruler import TASKS, ruler_data
from tests.raising import raises


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_is_in_the_passages(task):
    data = ruler_data(task, questions=20, passages=5)
    assert data == ruler_data(task, questions=20, passages=5)
    assert data != ruler_data(task, questions=20, passages=5, seed=1)
    for question in data.questions:
        texts = [data.passages[name] for name in question.contexts]
        assert len(texts) == 5
        assert all(any(answer in text for text in texts) for answer in question.answers)
        assert question.other != question.gold
        if question.passage:
            assert question.answers[0] in data.passages[question.passage]
            assert sum(question.answers[0] in text for text in texts) == 1


def test_every_variable_follows_its_source():
    for question in ruler_data("variables", questions=20, passages=6).questions:
        data = ruler_data("variables", questions=20, passages=6)
        text = " ".join(data.passages[name] for name in question.contexts)
        value = question.text.split()[-1].rstrip("?")
        at = [text.index(f"{name} = ") for name in question.answers]
        assert at == sorted(at)
        assert f"{question.answers[0]} = {value}." in text


def test_the_common_words_are_the_most_common():
    data = ruler_data("words", questions=5, passages=4)
    for question in data.questions:
        listed = " ".join(data.passages[name] for name in question.contexts).replace(".", "").split()
        most = Counter(listed).most_common(3)
        assert {word for word, _ in most} == set(question.answers)


@pytest.mark.parametrize("wrong", [{"task": "hay"}, {"questions": 1}, {"passages": 1}, {"sentences": 0}])
def test_wrong_sizes_are_refused(wrong):
    given = {"task": "needle", "questions": 2, "passages": 2, **wrong}
    code = "parameter.unknown_choice" if "task" in wrong else "parameter.out_of_range"
    with raises(code, ParameterError):
        ruler_data(given.pop("task"), **given)


def test_generated_data_is_measured():
    llm = LLM("demo", dtype="float32", kv_memory="128MiB", promotion_memory=0, store="off")
    data = ruler_data("needle", questions=2, passages=3, sentences=2)
    result = measure_reading(llm, data, policies=("modular",), questions=2, tasks=("citation",))
    assert [row["reuse"] for row in result["rows"]] == ["off", "modular"]
    assert result["rows"][0]["kl"] == pytest.approx(0, abs=1e-6)


LMCACHE = [
    {
        "id": "q0",
        "question": "Who is the mayor?",
        "answers": ["Rosa Tilen"],
        "ctxs": [{"title": "Bravel", "text": "Rosa Tilen is the mayor."}, {"title": "Monar", "text": "Glass."}],
    },
    {
        "id": "q1",
        "question": "What is made in Monar?",
        "answers": ["Glass"],
        "ctxs": [{"title": "Monar", "text": "Glass."}, {"title": "Bravel", "text": "Rosa Tilen is the mayor."}],
    },
]


def test_a_file_of_lmcache_keeps_its_passages_in_order(tmp_path):
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(LMCACHE))
    data = read_data(path)
    assert len(data.passages) == 2
    for question in data.questions:
        (row,) = [row for row in LMCACHE if row["question"] == question.text]
        parts = messages_of(data, question, 6, 0)[1]["content"]
        assert [part["text"].strip() for part in parts[:-1]] == [f"{c['title']}\n{c['text']}" for c in row["ctxs"]]
    with raises("parameter.conflict", ParameterError):
        measure_reading(LLM("demo", kv_memory="64MiB"), data, policies=(), tasks=("citation",))


@pytest.mark.parametrize(
    "damaged", ["{", "{}", "[3]", '[{"question": "?"}]', '[{"question": "?", "answers": [], "ctxs": [1]}]']
)
def test_damaged_file_is_refused_with_its_position(tmp_path, damaged):
    path = tmp_path / "questions.json"
    path.write_text(damaged)
    with pytest.raises(ParameterError, match=r"questions\.json"):
        read_data(path)
