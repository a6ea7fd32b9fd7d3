"""Finished outputs → the body of a response: ``chat.completion`` or ``text_completion``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inlay.openai.bodies import Endpoint
from inlay.openai.logprobs import chat_logprobs, completion_logprobs
from inlay.openai.translate import Call
from inlay.types import CompletionOutput, RequestOutput

_OBJECTS = {Endpoint.CHAT: "chat.completion", Endpoint.COMPLETIONS: "text_completion"}
_IDS = {Endpoint.CHAT: "chatcmpl", Endpoint.COMPLETIONS: "cmpl"}
_COUNTED = ("exact_tokens", "module_tokens", "shifted_tokens", "computed_tokens")


def respond(call: Call, outputs: Sequence[RequestOutput], *, name: str, created: int, model: str) -> dict[str, Any]:
    """The body of the response to a call.

    outputs: one for each of the call's prompts, finished. name: what tells this response from others, a part of its id.
    created: seconds since 1970. model: what it is called.
    ``usage`` sums over the prompts; ``inlay`` says how prompt tokens came about, as types.Usage does.
    """
    answers = [answer for output in outputs for answer in output.outputs]
    choice = _chat_choice if call.endpoint is Endpoint.CHAT else _completion_choice
    return {
        "id": f"{_IDS[call.endpoint]}-{name}",
        "object": _OBJECTS[call.endpoint],
        "created": created,
        "model": model,
        "choices": [choice(call, number, answer) for number, answer in enumerate(answers)],
        "usage": _usage(outputs),
        "inlay": {name: sum(getattr(output.usage, name) for output in outputs) for name in _COUNTED},
    }


def _chat_choice(call: Call, number: int, answer: CompletionOutput) -> dict[str, Any]:
    logprobs = None
    if answer.logprobs is not None:
        logprobs = chat_logprobs(answer.token_ids, answer.logprobs, call.params.logprobs or 0)
    message = {"role": "assistant", "content": answer.text, "refusal": None}
    return {"index": number, "message": message, "logprobs": logprobs, **_end(answer)}


def _completion_choice(call: Call, number: int, answer: CompletionOutput) -> dict[str, Any]:
    logprobs = None if answer.logprobs is None else completion_logprobs(answer.token_ids, answer.logprobs)
    return {"index": number, "text": answer.text, "logprobs": logprobs, **_end(answer)}


def _end(answer: CompletionOutput) -> dict[str, Any]:
    return {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}


def _usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    prompt = sum(output.usage.prompt_tokens for output in outputs)
    said = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "total_tokens": prompt + said,
        "prompt_tokens_details": {"cached_tokens": sum(output.usage.cached_tokens for output in outputs)},
    }
