"""The cases of the OpenResponses compliance suite. Every object must have exactly the fields of OpenAI's own types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from inlay import AsyncLLM
from tests.model.api.tool_templates import tool_model
from tests.server.server.conftest import Site, running

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
# inlay's own, and fields of OpenResponses and of OpenAI's service that OpenAI's types leave out.
OUTSIDE = {"inlay", "store", "presence_penalty", "frequency_penalty"} - set(Response.model_fields)
#: The fields that OpenResponses requires of every response.
REQUIRED = [
    "id",
    "object",
    "created_at",
    "completed_at",
    "status",
    "incomplete_details",
    "model",
    "previous_response_id",
    "instructions",
    "output",
    "error",
    "tools",
    "tool_choice",
    "truncation",
    "parallel_tool_calls",
    "text",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "top_logprobs",
    "temperature",
    "reasoning",
    "usage",
    "max_output_tokens",
    "max_tool_calls",
    "store",
    "background",
    "service_tier",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
]
NUMBERS = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs")  # never null
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "name": "weather", "description": "The weather.", "parameters": CITY, "strict": True}
USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello there"}]}
CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city":"Oslo"}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "Sunny."}
FORM = {"type": "json_schema", "name": "place", "schema": CITY, "strict": True}
CASES: dict[str, dict[str, Any]] = {
    "basic text": {"input": "Hello there"},
    "list input": {"input": [USER]},
    "system prompt": {"instructions": "Be kind.", "input": [USER]},
    "developer message": {"input": [{"type": "message", "role": "developer", "content": "Be kind."}, USER]},
    "tool call": {
        "input": "Hello",
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_output_tokens": 80,
    },
    "tool result": {"input": [USER, CALL, RESULT], "tools": [WEATHER]},
    "multi-turn": {"input": [USER, {"role": "assistant", "content": "Hello."}, USER]},
    "reasoning": {"input": "Hello", "include": ["reasoning.encrypted_content"], "max_output_tokens": 40},
    "json schema": {"input": "Hello", "text": {"format": FORM}, "max_output_tokens": 40},
    "cut": {"input": "Hello", "max_output_tokens": 1},
}


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    llm = AsyncLLM(tool_model("qwen"), kv_memory="16MiB", chunk_size=8, seed=1)
    with running(llm) as found:
        yield found
    llm.shutdown()


def undeclared(value: Any, place: str = "") -> list[str]:
    """Return the places of fields that OpenAI's types do not declare."""
    if isinstance(value, list):
        return [found for number, one in enumerate(value) for found in undeclared(one, f"{place}[{number}]")]
    if not isinstance(value, BaseModel):
        return []
    extra = [f"{place}.{name}" for name in value.model_extra or {}]
    inner = [
        found for name in type(value).model_fields for found in undeclared(getattr(value, name), f"{place}.{name}")
    ]
    return extra + inner


def check_response(document: dict[str, Any], place: str = "response") -> None:
    plain = {name: value for name, value in document.items() if name not in OUTSIDE}
    assert set(REQUIRED) <= document.keys(), set(REQUIRED) - document.keys()
    assert all(document[name] is not None for name in NUMBERS)
    assert (document["completed_at"] is None) == (document["status"] in ("in_progress", "incomplete", "failed"))
    assert all({"description", "parameters", "strict"} <= tool.keys() for tool in document["tools"])
    assert undeclared(Response.model_validate(plain, strict=True), place) == []


def check_event(event: dict[str, Any]) -> None:
    if "response" in event:
        check_response(event["response"], event["type"])
        event = {**event, "response": {k: v for k, v in event["response"].items() if k not in OUTSIDE}}
    parsed = EVENT.validate_python(event, strict=True)
    assert parsed.type == event["type"]
    # Older releases of the client require this name, and newer ones do not declare it.
    assert set(undeclared(parsed, event["type"])) <= {"response.function_call_arguments.done.name"}


def events_of(told: str) -> list[dict[str, Any]]:
    """Return the events of a stream. Each one has its type as its name."""
    found = []
    for block in told.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def asked(case: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_output_tokens": 12, "seed": 3, **CASES[case], **more}


@pytest.mark.parametrize("case", CASES)
def test_a_response_has_openais_fields(site: Site, case: str) -> None:
    status, _, document = site.call("POST", "/v1/responses", asked(case))
    assert status == 200, document
    check_response(document)
    if case == "tool call":
        assert [item["type"] for item in document["output"]] == ["function_call"]
        assert json.loads(document["output"][0]["arguments"])["city"] in ("Oslo", "Rome")
    if case == "json schema":
        assert json.loads(document["output"][0]["content"][0]["text"])["city"] in ("Oslo", "Rome")
    if case == "cut":
        assert (document["status"], document["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize("case", CASES)
def test_events_have_openais_fields(site: Site, case: str) -> None:
    status, _, told = site.call("POST", "/v1/responses", asked(case, stream=True))
    assert status == 200, told
    events = events_of(told)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        check_event(event)
    _, _, whole = site.call("POST", "/v1/responses", asked(case))
    kinds = [item["type"] for item in events[-1]["response"]["output"]]
    assert kinds == [item["type"] for item in whole["output"]]


def test_a_stored_response_is_continued(site: Site) -> None:
    _, _, first = site.call("POST", "/v1/responses", asked("tool call"))
    (call,) = first["output"]
    result = {**RESULT, "call_id": call["call_id"]}
    more = {"previous_response_id": first["id"], "input": [result], "tools": [WEATHER]}
    status, _, second = site.call("POST", "/v1/responses", asked("basic text", **more))
    assert status == 200, second
    check_response(second)
    assert second["previous_response_id"] == first["id"]
    status, _, read = site.call("GET", f"/v1/responses/{second['id']}")
    assert (status, read) == (200, second)
