"""A cluster as a discrete-event simulation: the router itself over replicas that only count. ``inlay simulate``."""
