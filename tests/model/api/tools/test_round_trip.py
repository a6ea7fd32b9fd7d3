"""Inside a tool loop, a past call and its reasoning go back to the template in the form of the model's family."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from inlay.api.openai import read_body, translate
from inlay.api.pieces import WholeAnswer
from inlay.api.reasoning import HarmonyParser
from inlay.api.tools.formats import model_tools, named_format
from inlay.api.tools.offer import with_family_ids
from inlay.prompt.chat import ChatTemplate
from inlay.prompt.conversation import as_turn
from tests.model.api.tool_templates import tool_tokenizer
from tests.tokenizers_for_tests import with_template

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}},
        },
    },
}
ARGUMENTS = {"city": "Rome", "days": 3, "where": {"lat": 41.9}}
_USERS = "{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }}\n{% elif m.role == 'tool' %}"
_THOUGHT = "<think>\\n' + m.reasoning_content + '\\n</think>\\n"


@dataclass(frozen=True)
class Family:
    """A template after that of a real family: how it shows tools, a result, and an answer with a call."""

    format: str
    tools: str
    result: str
    answer: str
    written: str
    """An answer as it renders, without its reasoning."""

    @property
    def template(self) -> str:
        return f"{self.tools}{_USERS}{self.result}{{% else %}}{self.answer}{{% endif %}}{{% endfor %}}"


_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
_CALLS = "{% for c in m.tool_calls or [] %}"
FAMILIES = (
    Family(
        "hermes",
        _TOOLS + "{# <tool_call> #}",
        "<tool_response>{{ m.content }}</tool_response>",
        "{{ '" + _THOUGHT + "' if m.reasoning_content }}{{ m.content }}" + _CALLS + "<tool_call>\n"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}',
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3, "where": {"lat": 41.9}}}\n'
        "</tool_call>",
    ),
    Family(
        "qwen3_coder",
        _TOOLS,
        "<tool_response>{{ m.content }}</tool_response>",
        "{{ '" + _THOUGHT + "' if m.reasoning_content }}{{ m.content }}" + _CALLS + "<tool_call>\n"
        "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n"
        "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}",
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        '<parameter=where>\n{"lat": 41.9}\n</parameter>\n</function>\n</tool_call>',
    ),
    Family(
        "glm45",
        _TOOLS,
        "<tool_response>{{ m.content }}</tool_response>",
        "{{ '" + _THOUGHT + "' if m.reasoning_content }}{{ m.content }}" + _CALLS + "<tool_call>"
        "{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
        "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
        '<arg_value>3</arg_value>\n<arg_key>where</arg_key>\n<arg_value>{"lat": 41.9}</arg_value>\n</tool_call>',
    ),
    Family(  # it joins texts, so arguments must be JSON text
        "deepseek_v31",
        _TOOLS,
        "{{ m.content }}",
        "{{ '" + _THOUGHT + "' if m.reasoning_content }}{{ m.content }}<｜tool▁calls▁begin｜>" + _CALLS
        + "{{ '<｜tool▁call▁begin｜>' + c['function']['name'] + '<｜tool▁sep｜>' + c['function']['arguments'] + "
        "'<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome", "days": 3, "where": '
        '{"lat": 41.9}}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    Family(  # it shows ids
        "kimi_k2",
        _TOOLS,
        "## Return of {{ m.tool_call_id }}\n{{ m.content }}",
        "{{ '" + _THOUGHT + "' if m.reasoning_content }}{{ m.content }}<|tool_calls_section_begin|>" + _CALLS
        + "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}"
        "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Rome", "days": 3, "where": {"lat": 41.9}}<|tool_call_end|><|tool_calls_section_end|>',
    ),
    Family(  # it requires ids of nine letters and digits
        "mistral",
        _TOOLS,
        "{{ m.tool_call_id }}{{ m.content }}",
        "{{ '" + _THOUGHT + "' if m.reasoning_content }}{{ m.content }}" + _CALLS
        + "{% if c.id | length != 9 %}{{ raise_exception('ids need nine characters') }}{% endif %}"
        "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}",
        '[TOOL_CALLS]weather[ARGS]{"city": "Rome", "days": 3, "where": {"lat": 41.9}}',
    ),
    Family(  # it reads ``thinking``, and refuses a call with content and reasoning
        "openai",
        _TOOLS,
        "{{ m.content }}",
        "{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
        "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}"
        "{{ m.content }}" + _CALLS + "<|channel|>commentary to=functions.{{ c.function.name }} <|constrain|>json"
        "<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}",
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome", "days": 3, "where": '
        '{"lat": 41.9}}<|call|>',
    ),
)  # fmt: skip


def turns(family: Family, name: str, content: str = "") -> list[dict[str, Any]]:
    """Return a conversation in a tool loop, as the template gets it. ``name`` is the field of its reasoning."""
    tokenizer = with_template(tool_tokenizer("none"), family.template)
    call = {"id": "call_0123456789abcdef", "type": "function"}
    call["function"] = {"name": "weather", "arguments": json.dumps(ARGUMENTS)}  # type: ignore[assignment]
    messages = [
        {"role": "user", "content": "How is it in Rome?"},
        {"role": "assistant", "content": content, name: "I look it up.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "Sunny."},
    ]
    body = read_body({"messages": messages, "tools": [TOOL]}, "/v1/chat/completions")
    tools = model_tools(tokenizer)
    assert tools is not None
    assert tools.format.name == family.format
    prompt: Any = translate(body, tools=tools).prompts[0]
    return list(map(as_turn, prompt["messages"]))


def rendered(family: Family, messages: list[dict[str, Any]]) -> str:
    tokenizer = with_template(tool_tokenizer("none"), family.template)
    return ChatTemplate(tokenizer).render(messages, tools=[TOOL])


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.format)
def test_a_template_shows_a_past_call_and_its_reasoning(family: Family, name: str) -> None:
    text = rendered(family, turns(family, name))
    assert family.written in text
    assert "I look it up." in text
    assert "Sunny." in text


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.format)
def test_the_rendered_call_is_parsed_as_that_call(family: Family) -> None:
    """What the template writes is what the model learned to write, so the parser must read it."""
    row = named_format(family.format)
    assert row is not None
    tokenizer = with_template(tool_tokenizer("none"), family.template)
    tools = model_tools(tokenizer)
    assert tools is not None
    functions = {"weather": TOOL["function"]["parameters"]}  # type: ignore[index]
    if row.harmony:
        harmony = HarmonyParser(functions, parallel=True)
        answer = WholeAnswer.of([*harmony.feed(family.written), *harmony.finish()])
    else:
        from inlay.api.tools.formats import FreeParser

        parser = FreeParser(tools, functions, parallel=True)
        answer = WholeAnswer.of([*parser.feed(family.written), *parser.finish()])
    (called,) = answer.parts
    assert (called.name, json.loads(called.arguments)) == ("weather", ARGUMENTS)  # type: ignore[union-attr]


def test_call_keeps_text_and_reasoning_if_the_template_refuses_both() -> None:
    family = FAMILIES[-1]
    text = rendered(family, turns(family, "reasoning", "Let me see."))
    assert "<|channel|>analysis<|message|>I look it up.\nLet me see.<|end|>" in text


def test_ids_are_counted_over_the_whole_conversation() -> None:
    tools = model_tools(with_template(tool_tokenizer("none"), FAMILIES[4].template))
    call = {"type": "function", "function": {"name": "weather", "arguments": {}}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [{**call, "id": "a"}, {**call, "id": "b"}]},
        {"role": "tool", "tool_call_id": "b", "content": "B"},
        {"role": "tool", "tool_call_id": "a", "content": "A"},
        {"role": "assistant", "content": "", "tool_calls": [{**call, "id": "c"}]},
        {"role": "tool", "tool_call_id": "c", "content": "C"},
    ]
    made = with_family_ids(messages, tools)
    assert [call["id"] for turn in made for call in turn.get("tool_calls", ())] == [
        f"functions.weather:{number}" for number in range(3)
    ]
    assert [turn["tool_call_id"] for turn in made if turn["role"] == "tool"] == [
        f"functions.weather:{number}" for number in (1, 0, 2)
    ]
    assert with_family_ids(messages, None) == messages
