"""Triton has wheels for Linux alone; elsewhere there is nothing to test."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["test_*"]
