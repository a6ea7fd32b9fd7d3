"""Messages as chat templates take them, and rules for each role."""

from __future__ import annotations

from typing import Any

import pytest

from inlay.api.failures import BodyError
from inlay.api.openai import Endpoint, read_body, translate
from inlay.api.openai.bodies import ChatBody
from inlay.api.openai.messages import first_of_tools, for_template

USER = {"role": "user", "content": "Hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "Sunny."}


def messages(*given: dict[str, Any]) -> list[dict[str, Any]]:
    body = read_body({"messages": list(given)}, Endpoint.CHAT)
    assert isinstance(body, ChatBody)
    return for_template(body.messages or ())


def text(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
TURNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": (USER, USER),
    "developer": ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
    "parts": ({**USER, "content": [text("a"), text("b")]}, {**USER, "content": [text("a"), text("b")]}),
    "a marked part": (
        {**USER, "content": [text("a", **EPHEMERAL), text("b", cache_control=None)]},
        {**USER, "content": [text("a", **EPHEMERAL), text("b")]},
    ),
    "a mark with a time to live": (
        {**USER, "content": [text("a", cache_control={"type": "ephemeral", "ttl": "1h"})]},
        {**USER, "content": [text("a", cache_control={"type": "ephemeral", "ttl": "1h"})]},
    ),
    "an empty time to live, which is refused with the prompt": (
        {**USER, "content": [text("a", cache_control={"type": "ephemeral", "ttl": ""})]},
        {**USER, "content": [text("a", cache_control={"type": "ephemeral", "ttl": ""})]},
    ),
    "two marks that say the same": (
        {
            **USER,
            "content": [text("a", **EPHEMERAL, prompt_cache_breakpoint={"mode": "explicit", "ttl": "30m"})],
        },
        {**USER, "content": [text("a", cache_control={"type": "ephemeral", "ttl": "30m"})]},
    ),
    "OpenAI's mark": (
        {**USER, "content": [text("a", prompt_cache_breakpoint={"mode": "explicit", "ttl": None})]},
        {**USER, "content": [text("a", **EPHEMERAL)]},
    ),
    "OpenAI's mark with a time to live": (
        {**USER, "content": [text("a", prompt_cache_breakpoint={"mode": "explicit", "ttl": "30m"})]},
        {**USER, "content": [text("a", cache_control={"type": "ephemeral", "ttl": "30m"})]},
    ),
    "a name": ({**USER, "name": "Ann"}, {**USER, "name": "Ann"}),
    "a refusal": (
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": "No."},
    ),
    "a part that refuses": (
        {"role": "assistant", "content": [text("a"), {"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": [text("a"), text("No.")]},
    ),
    "a past answer of an SDK": (
        {"role": "assistant", "content": "Hi", "refusal": None, "annotations": [], "audio": None, "function_call": None}
        | {"tool_calls": None},
        {"role": "assistant", "content": "Hi"},
    ),
    "what LiteLLM's messages hold": (
        {"role": "assistant", "content": "Hi", "provider_specific_fields": {"refusal": None}, "images": []}
        | {"reasoning_content": "Hm.", "thinking_blocks": [{"type": "thinking", "thinking": "Hm."}]},
        {"role": "assistant", "content": "Hi", "reasoning_content": "Hm."},
    ),
    "thoughts": (
        {"role": "assistant", "content": None, "reasoning": "Hm.", "reasoning_content": None},
        {"role": "assistant", "content": "", "reasoning": "Hm."},
    ),
    "a marked text": ({**USER, "cache_control": {"type": "ephemeral", "ttl": None}}, {**USER, **EPHEMERAL}),
    "a marked answer": (
        {"role": "assistant", "content": "Hi", **EPHEMERAL},
        {"role": "assistant", "content": "Hi", **EPHEMERAL},
    ),
    "a marked system turn in parts": (
        {"role": "system", "content": [text("a"), text("b")], **EPHEMERAL},
        {"role": "system", "content": [text("a"), text("b")], **EPHEMERAL},
    ),
    "parts of a past answer": (
        {
            "role": "assistant",
            "content": [
                text("Hi", annotations=[], index=0, id="msg_1", logprobs=None),
                {"type": "refusal", "refusal": "No.", "id": "msg_2"},
            ],
        },
        {"role": "assistant", "content": [text("Hi"), text("No.")]},
    ),
    "annotations": (
        {"role": "assistant", "content": "Hi", "annotations": [{"type": "url_citation", "url_citation": {}}]},
        {"role": "assistant", "content": "Hi"},
    ),
    "no calls": ({"role": "assistant", "content": "Hi", "tool_calls": []}, {"role": "assistant", "content": "Hi"}),
}


@pytest.mark.parametrize(("given", "expected"), TURNS.values(), ids=TURNS.keys())
def test_messages_become_template_turns(given: dict[str, Any], expected: dict[str, Any]):
    assert messages(given) == [expected]


def test_calls_and_their_results():
    """Arguments become objects; a result gets the name of the function that was called."""
    without_type = {"id": "c2", "function": {"name": "time", "arguments": " "}}
    both = {"role": "assistant", "content": "I look.", "tool_calls": [CALL, without_type]}
    other = {**RESULT, "tool_call_id": "c2", "content": [text("Ten.")], "name": "clock"}
    assert messages(USER, both, RESULT, other)[1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}},
                {"id": "c2", "type": "function", "function": {"name": "time", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "Sunny.", "name": "weather", "tool_call_id": "c1"},
        {"role": "tool", "content": [text("Ten.")], "name": "clock", "tool_call_id": "c2"},
    ]
    assert messages(USER, CALLS, RESULT)[1]["content"] == ""


def test_the_first_message_of_tools():
    for given, number in (([USER], None), ([USER, CALLS, RESULT], 1), ([USER, {**CALLS, "tool_calls": []}], None)):
        given = [{**one, "content": one["content"] or "x"} for one in given]
        body = read_body({"messages": given}, Endpoint.CHAT)
        assert isinstance(body, ChatBody)
        assert first_of_tools(body.messages or ()) == number


WRONG: list[tuple[list[dict[str, Any]], str, str]] = [
    ([{"role": "user", "content": None}], "messages[0].content", "messages[0] has no content; it must be a text, or"),
    ([{"role": "assistant"}], "messages[0].content", "messages[0] has no content"),
    ([USER, {"role": "assistant", "tool_calls": []}], "messages[1].content", "messages[1] has no content"),
    ([{**USER, "tool_calls": [CALL]}], "messages[0].tool_calls", "messages[0] has tool_calls, and its role is 'user'"),
    ([{**USER, "refusal": "No."}], "messages[0].refusal", "messages[0] has a refusal; only an assistant has one"),
    (
        [{"role": "assistant", "content": "x", "refusal": "No."}],
        "messages[0].refusal",
        "messages[0] has a refusal; only an assistant has one, in place of content",
    ),
    ([{**USER, "tool_call_id": "c1"}], "messages[0].tool_call_id", "messages[0] has a tool_call_id; only a message"),
    ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id", "messages[0] has no tool_call_id; it must be"),
    ([RESULT], "messages[0].tool_call_id", "messages[0] is the result of 'c1', which no message before it calls"),
    ([RESULT, CALLS], "messages[0].tool_call_id", "messages[0] is the result of 'c1', which no message before it"),
    ([CALLS, {**RESULT, "content": None}], "messages[1].content", "messages[1] has no content; it must be"),
    (
        [{**CALLS, "tool_calls": [{**CALL, "type": "custom"}]}],
        "messages[0].tool_calls",
        "messages[0].tool_calls is a list of 1; it must be a list of at most 128 calls",
    ),
    (
        [{**CALLS, "tool_calls": [CALL] * 129}],
        "messages[0].tool_calls",
        "messages[0].tool_calls is a list of 129; it must be a list of at most 128 calls",
    ),
    (
        [{**CALLS, "tool_calls": [{**CALL, "function": {"name": "a b", "arguments": "{}"}}]}],
        "messages[0].tool_calls",
        "messages[0].tool_calls is a list of 1; it must be",
    ),
    (
        [{**USER, "content": [text("a"), text("b", cache_control={"type": "forever"})]}],
        "messages[0].content[1].cache_control.type",
        'messages[0].content[1].cache_control.type is \'forever\'; write cache_control: {"type": "ephemeral"}, with',
    ),
    (
        [{**USER, "content": [text("a", cache_control={"type": "ephemeral", "ttl": 300})]}],
        "messages[0].content[0].cache_control.ttl",
        "messages[0].content[0].cache_control.ttl is 300; write cache_control: ",
    ),
    (
        [{**USER, "content": [text("a", prompt_cache_breakpoint={"ttl": "12h"})]}],
        "messages[0].content[0].prompt_cache_breakpoint.mode",
        "messages[0].content[0].prompt_cache_breakpoint.mode is missing; write prompt_cache_breakpoint: ",
    ),
    (
        [{**USER, "content": [{"type": "image", "cache_control": {"type": "ephemeral"}}]}],
        "messages[0].content[0].type",
        "messages[0].content[0].type is 'image'; it must be \"text\": inlay reads text alone",
    ),
    (
        [{**USER, "content": [text("a"), text("b", annotations=[])]}],
        "messages[0].content[1].annotations",
        "messages[0].content[1] has the field 'annotations', which is not supported; a part has type, text, ",
    ),
    (
        [{**USER, "content": [text("a"), {"type": "text"}]}],
        "messages[0].content[1].text",
        "messages[0].content[1].text is missing; it must be a text",
    ),
    (
        [{**USER, "content": [{"type": "text", "text": 5}]}],
        "messages[0].content[0].text",
        "messages[0].content[0].text is 5; it must be a text",
    ),
    ([{**USER, "content": [{"text": "a"}]}], "messages[0].content[0].type", "messages[0].content[0].type is missing;"),
    ([{**USER, "content": ["a"]}], "messages[0].content[0]", "messages[0].content[0] is 'a'; it must be a part"),
    (
        [{"role": "assistant", "content": [text("a"), {"type": "refusal", "refusal": None}]}],
        "messages[0].content[1].refusal",
        "messages[0].content[1].refusal is missing; it must be a text",
    ),
    (
        [{**USER, "cache_control": {"type": "forever"}}],
        "messages[0].cache_control",
        'messages[0].cache_control is an object of 1; it must be {"type": "ephemeral"}, with or without',
    ),
    ([{"role": "assistant", "reasoning": 3}], "messages[0].reasoning", "messages[0].reasoning is 3; it must be a text"),
    (
        [
            {
                **USER,
                "content": [
                    text(
                        "a",
                        cache_control={"type": "ephemeral", "ttl": "5m"},
                        prompt_cache_breakpoint={"mode": "explicit", "ttl": "12h"},
                    )
                ],
            }
        ],
        "messages[0].content[0]",
        "messages[0].content[0] has the lifetimes '5m' and '12h' in its two marks; leave one of them out",
    ),
    ([{**USER, "name": "x" * 65}], "messages[0].name", "messages[0].name is 'xxx"),
]


@pytest.mark.parametrize(("given", "param", "sentence"), WRONG)
def test_invalid_messages_are_rejected(given: list[dict[str, Any]], param: str, sentence: str):
    with pytest.raises(BodyError) as caught:
        messages(*given)
    assert caught.value.param == param
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    "arguments", ["{", "[]", "3", "null", '{"a": NaN}', '{"a": "\\ud800"}', "[" * 500, "city=Rome"]
)
def test_non_object_arguments_are_passed_unchanged(arguments: str):
    (made,) = messages({**CALLS, "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": arguments}}]})
    assert made["tool_calls"][0]["function"] == {"name": "weather", "arguments": arguments}


def test_a_template_that_does_not_show_calls():
    body = read_body({"messages": [USER, CALLS, RESULT]}, Endpoint.CHAT)
    with pytest.raises(BodyError, match="which this model's chat template does not show") as caught:
        translate(body)
    assert caught.value.param == "messages[1]"


def test_extra_fields_of_past_calls_are_ignored():
    """Streams number the pieces of calls, and clients keep the number in the assembled message."""
    (called,) = CALLS["tool_calls"][:1]
    echoed = {**called, "index": 0, "function": {**called["function"], "provider_specific_fields": {}}}
    assert messages(USER, {**CALLS, "tool_calls": [echoed]}) == messages(USER, {**CALLS, "tool_calls": [called]})


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({**USER, "thinking_blocks": []}, "messages[0] has the field 'thinking_blocks', which is not supported"),
        (
            {"role": "assistant", "content": "", "function_call": {"name": "look", "arguments": "{}"}},
            "messages[0].function_call is an object of 2; it must be left out; it is the old form of tool_calls",
        ),
        (
            {"role": "assistant", "content": [{"type": "text", "text": "a", "mood": 1}]},
            "messages[0].content[0] has the field 'mood', which is not supported; a part has type, text",
        ),
    ],
)
def test_invalid_past_answers_are_rejected(message: dict[str, Any], sentence: str):
    with pytest.raises(BodyError) as caught:
        messages(message)
    assert str(caught.value).startswith(sentence)
