"""Writes the events of a streamed message from outputs so far.

The order is Anthropic's: message_start, the blocks one after the other, message_delta, message_stop. A ping follows the
start of the first block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from inlay.api.anthropic.respond import encode, end, error_body, head, opened_call, signature, usage_of
from inlay.api.call import Call
from inlay.api.failures import Failure
from inlay.api.pieces import AnswerPieces, Piece
from inlay.api.reasoning import Thought
from inlay.api.usage import inlay_of
from inlay.types import RequestOutput

_PING = {"type": "ping"}


class MessageEvents:
    """The events of one message.

    Args:
        call: the request.
        name: see ``respond``.
        created: see ``respond``.
        model: see ``respond``.
        fingerprint: see ``respond``.
    """

    def __init__(self, call: Call, *, name: str, created: int, model: str, fingerprint: str | None = None) -> None:
        self._call = call
        self._name = name
        self._model = model
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
        message = {**head(self._name, self._model), "content": [], "stop_reason": None, "stop_sequence": None}
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
                yield from self._opened(piece.call, opened_call(self._name, piece.call, piece.name))
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
