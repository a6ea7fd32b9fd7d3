"""The official client."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
from pydantic import BaseModel
from scenario import AGAIN, ASKED, BASE, CITY, FORM, MODEL, TOOLS, run

client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0)


class Answer(BaseModel):
    city: Literal["Oslo", "Rome"]


def ask(messages: list[Any], **more: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, **{"max_tokens": 40, **more}).choices[0]


def results(message: Any) -> list[Any]:
    for call in message.tool_calls:
        assert json.loads(call.function.arguments)["city"] in CITY["properties"]["city"]["enum"]
    return [{"role": "tool", "tool_call_id": call.id, "content": "Sunny."} for call in message.tool_calls]


def chat() -> None:
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    messages += [ask(messages).message, {"role": "user", "content": AGAIN}]
    assert ask(messages).finish_reason in ("stop", "length")


def stream() -> None:
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    for again in (AGAIN, ASKED):
        with client.chat.completions.stream(model=MODEL, messages=messages, max_tokens=20) as events:
            assert [event.type for event in events]
            messages += [events.get_final_completion().choices[0].message, {"role": "user", "content": again}]


def tools() -> None:
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        message = ask(messages, tools=TOOLS, tool_choice=choice, max_tokens=400).message
        messages += [message, *results(message)]
    assert ask(messages, tools=TOOLS).finish_reason in ("stop", "length", "tool_calls")


def streamed_tools() -> None:
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    more: dict[str, Any] = {"tools": [openai.pydantic_function_tool(Answer)], "tool_choice": "required"}
    with client.chat.completions.stream(model=MODEL, messages=messages, max_tokens=400, **more) as events:
        assert "tool_calls.function.arguments.done" in {event.type for event in events}
        message = events.get_final_completion().choices[0].message
    messages += [message, *results(message)]
    assert list(client.chat.completions.create(model=MODEL, messages=messages, stream=True, max_tokens=8, **more))


def structured() -> None:
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    for _ in range(2):
        parsed = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Answer)
        message = parsed.choices[0].message
        assert message.parsed
        messages += [message, {"role": "user", "content": AGAIN}]


def tools_and_structured() -> None:
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    for _ in range(2):
        message = ask(messages, tools=TOOLS, response_format=FORM, max_tokens=400).message
        messages += [message, *results(message)] if message.tool_calls else [message]
        assert message.tool_calls or json.loads(message.content)["city"]


def allowed_tools() -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    other = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
    asked = [{"role": "user", "content": ASKED}]
    message = ask(asked, tools=[other, *TOOLS], tool_choice=choice, max_tokens=400).message
    assert {call.function.name for call in message.tool_calls} == {"weather"}


if __name__ == "__main__":
    run(chat, stream, tools, streamed_tools, structured, tools_and_structured, allowed_tools)
