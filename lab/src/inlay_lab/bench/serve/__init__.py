"""Many clients of a running server: client latencies beside the server's metrics. Does not import torch.

``clients`` has connections, prompts with their right answers, and client behaviours. ``measure`` runs many at once.
"""
