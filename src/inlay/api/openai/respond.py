"""Writes the body of a response (``chat.completion`` or ``text_completion``) from finished outputs, and error objects.

Streams use its parts for usage, tool calls and log-probabilities. Those of prompts are in vLLM's form.

The events of a streamed response are ``chat.completion.chunk`` or ``text_completion``. An output holds the whole answer
so far, and a chunk holds its new part. Text only grows, so the new part is the rest after the last chunk.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Unpack

from inlay.api.call import Call, Level, Named
from inlay.api.failures import Failure
from inlay.api.openai.bodies import Endpoint
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
from inlay.api.tools import Delta
from inlay.errors import Problem
from inlay.logprobs import Logprob
from inlay.pml.problems import JSONPlace
from inlay.types import CompletionOutput, RequestOutput
from inlay.wording import printable

_OBJECTS: dict[str, str] = {Endpoint.CHAT: "chat.completion", Endpoint.COMPLETIONS: "text_completion"}
_IDS: dict[str, str] = {Endpoint.CHAT: "chatcmpl", Endpoint.COMPLETIONS: "cmpl"}


def respond(call: Call, outputs: Sequence[RequestOutput], **named: Unpack[Named]) -> dict[str, Any]:
    """Return the body of the response to a call."""
    answers = [(output, answer) for output in outputs for answer in output.outputs]
    if call.endpoint == Endpoint.CHAT:
        choices = [_chat_choice(call, named["name"], number, *each) for number, each in enumerate(answers)]
    else:
        choices = [_completion_choice(call, number, *each) for number, each in enumerate(answers)]
    told = call.scores is not None and call.endpoint == Endpoint.CHAT
    return {
        **_head(call, _OBJECTS, named),
        "choices": choices,
        "usage": usage_of(outputs, call.reasoning),
        "inlay": inlay_of(outputs),
        **({"prompt_logprobs": prompt_scores(call, outputs[0])} if told else {}),
    }


def _head(call: Call, objects: Mapping[str, str], named: Named) -> dict[str, Any]:
    """Return the first fields of a response or a chunk."""
    return {
        "id": f"{_IDS[call.endpoint]}-{named['name']}",
        "object": objects[call.endpoint],
        "created": named["created"],
        "model": named["model"],
        "system_fingerprint": named.get("fingerprint"),
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
    """Return the piece that begins a tool call: its id and name."""
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
    """Return the chosen token and the ``top`` most probable tokens."""
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


_CHUNK_OBJECTS: dict[str, str] = {Endpoint.CHAT: "chat.completion.chunk", Endpoint.COMPLETIONS: "text_completion"}

_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class Chunks:
    """The chunks of one response.

    A chat choice starts with a chunk for its role. Then come chunks for content and tool calls, and a chunk with its
    finish reason. A completion has no role and no calls. The final chunk has the ``inlay`` object of a whole response.
    It is the usage chunk, if the call asks for usage.
    """

    def __init__(self, call: Call, **named: Unpack[Named]) -> None:
        # Encoded once, because only a fifth of a chunk changes from token to token.
        self._head = f'{_json(_head(call, _CHUNK_OBJECTS, named))[:-1]},"choices":['
        self._usage = call.include_usage
        self._running_usage = call.running_usage
        self._reasoning = call.reasoning
        self._answers = call.params.n
        self._outputs: dict[int, RequestOutput] = {}
        kind = _ChatChoice if call.endpoint == Endpoint.CHAT else _TextChoice
        self._choices = [kind(call, named["name"], number) for number in range(len(call.prompts) * call.params.n)]

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
