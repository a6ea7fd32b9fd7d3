"""LongBench (arXiv 2308.14508) with its documents as modules, as in the Prompt Cache paper (section 5)."""
