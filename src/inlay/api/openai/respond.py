"""Writes the body of a response (``chat.completion`` or ``text_completion``) from finished outputs, and error objects.

Streams use its parts for usage, tool calls and log-probabilities. Those of prompts are in vLLM's form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from inlay.api.call import Call, Level
from inlay.api.failures import Failure
from inlay.api.openai.bodies import Endpoint
from inlay.api.pieces import CalledTool, WholeAnswer, call_digest, whole_answer
from inlay.api.reasoning import ReasoningUse
from inlay.api.tools import Delta
from inlay.api.usage import counts_of, inlay_of
from inlay.errors import Problem
from inlay.logprobs import Logprob
from inlay.pml.problems import JSONPlace
from inlay.types import CompletionOutput, RequestOutput
from inlay.wording import printable

_OBJECTS: dict[str, str] = {Endpoint.CHAT: "chat.completion", Endpoint.COMPLETIONS: "text_completion"}
_IDS: dict[str, str] = {Endpoint.CHAT: "chatcmpl", Endpoint.COMPLETIONS: "cmpl"}


def respond(
    call: Call,
    outputs: Sequence[RequestOutput],
    *,
    name: str,
    created: int,
    model: str,
    fingerprint: str | None = None,
) -> dict[str, Any]:
    """Return the body of the response to a call.

    Args:
        call: the request.
        outputs: the finished output of each prompt.
        name: unique to the response; a part of its id and of the ids of its tool calls.
        created: seconds since 1970.
        model: the model's name.
        fingerprint: see ``system_fingerprint``.
    """
    answers = [(output, answer) for output in outputs for answer in output.outputs]
    if call.endpoint == Endpoint.CHAT:
        choices = [_chat_choice(call, name, number, *each) for number, each in enumerate(answers)]
    else:
        choices = [_completion_choice(call, number, *each) for number, each in enumerate(answers)]
    told = call.scores is not None and call.endpoint == Endpoint.CHAT
    return {
        "id": f"{_IDS[call.endpoint]}-{name}",
        "object": _OBJECTS[call.endpoint],
        "created": created,
        "model": model,
        "system_fingerprint": fingerprint,
        "choices": choices,
        "usage": usage_of(outputs, call.reasoning),
        "inlay": inlay_of(outputs),
        **({"prompt_logprobs": prompt_scores(call, outputs[0])} if told else {}),
    }


def _chat_choice(call: Call, name: str, number: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
    logprobs = None
    if answer.logprobs is not None:
        logprobs = chat_logprobs(answer.token_ids, answer.logprobs, call.params.logprobs or 0)
    whole = whole_answer(call, output, answer)
    said = as_message(whole, name, number)
    message = {"role": "assistant", **said, **told_reasoning(whole.reasoning), "refusal": None}
    return {"index": number, "message": message, "logprobs": logprobs, **_end(answer, calls=whole.calls)}


def _completion_choice(call: Call, number: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
    logprobs = None if answer.logprobs is None else completion_logprobs(answer.token_ids, answer.logprobs)
    if logprobs is not None and call.echo:
        logprobs = joined(echoed_logprobs(output, call.params.logprobs or 0), logprobs)
    text = (output.prompt or "") + answer.text if call.echo else answer.text
    scores = {} if call.scores is None else {"prompt_logprobs": prompt_scores(call, output)}
    return {"index": number, "text": text, "logprobs": logprobs, **_end(answer, calls=False), **scores}


def _end(answer: CompletionOutput, *, calls: bool) -> dict[str, Any]:
    reason = finish_reason(answer.finish_reason, calls=calls)
    return {"finish_reason": reason, "stop_reason": answer.stop_reason}


def told_reasoning(text: str) -> dict[str, str]:
    """Return reasoning for a message or a delta, under the common field name and vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def usage_of(outputs: Sequence[RequestOutput], reasoning: ReasoningUse | None = None) -> dict[str, Any]:
    """Return OpenAI's ``usage``, summed over all prompts and answers. ``reasoning`` is the form of their reasoning."""
    counts = counts_of(outputs, reasoning)
    prompt, tokens = counts.prompt, counts.answer
    told = {"cached_tokens": counts.cached, "cache_write_tokens": counts.written}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {**told, "text_tokens": prompt, "audio_tokens": 0, "image_tokens": 0},
        "completion_tokens_details": {
            "text_tokens": tokens,
            "reasoning_tokens": counts.thought,
            "audio_tokens": 0,
            "accepted_prediction_tokens": counts.accepted,
            "rejected_prediction_tokens": counts.rejected,
        },
    }


def as_message(whole: WholeAnswer, response: str, choice: int) -> dict[str, Any]:
    """Return the ``content`` and ``tool_calls`` of a complete message.

    For ``response`` and ``choice`` see ``as_delta``.
    """
    calls = [
        _opened(Delta(call=part.number, name=part.name, arguments=part.arguments), response, choice)
        for part in whole.parts
        if isinstance(part, CalledTool)
    ]
    message: dict[str, Any] = {"content": whole.text or None if calls else whole.text}
    return {**message, "tool_calls": calls} if calls else message


def as_delta(delta: Delta, response: str, choice: int) -> dict[str, Any]:
    """Return the ``delta`` of a chunk.

    Args:
        delta: the piece of the answer.
        response: the unique name of the response.
        choice: the number of the answer. The ids of calls are derived from both.
    """
    if delta.call is None:
        return {"content": delta.content}
    piece = {"index": delta.call}
    if delta.name is not None:
        return {"tool_calls": [piece | _opened(delta, response, choice)]}
    return {"tool_calls": [{**piece, "function": {"arguments": delta.arguments}}]}


def finish_reason(reason: str | None, *, calls: bool) -> str | None:
    """Return OpenAI's ``finish_reason`` for the engine's. ``calls`` is True if the answer calls a tool."""
    return "tool_calls" if calls and reason == "stop" else reason


def _opened(delta: Delta, response: str, choice: int) -> dict[str, Any]:
    """Return the first piece of a call."""
    assert delta.call is not None, "it is a piece of a call"
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"id": f"call_{call_digest(response, choice, delta.call)}", "type": "function", "function": function}


def error_body(failure: Failure) -> dict[str, Any]:
    """Return the body ``{"error": {"message", "type", "param", "code"}}`` of a failure, with any "problems"."""
    kind = failure.kind.value
    said = {"message": failure.message, "type": kind, "param": failure.param, "code": failure.code}
    problems = {"problems": [_described(problem) for problem in failure.problems]} if failure.problems else {}
    return {"error": {**said, **problems}}


def limit_headers(levels: Sequence[Level]) -> dict[str, str]:
    """Return OpenAI's ``x-ratelimit-…`` headers: each limit, its rest, and the time until it is full again."""
    headers = {}
    for level in levels:
        headers[f"x-ratelimit-limit-{level.name}"] = str(level.limit)
        headers[f"x-ratelimit-remaining-{level.name}"] = str(level.remaining)
        headers[f"x-ratelimit-reset-{level.name}"] = duration(level.full_in_s)
    return headers


def duration(seconds: float) -> str:
    """Format a time like OpenAI's headers: "17ms", "1.5s", "2m30s".

    It rounds up, so that no client retries too early.
    """
    milliseconds = math.ceil(seconds * 1000)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, milliseconds = divmod(milliseconds, 60_000)
    rest = f"{milliseconds / 1000:g}s"
    return f"{minutes}m{rest}" if minutes else rest


def _described(problem: Problem) -> dict[str, Any]:
    place = problem.place
    path = {"path": place.path} if isinstance(place, JSONPlace) else {}
    return {"line": place.line, "column": place.column, **path, "message": printable(problem.message)}


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
