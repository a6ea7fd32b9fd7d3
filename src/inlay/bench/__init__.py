"""Measurements that users can repeat: each is one file here, one ``inlay bench`` command, one file in benchmarks/."""
