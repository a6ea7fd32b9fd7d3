"""Bodies of every dialect with a few values replaced: each becomes a call, or is refused with one line."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.api.dialect import ANTHROPIC, OPENAI, RESPONSES, Dialect
from inlay.api.failures import BodyError
from inlay.api.tools.formats import model_tools
from tests.model.api.tool_templates import tool_tokenizer

QWEN = model_tools(tool_tokenizer("qwen"))
MARK = {"type": "ephemeral", "ttl": "1h"}
SCHEMA = {"type": "object", "properties": {"at": {"enum": ["sea", "sky"]}}, "required": ["at"]}
CHAT: dict[str, Any] = {
    "model": "m",
    "max_tokens": 4,
    "stop": ["x"],
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be kind.", "cache_control": MARK}]},
        {"role": "user", "content": "Hello", "cache_control": MARK},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "Waves."}]},
    ],
    "tools": [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": "look"}},
    "reuse": "modular",
}
MESSAGE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 4,
    "stop_sequences": ["x"],
    "system": [{"type": "text", "text": "Be kind.", "cache_control": MARK}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Hello", "cache_control": MARK},
                {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}, "title": "b"},
                {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "a"}]}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c", "name": "look", "input": {"at": "sea"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "content": [{"type": "text", "text": "a"}],
                    "is_error": True,
                },
                {"type": "tool_result", "tool_use_id": "c", "content": "b", "cache_control": MARK},
            ],
        },
        {"role": "system", "content": "Stop."},
    ],
    "tools": [{"name": "look", "input_schema": SCHEMA, "cache_control": MARK}],
    "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "high"},
    "cache_control": MARK,
    "metadata": {"user_id": "x"},
}
RESPONSE: dict[str, Any] = {
    "model": "m",
    "max_output_tokens": 4,
    "instructions": "Be kind.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello", "cache_control": MARK}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}", "namespace": "n"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "developer", "content": "Stop.", "order": "any"},
    ],
    "tools": [
        {"type": "function", "name": "look", "parameters": SCHEMA, "strict": True},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}]},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    "reasoning": {"effort": "medium", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
}
BODIES = [
    pytest.param(OPENAI, "/v1/chat/completions", CHAT, id="chat"),
    pytest.param(ANTHROPIC, "/v1/messages", MESSAGE, id="message"),
    pytest.param(RESPONSES, "/v1/responses", RESPONSE, id="response"),
]
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**70, 1.5, "", "a", "text", [], {}, [[]], [{}], [None], {"type": "text"}, {"type": []}),
    *(
        {"type": "image"},
        {"type": "tool_use"},
        {"role": "user"},
        "5m",
        ["a"] * 2000,
        {"a": {"a": {}}},
        "user",
        "system",
    ),
)


@pytest.mark.parametrize(("dialect", "path", "body"), BODIES)
def test_unchanged_bodies_are_accepted(dialect: Dialect, path: str, body: dict[str, Any]) -> None:
    assert outcome(dialect, path, body) == (200, "")


@pytest.mark.parametrize(("dialect", "path", "body"), BODIES)
@given(seed=st.integers(0, 2**32))
def test_a_changed_body_becomes_a_call_or_is_refused(
    dialect: Dialect, path: str, body: dict[str, Any], seed: int
) -> None:
    chance = random.Random(seed)
    made = copy.deepcopy(body)
    for _ in range(chance.randint(1, 3)):
        change(made, chance)
    status, message = outcome(dialect, path, made)
    assert status in (200, 400, 404), made
    assert "\n" not in message


def change(body: dict[str, Any], chance: random.Random) -> None:
    """Replace, delete or double one value somewhere in a body."""
    places: list[tuple[Any, Any]] = []
    left: list[Any] = [body]
    while left:
        inside = left.pop()
        for key in inside if isinstance(inside, dict) else range(len(inside)):
            places.append((inside, key))
            if isinstance(inside[key], dict | list) and len(inside[key]) < 100:
                left.append(inside[key])
    if not places:
        return
    inside, key = chance.choice(places)
    kind = chance.randrange(4)
    if kind == 0:
        del inside[key]
    elif kind == 1 and isinstance(inside, list):
        inside.insert(key, copy.deepcopy(inside[key]))
    elif kind == 2 and isinstance(inside, dict):
        inside[chance.choice(["type", "text", "id", "name", "content", "extra"])] = copy.deepcopy(chance.choice(VALUES))
    else:
        inside[key] = copy.deepcopy(chance.choice(VALUES))


def outcome(dialect: Dialect, path: str, body: Any) -> tuple[int, str]:
    """The status of a body, and the sentence of its refusal."""
    try:
        call = dialect.translate(dialect.read(body, path), tools=QWEN)
    except BodyError as error:
        return error.status, str(error)
    assert call.prompts[0]
    return 200, ""
