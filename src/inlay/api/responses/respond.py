"""Writes responses: the document of finished outputs, and the numbered events of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Unpack

from inlay.api.call import Call, Named
from inlay.api.failures import Failure
from inlay.api.pieces import (
    AnswerPieces,
    CalledTool,
    Piece,
    WholeAnswer,
    call_digest,
    counts_of,
    inlay_of,
    whole_answer,
)
from inlay.api.reasoning import ReasoningUse, Thought
from inlay.api.responses.items import encoded_reasoning
from inlay.types import CompletionOutput, RequestOutput

DONE, CUT, RUNNING, FAILED = "completed", "incomplete", "in_progress", "failed"


def respond(call: Call, outputs: Sequence[RequestOutput], **named: Unpack[Named]) -> dict[str, Any]:
    """Return the document of a response."""
    (output,) = outputs
    (answer,) = output.outputs
    status = status_of(answer)
    return {
        **document(call, status, **named),
        "output": items_of(whole_answer(call, output, answer), call, named["name"], status),
        "usage": usage_of(outputs, call.reasoning),
        "inlay": inlay_of(outputs),
    }


def document(call: Call, status: str, failure: Failure | None = None, **named: Unpack[Named]) -> dict[str, Any]:
    """Return a response without output. ``failure`` is the reason for a failed one."""
    repeated = {key: value for key, value in call.repeated.items() if key != "include_encrypted"}
    return {
        "id": f"resp_{named['name']}",
        "object": "response",
        "created_at": named["created"],
        "completed_at": max(named["created"], int(time.time())) if status == DONE else None,
        "status": status,
        "background": False,
        "error": None if failure is None else {"code": failure.code or failure.kind.value, "message": failure.message},
        "incomplete_details": {"reason": "max_output_tokens"} if status == CUT else None,
        "model": named["model"],
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


_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class ResponseEvents:
    """The events of one response."""

    def __init__(self, call: Call, **named: Unpack[Named]) -> None:
        self._call = call
        self._name = named["name"]
        self._named = named
        self._pieces: AnswerPieces | None = None
        self._latest: RequestOutput | None = None
        self._number = 0  # of the next event
        self._open: Thought | str | CalledTool | None = None  # the current part, so far
        self._items: list[dict[str, Any]] = []  # that are complete

    def update(self, number: int, output: RequestOutput) -> Iterable[str]:
        """Return the events for new output."""
        return [self._event(event) for event in self._events(output)]

    def end(self) -> list[str]:
        """Return the events after the answer has ended."""
        assert self._latest is not None, "an answer has an output"
        status = status_of(self._latest.outputs[0])
        if self._open is None and not self._items:
            told = [*self._opened(""), *self._close(status)]
        else:
            told = list(self._close(status))
        response = {
            **document(self._call, status, **self._named),
            "output": self._items,
            "usage": usage_of([self._latest], self._call.reasoning),
            "inlay": inlay_of([self._latest]),
        }
        told.append({"type": f"response.{status}", "response": response})
        return list(map(self._event, told))

    def fail(self, failure: Failure) -> list[str]:
        """Return the event that ends the stream with an error."""
        response = {**document(self._call, FAILED, failure, **self._named), "output": self._items}
        return [self._event({"type": "response.failed", "response": response})]

    def _events(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        if self._pieces is None:
            self._pieces = AnswerPieces(self._call, output)
            response = document(self._call, RUNNING, **self._named)
            yield {"type": "response.created", "response": response}
            yield {"type": "response.in_progress", "response": response}
        self._latest = output
        for answer in output.outputs:
            for piece in self._pieces.update(answer):
                yield from self._told(piece)

    def _told(self, piece: Piece) -> Iterator[dict[str, Any]]:
        if isinstance(piece, Thought):
            if not isinstance(self._open, Thought):
                yield from self._opened(Thought(""))
            assert isinstance(self._open, Thought), "it was opened"
            self._open = Thought(self._open.text + piece.text)
            yield self._within("response.reasoning_text.delta", content_index=0, delta=piece.text)
        elif piece.call is None:
            if piece.content:
                if not isinstance(self._open, str):
                    yield from self._opened("")
                assert isinstance(self._open, str), "it was opened"
                self._open += piece.content
                yield self._within("response.output_text.delta", content_index=0, delta=piece.content, logprobs=[])
        else:
            if piece.name is not None:
                yield from self._opened(CalledTool(piece.call, piece.name))
            if piece.arguments:
                assert isinstance(self._open, CalledTool), "its name comes first"
                self._open.arguments += piece.arguments
                yield self._within("response.function_call_arguments.delta", delta=piece.arguments)

    def _opened(self, part: Thought | str | CalledTool) -> Iterator[dict[str, Any]]:
        """Yield the end of the current item, and the start of one with this part."""
        yield from self._close(DONE)
        self._open = part
        yield {"type": "response.output_item.added", "output_index": self._index, "item": self._item(RUNNING)}
        if not isinstance(part, CalledTool):
            yield self._within("response.content_part.added", content_index=0, part=self._part(part))

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        """Yield the end of the current item, if there is one."""
        part = self._open
        if part is None:
            return
        if isinstance(part, CalledTool):
            yield self._within("response.function_call_arguments.done", arguments=part.arguments, name=part.name)
        else:
            thought = isinstance(part, Thought)
            kind = "response.reasoning_text.done" if thought else "response.output_text.done"
            text: dict[str, Any] = {"text": part.text} if isinstance(part, Thought) else {"text": part, "logprobs": []}
            yield self._within(kind, content_index=0, **text)
            yield self._within("response.content_part.done", content_index=0, part=self._part(part))
        item = self._item(status)
        yield {"type": "response.output_item.done", "output_index": self._index, "item": item}
        self._items.append(item)
        self._open = None

    @property
    def _index(self) -> int:
        return len(self._items)

    def _item(self, status: str) -> dict[str, Any]:
        """Return the current item."""
        part, running = self._open, status == RUNNING
        assert part is not None, "an item is open"
        if isinstance(part, CalledTool):
            return call_item(self._name, self._index, part, status)
        if isinstance(part, Thought):
            return reasoning_item(self._call, self._name, self._index, None if running else part.text, status)
        return message_item(self._name, self._index, None if running else part, status)

    def _part(self, part: Thought | str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": part.text} if isinstance(part, Thought) else text_part(part)

    def _within(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event within the current item."""
        return {"type": kind, "item_id": self._item(RUNNING)["id"], "output_index": self._index, **fields}

    def _event(self, event: dict[str, Any]) -> str:
        told = _json({**event, "sequence_number": self._number})
        self._number += 1
        return f"event: {event['type']}\ndata: {told}\n\n"
