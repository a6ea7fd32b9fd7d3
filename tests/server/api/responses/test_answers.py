"""Responses and their streams: the events add up to the whole response, and OpenAI's types read both."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response

from inlay.api.call import Call
from inlay.api.failures import Failure
from inlay.api.reasoning import FORMATS, ModelReasoning
from inlay.api.responses import Endpoint, ResponseEvents, read_body, respond, translate
from inlay.api.tools.formats import FORMATS as TOOL_FORMATS
from inlay.api.tools.formats import ModelTools
from inlay.types import CompletionOutput, RequestMetrics, RequestOutput, Usage

HERMES = ModelTools(next(row for row in TOOL_FORMATS if row.name == "hermes"))
THINKS = ModelReasoning(FORMATS[0], frozenset(), None, lambda ids: "")
NAMED: dict[str, Any] = {"name": "x", "created": 1, "model": "m"}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
SPACE = {"type": "namespace", "name": "agents", "tools": [LOOK]}
CALLED = '<tool_call>{"name": "look", "arguments": {"at": "sea"}}</tool_call>'
USAGE = Usage(10, 4, 6, 4, 0, 0, written_tokens=5)


def asked(**body: Any) -> Call:
    read = read_body(
        {"model": "m", "input": "?", "include": ["reasoning.encrypted_content"], **body}, Endpoint.RESPONSES
    )
    return translate(read, tools=HERMES, reasoning=THINKS)


def output(text: str, end: str | None = "stop") -> RequestOutput:
    answer = CompletionOutput(0, text, tuple(range(len(text))), finish_reason=end)  # type: ignore[arg-type]
    return RequestOutput("r", "?", (1,) * 10, tuple(range(10)), [answer], end is not None, USAGE, RequestMetrics())


def streamed(call: Call, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
    stream = ResponseEvents(call, **NAMED)
    said = [event for one in outputs for event in stream.update(0, one)]
    told = []
    for event in (*said, *stream.end()):
        kind, data, *rest = event.split("\n")
        assert rest == ["", ""]
        told.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {told[-1]['type']}"
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    return told


TEXTS = ["Hello.", "", CALLED, f"I look.{CALLED}{CALLED}", f"<think>Hm. So.</think>Yes. {CALLED}", "<think>Hm", "a<b"]


@given(st.sampled_from(TEXTS), st.booleans(), st.sampled_from(["stop", "length"]), st.integers(0, 9999))
def test_events_add_up_to_the_response(text: str, tools: bool, end: str, seed: int) -> None:
    call = asked(stream=True, **({"tools": [LOOK]} if tools else {}))
    ends = sorted(random.Random(seed).choices(range(len(text) + 1), k=3))
    with patch("time.time", return_value=2.0):  # both answers end in the same second
        events = streamed(call, [*(output(text[:at], None) for at in ends), output(text, end)])
        whole = respond(call, [output(text, end)], **NAMED)
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert events[-1]["response"] == whole
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole["output"]
    for number, item in enumerate(done):
        deltas = [e["delta"] for e in events if e["type"].endswith(".delta") and e["output_index"] == number]
        said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(deltas) == said
    Response.model_validate(whole)


def test_events_come_in_openais_order() -> None:
    kinds = [event["type"] for event in streamed(asked(tools=[LOOK]), [output(f"Hi{CALLED}")])]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_truncated_answer_is_incomplete() -> None:
    whole = respond(asked(), [output("Hi", "length")], **NAMED)
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][0]["status"] == "incomplete"


def test_call_keeps_its_namespace() -> None:
    call = asked(tools=[SPACE])
    (item,) = respond(call, [output(CALLED.replace("look", "agents.look"))], **NAMED)["output"]
    assert (item["namespace"], item["name"], item["call_id"][:5]) == ("agents", "look", "call_")


def test_a_response_repeats_the_request() -> None:
    whole = respond(asked(metadata={"a": "b"}, instructions="Be kind.", temperature=0.5), [output("Hi")], **NAMED)
    repeated = (whole["metadata"], whole["instructions"], whole["temperature"], whole["store"])
    assert repeated == ({"a": "b"}, "Be kind.", 0.5, True)
    assert whole["usage"]["input_tokens_details"] == {"cached_tokens": 4, "cache_write_tokens": 5}
    assert whole["inlay"]["exact_tokens"] == 4


@pytest.mark.parametrize("begun", [False, True])
def test_a_failed_stream_ends_with_a_failed_response(begun: bool) -> None:
    stream = ResponseEvents(asked(), **NAMED)
    before = list(stream.update(0, output("Hi", None))) if begun else []
    (event,) = stream.fail(Failure(504, "too late", code="deadline_exceeded"))
    told = json.loads(event.split("\ndata: ")[1])
    assert (told["type"], told["sequence_number"]) == ("response.failed", len(before))
    assert told["response"]["error"] == {"code": "deadline_exceeded", "message": "too late"}
