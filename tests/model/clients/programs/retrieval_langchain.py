"""LangChain: a retriever's documents go through CachedFirst, and into marked parts of a chat."""

from __future__ import annotations

import sys

from langchain_core.documents import Document
from retrieval_scenario import RELEVANCE, SYSTEM, TEXTS, answer, check_answer, evict

from inlay.retrieval import CacheScorer
from inlay.retrieval.langchain import CachedFirst, marked_message

base = sys.argv[1]
evict(base)
documents = [
    Document(page_content=text, metadata={"relevance_score": relevance})
    for text, relevance in zip(TEXTS, RELEVANCE, strict=True)
]


def chosen(epsilon: float) -> list[Document]:
    scorer = CacheScorer(base, messages=[SYSTEM])
    found = CachedFirst(scorer=scorer, epsilon=epsilon, most=2).compress_documents(documents, "Who?")
    assert scorer.error is None, scorer.error
    return list(found)


first = chosen(0.0)
message = marked_message(first, "Who is the captain?")
answer(base, {"role": "user", "content": message.content})
check_answer(base, lambda epsilon: [one.page_content for one in chosen(epsilon)])
