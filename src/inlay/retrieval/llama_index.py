"""LlamaIndex: a node postprocessor that prefers stored nodes, and messages with marked nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle

from inlay.retrieval.rerank import choose_cached, marked_parts


class CachedFirst(BaseNodePostprocessor):
    """Chooses ``most`` nodes. Within ``epsilon`` of their score, it prefers nodes whose KV is stored.

    Args:
        scorer: such as CacheScorer.
        epsilon: see ``rerank``.
        most: the number of nodes to choose.
    """

    scorer: Any
    epsilon: float = 0.0
    most: int = 4

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        relevance = [node.score or 0.0 for node in nodes]
        chosen = choose_cached(list(map(_text, nodes)), relevance, self.scorer, epsilon=self.epsilon, most=self.most)
        return [nodes[index] for index in chosen]


def marked_message(nodes: Sequence[NodeWithScore], question: str) -> dict[str, Any]:
    """Return a user's message for an OpenAI client, with each node as a marked part, and the question behind them."""
    return {"role": "user", "content": marked_parts([_text(node) for node in nodes], question)}


def _text(node: NodeWithScore) -> str:
    return str(node.node.get_content(metadata_mode=MetadataMode.NONE))
