"""LongBench (arXiv 2308.14508) with its documents as modules, as Prompt Cache measures it (section 5)."""
