"""Haystack: a pipeline's documents go through CachedFirst, and into marked parts of a chat."""

from __future__ import annotations

import sys

from haystack import Document, Pipeline
from retrieval_scenario import RELEVANCE, SYSTEM, TEXTS, answer, check_answer, evict

from inlay.retrieval import CacheScorer
from inlay.retrieval.haystack import CachedFirst, marked_message

base = sys.argv[1]
evict(base)
documents = [Document(content=text, score=relevance) for text, relevance in zip(TEXTS, RELEVANCE, strict=True)]


def chosen(epsilon: float) -> list[Document]:
    scorer = CacheScorer(base, messages=[SYSTEM])
    pipeline = Pipeline()
    pipeline.add_component("cached", CachedFirst(scorer, epsilon=epsilon, most=2))
    found = pipeline.run({"cached": {"documents": documents}})["cached"]["documents"]
    assert scorer.error is None, scorer.error
    return found


answer(base, marked_message(chosen(0.0), "Who is the captain?"))
check_answer(base, lambda epsilon: [one.content for one in chosen(epsilon)])
