"""Haystack: a ranker that prefers stored documents, and messages with marked documents."""

from __future__ import annotations

from typing import Any

from haystack import Document, component

from inlay.retrieval.rerank import Scorer, choose_cached, marked_parts


@component
class CachedFirst:
    """Chooses ``most`` documents. Within ``epsilon`` of their score, it prefers documents whose KV is stored.

    Args:
        scorer: such as CacheScorer.
        epsilon: see ``rerank``.
        most: the number of documents to choose.
    """

    def __init__(self, scorer: Scorer, *, epsilon: float = 0.0, most: int = 4) -> None:
        self.scorer = scorer
        self.epsilon = epsilon
        self.most = most

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, list[Document]]:
        """Return the chosen documents, the most relevant first."""
        texts = [document.content or "" for document in documents]
        relevance = [document.score or 0.0 for document in documents]
        chosen = choose_cached(texts, relevance, self.scorer, epsilon=self.epsilon, most=self.most)
        return {"documents": [documents[index] for index in chosen]}


def marked_message(documents: list[Document], question: str) -> dict[str, Any]:
    """Return a user's message for an OpenAI client, with each document as a marked part, and the question behind."""
    return {"role": "user", "content": marked_parts([document.content or "" for document in documents], question)}
