"""Log-probabilities of answers in OpenAI's form, and of prompts in vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from inlay.api.call import Call
from inlay.logprobs import Logprob
from inlay.types import RequestOutput

_LOWEST = -9999.0  # OpenAI's value for an impossible token; JSON has no infinity
_HALF = "\ufffd"


def chat_logprobs(token_ids: Sequence[int], steps: Sequence[Mapping[int, Logprob]], top: int) -> dict[str, Any]:
    """Return the ``logprobs`` of a chat's choice. ``top`` is the number of most probable tokens in each list.

    ``bytes`` is null if a token is a part of a character.
    """
    content = []
    for token, step in zip(token_ids, steps, strict=True):
        leaders = sorted(step.values(), key=lambda one: one.rank or 0)
        listed = [_entry(one) for one in leaders if one.rank is not None and one.rank <= top]
        content.append({**_entry(step[token]), "top_logprobs": listed})
    return {"content": content, "refusal": None}


def completion_logprobs(token_ids: Sequence[int], steps: Sequence[Mapping[int, Logprob]]) -> dict[str, Any]:
    """Return the ``logprobs`` of a completion's choice: four lists with one entry per token.

    ``top_logprobs`` is keyed by text, with the chosen token included. If two tokens have the same text, the more
    probable one counts. ``text_offset`` counts the characters of earlier tokens.
    """
    chosen = [step[token] for token, step in zip(token_ids, steps, strict=True)]
    texts = [_text(one) for one in chosen]
    return {
        "text_offset": [0, *accumulate(len(text) for text in texts)][: len(texts)],
        "token_logprobs": [_number(one) for one in chosen],
        "tokens": texts,
        "top_logprobs": [_by_text(step) for step in steps],
    }


def echoed_logprobs(output: RequestOutput, top: int) -> dict[str, Any]:
    """Return the ``logprobs`` of an echoed prompt, with ``top`` alternatives per token. Its first token has none."""
    first, *steps = output.prompt_logprobs or [None]
    assert first is None, "nobody expects the first token"
    kept = [_up_to(top, token, step or {}) for token, step in zip(output.prompt_token_ids[1:], steps, strict=True)]
    known = completion_logprobs(output.prompt_token_ids[1:], kept)
    behind = "".join(known["tokens"])
    prompt = output.prompt or ""
    # The first token's text is the rest of the prompt. It is empty if later tokens split a character.
    text = prompt[: len(prompt) - len(behind)] if prompt.endswith(behind) else ""
    return joined({"text_offset": [0], "token_logprobs": [None], "tokens": [text], "top_logprobs": [None]}, known)


def joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Join the ``logprobs`` of tokens with those of later tokens."""
    offset = sum(map(len, one["tokens"]))
    moved = {**other, "text_offset": [offset + at for at in other["text_offset"]]}
    return {name: [*values, *moved[name]] for name, values in one.items()}


def prompt_scores(call: Call, output: RequestOutput) -> list[dict[str, dict[str, Any]] | None]:
    """Return vLLM's ``prompt_logprobs``: for every prompt token None, or tokens by id."""
    told: list[dict[str, dict[str, Any]] | None] = []
    for token, step in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True):
        kept = None if step is None else _up_to(call.scores or 0, token, step)
        told.append(None if kept is None else {str(each): _scored(one) for each, one in kept.items()})
    return told


def _scored(one: Logprob) -> dict[str, Any]:
    return {"logprob": _number(one), "rank": one.rank, "decoded_token": one.decoded_token}


def _up_to(top: int, token: int, step: Mapping[int, Logprob]) -> dict[int, Logprob]:
    """Return a token, and the ``top`` most probable ones."""
    return {each: one for each, one in step.items() if each == token or (one.rank or 0) <= top}


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
