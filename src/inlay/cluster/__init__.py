"""Several engines as one: replicas on Ray Serve, and a router that chooses among them by modules."""
