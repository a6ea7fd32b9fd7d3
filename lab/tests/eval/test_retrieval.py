"""Retrieval that prefers stored documents, on the bundled model and a small collection."""

from __future__ import annotations

import pytest

from inlay.client.llm import LLM
from inlay.errors import ParameterError
from inlay_lab.eval.retrieval import RetrievalSetting, Retriever, collection, measure_retrieval, retrieval_table

SMALL = RetrievalSetting(documents=60, questions=8, chosen=2, candidates=20, epsilons=(0.0, 1.0), share=0.2)


def test_the_retriever_finds_the_document_of_a_question():
    documents, asks = collection(SMALL)
    retriever = Retriever([document.text for document in documents])
    first = [retriever.best(ask.text, 2)[0] for ask in asks]
    assert sum(ask.document in best for ask, best in zip(asks, first, strict=True)) >= len(asks) - 1


def test_popular_documents_are_asked_about_more_often():
    documents, asks = collection(RetrievalSetting(documents=100, questions=300))
    assert len({document.name for document in documents}) == 100
    popular = sum(ask.document < 10 for ask in asks)
    assert popular > 100


def test_a_larger_epsilon_finds_more_and_loses_at_most_epsilon():
    made = []

    def make(tokens: float) -> LLM:
        made.append(tokens)
        return LLM("demo", dtype="float32", store="off", promotion_memory=0, kv_memory="16MiB")

    result = measure_retrieval(make, SMALL)
    none, much = result["rows"]
    assert none["most_lost"] <= 1e-6 < much["most_lost"] <= 1.0
    assert much["hit_share"] > none["hit_share"]
    assert none["recall"] >= 0.8
    assert len(made) == 2
    assert "| 0 |" in retrieval_table(result)


@pytest.mark.parametrize("wrong", [{"chosen": 1}, {"candidates": 3}, {"share": 0}, {"epsilons": (-1.0,)}])
def test_wrong_settings_are_rejected(wrong):
    with pytest.raises(ParameterError):
        RetrievalSetting(**wrong)
