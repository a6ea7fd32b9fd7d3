"""Which requests run together: those that share the most.

A request's key is its prompt as token ids, most significant byte first, so sorting keys sorts prompts as a walk through
their prefix tree would meet them (the tree of ChunkAttention, arXiv 2402.15220, section 3.1): a prefix's requests stand
side by side and in the pool once, however small that is. Prompts of one schema under one policy come together.
"""

from __future__ import annotations

import numpy as np

from inlay.async_llm import AsyncLLM
from inlay.openai import Call
from inlay.pml import Prompt


def sort_key(llm: AsyncLLM, call: Call) -> bytes:
    """The place of a request among others; that of its first prompt. Raises InlayError for a prompt that is wrong."""
    prompt = call.prompts[0]
    ids = np.array(llm.lay_out(prompt, reuse=call.reuse, positions=call.positions).ids, dtype=">u4").tobytes()
    if not isinstance(prompt, Prompt):
        return b"\0" + ids  # no schema has an empty name
    return f"{prompt.schema}\0{call.reuse}\0{call.positions}\0".encode() + ids
