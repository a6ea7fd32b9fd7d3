"""Writes the body of a response (``chat.completion`` or ``text_completion``) from finished outputs, and error objects.

Streams use its parts for usage and tool calls.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from inlay.api.call import Call
from inlay.api.failures import Failure
from inlay.api.openai.bodies import Endpoint
from inlay.api.openai.logprobs import chat_logprobs, completion_logprobs, echoed_logprobs, joined, prompt_scores
from inlay.api.reasoning import ReasoningUse
from inlay.api.tools import Delta, ToolUse
from inlay.errors import Problem
from inlay.pml.problems import JSONPlace
from inlay.types import CompletionOutput, RequestMetrics, RequestOutput

_OBJECTS: dict[str, str] = {Endpoint.CHAT: "chat.completion", Endpoint.COMPLETIONS: "text_completion"}
_IDS: dict[str, str] = {Endpoint.CHAT: "chatcmpl", Endpoint.COMPLETIONS: "cmpl"}
_COUNTED = (
    "exact_tokens",
    "module_tokens",
    "scaffold_tokens",
    "anchored_tokens",
    "isolated_tokens",
    "promoted_tokens",
    "shifted_tokens",
    "host_tokens",
    "disk_tokens",
    "shared_tokens",
    "duplicate_tokens",
    "recomputed_tokens",
    "linked_tokens",
    "selecting_tokens",
    "computed_tokens",
)
_NO_TIMES = RequestMetrics()
_TIMED = ("queue_s", "fetch_s", "compute_s", "ttft_s", "total_s")


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
    text, reasoning = answer.text, ""
    if call.reasoning is not None:
        parser = call.reasoning.parser(output.prompt or "")
        parts = [parser.feed(text), parser.finish()]
        text, reasoning = "".join(part.content for part in parts), "".join(part.reasoning for part in parts)
    said: dict[str, Any] = {"content": text}
    if call.tools is not None:
        said = as_message(call.tools, text, name, number)
    message = {"role": "assistant", **said, **told_reasoning(call.reasoning, reasoning), "refusal": None}
    return {"index": number, "message": message, "logprobs": logprobs, **_end(answer, calls="tool_calls" in said)}


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


def told_reasoning(use: ReasoningUse | None, text: str) -> dict[str, str]:
    """Return reasoning for a message or a delta, under the common field name and vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text} if use is not None and use.include and text else {}


def usage_of(outputs: Sequence[RequestOutput], reasoning: ReasoningUse | None = None) -> dict[str, Any]:
    """Return OpenAI's ``usage``, summed over all prompts and answers. ``reasoning`` is the form of their reasoning."""
    thought = 0
    if reasoning is not None:
        said = [(output.prompt or "", answer.token_ids) for output in outputs for answer in output.outputs]
        thought = sum(reasoning.count(*each) for each in said)
    prompt = sum(output.usage.prompt_tokens for output in outputs)
    tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    cached = sum(output.usage.cached_tokens for output in outputs)
    written = sum(output.usage.written_tokens for output in outputs)
    told = {"cached_tokens": cached, "cache_write_tokens": written}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {**told, "text_tokens": prompt, "audio_tokens": 0, "image_tokens": 0},
        "completion_tokens_details": {
            "text_tokens": tokens,
            "reasoning_tokens": thought,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def inlay_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return the ``inlay`` object: the origin of the prompt tokens, and the times of the slowest prompt.

    The tokens are summed over all prompts (types.Usage). ``repaired_tokens`` is a deprecated name of
    ``recomputed_tokens``. ``reuse`` is the policy of the prompts; several are joined with commas. ``misses``,
    ``across_tokens``, ``reanchored_tokens``, ``primed_tokens``, ``fallbacks`` and ``order`` are left out if empty.
    ``order`` lists the members of each set in their final order (types.SetOrder). ``timing`` is in seconds
    (types.RequestMetrics). Unknown times are null, for example in a waiting request.
    """
    slowest = max((output.metrics for output in outputs), key=lambda times: times.total_s or 0.0, default=_NO_TIMES)
    times = {name: getattr(slowest, name) for name in _TIMED}
    misses: Counter[str] = Counter()
    for output in outputs:
        misses.update(dict(output.usage.misses))
    across = sum(output.usage.across_tokens for output in outputs)
    reanchored = sum(output.usage.reanchored_tokens for output in outputs)
    primed = sum(output.usage.primed_tokens for output in outputs)
    order = [each.told for output in outputs for each in output.order]
    fallbacks = dict.fromkeys(
        (output.fell_back_from, output.reuse) for output in outputs if output.fell_back_from is not None
    )
    return {
        "reuse": ", ".join(dict.fromkeys(output.reuse for output in outputs if output.reuse is not None)) or None,
        **{name: sum(getattr(output.usage, name) for output in outputs) for name in _COUNTED},
        "repaired_tokens": sum(output.usage.recomputed_tokens for output in outputs),
        **({"across_tokens": across} if across else {}),
        **({"reanchored_tokens": reanchored} if reanchored else {}),
        **({"primed_tokens": primed} if primed else {}),
        **({"misses": dict(misses)} if misses else {}),
        **({"order": order} if order else {}),
        **({"fallbacks": [{"asked": asked, "taken": taken} for asked, taken in fallbacks]} if fallbacks else {}),
        "timing": {name: None if seconds is None else round(seconds, 6) for name, seconds in times.items()},
    }


def as_message(use: ToolUse, text: str, response: str, choice: int) -> dict[str, Any]:
    """Return the ``content`` and ``tool_calls`` of a complete message.

    For ``response`` and ``choice`` see ``as_delta``.
    """
    parser = use.parser()
    deltas = [*parser.feed(text), *parser.finish()]
    content = "".join(delta.content for delta in deltas)
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if delta.name is not None:
            calls.append(_opened(delta, response, choice))
        elif delta.call is not None:
            calls[delta.call]["function"]["arguments"] += delta.arguments
    message: dict[str, Any] = {"content": content or None if calls else content}
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
    digest = hashlib.sha256(f"{response} {choice} {delta.call}".encode()).hexdigest()
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"id": f"call_{digest[:24]}", "type": "function", "function": function}


def error_body(failure: Failure) -> dict[str, Any]:
    """Return the body ``{"error": {"message", "type", "param", "code"}}`` of a failure, with any "problems"."""
    kind = failure.kind.value
    said = {"message": failure.message, "type": kind, "param": failure.param, "code": failure.code}
    problems = {"problems": [_described(problem) for problem in failure.problems]} if failure.problems else {}
    return {"error": {**said, **problems}}


def _described(problem: Problem) -> dict[str, Any]:
    place = problem.place
    path = {"path": place.path} if isinstance(place, JSONPlace) else {}
    return {"line": place.line, "column": place.column, **path, "message": problem.message}
