"""inlay beside other engines on one machine, each in the Python that has it."""
