"""Request bodies: fields that are read, fields that are ignored, and one sentence for each invalid one."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from inlay import LLM, InlayError
from inlay.api import reading as read_module
from inlay.api.call import Call
from inlay.api.failures import BodyError, Failure, failure_of
from inlay.api.foreign import IGNORED
from inlay.api.openai import Endpoint, error_body, read_body, translate
from inlay.api.openai.bodies import LONGEST, MAX_PROMPTS, NO_EFFECT, UNSUPPORTED, ChatBody, CompletionBody
from inlay.api.tools.formats import ModelTools, model_tools
from tests.model.api.tool_templates import tool_model, tool_tokenizer
from tests.raising import raises

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
TEXT = {"prompt": "Hello"}


def nested(depth: int) -> Any:
    made: Any = {}
    for _ in range(depth):
        made = {"a": made}
    return made


def read(body: Any, endpoint: Endpoint = Endpoint.CHAT):
    return read_body(body, endpoint)


@pytest.mark.parametrize("name", NO_EFFECT)
def test_client_habits_are_accepted_without_effect(name: str):
    for value in ("x", 3, {"a": "b"}, None, True):
        assert read({**CHAT, name: value}) == read(CHAT)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_every_unsupported_field_is_refused_by_name(name: str):
    with raises("unsupported_field", BodyError, field=name):
        read({**TEXT, name: ["something"]}, Endpoint.COMPLETIONS)
    harmless, _ = UNSUPPORTED[name]
    for value in (None, *harmless):
        assert read({**TEXT, name: value}, Endpoint.COMPLETIONS) == read(TEXT, Endpoint.COMPLETIONS)


@pytest.mark.parametrize("name", IGNORED)
@pytest.mark.parametrize(("body", "endpoint"), [(CHAT, Endpoint.CHAT), (TEXT, Endpoint.COMPLETIONS)])
def test_fields_of_other_servers_are_ignored_and_listed(name: str, body: dict[str, Any], endpoint: Endpoint):
    for value in (4096, "x", {"a": [1]}, False):
        given = read({**body, name: value}, endpoint)
        assert given.ignored == (name,)
        assert given.model_dump() == read(body, endpoint).model_dump()
        assert translate(given).ignored == (name,)
    assert read({**body, name: None}, endpoint).ignored == ()


def test_options_are_ignored_only_if_every_one_is_known():
    assert read({**CHAT, "options": {"num_ctx": 8192, "num_gpu": 1}, "ttl": 5}).ignored == ("options", "ttl")
    for options in ({"num_ctx": 1, "temperature": 0}, {"num_ctxx": 1}, [1]):
        with raises("unsupported_field", BodyError, field="options"):
            read({**CHAT, "options": options})


def test_no_field_is_both_ignored_and_known():
    known = {*ChatBody.model_fields, *CompletionBody.model_fields, *UNSUPPORTED, *NO_EFFECT}
    assert not known & IGNORED.keys()
    assert "cache_salt" not in {*(known - UNSUPPORTED.keys()), *IGNORED}


@pytest.mark.parametrize(
    ("name", "near"), [("num_ctxx", "num_ctx"), ("temprature", "temperature"), ("keep_alve", "keep_alive")]
)
def test_typo_is_rejected_with_the_nearest_field(name: str, near: str):
    with raises("unknown_field", BodyError, field=name, names=near):
        read({**CHAT, name: 1})


def test_no_ignored_field_is_suggested_for_a_setting_of_the_server():
    with raises("unknown_field", BodyError, names="leave it out"):
        read({**CHAT, "speculation": "off"})


def test_unsupported_fields_differ_by_endpoint():
    assert set(UNSUPPORTED) & set(ChatBody.model_fields) == {"parallel_tool_calls", "tool_choice", "tools"}
    assert not set(UNSUPPORTED) & set(CompletionBody.model_fields)
    with raises("unsupported_field", BodyError, field="functions"):
        read({**CHAT, "functions": [{"name": "f"}]})


def test_harmless_values_are_compared_with_their_types():
    assert read({**TEXT, "best_of": 1}, Endpoint.COMPLETIONS) == read(TEXT, Endpoint.COMPLETIONS)
    with raises("unsupported_field", BodyError, field="best_of"):
        read({**TEXT, "best_of": True}, Endpoint.COMPLETIONS)


def test_best_of_must_equal_n():
    assert read({**TEXT, "n": 2, "best_of": 2}, Endpoint.COMPLETIONS) == read({**TEXT, "n": 2}, Endpoint.COMPLETIONS)
    with raises("unsupported_field", BodyError, field="best_of"):
        read({**TEXT, "n": 2, "best_of": 3}, Endpoint.COMPLETIONS)


@pytest.mark.parametrize("form", [ChatBody, CompletionBody])
def test_null_equals_a_missing_field(form):
    endpoint, least = (Endpoint.CHAT, CHAT) if form is ChatBody else (Endpoint.COMPLETIONS, TEXT)
    nulls = {name: None for name in form.model_fields if name not in least}
    assert read({**nulls, **least}, endpoint) == read(least, endpoint)


def test_nulls_and_empty_lists_of_past_answers():
    answer = {"role": "assistant", "content": "Hi", "refusal": None, "annotations": [], "tool_calls": []}
    body = read({"messages": [answer]})
    assert isinstance(body, ChatBody)
    assert body.messages is not None
    assert body.messages[0].content == "Hi"


def test_nulls_in_objects_of_lists():
    part = {"type": "text", "text": "a", "cache_control": None}
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, "index": None}
    tool = {"type": "function", "function": {"name": "f", "description": None, "parameters": None, "strict": None}}
    nulls = {
        "messages": [
            {"role": "user", "content": [part]},
            {"role": "assistant", "content": None, "tool_calls": [called]},
        ],
        "tools": [tool],
        "stream_options": {"include_usage": None},
    }
    kept = {"type": "text", "text": "a"}
    del called["index"]
    plain = {
        "messages": [{"role": "user", "content": [kept]}, {"role": "assistant", "tool_calls": [called]}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "stream_options": {},
    }
    assert read(nulls) == read(plain)
    body = read({**plain, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"default": None}}}]})
    assert isinstance(body, ChatBody)
    assert body.tools is not None
    assert body.tools[0].function.parameters == {"default": None}  # a schema may say null


@pytest.mark.parametrize(
    ("body", "param", "sentence"),
    [
        ([], None, "the body is an empty list; it must be an object"),
        (
            {**CHAT, "max_token": 3},
            "max_token",
            "/v1/chat/completions takes no field 'max_token'; did you mean max_tok",
        ),
        ({**CHAT, "zzz": 3}, "zzz", "/v1/chat/completions takes no field 'zzz'; leave it out"),
        ({**CHAT, "temperature": "hot"}, "temperature", "temperature is 'hot'; it must be a number"),
        ({**CHAT, "n": 0}, "n", "n is 0; it must be a whole number of at least 1"),
        ({**CHAT, "n": 2.0}, "n", "n is 2.0; it must be a whole number"),
        ({**CHAT, "logprobs": 2}, "logprobs", "logprobs is 2; it must be true or false"),
        ({**CHAT, "stop": [1]}, "stop", "stop[0] is 1; stop must be a text or a list of texts, at most 64"),
        (
            {**CHAT, "stop": ["a"] * 65},
            "stop",
            "stop is a list of 65; it must be a text or a list of texts, at most 64",
        ),
        (
            {**CHAT, "repetition_penalty": 1e-300},
            "repetition_penalty",
            "repetition_penalty is 1e-300; it must be a number from 0.01 to 100",
        ),
        ({**CHAT, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21; it must be a whole number from 0 to 20"),
        ({**CHAT, "response_format": "json"}, "response_format", "response_format is 'json'; it must be "),
        ({**CHAT, "logit_bias": {"3": "x"}}, "logit_bias", "logit_bias is an object of 1; it must be an object of tok"),
        ({"messages": "Hello"}, "messages", "messages is 'Hello'; it must be a list of messages"),
        ({"messages": ["Hello"]}, "messages[0]", "messages[0] is 'Hello'; it must be a message"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "messages[0] has no role; it must be "),
        (
            {"messages": [{"role": "user", "content": None}]},
            "messages[0].content",
            "messages[0] has no content; it must",
        ),
        (
            {"messages": [{"role": "function", "content": "x"}]},
            "messages[0].role",
            "messages[0].role is 'function'; it must be ",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            "messages[0].content[0].type is 'image_url'; it must be \"text\": inlay reads text alone",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "mood": "good"}]},
            "messages[0].mood",
            "messages[0] has the field 'mood', which is not supported; a message has role, content, name",
        ),
        ({**CHAT, "top_k": 2**40}, "top_k", "top_k is 1099511627776; it must be a whole number from -1 to"),
        ({**CHAT, "top_k": 10**5000}, "top_k", "top_k is a huge number; it must be a whole number from -1 to"),
        ({**CHAT, "priority": 2**31}, "priority", "priority is 2147483648; it must be a whole number of 32 bits"),
        ({**CHAT, "temperature": math.nan}, "temperature", "temperature holds NaN or Infinity, which are not JSON"),
        ({**CHAT, "logit_bias": {"3": -math.inf}}, "logit_bias", "logit_bias holds NaN or Infinity"),
        ({**CHAT, "stop": "a\ud800"}, "stop", "stop holds a lone surrogate at index 1; decode the text properly or"),
        (
            {"messages": [{"role": "user", "content": "\udfff"}]},
            "messages",
            "messages holds a lone surrogate at index 0",
        ),
        ({**CHAT, "tools": [{"\ud83d": 1}]}, "tools", "tools holds a lone surrogate"),
        (
            {**CHAT, "\ud83d": 1},
            None,
            "the name of a field holds a lone surrogate at index 0; decode the text properly",
        ),
        ({**CHAT, "prompt": nested(200)}, "prompt", "prompt nests lists and objects too deeply; nest them less deeply"),
        (
            {**CHAT, "stream_options": {"include_usage": 1}},
            "stream_options",
            'stream_options.include_usage is 1; stream_options must be {"include_usage": true}',
        ),
    ],
)
def test_invalid_body_is_rejected_with_one_sentence(body, param, sentence: str):
    with pytest.raises(BodyError) as caught:
        read(body)
    assert caught.value.param == param
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_several_problems_are_reported_together():
    with pytest.raises(BodyError) as caught:
        read({**CHAT, "tools": [1], "temperature": "hot", "wild": 1, "audio": {}})
    assert [part.split()[0] for part in str(caught.value).split(". Also: ")] == [
        "/v1/chat/completions",
        "audio",
        "temperature",
        "tools[0]",
    ]


# any input

odd_texts = st.text(max_size=5) | st.sampled_from(["\ud800", "a\udfff", "{", '{"a": 1}', "x" * 300])
numbers = st.integers() | st.floats() | st.sampled_from([10**400, -(10**30), 1e308])
json_values = st.recursive(
    st.none() | st.booleans() | numbers | odd_texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(odd_texts, inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from([*ChatBody.model_fields, *CompletionBody.model_fields, *UNSUPPORTED, *NO_EFFECT])


def seldom(strategy: st.SearchStrategy[Any], other: Any) -> st.SearchStrategy[Any]:
    """Mostly the other one."""
    return st.integers(0, 11).flatmap(lambda number: strategy if number == 11 else st.just(other))


def nearly(
    fields: dict[str, st.SearchStrategy[Any]], **optional: st.SearchStrategy[Any]
) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with these fields; now and then one is missing, of another value, or one too many."""
    known = [*fields, *optional]
    return st.builds(
        lambda right, wrong, missing: {key: value for key, value in {**right, **wrong}.items() if key != missing},
        st.fixed_dictionaries(fields, optional=optional),
        seldom(st.dictionaries(st.sampled_from([*known, "more"]), json_values, min_size=1, max_size=1), {}),
        seldom(st.sampled_from(known), None),
    )


plain = st.sampled_from(["Hello", "", " \n", "<|im_end|>", "é😀"])
said = plain.flatmap(lambda text: seldom(odd_texts, text))
marks = nearly({"type": st.just("ephemeral")}, ttl=st.sampled_from(["5m", "1h"]))
parts = st.lists(
    nearly({"type": st.just("text"), "text": said}, cache_control=marks)
    | nearly({"type": st.just("refusal"), "refusal": said}),
    max_size=2,
)
arguments = st.sampled_from(["{}", "", '{"a": "<|im_end|>"}']).flatmap(
    lambda text: seldom(st.sampled_from(["[", "3", '{"a": 1e999}']), text)
)
function = nearly({"name": st.sampled_from(["f", "g"]), "arguments": arguments})
calls = st.lists(
    nearly({"id": st.sampled_from(["c1", "c2"]), "type": st.just("function"), "function": function}), max_size=2
)
turns = (
    nearly({"role": st.sampled_from(["system", "developer", "user"]), "content": said | parts}, name=said)
    | nearly({"role": st.just("assistant"), "content": said | parts | st.none(), "tool_calls": calls})
    | nearly({"role": st.just("assistant"), "refusal": said})
    | nearly({"role": st.just("tool"), "content": said | parts, "tool_call_id": st.sampled_from(["c1", "c2"])})
)
BOTH = [{"id": name, "function": {"name": "f", "arguments": ""}} for name in ("c1", "c2")]
called_first = nearly({"role": st.just("assistant"), "tool_calls": st.just(BOTH)})
schemas = nearly({"type": st.just("object"), "properties": st.sampled_from([{}, {"a": {"type": "string"}}])})
offered = nearly(
    {"type": st.just("function"), "function": nearly({"name": st.just("f")}, description=said, parameters=schemas)}
)
choices = st.sampled_from(["auto", "none", "required", {"type": "function", "function": {"name": "f"}}])
bodies = nearly(
    {
        "messages": st.builds(lambda first, rest: [first, *rest], called_first, st.lists(turns, max_size=4)),
        "tools": st.lists(offered, max_size=1)
        | seldom(st.builds(lambda depth: [nested(depth)], st.integers(0, 140)), []),
    },
    tool_choice=choices,
    parallel_tool_calls=st.booleans(),
)
short_prompts = nearly(
    {},
    prompt=nearly(
        {"schema": st.just("s")},
        imports=st.lists(st.just("m") | nearly({"name": st.just("m")}, arguments=json_values), max_size=2),
        text=said,
        content=json_values,
    ),
    stream=st.booleans(),
    stream_options=nearly({}, include_usage=st.booleans()),
)
FAMILIES = ("none", "qwen", "llama")


@pytest.fixture(scope="module")
def llms() -> dict[str, LLM]:
    return {family: LLM(tool_model(family), kv_memory="8MiB") for family in FAMILIES}


def outcome(body: Any, endpoint: Endpoint, model: ModelTools | None) -> Call | Failure:
    """Return the call or the failure that the client gets. Any other error fails the test."""
    try:
        return translate(read_body(body, endpoint), tools=model)
    except InlayError as error:
        return failure_of(error)


def check(found: Call | Failure, endpoint: Endpoint) -> None:
    if isinstance(found, Call):
        assert found.endpoint is endpoint
        assert len(found.prompts) >= 1
        return
    assert 400 <= found.status < 500
    assert found.message
    assert "\n" not in found.message
    json.dumps(error_body(found), ensure_ascii=False).encode()


@given(st.dictionaries(names | odd_texts, json_values, max_size=5), st.sampled_from(Endpoint))
def test_any_fields_give_a_call_or_a_project_error(body: dict[str, Any], endpoint: Endpoint):
    check(outcome({**(CHAT if endpoint is Endpoint.CHAT else TEXT), **body}, endpoint, None), endpoint)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=bodies | short_prompts, family=st.sampled_from(FAMILIES))
def test_any_messages_and_tools_give_a_call_or_a_project_error(body: Any, family: str, llms: dict[str, LLM]):
    found = outcome(body, Endpoint.CHAT, model_tools(tool_tokenizer(family)))
    check(found, Endpoint.CHAT)
    if isinstance(found, Call):
        with suppress(InlayError):  # a template that refuses the turns, or an unknown schema
            llms[family].lay_out(found.prompts[0])


@given(json_values, st.sampled_from(Endpoint))
def test_any_body_gives_a_call_or_a_project_error(body: Any, endpoint: Endpoint):
    check(outcome(body, endpoint, None), endpoint)


def test_a_large_prompt_of_ids_is_read():
    body = read({"prompt": list(range(50_000))}, Endpoint.COMPLETIONS)
    assert isinstance(body, CompletionBody)
    assert body.prompt == list(range(50_000))


# much of it


def refusal(body: Any, endpoint: Endpoint = Endpoint.CHAT) -> str:
    """The sentence that a body is refused with, which is short whatever the body."""
    with pytest.raises(BodyError) as caught:
        read(body, endpoint)
    failure = failure_of(caught.value)
    assert len(json.dumps(error_body(failure))) < 10_000
    assert len(failure.param or "") <= 101
    return failure.message


@pytest.mark.parametrize("first", ["", 1, [1]])
def test_long_prompt_list_of_mixed_types_gives_one_error(first: Any):
    others: dict[type, Any] = {str: 1, int: "", list: [""]}
    wrong = [first, others[type(first)], *[1] * 300_000]
    with pytest.raises(ValidationError) as caught:
        CompletionBody.model_validate({"prompt": wrong})
    assert caught.value.error_count() == 1
    sentence = refusal({"prompt": wrong[:MAX_PROMPTS]}, Endpoint.COMPLETIONS)
    assert sentence.startswith("prompt is a list of 4,096; it must be a text, token ids, a list of either, or a prompt")


@pytest.mark.parametrize("member", [True, 1.5, None, {}])
def test_invalid_prompt_members_are_rejected(member: Any):
    for prompt in ([member] * 2, [1, member], ["a", member], [[1], [member]]):
        assert refusal({"prompt": prompt}, Endpoint.COMPLETIONS).startswith("prompt is a list of 2; it must be")


@pytest.mark.parametrize("prompt", ["a", ["a", ""], [1, 2**70], [[1], []], [], {"schema": "s"}])
def test_valid_prompts_are_kept_unchanged(prompt: Any):
    body = read({"prompt": prompt}, Endpoint.COMPLETIONS)
    assert isinstance(body, CompletionBody)
    assert body.prompt is prompt or body.prompt == prompt


@pytest.mark.parametrize(("name", "most"), LONGEST.items())
def test_overlong_lists_and_objects_are_rejected(name: str, most: int):
    member = {"role": "user", "content": "a"}
    value: Any = {str(i): 1 for i in range(most + 1)} if name == "logit_bias" else [member] * (most + 1)
    sentence = refusal({**CHAT, name: value})
    assert sentence.startswith(
        f"{name} is {'an object' if name == 'logit_bias' else 'a list'} of {most + 1:,}; it must be "
    )
    assert f"at most {most:,}" in sentence


def test_twenty_problems_are_named():
    sentence = refusal({"messages": [1] * 8_000})
    assert sentence.count("Also: ") == 20
    assert sentence.endswith("Also: there are more errors; correct these first")
    sentence = refusal({"messages": [{"role": "user"}] * 8_000})
    assert (sentence.count(" has no content; "), sentence.count("Also: ")) == (20, 20)
    sentence = refusal({**CHAT, **{f"max_token_{i}": 1 for i in range(200)}})
    assert sentence.count("did you mean max_tokens?") == 20


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({f"f{i}": 1 for i in range(10_000)}, "the body has 10,000 fields; it may have at most 256, so leave out the"),
        (
            {"messages": [{f"f{i}": 1 for i in range(300)}]},
            "messages holds an object of 300 fields; it may have at most 256, so leave out the others",
        ),
        (
            {**CHAT, "tool_choice": {"type": "function", "function": {f"f{i}": 1 for i in range(300)}}},
            "tool_choice holds an object of 300 fields",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "x"}] * 90_000}]},
            "messages[0].content is a list of 90,000; it must be a text, or a list of parts",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1_025}]},
            "messages[0].content is a list of 1,025; it must be",
        ),
        (
            {**CHAT, "stop": ["a" * 1_025]},
            f"stop[0] is '{'a' * 58}…; stop must be a text or a list of texts, at most 64, of",
        ),
        ({**CHAT, "tools": [{"x": [1] * 50_000}]}, "tools holds more than 50,000 values; leave some of them out"),
        (
            {**CHAT, "structured_outputs": {"choice": ["a"] * 50_000}},
            "structured_outputs holds more than 50,000 values",
        ),
        ({"prompt": {"schema": "s", "content": ["a"] * 20_000}}, "prompt holds more than 20,000 values"),
        ({**CHAT, "x" * 5_000: 1}, f"/v1/chat/completions takes no field '{'x' * 58}…; leave it out"),
        ({"messages": [{**CHAT["messages"][0], "x" * 5_000: 1}]}, f"messages[0] has the field '{'x' * 58}…, which is"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_oversized_values_are_rejected(body: Any, sentence: str):
    assert refusal(body).startswith(sentence)


def test_many_prompts_and_many_tags():
    many = ["a"] * 4_097
    assert refusal({"prompt": many}, Endpoint.COMPLETIONS) == (
        "prompt is a list of 4,097; one request takes at most 4,096 prompts"
    )
    with pytest.raises(BodyError, match=r"^pml holds more than 20,000 tags; import fewer modules$"):
        translate(read({"pml": f'<prompt schema="s">{"<a/>" * 20_000}</prompt>'}, Endpoint.COMPLETIONS))


def test_overlong_field_names_get_no_suggestion(monkeypatch):
    compared: list[str] = []
    monkeypatch.setattr(read_module, "get_close_matches", lambda name, *_, **__: compared.append(name) or [])
    refusal({**CHAT, **{f"{i}" * 40: 1 for i in range(10, 100)}})
    assert not compared
    refusal({**CHAT, **{f"max_token_{i}": 1 for i in range(200)}})
    assert len(compared) == 21
