"""Texts of a wanted number of tokens, for prompts whose meaning does not matter."""

from __future__ import annotations

import random

from inlay.base import Base

_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")


def exact_text(llm: Base, tokens: int, draw: random.Random) -> str:
    """Words that make that many tokens; a token or two off where the tokenizer joins what was cut."""
    text = " ".join(draw.choices(_WORDS, k=tokens))
    ids = llm.encoder.text(text)[:tokens]
    return str(llm.tokenizer.decode(list(ids)))
