"""vLLM's fields of both bodies: their meaning, and fields that are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from inlay import SamplingParams
from inlay.api.failures import BodyError
from inlay.api.openai import Endpoint, read_body, translate
from tests.unit.api.openai.test_translate import USER, chat, completion

BEGUN = {"role": "assistant", "content": "It is"}
TAG = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bad_words", ["the"]),
        ("allowed_token_ids", [3, 4]),
        ("truncate_prompt_tokens", 5),
        ("truncate_prompt_tokens", -1),
        ("prompt_logprobs", 3),
        ("structured_outputs", {"grammar": 'root ::= "a"'}),
        ("structured_outputs", {"structural_tag": TAG}),
    ],
)
def test_fields_of_the_same_name(name: str, value: Any):
    for call, default in ((chat(**{name: value}), None), (completion(**{name: value}), 16)):
        assert call.params == SamplingParams(**{"max_tokens": default, name: value})


def test_a_structural_tag_as_a_response_format():
    given = chat(response_format={"type": "structural_tag", **TAG})
    assert given.params.structured_outputs == {"structural_tag": TAG}


def test_template_options_are_translated():
    options = {"chat_template_kwargs": {"a": 1}, "documents": [{"title": "x"}], "add_generation_prompt": False}
    assert chat(**options).prompts == ({"messages": [USER], **options},)
    given = chat(messages=[USER, BEGUN], continue_final_message=True, add_generation_prompt=False)
    assert given.prompts[0]["continue_final_message"] is True


@pytest.mark.parametrize(
    ("body", "scored"),
    [
        ({"logprobs": 2}, None),
        ({"prompt_logprobs": 2}, 2),
        ({"echo": True}, None),  # the text is known
        ({"echo": True, "prompt": ["a", "b"]}, None),
        ({"echo": True, "prompt": [1, 2]}, 0),
        ({"echo": True, "prompt": [[1, 2]]}, 0),
        ({"echo": True, "max_tokens": 0}, 0),
        ({"echo": True, "logprobs": 2}, 2),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 5}, 5),
        ({"prompt_logprobs": 0, "max_tokens": 0}, 0),
    ],
)
def test_echo_and_prompt_logprobs_are_translated(body, scored):
    call = completion(**body)
    assert call.params.prompt_logprobs == scored
    assert (call.echo, call.scores) == (body.get("echo", False), body.get("prompt_logprobs"))


@pytest.mark.parametrize(
    ("endpoint", "body", "param", "sentence"),
    [
        (Endpoint.COMPLETIONS, {"max_tokens": 0}, "max_tokens", "max_tokens is 0; it must be None or a whole number"),
        (Endpoint.COMPLETIONS, {"max_tokens": -1}, "max_tokens", "max_tokens is -1; it must be a whole number of at"),
        (Endpoint.CHAT, {"max_tokens": 0}, "max_tokens", "max_tokens is 0; it must be a whole number of at least 1"),
        (Endpoint.CHAT, {"echo": True}, "echo", "echo is true; it must be false; a chat's answer does not repeat its"),
        (
            Endpoint.CHAT,
            {"chat_template": "{{ messages }}"},
            "chat_template",
            "chat_template is not supported: a template is a program, and only the model's own is run; write",
        ),
        (
            Endpoint.COMPLETIONS,
            {"stream": True, "prompt_logprobs": 1},
            "prompt_logprobs",
            "prompt_logprobs does not work with stream; leave stream out",
        ),
        (
            Endpoint.COMPLETIONS,
            {"spaces_between_special_tokens": False},
            "spaces_between_special_tokens",
            "spaces_between_special_tokens is not supported: a text is what the tokenizer's decoder gives",
        ),
        (
            Endpoint.COMPLETIONS,
            {"guided_grammar": "start: a"},
            "guided_grammar",
            'guided_grammar is not supported: write "structured_outputs": {"grammar": "…"}',
        ),
        (
            Endpoint.CHAT,
            {"add_generation_prompt": True, "continue_final_message": True, "messages": [USER, BEGUN]},
            "continue_final_message",
            "continue_final_message goes on with the last message, and add_generation_prompt opens a new one",
        ),
        (
            Endpoint.CHAT,
            {"continue_final_message": True},
            "continue_final_message",
            "continue_final_message is given, and the last message is no text of the assistant's",
        ),
        (
            Endpoint.CHAT,
            {"messages": None, "pml": "<prompt schema='s'/>", "chat_template_kwargs": {"a": 1}},
            "chat_template_kwargs",
            "chat_template_kwargs is given with a prompt of a schema; give it with messages",
        ),
        (
            Endpoint.CHAT,
            {"chat_template_kwargs": [1]},
            "chat_template_kwargs",
            "chat_template_kwargs is a list of 1; it must be",
        ),
        (Endpoint.CHAT, {"documents": [{"a": 1}]}, "documents", "documents[0].a is 1; documents must be a list of"),
        (Endpoint.CHAT, {"bad_words": ["a"] * 300}, "bad_words", "bad_words is a list of 300; it must be a list"),
        (
            Endpoint.CHAT,
            {"response_format": {"type": "text", **TAG}},
            "response_format",
            'response_format holds structures and triggers exactly if its type is "structural_tag"',
        ),
        (
            Endpoint.CHAT,
            {"response_format": {"type": "structural_tag", "triggers": ["<a>"]}},
            "response_format",
            'response_format holds structures and triggers exactly if its type is "structural_tag"',
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_unsupported_fields_are_rejected(endpoint: Endpoint, body: dict[str, Any], param: str, sentence: str):
    whole = {"messages": [USER], **body} if endpoint is Endpoint.CHAT else {"prompt": "Hello", **body}
    with pytest.raises(BodyError) as caught:
        translate(read_body(whole, endpoint))
    assert (caught.value.param, str(caught.value)[: len(sentence)]) == (param, sentence)
