"""Many clients of a running server at once: what they see, and what the server says of it. Light: no torch here.

One file a thing: wire (a connection), cases (prompts, and what is right), clients (how they behave), measure (a run).
"""
