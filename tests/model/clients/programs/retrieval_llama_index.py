"""LlamaIndex: a retriever's nodes go through CachedFirst, and into marked parts of a chat."""

from __future__ import annotations

import sys

from llama_index.core.schema import NodeWithScore, TextNode
from retrieval_scenario import RELEVANCE, SYSTEM, TEXTS, answer, check_answer, evict

from inlay.retrieval import CacheScorer
from inlay.retrieval.llama_index import CachedFirst, marked_message

base = sys.argv[1]
evict(base)
nodes = [
    NodeWithScore(node=TextNode(text=text, metadata={"retrieved_at": str(number)}), score=relevance)
    for number, (text, relevance) in enumerate(zip(TEXTS, RELEVANCE, strict=True))
]


def chosen(epsilon: float) -> list[NodeWithScore]:
    scorer = CacheScorer(base, messages=[SYSTEM])
    found = CachedFirst(scorer=scorer, epsilon=epsilon, most=2).postprocess_nodes(nodes, query_str="Who?")
    assert scorer.error is None, scorer.error
    return found


answer(base, marked_message(chosen(0.0), "Who is the captain?"))
check_answer(base, lambda epsilon: [one.node.text for one in chosen(epsilon)])
