"""Messages and their streams: the events come in Anthropic's order, and add up to the whole message."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.api.anthropic import Endpoint, MessageEvents, error_body, read_body, respond, translate
from inlay.api.call import Call
from inlay.api.failures import Failure
from inlay.api.reasoning import FORMATS, ModelReasoning
from inlay.api.tools.formats import FORMATS as TOOL_FORMATS
from inlay.api.tools.formats import ModelTools
from inlay.types import CompletionOutput, RequestMetrics, RequestOutput, Usage

HERMES = ModelTools(next(row for row in TOOL_FORMATS if row.name == "hermes"))
THINKS = ModelReasoning(FORMATS[0], frozenset(), None, lambda ids: "")
NAMED: dict[str, Any] = {"name": "x", "created": 1, "model": "m"}
LOOK = {"name": "look", "input_schema": {"type": "object"}}
CALLED = '<tool_call>{"name": "look", "arguments": {"at": "sea"}}</tool_call>'
USAGE = Usage(10, 4, 6, 4, 0, 0, written_tokens=5, lasting_tokens=2)


def asked(**body: Any) -> Call:
    given = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "?"}], **body}
    return translate(read_body(given, Endpoint.MESSAGES), tools=HERMES, reasoning=THINKS)


def output(text: str, end: str | None = "stop", stop_reason: str | int | None = None) -> RequestOutput:
    answer = CompletionOutput(0, text, tuple(range(len(text))), finish_reason=end, stop_reason=stop_reason)  # type: ignore[arg-type]
    return RequestOutput("r", "?", (1,) * 10, tuple(range(10)), [answer], end is not None, USAGE, RequestMetrics())


def streamed(call: Call, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
    stream = MessageEvents(call, **NAMED)
    said = [event for one in outputs for event in stream.update(0, one)]
    told = []
    for event in (*said, *stream.end()):
        kind, data, *rest = event.split("\n")
        assert rest == ["", ""]
        told.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {told[-1]['type']}"
    return told


def added_up(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that events add up to, by the rules for clients."""
    first, *rest = events
    message = first["message"]
    inputs: dict[int, str] = {}
    for event in rest:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], dict(event["delta"])
            kind = delta.pop("type")
            if kind == "input_json_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
            else:
                for key, value in delta.items():
                    block[key] += value
        elif event["type"] == "message_delta":
            message |= {**event["delta"], "usage": event["usage"], "inlay": event["inlay"]}
    for index, said in inputs.items():
        message["content"][index]["input"] = json.loads(said)
    return message


TEXTS = ["Hello.", "", CALLED, f"I look.{CALLED}{CALLED}", f"<think>Hm. So.</think>Yes. {CALLED}", "<think>Hm", "a<b"]


@given(st.sampled_from(TEXTS), st.booleans(), st.integers(0, 9999))
def test_events_add_up_to_the_message(text: str, tools: bool, seed: int) -> None:
    call = asked(stream=True, **({"tools": [LOOK]} if tools else {}))
    ends = sorted(random.Random(seed).choices(range(len(text) + 1), k=3))
    events = streamed(call, [*(output(text[:end], None) for end in ends), output(text)])
    assert added_up(events) == respond(call, [output(text)], **NAMED)


def test_events_come_in_anthropics_order() -> None:
    events = streamed(asked(tools=[LOOK], stream=True), [output(f"<think>Hm</think>Hi{CALLED}")])
    kinds = [event["type"] for event in events]
    block = ["content_block_delta", "content_block_stop"]
    assert kinds == [
        *("message_start", "content_block_start", "ping", "content_block_delta", *block),
        *("content_block_start", *block, "content_block_start", *block),
        *("message_delta", "message_stop"),
    ]
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert deltas == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]


@pytest.mark.parametrize(
    ("text", "end", "stop", "reason"),
    [
        ("Hi", "stop", None, "end_turn"),
        ("Hi", "stop", 7, "end_turn"),
        ("Hi", "stop", "x", "stop_sequence"),
        ("Hi", "length", None, "max_tokens"),
        (CALLED, "stop", None, "tool_use"),
        (CALLED, "length", None, "max_tokens"),
    ],
)
def test_stop_reasons(text: str, end: str, stop: Any, reason: str) -> None:
    message = respond(asked(tools=[LOOK]), [output(text, end, stop)], **NAMED)
    assert message["stop_reason"] == reason
    assert message["stop_sequence"] == (stop if isinstance(stop, str) else None)


def test_every_prompt_token_is_counted_once() -> None:
    message = respond(asked(), [output("Hi")], **NAMED)
    usage = message["usage"]
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
    assert [usage[name] for name in parts] == [1, 5, 4, 2]
    assert usage["cache_creation"] == {"ephemeral_5m_input_tokens": 3, "ephemeral_1h_input_tokens": 2}
    assert message["inlay"]["exact_tokens"] == 4


def test_a_call_that_was_cut_has_no_arguments() -> None:
    call = asked(tools=[LOOK], tool_choice={"type": "any"})
    (block,) = respond(call, [output('{"name": "look", "arguments": {"at": "se', "length")], **NAMED)["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "look", {})


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_errors_have_anthropics_types(status: int, kind: str) -> None:
    body = error_body(Failure(status, "it went wrong", code="some_code", request_id="req-1"))
    assert (body["error"]["type"], body["error"]["code"], body["request_id"]) == (kind, "some_code", "req-1")


def test_a_failed_stream_ends_with_an_error_event() -> None:
    (event,) = MessageEvents(asked(), **NAMED).fail(Failure(504, "too late", code="deadline_exceeded"))
    kind, data, *_ = event.split("\n")
    assert kind == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
