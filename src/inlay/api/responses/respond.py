"""Writes the document of a response from finished outputs. Streams use its parts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from inlay.api.call import Call
from inlay.api.failures import Failure
from inlay.api.pieces import CalledTool, WholeAnswer, call_digest, whole_answer
from inlay.api.reasoning import ReasoningUse, Thought
from inlay.api.responses.items import encoded_reasoning
from inlay.api.usage import counts_of, inlay_of
from inlay.types import CompletionOutput, RequestOutput

DONE, CUT, RUNNING, FAILED = "completed", "incomplete", "in_progress", "failed"


def respond(
    call: Call,
    outputs: Sequence[RequestOutput],
    *,
    name: str,
    created: int,
    model: str,
    fingerprint: str | None = None,
) -> dict[str, Any]:
    """Return the document of a response. For the arguments, see ``Dialect.respond``."""
    (output,) = outputs
    (answer,) = output.outputs
    status = status_of(answer)
    return {
        **document(call, status, name=name, created=created, model=model),
        "output": items_of(whole_answer(call, output, answer), call, name, status),
        "usage": usage_of(outputs, call.reasoning),
        "inlay": inlay_of(outputs),
    }


def document(
    call: Call, status: str, *, name: str, created: int, model: str, failure: Failure | None = None
) -> dict[str, Any]:
    """Return a response without output.

    Args:
        call: the request.
        status: of the response.
        name: the unique part of its id.
        created: seconds since 1970.
        model: the model's name.
        failure: the reason for a failed response.
    """
    repeated = {key: value for key, value in call.repeated.items() if key != "include_encrypted"}
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": created,
        "completed_at": max(created, int(time.time())) if status == DONE else None,
        "status": status,
        "background": False,
        "error": None if failure is None else {"code": failure.code or failure.kind.value, "message": failure.message},
        "incomplete_details": {"reason": "max_output_tokens"} if status == CUT else None,
        "model": model,
        "output": [],
        "truncation": "disabled",
        "usage": None,
        "temperature": call.params.temperature,
        "top_p": call.params.top_p,
        "presence_penalty": call.params.presence_penalty,
        "frequency_penalty": call.params.frequency_penalty,
        "top_logprobs": 0,
        "max_tool_calls": None,
        "service_tier": "default",
        **repeated,
    }


def status_of(answer: CompletionOutput) -> str:
    """Return the status of a finished answer."""
    return CUT if answer.finish_reason == "length" else DONE


def items_of(whole: WholeAnswer, call: Call, name: str, status: str) -> list[dict[str, Any]]:
    """Return the output items of an answer. An answer without any part is a message without text.

    Args:
        whole: the answer.
        call: the request.
        name: of the response.
        status: of the response, which is that of its last item.
    """
    parts = whole.parts or [""]
    made = []
    for index, part in enumerate(parts):
        state = status if index == len(parts) - 1 else DONE
        if isinstance(part, Thought):
            made.append(reasoning_item(call, name, index, part.text, state))
        elif isinstance(part, CalledTool):
            made.append(call_item(name, index, part, state))
        else:
            made.append(message_item(name, index, part, state))
    return made


def reasoning_item(call: Call, name: str, index: int, text: str | None, status: str) -> dict[str, Any]:
    """Return an item of reasoning. ``text`` is None before its content."""
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    item: dict[str, Any] = {"id": _id("rs", name, index), "type": "reasoning", "summary": [], "content": content}
    if call.repeated.get("include_encrypted"):
        item["encrypted_content"] = encoded_reasoning(text or "")
    return {**item, "status": status}


def message_item(name: str, index: int, text: str | None, status: str) -> dict[str, Any]:
    """Return a message. ``text`` is None before its content."""
    content = [] if text is None else [text_part(text)]
    head = {"id": _id("msg", name, index), "type": "message", "role": "assistant"}
    return {**head, "content": content, "status": status}


def text_part(text: str) -> dict[str, Any]:
    """Return the part of a message that has its text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(name: str, index: int, called: CalledTool, status: str) -> dict[str, Any]:
    """Return the call of a function."""
    namespace, _, function = called.name.rpartition(".")
    return {
        "id": _id("fc", name, index),
        "type": "function_call",
        "call_id": f"call_{call_digest(name, 0, called.number)}",
        "name": function,
        **({"namespace": namespace} if namespace else {}),
        "arguments": called.arguments,
        "status": status,
    }


def usage_of(outputs: Sequence[RequestOutput], reasoning: ReasoningUse | None = None) -> dict[str, Any]:
    """Return OpenAI's ``usage`` of a response. ``reasoning`` is the form of its reasoning."""
    counts = counts_of(outputs, reasoning)
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": counts.written},
        "output_tokens": counts.answer,
        "output_tokens_details": {"reasoning_tokens": counts.thought},
        "total_tokens": counts.prompt + counts.answer,
    }


def _id(kind: str, name: str, index: int) -> str:
    return f"{kind}_{call_digest(name, 1, index)}"
