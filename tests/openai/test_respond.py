"""Bodies of responses: OpenAI's own types read them, and they say what the model said."""

from __future__ import annotations

import math
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from inlay import LLM
from inlay.openai import Endpoint, read_body, respond, translate

from ..conftest import tiny

MESSAGES = [{"role": "user", "content": "Héllo"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny("llama"), kv_memory="16MiB", seed=0)


def answer(llm: LLM, endpoint: Endpoint, **body: Any):
    call = translate(read_body({"max_tokens": 12, "seed": 3, **body}, endpoint))
    outputs = llm.generate(list(call.prompts), call.params)
    return call, outputs, respond(call, outputs, name="x", created=1, model="m")


def test_a_chat(llm):
    _, (output,), body = answer(llm, Endpoint.CHAT, messages=MESSAGES)
    read = ChatCompletion.model_validate(body, strict=True)
    said = output.outputs[0]
    assert (read.id, read.object, read.model, read.created) == ("chatcmpl-x", "chat.completion", "m", 1)
    assert (read.choices[0].message.content, read.choices[0].finish_reason) == (said.text, said.finish_reason)
    assert read.choices[0].logprobs is None


def test_usage_sums_over_prompts_and_answers(llm):
    _, outputs, body = answer(llm, Endpoint.COMPLETIONS, prompt=["Some words", "Other words"], n=2)
    read = Completion.model_validate(body, strict=True)
    assert [choice.index for choice in read.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in read.choices] == [one.text for output in outputs for one in output.outputs]
    assert read.object == "text_completion"
    usage = read.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens == len("Some words") + len("Other words")
    assert usage.completion_tokens == sum(len(one.token_ids) for output in outputs for one in output.outputs)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == sum(output.usage.cached_tokens for output in outputs)
    reused = body["inlay"]
    assert reused["exact_tokens"] + reused["module_tokens"] + reused["computed_tokens"] == usage.prompt_tokens


def test_what_was_reused_is_told(llm):
    answer(llm, Endpoint.COMPLETIONS, prompt="The very same words.")
    _, _, body = answer(llm, Endpoint.COMPLETIONS, prompt="The very same words.")
    assert body["inlay"] == {"exact_tokens": 19, "module_tokens": 0, "shifted_tokens": 0, "computed_tokens": 1}


@pytest.mark.parametrize("top", [0, 1, 4])
def test_logprobs_of_a_chat(llm, top: int):
    _, (output,), body = answer(llm, Endpoint.CHAT, messages=MESSAGES, logprobs=True, top_logprobs=top, temperature=2)
    read = ChatCompletion.model_validate(body, strict=True)
    logprobs, said = read.choices[0].logprobs, output.outputs[0]
    assert logprobs is not None
    assert logprobs.content is not None
    assert said.logprobs is not None
    for entry, token, step in zip(logprobs.content, said.token_ids, said.logprobs, strict=True):
        assert entry.logprob == step[token].logprob
        assert len(entry.top_logprobs) == top
        assert [one.logprob for one in entry.top_logprobs] == sorted(
            (one.logprob for one in step.values()), reverse=True
        )[:top]
        if entry.bytes is None:
            assert "\ufffd" in entry.token
        else:
            assert bytes(entry.bytes).decode() == entry.token


def test_logprobs_of_a_completion(llm):
    _, (output,), body = answer(llm, Endpoint.COMPLETIONS, prompt="Hello", logprobs=3, temperature=2)
    read = Completion.model_validate(body, strict=True)
    logprobs, said = read.choices[0].logprobs, output.outputs[0]
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    assert said.logprobs is not None
    assert said.cumulative_logprob is not None
    assert math.isclose(sum(logprobs.token_logprobs or ()), said.cumulative_logprob)
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(len(logprobs.tokens))]
    for text, number, top, step in zip(
        logprobs.tokens, logprobs.token_logprobs or (), logprobs.top_logprobs, said.logprobs, strict=True
    ):
        assert top[text] >= number
        assert max(top.values()) == max(one.logprob for one in step.values())
        assert set(top) == {one.decoded_token for one in step.values()}


def test_stop_reasons(llm):
    _, (free,), _ = answer(llm, Endpoint.COMPLETIONS, prompt="Hello", temperature=0)
    token = free.outputs[0].token_ids[2]
    _, _, body = answer(llm, Endpoint.COMPLETIONS, prompt="Hello", temperature=0, stop_token_ids=[token])
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("stop", token)


def test_json_answers(llm):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    white = {str(token): -100 for token in llm.tokenizer.encode(" \t\r\n")}  # a random model likes to go on with it
    _, _, body = answer(llm, Endpoint.CHAT, messages=MESSAGES, response_format=wanted, max_tokens=40, logit_bias=white)
    text = ChatCompletion.model_validate(body, strict=True).choices[0].message.content
    assert text in ('{"a":1}', '{"a":2}')
