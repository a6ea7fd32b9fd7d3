"""Reading comprehension: its figures are those of the stock model, and bad data is named with its place."""

from __future__ import annotations

import json

import pytest
import torch

from inlay import LLM, ParameterError
from inlay_lab.eval.reading import measure_reading, messages_of, read_data, table

PASSAGES = {
    "harbour": "The harbour of Bravel was built in 1832. Its lamp is turned by hand.",
    "museum": "The museum of Ostwick shows charts. Its director is Anna Thorn.",
    "ferry": "The ferry to Lindau leaves at nine. A ticket costs 12 marks.",
}
QUESTIONS = [
    ("harbour", "When was the harbour built?", ["1832"]),
    ("museum", "Who is the director?", ["Anna Thorn", "Thorn"]),
    ("ferry", "When does the ferry leave?", ["at nine", "nine"]),
    ("ferry", "Who is the captain?", []),
]


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "passages.jsonl", [{"name": name, "text": text} for name, text in PASSAGES.items()])
    rows = [{"passage": at, "question": text, "answers": answers} for at, text, answers in QUESTIONS]
    write(tmp_path / "questions.jsonl", rows)
    return tmp_path


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_gold_passage_takes_every_place(folder):
    data = read_data(folder)
    assert len(data.questions) == 3  # one has no answer
    question = data.questions[0]
    for number in range(3):
        parts = messages_of(data, question, 3, number)[1]["content"]
        assert parts[number]["text"].strip() == data.passages[question.passage]
        assert parts[-1]["text"] == f"Question: {question.text}"


def test_full_prefill_is_the_stock_model_and_recomputing_everything_equals_it(folder):
    data = read_data(folder)
    llm = LLM("demo", dtype="float32", kv_memory="128MiB", promotion_memory=0, store="off")
    done = []
    result = measure_reading(
        llm,
        data,
        policies=("anchored", "anchored+profiled:1"),
        passages=3,
        questions=2,
        progress=lambda *at: done.append(at),
    )
    full, anchored, recomputed = result["rows"]
    assert (full["kl"], full["same_answers"], full["flips"]) == (pytest.approx(0, abs=1e-6), 1, 0)
    assert anchored["kl"] > 1e-4 > abs(recomputed["gold_difference"])
    assert recomputed["recomputed"] > 0.3 > anchored["recomputed"]
    assert done == [(1, 2), (2, 2)]
    assert table(result).count("\n") == 4
    means = []
    for number, question in enumerate(data.questions[:2]):
        ids = list(llm.lay_out(messages_of(data, question, 3, number), reuse="exact").ids)
        gold = llm.processor.encoder.text(question.answers[0])
        with torch.inference_mode():
            logits = llm.loaded.model(input_ids=torch.tensor([ids + list(gold)])).logits[0].float()
        rows = torch.log_softmax(logits, -1)[len(ids) - 1 : -1]
        means.append(float(rows[torch.arange(len(gold)), torch.tensor(gold)].mean()))
    assert full["gold"] == pytest.approx(sum(means) / 2, abs=1e-3)


def test_bad_data_is_named_with_its_place(folder):
    (folder / "passages.jsonl").write_text('{"name": "a"}\n')
    with pytest.raises(ParameterError, match=r"passages\.jsonl:1: 'text' is missing"):
        read_data(folder)
    (folder / "passages.jsonl").unlink()
    with pytest.raises(ParameterError, match=r"passages\.jsonl: cannot be read"):
        read_data(folder)
