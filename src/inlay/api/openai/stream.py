"""Writes the events of a streamed response (``chat.completion.chunk`` or ``text_completion``) from outputs so far.

An output holds the whole answer so far, and a chunk holds its new part. Text only grows, so the new part is the rest
after the last chunk.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from inlay.api.call import Call
from inlay.api.failures import Failure
from inlay.api.openai.bodies import Endpoint
from inlay.api.openai.respond import (
    as_delta,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    error_body,
    finish_reason,
    told_reasoning,
    usage_of,
)
from inlay.api.pieces import AnswerPieces, Piece
from inlay.api.reasoning import Thought
from inlay.api.usage import inlay_of
from inlay.logprobs import Logprob
from inlay.types import CompletionOutput, RequestOutput

_OBJECTS: dict[str, str] = {Endpoint.CHAT: "chat.completion.chunk", Endpoint.COMPLETIONS: "text_completion"}
_IDS: dict[str, str] = {Endpoint.CHAT: "chatcmpl", Endpoint.COMPLETIONS: "cmpl"}

_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class Chunks:
    """The chunks of one response.

    A chat choice starts with a chunk for its role. Then come chunks for content and tool calls, and a chunk with its
    finish reason. A completion has no role and no calls. The final chunk has the ``inlay`` object of a whole response.
    It is the usage chunk, if the call asks for usage.

    Args:
        call: the request.
        name: see ``respond``.
        created: see ``respond``.
        model: see ``respond``.
        fingerprint: see ``respond``.
    """

    def __init__(self, call: Call, *, name: str, created: int, model: str, fingerprint: str | None = None) -> None:
        head = {
            "id": f"{_IDS[call.endpoint]}-{name}",
            "object": _OBJECTS[call.endpoint],
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        # Encoded once, because only a fifth of a chunk changes from token to token.
        self._head = f'{_json(head)[:-1]},"choices":['
        self._usage = call.include_usage
        self._running_usage = call.running_usage
        self._reasoning = call.reasoning
        self._answers = call.params.n
        self._outputs: dict[int, RequestOutput] = {}
        kind = _ChatChoice if call.endpoint == Endpoint.CHAT else _TextChoice
        self._choices = [kind(call, name, number) for number in range(len(call.prompts) * call.params.n)]

    def update(self, number: int, output: RequestOutput) -> Iterable[str]:
        """Return the events for new output of the call's prompt with this number."""
        return map(_event, self.documents(number, output))

    def end(self) -> list[str]:
        """Return the usage chunk, if the call asks for it, and the end marker."""
        return [*([_event(self.usage())] if self._usage else ()), _event("[DONE]")]

    def fail(self, failure: Failure) -> list[str]:
        """Return the event that ends the stream with an error."""
        return [_event(_json(error_body(failure)))]

    def documents(self, number: int, output: RequestOutput) -> Iterator[str]:
        """Yield the chunks of ``update`` as JSON."""
        self._outputs[number] = output
        for answer in output.outputs:
            for said in self._choices[number * self._answers + answer.index].update(answer, output):
                yield f"{self._head}{said}{self._so_far()}{self._last_words()}}}"

    def usage(self) -> str:
        """Return the usage chunk, which follows the last choice."""
        outputs = self._latest()
        return f"{self._head}],{_json({'usage': usage_of(outputs, self._reasoning), 'inlay': inlay_of(outputs)})[1:]}"

    def _so_far(self) -> str:
        """Return the part of a chunk after its choices."""
        if self._running_usage:
            return f'],"usage":{_json(usage_of(self._latest(), self._reasoning))}'
        return '],"usage":null' if self._usage else "]"

    def _last_words(self) -> str:
        """Return the extra part of the last choice's last chunk."""
        if self._usage or not all(choice.finished for choice in self._choices):
            return ""
        return f',"inlay":{_json(inlay_of(self._latest()))}'

    def _latest(self) -> list[RequestOutput]:
        return [output for _, output in sorted(self._outputs.items())]


def _event(document: str) -> str:
    return f"data: {document}\n\n"


class _Choice(ABC):
    """One answer and the part of it that was sent.

    Args:
        call: the request.
        name: of the response.
        number: of the choice.
    """

    def __init__(self, call: Call, name: str, number: int) -> None:
        self._top = call.params.logprobs or 0
        self._name = name
        self._number = number
        self._begun = False
        self._characters = 0
        self._tokens = 0
        self.finished = False

    def update(self, answer: CompletionOutput, output: RequestOutput) -> Iterator[str]:
        """Yield the new part of an answer as entries of ``choices``. ``output`` is the answer's output."""
        if self.finished:
            return
        if not self._begun:
            self._begun = True
            yield from self._opening(output)
        text = answer.text[self._characters :]
        self._characters += len(text)
        logprobs = self._new_logprobs(answer)
        if text or logprobs is not None:
            yield from self._said(text, "null" if logprobs is None else _json(logprobs))
        if answer.finish_reason is not None:
            yield from self._rest()
            self.finished = True
            yield self._end(answer)

    def _new_logprobs(self, answer: CompletionOutput) -> dict[str, Any] | None:
        """Return the log-probabilities of new tokens, which may come before their text."""
        start, self._tokens = self._tokens, len(answer.token_ids)
        if answer.logprobs is None or start == self._tokens:
            return None
        return self._logprobs(answer.token_ids[start:], answer.logprobs[start:])

    def _opening(self, output: RequestOutput) -> Iterable[str]:
        """Return the entries before the first text."""
        return ()

    def _rest(self) -> Iterable[str]:
        """Return the entries for text that was held back, at the end of the answer."""
        return ()

    @abstractmethod
    def _logprobs(self, token_ids: Sequence[int], steps: Sequence[Mapping[int, Logprob]]) -> dict[str, Any]:
        """Return the log-probabilities of new tokens in the endpoint's form."""

    @abstractmethod
    def _said(self, text: str, logprobs: str) -> Iterable[str]:
        """Return the entries for new text. ``logprobs`` is JSON."""

    @abstractmethod
    def _end(self, answer: CompletionOutput) -> str:
        """Return the entry that ends the choice."""


class _ChatChoice(_Choice):
    def __init__(self, call: Call, name: str, number: int) -> None:
        super().__init__(call, name, number)
        self._call = call
        self._pieces: AnswerPieces | None = None

    def _opening(self, output: RequestOutput) -> Iterable[str]:
        self._pieces = AnswerPieces(self._call, output)
        yield self._entry('{"role":"assistant","content":"","refusal":null}')

    def _logprobs(self, token_ids: Sequence[int], steps: Sequence[Mapping[int, Logprob]]) -> dict[str, Any]:
        return chat_logprobs(token_ids, steps, self._top)

    def _said(self, text: str, logprobs: str) -> Iterable[str]:
        assert self._pieces is not None, "the choice was opened"
        if self._pieces.plain:
            yield self._entry(f'{{"content":{_json(text)}}}', logprobs)
            return
        told = self._told(self._pieces.feed(text))
        if logprobs != "null":  # with the first delta or alone, because a token's text may be held back
            yield self._entry(next(told, "{}"), logprobs)
        yield from map(self._entry, told)

    def _rest(self) -> Iterable[str]:
        assert self._pieces is not None, "the choice was opened"
        return map(self._entry, self._told(self._pieces.finish()))

    def _told(self, pieces: Iterable[Piece]) -> Iterator[str]:
        for piece in pieces:
            if isinstance(piece, Thought):
                yield _json(told_reasoning(piece.text))
            else:
                yield _json(as_delta(piece, self._name, self._number))

    def _entry(self, delta: str, logprobs: str = "null", end: str = '"finish_reason":null') -> str:
        return f'{{"index":{self._number},"delta":{delta},"logprobs":{logprobs},{end}}}'

    def _end(self, answer: CompletionOutput) -> str:
        reason = finish_reason(answer.finish_reason, calls=self._pieces is not None and self._pieces.calls)
        return self._entry("{}", end=_json({"finish_reason": reason, "stop_reason": answer.stop_reason})[1:-1])


class _TextChoice(_Choice):
    def __init__(self, call: Call, name: str, number: int) -> None:
        super().__init__(call, name, number)
        self._offset = 0  # of the next token's text
        self._echo = call.echo
        self._scored = call.params.logprobs is not None

    def _opening(self, output: RequestOutput) -> Iterable[str]:
        if not self._echo:
            return
        logprobs = echoed_logprobs(output, self._top) if self._scored else None
        if logprobs is not None:
            self._offset = sum(map(len, logprobs["tokens"]))
        yield from self._said(output.prompt or "", "null" if logprobs is None else _json(logprobs))

    def _logprobs(self, token_ids: Sequence[int], steps: Sequence[Mapping[int, Logprob]]) -> dict[str, Any]:
        logprobs = completion_logprobs(token_ids, steps)
        logprobs["text_offset"] = [self._offset + offset for offset in logprobs["text_offset"]]
        self._offset += sum(map(len, logprobs["tokens"]))
        return logprobs

    def _said(self, text: str, logprobs: str) -> Iterable[str]:
        yield f'{{"index":{self._number},"text":{_json(text)},"logprobs":{logprobs},"finish_reason":null}}'

    def _end(self, answer: CompletionOutput) -> str:
        end = _json({"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason})[1:]
        return f'{{"index":{self._number},"text":"","logprobs":null,{end}'
