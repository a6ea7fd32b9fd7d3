"""Time to the first token behind a module stored on disk, beside other ways to read the same bytes."""
