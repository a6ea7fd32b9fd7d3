"""Bodies as calls: every field that has an effect has it."""

from __future__ import annotations

from typing import Any

import pytest

from inlay import PMLError, Prompt, SamplingParams
from inlay.api.call import Call
from inlay.api.failures import BodyError
from inlay.api.openai import Endpoint, read_body, translate
from tests.raising import raises

USER = {"role": "user", "content": "Hello"}


def chat(default: int | None = None, **body: Any) -> Call:
    return translate(read_body({"messages": [USER], **body}, Endpoint.CHAT), default_max_tokens=default)


def completion(default: int | None = None, **body: Any) -> Call:
    return translate(read_body({"prompt": "Hello", **body}, Endpoint.COMPLETIONS), default_max_tokens=default)


def test_defaults_equal_openais():
    assert chat().params == SamplingParams(max_tokens=None)
    assert completion().params == SamplingParams(max_tokens=16)
    assert chat(default=7).params.max_tokens == completion(default=7).params.max_tokens == 7
    assert chat(default=7, max_tokens=3).params.max_tokens == 3
    assert (chat().reuse, chat().positions, chat().model, chat().stream) == (None, None, None, False)


def test_missing_fields_use_model_defaults():
    defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 50}

    def asked(endpoint: Endpoint, default: int | None = None, **body: Any) -> SamplingParams:
        prompt = {"messages": [USER]} if endpoint is Endpoint.CHAT else {"prompt": "Hello"}
        read = read_body({**prompt, **body}, endpoint)
        return translate(read, default_max_tokens=default, defaults=defaults).params

    chats, completions = Endpoint.CHAT, Endpoint.COMPLETIONS
    assert asked(chats) == SamplingParams(temperature=0.6, top_k=20, max_tokens=50)
    assert asked(completions) == SamplingParams(temperature=0.6, top_k=20, max_tokens=16)
    for endpoint in Endpoint:
        assert asked(endpoint, 7).max_tokens == 7
        # a field at OpenAI's default is sent like any other
        said = asked(endpoint, temperature=1, top_k=0, max_tokens=3)
        assert said == SamplingParams(temperature=1, top_k=0, max_tokens=3)
        assert asked(endpoint, temperature=None).temperature == 0.6
    assert defaults == {"temperature": 0.6, "top_k": 20, "max_tokens": 50}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 3),
        ("temperature", 0.5),
        ("top_p", 0.5),
        ("top_k", 5),
        ("min_p", 0.1),
        ("typical_p", 0.5),
        ("repetition_penalty", 1.5),
        ("presence_penalty", -1),
        ("frequency_penalty", 1.5),
        ("stop", "x"),
        ("stop", ["x", "y"]),
        ("stop_token_ids", [3, 4]),
        ("include_stop_str_in_output", True),
        ("ignore_eos", True),
        ("min_tokens", 2),
        ("skip_special_tokens", False),
        ("seed", 5),
        ("max_tokens", 5),
        ("structured_outputs", {"choice": ["a", "b"]}),
    ],
)
def test_fields_of_the_same_name(name: str, value: Any):
    for call, default in ((chat(**{name: value}), None), (completion(**{name: value}), 16)):
        assert call.params == SamplingParams(**{"max_tokens": default, name: value})


def test_renamed_fields_are_translated():
    assert chat(max_completion_tokens=5).params.max_tokens == 5
    assert chat(logit_bias={"3": -2, "17": 100}).params.logit_bias == {3: -2, 17: 100}
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).params.logprobs == 4
    assert chat(logprobs=False).params.logprobs is None
    assert completion(logprobs=4).params.logprobs == 4
    assert chat(seed=-1).params.seed == 2**64 - 1
    given = chat(reuse="exact", positions="packed", model="m", stream=True)
    assert (given.reuse, given.positions, given.model, given.stream) == ("exact", "packed", "m", True)


@pytest.mark.parametrize(
    ("response_format", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_object": True}),
        (
            {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": {"type": "null", "a": None}},
            },
            {"json": {"type": "null", "a": None}},
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {"a": {"const": 1}}}}},
            {"json": {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": False}},
        ),
        ({"type": "text", "json_schema": None}, None),
    ],
)
def test_response_formats(response_format, expected):
    assert chat(response_format=response_format).params.structured_outputs == expected


def test_json_response_format_keeps_its_definitions():
    schema = {"type": "object", "$defs": {"A": {"const": 1}}, "properties": {"a": {"$ref": "#/$defs/A"}, "b": {}}}
    structure = chat(
        response_format={"type": "json_schema", "json_schema": {"schema": schema}}
    ).params.structured_outputs
    assert structure is not None
    made = structure["json"]
    (name,) = made["$defs"].keys() - {"A"}
    assert made["properties"]["b"] == {"$ref": f"#/$defs/{name}"}
    for wrong in ({"properties": 3}, {"properties": {}, "required": 3}, {"$defs": 3, "properties": {"a": {}}}):
        with pytest.raises(BodyError) as caught:
            chat(response_format={"type": "json_schema", "json_schema": {"schema": wrong}})
        assert caught.value.param == "response_format"


def test_messages():
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts}]
    expected = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": parts}]
    assert chat(messages=messages).prompts == (expected,)


@pytest.mark.parametrize("make", [chat, completion])
def test_fields_outside_sampling_are_translated(make):
    plain = make()
    assert (plain.priority, plain.include_usage, plain.said_max_tokens, plain.tools) == (0, False, False, None)
    given = make(priority=-3, stream=True, stream_options={"include_usage": True, "include_obfuscation": True})
    assert (given.priority, given.stream, given.include_usage) == (-3, True, True)
    assert not make(stream=True, stream_options={"include_usage": False}).include_usage
    assert make(stream_options={"include_obfuscation": True}) == make(stream_options={}) == plain
    assert make(max_tokens=5).said_max_tokens
    assert not make(default=7).said_max_tokens


def test_policies():
    for reuse in ("off", "exact", "isolated", "anchored"):
        assert chat(reuse=reuse).reuse == completion(reuse=reuse).reuse == reuse
    for reuse in ("modular", "modular+promote:off", "modular+linked:4+promote:off"):
        assert chat(reuse=reuse).reuse == reuse


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ([1, 2],)), ([[1], [2]], ([1], [2]))],
)
def test_prompts_of_completions(prompt, prompts):
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("make", [chat, completion])
def test_prompts_of_a_schema(make):
    document = {"schema": "trip", "content": [{"import": "miami"}, "Where?"]}
    short = {"schema": "trip", "imports": ["miami"], "text": "Where?"}
    pml = '<prompt schema="trip"><miami/>Where?</prompt>'
    empty: dict[str, Any] = {"messages": []} if make is chat else {}
    for call in (
        make(**empty, prompt=document),
        make(**empty, prompt=short),
        make(**{**empty, "prompt": None}, pml=pml),
    ):
        (prompt,) = call.prompts
        assert isinstance(prompt, Prompt)
        assert prompt.to_pml() == Prompt.from_string(pml).to_pml()


def test_a_prompt_of_a_schema_that_cannot_be_read():
    with raises("pml.unknown_key", PMLError, names="contents"):
        completion(prompt={"schema": "trip", "contents": []})
    with pytest.raises(PMLError, match="pml:1:"):
        completion(prompt=None, pml="<prompt")


@pytest.mark.parametrize(
    ("make", "body", "param", "sentence"),
    [
        (
            chat,
            {"messages": []},
            "messages",
            "there is no prompt; give messages, or a schema's prompt as prompt or pml",
        ),
        (completion, {"prompt": None}, "prompt", "there is no prompt; give prompt, or a schema's prompt as pml"),
        (chat, {"pml": "<prompt/>"}, "pml", "messages and pml are both given; keep one of them"),
        (completion, {"pml": "<prompt/>"}, "pml", "prompt and pml are both given; keep one of them"),
        (completion, {"prompt": []}, "prompt", "prompt is empty; give at least one token"),
        (completion, {"prompt": ["a", ""]}, "prompt", "prompt is empty; give at least one token"),
        (chat, {"max_tokens": 2, "max_completion_tokens": 2}, "max_tokens", "max_tokens and max_completion_tokens are"),
        (chat, {"top_logprobs": 2}, "top_logprobs", "top_logprobs is given without logprobs"),
        (chat, {"logit_bias": {"a": 1}}, "logit_bias", "logit_bias has the key 'a'; its keys are token ids"),
        (chat, {"response_format": {"type": "json_schema"}}, "response_format", "response_format holds a json_schema"),
        (
            chat,
            {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}},
            "response_format",
            "response_format and structured_outputs are both given",
        ),
        (chat, {"temperature": -1}, "temperature", "temperature is -1.0; it must be a number from 0 to 100"),
        (chat, {"n": 2, "temperature": 0}, "n", "n is 2; it must be 1 where temperature is 0"),
        (chat, {"min_tokens": 5, "max_tokens": 3}, "min_tokens", "min_tokens is 5; it must be a whole number from 0"),
        (chat, {"structured_outputs": {}}, "structured_outputs", "structured_outputs is {}; it must be"),
        (
            completion,
            {"stream_options": {"include_usage": True}},
            "stream_options",
            'stream_options needs a stream; write "stream": true',
        ),
    ],
)
def test_invalid_bodies_are_rejected(make, body, param, sentence):
    with pytest.raises(BodyError) as caught:
        make(**body)
    assert caught.value.param == param
    assert str(caught.value).startswith(sentence)
