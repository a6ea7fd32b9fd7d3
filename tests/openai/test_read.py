"""Bodies of requests: what is taken, what is left alone, and one sentence for what is not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay import InlayError
from inlay.openai import BodyError, Endpoint, failure_of, read_body, translate
from inlay.openai.bodies import NO_EFFECT, UNSUPPORTED, ChatBody, CompletionBody

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
TEXT = {"prompt": "Hello"}


def read(body: Any, endpoint: Endpoint = Endpoint.CHAT):
    return read_body(body, endpoint)


@pytest.mark.parametrize("name", NO_EFFECT)
def test_habits_are_accepted_and_change_nothing(name: str):
    for value in ("x", 3, {"a": "b"}, None, True):
        assert read({**CHAT, name: value}) == read(CHAT)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_every_unsupported_field_is_refused_by_name(name: str):
    with pytest.raises(BodyError, match=f"^{name} is not supported: ") as caught:
        read({**CHAT, name: ["something"]})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_field")
    harmless, _ = UNSUPPORTED[name]
    for value in (None, *harmless):
        assert read({**CHAT, name: value}) == read(CHAT)


def test_harmless_values_are_compared_with_their_types():
    assert read({**TEXT, "best_of": 1}, Endpoint.COMPLETIONS) == read(TEXT, Endpoint.COMPLETIONS)
    with pytest.raises(BodyError, match="best_of is not supported"):
        read({**TEXT, "best_of": True}, Endpoint.COMPLETIONS)


@pytest.mark.parametrize("form", [ChatBody, CompletionBody])
def test_null_is_the_same_as_nothing(form):
    endpoint, least = (Endpoint.CHAT, CHAT) if form is ChatBody else (Endpoint.COMPLETIONS, TEXT)
    nulls = {name: None for name in form.model_fields if name not in least}
    assert read({**nulls, **least}, endpoint) == read(least, endpoint)


def test_nulls_and_empty_lists_of_past_answers():
    answer = {"role": "assistant", "content": "Hi", "refusal": None, "annotations": [], "tool_calls": []}
    body = read({"messages": [answer]})
    assert isinstance(body, ChatBody)
    assert body.messages is not None
    assert body.messages[0].text == "Hi"


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
        ({**CHAT, "stop": [1]}, "stop", "stop is a list of 1; it must be a text or a list of texts"),
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
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages[0].role",
            "messages[0].role is 'tool'; it must be ",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
            "messages[0].content is a list of 1; it must be a text, or a list of parts",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "name": "Ann"}]},
            "messages[0].name",
            "messages[0] has the field 'name', which is not supported",
        ),
    ],
)
def test_what_is_wrong(body, param, sentence: str):
    with pytest.raises(BodyError) as caught:
        read(body)
    assert caught.value.param == param
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_several_problems_come_at_once():
    with pytest.raises(BodyError) as caught:
        read({**CHAT, "tools": [1], "temperature": "hot", "wild": 1})
    assert [part.split()[0] for part in str(caught.value).split(". Also: ")] == [
        "tools",
        "/v1/chat/completions",
        "temperature",
    ]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from([*ChatBody.model_fields, *CompletionBody.model_fields, *UNSUPPORTED, *NO_EFFECT])


@given(st.dictionaries(names | st.text(max_size=5), json_values, max_size=5), st.sampled_from(Endpoint))
def test_whatever_comes_is_a_call_or_an_error_of_ours(body, endpoint: Endpoint):
    least = CHAT if endpoint is Endpoint.CHAT else TEXT
    try:
        call = translate(read_body({**least, **body}, endpoint))
    except InlayError as error:
        failure = failure_of(error)
        assert 400 <= failure.status < 500
        assert failure.message
        assert "\n" not in failure.message
    else:
        assert call.endpoint is endpoint
        assert len(call.prompts) >= 1
