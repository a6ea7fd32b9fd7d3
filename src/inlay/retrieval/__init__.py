"""Retrieval that knows the cache: among texts of nearly equal relevance, take those whose KV is stored.

Its modules load no model and no torch. ``langchain``, ``llama_index`` and ``haystack`` hold components for these
libraries, which must be installed.
"""

from inlay.retrieval.rerank import CacheScorer, Scorer, choose_cached, chunks, marked_parts, rerank

__all__ = ["CacheScorer", "Scorer", "choose_cached", "chunks", "marked_parts", "rerank"]
