"""A cluster as a discrete-event simulation: the real router over replicas that only count. ``inlay simulate``."""
