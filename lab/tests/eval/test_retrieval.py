"""Retrieval that prefers stored documents, on the bundled model and a small collection."""

from __future__ import annotations

import pytest

from inlay.client.llm import LLM
from inlay.errors import ParameterError
from inlay_lab.eval.collection import Retriever, generated
from inlay_lab.eval.reading_data import Data, Question
from inlay_lab.eval.retrieval import RetrievalSetting, draw_retrieval, measure_retrieval, of_data, retrieval_table

SMALL = RetrievalSetting(documents=60, questions=8, chosen=2, candidates=20, epsilons=(0.0, 1.0), share=0.2)


def test_the_retriever_finds_the_document_of_a_question():
    found = generated(60, 8)
    retriever = Retriever(found.texts)
    first = [retriever.best(ask.text, 2)[0] for ask in found.asks]
    assert sum(ask.document in best for ask, best in zip(found.asks, first, strict=True)) >= len(found.asks) - 1


def test_popular_documents_are_asked_about_more_often():
    found = generated(100, 300)
    assert len(set(found.texts)) == 100
    popular = sum(ask.document < 10 for ask in found.asks)
    assert popular > 100


def passages(count: int) -> Data:
    texts = {f"p{number}": f"Town {number} has a mayor named M{number}." for number in range(count)}
    asked = [
        Question(f"Who is the mayor of town {number}?", f"p{number}", (f"M{number}",), "") for number in range(count)
    ]
    return Data(texts, tuple(asked))


def test_real_data_gives_questions_about_its_own_passages():
    found = of_data(passages(9), RetrievalSetting(questions=50))
    assert len(found.texts) == 9
    for ask in found.asks:
        (answer,) = ask.answers
        assert f"{answer}." in found.texts[ask.document]
        assert found.is_right(f"It is {answer.lower()}.", ask)
        assert not found.is_right("It is nobody.", ask)


def test_data_without_passages_of_its_questions_is_rejected():
    data = Data(passages(3).passages, (Question("Who?", "", ("M1",), "", ("p0", "p1")),) * 2)
    with pytest.raises(ParameterError):
        of_data(data, SMALL)


def test_more_candidates_than_documents_are_rejected():
    with pytest.raises(ParameterError):
        measure_retrieval(lambda size: pytest.fail("nothing runs"), SMALL, data=passages(9))


@pytest.mark.parametrize("data", [None, passages(30)], ids=["generated", "real"])
def test_a_larger_epsilon_finds_more_and_loses_at_most_epsilon(tmp_path, data):
    made = []

    def make(size: int) -> LLM:
        made.append(size)
        return LLM("demo", dtype="float32", store="off", promotion_memory=0, kv_memory=size)

    result = measure_retrieval(make, SMALL, data=data)
    none, much = result["rows"]
    assert none["most_lost"] <= 1e-6 < much["most_lost"] <= 1.0
    assert much["hit_share"] > none["hit_share"]
    assert none["scored"] <= much["scored"] == SMALL.candidates
    assert none["recall"] >= 0.8
    assert 0 < none["stored_share"] < 1
    assert len(made) == 3
    assert "| 0 |" in retrieval_table(result)
    draw_retrieval(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.parametrize("wrong", [{"chosen": 1}, {"candidates": 3}, {"share": 0}, {"epsilons": (-1.0,)}])
def test_wrong_settings_are_rejected(wrong):
    with pytest.raises(ParameterError):
        RetrievalSetting(**wrong)
