"""Many clients of a running server at once: what they see, and what the server says of it. Light: no torch here.

``clients`` has connections, prompts with what is right, and how clients behave; ``measure`` a run of many.
"""
