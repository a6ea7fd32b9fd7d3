"""Reasoning over HTTP: whole and streamed, with tools and formats, and the template variables for it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from inlay import LLM, AsyncLLM, ParameterError, SamplingParams
from inlay.api.openai import Endpoint, read_body, respond, translate
from inlay.api.openai.respond import Chunks
from inlay.api.reasoning import model_reasoning
from inlay.api.tools.formats import model_tools
from inlay.types import CompletionOutput, RequestMetrics, RequestOutput, Usage
from tests.conftest import tiny
from tests.server.server.conftest import CHAT, Site, running
from tests.tokenizers_for_tests import with_template

TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>{% endif %}"
    "{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Yes or no?"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


def thinking_model() -> Any:
    loaded = tiny("llama")
    return replace(loaded, tokenizer=with_template(loaded.tokenizer, TEMPLATE))


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    llm = AsyncLLM(thinking_model(), kv_memory="16MiB", seed=1)
    with running(llm) as found:
        yield found
    llm.shutdown()


def made(text: str, **body: Any):
    """A chat call and its response if the model generates this text."""
    tokenizer = thinking_model().tokenizer
    reasoning, tools = model_reasoning(tokenizer), model_tools(tokenizer)
    call = translate(read_body({"messages": MESSAGES, **body}, Endpoint.CHAT), reasoning=reasoning, tools=tools)
    ids, steps = tuple(tokenizer.encode(text)), []
    for count in range(1, len(ids) + 1):
        reason = "stop" if count == len(ids) else None
        said = CompletionOutput(0, tokenizer.decode(ids[:count]), ids[:count], finish_reason=reason)
        usage = Usage(1, 0, 1, 0, 0, 0)
        steps.append(RequestOutput("x", "<a><think>", (1,), (0,), [said], reason is not None, usage, RequestMetrics()))
    return call, steps


def whole(text: str, **body: Any) -> dict[str, Any]:
    call, steps = made(text, **body)
    return respond(call, steps[-1:], name="x", created=1, model="m")


def streamed(text: str, **body: Any) -> dict[str, Any]:
    """The message that the deltas of a stream add up to."""
    call, steps = made(text, **body)
    chunks = Chunks(call, name="x", created=1, model="m")
    message: dict[str, Any] = {}
    for step in steps:
        for document in chunks.documents(0, step):
            for name, value in json.loads(document)["choices"][0]["delta"].items():
                message[name] = message.get(name, "" if isinstance(value, str) else []) + value if value else value
    return message


def test_whole_and_streamed_answers_separate_reasoning_and_content():
    text = "Hm.\nIt is so.\n</think>\n\nYes."
    body = whole(text)
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.\nIt is so.", "Yes.")
    assert message["reasoning"] == message["reasoning_content"]
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("Hm.\nIt is so.\n</think>")
    again = streamed(text)
    assert (again["reasoning_content"], again["content"]) == ("Hm.\nIt is so.", "Yes.")


def test_reasoning_is_left_out_on_request():
    for message in (
        whole("Hm.</think>Yes.", include_reasoning=False)["choices"][0]["message"],
        streamed("Hm.</think>Yes.", include_reasoning=False),
    ):
        assert message["content"] == "Yes."
        assert not {"reasoning", "reasoning_content"} & set(message)


def test_only_calls_after_reasoning_are_calls():
    body = whole(f"Shall I {CALL}?</think>{CALL}", tools=[TOOL])
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == f"Shall I {CALL}?"
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["look"]
    again = streamed(f"Shall I {CALL}?</think>{CALL}", tools=[TOOL])
    assert again["reasoning_content"] == f"Shall I {CALL}?"
    assert again["tool_calls"]


def test_format_applies_only_after_reasoning():
    llm = LLM(thinking_model(), kv_memory="16MiB", seed=0)
    reasoning = model_reasoning(llm.tokenizer)
    call = translate(
        read_body({"messages": MESSAGES, "structured_outputs": {"choice": ["yes", "no"]}}, CHAT), reasoning=reasoning
    )
    assert call.params.reasoning_end == "</think>"
    params = replace(call.params, temperature=0, max_tokens=40)
    thought = llm.tokenizer.encode("Hm, no form here.</think>")
    # the text up to the mark is given; after it the grammar decides
    request = llm.local.prepare(llm.processor.process(call.prompts[0], params, llm.policy()))
    for token in thought:
        assert request.sampling.row.guide is None
        request.sampling.row.take(token)
    assert request.sampling.row.guide is not None
    with pytest.raises(Exception, match="doesn't satisfy the grammar"):
        request.sampling.row.take(llm.tokenizer.encode("x")[0])
    off = {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}
    (output,) = llm.generate([off], params)
    assert output.outputs[0].text in ("yes", "no")


def test_answer_without_reasoning_follows_its_format_from_the_start():
    loaded = thinking_model()
    silent = TEMPLATE.replace("{% else %}<think>{% endif %}", "{% endif %}")
    llm = LLM(replace(loaded, tokenizer=with_template(loaded.tokenizer, silent)), kv_memory="16MiB", seed=0)
    asked = {"messages": MESSAGES, "structured_outputs": {"regex": "<p>[a-z]{3}|yes"}, "max_tokens": 30}
    call = translate(read_body(asked, CHAT), reasoning=model_reasoning(llm.tokenizer))
    params = replace(call.params, n=6, seed=1)

    def has_guide(text: str) -> bool:
        """Whether a guide constrains the answer after this text."""
        row = llm.local.prepare(llm.processor.process(call.prompts[0], params, llm.policy())).sampling.row
        for token in llm.tokenizer.encode(text, add_special_tokens=False):
            row.take(token)
        return row.guide is not None

    assert [has_guide(text) for text in ("", "<", "<t", "<think", "<p>a", "y")] == [True] * 6
    assert not has_guide("<think>Hm")
    assert has_guide("<think>Hm.</think>")
    with pytest.raises(ParameterError, match="doesn't satisfy the grammar"):
        has_guide("<tp")
    no_mark = {llm.tokenizer.encode("<")[0]: -100}
    said = llm.generate(call.prompts[0], replace(params, logit_bias=no_mark))[0].outputs
    assert {one.text for one in said} == {"yes"}
    for one in llm.generate(call.prompts[0], params)[0].outputs:
        assert re.match("<think>|<p>[a-z]{3}$|yes$", one.text)


def test_structured_answer_does_not_end_while_reasoning():
    llm = LLM(thinking_model(), kv_memory="16MiB", seed=0)
    end = llm.tokenizer.eos_token_id
    params = SamplingParams(
        temperature=0,
        max_tokens=5,
        logit_bias={end: 100},
        structured_outputs={"choice": ["a"]},
        reasoning_end="</think>",
    )
    (output,) = llm.generate("x", params)
    assert len(output.outputs[0].token_ids) == 5
    assert end not in output.outputs[0].token_ids


def test_reasoning_is_separated_over_http(site):
    body = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = site.post(CHAT, **body)
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["choices"][0]["message"]["reasoning_content"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 8
    for off in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        answer = site.post(CHAT, **body, **off)
        assert "reasoning_content" not in answer["choices"][0]["message"]
        assert answer["choices"][0]["message"]["content"]
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    site.post(CHAT, **body, reasoning_effort="medium")
    status, error = site.refusal(CHAT, {**body, "reasoning_effort": "high"})
    assert (status, error["param"]) == (400, "reasoning_effort")
    assert error["message"] == (
        'reasoning_effort is \'high\', but this model\'s chat template does not support it; write "none" or "medium", '
        "or leave it out"
    )


def test_reasoning_effort_reaches_the_template():
    tokenizer = with_template(tiny("llama").tokenizer, "{{ messages[0].content }}{{ reasoning_effort }}")
    call = translate(
        read_body({"messages": MESSAGES, "reasoning_effort": "high"}, Endpoint.CHAT),
        reasoning=model_reasoning(tokenizer),
    )
    assert call.prompts == ({"messages": MESSAGES, "chat_template_kwargs": {"reasoning_effort": "high"}},)
    assert call.reasoning is None


def test_reasoning_parser_can_be_turned_off():
    llm = AsyncLLM(thinking_model(), kv_memory="16MiB", seed=1)
    with running(llm, reasoning_parser="off") as found:
        answer = found.post(CHAT, messages=MESSAGES, max_tokens=4, ignore_eos=True)
        assert answer["choices"][0]["message"]["content"]
    llm.shutdown()
