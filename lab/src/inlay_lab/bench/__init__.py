"""Measurements that users can repeat, each behind a command of ``inlay bench`` or of lab/benchmarks/."""
