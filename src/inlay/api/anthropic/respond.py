"""Writes the answers of messages: the body of finished outputs, the events of a stream, and error objects.

The order of events is Anthropic's: message_start, the blocks one after the other, message_delta, message_stop. A ping
follows the start of the first block.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Unpack

from inlay.api.call import Call, Level, Named
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
from inlay.api.tools.readers import object_in
from inlay.types import CompletionOutput, RequestOutput

#: HTTP status → Anthropic's type of an error. Other client errors are "invalid_request_error", and others "api_error".
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_TOO_LONG = "prompt is too long"  # clients such as Claude Code look for these words, and shorten the conversation


def respond(call: Call, outputs: Sequence[RequestOutput], **named: Unpack[Named]) -> dict[str, Any]:
    """Return the body of a message."""
    (output,) = outputs
    (answer,) = output.outputs
    whole = whole_answer(call, output, answer)
    return {
        **head(named),
        "content": content_of(whole, named["name"]),
        **end(answer, calls=whole.calls),
        "usage": usage_of(outputs, call.reasoning),
        "inlay": inlay_of(outputs),
    }


def head(named: Named) -> dict[str, Any]:
    """Return the first fields of a message."""
    return {"id": f"msg_{named['name']}", "type": "message", "role": "assistant", "model": named["model"]}


def content_of(whole: WholeAnswer, name: str) -> list[dict[str, Any]]:
    """Return the content blocks of an answer. ``name`` is that of the response."""
    made: list[dict[str, Any]] = []
    for part in whole.parts:
        if isinstance(part, Thought):
            made.append({"type": "thinking", "thinking": part.text, "signature": signature(part.text)})
        elif isinstance(part, CalledTool):
            # A call that was cut has no object of arguments.
            block = {**opened_call(name, part.number, part.name), "input": object_in(part.arguments) or {}}
            made.append(block)
        else:
            made.append({"type": "text", "text": part})
    return made


def opened_call(response: str, number: int, function: str) -> dict[str, Any]:
    """Return the block of a call without arguments."""
    return {"type": "tool_use", "id": f"toolu_{call_digest(response, 0, number)}", "name": function, "input": {}}


def signature(thinking: str) -> str:
    """Return a digest of reasoning, because clients require a signature and send it back. It is never checked."""
    return hashlib.sha256(thinking.encode(errors="surrogatepass")).hexdigest()


def end(answer: CompletionOutput, *, calls: bool) -> dict[str, Any]:
    """Return Anthropic's ``stop_reason`` and ``stop_sequence``. ``calls`` is True if the answer calls a tool."""
    reason = {"stop": "tool_use" if calls else "end_turn", "length": "max_tokens"}.get(answer.finish_reason or "")
    sequence = answer.stop_reason if isinstance(answer.stop_reason, str) else None
    if sequence is not None and answer.finish_reason == "stop":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": sequence}


def usage_of(outputs: Sequence[RequestOutput], reasoning: ReasoningUse | None = None) -> dict[str, Any]:
    """Return Anthropic's ``usage``.

    Each prompt token counts once: as read from the cache, as written to it, or as input. Written tokens that stay for
    an hour or longer count as ``ephemeral_1h_input_tokens``, and the others as ``ephemeral_5m_input_tokens``.
    """
    counts = counts_of(outputs, reasoning)
    return {
        "input_tokens": counts.prompt - counts.cached - counts.written,
        "cache_creation_input_tokens": counts.written,
        "cache_read_input_tokens": counts.cached,
        "cache_creation": {
            "ephemeral_5m_input_tokens": counts.written - counts.lasting,
            "ephemeral_1h_input_tokens": counts.lasting,
        },
        "output_tokens": counts.answer,
        "output_tokens_details": {"thinking_tokens": counts.thought},
        "service_tier": "standard",
    }


def error_body(failure: Failure) -> dict[str, Any]:
    """Return the body of an error. ``code``, ``param`` and ``details`` are beside Anthropic's fields."""
    kind = _ERRORS.get(failure.status, "invalid_request_error" if failure.status < 499 else "api_error")
    message = failure.message
    if failure.code == "context_length_exceeded" and _TOO_LONG not in message:
        message = f"{_TOO_LONG}: {message}"
    error: dict[str, Any] = {"type": kind, "message": message, "code": failure.code, "param": failure.param}
    if failure.code is not None:
        error["details"] = {"error_code": failure.code}
    return {"type": "error", "error": error, "request_id": failure.request_id}


def limit_headers(levels: Sequence[Level]) -> dict[str, str]:
    """Return Anthropic's rate limit headers."""
    headers = {}
    for level in levels:
        prefix = f"anthropic-ratelimit-{level.name}"
        full = datetime.now(UTC) + timedelta(seconds=level.full_in_s)
        headers[f"{prefix}-limit"] = str(level.limit)
        headers[f"{prefix}-remaining"] = str(level.remaining)
        headers[f"{prefix}-reset"] = full.strftime("%Y-%m-%dT%H:%M:%SZ")
    return headers


encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_PING = {"type": "ping"}


class MessageEvents:
    """The events of one message."""

    def __init__(self, call: Call, **named: Unpack[Named]) -> None:
        self._call = call
        self._named = named
        self._pieces: AnswerPieces | None = None
        self._latest: RequestOutput | None = None
        self._index = -1  # of the current block
        self._open: str | int | None = None  # its kind, or the number of its call
        self._thought = ""

    def update(self, number: int, output: RequestOutput) -> Iterable[str]:
        """Return the events for new output."""
        return [_event(event) for event in self._events(output)]

    def end(self) -> list[str]:
        """Return the events after the answer has ended."""
        assert self._latest is not None, "an answer has an output"
        assert self._pieces is not None, "an answer has an output"
        (answer,) = self._latest.outputs
        delta = end(answer, calls=self._pieces.calls)
        usage = usage_of([self._latest], self._call.reasoning)
        told = {"type": "message_delta", "delta": delta, "usage": usage, "inlay": inlay_of([self._latest])}
        return [*map(_event, self._close()), _event(told), _event({"type": "message_stop"})]

    def fail(self, failure: Failure) -> list[str]:
        """Return the event that ends the stream with an error."""
        return [_event(error_body(failure))]

    def _events(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        if self._pieces is None:
            self._pieces = AnswerPieces(self._call, output)
            yield self._start(output)
        self._latest = output
        for answer in output.outputs:
            for piece in self._pieces.update(answer):
                yield from self._told(piece)

    def _start(self, output: RequestOutput) -> dict[str, Any]:
        message = {**head(self._named), "content": [], "stop_reason": None, "stop_sequence": None}
        return {"type": "message_start", "message": {**message, "usage": usage_of([output], self._call.reasoning)}}

    def _told(self, piece: Piece) -> Iterator[dict[str, Any]]:
        if isinstance(piece, Thought):
            yield from self._opened("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._thought += piece.text
            yield self._delta({"type": "thinking_delta", "thinking": piece.text})
        elif piece.call is None:
            if piece.content:
                yield from self._opened("text", {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": piece.content})
        else:
            if piece.name is not None:
                yield from self._opened(piece.call, opened_call(self._named["name"], piece.call, piece.name))
            if piece.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": piece.arguments})

    def _opened(self, kind: str | int, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the start of a block, unless it is open."""
        if self._open == kind:
            return
        yield from self._close()
        self._index += 1
        self._open = kind
        yield {"type": "content_block_start", "index": self._index, "content_block": block}
        if self._index == 0:
            yield _PING

    def _close(self) -> Iterator[dict[str, Any]]:
        """Yield the end of the current block, if there is one."""
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": signature(self._thought)})
            self._thought = ""
        yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _event(event: dict[str, Any]) -> str:
    return f"event: {event['type']}\ndata: {encode(event)}\n\n"
