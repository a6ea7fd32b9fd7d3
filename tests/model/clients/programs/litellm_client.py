"""LiteLLM, which keeps fields of its own in messages and sends them back."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices

import litellm
from scenario import AGAIN, ASKED, BASE, FORM, MODEL, TOOLS, run

litellm.suppress_debug_info = True
PROVIDERS = ("openai", "hosted_vllm")


def ask(provider: str, messages: list[Any], **more: Any) -> Any:
    where = {"model": f"{provider}/{MODEL}", "api_base": BASE, "api_key": "none", "num_retries": 0}
    return litellm.completion(messages=messages, **{"max_tokens": 40, **where, **more})


def results(message: Any) -> list[Any]:
    for call in message.tool_calls:
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    return [
        {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "Sunny."} for call in message.tool_calls
    ]


def chat() -> None:
    for provider in PROVIDERS:
        messages: list[Any] = [{"role": "user", "content": ASKED}]
        message = ask(provider, messages).choices[0].message
        thought = {"role": "assistant", "content": "Rain.", "reasoning_content": "Hm.", "thinking_blocks": []}
        messages += [message, {"role": "user", "content": AGAIN}, thought, {"role": "user", "content": ASKED}]
        assert ask(provider, messages).choices[0].finish_reason in ("stop", "length")


def stream() -> None:
    for provider in PROVIDERS:
        messages: list[Any] = [{"role": "user", "content": ASKED}]
        for again in (AGAIN, ASKED):
            pieces = list(ask(provider, messages, stream=True, stream_options={"include_usage": True}))
            messages += [litellm.stream_chunk_builder(pieces).choices[0].message, {"role": "user", "content": again}]


def tools() -> None:
    for provider in PROVIDERS:
        messages: list[Any] = [{"role": "user", "content": ASKED}]
        for _ in range(2):
            answer = ask(provider, messages, tools=TOOLS, tool_choice="required", max_tokens=400)
            messages += [answer.choices[0].message, *results(answer.choices[0].message)]
        assert ask(provider, messages, tools=TOOLS).choices


def streamed_tools() -> None:
    for provider in PROVIDERS:
        messages: list[Any] = [{"role": "user", "content": ASKED}]
        pieces = list(ask(provider, messages, tools=TOOLS, tool_choice="required", max_tokens=400, stream=True))
        message = litellm.stream_chunk_builder(pieces).choices[0].message
        messages += [message, *results(message)]
        assert list(ask(provider, messages, tools=TOOLS, stream=True))


def structured() -> None:
    for provider in PROVIDERS:
        messages: list[Any] = [{"role": "user", "content": ASKED}]
        for _ in range(2):
            message = ask(provider, messages, response_format=FORM, max_tokens=400).choices[0].message
            assert json.loads(message.content)["city"]
            messages += [message, {"role": "user", "content": AGAIN}]


def tools_and_structured() -> None:
    for provider in PROVIDERS:
        messages: list[Any] = [{"role": "user", "content": ASKED}]
        message = ask(provider, messages, tools=TOOLS, response_format=FORM, max_tokens=400).choices[0].message
        assert message.tool_calls or json.loads(message.content)["city"]


def injected_marks() -> None:
    """LiteLLM marks messages and tools by itself, for servers that cache."""
    points = [{"location": "message", "role": "system"}, {"location": "message", "index": -1}]
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASKED}]
    for provider in PROVIDERS:
        for _ in range(2):
            answer = ask(provider, messages, tools=TOOLS, cache_control_injection_points=points)
            assert answer.usage.prompt_tokens > 0


def messages_route() -> None:
    """The same conversation over /v1/messages."""
    where = {"model": f"anthropic/{MODEL}", "api_base": BASE.removesuffix("/v1"), "api_key": "none", "max_tokens": 400}
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    for stream in (False, True):
        answer = litellm.completion(messages=messages, tools=TOOLS, tool_choice="required", stream=stream, **where)
        if stream:
            answer = litellm.stream_chunk_builder(list(answer))
        messages += [answer.choices[0].message, *results(answer.choices[0].message)]
    assert litellm.completion(messages=messages, tools=TOOLS, **where).choices


if __name__ == "__main__":
    run(chat, stream, tools, streamed_tools, structured, tools_and_structured, injected_marks, messages_route)
