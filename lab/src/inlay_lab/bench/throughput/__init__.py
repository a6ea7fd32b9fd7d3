"""Many requests at once: a shared beginning, or modules in any order; inlay, without reuse, and stock transformers."""
