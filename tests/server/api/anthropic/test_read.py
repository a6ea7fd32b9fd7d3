"""Bodies of the Messages API: each wrong one is refused with a code and a place."""

from __future__ import annotations

from typing import Any

import pytest

from inlay.api.anthropic import Endpoint, error_body, read_body, translate
from inlay.api.anthropic.bodies import NO_EFFECT, UNSUPPORTED
from inlay.api.failures import BodyError, failure_of
from inlay.api.tools.formats import model_tools
from tests.model.api.tool_templates import tool_tokenizer

QWEN = model_tools(tool_tokenizer("qwen"))
ASKED = {"role": "user", "content": "Hello"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "sea"}}
CALLED = [ASKED, {"role": "assistant", "content": [USE]}]
LOOK = {"name": "look", "input_schema": {"type": "object"}}


def refusal(body: dict[str, Any], *, minimal: bool = True) -> BodyError:
    given = {"model": "m", "max_tokens": 4, "messages": [ASKED], **body} if minimal else body
    with pytest.raises(BodyError) as caught:
        translate(read_body(given, Endpoint.MESSAGES), tools=QWEN)
    assert caught.value.status == 400
    assert "\n" not in str(caught.value)
    return caught.value


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def result(**fields: Any) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": "toolu_1", **fields}
    return {"messages": [*CALLED, {"role": "user", "content": [block]}]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (user({"type": "text"}), "messages[0].content[0].text"),
        (user({"type": "text", "text": 5}), "messages[0].content[0].text"),
        (user({"type": "text", "text": "a", "bold": True}), "messages[0].content[0].bold"),
        (user({"type": "text", "text": "a", "cache_control": {"type": "x"}}), "messages[0].content[0].cache_control"),
        (user("a"), "messages[0].content[0]"),
        (user({}), "messages[0].content[0].type"),
        (user({"type": "holograph"}), "messages[0].content[0].type"),
        (user(USE), "messages[0].content[0].type"),
        (user({"type": "document", "source": {"type": "text"}}), "messages[0].content[0].source.data"),
        (user({"type": "document"}), "messages[0].content[0].source"),
        (user({"type": "tool_result", "tool_use_id": "no"}), "messages[0].content[0].tool_use_id"),
        (result(content=[{"type": "text"}]), "messages[2].content[0].content[0].text"),
        (result(content=5), "messages[2].content[0].content"),
        (result(is_error="yes"), "messages[2].content[0].is_error"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": ["a"]}, "messages[0]"),
        ({"messages": []}, "messages"),
        ({"messages": CALLED}, "messages[1]"),
        (
            {"messages": [ASKED, {"role": "assistant", "content": [{**USE, "input": "{}"}]}]},
            "messages[1].content[0].input",
        ),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"system": 5}, "system"),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [LOOK, LOOK]}, "tools[1].name"),
        ({"tools": [{**LOOK, "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "hear"}}, "tool_choice"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"thinking": {"type": "sometimes"}}, "thinking"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
        ({"reuse": "sometimes"}, "reuse"),
    ],
)
def test_invalid_body_is_rejected_with_its_field(body: dict[str, Any], param: str) -> None:
    found = refusal(body).param
    assert found == param or (found or "").startswith(f"{param}."), found


@pytest.mark.parametrize("missing", ["messages", "max_tokens"])
def test_a_required_field_is_named(missing: str) -> None:
    body = {"model": "m", "max_tokens": 4, "messages": [ASKED]}
    del body[missing]
    found = refusal(body, minimal=False)
    assert (found.code, found.param) == ("missing_field", missing)


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}},
        {"type": "document", "source": {"type": "url", "url": "https://a.example"}},
        {"type": "search_result", "source": "a", "title": "b", "content": []},
    ],
)
def test_non_text_content_is_rejected_with_its_own_code(block: dict[str, Any]) -> None:
    assert refusal(user(block)).code == "unsupported_content"
    assert refusal(result(content=[block])).code == "unsupported_content"


def test_unknown_fields_are_rejected_and_client_habits_are_accepted() -> None:
    found = refusal({"max_token": 3})
    assert (found.code, found.param) == ("unknown_field", "max_token")
    assert refusal({"mcp_servers": [{}]}).code == "unsupported_field"
    body = {"model": "m", "max_tokens": 4, "messages": [ASKED], **{key: {"a": "b"} for key in NO_EFFECT}}
    body |= {name: harmless[0] for name, (harmless, _) in UNSUPPORTED.items() if harmless}
    read_body(body, Endpoint.MESSAGES)


def test_fields_of_other_servers_are_named_in_the_call() -> None:
    body = {"model": "m", "max_tokens": 4, "messages": [ASKED], "keep_alive": "5m"}
    assert translate(read_body(body, Endpoint.MESSAGES)).ignored == ("keep_alive",)


def test_body_that_is_not_an_object_is_rejected() -> None:
    for raw in (None, [], "a", 5):
        with pytest.raises(BodyError):
            read_body(raw, Endpoint.MESSAGES)


def test_many_errors_are_named_at_once_up_to_a_limit() -> None:
    found = refusal({"messages": [{"role": "user", "content": 5}] * 100, "system": 5})
    assert str(found).count(". Also: ") == 20


def test_a_model_without_tools_refuses_them() -> None:
    for body in ({"tools": [LOOK]}, result(content="a")):
        given = {"model": "m", "max_tokens": 4, "messages": [ASKED], **body}
        with pytest.raises(BodyError) as caught:
            translate(read_body(given, Endpoint.MESSAGES))
        assert caught.value.code == "unsupported_field"


def test_an_error_has_anthropics_form_and_the_code() -> None:
    body = error_body(failure_of(refusal({"max_token": 3})))
    assert (body["type"], body["error"]["type"], body["error"]["code"]) == (
        "error",
        "invalid_request_error",
        "unknown_field",
    )
    assert body["error"]["details"] == {"error_code": "unknown_field"}
