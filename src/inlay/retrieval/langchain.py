"""LangChain: a document compressor that prefers stored documents, and messages with marked documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.messages import HumanMessage
from pydantic import ConfigDict

from inlay.retrieval.rerank import Scorer, choose_cached, marked_parts


class CachedFirst(BaseDocumentCompressor):
    """Chooses ``most`` documents. Within ``epsilon`` of relevance, it prefers documents whose KV is stored.

    Args:
        scorer: such as CacheScorer.
        epsilon: see ``rerank``.
        most: the number of documents to choose.
        relevance: the key of the relevance in a document's metadata. Documents without one count as ranked by their
            order, 0.001 apart.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    scorer: Scorer
    epsilon: float = 0.0
    most: int = 4
    relevance: str = "relevance_score"

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        """Return the chosen documents, the most relevant first."""
        relevance = [
            float(document.metadata.get(self.relevance, -0.001 * place)) for place, document in enumerate(documents)
        ]
        texts = [document.page_content for document in documents]
        chosen = choose_cached(texts, relevance, self.scorer, epsilon=self.epsilon, most=self.most)
        return [documents[index] for index in chosen]


def marked_message(documents: Sequence[Document], question: str) -> HumanMessage:
    """Return a user's message with each document as a marked part, and the question behind them."""
    content: list[str | dict[Any, Any]] = list(
        marked_parts([document.page_content for document in documents], question)
    )
    return HumanMessage(content=content)
