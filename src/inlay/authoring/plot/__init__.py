"""Drawings with matplotlib (the optional extra ``plots``)."""
