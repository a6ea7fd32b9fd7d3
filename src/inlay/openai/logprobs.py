"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from inlay.types import Logprob

_LOWEST = -9999.0  # what OpenAI sends for a token that cannot come; JSON has no infinity
_HALF = "\ufffd"


def chat_logprobs(token_ids: Sequence[int], steps: Sequence[Mapping[int, Logprob]], top: int) -> dict[str, Any]:
    """The ``logprobs`` of a chat's choice. top: how many of the most probable tokens to list for every token.

    ``bytes`` is null where a token is a part of a character.
    """
    content = []
    for token, step in zip(token_ids, steps, strict=True):
        leaders = sorted(step.values(), key=lambda one: one.rank or 0)
        listed = [_entry(one) for one in leaders if one.rank is not None and one.rank <= top]
        content.append({**_entry(step[token]), "top_logprobs": listed})
    return {"content": content, "refusal": None}


def completion_logprobs(token_ids: Sequence[int], steps: Sequence[Mapping[int, Logprob]]) -> dict[str, Any]:
    """The ``logprobs`` of a completion's choice: four lists of one entry a token.

    ``top_logprobs`` is by text, the chosen token's included; of tokens that are written alike the likelier counts.
    ``text_offset`` counts the characters of the tokens before.
    """
    chosen = [step[token] for token, step in zip(token_ids, steps, strict=True)]
    texts = [_text(one) for one in chosen]
    return {
        "text_offset": [0, *accumulate(len(text) for text in texts)][: len(texts)],
        "token_logprobs": [_number(one) for one in chosen],
        "tokens": texts,
        "top_logprobs": [_by_text(step) for step in steps],
    }


def _by_text(step: Mapping[int, Logprob]) -> dict[str, float]:
    ascending = sorted(step.values(), key=lambda one: one.logprob)
    return {_text(one): _number(one) for one in ascending}


def _entry(one: Logprob) -> dict[str, Any]:
    text = _text(one)
    return {"token": text, "bytes": None if _HALF in text else list(text.encode()), "logprob": _number(one)}


def _text(one: Logprob) -> str:
    return one.decoded_token or ""


def _number(one: Logprob) -> float:
    return max(one.logprob, _LOWEST)
