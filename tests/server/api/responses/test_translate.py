"""Calls that responses become: turns for the template, marks, tools, reasoning and stored responses."""

from __future__ import annotations

from typing import Any

import pytest

from inlay.api.call import Call, StoredAnswer
from inlay.api.failures import BodyError
from inlay.api.reasoning import FORMATS, ModelReasoning
from inlay.api.responses import Endpoint, read_body, translate
from inlay.api.responses.items import decoded_reasoning, encoded_reasoning
from inlay.api.tools.formats import model_tools
from tests.model.api.tool_templates import tool_tokenizer

QWEN = model_tools(tool_tokenizer("qwen"))
HOUR = {"type": "ephemeral", "ttl": "1h"}
LOOK = {"type": "function", "name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
CALL = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"at": "sea"}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "Waves."}
USER = {"role": "user", "content": "Hello"}


def call(body: dict[str, Any], **more: Any) -> Call:
    return translate(read_body({"model": "m", "input": "Hello", **body}, Endpoint.RESPONSES), tools=QWEN, **more)


def turns(body: dict[str, Any], **more: Any) -> Any:
    (prompt,) = call(body, **more).prompts
    return prompt["messages"] if isinstance(prompt, dict) else prompt


def text(said: str, **mark: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **mark}


def test_plain_text_is_a_user_turn() -> None:
    assert turns({}) == [USER]
    assert turns({"instructions": "Be kind."}) == [{"role": "system", "content": "Be kind."}, USER]


def test_consecutive_messages_of_one_role_are_joined() -> None:
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}
    made = turns({"instructions": "Be kind.", "input": [developer, USER, USER]})
    assert made == [
        {"role": "system", "content": [text("Be kind."), text("\n\n"), text("Be brief.")]},
        {"role": "user", "content": [text("Hello"), text("\n\n"), text("Hello")]},
    ]


def test_reasoning_text_and_calls_of_one_answer_are_one_turn() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    made = turns({"input": [USER, thought, said, CALL, RESULT]})
    function = {"name": "look", "arguments": {"at": "sea"}}
    assert made[1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "Waves.", "tool_call_id": "call_1", "name": "look"},
    ]


def test_encoded_reasoning_round_trips() -> None:
    assert decoded_reasoning(encoded_reasoning("Hm. é")) == "Hm. é"
    assert decoded_reasoning("gAAAA-other") == ""
    thought = {"type": "reasoning", "summary": [], "encrypted_content": encoded_reasoning("Hm.")}
    made = turns({"input": [USER, thought, {"role": "assistant", "content": "Yes."}, USER]})
    assert made[1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}


def test_marks_of_both_kinds_stay_on_their_parts() -> None:
    parts = [
        {"type": "input_text", "text": "a", "cache_control": HOUR},
        {"type": "input_text", "text": "b", "prompt_cache_breakpoint": {"mode": "explicit"}},
    ]
    (turn,) = turns({"input": [{"role": "user", "content": parts}], "prompt_cache_options": {"ttl": "30m"}})
    half = {"type": "ephemeral", "ttl": "30m"}
    assert turn["content"] == [text("a", cache_control=HOUR), text("b", cache_control=half)]
    (turn,) = turns({"input": [{**USER, "cache_control": HOUR, "order": "any"}]})
    assert turn == {"role": "user", "content": [text("Hello", cache_control=HOUR)], "order": "any"}


def test_namespace_precedes_its_function_names() -> None:
    space = {"type": "namespace", "name": "agents", "description": "x", "tools": [LOOK]}
    made = call({"tools": [space], "tool_choice": {"type": "function", "name": "look", "namespace": "agents"}})
    assert made.tools is not None
    assert made.tools.functions.keys() == {"agents.look"}
    past = [USER, {**CALL, "namespace": "agents"}, RESULT]
    assert turns({"input": past})[1]["tool_calls"][0]["function"]["name"] == "agents.look"


def test_a_tool_that_inlay_cannot_run_is_hidden_and_named() -> None:
    made = call({"tools": [LOOK, {"type": "web_search", "external_web_access": True}]})
    assert made.tools is not None
    assert (list(made.tools.functions), made.ignored) == (["look"], ("tools[1]",))


@pytest.mark.parametrize(
    ("fields", "held", "parallel"),
    [
        ({}, False, True),
        ({"parallel_tool_calls": False}, False, False),
        ({"tool_choice": "required"}, True, True),
        ({"tool_choice": {"type": "function", "name": "look"}}, True, False),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]}},
            False,
            True,
        ),
    ],
)
def test_tool_choice_sets_constraint_and_parallel_calls(fields: dict[str, Any], held: bool, parallel: bool) -> None:
    made = call({"tools": [LOOK], **fields})
    assert made.tools is not None
    assert (made.tools.held, made.tools.parallel) == (held, parallel)


def test_sampling_fields_are_translated() -> None:
    made = call({"max_output_tokens": 5, "temperature": 0.5, "top_p": 0.5, "seed": 7, "reuse": "modular"})
    assert (made.params.max_tokens, made.params.temperature, made.params.seed) == (5, 0.5, 7)
    assert (made.said_max_tokens, made.reuse) == (True, "modular")
    assert call({}, default_max_tokens=9).params.max_tokens == 9


@pytest.mark.parametrize(
    ("form", "key"),
    [
        ({"type": "json_object"}, "json_object"),
        ({"type": "json_schema", "name": "a", "schema": {"type": "object"}}, "json"),
    ],
)
def test_answer_can_be_constrained_to_a_format(form: dict[str, Any], key: str) -> None:
    structure = call({"text": {"format": form}}).params.structured_outputs
    assert structure is not None
    assert set(structure) == {key}
    assert call({"text": {"format": {"type": "text"}}}).params.structured_outputs is None


def test_effort_sets_the_template_and_a_summary_is_named_as_ignored() -> None:
    thinks = ModelReasoning(FORMATS[0], frozenset({"enable_thinking"}), None, lambda ids: "")
    made = call({"reasoning": {"effort": "none", "summary": "auto"}}, reasoning=thinks)
    (prompt,) = made.prompts
    assert prompt["chat_template_kwargs"] == {"enable_thinking": False}  # type: ignore[call-overload, index]
    assert made.ignored == ("reasoning.summary",)


def test_effort_without_a_place_in_the_template_is_named_as_ignored() -> None:
    thinks = ModelReasoning(FORMATS[0], frozenset({"enable_thinking"}), None, lambda ids: "")
    for model in (None, thinks):
        made = call({"reasoning": {"effort": "high"}}, reasoning=model)
        assert made.ignored == ("reasoning.effort",)
        assert isinstance(made.prompts[0], list), "the template gets no variables"
    assert call({"reasoning": {"effort": "medium"}}).ignored == ()
    with pytest.raises(BodyError) as error:
        call({"reasoning": {"effort": "none"}}, reasoning=ModelReasoning(FORMATS[0], frozenset(), None, lambda ids: ""))
    assert error.value.param == "reasoning.effort"


def test_a_stored_response_is_continued_with_its_input_and_output() -> None:
    first = call({"instructions": "Be kind.", "metadata": {"a": "b"}})
    assert first.store is not None
    assert [(item["type"], item["content"]) for item in first.store] == [("message", "Hello")]
    said = {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]}
    stored = {"resp_1": StoredAnswer({"id": "resp_1", "output": [said, CALL]}, first.store)}
    second = call({"input": [RESULT], "previous_response_id": "resp_1"}, stored=stored)
    assert second.store is not None
    assert [item["type"] for item in second.store] == ["message", "message", "function_call", "function_call_output"]
    roles = [turn["role"] for turn in turns({"input": [RESULT], "previous_response_id": "resp_1"}, stored=stored)]
    assert roles == ["user", "assistant", "tool"]


def test_response_is_not_stored_with_store_false() -> None:
    assert call({"store": False}).store is None
