"""The published experiments, run again: Prompt Cache (arXiv 2311.04934) and ChunkAttention (arXiv 2402.15220)."""
