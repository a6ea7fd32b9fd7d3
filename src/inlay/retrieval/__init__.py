"""Retrieval that knows the cache: among texts of nearly equal relevance, take those whose KV is stored.

Its modules load no model and no torch. ``langchain``, ``llama_index`` and ``haystack`` hold components for these
libraries, which must be installed.
"""

from inlay.retrieval.chunks import chunks
from inlay.retrieval.parts import marked_parts
from inlay.retrieval.rerank import choose_cached, rerank
from inlay.retrieval.score import CacheScorer, Scorer

__all__ = ["CacheScorer", "Scorer", "choose_cached", "chunks", "marked_parts", "rerank"]
