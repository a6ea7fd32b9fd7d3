"""Reading comprehension: its figures are those of the stock model, and bad data is named with its place."""

from __future__ import annotations

import json
import random

import pytest
import torch

from inlay import LLM, ParameterError
from inlay_lab.eval import reading as module
from inlay_lab.eval.reading import expected_flips, measure_reading, table
from inlay_lab.eval.reading_data import documents_data, messages_of, read_data, schema_prompt
from inlay_lab.eval.reading_tasks import choice, citation, rouge_l
from tests.raising import raises

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


def test_gold_passage_is_at_every_position(folder):
    data = read_data(folder)
    assert len(data.questions) == 3  # one has no answer
    question = data.questions[0]
    for number in range(3):
        parts = messages_of(data, question, 3, number)[1]["content"]
        assert parts[number]["text"].strip() == data.passages[question.passage]
        assert parts[-1]["text"] == f"Question: {question.text}"


def test_a_prompt_of_a_schema_has_the_text_of_the_messages(folder):
    data, llm, gaps = read_data(folder), demo(), 0
    for number, question in enumerate(data.questions):
        schema, prompt = schema_prompt(data, question, 2, number, 3)
        assert len(schema.modules) == 3
        llm.add_schema(schema, encode=False)
        ids = llm.lay_out(messages_of(data, question, 2, number), reuse="exact").ids
        laid_out = llm.lay_out(prompt, reuse="anchored", positions="schema")
        assert laid_out.ids == ids
        gaps += laid_out.positions[-1] >= len(ids)
    assert gaps


def test_modules_of_a_schema_are_read_at_its_positions(folder):
    data, llm = read_data(folder), demo()
    result = measure_reading(llm, data, policies=("anchored", "anchored+profiled:1"), passages=2, questions=3, schema=3)
    full, anchored, recomputed = result["rows"]
    assert result["schema"] == 3
    assert full["read"] == 0 < 0.05 < anchored["read"]
    assert recomputed["recomputed"] > 0.3
    assert anchored["kl"] > recomputed["kl"]
    packed = measure_reading(llm, data, policies=("anchored",), passages=2, questions=3)["rows"][1]
    assert packed["kl"] != pytest.approx(anchored["kl"], rel=1e-3)


@pytest.mark.parametrize("given", [{"schema": 1}, {"schema": 3, "marks": False}, {"schema": 3, "tasks": ("choice",)}])
def test_a_schema_that_does_not_fit_is_rejected(folder, given):
    with raises("parameter.conflict"):
        measure_reading(demo(), read_data(folder), policies=("modular+content",), passages=2, questions=1, **given)


def demo() -> LLM:
    return LLM("demo", dtype="float32", kv_memory="128MiB", promotion_memory=0, store="off")


def test_full_prefill_and_full_recomputation_equal_the_stock_model(folder):
    data = read_data(folder)
    llm = demo()
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
    assert full["margin_change"] == full["expected_flips"] == 0
    assert anchored["margin_change"] > 0.01 > recomputed["margin_change"]
    assert anchored["kl"] > 1e-4 > abs(recomputed["gold_difference"])
    assert recomputed["recomputed"] > 0.3 > anchored["recomputed"]
    assert done == [(2, 2)]
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


def test_concurrent_questions_give_the_same_figures(folder, monkeypatch):
    data, results = read_data(folder), []
    for at_once in (1, 3):
        monkeypatch.setattr(module, "AT_ONCE", at_once)
        results.append(measure_reading(demo(), data, policies=("modular",), passages=2, questions=3, tasks=("choice",)))
    one, other = (result["rows"] for result in results)
    for row, same in zip(one, other, strict=True):
        assert row["choice"] == same["choice"]
        for name in ("kl", "gold", "f1", "recomputed"):
            assert row[name] == pytest.approx(same[name], abs=1e-4)


def test_an_interruption_keeps_the_questions_so_far(folder, monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE", 1)

    def interrupt(done, of):
        raise KeyboardInterrupt

    partial = []
    result = measure_reading(
        demo(),
        read_data(folder),
        policies=("anchored",),
        passages=2,
        questions=3,
        progress=interrupt,
        partial=partial.append,
    )
    assert (result["questions"], len(result["rows"])) == (1, 2)
    assert partial == [result]


def test_expected_flips_equal_simulated_noise():
    draw = random.Random(0)
    margins = [draw.uniform(-2, 2) for _ in range(4000)]
    flips = [(margin >= 0) != (margin + draw.gauss(0, 0.3) >= 0) for margin in margins]
    assert expected_flips(margins, 0.3) == pytest.approx(sum(flips) / len(flips), abs=0.01)
    assert expected_flips(margins, 0.0) == 0


def test_tasks_ask_for_the_gold_passage_and_answer(folder):
    data = read_data(folder)
    question = data.questions[0]
    for number in range(3):
        asked = choice(data, question, 3, number)
        (line,) = [
            line for line in asked.messages[1]["content"][-1]["text"].splitlines() if question.answers[0] in line
        ]
        assert line == f"{asked.options[asked.right]}. {question.answers[0]}"
        asked = citation(data, question, 3, number)
        parts = [part["text"] for part in asked.messages[1]["content"]]
        at = parts.index(f"{data.passages[question.passage]}\n\n")
        assert parts[at - 1] == f"[{asked.options[asked.right]}] "


def test_full_recomputation_changes_no_decision_or_summary(folder):
    tasks = ("choice", "citation", "summary")
    result = measure_reading(
        demo(), read_data(folder), policies=("modular+profiled:1",), passages=3, questions=2, tasks=tasks
    )
    full, recomputed = result["rows"]
    for task in ("choice", "citation"):
        assert recomputed[task]["flips"] == full[task]["flips"] == 0
        assert recomputed[task]["accuracy"] == full[task]["accuracy"]
    assert full["summary"]["rouge_l"] == recomputed["summary"]["rouge_l"] == 1
    assert "citation flips" in table(result)


def test_plain_passages_are_found_by_their_content(folder):
    long = {
        name: f"# {name}\n{text} " + "It stands on the shore, and many people come to see it. " * 6
        for name, text in PASSAGES.items()
    }
    write(folder / "passages.jsonl", [{"name": name, "text": text} for name, text in long.items()])
    policies = ("modular", "modular+content+profiled:0", "modular+content+profiled:1")
    result = measure_reading(demo(), read_data(folder), policies=policies, passages=3, questions=3, marks=False)
    full, unmarked, found, recomputed = result["rows"]
    assert (full["read"], unmarked["read"]) == (0, 0)
    assert found["read"] > 0.1
    assert recomputed["recomputed"] > 0.1
    assert recomputed["kl"] < 1e-4
    with raises("parameter.conflict", ParameterError):
        measure_reading(demo(), read_data(folder), tasks=("choice",), marks=False)


def test_an_unknown_task_is_refused(folder):
    with raises("parameter.unknown_choice", ParameterError):
        measure_reading(demo(), read_data(folder), tasks=("poem",))


def test_likeness_is_the_longest_common_subsequence():
    assert rouge_l("The cat sat.", "the cat ran") == pytest.approx(2 / 3)
    assert rouge_l("a b c d", "d a b") == pytest.approx(2 * 2 / 7)
    assert (rouge_l("", "word"), rouge_l("", "")) == (0, 1)


def test_invalid_data_is_located(folder):
    (folder / "passages.jsonl").write_text('{"name": "a"}\n')
    with pytest.raises(ParameterError, match=r"passages\.jsonl:1: 'text' is missing"):
        read_data(folder)
    (folder / "passages.jsonl").unlink()
    with pytest.raises(ParameterError, match=r"passages\.jsonl: cannot be read"):
        read_data(folder)


def test_generated_documents_have_their_answers():
    data = documents_data(questions=12, passages=3, paragraphs=2)
    assert len(data.questions) == 12
    with_answer = [question for question in data.questions if question.passage in question.contexts]
    assert len(with_answer) >= 10  # the retriever found the document
    for question in with_answer:
        assert question.gold in question.passage
        assert question.other != question.gold
        assert len(data.names(question, 3, 0)) == 3
    with raises("parameter.out_of_range", ParameterError):
        documents_data(questions=12, passages=1, paragraphs=2)
