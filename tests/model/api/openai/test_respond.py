"""Bodies of responses: OpenAI's own types parse them, and they contain the model's output."""

from __future__ import annotations

import math
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from inlay import LLM
from inlay.api.call import system_fingerprint
from inlay.api.openai import Endpoint, read_body, respond, translate
from inlay.api.openai.respond import usage_of
from inlay.api.pieces import inlay_of
from inlay.api.tools.formats import model_tools
from inlay.types import RequestMetrics, RequestOutput, Usage
from tests.conftest import tiny
from tests.model.api.tool_templates import tool_model

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
    assert usage.completion_tokens_details is not None
    told = {**usage.completion_tokens_details.model_dump(), **usage.prompt_tokens_details.model_dump()}
    assert [told[name] for name in ("reasoning_tokens", "audio_tokens", "image_tokens")] == [0] * 3
    drafted, accepted = (reused[name] for name in ("drafted_tokens", "accepted_tokens"))
    assert accepted == told["accepted_prediction_tokens"] == sum(output.usage.accepted_tokens for output in outputs)
    assert drafted - accepted == told["rejected_prediction_tokens"]
    assert usage.completion_tokens_details.text_tokens == usage.completion_tokens
    slowest = max(outputs, key=lambda output: output.metrics.total_s or 0).metrics
    assert list(reused["timing"]) == ["queue_s", "fetch_s", "compute_s", "ttft_s", "total_s"]
    for name, seconds in reused["timing"].items():
        assert seconds == round(getattr(slowest, name), 6)
    assert reused["timing"]["total_s"] >= reused["timing"]["ttft_s"] > 0


def test_reuse_counts_are_reported(llm):
    answer(llm, Endpoint.COMPLETIONS, prompt="The very same words.")
    _, outputs, body = answer(llm, Endpoint.COMPLETIONS, prompt="The very same words.")
    usage = outputs[0].usage
    counts = {name: count for name, count in body["inlay"].items() if name != "timing"}
    assert counts == {
        "reuse": "exact",
        "exact_tokens": 19,
        "module_tokens": 0,
        "scaffold_tokens": 0,
        "anchored_tokens": 0,
        "isolated_tokens": 0,
        "promoted_tokens": 0,
        "shifted_tokens": 0,
        "host_tokens": 0,
        "disk_tokens": 0,
        "shared_tokens": 0,
        "duplicate_tokens": 1,
        "recomputed_tokens": 0,
        "repaired_tokens": 0,
        "linked_tokens": 0,
        "selecting_tokens": 0,
        "computed_tokens": 1,
        "drafted_tokens": usage.drafted_tokens,
        "accepted_tokens": usage.accepted_tokens,
    }
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 19


def test_replaced_policy_is_reported():
    one, other = (
        RequestOutput("0", None, (1,), (0,), [], False, Usage(1, 0, 1, 0, 0, 0), RequestMetrics(), None, (), *policies)
        for policies in (("exact", "modular"), ("anchored", None))
    )
    assert inlay_of([other, one, one])["fallbacks"] == [{"asked": "modular", "taken": "exact"}]
    assert "fallbacks" not in inlay_of([other])


def test_usage_before_anything_is_known():
    waiting = RequestOutput("0", None, (1, 2), (0, 1), [], False, Usage(2, 0, 2, 0, 0, 0), RequestMetrics())
    told = inlay_of([waiting])
    assert told["timing"] == {"queue_s": None, "fetch_s": 0.0, "compute_s": None, "ttft_s": None, "total_s": None}
    assert told["computed_tokens"] == 2
    assert usage_of([waiting])["total_tokens"] == 2
    assert usage_of([])["prompt_tokens"] == inlay_of([])["computed_tokens"] == 0


def test_fingerprints(llm):
    call, outputs, body = answer(llm, Endpoint.CHAT, messages=MESSAGES)
    assert body["system_fingerprint"] is None
    name = system_fingerprint(llm.loaded.fingerprint)
    assert name.startswith("fp_")
    assert name != system_fingerprint(tiny("qwen2").fingerprint)
    told = respond(call, outputs, name="x", created=1, model="m", fingerprint=name)
    assert ChatCompletion.model_validate(told, strict=True).system_fingerprint == name
    assert {**told, "system_fingerprint": None} == body


def test_calls_of_tools():
    llm = LLM(tool_model("qwen"), kv_memory="16MiB", seed=0)
    parameters = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    function = {"name": "weather", "parameters": {**parameters, "additionalProperties": False}}
    body = {"messages": MESSAGES, "tools": [{"type": "function", "function": function}], "n": 2, "seed": 3}
    tools = model_tools(llm.tokenizer)
    for more, reason in (({}, "tool_calls"), ({"max_tokens": 45}, "length")):
        asked = {**body, "tool_choice": {"type": "function", "function": {"name": "weather"}}, **more}
        call = translate(read_body(asked, Endpoint.CHAT), tools=tools)
        outputs = llm.generate(list(call.prompts), call.params)
        read = ChatCompletion.model_validate(respond(call, outputs, name="x", created=1, model="m"), strict=True)
        for choice in read.choices:
            assert choice.finish_reason == reason
            assert choice.message.content is None
            (called,) = choice.message.tool_calls or ()
            assert called.type == "function"
            assert called.function.name == "weather"
            assert called.function.arguments in ('{"city": "Rome"}', '{"city": "Oslo"}') or reason == "length"
        ids = [called.id for choice in read.choices for called in choice.message.tool_calls or ()]
        assert len(set(ids)) == 2


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
