"""Bodies of the Responses API: each wrong one is refused with a code and a place."""

from __future__ import annotations

from typing import Any

import pytest

from inlay.api.failures import BodyError
from inlay.api.responses import Endpoint, read_body, translate
from inlay.api.responses.bodies import NO_EFFECT, UNSUPPORTED
from inlay.api.tools.formats import model_tools
from tests.model.api.tool_templates import tool_tokenizer

QWEN = model_tools(tool_tokenizer("qwen"))
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}


def refusal(body: dict[str, Any]) -> BodyError:
    with pytest.raises(BodyError) as caught:
        translate(read_body({"model": "m", "input": "Hello", **body}, Endpoint.RESPONSES), tools=QWEN)
    assert "\n" not in str(caught.value)
    return caught.value


def message(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts), **fields}]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (message({"type": "input_text"}), "input[0].content[0].text"),
        (message({"type": "input_text", "text": 5}), "input[0].content[0].text"),
        (message({"type": "text", "text": "a"}), "input[0].content[0].type"),
        (message("a"), "input[0].content[0]"),
        (message(type="speech"), "input[0].type"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": ["a"]}, "input[0]"),
        ({"input": 5}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "look"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "a"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "content": "a"}]}, "input[0].content"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools[0].type"),
        ({"tools": [LOOK, LOOK]}, "tools[1].name"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{**LOOK, "parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "hear"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ({"text": {"verbosity": "high"}}, "text"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"reuse": "sometimes"}, "reuse"),
    ],
)
def test_invalid_body_is_rejected_with_its_field(body: dict[str, Any], param: str) -> None:
    found = refusal(body)
    assert (found.status, found.param) == (400, param)


@pytest.mark.parametrize(
    "body",
    [
        message({"type": "input_image", "image_url": "https://a.example"}),
        message({"type": "input_file", "file_id": "a"}),
        {"input": [{"type": "web_search_call", "id": "a"}]},
        {"input": [{"type": "item_reference", "id": "a"}]},
    ],
)
def test_non_text_content_is_rejected_with_its_own_code(body: dict[str, Any]) -> None:
    assert refusal(body).code == "unsupported_content"


def test_an_unknown_previous_response_is_not_found() -> None:
    found = refusal({"previous_response_id": "resp_1"})
    assert (found.status, found.code, found.param) == (404, "response_not_found", "previous_response_id")


@pytest.mark.parametrize(
    ("body", "begin"),
    [
        ({"reasoning": {"effort": "x"}}, "reasoning.effort is 'x'; reasoning must be"),
        ({"stop": ["a", 1]}, "stop[1] is 1; stop must be"),
        ({"text": {"format": {}}}, "text.format.type is missing; text must be"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name is missing; tool_choice must be"),
        ({"metadata": {"\x1b[2J" + "a" * 200: 1}}, f"metadata.\x1b[2J{'a' * 95}… is 1; metadata must be"),
        ({"stop": 5}, "stop is 5; it must be"),
    ],
)
def test_invalid_value_in_a_field_is_named(body: dict[str, Any], begin: str) -> None:
    error = refusal(body)
    assert str(error).startswith(begin)
    assert error.param == next(iter(body))


def test_unknown_fields_are_rejected_and_client_habits_are_accepted() -> None:
    assert refusal({"max_output_token": 3}).code == "unknown_field"
    assert refusal({"background": True}).code == "unsupported_field"
    body = {"model": "m", "input": "a", **dict.fromkeys(NO_EFFECT, "x")}
    body |= {name: harmless[0] for name, (harmless, _) in UNSUPPORTED.items() if harmless}
    read_body(body, Endpoint.RESPONSES)


def test_body_that_is_not_an_object_is_rejected() -> None:
    for raw in (None, [], "a", 5):
        with pytest.raises(BodyError):
            read_body(raw, Endpoint.RESPONSES)
