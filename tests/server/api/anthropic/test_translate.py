"""Calls that messages become: turns for the template, marks, tools, reasoning and sampling."""

from __future__ import annotations

from typing import Any

import pytest

from inlay.api.anthropic import Endpoint, read_body, translate
from inlay.api.call import Call
from inlay.api.reasoning import FORMATS, ModelReasoning
from inlay.api.tools.formats import model_tools
from tests.model.api.tool_templates import tool_tokenizer

QWEN = model_tools(tool_tokenizer("qwen"))
ASKED = {"role": "user", "content": "Hello"}
FIVE, HOUR = {"type": "ephemeral", "ttl": "5m"}, {"type": "ephemeral", "ttl": "1h"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "sea"}}
LOOK = {"name": "look", "description": "Look.", "input_schema": {"type": "object", "properties": {}}}


def call(body: dict[str, Any], **more: Any) -> Call:
    given = {"model": "m", "max_tokens": 4, "messages": [ASKED], **body}
    return translate(read_body(given, Endpoint.MESSAGES), tools=QWEN, **more)


def turns(body: dict[str, Any]) -> Any:
    (prompt,) = call(body).prompts
    return prompt["messages"] if isinstance(prompt, dict) else prompt


def text(said: str, **mark: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **mark}


def reasoner(*variables: str) -> ModelReasoning:
    return ModelReasoning(FORMATS[0], frozenset(variables), None, lambda ids: "")


def test_the_system_prompt_is_the_first_turn() -> None:
    assert turns({"system": "Be kind."}) == [{"role": "system", "content": "Be kind."}, ASKED]
    blocks = [text("Be kind.", cache_control=HOUR), text("Be brief.")]
    assert turns({"system": blocks})[0] == {"role": "system", "content": blocks}
    assert turns({"system": ""}) == [ASKED]


def test_a_mark_stays_on_its_block() -> None:
    blocks = [text("a", cache_control={"type": "ephemeral"}), text("b", cache_control=FIVE), text("c")]
    assert turns({"messages": [{"role": "user", "content": blocks}]}) == [{"role": "user", "content": blocks}]


def test_mark_on_a_message_marks_all_its_parts() -> None:
    (turn,) = turns({"messages": [{"role": "user", "content": [text("a"), text("b")], "cache_control": HOUR}]})
    assert turn["content"] == [text("a", cache_control=HOUR), text("b", cache_control=HOUR)]
    (turn,) = turns({"messages": [{**ASKED, "cache_control": HOUR}]})
    assert turn["content"] == [text("Hello", cache_control=HOUR)]


def test_mark_on_a_request_marks_the_last_text() -> None:
    *before, last = turns({"system": "S", "cache_control": FIVE})
    assert before == [{"role": "system", "content": "S"}]
    assert last["content"] == [text("Hello", cache_control=FIVE)]
    (turn,) = turns({"messages": [{"role": "user", "content": [text("a", cache_control=HOUR)]}], "cache_control": FIVE})
    assert turn["content"] == [text("a", cache_control=HOUR)]


def test_call_and_its_result_are_template_turns() -> None:
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("Waves.")], "cache_control": HOUR},
        text("And now?"),
    ]
    past = {"role": "assistant", "content": [text("I look."), USE]}
    made = turns({"messages": [ASKED, past, {"role": "user", "content": results}]})
    assert made[1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {"id": "toolu_1", "type": "function", "function": {"name": "look", "arguments": {"at": "sea"}}}
            ],
        },
        {
            "role": "tool",
            "content": [text("Waves.", cache_control=HOUR)],
            "tool_call_id": "toolu_1",
            "name": "look",
        },
        {"role": "user", "content": [text("And now?")]},
    ]


@pytest.mark.parametrize("content", [None, "", "Waves."])
def test_a_result_may_be_a_text_or_missing(content: str | None) -> None:
    block = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, "is_error": True}
    made = turns({"messages": [ASKED, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [block]}]})
    assert (made[-1]["content"], made[-1]["is_error"]) == (content or "", True)


def test_past_reasoning_reaches_the_template_and_redacted_reasoning_does_not() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    past = {"role": "assistant", "content": [thought, redacted, text("Yes.")]}
    made = turns({"messages": [ASKED, past, ASKED]})
    assert made[1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}


def test_a_document_of_text_is_read_with_its_title() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "It rains."}
    blocks = {"type": "content", "content": [text("It "), text("rains.")]}
    for given in (source, blocks):
        document = {"type": "document", "source": given, "title": "Weather", "cache_control": FIVE}
        (turn,) = turns({"messages": [{"role": "user", "content": [document, text("Why?")]}]})
        assert turn["content"] == [text("Weather\nIt rains.", cache_control=FIVE), text("Why?")]


def test_consecutive_messages_of_one_role_are_joined() -> None:
    made = turns({"messages": [ASKED, {"role": "user", "content": [text("there")]}]})
    assert made == [{"role": "user", "content": [text("Hello"), text("\n\n"), text("there")]}]


def test_billing_block_is_dropped() -> None:
    billing = text("x-anthropic-billing-header: cc_version=1.2.3;")
    assert turns({"system": [billing, text("Be kind.")]})[0]["content"] == [text("Be kind.")]
    assert turns({"system": [billing]}) == [ASKED]


def test_system_message_in_the_middle_keeps_its_position() -> None:
    made = turns({"messages": [ASKED, {"role": "system", "content": "Stop."}, ASKED]})
    assert [turn["role"] for turn in made] == ["user", "system", "user"]


def test_a_last_message_of_the_assistant_is_continued() -> None:
    (prompt,) = call({"messages": [ASKED, {"role": "assistant", "content": "Well"}]}).prompts
    assert prompt["continue_final_message"]  # type: ignore[call-overload, index]


def test_sampling_fields_are_translated() -> None:
    made = call({"stop_sequences": ["x"], "temperature": 0.5, "top_p": 0.5, "top_k": 3, "seed": 7, "min_p": 0.1}).params
    assert (made.stop, made.temperature, made.top_p, made.top_k) == (["x"], 0.5, 0.5, 3)
    assert (made.max_tokens, made.seed, made.min_p) == (4, 7, 0.1)


def test_inlay_fields_equal_the_other_dialects() -> None:
    made = call({"reuse": "modular", "recompute": "linked:4", "positions": "packed", "order": "any", "priority": 2})
    assert (made.reuse, made.positions, made.order, made.priority) == ("modular+linked:4", "packed", "any", 2)


@pytest.mark.parametrize(
    ("choice", "held", "parallel"),
    [
        (None, False, True),
        ({"type": "auto"}, False, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, False, False),
        ({"type": "any"}, True, True),
        ({"type": "any", "disable_parallel_tool_use": True}, True, False),
        ({"type": "tool", "name": "look"}, True, False),
    ],
)
def test_tool_choice_sets_constraint_and_parallel_calls(choice: Any, held: bool, parallel: bool) -> None:
    made = call({"tools": [{**LOOK, "cache_control": HOUR}], **({} if choice is None else {"tool_choice": choice})})
    assert made.tools is not None
    assert (made.tools.held, made.tools.parallel) == (held, parallel)
    assert (made.params.structured_outputs is not None) == held
    (prompt,) = made.prompts
    shown = {"name": "look", "description": "Look.", "parameters": LOOK["input_schema"]}
    assert prompt["tools"] == ({"type": "function", "function": shown, "cache_control": HOUR},)  # type: ignore[call-overload, index]


def test_tool_choice_none_hides_the_tools() -> None:
    assert call({"tools": [LOOK], "tool_choice": {"type": "none"}}).tools is None


def test_answer_can_be_constrained_to_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    made = call({"output_config": {"format": {"type": "json_schema", "schema": schema}}})
    assert made.params.structured_outputs is not None
    assert set(made.params.structured_outputs) == {"json"}


@pytest.mark.parametrize(
    ("body", "variables", "expected", "ignored"),
    [
        ({"thinking": {"type": "disabled"}}, ("enable_thinking",), {"enable_thinking": False}, ()),
        ({"thinking": {"type": "adaptive"}}, ("enable_thinking",), {"enable_thinking": True}, ()),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2048}},
            ("thinking",),
            {"thinking": True},
            ("thinking.budget_tokens",),
        ),
        ({"thinking": {"type": "disabled"}}, (), {}, ("thinking",)),
        ({"output_config": {"effort": "high"}}, ("reasoning_effort",), {"reasoning_effort": "high"}, ()),
        ({"output_config": {"effort": "high"}}, (), {}, ("output_config.effort",)),
    ],
)
def test_thinking_sets_variables_of_the_template(
    body: dict[str, Any], variables: tuple[str, ...], expected: dict[str, Any], ignored: tuple[str, ...]
) -> None:
    made = call(body, reasoning=reasoner(*variables))
    (prompt,) = made.prompts
    found = prompt.get("chat_template_kwargs", {}) if isinstance(prompt, dict) else {}
    assert (found, made.ignored) == (expected, ignored)


def test_thinking_of_a_model_that_does_not_reason_is_named_as_ignored() -> None:
    made = call({"thinking": {"type": "adaptive"}})
    assert (made.reasoning, made.ignored) == (None, ("thinking",))


@pytest.mark.parametrize("thinking", [{"type": "disabled"}, {"type": "adaptive", "display": "omitted"}])
def test_reasoning_is_left_out_on_request(thinking: dict[str, Any]) -> None:
    made = call({"thinking": thinking}, reasoning=reasoner("enable_thinking"))
    assert made.reasoning is not None
    assert not made.reasoning.include
