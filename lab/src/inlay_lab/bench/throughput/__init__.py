"""Many requests at once that share a prefix or modules: inlay with and without reuse, beside other engines."""
