"""Made-up bodies of every dialect: each becomes a call, or is refused with status 400 and one line."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.api.dialect import ANTHROPIC, OPENAI, RESPONSES, Dialect
from inlay.api.failures import BodyError
from inlay.api.tools.formats import model_tools
from tests.api.tool_templates import tool_tokenizer

QWEN = model_tools(tool_tokenizer("qwen"))
LEAVES = st.none() | st.booleans() | st.integers() | st.sampled_from(["", "a", "text", "user", "tool_use", "call_1"])
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
)
KINDS = [
    *("text", "document", "tool_use", "tool_result", "thinking", "redacted_thinking", "image", "content", "base64"),
    *("message", "function_call", "function_call_output", "reasoning", "input_text", "output_text", "refusal"),
    *("function", "namespace", "web_search", "custom", "ephemeral", "summary_text", "reasoning_text", "input_image"),
]
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "type": st.sampled_from(KINDS),
    "role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]),
    "id": st.sampled_from(["call_1", "call_2"]),
    "name": st.sampled_from(["look", "a b"]),
    "tool_use_id": st.sampled_from(["call_1", "call_2"]),
    "call_id": st.sampled_from(["call_1", "call_2"]),
    "tool_call_id": st.sampled_from(["call_1"]),
    "arguments": st.sampled_from(["{}", "{", ""]),
    **dict.fromkeys(("text", "data", "thinking", "signature", "title", "refusal", "media_type"), st.just("a")),
    "is_error": st.booleans(),
    "ttl": st.sampled_from(["5m", "1h", "1x"]),
    **dict.fromkeys(("input_schema", "parameters", "input"), st.just({"type": "object"})),
}


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    nested = dict.fromkeys(("content", "source", "cache_control", "output", "summary", "tools"), inner)
    deeper: dict[str, st.SearchStrategy[Any]] = {**FIELDS, **nested}
    return st.fixed_dictionaries({}, optional=deeper)


THINGS = st.recursive(
    LEAVES, lambda inner: st.lists(objects(inner), max_size=3) | objects(inner) | inner, max_leaves=12
)
SETS = {"model", "max_tokens", "messages", "input", "system", "instructions", "tools", "tool_choice", "thinking"}
SETS |= {"cache_control", "output_config", "text", "reasoning", "include", "metadata", "stop_sequences", "store"}


@pytest.mark.parametrize(
    ("dialect", "path"), [(one, route.path) for one in (OPENAI, ANTHROPIC, RESPONSES) for route in one.routes]
)
@given(data=st.data())
def test_a_body_becomes_a_call_or_is_refused(dialect: Dialect, path: str, data: st.DataObject) -> None:
    said = {"messages": st.lists(objects(THINGS), max_size=3), "input": st.lists(objects(THINGS), max_size=3)}
    body = data.draw(st.fixed_dictionaries({}, optional={name: said.get(name, THINGS | JSON) for name in sorted(SETS)}))
    body = {"model": "m", "max_tokens": 4, **body} if data.draw(st.booleans()) else body
    status, message = outcome(dialect, path, body)
    assert status in (200, 400, 404)
    assert "\n" not in message


def outcome(dialect: Dialect, path: str, body: Any) -> tuple[int, str]:
    """The status of a body, and the sentence of its refusal."""
    try:
        call = dialect.translate(dialect.read(body, path), tools=QWEN)
    except BodyError as error:
        return error.status, str(error)
    assert call.prompts
    return 200, ""
