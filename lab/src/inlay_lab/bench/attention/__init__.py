"""The attention kernel alone, one layer: after ChunkAttention (arXiv 2402.15220), table 3 and figures 3 and 4."""
